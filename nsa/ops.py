"""The operators PyTorch sees, one for each direction: a boundary around a whole call, no maths.

``torch.compile`` traces neither routing nor kernels, autograd finds the gradient's formula here, and what PyTorch does
to tensors (fake ones, subclasses, vmap) is answered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from nsa import dispatch, garbage, gradients, settings
from nsa.transforms import forward_mode, no_tangents, tangents_refused, vmap_refused

_QKV = "Tensor q, Tensor k, Tensor v"
_CALL = (
    "Tensor? ranges, Tensor? block_indices, int? block_size, bool causal, Tensor? q_positions, float? scale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_selected, str backend, str schedule"
)
_SCHEMAS = {
    "selection_attention": f"({_QKV}, {_CALL}) -> (Tensor, Tensor)",
    "selection_attention_backward": (
        f"(Tensor do, Tensor? dlse, {_QKV}, Tensor o, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor)"
    ),
    "selection_attention_with_kvcache": (
        f"({_QKV}, Tensor cache_seqlens, Tensor? ranges, Tensor? block_indices, int? block_size, Tensor? block_table, "
        "bool causal, float? scale, int? max_selected, str backend, str schedule) -> (Tensor, Tensor)"
    ),
}
# Kernels want contiguous head dims: a compiler may not choose other strides for what it hands over.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library = torch.library.Library("nsa", "DEF")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor]:
    no_tangents("the operator", q, k, v)
    what = dispatch.plan(
        q, k, v, ranges, block_indices, block_size, causal, q_positions, cu_seqlens_q, cu_seqlens_k, max_selected, None,
        backend, schedule,
    )  # fmt: skip
    given = (
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_seqlens_q, cu_seqlens_k, True, None,
        None, None,
    )  # fmt: skip
    o, lse = dispatch.run(what, given)
    assert lse is not None
    return o, lse


def _with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    block_table: Tensor | None,
    causal: bool,
    scale: float | None,
    max_selected: int | None,
    backend: str,
    schedule: str,
) -> tuple[Tensor, Tensor]:
    no_tangents("selection_attention_with_kvcache", q, k_cache, v_cache)
    what = dispatch.plan(
        q, k_cache, v_cache, ranges, block_indices, block_size, causal, None, None, None, max_selected, None, backend,
        schedule, cache_seqlens, block_table,
    )  # fmt: skip
    if settings.get().debug_cache:
        garbage.report(cache_seqlens, block_table, q.shape[1], k_cache.shape[0], k_cache.shape[1], causal)
    given = (
        q, k_cache, v_cache, ranges, block_indices, block_size, causal, None, scale, None, None, True, None,
        cache_seqlens, block_table,
    )  # fmt: skip
    o, lse = dispatch.run(what, given)
    assert lse is not None
    return o, lse


def into(out: Tensor | None, o: Tensor) -> Tensor:
    """An operator's result where the caller wants it; ``out`` has not been checked where a call is compiled.

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


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    if forward_mode():  # whether a fake tensor has a tangent, torch does not say
        tangents_refused("a compiled call")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


def _backward_fake(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object) -> gradients.Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, *how = inputs
    ctx.set_materialize_grads(False)  # an output nobody uses costs nothing
    ctx.save_for_backward(q, k, v, *output, ranges, block_indices, q_positions, cu_q, cu_k)
    ctx.call = block_size, causal, scale, how


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of what :func:`_forward` takes: q, k and v."""
    arguments = len(ctx.needs_input_grad)
    if do is None and dlse is None:
        return (None,) * arguments
    q, k, v, o, lse, ranges, block_indices, q_positions, cu_q, cu_k = ctx.saved_tensors
    block_size, causal, scale, how = ctx.call
    found = torch.ops.nsa.selection_attention_backward(
        torch.zeros_like(o) if do is None else do, dlse, q, k, v, o, lse, ranges, block_indices, block_size, causal,
        q_positions, scale, cu_q, cu_k, *how,
    )  # fmt: skip
    return (*found, *(None,) * (arguments - len(found)))


def _twice(ctx: Any, *_: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "the gradient of selection_attention cannot be differentiated: differentiate twice with "
        'backend="reference", or with backend="sdpa" under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)'
    )


def _no_gradient(ctx: Any, *_: Tensor | None) -> NoReturn:
    raise RuntimeError("selection_attention_with_kvcache has no gradient: train with selection_attention")


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "selection_attention": (_forward, _forward_fake),
    "selection_attention_backward": (gradients.backward, _backward_fake),
    "selection_attention_with_kvcache": (_with_kvcache, _forward_fake),
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
torch.library.register_autograd("nsa::selection_attention_with_kvcache", _no_gradient, lib=_library)
