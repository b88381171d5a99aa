"""Runs a planned call: launches its kernel, or the fallback if the kernel is broken, and counts routes.

`nsa.failures` remembers a kernel that failed by its compiled variants. If the caller named a backend, there is no
fallback, and errors are raised.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nsa import debug, failures, guard, routing
from nsa.call import Call
from nsa.failures import broken
from nsa.gpu import SDPA_LAYOUTS
from nsa.kernels.shared.asking import Untried
from nsa.kernels.shared.errors import NO_MEMORY, DoesNotFit
from nsa.plain import oracle, packed_sdpa
from nsa.routing import PLAIN, Plan
from nsa.settings import recording
from nsa.torch_modes import capturing, odd

logger = logging.getLogger("nsa")


class RouteRecord(NamedTuple):
    """How often calls took one route (`routes` lists the names) for one reason, since the process started.

    ``rows`` is the kind of rows that query-major read, ``ranges`` or ``blocks``; empty for other routes.
    """

    route: str
    reason: str
    calls: int
    rows: str = ""


Result = tuple[Tensor, Tensor | None]

_taken: dict[tuple[str, str, str], list[int]] = {}
"""Calls by route, reason and kind of rows. Each count is a list of one number, which a plan keeps, because a look-up
takes longer."""


def routes() -> list[RouteRecord]:
    """The routes that ran in this process, why, and how often; the most frequent first.

    Routes are the schedules ``query_major``, ``per_head``, ``key_major``, ``union`` and ``small_blocks``, and
    ``backward``, ``sdpa`` and ``reference``. Calls on packed rows (``sel_attn_fwd_*``) are not counted. If a kernel
    failed, the reason of the route that serves instead says why.
    """
    counts = Counter({entry: calls for entry, (calls,) in _taken.items() if calls})
    return [RouteRecord(route, reason, calls, rows) for (route, reason, rows), calls in counts.most_common()]


def reset() -> None:
    """Forget the route log and the failures of kernels, so that kernels are tried again. Files of `nsa.guard` stay."""
    _taken.clear()
    routing.forget()  # plans keep the counts of their calls
    failures.forget()


def _counter(route: str, reason: str, rows: str = "") -> list[int]:
    return _taken.setdefault((route, reason, rows), [0])


def count(route: str, reason: str, rows: str = "") -> None:
    """Count a call in the route log."""
    _counter(route, reason, rows)[0] += 1


def run(plan: Plan, call: Call) -> Result:
    """Run a planned call. Returns ``(O, LSE)``; LSE is None without ``call.return_lse``."""
    if plan.unusual:
        call = call.with_lists()
        if plan.debug:
            return _run_debug(plan, call)
    attached, error = plan.launch, None
    if attached is not None and not broken:  # the fast path of most calls
        try:
            result: Result = attached[0].forward(attached[1], call, plan.route)
        except (DoesNotFit, *failures.caught()) as raised:  # type: ignore[misc]
            error = None if isinstance(raised, Untried) else raised
            if plan.named and error is not None:
                raise
        else:
            if call.out is not None:
                _written(call.out)
            attached[3][0] += 1
            return result
    result, *taken = _served(plan, call, error)
    count(*taken)
    return result


def _served(plan: Plan, call: Call, error: BaseException | None = None) -> tuple[Result, str, str, str]:
    """Run a call with fallbacks. Returns the result, its route, the reason and the kind of rows.

    Args:
        error: the error of a launch that was already tried.
    """
    reason = plan.reason
    if plan.route in PLAIN:
        return plain(plan.route, call, plan.shape.bound, plan.sdpa_layout), plan.route, reason, ""
    if plan.named:
        return launch(plan, call), plan.route, reason, plan.rows
    while True:
        cause = failures.cause_of(plan.kernel)
        attached = plan.launch
        if cause is None:
            try:
                if error is not None:
                    raise error
                attached = attached or attach(plan, call)
                cause = failures.cause_of(attached[2])
                if cause is None:
                    result = launch(plan, call, attached)
                    failures.works(attached[2])
                    return result, plan.route, reason, plan.rows
            except DoesNotFit as misfit:
                cause = str(misfit)
            except failures.caught() as failure:
                server = plan.fallback if plan.instead is None else plan.instead.route
                key = failure_key(plan.kernel, attached)
                odd_one = any(map(odd, call.tensors))
                cause = NO_MEMORY if odd_one else failures.remember(key, plan.route, failure, server)
        if plan.instead is None:
            return plain(plan.fallback, call, plan.shape.bound, plan.sdpa_layout), plan.fallback, cause, ""
        plan, reason, error = plan.instead, cause, None


class _Refusal:
    """Takes the place of a kernel module for calls that do not fit the kernel."""

    @staticmethod
    def forward(why: str, *_: object) -> NoReturn:
        raise DoesNotFit(why)


Attached = tuple[Any, Any, Any, list[int]]
"""The `plan` module of a kernel family, its launch of the call, the key of a failure (the launch's variants, or the
signature if the launch has none), and the count of its calls in the route log."""


def with_variants(kernel: Any, launch: Any, signature: str, *taken: str) -> Attached:
    """A kernel and its launch, with the key of a failure and the count in the route log."""
    return kernel, launch, getattr(launch, "variants", signature), _counter(*taken)


def failure_key(signature: str, attached: Attached | None) -> Any:
    """The key of a failure in `nsa.failures`: the variants of a launch, or the signature before there are any."""
    return signature if attached is None else attached[2]


def attach(plan: Plan, call: Call) -> Attached:
    """Have the kernel family plan the launch, at the first call of a plan."""
    family = plan.family
    try:
        of_call = family.plan(call, plan.shape, plan.route)
        attached = with_variants(family.kernels, of_call, plan.kernel, plan.route, plan.reason, plan.rows)
    except DoesNotFit as error:
        attached = _Refusal, str(error), plan.kernel, _counter(plan.route, plan.reason, plan.rows)
    plan.launch = attached
    return attached


def launch(plan: Plan, call: Call, attached: Attached | None = None) -> Result:
    """Launch the kernel of a planned call. Raises if that fails."""
    attached = attached or plan.launch or attach(plan, call)
    try:
        result: Result = attached[0].forward(attached[1], call, plan.route)
    except Untried as untried:
        guard.admit(untried, guard.describe(call, plan.shape, plan.route, attached[1]), call.q.device)
        return launch(plan, call, attached)
    if call.out is not None:
        _written(call.out)
    return result


def _written(out: Tensor) -> None:
    """Tell autograd that ``out`` was modified, because autograd does not see the writes of a kernel."""
    if not out.is_inference():
        increment_version(out)


def plain(route: str, call: Call, bound: int | None, layout: str = SDPA_LAYOUTS[0]) -> Result:
    """Run packed SDPA or the reference.

    Args:
        bound: of the keys of a row, if the host knows one.
        layout: of packed SDPA.
    """
    if route == "sdpa":
        o, lse = packed_sdpa.packed_sdpa(call, bound, layout)
    else:
        o, lse = oracle.selection_reference(call)
    return (o if call.out is None else call.out.copy_(o)), lse


def _run_debug(plan: Plan, call: Call) -> Result:
    """Run a call and log what the ``debug_*`` settings ask for.

    ``debug_timing`` and ``debug_compare`` synchronize, so they do nothing while a CUDA graph is captured.
    """
    current = call.settings
    timed, compared = (on and not capturing(call.q) for on in (current.debug_timing, current.debug_compare))
    if (folder := recording()) is not None:
        debug.count_shape(call, folder)
    if current.debug_shapes:
        named = call.named_tensors()
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    if current.debug_cache and call.cache_seqlens is not None:
        debug.report_cache(call)
    synchronize = torch.cuda.synchronize if call.q.is_cuda and timed else lambda _: None
    synchronize(call.q.device)
    began = time.perf_counter()
    result, route, reason, rows = _served(plan, call)
    synchronize(call.q.device)
    count(route, reason, rows)
    if timed:
        elapsed = (time.perf_counter() - began) * 1e3
        logger.info("route %s (%s): %.3f ms, host and device", route, reason, elapsed)
    if compared:
        exact = plain("reference", call._replace(return_lse=False, out=None), None)[0]
        count("reference", "debug_compare is set")
        error = (result[0].double() - exact.double()).abs()
        worst = error.max().item() if error.numel() else 0.0
        logger.info("route %s against the reference: max error %.3e", route, worst)
    return result
