"""Tiles of the kernels for small blocks: pure functions of shapes. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.query_major.tiles import FULL, MAX_SPLITS, most_heads, split_count
from nsa.kernels.shared.device import SHARED_BYTES
from nsa.kernels.shared.sizes import Worth, padded

LARGEST = 16  # keys of a small block
FEW = 64  # blocks of a row that query-major looks up at once. Rows of more are served by this family, unasked
MOST_BLOCKS = 1 << 16  # of a row
MOST_KEYS = 2**30  # of a sequence: keys and slots are counted in int32

TWICE = 2  # programs for each multiprocessor, into which the keys of few rows are split
MOST_SHARES = 8  # of a row, for that
LONELY = 16  # fewer programs than this read one tile each
LONELY_KEYS = 128  # of such a tile
"""Measured on an H100, see docs/notebook/small-blocks.md."""

MOST_TOKENS = 16  # of a tile of neighbouring tokens
MOST_SLOTS = 4096  # blocks of a row in a union, which a program of the list kernel holds at once

WORTH = Worth(cost=10, gain=7)
LEAST_TILES = 32  # programs of tiles. Fewer of them are slower than rows


class Choice(NamedTuple):
    """What a sweep varies. None, and a number of 0, stand for the rule."""

    splits: int = 0  # parts into which the keys of a row are split
    keys: int = 0  # keys of a row's tile
    warps: int = 0
    stages: int = 0
    rows: int = 64  # query rows of a tile of neighbouring tokens; 0: there are no such tiles
    union_keys: int = 0  # keys of a step of such a tile
    union_warps: int = 0
    union_stages: int = 0
    union_splits: int = 0
    worth: Worth = WORTH
    least: int = LEAST_TILES  # programs of tiles
    left: int = 32  # programs for each multiprocessor that compute the rows that tiles left


RULES = Choice()


class Rows(NamedTuple):
    """Compile-time choices of the kernel for single rows."""

    HEADS: int  # query heads of a program
    BLOCK_G: int  # HEADS padded for the tensor cores
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_L: int  # keys of a tile
    warps: int
    stages: int


class Unions(NamedTuple):
    """Compile-time choices of the kernels for tiles of neighbouring tokens."""

    TOKENS: int
    ROWS: int  # query rows of a tile, rounded up to a power of two
    SLOTS: int  # blocks of a row, rounded up to a power of two
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_N: int  # keys of a step
    warps: int
    stages: int


def choose(
    capability: int, processors: int, itemsize: int, q_itemsize: int, G: int, D: int, Dv: int, bound: int, rows: int,
    choice: Choice = RULES, invariant: bool = False, pipelined: bool = True,
) -> tuple[Rows, int]:  # fmt: skip
    """Tile and splits of the kernel for single rows.

    Args:
        capability, processors: of the GPU, as `device.chip` tells.
        itemsize, q_itemsize: bytes of an element of K and of q.
        bound: places for keys in a row.
        rows: (token, KV head) pairs.
        invariant: few rows are launched like many.
        pipelined: loads may run ahead.
    """
    heads = min(G, most_heads(q_itemsize))
    block_g, block_d, block_dv = padded(heads), padded(D), padded(Dv)
    programs = max(1, rows * -(-G // heads))
    full = invariant or rows >= FULL * processors
    narrow = block_g <= 16 and q_itemsize <= 2
    lonely = narrow and not full and programs < LONELY
    splits = choice.splits
    if not splits and lonely:
        splits = max(1, min(-(-bound // LONELY_KEYS), MAX_SPLITS, TWICE * processors // programs))
    elif not splits:
        splits = 1 if full else split_count(programs, bound, (D + Dv) * itemsize, processors, 0)
        while not full and splits < MOST_SHARES and 2 * splits * programs <= TWICE * processors and bound > 64 * splits:
            splits *= 2
    usual = LONELY_KEYS if lonely else 64 if itemsize == 1 and not full else 32
    block_l = choice.keys or (usual if q_itemsize <= 2 else 16)
    block_l = min(block_l, padded(-(-bound // splits)))
    warps = choice.warps or (2 if narrow and block_l <= 32 and block_d + block_dv < 512 else 4)
    stages = choice.stages or 3
    stages = stages if pipelined else 1
    budget = SHARED_BYTES[capability] - block_g * (block_d + block_l) * max(q_itemsize, 2) - 4096
    key_bytes = (block_d + block_dv) * (3 if itemsize == 1 and block_g >= 64 else itemsize)
    while stages > 2 and (stages - 1) * block_l * key_bytes > budget:
        stages -= 1
    while block_l > 16 and max(stages - 1, 1) * block_l * key_bytes > budget:
        block_l //= 2
    if capability == 90 and block_g >= 64 and q_itemsize <= 2 and min(block_d, 64) != min(block_dv, 64) and pipelined:
        stages = max(stages, 2)  # with one stage K and V, swizzled differently, share an address (`child.mixed`)
    return Rows(heads, block_g, block_d, block_dv, block_l, warps, stages), splits


@lru_cache(maxsize=4096)
def unions(
    capability: int, itemsize: int, q_itemsize: int, G: int, D: int, Dv: int, n: int, blocks: int,
    choice: Choice = RULES,
) -> Unions | None:  # fmt: skip
    """Tile of neighbouring tokens; None if no tile holds two tokens.

    Args:
        n: blocks of a row.
        blocks: of a sequence.

    The other arguments are those of :func:`choose`.
    """
    block_d, block_dv, slots = padded(D), padded(Dv), padded(n)
    rows = choice.rows if q_itemsize <= 2 else min(choice.rows, 16)
    # A block and the mask of the tokens fit an int32, and places in a list an int16.
    tokens = min(rows // G, MOST_TOKENS, 31 - blocks.bit_length(), (2**15 - 1) // n)
    if tokens < 2 or slots > MOST_SLOTS:
        return None
    rows = padded(tokens * G)
    block_n = choice.union_keys or (32 if q_itemsize <= 2 else 16)
    warps = choice.union_warps or 4
    stages = choice.union_stages or 2
    key_bytes = (block_d + block_dv) * (itemsize + 2 if itemsize == 1 else itemsize)
    budget = SHARED_BYTES[capability] - rows * (block_d + block_n) * max(q_itemsize, 2) - 4096
    while stages > 2 and stages * block_n * key_bytes > budget:
        stages -= 1
    while block_n > 16 and stages * block_n * key_bytes > budget:
        block_n //= 2
    return Unions(tokens, rows, slots, block_d, block_dv, block_n, warps, stages)


def union_splits(programs: int, processors: int, bound: int, choice: Choice = RULES) -> int:
    """Parts into which the keys of a union are split, so that few tiles fill the chip."""
    if choice.union_splits:
        return choice.union_splits
    splits = 1
    while splits < 16 and 4 * splits * programs <= 3 * processors and bound >= 128 * splits:
        splits *= 2
    return splits
