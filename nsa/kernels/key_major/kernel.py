"""Key-major forward: a program holds a key block and reads the queries that selected it; a second kernel merges.

A block is read once for many queries, while query-major reads a block for every row. The price is a partial result for
each (row, block), in the dtype of the inputs, that is written to memory and read again. For groups of 9 to 16 heads the
merge kernel may also read some blocks itself, as query-major does. Source: NSA, arXiv 2502.11089, section 3.4; order of
loops as in FSA, arXiv 2508.18224.
"""

import triton
import triton.language as tl

from nsa.kernels.shared.e4m3 import fit_half, half_of, scaled_values
from nsa.kernels.shared.inverse_index import OVERFULL, first_block
from nsa.kernels.shared.keys import attend, in_page, load_tiles, places_of_each
from nsa.kernels.shared.sequences import (
    BATCH,
    CACHE,
    RAGGED,
    VARLEN,
    causal_end,
    filled_keys,
    find_sequence,
    last_query,
    sequence_keys,
    visible_keys,
)
from nsa.kernels.shared.softmax import finish
from nsa.kernels.shared.spans import RANGES, TILED, clamp_span, key_positions, load_spans, tile_start

RUNTIME = "B S S_kv HKV heads head0 n size slots first window index windows work slot_bits tokens passed pages".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh ob os oh tb".split()]


@triton.jit
def load_unit(unit_ptr, i, count):
    """Load units ``i``, each a token of the window and a slot. Past the last unit, the last one is loaded."""
    return tl.load(unit_ptr + tl.minimum(i, count - 1))


@triton.jit
def query_offset(token, S, stride_b, stride_s, LAYOUT: tl.constexpr):
    """Offsets of tokens' queries, in units of the strides."""
    token = token.to(tl.int64)
    if LAYOUT == BATCH or LAYOUT == CACHE:
        return (token // S) * stride_b + (token % S) * stride_s
    else:
        return token * stride_s


@triton.jit(do_not_specialize=RUNTIME)
def _partial_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, k_scale_ptr, span_ptr,
    unit_ptr, work_ptr,
    B, S, S_kv, HKV, heads, head0, n, size, slots, first, window, index, windows, work, slot_bits, pages,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale, stride_tb,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, SOURCE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, ONE_TILE: tl.constexpr, WIDE: tl.constexpr, STRIDE_UNIT: tl.constexpr, K_STEP: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Partial results of one window's units: O ``[window, heads, slots, G, Dv]``, normalised, and LSE in base 2.

    A program takes one share (``inverse_index.py``), whose units are of one block, ``BLOCK_M / HEADS`` units at a time.
    In a ragged batch it goes on with every ``programs``-th share. With a program for each possible share, most programs
    would have no work, because few of the sequences may have units.
    ``first``: first token of the window. ``index``: number of the window in the lists.
    """
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv  # keys are converted to the dtype of queries
    UNITS: tl.constexpr = BLOCK_M // HEADS
    head = tl.program_id(1)
    head_kv = head0 + head
    group = index * heads + head
    # Begin in the middle of the list. The blocks that most rows select, the oldest and the newest, are at its ends. If
    # their programs began last, the whole kernel would wait for them.
    programs = tl.num_programs(0)
    at = tl.program_id(0) + programs // 2
    at = tl.where(at >= programs, at - programs, at)
    all_work = windows * heads * work
    work_ptr += group * work
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + head_kv * K_STEP)
    count = tl.load(work_ptr + 2 * all_work + at)
    # A `while` loop would be shorter, but Triton 3.1 fails to compile tensor-core products in one for sm_90.
    for _ in range(0, tl.cdiv(work, programs) if LAYOUT == RAGGED else 1):
        if count > 0:
            block = tl.load(work_ptr + at)
            units = unit_ptr + (group * window * slots + tl.load(work_ptr + all_work + at))
            following = count - count
            if LAYOUT == RAGGED:  # else there is a program for each share
                at += programs  # the next count is loaded early, so that no wait follows
                following = tl.load(work_ptr + 2 * all_work + at, mask=at < work, other=0)

            # Find the block's keys, and the offset of its sequence's queries, so that the loop below needs no division.
            if LAYOUT != VARLEN:
                per_sequence = tl.cdiv(S_kv, size)
                seq = block // per_sequence
                seqlen_k = S_kv
                if LAYOUT != BATCH:
                    seqlen_k = filled_keys(seq, S_kv, cu_k_ptr)
                k_off = seq.to(tl.int64) * stride_kb
                v_off = seq.to(tl.int64) * stride_vb
                if PAGE:
                    k_off = tl.zeros([], tl.int64)
                    v_off = tl.zeros([], tl.int64)
                    table_row = table_ptr + seq.to(tl.int64) * stride_tb
                if LAYOUT == RAGGED:
                    q_off = tl.zeros([], tl.int64)
                    lead = first
                    shift = seqlen_k - last_query(cu_q_ptr, seq, seq < B)
                else:
                    q_off = seq.to(tl.int64) * stride_qb
                    lead = first - seq * S  # query = token of the window + lead
                    shift = seqlen_k - S  # position = query + shift
                key0 = (block - seq * per_sequence) * size
            else:
                seq = find_sequence(cu_q_ptr, B, first + (tl.load(units) >> slot_bits), 128)
                k_first, seqlen_k = sequence_keys(seq, B, S_kv, cu_k_ptr)
                k_off = k_first * stride_kn
                v_off = k_first * stride_vn
                q_off = tl.zeros([], tl.int64)
                lead = first
                shift = (seqlen_k - tl.load(cu_q_ptr + seq + 1)).to(tl.int32)
                key0 = (block - first_block(seq, k_first, 0, size, LAYOUT)) * size
            stop = tl.minimum(seqlen_k - key0, size) + key0
            k_off += tl.cast(head_kv, tl.int64) * stride_kh
            v_off += tl.cast(head_kv, tl.int64) * stride_vh

            row = tl.arange(0, BLOCK_M)
            g = row % HEADS  # [BLOCK_M]
            if HEADS != G:
                g += tl.program_id(2) * HEADS
            d = tl.arange(0, BLOCK_D)
            dv = tl.arange(0, BLOCK_DV)
            key = tl.arange(0, BLOCK_N)
            if not PAGE:
                k_ptrs = k_ptr + (k_off + (key0 + key).to(tl.int64) * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
                v_ptrs = v_ptr + (v_off + (key0 + key).to(tl.int64) * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
            if ONE_TILE:
                inside = key0 + key < stop
                if PAGE:
                    place = (key0 + key).to(tl.int64)
                    k_page, v_page, place, inside = in_page(table_row, place, inside, pages, stride_kb, stride_vb, PAGE)
                    k_ptrs = k_ptr + (k_off + k_page + place * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
                    v_ptrs = v_ptr + (v_off + v_page + place * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
                k = tl.load(k_ptrs, mask=inside[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_N, BLOCK_D]
                v = tl.load(v_ptrs, mask=inside[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_N, BLOCK_DV]
                if E4M3:
                    k = half_of(k).to(q_ptr.dtype.element_ty)
                    v = half_of(v).to(q_ptr.dtype.element_ty)

            q_base = q_ptr + (q_off + tl.cast(head_kv, tl.int64) * G * stride_qh) * STRIDE_UNIT
            head_off = (g.to(tl.int64) if WIDE else g) * stride_qh
            coming = load_unit(units, row // HEADS, count)  # a step ahead, because addresses of queries depend on it
            for done in range(0, count, UNITS):
                i = done + row // HEADS
                query = lead + (coming >> slot_bits)
                if WIDE:
                    query = query.to(tl.int64)
                q_ptrs = q_base + (query * stride_qs + head_off)[:, None] * STRIDE_UNIT + d[None, :]
                q = tl.load(q_ptrs, mask=(g < G)[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_M, BLOCK_D]
                coming = load_unit(units, i + UNITS, count)
                unit = load_unit(units, i, count)  # loaded again from L1, which saves registers
                local = unit >> slot_bits
                token = first + local
                slot = unit - (local << slot_bits)

                low = tl.zeros([BLOCK_M], tl.int32)
                high = stop + low
                if CAUSAL:
                    high = causal_end(lead + local + shift, stop, token, pos_ptr)
                at_row = (local * heads + head) * slots + slot  # [BLOCK_M]; offsets of parts fit int32
                if SOURCE == RANGES:
                    span = tl.load(span_ptr + index * window * heads * slots + at_row)
                    pair = sel_ptr + ((token.to(tl.int64) * HKV + head_kv) * n + span) * 2
                    low, high = clamp_span(tl.load(pair), tl.load(pair + 1), high, size, SOURCE)

                if ONE_TILE:
                    scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
                    seen = (key0 + key)[None, :] < high[:, None]
                    if SOURCE == RANGES:
                        seen &= (key0 + key)[None, :] >= low[:, None]
                    if PAGE:
                        seen &= inside[None, :]
                    scores = tl.where(seen, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
                    m = tl.max(scores, 1)
                    p = tl.exp2(scores - tl.where(m == float("-inf"), 0.0, m)[:, None])
                    l = tl.sum(p, 1)
                    acc = tl.dot(p.to(v.dtype), v, input_precision=INPUT_PRECISION)
                else:
                    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    l = tl.zeros([BLOCK_M], tl.float32)
                    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                    for ahead in range(0, size, BLOCK_N):
                        inside = key0 + ahead + key < stop
                        if PAGE:
                            place = (key0 + ahead + key).to(tl.int64)
                            k_page, v_page, place, inside = in_page(
                                table_row, place, inside, pages, stride_kb, stride_vb, PAGE
                            )
                            k_here = k_ptr + (k_off + k_page + place * stride_kn)[:, None] * STRIDE_UNIT + d[None, :]
                            v_here = v_ptr + (v_off + v_page + place * stride_vn)[:, None] * STRIDE_UNIT + dv[None, :]
                        else:
                            k_here = k_ptrs + (tl.cast(ahead, tl.int64) * stride_kn) * STRIDE_UNIT
                            v_here = v_ptrs + (tl.cast(ahead, tl.int64) * stride_vn) * STRIDE_UNIT
                        k = tl.load(k_here, mask=inside[:, None] & (d[None, :] < D), other=0.0)
                        v = tl.load(v_here, mask=inside[:, None] & (dv[None, :] < Dv), other=0.0)
                        if E4M3:
                            k = half_of(k).to(q_ptr.dtype.element_ty)
                            v = half_of(v).to(q_ptr.dtype.element_ty)
                        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
                        seen = (key0 + ahead + key)[None, :] < high[:, None]
                        if SOURCE == RANGES:
                            seen &= (key0 + ahead + key)[None, :] >= low[:, None]
                        if PAGE:
                            seen &= inside[None, :]
                        scores = tl.where(seen, scores, float("-inf"))
                        m_new = tl.maximum(m, tl.max(scores, 1))
                        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                        p = tl.exp2(scores - m_safe[:, None])
                        alpha = tl.exp2(m - m_safe)
                        l = l * alpha + tl.sum(p, 1)
                        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
                        m = m_new
                here = (i < count) & (g < G)
                l = tl.where(l == 0.0, 1.0, l)
                acc = acc * (1.0 / l)[:, None]
                at_head = at_row * G + g
                tl.store(lse_ptr + at_head, m + tl.log2(l), mask=here)
                part_ptrs = part_ptr + at_head[:, None] * Dv + dv[None, :]
                mask = here[:, None] & (dv[None, :] < Dv)
                # Evicted first from L2, because parts are read only after the whole window is written. Queries stay.
                tl.store(part_ptrs, acc.to(part_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")

            count = following


@triton.jit(do_not_specialize=RUNTIME)
def _merge_kernel(
    part_ptr, part_lse_ptr, block_ptr, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr,
    table_ptr, served_ptr, k_scale_ptr, v_scale_ptr,
    B, S, S_kv, HKV, heads, head0, n, size, slots, first, tokens, passed, pages,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob,
    stride_os, stride_oh, scale, stride_tb,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, SOURCE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, STRIDE_UNIT: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, PAIRS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, WALK: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, SPANS: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge one window's partial results. A program takes ``HEADS`` heads of a row.

    ``passed``: tokens of the pass that are in earlier windows. WALK: a row's slots from ``slots`` on have no partial
    results; their keys are read here, as in query-major. Keys come from L2 and partial results from memory, so a kernel
    that reads both keeps both busy.
    """
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    local = program % tokens  # one KV head after the other, so that its keys may stay in L2
    head_kv = head0 + program // tokens
    token = first + local
    if served_ptr is not None:
        if tl.load(served_ptr + token.to(tl.int64) * HKV + head_kv) != 0:  # served by a union or as a step
            return
    row = local.to(tl.int64) * heads + program // tokens
    g = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    head = head_kv * G + g
    dv = tl.arange(0, BLOCK_DV)
    block_ptr += (passed.to(tl.int64) * heads + row) * slots
    part_lse_ptr += row * slots * G
    part_ptr += row * slots * G * Dv

    # The maximum is reduced after the loop, because Triton 3.6 fails if a loop reduces and the result is used twice.
    most = tl.full([HEADS, CHUNK], float("-inf"), tl.float32)
    for begin in range(0, slots, CHUNK):
        u = begin + tl.arange(0, CHUNK)  # [CHUNK]
        used = tl.load(block_ptr + u, mask=u < slots, other=-1) >= 0
        mask = used[None, :] & (g < G)[:, None]
        part_lse = tl.load(part_lse_ptr + u[None, :] * G + g[:, None], mask=mask, other=float("-inf"))
        most = tl.maximum(most, part_lse)
    m = tl.max(most, 1)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    for begin in range(0, slots, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            u = begin + i + tl.zeros([HEADS], tl.int32)  # the same for all heads; not every Triton has scalar masks
            used = tl.load(block_ptr + u, mask=(u < slots) & (g < G), other=-1) >= 0
            part_lse = tl.load(part_lse_ptr + u * G + g, mask=used, other=float("-inf"))
            part = part_ptr + (u * G + g)[:, None] * Dv + dv[None, :]
            mask = used[:, None] & (dv[None, :] < Dv)
            part = tl.load(part, mask=mask, other=0.0, eviction_policy="evict_first")
            weight = tl.exp2(part_lse - m_safe)
            total += weight
            acc += weight[:, None] * part.to(tl.float32)

    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head_kv * V_STEP)
    if WALK:
        if k_scale_ptr is not None:
            scale *= tl.load(k_scale_ptr + head_kv * K_STEP)
        seq, k_first, limit = visible_keys(token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT, CAUSAL)
        table_row = table_ptr
        if PAGE:
            k_base = k_ptr + tl.cast(head_kv, tl.int64) * stride_kh * STRIDE_UNIT
            v_base = v_ptr + tl.cast(head_kv, tl.int64) * stride_vh * STRIDE_UNIT
            table_row += tl.cast(seq, tl.int64) * stride_tb
        elif LAYOUT != VARLEN:
            k_base = k_ptr + (tl.cast(seq, tl.int64) * stride_kb + tl.cast(head_kv, tl.int64) * stride_kh) * STRIDE_UNIT
            v_base = v_ptr + (tl.cast(seq, tl.int64) * stride_vb + tl.cast(head_kv, tl.int64) * stride_vh) * STRIDE_UNIT
        else:
            k_base = k_ptr + (k_first * stride_kn + tl.cast(head_kv, tl.int64) * stride_kh) * STRIDE_UNIT
            v_base = v_ptr + (k_first * stride_vn + tl.cast(head_kv, tl.int64) * stride_vh) * STRIDE_UNIT
        d = tl.arange(0, BLOCK_D)
        q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
        q_mask = (g < G)[:, None] & (d[None, :] < D)
        q = tl.load(q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :], mask=q_mask, other=0.0)  # [HEADS, BLOCK_D]
        fit = 1.0
        if FIT:
            q, fit = fit_half(q)
        acc_odd, column = 0.0, dv
        if PAIRS:
            v_base = v_base.to(tl.pointer_type(tl.int16))
            column = tl.arange(0, BLOCK_DV // 2)
            acc, acc_odd = tl.split(tl.reshape(acc, [HEADS, BLOCK_DV // 2, 2]))
        l = tl.where(tl.arange(0, BLOCK_L)[None, :] == 0, total[:, None], 0.0)  # [HEADS, BLOCK_L]
        sel_row = sel_ptr + (token.to(tl.int64) * HKV + head_kv) * n + slots
        for chunk in range(0, tl.cdiv(n - slots, SPANS)):
            start, before, length, keys = load_spans(
                sel_row, chunk * SPANS, n - slots, limit, size, SOURCE, SPANS, BLOCK_L
            )
            for begin in range(0, keys, BLOCK_L):
                at = begin + tl.arange(0, BLOCK_L)
                valid = at < keys
                if SOURCE == TILED and (PAGE and PAGE % BLOCK_L == 0):
                    key = tile_start(begin, start, before, length)
                    stop = limit - key
                    k_page, v_page, key, exists = in_page(table_row, key, stop > 0, pages, stride_kb, stride_vb, PAGE)
                    valid = tl.arange(0, BLOCK_L) < tl.where(exists, stop, 0)
                    key = key + tl.arange(0, BLOCK_L)
                else:
                    if SOURCE == TILED:
                        key = tile_start(begin, start, before, length) + tl.arange(0, BLOCK_L)
                        valid = key < limit
                    else:
                        key = key_positions(at, start, before, length)
                    k_page, v_page, key, valid = places_of_each(
                        table_row, key, valid, pages, stride_kb, stride_vb, PAGE
                    )
                key = key.to(tl.int64)
                k_at = key * stride_kn + k_page
                v_at = key * stride_vn + v_page
                k, v = load_tiles(k_base, v_base, k_at, v_at, valid, d, column, D, Dv, STRIDE_UNIT, PAIRS)
                m, l, acc, acc_odd = attend(
                    q, fit, k, v, valid, scale, m, l, acc, acc_odd, E4M3, FIT, PAIRS, False, INPUT_PRECISION
                )
        total = tl.sum(l, 1)
        if PAIRS:
            acc = tl.interleave(acc, acc_odd)

    acc, lse = finish(m, total, acc)
    if v_scale_ptr is not None:
        acc = scaled_values(acc, lse, v_scale)
    if SOURCE == RANGES:
        overfull = False
        if slots > 0:
            overfull = tl.load(block_ptr) == OVERFULL
        if overfull:  # the row's units were not listed, so its result is NaN
            acc += float("nan")
            lse += float("nan")
    o_off = query_offset(token, S, stride_ob, stride_os, LAYOUT) + head.to(tl.int64) * stride_oh
    o_ptrs = o_ptr + o_off[:, None] * STRIDE_UNIT + dv[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=(g < G)[:, None] & (dv[None, :] < Dv))
    if lse_ptr is not None:
        tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=g < G)
