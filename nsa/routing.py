"""Chooses the implementation that serves a call, from metadata and settings. Nothing is read from the device.

The families of kernels (`nsa/kernels/families.py`) are asked in turn whether they pay. Small blocks gathers many blocks
of a few keys at a time. Query-major reads the selected keys anew for every query. Key-major reads a block once for all
queries that selected it, and merges partial results afterwards, which is faster for small groups and many queries.
Union reads a block once for a few neighbouring queries; the device decides for which of them, and key-major or
query-major serves the others. In calls of key-major and union, query-major serves the steps of a ragged batch: its
sequences of at most 8 queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from nsa import debug, gpu, overlap, settings
from nsa.call import TENSORS, Call
from nsa.kernels.families import BACKWARD, FAMILIES, OF_SCHEDULE, SERVES_ALL
from nsa.kernels.shared.errors import NO_MEMORY
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import E4M3, Shape
from nsa.torch_modes import forward_mode
from nsa.validate import check, check_rows

MIN_CAPABILITY = 80  # ten times the compute capability
PLAIN = ("sdpa", "reference")  # routes in plain PyTorch, which PyTorch can differentiate
E4M3_CAPABILITY = 89  # the first with an instruction that converts E4M3
MAX_PLANS = 4096


@dataclass(eq=False)
class Plan:
    """What will run for a call, and why."""

    shape: Shape
    route: str
    reason: str
    named: bool  # the caller named the backend: no fallback
    kernel: str = ""  # the key of a failure of the kernel; a string, because strings cache their hash
    backward: str = ""  # the key of a failure of the backward kernels
    fallback: str = "sdpa"
    sdpa_layout: str = "heads_as_queries"
    debug: bool = False  # `debug.wanted`
    unusual: bool = False  # `debug`, or the selection has one list for all KV heads
    family: Family = SERVES_ALL  # of the kernel, for Triton routes
    rows: str = ""  # the kind of rows that query-major reads, `ranges` or `blocks`
    extents: overlap.Extents | None = None  # of the call's tensors, if it has `out`
    instead: Plan | None = None  # what runs before the fallback if this kernel is broken
    launch: Any = None  # from the first call on: see `dispatch.attach`
    backward_launches: dict[int | None, Any] = field(init=False, default_factory=dict)  # see `backward.attach`


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
    """Why Triton cannot serve a call with queries of ``dtype`` and keys of ``keys``, or None if it can.

    ``no_triton``: the answer of :func:`why_not_triton`.
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
    given, call = call, call.with_lists()
    shape, current, device = check(call), call.settings, call.q.device
    fallback = "sdpa" if current.use_sel_pack else "reference"
    device_name, layout, no_triton = _device_facts(device)
    why_not = obstacle(call.q.dtype, device, no_triton, call.k.dtype) or _without_memory(call)
    kernel, why_kernel = choose(call, shape, device_name)

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
        if shape.bound is not None and shape.bound < min_L:
            route, reason = fallback, f"rows select at most {shape.bound} keys, sel_triton_min_L is {min_L}"
        else:
            route, reason = kernel, why_kernel or "rows are long enough for Triton"
    # Calls with a cache have their own kernels, for each page size and for a cache of fp8.
    cache = None if call.cache_seqlens is None else (call.page_size or 0, call.k.dtype)
    signature = device, call.q.dtype, shape.G, shape.D, shape.Dv, call.causal, shape.varlen, cache
    debugged = debug.wanted(current)
    chosen = Plan(
        shape, route, reason, call.backend != "auto", fallback=fallback, sdpa_layout=layout,
        backward=f"{BACKWARD.name} {call.block_size} {signature}",  # tiles depend on the block size (None: ranges)
        extents=overlap.extents(call), debug=debugged, unusual=debugged or call is not given,
    )  # fmt: skip
    plans: Plan | None = None
    family = OF_SCHEDULE[kernel]
    for server in reversed(FAMILIES[FAMILIES.index(family) :]):  # each plan has the next family's as its `instead`
        word = kernel if server is family else server.name
        rows = ("ranges" if call.block_size is None else "blocks") if word == SERVES_ALL.name else ""
        kind = rows or (f"{call.block_size}" if server.by_block_size else "")
        plans = replace(
            chosen, route=word, family=server, rows=rows, kernel=f"{word} {kind} {signature}", instead=plans
        )
    assert plans is not None
    return plans if route == kernel and not chosen.named else replace(plans, route=route, instead=None)


def choose(call: Call, shape: Shape, device_name: str | None) -> tuple[str, str | None]:
    """The schedule of a call, and the reason if a measurement decided it.

    A family's ``pays`` decides. Key-major and union compare expected times there (`nsa.schedules.fastest`).
    Without a GPU (``device_name`` None) no family is asked, and the one that serves every call is taken.
    """
    if call.schedule != "auto":
        return call.schedule, None
    for family in FAMILIES:
        why = None if device_name is None else family.pays(call, shape, device_name)
        if why is not None:
            return family.name, why
    return SERVES_ALL.schedule(call), None


def _device_facts(device: torch.device) -> tuple[str | None, str, str | None]:
    """``(name, layout of packed SDPA, why Triton cannot run there)`` of a device. The name is None for a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    layout = (threshold.sdpa_layout if threshold is not None else None) or "heads_as_queries"
    return name, layout, why_not_triton(device)


def _without_memory(call: Call) -> str | None:
    """Why kernels cannot read the tensors of a call, as far as their classes tell; None if kernels can."""
    plain = [x is None or x.__class__ in (torch.Tensor, torch.nn.Parameter) for x in call[:TENSORS]]
    return None if all(plain) or not plain[0] else NO_MEMORY  # q is not plain if only a plan is asked for


def make_rows_plan(call: Call) -> Plan:
    """The plan of a call on packed rows. It has no fallback.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check_rows`.
        RuntimeError: Triton cannot serve the call.
    """
    shape = check_rows(call)
    dtype, device = call.q.dtype, call.q.device
    why_not = obstacle(dtype, device, why_not_triton(device)) or _without_memory(call)
    if why_not is not None:
        raise RuntimeError(why_not)
    route = "per_head" if call.schedule == "per_head" else SERVES_ALL.name
    return Plan(shape, route, "packed rows", True, extents=overlap.extents(call))


def plan(call: Call, key: Any = None, make: Callable[[Call], Plan] = make_plan) -> Plan:
    """``make(call)``, remembered by ``key`` (``call.key()`` if None), so that a repeated call only pays a look-up.

    Raises:
        AttributeError: an argument that must be a tensor is not.
        ValueError, TypeError, RuntimeError: from ``make``.
    """
    key = call.key() if key is None else key
    remembered = _plans.get(key)
    if remembered is not None:
        return remembered
    made = make(call)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()  # most plans are of shapes that occurred once; the others are made again
    return _plans.setdefault(key, made)


def without_kernels(plan: Plan) -> Plan:
    """The plan of a transformed call, in plain PyTorch: its tensors have tangents, or no memory of their own.

    Raises:
        RuntimeError: the caller named Triton.
    """
    forward = forward_mode()
    if plan.route in PLAIN and (plan.named or not forward):
        return plan
    reason = "torch.func or forward-mode AD transforms the call, which Triton's kernels do not support"
    if plan.named:
        raise RuntimeError(f"backend='triton': {reason}")
    # Most SDPA kernels of PyTorch have no forward-mode derivative.
    return replace(plan, route="reference" if forward else plan.fallback, reason=reason, launch=None)
