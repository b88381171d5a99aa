"""Tile sizes and splits: a pure function of what the host knows of a call. Imports no Triton.

A GPU that was swept (`pytest -m perf --nsa-sweep`) has a table in its file (`nsa/gpu.py`): the nearest measured shape
decides. Everything else gets rules, whose numbers come from an H100 and from each architecture's shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from nsa import gpu

AMD = 942
"""Stands for every AMD GPU where a compute capability is asked for: none has less shared memory than a gfx942."""

SHARED_BYTES = {
    **{80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448},
    **{100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376},
    AMD: 65_536,
}
"""Shared memory one program may use, by compute capability; the smallest stands for an unknown one."""

SPAN_BUCKETS = (8, 16, 64)
"""Spans a program holds in registers at a time; rows with more are read in chunks of the largest."""

MAX_SPLITS = 32
MAX_HEADS = 64
"""Query heads one program holds; larger groups take several programs."""

EXCHANGE_BYTES = 33_296
"""Shared memory through which programs of a cluster may hand each other results: of 16 heads and Dv = 256."""

UNBOUNDED = 1024
"""Keys a row is taken to have where nothing bounds them and its result must not depend on the others of the call, whose
keys lie in the same tensor. Tables are measured to that length."""


class Choice(NamedTuple):
    """What a sweep varies, and a table holds."""

    splits: int  # parts into which the keys of a row are split
    head_tiles: int  # programs a group of query heads is dealt to
    BLOCK_L: int
    num_warps: int
    num_stages: int
    cluster: int = 1  # whether the programs that share a row merge their results, where they can; else a kernel does


forced: Choice | None = None
"""What a sweep wants launched next, whatever tables and rules say."""


class Tile(NamedTuple):
    """Compile-time choices of the forward kernel."""

    HEADS: int  # query heads of a program
    BLOCK_G: int  # HEADS padded to what the tensor cores take
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_L: int  # keys of a tile
    SPANS: int
    STREAM_Q: bool  # queries come with every tile, instead of before them
    UPFRONT: bool  # a tile that is not pipelined asks for all it needs before it waits for any of it
    num_warps: int
    num_stages: int


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def span_bucket(n: int, S_kv: int) -> int:
    """Spans held at a time. Slots of a chunk are counted in int32, hence fewer spans over enormous caches."""
    bucket = next((b for b in SPAN_BUCKETS if n <= b), SPAN_BUCKETS[-1])
    while bucket > 1 and bucket * S_kv >= 2**31 - 256:  # and a tile beyond
        bucket //= 2
    return bucket


FULL = 2
"""Rows a multiprocessor from which on a launch counts as full, and their number decides nothing any more."""


def fill_bucket(programs: int, processors: int) -> int:
    """How well a launch fills the chip: 0 less than a program per multiprocessor, 1 a few, 2 four or more."""
    return 0 if programs < processors else 1 if programs < 4 * processors else 2


def _shape(itemsize: int, block_g: int, head_dim: int, spans: int, fill: int) -> tuple[int, int, int]:
    """``(BLOCK_L, num_warps, num_stages)`` before the bound and shared memory cut it.

    Measured on an H100 in bf16 at G = 8, D = 64 and 128 (docs/notebook/query-major.md): many rows want small tiles
    of one or two warps, so that a multiprocessor holds many programs; few rows want long tiles, so that one program
    keeps enough bytes in flight. Where keys must be looked up first, the tiles of few rows are better not that long.
    """
    wide = head_dim > 64
    if itemsize > 2:
        return 32, 4, 2  # fp32 dots run on the CUDA cores: registers, not bandwidth, are short
    if block_g > 16 or head_dim > 128:
        return (64 if head_dim <= 128 else 32), 4, 3
    if fill == 2:
        return 16, 1 if spans == 1 else 2, 2 if wide else 3
    if spans > 1:
        return 64, 4, 3
    if fill == 1:
        return (32, 2, 3) if wide else (64, 4, 3)
    return 128, 4, 3


UPFRONT_REGISTERS = 128
"""Registers of a thread that the keys and values of a tile may take."""

STREAMED = 4
"""Tiles of a program up to which queries come with each: latency is saved, and little is read again."""


@lru_cache(maxsize=4096)
def select(
    capability: int,
    itemsize: int,
    G: int,
    D: int,
    Dv: int,
    bound: int,
    spans: int,
    fill: int,
    per_head: bool = False,
    pipelined: bool = True,
    choice: Choice | None = None,
    taken: int = 0,
) -> Tile:
    """Tile of the query-major forward kernel.

    Args:
        capability: compute capability times ten, 90 for sm_90.
        itemsize: bytes of an element of K.
        bound: host bound on the keys of a row (``S_kv`` where nothing better is known).
        spans: from :func:`span_bucket`; 1 for rows that read one span from its start.
        fill: from :func:`fill_bucket`; of no matter where there is a `choice`.
        per_head: one head a program instead of the group.
        pipelined: whether loads may run ahead (``num_stages`` > 1).
        choice: measured, instead of the rules; cut to what shared memory holds all the same.
        taken: bytes of shared memory that are not for tiles.
    """
    heads = group_heads(G, per_head)
    if choice is not None and not per_head:
        heads = min(heads, -(-G // choice.head_tiles))
    block_g = max(16, next_power_of_2(heads))
    block_d, block_dv = max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))
    rule = _shape(itemsize, block_g, max(block_d, block_dv), spans, fill)
    block_l, num_warps, stages = rule if choice is None else choice[2:5]
    longest = max(16, next_power_of_2(bound))
    if choice is not None and block_l > longest:  # measured on longer rows: as many keys a warp
        num_warps = max(1, num_warps * longest // block_l)
    block_l = min(block_l, longest)
    single = block_l >= bound and choice is None  # one tile: nothing to load ahead of
    stages = stages if pipelined and not single else 1
    if capability == 90 and block_g >= 64 and itemsize == 2 and min(block_d, 64) != min(block_dv, 64) and pipelined:
        stages = max(stages, 2)  # K and V, swizzled differently, would take turns at one address (`aot_child.mixed`)
    key_bytes = (block_d + block_dv) * itemsize
    # Room for Q and the weights beside the tiles in flight.
    budget = (
        SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
        - block_g * (block_d + block_l) * itemsize
        - 4096
        - taken
    )
    while stages > 2 and (stages - 1) * block_l * key_bytes > budget:
        stages -= 1
    while block_l > 16 and max(stages - 1, 1) * block_l * key_bytes > budget:
        block_l //= 2
    stream_q = bound <= STREAMED * block_l and block_g <= 16
    upfront = stages == 1 and itemsize == 2 and block_l * key_bytes <= UPFRONT_REGISTERS * 4 * 32 * num_warps
    return Tile(heads, block_g, block_d, block_dv, block_l, spans, stream_q, upfront, num_warps, stages)


def choose(
    name: str | None,
    capability: int,
    processors: int,
    itemsize: int,
    G: int,
    D: int,
    Dv: int,
    bound: int,
    spans: int,
    rows: int,
    per_head: bool = False,
    pipelined: bool = True,
    choice: Choice | None = None,
    largest: int = 0,
    invariant: bool = False,
) -> tuple[Tile, int, bool]:
    """Tile and splits of a launch, and whether the programs that share a row are a cluster.

    Args:
        name: of the GPU, as CUDA tells it; None where there is none.
        processors: multiprocessors of the device.
        rows: (token, KV head) pairs.
        choice: what a sweep tries; None asks the GPU's table, then the rules.
        largest: number of programs of a cluster; 0 where there are none.
        invariant: few rows are launched like many.

    From :data:`FULL` rows a multiprocessor on, their number decides nothing: a row's result is the same, bit by bit,
    whichever others share the call. Others as for :func:`select`.
    """
    full = invariant or rows >= FULL * processors
    if choice is None and not per_head:
        choice = measured(name, itemsize, G, D, Dv, bound, spans == 1, None if full else rows, FULL * processors)
    if choice is not None:
        splits = min(choice.splits, MAX_SPLITS)
        part = -(-bound // splits)
        merged = bool(choice.cluster) and 1 < splits <= largest
        taken = EXCHANGE_BYTES if merged else 0
        tile = select(capability, itemsize, G, D, Dv, part, spans, 0, per_head, pipelined, choice, taken)
        return tile, splits, merged and exchange_bytes(tile.HEADS, tile.BLOCK_DV, splits) <= taken
    programs = rows * -(-G // group_heads(G, per_head))
    splits = 1 if full else split_count(programs, bound, (D + Dv) * itemsize, processors, largest)
    fill = 2 if full else fill_bucket(programs * splits, processors)
    merged = fits_clusters(programs, splits, processors, largest)
    taken = EXCHANGE_BYTES if merged else 0
    tile = select(capability, itemsize, G, D, Dv, -(-bound // splits), spans, fill, per_head, pipelined, None, taken)
    return tile, splits, merged and exchange_bytes(tile.HEADS, tile.BLOCK_DV, splits) <= taken


def merged_heads(heads: int, cluster: int) -> int:
    """Heads that each program of a cluster merges, padded to a power of 2."""
    return next_power_of_2(-(-heads // max(cluster, 1)))


BARRIER_BYTES = 16
PATTERN_BYTES = 1024  # after so many, a swizzled tile in shared memory begins anew; PTX ISA 9.7.15.5.1


def box_bytes(heads: int, block_dv: int, cluster: int) -> int:
    """Shared memory in which a program of a cluster gets all parts of its heads, or puts its part of all heads."""
    return cluster * merged_heads(heads, cluster) * (block_dv + 4) * 4


def exchange_bytes(heads: int, block_dv: int, cluster: int) -> int:
    """Shared memory that a program of a cluster needs beside its tiles, see :mod:`nsa.kernels.shared.clusters`.

    The tiles come to lie behind it, and tensor cores that read tiles of 64 rows from there (``wgmma``) take the
    pattern in which they lie from their address: it must be as if they lay first.
    """
    if not cluster:
        return 0
    total = BARRIER_BYTES + 2 * box_bytes(heads, block_dv, cluster)
    align = PATTERN_BYTES if next_power_of_2(heads) >= 64 else BARRIER_BYTES
    return -(-total // align) * align


class Point(NamedTuple):
    """A measured shape of one table bucket."""

    G: int
    rows: int
    L: int


def measured(
    name: str | None, itemsize: int, G: int, D: int, Dv: int, bound: int, one_span: bool, rows: int | None, full: int
) -> Choice | None:
    """The choice of the nearest shape that a sweep measured on this GPU; None if none is near.

    ``rows`` None: of shapes with at least ``full`` rows, whatever their number.
    """
    if name is None or itemsize != 2 or G > MAX_HEADS or bound == 0 or rows == 0:
        return None
    points = table(name).get((one_span, max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))), {})
    padded = max(16, next_power_of_2(G))
    known = [p for p in points if bound <= 2 * p.L and max(16, next_power_of_2(p.G)) == padded]
    if rows is None:
        known = [p for p in known if p.rows >= full and points[p].splits == 1]
    else:
        known = [p for p in known if p.rows <= 2 * rows]
    if not known:
        return None

    def distance(p: Point) -> float:
        return sum(abs(math.log2(a / b)) for a, b in ((p.L, bound), (p.rows, rows or p.rows), (p.G, G)))

    nearest = min(known, key=lambda p: (distance(p), p))
    # Parts that were right for a shape are right for its like only: fewer keys make them short, more rows overfill.
    alike = abs(math.log2(nearest.L / bound)) <= 0.5 and abs(math.log2(nearest.rows / (rows or nearest.rows))) <= 0.5
    return points[nearest] if alike or points[nearest].splits == 1 else None


def table(name: str) -> Mapping[gpu.Bucket, Mapping[Point, Choice]]:
    """The best choices of a GPU by (one span, BLOCK_D, BLOCK_DV); empty if nobody swept it.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    swept = gpu.measured(name).tiles
    return {} if swept is None else swept.query_major


def group_heads(G: int, per_head: bool) -> int:
    """Query heads of one program."""
    return 1 if per_head else min(G, MAX_HEADS)


def fits_clusters(programs: int, splits: int, processors: int, largest: int) -> bool:
    """Whether the programs that share a row had better be a cluster. ``programs``: of an unsplit launch.

    A cluster lies in one GPC. Those do not all have a multiple of 4 multiprocessors: of an H100's 132, clusters of 4
    fill 120 at a time, and what is left over waits.
    """
    return 1 < splits <= largest and (splits == 2 or 4 * programs * splits <= 3 * processors)


# What the split decision weighs, measured on an H100: bytes per nanosecond that one program streams and that one
# multiprocessor's share of the memory is, and the nanoseconds that a key takes a program, and that merging partial
# results takes in a cluster and by a kernel of its own.
PROGRAM_RATE = 37.0
PROCESSOR_RATE = 23.5
KEY_NS = 4.0
CLUSTER_NS = 1250.0
MERGE_NS = 3000.0
MIN_SPLIT = 64  # keys; a split reads at least a tile


def split_count(programs: int, bound: int, key_bytes: int, processors: int, largest: int = 0) -> int:
    """Into how many parts the keys of a row are split so that few rows fill the chip; 1 = no split.

    Args:
        programs: programs of an unsplit launch.
        bound: host bound on the keys of a row.
        key_bytes: bytes of one key and its value.
        processors: multiprocessors of the device.
        largest: number of programs of a cluster; 0 where there are none.
    """
    row_ns = bound * (key_bytes / PROGRAM_RATE + KEY_NS)
    stream = programs * bound * key_bytes / (PROCESSOR_RATE * processors)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (2 * processors))
        merge = CLUSTER_NS if fits_clusters(programs, splits, processors, largest) else MERGE_NS
        return max(waves * row_ns / splits, stream) + (merge if splits > 1 else 0.0)

    return min((s for s in (1, 2, 4, 8, 16, MAX_SPLITS) if s == 1 or bound >= s * MIN_SPLIT), key=cost)
