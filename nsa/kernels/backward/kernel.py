"""Backward kernels: dK and dV, summed block by block over queries, and dQ, key-major or query-major.

``P`` are the weights and ``O`` the output of the forward pass: ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P * (dP -
delta)``, ``dQ = scale * dS K``, ``dK = scale * dS^T Q``. Here ``delta = rowsum(dO * O) - dLSE`` is the gradient
through the normalisation and the log-sum-exp. Source: FlashAttention-2, arXiv 2307.08691, algorithm 2; order of loops
as in NSA, arXiv 2502.11089, section 3.4. There are no float atomics. Sums follow the order in which units
(``shared/inverse_index.py``) are listed.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import load_unit, query_offset
from nsa.kernels.shared.inverse_index import first_block
from nsa.kernels.shared.sequences import BATCH, causal_end, find_sequence, sequence_keys, visible_keys
from nsa.kernels.shared.spans import RANGES, TILED, clamp_span, key_positions, load_spans, tile_start

RUNTIME = "rows B S S_kv HKV heads head0 n size slots blocks first tokens window work slot_bits share several".split()
RUNTIME += "sum_heads here list0 served0".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split()]


@triton.jit(do_not_specialize=RUNTIME)
def _delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, rows, Dv: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr
):
    """Write ``stats [2, rows]``: base-2 LSE (inf for a row without keys), then delta. Here a row is one query head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    dv = tl.arange(0, BLOCK_DV)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * Dv + dv[None, :]
    mask = inside[:, None] & (dv[None, :] < Dv)
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_DV]
    do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(stats_ptr + row, lse, mask=inside)
    tl.store(stats_ptr + tl.cast(rows, tl.int64) + row, delta, mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr,
    B, S, S_kv, HKV, n, size, tokens,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, SOURCE: tl.constexpr, LAYOUT: tl.constexpr,
    CAUSAL: tl.constexpr, STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """dQ query-major: a program holds ``HEADS`` heads of a row and reads the row's keys, as in the forward pass."""
    program = tl.program_id(0)
    token = program % tokens  # one KV head after the other, so that its keys may stay in L2
    head_kv = program // tokens
    seq, k_first, limit = visible_keys(token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT, CAUSAL)
    head_off = tl.cast(head_kv, tl.int64)
    if LAYOUT == BATCH:
        k_base = k_ptr + (tl.cast(seq, tl.int64) * stride_kb + head_off * stride_kh) * STRIDE_UNIT
        v_base = v_ptr + (tl.cast(seq, tl.int64) * stride_vb + head_off * stride_vh) * STRIDE_UNIT
    else:
        k_base = k_ptr + (k_first * stride_kn + head_off * stride_kh) * STRIDE_UNIT
        v_base = v_ptr + (k_first * stride_vn + head_off * stride_vh) * STRIDE_UNIT

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    in_group = (g < HEADS) & (tl.program_id(1) * HEADS + g < G)
    head = head_kv * G + tl.program_id(1) * HEADS + g  # [BLOCK_G]
    at = token.to(tl.int64) * HKV * G + head
    q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q_mask = in_group[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :], mask=q_mask, other=0.0)  # [BLOCK_G, BLOCK_D]
    do_mask = in_group[:, None] & (dv[None, :] < Dv)
    do = tl.load(do_ptr + at[:, None] * Dv + dv[None, :], mask=do_mask, other=0.0)  # [BLOCK_G, BLOCK_DV]
    lse = tl.load(stats_ptr + at, mask=in_group, other=float("inf"))
    delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HKV * G + at, mask=in_group, other=0.0)

    dq = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    sel_row = sel_ptr + (token.to(tl.int64) * HKV + head_kv) * n * (2 if SOURCE == RANGES else 1)
    for chunk in range(0, tl.cdiv(n, SPANS)):
        start, before, length, total = load_spans(sel_row, chunk * SPANS, n, limit, size, SOURCE, SPANS, BLOCK_L)
        for begin in range(0, total, BLOCK_L):
            slot = begin + tl.arange(0, BLOCK_L)
            valid = slot < total
            if SOURCE == TILED:
                key = tile_start(begin, start, before, length) + tl.arange(0, BLOCK_L)
                valid = key < limit
            else:
                key = key_positions(slot, start, before, length)
            key = key.to(tl.int64)
            k_ptrs = k_base + (key * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
            k = tl.load(k_ptrs, mask=valid[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_L, BLOCK_D]
            v_ptrs = v_base + (key * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
            v = tl.load(v_ptrs, mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_L, BLOCK_DV]
            scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
            p = tl.exp2(scores - lse[:, None])  # [BLOCK_G, BLOCK_L]
            dp = tl.dot(do, tl.trans(v), input_precision=INPUT_PRECISION)
            ds = tl.where(valid[None, :], p * (dp - delta[:, None]), 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=INPUT_PRECISION)
    dq_ptrs = dq_ptr + at[:, None] * D + d[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=RUNTIME)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr, dq_part_ptr, sel_ptr, pos_ptr,
    cu_q_ptr, cu_k_ptr, span_ptr, unit_ptr, count_ptr, start_ptr, part_ptr, work_ptr,
    B, S, S_kv, HKV, sum_heads, heads, head0, list0, n, size, slots, blocks, first, tokens, window, work, slot_bits,
    several, stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, SOURCE: tl.constexpr, LAYOUT: tl.constexpr,
    CAUSAL: tl.constexpr, STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Add one window's units to dK and dV ``[keys, sum_heads, D | Dv]`` fp32; with ``dq_part_ptr`` write parts of dQ.

    A program takes one share, as in the forward pass, and ``BLOCK_N`` keys of its block. If the block has one share,
    the program adds to dK and dV. If the block has several, each program writes a partial sum ``[here, several, size,
    D | Dv]`` fp32 for :func:`_sum_kernel`. dq_part ``[window, here, slots, G, D]`` has the dtype of the queries.

    A launch takes ``here`` KV heads, the axis 1 of its grid: from ``head0`` on in the tensors of the call, from
    ``list0`` on in the lists, which are of ``heads`` KV heads.
    """
    UNITS: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (G + HEADS - 1) // HEADS  # if there are several, a tile holds one unit
    head_local = tl.program_id(1)
    head_kv = head0 + head_local
    listed = list0 + head_local
    at = listed * work + tl.program_id(0)
    all_work = heads * work
    count = tl.load(work_ptr + 2 * all_work + at)
    if count == 0:
        return
    block = tl.load(work_ptr + at)
    begin = tl.load(work_ptr + all_work + at)
    of_block = listed * blocks + block
    shares = tl.cdiv(tl.load(count_ptr + of_block), SHARE)
    share = (begin - tl.load(start_ptr + of_block)) // SHARE
    part = tl.load(part_ptr + of_block) + share
    unit_ptr += listed * window * slots + begin

    seq = 0
    q_first = tl.zeros([], tl.int64)  # a query's offset is q_first + token * stride_qs
    if LAYOUT == BATCH:
        per_sequence = tl.cdiv(S_kv, size)
        seq = block // per_sequence
        seqlen_k = S_kv
        k_off = seq.to(tl.int64) * stride_kb
        v_off = seq.to(tl.int64) * stride_vb
        q_first = seq.to(tl.int64) * (stride_qb - S.to(tl.int64) * stride_qs)
        shift = S_kv - S - seq * S  # position = token + shift
        key0 = (block - seq * per_sequence) * size
        row0 = seq.to(tl.int64) * S_kv + key0
    else:
        seq = find_sequence(cu_q_ptr, B, first + (tl.load(unit_ptr) >> slot_bits), 128)
        k_first, seqlen_k = sequence_keys(seq, B, S_kv, cu_k_ptr)
        k_off = k_first * stride_kn
        v_off = k_first * stride_vn
        shift = (seqlen_k - tl.load(cu_q_ptr + seq + 1)).to(tl.int32)
        key0 = (block - first_block(seq, k_first, 0, size, LAYOUT)) * size
        row0 = k_first + key0
    stop = tl.minimum(seqlen_k - key0, size)  # number of keys of the block
    k_off += tl.cast(head_kv, tl.int64) * stride_kh
    v_off += tl.cast(head_kv, tl.int64) * stride_vh

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    key = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # within the block
    inside = key < stop
    k_ptrs = k_ptr + (k_off + (key0 + key).to(tl.int64) * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
    v_ptrs = v_ptr + (v_off + (key0 + key).to(tl.int64) * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
    k = tl.load(k_ptrs, mask=inside[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_N, BLOCK_D]
    v = tl.load(v_ptrs, mask=inside[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_N, BLOCK_DV]

    if dq_part_ptr is not None:
        # A key with NaN or inf, multiplied by dS = 0, would spoil dQ of queries that may not see the key. Queries that
        # see the key have the NaN in dS already.
        k_seen = tl.where(tl.abs(k) < float("inf"), k, 0.0).to(k.dtype)
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    upcoming = load_unit(unit_ptr, (row // HEADS) // HEAD_TILES, count)  # a tile ahead: addresses depend on it
    for done in range(0, count * HEAD_TILES, UNITS):
        i = (done + row // HEADS) // HEAD_TILES  # [BLOCK_M]
        g = (done % HEAD_TILES) * HEADS + row % HEADS
        here = (i < count) & (g < G)
        unit = upcoming
        upcoming = load_unit(unit_ptr, (done + UNITS + row // HEADS) // HEAD_TILES, count)
        local = unit >> slot_bits
        token = first + local
        slot = unit - (local << slot_bits)
        head = head_kv * G + g
        q_off = q_first + token.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
        q_ptrs = q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :]
        q = tl.load(q_ptrs, mask=here[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_M, BLOCK_D]
        at_head = token.to(tl.int64) * HKV * G + head  # [BLOCK_M]
        do_ptrs = do_ptr + at_head[:, None] * Dv + dv[None, :]
        do = tl.load(do_ptrs, mask=here[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_M, BLOCK_DV]
        lse = tl.load(stats_ptr + at_head, mask=here, other=float("inf"))
        delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HKV * G + at_head, mask=here, other=0.0)

        high = stop + tl.zeros([BLOCK_M], tl.int32)
        if CAUSAL:
            high = causal_end(token + (shift - key0), stop, token, pos_ptr, key0)
        seen = here[None, :] & (key[:, None] < high[None, :])  # [BLOCK_N, BLOCK_M]
        if SOURCE == RANGES:
            span = tl.load(span_ptr + (local * heads + listed) * slots + slot)
            pair = sel_ptr + ((token.to(tl.int64) * HKV + head_kv) * n + span) * 2
            low, end = clamp_span(tl.load(pair), tl.load(pair + 1), seqlen_k, size, SOURCE)
            seen &= (key[:, None] >= (low - key0)[None, :]) & (key[:, None] < (end - key0)[None, :])

        # Scores are transposed, because the next products take the weights as their left operand.
        scores = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
        p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)  # [BLOCK_N, BLOCK_M]
        dv_sum = tl.dot(p.to(do.dtype), do, dv_sum, input_precision=INPUT_PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=INPUT_PRECISION)
        ds = tl.where(seen, p * (dp - delta[None, :]), 0.0).to(q.dtype)
        dk_sum = tl.dot(ds, q, dk_sum, input_precision=INPUT_PRECISION)
        if dq_part_ptr is not None:
            if BLOCK_M < 64:  # wgmma needs at least 64 rows in its left operand
                dq = tl.trans(tl.dot(tl.trans(k_seen), ds, input_precision=INPUT_PRECISION) * scale)
            else:
                dq = tl.dot(tl.trans(ds), k_seen, input_precision=INPUT_PRECISION) * scale  # [BLOCK_M, BLOCK_D]
            at_part = (local * tl.num_programs(1) + head_local) * slots + slot  # [BLOCK_M]
            dq_ptrs = dq_part_ptr + (at_part * G + g)[:, None] * D + d[None, :]
            mask = here[:, None] & (d[None, :] < D)
            tl.store(dq_ptrs, dq.to(dq_part_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")

    dk_sum *= scale
    dk_mask = inside[:, None] & (d[None, :] < D)
    dv_mask = inside[:, None] & (dv[None, :] < Dv)
    if shares > 1:
        at_key = (tl.cast(head_local, tl.int64) * several + part) * size + key  # [BLOCK_N]
        tl.store(dk_part_ptr + at_key[:, None] * D + d[None, :], dk_sum, mask=dk_mask)
        tl.store(dv_part_ptr + at_key[:, None] * Dv + dv[None, :], dv_sum, mask=dv_mask)
    else:
        at_key = (row0 + key) * sum_heads + head_kv
        dk_ptrs = dk_ptr + at_key[:, None] * D + d[None, :]
        tl.store(dk_ptrs, tl.load(dk_ptrs, mask=dk_mask, other=0.0) + dk_sum, mask=dk_mask)
        dv_ptrs = dv_ptr + at_key[:, None] * Dv + dv[None, :]
        tl.store(dv_ptrs, tl.load(dv_ptrs, mask=dv_mask, other=0.0) + dv_sum, mask=dv_mask)


@triton.jit(do_not_specialize=RUNTIME)
def _sum_kernel(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, unit_ptr, count_ptr, start_ptr, part_ptr, cu_q_ptr, cu_k_ptr,
    B, S_kv, sum_heads, head0, list0, size, slots, blocks, first, window, slot_bits, several,
    D: tl.constexpr, Dv: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of blocks of several shares, in order. A program takes ``BLOCK_N`` keys of a block."""
    block = tl.program_id(0)
    head_local = tl.program_id(1)
    head_kv = head0 + head_local
    of_block = (list0 + head_local) * blocks + block
    shares = tl.cdiv(tl.load(count_ptr + of_block), SHARE)
    if shares < 2:
        return
    if LAYOUT == BATCH:
        per_sequence = tl.cdiv(S_kv, size)
        seq = block // per_sequence
        key0 = (block - seq * per_sequence) * size
        row0 = seq.to(tl.int64) * S_kv + key0
        seqlen_k = S_kv
    else:
        unit = tl.load(unit_ptr + (list0 + head_local) * window * slots + tl.load(start_ptr + of_block))
        seq = find_sequence(cu_q_ptr, B, first + (unit >> slot_bits), 128)
        k_first, seqlen_k = sequence_keys(seq, B, S_kv, cu_k_ptr)
        key0 = (block - first_block(seq, k_first, 0, size, LAYOUT)) * size
        row0 = k_first + key0
    key = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = key < tl.minimum(seqlen_k - key0, size)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    dk_mask = inside[:, None] & (d[None, :] < D)
    dv_mask = inside[:, None] & (dv[None, :] < Dv)
    at_key = (row0 + key) * sum_heads + head_kv
    dk_ptrs = dk_ptr + at_key[:, None] * D + d[None, :]
    dv_ptrs = dv_ptr + at_key[:, None] * Dv + dv[None, :]
    dk_sum = tl.load(dk_ptrs, mask=dk_mask, other=0.0)
    dv_sum = tl.load(dv_ptrs, mask=dv_mask, other=0.0)
    part = tl.cast(head_local, tl.int64) * several + tl.load(part_ptr + of_block)
    for begin in range(0, shares, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            share = begin + i + tl.zeros([BLOCK_N], tl.int32)  # as in `key_kernels._merge_kernel`
            here = (share < shares)[:, None]
            at_part = (part + share) * size + key  # [BLOCK_N]
            dk_part_ptrs = dk_part_ptr + at_part[:, None] * D + d[None, :]
            dk_sum += tl.load(dk_part_ptrs, mask=dk_mask & here, other=0.0)
            dv_part_ptrs = dv_part_ptr + at_part[:, None] * Dv + dv[None, :]
            dv_sum += tl.load(dv_part_ptrs, mask=dv_mask & here, other=0.0)
    tl.store(dk_ptrs, dk_sum, mask=dk_mask)
    tl.store(dv_ptrs, dv_sum, mask=dv_mask)


@triton.jit(do_not_specialize=RUNTIME)
def _gather_kernel(
    dq_part_ptr, block_ptr, served_ptr, dq_ptr,
    HKV, heads, here, head0, list0, served0, slots, first,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up the parts of dQ of one window, one for each block of a row. A program takes ``HEADS`` heads of a row.

    Rows that ``served_ptr`` marks have no parts, and their dQ is left as it is. ``here`` KV heads as of
    :func:`_dkdv_kernel`, from ``served0`` on in the marks.
    """
    program = tl.program_id(0)
    local = program // here
    head_local = program % here
    head_kv = head0 + head_local
    if served_ptr is not None:
        if tl.load(served_ptr + (first + local).to(tl.int64) * HKV + served0 + head_local) != 0:
            return
    g = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    d = tl.arange(0, BLOCK_D)
    block_ptr += (local.to(tl.int64) * heads + list0 + head_local) * slots
    dq_part_ptr += (local.to(tl.int64) * here + head_local) * slots * G * D
    dq = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for begin in range(0, slots, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            u = begin + i + tl.zeros([HEADS], tl.int32)  # as in `key_kernels._merge_kernel`
            used = tl.load(block_ptr + u, mask=(u < slots) & (g < G), other=-1) >= 0
            ptrs = dq_part_ptr + (u * G + g)[:, None] * D + d[None, :]
            part = tl.load(ptrs, mask=used[:, None] & (d[None, :] < D), other=0.0, eviction_policy="evict_first")
            dq += part.to(tl.float32)
    at = ((first + local).to(tl.int64) * HKV + head_kv) * G + g
    mask = (g < G)[:, None] & (d[None, :] < D)
    tl.store(dq_ptr + at[:, None] * D + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)
