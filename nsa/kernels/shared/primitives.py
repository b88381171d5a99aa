"""The pieces forward and backward kernels share: whose row this is, which keys it reads, one softmax step."""

import triton
import triton.language as tl

from nsa.kernels.shared.launch import TRITON

# Programmatic dependent launch: a kernel is set up while the one before it still runs. Triton 3.4 has these calls too,
# but they do not compile.
if TRITON >= (3, 5):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    gdc_launch_dependents = gdc_wait = None

# Where a row's keys are listed. WHOLE: it reads its sequence from the first key on. TILED: as blocks of whole tiles, so
# that a tile lies in one block.
WHOLE = tl.constexpr(0)
RANGES = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
TILED = tl.constexpr(3)

# How a row finds its sequence. BATCH: [B, S_kv, ...]. VARLEN: cu_seqlens over tokens. PACKED: row i is sequence i.
# CACHE: as BATCH, but not all of S_kv is there, and it may lie in pages.
BATCH = tl.constexpr(0)
VARLEN = tl.constexpr(1)
PACKED = tl.constexpr(2)
CACHE = tl.constexpr(3)


@triton.jit
def find_sequence(cu_seqlens_ptr, B, token, CHUNK: tl.constexpr):
    """Index of the sequence that holds ``token``: how many sequences end at or before it. ``B`` if none holds it."""
    seq = tl.full([], 0, tl.int32)
    for first in range(0, B, CHUNK):
        j = first + tl.arange(0, CHUNK)  # [CHUNK]
        ends = tl.load(cu_seqlens_ptr + 1 + j, mask=j < B, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    return seq


@triton.jit
def ask_spans(sel_ptr, j, n, SOURCE: tl.constexpr):
    """What spans ``j`` of one row are read from, as it lies in memory, for :func:`clamp_span`.

    Two numbers for ranges, one and the same for blocks; nothing is selected from ``n`` on. Apart, so that a program may
    ask for them before it works out anything else.
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
    """Spans of what :func:`ask_spans` returned, clamped to ``[0, limit]``: ``(start, end)`` int32."""
    if SOURCE == RANGES:
        # Clamped in the dtype that came: int64 spans may be anything.
        start = tl.minimum(tl.maximum(begin, 0), limit).to(tl.int32)
        end = tl.minimum(tl.maximum(stop, 0), limit).to(tl.int32)
        end = tl.maximum(start, end)
    else:
        # Clamped before it is multiplied; a division would take longer.
        listed = (begin >= 0) & (tl.minimum(begin, 2147483647).to(tl.int64) * block_size < limit)
        start = tl.where(listed, begin, 0).to(tl.int32) * block_size
        end = start + tl.where(listed, tl.minimum(block_size, limit - start), 0)
    return start, end


@triton.jit
def load_span(sel_ptr, j, n, limit, block_size, SOURCE: tl.constexpr):
    """Spans ``j`` of one row, clamped to ``[0, limit]``: ``(start, end)`` int32, empty from ``n`` on."""
    begin, stop = ask_spans(sel_ptr, j, n, SOURCE)
    return clamp_span(begin, stop, limit, block_size, SOURCE)


@triton.jit
def slots_of(begin, stop, limit, block_size, SOURCE: tl.constexpr, BLOCK_L: tl.constexpr):
    """Spans of one row, of what :func:`ask_spans` returned, for :func:`key_positions`.

    A selected key takes a slot. Blocks of whole tiles (``TILED``) take slots in whole tiles, for :func:`tile_start`.

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
    """:func:`slots_of` the ``SPANS`` spans of one row from number ``first`` on."""
    begin, stop = ask_spans(sel_ptr, first + tl.arange(0, SPANS), n, SOURCE)
    return slots_of(begin, stop, limit, block_size, SOURCE, BLOCK_L)


def _ask_eight() -> str:
    """Assembly: eight ranges at ``$16``, ``$17`` of which exist, 0 for others. Two at a time where they are aligned."""
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
    """What all ``SPANS`` spans of a row are read from, for :func:`slots_of_each`: begins and ends, scalars in turn."""
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
    """:func:`slots_of` what :func:`ask_each` returned, for :func:`key_of_each`. here: 0, added to what was asked for.

    Returns what a key of each span is past its slot, the slots before each, and those of all.
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
    """Key of each of ``slot [BLOCK_L]``, worked out by every thread; that of one past the last must be masked."""
    further = tl.zeros_like(slot) + shift[0]
    for j in tl.static_range(1, len(shift)):
        further = tl.where(slot >= before[j], shift[j], further)
    return slot + further


@triton.jit
def tile_start(slot, start, before, length):
    """First key of the tile at ``slot``, which lies in one span."""
    here = (before <= slot) & (slot < before + length)
    return tl.sum(tl.where(here, start + (slot - before), 0), 0)


@triton.jit
def key_positions(slot, start, before, length):
    """Key of each of ``slot [BLOCK_L]``; that of a slot past the last one must be masked."""
    slot = slot[:, None]
    here = (before <= slot) & (slot < before + length)  # [BLOCK_L, SPANS]
    return tl.sum(tl.where(here, start + (slot - before), 0), 1)


@triton.jit
def in_page(table_row, key, inside, pages, stride_k, stride_v, PAGE: tl.constexpr):
    """``(K's offset int64, V's, place, inside)`` of keys, a block or one, by the page table of their sequence.

    Offsets of pages, places within them. What lies in a page that does not exist is not ``inside``.
    """
    # The look-up is not masked, which Triton 3.1 cannot pipeline, nor is what it adds to the table, of which Triton 3.3
    # dies. The table has a first place where any key is.
    key = tl.where(inside, key, 0)
    page = tl.load(table_row + key // PAGE)
    inside = inside & (page >= 0) & (page < pages)
    page = tl.where(inside, page, 0).to(tl.int64)
    return page * stride_k, page * stride_v, key % PAGE, inside


@triton.jit
def tile_in_pages(table_row, key, limit, pages, stride_k, stride_v, PAGE: tl.constexpr, BLOCK_L: tl.constexpr):
    """``(K's offset int64, V's, place, inside)`` of the tile of keys from ``key`` on, which holds whole pages.

    As :func:`in_page`, but pages are looked up one by one: a block of them would be pipelined in the place of keys.
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

    scores ``[BLOCK_G, BLOCK_L]``, ``-inf`` where masked; m ``[BLOCK_G]``; l ``[BLOCK_G, BLOCK_L]``, not yet added
    up: that would cost every tile two barriers; acc ``[BLOCK_G, BLOCK_DV]``.
    """
    m_new = tl.maximum(m, tl.max(scores, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    p = tl.exp2(scores - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return m_new, l * alpha[:, None] + p, acc * alpha[:, None], p


@triton.jit
def not_before(x):
    """``x``, 16 bit, with nothing done to it before this point. NVIDIA only.

    A load that is not pipelined is otherwise waited for where it stands, before the next one is issued.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@triton.jit
def nothing_of(x):
    """0 for ``x >= 0``, int32, which no compiler knows: what it is added to is used here, not before. NVIDIA only."""
    return tl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def nothing_of_lanes(x):
    """:func:`nothing_of` ``x``, of which no compiler knows that it is one for all lanes, either. NVIDIA only.

    What is one for all is worked out by the processor's scalar unit, which takes several times as long a step.
    """
    lanes = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %lanemask_lt; shr.u32 $0, t, 31; }", "=r", [], tl.int32, True, 1
    )
    return lanes + nothing_of(x)


@triton.jit
def finish(m, l, acc):
    """``(O [R, BLOCK_DV], LSE [R])`` of maximum, sum and accumulator.

    A row that selected nothing has m = -inf and l = 0: O = 0, LSE = -inf. A NaN sum stays NaN.
    """
    l = tl.where(l == 0.0, 1.0, l)
    return acc * (1.0 / l)[:, None], m * 0.6931471805599453 + tl.log(l)


@triton.jit
def merge_parts(part_ptr, rows, mask, heads, dv, Dv: tl.constexpr, SPLITS: tl.constexpr):
    """``(O [R, BLOCK_DV], LSE [R])`` of partial results, each thread merging all parts of its elements.

    acc ``[SPLITS, heads, Dv]``, m ``[SPLITS, heads]`` and l ``[SPLITS, heads]`` lie one after the other, fp32.
    rows, mask ``[R]``: which of ``heads``; dv ``[BLOCK_DV]``.
    """
    parts = tl.cast(heads, tl.int64) * SPLITS
    m = tl.full(rows.shape, float("-inf"), tl.float32)
    l = tl.zeros(rows.shape, tl.float32)
    acc = tl.zeros([rows.shape[0], dv.shape[0]], tl.float32)
    for i in tl.static_range(SPLITS):
        at = tl.full(rows.shape, i, tl.int64) * heads + rows
        # Not from L1: another multiprocessor has written them just now.
        part_m = tl.load(part_ptr + parts * Dv + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(part_ptr + parts * (Dv + 1) + at, mask=mask, other=0.0, cache_modifier=".cg")
        part = part_ptr + at[:, None] * Dv + dv[None, :]
        part = tl.load(part, mask=mask[:, None] & (dv[None, :] < Dv), other=0.0, cache_modifier=".cg")
        m, l, acc = merge_part(m, l, acc, part_m, part_l, part)
    return finish(m, l, acc)


@triton.jit
def merge_part(m, l, acc, part_m, part_l, part):
    """Maximum, sum and accumulator ``[R], [R], [R, BLOCK_DV]`` with another part of the keys."""
    m_new = tl.maximum(m, part_m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - m_safe), tl.exp2(part_m - m_safe)
    return m_new, l * old + part_l * new, acc * old[:, None] + part * new[:, None]


@triton.jit
def expect_table(table_row, width):
    """Ask for a page table's row, so that look-ups find it in L2. NVIDIA only. Of a long one its first 128 lines."""
    LINE: tl.constexpr = 1024 // table_row.dtype.element_ty.primitive_bitwidth  # entries of one
    at = tl.minimum(tl.arange(0, 128) * LINE, tl.maximum(width - 1, 0))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(table_row + at).to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def filled_keys(seq, S_kv, cache_seqlens_ptr):
    """Keys that a cache with room for ``S_kv`` of a sequence holds of it."""
    return tl.minimum(tl.maximum(tl.load(cache_seqlens_ptr + seq), 0), S_kv).to(tl.int32)
