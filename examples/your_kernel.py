"""A kernel for the suite to prove: selection attention in Triton, one query head a program, as plain as it gets.

    pytest -m parity --nsa-impl examples.your_kernel:attend

It imports nothing of `nsa`: that is all a kernel of yours needs to be tested. Not fast: every head of a group reads the
group's keys again, and a span of two keys costs a whole tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # keys of a tile


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, ranges_ptr, o_ptr, lse_ptr, S, S_kv, HQ, HKV, n, scale,
    D: tl.constexpr, Dv: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # of B * S * HQ
    h, s, b = program % HQ, program // HQ % S, program // HQ // S
    kv_head = h // (HQ // HKV)
    row = (b * S + s) * HKV + kv_head
    # Queries are the newest S of S_kv positions. No key past the query's own, and none outside the tensor.
    limit = tl.minimum(S_kv - S + s + 1, S_kv) if CAUSAL else S_kv

    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q = tl.load(q_ptr + program * D + d, mask=d < D, other=0.0).to(tl.float32)  # [D_PAD]
    m = -float("inf")  # the largest score so far
    total = 0.0  # of exp(score - m)
    acc = tl.zeros([DV_PAD], tl.float32)
    for span in range(n):
        start = tl.maximum(tl.load(ranges_ptr + (row * n + span) * 2), 0)
        end = tl.minimum(tl.load(ranges_ptr + (row * n + span) * 2 + 1), limit)
        for tile in range(start, end, BLOCK):
            key = tile + tl.arange(0, BLOCK)
            inside = key < end
            at = (b * S_kv + key) * HKV + kv_head
            k = tl.load(k_ptr + at[:, None] * D + d, mask=inside[:, None] & (d < D), other=0.0)  # [BLOCK, D_PAD]
            v = tl.load(v_ptr + at[:, None] * Dv + dv, mask=inside[:, None] & (dv < Dv), other=0.0)  # [BLOCK, DV_PAD]
            score = tl.sum(q * k.to(tl.float32), 1) * scale
            score = tl.where(inside, score, -float("inf"))  # [BLOCK]
            m_new = tl.maximum(m, tl.max(score, 0))
            shrink, p = tl.exp(m - m_new), tl.exp(score - m_new)
            total = total * shrink + tl.sum(p, 0)
            acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
            m = m_new
    some = total > 0  # else nothing is selected: O = 0, LSE = -inf
    o = tl.where(some, acc / tl.where(some, total, 1.0), 0.0)
    tl.store(o_ptr + program * Dv + dv, o, mask=dv < Dv)
    tl.store(lse_ptr + program, tl.where(some, m + tl.log(tl.where(some, total, 1.0)), -float("inf")))


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, ranges: Tensor, causal: bool, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """What `--nsa-impl` calls.

    Args:
        q: `[B, S, HQ, D]`. k: `[B, S_kv, HKV, D]`. v: `[B, S_kv, HKV, Dv]`.
        ranges: `[B, S, HKV, n, 2]` int32 or int64, half-open key spans of any values.
        causal: query `s` sees no key past `S_kv - S + s`.
        scale: of the scores.

    Returns:
        `O [B, S, HQ, Dv]` in `q`'s dtype; with `return_lse` also the natural log-sum-exp `[B, S, HQ]`, fp32.

    Raises:
        NotImplementedError: a call this kernel does not take. The suite lists it as unsupported, not as failed.
    """
    if q.dtype == torch.float64:
        raise NotImplementedError("float64")
    q, k, v, ranges = (x.contiguous() for x in (q, k, v, ranges))
    (B, S, HQ, D), (S_kv, HKV, Dv) = q.shape, v.shape[1:]
    o, lse = q.new_empty(B, S, HQ, Dv), q.new_empty(B, S, HQ, dtype=torch.float32)
    if o.numel():
        _attend_kernel[(B * S * HQ,)](
            q, k, v, ranges, o, lse, S, S_kv, HQ, HKV, ranges.shape[3], scale, D, Dv, triton.next_power_of_2(D),
            triton.next_power_of_2(Dv), BLOCK, causal, enable_fp_fusion=True,  # else Triton 3.9 warns, an error here
        )  # fmt: skip
    return (o, lse) if return_lse else o
