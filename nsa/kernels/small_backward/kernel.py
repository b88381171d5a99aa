"""Backward kernels for selections of many small blocks of ``SIZE`` keys each (1 to 16).

The formulas are those of ``backward/kernel.py``. `_unite_kernel` makes the union of the blocks of neighbouring tokens,
with a mask of the tokens that selected each. `_small_dq_kernel` computes dQ of a tile of tokens over its union.
`_small_dkdv_kernel` adds windows of tokens to dK and dV: a program takes some keys of a window's union, and the
queries from the first to the last that selected one of them. A block is in the union once, so no two programs of a
window add to the same key. A program adds when all programs of earlier windows have added, so every sum has a fixed
order.

Keys are counted through all sequences. A block that a row lists several times counts as often: lists of such rows are
marked, and their kernels count how often a row lists each block (``OFTEN``). Windows with a row whose LSE or
gradient is not finite are marked, too.
"""

import triton
import triton.language as tl

from nsa.kernels.shared.sequences import BATCH, causal_limit, sequence_of
from nsa.kernels.small_blocks.kernel import _narrow

RUNTIME = "B S S_kv n tokens lists first tiles programs room keys HQ stride_lt stride_lh".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split()]


@triton.jit
def _bits(mask):
    """How many bits of each mask are set."""
    mask -= (mask >> 1) & 0x55555555
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    mask += mask >> 8
    return (mask + (mask >> 16)) & 63


@triton.jit
def _log2(x):
    """The number of the highest bit of an int32 above 0, or one more. Negative for 0."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _bucket(mask, TOKENS: tl.constexpr):
    """The bucket of each mask, 0 to 31: by the quarter of its first token, then the eighth of its last, descending."""
    first = _log2(mask & -mask) * 4 // TOKENS
    return tl.where(mask == 0, 31, first * 8 + 7 - tl.minimum(_log2(mask) * 8 // TOKENS, 7))


@triton.jit
def _sort(places, masks, to_places, to_masks, count, TOKENS: tl.constexpr):
    """Copy entries, sorted by bucket, so that neighbours are of nearly the same tokens. Equal ones keep their order."""
    i = tl.arange(0, 64)
    buckets = tl.arange(0, 32)
    sizes = tl.zeros([32], tl.int32)
    for begin in range(0, count, 64):
        bucket = _bucket(tl.load(masks + begin + i, mask=begin + i < count, other=0), TOKENS)
        bucket = tl.where(begin + i < count, bucket, -1)
        sizes += tl.sum((bucket[:, None] == buckets[None, :]).to(tl.int32), 0)
    starts = tl.cumsum(sizes, 0) - sizes
    for begin in range(0, count, 64):
        here = begin + i < count
        mask = tl.load(masks + begin + i, mask=here, other=0)
        place = tl.load(places + begin + i, mask=here, other=0)
        bucket = tl.where(here, _bucket(mask, TOKENS), -1)
        mine = (bucket[:, None] == buckets[None, :]).to(tl.int32)  # [64, 32]
        at = tl.sum(mine * (starts[None, :] + tl.cumsum(mine, 0) - mine), 1)
        tl.store(to_places + at, place, mask=here)
        tl.store(to_masks + at, mask, mask=here)
        starts += tl.sum(mine, 0)


@triton.jit
def _finite(lse, delta):
    """Whether a row's LSE and delta are. The LSE of a row without keys is not."""
    return (tl.abs(lse) < float("inf")) & (tl.abs(delta) < float("inf"))


@triton.jit(do_not_specialize=RUNTIME)
def _unite_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, stats_ptr, place_ptr, mask_ptr, count_ptr, bound_ptr, index_ptr, unsorted_ptr,
    B, S, S_kv, n, tokens, lists, first, tiles, room, keys, HQ, stride_lt, stride_lh,
    SIZE: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the unions of tiles of ``TOKENS`` tokens: place and mask ``[tiles, lists, room]``, and count.

    A place is the first key of a block times 32, plus the number of its keys; 0 for an entry without a block. Entries
    are in the order in which blocks first occur, token by token; with unsorted ``[2, programs, lists, room]``, which
    holds them until then, by their first and last tokens (`_sort`). bound ``[2, tokens]``: the end of the keys that a
    token may see, and the first key of its sequence. count is ``-1 - count`` where a row lists a block twice, and with
    stats ``[2, tokens, HQ]`` where a row's LSE or delta is not finite. A program takes every so many tiles; ``first``
    is the number of the launch's first tile. index ``[programs, lists, keys]`` is a sparse set, as in `small_blocks`.
    """
    program = tl.program_id(0)
    number = tl.program_id(1)  # of the list, among the lists of a token
    index_ptr += (program * lists + number).to(tl.int64) * keys
    rows = sel_ptr + tl.cast(number, tl.int64) * stride_lh
    i = tl.arange(0, SLOTS)
    for tile in range(program, tiles, tl.num_programs(0)):
        token0 = (first + tile) * TOKENS
        end = tl.minimum(token0 + TOKENS, tokens)
        at_list = (tile * lists + number).to(tl.int64) * room
        places = place_ptr + at_list
        masks = mask_ptr + at_list
        if unsorted_ptr is not None:
            places = unsorted_ptr + (program * lists + number).to(tl.int64) * room
            masks = places + tl.cast(tl.num_programs(0), tl.int64) * lists * room
        count = 0
        selected = 0
        ahead = tl.load(rows + token0.to(tl.int64) * stride_lt + i, mask=i < n, other=-1)
        for t in range(0, end - token0):
            token = token0 + t
            block = _narrow(ahead)
            row = rows + (token + 1).to(tl.int64) * stride_lt
            ahead = tl.load(row + i, mask=i < tl.where(token + 1 < end, n, 0), other=-1)
            seq, k_first, seqlen_k, shift = sequence_of(token, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
            limit = causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL).to(tl.int32)
            base = k_first.to(tl.int32)
            if LAYOUT == BATCH:
                base = (seq * S_kv).to(tl.int32)
            tl.store(bound_ptr + token, base + limit)  # all lists of a token write the same
            tl.store(bound_ptr + tokens + token, base)
            listed = (block >= 0) & (block < tl.cdiv(limit, SIZE))
            begin = tl.where(listed, block, 0) * SIZE
            place = ((base + begin) * 32 + tl.minimum(seqlen_k - begin, SIZE)).to(tl.int32)
            index = index_ptr + base + begin
            at = tl.load(index, mask=listed, other=-1)
            known = listed & (at >= 0) & (at < count)
            known &= tl.load(places + at, mask=known, other=0) == place
            mask = tl.load(masks + at, mask=known, other=0)
            fresh = listed & (known == 0)
            at = tl.where(known, at, count + tl.cumsum(fresh.to(tl.int32), 0) - 1)
            tl.debug_barrier()  # entries are read before any is written
            tl.store(masks + at, mask | (1 << t), mask=listed)
            tl.store(places + at, place, mask=fresh)
            tl.store(index, at, mask=fresh)
            tl.debug_barrier()
            found = tl.load(index, mask=fresh, other=0)
            if tl.sum((fresh & (found != at)).to(tl.int32), 0) > 0:
                # Slots of this row list the same new block. The first of them keeps it, in every run.
                tl.store(index, tl.where(fresh, room, 0), mask=fresh)
                tl.debug_barrier()
                tl.atomic_min(index, at, mask=fresh)
                tl.debug_barrier()
                none = fresh & (tl.load(index, mask=fresh, other=0, cache_modifier=".cg") != at)
                tl.store(places + at, tl.zeros_like(at), mask=none)
                tl.store(masks + at, tl.zeros_like(at), mask=none)
            count += tl.sum(fresh.to(tl.int32), 0)
            selected += tl.sum(listed.to(tl.int32), 0)
            tl.debug_barrier()
        bits = 0
        for begin in range(0, count, SLOTS):
            bits += tl.sum(_bits(tl.load(masks + begin + i, mask=begin + i < count, other=0)), 0)
        often = bits != selected
        if stats_ptr is not None:
            heads = HQ // lists  # whose rows read this list
            for begin in range(0, (end - token0) * heads, SLOTS):
                here = begin + i < (end - token0) * heads
                at = (token0 + (begin + i) // heads).to(tl.int64) * HQ + number * heads + (begin + i) % heads
                lse = tl.load(stats_ptr + at, mask=here, other=0.0)
                delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HQ + at, mask=here, other=0.0)
                often |= tl.sum((_finite(lse, delta) == 0).to(tl.int32), 0) > 0
        tl.store(count_ptr + tile * lists + number, tl.where(often, -1 - count, count))
        if unsorted_ptr is not None:
            _sort(places, masks, place_ptr + at_list, mask_ptr + at_list, count, TOKENS)
            tl.debug_barrier()  # entries are read before the next tile writes its own


@triton.jit
def _offset(token, S, stride_b, stride_s, FLAT: tl.constexpr):
    """Offsets of tokens, counted through all sequences of ``S``, in units of the strides: int64."""
    at = token.to(tl.int64) * stride_s
    if not FLAT:
        at += (token // S).to(tl.int64) * (stride_b - tl.cast(S, tl.int64) * stride_s)
    return at


@triton.jit
def _load_keys(
    k_base, v_base, key, valid, S_kv, stride_kb, stride_kn, stride_vb, stride_vn,
    D: tl.constexpr, Dv: tl.constexpr, FLAT: tl.constexpr, STRIDE_UNIT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Keys and values ``[keys, BLOCK_D], [keys, BLOCK_DV]``; zeros where not valid."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_at = _offset(key, S_kv, stride_kb, stride_kn, FLAT) * STRIDE_UNIT
    k = tl.load(k_base + k_at[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    v_at = _offset(key, S_kv, stride_vb, stride_vn, FLAT) * STRIDE_UNIT
    v = tl.load(v_base + v_at[:, None] + dv[None, :], mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)
    return k, v


@triton.jit
def _times(rows, exists, base, bound, begin, n, SIZE: tl.constexpr):
    """How often each row lists the block that begins with key ``begin``: fp32 ``[rows, keys]``.

    rows, exists, base, bound ``[rows]``: the row's list, and as of `_unite_kernel`. begin ``[keys]``, -1 for none.
    """
    times = tl.zeros([base.shape[0], begin.shape[0]], tl.float32)
    most = tl.where(exists, tl.cdiv(bound - base, SIZE), 0)
    for slot in range(0, n):
        block = _narrow(tl.load(rows + slot, mask=exists, other=-1))
        listed = (block >= 0) & (block < most)
        first = tl.where(listed, base + tl.where(listed, block, 0) * SIZE, -2)
        times += (first[:, None] == begin[None, :]).to(tl.float32)
    return times


@triton.jit
def _dq_of(
    q, do, lse, delta, rows, exists, base, bound, bit, place_ptr, mask_ptr, k_base, v_base, total, n, S_kv, stride_kb,
    stride_kn, stride_vb, stride_vn, scale,
    D: tl.constexpr, Dv: tl.constexpr, SIZE: tl.constexpr, FLAT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DQ_N: tl.constexpr,
    OFTEN: tl.constexpr,
):  # fmt: skip
    """dQ / scale of a tile. OFTEN: blocks count as often as they are listed, and keys may have NaN or infinities."""
    slots = tl.arange(0, DQ_N)
    dq = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    place = tl.load(place_ptr + slots // SIZE, mask=slots < total, other=0)
    mask = tl.load(mask_ptr + slots // SIZE, mask=slots < total, other=0)
    for begin in range(0, total, DQ_N):
        within = (begin + slots) % SIZE
        key = (place >> 5) + within
        valid = within < (place & 31)
        seen = ((mask[None, :] & bit[:, None]) != 0) & valid[None, :] & (key[None, :] < bound[:, None])
        k, v = _load_keys(
            k_base, v_base, key, valid, S_kv, stride_kb, stride_kn, stride_vb, stride_vn, D, Dv, FLAT, STRIDE_UNIT,
            BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
        p = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)  # [ROWS, DQ_N]
        if OFTEN:
            p *= _times(rows, exists, base, bound, tl.where(valid, key - within, -1), n, SIZE)
        dp = tl.dot(do, tl.trans(v), input_precision=INPUT_PRECISION)
        ds = tl.where(seen, p * (dp - delta[:, None]), 0.0).to(k.dtype)
        if OFTEN:  # rows that see such a key have NaN in dS already
            k = tl.where(tl.abs(k) < float("inf"), k, 0.0).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=INPUT_PRECISION)
        ahead = begin + DQ_N + slots
        place = tl.load(place_ptr + ahead // SIZE, mask=ahead < total, other=0)
        mask = tl.load(mask_ptr + ahead // SIZE, mask=ahead < total, other=0)
    return dq


@triton.jit(do_not_specialize=RUNTIME)
def _small_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, sel_ptr, place_ptr, mask_ptr, count_ptr, bound_ptr,
    S, S_kv, n, tokens, lists, first, room, stride_lt, stride_lh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr, SIZE: tl.constexpr, FLAT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DQ_N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile: ``TOKENS`` tokens with ``HEADS`` query heads each, in ``ROWS`` rows.

    dS is zero where a row may not see a key, and zero times NaN is NaN. So a tile with a NaN is computed once more.
    """
    HEAD_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    tile = tl.program_id(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    head_kv = tl.program_id(1)  # one KV head after the other, so that its keys may stay in L2
    number = head_kv % lists
    count = tl.load(count_ptr + tile * lists + number)
    often = count < 0
    total = tl.where(often, -1 - count, count) * SIZE
    r = tl.arange(0, ROWS)
    token = (first + tile) * TOKENS + r // HEADS  # [ROWS]
    g = head_tile * HEADS + r % HEADS
    exists = (r // HEADS < TOKENS) & (token < tokens) & (g < G)
    bit = tl.where(exists, 1 << (r // HEADS), 0)
    bound = tl.load(bound_ptr + token, mask=exists, other=0)
    base = tl.load(bound_ptr + tokens + token, mask=exists, other=0)
    rows = sel_ptr + token.to(tl.int64) * stride_lt + tl.cast(number, tl.int64) * stride_lh
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = head_kv * G + g
    at = token.to(tl.int64) * HKV * G + head
    q_off = _offset(token, S, stride_qb, stride_qs, FLAT) + head.to(tl.int64) * stride_qh
    q_mask = exists[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :], mask=q_mask, other=0.0)  # [ROWS, BLOCK_D]
    do_mask = exists[:, None] & (dv[None, :] < Dv)
    do = tl.load(do_ptr + at[:, None] * Dv + dv[None, :], mask=do_mask, other=0.0)  # [ROWS, BLOCK_DV]
    lse = tl.load(stats_ptr + at, mask=exists, other=float("inf"))
    delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HKV * G + at, mask=exists, other=0.0)
    k_base = k_ptr + tl.cast(head_kv, tl.int64) * stride_kh * STRIDE_UNIT
    v_base = v_ptr + tl.cast(head_kv, tl.int64) * stride_vh * STRIDE_UNIT
    places = place_ptr + (tile * lists + number).to(tl.int64) * room
    masks = mask_ptr + (tile * lists + number).to(tl.int64) * room
    dq = _dq_of(
        q, do, lse, delta, rows, exists, base, bound, bit, places, masks, k_base, v_base, tl.where(often, 0, total), n,
        S_kv, stride_kb, stride_kn, stride_vb, stride_vn, scale, D, Dv, SIZE, FLAT, STRIDE_UNIT, INPUT_PRECISION,
        BLOCK_D, BLOCK_DV, DQ_N, False,
    )  # fmt: skip
    spoiled = tl.sum((dq != dq).to(tl.int32))  # over both axes at once, which compiles for all GPUs
    if often | (spoiled > 0):
        dq = _dq_of(
            q, do, lse, delta, rows, exists, base, bound, bit, places, masks, k_base, v_base, total, n, S_kv,
            stride_kb, stride_kn, stride_vb, stride_vn, scale, D, Dv, SIZE, FLAT, STRIDE_UNIT, INPUT_PRECISION,
            BLOCK_D, BLOCK_DV, DQ_N, True,
        )  # fmt: skip
    tl.store(dq_ptr + at[:, None] * D + d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _weights(scores, dp, seen, lse, delta, times, p, ds, scale, OFTEN: tl.constexpr):
    """Weights and dS / scale ``[BLOCK_N, BLOCK_M]``, in the dtypes of ``p`` and ``ds``."""
    weights = tl.where(seen, tl.exp2(scores * (scale * 1.4426950408889634) - lse[None, :]), 0.0)
    if OFTEN:
        weights *= times
    return weights.to(p.dtype), tl.where(seen, weights * (dp - delta[None, :]), 0.0).to(ds.dtype)


@triton.jit
def _step(
    q_ptr, do_ptr, stats_ptr, bound_ptr, k, v, key, mask, row, high, times, dk_sum, dv_sum, token0, head_kv, S, tokens,
    stride_qb, stride_qs, stride_qh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr, FLAT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, OFTEN: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """Add ``BLOCK_M`` rows of a window, from ``row`` on and before ``high``, to dK / scale and dV of some keys.

    OFTEN: ``times [BLOCK_N, BLOCK_M]`` says how often a row lists each key, and rows whose LSE or gradient is not
    finite give NaN to all keys that they see, and nothing to others.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    r = row + tl.arange(0, BLOCK_M)
    here = r < high
    token = token0 + r // G  # [BLOCK_M]
    head = head_kv * G + r % G
    at = token.to(tl.int64) * (HKV * G) + head
    lse = tl.load(stats_ptr + at, mask=here, other=float("inf"))
    delta = tl.load(stats_ptr + tl.cast(tokens, tl.int64) * HKV * G + at, mask=here, other=0.0)
    finite = here
    if OFTEN:
        finite &= _finite(lse, delta)
        lse = tl.where(finite | (here == 0), lse, float("nan"))
    bound = tl.load(bound_ptr + token, mask=here, other=0)
    q_off = _offset(token, S, stride_qb, stride_qs, FLAT) + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :]
    q = tl.load(q_ptrs, mask=finite[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_M, BLOCK_D]
    do_ptrs = do_ptr + at[:, None] * Dv + dv[None, :]
    do = tl.load(do_ptrs, mask=finite[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_M, BLOCK_DV]
    seen = (((mask[:, None] >> (r // G)[None, :]) & 1) != 0) & (key[:, None] < bound[None, :]) & here[None, :]
    # Scores are transposed, because the next products take the weights as their left operand.
    scores = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=INPUT_PRECISION)
    p = scores.to(do.dtype)
    ds = dp.to(q.dtype)
    # `row < high` always holds. Without a branch before the next products, Triton does not divide the columns of
    # scores and dP among warps on Hopper, and with 64 keys four of eight warps compute what the others do.
    if BRANCH:
        if row < high:
            p, ds = _weights(scores, dp, seen, lse, delta, times, p, ds, scale, OFTEN)
    else:
        p, ds = _weights(scores, dp, seen, lse, delta, times, p, ds, scale, OFTEN)
    dv_sum = tl.dot(p, do, dv_sum, input_precision=INPUT_PRECISION)
    return tl.dot(ds, q, dk_sum, input_precision=INPUT_PRECISION), dv_sum


@triton.jit
def _add(dk_ptr, dv_ptr, dk, dv, key, valid, head_kv, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr):
    """Add to dK and dV of some keys of a KV head. No other program adds to them at the time, so the order is fixed."""
    at = key.to(tl.int64) * HKV + head_kv
    d = tl.arange(0, dk.shape[1])
    tl.atomic_add(dk_ptr + at[:, None] * D + d[None, :], dk, mask=valid[:, None] & (d[None, :] < D), sem="relaxed")
    d = tl.arange(0, dv.shape[1])
    tl.atomic_add(dv_ptr + at[:, None] * Dv + d[None, :], dv, mask=valid[:, None] & (d[None, :] < Dv), sem="relaxed")


@triton.jit
def _total(count, SIZE: tl.constexpr, OFTEN: tl.constexpr):
    """Keys of a window's union; 0 if the other variant computes the window."""
    return tl.maximum(-1 - count if OFTEN else count, 0) * SIZE


@triton.jit
def _wait_for(window, programs, count_ptr, done_ptr, lists, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
              OFTEN: tl.constexpr, HKV: tl.constexpr):  # fmt: skip
    """Wait until all programs of the windows before ``window`` have added their sums."""
    total = 0
    while (window > 0) & (total == 0):  # the last window that has keys: it waits for those before it
        window -= 1
        total = _total(tl.load(count_ptr + window * lists), SIZE, OFTEN)
    if total > 0:
        expected = tl.minimum(tl.cdiv(total, BLOCK_N), programs)
        done = tl.atomic_add(done_ptr + window * HKV, 0, sem="acquire")
        while done < expected:
            done = tl.atomic_add(done_ptr + window * HKV, 0, sem="acquire")


@triton.jit(do_not_specialize=RUNTIME)
def _small_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, sel_ptr, place_ptr, mask_ptr, count_ptr, bound_ptr,
    turn_ptr,
    S, S_kv, n, tokens, lists, first, programs, room, stride_lt, stride_lh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, scale,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, HKV: tl.constexpr, SIZE: tl.constexpr, FLAT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OFTEN: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """Add the windows of a pass to dK and dV ``[keys, HKV, D | Dv]`` fp32.

    ``programs`` programs a window and a KV head take every so many ``BLOCK_N`` keys of the union. OFTEN: of windows in
    which a row lists a block twice, or is not finite, else of others.

    turn ``[2 + windows * HKV]``, zeros before: the programs that have started, of each variant, and of each window and
    KV head those that have added their sums. A program's number is the order in which programs start, so what it waits
    for has started before it.
    """
    number = tl.atomic_add(turn_ptr + (1 if OFTEN else 0), 1, sem="relaxed")
    part = number % programs
    head_kv = number // programs % HKV
    window = number // programs // HKV
    done_ptr = turn_ptr + 2 + head_kv
    count_ptr += head_kv % lists
    total = _total(tl.load(count_ptr + window * lists), SIZE, OFTEN)
    if part * BLOCK_N >= total:
        return
    token0 = (first + window) * WINDOW
    end = tl.minimum(token0 + WINDOW, tokens)
    rows = (end - token0) * G
    places = place_ptr + (window * lists + head_kv % lists).to(tl.int64) * room
    masks = mask_ptr + (window * lists + head_kv % lists).to(tl.int64) * room
    sel_ptr += (head_kv % lists).to(tl.int64) * stride_lh
    k_base = k_ptr + head_kv.to(tl.int64) * stride_kh * STRIDE_UNIT
    v_base = v_ptr + head_kv.to(tl.int64) * stride_vh * STRIDE_UNIT
    for chunk in range(part * BLOCK_N, total, programs * BLOCK_N):
        slot = chunk + tl.arange(0, BLOCK_N)
        place = tl.load(places + slot // SIZE, mask=slot < total, other=0)
        mask = tl.load(masks + slot // SIZE, mask=slot < total, other=0)
        within = slot % SIZE
        key = (place >> 5) + within  # [BLOCK_N]
        valid = within < (place & 31)
        mask = tl.where(valid, mask, 0)
        k, v = _load_keys(
            k_base, v_base, key, valid, S_kv, stride_kb, stride_kn, stride_vb, stride_vn, D, Dv, FLAT, STRIDE_UNIT,
            BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        low = _log2(tl.min(tl.where(mask > 0, mask & -mask, 1 << 30), 0)) * G
        high = tl.minimum((_log2(tl.max(mask, 0)) + 1) * G, rows)
        dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for row in range(low, high, BLOCK_M):
            times = 0
            if OFTEN:
                token = token0 + (row + tl.arange(0, BLOCK_M)) // G
                here = token < end
                bound = tl.load(bound_ptr + token, mask=here, other=0)
                base = tl.load(bound_ptr + tokens + token, mask=here, other=0)
                lists_of = sel_ptr + token.to(tl.int64) * stride_lt
                begin = tl.where(valid, key - within, -1)
                times = tl.trans(_times(lists_of, here, base, bound, begin, n, SIZE))
            dk_sum, dv_sum = _step(
                q_ptr, do_ptr, stats_ptr, bound_ptr, k, v, key, mask, row, high, times, dk_sum, dv_sum, token0,
                head_kv, S, tokens, stride_qb, stride_qs, stride_qh, scale, G, D, Dv, HKV, FLAT, STRIDE_UNIT,
                INPUT_PRECISION, BLOCK_D, BLOCK_DV, BLOCK_M, OFTEN, BRANCH,
            )  # fmt: skip
        if chunk == part * BLOCK_N:
            _wait_for(window, programs, count_ptr, done_ptr, lists, SIZE, BLOCK_N, OFTEN, HKV)
        _add(dk_ptr, dv_ptr, dk_sum * scale, dv_sum, key, valid, head_kv, D, Dv, HKV)
    tl.debug_barrier()  # all threads have added
    tl.atomic_add(done_ptr + window * HKV, 1, sem="release")
