"""The oracle, backend ``reference``: gathers every selected key and computes attention in fp64.

It computes equations 5 to 12 of arXiv 2502.11089 for a given selection. Its only code in common with packed SDPA is the
clamping of spans and the page look-up, both in :mod:`nsa.plain.spans`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels.shared.shape import E4M3
from nsa.plain import spans as sp

ORACLE_BYTES = 1 << 28  # workspace, which sets how many queries are computed at a time


def selection_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """Gather the selected keys and values of each row, then compute softmax attention in fp64.

    Returns:
        ``O`` ``[..., HQ, Dv]`` in ``q``'s dtype, and ``LSE`` ``[..., HQ]``: fp64 if ``q`` is, else fp32; None without
        ``return_lse``.
    """
    q, k, v, scale, block_table = call.q, call.k, call.v, call.scale, call.block_table
    spans = sp.of_call(call)
    if k.dim() == 3:
        k, v = k[None], v[None]
    pages, dtype = k.shape[0], k.dtype
    if dtype == E4M3:  # PyTorch cannot index fp8 on every device
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if block_table is not None and pages == 0:
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))  # padded slots need a page to index
    HKV, G, D, Dv = k.shape[2], q.shape[-2] // k.shape[2], q.shape[-1], v.shape[-1]
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    queries = q.reshape(spans.batch.shape[0], HKV, G, D)
    lengths = spans.lengths()
    L = int(lengths.max()) if lengths.numel() else 0
    outs, lses = [], []
    per_token = max(1, HKV * L * (8 * (D + Dv) + 9 * spans.starts.shape[-1]))
    for chunk in torch.arange(queries.shape[0], device=q.device).split(max(1, ORACLE_BYTES // per_token)):
        starts, ends = spans.starts[chunk].long(), spans.ends[chunk].long()  # [t, HKV, n]
        # Slot p of a row belongs to the first span with more than p keys up to its end.
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
        # Padded slots may hold NaN, so they are replaced: a weight of 0 would not remove a NaN.
        K, V = k[batch, key, head], v[batch, key, head]
        if dtype == E4M3:
            K, V = K.view(dtype), V.view(dtype)
        K, V = K.double(), V.double()
        if call.k_scale is not None:
            K = K * call.k_scale.double().view(-1, 1, 1)
        if call.v_scale is not None:
            V = V * call.v_scale.double().view(-1, 1, 1)
        K, V = (x.masked_fill(~valid[..., None], 0.0) for x in (K, V))  # [t, HKV, L, D]
        scores = torch.einsum("thgd,thld->thgl", queries[chunk].double(), K) * scale
        scores = scores.masked_fill(~valid[:, :, None], -math.inf)
        lse = torch.logsumexp(scores, -1)
        # If a row has no finite score, its weights are 0, as in SDPA, instead of exp(-inf + inf) = NaN.
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
    """Compare ``got`` with the oracle's ``want``: None if rounding to ``dtype`` explains the error, else a message.

    Rounding explains an error of two units in the last place of the largest value. A kernel that loses one of a few
    hundred keys or one element of the head dimension, or whose scale is 3% off, has a larger error.

    Args:
        of: what is compared, for the message.
    """
    got = got.cpu().double()
    same = (got == want) & want.isinf()
    error = torch.where(same, 0.0, (got - want).abs())
    worst = float(torch.where(error.isnan(), math.inf, error).max())
    peak = float(want[want.isfinite()].abs().amax()) if want.isfinite().any() else 0.0
    bound = max(2 * torch.finfo(dtype).eps, 1e-4 if dtype == torch.float32 else 0.0) * (peak or 1.0)
    return None if worst <= bound else f"max {of}error {worst:.3g}, rounding explains {bound:.3g}"
