"""Forward kernels for selections of many small blocks, of ``SIZE`` keys each (1 to 16).

A tile of keys takes several listed blocks. The place of each key is looked up while earlier tiles are computed: its
block two tiles ahead, its page one tile ahead. The look-ups are carried from turn to turn of the loop, so that Triton
pipelines the loads of keys and values, and not the look-ups. A row's list may be shared by all KV heads: ``stride_lh``,
the stride of lists over KV heads, is then 0.

`_rows_kernel` computes single rows, whose keys may be split among programs. `_unions_kernel` computes tiles of
neighbouring tokens over the union of their blocks, which `_list_kernel` makes. Rows of other tiles, which
``served_ptr`` does not mark, are left to `_rows_kernel`.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.compiler import gdc_launch_dependents, gdc_wait
from nsa.kernels.shared.e4m3 import add_pairs, fit_half, half_of, scaled_values
from nsa.kernels.shared.keys import expect_table
from nsa.kernels.shared.sequences import VARLEN, causal_limit, sequence_of
from nsa.kernels.shared.softmax import finish, softmax_step

RUNTIME = "B S S_kv n tokens pages lists first tiles run blocks room cost gain stride_lt stride_lh".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh ob os oh tb".split()]

NOT_SERVED = tl.constexpr(-1)  # the number of blocks of a tile whose rows are left to `_rows_kernel`


@triton.jit
def _listed(list_row, slot, total, SIZE: tl.constexpr):
    """Listed block of each ``slot [BLOCK]``, a place for one key. -1 for padding, and for slots from ``total`` on."""
    return _narrow(tl.load(list_row + slot // SIZE, mask=slot < total, other=-1))


@triton.jit
def _narrow(block):
    """Block indices as int32. Negative ones stay negative, and those past int32 become its largest number."""
    if block.dtype == tl.int64:
        block = tl.maximum(tl.minimum(block, 2147483647), -1).to(tl.int32)
    return block


@triton.jit
def _key_of(block, slot, limit, SIZE: tl.constexpr):
    """Key of each slot; -1 where there is no block, and for keys from ``limit`` on."""
    inside = (block >= 0) & (block < tl.cdiv(limit, SIZE))  # so that the product does not overflow
    key = tl.where(inside, block, 0) * SIZE + slot % SIZE
    return tl.where(inside & (key < limit), key, -1)


@triton.jit
def _page_of(table_row, key, pages, PAGE: tl.constexpr):
    """Page of each key; -1 for keys below 0, and for pages that do not exist."""
    page = tl.load(table_row + tl.maximum(key, 0) // PAGE, mask=key >= 0, other=-1)
    return tl.where((page >= 0) & (page < pages), page, -1).to(tl.int32)


@triton.jit
def _bases(
    k_ptr, v_ptr, seq, head_kv, k_first, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    LAYOUT: tl.constexpr, PAGE: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """Pointers to the first key and value of a sequence and a KV head; with pages, of page 0."""
    k_off = tl.cast(head_kv, tl.int64) * stride_kh
    v_off = tl.cast(head_kv, tl.int64) * stride_vh
    if LAYOUT == VARLEN:
        k_off += k_first * stride_kn
        v_off += k_first * stride_vn
    elif not PAGE:
        k_off += tl.cast(seq, tl.int64) * stride_kb
        v_off += tl.cast(seq, tl.int64) * stride_vb
    return k_ptr + k_off * STRIDE_UNIT, v_ptr + v_off * STRIDE_UNIT


@triton.jit
def _offset(key, page, stride_page, stride_key, PAGE: tl.constexpr, STRIDE_UNIT: tl.constexpr):
    """Elements from the first key of :func:`_bases` to each key, int64."""
    if PAGE:
        at = tl.maximum(page, 0).to(tl.int64) * stride_page + (tl.maximum(key, 0) % PAGE).to(tl.int64) * stride_key
    else:
        at = tl.maximum(key, 0).to(tl.int64) * stride_key
    return at * STRIDE_UNIT


@triton.jit(do_not_specialize=RUNTIME)
def _rows_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, part_ptr, sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, k_scale_ptr,
    v_scale_ptr, served_ptr,
    B, S, S_kv, n, tokens, pages, lists, run, stride_lt, stride_lh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob,
    stride_os, stride_oh, scale, stride_tb,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr, SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, PAIRS: tl.constexpr,
    ALIKE: tl.constexpr, STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_L: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one row, or of one of its splits: the query heads of a token and a KV head.

    Split ``i`` of ``N`` reads the tiles ``i``, ``i + N``, … of the row's slots. `_combine_kernel` merges their parts.
    With served ``[tokens, lists]``, rows that it marks are skipped.
    TOKENS: rows are not split, and the programs of axis 1 share the rows of a tile of neighbouring tokens.
    """
    if OVERLAP:
        gdc_launch_dependents()  # the merge kernel may start; it waits for this kernel's end before it reads
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    HEAD_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    program = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if TOKENS:
        split = 0
        splits = 1
    head_tile = program % HEAD_TILES
    place = program // HEAD_TILES // HKV  # of the row's token
    head_kv = program // HEAD_TILES % HKV
    if EARLY:
        gdc_wait()  # the previous kernel on the stream may still run, so wait for its end before any memory access
    token0 = place
    turns = 1
    if TOKENS:
        # Programs of a tile take its tokens in turn, because programs that return at once cost time, too.
        token0, end = _tokens_of(place, run, TOKENS)
        turns = end - token0
    if served_ptr is not None:
        if tl.load(served_ptr + token0.to(tl.int64) * lists + head_kv % lists) > 0:
            return
    for turn in range(tl.program_id(1) if TOKENS else 0, turns, tl.num_programs(1) if TOKENS else 1):
        token = token0 + turn

        # A tile's blocks are asked for first, because all else waits for them.
        slots = tl.arange(0, BLOCK_L)
        total = n * SIZE
        stride = splits * BLOCK_L
        list_row = sel_ptr + token.to(tl.int64) * stride_lt + tl.cast(head_kv, tl.int64) * stride_lh
        block = _listed(list_row, split * BLOCK_L + slots, total, SIZE)
        ahead = _listed(list_row, split * BLOCK_L + stride + slots, total, SIZE)

        seq, k_first, seqlen_k, shift = sequence_of(token, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
        if PAGE:
            table_row = table_ptr + tl.cast(seq, tl.int64) * stride_tb
            if EARLY:
                expect_table(table_row, S_kv // PAGE)
        limit = causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL)
        factor = scale * 1.4426950408889634
        if k_scale_ptr is not None:  # scaling the keys scales the scores
            factor *= tl.load(k_scale_ptr + head_kv * K_STEP)
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr + head_kv * V_STEP)

        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        in_group = (g < HEADS) & (head_tile * HEADS + g < G)
        head = head_kv * G + head_tile * HEADS + g  # [BLOCK_G]
        q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
        q_ptrs = q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :]
        q = tl.load(q_ptrs, mask=in_group[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_G, BLOCK_D]
        if FIT:
            q, fit = fit_half(q)
            factors = fit * factor
        k_base, v_base = _bases(
            k_ptr, v_ptr, seq, head_kv, k_first, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            LAYOUT, PAGE, STRIDE_UNIT,
        )  # fmt: skip
        if PAIRS:
            v_base = v_base.to(tl.pointer_type(tl.int16))
            dv_pair = tl.arange(0, BLOCK_DV // 2)

        m = tl.full([BLOCK_G], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_G, BLOCK_L], tl.float32)  # summed over BLOCK_L after the loop
        if PAIRS:
            acc = tl.zeros([BLOCK_G, BLOCK_DV // 2], tl.float32)  # of even columns
            acc_odd = tl.zeros([BLOCK_G, BLOCK_DV // 2], tl.float32)
        else:
            acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)

        key = _key_of(block, split * BLOCK_L + slots, limit, SIZE)
        page = key
        if PAGE:
            page = _page_of(table_row, key, pages, PAGE)
        for begin in range(split * BLOCK_L, total, stride):
            valid = page >= 0
            k_at = _offset(key, page, stride_kb, stride_kn, PAGE, STRIDE_UNIT)
            k = tl.load(k_base + k_at[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
            v_at = k_at
            if not ALIKE:
                v_at = _offset(key, page, stride_vb, stride_vn, PAGE, STRIDE_UNIT)
            if PAIRS:
                v_ptrs = v_base + (v_at // 2)[:, None] + dv_pair[None, :]
                v = tl.load(v_ptrs, mask=valid[:, None] & (dv_pair[None, :] < Dv // 2), other=0)
            else:
                v_ptrs = v_base + v_at[:, None] + dv[None, :]
                v = tl.load(v_ptrs, mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_L, BLOCK_DV]
            # Look up what the next turn reads.
            key = _key_of(ahead, begin + stride + slots, limit, SIZE)
            page = key
            if PAGE:
                page = _page_of(table_row, key, pages, PAGE)
            ahead = _listed(list_row, begin + 2 * stride + slots, total, SIZE)

            if E4M3:
                k = half_of(k)
            scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_G, BLOCK_L]
            if FIT:
                scores = scores * factors[:, None]
            else:
                scores = scores * factor
            scores = tl.where(valid[None, :], scores, float("-inf"))
            m_old = m
            m, l, acc, p = softmax_step(scores, m, l, acc)
            if PAIRS:
                acc, acc_odd = add_pairs(p, v, acc, acc_odd, m_old, m)
            else:
                if E4M3:
                    v = half_of(v)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)

        if PAIRS:
            acc = tl.interleave(acc, acc_odd)
        if SPLIT:
            if v_scale_ptr is not None:
                acc = scaled_values(acc, m, v_scale)
            _store_part(part_ptr, split, splits, token, tokens, head, HKV * G, m, tl.sum(l, 1), acc, dv, in_group, Dv)
        else:
            o, lse = finish(m, tl.sum(l, 1), acc)
            if v_scale_ptr is not None:
                o = scaled_values(o, lse, v_scale)
            o_off = query_offset(token, S, stride_ob, stride_os, LAYOUT) + head.to(tl.int64) * stride_oh
            o_ptrs = o_ptr + o_off[:, None] * STRIDE_UNIT + dv[None, :]
            tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=in_group[:, None] & (dv[None, :] < Dv))
            if lse_ptr is not None:
                tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=in_group)


@triton.jit
def _store_part(part_ptr, split, splits, token, tokens, head, HQ, m, l, acc, dv, mask, Dv: tl.constexpr):
    """Write one split's maximum, sum and accumulator of some heads, as `merge_parts` reads them."""
    heads = tl.cast(tokens, tl.int64) * HQ
    part = split * heads + token.to(tl.int64) * HQ + head
    tl.store(part_ptr + part[:, None] * Dv + dv[None, :], acc, mask=mask[:, None] & (dv[None, :] < Dv))
    part += splits * heads * Dv  # m and l lie behind the accumulators of all parts
    tl.store(part_ptr + part, m, mask=mask)
    tl.store(part_ptr + splits * heads + part, l, mask=mask)


@triton.jit
def _tokens_of(tile, run, TOKENS: tl.constexpr):
    """First token of a tile, and one past its last. ``run`` tokens of a sequence follow each other, and no tile takes
    tokens of two runs.
    """
    per_run = tl.cdiv(run, TOKENS)
    token0 = tile // per_run * run + tile % per_run * TOKENS
    return token0, tl.minimum(token0 + TOKENS, (tile // per_run + 1) * run)


@triton.jit(do_not_specialize=RUNTIME)
def _list_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, entry_ptr, k_place_ptr, v_place_ptr, count_ptr, served_ptr,
    index_ptr,
    B, S, S_kv, n, pages, lists, first, tiles, run, blocks, room, cost, gain, stride_lt, stride_lh,
    stride_kb, stride_kn, stride_vb, stride_vn, stride_tb,
    SIZE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the unions of tiles of ``TOKENS`` tokens: entry int32 and place int64 ``[tiles, lists, room]``, and count.

    An entry is a block times ``2^TOKENS`` plus the mask of the tokens that selected the block. Its place is the offset
    of its first key from the first key of :func:`_bases`, in units of the strides, times 32, plus the number of its
    keys that a token of the tile may see. v_place is None if values have the strides of keys. Entries are in the order
    in which they first occur, token by token. A program takes every so many tiles; ``first`` is the number of the
    launch's first tile. index ``[programs, lists, blocks]`` int16 says where in the list of the program's tile a block
    is. It is checked against the list, so it is never cleared (Briggs and Torczon, 1993, sparse sets).

    count is `NOT_SERVED` where the tokens are of several sequences, where a row lists a block twice, and where the
    union is not worth reading, because it has more than ``gain / cost`` blocks for each listed block. served ``[tokens,
    lists]`` is 0 for rows of such tiles, else 1.
    """
    program = tl.program_id(0)
    number = tl.program_id(1)  # of the list, among the lists of a token
    index_ptr += (program * lists + number).to(tl.int64) * blocks
    i = tl.arange(0, SLOTS)
    mine = tl.arange(0, 16)  # tokens of the tile
    for tile in range(program, tiles, tl.num_programs(0)):
        token0, end = _tokens_of(first + tile, run, TOKENS)
        seq, k_first, seqlen_k, shift = sequence_of(token0, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
        # All tokens must be of one sequence. In a ragged batch a token after the last sequence has its `seq`, but no
        # keys.
        other, _, keys, _ = sequence_of(end - 1, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
        limits = causal_limit(tl.minimum(token0 + mine, end - 1), shift, seqlen_k, pos_ptr, CAUSAL)
        farthest = tl.max(limits + mine * 0, 0)  # a call that is not causal has one limit
        at_list = (tile * lists + number).to(tl.int64) * room
        count = 0
        selected = 0
        again = 0
        rows = sel_ptr + tl.cast(number, tl.int64) * stride_lh
        ahead = tl.load(rows + token0.to(tl.int64) * stride_lt + i, mask=i < n, other=-1)
        for t in range(0, end - token0):
            token = token0 + t
            limit = causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL)
            block = _narrow(ahead)
            row = rows + (token + 1).to(tl.int64) * stride_lt
            ahead = tl.load(row + i, mask=i < tl.where(token + 1 < end, n, 0), other=-1)
            listed = (block >= 0) & (block < tl.cdiv(limit, SIZE))
            block = tl.where(listed, block, 0)
            key = block * SIZE
            page = tl.zeros_like(block)
            if PAGE:
                page = tl.load(table_ptr + tl.cast(seq, tl.int64) * stride_tb + key // PAGE, mask=listed, other=-1)
                listed &= (page >= 0) & (page < pages)
                page = tl.where(listed, page, 0).to(tl.int32)
                key = key % PAGE
            seen = tl.minimum(farthest - block * SIZE, SIZE)
            k_place = (page.to(tl.int64) * stride_kb + key.to(tl.int64) * stride_kn) * 32 + seen
            at = tl.load(index_ptr + block, mask=listed, other=-1).to(tl.int32)
            known = listed & (at >= 0) & (at < count)
            there = tl.load(entry_ptr + at_list + at, mask=known, other=-1)
            known &= (there >> TOKENS) == block
            fresh = listed & (known == 0)
            rank = tl.cumsum(fresh.to(tl.int32), 0)
            at = tl.where(known, at, count + rank - 1)
            entry = tl.where(known, there, block << TOKENS) | (1 << t)
            tl.debug_barrier()  # entries are read before any is written
            tl.store(entry_ptr + at_list + at, entry, mask=listed)
            tl.store(k_place_ptr + at_list + at, k_place, mask=fresh)
            if v_place_ptr is not None:
                v_place = (page.to(tl.int64) * stride_vb + key.to(tl.int64) * stride_vn) * 32 + seen
                tl.store(v_place_ptr + at_list + at, v_place, mask=fresh)
            tl.store(index_ptr + block, at.to(tl.int16), mask=fresh)
            tl.debug_barrier()
            # Two slots of this row list the same new block: one of them finds the other's place.
            found = tl.load(index_ptr + block, mask=fresh, other=0).to(tl.int32)
            again += tl.sum((fresh & (found != at)).to(tl.int32), 0)
            count += tl.sum(fresh.to(tl.int32), 0)
            selected += tl.sum(listed.to(tl.int32), 0)
            tl.debug_barrier()
        bits = 0
        for begin in range(0, count, SLOTS):
            entry = tl.load(entry_ptr + at_list + begin + i, mask=begin + i < count, other=0)
            for j in tl.static_range(TOKENS):
                bits += tl.sum((entry >> j) & 1, 0)
        # A row that lists a known block twice sets its bit once.
        worth = (other == seq) & (keys == seqlen_k) & (again == 0) & (bits == selected)
        worth &= count.to(tl.int64) * cost <= selected.to(tl.int64) * gain
        tl.store(count_ptr + tile * lists + number, tl.where(worth, count, NOT_SERVED))
        served = served_ptr + (token0 + mine).to(tl.int64) * lists + number
        tl.store(served, tl.where(mine >= 0, worth, 0).to(tl.int32), mask=(token0 + mine < end) & (mine < TOKENS))


@triton.jit
def _of_list(list_ptr, slot, total, SIZE: tl.constexpr):
    """Entry or place of each ``slot [BLOCK_N]``, a place for one key; 0, which has no keys, from ``total`` on."""
    return tl.load(list_ptr + slot // SIZE, mask=slot < total, other=0)


@triton.jit(do_not_specialize=RUNTIME)
def _unions_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, part_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, k_scale_ptr, v_scale_ptr, entry_ptr,
    k_place_ptr, v_place_ptr, count_ptr, served_ptr,
    B, S, S_kv, tokens, lists, first, tiles, run, room,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob,
    stride_os, stride_oh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr, SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of one tile: ``TOKENS`` tokens with ``G`` query heads each, in ``ROWS`` rows, over their union.

    Splits of the union's keys are as in :func:`_rows_kernel`. A weight of zero times a NaN or an infinity is NaN, so a
    value that only a neighbour selected could spoil a row. A tile whose result has a NaN is therefore not served.
    """
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    tile = tl.program_id(0) % tiles  # one KV head after the other, so that its keys may stay in L2
    head_kv = tl.program_id(0) // tiles
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    number = head_kv % lists
    blocks = tl.load(count_ptr + tile * lists + number)
    if SPLIT:
        blocks = tl.maximum(blocks, 0)  # the merge reads the parts of all tiles
    elif blocks < 0:
        return
    token0, end = _tokens_of(first + tile, run, TOKENS)
    seq, k_first, seqlen_k, shift = sequence_of(token0, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    r = tl.arange(0, ROWS)
    of_tile = r // G
    token = token0 + of_tile  # [ROWS]
    exists = (token < end) & (of_tile < TOKENS)
    limit = causal_limit(tl.minimum(token, end - 1), shift, seqlen_k, pos_ptr, CAUSAL)
    limit = tl.where(exists, limit, 0)
    bit = tl.where(exists, 1 << of_tile, 0)

    slots = tl.arange(0, BLOCK_N)
    total = blocks * SIZE
    stride = splits * BLOCK_N
    at_list = (tile * lists + number).to(tl.int64) * room
    entry = _of_list(entry_ptr + at_list, split * BLOCK_N + slots, total, SIZE)
    k_place = _of_list(k_place_ptr + at_list, split * BLOCK_N + slots, total, SIZE)
    if v_place_ptr is not None:
        v_place = _of_list(v_place_ptr + at_list, split * BLOCK_N + slots, total, SIZE)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = head_kv * G + r % G
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + head_kv * K_STEP)
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head_kv * V_STEP)
    q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :]
    q = tl.load(q_ptrs, mask=exists[:, None] & (d[None, :] < D), other=0.0)  # [ROWS, BLOCK_D]
    factor = scale * 1.4426950408889634
    if FIT:
        q, fit = fit_half(q)
        factors = fit * factor
    k_base, v_base = _bases(
        k_ptr, v_ptr, seq, head_kv, k_first, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, LAYOUT,
        PAGE, STRIDE_UNIT,
    )  # fmt: skip

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    within = slots % SIZE  # the key's number in its block
    k_ptrs = k_base + (within.to(tl.int64) * stride_kn * STRIDE_UNIT)[:, None] + d[None, :]
    v_ptrs = v_base + (within.to(tl.int64) * stride_vn * STRIDE_UNIT)[:, None] + dv[None, :]
    for begin in range(split * BLOCK_N, total, stride):
        if BLOCK_N % SIZE:
            within = (begin + slots) % SIZE
            k_ptrs = k_base + (within.to(tl.int64) * stride_kn * STRIDE_UNIT)[:, None] + d[None, :]
            v_ptrs = v_base + (within.to(tl.int64) * stride_vn * STRIDE_UNIT)[:, None] + dv[None, :]
        valid = within < (k_place & 31).to(tl.int32)
        k_at = (k_place >> 5) * STRIDE_UNIT
        k = tl.load(k_ptrs + k_at[:, None], mask=valid[:, None] & (d[None, :] < D), other=0.0)
        v_at = k_at
        if v_place_ptr is not None:
            v_at = (v_place >> 5) * STRIDE_UNIT
        v = tl.load(v_ptrs + v_at[:, None], mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)
        mask = entry
        key = (entry >> TOKENS) * SIZE + within
        # Ask for what the next turn reads.
        entry = _of_list(entry_ptr + at_list, begin + stride + slots, total, SIZE)
        k_place = _of_list(k_place_ptr + at_list, begin + stride + slots, total, SIZE)
        if v_place_ptr is not None:
            v_place = _of_list(v_place_ptr + at_list, begin + stride + slots, total, SIZE)

        if E4M3:
            k = half_of(k)
            v = half_of(v)
        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [ROWS, BLOCK_N]
        if FIT:
            scores = scores * factors[:, None]
        else:
            scores = scores * factor
        seen = ((mask[None, :] & bit[:, None]) != 0) & (key[None, :] < limit[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
        p = tl.exp2(scores - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m = m_new

    if SPLIT:
        if v_scale_ptr is not None:
            acc = scaled_values(acc, m, v_scale)
        _store_part(part_ptr, split, splits, token, tokens, head, HKV * G, m, l, acc, dv, exists, Dv)
        o = acc
    else:
        o, lse = finish(m, l, acc)
        if v_scale_ptr is not None:
            o = scaled_values(o, lse, v_scale)
        o_off = query_offset(token, S, stride_ob, stride_os, LAYOUT) + head.to(tl.int64) * stride_oh
        o_ptrs = o_ptr + o_off[:, None] * STRIDE_UNIT + dv[None, :]
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=exists[:, None] & (dv[None, :] < Dv))
        if lse_ptr is not None:
            tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=exists)
    spoiled = tl.sum((o != o).to(tl.int32))  # over both axes at once, which compiles for all GPUs
    if spoiled > 0:
        mine = tl.arange(0, 16)
        served = served_ptr + (token0 + mine).to(tl.int64) * lists + number
        tl.store(served, tl.zeros([16], tl.int32), mask=(token0 + mine < end) & (mine < TOKENS))
