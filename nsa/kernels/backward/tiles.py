"""Tiles and windows of the backward kernels: pure functions of what the host knows of a call. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.key_major.tiles import MOST_COUNT_BYTES, even, heads_at_once
from nsa.kernels.shared import sizes
from nsa.kernels.shared.device import AMD, SHARED_BYTES
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.sizes import Worth, next_power_of_2, padded
from nsa.kernels.union import tiles as union_tiles

DQ_BYTES = 1280 << 20
"""Limit of the parts of dQ of a window, one for each block of a row. Long windows are better: dK and dV are read and
written once per window. Half of this limit adds 3 ms to a pass of 32 ms (H100, HQ/HKV 64/4, 65,536 tokens)."""

HEAD_BYTES = 48 << 20
"""Limit of the queries and gradients of one KV head in a window, like `HEAD_BYTES` of key-major's tiles."""

SUM_BYTES = 256 << 20
"""Limit of the partial sums of dK and dV. Blocks that several programs share have partial sums."""

INDEX_BYTES = 56 << 20
"""Limit of the lists of a window's units."""

STRIP_BYTES = 64 << 20
"""Limit of the counters of blocks. Each strip of tokens has a counter for each block."""

STRIP = 16
"""Fewest tokens of a strip. A program counts the tokens of its strip in sequence."""

STRIPS = 2048
"""Limit of the strips of all heads. More strips do not count faster, and each strip needs a counter for each block."""

MOST_PARTS_G = 16
"""Largest group whose dQ is summed from parts that key blocks compute. Larger groups would have so many bytes of parts
that it costs less to read the keys again for every query."""

UNIONS_FROM = 1 << 21
"""Fewest query rows (tokens * query heads), times G, of a call with unions: 2,048 tokens of 64/4, 8,192 of 32/4. In
smaller calls it costs more to list blocks twice than unions gain."""

LEAST_UNION_G = 8
"""Smallest group with unions. A tile of a smaller group has so many tokens that its union is seldom worth reading."""


class Unions(NamedTuple):
    """Which calls have unions, and which unions are worth reading."""

    rows: int = UNIONS_FROM
    least_G: int = LEAST_UNION_G
    worth: Worth = union_tiles.WORTH


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int  # query rows of a tile
    warps: int
    stages: int
    share: int  # tiles of rows that a program takes of its block
    keep_dq: bool  # dQ is summed from parts that key blocks compute, if a block is one tile
    BLOCK_L: int  # keys of a tile where dQ is query-major
    dq_warps: int
    dq_stages: int


# Swept on an H100 with G of 1 to 64. The choices that lost are in docs/notebook/backward.md.
HOPPER_FEW = Choice(32, 4, 2, 64, True, 32, 1, 2)  # G below 4
HOPPER_SMALL = Choice(32, 4, 2, 128, True, 32, 1, 2)  # G up to 8
HOPPER_16 = Choice(32, 4, 3, 128, True, 32, 1, 2)  # G up to 16
HOPPER_LARGE = Choice(32, 4, 3, 128, False, 64, 4, 2)
HOPPER_ALONE = Choice(32, 4, 3, 256, False, 32, 1, 2)  # G of 4 to 16, where no parts of dQ are written
HOPPER_LONG_KEYS = Choice(32, 8, 2, 128, True, 32, 1, 2)  # D above 128, Dv up to 128, and G up to 8
HOPPER_LONG_KEYS_16 = Choice(32, 8, 2, 128, False, 64, 4, 2)
# Not measured, but chosen by the registers and shared memory that the compile matrix shows.
SMALL = Choice(64, 8, 2, 32, True, 32, 1, 2)
SMALL_FEW = SMALL._replace(rows=32, share=64)  # G = 1, where 64 rows spill 1,064 bytes in each turn under Triton 3.6
SMALL_AMD = SMALL._replace(rows=32, warps=4)  # 64 rows and 8 warps spill up to 2.7 KiB in each turn of the loop
LARGE = Choice(64, 8, 2, 32, False, 32, 4, 2)
WIDE_HEADS = Choice(32, 8, 1, 32, False, 16, 4, 1)  # D or Dv above 128
FP32 = Choice(16, 4, 1, 32, False, 16, 4, 1)  # fp32 dot products run on the CUDA cores
# Over ranges, a program of dQ with 4 warps or more than 16 heads would need 2 KiB of local memory a thread.
WIDE_FP32 = FP32._replace(dq_warps=8)


class Tile(NamedTuple):
    """Compile-time choices of the kernels. ``share`` is in units; the other fields are as in :class:`Choice`."""

    HEADS: int  # query heads of a unit in a tile
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int  # keys of a tile
    warps: int
    stages: int
    share: int
    keep_dq: bool
    dq_heads: int  # query heads of a program where dQ is query-major
    BLOCK_G: int  # dq_heads padded for the tensor cores
    BLOCK_L: int
    dq_warps: int
    dq_stages: int


@lru_cache(maxsize=4096)
def select(
    capability: int, itemsize: int, G: int, D: int, Dv: int, size: int, spans: bool, choice: Choice | None = None,
    pipelines: bool = True, parts: bool = True,
) -> Tile:  # fmt: skip
    """Tile of a call whose blocks hold ``size`` keys.

    Args:
        capability, itemsize: as for :func:`nsa.kernels.query_major.tiles.select`.
        pipelines: this Triton can pipeline the loads of queries.
        parts: dQ may be summed from parts.
    """
    block_d, block_dv = padded(D), padded(Dv)
    narrow = sizes.narrow(capability, itemsize, block_d, block_dv)
    chosen = choice or _rule(capability, itemsize, G, narrow, block_d > 128, parts)
    most = (64 if itemsize == 2 else 32) if narrow else (32 if itemsize == 2 else 16)
    budget = SHARED_BYTES[capability] // itemsize
    rows, block_n = shrunk(chosen.rows, min(padded(size), most), chosen.stages, block_d + block_dv, budget)
    heads = next_power_of_2(G)
    in_tile = min(heads, rows)
    dq_heads = min(heads, 64 if narrow and itemsize == 2 else 16)
    stages = chosen.stages if pipelines else 1
    # Without a pipeline dO and dS lie at one address, which ptxas may lose for sm_90 (docs/notebook/compile-matrix.md).
    lost = capability == 90 and itemsize == 2 and stages == 1
    keep_dq = parts and chosen.keep_dq and not spans and size <= block_n and not lost
    return Tile(
        in_tile, block_d, block_dv, rows, block_n, chosen.warps, stages, chosen.share * (rows // in_tile), keep_dq,
        dq_heads, max(16, dq_heads), chosen.BLOCK_L, chosen.dq_warps if dq_heads <= 16 else 4, chosen.dq_stages,
    )  # fmt: skip


def shrunk(rows: int, keys: int, stages: int, width: int, budget: int) -> tuple[int, int]:
    """Query rows and keys of a tile, halved until ``budget`` elements hold the keys and values of ``width`` together,
    the queries and their gradients in all stages, and P and dS.
    """
    while rows + keys > 32 and (keys + rows * stages) * width + 2 * rows * keys > budget:
        rows, keys = (rows // 2, keys) if rows >= keys else (rows, keys // 2)
    return rows, keys


def _rule(capability: int, itemsize: int, G: int, narrow: bool, long_keys: bool, parts: bool) -> Choice:
    if itemsize > 2:
        return FP32 if narrow else WIDE_FP32
    if not narrow:
        return WIDE_HEADS
    if long_keys:
        return HOPPER_LONG_KEYS if G <= 8 else HOPPER_LONG_KEYS_16
    if capability == 90:
        if not parts and 4 <= G <= MOST_PARTS_G:
            return HOPPER_ALONE
        if G <= 8:
            return HOPPER_FEW if G < 4 else HOPPER_SMALL
        return HOPPER_16 if G <= MOST_PARTS_G else HOPPER_LARGE
    if G > MOST_PARTS_G:
        return LARGE
    return SMALL_AMD if capability == AMD else SMALL_FEW if G == 1 else SMALL


@lru_cache(maxsize=1024)
def union(capability: int, itemsize: int, G: int, D: int, Dv: int, n: int, size: int) -> union_tiles.Tile | None:
    """Tile of the kernel that takes dQ from unions of ``n`` blocks a row. A block of ``size`` keys is one tile.

    None if no tile holds two tokens, or if shared memory does not hold a tile.
    """
    block_n = padded(size)
    for rows, stages in ((64, 2), (64, 1), (32, 2), (32, 1)):
        choice = union_tiles.Choice(rows, block_n, 8 if padded(D) > 128 else 4, stages)
        tile = union_tiles.select(capability, itemsize, G, D, Dv, n, size, choice)
        if tile is None or tile.TOKENS * tile.HEADS < 16:
            return None
        rows = tile.TOKENS * tile.HEADS
        wide = tile.BLOCK_D + tile.BLOCK_DV
        if itemsize * ((rows + stages * block_n) * wide + rows * block_n) <= SHARED_BYTES[capability]:
            return tile._replace(BLOCK_N=block_n, stages=stages)
    return None


class Windows(NamedTuple):
    """How a call's tokens are divided into windows, which share lists and partial results."""

    slots: int  # units that a row may have
    slot_bits: int
    blocks: int  # of all sequences
    heads: int  # KV heads that are processed at once
    window: int  # tokens of a window
    work: int  # upper bound of the shares of one head
    several: int  # upper bound of the shares of blocks that have more than one share
    strip: int  # tokens that a program counts


def windows(
    tokens: int, HKV: int, G: int, D: int, Dv: int, itemsize: int, slots: int, blocks: int, size: int, share: int,
    keep_dq: bool, spans: bool, dq_bytes: int | None = None,
) -> Windows:  # fmt: skip
    """Windows whose lists and partial results stay within the limits above. ``dq_bytes`` replaces `DQ_BYTES` if given.

    Raises:
        ValueError: the lists or parts of one token, or the counters of blocks, exceed a limit.
    """
    slots, dq_bytes = max(slots, 1), dq_bytes or DQ_BYTES
    bits = max(slots - 1, 1).bit_length()
    # Bytes of one head of a token: its lists, its parts of dQ, and its partial sums multiplied by `share`.
    index = slots * (16 if spans else 12)
    dq = slots * G * D * itemsize if keep_dq else 0
    sums = 2 * slots * size * (D + Dv) * 4

    def most(heads: int) -> int:
        longest = min(INDEX_BYTES // (heads * index), (1 << max(31 - bits, 0)) - 1, max(tokens, 1))
        longest = min(longest, max(1, SUM_BYTES * share // (heads * sums)))
        return min(longest, dq_bytes // (heads * dq)) if dq else longest

    if most(1) == 0:
        raise DoesNotFit(
            f"backward: expected the lists of a row to fit {INDEX_BYTES} bytes and its parts of dQ {dq_bytes} bytes, "
            f"got {index} and {dq} bytes for {slots} blocks{'; max_selected bounds them' if spans else ''}"
        )
    heads = heads_at_once(HKV, tokens, most, HEAD_BYTES // (G * (D + Dv) * itemsize))
    window = even(tokens, most(heads))
    strip = strip_of(window, heads, blocks)
    counted = -(-window // strip) * heads * blocks * 4
    if counted > MOST_COUNT_BYTES:
        raise DoesNotFit(
            f"backward: expected counters of blocks to fit {MOST_COUNT_BYTES} bytes, got {counted} bytes of "
            f"{blocks} blocks and {heads} KV heads"
        )
    units = window * slots
    work = -(-units // share) + min(blocks, units)
    return Windows(slots, bits, blocks, heads, window, work, max(1, 2 * units // share), strip)


def strip_of(window: int, heads: int, blocks: int) -> int:
    """Tokens of a strip, if the units of so many KV heads are listed at once."""
    strip = STRIP
    while strip < window and -(-window // strip) * heads > min(STRIPS, STRIP_BYTES // (4 * max(blocks, 1))):
        strip *= 2
    return strip
