"""Union forward: a program holds a tile of neighbouring tokens and reads each block that any of them selected, once.

In trained models neighbouring queries select mostly the same blocks. A tile's rows are masked by a bit of the block's
mask (bit ``i``: token ``i`` of the tile selected it) and by their causal limits. Nothing is merged afterwards. A list
kernel makes the unions, and decides for each tile whether its union is worth reading. Another family serves the other
tiles, and skips the rows that ``served_ptr`` marks. Source: NSA, arXiv 2502.11089, section 3.4.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.compiler import INTERPRETED, apart
from nsa.kernels.shared.keys import in_page, load_tiles, tile_in_pages
from nsa.kernels.shared.sequences import VARLEN, causal_limit, sequence_of
from nsa.kernels.shared.softmax import finish

RUNTIME = "B S S_kv HKV n size tokens first tiles pages cost gain".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh ob os oh tb".split()]

NOT_SERVED = tl.constexpr(-1)  # the number of blocks of a tile that another kernel serves
UNLISTED = tl.constexpr(2147483647)  # sorts after all blocks


@triton.jit(do_not_specialize=RUNTIME)
def _list_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, list_ptr, count_ptr, served_ptr,
    B, S, S_kv, HKV, n, size, tokens, first, cost, gain,
    LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the union of a tile's blocks in the order of keys: list ``[tiles, HKV, TOKENS * SLOTS]`` int64.

    An entry has the block in its lower 32 bits and the mask of the tokens that selected it in its upper 32 bits.

    A program takes ``TOKENS`` tokens of a KV head; ``first`` is the number of the launch's first tile. count ``[tiles,
    HKV]`` is `NOT_SERVED` where the tokens are of several sequences, where a row lists a block twice, and where the
    union is not worth reading, because it has more than ``gain / cost`` blocks for each listed block. served ``[tokens,
    HKV]`` is 1 for rows of the other tiles, else 0. STEPS: query-major has already marked the rows that it serves.
    These marks stay, and the tiles of these rows are `NOT_SERVED`.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token0 = (first + tile) * TOKENS
    seq, k_first, seqlen_k, shift = sequence_of(token0, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    # All tokens must be of one sequence. In a ragged batch a token after the last sequence has its `seq`, but no keys.
    newest = tl.minimum(token0 + TOKENS, tokens) - 1
    other, _, keys, _ = sequence_of(newest, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    together = (other == seq) & (keys == seqlen_k)
    mine = token0 + tl.arange(0, TOKENS)
    served_ptr += mine.to(tl.int64) * HKV + head
    served = tl.zeros([TOKENS], tl.int32)
    if STEPS:
        served = tl.load(served_ptr, mask=mine < tokens, other=0)
        together &= tl.max(served, 0) == 0

    i = tl.arange(0, TOKENS * SLOTS)
    token = token0 + i // SLOTS
    inside = (token < tokens) & (i % SLOTS < n)
    block = tl.load(sel_ptr + (token.to(tl.int64) * HKV + head) * n + i % SLOTS, mask=inside, other=-1)
    limit = causal_limit(tl.minimum(token, tokens - 1), shift, seqlen_k, pos_ptr, CAUSAL)
    listed = (block >= 0) & (tl.minimum(block, 2147483647).to(tl.int64) * size < limit)
    entry = tl.where(listed, tl.where(listed, block, 0).to(tl.int32) * TOKENS + i // SLOTS, UNLISTED)
    entry = tl.sort(entry)
    listed = entry != UNLISTED

    # Each entry needs the entry before it. Each block needs the sums of bits at its first entry and at the next block's
    # first entry. Both are read back from the program's own part of the lists.
    list_ptr += (tile.to(tl.int64) * HKV + head) * (TOKENS * SLOTS)
    tl.store(list_ptr + i, entry.to(tl.int64))
    tl.debug_barrier()
    before = tl.load(list_ptr + i - 1, mask=i > 0, other=UNLISTED).to(tl.int32)
    begins = listed & ((before // TOKENS != entry // TOKENS) | (i == 0))
    twice = tl.sum((listed & (before == entry)).to(tl.int32), 0)
    bit = tl.where(listed, 1 << (entry % TOKENS), 0)
    bits = tl.cumsum(bit, 0) - bit  # the difference between two of these sums is right even if they overflow
    rank = tl.cumsum(begins.to(tl.int32), 0) - 1
    blocks = tl.sum(begins.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(list_ptr + rank, (bits.to(tl.int64) << 32) | (entry // TOKENS), mask=begins)
    tl.debug_barrier()
    here = tl.load(list_ptr + i, mask=i < blocks, other=0)
    following = tl.load(list_ptr + i + 1, mask=i + 1 < blocks, other=0) >> 32
    following = tl.where(i + 1 < blocks, following, tl.sum(bit, 0).to(tl.int64))
    tl.debug_barrier()
    mask = (following - (here >> 32)) & 0xFFFFFFFF
    tl.store(list_ptr + i, (mask << 32) | (here & 0xFFFFFFFF), mask=i < blocks)

    worth = together & (twice == 0) & (blocks * cost <= tl.sum(listed.to(tl.int32), 0) * gain)
    tl.store(count_ptr + tile * HKV + head, tl.where(worth, blocks, NOT_SERVED))
    tl.store(served_ptr, served + worth.to(tl.int32), mask=mine < tokens)


@triton.jit(do_not_specialize=RUNTIME)
def _union_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, table_ptr, list_ptr, count_ptr, served_ptr,
    B, S, S_kv, HKV, size, tokens, first, tiles, pages,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob,
    stride_os, stride_oh, scale, stride_tb,
    G: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
    TILED: tl.constexpr, ONE_TILE: tl.constexpr, STRIDE_UNIT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Attention of one tile: ``TOKENS`` tokens with ``HEADS`` query heads each (``G``, rounded up to a power of two).

    TILED: ``size`` is a multiple of ``BLOCK_N``, so a tile of keys lies in one block; otherwise it may span several.

    TMA: ``k_ptr`` and ``v_ptr`` are tensor descriptors of ``[sequences or pages, HKV, keys, D]``, and packed sequences
    count as one. TMA computes the addresses of a tile, and reads zeros past the end of the tensor. Requires TILED, and
    pages of whole tiles. Unlike pointers it also reads keys that no row may see: places of a cache that are not filled,
    or the next packed sequence. ``scale`` must be positive, so that a row's highest product is its highest score. The
    kernel does not negate q instead, because Triton would then load q into registers in every step.

    A weight of zero times a NaN or an infinity is NaN, so a value that only a neighbour selected, or that only TMA
    reads, could spoil a row. A tile whose result has a NaN is therefore not served: the other family computes its rows.
    """
    tile = tl.program_id(0) % tiles  # one KV head after the other, so that its keys may stay in L2
    head_kv = tl.program_id(0) // tiles
    blocks = tl.load(count_ptr + tile * HKV + head_kv)
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
    nearest = tl.min(tl.where(exists, limit, farthest), 0)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = head_kv * G + g
    q_off = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + q_off[:, None] * STRIDE_UNIT + d[None, :]
    q = tl.load(q_ptrs, mask=exists[:, None] & (d[None, :] < D), other=0.0)  # [TOKENS * HEADS, BLOCK_D]
    if PAGE:
        table_row = table_ptr + tl.cast(seq, tl.int64) * stride_tb
    if TMA:
        row, shifted = seq.to(tl.int32), 0  # where the sequence begins
        if LAYOUT == VARLEN:
            row, shifted = 0, k_first.to(tl.int32)
    else:
        k_off = tl.cast(head_kv, tl.int64) * stride_kh
        v_off = tl.cast(head_kv, tl.int64) * stride_vh
        if LAYOUT == VARLEN:
            k_off += k_first * stride_kn
            v_off += k_first * stride_vn
        elif not PAGE:
            k_off += tl.cast(seq, tl.int64) * stride_kb
            v_off += tl.cast(seq, tl.int64) * stride_vb
        k_base = k_ptr + k_off * STRIDE_UNIT
        v_base = v_ptr + v_off * STRIDE_UNIT
    list_ptr += (tile.to(tl.int64) * HKV + head_kv) * (TOKENS * SLOTS)

    m = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    l = tl.zeros([TOKENS * HEADS], tl.float32)
    acc = tl.zeros([TOKENS * HEADS, BLOCK_DV], tl.float32)
    keys = tl.arange(0, BLOCK_N)
    factor = scale * 1.4426950408889634
    steps = blocks
    if not TILED:
        steps = tl.cdiv(blocks * size, BLOCK_N)
    elif not ONE_TILE:
        steps = blocks * (size // BLOCK_N)
    # An entry is loaded a step ahead, because addresses of keys depend on it. It is taken apart at once, because Triton
    # fails for sm_100 if the loop carries the entry itself.
    coming = tl.load(list_ptr)
    mask = (coming >> 32).to(tl.int32)
    begin = coming.to(tl.int32) * size
    for step in range(0, steps):
        if TILED:
            key = begin
            if not ONE_TILE:
                key += step % (size // BLOCK_N) * BLOCK_N
            stop = farthest - key
            chosen = tl.where(((mask >> (r // HEADS)) & 1) != 0, limit - key, 0)  # keys of this tile that a row may see
            partial = key + BLOCK_N > nearest
            seen = keys[None, :] < chosen[:, None]  # [TOKENS * HEADS, BLOCK_N]
            if TMA:
                if PAGE:
                    page, _, key, found = in_page(table_row, key, stop > 0, pages, 1, 1, PAGE)
                    row = tl.where(found, page, pages).to(tl.int32)  # past the last page TMA reads zeros
                    chosen = tl.where(found, chosen, 0)
            elif PAGE and PAGE % BLOCK_N == 0:
                k_page, v_page, key, found = in_page(table_row, key, stop > 0, pages, stride_kb, stride_vb, PAGE)
                valid = keys < tl.where(found, stop, 0)
                key = key + keys
            elif PAGE:
                if BLOCK_N % PAGE == 0 and BLOCK_N <= 8 * PAGE:
                    k_page, v_page, key, valid = tile_in_pages(
                        table_row, key, farthest, pages, stride_kb, stride_vb, PAGE, BLOCK_N
                    )
                else:
                    k_page, v_page, key, valid = in_page(
                        table_row, key + keys, keys < stop, pages, stride_kb, stride_vb, PAGE
                    )
            else:
                valid = keys < stop
                key = key + keys
        else:
            listed = (step * BLOCK_N + keys) // size
            known = listed < blocks
            entry = tl.load(list_ptr + listed, mask=known, other=0)
            key = entry.to(tl.int32) * size + (step * BLOCK_N + keys - listed * size)
            chosen = ((entry >> 32).to(tl.int32)[None, :] >> (r // HEADS)[:, None]) & 1
            seen = (chosen != 0) & (key[None, :] < limit[:, None])  # [TOKENS * HEADS, BLOCK_N]
            valid = known & (key < farthest)
            if PAGE:
                k_page, v_page, key, valid = in_page(table_row, key, valid, pages, stride_kb, stride_vb, PAGE)
        if TMA:
            k = tl.reshape(k_ptr.load([row, head_kv, shifted + key, 0]), [BLOCK_N, BLOCK_D])
            v = tl.reshape(v_ptr.load([row, head_kv, shifted + key, 0]), [BLOCK_N, BLOCK_DV])
        else:
            if PAGE:
                seen &= valid[None, :]
            key = key.to(tl.int64)
            k_at = key * stride_kn
            v_at = key * stride_vn
            if PAGE:
                k_at += k_page
                v_at += v_page
            k, v = load_tiles(k_base, v_base, k_at, v_at, valid, d, dv, D, Dv, STRIDE_UNIT, False)
        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        if TMA:
            # In most tiles a row may see all keys or none, and `some` is its mask. Only near a limit keys need a mask.
            if partial:
                few = chosen
                if not INTERPRETED:
                    few = apart(few)
                scores = tl.where(keys[None, :] < few[:, None], scores, float("-inf"))
            some = chosen > 0
            m_new = tl.maximum(m, tl.where(some, tl.max(scores, 1) * factor, float("-inf")))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
            p = tl.exp2(scores * factor - tl.where(some, m_safe, float("inf"))[:, None])
        else:
            scores = tl.where(seen, scores * factor, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(scores - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
        m = m_new
        if TILED:
            if ONE_TILE:
                coming = tl.load(list_ptr + tl.minimum(step + 1, steps - 1))
            else:
                coming = tl.load(list_ptr + tl.minimum(step + 1, steps - 1) // (size // BLOCK_N))
            mask = (coming >> 32).to(tl.int32)
            begin = coming.to(tl.int32) * size

    o, lse = finish(m, l, acc)
    o_off = query_offset(token, S, stride_ob, stride_os, LAYOUT) + head.to(tl.int64) * stride_oh
    o_ptrs = o_ptr + o_off[:, None] * STRIDE_UNIT + dv[None, :]
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=exists[:, None] & (dv[None, :] < Dv))
    if lse_ptr is not None:
        tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=exists)
    spoiled = tl.sum((o != o).to(tl.int32))  # over both axes at once, which compiles for all GPUs
    if spoiled > 0:
        mine = token0 + tl.arange(0, TOKENS)
        none = tl.zeros([TOKENS], tl.int32)
        tl.store(served_ptr + mine.to(tl.int64) * HKV + head_kv, none, mask=mine < tokens)
