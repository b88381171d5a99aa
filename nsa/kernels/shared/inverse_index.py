"""Inverts the selection on the device: lists which rows read each key block, by a counting sort without a host sync.

A *unit* is a key block that a row (token, KV head) reads. In a block list each slot is a unit. Ranges are cut where key
blocks begin, and each piece is a unit. For each window of tokens and each KV head, units are listed block by block, and
the list is cut into *shares*. A share is the work of one program of :mod:`nsa.kernels.key_major.kernel`. The lists may
hold only some KV heads at a time: ``heads`` of them, from ``head0`` on.

In the forward pass atomics decide the order of a block's units, and no result depends on that order. The sums of
:mod:`nsa.kernels.backward.kernel` depend on it, so the backward pass lists units in the order of tokens and slots.
"""

import triton
import triton.language as tl

from nsa.kernels.shared.sequences import RAGGED, VARLEN, causal_limit, last_query, sequence_of, visible_keys
from nsa.kernels.shared.spans import RANGES, load_span

UNUSED = tl.constexpr(-1)  # marks a slot without a unit
OVERFULL = tl.constexpr(-2)  # marks the first slot of a row with more units than slots, whose units are not listed

RUNTIME = "B S S_kv HKV heads head0 n size slots blocks first tokens window work slot_bits strip strips mark".split()


@triton.jit
def first_block(seq, k_first, per_sequence, size, LAYOUT: tl.constexpr):
    """Number of a sequence's first block among the blocks of all sequences.

    A packed batch leaves gaps between numbers, because a sequence that begins within a block gets a block of its own.
    """
    if LAYOUT != VARLEN:
        return seq * per_sequence
    else:
        return (k_first // size).to(tl.int32) + seq


@triton.jit(do_not_specialize=RUNTIME)
def _count_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, served_ptr, block_ptr, span_ptr, rank_ptr, count_ptr,
    B, S, S_kv, HKV, heads, head0, n, size, slots, blocks, first, window,
    SOURCE: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Write the block of every unit, and its rank among the units of the same window, head and block.

    A program takes one token, from ``first`` on; windows have ``window`` tokens. Rows of blocks that ``served_ptr``
    marks have no units. block, rank and, for ranges, span ``[tokens, heads, slots]``; count ``[windows, heads,
    blocks]``, zero before the launch.
    """
    token = tl.program_id(0)
    seq, k_first, limit = visible_keys(first + token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT, CAUSAL)
    base = first_block(seq, k_first, tl.cdiv(S_kv, size), size, LAYOUT)
    counts = count_ptr + (token // window) * heads * blocks + base
    out = token * heads * slots
    if SOURCE != RANGES:
        row = sel_ptr + ((first + token).to(tl.int64) * HKV + head0) * n
        for begin in range(0, heads * slots, CHUNK):  # the first ``slots`` blocks of all rows of the token
            i = begin + tl.arange(0, CHUNK)
            inside = i < heads * slots
            head = i // slots
            block = tl.load(row + head * n + (i - head * slots), mask=inside, other=-1)
            listed = (block >= 0) & (tl.minimum(block, 2147483647).to(tl.int64) * size < limit)
            if served_ptr is not None:
                served = tl.load(served_ptr + (first + token).to(tl.int64) * HKV + head0 + head, mask=inside, other=1)
                listed &= served == 0
            block = tl.where(listed, block, 0).to(tl.int32)
            rank = tl.atomic_add(counts + head * blocks + block, 1, mask=listed, sem="relaxed")
            tl.store(block_ptr + out + i, tl.where(listed, base + block, UNUSED), mask=inside)
            tl.store(rank_ptr + out + i, rank, mask=listed)
    else:
        for head in range(0, heads):
            row = sel_ptr + ((first + token).to(tl.int64) * HKV + head0 + head) * n * 2
            _count_spans(
                row, counts + head * blocks, block_ptr, span_ptr, rank_ptr, out + head * slots, base, n, limit, size,
                slots, CHUNK, SPANS, False,
            )  # fmt: skip


@triton.jit
def _count_spans(
    row, counts,
    block_ptr, span_ptr, rank_ptr,
    at, base, n, limit, size, slots,
    CHUNK: tl.constexpr, SPANS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Write the units of one row's spans, from element ``at`` on. ``counts``: of the head's blocks from ``base`` on."""
    needed = tl.zeros([], tl.int64)
    for begin in range(0, n, SPANS):
        start, end = load_span(row, begin + tl.arange(0, SPANS), n, limit, size, RANGES)
        needed += tl.sum(tl.where(end > start, (end - 1) // size - start // size + 1, 0).to(tl.int64), 0)
    used = tl.zeros([], tl.int32)
    if needed <= slots:
        for begin in range(0, n, SPANS):
            j = begin + tl.arange(0, SPANS)  # [SPANS]
            start, end = load_span(row, j, n, limit, size, RANGES)
            pieces = tl.where(end > start, (end - 1) // size - start // size + 1, 0)
            before = tl.cumsum(pieces, 0) - pieces
            total = tl.sum(pieces, 0)
            for done in range(0, total, CHUNK):
                u = done + tl.arange(0, CHUNK)  # [CHUNK]
                here = (before[None, :] <= u[:, None]) & (u[:, None] < (before + pieces)[None, :])
                block = tl.sum(tl.where(here, (start // size - before)[None, :], 0), 1) + u
                span = tl.sum(tl.where(here, j[None, :], 0), 1)
                listed = u < total
                if ORDERED:
                    rank = _rank_in_order(counts, block, listed, CHUNK)
                else:
                    rank = tl.atomic_add(counts + block, 1, mask=listed, sem="relaxed")
                tl.store(block_ptr + at + used + u, base + block, mask=listed)
                tl.store(span_ptr + at + used + u, span, mask=listed)
                tl.store(rank_ptr + at + used + u, rank, mask=listed)
            used += total
    for begin in range(0, slots, CHUNK):
        u = begin + tl.arange(0, CHUNK)
        nothing = tl.where((u == 0) & (needed > slots), OVERFULL, UNUSED)
        tl.store(block_ptr + at + u, nothing, mask=(u >= used) & (u < slots))


@triton.jit
def _rank_in_order(counts, block, listed, CHUNK: tl.constexpr):
    """Ranks of ``block [CHUNK]``: after the units that this program counted earlier, in the order of ``block``."""
    i = tl.arange(0, CHUNK)
    ahead = (block[None, :] == block[:, None]) & (i[None, :] < i[:, None]) & listed[None, :]
    rank = tl.atomic_add(counts + block, 0, mask=listed, sem="relaxed")  # a plain load could read an old value from L1
    tl.debug_barrier()
    tl.atomic_add(counts + block, 1, mask=listed, sem="relaxed")
    tl.debug_barrier()
    return rank + tl.sum(ahead.to(tl.int32), 1)


@triton.jit(do_not_specialize=RUNTIME)
def _order_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, served_ptr, block_ptr, span_ptr, rank_ptr, count_ptr,
    B, S, S_kv, HKV, heads, head0, n, size, slots, blocks, first, tokens, strip, mark,
    SOURCE: tl.constexpr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """As :func:`_count_kernel`, but ranks follow the order of tokens and slots, within a strip of ``strip`` tokens.

    A program takes one strip and head. count ``[strips, heads, blocks]``, zero before the launch. With ``served_ptr``
    only rows of blocks whose entry is ``mark`` have units.
    """
    head = tl.program_id(1)
    begin_token = tl.program_id(0) * strip
    counts = count_ptr + (tl.program_id(0) * heads + head) * blocks
    for token in range(begin_token, tl.minimum(begin_token + strip, tokens)):
        seq, k_first, limit = visible_keys(first + token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT, CAUSAL)
        base = first_block(seq, k_first, tl.cdiv(S_kv, size), size, LAYOUT)
        at = (token * heads + head) * slots
        if SOURCE == RANGES:
            row = sel_ptr + ((first + token).to(tl.int64) * HKV + head0 + head) * n * 2
            _count_spans(
                row, counts + base, block_ptr, span_ptr, rank_ptr, at, base, n, limit, size, slots, CHUNK, SPANS, True
            )
        else:
            at_row = (first + token).to(tl.int64) * HKV + head0 + head
            if served_ptr is not None:
                limit = tl.where(tl.load(served_ptr + at_row) == mark, limit, 0)
            row = sel_ptr + at_row * n
            for begin in range(0, slots, CHUNK):
                i = begin + tl.arange(0, CHUNK)
                block = tl.load(row + i, mask=i < slots, other=-1)
                listed = (block >= 0) & (tl.minimum(block, 2147483647).to(tl.int64) * size < limit)
                block = tl.where(listed, block, 0).to(tl.int32)
                tl.store(block_ptr + at + i, tl.where(listed, base + block, UNUSED), mask=i < slots)
                if limit > 0:
                    rank = _rank_in_order(counts + base, block, listed, CHUNK)
                    tl.store(rank_ptr + at + i, rank, mask=listed)


@triton.jit(do_not_specialize=RUNTIME)
def _strip_kernel(count_ptr, total_ptr, heads, blocks, strips, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Replace each strip's count of units by the sum over the strips before it, and write total ``[heads, blocks]``.

    A program takes ``CHUNK`` blocks of a head, ``AT_ONCE`` strips at a time.
    """
    head = tl.program_id(1)
    block = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, strips, AT_ONCE):
        strip = begin + tl.arange(0, AT_ONCE)
        at = count_ptr + ((strip * heads + head) * blocks)[:, None] + block[None, :]
        mask = (strip < strips)[:, None] & (block < blocks)[None, :]
        count = tl.load(at, mask=mask, other=0)  # [AT_ONCE, CHUNK]
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(total_ptr + head * blocks + block, total, mask=block < blocks)


@triton.jit
def chunks_of(cu_q_ptr, B, STEPS: tl.constexpr, CHUNK: tl.constexpr):
    """``(low, high)``: all sequences of a ragged batch with more than ``STEPS`` queries are in ``[low, high)``.

    If ends are not in rising order, a sequence that seems short may have many queries, so the result is ``(0, B)``.
    """
    low = tl.zeros([CHUNK], tl.int32) + B
    high = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, B, CHUNK):
        seq = begin + tl.arange(0, CHUNK)
        start = tl.load(cu_q_ptr + seq, mask=(seq > 0) & (seq < B), other=0)
        end = last_query(cu_q_ptr, seq, seq < B)
        start = tl.minimum(tl.maximum(start, 0), 2147483647).to(tl.int32)
        falls = (end < start) & (seq < B)
        long = (end - start > STEPS) & (seq < B)
        low = tl.where(falls, 0, tl.where(long, tl.minimum(low, seq), low))
        high = tl.where(falls, B, tl.where(long, tl.maximum(high, seq + 1), high))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _cut_into_shares(
    counts, starts, work_ptr, part_ptr, low, high, blocks, all_work, SHARE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Write ``starts`` and the shares of the blocks in ``[low, high)``, of one window and head. Returns their number.

    ``.cg`` reads counts past L1, which may hold values from before this program's atomics.
    """
    units = tl.zeros([], tl.int32)
    shares = tl.zeros([], tl.int32)
    parts = tl.zeros([], tl.int32)
    for begin in range(low, high, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        count = tl.load(counts + block, mask=block < blocks, other=0, cache_modifier=".cg")
        mine = (count + (SHARE - 1)) // SHARE
        start = units + tl.cumsum(count, 0) - count
        at = shares + tl.cumsum(mine, 0) - mine
        tl.store(starts + block, start, mask=block < blocks)
        for i in range(0, tl.max(mine, 0)):
            wanted = i < mine
            tl.store(work_ptr + at + i, block, mask=wanted)
            tl.store(work_ptr + all_work + at + i, start + i * SHARE, mask=wanted)
            tl.store(work_ptr + 2 * all_work + at + i, tl.minimum(count - i * SHARE, SHARE), mask=wanted)
        if part_ptr is not None:
            several = tl.where(mine > 1, mine, 0)
            part = parts + tl.cumsum(several, 0) - several
            tl.store(part_ptr + block, part, mask=block < blocks)
            parts += tl.sum(several, 0)
        units += tl.sum(count, 0)
        shares += tl.sum(mine, 0)
    return shares


@triton.jit(do_not_specialize=RUNTIME)
def _scan_kernel(
    count_ptr, start_ptr, work_ptr, part_ptr, cu_q_ptr,
    B, blocks, work,
    SHARE: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write where each block's units begin, and cut them into shares of at most ``SHARE`` units of one block.

    A program takes one window and head. count, start ``[windows, heads, blocks]``. work ``[3, windows, heads, work]``:
    each share's block, first unit and number of units, zero before the launch (a share of 0 units has no work). part
    ``[windows, heads, blocks]`` or None: number of a block's first partial sum, counted over blocks of several shares.
    STEPS: sequences of at most ``STEPS`` queries have no units. A program looks only from the first to the last of the
    other sequences.
    """
    group = tl.program_id(0)
    low, high = 0, blocks
    if STEPS:
        low, high = chunks_of(cu_q_ptr, B, STEPS, 128)  # one end a thread; else the loop below gets a slow layout
        low = low * (blocks // tl.maximum(B, 1)) // CHUNK * CHUNK  # for a multiple of CHUNK Triton makes better code
        high *= blocks // tl.maximum(B, 1)
    if part_ptr is not None:
        part_ptr += group * blocks
    _cut_into_shares(
        count_ptr + group * blocks, start_ptr + group * blocks, work_ptr + group * work, part_ptr, low, high, blocks,
        tl.num_programs(0) * work, SHARE, CHUNK,
    )  # fmt: skip


@triton.jit
def _visible_keys_of_each(token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr):
    """``(seq, limit)`` of several tokens, as :func:`visible_keys` gives them for one. Not for packed keys.

    In a ragged batch its time grows with the number of sequences.
    """
    if LAYOUT == RAGGED:
        ended = token - token  # zeros of the same shape and dtype
        for i in range(0, B):
            ended += (tl.load(cu_q_ptr + 1 + i) <= token).to(tl.int32)
        seq = tl.maximum(tl.minimum(ended, B - 1), 0)
        filled = tl.load(cu_k_ptr + seq, mask=ended < B, other=0)
        seqlen_k = tl.minimum(tl.maximum(filled, 0), S_kv).to(tl.int32)
        shift = seqlen_k - last_query(cu_q_ptr, seq, ended < B)
    else:
        seq, _, seqlen_k, shift = sequence_of(token, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    return seq, causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL)


@triton.jit(do_not_specialize=RUNTIME)
def _lists_kernel(
    sel_ptr, pos_ptr, cu_q_ptr, cu_k_ptr, served_ptr, block_ptr, rank_ptr, count_ptr, start_ptr, work_ptr, unit_ptr,
    B, S, S_kv, HKV, heads, head0, n, size, slots, blocks, first, tokens, window, work, slot_bits,
    LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Do in one launch what `_count_kernel`, `_scan_kernel` and `_scatter_kernel` do, for few units of block lists.

    A program takes one window and head, and writes all that later kernels read, so no memory has to be zero before.
    """
    group = tl.program_id(0)
    head = group % heads
    begin = group // heads * window
    here = tl.minimum(window, tokens - begin)
    counts = count_ptr + group * blocks
    starts = start_ptr + group * blocks
    for done in range(0, blocks, CHUNK):
        block = done + tl.arange(0, CHUNK)
        tl.store(counts + block, 0, mask=block < blocks)
    tl.debug_barrier()
    for done in range(0, here * slots, CHUNK):
        i = done + tl.arange(0, CHUNK)
        inside = i < here * slots
        local = tl.minimum(i // slots, here - 1)
        slot = i - local * slots
        token = first + begin + local
        seq, limit = _visible_keys_of_each(token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT, CAUSAL)
        row = token.to(tl.int64) * HKV + head0 + head
        block = tl.load(sel_ptr + row * n + slot, mask=inside, other=-1)
        listed = (block >= 0) & (tl.minimum(block, 2147483647).to(tl.int64) * size < limit)
        if served_ptr is not None:
            listed &= tl.load(served_ptr + row) == 0
        block = tl.where(listed, seq * tl.cdiv(S_kv, size) + block, 0).to(tl.int32)
        rank = tl.atomic_add(counts + block, 1, mask=listed, sem="relaxed")
        at = ((begin + local) * heads + head) * slots + slot
        tl.store(block_ptr + at, tl.where(listed, block, UNUSED), mask=inside)
        tl.store(rank_ptr + at, rank, mask=listed)
    tl.debug_barrier()
    all_work = tl.num_programs(0) * work
    work_ptr += group * work
    shares = _cut_into_shares(counts, starts, work_ptr, None, 0, blocks, blocks, all_work, SHARE, CHUNK)
    for done in range(shares, work, CHUNK):
        at = done + tl.arange(0, CHUNK)
        tl.store(work_ptr + 2 * all_work + at, 0, mask=at < work)
    tl.debug_barrier()
    for done in range(0, here * slots, CHUNK):
        i = done + tl.arange(0, CHUNK)
        inside = i < here * slots
        local = i // slots
        slot = i - local * slots
        at = ((begin + local) * heads + head) * slots + slot
        block = tl.load(block_ptr + at, mask=inside, other=UNUSED)
        rank = tl.load(rank_ptr + at, mask=block >= 0, other=0)
        start = tl.load(starts + block, mask=block >= 0, other=0)
        tl.store(unit_ptr + group * window * slots + start + rank, (local << slot_bits) | slot, mask=block >= 0)


@triton.jit(do_not_specialize=RUNTIME)
def _scatter_kernel(
    block_ptr, rank_ptr, start_ptr, strip_ptr, unit_ptr,
    heads, slots, blocks, tokens, window, strip, slot_bits,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the list of units, ``unit [windows, heads, window * slots]``: token within its window, and slot.

    A program takes ``CHUNK`` slots.
    """
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < tokens * heads * slots
    block = tl.load(block_ptr + i, mask=inside, other=UNUSED)
    rank = tl.load(rank_ptr + i, mask=block >= 0, other=0)
    row = i // slots
    token = row // heads
    group = (token // window) * heads + row % heads
    start = tl.load(start_ptr + group * blocks + block, mask=block >= 0, other=0)
    if strip_ptr is not None:  # ranks count within a strip of tokens
        at = (token // strip * heads + row % heads) * blocks + block
        start += tl.load(strip_ptr + at, mask=block >= 0, other=0)
    unit = ((token % window) << slot_bits) | (i % slots)
    tl.store(unit_ptr + group * window * slots + start + rank, unit, mask=block >= 0)
