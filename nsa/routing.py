"""Chooses the implementation that serves a call, from metadata and settings. Nothing is read from the device.

Three Triton kernels can serve block indices. Query-major reads the selected keys anew for every query. Key-major reads
a block once for all queries that selected it, and merges partial results afterwards, which is faster for small groups
and many queries. Union reads a block once for a few neighbouring queries; the device decides for which of them, and
key-major serves the others. In calls of either, query-major serves the steps of a ragged batch: its sequences of at
most 8 queries. The crossover, in queries, is measured (`pytest -m perf tests/perf/test_crossover.py
--nsa-update-schedules`) and stored in the GPU's file (`nsa/gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from nsa import gpu, overlap, settings
from nsa.call import Call
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared.errors import NO_MEMORY
from nsa.kernels.union import tiles as union_tiles
from nsa.torch_modes import forward_mode
from nsa.validate import E4M3, Dims, check, check_rows

MIN_CAPABILITY = 80  # ten times the compute capability
PLAIN = ("sdpa", "reference")  # routes in plain PyTorch, which PyTorch can differentiate
E4M3_CAPABILITY = 89  # the first with an instruction that converts E4M3
MAX_PLANS = 4096
FAMILIES = ("key_major", "union")
"""The schedules that are kernel families of their own; `query_major` serves all other routes."""

STAND_IN = "NVIDIA H100 80GB HBM3"
"""The GPU whose crossover is used on a GPU without one. The crossover depends far more on the group size than on the
GPU, and a schedule changes the speed of a call, and its result only by rounding."""

# The crossover is used for calls within these limits. It was measured with 16 blocks of 64 keys a row.
DTYPES = (torch.float16, torch.bfloat16)
MIN_SLOTS = 4
BLOCK_SIZES = (16, 128)
MIN_BOUND = 512  # keys
MAX_HEAD_DIM = 128
UNION_GROUPS = range(4, 33)  # smaller groups leave a tile's rows empty, larger ones fill it with one token
CHUNK = 8  # at or above this many keys per query, a call is a chunk of a longer prompt, with a crossover of its own


@dataclass(eq=False)
class Plan:
    """What will run for a call, and why."""

    dims: Dims
    route: str
    reason: str
    named: bool  # the caller named the backend: no fallback
    kernel: str = ""  # the key of a failure of the kernel; a string, because strings cache their hash
    backward: str = ""  # the key of a failure of the backward kernels
    fallback: str = "sdpa"
    sdpa_layout: str = "heads_as_queries"
    debug: bool = False  # a `debug_*` setting is on
    module: str = "query_major"  # of nsa.kernels, for Triton routes
    extents: overlap.Extents | None = None  # of the call's tensors, if it has `out`
    instead: Plan | None = None  # what runs before the fallback if this kernel is broken
    launch: Any = None  # from the first call on: see `dispatch.attach`
    backward_launch: Any = None


_plans: dict[Any, Plan] = {}  # by `Call.key`
forget = _plans.clear
settings.ON_RELOAD.append(forget)


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


@lru_cache(maxsize=64)
def why_not_e4m3(device: torch.device) -> str | None:
    """Why Triton's kernels cannot read a cache of ``E4M3`` on ``device``, or None if they can."""
    text = "Triton route reads float8_e4m3fn on NVIDIA GPUs of compute capability 8.9 or newer"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return f"{text}, {device} is an AMD GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{text}, {device} has {major}.{minor}" if major * 10 + minor < E4M3_CAPABILITY else None


def obstacle(
    dtype: torch.dtype, device: torch.device, no_triton: str | None, keys: torch.dtype | None = None
) -> str | None:
    """Why Triton cannot serve a call, or None if it can.

    Args:
        dtype: of the queries.
        no_triton: the answer of :func:`why_not_triton`.
        keys: dtype of the keys, if it may differ.
    """
    if dtype == torch.float64:
        return "Triton route takes float16, bfloat16 and float32, got float64"
    if no_triton is None and dtype == torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter computes bfloat16 wrong"
    if no_triton is None and keys == E4M3:
        return why_not_e4m3(device)
    return no_triton


def make_plan(call: Call) -> Plan:
    """Validate a call and choose its route, for the forward and the backward pass.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check`.
        RuntimeError: ``backend="triton"`` where Triton cannot serve the call.
    """
    dims, current, device = check(call), call.settings, call.q.device
    fallback = "sdpa" if current.use_sel_pack else "reference"
    device_name, layout, no_triton = _device_facts(device)
    why_not = obstacle(call.q.dtype, device, no_triton, call.k.dtype) or _without_memory(call)
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
    # Calls with a cache have their own kernels, for each page size and for a cache of fp8.
    cache = None if call.cache_seqlens is None else (call.page_size or 0, call.k.dtype)
    signature = device, call.q.dtype, dims.G, dims.D, dims.Dv, call.causal, dims.varlen, cache
    chosen = Plan(
        dims=dims,
        route=route,
        reason=reason,
        named=call.backend != "auto",
        kernel=f"{kernel} {signature}",
        # The tiles of key-major and of the backward kernels depend on the block size (None: ranges). A failure of such
        # a kernel says nothing about other block sizes.
        backward=f"backward {call.block_size} {signature}",
        fallback=fallback,
        sdpa_layout=layout,
        extents=overlap.extents(call),
        debug=current.debug_timing or current.debug_compare or current.debug_shapes or current.debug_cache,
    )
    if kernel not in FAMILIES:
        return chosen
    spans = "ranges" if call.block_size is None else "blocks"
    others = {"union": ("key_major", spans), "key_major": (spans,)}[kernel]
    served_by: Plan | None = None
    for name in (*reversed(others), kernel):
        here = replace(chosen, route=name, kernel=f"{name} {signature}", instead=served_by)
        if name in FAMILIES:
            here = replace(here, module=name, kernel=f"{name} {call.block_size} {signature}")
        served_by = here
    assert served_by is not None
    return served_by if route == kernel and not chosen.named else replace(served_by, route=route, instead=None)


def _device_facts(device: torch.device) -> tuple[str | None, str, str | None]:
    """``(name, layout of packed SDPA, why Triton cannot run there)`` of a device. The name is None for a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    layout = (threshold.sdpa_layout if threshold is not None else None) or "heads_as_queries"
    return name, layout, why_not_triton(device)


def _without_memory(call: Call) -> str | None:
    """Why kernels cannot read the tensors of a call, as far as their classes tell; None if kernels can."""
    plain = [x is None or x.__class__ in (torch.Tensor, torch.nn.Parameter) for x in call.tensors]
    return None if all(plain) or not plain[0] else NO_MEMORY  # q is not plain if only a plan is asked for


def traced_plan(call: Call) -> Plan:
    """The plan of a call that names a backend of plain PyTorch, and that ``torch.compile`` traces.

    Settings and the device's name are not used, because a compiler cannot look them up.
    """
    return Plan(check(call), call.backend, "traced by torch.compile", True, fallback=call.backend)


def make_rows_plan(call: Call) -> Plan:
    """The plan of a call on packed rows. It has no fallback.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check_rows`.
        RuntimeError: Triton cannot serve the call.
    """
    dims = check_rows(call)
    dtype, device = call.q.dtype, call.q.device
    why_not = obstacle(dtype, device, why_not_triton(device)) or _without_memory(call)
    if why_not is not None:
        raise RuntimeError(why_not)
    grouped = "dense_group" if call.cu_seqlens_k is None else "varlen_group"
    route = "per_head" if call.schedule == "per_head" else grouped
    return Plan(dims, route, "packed rows", True, extents=overlap.extents(call))


def plan(call: Call, key: Any = None, make: Callable[[Call], Plan] = make_plan) -> Plan:
    """``make(call)``, remembered by ``key``, so that a repeated call only pays a look-up.

    Args:
        key: ``call.key()`` if None.

    Raises:
        AttributeError: an argument that must be a tensor is not.
        ValueError, TypeError, RuntimeError: from ``make``.
    """
    key = call.key() if key is None else key
    found = _plans.get(key)
    if found is not None:
        return found
    made = make(call)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()  # most plans are of shapes that occurred once; the others are made again
    return _plans.setdefault(key, made)


def without_kernels(what: Plan) -> Plan:
    """The plan of a transformed call, in plain PyTorch: its tensors have tangents, or no memory of their own.

    Raises:
        RuntimeError: the caller named Triton.
    """
    forward = forward_mode()
    if what.route in PLAIN and (what.named or not forward):
        return what
    reason = "torch.func or forward-mode AD transforms the call, which Triton's kernels do not support"
    if what.named:
        raise RuntimeError(f"backend='triton': {reason}")
    # Most SDPA kernels of PyTorch have no forward-mode derivative.
    return replace(what, route="reference" if forward else what.fallback, reason=reason, launch=None)


def triton_route(call: Call, dims: Dims, device_name: str | None) -> tuple[str, str | None]:
    """The Triton route of a call, and the reason if a measurement decided it.

    Args:
        device_name: the GPU, as CUDA names it. None without a GPU; key-major then runs only if the caller names it.
    """
    if call.schedule in ("key_major", "union", "per_head"):
        return call.schedule, None
    if call.schedule == "auto" and not call.settings.sel_triton_group:
        return "per_head", None
    if call.block_size is None:
        return "ranges", None
    # With `batch_invariant` the number of queries must not decide, because the two schedules round differently.
    if call.schedule == "auto" and device_name is not None and not call.settings.batch_invariant:
        queries = dims.tokens // max(dims.B, 1)  # per sequence (varlen: the mean), because sequences share no blocks
        if call.max_seqlen_q is not None and queries > 1:  # assumes one token for each other sequence
            queries = max(queries, min(call.max_seqlen_q, dims.tokens - dims.B + 1))
        S_kv = dims.S_kv // max(dims.B, 1) if dims.varlen and call.cache_seqlens is None else dims.S_kv
        start = key_major_from(device_name, dims.G, S_kv >= CHUNK * queries)
        taken = takes_key_major(start, queries, call.q.dtype, dims.n, call.block_size, dims.bound, max(dims.D, dims.Dv))
        if taken and key_tiles.pays(dims.B, queries, S_kv, dims.S_kv, dims.HKV, dims.n, call.block_size):
            union = dims.G in UNION_GROUPS and union_tiles.fits(dims.S_kv, call.block_size)
            union = union and call.k.dtype == call.q.dtype
            why = _why(device_name, dims.G, start)
            return ("union", f"{why}; union serves neighbours that share blocks") if union else ("key_major", why)
    return "blocks", None


def takes_key_major(
    start: int | None, tokens: int, dtype: torch.dtype, n: int, block_size: int, bound: int | None, head_dim: int
) -> bool:
    """Whether key-major is faster than query-major for a call with block indices.

    False for calls that are unlike those of the measurement: few slots, short rows or unusual block sizes (query-major
    reads little there), fp32 (products take longer than reads), or head dims above 128 (they have other tiles).

    Args:
        start: queries from which on key-major is faster for the call's group size; None: never.
        tokens: query positions of a sequence.
        n: block slots of a row.
        block_size: keys of a block.
        bound: the host's bound on the keys of a row; None: unknown.
        head_dim: the larger of D and Dv.
    """
    long = start is not None and tokens >= start and n >= MIN_SLOTS and bound is not None and bound >= MIN_BOUND
    return long and dtype in DTYPES and BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1] and head_dim <= MAX_HEAD_DIM


def key_major_from(device_name: str, G: int, chunk: bool = False) -> int | None:
    """Queries from which on key-major is faster on a GPU. None if it never is, or if no GPU was measured.

    Args:
        device_name: as CUDA names it.
        chunk: the queries are a chunk of a longer prompt.

    Raises:
        ValueError: a file of measurements cannot be parsed. The text names it.
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
    """The crossover of this GPU model, else that of the stand-in, else None.

    Raises:
        ValueError: as :func:`key_major_from`.
    """
    return gpu.measured(device_name).crossover or gpu.measured(STAND_IN).crossover
