"""The front door: selection attention over spans or blocks.

Shape glossary. ``B`` batch, ``S`` query positions, ``T`` tokens of a varlen batch, ``S_kv`` keys, ``HQ`` query heads,
``HKV`` KV heads, ``G = HQ // HKV``, ``D`` query and key head dim, ``Dv`` value head dim, ``n`` spans or blocks per row,
``L`` keys selected in a row. A *row* is one (batch, query position, KV head): ``G`` query heads and one list of spans.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from nsa import dispatch, ops
from nsa.transforms import any_autocast_enabled, autocast_dtype, cast, transformed, transforms_active
from nsa.validate import check_scale, check_tensors, raw

CuSeqlens = Tensor | tuple[Tensor, Tensor]


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    causal: bool = ...,
    q_positions: Tensor | None = ...,
    scale: float | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    causal: bool = ...,
    q_positions: Tensor | None = ...,
    scale: float | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    causal: bool = True,
    q_positions: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: CuSeqlens | None = None,
    max_selected: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    schedule: str = "auto",
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over the keys its row selected: NSA's selection branch (arXiv 2502.11089, section 3.3.2).

    Args:
        q: ``[B, S, HQ, D]``, or ``[T, HQ, D]`` with ``cu_seqlens``; fp16, bf16, fp32 or (reference, sdpa) fp64. Any
            strides, last dim contiguous. ``HQ = G * HKV`` with ``G`` from 1 to 128; ``D`` and ``Dv`` from 16 to 256.
        k: ``[B, S_kv, HKV, D]`` or ``[T_kv, HKV, D]``.
        v: ``[B, S_kv, HKV, Dv]`` or ``[T_kv, HKV, Dv]``.
        ranges: ``[B, S, HKV, n, 2]`` (varlen ``[T, HKV, n, 2]``) int32 or int64, half-open key spans, local to the
            row's sequence. Any values: spans are clamped to the sequence; a key listed twice counts twice.
        block_indices: ``[B, S, HKV, n]`` (varlen ``[T, HKV, n]``) int32 or int64, instead of ``ranges``; block ``b`` is
            ``[b * block_size, (b + 1) * block_size)``, negative is padding, in any slot.
        block_size: keys per block; with ``block_indices`` only.
        causal: clamp each span's end to ``t + 1``, where query ``s`` sits at ``t = S_kv - S + s`` (bottom-right).
        q_positions: ``[B, S]`` (varlen ``[T]``) int, ``t`` of each query instead.
        scale: of the scores; ``1 / sqrt(D)`` if None.
        cu_seqlens: ``[B + 1]`` int cumulative lengths of varlen sequences, or a pair ``(cu_seqlens_q, cu_seqlens_k)``.
            The first sequence begins at token 0, whatever they say; tokens after the last one select nothing. Neither
            is looked up, which would sync.
        max_selected: host bound on ``L``, the keys of a row; decides route, tiles and splits, and saves packed SDPA its
            device sync. More keys than promised: undefined result, but no read outside the tensors.
        return_lse: also return the natural log-sum-exp of the scaled scores.
        backend: ``auto`` routes and falls back; ``triton``, ``sdpa`` (packed) and ``reference`` never fall back.
        schedule: of the Triton kernels: ``query_major`` holds the group of a row in a program, ``per_head`` one head,
            ``key_major`` a block of keys and all queries that selected it. ``auto`` takes the last for prefills with
            block indices where it was measured to be faster (:mod:`nsa.schedules`); a NaN or inf in a block that a row
            selected may reach it there, even if that key is clamped away for it.
        out: ``[..., HQ, Dv]`` to write to.

    Gradients: of ``q``, ``k`` and ``v`` through both ``O`` and ``LSE``, in the dtype of each; the selection has none.
    Only ``reference`` (and ``sdpa`` under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``) is differentiable
    twice. They are the same bit by bit from run to run. A NaN or inf of a query or of ``dO`` may reach dK and dV of
    keys that are clamped away for that query, in a block that it selected. Long prompts with ``ranges`` want
    ``max_selected``, or the backward pass takes them in many small windows. ``torch.vmap`` is refused; other transforms
    of ``torch.func`` are served by ``sdpa`` or ``reference``, forward-mode AD by ``reference`` and not compiled.

    Under ``torch.autocast`` ``q``, ``k`` and ``v`` (not fp64) are cast to its dtype, as for SDPA.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]`` in ``q``'s dtype; with ``return_lse`` also ``LSE`` fp32
        ``[B, S, HQ]`` or ``[T, HQ]`` (fp64 for fp64). A row that selects nothing gives ``O = 0``, ``LSE = -inf``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above; says expected and got.
        RuntimeError: ``backend="triton"`` cannot serve the call; a kernel's gradient is differentiated again; a tensor
            is mapped by ``torch.vmap``; or packing without ``max_selected`` under
            ``torch.compile`` or CUDA graph capture.
    """
    if cu_seqlens is None:
        cu_q = cu_k = None
    else:
        pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        if len(pair) != 2:
            raise TypeError(f"cu_seqlens: expected a tensor or a pair of tensors, got a tuple of {len(pair)}")
        cu_q, cu_k = pair
    if scale is not None and type(scale) is not float:
        check_scale(scale)
    if is_compiling() or any_autocast_enabled() or transforms_active() or forward_ad._current_level >= 0:
        served = _transformed(
            q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, max_selected,
            return_lse, backend, schedule, out,
        )  # fmt: skip
        if served is not None:
            return served
    try:
        planned = dispatch.plan(
            q, k, v, ranges, block_indices, block_size, causal, q_positions, cu_q, cu_k, max_selected, out, backend,
            schedule,
        )  # fmt: skip
    except AttributeError:
        optional = {
            "ranges": ranges, "block_indices": block_indices, "q_positions": q_positions, "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k, "out": out,
        }  # fmt: skip
        check_tensors(q=q, k=k, v=v, **{name: x for name, x in optional.items() if x is not None})
        raise
    # A subclass, as FakeTensor, may have no memory to launch a kernel on: the operator knows what to do with it.
    if planned.route not in dispatch.PLAIN and (
        q.__class__ is not Tensor or (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):
        return _operator(
            q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, max_selected,
            return_lse, backend, schedule, out,
        )  # fmt: skip
    given = (
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, return_lse, out, None, None,
    )  # fmt: skip
    o, lse = dispatch.run(planned, given)
    if return_lse:
        assert lse is not None
        return o, lse
    return o


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    scale: float | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_selected: int | None,
    return_lse: bool,
    backend: str,
    schedule: str,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Through PyTorch's dispatcher, which knows the gradient and needs no memory to trace."""
    o, lse = torch.ops.nsa.selection_attention(
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, max_selected, backend,
        schedule,
    )  # fmt: skip
    o = ops.into(out, o)
    return (o, lse) if return_lse else o


def _transformed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    scale: float | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_selected: int | None,
    return_lse: bool,
    backend: str,
    schedule: str,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """A call compiled, under autocast, in a transform of ``torch.func`` or in forward mode; None: as any other."""
    check_tensors(q=q, k=k, v=v)
    tracing = is_compiling()
    wrapped = not tracing and transformed(q, k, v, ranges, block_indices, q_positions, cu_q, cu_k, out)
    dtype = autocast_dtype(q.device)
    if dtype is not None:
        with torch.autocast(q.device.type, enabled=False):  # it is done: what runs inside takes what it is given
            return selection_attention(  # type: ignore[call-overload, misc, no-any-return]
                cast(q, dtype), cast(k, dtype), cast(v, dtype), ranges=ranges, block_indices=block_indices,
                block_size=block_size, causal=causal, q_positions=q_positions, scale=scale,
                cu_seqlens=None if cu_q is None else (cu_q, cu_k), max_selected=max_selected, return_lse=return_lse,
                backend=backend, schedule=schedule, out=out,
            )  # fmt: skip
    if not (tracing or wrapped):
        return None
    if tracing and backend in ("auto", "triton"):
        return _operator(
            q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, max_selected,
            return_lse, backend, schedule, out,
        )  # fmt: skip
    if tracing:  # which can look up nothing
        planned = dispatch.make_plan(
            None, raw(q), raw(k), raw(v), None if ranges is None else raw(ranges),
            None if block_indices is None else raw(block_indices), block_size, causal,
            None if q_positions is None else raw(q_positions), None if cu_q is None else raw(cu_q),
            None if cu_k is None else raw(cu_k), max_selected, None if out is None else raw(out), backend, schedule,
        )  # fmt: skip
    else:
        planned = dispatch.plan(
            q, k, v, ranges, block_indices, block_size, causal, q_positions, cu_q, cu_k, max_selected, out, backend,
            schedule,
        )  # fmt: skip
    if wrapped:
        planned = dispatch.transformed(planned)
    given = (
        q, k, v, ranges, block_indices, block_size, causal, q_positions, scale, cu_q, cu_k, return_lse, out, None, None,
    )  # fmt: skip
    o, lse = dispatch.run(planned, given)
    return o if lse is None else (o, lse)


assert ops  # registers torch.ops.nsa
