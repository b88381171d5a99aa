"""Which implementation serves a call, and why: decided from metadata and settings, never from what is on the device.

Two Triton kernels can serve block indices. Query-major reads the selected keys anew for every query. Key-major reads a
block once for all queries that selected it and merges partial results afterwards: that pays for small groups and many
queries. From how many queries on is measured (`pytest -m perf tests/perf/test_crossover.py --nsa-update-schedules`) and
stands in the GPU's file (`nsa/gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nsa import gpu, settings
from nsa.call import Call
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.torch_modes import forward_mode
from nsa.validate import Dims, check, check_rows

MIN_CAPABILITY = 80
PLAIN = ("sdpa", "reference")  # routes of plain torch, which differentiates them
MAX_PLANS = 4096

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


class Plan(NamedTuple):
    """What will run for a signature, and why."""

    dims: Dims
    route: str
    reason: str
    named: bool  # asked for by name: no fallback
    kernel: str  # what a broken kernel is remembered by; a string knows its hash
    fallback: str
    sdpa_layout: str
    debug: bool
    launches: dict[Any, Any]  # kernel module and launch, see `attach`, by what a sweep tries; None: no sweep
    backward: str  # what a broken backward kernel is remembered by
    backward_launches: dict[Any, Any]
    module: str = "query_major"  # of nsa.kernels, which serves the Triton routes
    tiles: Any = tiles  # the module that says which tiles a sweep forces on that kernel
    instead: Plan | None = None  # what serves where this kernel is broken, before the fallback does


_plans: dict[Any, Plan] = {}  # by the metadata of a call and the settings in force
settings.ON_RELOAD.append(_plans.clear)


@lru_cache(maxsize=64)
def why_not_triton(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``, or None if it can."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major * 10 + minor < MIN_CAPABILITY:
            return f"Triton route needs compute capability 8.0 or newer, {device} has {major}.{minor}"
        return None
    if device.type == "cpu" and settings.interpreter():
        return None
    return f"Triton route needs a CUDA device, got {device}"


def obstacle(dtype: torch.dtype, device: torch.device, no_triton: str | None) -> str | None:
    """Why Triton cannot serve such a call, or None; ``no_triton`` comes from :func:`why_not_triton`."""
    if dtype == torch.float64:
        return "Triton route takes float16, bfloat16 and float32, got float64"
    if no_triton is None and dtype == torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter computes bfloat16 wrong"
    return no_triton


def make_plan(call: Call) -> Plan:
    """Validate a call and choose its route. The forward and the backward pass share it.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check`.
        RuntimeError: ``backend="triton"`` where Triton cannot serve the call.
    """
    dims, current, device = check(call), call.settings, call.q.device
    fallback = "sdpa" if current.use_sel_pack else "reference"
    device_name, layout, no_triton = _device_facts(device)
    why_not = obstacle(call.q.dtype, device, no_triton)
    kernel, why_kernel = triton_route(call, dims, device_name)

    if call.backend == "triton":
        if why_not is not None:
            raise RuntimeError(f"backend='triton': {why_not}")
        route, reason = kernel, f"backend='triton' asked for{f'; {why_kernel}' if why_kernel else ''}"
    elif call.backend != "auto":
        route, reason = call.backend, f"backend={call.backend!r} asked for"
    elif current.force_parity:
        route, reason = "reference", "force_parity is set"
    elif not current.use_triton_sel:
        route, reason = fallback, "use_triton_sel is off"
    elif why_not is not None:
        route, reason = fallback, why_not
    else:
        min_L = current.sel_triton_min_L
        if min_L is None:
            min_L = gpu.DEFAULT_MIN_L if device_name is None else gpu.min_L_for(device_name)
        if dims.bound is not None and dims.bound < min_L:
            route, reason = fallback, f"rows select at most {dims.bound} keys, sel_triton_min_L is {min_L}"
        else:
            route, reason = kernel, why_kernel or "rows are long enough for Triton"
    # Caches have kernels of their own, one for each size of pages.
    cache = None if call.cache_seqlens is None else 0 if call.block_table is None else call.k.shape[1]
    signature = device, call.q.dtype, dims.G, dims.D, dims.Dv, call.causal, dims.varlen, cache
    chosen = Plan(
        dims=dims,
        route=route,
        reason=reason,
        named=call.backend != "auto",
        kernel=f"{kernel} {signature}",
        fallback=fallback,
        sdpa_layout=layout,
        debug=current.debug_timing or current.debug_compare or current.debug_shapes or current.debug_cache,
        launches={},
        # As key-major, it works by blocks of keys: a failure speaks of this block size only.
        backward=f"backward {call.block_size} {signature}",
        backward_launches={},
    )
    if kernel != "key_major":
        return chosen
    # Key-major's tiles are made of blocks: a failure speaks of this block size (None: of ranges) only.
    key_major = chosen._replace(
        module="key_major", tiles=key_tiles, kernel=f"key_major {call.block_size} {signature}"
    )
    if chosen.named or route != "key_major":
        return key_major
    spans = "ranges" if call.block_size is None else "blocks"
    return key_major._replace(instead=chosen._replace(route=spans, kernel=f"{spans} {signature}", launches={}))


def _device_facts(device: torch.device) -> tuple[str | None, str, str | None]:
    """``(name, packed SDPA layout, why Triton cannot run there)``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    layout = (threshold.sdpa_layout if threshold is not None else None) or "heads_as_queries"
    return name, layout, why_not_triton(device)


def traced_plan(call: Call) -> Plan:
    """The plan of a call that ``torch.compile`` traces through plain torch, asked for by name.

    A compiler can look up neither settings nor the device.
    """
    dims, route = check(call), call.backend
    return Plan(dims, route, "traced by torch.compile", True, "", route, "heads_as_queries", False, {}, "", {})


def make_rows_plan(call: Call) -> Plan:
    """The plan of a call on packed rows, which has no fallback.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check_rows`.
        RuntimeError: Triton cannot serve the call.
    """
    dims = check_rows(call)
    dtype, device = call.q.dtype, call.q.device
    why_not = obstacle(dtype, device, why_not_triton(device))
    if why_not is not None:
        raise RuntimeError(why_not)
    grouped = "dense_group" if call.cu_seqlens_k is None else "varlen_group"
    route = "per_head" if call.schedule == "per_head" else grouped
    return Plan(dims, route, "packed rows", True, "", "", "", False, {}, "", {})


def plan(call: Call, key: Any = None, make: Callable[[Call], Plan] = make_plan) -> Plan:
    """Remembered ``make(call)``: a repeated call pays a look-up of ``key``, ``call.key()`` unless given.

    Raises:
        AttributeError: what should be a tensor is none.
        ValueError, TypeError, RuntimeError: from ``make``.
    """
    key = call.key() if key is None else key
    found = _plans.get(key)
    if found is not None:
        return found
    made = make(call)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()  # shapes that come once: those in use are back at their next call
    return _plans.setdefault(key, made)


def without_kernels(what: Plan) -> Plan:
    """The plan of a call that is transformed: its tensors have no memory to launch a kernel on, or tangents.

    Raises:
        RuntimeError: Triton was asked for by name.
    """
    forward = forward_mode()
    if what.route in PLAIN and (what.named or not forward):
        return what
    reason = "torch.func or forward-mode AD transforms the call, which Triton's kernels do not know"
    if what.named:
        raise RuntimeError(f"backend='triton': {reason}")
    # Most of torch's SDPA kernels cannot be differentiated in forward mode.
    return what._replace(route="reference" if forward else what.fallback, reason=reason, launches={})


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
