"""Two plain-torch implementations: the fp64 gather oracle, and packed SDPA (fallback and yardstick).

They share nothing but the clamping of spans to what a token may see: the oracle looks every selected key up span by
span, packed SDPA walks along rows. What both compute is equations 5 to 12 of arXiv 2502.11089 with the selection given.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa import spans as sp
from nsa.call import Call
from nsa.transforms import transforms_active

WORKSPACE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 23}  # CPU: a packed chunk stays in the cache
KEPT_BYTES = 1 << 30  # packed keys that autograd may keep
ORACLE_BYTES = 1 << 28
MAX_ROWS_PER_CALL = 32768  # SDPA's batch is a CUDA grid dimension of at most 65,535


def call_spans(call: Call) -> sp.RowSpans:
    """Clamped spans of a call."""
    q, k, table = call.q, call.k, call.block_table
    S_kv = k.shape[-3] if table is None else k.shape[1] * table.shape[1]
    limits = sp.key_limits(
        math.prod(q.shape[:-2]), q.shape[-3], S_kv, causal=call.causal, device=q.device, q_positions=call.q_positions,
        cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, cache_seqlens=call.cache_seqlens,
    )  # fmt: skip
    return sp.row_spans(call.ranges, call.block_indices, call.block_size, *limits)


def selection_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """The oracle: gather each row's keys, then softmax attention in fp64. fp64 tensors get its full precision.

    Returns:
        ``O`` like ``q`` with ``Dv`` last, in ``q``'s dtype; with ``return_lse`` also ``LSE`` ``q.shape[:-1]`` (fp64
        for fp64 inputs, else fp32), else None.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    spans = call_spans(call)
    if k.dim() == 3:
        k, v = k[None], v[None]
    pages = k.shape[0]
    if block_table is not None and pages == 0:
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))  # for keys that are not there to point at
    HKV, G, D, Dv = k.shape[2], q.shape[-2] // k.shape[2], q.shape[-1], v.shape[-1]
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    queries = q.reshape(spans.batch.shape[0], HKV, G, D)
    lengths = spans.lengths()
    L = int(lengths.max()) if lengths.numel() else 0
    outs, lses = [], []
    per_token = max(1, HKV * L * (8 * (D + Dv) + 9 * spans.starts.shape[-1]))
    for chunk in torch.arange(queries.shape[0], device=q.device).split(max(1, ORACLE_BYTES // per_token)):
        starts, ends = spans.starts[chunk].long(), spans.ends[chunk].long()  # [t, HKV, n]
        # Selected slot p belongs to the span before whose end p keys have been counted.
        counted = (ends - starts).cumsum(-1)
        p = torch.arange(L, device=q.device)
        slot = (p[:, None] >= counted[:, :, None, :]).sum(-1)  # [t, HKV, L]
        valid = p < lengths[chunk][..., None]
        slot = slot.clamp(max=max(starts.shape[-1] - 1, 0))
        if L:
            key = starts.gather(-1, slot) + p - (counted - (ends - starts)).gather(-1, slot)
            key = torch.where(valid, key, 0) + spans.offset[chunk][:, None, None]
        else:
            key = torch.zeros_like(slot)
        batch = spans.batch[chunk][:, None, None]
        head = torch.arange(HKV, device=q.device)[:, None]
        if block_table is not None:
            batch, key, valid = sp.in_pages(block_table, pages, k.shape[1], batch, key, valid)
        # What was not selected may be NaN: it is replaced, not multiplied by zero.
        K = k[batch, key, head].double().masked_fill(~valid[..., None], 0.0)  # [t, HKV, L, D]
        V = v[batch, key, head].double().masked_fill(~valid[..., None], 0.0)
        scores = torch.einsum("thgd,thld->thgl", queries[chunk].double(), K) * scale
        scores = scores.masked_fill(~valid[:, :, None], -math.inf)
        lse = torch.logsumexp(scores, -1)
        # No key, or none of a finite score: weights of 0, not exp(-inf + inf) = NaN. SDPA does the same.
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        outs.append(torch.einsum("thgl,thld->thgd", weights, V))
        lses.append(lse)
    out = torch.cat(outs).to(q.dtype) if outs else q.new_zeros(0, HKV, G, Dv)
    out = out.reshape(*q.shape[:-1], Dv)
    if not call.return_lse:
        return out, None
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.cat(lses).to(lse_dtype) if lses else q.new_zeros(0, HKV, G, dtype=lse_dtype)
    return out, lse.reshape(q.shape[:-1])


def beyond_rounding(got: Tensor, want: Tensor, dtype: torch.dtype, of: str = "") -> str | None:
    """How far ``got`` is from the oracle's ``want``, if rounding to ``dtype`` does not explain it; else None.

    Rounding explains two units in the last place of the largest value there is. One key of a few hundred lost, one
    element of a head dimension lost or a scale 3% off is further off than that.
    """
    got = got.cpu().double()
    same = (got == want) & want.isinf()
    error = torch.where(same, 0.0, (got - want).abs())
    worst = float(torch.where(error.isnan(), math.inf, error).max())
    peak = float(want[want.isfinite()].abs().amax()) if want.isfinite().any() else 0.0
    bound = max(2 * torch.finfo(dtype).eps, 1e-4 if dtype == torch.float32 else 0.0) * (peak or 1.0)
    return None if worst <= bound else f"max {of}error {worst:.3g}, rounding explains {bound:.3g}"


def sdpa_rows(q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None, scale: float, layout: str) -> Tensor:
    """SDPA over packed rows.

    Args:
        q: ``[N, H, D]``. K: ``[N, L, D]``. V: ``[N, L, Dv]``. mask: ``[N, L]`` bool, or None where all slots are keys.
        layout: how ``H`` heads share one KV head: as the queries of one head, as heads over expanded K and V, or by
            SDPA's ``enable_gqa``.

    Returns:
        ``[N, H, Dv]``. The spans are causal already, hence ``is_causal=False``: with one query SDPA's causal mask is
        top-left and would leave a single key.
    """
    K, V = K[:, None], V[:, None]
    attn_mask = None if mask is None else mask[:, None, None, :]
    if layout == "heads_as_queries":
        return F.scaled_dot_product_attention(q[:, None], K, V, attn_mask, is_causal=False, scale=scale)[:, 0]
    q = q[:, :, None]
    if layout == "expanded":
        K, V = (x.expand(-1, q.shape[1], -1, -1) for x in (K, V))
    out = F.scaled_dot_product_attention(
        q, K, V, attn_mask, is_causal=False, scale=scale, enable_gqa=layout == "enable_gqa"
    )
    return out[:, :, 0]


def packed_sdpa(
    call: Call, bound: int | None = None, layout: str = "heads_as_queries"
) -> tuple[Tensor, Tensor | None]:
    """Packed SDPA: copy each row's keys side by side, then one SDPA call per chunk of rows. Differentiable.

    The workspace stays below ``WORKSPACE_BYTES`` as long as one row's keys fit it. Autograd keeps up to ``KEPT_BYTES``
    of packed keys, and packs again where there are more; compilers and ``torch.func`` keep all of them.

    Args:
        bound: host bound on the keys of a row, ``call.max_selected`` unless given.
        layout: one of ``gpu.SDPA_LAYOUTS``.

    Returns:
        As :func:`selection_reference`.

    Raises:
        RuntimeError: without a bound, for ranges, under ``torch.compile`` or CUDA graph capture.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    bound = call.max_selected if bound is None else bound
    spans = call_spans(call)
    room = k.shape[-3] * (1 if block_table is None else block_table.shape[1])
    held = room if call.block_size is None or room < call.block_size else call.block_size  # keys of a span, at most
    held *= spans.starts.shape[-1]
    if call.block_size is not None or bound is not None:  # a bound may be loose, and a block reach past the end
        bound = held if bound is None or held < bound else bound
    HKV, D, Dv = k.shape[-2], q.shape[-1], v.shape[-1]
    G = q.shape[-2] // HKV
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    queries = _aligned(q.reshape(spans.batch.shape[0] * HKV, G, D))
    if scale <= 0:  # SDPA's CUDA kernels take the maximum of unscaled scores
        queries, scale = (-queries, -scale) if scale < 0 else (queries * 0, 1.0)
    N = queries.shape[0]
    lengths = spans.lengths().view(-1)
    L, masked = sp.max_length(lengths, bound)
    out = q.new_zeros(N, G, Dv)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((N, G), -math.inf, device=q.device, dtype=lse_dtype) if call.return_lse else None
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if (L == 0 or N == 0) and not keep:
        return _shaped(q, out, lse)

    if masked or L == 0 or block_table is not None:  # whose pages may not exist
        masked, L = True, max(8, -(-L // 8) * 8)  # SDPA wants masks of whole 16-byte rows
    gather = sp.gather_for(k, v, spans, L, block_table)
    per_row = L * ((D + Dv) * k.element_size() * 2 + 48 + (D * 4 + G * 8 if call.return_lse else 0))
    chunk = max(1, min(MAX_ROWS_PER_CALL, WORKSPACE_BYTES.get(q.device.type, 1 << 30) // per_row))
    pieces = []
    into = None if keep or q.is_cuda else gather.buffers(min(chunk, N), L)

    def attend(rows: slice) -> tuple[Tensor, Tensor | None]:
        K, V, valid = gather.pack(rows, L, masked, into)
        empty = (lengths[rows] == 0 if block_table is None else ~valid.any(-1))[:, None]
        # An empty row attends to zeros and is zeroed afterwards: no NaN, forward or backward.
        mask = valid | empty if masked else None
        o = sdpa_rows(queries[rows], K, V, mask, scale, layout)
        o = o.masked_fill(empty[..., None], 0) if masked else o
        if lse is None:
            return o, None
        scores = torch.bmm(queries[rows].to(lse.dtype), K.to(lse.dtype).transpose(1, 2)).mul_(scale)
        return o, torch.logsumexp(scores.masked_fill(~valid[:, None], -math.inf), -1)

    # Autograd would keep the packed keys of every chunk. Where they are many, each is packed again for its gradient.
    much = N * per_row > KEPT_BYTES
    again = keep and much and not torch.compiler.is_compiling() and not transforms_active()
    # A compiler would take the length of a range for a constant, and compile anew for each number of rows.
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


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, as SDPA's CUDA kernels need; a copy only where it is not.

    A compiler cannot ask for the offset: it always copies.
    """
    if not torch.compiler.is_compiling() and x.is_contiguous() and (x.storage_offset() * x.element_size()) % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _shaped(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out = out.view(*q.shape[:-1], out.shape[-1])
    return out, None if lse is None else lse.view(q.shape[:-1])
