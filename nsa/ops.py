"""Connects a call to PyTorch: an autograd function, and one operator for each direction.

A call takes the cheapest of three ways. Without gradients it goes straight to its plan. With gradients it is an
autograd function. A call is an operator wherever something looks at PyTorch's dispatcher: ``torch.compile``, which does
not trace into the operator, a dispatch mode, and tensors with a rule of their own, such as fake ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from nsa import backward, dispatch, overlap, routing, settings, torch_modes
from nsa.backward import Gradients
from nsa.call import TENSORS, Call
from nsa.dispatch import Result
from nsa.routing import Plan
from nsa.torch_modes import any_autocast_enabled, dispatch_modes, odd, transforms_active
from nsa.validate import check_bound, check_tensors, integer

# The fields of a `Call`, in their order, without `out`, `return_lse` and `settings`.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? ranges, Tensor? block_indices, Tensor? q_positions, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cache_seqlens, Tensor? block_table, Tensor? k_scale, Tensor? v_scale, "
    "int? block_size, bool causal, float? scale, int? max_selected, int? max_seqlen_q, str backend, str schedule"
)
_SCHEMA = f"({_CALL}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, bool[3] wanted, {_CALL}) -> (Tensor, Tensor, Tensor)"
)
# A compiler must keep the strides of the inputs, because kernels need contiguous head dims.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library = torch.library.Library("nsa", "DEF")


def serve(call: Call, tracing: bool = False) -> Result:
    """Run a call. Returns ``(O, LSE)``; LSE is None without ``call.return_lse``.

    Args:
        tracing: whether a compiler traces the call.

    Raises:
        As :func:`nsa.selection_attention`.
    """
    if tracing or any_autocast_enabled() or transforms_active() or dispatch_modes() or forward_ad._current_level >= 0:
        return _unusual(call, tracing)
    q, k, v, out = call.q, call.k, call.v, call.out
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        check_tensors(**_named(call))
        if any(map(odd, call.tensors)):
            return _dispatched(call)
    try:
        planned = routing.plan(call)
    except AttributeError:
        check_tensors(**_named(call))
        raise
    except TypeError:
        sizes = {name: integer(getattr(call, name)) for name in ("block_size", "max_selected", "max_seqlen_q")}
        if all(value is getattr(call, name) for name, value in sizes.items()):
            check_bound(call)  # names an option that has no hash
            raise
        return serve(call._replace(**sizes))
    if out is not None and overlap.near(out, q, k, v, planned.extents):
        overlap.refuse_shared(call, _named)
    wants_grad = is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (out is not None and out.requires_grad)
    )
    if wants_grad and (planned.route not in routing.PLAIN or call.cache_seqlens is not None):
        return _recorded(call, planned)
    return dispatch.run(planned, call)


def _unusual(call: Call, tracing: bool) -> Result:
    """Run a call that is compiled, transformed by ``torch.func``, in forward-mode AD, under autocast or a mode."""
    check_tensors(**_named(call))
    dtype = torch_modes.autocast_dtype(call.q.device)
    cached = call.cache_seqlens is not None
    if dtype is not None and not (cached and tracing):
        with torch.autocast(call.q.device.type, enabled=False):  # so that SDPA does not cast again
            if not cached:  # calls with a cache are not cast
                call = torch_modes.cast(call, dtype)
            return serve(call, tracing)
    if tracing:
        return _dispatched(call, tracing)
    wrapped = torch_modes.transformed(*call.tensors)
    if cached and wrapped:
        raise RuntimeError(
            "selection_attention_with_kvcache has no rule for transforms of torch.func, nor for forward-mode AD"
        )
    if not wrapped and (dispatch_modes() or any(map(odd, call.tensors))):
        return _dispatched(call)
    if cached:
        return _operator(call)
    planned = routing.plan(call)
    return dispatch.run(routing.without_kernels(planned) if wrapped else planned, call)


def _dispatched(call: Call, tracing: bool = False) -> Result:
    """Run a call as an operator, or, if the caller named plain PyTorch, as the operators of which that consists."""
    call = call.with_lists()
    if call.cache_seqlens is not None or call.backend in ("auto", "triton"):
        if not tracing:  # a compiler would guard each size that a check compares
            check_bound(call)
        return _operator(call)
    # Not counted as a route, because each count would recompile a graph that reads the counter.
    # A compiler can look up neither settings nor the device's name, so there is no plan.
    return dispatch.plain(call.backend, call, check_bound(call))


def _named(call: Call) -> dict[str, Tensor]:
    return call.named_tensors() if call.cache_seqlens is None else call.named_tensors("q", "k_cache", "v_cache")


def _operator(call: Call) -> Result:
    """Run a call as an operator, which PyTorch's dispatcher can trace and differentiate."""
    o, lse = torch.ops.nsa.selection_attention(*_arguments(call))
    return _into(call.out, o), lse if call.return_lse else None


def _recorded(call: Call, planned: Plan) -> Result:
    if call.out is not None:  # what the kernels write is copied to `out`, whose strides are not theirs
        planned = routing.plan(call._replace(out=None))
    o, lse = _Attention.apply(call, planned, call.q, call.k, call.v)  # type: ignore[no-untyped-call]
    return _into(call.out, o), lse if call.return_lse else None


def _into(out: Tensor | None, o: Tensor) -> Tensor:
    """Copy ``o`` to ``out`` if there is one.

    Raises:
        ValueError: ``out`` differs from ``o`` in shape, dtype or device. In a compiled call this is the first check.
    """
    if out is None:
        return o
    if out.shape != o.shape or out.dtype != o.dtype or out.device != o.device:
        raise ValueError(
            f"out: expected {list(o.shape)}, {o.dtype}, {o.device}, got {list(out.shape)}, {out.dtype}, {out.device}"
        )
    return out.copy_(o)


def _arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of the operator: the call without ``out``, ``return_lse`` and ``settings``."""
    return *call[: TENSORS - 1], *call[TENSORS:-2]


def _of_arguments(arguments: tuple[Any, ...]) -> Call:
    return Call._make((*arguments[: TENSORS - 1], None, *arguments[TENSORS - 1 :], True, settings.get()))


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """A planned call with gradients. The autograd node of the operator takes four times as long."""

    @staticmethod
    def forward(ctx: Any, call: Call, planned: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        call = Call._make((*call[: TENSORS - 1], None, *call[TENSORS:-2], True, call.settings))  # without out, with LSE
        o, lse = dispatch.run(planned, call)
        ctx.set_materialize_grads(False)  # an unused output has gradient None instead of zeros
        ctx.save_for_backward(*call[: TENSORS - 1], o, lse)
        ctx.rest = call[TENSORS:], planned, _strides(call)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        options, planned, strides = ctx.rest
        call = Call._make((*tensors, None, *options))
        with settings.applied(call.settings):  # this may be a thread of autograd
            if _strides(call) != strides:  # a hook saved copies
                planned = routing.plan(call)
            gradients = _gradients(call, planned, do, dlse, o, lse, ctx.needs_input_grad[2:])
        return None, None, *gradients


def _strides(call: Call) -> list[tuple[int, ...]]:
    """Of the tensors that a plan reads where they lie."""
    return [x.stride() for x in (call.q, call.k, call.v, call.selection) if x is not None]


def _gradients(
    call: Call, planned: Plan | None, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if call.cache_seqlens is not None:
        raise RuntimeError("selection_attention_with_kvcache has no gradient: train with selection_attention")
    if do is None and dlse is None:
        return (None,) * 3
    # A kernel served the saved tensors, so only a hook can have replaced them by odd ones.
    replaced = any(x.__class__ is not Tensor and odd(x) for x in call[:3])
    seen = is_grad_enabled() or dispatch_modes() or odd(do) or odd(dlse) or replaced
    if planned is not None and not seen:
        gradients = backward.backward(planned, call, do, dlse, o, lse, wanted)
    else:  # if the gradient is differentiated again, the operator raises an error that says what to do
        gradients = torch.ops.nsa.selection_attention_backward(do, dlse, o, lse, list(wanted), *_arguments(call))
    return tuple(x if want else None for x, want in zip(gradients, wanted, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: TENSORS - 1], *output)
    ctx.options = *inputs[TENSORS - 1 :], True, settings.get()


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the operator's arguments, of which q, k and v have one."""
    *tensors, o, lse = ctx.saved_tensors
    call = Call._make((*tensors, None, *ctx.options))
    with settings.applied(call.settings):
        gradients = _gradients(call, None, do, dlse, o, lse, tuple(ctx.needs_input_grad[:3]))
    return (*gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients)))


# --- the operators ----------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _of_arguments(arguments)
    torch_modes.no_tangents("the operator", call.q, call.k, call.v)
    o, lse = dispatch.run(routing.plan(call), call)
    assert lse is not None
    return o, lse


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    if torch_modes.forward_mode():  # always refused: PyTorch does not say whether a fake tensor has a tangent
        torch_modes.tangents_refused("a compiled call")
    q, _, v = arguments[:3]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def _backward(
    do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> Gradients:
    call = _of_arguments(arguments)
    torch_modes.no_tangents("the gradient", do, dlse, call.q, call.k, call.v)
    return backward.backward(routing.plan(call), call, do, dlse, o, lse, tuple(wanted))


def _backward_fake(
    do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> Gradients:
    dq, dk, dv = (x.new_empty(x.shape if want else (0,)) for x, want in zip(arguments[:3], wanted, strict=True))
    return dq, dk, dv


def _backward_vmap(
    info: Any, in_dims: tuple[Any, ...], do: Tensor | None, dlse: Tensor | None, *rest: Any
) -> tuple[Gradients, tuple[int, int, int]]:
    """The gradients for several gradients of one output at once (``is_grads_batched``): one backward pass for each.

    Raises:
        RuntimeError: ``vmap`` also maps an input of the call.
    """
    if any(dim is not None for dim in tree_leaves(in_dims[2:])):
        torch_modes.vmap_refused()
    given = [(x, dim) for x, dim in zip((do, dlse), in_dims, strict=False)]
    each = []
    for i in range(info.batch_size):
        one = [x if x is None or dim is None else x.select(dim, i) for x, dim in given]
        each.append(torch.ops.nsa.selection_attention_backward(*one, *rest))
    dq, dk, dv = (torch.stack(xs) for xs in zip(*each, strict=True))
    return (dq, dk, dv), (0, 0, 0)


for _name, _schema, _real, _fake, _vmap in (
    ("selection_attention", _SCHEMA, _forward, _forward_fake, torch_modes.vmap_refused),
    ("selection_attention_backward", _BACKWARD_SCHEMA, _backward, _backward_fake, _backward_vmap),
):
    _library.define(_name + _schema, tags=_TAGS)
    _library.impl(_name, _real, "CPU")
    _library.impl(_name, _real, "CUDA")
    torch.library.register_fake(f"nsa::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"nsa::{_name}", _vmap, lib=_library)
torch.library.register_autograd("nsa::selection_attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("nsa::selection_attention_backward", torch_modes.differentiable_once, lib=_library)
