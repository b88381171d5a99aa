"""Which schedule is the fastest for a call: what each does for it (``nsa/work.py``) times what that costs on a GPU.

What a unit of work costs was fitted to the times of calls of drawn shapes (``nsa/tuning/costs.py``), and is stored in
the file of the GPU (``nsa/gpu.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch

from nsa import gpu
from nsa.call import Call
from nsa.kernels.shared import device
from nsa.kernels.shared.shape import E4M3, Shape, has_steps
from nsa.work import KEY_MAJOR, PROCESSORS, QUERY_MAJOR, REST, UNION, Job, capability_of, work

MARGIN = 1.03
"""How many times as fast as query-major another schedule must be, because query-major takes the least host time."""

REST_MARGIN = 1.05
"""Query-major serves the rows that unions leave if key-major is expected to take this many times as long, or more. With
1.0, prompts of 64/4 heads were 1 to 6% slower."""

# Costs are used for calls within these limits, because the drawn shapes lie within them.
DTYPES = (torch.float16, torch.bfloat16)
LEAST_BLOCKS, LEAST_KEYS = 4, 256  # of a row
BLOCK_SIZES = (16, 128)
MOST_GROUP = 32

OVERLAPS = 0.0, 0.5, 0.9
"""The shares of blocks that neighbours may have in common. The host takes the geometric mean of the times."""

Kind = Mapping[str, Mapping[str, float]]  # the costs of a kind of calls


def microseconds(costs: gpu.Costs, job: Job) -> dict[str, float]:
    """The time of a call by schedule, as far as there are costs of its kind.

    The host does not know how many blocks neighbours share, so it takes the geometric mean over `OVERLAPS`. A decode
    step has no neighbours.
    """
    of, overlaps = _costs_of(costs, job), OVERLAPS if job.queries > 1 else OVERLAPS[:1]
    server = rest(of, job)
    found = [times(of, job._replace(shared=overlap), server) for overlap in overlaps]
    return {name: math.prod(each[name] for each in found) ** (1 / len(found)) for name in found[0]}


def _costs_of(costs: gpu.Costs, job: Job) -> Kind:
    """The costs of a call's kind. If too few calls over fp8 were drawn to fit them, those of 16 bits."""
    return costs.kinds.get(job.kind) or costs.kinds.get(job._replace(e4m3=False).kind, {})


def times(of: Kind, job: Job, server: str | None = None) -> dict[str, float]:
    """The time of a call by schedule, whose rows share as many blocks as the job says.

    Args:
        server: :func:`rest` of the call, which no overlap changes; None: it is not known yet.
    """
    found = _without_union(of, job)
    counts = of_union(job, found, server or rest(of, job)) if UNION in of else {}
    return found | ({UNION: _sum(of[UNION], counts)} if counts else {})


def _without_union(of: Kind, job: Job) -> dict[str, float]:
    """The times of query-major and key-major, as far as there are costs of them."""
    return {name: _sum(of[name], work(job, name)) for name in (QUERY_MAJOR, KEY_MAJOR) if name in of}


def of_union(job: Job, others: Mapping[str, float], server: str) -> dict[str, float]:
    """The work of union, with the time of what serves its other rows; {} without a tile, or without costs of that.

    Args:
        others: times of the other schedules. server: the one that serves, by :func:`rest`.
    """
    counts = work(job, UNION)
    return counts | {REST: counts[REST] * others[server]} if counts and server in others else {}


def _sum(costs: Mapping[str, float], counts: Mapping[str, float]) -> float:
    return sum(cost * counts[name] for name, cost in costs.items())


def reason_if_fastest(call: Call, shape: Shape, device_name: str, schedule: str, *others: str) -> str | None:
    """The reason to take a schedule for a call with blocks; None if query-major or one of ``others`` is faster.

    Args:
        others: schedules that could serve the call too.

    Raises:
        ValueError: a file of measurements cannot be parsed. The text names it.
    """
    known = _known(call, shape, device_name)
    if known is None or fastest(*known, (schedule, *others)) != schedule:
        return None
    costs, _ = known
    text = f"{schedule} is expected to be the fastest, measured on {costs.provenance['gpu']}"
    return text if _own(costs, device_name) else f"{text} ({device_name} was not measured)"


def rest(of: Kind, job: Job) -> str:
    """The schedule that serves the rows that unions leave: query-major or key-major, as if these rows shared no block.

    Key-major serves them in a ragged batch whose steps query-major serves already. It also serves them if they are too
    few to fill half of an H100 with query-major's programs, one a row.
    """
    if job.steps or 2 * job.rows < PROCESSORS or not {*of} >= {QUERY_MAJOR, KEY_MAJOR}:
        return KEY_MAJOR
    alone = _without_union(of, job._replace(shared=0.0))
    return QUERY_MAJOR if alone[QUERY_MAJOR] * REST_MARGIN <= alone[KEY_MAJOR] else KEY_MAJOR


def rest_of(call: Call, shape: Shape, device_name: str) -> str:
    """:func:`rest` for a call with blocks. Raises as :func:`why`."""
    known = _known(call, shape, device_name)
    return KEY_MAJOR if known is None else rest(_costs_of(*known), known[1])


def _known(call: Call, shape: Shape, device_name: str) -> tuple[gpu.Costs, Job] | None:
    """The costs and the sizes of a call; None without costs, or for a call unlike all that were measured."""
    costs = measured(device_name)
    job = None if costs is None else job_of(call, shape)
    return None if costs is None or job is None else (costs, job)


def job_of(call: Call, shape: Shape) -> Job | None:
    """The sizes of a call; None if it is unlike all calls that were measured."""
    g, size, sequences = shape, call.block_size, max(shape.B, 1)
    # With `batch_invariant` the number of queries must not decide, because schedules round differently.
    if size is None or call.settings.batch_invariant or not call.settings.sel_triton_group:
        return None
    queries = g.tokens // sequences  # varlen: the mean
    if call.max_seqlen_q is not None and queries > 1:  # assumes one token for each other sequence
        queries = max(queries, min(call.max_seqlen_q, g.tokens - g.B + 1))
        sequences = max(1, round(g.tokens / queries))
    keys = g.S_kv // max(shape.B, 1) if g.packed else g.S_kv
    usual = call.q.dtype in DTYPES and g.n >= LEAST_BLOCKS and BLOCK_SIZES[0] <= size <= BLOCK_SIZES[1]
    long = g.bound is not None and g.bound >= LEAST_KEYS and 0 < queries <= keys
    if not (usual and long) or g.G > MOST_GROUP:
        return None
    kinds = g.page > 0, call.k.dtype == E4M3, has_steps(call, g)
    capability = capability_of(device.chip(call.q.device).capability, g.D, g.Dv)
    return Job(sequences, queries, keys, g.HKV, g.G, g.D, g.Dv, g.n, size, *kinds, capability)


@lru_cache(maxsize=4096)
def fastest(costs: gpu.Costs, job: Job, among: tuple[str, ...]) -> str:
    """The schedule that is expected to be the fastest, of query-major and those that could serve the call too."""
    expected = microseconds(costs, job).items()
    least = {name: us * (1 if name == QUERY_MAJOR else MARGIN) for name, us in expected}
    return min((name for name in least if name in (QUERY_MAJOR, *among)), key=least.__getitem__, default=QUERY_MAJOR)


def describe(device_name: str) -> str:
    """How schedules are chosen on a GPU, as a line for `python -m nsa`."""
    costs = measured(device_name)
    if costs is None:
        return "query-major, except for small blocks: costs were not measured"
    by = "" if _own(costs, device_name) else f" on {costs.provenance['gpu']}, not on this GPU,"
    return f"by costs; measured{by} {costs.provenance['date']}, {costs.provenance['shapes']}, {costs.path}"


def measured(device_name: str) -> gpu.Costs | None:
    """The costs of this GPU model, else those of the stand-in, else None. Raises ValueError as :func:`why`."""
    return gpu.measured(device_name).costs or gpu.measured(gpu.STAND_IN).costs


def _own(costs: gpu.Costs, device_name: str) -> bool:
    return costs.path.stem == gpu.device_slug(device_name)
