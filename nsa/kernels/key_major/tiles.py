"""Tiles and windows of the key-major kernels: pure functions of what the host knows of a call. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.shared import sizes
from nsa.kernels.shared.device import SHARED_BYTES
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.sizes import MOST_HEADS, MOST_KEYS, next_power_of_2, padded

GRID = 64
"""Keys of a block into which ranges are cut."""

PARTS_BYTES = 920 << 20
"""Limit of the partial results of a window of tokens. Long windows are better: all keys are read once per window."""

INDEX_BYTES = 56 << 20
"""Limit of the lists of units. Longer calls take several passes."""

HEAD_BYTES = 16 << 20
"""Limit of the queries of one KV head in a window that is made longer by processing fewer KV heads at once. Programs
read these queries many times, so they should stay in L2."""

REREAD = 4
"""Windows are made longer while the keys that a window reads have more than 1/4 of the bytes of its partial results."""

COUNT_BYTES = 16 << 20
"""Limit of the counters of blocks, two ints each, of all windows of a pass. One window may take more."""

MOST_COUNT_BYTES = 1 << 30

MAX_SLOTS = 64
"""Blocks of a row that routing gives to key-major. With at most 64, windows have thousands of tokens."""

FEW_UNITS = 8192
"""One program lists at most this many units of a window and head, of at most this many blocks. A call then has two
launches and a fill fewer."""
FEW_SEQUENCES = 16
"""The lists of a ragged batch of more sequences take three launches: one program would read each end for every unit."""


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int  # query rows of a tile
    warps: int
    registers: int | None  # limit of a thread; None for no limit
    share: int  # tiles of rows that a program takes of its block
    merge_heads: int  # heads of a merge program that reads no keys itself
    at_once: int  # partial results of a head that the merge loads at once
    walked: int = 0  # of every 16 blocks of a row, how many the merge kernel computes itself
    BLOCK_L: int = 16  # keys of a tile of these blocks
    walk_stages: int = 3
    walk_registers: int | None = None


# Measured on an H100 in bf16 with D = 128 (docs/notebook/key-major.md).
SMALL = Choice(64, 4, 128, 16, 8, 4)
LARGE = Choice(64, 4, 128, 8, 4, 2, 8, 16, 3, 168)  # groups that fill the 16 rows of a tensor core's tile
HUGE = Choice(64, 4, 128, 8, 4, 4)  # groups too large for the merge's single warp to read keys
LONG = Choice(64, 4, None, 16, 8, 4)  # `LARGE` for blocks of more than `LIMITED_SIZE` keys: the merge reads no keys
FEW_SHARE = 8  # the share of `LONG` where fewer than `FEW_READS` rows read a block, on average
FEW_READS = 64
WIDE_HEADS = Choice(32, 4, None, 8, 4, 4)  # D or Dv above 128; with 8 warps Triton 3.1 aborts for sm_90
LONG_KEYS = Choice(64, 4, None, 8, 4, 4)  # D above 128, Dv up to 128, where tiles are those of narrow head dims
FP32 = Choice(16, 4, None, 8, 4, 4)  # fp32 dot products run on the CUDA cores

LIMITED_SIZE = 64
"""Keys of the largest blocks whose kernel has a register limit. For blocks of 128 and 256 an H100 is faster without."""
ONE_TILE = 128
SEVERAL_TILES = 64
"""Keys of the largest block that is one tile, and keys of a tile of larger blocks (docs/notebook/key-major.md)."""


class Tile(NamedTuple):
    """Compile-time choices of the kernels. ``share`` is in units; the other fields are as in :class:`Choice`."""

    HEADS: int  # query heads of a unit in a tile
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int  # query rows of a tile: HEADS of each of its units
    BLOCK_N: int  # keys of a tile
    warps: int
    registers: int | None
    share: int
    merge_heads: int
    at_once: int
    walked: int
    BLOCK_L: int
    walk_stages: int
    walk_registers: int | None


@lru_cache(maxsize=4096)
def select(
    capability: int, itemsize: int, G: int, D: int, Dv: int, size: int, choice: Choice | None = None, walk: bool = True,
    e4m3: bool = False, reads: int = FEW_READS,
) -> Tile:  # fmt: skip
    """Tile of a call whose blocks hold ``size`` keys.

    Args:
        itemsize: bytes of an element of Q. e4m3: keys are of one byte.
        walk: of :func:`walks`. reads: rows that read a block, on average.
    """
    block_d, block_dv = padded(D), padded(Dv)
    narrow = sizes.narrow(capability, itemsize, block_d, block_dv)
    chosen = choice or _rule(itemsize, G, block_d, narrow, size, walk, e4m3, reads)
    limited = capability == 90 and narrow  # elsewhere limits were not measured, and ptxas may fail under them
    rows, block_n = chosen.rows, SEVERAL_TILES if size > ONE_TILE else padded(size)
    # Scores and results of a tile must leave free registers.
    block_n = min(block_n, (32 if narrow else 16) if itemsize > 2 else (128 if narrow else 32))
    budget = SHARED_BYTES[capability]
    while block_n > 16 and (block_n * (block_d + block_dv) + rows * (block_d + block_n)) * itemsize > budget:
        block_n //= 2
    heads = next_power_of_2(G)
    merge_heads = min(heads, max(1, chosen.merge_heads * 128 // max(block_dv, 64)))
    return Tile(
        min(heads, rows), block_d, block_dv, rows, block_n, chosen.warps,
        chosen.registers if limited else None, chosen.share * (rows // min(heads, rows)),
        max(16, min(heads, 64)) if chosen.walked else merge_heads, chosen.at_once, chosen.walked, chosen.BLOCK_L,
        chosen.walk_stages, chosen.walk_registers if limited else None,
    )  # fmt: skip


def _rule(itemsize: int, G: int, block_d: int, narrow: bool, size: int, walk: bool, e4m3: bool, reads: int) -> Choice:
    """The choice where no sweep forces one. ``narrow``: of `sizes.narrow`."""
    if itemsize > 2:
        chosen = FP32
    elif not narrow:
        chosen = WIDE_HEADS
    elif block_d > 128:
        chosen = LONG_KEYS
    else:
        chosen = SMALL if G <= 8 else LARGE if G <= 16 else HUGE
    if chosen is LARGE and size > LIMITED_SIZE:
        chosen = LONG if reads >= FEW_READS else LONG._replace(share=FEW_SHARE)
    if chosen.registers is not None and size > LIMITED_SIZE:
        chosen = chosen._replace(registers=None)
    if e4m3:  # more stages, to keep as many bytes in flight as in 16 bits; longer tiles would spill
        chosen = chosen._replace(walk_stages=2 * chosen.walk_stages - 1)
    return chosen if walk else chosen._replace(walked=0)


def walks(queries: int, S_kv: int, invariant: bool) -> bool:
    """Whether the merge kernel may read keys itself: not if few queries read a long context, whose keys miss L2.

    With 2,048 queries on an H100 (HQ/HKV 64/4), a merge that reads no keys makes a call of 4,096 keys 1.07 times as
    long, of 8,192 keys equally long, and of 65,536 keys 0.91 times as long. The choice changes how a row is rounded,
    so with ``invariant`` it is the same for every length.
    """
    return invariant or 2 * queries >= S_kv


def count_bytes(heads: int, blocks: int) -> int:
    """Bytes of the counters of one window."""
    return 8 * heads * blocks


class Grid(NamedTuple):
    """The key blocks of a call."""

    size: int  # keys of a block
    blocks: int  # of all sequences
    slots: int  # blocks that a row may read


def grid(of: str, B: int, S_kv: int, HKV: int, n: int, block_size: int | None, packed: bool, bound: int | None) -> Grid:
    """The key blocks of a call. A row's ``n`` ranges, of ``bound`` keys together, are cut into blocks of `GRID` keys.

    Raises:
        ValueError: there are more keys or KV heads than the kernels count. ``of`` is the kernel that the text names.
    """
    if S_kv > MOST_KEYS or HKV > MOST_HEADS:
        raise DoesNotFit(f"{of}: expected at most {MOST_KEYS} keys and {MOST_HEADS} KV heads, got {S_kv} and {HKV}")
    size = GRID if block_size is None else min(block_size, max(S_kv, 1))
    end = sizes.end_of_blocks(S_kv, size)
    if end > sizes.MOST_END:
        raise DoesNotFit(f"{of}: expected blocks of {size} keys to end at {sizes.MOST_END} or before, got {end}")
    blocks = S_kv // size + B if packed else B * -(-S_kv // size)
    if block_size is not None:
        return Grid(size, blocks, n)
    slots = n * -(-S_kv // size)
    return Grid(size, blocks, slots if bound is None else min(slots, bound // size + 2 * n))


class Windows(NamedTuple):
    """How a call's tokens are divided: into passes, which share lists, and windows, which share partial results."""

    slots: int  # units that a row may have
    slot_bits: int
    blocks: int  # of all sequences
    heads: int  # KV heads that are processed at once
    tokens: int  # of a pass
    window: int  # tokens of a window
    work: int  # upper bound of the shares of one window and head
    row: int  # units of a token, of all KV heads that are processed at once
    most: int  # windows of a pass


def windows(
    tokens: int, HKV: int, G: int, D: int, Dv: int, itemsize: int, slots: int, blocks: int, share: int, spans: bool,
    scarce: int = 1,
) -> Windows:  # fmt: skip
    """Windows and passes whose partial results and lists stay within the limits above, divided by ``scarce``.

    Raises:
        ValueError: one token's partial results exceed the limit, or the counters of blocks do.
    """
    bits = max(slots - 1, 1).bit_length()
    parts_bytes, index_bytes = PARTS_BYTES // scarce, INDEX_BYTES // scarce
    listed_bytes = max(slots, 1) * (16 if spans else 12)  # for one head of a token, like `part_bytes`
    part_bytes = max(slots, 1) * G * (Dv * itemsize + 4)

    def most(heads: int) -> int:
        longest = min(parts_bytes // (heads * part_bytes), index_bytes // (heads * listed_bytes))
        return min(longest, (1 << max(31 - bits, 0)) - 1, max(tokens, 1))

    if most(1) == 0:
        raise DoesNotFit(
            f"key_major: expected the partial results of a row to fit {parts_bytes} bytes, got {part_bytes} bytes of "
            f"{slots} blocks a row{'; max_selected bounds them' if spans else ''}"
        )
    if count_bytes(HKV, blocks) > MOST_COUNT_BYTES:
        raise DoesNotFit(
            f"key_major: expected counters of blocks to fit {MOST_COUNT_BYTES} bytes, got {count_bytes(HKV, blocks)} "
            f"bytes of {blocks} blocks and {HKV} KV heads"
        )
    enough = min(tokens, REREAD * tokens // (max(slots, 1) * G))
    heads = heads_at_once(HKV, enough, most, HEAD_BYTES // (G * D * itemsize))
    window = even(tokens, most(heads))
    listed = min(tokens, index_bytes // (heads * listed_bytes))
    at_once = max(1, min(listed // max(window, 1), COUNT_BYTES // max(count_bytes(heads, blocks), 1)))
    units = window * slots
    work = -(-units // share) + min(blocks, units)
    work = -(-work // 4) * 4  # aligns the counters that follow the lists
    of_pass = min(tokens, at_once * window)
    return Windows(slots, bits, blocks, heads, of_pass, window, work, heads * slots, -(-of_pass // max(window, 1)))


def few(w: Windows, sequences: int) -> bool:
    """Whether one program lists the units of a window and head. ``sequences``: of a ragged batch, else 0."""
    return w.window * w.slots <= FEW_UNITS and w.blocks <= FEW_UNITS and sequences <= FEW_SEQUENCES


def heads_at_once(HKV: int, enough: int, most: Callable[[int], int], longest: int) -> int:
    """How many of ``HKV`` KV heads are processed at once, a divisor of ``HKV``.

    Args:
        enough: tokens; a window of this length need not be longer.
        most: the largest window for a number of heads; fewer heads never make it shorter.
        longest: the largest window for which fewer heads are processed at once.
    """
    divisors = [heads for heads in range(HKV, 0, -1) if HKV % heads == 0]
    chosen = next(heads for heads in divisors if most(heads) > 0 or heads == 1)
    for heads in divisors[divisors.index(chosen) :]:
        if most(chosen) >= enough or most(heads) > longest:
            break
        chosen = heads
    return chosen


def even(tokens: int, most: int) -> int:
    """Tokens of a window, at most ``most``. Windows have equal length, a multiple of 64 where that is possible."""
    if tokens <= most:
        return tokens
    pieces = -(-tokens // most)
    rounded = -(-tokens // (64 * pieces)) * 64
    return rounded if rounded <= most else max(most // 64 * 64, 1) if most >= 64 else most
