"""Triton kernels that choose blocks: scores of blocks, and the exact ``n`` best of them.

`_lse_kernel` computes the sums of a softmax over index keys, if the caller does not bring them. `_scores_kernel` writes
the scores of blocks for a tile of queries. `_choose_kernel` finds the ``n`` best blocks of a row and writes them in
rising order. It searches the score of the ``n``-th best block by bisection over integers that are in the order of the
scores, so that ties are exact and go to the smaller block.

An index key is a row of ``k``. Key ``i`` stands for the tokens ``i * STRIDE`` to ``i * STRIDE + WINDOW - 1`` of its
sequence, and a query at position ``t`` may see it if none of them is behind ``t``. The rows of a tile are its query
heads: row ``r`` has head ``r // LB`` of the list, and of ``LB = LISTS * TOKENS`` pairs of a list and a token the pair
``r % LB``.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.e4m3 import fit_half, half_of
from nsa.kernels.shared.primitives import (
    CACHE,
    INTERPRETED,
    RAGGED,
    VARLEN,
    filled_keys,
    find_sequence,
    find_without_loop,
    last_query,
    sequence_keys,
)

MAX = tl.constexpr(0)
RELU = tl.constexpr(1)
SOFTMAX = tl.constexpr(2)

RUNTIME = "B S rows end lists tile0 run pages width splits n first newest".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh wb ws lb ls tb".split()]

NEVER = tl.constexpr(-2147483648)  # a block that may not be chosen
ALWAYS = tl.constexpr(2147483647)  # a forced block


@triton.jit
def _tokens_of(tile, run, TOKENS: tl.constexpr):
    """First token of a tile, and one past its last. No tile takes tokens of two runs."""
    per_run = tl.cdiv(run, TOKENS)
    token0 = tile // per_run * run + tile % per_run * TOKENS
    return token0, tl.minimum(token0 + TOKENS, (tile // per_run + 1) * run)


@triton.jit
def _find(token, B, S, cu_q_ptr, LAYOUT: tl.constexpr):
    """Sequence of a token; ``B`` for a token after the last sequence."""
    if LAYOUT == VARLEN:
        return find_sequence(cu_q_ptr, B, token, 128)
    elif LAYOUT == RAGGED:
        return find_without_loop(cu_q_ptr, B, token, 128)
    else:
        return token // S


@triton.jit
def _sequence(
    seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """``(key0, keys, tokens, shift)`` of a sequence: its first index key (int64) and their number, how many tokens it
    has, and what makes a position of a token's number. A sequence from ``B`` on has none.
    """
    key0 = tl.zeros([], tl.int64)
    known = seq < B
    if LAYOUT == CACHE or LAYOUT == RAGGED:
        room = rows * STRIDE + WINDOW - 1
        tokens = filled_keys(tl.minimum(seq, tl.maximum(B - 1, 0)), room, cu_k_ptr) if LAYOUT == CACHE else 0
        if LAYOUT == RAGGED:
            tokens = tl.load(cu_k_ptr + seq, mask=known, other=0)
            tokens = tl.minimum(tl.maximum(tokens, 0), room).to(tl.int32)
        keys = tl.minimum(tl.where(tokens >= WINDOW, (tokens - WINDOW) // STRIDE + 1, 0), rows)
        end = (seq + 1) * S if LAYOUT == CACHE else last_query(cu_q_ptr, seq, known)
        shift = tokens - end
    elif LAYOUT == VARLEN:
        key0, keys = sequence_keys(seq, B, rows, cu_k_ptr)
        tokens = tl.where(known, keys * STRIDE + WINDOW - 1, 0)
        if WINDOW == 1:
            shift = tokens - last_query(cu_q_ptr, seq, known)
        else:
            begin = tl.load(cu_q_ptr + seq, mask=known & (seq > 0), other=0)
            shift = -tl.minimum(tl.maximum(begin, 0), 2147483647).to(tl.int32)
    else:
        keys = rows
        tokens = rows * STRIDE + WINDOW - 1
        shift = tokens - (seq + 1) * S if WINDOW == 1 else -seq * S
    return key0, keys, tokens, shift


@triton.jit
def _position(token, valid, shift, tokens, pos_ptr):
    """Position of each token in its sequence; -1 for one that sees nothing."""
    if pos_ptr is None:
        position = token + shift
    else:
        position = tl.load(pos_ptr + token, mask=valid, other=-1)
    return tl.where(valid, tl.maximum(tl.minimum(position, tokens - 1), -1), -1).to(tl.int32)


@triton.jit
def _seen(position, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """How many index keys a query at ``position`` may see."""
    return tl.where(position + 1 >= WINDOW, (position + 1 - WINDOW) // STRIDE + 1, 0)


@triton.jit
def _first_key(tile, SIZE: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """First index key of a tile."""
    return tile // PARTS * SIZE + tile % PARTS * N if PARTS else tile * N


@triton.jit
def _page_of(table_row, key0, i, keys, pages, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Pages of the keys ``key0 + i``: one if the tile lies in one page, else ``[N]``. -1 if there is none.

    A tile's pages are looked up while the tile before it is computed, and carried to it. So Triton pipelines the loads
    of keys, and not the look-ups.
    """
    if PAGE and ONE_PAGE:
        page = tl.load(table_row + key0 // PAGE, mask=key0 < keys, other=-1)
        return tl.where((page >= 0) & (page < pages), page, -1).to(tl.int32)
    elif PAGE:
        key = key0 + i
        page = tl.load(table_row + key // PAGE, mask=key < keys, other=-1)
        return tl.where((page >= 0) & (page < pages), page, -1).to(tl.int32)
    else:
        return 0


@triton.jit
def _load_keys(
    k_ptr, page, key0, i, keys, stride_kb, stride_kn, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Index keys ``key0 + i`` of a sequence, ``[N, BLOCK_D]``, transposed on request; and which of them exist, ``[N]``.

    ONE_PAGE: the tile lies in one page. MASKED: keys from ``keys`` on are not loaded.
    """
    key = key0 + i
    exists = key < keys
    if PAGE and ONE_PAGE:
        exists = key < tl.where(page >= 0, keys, 0)
        begin = tl.maximum(page, 0).to(tl.int64) * stride_kb + tl.cast(key0 % PAGE, tl.int64) * stride_kn
        at = i.to(tl.int64) * stride_kn
    elif PAGE:
        exists &= page >= 0
        begin = 0
        at = tl.maximum(page, 0).to(tl.int64) * stride_kb + (key % PAGE).to(tl.int64) * stride_kn
    else:
        begin = tl.cast(key0, tl.int64) * stride_kn
        at = i.to(tl.int64) * stride_kn
    k_ptr += begin * UNIT
    d = tl.arange(0, BLOCK_D)
    if TRANSPOSED:
        ptrs = k_ptr + at[None, :] * UNIT + d[:, None]
        wanted = exists[None, :] & (d[:, None] < D)
        inside = (d[:, None] < D) & (i[None, :] >= 0)
    else:
        ptrs = k_ptr + at[:, None] * UNIT + d[None, :]
        wanted = exists[:, None] & (d[None, :] < D)
        inside = (d[None, :] < D) & (i[:, None] >= 0)
    if MASKED:
        k = tl.load(ptrs, mask=wanted, other=0.0)
    elif BLOCK_D == D:
        k = tl.load(ptrs)
    else:
        k = tl.load(ptrs, mask=inside, other=0.0)
    if k.dtype == tl.float8e4nv:
        k = half_of(k)
    return k, exists


@triton.jit
def _load_queries(
    q_ptr, token, head, valid, S, stride_qb, stride_qs, stride_qh, D: tl.constexpr, BLOCK_D: tl.constexpr,
    LAYOUT: tl.constexpr, UNIT: tl.constexpr, FIT: tl.constexpr,
):  # fmt: skip
    """Index queries ``[M, BLOCK_D]``, and the factor ``[M]`` by which their scores are too small."""
    d = tl.arange(0, BLOCK_D)
    at = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + at[:, None] * UNIT + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    if FIT:
        q, fit = fit_half(q)
    else:
        fit = tl.full([q.shape[0]], 1.0, tl.float32)
    return q, fit


@triton.jit
def _in_registers(q, valid):
    """``q``, zeros where not valid, as it is already.

    A left operand that was just loaded stays in shared memory, and every product reads it there. One that was computed
    stays in registers. Products of 128 rows and 128 keys are held up by shared memory.
    """
    if q.dtype.primitive_bitwidth == 16 and q.shape[1] <= 128:  # else there are too few registers
        q = tl.where(valid[:, None], q, 0.0)
    return q


@triton.jit
def _block_maxima(
    q, fit, k_ptr, page, tile, limit, keys, stride_kb, stride_kn, in_list,
    SIZE: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr, LB: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The largest score of the keys of each block of a tile, ``[LB, blocks of the tile]``."""
    i = tl.arange(0, N)
    key0 = _first_key(tile, SIZE, N, PARTS)
    k, exists = _load_keys(
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
    q, factor, lse, k_ptr, page, tile, limit, keys, stride_kb, stride_kn, carry,
    SCORE: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, LB: tl.constexpr, INPUT_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of the blocks of a tile that sum over heads, ``[blocks of the tile, LB]``; and the next ``carry [LB]``.

    RELU: ``factor [M]`` is a head's weight; a block has the largest sum of its keys. SOFTMAX: ``factor`` turns scores
    into exponents of 2; a block has the sum of its keys' weights, each times the number of strides that the key has in
    the block. ``carry`` is what the last keys before the tile have in its first block.
    """
    i = tl.arange(0, N)
    key0 = _first_key(tile, SIZE, N, PARTS)
    k, exists = _load_keys(
        k_ptr, page, key0, i, keys, stride_kb, stride_kn, D, BLOCK_D, PAGE, ONE_PAGE, UNIT,
        MASKED, False,
    )  # fmt: skip
    s = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)  # [N, M]
    if SCORE == RELU:
        s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * factor[None, :]
    else:
        s = tl.exp2(s * factor[None, :] - lse[None, :])
    if HEADS > 1:
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
        spill = tl.sum(tl.reshape(s * (OVERLAP - own), [N // SIZE, SIZE, LB]), 1)
        s = tl.sum(tl.reshape(s * own, [N // SIZE, SIZE, LB]), 1)
        block = tl.arange(0, N // SIZE)
        before = (block[None, :, None] == block[:, None, None] - 1).to(tl.float32)
        s += tl.sum(before * spill[None, :, :], 1)
        s += tl.where(block[:, None] == 0, carry[None, :], 0.0)
        carry = tl.sum(tl.where(block[:, None] == N // SIZE - 1, spill, 0.0), 0)
    return s, carry


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
    M: tl.constexpr = HEADS * LB
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    PER_HEAD: tl.constexpr = (PER_KEY + LISTS - 1) // LISTS  # programs of a key head
    ALIGNED: tl.constexpr = PARTS == 0 or SIZE % N == 0
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % N == 0 and ALIGNED
    list_tiles = lists // PER_KEY * PER_HEAD
    local = tl.program_id(0) // list_tiles
    which = tl.program_id(0) % list_tiles
    head_k = which // PER_HEAD
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    token0, token1 = _tokens_of(tile0 + local, run, TOKENS)
    token1 = tl.minimum(token1, end)

    r = tl.arange(0, M)
    of_row = token0 + r % TOKENS
    in_key = which % PER_HEAD * LISTS + r // TOKENS % LISTS  # of the key head's lists
    list_row = head_k * PER_KEY + in_key
    g = r // LB
    valid = (of_row < token1) & (in_key < PER_KEY) & (g < G)
    head = list_row * G + g
    safe = tl.minimum(of_row, token1 - 1)
    q, fit = _load_queries(
        q_ptr, safe, head, valid, S, stride_qb, stride_qs, stride_qh, D, BLOCK_D, LAYOUT, UNIT, FIT
    )  # fmt: skip
    if SCORE == MAX:
        q = _in_registers(q, valid)
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
            heads = lists * G
            at = (local * TOKENS + r % TOKENS).to(tl.int64) * heads + head
            step = tl.cast(tl.num_programs(0) // list_tiles * TOKENS, tl.int64) * heads
            m = tl.full([M], float("-inf"), tl.float32)
            l = tl.zeros([M], tl.float32)
            for part in tl.static_range(LSE_PARTS):
                m_part = tl.load(lse_ptr + part * step + at, mask=valid, other=float("-inf"))
                l_part = tl.load(lse_ptr + (LSE_PARTS + part) * step + at, mask=valid, other=0.0)
                m_new = tl.maximum(m, m_part)
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
                l = l * tl.exp2(m - m_safe) + l_part * tl.exp2(m_part - m_safe)
                m = m_new
            lse = m + tl.log2(tl.where(l > 0, l, 1.0))
        else:
            at = query_offset(safe, S, stride_lb, stride_ls, LAYOUT) + head
            lse = tl.load(lse_ptr + at, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        lse = tl.where(valid, lse, float("inf"))

    # The pairs of a list and a token, and where their scores go.
    x = tl.arange(0, LB)
    token = token0 + x % TOKENS
    in_key = which % PER_HEAD * LISTS + x // TOKENS
    row = (local * TOKENS + x % TOKENS).to(tl.int64) * lists + head_k * PER_KEY + in_key
    pair = (token < token1) & (in_key < PER_KEY)
    into = score_ptr + row * width  # [LB]
    BLOCKS: tl.constexpr = 1 if PARTS else N // SIZE
    block = tl.arange(0, BLOCKS)
    i = tl.arange(0, N)
    OVERLAP: tl.constexpr = WINDOW // STRIDE

    seq = _find(token0, B, S, cu_q_ptr, LAYOUT)
    last = seq
    if LAYOUT == VARLEN or LAYOUT == RAGGED:
        last = _find(token1 - 1, B, S, cu_q_ptr, LAYOUT)
    while seq <= last:
        key0, keys, tokens, shift = _sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
        mine = pair
        mine_row = valid
        if LAYOUT == VARLEN or LAYOUT == RAGGED:
            first_token = tl.load(cu_q_ptr + seq, mask=(seq > 0) & (seq < B), other=0).to(tl.int32)
            last_token = last_query(cu_q_ptr, seq, seq < B)
            mine &= (token >= first_token) & (token < last_token)
            mine_row &= (of_row >= first_token) & (of_row < last_token)
        limit = _seen(_position(token, mine, shift, tokens, pos_ptr), STRIDE, WINDOW)  # [LB]
        limit = tl.minimum(limit, keys)
        most = tl.max(limit, 0)
        least = tl.min(tl.where(mine, limit, 2147483647), 0)
        k_base = k_ptr + (tl.cast(head_k, tl.int64) * stride_kh + key0 * stride_kn) * UNIT
        table_row = table_ptr
        if PAGE:
            table_row += tl.cast(tl.minimum(seq, tl.maximum(B - 1, 0)), tl.int64) * stride_tb
        else:
            k_base += tl.cast(tl.minimum(seq, tl.maximum(B - 1, 0)), tl.int64) * stride_kb * UNIT
        STEP: tl.constexpr = SIZE if PARTS else N  # keys of a unit of work
        UNITS: tl.constexpr = PARTS if PARTS else 1  # tiles of a unit
        units = tl.cdiv(most, STEP)
        if SCORE == SOFTMAX:  # the last key may reach into one more block
            units = tl.where(most > 0, tl.cdiv(tl.cdiv((most - 1) * STRIDE + WINDOW, STRIDE), STEP), 0)
        each = tl.cdiv(units, splits)
        begin = split * each * UNITS
        stop = tl.minimum(split * each + each, units) * UNITS
        whole = tl.minimum(tl.maximum(least, 0) // STEP * UNITS, stop)
        limits = _seen(_position(of_row, mine_row, shift, tokens, pos_ptr), STRIDE, WINDOW)  # [M]
        limits = tl.minimum(limits, keys)
        if PARTS and SIZE % N:  # a tile reaches past its block
            whole = 0
        whole = tl.maximum(whole, begin)
        page = _page_of(table_row, _first_key(begin, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE)
        if SCORE == MAX:
            best = tl.full([LB, BLOCKS], float("-inf"), tl.float32)
            for tile in range(begin, whole):
                found = _block_maxima(
                    q, fit, k_base, page, tile, limits, keys, stride_kb, stride_kn, g < G,
                    SIZE, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB, INPUT_PRECISION, False,
                )  # fmt: skip
                to = tile * BLOCKS
                if PARTS:
                    best = tl.where(tile % PARTS == 0, found, tl.maximum(best, found))
                    found = best
                    to = tile // PARTS
                tl.store(into[:, None] + to + block[None, :], found, mask=mine[:, None] & (block[None, :] >= 0))
                page = _page_of(
                    table_row, _first_key(tile + 1, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE
                )  # fmt: skip
            for tile in range(whole, stop):
                found = _block_maxima(
                    q, fit, k_base, page, tile, limits, keys, stride_kb, stride_kn, g < G,
                    SIZE, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB, INPUT_PRECISION, True,
                )  # fmt: skip
                to = tile * BLOCKS
                if PARTS:
                    best = tl.where(tile % PARTS == 0, found, tl.maximum(best, found))
                    found = best
                    to = tile // PARTS
                inside = mine[:, None] & ((to + block[None, :]) * SIZE < most)
                tl.store(into[:, None] + to + block[None, :], found, mask=inside)
                page = _page_of(
                    table_row, _first_key(tile + 1, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE
                )  # fmt: skip
        else:
            best = tl.full([BLOCKS, LB], float("-inf"), tl.float32)
            carry = tl.zeros([LB], tl.float32)
            if SCORE == SOFTMAX:
                if begin > 0 and begin < stop:
                    page = _page_of(table_row, (begin - 1) * N, i, keys, pages, PAGE, ONE_PAGE)
                    _, carry = _block_sums(
                        q, fit, lse, k_base, page, begin - 1, limit, keys, stride_kb, stride_kn, carry,
                        SCORE, SIZE, OVERLAP, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB,
                        INPUT_PRECISION, True,
                    )  # fmt: skip
                    page = _page_of(table_row, begin * N, i, keys, pages, PAGE, ONE_PAGE)
            for tile in range(begin, whole):
                found, carry = _block_sums(
                    q, fit, lse, k_base, page, tile, limit, keys, stride_kb, stride_kn, carry,
                    SCORE, SIZE, OVERLAP, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB,
                    INPUT_PRECISION, False,
                )  # fmt: skip
                to = tile * BLOCKS
                if PARTS:
                    best = tl.where(tile % PARTS == 0, found, tl.maximum(best, found))
                    found = best
                    to = tile // PARTS
                tl.store(into[None, :] + to + block[:, None], found, mask=mine[None, :] & (block[:, None] >= 0))
                page = _page_of(
                    table_row, _first_key(tile + 1, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE
                )  # fmt: skip
            for tile in range(whole, stop):
                found, carry = _block_sums(
                    q, fit, lse, k_base, page, tile, limit, keys, stride_kb, stride_kn, carry,
                    SCORE, SIZE, OVERLAP, N, PARTS, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, HEADS, LB,
                    INPUT_PRECISION, True,
                )  # fmt: skip
                to = tile * BLOCKS
                if PARTS:
                    best = tl.where(tile % PARTS == 0, found, tl.maximum(best, found))
                    found = best
                    to = tile // PARTS
                reach = most if SCORE == RELU else most + OVERLAP - 1
                inside = mine[None, :] & ((to + block[:, None]) * SIZE < reach)
                tl.store(into[None, :] + to + block[:, None], found, mask=inside)
                page = _page_of(
                    table_row, _first_key(tile + 1, SIZE, N, PARTS), i, keys, pages, PAGE, ONE_PAGE
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
    LB: tl.constexpr = LISTS * TOKENS
    M: tl.constexpr = HEADS * LB
    E4M3: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    FIT: tl.constexpr = E4M3 and q_ptr.dtype.element_ty == tl.bfloat16
    PER_HEAD: tl.constexpr = (PER_KEY + LISTS - 1) // LISTS
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % N == 0
    list_tiles = lists // PER_KEY * PER_HEAD
    local = tl.program_id(0) // list_tiles
    which = tl.program_id(0) % list_tiles
    head_k = which // PER_HEAD
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    token0, token1 = _tokens_of(tile0 + local, run, TOKENS)
    token1 = tl.minimum(token1, end)
    r = tl.arange(0, M)
    token = token0 + r % TOKENS
    in_key = which % PER_HEAD * LISTS + r // TOKENS % LISTS
    g = r // LB
    valid = (token < token1) & (in_key < PER_KEY) & (g < G)
    head = (head_k * PER_KEY + in_key) * G + g
    safe = tl.minimum(token, token1 - 1)
    q, fit = _load_queries(
        q_ptr, safe, head, valid, S, stride_qb, stride_qs, stride_qh, D, BLOCK_D, LAYOUT, UNIT, FIT
    )  # fmt: skip
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + head_k * K_STEP)
    fit *= scale * 1.4426950408889634
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    i = tl.arange(0, N)
    seq = _find(token0, B, S, cu_q_ptr, LAYOUT)
    last = seq
    if LAYOUT == VARLEN or LAYOUT == RAGGED:
        last = _find(token1 - 1, B, S, cu_q_ptr, LAYOUT)
    while seq <= last:
        key0, keys, tokens, shift = _sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
        mine = valid
        if LAYOUT == VARLEN or LAYOUT == RAGGED:
            first_token = tl.load(cu_q_ptr + seq, mask=(seq > 0) & (seq < B), other=0).to(tl.int32)
            mine &= (token >= first_token) & (token < last_query(cu_q_ptr, seq, seq < B))
        limit = tl.minimum(_seen(_position(token, mine, shift, tokens, pos_ptr), STRIDE, WINDOW), keys)  # [M]
        k_base = k_ptr + (tl.cast(head_k, tl.int64) * stride_kh + key0 * stride_kn) * UNIT
        table_row = table_ptr
        if PAGE:
            table_row += tl.cast(tl.minimum(seq, tl.maximum(B - 1, 0)), tl.int64) * stride_tb
        else:
            k_base += tl.cast(tl.minimum(seq, tl.maximum(B - 1, 0)), tl.int64) * stride_kb * UNIT
        tiles = tl.cdiv(tl.max(limit, 0), N)
        each = tl.cdiv(tiles, splits)
        page = _page_of(table_row, split * each * N, i, keys, pages, PAGE, ONE_PAGE)
        for tile in range(split * each, tl.minimum(split * each + each, tiles)):
            k, exists = _load_keys(
                k_base, page, tile * N, i, keys, stride_kb, stride_kn, D, BLOCK_D, PAGE, ONE_PAGE, UNIT, True, True
            )  # fmt: skip
            page = _page_of(table_row, (tile + 1) * N, i, keys, pages, PAGE, ONE_PAGE)
            s = tl.dot(q, k, input_precision=INPUT_PRECISION) * fit[:, None]
            s = tl.where(exists[None, :] & (tile * N + i[None, :] < limit[:, None]), s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)
            m = m_new
        seq += 1
    heads = lists * G
    step = tl.cast(tl.num_programs(0) // list_tiles * TOKENS, tl.int64) * heads
    at = (local * TOKENS + r % TOKENS).to(tl.int64) * heads + head
    tl.store(lse_ptr + split * step + at, m, mask=valid)
    tl.store(lse_ptr + (splits + split) * step + at, l, mask=valid)


@triton.jit
def _ordered(score):
    """int32 in the order of fp32 ``score``. NaN counts as -inf, and -0 as 0. Never `NEVER` or `ALWAYS`."""
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _nth_best(key, older, count, missing, TWO: tl.constexpr):
    """``(worst, tied)``: all keys of the ``missing`` best are ``worst`` or better; tied: so are some more.

    Searches ``key`` and, if TWO, ``older``, where `NEVER` stands for none. count: how many of them are not `NEVER`.
    """
    low = tl.min(tl.where(key == NEVER, ALWAYS, key), 0)
    high = tl.max(key, 0)
    if TWO:
        low = tl.minimum(low, tl.min(tl.where(older == NEVER, ALWAYS, older), 0))
        high = tl.maximum(high, tl.max(older, 0))
    some = (missing > 0) & (count > missing)  # neither none nor all
    low = tl.where(some, low, tl.where(missing > 0, NEVER + 1, ALWAYS))
    high = tl.where(some, high, low)
    # At least `missing` keys are `low` or better; fewer are better than `high`.
    found = missing + some.to(tl.int32)
    while (low < high) & (found != missing):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        better = tl.sum((key >= middle).to(tl.int32), 0)
        if TWO:
            better += tl.sum((older >= middle).to(tl.int32), 0)
        enough = better >= missing
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        found = tl.where(enough, better, found)
    return low, found != missing


@triton.jit
def _both(begin, end, low, high):
    """How many numbers are in both ranges."""
    return tl.maximum(tl.minimum(end, high) - tl.maximum(begin, low), 0)


@triton.jit(do_not_specialize=RUNTIME)
def _choose_kernel(
    score_ptr, out_ptr, kept_ptr, pos_ptr, cu_q_ptr, cu_k_ptr,
    B, S, rows, end, lists, tile0, run, width, n, first, newest,
    SCORE: tl.constexpr, LAYOUT: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    TAIL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Write the chosen blocks of one row, ``out [tokens, lists, n + TAIL]``, in rising order, then -1.

    CHUNKED: the row is read in chunks of ``BLOCK`` blocks. The best ``n`` so far are in ``out``, and their keys in
    ``kept [rows of the pass, lists, n]``. KEPT is ``n``, padded.
    """
    BLOCK_TOKENS: tl.constexpr = SIZE * STRIDE
    place = tl.program_id(0) // lists
    number = tl.program_id(0) % lists
    token0, token1 = _tokens_of(tile0 + place // TOKENS, run, TOKENS)
    token = token0 + place % TOKENS
    if token >= tl.minimum(token1, end):
        return
    seq = _find(token, B, S, cu_q_ptr, LAYOUT)
    _, keys, tokens, shift = _sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
    position = _position(token, token < end, shift, tokens, pos_ptr)
    seen = tl.minimum(_seen(position, STRIDE, WINDOW), keys)
    blocks = (position + BLOCK_TOKENS) // BLOCK_TOKENS  # up to the query's own one
    if SCORE == SOFTMAX:
        scored = tl.where(seen > 0, ((seen - 1) * STRIDE + WINDOW - 1) // BLOCK_TOKENS + 1, 0)
    else:
        scored = tl.cdiv(seen, SIZE)
    chosen_from = (position + 1) // BLOCK_TOKENS if TAIL else blocks
    scored = tl.minimum(scored, chosen_from)
    width = width // 16 * 16  # as it is already, but so the compiler knows it, and threads load four scores at a time
    scores = score_ptr + (place.to(tl.int64) * lists + number) * width
    slots = n + TAIL
    out = out_ptr + (token.to(tl.int64) * lists + number) * slots
    kept = kept_ptr
    if CHUNKED:
        kept += (place.to(tl.int64) * lists + number) * n
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, KEPT)
    count = 0
    stop = chosen_from if CHUNKED else 1
    # Blocks before `free` and from `forced` on are chosen, and of those from `free` to `scored` the best.
    free = tl.minimum(first, chosen_from)
    forced = tl.maximum(chosen_from - newest, free)
    scored = tl.minimum(scored, forced)
    for begin in range(0, stop, BLOCK):
        block = begin + i
        score = tl.load(scores + block, mask=block < width, other=float("-inf"))
        key = tl.where((block >= free) & (block < scored), _ordered(score), NEVER)
        sure = (block < free) | ((block >= forced) & (block < chosen_from))
        end = begin + BLOCK
        candidates = _both(begin, end, free, scored)
        missing = n - _both(begin, end, 0, free) - _both(begin, end, forced, chosen_from)
        older = tl.full([KEPT], NEVER, tl.int32)
        older_sure = older == ALWAYS
        if CHUNKED:
            older = tl.load(kept + j, mask=j < count, other=NEVER)
            older_block = tl.load(out + j, mask=j < count, other=-1)
            tl.debug_barrier()  # all is read before any is written
            older_sure = older == ALWAYS
            forced_before = tl.sum(older_sure.to(tl.int32), 0)
            candidates += count - forced_before
            missing -= forced_before
            older = tl.where(older_sure, NEVER, older)
        worst, tied = _nth_best(key, older, candidates, missing, CHUNKED)
        take = key >= worst
        older_take = older >= worst
        if tied:  # of the blocks as good as the worst, the smallest
            need = missing - tl.sum((key > worst).to(tl.int32), 0)
            if CHUNKED:
                need -= tl.sum((older > worst).to(tl.int32), 0)
                equal = (older == worst).to(tl.int32)
                older_take = (older > worst) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))
                need -= tl.sum(equal, 0)
            equal = (key == worst).to(tl.int32)
            take = (key > worst) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))
        take = take | sure
        written = 0
        if CHUNKED:
            older_take = older_take | older_sure
            chosen = older_take.to(tl.int32)
            rank = tl.cumsum(chosen, 0) - chosen
            tl.store(kept + rank, tl.where(older_sure, ALWAYS, older), mask=older_take)
            tl.store(out + rank, older_block, mask=older_take)
            written = tl.sum(chosen, 0)
        chosen = take.to(tl.int32)
        rank = written + tl.cumsum(chosen, 0) - chosen
        tl.store(out + rank, block, mask=take)
        if CHUNKED:
            tl.store(kept + rank, tl.where(sure, ALWAYS, key), mask=take)
            tl.debug_barrier()
        count = written + tl.sum(chosen, 0)
    padding = tl.full([KEPT], -1, tl.int32)
    if TAIL:
        open_block = blocks > chosen_from
        tl.store(out + count, chosen_from, mask=open_block)
        count += open_block.to(tl.int32)
        tl.store(out + n, -1, mask=count <= n)
    tl.store(out + j, padding, mask=(j >= count) & (j < n))
