"""Helpers of forward and backward kernels: a row's sequence, the keys that it reads, a step of the softmax, merging."""

import triton
import triton.language as tl

from nsa import settings
from nsa.kernels.shared.launch import TRITON

# Programmatic dependent launch (PDL): a kernel starts while the one before it on the stream still runs. Triton 3.4 has
# these functions, too, but they do not compile.
if TRITON >= (3, 5):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    gdc_launch_dependents = gdc_wait = None

INTERPRETED = tl.constexpr(settings.interpreter())

# SOURCE: what lists a row's keys. WHOLE: nothing, the row reads its sequence from the first key on. RANGES, BLOCKS: a
# selection. TILED: blocks whose size is a multiple of the tile, so that each tile lies in one block.
WHOLE = tl.constexpr(0)
RANGES = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
TILED = tl.constexpr(3)

# LAYOUT: how a row finds its sequence. BATCH: [B, S_kv, ...]. VARLEN: cu_seqlens over tokens. PACKED: row i is sequence
# i. CACHE: as BATCH, but only the first keys of each sequence are filled, and keys may lie in pages. RAGGED: queries as
# in VARLEN, keys as in CACHE.
BATCH = tl.constexpr(0)
VARLEN = tl.constexpr(1)
PACKED = tl.constexpr(2)
CACHE = tl.constexpr(3)
RAGGED = tl.constexpr(4)


@triton.jit
def find_sequence(cu_seqlens_ptr, B, token, CHUNK: tl.constexpr):
    """Index of the sequence that holds ``token``, ``B`` if none: the number of sequences that end at or before it."""
    seq = tl.full([], 0, tl.int32)
    for first in range(0, B, CHUNK):
        j = first + tl.arange(0, CHUNK)  # [CHUNK]
        ends = tl.load(cu_seqlens_ptr + 1 + j, mask=j < B, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    return seq


@triton.jit
def ask_spans(sel_ptr, j, n, SOURCE: tl.constexpr):
    """Load spans ``j`` of one row as they lie in memory, for :func:`clamp_span`. Spans from ``n`` on are empty.

    Returns begin and end of ranges; for blocks both are the block index. The load is apart from the clamp, so that a
    program can issue it before it computes anything else.
    """
    inside = j < n
    if SOURCE == RANGES:
        begin = tl.load(sel_ptr + 2 * j, mask=inside, other=0)
        stop = tl.load(sel_ptr + 2 * j + 1, mask=inside, other=0)
    else:
        begin = tl.load(sel_ptr + j, mask=inside, other=-1)
        stop = begin
    return begin, stop


@triton.jit
def clamp_span(begin, stop, limit, block_size, SOURCE: tl.constexpr):
    """What :func:`ask_spans` returned, clamped to ``[0, limit]``: ``(start, end)`` int32."""
    if SOURCE == RANGES:
        # Clamp in the dtype of the spans: int64 spans may lie past int32.
        start = tl.minimum(tl.maximum(begin, 0), limit).to(tl.int32)
        end = tl.minimum(tl.maximum(stop, 0), limit).to(tl.int32)
        end = tl.maximum(start, end)
    else:
        # Clamp the index before the product, which could overflow. A division would take longer.
        listed = (begin >= 0) & (tl.minimum(begin, 2147483647).to(tl.int64) * block_size < limit)
        start = tl.where(listed, begin, 0).to(tl.int32) * block_size
        end = start + tl.where(listed, tl.minimum(block_size, limit - start), 0)
    return start, end


@triton.jit
def causal_end(position, end, token, pos_ptr, origin=0):
    """The causal rule: a query may read the keys before ``end`` up to its own position. Returns the end of these keys.

    ``pos_ptr`` holds positions of tokens, of any value, which replace ``position``; or it is None. Keys and
    ``position`` count from ``origin``. The result may be negative for a query without keys.
    """
    if pos_ptr is not None:
        position = tl.maximum(tl.minimum(tl.load(pos_ptr + token), origin + end - 1), -1).to(tl.int32) - origin
    return tl.minimum(position + 1, end)


@triton.jit
def load_span(sel_ptr, j, n, limit, block_size, SOURCE: tl.constexpr):
    """Load spans ``j`` of one row, clamped to ``[0, limit]``: ``(start, end)`` int32, empty from ``n`` on."""
    begin, stop = ask_spans(sel_ptr, j, n, SOURCE)
    return clamp_span(begin, stop, limit, block_size, SOURCE)


@triton.jit
def slots_of(begin, stop, limit, block_size, SOURCE: tl.constexpr, BLOCK_L: tl.constexpr):
    """Slots of the spans that :func:`ask_spans` returned, for :func:`key_positions`.

    Each selected key takes a slot. For blocks of whole tiles (``TILED``) the number of slots is rounded up to whole
    tiles, for :func:`tile_start`.

    Returns ``start [SPANS]`` (first key), ``before [SPANS]`` (slots of earlier spans of this chunk), ``length [SPANS]``
    and ``total`` (slots of this chunk).
    """
    start, end = clamp_span(begin, stop, limit, block_size, SOURCE)
    length = end - start
    if SOURCE == TILED:
        length = tl.cdiv(length, BLOCK_L) * BLOCK_L
    return start, tl.cumsum(length, 0) - length, length, tl.sum(length, 0)


@triton.jit
def load_spans(sel_ptr, first, n, limit, block_size, SOURCE: tl.constexpr, SPANS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Load ``SPANS`` spans of one row, from number ``first`` on, and return :func:`slots_of` them."""
    begin, stop = ask_spans(sel_ptr, first + tl.arange(0, SPANS), n, SOURCE)
    return slots_of(begin, stop, limit, block_size, SOURCE, BLOCK_L)


def _ask_eight() -> str:
    """Assembly that loads eight ranges from ``$16``, in pairs if aligned. Ranges from number ``$17`` on are 0."""
    text = ["{ .reg .pred p; .reg .b32 odd, one; .reg .b64 by;"]
    text += [f"mov.b32 ${i}, 0;" for i in range(16)]
    text += ["and.b64 by, $16, 15; cvt.u32.u64 odd, by; and.b32 one, $17, 1; or.b32 odd, odd, one;"]
    text += ["setp.ne.b32 p, odd, 0; @p bra.uni each;"]
    for i in range(0, 16, 4):
        pair = ", ".join(f"${j}" for j in range(i, i + 4))
        text.append(f"setp.gt.s32 p, $17, {i // 2}; @p ld.global.v4.b32 {{{pair}}}, [$16+{4 * i}];")
    text += ["bra.uni done; each:"]
    for i in range(0, 16, 2):
        text.append(f"setp.gt.s32 p, $17, {i // 2};")
        text += [f"@p ld.global.b32 ${j}, [$16+{4 * j}];" for j in (i, i + 1)]
    return "\n".join([*text, "done: }"])


ASK_EIGHT = tl.constexpr(_ask_eight())
EIGHT_RANGES = tl.constexpr(",".join(["=&r"] * 16 + ["l", "r"]))


@triton.jit
def ask_each(sel_ptr, n, SPANS: tl.constexpr, SOURCE: tl.constexpr, PTX: tl.constexpr):
    """Load all ``SPANS`` spans of a row as scalars, each begin followed by its end, for :func:`slots_of_each`."""
    if PTX and SPANS == 8 and SOURCE == RANGES and sel_ptr.dtype.element_ty == tl.int32:
        every = tl.inline_asm_elementwise(
            ASK_EIGHT, EIGHT_RANGES, [sel_ptr.to(tl.int64), n], (tl.int32,) * 16, False, 1
        )
    else:
        every = ()
        for j in tl.static_range(SPANS):
            every = every + ask_spans(sel_ptr, j, n, SOURCE)  # noqa: RUF005 (no star in a kernel)
    return every


@triton.jit
def slots_of_each(every, here, limit, block_size, SPANS: tl.constexpr, SOURCE: tl.constexpr):
    """As :func:`slots_of`, for what :func:`ask_each` returned. ``here``: an opaque 0 from :func:`nothing_of`.

    Returns for :func:`key_of_each`: for each span, the difference between its keys and their slots; for each span, the
    slots of earlier spans; and the slots of all spans.
    """
    shift = ()
    before = ()
    total = 0
    for j in tl.static_range(SPANS):
        start, end = clamp_span(every[2 * j] + here, every[2 * j + 1] + here, limit, block_size, SOURCE)
        shift = shift + (start - total,)
        before = before + (total,)
        total += end - start
    return shift, before, total


@triton.jit
def key_of_each(slot, shift, before):
    """Key of each ``slot [BLOCK_L]``, computed by each thread alone. Keys of slots past the last must be masked."""
    further = tl.zeros_like(slot) + shift[0]
    for j in tl.static_range(1, len(shift)):
        further = tl.where(slot >= before[j], shift[j], further)
    return slot + further


@triton.jit
def tile_start(slot, start, before, length):
    """First key of the tile that begins at ``slot`` and lies in one span."""
    here = (before <= slot) & (slot < before + length)
    return tl.sum(tl.where(here, start + (slot - before), 0), 0)


@triton.jit
def key_positions(slot, start, before, length):
    """Key of each ``slot [BLOCK_L]``. Keys of slots past the last must be masked."""
    slot = slot[:, None]
    here = (before <= slot) & (slot < before + length)  # [BLOCK_L, SPANS]
    return tl.sum(tl.where(here, start + (slot - before), 0), 1)


@triton.jit
def in_page(table_row, key, inside, pages, stride_k, stride_v, PAGE: tl.constexpr):
    """Look up ``key``, a tile of keys or one key, in its sequence's page table: ``(k_page, v_page, place, inside)``.

    k_page and v_page are the int64 offsets of the key's page in K and V. place is the key's number within the page.
    Keys in pages that do not exist are not ``inside``.
    """
    # The key is masked, not the load or the quotient. Triton 3.1 cannot pipeline masked look-ups, and a masked quotient
    # makes Triton 3.3 crash. Entry 0 of the table exists wherever there are keys.
    key = tl.where(inside, key, 0)
    page = tl.load(table_row + key // PAGE)
    inside = inside & (page >= 0) & (page < pages)
    page = tl.where(inside, page, 0).to(tl.int64)
    return page * stride_k, page * stride_v, key % PAGE, inside


@triton.jit
def tile_in_pages(table_row, key, limit, pages, stride_k, stride_v, PAGE: tl.constexpr, BLOCK_L: tl.constexpr):
    """As :func:`in_page`, for the tile of keys from ``key`` on, which consists of whole pages.

    Pages are looked up one by one, because Triton would pipeline a vector of look-ups instead of the keys.
    """
    i = tl.arange(0, BLOCK_L)
    k_at = tl.zeros([BLOCK_L], tl.int64)
    v_at = tl.zeros([BLOCK_L], tl.int64)
    stop = tl.zeros([BLOCK_L], tl.int32)
    for j in tl.static_range(BLOCK_L // PAGE):
        at = key + j * PAGE
        found = tl.load(table_row + at // PAGE, mask=at < limit, other=-1)
        exists = (found >= 0) & (found < pages)
        page = tl.where(exists, found, 0).to(tl.int64)
        here = i // PAGE == j
        k_at = tl.where(here, page * stride_k, k_at)
        v_at = tl.where(here, page * stride_v, v_at)
        stop = tl.where(here, tl.where(exists, limit - key, 0), stop)
    return k_at, v_at, i % PAGE, i < stop


@triton.jit
def softmax_step(scores, m, l, acc):
    """One step of the online softmax in base 2: new maximum, sum and rescaled accumulator, and this tile's weights.

    scores ``[BLOCK_G, BLOCK_L]``, ``-inf`` where masked; m ``[BLOCK_G]``; acc ``[BLOCK_G, BLOCK_DV]``; l ``[BLOCK_G,
    BLOCK_L]``, which the caller sums over keys at the end, because a sum in every tile would cost two barriers.
    """
    m_new = tl.maximum(m, tl.max(scores, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    p = tl.exp2(scores - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return m_new, l * alpha[:, None] + p, acc * alpha[:, None], p


@triton.jit
def not_before(x):
    """16-bit or 8-bit ``x``, which the compiler may not use before this point. NVIDIA only.

    Otherwise the kernel waits for a load that is not pipelined before it issues the next load.
    """
    if x.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 4)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@triton.jit
def apart(x):
    """int32 ``x``. A branch that uses the result stays a branch: LLVM cannot turn it into selects. NVIDIA only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def nothing_of(x):
    """An opaque zero made of int32 ``x >= 0``: LLVM cannot hoist a sum with this zero out of a loop. NVIDIA only."""
    return tl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def nothing_of_lanes(x):
    """As :func:`nothing_of`, but the compiler cannot see that all lanes have the same value. NVIDIA only.

    Values that all lanes share are computed by the uniform datapath, where a step takes several times as long.
    """
    lanes = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %lanemask_lt; shr.u32 $0, t, 31; }", "=r", [], tl.int32, True, 1
    )
    return lanes + nothing_of(x)


@triton.jit
def finish(m, l, acc):
    """``(O [R, BLOCK_DV], LSE [R])`` of maximum, sum and accumulator.

    A row that selected nothing has m = -inf and l = 0, and gets O = 0 and LSE = -inf. A sum that is NaN stays NaN.
    """
    l = tl.where(l == 0.0, 1.0, l)
    return acc * (1.0 / l)[:, None], m * 0.6931471805599453 + tl.log(l)


@triton.jit
def merge_parts(part_ptr, rows, mask, heads, dv, Dv: tl.constexpr, SPLITS: tl.constexpr):
    """``(O [R, BLOCK_DV], LSE [R])`` of partial results. Each thread merges all parts of its elements.

    ``part_ptr`` holds acc ``[SPLITS, heads, Dv]``, then m ``[SPLITS, heads]``, then l ``[SPLITS, heads]``, all fp32.
    rows, mask ``[R]``: which of ``heads`` to merge; dv ``[BLOCK_DV]``.
    """
    parts = tl.cast(heads, tl.int64) * SPLITS
    m = tl.full(rows.shape, float("-inf"), tl.float32)
    l = tl.zeros(rows.shape, tl.float32)
    acc = tl.zeros([rows.shape[0], dv.shape[0]], tl.float32)
    for i in tl.static_range(SPLITS):
        at = tl.full(rows.shape, i, tl.int64) * heads + rows
        # Load from L2, not L1, because another multiprocessor has just written the parts.
        part_m = tl.load(part_ptr + parts * Dv + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(part_ptr + parts * (Dv + 1) + at, mask=mask, other=0.0, cache_modifier=".cg")
        part = part_ptr + at[:, None] * Dv + dv[None, :]
        part = tl.load(part, mask=mask[:, None] & (dv[None, :] < Dv), other=0.0, cache_modifier=".cg")
        m, l, acc = merge_part(m, l, acc, part_m, part_l, part)
    return finish(m, l, acc)


@triton.jit
def merge_part(m, l, acc, part_m, part_l, part):
    """Maximum, sum and accumulator ``[R], [R], [R, BLOCK_DV]``, updated with those of another part of the keys."""
    m_new = tl.maximum(m, part_m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - m_safe), tl.exp2(part_m - m_safe)
    return m_new, l * old + part_l * new, acc * old[:, None] + part * new[:, None]


@triton.jit
def expect_table(table_row, width):
    """Prefetch a row of the page table to L2, at most its first 128 lines. NVIDIA only."""
    LINE: tl.constexpr = 1024 // table_row.dtype.element_ty.primitive_bitwidth  # entries of a line
    at = tl.minimum(tl.arange(0, 128) * LINE, tl.maximum(width - 1, 0))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(table_row + at).to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def filled_keys(seq, S_kv, cache_seqlens_ptr):
    """Filled keys of a sequence in a cache that has room for ``S_kv``."""
    return tl.minimum(tl.maximum(tl.load(cache_seqlens_ptr + seq), 0), S_kv).to(tl.int32)


@triton.jit
def sequence_keys(seq, B, S_kv, cu_k_ptr):
    """``(first key, number of keys)`` of a sequence of a packed batch. A sequence from ``B`` on has no keys."""
    known = seq < B
    k_first = tl.load(cu_k_ptr + seq, mask=known, other=0).to(tl.int64)
    k_last = tl.load(cu_k_ptr + seq + 1, mask=known, other=0).to(tl.int64)
    k_first = tl.minimum(tl.maximum(k_first, 0), S_kv)
    k_last = tl.minimum(tl.maximum(k_last, k_first), S_kv)
    return k_first, (k_last - k_first).to(tl.int32)


@triton.jit
def sequence_of_cache(cu_q_ptr, cache_seqlens_ptr, B, token):
    """``(seq, filled, behind)`` of one token of a ragged batch: its sequence, the sequence's length as it is in memory,
    and how many queries the sequence has from the token on: 1 for the last query, less for a token after it.

    A token after the last sequence gets a length of 0, and the last sequence, so that its row of a page table exists.
    Without sequences ``seq`` is 0.
    """
    seq = find_without_loop(cu_q_ptr, B, token, 128)
    known = seq < B
    filled = tl.load(cache_seqlens_ptr + seq, mask=known, other=0)
    end = last_query(cu_q_ptr, seq, known)
    return tl.maximum(tl.minimum(seq, B - 1), 0), filled, end - token


@triton.jit
def find_step(cu_q_ptr, B, tokens, place, STEPS: tl.constexpr):
    """Token of query ``place // B`` of sequence ``place % B`` of a ragged batch. -1: the sequence has no such query, or
    more than ``STEPS`` queries.
    """
    seq = place % B
    begin = tl.load(cu_q_ptr + seq, mask=seq > 0, other=0)
    end = tl.load(cu_q_ptr + seq + 1)
    begin = tl.minimum(tl.maximum(begin, 0), tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
    token = begin + place // B
    found = (token < end) & (end - begin <= STEPS)
    # If ends are not in rising order, several sequences claim a token. It belongs to the one that all kernels find.
    found &= find_without_loop(cu_q_ptr, B, token, 128) == seq
    return tl.where(found, token, -1)


@triton.jit
def find_without_loop(cu_seqlens_ptr, B, token, CHUNK: tl.constexpr):
    """As :func:`find_sequence`, for at most ``CHUNK * CHUNK`` sequences. If there are more than ``CHUNK``, the ends
    must be in rising order; otherwise the result may be any sequence, or ``B``.

    From version 3.7 on, Triton does not pipeline the keys of some tiles if a loop or a branch comes before them.
    """
    i = tl.arange(0, CHUNK)  # [CHUNK]
    step = tl.cdiv(B, CHUNK)  # look at every step-th end, then at those in between; with step = 1 there are none
    last = (i + 1) * step
    ends = tl.load(cu_seqlens_ptr + last, mask=last <= B, other=2147483647)
    seq = (tl.sum((ends <= token).to(tl.int32), 0) * step).to(tl.int32)
    ends = tl.load(cu_seqlens_ptr + 1 + seq + i, mask=(i + 1 < step) & (seq + i < B), other=2147483647)
    return seq + tl.sum((ends <= token).to(tl.int32), 0)


@triton.jit
def last_query(cu_q_ptr, seq, known):
    """One past the last query of a sequence, clamped to ``[0, 2^31 - 1]``."""
    end = tl.load(cu_q_ptr + seq + 1, mask=known, other=0)
    return tl.minimum(tl.maximum(end, 0), 2147483647).to(tl.int32)
