"""The backward pass of a call: its route, its sticky fallback, and the recomputation it falls back on.

Decided as the forward is, from the same plan; kernels of the two directions fail on their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch
from nsa.dispatch import Plan
from nsa.kernels import backward_tiles
from nsa.transforms import no_tangents

ROUTE = "backward"
Gradients = tuple[Tensor, Tensor, Tensor]

_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")


class _DoesNotFit(ValueError):
    """A call for which the kernels' workspace is too small: another may fit."""


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_selected: int | None,
    backend: str,
    schedule: str,
) -> Gradients:
    """Gradients of a call, given those of its outputs.

    Args:
        do: like ``o``, any strides. dlse: like ``lse``; None counts as zeros.
        o, lse: what the forward returned. The rest is what it was given.

    Returns:
        ``dq``, ``dk``, ``dv``: like ``q``, ``k`` and ``v``, contiguous.

    Raises:
        ValueError: ``backend="triton"`` and the call does not fit the kernels' workspace.
        RuntimeError and others: ``backend="triton"`` and the kernel failed.
    """
    no_tangents("the gradient", do, dlse, q, k, v)
    what = dispatch.plan(
        q, k, v, ranges, block_indices, block_size, causal, q_positions, cu_seqlens_q, cu_seqlens_k, max_selected, None,
        backend, schedule,
    )  # fmt: skip
    selection = block_indices if ranges is None else ranges
    assert selection is not None

    def launched() -> Gradients:
        return _triton(
            what, do, dlse, q, k, v, o, lse, selection, block_size, causal, q_positions, scale, cu_seqlens_q,
            cu_seqlens_k,
        )  # fmt: skip

    if what.route in dispatch.PLAIN:
        route, reason = what.route, f"backward: {what.reason}"
    elif what.named:
        return launched()
    else:
        known = dispatch.known_failure(what.backward)
        if known is None:
            try:
                return launched()
            except _DoesNotFit as error:
                known = f"backward: {error}"
            except dispatch.failures() as error:
                known = dispatch.remember(what.backward, ROUTE, error, what.fallback)
        route, reason = what.fallback, known
    call = ranges, block_indices, block_size, causal, q_positions, scale, cu_seqlens_q, cu_seqlens_k
    return _recompute(route, reason, what, do, dlse, q, k, v, *call)


def _triton(
    what: Plan,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    selection: Tensor,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Gradients:
    found = what.backward_launches.get(backward_tiles.forced)
    if found is None:
        kernel = importlib.import_module("nsa.kernels.backward")  # which imports Triton
        try:
            launch = kernel.launch_for(
                q, k, v, selection=selection, block_size=block_size, causal=causal, q_positions=q_positions,
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, bound=what.dims.bound,
            )  # fmt: skip
        except ValueError as error:
            raise _DoesNotFit(str(error)) from error
        found = what.backward_launches[backward_tiles.forced] = kernel, launch
    kernel, launch = found
    result: Gradients = kernel.backward(
        launch, do, dlse, q, k, v, o, lse, ROUTE, selection, q_positions, scale, cu_seqlens_q, cu_seqlens_k
    )
    dispatch.count(ROUTE, what.reason)
    return result


def _recompute(
    route: str,
    reason: str,
    what: Plan,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *call: Any,
) -> Gradients:
    """Run packed SDPA or the reference once more, this time recorded, and differentiate it."""
    with _recorded(q.device.type):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again: tuple[Any, ...] = (*leaves, *call, dlse is not None, None, None, None)
        outputs = dispatch.plain(route, reason, what, again)
        pairs = [(x, g) for x, g in zip(outputs, (do, dlse), strict=True) if x is not None]
        dq, dk, dv = torch.autograd.grad(
            [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


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
