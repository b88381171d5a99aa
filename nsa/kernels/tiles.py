"""Tile sizes: a pure function of what the host knows of a call. Imports no Triton.

The numbers come from sweeps on the GPUs named beside them; an architecture nobody swept gets the rules that follow
from its shared memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Shared memory one program may use, by compute capability; the smallest stands for an unknown one."""

SPAN_BUCKETS = (4, 16, 64)
"""Spans a program holds in registers at a time; rows with more are read in chunks of the largest."""

MAX_SPLITS = 32
MAX_HEADS = 64
"""Query heads one program holds; larger groups take several programs."""


class Tile(NamedTuple):
    """Compile-time choices of the forward kernel."""

    HEADS: int  # query heads of a program
    BLOCK_G: int  # HEADS padded to what the tensor cores take
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_L: int  # keys of a tile
    SPANS: int
    num_warps: int
    num_stages: int


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def span_bucket(n: int, S_kv: int) -> int:
    """Spans held at a time. Slots of a chunk are counted in int32, hence fewer spans over enormous caches."""
    bucket = next((b for b in SPAN_BUCKETS if n <= b), SPAN_BUCKETS[-1])
    while bucket > 1 and bucket * S_kv >= 2**31:
        bucket //= 2
    return bucket


def fill_bucket(programs: int, processors: int) -> int:
    """How well a launch fills the chip: 0 less than a program per multiprocessor, 1 a few, 2 four or more."""
    return 0 if programs < processors else 1 if programs < 4 * processors else 2


def _shape(itemsize: int, block_g: int, head_dim: int, spans: int, fill: int) -> tuple[int, int, int]:
    """``(BLOCK_L, num_warps, num_stages)`` before the bound and shared memory cut it.

    Swept on an H100 in bf16 at G = 8, D = 64 and 128 (CONTRIBUTING.md, "What was tried"): many rows want small tiles
    of one or two warps, so that a multiprocessor holds many programs; few rows want long tiles, so that one program
    keeps enough bytes in flight.
    """
    wide = head_dim > 64
    if itemsize > 2:
        return 32, 4, 2  # fp32 dots run on the CUDA cores: registers, not bandwidth, are short
    if block_g > 16 or head_dim > 128:
        return (64 if head_dim <= 128 else 32), 4, 3
    if fill == 2:
        return 16, 1 if spans == 1 else 2, 2 if wide else 3
    if fill == 1:
        return (32, 2 if spans == 1 else 4, 3) if wide else (64, 4, 3)
    return 128, 8 if wide and spans > 1 else 4, 3


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
) -> Tile:
    """Tile of the query-major forward kernel.

    Args:
        capability: compute capability times ten, 90 for sm_90.
        itemsize: bytes of an element of K.
        bound: host bound on the keys of a row (``S_kv`` where nothing better is known).
        spans: from :func:`span_bucket`; 1 for rows that read one span from its start.
        fill: from :func:`fill_bucket`.
        per_head: one head a program instead of the group.
        pipelined: whether loads may run ahead (``num_stages`` > 1).
    """
    heads = group_heads(G, per_head)
    block_g = max(16, next_power_of_2(heads))
    block_d, block_dv = max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))
    block_l, num_warps, stages = _shape(itemsize, block_g, max(block_d, block_dv), spans, fill)
    block_l = min(block_l, max(16, next_power_of_2(bound)))
    stages = stages if pipelined else 1
    key_bytes = (block_d + block_dv) * itemsize
    # Room for Q and the weights beside the tiles in flight.
    budget = SHARED_BYTES.get(capability, min(SHARED_BYTES.values())) - block_g * (block_d + block_l) * itemsize - 4096
    while stages > 2 and (stages - 1) * block_l * key_bytes > budget:
        stages -= 1
    while block_l > 16 and max(stages - 1, 1) * block_l * key_bytes > budget:
        block_l //= 2
    return Tile(heads, block_g, block_d, block_dv, block_l, spans, num_warps, stages)


def group_heads(G: int, per_head: bool) -> int:
    """Query heads of one program."""
    return 1 if per_head else min(G, MAX_HEADS)


# What the split decision weighs, measured on an H100: bytes per nanosecond that one program streams and that one
# multiprocessor's share of the memory is, and the nanoseconds that merging partial results costs.
PROGRAM_RATE = 37.0
PROCESSOR_RATE = 23.5
MERGE_NS = 4500.0
MIN_SPLIT = 64  # keys; a split reads at least a tile


def split_count(programs: int, bound: int, key_bytes: int, processors: int) -> int:
    """Into how many parts the keys of a row are split so that few rows fill the chip; 1 = no split.

    Args:
        programs: programs of an unsplit launch.
        bound: host bound on the keys of a row.
        key_bytes: bytes of one key and its value.
        processors: multiprocessors of the device.
    """
    row_bytes = bound * key_bytes
    stream = programs * row_bytes / (PROCESSOR_RATE * processors)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (2 * processors))
        return max(waves * row_bytes / splits / PROGRAM_RATE, stream) + (MERGE_NS if splits > 1 else 0.0)

    return min((s for s in (1, 2, 4, 8, 16, MAX_SPLITS) if s == 1 or bound >= s * MIN_SPLIT), key=cost)
