"""The keys that a row selected, as spans: loads them, clamps them, and finds the key of each slot of a tile."""

import triton
import triton.language as tl

# SOURCE: what lists a row's keys. WHOLE: nothing, the row reads its sequence from the first key on. RANGES, BLOCKS: a
# selection. TILED: blocks whose size is a multiple of the tile, so that each tile lies in one block.
WHOLE = tl.constexpr(0)

RANGES = tl.constexpr(1)

BLOCKS = tl.constexpr(2)

TILED = tl.constexpr(3)


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
