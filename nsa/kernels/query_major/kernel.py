"""Query-major forward kernel: a program holds the query heads of one row and reads the row's keys where they lie.

One kernel serves dense rows, ``cu_seqlens`` rows, ranges and blocks. These differ in how a program finds the keys of
its next tile (``spans``); the loop over tiles is written once. Source: NSA, arXiv 2502.11089, section 3.4 and
figure 3 (group-centric data loading); online softmax as in FlashAttention. Launched by ``plan.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.shared.clusters import exchange, merge_inbox, open_inbox
from nsa.kernels.shared.compiler import gdc_launch_dependents, gdc_wait, not_before, nothing_of, nothing_of_lanes
from nsa.kernels.shared.e4m3 import fit_half, scaled_values
from nsa.kernels.shared.keys import attend, expect_table, load_tiles, places_of_block, places_of_each
from nsa.kernels.shared.sequences import (
    CACHE,
    PACKED,
    RAGGED,
    VARLEN,
    causal_end,
    find_sequence,
    find_step,
    last_query,
    sequence_keys,
    sequence_of_cache,
)
from nsa.kernels.shared.softmax import finish
from nsa.kernels.shared.spans import (
    RANGES,
    TILED,
    WHOLE,
    ask_each,
    ask_spans,
    clamp_span,
    key_of_each,
    key_positions,
    slots_of,
    slots_of_each,
    tile_start,
)

# These arguments vary from batch to batch and must not make Triton compile again. Strides are divided by STRIDE_UNIT.
# The kernel multiplies by STRIDE_UNIT again, so the compiler knows a factor of all strides, as vector loads need. The
# page table's stride is not divided. It comes last, because elsewhere it costs kernels without pages 2 or 3 registers.
RUNTIME = [
    *("B", "S", "S_kv", "n", "block_size", "pages"),
    *(f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh ob os oh tb".split()),
]


@triton.jit
def find_row(
    token, batch, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qs, stride_kb, stride_kn, stride_vb,
    stride_vn, stride_ob, stride_os, stride_tb,
    LAYOUT: tl.constexpr, PAGE: tl.constexpr, S_MANY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Find a row's query and the keys of its sequence: ``(limit, q_off, o_off, k_off, v_off, table_off)``.

    ``limit``: keys that the row may see, if all are filled. Offsets are int64 and in units; with pages, those of K and
    V are 0. ``table_off``: offset of the sequence's row in the page table; 0 without pages.
    """
    table_off = 0
    if LAYOUT == VARLEN or LAYOUT == PACKED:
        seq = token
        if LAYOUT == VARLEN:
            seq = find_sequence(cu_q_ptr, B, token, 128)
        q_off = token.to(tl.int64) * stride_qs
        o_off = token.to(tl.int64) * stride_os
        k_first, seqlen_k = sequence_keys(seq, B, S_kv, cu_k_ptr)
        k_off = k_first * stride_kn
        v_off = k_first * stride_vn
        t = seqlen_k - 1
        if CAUSAL:
            q_last = tl.load(cu_q_ptr + seq + 1, mask=seq < B, other=0)
            t = (seqlen_k - q_last + token).to(tl.int32)
    else:
        if LAYOUT == RAGGED:
            batch = batch.to(tl.int64)
            s = 0
            q_off = token.to(tl.int64) * stride_qs
            o_off = token.to(tl.int64) * stride_os
        else:
            batch = (token // S if S_MANY else token).to(tl.int64)
            s = token % S if S_MANY else 0
            q_off = batch * stride_qb + tl.cast(s, tl.int64) * stride_qs
            o_off = batch * stride_ob + tl.cast(s, tl.int64) * stride_os
        k_off = tl.zeros([], tl.int64) if PAGE else batch * stride_kb
        v_off = tl.zeros([], tl.int64) if PAGE else batch * stride_vb
        if PAGE:
            table_off = batch * stride_tb
        seqlen_k = S_kv
        t = S_kv - S + s  # bottom-right: the last query sees the last key
    limit = seqlen_k
    if CAUSAL:
        # Not `max(end, 0)`: from that, ptxas 12.8 makes a schedule that is 4% slower for decode of D = 64 on an H100.
        limit = tl.maximum(causal_end(t, seqlen_k, token, pos_ptr) - 1, -1) + 1
    return limit, q_off, o_off, k_off, v_off, table_off


@triton.jit
def visible_in_cache(filled, S_kv, before, token, CAUSAL: tl.constexpr):
    """Keys of a cache that a row may see. ``filled``: the sequence's length as it is in memory, any number.

    ``before``: the row's position is so many before ``filled``. It may be any number, because cu_seqlens may be wrong.
    """
    visible = tl.minimum(tl.maximum(filled, 0), S_kv).to(tl.int32)
    if CAUSAL:
        visible = tl.maximum(causal_end(visible - before, visible, token, None), 0)
    return visible


@triton.jit
def keys_of_tile(
    begin, last, start, before, length, shift, visible, split, table_row, pages, stride_kb, stride_vb,
    SOURCE: tl.constexpr, SINGLE: tl.constexpr, EACH: tl.constexpr, PAGE: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Keys of the slots from ``begin`` to ``last``, at most ``BLOCK_L``: results as of :func:`places_of_block`.

    start, before, length, shift: of :func:`slots_of` or :func:`slots_of_each`; with SINGLE over blocks, start is of
    :func:`clamp_span`. visible: one past the last key that the tile may read.
    """
    slot = begin + tl.arange(0, BLOCK_L)
    valid = slot < last
    if SOURCE == WHOLE:
        return 0, 0, slot, valid
    elif SOURCE == TILED:
        if SINGLE:
            key = start + split % SINGLE * BLOCK_L
        else:
            key = tile_start(begin, start, before, length)
        return places_of_block(table_row, key, visible, pages, stride_kb, stride_vb, PAGE, BLOCK_L)
    else:
        key = key_of_each(slot, shift, before) if EACH else key_positions(slot, start, before, length)
        return places_of_each(table_row, key, valid, pages, stride_kb, stride_vb, PAGE)


@triton.jit
def store_part(part_ptr, part, parts, m, l, acc, mask, dv, Dv: tl.constexpr):
    """Store one share's results, laid out as :func:`merge_parts` reads them.

    ``part [BLOCK_G]``: each head's place among the ``parts`` of the call, one for each share and head.
    """
    tl.store(part_ptr + part[:, None] * Dv + dv[None, :], acc, mask=mask[:, None] & (dv[None, :] < Dv))
    part += parts * Dv  # m and l lie behind the accumulators of all parts
    tl.store(part_ptr + part, m, mask=mask)
    tl.store(part_ptr + parts + part, tl.sum(l, 1), mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, part_ptr, sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, k_scale_ptr,
    v_scale_ptr, served_ptr,
    B, S, S_kv, n, block_size, pages,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob,
    stride_os, stride_oh, scale, stride_tb,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, SOURCE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr,
    HKV: tl.constexpr, S_MANY: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr, CHUNKED: tl.constexpr,
    FAR: tl.constexpr, HOLD: tl.constexpr, HOLD_Q: tl.constexpr, SINGLE: tl.constexpr, EACH: tl.constexpr,
    SPLIT: tl.constexpr, STRIDE_UNIT: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, PAIRS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, HEADS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, SPANS: tl.constexpr, STREAM_Q: tl.constexpr, UPFRONT: tl.constexpr,
    CLUSTER: tl.constexpr, MINE: tl.constexpr, SHARED: tl.constexpr, SENDING: tl.constexpr, EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """STEPS: the grid has a place for each of the first ``STEPS`` queries of each sequence of a ragged batch, the first
    queries of all sequences first. Sequences of at most ``STEPS`` queries are served, and their rows are marked in
    served ``[tokens, HKV]``. Programs of all other places return at once. Without STEPS, programs of rows that served
    marks return at once.
    """
    if OVERLAP:
        gdc_launch_dependents()  # the merge kernel may start; it waits for this kernel's end before it reads
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    HEAD_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if CLUSTER:  # the programs that share a row are neighbours
        split = program % CLUSTER
        splits = CLUSTER
        program = program // CLUSTER
        programs = programs // CLUSTER
    row = program // HEAD_TILES
    head_tile = program % HEAD_TILES
    # If rows over blocks are not split, all tokens of one KV head run before those of the next. The keys of one head
    # may fit L2 where those of all heads do not.
    BY_HEAD: tl.constexpr = SOURCE == TILED and HKV > 1 and not (SPLIT or STEPS)
    if BY_HEAD:
        tokens = programs // HEAD_TILES // HKV
        token = row % tokens
        head_kv = row // tokens
        row = token * HKV + head_kv
    else:
        token = row // HKV
        head_kv = row % HKV
    batch = token  # replaced below for ragged batches; no other layout reads it

    if EARLY:
        gdc_wait()  # the previous kernel on the stream may still run, so wait for its end before any memory access

    if STEPS:
        place = token
        batch = place % B
        token = find_step(cu_q_ptr, B, S, place, STEPS)
        if token < 0:
            return
        row = token * HKV + head_kv
        tl.store(served_ptr + row.to(tl.int64), 1)
    elif served_ptr is not None:
        if tl.load(served_ptr + row.to(tl.int64)) != 0:
            return

    # Load first what decides which keys are read, and compute the rest while these loads are in flight.
    if SOURCE != WHOLE:
        sel_row = sel_ptr + row.to(tl.int64) * n * (2 if SOURCE == RANGES else 1)
        if SINGLE and SOURCE == TILED:  # each program reads one tile of one block
            begin_of, end_of = ask_spans(sel_row, split // SINGLE, n, SOURCE)
        elif EACH:
            every = ask_each(sel_row, n, SPANS, SOURCE, HOLD)
        else:
            begin_of, end_of = ask_spans(sel_row, tl.arange(0, SPANS), n, SOURCE)
    if LAYOUT == CACHE:
        filled = tl.load(cu_k_ptr + (token // S if S_MANY else token).to(tl.int64))
        behind = S - token % S if S_MANY else S
    elif STEPS:
        filled = tl.load(cu_k_ptr + batch)
        behind = last_query(cu_q_ptr, batch, batch < B) - token
    elif LAYOUT == RAGGED:
        batch, filled, behind = sequence_of_cache(cu_q_ptr, cu_k_ptr, B, token)
    if k_scale_ptr is not None:  # scaling the keys scales the scores
        scale *= tl.load(k_scale_ptr + head_kv * K_STEP)
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head_kv * V_STEP)

    if CLUSTER:
        inbox = open_inbox(CLUSTER, MINE, BLOCK_DV, SHARED)

    limit, q_off, o_off, k_off, v_off, table_off = find_row(
        token, batch, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, stride_qb, stride_qs, stride_kb, stride_kn, stride_vb,
        stride_vn, stride_ob, stride_os, stride_tb, LAYOUT, PAGE, S_MANY, CAUSAL,
    )  # fmt: skip
    if PAGE:
        table_ptr += table_off  # the sequence's row
        if EARLY:
            expect_table(table_ptr, S_kv // PAGE)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    in_group = (g < HEADS) & (head_tile * HEADS + g < G)
    head = head_kv * G + head_tile * HEADS + g  # [BLOCK_G]

    q_ptrs = q_ptr + (q_off + head.to(tl.int64) * stride_qh)[:, None] * STRIDE_UNIT + d[None, :]
    q_mask = in_group[:, None] & (d[None, :] < D)
    if HOLD_Q:
        held = tl.load(q_ptrs, mask=q_mask, other=0.0)  # [BLOCK_G, BLOCK_D]
    k_off += tl.cast(head_kv, tl.int64) * stride_kh
    v_off += tl.cast(head_kv, tl.int64) * stride_vh
    k_base = k_ptr + k_off * STRIDE_UNIT
    v_base = v_ptr + v_off * STRIDE_UNIT
    column = dv
    if PAIRS:
        v_base = v_base.to(tl.pointer_type(tl.int16))
        column = tl.arange(0, BLOCK_DV // 2)

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G, BLOCK_L], tl.float32)  # summed over BLOCK_L after the loop
    acc = tl.zeros([BLOCK_G, BLOCK_DV // 2 if PAIRS else BLOCK_DV], tl.float32)  # with PAIRS of even columns
    acc_odd = tl.zeros([BLOCK_G, BLOCK_DV // 2], tl.float32) if PAIRS else 0.0
    if not FIT:
        fit = 1.0

    # One chunk is a loop, too. What does not need the spans is computed before the loop, while the spans are loaded.
    # The opaque zero that is added to the spans keeps LLVM from moving the wait for them out of the loop.
    of_block: tl.constexpr = SINGLE and SOURCE == TILED
    chunks = 1 if SOURCE == WHOLE else tl.minimum(n, 1) if of_block else (n + SPANS - 1) // SPANS
    for chunk in range(0, chunks):
        visible, here, start, before, length, shift = limit, 0, 0, 0, 0, 0
        if SOURCE == WHOLE:
            total = limit
        else:
            if HOLD and EACH:
                here = nothing_of_lanes(chunk)
            elif HOLD:
                here = nothing_of(chunk)
            if LAYOUT == CACHE or LAYOUT == RAGGED:
                visible = visible_in_cache(filled + here, S_kv, behind, token, CAUSAL)
            if of_block:
                start, visible = clamp_span(begin_of + here, end_of + here, visible, block_size, SOURCE)
                total = BLOCK_L
            elif EACH:
                shift, before, total = slots_of_each(every, here, visible, block_size, SPANS, SOURCE)
            else:
                start, before, length, total = slots_of(
                    begin_of + here, end_of + here, visible, block_size, SOURCE, BLOCK_L
                )
        first, last = 0, total
        # This program's share of the chunk's slots, in whole tiles.
        if SPLIT and not of_block:
            share = tl.cdiv(tl.cdiv(total, BLOCK_L), splits) * BLOCK_L
            first = tl.minimum(split * share, total)
            last = tl.minimum(first + share, total)
        # Queries are loaded with the spans (HOLD_Q), with every tile (STREAM_Q), or here, between spans and keys. The
        # zero that is added keeps this load inside the loop.
        if not STREAM_Q and not HOLD_Q:
            q = tl.load(q_ptrs + tl.minimum(chunk, 0) * 16, mask=q_mask, other=0.0)
        if FIT and not STREAM_Q:
            if HOLD_Q:
                q = not_before(held)
            q, fit = fit_half(q)
        for tile in range(0 if SINGLE else first, BLOCK_L if SINGLE else last, BLOCK_L):
            begin = first if SINGLE else tile
            if HOLD_Q and not FIT:
                q = not_before(held)  # do not wait for the queries before the loop
            k_page, v_page, key, valid = keys_of_tile(
                begin, last, start, before, length, shift, visible, split, table_ptr, pages, stride_kb, stride_vb,
                SOURCE, SINGLE, EACH, PAGE, BLOCK_L,
            )  # fmt: skip
            if FAR:  # otherwise the key's offset, in units, fits int32
                key = key.to(tl.int64)
            k_at, v_at = (key * stride_kn).to(tl.int64) + k_page, (key * stride_vn).to(tl.int64) + v_page
            k, v = load_tiles(k_base, v_base, k_at, v_at, valid, d, column, D, Dv, STRIDE_UNIT, PAIRS)
            if STREAM_Q:
                q = tl.load(q_ptrs + tl.minimum(tile, 0) * 16, mask=q_mask, other=0.0)
            if UPFRONT and SINGLE:  # without a loop, ptxas would load values only after the keys have arrived
                tl.debug_barrier()
                q = not_before(q)
            if FIT and STREAM_Q:
                q, fit = fit_half(q)
            m, l, acc, acc_odd = attend(
                q, fit, k, v, valid, scale, m, l, acc, acc_odd, E4M3, FIT, PAIRS, UPFRONT, INPUT_PRECISION
            )
        if CHUNKED:
            begin_of, end_of = ask_spans(sel_row, (chunk + 1) * SPANS + tl.arange(0, SPANS), n, SOURCE)

    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if CLUSTER:  # each program of the cluster merges some heads
        exchange(inbox, split, m, tl.sum(l, 1), acc, g, in_group, HEADS, CLUSTER, MINE, SENDING)
        g = split + CLUSTER * tl.arange(0, MINE)
        in_group = (g < HEADS) & (head_tile * HEADS + g < G)
        head = head_kv * G + head_tile * HEADS + g  # [MINE]
        o, lse = merge_inbox(inbox, in_group, BLOCK_DV, CLUSTER, MINE)
    elif SPLIT:
        if v_scale_ptr is not None:
            acc = scaled_values(acc, m, v_scale)
        heads = (programs // HEAD_TILES).to(tl.int64) * G
        part = split * heads + (place if STEPS else token).to(tl.int64) * HKV * G + head
        store_part(part_ptr, part, splits * heads, m, l, acc, in_group, dv, Dv)
    else:
        o, lse = finish(m, tl.sum(l, 1), acc)
    if CLUSTER or not SPLIT:
        if v_scale_ptr is not None:
            o = scaled_values(o, lse, v_scale)
        o_ptrs = o_ptr + (o_off + head.to(tl.int64) * stride_oh)[:, None] * STRIDE_UNIT + dv[None, :]
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=in_group[:, None] & (dv[None, :] < Dv))
        if lse_ptr is not None:
            tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=in_group)
