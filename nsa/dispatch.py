"""Runs a planned call: launches its kernel, serves it by the fallback where that kernel is broken, counts routes.

A kernel that failed to compile or launch is remembered, by its compiled variants, and not tried again. An
implementation asked for by name never falls back: it raises.
"""

from __future__ import annotations

import errno
import importlib
import logging
import re
import subprocess
import time
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nsa import debug, guard
from nsa.call import Call
from nsa.kernels.key_major.tiles import DoesNotFit
from nsa.kernels.shared import errors
from nsa.plain import oracle, packed_sdpa
from nsa.routing import PLAIN, Plan

logger = logging.getLogger("nsa")

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


class RouteRecord(NamedTuple):
    """How often a route was taken for one reason."""

    route: str
    reason: str
    calls: int


Result = tuple[Tensor, Tensor | None]

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


@lru_cache(maxsize=1)
def failures() -> tuple[type[BaseException], ...]:
    """The errors compiling or launching a kernel raises. Nothing else is taken for a broken kernel."""
    # ImportError: no Triton here; RuntimeError: the MLIR pass manager and the driver; OSError and CalledProcessError:
    # the launcher's C compiler.
    return (*errors.compile_errors(), ImportError, RuntimeError, OSError, subprocess.CalledProcessError)


@lru_cache(maxsize=1)
def launch_errors() -> tuple[type[BaseException], ...]:
    """All after which another route serves a call: those of a broken kernel, and that the call does not fit."""
    return DoesNotFit, *failures()


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
            except DoesNotFit as misfit:
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
        raise DoesNotFit(why)


Planned = tuple[Any, Any]  # the module of a kernel's launcher, and how it launches the call


def attach(what: Plan, call: Call) -> Planned:
    """Work out how the call is launched, at the first call of a plan."""
    kernel: Any = importlib.import_module(f"nsa.kernels.{what.module}.plan")  # which imports Triton
    try:
        found = kernel, kernel.plan(call, what.dims.bound, what.route == "per_head")
    except DoesNotFit as error:
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
        o, lse = packed_sdpa.packed_sdpa(call, what.dims.bound, what.sdpa_layout)
    else:
        o, lse = oracle.selection_reference(call)
    return (o if call.out is None else call.out.copy_(o)), lse


def _run_debug(what: Plan, call: Call) -> Result:
    """Run with whatever the ``debug_*`` settings ask to have logged. Synchronizes."""
    current = call.settings
    if current.debug_shapes:
        named = call.named_tensors()
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    if current.debug_cache and call.cache_seqlens is not None:
        debug.report_cache(call)
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
