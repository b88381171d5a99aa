"""The checks of the setting `debug_cache`: impossible sequence lengths and page numbers of a KV cache are logged."""

from __future__ import annotations

import logging

import torch

from nsa.call import Call

logger = logging.getLogger("nsa")
MOST_REPORTED = 8  # wrong entries that one line of the log lists


def report_cache(call: Call) -> None:
    """Warn of lengths outside the cache, of lengths in ``[1, S)`` if causal, and of page numbers out of range.

    In a ragged batch also of ``cu_seqlens_q`` that is not in order; ``S`` is then a sequence's number of queries.

    Synchronizes, so it does nothing while a CUDA graph is captured.
    """
    cache_seqlens, block_table, ends = call.cache_seqlens, call.block_table, call.cu_seqlens_q
    assert cache_seqlens is not None
    if cache_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
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
        table = block_table.long().cpu()
        used = torch.arange(table.shape[1]) * size < lengths.clamp(0, room)[:, None]
        missing = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
        _warn("block_table", f"expected pages 0 to {pages - 1}", [f"{table[b, i]} at [{b}, {i}]" for b, i in missing])


def _queries(ends: torch.Tensor, T: int) -> torch.Tensor:
    """Queries of each sequence. Warns of ends that do not rise from 0, or that are past the last token."""
    values = ends.diff()
    expected = f"expected 0 first, then ends in rising order up to {T}"
    wrong = torch.cat((ends[:1] != 0, (values < 0) | (ends[1:] > T)))
    _warn("cu_seqlens_q", expected, [f"{ends[i]} at [{i}]" for i in wrong.nonzero()[:, 0].tolist()])
    return values


def _warn(name: str, expected: str, values: list[str]) -> None:
    if values:
        more = f" and {len(values) - MOST_REPORTED} more" if len(values) > MOST_REPORTED else ""
        logger.warning("%s: %s, got %s%s", name, expected, ", ".join(values[:MOST_REPORTED]), more)
