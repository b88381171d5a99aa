"""Key-major as routing sees it: whether it serves a call, and from how many queries on it is faster.

The crossover, in queries, is measured (`pytest -m perf tests/perf/test_crossover.py --nsa-update-schedules`) and stored
in the GPU's file (`nsa/gpu.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from nsa import gpu
from nsa.call import Call
from nsa.kernels.key_major import tiles
from nsa.kernels.query_major.family import FAMILY as QUERY_MAJOR
from nsa.kernels.shared import sizes
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import RAGGED, Shape

STAND_IN = "NVIDIA H100 80GB HBM3"
"""The GPU whose crossover is used on a GPU without one. The crossover depends far more on the group size than on the
GPU, and a schedule changes the speed of a call, and its result only by rounding."""

# The crossover is used for calls within these limits. It was measured with 16 blocks of 64 keys a row.
DTYPES = (torch.float16, torch.bfloat16)
MIN_SLOTS = 4
BLOCK_SIZES = (16, 128)
MIN_BOUND = 512  # keys
MAX_HEAD_DIM = 128
CHUNK = 8  # at or above this many keys per query, a call is a chunk of a longer prompt, with a crossover of its own


class KeyMajor(Family):
    name = "key_major"
    schedules = ("key_major",)

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        # With `batch_invariant` the number of queries must not decide, because the two schedules round differently.
        if call.block_size is None or call.settings.batch_invariant or not call.settings.sel_triton_group:
            return None
        g, sequences = shape, max(shape.B, 1)
        queries = g.tokens // sequences  # per sequence (varlen: the mean), because sequences share no blocks
        if call.max_seqlen_q is not None and queries > 1:  # assumes one token for each other sequence
            queries = max(queries, min(call.max_seqlen_q, g.tokens - g.B + 1))
        S_kv = g.S_kv // sequences if g.packed else g.S_kv
        start = key_major_from(device_name, g.G, S_kv >= CHUNK * queries)
        if not takes_key_major(start, queries, call.q.dtype, g.n, call.block_size, g.bound, max(g.D, g.Dv)):
            return None
        if not tiles.pays(g.B, queries, S_kv, g.S_kv, g.HKV, g.n, call.block_size):
            return None
        return _why(device_name, g.G, start)

    def plan(self, call: Call, shape: Shape, schedule: str, skips: bool = False) -> Any:
        steps = QUERY_MAJOR.plan_steps(call, shape) if has_steps(call, shape) else None
        return import_module("nsa.kernels.key_major.plan").plan(call, shape, skips, steps)


FAMILY = KeyMajor()


def has_steps(call: Call, shape: Shape) -> bool:
    """Whether query-major serves the sequences of at most `STEPS` queries, which seldom share blocks: in a ragged batch
    with blocks.

    Not if the call must be ``batch_invariant``, because the number of sequences decides tiles; nor if ``max_seqlen_q``
    is so small that every sequence must have more than `STEPS` queries.
    """
    if shape.layout != RAGGED or call.block_size is None or call.settings.batch_invariant:
        return False
    return call.max_seqlen_q is None or shape.tokens <= (shape.B - 1) * call.max_seqlen_q + sizes.STEPS


def takes_key_major(
    start: int | None, tokens: int, dtype: torch.dtype, n: int, block_size: int, bound: int | None, head_dim: int
) -> bool:
    """Whether key-major is faster than query-major for a call with block indices.

    False for calls that are unlike those of the measurement: few slots, short rows or unusual block sizes (query-major
    reads little there), fp32 (products take longer than reads), or head dims above 128 (they have other tiles).

    Args:
        start: of :func:`key_major_from`. tokens: query positions of a sequence. n: block slots of a row.
        bound: the host's bound on the keys of a row. head_dim: the larger of D and Dv.
    """
    long = start is not None and tokens >= start and n >= MIN_SLOTS and bound is not None and bound >= MIN_BOUND
    return long and dtype in DTYPES and BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1] and head_dim <= MAX_HEAD_DIM


def key_major_from(device_name: str, G: int, chunk: bool = False) -> int | None:
    """Queries from which on key-major is faster on a GPU; None if it never is, or if no GPU was measured.

    ``chunk``: the queries are a chunk of a longer prompt. Raises ValueError if a file cannot be parsed.
    """
    schedule = measured(device_name)
    return None if schedule is None else schedule.start(G, chunk)


def _why(device_name: str, G: int, start: int | None) -> str:
    """The reason that `nsa.routes()` shows for key-major. It names no sizes, because calls are counted by reason."""
    schedule = measured(device_name)
    assert schedule is not None
    text = f"{start} queries or more with G = {G}: key-major is faster, measured on {schedule.provenance['gpu']}"
    return text if _own(schedule, device_name) else f"{text} ({device_name} was not measured)"


def describe(device_name: str) -> str:
    """When key-major is used on a GPU, as a line for `python -m nsa`."""
    schedule = measured(device_name)
    if schedule is None:
        return "query-major everywhere: key-major was not measured"
    text = f"{_starts(schedule.tokens)}; chunks of longer prompts: {_starts(schedule.chunk)}"
    by = "" if _own(schedule, device_name) else f" on {schedule.provenance['gpu']}, not on this GPU,"
    return f"{text}; measured{by} {schedule.provenance['date']}, {schedule.path}"


def _starts(table: Mapping[int, int | None]) -> str:
    pays = [f"{start} queries at G = {G}" for G, start in table.items() if start is not None]
    never = [str(G) for G, start in table.items() if start is None]
    text = f"key-major from {', '.join(pays)}" if pays else "query-major everywhere"
    return text + (f", never at G = {', '.join(never)}" if pays and never else "")


def _own(schedule: gpu.Crossover, device_name: str) -> bool:
    return schedule.path.stem == gpu.device_slug(device_name)


def measured(device_name: str) -> gpu.Crossover | None:
    """The crossover of this GPU model, else that of the stand-in, else None."""
    return gpu.measured(device_name).crossover or gpu.measured(STAND_IN).crossover
