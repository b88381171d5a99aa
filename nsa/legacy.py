"""The original function names and layouts. The same kernels serve them.

``sel_attn_fwd_*`` take packed rows: ``N`` rows of ``H`` query heads; a row reads all keys that are packed for it. They
run Triton or raise an error. The two wrappers in the original layout fall back, as `nsa.selection_attention` does.
"""

from __future__ import annotations

from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from nsa import dispatch, overlap, routing, settings, torch_modes
from nsa.api import selection_attention
from nsa.call import Call
from nsa.torch_modes import any_autocast_enabled, odd, transforms_active
from nsa.validate import check_dtype, check_ndim, check_rows, check_shape, check_tensors, integer, number


def _direct(
    Q: Tensor, K: Tensor, V: Tensor, cu_seqlens: Tensor | None, max_selected: int | None, scale: float | None,
    return_lse: bool, out: Tensor | None, per_head: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A call on packed rows, whose only selection is ``cu_seqlens``."""
    if scale is not None and type(scale) is not float:
        scale = number(scale)
    schedule, current = "per_head" if per_head else "auto", settings.get()
    call: Call = tuple.__new__(
        Call,
        (
            Q, K, V, None, None, None, None, cu_seqlens, None, None, None, None, out, None, True, scale, max_selected,
            None, "triton", schedule, return_lse, current,
        ),
    )  # fmt: skip
    if any_autocast_enabled() or transforms_active() or forward_ad._current_level >= 0:
        call = _unusual(call)
        Q, K, V = call[:3]
    if type(Q) is not Tensor or type(K) is not Tensor or type(V) is not Tensor:
        _refuse_odd(call)
    try:
        key = Call.rows_key(Q, K, V, cu_seqlens, out, max_selected, schedule, current)
        planned = routing.plan(call, key, routing.make_rows_plan)
    except AttributeError:
        check_tensors(**_named(call))
        raise
    except TypeError:
        if integer(max_selected) is max_selected:
            check_rows(call)  # names a bound that has no hash
            raise
        return _direct(Q, K, V, cu_seqlens, integer(max_selected), scale, return_lse, out, per_head)
    if out is not None and overlap.near(out, Q, K, V, planned.extents):
        overlap.refuse_shared(call, _named)
    if is_grad_enabled() and (Q.requires_grad or K.requires_grad or V.requires_grad):
        raise RuntimeError("packed rows have no backward, and an input requires grad: use selection_attention")
    o, lse = dispatch.launch(planned, call)
    return o if lse is None else (o, lse)


def _unusual(call: Call) -> Call:
    """The call with the dtypes that autocast gives it. Transforms of ``torch.func`` and tangents are refused."""
    check_tensors(**_named(call))
    if torch_modes.transformed(*call.tensors):
        torch_modes.no_tangents("packed rows", call.q, call.k, call.v)
        raise RuntimeError("packed rows have no rule for transforms of torch.func: use selection_attention")
    dtype = torch_modes.autocast_dtype(call.q.device)
    return call if dtype is None else torch_modes.cast(call, dtype)


def _refuse_odd(call: Call) -> None:
    """Raise TypeError for a tensor of a class that may have no memory of its own."""
    named = _named(call)
    check_tensors(**named)
    for name, x in list(named.items())[:3]:
        if odd(x):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}: packed rows are no operator")


def _named(call: Call) -> dict[str, Tensor]:
    return call.named_tensors("Q", *(("K", "V") if call.cu_seqlens_k is None else ("K_all", "V_all")))


def sel_attn_fwd_dense(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of rows whose ``L`` selected keys are packed side by side. A row has ``H`` query heads and one KV head.

    Each program of the Triton kernel computes one head of a row (route ``per_head``). This function is kept for
    comparison, because :func:`sel_attn_fwd_dense_group` reads the keys of a row once for all heads.

    Args:
        Q: ``[N, H, D]``, fp16, bf16 or fp32.
        K: ``[N, L, D]``.
        V: ``[N, L, Dv]``.
        scale: factor of the scores; ``1 / sqrt(D)`` if None.
        return_lse: also return the natural log-sum-exp of the scaled scores, ``[N, H]`` fp32.
        out: ``[N, H, Dv]``, memory for the result.

    Returns:
        ``[N, H, Dv]`` in ``Q``'s dtype.

    Raises:
        ValueError, TypeError: a shape, dtype or device does not fit.
        RuntimeError: Triton cannot run here (there is no fallback), or an input requires a gradient.
    """
    return _direct(Q, K, V, None, None, scale, return_lse, out, True)


def sel_attn_fwd_dense_group(
    Q: Tensor, K: Tensor, V: Tensor, *, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`sel_attn_fwd_dense` with all ``H`` query heads of a row in one program (route ``query_major``)."""
    return _direct(Q, K, V, None, None, scale, return_lse, out, False)


def sel_attn_fwd_varlen(
    Q: Tensor, K_all: Tensor, V_all: Tensor, cu_seqlens: Tensor, *,
    max_selected: int | None = None, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed rows of different lengths, one after another in ``K_all`` and ``V_all``.

    For comparison, as :func:`sel_attn_fwd_dense`.

    Args:
        Q: ``[N, H, D]``, fp16, bf16 or fp32.
        K_all: ``[sum L, D]``.
        V_all: ``[sum L, Dv]``.
        cu_seqlens: ``[N + 1]`` int32 or int64. Row ``i`` reads keys ``[cu_seqlens[i], cu_seqlens[i + 1])``, clamped to
            the tensor.
        max_selected: upper bound, known to the host, of the keys of a row. It decides tiles and splits only.
        scale, return_lse, out: as for :func:`sel_attn_fwd_dense`.

    Returns, Raises: as for :func:`sel_attn_fwd_dense`.
    """
    if type(cu_seqlens) is not Tensor:  # asked first, because a call of a function takes longer
        check_tensors(cu_seqlens=cu_seqlens)
    return _direct(Q, K_all, V_all, cu_seqlens, max_selected, scale, return_lse, out, True)


def sel_attn_fwd_varlen_group(
    Q: Tensor, K_all: Tensor, V_all: Tensor, cu_seqlens: Tensor, *,
    max_selected: int | None = None, scale: float | None = None, return_lse: bool = False, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`sel_attn_fwd_varlen` with all ``H`` query heads of a row in one program (route ``query_major``)."""
    if type(cu_seqlens) is not Tensor:  # asked first, because a call of a function takes longer
        check_tensors(cu_seqlens=cu_seqlens)
    return _direct(Q, K_all, V_all, cu_seqlens, max_selected, scale, return_lse, out, False)


def selection_attention_triton(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, *,
    causal: bool = False, scale: float | None = None, max_selected: int | None = None,
) -> Tensor:  # fmt: skip
    """:func:`nsa.selection_attention` with ``backend="auto"``, in the original wrapper's layout.

    Args:
        Q: ``[B, S, HKV, G, D]``.
        K: ``[B, HKV, S_kv, D]``.
        V: ``[B, HKV, S_kv, Dv]``.
        ranges: ``[B, S, HKV, n, 2]`` int32 or int64.
        causal: clamp spans causally. False by default, because the original expects spans that are clamped already.
        scale, max_selected: as for :func:`nsa.selection_attention`.

    Returns:
        ``[B, S, HKV, G, Dv]`` in ``Q``'s dtype.

    Raises:
        As :func:`nsa.selection_attention`.
    """
    return _original_layout(Q, K, V, ranges, causal, scale, max_selected, "auto")


def grouped_selection_attention_packed(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, *,
    causal: bool = False, scale: float | None = None, max_selected: int | None = None,
) -> Tensor:  # fmt: skip
    """:func:`selection_attention_triton` with ``backend="sdpa"``, packed SDPA."""
    return _original_layout(Q, K, V, ranges, causal, scale, max_selected, "sdpa")


def _original_layout(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, causal: bool, scale: float | None, max_selected: int | None,
    backend: str,
) -> Tensor:  # fmt: skip
    check_tensors(Q=Q, K=K, V=V)
    layouts = {"Q": "[B, S, HKV, G, D]", "K": "[B, HKV, S_kv, D]", "V": "[B, HKV, S_kv, Dv]"}
    for x, (name, layout) in zip((Q, K, V), layouts.items(), strict=True):
        check_ndim(name, x, layout)
        check_dtype(name, x.dtype, (Q.dtype,), " (that of Q)")
    B, _, HKV, _, D = Q.shape
    for name, x, last in (("K", K, D), ("V", V, V.shape[3])):
        check_shape(name, x, layouts[name], (B, HKV, K.shape[2], last))
    o = selection_attention(
        Q.flatten(2, 3), K.transpose(1, 2), V.transpose(1, 2), ranges=ranges, causal=causal, scale=scale,
        max_selected=max_selected, backend=backend,
    )  # fmt: skip
    return o.view(*Q.shape[:-1], V.shape[-1])
