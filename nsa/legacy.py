"""Packed rows and the original wrapper's layout: views onto the same kernels.

The direct entry points (``sel_attn_fwd_*``) run Triton or raise; the wrappers in the original layout route and fall
back. ``N`` rows of ``H`` query heads each; row ``i`` reads every key it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import dispatch, routing, settings
from nsa.api import selection_attention
from nsa.call import Call
from nsa.torch_modes import (
    any_autocast_enabled,
    autocast_dtype,
    cast,
    forward_mode,
    no_tangents,
    transformed,
    transforms_active,
)
from nsa.validate import check_tensors, number


def _direct(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """A call on packed rows, whose only selection is ``cu_seqlens_k``."""
    if call.scale is not None and type(call.scale) is not float:
        call = call._replace(scale=number(call.scale))
    if any_autocast_enabled() or transforms_active() or forward_mode():
        call = _unusual(call)
    try:
        planned = routing.plan(call, call.rows_key(), routing.make_rows_plan)
    except AttributeError:
        check_tensors(**_named(call))
        raise
    if torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad):
        raise RuntimeError("packed rows have no backward, and an input requires grad: use selection_attention")
    o, lse = dispatch.launch(planned, call)
    return o if lse is None else (o, lse)


def _unusual(call: Call) -> Call:
    """The call as autocast wants it; refused in a transform of ``torch.func`` and with tangents."""
    check_tensors(**_named(call))
    if transformed(*call.tensors):
        no_tangents("packed rows", call.q, call.k, call.v)
        raise RuntimeError("packed rows have no rule for transforms of torch.func: use selection_attention")
    dtype = autocast_dtype(call.q.device)
    if dtype is None:
        return call
    return call._replace(q=cast(call.q, dtype), k=cast(call.k, dtype), v=cast(call.v, dtype))


def _named(call: Call) -> dict[str, Tensor]:
    return call.named_tensors("Q", *(("K", "V") if call.cu_seqlens_k is None else ("K_all", "V_all")))


def sel_attn_fwd_dense(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows with ``L`` keys each, one query head a program (route ``per_head``, for comparison).

    Args:
        Q: ``[N, H, D]``. K: ``[N, L, D]``. V: ``[N, L, Dv]``.
        scale: of the scores; ``1 / sqrt(D)`` if None.
        return_lse: also return the natural log-sum-exp ``[N, H]`` fp32.
        out: ``[N, H, Dv]`` to write to.

    Returns:
        ``[N, H, Dv]`` in ``Q``'s dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
        RuntimeError: Triton cannot run here. It never falls back.
    """
    call: Call = tuple.__new__(
        Call,
        (
            Q, K, V, None, None, None, None, None, None, None, out, None, True, scale, None, "triton", "per_head",
            return_lse, settings.get(),
        ),
    )  # fmt: skip
    return _direct(call)


def sel_attn_fwd_dense_group(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows with ``L`` keys each, the whole group a program; as :func:`sel_attn_fwd_dense` otherwise."""
    call: Call = tuple.__new__(
        Call,
        (
            Q, K, V, None, None, None, None, None, None, None, out, None, True, scale, None, "triton", "auto",
            return_lse, settings.get(),
        ),
    )  # fmt: skip
    return _direct(call)


def sel_attn_fwd_varlen(
    Q: Tensor,
    K_all: Tensor,
    V_all: Tensor,
    cu_seqlens: Tensor,
    *,
    max_selected: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows of different lengths, one query head a program (route ``per_head``, for comparison).

    Args:
        Q: ``[N, H, D]``. K_all: ``[sum L, D]``. V_all: ``[sum L, Dv]``.
        cu_seqlens: ``[N + 1]`` int32 or int64; row ``i`` reads keys ``[cu_seqlens[i], cu_seqlens[i + 1])``, clamped to
            the tensor.
        max_selected: host bound on the longest row; decides tiles and splits only.
        scale, return_lse, out: as in :func:`sel_attn_fwd_dense`.

    Returns, Raises: as :func:`sel_attn_fwd_dense`.
    """
    check_tensors(cu_seqlens=cu_seqlens)
    call: Call = tuple.__new__(
        Call,
        (
            Q, K_all, V_all, None, None, None, None, cu_seqlens, None, None, out, None, True, scale, max_selected,
            "triton", "per_head", return_lse, settings.get(),
        ),
    )  # fmt: skip
    return _direct(call)


def sel_attn_fwd_varlen_group(
    Q: Tensor,
    K_all: Tensor,
    V_all: Tensor,
    cu_seqlens: Tensor,
    *,
    max_selected: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows of different lengths, the whole group a program; as :func:`sel_attn_fwd_varlen` otherwise."""
    check_tensors(cu_seqlens=cu_seqlens)
    call: Call = tuple.__new__(
        Call,
        (
            Q, K_all, V_all, None, None, None, None, cu_seqlens, None, None, out, None, True, scale, max_selected,
            "triton", "auto", return_lse, settings.get(),
        ),
    )  # fmt: skip
    return _direct(call)


def selection_attention_triton(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ranges: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    max_selected: int | None = None,
) -> Tensor:
    """The original wrapper: routes as ``backend="auto"`` does, and falls back.

    Args:
        Q: ``[B, S, HKV, G, D]``. K: ``[B, HKV, S_kv, D]``. V: ``[B, HKV, S_kv, Dv]``.
        ranges: ``[B, S, HKV, n, 2]``, taken as given (the original's spans are causal already); ``causal=True`` clamps
            them as :func:`nsa.selection_attention` does.
        scale, max_selected: as in :func:`nsa.selection_attention`.

    Returns:
        ``[B, S, HKV, G, Dv]``.
    """
    return _original_layout(Q, K, V, ranges, causal, scale, max_selected, "auto")


def grouped_selection_attention_packed(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ranges: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    max_selected: int | None = None,
) -> Tensor:
    """Packed SDPA in the original wrapper's layout: reference and fallback. Arguments and result as
    :func:`selection_attention_triton`.
    """
    return _original_layout(Q, K, V, ranges, causal, scale, max_selected, "sdpa")


def _original_layout(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ranges: Tensor,
    causal: bool,
    scale: float | None,
    max_selected: int | None,
    backend: str,
) -> Tensor:
    check_tensors(Q=Q, K=K, V=V)
    for name, x, layout in (
        ("Q", Q, "[B, S, HKV, G, D]"),
        ("K", K, "[B, HKV, S_kv, D]"),
        ("V", V, "[B, HKV, S_kv, Dv]"),
    ):
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name}: expected {layout}, got shape {list(x.shape)}")
        if x.dtype != Q.dtype:
            wanted, got = (str(dtype).removeprefix("torch.") for dtype in (Q.dtype, x.dtype))
            raise TypeError(f"{name}: expected dtype {wanted} (that of Q), got {got}")
    B, _, HKV, _, D = Q.shape
    for name, x, layout, shape in (
        ("K", K, "[B, HKV, S_kv, D]", [B, HKV, K.shape[2], D]),
        ("V", V, "[B, HKV, S_kv, Dv]", [B, HKV, K.shape[2], V.shape[3]]),
    ):
        if list(x.shape) != shape:
            raise ValueError(f"{name}: expected {layout} = {shape}, got {list(x.shape)}")
    o = selection_attention(
        Q.flatten(2, 3),
        K.transpose(1, 2),
        V.transpose(1, 2),
        ranges=ranges,
        causal=causal,
        scale=scale,
        max_selected=max_selected,
        backend=backend,
    )
    return o.view(*Q.shape[:-1], V.shape[-1])
