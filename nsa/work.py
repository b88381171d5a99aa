"""What each schedule does for a call, counted from the sizes of the call. `nsa/gpu.py` stores what a unit of it costs.

Tiles and splits are those of an H100 without a table, on every GPU, also for costs that a user measured. Only head dims
whose tiles are narrow on Hopper alone (`sizes.narrow`) are counted with the GPU's own tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nsa import gpu
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles as query_tiles
from nsa.kernels.shared import sizes
from nsa.kernels.shared.sizes import padded, span_bucket
from nsa.kernels.union import tiles as union_tiles

SCHEDULES = QUERY_MAJOR, KEY_MAJOR, UNION = "query_major", "key_major", "union"
"""The schedules that have costs."""

REST = "rest"
"""A term of union's costs: the share of rows without a union, times the time of the schedule that serves these."""

CAPABILITY, PROCESSORS = gpu.STAND_IN_CHIP
LARGEST_CLUSTER = 16  # of an H100
PLACES = 2  # of a sequence's queries, at which a union is estimated


class Job(NamedTuple):
    """The sizes that decide how long a call takes."""

    sequences: int
    queries: int  # of a sequence
    keys: int  # of a sequence
    HKV: int
    G: int
    D: int
    Dv: int
    n: int  # blocks of a row
    block_size: int
    paged: bool = False
    e4m3: bool = False
    steps: bool = False  # query-major serves short sequences of a ragged batch in a launch of its own
    capability: int = CAPABILITY  # see :func:`capability_of`
    shared: float = 0.0  # the share of its blocks that a row has in common with the row before; the host cannot know it

    @property
    def kind(self) -> str:
        """Calls of a kind have costs of their own."""
        narrow = sizes.narrow(self.capability, 2, padded(self.D), padded(self.Dv))
        return ("narrow" if narrow else "wide") + ("_e4m3" if self.e4m3 else "")

    @property
    def rows(self) -> int:
        return self.sequences * self.queries * self.HKV

    @property
    def most_keys(self) -> int:
        """Keys of the longest row."""
        return min(self.n * self.block_size, self.keys)

    @property
    def mean_keys(self) -> float:
        """Keys that a row reads on average, if the queries are the last of the sequence and attend causally."""
        most, first = self.most_keys, self.keys - self.queries + 1
        short = max(0, most - first + 1)  # queries with fewer keys behind them than a row may read
        return ((first + most) / 2 * short + most * (self.queries - short)) / self.queries

    @property
    def mean_blocks(self) -> float:
        return min(self.n, self.mean_keys / self.block_size + 1)

    @property
    def blocks_read(self) -> float:
        """Blocks that some row reads, of all sequences and KV heads. A row draws at random what it does not share."""
        blocks = max(1.0, self.keys / self.block_size)
        drawn = self.mean_blocks * (1 + (self.queries - 1) * (1 - self.shared))
        return self.sequences * self.HKV * blocks * -math.expm1(-drawn / blocks)

    @property
    def numbers_of_blocks(self) -> float:
        return self.blocks_read * self.block_size * (self.D + self.Dv) / 1e6


def capability_of(capability: int, D: int, Dv: int) -> int:
    """That of an H100, unless a GPU of this compute capability has tiles for other head dims (`sizes.narrow`)."""
    here, there = (sizes.narrow(of, 2, padded(D), padded(Dv)) for of in (capability, CAPABILITY))
    return CAPABILITY if here == there else capability


def work(job: Job, schedule: str) -> dict[str, float]:
    """What one of the `SCHEDULES` does for a call, in millions unless the name says otherwise; {} if it has no tile.

    ``_each`` counts the work of the longest program, or of the longest merge of a row, which decides the time of calls
    of few programs. A step is a tile of keys. Numbers and products are counted with head dims as long as those of
    tiles, except ``numbers_of_blocks``. ``_wgmma``, ``_mma``: products of tiles that use `wgmma`, and of tiles that do
    not. A term whose work changes gets another name, so that costs of the old work are not read (`nsa/gpu.py`).
    """
    return {QUERY_MAJOR: _query_major, KEY_MAJOR: _key_major, UNION: _union}[schedule](job)


def _query_major(job: Job) -> dict[str, float]:
    tile, splits, _ = query_tiles.tile_and_splits(
        None, job.capability, PROCESSORS, 1 if job.e4m3 else 2, job.G, job.D, job.Dv, job.most_keys,
        span_bucket(job.n, job.keys), job.rows, largest=LARGEST_CLUSTER, block=job.block_size & -job.block_size,
    )  # fmt: skip
    width, programs = tile.BLOCK_D + tile.BLOCK_DV, job.rows * -(-job.G // tile.HEADS)
    steps = -(-job.most_keys // (splits * tile.BLOCK_L))
    each = steps * tile.BLOCK_L * width / 1e6
    numbers = programs * job.mean_keys * width / 1e6
    return {
        "calls": 1.0,
        "steps_each": steps / 1e6,
        "steps_each_in_pages": steps * job.paged / 1e6,
        "numbers_each": each,
        "products_each": each * tile.BLOCK_G / tile.num_warps,
        "programs": programs * splits / 1e6,
        "steps_in_pages": programs * job.mean_keys / tile.BLOCK_L * job.paged / 1e6,
        "numbers": numbers,
        "products": numbers * tile.BLOCK_G,
        "numbers_of_blocks": job.numbers_of_blocks,
    }


def _key_major(job: Job) -> dict[str, float]:
    tokens, size, blocks = job.sequences * job.queries, job.block_size, job.sequences * job.keys / job.block_size
    walks, reads = key_tiles.walks(job.queries, job.keys, False), int(tokens * job.n / max(blocks, 1.0))
    tile = key_tiles.select(job.capability, 2, job.G, job.D, job.Dv, size, None, walks, job.e4m3, reads)
    width, units, loads = tile.BLOCK_D + tile.BLOCK_DV, tile.BLOCK_M // tile.HEADS, -(-size // tile.BLOCK_N)
    walked = (job.n * tile.walked // 16) / job.n  # the share of a row's blocks that the merge reads itself
    entries = job.rows * job.mean_blocks * (1 - walked)
    steps, shares = (job.blocks_read + entries / of for of in (units, tile.share))
    programs = -(-job.G // tile.HEADS)  # of a share
    each = -(-min(job.queries, tile.share) // units)  # all queries of a sequence may read its first block
    return {
        "calls": 1.0,
        "blocks": blocks / 1e6,
        "entries": entries / 1e6,
        "steps": steps * loads * programs / 1e6,
        "steps_each": each * loads / 1e6,
        "numbers_each": each * size * width / 1e6,
        "products": steps * tile.BLOCK_M * size * width * programs / 1e6,
        "numbers_of_blocks": job.numbers_of_blocks,
        "keys_in_pages": (shares if loads == 1 else steps) * size * job.paged * programs / 1e6,
        "parts": entries * job.G * job.Dv / 1e6,
        "parts_each": job.n * (1 - walked) / 1e6,
        "numbers_walked": job.rows * job.mean_keys * walked * width / 1e6,
    }


def _union(job: Job) -> dict[str, float]:
    tile = union_tiles.select(job.capability, 2, job.G, job.D, job.Dv, job.n, job.block_size)
    if tile is None:
        return {}
    (cost, gain), tokens = union_tiles.worth(job.block_size), min(tile.TOKENS, job.queries)
    unions = [0.0] * PLACES  # blocks of a union; 0 where it is not worth reading
    for i in range(PLACES):
        seen = (job.keys - job.queries * (1 - (i + 0.5) / PLACES)) / job.block_size + 1
        listed = min(job.n, seen)
        union = seen * (1 - (1 - listed / seen) ** (1 + (tokens - 1) * (1 - job.shared)))
        if union * cost <= tokens * listed * gain * tile.HEADS:
            unions[i] = union
    apart = job.sequences > 1 and job.queries % tile.TOKENS  # tiles of tokens of two sequences have no union
    whole = max(0.0, 1 - (tile.TOKENS - 1) / job.queries) if apart else 1.0
    tiles, slots = -(-job.sequences * job.queries // tile.TOKENS) * job.HKV, tile.TOKENS * tile.SLOTS
    each = max(1.0, max(unions) * (whole > 0) * job.block_size / tile.BLOCK_N)
    steps = tiles * whole * sum(unions) / PLACES * job.block_size / tile.BLOCK_N
    products = tile.BLOCK_N * (tile.BLOCK_D + tile.BLOCK_DV) * tile.TOKENS * tile.HEADS / 1e6  # of a step
    return {
        "calls": 1.0,
        "sorted": tiles * slots * math.log2(slots) / 1e6,
        "sorted_each": slots * math.log2(slots) ** 2 / 1e6,
        "steps_each": each / 1e6,
        "products_each_wgmma": each * products * tile.TMA,
        "products_each_mma": each * products * (not tile.TMA),
        "steps": steps / 1e6,
        "products_wgmma": steps * products * tile.TMA,
        "products_mma": steps * products * (not tile.TMA),
        REST: 1 - whole * sum(union > 0 for union in unions) / PLACES,
    }


TERMS = {name: tuple(work(Job(1, 64, 64, 1, 8, 64, 64, 4, 16), name)) for name in SCHEDULES}
"""The terms of the work of each schedule."""
