"""Tiles of the backward kernels for small blocks: pure functions of shapes. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.call import Call
from nsa.kernels.backward.tiles import shrunk
from nsa.kernels.shared.device import SHARED_BYTES
from nsa.kernels.shared.shape import BATCH, Shape
from nsa.kernels.shared.sizes import padded

MOST_KEYS = 2**26  # of all sequences: a block's first key, times 32, fits an int32
MOST_TOKENS = 30  # of a window: the mask of its tokens fits an int32
WINDOW = 30
"""Tokens whose dK and dV one launch adds. Long windows read and write dK and dV less often, but multiply more zeros."""

PROGRAMS = 96  # of a window and a KV head, for dK and dV


class Choice(NamedTuple):
    """What a sweep varies. 0 stands for the rule."""

    window: int = 0  # tokens of a launch of dK and dV
    rows: int = 0  # query rows of a step
    keys: int = 0  # keys of a program
    warps: int = 0
    stages: int = 0
    dq_rows: int = 0  # query rows of a tile of neighbouring tokens
    dq_keys: int = 0  # keys of a step
    dq_warps: int = 0
    dq_stages: int = 0
    programs: int = 0  # of a window and a KV head, for dK and dV


RULES = Choice()


class Tile(NamedTuple):
    """Compile-time choices of the kernels."""

    WINDOW: int
    SLOTS: int  # blocks of a row, rounded up to a power of two
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    warps: int
    stages: int
    TOKENS: int  # of a tile of dQ
    HEADS: int  # query heads of a program of dQ
    ROWS: int  # TOKENS * HEADS, rounded up to a power of two
    DQ_N: int
    dq_warps: int
    dq_stages: int


@lru_cache(maxsize=1024)
def select(capability: int, itemsize: int, G: int, D: int, Dv: int, n: int, choice: Choice = RULES) -> Tile:
    """Tile of a call.

    Args:
        capability, itemsize: as for :func:`nsa.kernels.query_major.tiles.select`.
        n: blocks of a row.
    """
    block_d, block_dv = padded(D), padded(Dv)
    narrow = itemsize <= 2
    window = max(1, min(choice.window or WINDOW, MOST_TOKENS))
    rows, keys = choice.rows or (64 if narrow else 16), choice.keys or (64 if narrow else 16)
    stages, budget = choice.stages or 1, SHARED_BYTES[capability] // itemsize
    rows, keys = shrunk(min(rows, padded(window * G)), keys, stages, block_d + block_dv, budget)
    heads = min(G, 64 if narrow else 16)
    # With one stage two programs fit a multiprocessor.
    most = choice.dq_rows or (64 if narrow else 16)
    dq_keys, dq_stages = choice.dq_keys or (32 if narrow else 16), choice.dq_stages or 1
    tokens = max(1, min(most // heads, MOST_TOKENS))
    dq_rows = padded(tokens * heads)
    while dq_keys > 16 and (dq_rows + dq_keys * dq_stages) * (block_d + block_dv) + dq_rows * dq_keys > budget:
        dq_keys //= 2
    return Tile(
        window, padded(n), block_d, block_dv, rows, keys, choice.warps or (8 if rows * keys > 1024 else 4), stages,
        tokens, heads, dq_rows, dq_keys, choice.dq_warps or 4, dq_stages,
    )  # fmt: skip


def keys_of(call: Call, shape: Shape) -> int:
    """Keys of all sequences."""
    return shape.B * shape.S_kv if shape.layout == BATCH else call.k.shape[0]
