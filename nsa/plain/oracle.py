"""The oracle: every selected key is looked up span by span, and attention computed in fp64.

It computes equations 5 to 12 of arXiv 2502.11089 with the selection given. It shares no code with packed SDPA but the
clamping of spans to what a token may see.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.call import Call
from nsa.plain import spans as sp

ORACLE_BYTES = 1 << 28


def selection_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """The oracle: gather each row's keys, then softmax attention in fp64. fp64 tensors get its full precision.

    Returns:
        ``O`` like ``q`` with ``Dv`` last, in ``q``'s dtype; with ``return_lse`` also ``LSE`` ``q.shape[:-1]`` (fp64
        for fp64 inputs, else fp32), else None.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    spans = sp.of_call(call)
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
