"""dQ of tiles of neighbouring tokens, which read the union of their blocks as in ``nsa/kernels/union/kernel.py``.

The list kernel of the forward pass makes the lists. A tile reads each block of its union once, and a block's bits say
which tokens selected the block. Rows of these tiles have no parts of dQ. Which tiles these are depends on the selection
alone, so all lists of a backward pass can be made before its keys are there.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.sequences import BATCH, causal_limit, sequence_of

RUNTIME = "B S S_kv HKV list0 size tokens first tiles".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split()]


@triton.jit
def _sum_over_union(
    q, do, lse, delta, limit, farthest,
    k_base, v_base, list_ptr,
    blocks, size, stride_kn, stride_vn, scale,
    D: tl.constexpr, Dv: tl.constexpr, STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """dQ of one tile, not scaled. FINITE: NaN and infinities of K count as zeros in the last product."""
    r = tl.arange(0, q.shape[0])
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, do.shape[1])
    dq = tl.zeros(q.shape, tl.float32)  # [TOKENS * HEADS, BLOCK_D]
    keys = tl.arange(0, BLOCK_N)
    # An entry is loaded a step ahead and taken apart at once, as in the forward pass.
    coming = tl.load(list_ptr)
    mask = (coming >> 32).to(tl.int32)
    begin = coming.to(tl.int32) * size
    # Not pipelined if FINITE, so that the rare loop costs the usual one no registers.
    for step in tl.range(0, blocks, num_stages=1 if FINITE else None):
        stop = tl.minimum(farthest - begin, size)
        chosen = tl.where(((mask >> (r // HEADS)) & 1) != 0, tl.minimum(limit - begin, size), 0)
        seen = keys[None, :] < chosen[:, None]  # [TOKENS * HEADS, BLOCK_N]
        valid = keys < stop
        key = (begin + keys).to(tl.int64)
        k_ptrs = k_base + (key * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
        v_ptrs = v_base + (key * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
        k = tl.load(k_ptrs, mask=valid[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_ptrs, mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_N, BLOCK_DV]
        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
        p = tl.exp2(scores - lse[:, None])  # [TOKENS * HEADS, BLOCK_N]
        dp = tl.dot(do, tl.trans(v), input_precision=INPUT_PRECISION)
        ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
        if FINITE:
            k = tl.where(tl.abs(k) < float("inf"), k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=INPUT_PRECISION)
        coming = tl.load(list_ptr + tl.minimum(step + 1, blocks - 1))
        mask = (coming >> 32).to(tl.int32)
        begin = coming.to(tl.int32) * size
    return dq


@triton.jit(do_not_specialize=RUNTIME)
def _union_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, list_ptr, count_ptr,
    B, S, S_kv, HKV, list0, size, tokens, first, tiles,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile: ``TOKENS`` tokens with ``HEADS`` query heads each. A block is one tile of ``BLOCK_N`` keys.

    The lists are of KV heads of a larger call, and ``list0`` is the call's first among them.

    dS is zero where a row may not see a key, and zero times NaN is NaN. So a tile whose dQ has a NaN is computed again
    with finite keys, which is exact for rows that do not see the NaN; dS of the others is NaN already.
    """
    tile = tl.program_id(0) % tiles  # one KV head after the other, so that its keys may stay in L2
    head_kv = tl.program_id(0) // tiles
    blocks = tl.load(count_ptr + tile * HKV + list0 + head_kv)
    if blocks < 0:
        return
    token0 = (first + tile) * TOKENS
    seq, k_first, seqlen_k, shift = sequence_of(token0, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    r = tl.arange(0, TOKENS * HEADS)
    token = token0 + r // HEADS  # [TOKENS * HEADS]
    g = r % HEADS
    exists = (token < tokens) & (g < G)
    limit = causal_limit(tl.minimum(token, tokens - 1), shift, seqlen_k, pos_ptr, CAUSAL)
    limit = tl.where(exists, limit, 0)
    farthest = tl.max(limit, 0)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = head_kv * G + g
    at = token.to(tl.int64) * HKV * G + head
    q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q_mask = exists[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :], mask=q_mask, other=0.0)  # [TOKENS * HEADS, BLOCK_D]
    do_mask = exists[:, None] & (dv[None, :] < Dv)
    do = tl.load(do_ptr + at[:, None] * Dv + dv[None, :], mask=do_mask, other=0.0)  # [TOKENS * HEADS, BLOCK_DV]
    lse = tl.load(stats_ptr + at, mask=exists, other=float("inf"))
    delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HKV * G + at, mask=exists, other=0.0)
    k_off = tl.cast(head_kv, tl.int64) * stride_kh
    v_off = tl.cast(head_kv, tl.int64) * stride_vh
    if LAYOUT == BATCH:
        k_off += tl.cast(seq, tl.int64) * stride_kb
        v_off += tl.cast(seq, tl.int64) * stride_vb
    else:
        k_off += k_first * stride_kn
        v_off += k_first * stride_vn
    k_base = k_ptr + k_off * STRIDE_UNIT
    v_base = v_ptr + v_off * STRIDE_UNIT
    list_ptr += (tile.to(tl.int64) * HKV + list0 + head_kv) * (TOKENS * SLOTS)

    dq = _sum_over_union(
        q, do, lse, delta, limit, farthest, k_base, v_base, list_ptr, blocks, size, stride_kn, stride_vn, scale, D, Dv,
        STRIDE_UNIT, INPUT_PRECISION, HEADS, BLOCK_N, False,
    )  # fmt: skip
    spoiled = tl.sum((dq != dq).to(tl.int32))  # over both axes at once, which compiles for all GPUs
    if spoiled > 0:
        dq = _sum_over_union(
            q, do, lse, delta, limit, farthest, k_base, v_base, list_ptr, blocks, size, stride_kn, stride_vn, scale, D,
            Dv, STRIDE_UNIT, INPUT_PRECISION, HEADS, BLOCK_N, True,
        )  # fmt: skip
    tl.store(dq_ptr + at[:, None] * D + d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)
