"""Tiles and windows of the key-major kernels: pure functions of what the host knows of a call. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.tiles import SHARED_BYTES, next_power_of_2

GRID = 64
"""Keys of a block where ranges are cut into blocks."""

PARTS_BYTES = 768 << 20
"""Partial results of one window of tokens."""

INDEX_BYTES = 160 << 20
"""What lists of units take; longer calls take several passes."""

COUNT_BYTES = 32 << 20
"""Counters of blocks, two ints each, of all windows of a pass."""


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int  # query rows of a tile
    warps: int
    registers: int | None  # of a thread at most
    share: int  # tiles of rows that a program takes of its block
    merge_heads: int  # of a program that merges, and reads nothing itself
    merge_warps: int
    at_once: int  # partial results of a head that the merge asks for at once
    walked: int = 0  # sixteenths of a row's blocks that the kernel which merges reads itself
    BLOCK_L: int = 32  # keys of a tile of those
    walk_stages: int = 3
    merge_registers: int | None = None
    hint: int = 0


forced: Choice | None = None
"""What a sweep wants launched next."""

USUAL = Choice(64, 4, None, 8, 4, 1, 8)
SINGLE = Choice(32, 4, None, 8, 4, 1, 4)  # fp32: dots on the CUDA cores


class Tile(NamedTuple):
    """Compile-time choices of the partial kernel and of the merge."""

    HEADS: int  # query heads of a unit in a tile
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int  # query rows of a tile: HEADS of each of its units
    BLOCK_N: int  # keys of a tile
    num_warps: int
    registers: int | None
    share: int  # units of one program
    merge_heads: int
    merge_warps: int
    at_once: int
    walked: int
    BLOCK_L: int
    walk_stages: int
    merge_registers: int | None
    hint: int


@lru_cache(maxsize=4096)
def select(capability: int, itemsize: int, G: int, D: int, Dv: int, size: int, choice: Choice | None = None) -> Tile:
    """Tile of a call whose blocks hold ``size`` keys; ``capability`` and ``itemsize`` as for :func:`tiles.select`."""
    chosen = choice or (USUAL if itemsize == 2 else SINGLE)
    block_d, block_dv = max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))
    rows, block_n = chosen.rows, min(max(16, next_power_of_2(size)), 128)
    budget = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    while block_n > 16 and (block_n * (block_d + block_dv) + rows * (block_d + block_n)) * itemsize > budget:
        block_n //= 2
    if max(block_d, block_dv) * block_n > 64 * 128:  # one tile's scores and results must leave registers to spare
        block_n = max(16, min(block_n, 64))
    heads = min(next_power_of_2(G), rows)
    merge_heads = max(1, min(next_power_of_2(G), chosen.merge_heads * 128 // max(block_dv, 32)))
    if chosen.walked:
        merge_heads = max(16, min(next_power_of_2(G), 64))
    return Tile(
        heads, block_d, block_dv, rows, block_n, chosen.warps, chosen.registers, chosen.share * (rows // heads),
        merge_heads, *chosen[5:],
    )  # fmt: skip


class Windows(NamedTuple):
    """How a call's tokens are dealt with: in passes, and each in windows of which partial results are kept."""

    slots: int  # units a row may have
    slot_bits: int
    blocks: int  # of all sequences
    tokens: int  # of a pass
    window: int  # tokens
    work: int  # shares of one window and head at most


def windows(
    tokens: int, HKV: int, G: int, Dv: int, itemsize: int, slots: int, blocks: int, share: int, spans: bool
) -> Windows:
    """Windows whose partial results, and passes whose lists, stay within what the constants above allow.

    Raises:
        ValueError: one token's partial results are more than that.
    """
    row = HKV * max(slots, 1)
    part = row * G * (Dv * itemsize + 4)
    if part > PARTS_BYTES or row * 16 > INDEX_BYTES:
        raise ValueError(
            f"key_major: expected rows whose partial results fit {PARTS_BYTES} bytes, got rows of up to {slots} blocks, "
            f"{part} bytes a token; max_selected bounds them"
        )
    bits = max(slots - 1, 1).bit_length()
    window = min(tokens, PARTS_BYTES // part, (1 << 31 - bits) - 1)
    if window < tokens:
        window = _even(tokens, window)
    listed = min(tokens, INDEX_BYTES // (row * (16 if spans else 12)))
    at_once = max(1, min(listed // window, COUNT_BYTES // max(8 * HKV * blocks, 1)))
    window = min(window, listed)
    units = window * slots
    return Windows(slots, bits, blocks, min(tokens, at_once * window), window, -(-units // share) + min(blocks, units))


def _even(tokens: int, most: int) -> int:
    """Tokens of a window: windows alike, so that none is a remnant, of a multiple of 64 where that is possible."""
    pieces = -(-tokens // most)
    even = -(-tokens // pieces)
    rounded = -(-even // 64) * 64
    return rounded if rounded <= most else max(most // 64 * 64, 1) if most >= 64 else most


def workspace_bytes(w: Windows, HKV: int, G: int, Dv: int, itemsize: int, spans: bool) -> int:
    """What a call allocates beside its results."""
    count = -(-w.tokens // w.window)
    parts = w.window * HKV * w.slots * G * (Dv * itemsize + 4)
    lists = w.tokens * HKV * w.slots * (12 if spans else 8) + count * w.window * HKV * w.slots * 4
    return parts + lists + count * HKV * (8 * w.blocks + 12 * w.work)
