"""Tiles of the union kernels, and when a union is worth reading: pure functions of shapes. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.shared import sizes
from nsa.kernels.shared.device import SHARED_BYTES
from nsa.kernels.shared.sizes import Worth, next_power_of_2, padded

MOST_TOKENS = 16  # of a tile; a mask of its tokens must fit 32 bits
MOST_ENTRIES = 1024  # listed blocks of a tile, which one program sorts
MOST_BLOCKS = 1 << 26  # of a sequence; the block and the token of an entry must fit 31 bits

WORTH = Worth(cost=64, gain=3)
WORTH_LONG = Worth(cost=32, gain=1)  # blocks of more than 64 keys, which key-major reads faster
"""``gain`` is multiplied by the query heads of a token. A tile of tokens with 16 heads each may have 48 blocks for 64
listed ones (32 if blocks are long). On an H100 such a union takes about as long as its rows in key-major
(docs/notebook/union.md)."""


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int = 64  # query rows of a tile of tokens
    keys: int = 64  # keys of a tile of keys
    warps: int = 4
    stages: int = 3
    worth: Worth | None = None  # None: by the block size
    by_row: bool | None = None  # whether query-major serves the rows without a union; None: the costs say


class Tile(NamedTuple):
    """Compile-time choices of the kernels."""

    TOKENS: int  # neighbouring tokens of a tile
    HEADS: int  # query heads of a token, rounded up to a power of two
    SLOTS: int  # blocks of a row, rounded up to a power of two
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_N: int  # keys of a tile
    TMA: bool  # TMA loads keys and values where it can; only for `wgmma`, which needs a Hopper GPU and 64 rows
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def select(
    capability: int, itemsize: int, G: int, D: int, Dv: int, n: int, size: int, choice: Choice | None = None
) -> Tile | None:
    """Tile of a call whose rows list ``n`` blocks of ``size`` keys; None if no tile holds two tokens.

    Args:
        capability: as `device.chip` tells. itemsize: bytes of an element of q.
    """
    chosen = choice or Choice()
    heads, slots = next_power_of_2(G), next_power_of_2(n)
    block_d, block_dv = padded(D), padded(Dv)
    narrow = sizes.narrow(capability, itemsize, block_d, block_dv)
    rows = chosen.rows if narrow and itemsize == 2 else min(chosen.rows, 32 if itemsize == 2 else 16)
    tokens = min(rows // heads, MOST_TOKENS)
    while tokens > 1 and tokens * slots > MOST_ENTRIES:
        tokens //= 2
    if tokens < 2 or slots == 0:
        return None
    # A tile of keys lies in one block, or takes several blocks if they are smaller than a tile.
    block_n = min(chosen.keys, 64 if narrow and itemsize == 2 else 32)
    block_n = min(block_n, max(16, size)) if size & (size - 1) == 0 else block_n
    stages = chosen.stages
    of_q, of_stage = (tile * itemsize for tile in (rows * block_d, block_n * (block_d + block_dv)))
    while stages > 1 and stages * of_stage + of_q > SHARED_BYTES[capability]:
        stages -= 1
    padded_heads = max(heads, 16 // tokens)
    tma = capability == 90 and itemsize == 2 and narrow and tokens * padded_heads >= 64
    return Tile(tokens, padded_heads, slots, block_d, block_dv, block_n, tma, chosen.warps, stages)


def worth(size: int) -> Worth:
    """When a union of blocks of ``size`` keys is worth reading, if tokens have one query head."""
    return WORTH if size <= 64 else WORTH_LONG


def fits(S_kv: int, size: int) -> bool:
    """Whether the kernels can number the blocks of a sequence, and their keys."""
    end = sizes.end_of_blocks(S_kv, min(size, max(S_kv, 1)))
    return -(-S_kv // size) <= MOST_BLOCKS and S_kv <= sizes.MOST_KEYS and end <= sizes.MOST_END
