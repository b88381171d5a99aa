"""Packed SDPA: the fallback of the kernels, and their yardstick."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.call import Call
from nsa.plain import spans as sp
from nsa.torch_modes import transforms_active

WORKSPACE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 23}  # CPU: a packed chunk stays in the cache
KEPT_BYTES = 1 << 30  # packed keys that autograd may keep
MAX_ROWS_PER_CALL = 32768  # SDPA's batch is a CUDA grid dimension of at most 65,535


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
        As :func:`nsa.plain.oracle.selection_reference`.

    Raises:
        RuntimeError: without a bound, for ranges, under ``torch.compile`` or CUDA graph capture.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    bound = call.max_selected if bound is None else bound
    spans = sp.of_call(call)
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
