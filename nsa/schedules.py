"""From where the key-major kernel serves a prefill: measured per GPU, decided from shapes.

Query-major reads the selected keys anew for every query. Key-major reads a block once for all queries that selected it
and merges partial results afterwards: that pays for small groups and many queries. From how many queries on is measured
(`pytest -m perf tests/perf/test_crossover.py --nsa-update-schedules`) and stands in the GPU's file (`nsa/gpu.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa import gpu
from nsa.call import Call
from nsa.kernels.key_major import tiles as key_tiles
from nsa.validate import Dims

STAND_IN = "NVIDIA H100 80GB HBM3"
"""The GPU whose measurements serve one that nobody measured: the crossover moves with the group size far more than with
the GPU, and a schedule changes how fast a call is, not its result."""

DTYPES = (torch.float16, torch.bfloat16)
# Where the measured crossover says something about a call: it was measured with 16 blocks of 64.
MIN_SLOTS = 4
BLOCK_SIZES = (16, 128)
MIN_BOUND = 512  # keys
MAX_HEAD_DIM = 128
CHUNK = 8
"""Times as many keys as queries from which on a call is a chunk of a longer prompt, which was measured by itself."""


def triton_route(call: Call, dims: Dims, device_name: str | None) -> tuple[str, str | None]:
    """Which of Triton's routes serves a call, and why where a measurement chose it.

    Args:
        device_name: of the GPU, as CUDA names it; None where there is none, and key-major runs only if named.
    """
    if call.schedule in ("key_major", "per_head"):
        return call.schedule, None
    if call.schedule == "auto" and not call.settings.sel_triton_group:
        return "per_head", None
    if call.block_size is None:
        return "ranges", None
    # How many queries share a call must not decide what runs where it must not change a result.
    if call.schedule == "auto" and device_name is not None and not call.settings.batch_invariant:
        queries = dims.tokens // max(dims.B, 1)  # of a sequence, or their mean: only those may share a block
        S_kv = dims.S_kv // max(dims.B, 1) if dims.varlen else dims.S_kv
        start = key_major_from(device_name, dims.G, S_kv >= CHUNK * queries)
        usual = takes_key_major(start, queries, call.q.dtype, dims.n, call.block_size, dims.bound, max(dims.D, dims.Dv))
        if usual and key_tiles.pays(dims.B, queries, S_kv, dims.S_kv, dims.HKV, dims.n, call.block_size):
            return "key_major", _why(device_name, dims.G, start)
    return "blocks", None


def takes_key_major(
    start: int | None, tokens: int, dtype: torch.dtype, n: int, block_size: int, bound: int | None, head_dim: int
) -> bool:
    """Whether a call with block indices is one that key-major serves faster.

    Args:
        start: queries from which on it is faster for calls of this group size; None: never.
        tokens: query positions of a sequence.
        n: block slots of a row. block_size: keys of a block.
        bound: what the host knows of the keys of a row, None for nothing. head_dim: the larger of D and Dv.

    Few slots, short rows and odd block sizes are nobody's measurement: query-major reads little there. In fp32 the
    products, not the reads, take the time. Head dims above 128 have tiles of their own, which nobody has timed.
    """
    enough = n >= MIN_SLOTS and bound is not None and bound >= MIN_BOUND
    usual = dtype in DTYPES and BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1]
    return start is not None and tokens >= start and enough and usual and head_dim <= MAX_HEAD_DIM


def key_major_from(device_name: str, G: int, chunk: bool = False) -> int | None:
    """Queries from which on key-major is faster on a GPU, as CUDA names it; None: never, or nobody measured any GPU.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    schedule = measured(device_name)
    return None if schedule is None else schedule.start(G, chunk)


def _why(device_name: str, G: int, start: int | None) -> str:
    """The reason that `nsa.routes()` shows of a call served by key-major. Without its size: reasons are counted."""
    schedule = measured(device_name)
    assert schedule is not None
    text = f"{start} queries or more with G = {G}: key-major is faster, measured on {schedule.provenance['gpu']}"
    return text if _own(schedule, device_name) else f"{text} (nobody measured {device_name})"


def describe(device_name: str) -> str:
    """From where key-major is used on a GPU, in a line for people."""
    schedule = measured(device_name)
    if schedule is None:
        return "query-major everywhere: nobody measured key-major"
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
    """What was measured on this GPU model, else on the stand-in; None where there is neither.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    return gpu.measured(device_name).crossover or gpu.measured(STAND_IN).crossover
