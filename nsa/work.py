"""What each schedule does for a call, counted from the sizes of the call. `nsa/gpu.py` stores what a unit of it costs.

The host knows the sizes of a call, but not which keys its rows select.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nsa.kernels.shared.sizes import next_power_of_2

NAMES = ("query_major", "key_major", "union")
APART, SHARED = "union_apart", "union_shared"
"""Union's costs if neighbouring queries share no blocks, and if they share nine of ten."""

REST = "rest"
"""A term of union's costs: how much of the time of the schedule that serves rows without a union is added."""

WIDE = 128  # head dims above this have other tiles
TILE_ROWS = 64  # of key-major


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

    @property
    def kind(self) -> str:
        """Calls of a kind have costs of their own."""
        return ("wide" if max(self.D, self.Dv) > WIDE else "narrow") + ("_e4m3" if self.e4m3 else "")

    @property
    def mean_keys(self) -> float:
        """Keys that a row reads on average, if the queries are the last of the sequence and attend causally."""
        most, first = min(self.n * self.block_size, self.keys), self.keys - self.queries + 1
        short = max(0, most - first + 1)  # queries with fewer keys behind them than a row may read
        return ((first + most) / 2 * short + most * (self.queries - short)) / self.queries


def work(job: Job, schedule: str) -> dict[str, float]:
    """What a schedule does for a call, in millions unless the name says otherwise.

    Args:
        schedule: of `NAMES`; union is counted as key-major is. Its costs have the term `REST`, too, which is no work.
    """
    rows, width = job.sequences * job.queries * job.HKV, job.D + job.Dv
    read = rows * job.mean_keys / 1e6  # keys, of all rows
    if schedule == "query_major":
        idle = next_power_of_2(max(job.G, 16)) / 16 - 1  # sixteen heads are one tile of a tensor core
        return {
            "calls": 1.0,
            "keys_of_a_row": job.mean_keys,
            "keys": read,
            "numbers": read * width,
            "numbers_by_heads": read * width * idle,
            "blocks": rows * job.n / 1e6,
            "numbers_by_block_size": read * width / job.block_size,
            "numbers_by_heads_and_block_size": read * width * idle / job.block_size,
            "keys_in_pages_by_block_size": read / job.block_size * job.paged,
        }
    entries = rows * job.n * min(1.0, (job.mean_keys + job.block_size) / (job.n * job.block_size))
    blocks = max(1.0, job.sequences * job.HKV * job.keys / job.block_size)
    readers = entries / blocks
    some = blocks * -math.expm1(-readers)  # blocks with a reader, if readers were drawn at random
    tiles = some * math.ceil(max(1.0, entries / max(some, 1e-9)) * job.G / TILE_ROWS)
    return {
        "calls": 1.0,
        "doublings_of_entries": math.log2(max(entries, 2.0)),
        "entries": entries / 1e6,
        "entries_by_heads": entries * job.G / 1e6,
        "parts": entries * job.G * job.Dv / 1e6,
        "products": read * job.G * width,
        "numbers": read * width,
        "blocks": blocks / 1e6,
        "numbers_of_blocks": some * job.block_size * width / 1e6,
        "numbers_of_tiles": tiles * TILE_ROWS * job.block_size * width / 1e6,
    }


TERMS = {name: tuple(work(Job(1, 1, 1, 1, 1, 1, 1, 1, 1), name)) for name in (*NAMES[:2], APART, SHARED)}
TERMS |= {name: (*TERMS[name], REST) for name in (APART, SHARED)}
"""The terms of the work of each schedule that has costs."""
