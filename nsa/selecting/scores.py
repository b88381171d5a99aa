"""Triton kernels that score blocks. `reading` says what the rows of a tile are.

`_lse_kernel` computes the sums of a softmax over index keys, if the caller does not bring them. `_scores_kernel` writes
the scores of blocks for a tile of queries.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.compiler import INTERPRETED
from nsa.kernels.shared.sequences import RAGGED, VARLEN
from nsa.selecting.reading import (
    MAX,
    RELU,
    RUNTIME,
    SOFTMAX,
    among,
    find,
    first_key,
    in_registers,
    keys_from,
    keys_seen,
    load_keys,
    load_queries,
    page_of,
    pages_of,
    position_of,
    rows_of,
    sequence,
)


@triton.jit
def _block_maxima(
    q, fit, k_ptr, page, tile, limit, keys, stride_kb, stride_kn, in_list,
    SIZE: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr, LB: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The largest score of the keys of each block of a tile, ``[LB, blocks of the tile]``."""
    i = tl.arange(0, N)
    key0 = first_key(tile, SIZE, N, PARTS)
    k, exists = load_keys(
        k_ptr, page, key0, i, keys, stride_kb, stride_kn, D, BLOCK_D, PAGE, ONE_PAGE, UNIT,
        MASKED, True,
    )  # fmt: skip
    s = tl.dot(q, k, input_precision=INPUT_PRECISION)  # [M, N]
    if MASKED:
        seen = exists[None, :] & (key0 + i[None, :] < limit[:, None])
        if PARTS and SIZE % N:
            seen &= tile % PARTS * N + i[None, :] < SIZE
        s = tl.where(seen, s, float("-inf"))
    elif PAGE and not ONE_PAGE:
        s = tl.where(exists[None, :], s, float("-inf"))
    if INTERPRETED:  # a GPU's maximum ignores NaN
        s = tl.where(s == s, s, float("-inf"))
    if PARTS or SIZE == N:
        best = tl.max(s, 1)[:, None]  # [M, 1]
    else:
        best = tl.max(tl.reshape(s, [s.shape[0], N // SIZE, SIZE]), 2)  # [M, N // SIZE]
    best = best * fit[:, None]
    if PAGE and ONE_PAGE:
        best = tl.where(page >= 0, best, float("-inf"))
    if HEADS > 1:
        best = tl.where(in_list[:, None], best, float("-inf"))
        best = tl.max(tl.reshape(best, [HEADS, LB, best.shape[1]]), 0)
    return best


@triton.jit
def _block_sums(
    q, factor, lse, k_ptr, page, tile, limit, keys, stride_kb, stride_kn, carry, in_list,
    SCORE: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, LB: tl.constexpr, INPUT_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of the blocks of a tile that sum over heads, ``[blocks of the tile, LB]``; and the next ``carry [LB]``.

    RELU: ``factor [M]`` is a head's weight; a block has the largest sum of its keys. SOFTMAX: ``factor`` turns scores
    into exponents of 2; a block has the sum of its keys' weights, each times the number of strides that the key has in
    the block. ``carry`` is what the last keys before the tile have in its first block. A key that is infinite or NaN
    changes no block but its own: nothing is multiplied by 0 that may be either.
    """
    i = tl.arange(0, N)
    key0 = first_key(tile, SIZE, N, PARTS)
    k, exists = load_keys(
        k_ptr, page, key0, i, keys, stride_kb, stride_kn, D, BLOCK_D, PAGE, ONE_PAGE, UNIT,
        MASKED, False,
    )  # fmt: skip
    s = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)  # [N, M]
    if SCORE == RELU:
        s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * factor[None, :]
    else:
        s = tl.exp2(s * factor[None, :] - lse[None, :])
    if HEADS > 1:
        if HEADS != G:
            s = tl.where(in_list[None, :], s, 0.0)
        s = tl.sum(tl.reshape(s, [N, HEADS, LB]), 1)  # [N, LB]
    if SCORE == RELU:
        if MASKED:
            seen = exists[:, None] & (key0 + i[:, None] < limit[None, :])
            if PARTS and SIZE % N:
                seen &= tile % PARTS * N + i[:, None] < SIZE
            s = tl.where(seen, s, float("-inf"))
        elif PAGE:
            s = tl.where(exists[:, None], s, float("-inf"))
        if SIZE > 1:
            s = tl.where(s == s, s, float("-inf"))
        if PARTS or SIZE == N:
            s = tl.max(s, 0)[None, :]
        elif SIZE > 1:
            s = tl.max(tl.reshape(s, [N // SIZE, SIZE, LB]), 1)
    else:
        if MASKED:
            s = tl.where(exists[:, None] & (key0 + i[:, None] < limit[None, :]), s, 0.0)
        elif PAGE:
            s = tl.where(exists[:, None], s, 0.0)
        own = tl.minimum(OVERLAP, SIZE - i % SIZE).to(tl.float32)[:, None]
        beyond = tl.where(own < OVERLAP, s * (OVERLAP - own), 0.0)
        spill = tl.sum(tl.reshape(beyond, [N // SIZE, SIZE, LB]), 1)
        s = tl.sum(tl.reshape(s * own, [N // SIZE, SIZE, LB]), 1)
        block = tl.arange(0, N // SIZE)
        before = block[None, :, None] == block[:, None, None] - 1
        s += tl.sum(tl.where(before, spill[None, :, :], 0.0), 1)
        s += tl.where(block[:, None] == 0, carry[None, :], 0.0)
        carry = tl.sum(tl.where(block[:, None] == N // SIZE - 1, spill, 0.0), 0)
    return s, carry


@triton.jit
def _parts_at(
    local, token, head, lists, G: tl.constexpr, TOKENS: tl.constexpr, PER_KEY: tl.constexpr, LISTS: tl.constexpr
):  # fmt: skip
    """Where a tile's rows lie in a part of the LSE, and elements from a part to the next. token: within the tile."""
    heads = lists * G
    PER_HEAD: tl.constexpr = (PER_KEY + LISTS - 1) // LISTS
    step = tl.cast(tl.num_programs(0) // (lists // PER_KEY * PER_HEAD) * TOKENS, tl.int64) * heads
    return (local * TOKENS + token).to(tl.int64) * heads + head, step


@triton.jit
def _merged_lse(
    lse_ptr, local, token, head, valid, lists,
    G: tl.constexpr, TOKENS: tl.constexpr, PER_KEY: tl.constexpr, LISTS: tl.constexpr, LSE_PARTS: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 of a tile's rows, of the parts that `_lse_kernel` wrote."""
    at, step = _parts_at(local, token, head, lists, G, TOKENS, PER_KEY, LISTS)
    m = tl.full([head.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([head.shape[0]], tl.float32)
    for part in tl.static_range(LSE_PARTS):
        m_part = tl.load(lse_ptr + part * step + at, mask=valid, other=float("-inf"))
        l_part = tl.load(lse_ptr + (LSE_PARTS + part) * step + at, mask=valid, other=0.0)
        m_new = tl.maximum(m, m_part)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - m_safe) + l_part * tl.exp2(m_part - m_safe)
        m = m_new
    return m + tl.log2(tl.where(l > 0, l, 1.0))


@triton.jit(do_not_specialize=RUNTIME)
def _scores_kernel(
    q_ptr, k_ptr, weight_ptr, lse_ptr, score_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, k_scale_ptr,
    B, S, rows, end, lists, tile0, run, pages, width,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_wb, stride_ws, stride_lb, stride_ls,
    stride_tb, scale,
    SCORE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PER_KEY: tl.constexpr, K_STEP: tl.constexpr,
    UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, TOKENS: tl.constexpr, LISTS: tl.constexpr,
    HEADS: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, LSE_PARTS: tl.constexpr,
):  # fmt: skip
    """Write ``score [rows of the pass, lists, width]`` of a tile of tokens and some lists of one key head.

    SIZE: index keys of a block. PARTS: tiles of a block; 0 if a tile has whole blocks. PER_KEY: lists of a key head.
    HEADS: ``G``, padded. The programs of axis 1 share the keys of the tile. ``lse`` has the base 2 of LSE_PARTS parts:
    maximum and sum ``[LSE_PARTS, tokens of the pass, index heads]`` each; or with LSE_PARTS = 0 the natural LSE of the
    caller.
    """
    LB: tl.constexpr = LISTS * TOKENS
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    ALIGNED: tl.constexpr = PARTS == 0 or SIZE % N == 0
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % N == 0 and ALIGNED
    local, head_k, list0, token0, token1, of_row, head, g, valid = rows_of(
        end, lists, tile0, run, PER_KEY, G, TOKENS, LISTS, HEADS
    )  # fmt: skip
    safe = tl.minimum(of_row, token1 - 1)
    q, fit = load_queries(
        q_ptr, safe, head, valid, S, stride_qb, stride_qs, stride_qh, D, BLOCK_D, LAYOUT, UNIT, FIT
    )  # fmt: skip
    if SCORE == MAX:
        q = in_registers(q, valid)
    lse = fit
    if SCORE == RELU:
        if weight_ptr is not None:
            at = query_offset(safe, S, stride_wb, stride_ws, LAYOUT) + head
            fit *= tl.load(weight_ptr + at, mask=valid, other=0.0).to(tl.float32)
    if SCORE == SOFTMAX:
        if k_scale_ptr is not None:
            scale *= tl.load(k_scale_ptr + head_k * K_STEP)
        fit *= scale * 1.4426950408889634
        if LSE_PARTS:
            lse = _merged_lse(
                lse_ptr, local, of_row - token0, head, valid, lists, G, TOKENS, PER_KEY, LISTS, LSE_PARTS
            )  # fmt: skip
        else:
            at = query_offset(safe, S, stride_lb, stride_ls, LAYOUT) + head
            lse = tl.load(lse_ptr + at, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        lse = tl.where(valid, lse, float("inf"))

    # The pairs of a list and a token, and where their scores go.
    x = tl.arange(0, LB)
    token = token0 + x % TOKENS
    in_key = list0 + x // TOKENS
    row = (local * TOKENS + x % TOKENS).to(tl.int64) * lists + head_k * PER_KEY + in_key
    pair = (token < token1) & (in_key < PER_KEY)
    into = score_ptr + row * width  # [LB]
    BLOCKS: tl.constexpr = 1 if PARTS else N // SIZE
    block = tl.arange(0, BLOCKS)
    i = tl.arange(0, N)
    STEP: tl.constexpr = SIZE if PARTS else N  # keys of a unit of work
    UNITS: tl.constexpr = PARTS if PARTS else 1  # tiles of a unit
    OVERLAP: tl.constexpr = WINDOW // STRIDE

    seq = find(token0, B, S, cu_q_ptr, LAYOUT)
    last = seq
    if LAYOUT == VARLEN or LAYOUT == RAGGED:
        last = find(token1 - 1, B, S, cu_q_ptr, LAYOUT)
    while seq <= last:
        key0, keys, tokens, shift = sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
        mine = pair
        mine_row = valid
        if LAYOUT == VARLEN or LAYOUT == RAGGED:
            mine &= among(token, seq, B, cu_q_ptr)
            mine_row &= among(of_row, seq, B, cu_q_ptr)
        limit = keys_seen(position_of(token, mine, shift, tokens, pos_ptr), STRIDE, WINDOW)  # [LB]
        limit = tl.minimum(limit, keys)
        most = tl.max(limit, 0)
        least = tl.min(tl.where(mine, limit, 2147483647), 0)
        limits = keys_seen(position_of(of_row, mine_row, shift, tokens, pos_ptr), STRIDE, WINDOW)  # [rows]
        limits = tl.minimum(limits, keys)
        k_base = keys_from(k_ptr, head_k, key0, seq, B, stride_kb, stride_kn, stride_kh, PAGE, UNIT)
        table_row = pages_of(table_ptr, seq, B, stride_tb) if PAGE else table_ptr
        units = tl.cdiv(most, STEP)
        if SCORE == SOFTMAX:  # the last key may reach into one more block
            units = tl.where(most > 0, tl.cdiv(tl.cdiv((most - 1) * STRIDE + WINDOW, STRIDE), STEP), 0)
        each = tl.cdiv(units, tl.num_programs(1))
        begin = tl.program_id(1) * each * UNITS
        stop = tl.minimum((tl.program_id(1) + 1) * each, units) * UNITS
        whole = tl.minimum(tl.maximum(least, 0) // STEP * UNITS, stop)
        if PARTS and SIZE % N:  # a tile reaches past its block
            whole = 0
        whole = tl.maximum(whole, begin)
        carry = tl.zeros([LB], tl.float32)
        if SCORE == SOFTMAX:
            if begin > 0 and begin < stop:
                page = page_of(table_row, (begin - 1) * N, i, keys, pages, PAGE, ONE_PAGE)
                _, carry = _block_sums(
                    q, fit, lse, k_base, page, begin - 1, limit, keys, stride_kb, stride_kn, carry, g < G,
                    SCORE, SIZE, OVERLAP, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, G, HEADS, LB,
                    INPUT_PRECISION, True,
                )  # fmt: skip
        if SCORE == MAX:
            best = tl.full([LB, BLOCKS], float("-inf"), tl.float32)
        else:
            best = tl.full([BLOCKS, LB], float("-inf"), tl.float32)
        page = page_of(table_row, first_key(begin, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE)
        # All rows see all keys of the first tiles. The others are masked.
        for part in tl.static_range(2):
            for tile in range(begin if part == 0 else whole, whole if part == 0 else stop):
                if SCORE == MAX:
                    scored = _block_maxima(
                        q, fit, k_base, page, tile, limits, keys, stride_kb, stride_kn, g < G,
                        SIZE, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB, INPUT_PRECISION, part == 1,
                    )  # fmt: skip
                else:
                    scored, carry = _block_sums(
                        q, fit, lse, k_base, page, tile, limit, keys, stride_kb, stride_kn, carry, g < G,
                        SCORE, SIZE, OVERLAP, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, G, HEADS, LB,
                        INPUT_PRECISION, part == 1,
                    )  # fmt: skip
                to = tile * BLOCKS
                if PARTS:
                    best = tl.where(tile % PARTS == 0, scored, tl.maximum(best, scored))
                    scored = best
                    to = tile // PARTS
                inside = block >= 0  # [BLOCKS]
                if part == 1:
                    inside = (to + block) * SIZE < (most + OVERLAP - 1 if SCORE == SOFTMAX else most)
                if SCORE == MAX:
                    tl.store(into[:, None] + to + block[None, :], scored, mask=mine[:, None] & inside[None, :])
                else:
                    tl.store(into[None, :] + to + block[:, None], scored, mask=mine[None, :] & inside[:, None])
                page = page_of(
                    table_row, first_key(tile + 1, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE
                )  # fmt: skip
        seq += 1


@triton.jit(do_not_specialize=RUNTIME)
def _lse_kernel(
    q_ptr, k_ptr, lse_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, k_scale_ptr,
    B, S, rows, end, lists, tile0, run, pages,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_tb, scale,
    LAYOUT: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, PER_KEY: tl.constexpr, K_STEP: tl.constexpr, UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, LISTS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of each query head's softmax over its index keys, in base 2, as :func:`_scores_kernel` reads
    them. The programs of axis 1 share the keys; each writes a part. Rows and tiles are as there.
    """
    M: tl.constexpr = HEADS * LISTS * TOKENS
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % N == 0
    local, head_k, list0, token0, token1, token, head, g, valid = rows_of(
        end, lists, tile0, run, PER_KEY, G, TOKENS, LISTS, HEADS
    )  # fmt: skip
    safe = tl.minimum(token, token1 - 1)
    q, fit = load_queries(
        q_ptr, safe, head, valid, S, stride_qb, stride_qs, stride_qh, D, BLOCK_D, LAYOUT, UNIT, FIT
    )  # fmt: skip
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + head_k * K_STEP)
    fit *= scale * 1.4426950408889634
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    i = tl.arange(0, N)
    seq = find(token0, B, S, cu_q_ptr, LAYOUT)
    last = seq
    if LAYOUT == VARLEN or LAYOUT == RAGGED:
        last = find(token1 - 1, B, S, cu_q_ptr, LAYOUT)
    while seq <= last:
        key0, keys, tokens, shift = sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
        mine = valid
        if LAYOUT == VARLEN or LAYOUT == RAGGED:
            mine &= among(token, seq, B, cu_q_ptr)
        limit = tl.minimum(keys_seen(position_of(token, mine, shift, tokens, pos_ptr), STRIDE, WINDOW), keys)  # [M]
        k_base = keys_from(k_ptr, head_k, key0, seq, B, stride_kb, stride_kn, stride_kh, PAGE, UNIT)
        table_row = pages_of(table_ptr, seq, B, stride_tb) if PAGE else table_ptr
        tiles = tl.cdiv(tl.max(limit, 0), N)
        each = tl.cdiv(tiles, tl.num_programs(1))
        begin = tl.program_id(1) * each
        page = page_of(table_row, begin * N, i, keys, pages, PAGE, ONE_PAGE)
        for tile in range(begin, tl.minimum(begin + each, tiles)):
            k, exists = load_keys(
                k_base, page, tile * N, i, keys, stride_kb, stride_kn, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, True, True
            )  # fmt: skip
            page = page_of(table_row, (tile + 1) * N, i, keys, pages, PAGE, ONE_PAGE)
            s = tl.dot(q, k, input_precision=INPUT_PRECISION) * fit[:, None]
            s = tl.where(exists[None, :] & (tile * N + i[None, :] < limit[:, None]), s, float("-inf"))
            s = tl.where(s == s, s, float("-inf"))  # as where blocks are scored: a block with a NaN has -inf
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)
            m = m_new
        seq += 1
    at, step = _parts_at(local, token - token0, head, lists, G, TOKENS, PER_KEY, LISTS)
    splits = tl.num_programs(1)
    tl.store(lse_ptr + tl.program_id(1) * step + at, m, mask=valid)
    tl.store(lse_ptr + (splits + tl.program_id(1)) * step + at, l, mask=valid)
