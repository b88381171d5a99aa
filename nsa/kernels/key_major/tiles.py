"""Tiles and windows of the key-major kernels: pure functions of what the host knows of a call. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.query_major.tiles import SHARED_BYTES, next_power_of_2

GRID = 64
"""Keys of a block where ranges are cut into blocks."""

PARTS_BYTES = 920 << 20
"""Partial results of one window of tokens: the longer it is, the less often all keys are read."""

INDEX_BYTES = 56 << 20
"""What lists of units take; longer calls take several passes."""

HEAD_BYTES = 16 << 20
"""Queries of one KV head in a window, at most, where fewer KV heads go through at once so that windows are longer:
programs read them again and again, and L2 had better keep them."""

REREAD = 4
"""Windows get longer while reading all keys in each takes more than a fourth as many bytes as partial results do."""

COUNT_BYTES = 16 << 20
"""Counters of blocks, two ints each, of all windows of a pass; where those of one window take more, a pass has one."""

MOST_COUNT_BYTES = 1 << 30
MOST_KEYS = 2**31 - 1 - 256  # of a sequence: a tile that begins at the last one ends within int32
MOST_HEADS = 65_535  # KV heads, an axis of a CUDA grid

MAX_SLOTS = 64
MIN_REUSE = 4  # rows that read a block
"""What routing asks of a call beside its size: windows of thousands of tokens, and enough rows that read each block. At
one row a block query-major was faster on an H100, at two sometimes, at four never (docs/notebook/serving.md)."""


class DoesNotFit(ValueError):
    """A call whose workspace would not fit: another kernel has to serve it."""


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int  # query rows of a tile
    warps: int
    registers: int | None  # of a thread at most
    share: int  # tiles of rows that a program takes of its block
    merge_heads: int  # of a program that merges, and reads no keys itself
    at_once: int  # partial results of a head that the merge asks for at once
    walked: int = 0  # of sixteen blocks of a row, how many the kernel that merges reads itself
    BLOCK_L: int = 16  # keys of a tile of those
    walk_stages: int = 3
    walk_registers: int | None = None


forced: Choice | None = None
"""What a sweep wants launched next."""

# Measured on an H100, bf16, D = 128 (docs/notebook/key-major.md).
SMALL = Choice(64, 4, 128, 16, 4, 4)
LARGE = Choice(64, 4, 128, 8, 4, 2, 8, 16, 3, 168)  # groups that fill a tensor core's 16 rows
HUGE = Choice(64, 4, 128, 8, 4, 4)  # groups too large to read keys for in one warp
WIDE_HEADS = Choice(32, 4, None, 8, 4, 4)  # D or Dv above 128; with 8 warps Triton 3.1 aborts for sm_90
FP32 = Choice(16, 4, None, 8, 4, 4)  # fp32: dots run on the CUDA cores

LIMITED_SIZE = 64
"""Keys of the largest blocks for which a limit of registers pays: for those of 128 and 256 none was best on an H100."""
ONE_TILE = 128
SEVERAL_TILES = 64
"""Keys of the largest block that is one tile, and of a tile of larger ones (docs/notebook/key-major.md)."""


class Tile(NamedTuple):
    """Compile-time choices of the kernels, `share` in units; other fields as in :class:`Choice`."""

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
    capability: int, itemsize: int, G: int, D: int, Dv: int, size: int, choice: Choice | None = None, walk: bool = True
) -> Tile:
    """Tile of a call whose blocks hold ``size`` keys; ``capability`` and ``itemsize`` as for :func:`tiles.select`.

    walk: :func:`walks` says so.
    """
    block_d, block_dv = max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))
    narrow = max(block_d, block_dv) <= 128
    chosen = choice or rule(itemsize, G, narrow, size, walk)
    limited = capability == 90 and narrow  # elsewhere nobody has measured limits, and ptxas may fail under them
    rows, block_n = chosen.rows, SEVERAL_TILES if size > ONE_TILE else max(16, next_power_of_2(size))
    budget = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    # Scores and results of a tile must leave registers to spare.
    block_n = min(block_n, (32 if narrow else 16) if itemsize > 2 else (128 if narrow else 32))
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


def rule(itemsize: int, G: int, narrow: bool, size: int, walk: bool) -> Choice:
    """What nothing else forces; ``narrow``: D and Dv of at most 128."""
    chosen = FP32 if itemsize > 2 else WIDE_HEADS if not narrow else SMALL if G <= 8 else LARGE if G <= 16 else HUGE
    if chosen.registers is not None and size > LIMITED_SIZE:
        chosen = chosen._replace(registers=None)
    return chosen if walk else chosen._replace(walked=0)


def walks(queries: int, S_kv: int, invariant: bool) -> bool:
    """Whether the merge may read keys itself: they come from L2, unless few queries read a long context.

    On an H100, HQ/HKV 64/4, it took 1.07 times as long to do without at 2,048 queries of 4,096 keys, as long at 8,192,
    and 0.91 times at 65,536. ``invariant``: what shares the call must not change how a row is rounded.
    """
    return invariant or 2 * queries >= S_kv


def count_bytes(heads: int, blocks: int) -> int:
    """Of the counters of one window."""
    return 8 * heads * blocks


def pays(sequences: int, queries: int, S_kv: int, keys: int, HKV: int, n: int, block_size: int) -> bool:
    """Whether a call is of the kind that was measured: many rows for each block, few blocks for each row.

    Args:
        queries, S_kv: of one sequence, or their means. keys: of the longest, packed end to end of all.
    """
    blocks = -(-S_kv // block_size)
    counted = keys <= MOST_KEYS and HKV <= MOST_HEADS and count_bytes(HKV, sequences * (blocks + 1)) <= MOST_COUNT_BYTES
    return counted and n <= MAX_SLOTS and queries * n >= MIN_REUSE * blocks


class Grid(NamedTuple):
    """The key blocks of a call."""

    size: int  # keys of one
    blocks: int  # of all sequences
    slots: int  # blocks a row may read


def grid(of: str, B: int, S_kv: int, HKV: int, n: int, block_size: int | None, packed: bool, bound: int | None) -> Grid:
    """Blocks as the call lists them, or of `GRID` keys where ``n`` ranges of a row with ``bound`` keys are cut.

    Raises:
        ValueError: ``of`` names who asks; there are more keys or KV heads than the kernels count.
    """
    if S_kv > MOST_KEYS or HKV > MOST_HEADS:
        raise DoesNotFit(f"{of}: expected at most {MOST_KEYS} keys and {MOST_HEADS} KV heads, got {S_kv} and {HKV}")
    size = GRID if block_size is None else min(block_size, max(S_kv, 1))
    blocks = S_kv // size + B if packed else B * -(-S_kv // size)
    if block_size is not None:
        return Grid(size, blocks, n)
    slots = n * -(-S_kv // size)
    return Grid(size, blocks, slots if bound is None else min(slots, bound // size + 2 * n))


class Windows(NamedTuple):
    """How a call's tokens are dealt with: in passes, and each in windows of which partial results are kept."""

    slots: int  # units a row may have
    slot_bits: int
    blocks: int  # of all sequences
    heads: int  # KV heads that go through at once
    tokens: int  # of a pass
    window: int  # tokens
    work: int  # shares of one window and head at most

    @property
    def row(self) -> int:
        """Units of a token that go through at once."""
        return self.heads * self.slots

    @property
    def most(self) -> int:
        """Windows of a pass."""
        return -(-self.tokens // self.window)


def windows(
    tokens: int,
    HKV: int,
    G: int,
    D: int,
    Dv: int,
    itemsize: int,
    slots: int,
    blocks: int,
    share: int,
    spans: bool,
    scarce: int = 1,
) -> Windows:
    """Windows whose partial results, and passes whose lists, stay within what the constants above allow.

    scarce: they may take one in so many of those bytes.

    Raises:
        ValueError: one token's partial results are more than that.
    """
    bits = max(slots - 1, 1).bit_length()
    parts_bytes, index_bytes = PARTS_BYTES // scarce, INDEX_BYTES // scarce
    listed_bytes = max(slots, 1) * (16 if spans else 12)
    part_bytes = max(slots, 1) * G * (Dv * itemsize + 4)  # of one head of a token

    def most(heads: int) -> int:
        longest = min(parts_bytes // (heads * part_bytes), index_bytes // (heads * listed_bytes), (1 << 31 - bits) - 1)
        return min(longest, max(tokens, 1))

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
    window = even(tokens, most(heads)) if most(heads) < tokens else tokens
    listed = min(tokens, index_bytes // (heads * listed_bytes))
    at_once = max(1, min(listed // max(window, 1), COUNT_BYTES // max(count_bytes(heads, blocks), 1)))
    units = window * slots
    work = -(-units // share) + min(blocks, units)
    work = -(-work // 4) * 4  # so that what lies behind the lists is aligned
    return Windows(slots, bits, blocks, heads, min(tokens, at_once * window), window, work)


def heads_at_once(HKV: int, enough: int, most: Callable[[int], int], longest: int) -> int:
    """How many of ``HKV`` KV heads go through at once: a divisor.

    Args:
        enough: tokens of a window from which on it need not be longer.
        most: tokens that a window may have of so many heads; not fewer of fewer heads.
        longest: window for the sake of which heads are separated.
    """
    divisors = [heads for heads in range(HKV, 0, -1) if HKV % heads == 0]
    found = next(heads for heads in divisors if most(heads) > 0 or heads == 1)
    for heads in divisors[divisors.index(found) :]:
        if most(found) >= enough or most(heads) > longest:
            break
        found = heads
    return found


def even(tokens: int, most: int) -> int:
    """Tokens of a window: windows alike, so that none is a remnant, of a multiple of 64 where that is possible."""
    pieces = -(-tokens // most)
    even = -(-tokens // pieces)
    rounded = -(-even // 64) * 64
    return rounded if rounded <= most else max(most // 64 * 64, 1) if most >= 64 else most


def workspace_bytes(w: Windows, G: int, Dv: int, itemsize: int, spans: bool) -> int:
    """What a call allocates beside its results."""
    parts = w.window * w.row * G * (Dv * itemsize + 4)
    lists = w.tokens * w.row * (12 if spans else 8) + w.most * w.window * w.row * 4
    return parts + lists + w.most * w.heads * (8 * w.blocks + 12 * w.work)
