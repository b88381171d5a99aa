"""Packed SDPA, backend ``sdpa``: the fallback of the Triton kernels, and what they are timed against."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.call import Call
from nsa.kernels.shared.shape import E4M3
from nsa.plain import spans as sp
from nsa.torch_modes import differentiable_once, transforms_active

WORKSPACE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 23}  # of a chunk of rows; on a CPU a chunk must fit the cache
KEPT_BYTES = 1 << 30  # packed keys and values that autograd may keep for the backward pass
READ_FREELY = ("cpu",)  # devices whose values the host reads without waiting
MAX_ROWS_PER_CALL = 32768  # SDPA's batch becomes a CUDA grid dimension, which is at most 65,535


def sdpa_rows(q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, scale: float, layout: str) -> Tensor:
    """SDPA over packed rows.

    Causality is in the spans already, so SDPA gets ``is_causal=False``. For one query SDPA's causal mask is aligned
    top-left and would leave a single key.

    Args:
        q: ``[N, H, D]``. K: ``[N, L, D]``. V: ``[N, L, Dv]``.
        mask: ``[N, L]`` bool, True for slots that hold a key; None if all do.
        layout: how ``H`` query heads share one KV head. ``heads_as_queries`` passes them as ``H`` queries of one head,
            ``expanded`` as ``H`` heads over expanded K and V, ``enable_gqa`` by SDPA's option of that name.

    Returns:
        ``[N, H, Dv]``.
    """
    K, V = K[:, None], V[:, None]
    attn_mask = None if mask is None else mask[:, None, None, :]
    as_queries = layout == "heads_as_queries"
    q = q[:, None] if as_queries else q[:, :, None]
    if layout == "expanded":
        K, V = (x.expand(-1, q.shape[1], -1, -1) for x in (K, V))
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for x in (q, K, V):
            if x.requires_grad:
                x.register_hook(_once)
    out = F.scaled_dot_product_attention(
        q, K, V, attn_mask, is_causal=False, scale=scale, enable_gqa=layout == "enable_gqa"
    )
    return out[:, 0] if as_queries else out[:, :, 0]


def _once(gradient: Tensor | None) -> Tensor | None:
    """A hook on SDPA's inputs: where SDPA's gradient cannot be differentiated, the error is ours, not PyTorch's."""
    node = None if gradient is None else gradient.grad_fn
    if node is None or node.name() != "torch::autograd::NotImplemented":
        return None
    found: Tensor = _DifferentiableOnce.apply(gradient)  # type: ignore[no-untyped-call]
    return found


class _DifferentiableOnce(torch.autograd.Function):
    """The identity, whose gradient is an error."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        differentiable_once()


def packed_sdpa(call: Call, bound: int | None = None, layout: str = "heads_as_queries") -> tuple[Tensor, Tensor | None]:
    """Copy each row's selected keys side by side, then call SDPA once per chunk of rows. Differentiable.

    A chunk takes at most ``WORKSPACE_BYTES``, or one row. Autograd keeps up to ``KEPT_BYTES`` of packed keys. If there
    are more, the backward pass packs them again, except under ``torch.compile`` and ``torch.func``.

    Args:
        bound: host bound on the keys of a row; None: ``call.max_selected``.
        layout: one of ``gpu.SDPA_LAYOUTS``.

    Returns:
        As :func:`nsa.plain.oracle.selection_reference`.

    Raises:
        RuntimeError: a call with ranges and without a bound is compiled or captured as a CUDA graph.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    e4m3 = k.dtype == E4M3
    if e4m3:  # bytes are packed, and converted afterwards
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    spans = sp.of_call(call)
    bound = _most(call, call.max_selected if bound is None else bound, spans.starts.shape[-1])
    HKV, D, Dv = k.shape[-2], q.shape[-1], v.shape[-1]
    G = q.shape[-2] // HKV
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    queries = _aligned(q.reshape(spans.batch.shape[0] * HKV, G, D))
    if scale <= 0:  # SDPA's CUDA kernels subtract the maximum of unscaled scores: a negative scale overflows
        queries, scale = (-queries, -scale) if scale < 0 else (queries * 0, 1.0)
    N = queries.shape[0]
    k_scale, v_scale = (  # one number, or one for each KV head, becomes one for each row
        None if x is None else x.reshape(-1).expand(HKV).repeat(N // HKV)[:, None, None]
        for x in (call.k_scale, call.v_scale)
    )
    scaled = queries if k_scale is None else (queries * k_scale).to(q.dtype)
    lengths = spans.lengths().view(-1)
    L, masked = sp.max_length(lengths, bound) if e4m3 else _slots(lengths, bound)
    out = q.new_zeros(N, G, Dv)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((N, G), -math.inf, device=q.device, dtype=lse_dtype) if call.return_lse else None
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if (L == 0 or N == 0) and not keep:
        return _shaped(q, out, lse)

    if masked or L == 0 or block_table is not None:  # keys of a page that does not exist are masked
        masked, L = True, max(8, -(-L // 8) * 8)  # SDPA needs masks whose rows are multiples of 16 bytes
    gather = sp.gather_for(k, v, spans, L, block_table)
    per_row = L * ((D + Dv) * q.element_size() * 2 + 48 + (D * 4 + G * 8 if call.return_lse else 0))
    chunk = max(1, min(MAX_ROWS_PER_CALL, WORKSPACE_BYTES.get(q.device.type, 1 << 30) // per_row))
    pieces = []
    into = None if keep or q.is_cuda else gather.buffers(min(chunk, N), L)

    def attend(rows: slice) -> tuple[Tensor, Tensor | None]:
        K, V, valid = gather.pack(rows, L, masked, into)
        if e4m3:
            K, V = K.view(E4M3).to(q.dtype), V.view(E4M3).to(q.dtype)
        empty = (lengths[rows] == 0 if block_table is None else ~valid.any(-1))[:, None]
        # An empty row attends to zeros, and its output is set to 0. So neither pass, forward or backward, gives NaN.
        mask = valid | empty if masked else None
        o = sdpa_rows(scaled[rows], K, V, mask, scale, layout)
        o = o if v_scale is None else (o * v_scale[rows]).to(q.dtype)
        o = o.masked_fill(empty[..., None], 0) if masked else o
        if lse is None:
            return o, None
        exact = queries[rows].to(lse.dtype)
        exact = exact if k_scale is None else exact * k_scale[rows]
        scores = torch.bmm(exact, K.to(lse.dtype).transpose(1, 2)).mul_(scale)
        return o, torch.logsumexp(scores.masked_fill(~valid[:, None], -math.inf), -1)

    much = N * per_row > KEPT_BYTES
    again = keep and much and not torch.compiler.is_compiling() and not transforms_active()
    # A compiler treats the length of a `range` as a constant and would compile anew for each number of rows.
    for begin in (0,) if N <= chunk else range(0, N, chunk):
        rows = slice(begin, min(begin + chunk, N))
        o, lse_rows = checkpoint(attend, rows, use_reentrant=False, preserve_rng_state=False) if again else attend(rows)
        if keep:
            pieces.append(o)
        else:
            out[rows] = o
        if lse is not None and lse_rows is not None:
            lse[rows] = lse_rows
    return _shaped(q, torch.cat(pieces) if keep else out, lse)


def _slots(lengths: Tensor, bound: int | None) -> tuple[int, bool]:
    """:func:`spans.max_length`. On a CPU reading is free, so a bound does not hide that all rows are equally long."""
    if bound is None or lengths.device.type not in READ_FREELY or not sp.readable(lengths):
        return sp.max_length(lengths, bound)
    L, masked = sp.max_length(lengths, None)
    return (L, masked) if bound >= L else (bound, True)


def _most(call: Call, bound: int | None, n: int) -> int | None:
    """``bound``, or the number of keys that ``n`` spans can hold if it is lower; None for ranges without a bound."""
    if call.block_size is None and bound is None:
        return None
    room = call.k.shape[-3] * (1 if call.block_table is None else call.block_table.shape[1])
    held = n * (room if call.block_size is None or room < call.block_size else call.block_size)
    return held if bound is None or held < bound else bound


def _aligned(x: Tensor) -> Tensor:
    """``x``, contiguous and 16-byte aligned as SDPA's CUDA kernels need it. ``x`` is copied if it is not.

    Under a compiler ``x`` is always copied, because a compiler does not know the address.
    """
    if not torch.compiler.is_compiling() and x.is_contiguous() and sp.aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _shaped(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out = out.view(*q.shape[:-1], out.shape[-1])
    return out, None if lse is None else lse.view(q.shape[:-1])
