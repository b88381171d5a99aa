"""Tile sizes and splits: pure functions of what the host knows of a call. Imports no Triton.

`plan.py` calls :func:`tile_and_splits`. A pin, which `plan.py` reads, decides first (`nsa.kernels.pinned`). A GPU
that was swept (`pytest -m perf --nsa-sweep`) has a table in its file (`nsa/gpu.py`), whose nearest measured shape
decides next; an H200 uses the H100's. Rules decide on all other GPUs, and on every GPU for many rows over blocks and
for rows over blocks of 16 or 32 keys. Their numbers come from an H100 and from the shared memory of each
architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from nsa import gpu
from nsa.kernels.query_major.choice import Choice, Point
from nsa.kernels.shared.device import SHARED_BYTES
from nsa.kernels.shared.sizes import exchange_bytes, padded

MAX_SPLITS = 32
MAX_HEADS = 64
"""Query heads that one program holds. Larger groups take several programs."""

EXCHANGE_BYTES = 33_296
"""Limit of the shared memory through which programs of a cluster exchange results: what 16 heads of Dv = 256 need."""

UNBOUNDED = 1024
"""Assumed keys of a row without a bound, where its result must not depend on the other rows of the call. The length of
K cannot be the bound, because K holds the keys of those rows, too. Tables are measured up to this length."""


class Tile(NamedTuple):
    """Compile-time choices of the forward kernel."""

    HEADS: int  # query heads of a program
    BLOCK_G: int  # HEADS padded for the tensor cores
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_L: int  # keys of a tile
    SPANS: int
    STREAM_Q: bool  # queries are loaded with every tile, not once before all tiles
    UPFRONT: bool  # a tile that is not pipelined issues all its loads before it waits for the first
    num_warps: int
    num_stages: int


def most_heads(itemsize: int) -> int:
    """Most heads of a program. With more than 16 heads in fp32 ptxas spills, up to 18 KiB a thread, and the driver then
    reserves gigabytes of GPU memory at the first launch.
    """
    return MAX_HEADS if itemsize <= 2 else 16


FULL = 2
"""At or above this many rows per multiprocessor, tiles and splits no longer depend on the number of rows."""


def _shape(itemsize: int, block_g: int, head_dim: int, spans: int, fill: int, even: bool) -> tuple[int, int, int]:
    """``(BLOCK_L, num_warps, num_stages)``, before `select` cuts them to the bound and to shared memory.

    even: values of one byte may be read in pairs. If they are read one by one, they take more registers.

    Measured on an H100 in bf16 at G = 8, D = 64 and 128 (docs/notebook/query-major.md). Many rows want small tiles of
    one or two warps, so that a multiprocessor holds many programs. Few rows want long tiles, so that each program keeps
    enough bytes in flight. Keys of several spans are looked up first, which makes shorter tiles better for few rows.
    """
    wide = head_dim > 64
    if itemsize == 1:  # half the bytes: longer tiles
        if block_g > 16 or head_dim > 128 or not even:
            return 64, 4, 3  # not measured
        return ((128, 4, 3), (64, 2, 3), (64, 4, 2))[fill]
    if itemsize > 2:
        # fp32 dot products run on the CUDA cores and are limited by registers, not by bandwidth. With 4 warps and
        # D = 128 ptxas may unroll the loop until it spills 800 bytes in each turn.
        return 32, 4 if head_dim <= 64 else 8, 2
    if block_g > 16 or head_dim > 128:
        return (64 if head_dim <= 128 else 32), 4, 3
    if fill == 2:
        return 16, 1 if spans == 1 else 2, 2 if wide else 3
    if spans > 1:
        return 64, 4, 3
    if fill == 1:
        return (32, 2, 3) if wide else (64, 4, 3)
    return 128, 4, 3


def _in_blocks(itemsize: int, block_g: int, block_d: int, block_dv: int, size: int, bound: int) -> tuple[int, int, int]:
    """``(BLOCK_L, num_warps, num_stages)`` of tiles that lie in one block, for many rows in 16 or 8 bits.

    Such a tile looks its block up once. A tile of several blocks looks up each key. Measured on an H100 on drawn shapes
    (docs/notebook/query-major.md). ``size``: a power of two that divides the keys of a block. bound: keys of a row.
    """
    head_dim, keys = max(block_d, block_dv), min(32, size)
    if itemsize == 2 and block_g <= 16 and 64 < head_dim <= 128 and size >= 64 and bound >= LONG:
        return 64, 2, 3
    if block_g > 32:  # `wgmma` takes 64 rows and four warps
        return min(64 if head_dim <= 128 else 32, size), 4, 3  # not measured
    if itemsize == 1:
        return keys, 1 if block_g <= 16 and head_dim <= 128 else 2, 3
    if block_dv > 128:
        return 16, 1 if block_g <= 16 else 2, 2  # two warps were not measured: with one, sums fill all registers
    if block_d > 128:
        return (64, 2, 2) if block_g <= 16 and size >= 64 else (keys, 1 if block_g <= 16 else 2, 2)
    return keys, 1, 3 if block_g <= 16 else 2


LONG = 2048
"""Rows of at least this many keys have longer tiles. With short tiles too few of their bytes are in flight."""

LEAST_SHARE = 32
"""Keys of the smallest part of a row whose tiles lie in one block."""
SUMS = 4096  # sums of weighted values that a warp keeps at most, half of its registers

UPFRONT_REGISTERS = 128
"""Registers of a thread that the keys and values of a tile may take."""

STREAMED = 4
"""Programs of at most this many tiles load queries with every tile. This hides latency and costs few bytes."""


@lru_cache(maxsize=4096)
def select(
    capability: int, itemsize: int, G: int, D: int, Dv: int, bound: int, spans: int, fill: int, per_head: bool = False,
    pipelined: bool = True, choice: Choice | None = None, taken: int = 0,
) -> Tile:  # fmt: skip
    """Tile of the query-major forward kernel.

    Args:
        capability: compute capability times ten, 90 for sm_90. itemsize: bytes of an element of K.
        bound: host bound on the keys that a program reads of a row (``S_kv`` without a better one).
        spans: from :func:`span_bucket`; 1 for rows that read one span from their start.
        fill: how many programs there are: 0 for fewer than multiprocessors, 1 for fewer than 4 per multiprocessor, 2
            for more. Not used with a `choice`.
        per_head: one head per program instead of the group.
        pipelined: loads may run ahead (``num_stages`` > 1).
        choice: used in place of the rules, and also cut to shared memory.
        taken: bytes of shared memory that tiles may not use.
    """
    heads = 1 if per_head else min(G, most_heads(itemsize))
    if choice is not None and not per_head:
        heads = min(heads, -(-G // choice.head_tiles))
    block_g, block_d, block_dv = padded(heads), padded(D), padded(Dv)
    rule = _shape(itemsize, block_g, max(block_d, block_dv), spans, fill, Dv % 2 == 0)
    block_l, num_warps, stages = rule if choice is None else choice[2:5]
    longest = padded(bound)
    if choice is not None and block_l > longest:  # measured on longer rows: keep the number of keys per warp
        num_warps = max(1, num_warps * longest // block_l)
    block_l = min(block_l, longest)
    one_tile = block_l >= bound and choice is None  # so there is no next tile to load ahead
    stages = stages if pipelined and not one_tile else 1
    if capability == 90 and block_g >= 64 and itemsize <= 2 and min(block_d, 64) != min(block_dv, 64) and pipelined:
        stages = max(stages, 2)  # with one stage K and V, swizzled differently, share an address (`child.mixed`)
    # `wgmma` reads its operands from shared memory, so converted e4m3 tiles need 2 more bytes an element there.
    key_bytes = (block_d + block_dv) * (3 if itemsize == 1 and block_g >= 64 else itemsize)
    # Q and the weights lie in shared memory beside the tiles in flight.
    budget = SHARED_BYTES[capability] - block_g * (block_d + block_l) * max(itemsize, 2) - 4096 - taken
    while stages > 2 and (stages - 1) * block_l * key_bytes > budget:
        stages -= 1
    while block_l > 16 and max(stages - 1, 1) * block_l * key_bytes > budget:
        block_l //= 2
    # Over an e4m3 cache queries may have to be converted, which a program should do only once.
    stream_q = bound <= (1 if itemsize == 1 else STREAMED) * block_l and block_g <= 16
    upfront = stages == 1 and itemsize <= 2 and block_l * key_bytes <= UPFRONT_REGISTERS * 4 * 32 * num_warps
    return Tile(heads, block_g, block_d, block_dv, block_l, spans, stream_q, upfront, num_warps, stages)


def tile_and_splits(
    name: str | None, capability: int, processors: int, itemsize: int, G: int, D: int, Dv: int, bound: int, spans: int,
    rows: int, per_head: bool = False, pipelined: bool = True, choice: Choice | None = None, largest: int = 0,
    invariant: bool = False, block: int = 0,
) -> tuple[Tile, int, bool]:  # fmt: skip
    """Tile and splits of a launch, and whether the programs that share a row are a cluster.

    At or above :data:`FULL` rows per multiprocessor a row's result is the same, bit by bit, for any number of rows.

    Args:
        name: of the GPU, as CUDA spells it; None on the CPU. rows: (token, KV head) pairs.
        choice: of a pin or a sweep; None: the GPU's table decides, then the rules.
        largest: most programs of a cluster; 0 without clusters.
        invariant: few rows are launched like many.
        block: the largest power of two that divides the keys of a block; 0 for spans. Tiles of 16 keys or more may lie
            in one block (:func:`_in_blocks`).
    """
    full = invariant or rows >= FULL * processors
    blocks = block >= 16 and choice is None and itemsize <= 2 and not per_head
    if blocks and full:
        heads = min(G, most_heads(itemsize))
        tile = _in_blocks(itemsize, padded(heads), padded(D), padded(Dv), block, bound)
        choice = Choice(1, -(-G // heads), *tile)
    if choice is None and not per_head:
        within = block if blocks and block > 32 else 0
        choice = measured(
            name, capability, processors, itemsize, G, D, Dv, bound, spans == 1, None if full else rows, within
        )  # fmt: skip
    if choice is not None:
        splits, fill = min(choice.splits, MAX_SPLITS), 0
        merged = bool(choice.cluster) and 1 < splits <= largest
    else:
        programs = rows * -(-G // (1 if per_head else min(G, most_heads(itemsize))))
        splits = 1 if full else split_count(programs, bound, (D + Dv) * itemsize, processors, largest)
        fill = 0 if programs * splits < processors else 1 if programs * splits < 4 * processors else 2
        fill = 2 if full else fill
        merged = fits_clusters(programs, splits, processors, largest)
    taken = EXCHANGE_BYTES if merged else 0
    tile = select(capability, itemsize, G, D, Dv, -(-bound // splits), spans, fill, per_head, pipelined, choice, taken)
    one_tile = tile.BLOCK_L * splits >= bound
    if blocks and not full and block <= 32 and tile.BLOCK_L > block and (itemsize == 1 or not one_tile):
        # Few rows: their tiles lie in one block, too, and a row gets more splits in return.
        shares = splits if one_tile else min(2 * splits, MAX_SPLITS, max(splits, bound // LEAST_SHARE))
        warps = 4 if tile.BLOCK_G > 32 else max(block // 16, tile.BLOCK_G * tile.BLOCK_DV // SUMS)
        chosen = Choice(shares, -(-G // tile.HEADS), block, warps, 3, int(merged))
        return tile_and_splits(
            name, capability, processors, itemsize, G, D, Dv, bound, spans, rows, pipelined=pipelined, choice=chosen,
            largest=largest,
        )  # fmt: skip
    return tile, splits, merged and exchange_bytes(tile.HEADS, tile.BLOCK_DV, splits) <= taken


def measured(
    name: str | None, capability: int, processors: int, itemsize: int, G: int, D: int, Dv: int, bound: int,
    one_span: bool, rows: int | None, within: int = 0,
) -> Choice | None:  # fmt: skip
    """The choice of the nearest shape of the GPU's table; None if no shape is near.

    Args:
        rows: None: the nearest shape among those of at least :data:`FULL` rows per multiprocessor.
        within: None, too, if the nearest shape's tile is longer than so many keys of a block, because it looks up each
            key. 0: any tile.
    """
    if name is None or itemsize != 2 or G > MAX_HEADS or bound == 0 or rows == 0:
        return None
    points = table(name, capability, processors).get((one_span, padded(D), padded(Dv)), {})
    near = [p for p in points if bound <= 2 * p.L and padded(p.G) == padded(G)]
    if rows is None:
        near = [p for p in near if p.rows >= FULL * processors and points[p].splits == 1]
    else:
        near = [p for p in near if p.rows <= 2 * rows]
    if not near:
        return None

    def distance(p: Point) -> float:
        return sum(abs(math.log2(a / b)) for a, b in ((p.L, bound), (p.rows, rows or p.rows), (p.G, G)))

    nearest = min(near, key=lambda p: (distance(p), p))
    # Splits fit only similar shapes. For fewer keys the parts would be too short, and for more rows there would be more
    # programs than the chip holds.
    alike = abs(math.log2(nearest.L / bound)) <= 0.5 and abs(math.log2(nearest.rows / (rows or nearest.rows))) <= 0.5
    chosen = points[nearest]
    fits = not within or chosen.BLOCK_L <= within
    return chosen if fits and (alike or chosen.splits == 1) else None


def table(name: str, capability: int, processors: int) -> Mapping[gpu.Bucket, Mapping[Point, Choice]]:
    """The best choices of a GPU by (one span, BLOCK_D, BLOCK_DV); empty if neither it nor a chip like it was swept."""
    swept = gpu.tiles_for(name, capability, processors)
    return {} if swept is None else swept.query_major


def fits_clusters(programs: int, splits: int, processors: int, largest: int) -> bool:
    """Whether the programs that share a row should be a cluster. ``programs``: of an unsplit launch.

    A cluster lies in one GPC, and not every GPC has a multiple of 4 multiprocessors. Clusters of 4 fill 120 of the 132
    multiprocessors of an H100 at a time, and the other clusters wait.
    """
    return 1 < splits <= largest and (splits == 2 or 4 * programs * splits <= 3 * processors)


# Measured on an H100. Rates are in bytes per ns.
PROGRAM_RATE = 37.0  # of one program that reads
PROCESSOR_RATE = 23.5  # of the memory, divided by the number of multiprocessors
KEY_NS = 4.0  # a program's time for one key
CLUSTER_NS = 1250.0  # time to merge partial results in a cluster
MERGE_NS = 3000.0  # time to merge partial results in a second kernel
MIN_SPLIT = 64  # smallest part of a row, in keys


def split_count(programs: int, bound: int, key_bytes: int, processors: int, largest: int = 0) -> int:
    """Into how many parts the keys of a row are split so that few rows fill the chip; 1 = no split.

    ``programs`` and ``key_bytes``: programs of an unsplit launch, and bytes of one key and its value.
    """
    row_ns = bound * (key_bytes / PROGRAM_RATE + KEY_NS)
    stream = programs * bound * key_bytes / (PROCESSOR_RATE * processors)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (2 * processors))
        merge = CLUSTER_NS if fits_clusters(programs, splits, processors, largest) else MERGE_NS
        return max(waves * row_ns / splits, stream) + (merge if splits > 1 else 0.0)

    return min((s for s in (1, 2, 4, 8, 16, MAX_SPLITS) if s == 1 or bound >= s * MIN_SPLIT), key=cost)
