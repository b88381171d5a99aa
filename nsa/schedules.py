"""Which schedule is the fastest for a call: what each does for it, counted, times what that costs on a GPU.

The host knows the sizes of a call, but not which keys its rows select. From the sizes it counts work, such as the
numbers that rows read. What a unit of work costs was fitted to the times of calls of drawn shapes
(``nsa/tuning/costs.py``), and is stored in the file of the GPU (``nsa/gpu.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from nsa import gpu
from nsa.call import Call
from nsa.kernels.shared.shape import E4M3, Shape
from nsa.kernels.shared.sizes import next_power_of_2

STAND_IN = "NVIDIA H100 80GB HBM3"
"""The GPU whose costs are used on a GPU without costs of its own. A schedule changes the speed of a call, and its
result only by rounding."""

NAMES = ("query_major", "key_major", "union")
MARGIN = 1.03
"""How many times as fast as query-major another schedule must be, because query-major takes the least host time."""

# Costs are used for calls within these limits, because the drawn shapes lie within them.
DTYPES = (torch.float16, torch.bfloat16)
LEAST_BLOCKS, LEAST_KEYS = 4, 256  # of a row
BLOCK_SIZES = (16, 128)
MOST_GROUP = 32
WIDE = 128  # head dims above this have other tiles
TILE_ROWS = 64  # of key-major
APART, SHARED = "union_apart", "union_shared"
"""Union's costs if neighbouring queries share no blocks, and if they share nine of ten."""


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
        schedule: of `NAMES`; union is counted as key-major is.
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


def microseconds(costs: gpu.Costs, job: Job) -> dict[str, float]:
    """The time of a call by schedule, as far as there are costs of its kind."""
    of = costs.kinds.get(job.kind, {})
    found = {name: _sum(of[name], work(job, name)) for name in NAMES if name in of}
    if APART in of and SHARED in of:  # the host does not know which it will be, so it takes the mean
        apart, shared = (_sum(of[name], work(job, "union")) for name in (APART, SHARED))
        found["union"] = apart if job.queries == 1 else math.sqrt(apart * shared)
    return found


def _sum(costs: Mapping[str, float], counts: Mapping[str, float]) -> float:
    return sum(cost * counts[name] for name, cost in costs.items())


def why(call: Call, shape: Shape, device_name: str, schedule: str, *others: str) -> str | None:
    """The reason to take a schedule for a call with blocks; None if query-major or one of ``others`` is faster.

    Args:
        others: schedules that could serve the call too.

    Raises:
        ValueError: a file of measurements cannot be parsed. The text names it.
    """
    costs = measured(device_name)
    job = None if costs is None else job_of(call, shape)
    if costs is None or job is None or fastest(costs, job, (schedule, *others)) != schedule:
        return None
    text = f"{schedule} is expected to be the fastest, measured on {costs.provenance['gpu']}"
    return text if _own(costs, device_name) else f"{text} ({device_name} was not measured)"


def job_of(call: Call, shape: Shape) -> Job | None:
    """The sizes of a call; None if it is unlike all calls that were measured."""
    g, size, sequences = shape, call.block_size, max(shape.B, 1)
    # With `batch_invariant` the number of queries must not decide, because schedules round differently.
    if size is None or call.settings.batch_invariant or not call.settings.sel_triton_group:
        return None
    queries = g.tokens // sequences  # varlen: the mean
    if call.max_seqlen_q is not None and queries > 1:  # assumes one token for each other sequence
        queries = max(queries, min(call.max_seqlen_q, g.tokens - g.B + 1))
        sequences = max(1, g.tokens // max(queries, 1))
    keys = g.S_kv // max(shape.B, 1) if g.packed else g.S_kv
    usual = call.q.dtype in DTYPES and g.n >= LEAST_BLOCKS and BLOCK_SIZES[0] <= size <= BLOCK_SIZES[1]
    long = g.bound is not None and g.bound >= LEAST_KEYS and 0 < queries <= keys
    if not (usual and long) or g.G > MOST_GROUP:
        return None
    return Job(sequences, queries, keys, g.HKV, g.G, g.D, g.Dv, g.n, size, g.page > 0, call.k.dtype == E4M3)


@lru_cache(maxsize=4096)
def fastest(costs: gpu.Costs, job: Job, among: tuple[str, ...]) -> str:
    """The schedule that is expected to be the fastest, of query-major and those that could serve the call too."""
    times = microseconds(costs, job)
    least = {name: us * (1 if name == "query_major" else MARGIN) for name, us in times.items()}
    return min((name for name in least if name in (NAMES[0], *among)), key=least.__getitem__, default=NAMES[0])


def describe(device_name: str) -> str:
    """How schedules are chosen on a GPU, as a line for `python -m nsa`."""
    costs = measured(device_name)
    if costs is None:
        return "query-major everywhere: costs were not measured"
    by = "" if _own(costs, device_name) else f" on {costs.provenance['gpu']}, not on this GPU,"
    return f"by costs; measured{by} {costs.provenance['date']}, {costs.provenance['shapes']}, {costs.path}"


def measured(device_name: str) -> gpu.Costs | None:
    """The costs of this GPU model, else those of the stand-in, else None. Raises ValueError as :func:`why`."""
    return gpu.measured(device_name).costs or gpu.measured(STAND_IN).costs


def _own(costs: gpu.Costs, device_name: str) -> bool:
    return costs.path.stem == gpu.device_slug(device_name)
