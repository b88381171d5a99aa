"""The backward pass of a call: its route, its sticky fallback, and the recomputation it falls back on.

Decided as the forward is, from the same plan; kernels of the two directions fail on their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa import dispatch, routing
from nsa.call import Call
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.key_major.tiles import DoesNotFit
from nsa.routing import Plan

ROUTE = "backward"
Gradients = tuple[Tensor, Tensor, Tensor]

_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")


def backward(
    what: Plan,
    call: Call,
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: tuple[bool, ...] = (True, True, True),
) -> Gradients:
    """Gradients of a call, given those of its outputs.

    Args:
        what: the call's plan.
        do: like ``o``, any strides. dlse: like ``lse``. None counts as zeros.
        o, lse: what the forward returned.
        wanted: of q, k and v; a gradient that is not wanted comes back as an empty tensor.

    Returns:
        ``dq``, ``dk``, ``dv``: like ``q``, ``k`` and ``v``, contiguous.

    Raises:
        ValueError: ``backend="triton"`` and the call does not fit the kernels' workspace.
        RuntimeError and others: ``backend="triton"`` and the kernel failed.
    """
    if what.route in routing.PLAIN:
        route, reason = what.route, f"backward: {what.reason}"
    elif what.named:
        return _launch(what, call, do, dlse, o, lse, wanted)
    else:
        known = dispatch.known_failure(what.backward, what.backward_launches.get(backward_tiles.forced))
        if known is None:
            try:
                return _launch(what, call, do, dlse, o, lse, wanted)
            except DoesNotFit as error:
                known = f"backward: {error}"
            except dispatch.failures() as error:
                planned = what.backward_launches.get(backward_tiles.forced)
                known = dispatch.remember(what.backward, planned, ROUTE, error, what.fallback)
        route, reason = what.fallback, known
    return _recompute(route, reason, what, call, do, dlse, wanted)


def _launch(
    what: Plan,
    call: Call,
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: tuple[bool, ...],
) -> Gradients:
    found = what.backward_launches.get(backward_tiles.forced)
    if found is None:
        kernel = importlib.import_module("nsa.kernels.backward.plan")  # which imports Triton
        found = what.backward_launches[backward_tiles.forced] = kernel, kernel.plan(call, what.dims.bound)
    kernel, how = found
    do = torch.zeros_like(o) if do is None else do
    result: Gradients = kernel.backward(how, call, do, dlse, o, lse, ROUTE, wanted)
    dispatch.count(ROUTE, what.reason)
    return result


def _recompute(
    route: str,
    reason: str,
    what: Plan,
    call: Call,
    do: Tensor | None,
    dlse: Tensor | None,
    wanted: tuple[bool, ...],
) -> Gradients:
    """Run packed SDPA or the reference once more, this time recorded, and differentiate it."""
    with _recorded(call.q.device.type):
        q, k, v = (x.detach().requires_grad_(want) for x, want in zip((call.q, call.k, call.v), wanted, strict=True))
        again = call._replace(q=q, k=k, v=v, return_lse=dlse is not None, out=None)
        outputs = dispatch.plain(route, what, again)
        dispatch.count(route, reason)
        pairs = [(x, g) for x, g in zip(outputs, (do, dlse), strict=True) if x is not None and g is not None]
        leaves = [x for x in (q, k, v) if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, materialize_grads=True
            )
        )
    dq, dk, dv = (next(found).contiguous() if want else call.q.new_empty(0) for want in wanted)
    return dq, dk, dv


@contextmanager
def _recorded(device_type: str) -> Iterator[None]:
    """Autograd records, and autocast is off, whatever the caller's state.

    An operator's implementation runs below autograd: ``enable_grad`` alone does not bring it back.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.enable_grad(), torch.autocast(device_type, enabled=False):
        yield
