"""What each schedule does for a call, counted from the sizes of the call. `nsa/gpu.py` stores what a unit of it costs.

The tiles and splits are those of an H100 without a table, wherever the call runs, because the costs were measured there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles as query_tiles
from nsa.kernels.shared.sizes import span_bucket
from nsa.kernels.union import tiles as union_tiles

NAMES = ("query_major", "key_major", "union")
REST = "rest"
"""A term of union's costs: of the time of the schedule that serves the rows without a union, their share of all rows."""

WIDE = 128  # head dims above this have other tiles
CAPABILITY, PROCESSORS, LARGEST_CLUSTER = 90, 132, 16  # of an H100
PLACES = 4  # of a sequence's queries, at which a union is estimated


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
    ragged: bool = False
    shared: float = 0.0  # the share of its blocks that a row has in common with the row before; the host cannot know it

    @property
    def kind(self) -> str:
        """Calls of a kind have costs of their own."""
        return ("wide" if max(self.D, self.Dv) > WIDE else "narrow") + ("_e4m3" if self.e4m3 else "")

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
        """Blocks that some row reads, of all sequences and KV heads, if a row draws at random what it does not share."""
        blocks = max(1.0, self.keys / self.block_size)
        drawn = self.mean_blocks * (1 + (self.queries - 1) * (1 - self.shared))
        return self.sequences * self.HKV * blocks * -math.expm1(-drawn / blocks)


def work(job: Job, schedule: str, skips: bool = False) -> dict[str, float]:
    """What a schedule does for a call, in millions unless the name says otherwise. ``_each``: what a program does in
    sequence, which decides the time of few programs.

    Args:
        schedule: of `NAMES`. Nothing is counted for union if no tile of it holds two tokens.
        skips: query-major serves the rows that unions leave, with the tiles of many rows.
    """
    if schedule == "query_major":
        return _query_major(job, skips)
    return _key_major(job) if schedule == "key_major" else _union(job)


def _query_major(job: Job, skips: bool) -> dict[str, float]:
    G, D, Dv, size, most = job.G, job.D, job.Dv, job.block_size, job.most_keys
    tile, splits, _ = query_tiles.tile_and_splits(
        None, CAPABILITY, PROCESSORS, 1 if job.e4m3 else 2, G, D, Dv, most, span_bucket(job.n, job.keys), job.rows,
        largest=LARGEST_CLUSTER, invariant=skips, block=size & -size,
    )  # fmt: skip
    width, programs = tile.BLOCK_D + tile.BLOCK_DV, job.rows * -(-G // tile.HEADS) * splits
    tiles = -(-most // (splits * tile.BLOCK_L))  # of a program
    read = programs / splits * job.mean_keys * width / 1e6
    return {
        "calls": 1.0,
        "numbers_each": tiles * tile.BLOCK_L * width / 1e6,
        "products_each": tiles * tile.BLOCK_L * width * tile.BLOCK_G / tile.num_warps / 1e6,
        "lookups_each": tiles * job.paged / 1e6,
        "programs": programs / 1e6,
        "numbers": read,
        "products": read * tile.BLOCK_G,
        "numbers_of_blocks": job.blocks_read * size * (D + Dv) / 1e6,
        "parts": programs * tile.HEADS * tile.BLOCK_DV * (splits > 1) / 1e6,
    }


def _key_major(job: Job) -> dict[str, float]:
    G, size, tokens, blocks = job.G, job.block_size, job.sequences * job.queries, job.sequences * job.keys / job.block_size
    walks, reads = key_tiles.walks(job.queries, job.keys, False), int(tokens * job.n / max(blocks, 1.0))
    tile = key_tiles.select(CAPABILITY, 2, G, job.D, job.Dv, size, None, walks, job.e4m3, reads)
    width, walked = tile.BLOCK_D + tile.BLOCK_DV, job.n * tile.walked // 16 / job.n
    entries = job.rows * job.mean_blocks * (1 - walked)
    units = tile.BLOCK_M // tile.HEADS  # entries of a step
    steps = (job.blocks_read + entries / units) * -(-G // tile.HEADS)
    each = -(-min(job.queries, tile.share) // units)  # the first block of a sequence is read by all of its queries
    loads = -(-size // tile.BLOCK_N)  # tiles of a block
    again = steps if loads > 1 else (job.blocks_read + entries / tile.share) * -(-G // tile.HEADS)
    return {
        "calls": 1.0,
        "tokens": tokens / 1e6,
        "blocks": blocks / 1e6,
        "entries": entries / 1e6,
        "steps": steps * loads / 1e6,
        "steps_each": each * loads / 1e6,
        "numbers_each": each * size * width / 1e6,
        "products": steps * tile.BLOCK_M * size * width / 1e6,
        "numbers_of_blocks": job.blocks_read * size * (job.D + job.Dv) / 1e6,
        "keys_in_pages": again * size * job.paged / 1e6,
        "parts": entries * G * job.Dv / 1e6,
        "parts_each": job.n * (1 - walked) / 1e6,
        "numbers_walked": job.rows * job.mean_keys * walked * width / 1e6,
    }


def _union(job: Job) -> dict[str, float]:
    tile = union_tiles.select(CAPABILITY, 2, job.G, job.D, job.Dv, job.n, job.block_size)
    if tile is None:
        return {}
    worth, tokens = union_tiles.worth(job.block_size), min(tile.TOKENS, job.queries)
    served = mean = most = 0.0  # the share of tiles that their unions serve; the blocks of a union
    for place in range(PLACES):
        seen = max(1.0, (job.keys - job.queries * (1 - (place + 0.5) / PLACES)) / job.block_size + 1)
        listed = min(job.n, seen)
        drawn = 1 + (tokens - 1) * (1 - job.shared)
        union = seen * (1 - (1 - listed / seen) ** drawn)
        if union * worth.cost <= tokens * listed * worth.gain * tile.HEADS:
            served, mean, most = served + 1 / PLACES, mean + union / PLACES, max(most, union)
    # The tokens of a tile must be of one sequence.
    within = 1.0 if job.sequences == 1 or job.queries % tile.TOKENS == 0 else max(0.0, 1 - (tile.TOKENS - 1) / job.queries)
    tiles, slots = -(-job.sequences * job.queries // tile.TOKENS) * job.HKV, tile.TOKENS * tile.SLOTS
    each = max(1.0, most * (within > 0) * job.block_size / tile.BLOCK_N)
    numbers = tiles * mean * within * job.block_size * (tile.BLOCK_D + tile.BLOCK_DV) / 1e6
    return {
        "calls": 1.0,
        "tiles": tiles / 1e6,
        "sorted": tiles * slots * math.log2(slots) / 1e6,
        "sorted_each": math.log2(slots) ** 2 / 1e6,
        "steps_each": each / 1e6,
        "products_each": each * tile.BLOCK_N * (tile.BLOCK_D + tile.BLOCK_DV) * tile.TOKENS * tile.HEADS / 1e6,
        "products": numbers * tile.TOKENS * tile.HEADS,
        "keys_in_pages": tiles * mean * within * job.block_size * job.paged / 1e6,
        REST: 1 - served * within,
    }


TERMS = {name: tuple(work(Job(1, 64, 64, 1, 8, 64, 64, 4, 16), name)) for name in NAMES}
"""The terms of the work of each schedule."""
