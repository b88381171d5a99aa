"""Which implementation a call runs on: the route, the sticky fallback, and the log of both.

Decisions see metadata and settings only, never the device. A kernel that failed to compile or launch is remembered by
signature and not tried again. An implementation asked for by name never falls back: it raises.
"""

from __future__ import annotations

import errno
import importlib
import logging
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nsa import garbage, gpu, guard, reference, schedules, settings
from nsa.call import Call
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import errors
from nsa.transforms import forward_mode
from nsa.validate import Dims, check, check_rows

logger = logging.getLogger("nsa")

MIN_CAPABILITY = 80
PLAIN = ("sdpa", "reference")  # routes of plain torch, which differentiates them
# Texts of CUDA's driver for errors that say nothing about the kernel launched: memory is full, an earlier kernel broke
# the context, or a stream is being captured. Triton's errors have the text and no code.
OF_THE_DRIVER = frozenset((
    "out of memory",  # 2
    "an illegal memory access was encountered",  # 700
    "the launch timed out and was terminated",  # 702
    "device-side assert triggered",  # 710
    "an illegal instruction was encountered",  # 715
    "misaligned address",  # 716
    "unspecified launch failure",  # 719
    "operation not permitted when stream is capturing",  # 900
    "operation failed due to a previous error during capture",  # 901
    "operation would make the legacy stream depend on a capturing blocking stream",  # 906
))  # fmt: skip


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
_broken: dict[Any, str] = {}  # causes, by what `_suspect` says


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
    triton_route, why_triton = schedules.triton_route(call, dims, device_name)

    if call.backend == "triton":
        if why_not is not None:
            raise RuntimeError(f"backend='triton': {why_not}")
        route, reason = triton_route, f"backend='triton' asked for{f'; {why_triton}' if why_triton else ''}"
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
            route, reason = triton_route, why_triton or "rows are long enough for Triton"
    # Caches have kernels of their own, one for each size of pages.
    cache = None if call.cache_seqlens is None else 0 if call.block_table is None else call.k.shape[1]
    signature = device, call.q.dtype, dims.G, dims.D, dims.Dv, call.causal, dims.varlen, cache
    chosen = Plan(
        dims=dims,
        route=route,
        reason=reason,
        named=call.backend != "auto",
        kernel=f"{triton_route} {signature}",
        fallback=fallback,
        sdpa_layout=layout,
        debug=current.debug_timing or current.debug_compare or current.debug_shapes or current.debug_cache,
        launches={},
        # As key-major, it works by blocks of keys: a failure speaks of this block size only.
        backward=f"backward {call.block_size} {signature}",
        backward_launches={},
    )
    if triton_route != "key_major":
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
    return what._replace(route="reference" if forward else what.fallback, reason=reason, launches={})


@lru_cache(maxsize=1)
def failures() -> tuple[type[BaseException], ...]:
    """The errors compiling or launching a kernel raises. Nothing else is taken for a broken kernel."""
    # ImportError: no Triton here; RuntimeError: the MLIR pass manager and the driver; OSError and CalledProcessError:
    # the launcher's C compiler.
    return (*errors.compile_errors(), ImportError, RuntimeError, OSError, subprocess.CalledProcessError)


@lru_cache(maxsize=1)
def launch_errors() -> tuple[type[BaseException], ...]:
    """All after which another route serves a call: those of a broken kernel, and that the call does not fit."""
    return key_tiles.DoesNotFit, *failures()


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
    driver = re.match(r"Triton Error \[(?:CUDA|HIP)\]: (.*)", str(error))
    of_torch = str(error).startswith(("CUDA error: ", "HIP error: "))  # a plain RuntimeError before torch 2.8
    return not (of_torch or driver is not None and driver[1].strip() in OF_THE_DRIVER)


def _suspect(signature: str, planned: Planned | None) -> Any:
    """What a failure is remembered by: the compiled variants of a launch; before there is one, the signature."""
    return signature if planned is None else getattr(planned[1], "variants", signature)


def known_failure(signature: str, planned: Planned | None) -> str | None:
    """How such a launch failed in this process, if it did."""
    return _broken.get(_suspect(signature, planned)) if _broken else None


def remember(signature: str, planned: Planned | None, route: str, error: BaseException, server: str) -> str:
    """Note that a kernel is broken, say so once, and return the reason of all that ``server`` serves in its place.

    While a CUDA graph is captured nothing is remembered: compiling and loading kernels may be refused then.

    Raises:
        ``error``, where it says nothing about the kernel.
    """
    if not _is_kernel_failure(error):
        raise error
    cause = f"{route} kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return f"{cause} (under CUDA graph capture)"
    _broken[_suspect(signature, planned)] = cause
    logger.warning("%s; %s serves this signature from now on", cause, server)
    return cause


def count(route: str, reason: str) -> None:
    """Enter a call in the route log."""
    _taken[route, reason] += 1


def run(what: Plan, call: Call) -> Result:
    """Run a planned call."""
    if what.debug:
        return _run_debug(what, call)
    planned, error = what.launches.get(what.tiles.forced), None
    if planned is not None and not _broken:  # the shortest way, which most calls go
        try:
            result: Result = planned[0].forward(planned[1], call, what.route)
        except launch_errors() as raised:
            if what.named:
                raise
            error = raised
        else:
            if call.out is not None:
                _written(call.out)
            _taken[what.route, what.reason] += 1
            return result
    result, route, reason = _served(what, call, error)
    _taken[route, reason] += 1
    return result


def _served(what: Plan, call: Call, error: BaseException | None = None) -> tuple[Result, str, str]:
    """The result, the route that it took, and why. ``error``: of the launch, where that was tried already."""
    reason = what.reason
    if what.route in PLAIN:
        return plain(what.route, what, call), what.route, reason
    if what.named:
        return launch(what, call), what.route, reason
    while True:
        known = _broken.get(what.kernel) if _broken else None
        planned = what.launches.get(what.tiles.forced)
        if known is None:
            try:
                if error is not None:
                    raise error
                planned = planned or attach(what, call)
                known = known_failure(what.kernel, planned) if _broken else None
                if known is None:
                    return _launch(planned, what, call), what.route, reason
            except key_tiles.DoesNotFit as misfit:
                known = str(misfit)
            except failures() as failure:
                server = what.fallback if what.instead is None else what.instead.route
                known = remember(what.kernel, planned, what.route, failure, server)
        if what.instead is None:
            return plain(what.fallback, what, call), what.fallback, known
        what, reason, error = what.instead, known, None


class _Refusal:
    """In the place of a kernel, for calls that do not fit it."""

    @staticmethod
    def forward(why: str, *_: object) -> NoReturn:
        raise key_tiles.DoesNotFit(why)


Planned = tuple[Any, Any]  # the module of a kernel's launcher, and how it launches the call


def attach(what: Plan, call: Call) -> Planned:
    """Work out how the call is launched, at the first call of a plan."""
    kernel: Any = importlib.import_module(f"nsa.kernels.{what.module}.plan")  # which imports Triton
    try:
        found = kernel, kernel.plan(call, what.dims.bound, what.route == "per_head")
    except key_tiles.DoesNotFit as error:
        found = _Refusal, str(error)
    what.launches[what.tiles.forced] = found
    return found


def launch(what: Plan, call: Call) -> Result:
    """Launch the kernel of a planned call."""
    return _launch(what.launches.get(what.tiles.forced) or attach(what, call), what, call)


def _launch(planned: Planned, what: Plan, call: Call) -> Result:
    kernel, how = planned
    result: Result = kernel.forward(how, call, what.route)
    if call.out is not None:
        _written(call.out)
    return result


def _written(out: Tensor) -> None:
    """Tell autograd, which does not see a kernel write."""
    if not out.is_inference():
        increment_version(out)


def plain(route: str, what: Plan, call: Call) -> Result:
    """Packed SDPA or the reference."""
    if route == "sdpa":
        o, lse = reference.packed_sdpa(call, what.dims.bound, what.sdpa_layout)
    else:
        o, lse = reference.selection_reference(call)
    return (o if call.out is None else call.out.copy_(o)), lse


def _run_debug(what: Plan, call: Call) -> Result:
    """Run with whatever the ``debug_*`` settings ask to have logged. Synchronizes."""
    current = call.settings
    if current.debug_shapes:
        named = call.named_tensors()
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    if current.debug_cache and call.cache_seqlens is not None:
        garbage.report(call)
    _synchronize(call.q)
    began = time.perf_counter()
    result, route, reason = _served(what, call)
    _synchronize(call.q)
    count(route, reason)
    if current.debug_timing:
        elapsed = (time.perf_counter() - began) * 1e3
        logger.info("route %s (%s): %.3f ms, host and device", route, reason, elapsed)
    if current.debug_compare:
        exact = plain("reference", what, call._replace(return_lse=False, out=None))[0]
        count("reference", "debug_compare is set")
        error = (result[0].double() - exact.double()).abs()
        worst = error.max().item() if error.numel() else 0.0  # a debug setting: may read the device
        logger.info("route %s against the reference: max error %.3e", route, worst)
    return result


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
