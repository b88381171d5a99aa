"""Which implementation a call runs on: the route, the sticky fallback, and the log of both.

Decisions see metadata and settings only, never the device. A kernel that failed to compile or launch is remembered by
signature and not tried again. An implementation asked for by name never falls back: it raises.
"""

from __future__ import annotations

import errno
import importlib
import logging
import subprocess
import time
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import gpu, guard, reference, schedules, settings
from nsa.kernels import errors, tiles
from nsa.transforms import forward_mode
from nsa.validate import Dims, Raw, Signature, check, meta, optional, raw

logger = logging.getLogger("nsa")

MIN_CAPABILITY = 80
PLAIN = ("sdpa", "reference")  # routes of plain torch, which differentiates them
# A launch that reports one of these met memory that is full, or a context that an earlier kernel broke.
NOT_THE_KERNEL = (
    *("out of memory", "cuda error", "illegal memory access", "misaligned address", "illegal instruction"),
    *("launch failure", "device-side assert"),
)


class Call(NamedTuple):
    """The tensors and numbers of one call, in FlashAttention layout. They travel as a plain tuple, made in a tenth."""

    q: Tensor
    k: Tensor
    v: Tensor
    ranges: Tensor | None
    block_indices: Tensor | None
    block_size: int | None
    causal: bool
    q_positions: Tensor | None
    scale: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    return_lse: bool
    out: Tensor | None
    cache_seqlens: Tensor | None
    block_table: Tensor | None


_T = Tensor | None
Given = tuple[Tensor, Tensor, Tensor, _T, _T, int | None, bool, _T, float | None, _T, _T, bool, _T, _T, _T]
"""What a :class:`Call` holds, in its order."""


class Plan(NamedTuple):
    """What will run for a signature, and why."""

    dims: Dims
    route: str
    reason: str
    named: bool  # asked for by name: no fallback
    kernel: str  # what a broken kernel is remembered by; a string knows its hash
    per_head: bool
    pipelined: bool
    invariant: bool
    fallback: str
    sdpa_layout: str
    debug: bool
    launches: dict[Any, Any]  # kernel and launch, see `attach`, by what a sweep wants tried; None: no sweep
    backward: str  # what a broken backward kernel is remembered by
    backward_launches: dict[Any, Any]
    module: str = "query_major"  # of nsa.kernels, which serves the Triton routes
    instead: Plan | None = None  # what serves where this kernel is broken, before the fallback does


class RouteRecord(NamedTuple):
    """How often a route was taken for one reason."""

    route: str
    reason: str
    calls: int


Result = tuple[Tensor, Tensor | None]

MAX_PLANS = 4096

_plans: dict[Any, Plan] = {}  # by the metadata of a call and the settings in force
settings.ON_RELOAD.append(_plans.clear)
_taken: Counter[tuple[str, str]] = Counter()
_broken: dict[str, str] = {}


def routes() -> list[RouteRecord]:
    """What ran in this process and why, most frequent first. Names are those of ``spec``: ``ranges``, ``sdpa``, …"""
    return [RouteRecord(route, reason, calls) for (route, reason), calls in _taken.most_common()]


def reset() -> None:
    """Forget the route log and the failures of kernels: they are tried again. :mod:`nsa.guard` keeps its files."""
    _taken.clear()
    _broken.clear()
    guard.forget()


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


def make_plan(
    current: settings.Settings | None,
    q: Raw,
    k: Raw,
    v: Raw,
    ranges: Raw | None,
    block_indices: Raw | None,
    block_size: int | None,
    causal: bool,
    q_positions: Raw | None,
    cu_seqlens_q: Raw | None,
    cu_seqlens_k: Raw | None,
    max_selected: int | None,
    out: Raw | None,
    backend: str,
    schedule: str,
    cache_seqlens: Raw | None = None,
    block_table: Raw | None = None,
) -> Plan:
    """Validate the metadata of a call and choose its route. The forward and the backward pass share it.

    ``current`` is None while a compiler traces the call, which can look up neither settings nor the device: only plain
    torch, asked for by name, comes here then.

    Raises:
        ValueError, TypeError: from :func:`nsa.validate.check`.
        RuntimeError: ``backend="triton"`` where Triton cannot serve the call.
    """
    sig = Signature(
        meta(q), meta(k), meta(v), optional(ranges), optional(block_indices), block_size, causal, optional(q_positions),
        optional(cu_seqlens_q), optional(cu_seqlens_k), max_selected, optional(out), backend, schedule,
        optional(cache_seqlens), optional(block_table),
    )  # fmt: skip
    dims = check(sig)
    device = sig.q.device
    if current is None:
        route, reason = sig.backend, "traced by torch.compile"
        return Plan(dims, route, reason, True, "", False, True, False, route, "heads_as_queries", False, {}, "", {})
    fallback = "sdpa" if current.use_sel_pack else "reference"
    device_name, layout, no_triton = _device_facts(device)
    why_not = obstacle(sig.q.dtype, device, no_triton)
    triton_route, why_triton = schedules.triton_route(sig, dims, current, device_name)

    if sig.backend == "triton":
        if why_not is not None:
            raise RuntimeError(f"backend='triton': {why_not}")
        route, reason = triton_route, f"backend='triton' asked for{f'; {why_triton}' if why_triton else ''}"
    elif sig.backend != "auto":
        route, reason = sig.backend, f"backend={sig.backend!r} asked for"
    elif current.force_parity:
        route, reason = "reference", "force_parity is set"
    elif not current.use_triton_sel:
        route, reason = fallback, "use_triton_sel is off"
    elif why_not is not None:
        route, reason = fallback, why_not
    else:
        min_L = gpu.DEFAULT_MIN_L if current.sel_triton_min_L is None else current.sel_triton_min_L
        if device_name is not None:
            min_L = gpu.min_L_for(device_name)
        if dims.bound is not None and dims.bound < min_L:
            route, reason = fallback, f"rows select at most {dims.bound} keys, sel_triton_min_L is {min_L}"
        else:
            route, reason = triton_route, why_triton or "rows are long enough for Triton"
    # Caches have kernels of their own, one for each size of pages.
    cache = None if sig.cache_seqlens is None else 0 if sig.block_table is None else sig.k.shape[1]
    signature = device, sig.q.dtype, dims.G, dims.D, dims.Dv, sig.causal, dims.varlen, cache
    chosen = Plan(
        dims=dims,
        route=route,
        reason=reason,
        named=sig.backend != "auto",
        kernel=f"{triton_route} {signature}",
        per_head=triton_route == "per_head",
        pipelined=current.sel_triton_db,
        invariant=current.batch_invariant,
        fallback=fallback,
        sdpa_layout=layout,
        debug=current.debug_timing or current.debug_compare or current.debug_shapes,
        launches={},
        # As key-major, it works by blocks of keys: a failure speaks of this block size only.
        backward=f"backward {sig.block_size} {signature}",
        backward_launches={},
    )
    if triton_route != "key_major":
        return chosen
    # Key-major's tiles are made of blocks: a failure speaks of this block size (None: of ranges) only.
    key_major = chosen._replace(module="key_major", kernel=f"key_major {sig.block_size} {signature}")
    if chosen.named or sig.schedule != "auto" or route != "key_major":
        return key_major
    return key_major._replace(instead=chosen._replace(route="blocks", kernel=f"blocks {signature}", launches={}))


def _device_facts(device: torch.device) -> tuple[str | None, str, str | None]:
    """``(name, packed SDPA layout, why Triton cannot run there)``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    layout = (threshold.sdpa_layout if threshold is not None else None) or "heads_as_queries"
    return name, layout, why_not_triton(device)


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_selected: int | None,
    out: Tensor | None,
    backend: str,
    schedule: str,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Plan:
    """Remembered :func:`make_plan`: a repeated call pays a look-up.

    ``lru_cache`` would take half a microsecond more of every call: it hashes what is nested, and the type of each.

    Raises:
        AttributeError: what should be a tensor is none.
        ValueError, TypeError, RuntimeError: from :func:`make_plan`.
    """
    # Types, of those that may be of another: True == 1 == 1.0.
    key = (
        settings.get(), q.shape, q.dtype, q.device, q.stride(), k.shape, k.dtype, k.device, k.stride(),
        v.shape, v.dtype, v.device, v.stride(), None if ranges is None else raw(ranges),
        None if block_indices is None else raw(block_indices), block_size, block_size.__class__, causal,
        causal.__class__, None if q_positions is None else raw(q_positions),
        None if cu_seqlens_q is None else raw(cu_seqlens_q), None if cu_seqlens_k is None else raw(cu_seqlens_k),
        max_selected, max_selected.__class__, None if out is None else raw(out), backend, schedule,
        None if cache_seqlens is None else raw(cache_seqlens), None if block_table is None else raw(block_table),
    )  # fmt: skip
    found = _plans.get(key)
    if found is not None:
        return found
    made = make_plan(
        settings.get(), raw(q), raw(k), raw(v), _raw(ranges), _raw(block_indices), block_size, causal,
        _raw(q_positions), _raw(cu_seqlens_q), _raw(cu_seqlens_k), max_selected, _raw(out), backend, schedule,
        _raw(cache_seqlens), _raw(block_table),
    )  # fmt: skip
    if len(_plans) >= MAX_PLANS:
        _plans.clear()  # shapes that come once: those in use are back at their next call
    return _plans.setdefault(key, made)


def _raw(x: Tensor | None) -> Raw | None:
    return None if x is None else raw(x)


def transformed(what: Plan) -> Plan:
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
    return what._replace(route="reference" if forward else what.fallback, reason=reason)


@lru_cache(maxsize=1)
def failures() -> tuple[type[BaseException], ...]:
    """The errors compiling or launching a kernel raises. Nothing else is taken for a broken kernel."""
    # ImportError: no Triton here; RuntimeError: the MLIR pass manager and the driver; OSError and CalledProcessError:
    # the launcher's C compiler.
    return (*errors.compile_errors(), ImportError, RuntimeError, OSError, subprocess.CalledProcessError)


def _is_kernel_failure(error: BaseException) -> bool:
    """Whether a caught error speaks of the kernel. Out of memory does not, nor does a lost CUDA context."""
    if isinstance(error, guard.ProbeFailed):
        return True  # whatever its text says happened in another process
    if isinstance(error, RuntimeError) and type(error).__module__.startswith("torch"):
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        return False  # no memory, or no process, for the assembler or the launcher's C compiler
    if errors.starved(error):
        return False
    text = str(error).lower()
    return not (isinstance(error, RuntimeError) and any(words in text for words in NOT_THE_KERNEL))


def known_failure(kernel: str) -> str | None:
    """How a kernel failed in this process, if it did; ``kernel`` is what a :class:`Plan` remembers it by."""
    return _broken.get(kernel)


def remember(kernel: str, route: str, error: BaseException, server: str) -> str:
    """Note that a kernel is broken, say so once, and return the reason of all that ``server`` serves in its place.

    Raises:
        ``error``, where it says nothing about the kernel.
    """
    if not _is_kernel_failure(error):
        raise error
    cause = f"{route} kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"
    _broken[kernel] = cause
    logger.warning("%s; %s serves this signature from now on", cause, server)
    return cause


def count(route: str, reason: str) -> None:
    """Enter a call in the route log."""
    _taken[route, reason] += 1


def run(what: Plan, call: Given) -> Result:
    """Run a planned call."""
    if what.debug:
        return _run_debug(what, Call(*call))
    if what.route in PLAIN:
        return plain(what.route, what.reason, what, call)
    reason = what.reason
    if what.named:
        return _triton(reason, what, call)
    while True:
        known = _broken.get(what.kernel) if _broken else None
        if known is None:
            try:
                return _triton(reason, what, call)
            except failures() as error:
                server = what.fallback if what.instead is None else what.instead.route
                known = remember(what.kernel, what.route, error, server)
        if what.instead is None:
            return plain(what.fallback, known, what, call)
        what, reason = what.instead, known


def attach(
    launches: dict[Any, Any], q: Tensor, k: Tensor, v: Tensor, *, module: str = "query_major", **how: Any
) -> tuple[Any, Any]:
    """Remember in ``launches`` the kernel's module, which imports Triton, and what its ``launch_for`` says of calls."""
    kernel = importlib.import_module(f"nsa.kernels.{module}")
    found = launches[tiles.forced] = kernel, kernel.launch_for(q, k, v, **how)
    return found


def _triton(reason: str, what: Plan, call: Given) -> Result:
    (
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_seqlens_q, cu_seqlens_k, return_lse,
        out, cache_seqlens, block_table,
    ) = call  # fmt: skip
    selection = block_indices if ranges is None else ranges
    cache = {} if cache_seqlens is None else {"cache_seqlens": cache_seqlens, "block_table": block_table}
    kernel, launch = what.launches.get(tiles.forced) or attach(
        what.launches,
        q,
        k,
        v,
        module=what.module,
        selection=selection,
        block_size=block_size,
        causal=causal,
        q_positions=q_positions,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        bound=what.dims.bound,
        per_head=what.per_head,
        pipelined=what.pipelined,
        invariant=what.invariant,
        out=out,
        **cache,
    )
    result: Result = kernel.forward(
        launch, q, k, v, what.route, selection, q_positions, scale, cu_seqlens_q, cu_seqlens_k, return_lse, out, **cache
    )
    _taken[what.route, reason] += 1
    return result


def plain(route: str, reason: str, what: Plan, call: Given) -> Result:
    """Packed SDPA or the reference."""
    (
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_seqlens_q, cu_seqlens_k, return_lse,
        out, cache_seqlens, block_table,
    ) = call  # fmt: skip
    _taken[route, reason] += 1
    cu_seqlens = None if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    result: Tensor | tuple[Tensor, Tensor]
    if route == "sdpa":  # keywords are written out: gathered in a dict, they cost a microsecond
        result = reference.packed_sdpa(
            q, k, v, ranges=ranges, block_indices=block_indices, block_size=block_size, causal=causal,
            q_positions=q_positions, scale=scale, cu_seqlens=cu_seqlens, max_selected=what.dims.bound,
            return_lse=return_lse, layout=what.sdpa_layout, cache_seqlens=cache_seqlens, block_table=block_table,
        )  # fmt: skip
    else:
        result = reference.selection_reference(
            q, k, v, ranges=ranges, block_indices=block_indices, block_size=block_size, causal=causal,
            q_positions=q_positions, scale=scale, cu_seqlens=cu_seqlens, return_lse=return_lse,
            cache_seqlens=cache_seqlens, block_table=block_table,
        )  # fmt: skip
    o, lse = result if isinstance(result, tuple) else (result, None)
    return (o if out is None else out.copy_(o)), lse


def _run_debug(what: Plan, call: Call) -> Result:
    """Run with whatever the ``debug_*`` settings ask to have logged. Synchronizes."""
    current = settings.get()
    if current.debug_shapes:
        named = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    before = _taken.copy()
    _synchronize(call.q)
    began = time.perf_counter()
    result = run(what._replace(debug=False), call)
    _synchronize(call.q)
    route, reason = next(iter(_taken - before))
    if current.debug_timing:
        elapsed = (time.perf_counter() - began) * 1e3
        logger.info("route %s (%s): %.3f ms, host and device", route, reason, elapsed)
    if current.debug_compare:
        exact = plain("reference", "debug_compare is set", what, call._replace(return_lse=False, out=None))[0]
        error = (result[0].double() - exact.double()).abs()
        worst = error.max().item() if error.numel() else 0.0  # a debug setting: may read the device
        logger.info("route %s against the reference: max error %.3e", route, worst)
    return result


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
