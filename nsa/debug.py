"""What settings ask for beside a call: checks of a KV cache (`debug_cache`), and counts of shapes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from nsa.call import Call
from nsa.kernels.shared.shape import E4M3
from nsa.selecting import plain
from nsa.selecting.request import Request
from nsa.settings import Settings, recording
from nsa.torch_modes import capturing

logger = logging.getLogger("nsa")
MOST_REPORTED = 8  # wrong entries that one line of the log lists


def wanted(current: Settings) -> bool:
    """Whether a `debug_*` setting is on, or calls are recorded."""
    logged = current.debug_timing or current.debug_compare or current.debug_shapes or current.debug_cache
    return logged or recording() is not None


def report_cache(call: Call) -> None:
    """Warn of lengths outside the cache, of lengths in ``[1, S)`` if causal, and of page numbers out of range.

    In a ragged batch also of ``cu_seqlens_q`` that is not in order; ``S`` is then a sequence's number of queries.

    Synchronizes, so it does nothing while a CUDA graph is captured.
    """
    cache_seqlens, block_table, ends = call.cache_seqlens, call.block_table, call.cu_seqlens_q
    assert cache_seqlens is not None
    if capturing(cache_seqlens):
        return
    pages, size = call.k.shape[:2]  # without pages: batch entries, and the keys that each has room for
    room = size if block_table is None else size * block_table.shape[1]
    lengths = cache_seqlens.long().cpu()
    queries = torch.full_like(lengths, call.q.shape[1]) if ends is None else _queries(ends.long().cpu(), len(call.q))
    short = (lengths > 0) & (lengths < queries) & call.causal
    least = "the number of queries" if ends is not None else str(call.q.shape[1])
    for wrong, expected in (
        ((lengths < 0) | (lengths > room), f"expected 0 to {room}"),
        (short, f"expected {least} or more, or queries see nothing"),
    ):
        _warn("cache_seqlens", expected, [f"{lengths[b]} of sequence {b}" for b in wrong.nonzero()[:, 0].tolist()])
    if block_table is not None:
        _warn_of_pages(block_table, pages, size, lengths.clamp(0, room))


def report_selection(r: Request) -> None:
    """Warn of lengths outside the cache of a selection, of pages out of range, and of scores that are NaN, which count
    as -inf. Synchronizes, so it does nothing while a CUDA graph is captured.
    """
    if capturing(r.q):
        return
    if r.cache_seqlens is not None:
        lengths, room = r.cache_seqlens.long().cpu(), r.rows * r.stride + r.window - 1
        wrong = ((lengths < 0) | (lengths > room)).nonzero()[:, 0].tolist()
        _warn("cache_seqlens", f"expected 0 to {room}", [f"{lengths[b]} of sequence {b}" for b in wrong])
        if r.block_table is not None:
            keys = ((lengths.clamp(0, room) - r.window) // r.stride + 1).clamp(0, r.rows)
            _warn_of_pages(r.block_table, r.k.shape[0], r.page, keys)
    count, tokens = plain.count_nan(r)
    _warn("scores", "expected none that is NaN", [f"{count} of {tokens} tokens"] * (count > 0))


def _queries(ends: torch.Tensor, T: int) -> torch.Tensor:
    """Queries of each sequence. Warns of ends that do not rise from 0, or that are past the last token."""
    values = ends.diff()
    expected = f"expected 0 first, then ends in rising order up to {T}"
    wrong = torch.cat((ends[:1] != 0, (values < 0) | (ends[1:] > T)))
    _warn("cu_seqlens_q", expected, [f"{ends[i]} at [{i}]" for i in wrong.nonzero()[:, 0].tolist()])
    return values


def _warn_of_pages(block_table: torch.Tensor, pages: int, page_size: int, keys: torch.Tensor) -> None:
    """Warn of entries outside ``[0, pages)`` among those that the ``keys`` of each sequence use."""
    table = block_table.long().cpu()
    used = torch.arange(table.shape[1]) * page_size < keys[:, None]
    missing = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    _warn("block_table", f"expected pages 0 to {pages - 1}", [f"{table[b, i]} at [{b}, {i}]" for b, i in missing])


def _warn(name: str, expected: str, values: list[str]) -> None:
    if values:
        more = f" and {len(values) - MOST_REPORTED} more" if len(values) > MOST_REPORTED else ""
        logger.warning("%s: %s, got %s%s", name, expected, ", ".join(values[:MOST_REPORTED]), more)


# --- the shapes of a program's calls, for `python -m nsa record-workload` (nsa/testing/workloads/record.py) -----------

LEFT_OUT = "left out"  # calls that no workload describes: of ranges, or in fp32
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def count_shape(call: Call, folder: str) -> None:
    """Count a call of this process. The first one arranges that the counts are written when the process ends."""
    words = _words(call)
    _counts_of(os.getpid(), folder)[LEFT_OUT if words is None else json.dumps(words)] += 1


_counts: dict[tuple[int, str], Counter[str]] = {}


def _counts_of(pid: int, folder: str) -> Counter[str]:
    """The counts of a process, without those of the process that forked it. Its file is empty until it ends."""
    made: Counter[str] = Counter()
    counts = _counts.setdefault((pid, folder), made)
    if counts is not made:  # made by an earlier call, or by another thread at the same time
        return counts

    def write(text: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # a process that outlives the command: its folder is gone
            Path(folder, f"{pid}.json").write_text(text, encoding="utf-8")

    write("")
    Finalize(None, lambda: write(json.dumps(counts)), exitpriority=0)  # atexit runs in no child of multiprocessing
    return counts


def _words(call: Call) -> dict[str, Any] | None:
    """The words of a call's shape, as `file.WORDS`."""
    q, k, v, blocks, cu, table = call.q, call.k, call.v, call.block_indices, call.cu_seqlens_q, call.block_table
    if blocks is None or q.dtype not in NAMES or blocks.shape[-1] < 2:
        return None
    B = q.shape[0] if cu is None else cu.numel() - 1
    queries = q.shape[1] if cu is None else max(1, -(-q.shape[0] // max(1, B)))
    keys = k.shape[1] if k.ndim == 4 else k.shape[0] // max(1, B)
    keys = keys if table is None else keys * table.shape[1]
    return {
        "batch": B, "queries": queries, "keys": max(keys, queries), "HQ": q.shape[-2], "HKV": k.shape[-2],
        "D": q.shape[-1], "Dv": v.shape[-1], "block_size": call.block_size, "blocks": blocks.shape[-1],
        "dtype": NAMES[q.dtype], "pages": table is not None, "fp8": k.dtype == E4M3 and table is not None,
    }  # fmt: skip
