"""Sizes that several families round alike. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

INT32_MAX = 2**31 - 1

MOST_HEADS = 65_535  # KV heads, where they are the second or third axis of a CUDA grid

MOST_KEYS = INT32_MAX - 256  # of a sequence: a tile that begins at the last key ends within int32

MOST_END = INT32_MAX - 128
"""The largest end of a sequence's last block. Kernels count the keys of that block in int32, also those past the
sequence's last key. The 128 keys that are left are for a tile that reaches past the block's end."""

SPAN_BUCKETS = (8, 16, 64)
"""How many spans a program may hold in registers. Rows with more than 64 are read in chunks of 64."""

STEPS = 8
"""Queries up to which a sequence of a ragged batch counts as a step: one new token, or a few speculative ones."""


class Worth(NamedTuple):
    """A tile is served by its union if the union has at most ``gain / cost`` blocks for each listed block."""

    cost: int
    gain: int


ALWAYS = Worth(0, 0)  # a union of any size


@lru_cache(maxsize=1024)
def next_power_of_2(x: int) -> int:
    """The smallest power of two that is not below ``x``."""
    return 1 << max(x - 1, 0).bit_length()


@lru_cache(maxsize=1024)
def padded(x: int) -> int:
    """Length of a tile's axis for ``x`` elements: the next power of two, and at least the 16 of tensor cores."""
    return max(16, next_power_of_2(x))


@lru_cache(maxsize=1024)
def span_bucket(n: int, S_kv: int) -> int:
    """Spans that a program holds at a time. A chunk counts its slots in int32, so enormous caches get fewer spans."""
    bucket = next((b for b in SPAN_BUCKETS if n <= b), SPAN_BUCKETS[-1])
    while bucket > 1 and bucket * S_kv >= 2**31 - 256:  # 256: a tile may reach past the last slot
        bucket //= 2
    return bucket


def end_of_blocks(S_kv: int, size: int) -> int:
    """Where the last block of ``S_kv`` keys ends."""
    return -(-S_kv // size) * size


def narrow(capability: int, itemsize: int, block_d: int, block_dv: int) -> bool:
    """Whether tiles can be those of head dims up to 128. In 16 bits a Hopper GPU also has room for keys of up to 256
    elements beside values of 128: NSA's paper has 192 and 128.
    """
    return block_dv <= 128 and (block_d <= 128 or (block_d <= 256 and capability == 90 and itemsize == 2))


def pairs(block_g: int, block_dv: int) -> bool:
    """Whether a kernel should read e4m3 values in pairs, where their strides allow it.

    A matrix instruction with operands in registers needs the values of consecutive keys side by side. Without pairs the
    kernel loads them from shared memory byte by byte. Tiles of 64 heads use `wgmma`, which reads shared memory itself.
    """
    return block_g < 64 and block_dv >= 32  # Triton 3.1 multiplies 16 columns or more


# --- lists of tiles of neighbouring tokens, made in passes ------------------------------------------------------------

LIST_BYTES = 64 << 20
"""Limit of the lists of one pass. Longer calls take several passes."""
LIST_PLACES = 16 << 20
"""Limit of the places of blocks, which decides how many programs make lists at a time."""
LIST_PROGRAMS = 1024


def tiles_at_once(tiles: int, tile_bytes: int) -> int:
    """How many of ``tiles`` one pass takes, if the lists of a tile have ``tile_bytes``."""
    return max(1, min(tiles, LIST_BYTES // max(tile_bytes, 1)))


def list_programs(tiles: int, places: int) -> int:
    """Programs that make the lists of ``tiles``, if each has so many places of blocks."""
    return max(1, min(tiles, LIST_PROGRAMS, LIST_PLACES // max(places, 1)))


# --- shared memory through which the programs of a cluster exchange results, see `clusters.py` ------------------------

BARRIER_BYTES = 16
PATTERN_BYTES = 1024  # period of the pattern of a swizzled tile in shared memory; PTX ISA 9.7.15.5.1


@lru_cache(maxsize=1024)
def merged_heads(heads: int, cluster: int) -> int:
    """Heads that each program of a cluster merges, padded to a power of two."""
    return next_power_of_2(-(-heads // max(cluster, 1)))


def box_bytes(heads: int, block_dv: int, cluster: int) -> int:
    """Bytes in which a program of a cluster receives all parts of its own heads, or lays out its part of all heads."""
    return cluster * merged_heads(heads, cluster) * (block_dv + 4) * 4


@lru_cache(maxsize=1024)
def exchange_bytes(heads: int, block_dv: int, cluster: int) -> int:
    """Shared memory that a program of a cluster needs beside its tiles.

    The tiles lie behind these bytes. Tensor cores that read tiles of 64 rows (``wgmma``) derive the swizzle pattern
    from the address, so the number of bytes is then a multiple of the pattern's period.
    """
    if not cluster:
        return 0
    total = BARRIER_BYTES + 2 * box_bytes(heads, block_dv, cluster)
    align = PATTERN_BYTES if next_power_of_2(heads) >= 64 else BARRIER_BYTES
    return -(-total // align) * align
