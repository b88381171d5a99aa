"""Runs a planned call: launches its kernel, or the fallback if the kernel is broken, and counts routes.

A kernel that failed to compile or to launch is remembered by its compiled variants, and not tried again. If the caller
named a backend, there is no fallback, and errors are raised.
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

# Texts of driver errors that are not the kernel's fault: memory is full, an earlier kernel broke the context, or a
# stream is being captured. Comments give the codes, because Triton's errors contain only the texts.
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
    """How often calls took one route (`routes` lists the names) for one reason, since the process started."""

    route: str
    reason: str
    calls: int


Result = tuple[Tensor, Tensor | None]

_taken: Counter[tuple[str, str]] = Counter()
_broken: dict[Any, str] = {}  # causes of failures, by `_suspect`


def routes() -> list[RouteRecord]:
    """The routes that ran in this process, why, and how often; the most frequent first.

    Routes are ``dense_group``, ``varlen_group``, ``ranges``, ``blocks``, ``per_head``, ``key_major``, ``union``,
    ``backward``, ``sdpa`` and ``reference``.
    """
    return [RouteRecord(route, reason, calls) for (route, reason), calls in _taken.most_common()]


def reset() -> None:
    """Forget the route log and the failures of kernels, so that kernels are tried again. Files of `nsa.guard` stay."""
    _taken.clear()
    _broken.clear()
    guard.forget()


@lru_cache(maxsize=1)
def failures() -> tuple[type[BaseException], ...]:
    """The errors that compiling or launching a kernel may raise. No other error is caught.

    ImportError comes from a missing Triton, RuntimeError from the MLIR pass manager and the driver, OSError and
    CalledProcessError from the C compiler of Triton's launcher.
    """
    return (*errors.compile_errors(), ImportError, RuntimeError, OSError, subprocess.CalledProcessError)


def _is_kernel_failure(error: BaseException) -> bool:
    """Whether a caught error is the kernel's fault. Lack of memory and a lost CUDA context are not."""
    if isinstance(error, guard.ProbeFailed):
        return True  # decided first, because its text may quote a driver error of the child process
    if isinstance(error, RuntimeError) and type(error).__module__.startswith("torch"):
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        return False  # the system has no memory or process for the assembler or the C compiler
    if errors.starved(error):
        return False
    driver = re.match(r"Triton Error \[(?:CUDA|HIP)\]: (.*)", str(error))
    of_torch = str(error).startswith(("CUDA error: ", "HIP error: "))  # before 2.8 torch raises a plain RuntimeError
    return not (of_torch or driver is not None and driver[1].strip() in OF_THE_DRIVER)


def _suspect(signature: str, planned: Planned | None) -> Any:
    """The key of a failure in `_broken`: the compiled variants of the launch, or the signature before there are any."""
    return signature if planned is None else planned[2]


def known_failure(signature: str, planned: Planned | None) -> str | None:
    """The cause if this launch failed before in this process, else None."""
    return _broken.get(_suspect(signature, planned)) if _broken else None


def remember(signature: str, planned: Planned | None, route: str, error: BaseException, server: str) -> str:
    """Remember that a kernel is broken and log a warning. Returns the reason for calls that ``server`` serves instead.

    A failure during CUDA graph capture is not remembered, because CUDA may refuse to load a kernel then.

    Raises:
        ``error``, if it is not the kernel's fault.
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
    """Count a call in the route log."""
    _taken[route, reason] += 1


def run(what: Plan, call: Call) -> Result:
    """Run a planned call. Returns ``(O, LSE)``; LSE is None without ``call.return_lse``."""
    if what.debug:
        return _run_debug(what, call)
    planned, error = what.launches.get(what.tiles.forced), None
    if planned is not None and not _broken:  # the fast path of most calls
        try:
            result: Result = planned[0].forward(planned[1], call, what.route)
        except (DoesNotFit, *failures()) as raised:  # type: ignore[misc]
            if what.named:
                raise
            error = raised
        else:
            if call.out is not None:
                _written(call.out)
            _taken[planned[3]] += 1
            return result
    result, route, reason = _served(what, call, error)
    _taken[route, reason] += 1
    return result


def _served(what: Plan, call: Call, error: BaseException | None = None) -> tuple[Result, str, str]:
    """Run a call with fallbacks. Returns the result, its route and the reason.

    Args:
        error: the error of a launch that was already tried.
    """
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
                known = _broken.get(planned[2]) if _broken else None
                if known is None:
                    return launch(what, call, planned), what.route, reason
            except DoesNotFit as misfit:
                known = str(misfit)
            except failures() as failure:
                server = what.fallback if what.instead is None else what.instead.route
                known = remember(what.kernel, planned, what.route, failure, server)
        if what.instead is None:
            return plain(what.fallback, what, call), what.fallback, known
        what, reason, error = what.instead, known, None


class _Refusal:
    """Takes the place of a kernel module for calls that do not fit the kernel."""

    @staticmethod
    def forward(why: str, *_: object) -> NoReturn:
        raise DoesNotFit(why)


Planned = tuple[Any, Any, Any, tuple[str, str]]
"""The `plan` module of a kernel family, its launch of the call, the key of a failure (the launch's variants, or the
signature if the launch has none), and the entry of the route log (route and reason)."""


def with_variants(kernel: Any, launch: Any, signature: str, counted: tuple[str, str]) -> Planned:
    """A kernel and its launch, with the key of a failure and the entry of the route log."""
    return kernel, launch, getattr(launch, "variants", signature), counted


def attach(what: Plan, call: Call) -> Planned:
    """Have the kernel family plan the launch, at the first call of a plan."""
    kernel: Any = importlib.import_module(f"nsa.kernels.{what.module}.plan")  # not imported above: it imports Triton
    try:
        planned = kernel.plan(call, what.dims.bound, what.route == "per_head")
        found = with_variants(kernel, planned, what.kernel, (what.route, what.reason))
    except DoesNotFit as error:
        found = _Refusal, str(error), what.kernel, (what.route, what.reason)
    what.launches[what.tiles.forced] = found
    return found


def launch(what: Plan, call: Call, planned: Planned | None = None) -> Result:
    """Launch the kernel of a planned call. Raises if that fails."""
    found = planned or what.launches.get(what.tiles.forced) or attach(what, call)
    result: Result = found[0].forward(found[1], call, what.route)
    if call.out is not None:
        _written(call.out)
    return result


def _written(out: Tensor) -> None:
    """Tell autograd that ``out`` was modified, because autograd does not see the writes of a kernel."""
    if not out.is_inference():
        increment_version(out)


def plain(route: str, what: Plan, call: Call) -> Result:
    """Run packed SDPA or the reference."""
    if route == "sdpa":
        o, lse = packed_sdpa.packed_sdpa(call, what.dims.bound, what.sdpa_layout)
    else:
        o, lse = oracle.selection_reference(call)
    return (o if call.out is None else call.out.copy_(o)), lse


def _run_debug(what: Plan, call: Call) -> Result:
    """Run a call and log what the ``debug_*`` settings ask for. Synchronizes."""
    current = call.settings
    if current.debug_shapes:
        named = call.named_tensors()
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    if current.debug_cache and call.cache_seqlens is not None:
        debug.report_cache(call)
    synchronize = torch.cuda.synchronize if call.q.is_cuda else lambda _: None
    synchronize(call.q.device)
    began = time.perf_counter()
    result, route, reason = _served(what, call)
    synchronize(call.q.device)
    count(route, reason)
    if current.debug_timing:
        elapsed = (time.perf_counter() - began) * 1e3
        logger.info("route %s (%s): %.3f ms, host and device", route, reason, elapsed)
    if current.debug_compare:
        exact = plain("reference", what, call._replace(return_lse=False, out=None))[0]
        count("reference", "debug_compare is set")
        error = (result[0].double() - exact.double()).abs()
        worst = error.max().item() if error.numel() else 0.0
        logger.info("route %s against the reference: max error %.3e", route, worst)
    return result
