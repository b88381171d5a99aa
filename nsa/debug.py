"""The checks of the setting `debug_cache`: impossible sequence lengths and page numbers of a KV cache are logged."""

from __future__ import annotations

import logging

import torch

from nsa.call import Call

logger = logging.getLogger("nsa")
MOST_REPORTED = 8  # wrong entries that one line of the log lists


def report_cache(call: Call) -> None:
    """Warn of lengths outside the cache, of lengths in ``[1, S)`` if causal, and of page numbers out of range.

    Synchronizes, so it does nothing while a CUDA graph is captured.
    """
    cache_seqlens, block_table, S = call.cache_seqlens, call.block_table, call.q.shape[1]
    assert cache_seqlens is not None
    if cache_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    pages, size = call.k.shape[:2]  # without pages: batch entries, and the keys that each has room for
    room = size if block_table is None else size * block_table.shape[1]
    lengths = cache_seqlens.long().cpu()
    short = (lengths > 0) & (lengths < S) & call.causal
    for wrong, expected in (
        ((lengths < 0) | (lengths > room), f"expected 0 to {room}"),
        (short, f"expected {S} or more, or queries see nothing"),
    ):
        _warn("cache_seqlens", expected, [f"{lengths[b]} of sequence {b}" for b in wrong.nonzero()[:, 0].tolist()])
    if block_table is not None:
        table = block_table.long().cpu()
        used = torch.arange(table.shape[1]) * size < lengths.clamp(0, room)[:, None]
        missing = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
        _warn("block_table", f"expected pages 0 to {pages - 1}", [f"{table[b, i]} at [{b}, {i}]" for b, i in missing])


def _warn(name: str, expected: str, found: list[str]) -> None:
    if found:
        more = f" and {len(found) - MOST_REPORTED} more" if len(found) > MOST_REPORTED else ""
        logger.warning("%s: %s, got %s%s", name, expected, ", ".join(found[:MOST_REPORTED]), more)
