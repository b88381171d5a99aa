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
from nsa.torch_modes import odd

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


def run(what: Plan, call: Call) -> Result:
    """Run a planned call. Returns ``(O, LSE)``; LSE is None without ``call.return_lse``."""
    if what.debug:
        return _run_debug(what, call)
    planned, error = what.launch, None
    if planned is not None and not broken:  # the fast path of most calls
        try:
            result: Result = planned[0].forward(planned[1], call, what.route)
        except (DoesNotFit, *failures.caught()) as raised:  # type: ignore[misc]
            error = None if isinstance(raised, Untried) else raised
            if what.named and error is not None:
                raise
        else:
            if call.out is not None:
                _written(call.out)
            planned[3][0] += 1
            return result
    result, *taken = _served(what, call, error)
    count(*taken)
    return result


def _served(what: Plan, call: Call, error: BaseException | None = None) -> tuple[Result, str, str, str]:
    """Run a call with fallbacks. Returns the result, its route, the reason and the kind of rows.

    Args:
        error: the error of a launch that was already tried.
    """
    reason = what.reason
    if what.route in PLAIN:
        return plain(what.route, call, what.shape.bound, what.sdpa_layout), what.route, reason, ""
    if what.named:
        return launch(what, call), what.route, reason, what.rows
    while True:
        known = failures.known(what.kernel)
        planned = what.launch
        if known is None:
            try:
                if error is not None:
                    raise error
                planned = planned or attach(what, call)
                known = failures.known(planned[2])
                if known is None:
                    result = launch(what, call, planned)
                    failures.works(planned[2])
                    return result, what.route, reason, what.rows
            except DoesNotFit as misfit:
                known = str(misfit)
            except failures.caught() as failure:
                server = what.fallback if what.instead is None else what.instead.route
                key = failure_key(what.kernel, planned)
                odd_one = any(map(odd, call.tensors))
                known = NO_MEMORY if odd_one else failures.remember(key, what.route, failure, server)
        if what.instead is None:
            return plain(what.fallback, call, what.shape.bound, what.sdpa_layout), what.fallback, known, ""
        what, reason, error = what.instead, known, None


class _Refusal:
    """Takes the place of a kernel module for calls that do not fit the kernel."""

    @staticmethod
    def forward(why: str, *_: object) -> NoReturn:
        raise DoesNotFit(why)


Planned = tuple[Any, Any, Any, list[int]]
"""The `plan` module of a kernel family, its launch of the call, the key of a failure (the launch's variants, or the
signature if the launch has none), and the count of its calls in the route log."""


def with_variants(kernel: Any, launch: Any, signature: str, *taken: str) -> Planned:
    """A kernel and its launch, with the key of a failure and the count in the route log."""
    return kernel, launch, getattr(launch, "variants", signature), _counter(*taken)


def failure_key(signature: str, planned: Planned | None) -> Any:
    """The key of a failure in `nsa.failures`: the variants of a launch, or the signature before there are any."""
    return signature if planned is None else planned[2]


def attach(what: Plan, call: Call) -> Planned:
    """Have the kernel family plan the launch, at the first call of a plan."""
    family = what.family
    try:
        planned = family.plan(call, what.shape, what.route)
        found = with_variants(family.kernels, planned, what.kernel, what.route, what.reason, what.rows)
    except DoesNotFit as error:
        found = _Refusal, str(error), what.kernel, _counter(what.route, what.reason, what.rows)
    what.launch = found
    return found


def launch(what: Plan, call: Call, planned: Planned | None = None) -> Result:
    """Launch the kernel of a planned call. Raises if that fails."""
    found = planned or what.launch or attach(what, call)
    try:
        result: Result = found[0].forward(found[1], call, what.route)
    except Untried as untried:
        guard.admit(untried, guard.describe(call, what.shape, what.route, found[1]), call.q.device)
        return launch(what, call, found)
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


def _run_debug(what: Plan, call: Call) -> Result:
    """Run a call and log what the ``debug_*`` settings ask for. ``debug_timing`` synchronizes."""
    current = call.settings
    if (folder := recording()) is not None:
        from nsa.testing.workloads.record import count as record

        record(call, folder)
    if current.debug_shapes:
        named = call.named_tensors()
        logger.info("shapes: %s", ", ".join(f"{k} {list(x.shape)} strides {x.stride()}" for k, x in named.items()))
    if current.debug_cache and call.cache_seqlens is not None:
        debug.report_cache(call)
    synchronize = torch.cuda.synchronize if call.q.is_cuda and current.debug_timing else lambda _: None
    synchronize(call.q.device)
    began = time.perf_counter()
    result, route, reason, rows = _served(what, call)
    synchronize(call.q.device)
    count(route, reason, rows)
    if current.debug_timing:
        elapsed = (time.perf_counter() - began) * 1e3
        logger.info("route %s (%s): %.3f ms, host and device", route, reason, elapsed)
    if current.debug_compare:
        exact = plain("reference", call._replace(return_lse=False, out=None), None)[0]
        count("reference", "debug_compare is set")
        error = (result[0].double() - exact.double()).abs()
        worst = error.max().item() if error.numel() else 0.0
        logger.info("route %s against the reference: max error %.3e", route, worst)
    return result
