"""What PyTorch sees of a call: two operators, one for each direction, and the node of autograd.

A call goes the shortest way that PyTorch's state allows: straight to its plan; as a node of autograd where a gradient
is wanted; or as an operator, which ``torch.compile`` does not trace into and which answers for fake tensors and
subclasses. No maths here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from nsa import dispatch, gradients, settings
from nsa.call import TENSORS, Call
from nsa.dispatch import Plan, Result
from nsa.gradients import Gradients
from nsa.transforms import (
    any_autocast_enabled,
    autocast_dtype,
    cast,
    forward_mode,
    no_tangents,
    tangents_refused,
    transformed,
    transforms_active,
    vmap_refused,
)
from nsa.validate import check_tensors

# The fields of a `Call`, in their order, without `out`, `return_lse` and `settings`.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? ranges, Tensor? block_indices, Tensor? q_positions, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cache_seqlens, Tensor? block_table, int? block_size, bool causal, float? scale, "
    "int? max_selected, str backend, str schedule"
)
_SCHEMAS = {
    "selection_attention": f"({_CALL}) -> (Tensor, Tensor)",
    "selection_attention_backward": (
        f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, bool[3] wanted, {_CALL}) -> (Tensor, Tensor, Tensor)"
    ),
}
# Kernels want contiguous head dims: a compiler may not choose other strides for what it hands over.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library = torch.library.Library("nsa", "DEF")


def serve(call: Call, tracing: bool = False) -> Result:
    """``(O, LSE)`` of a call, LSE only where it is asked for.

    Args:
        tracing: a compiler traces the call.

    Raises:
        As :func:`nsa.selection_attention`.
    """
    if tracing or any_autocast_enabled() or transforms_active() or forward_ad._current_level >= 0:
        return _unusual(call, tracing)
    try:
        planned = dispatch.plan(call)
    except AttributeError:
        check_tensors(**_named(call))
        raise
    q = call.q
    wants_grad = is_grad_enabled() and (
        q.requires_grad
        or call.k.requires_grad
        or call.v.requires_grad
        or (call.out is not None and call.out.requires_grad)
    )
    # A subclass, as FakeTensor, may have no memory to launch a kernel on: the operator knows what to do with it.
    if wants_grad or q.__class__ is not Tensor:
        if planned.route not in dispatch.PLAIN or call.cache_seqlens is not None:
            return _operator(call) if q.__class__ is not Tensor else _recorded(call, planned)
    return dispatch.run(planned, call)


def _unusual(call: Call, tracing: bool) -> Result:
    """A call that is compiled, under autocast, in a transform of ``torch.func`` or in forward mode."""
    check_tensors(**_named(call))
    dtype = autocast_dtype(call.q.device)
    if dtype is not None and call.cache_seqlens is None:
        with torch.autocast(call.q.device.type, enabled=False):  # it is done: what runs inside takes what it is given
            call = call._replace(q=cast(call.q, dtype), k=cast(call.k, dtype), v=cast(call.v, dtype))
            return serve(call, tracing)
    if dtype is not None and not tracing:  # of a cache nothing is cast
        with torch.autocast(call.q.device.type, enabled=False):
            return serve(call)
    wrapped = not tracing and transformed(*call.tensors)
    if call.cache_seqlens is not None:
        if wrapped:
            raise RuntimeError(
                "selection_attention_with_kvcache has no rule for transforms of torch.func, nor for forward-mode AD"
            )
        return _operator(call)
    if tracing and call.backend in ("auto", "triton"):
        return _operator(call)
    if tracing:  # not counted as a route: a graph that counts is compiled anew for every count
        planned = dispatch.traced_plan(call)
        return dispatch.plain(planned.route, planned, call)
    planned = dispatch.plan(call)
    return dispatch.run(dispatch.transformed(planned) if wrapped else planned, call)


def _named(call: Call) -> dict[str, Tensor]:
    return call.named_tensors() if call.cache_seqlens is None else call.named_tensors("q", "k_cache", "v_cache")


def _operator(call: Call) -> Result:
    """Through PyTorch's dispatcher, which knows the gradient and needs no memory to trace."""
    o, lse = torch.ops.nsa.selection_attention(*_arguments(call))
    return _into(call.out, o), lse if call.return_lse else None


def _recorded(call: Call, planned: Plan) -> Result:
    o, lse = _Attention.apply(call, planned, call.q, call.k, call.v)  # type: ignore[no-untyped-call]
    return _into(call.out, o), lse if call.return_lse else None


def _into(out: Tensor | None, o: Tensor) -> Tensor:
    """A result where the caller wants it; ``out`` has not been checked where a call is compiled.

    Raises:
        ValueError: ``out`` is not as ``o``.
    """
    if out is None:
        return o
    if out.shape != o.shape or out.dtype != o.dtype or out.device != o.device:
        raise ValueError(
            f"out: expected {list(o.shape)}, {o.dtype}, {o.device}, got {list(out.shape)}, {out.dtype}, {out.device}"
        )
    return out.copy_(o)


def _arguments(call: Call) -> tuple[Any, ...]:
    """Of an operator."""
    return *call[: TENSORS - 1], *call[TENSORS:-2]


def _of_arguments(arguments: tuple[Any, ...]) -> Call:
    return _call(*arguments[: TENSORS - 1], None, *arguments[TENSORS - 1 :], True, settings.get())


def _call(*fields: Any) -> Call:
    return Call._make(fields)


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """A planned call as a node of autograd: the operator's own takes four times as long."""

    @staticmethod
    def forward(ctx: Any, call: Call, planned: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        call = call._replace(out=None, return_lse=True)
        o, lse = dispatch.run(planned, call)
        ctx.set_materialize_grads(False)  # an output nobody uses costs nothing
        ctx.save_for_backward(*call[: TENSORS - 1], o, lse)
        ctx.rest = call[TENSORS:], planned
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        options, planned = ctx.rest
        call = _call(*tensors, None, *options)
        with settings.applied(call.settings):  # this may be a thread of autograd's
            found = _gradients(call, planned, do, dlse, o, lse, ctx.needs_input_grad[2:])
        return None, None, *found


def _gradients(
    call: Call,
    planned: Plan | None,
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    if call.cache_seqlens is not None:
        raise RuntimeError("selection_attention_with_kvcache has no gradient: train with selection_attention")
    if do is None and dlse is None:
        return (None,) * 3
    if planned is not None and not is_grad_enabled():
        found = gradients.backward(planned, call, do, dlse, o, lse, wanted)
    else:  # which says what can be done, where the gradient is differentiated
        found = torch.ops.nsa.selection_attention_backward(do, dlse, o, lse, list(wanted), *_arguments(call))
    return tuple(x if want else None for x, want in zip(found, wanted, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: TENSORS - 1], *output)
    ctx.options = *inputs[TENSORS - 1 :], True, settings.get()


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of what the operator takes: q, k and v."""
    *tensors, o, lse = ctx.saved_tensors
    call = _call(*tensors, None, *ctx.options)
    with settings.applied(call.settings):
        found = _gradients(call, None, do, dlse, o, lse, tuple(ctx.needs_input_grad[:3]))
    return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))


def _twice(ctx: Any, *_: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "the gradient of selection_attention cannot be differentiated: differentiate twice with "
        'backend="reference", or with backend="sdpa" under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)'
    )


# --- the operators ----------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _of_arguments(arguments)
    no_tangents("the operator", call.q, call.k, call.v)
    o, lse = dispatch.run(dispatch.plan(call), call)
    assert lse is not None
    return o, lse


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    if forward_mode():  # whether a fake tensor has a tangent, torch does not say
        tangents_refused("a compiled call")
    q, _, v = arguments[:3]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def _backward(
    do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> Gradients:
    call = _of_arguments(arguments)
    no_tangents("the gradient", do, dlse, call.q, call.k, call.v)
    return gradients.backward(dispatch.plan(call), call, do, dlse, o, lse, tuple(wanted))


def _backward_fake(
    do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> Gradients:
    dq, dk, dv = (x.new_empty(x.shape if want else (0,)) for x, want in zip(arguments[:3], wanted, strict=True))
    return dq, dk, dv


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "selection_attention": (_forward, _forward_fake),
    "selection_attention_backward": (_backward, _backward_fake),
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=_TAGS)
    _real, _fake = _IMPLEMENTATIONS[_name]
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"nsa::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"nsa::{_name}", vmap_refused, lib=_library)
torch.library.register_autograd("nsa::selection_attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("nsa::selection_attention_backward", _twice, lib=_library)
