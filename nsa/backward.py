"""Runs the backward pass of a call: the kernels, or as fallback a recomputation that autograd differentiates.

The plan is that of the forward pass. A failure of the forward kernel says nothing about the backward kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa import dispatch, failures, guard, routing
from nsa.call import Call
from nsa.dispatch import Attached
from nsa.kernels.families import BACKWARD, backward_of
from nsa.kernels.shared.asking import Untried
from nsa.kernels.shared.errors import NO_MEMORY, DoesNotFit
from nsa.routing import Plan
from nsa.torch_modes import odd

ROUTE = "backward"
Gradients = tuple[Tensor, Tensor, Tensor]

_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")


def backward(
    plan: Plan, call: Call, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor,
    wanted: tuple[bool, ...] = (True, True, True),
) -> Gradients:  # fmt: skip
    """The gradients of ``q``, ``k`` and ``v``, in their shapes and dtypes, contiguous.

    Args:
        do, dlse: gradients of ``o`` and ``lse``, in their shapes and dtypes, any strides; None: zeros.
        o, lse: outputs of the forward pass.
        wanted: which of the three gradients are computed; the others are empty tensors.

    Raises:
        ValueError: ``backend="triton"``, and the call does not fit the workspace of the kernels.
        RuntimeError and others: ``backend="triton"``, and a kernel failed.
    """
    if plan.unusual:
        call = call.with_lists()
    if plan.route in routing.PLAIN:
        return _recompute(plan.route, f"backward: {plan.reason}", plan, call, do, dlse, wanted)
    if plan.named:
        return _launch(plan, call, do, dlse, o, lse, wanted)
    key = dispatch.failure_key(plan.backward, plan.backward_launches.get(None))
    cause = failures.cause_of(key)
    if cause is None:
        try:
            result = _launch(plan, call, do, dlse, o, lse, wanted)
        except DoesNotFit as error:
            cause = f"backward: {error}"
        except failures.caught() as error:
            key = dispatch.failure_key(plan.backward, plan.backward_launches.get(None))
            given = (*call.tensors, do, dlse, o, lse)
            cause = NO_MEMORY if any(map(odd, given)) else failures.remember(key, ROUTE, error, plan.fallback)
        else:
            failures.works(key)
            return result
    return _recompute(plan.fallback, cause, plan, call, do, dlse, wanted)


def _launch(
    plan: Plan, call: Call, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, wanted: tuple[bool, ...]
) -> Gradients:
    kernel, launch, _, calls = attach(plan, call)
    do = torch.zeros_like(o) if do is None else do
    try:
        result: Gradients = kernel.backward(launch, call, do, dlse, o, lse, ROUTE, wanted)
    except Untried as untried:
        given = {"do": do, "dlse": dlse, "o": o, "lse": lse, "wanted": wanted}
        guard.admit(untried, guard.describe(call, plan.shape, ROUTE, launch, given), call.q.device)
        return _launch(plan, call, do, dlse, o, lse, wanted)
    calls[0] += 1
    return result


def attach(plan: Plan, call: Call, within: int | None = None) -> Attached:
    """The kernels and their launch, which are planned at the first call. ``within`` as of the kernels' ``plan``."""
    attached = plan.backward_launches.get(within)
    if attached is None:
        family = backward_of(call, plan.shape) if within is None else BACKWARD
        more = () if within is None else (within,)
        launch = family.kernels.plan(call, plan.shape, *more)
        attached = dispatch.with_variants(family.kernels, launch, plan.backward, ROUTE, plan.reason)
        plan.backward_launches[within] = attached
    return attached


def _recompute(
    route: str, reason: str, plan: Plan, call: Call, do: Tensor | None, dlse: Tensor | None, wanted: tuple[bool, ...]
) -> Gradients:
    """Run packed SDPA or the reference again, recorded by autograd, and differentiate it."""
    with _recorded(call.q.device.type):
        q, k, v = (x.detach().requires_grad_(want) for x, want in zip((call.q, call.k, call.v), wanted, strict=True))
        again = call._replace(q=q, k=k, v=v, return_lse=dlse is not None, out=None)
        outputs = dispatch.plain(route, again, plan.shape.bound, plan.sdpa_layout)
        dispatch.count(route, reason)
        pairs = [(x, g) for x, g in zip(outputs, (do, dlse), strict=True) if x is not None and g is not None]
        pairs = [(x, g) for x, g in pairs if x.requires_grad]  # LSE does not depend on v
        leaves = [x for x in (q, k, v) if x.requires_grad]
        given, grads = [x for x, _ in pairs], [g for _, g in pairs]
        results = iter(torch.autograd.grad(given, leaves, grads, allow_unused=True, materialize_grads=True))
    dq, dk, dv = (next(results).contiguous() if want else call.q.new_empty(0) for want in wanted)
    return dq, dk, dv


@contextmanager
def _recorded(device_type: str) -> Iterator[None]:
    """In a `with` block, autograd records and autocast is off.

    The implementation of an operator runs with autograd's dispatch keys excluded, so ``enable_grad`` is not enough.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    keys = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with keys, torch.enable_grad(), torch.autocast(device_type, enabled=False):
        yield
