"""What the setting `debug_cache` logs of a live server's cache: impossible lengths, and pages that do not exist."""

from __future__ import annotations

import logging

import torch

from nsa.call import Call

logger = logging.getLogger("nsa")
MOST_REPORTED = 8  # places of a cache that are wrong, in one line of the log


def report_cache(call: Call) -> None:
    """Log lengths that the cache cannot have, or shorter than the queries but not 0, and pages that do not exist.

    Synchronizes, so not while a CUDA graph is captured.
    """
    cache_seqlens, block_table, S, causal = call.cache_seqlens, call.block_table, call.q.shape[1], call.causal
    assert cache_seqlens is not None
    pages, size = call.k.shape[:2]  # of a contiguous cache: entries, and the keys that each has room for
    if cache_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    room = size if block_table is None else size * block_table.shape[1]
    lengths = cache_seqlens.long().cpu()
    bad = ((lengths < 0) | (lengths > room)).nonzero()[:, 0].tolist()
    _say("cache_seqlens", f"expected 0 to {room}", [f"{lengths[b]} of sequence {b}" for b in bad])
    short = ((lengths > 0) & (lengths < S) & causal).nonzero()[:, 0].tolist()
    _say(
        "cache_seqlens",
        f"expected {S} or more, or queries see nothing",
        [f"{lengths[b]} of sequence {b}" for b in short],
    )
    if block_table is None:
        return
    table = block_table.long().cpu()
    used = torch.arange(table.shape[1]) * size < lengths.clamp(0, room)[:, None]
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    _say("block_table", f"expected pages 0 to {pages - 1}", [f"{table[b, i]} at [{b}, {i}]" for b, i in wrong])


def _say(name: str, expected: str, found: list[str]) -> None:
    if found:
        more = f" and {len(found) - MOST_REPORTED} more" if len(found) > MOST_REPORTED else ""
        logger.warning("%s: %s, got %s%s", name, expected, ", ".join(found[:MOST_REPORTED]), more)
