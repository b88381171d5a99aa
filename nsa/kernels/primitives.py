"""The pieces forward and backward kernels share: whose row this is, which keys it reads, one softmax step."""

import triton
import triton.language as tl

from nsa.kernels.launch import TRITON

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
BATCH = tl.constexpr(0)
VARLEN = tl.constexpr(1)
PACKED = tl.constexpr(2)


@triton.jit
def prefetch_rows(rows_ptr, width: tl.constexpr, padded: tl.constexpr, line: tl.constexpr):
    """Have L2 fetch ``width`` elements from each of ``rows_ptr [n]`` on, and wait for nothing. NVIDIA only.

    ``padded``: ``width`` as a power of 2; ``line``: elements of a cache line.
    """
    at = tl.minimum(tl.arange(0, (padded + line - 1) // line) * line, width - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [rows_ptr[:, None] + at[None, :]], tl.int32, False, 1
    )


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
def load_span(sel_ptr, j, n, limit, block_size, SOURCE: tl.constexpr):
    """Spans ``j`` of one row, clamped to ``[0, limit]``: ``(start, end)`` int32, empty for ``j`` outside [0, n)."""
    inside = (j >= 0) & (j < n)
    if SOURCE == RANGES:
        # Clamped in the dtype that came: int64 spans may be anything.
        begin = tl.load(sel_ptr + 2 * j, mask=inside, other=0)
        stop = tl.load(sel_ptr + 2 * j + 1, mask=inside, other=0)
        start = tl.minimum(tl.maximum(begin, 0), limit).to(tl.int32)
        end = tl.minimum(tl.maximum(stop, 0), limit).to(tl.int32)
        end = tl.maximum(start, end)
    else:
        block = tl.load(sel_ptr + j, mask=inside, other=-1)
        listed = (block >= 0) & (block <= (limit - 1) // block_size)
        start = tl.where(listed, block, 0).to(tl.int32) * block_size
        end = start + tl.where(listed, tl.minimum(block_size, limit - start), 0)
    return start, end


@triton.jit
def load_spans(sel_ptr, first, n, limit, block_size, SOURCE: tl.constexpr, SPANS: tl.constexpr):
    """``SPANS`` spans of one row from number ``first`` on, for :func:`key_positions`.

    Returns ``before [SPANS]`` (keys selected by earlier spans of this chunk), ``jump [SPANS]`` (where the span starts,
    less where the one before ended) and ``total`` (keys selected in this chunk).
    """
    j = first + tl.arange(0, SPANS)  # [SPANS]
    start, end = load_span(sel_ptr, j, n, limit, block_size, SOURCE)
    # Lane 0 has no predecessor: index -1 loads as the empty span at 0.
    _, end_before = load_span(sel_ptr, tl.where(j == first, -1, j - 1), n, limit, block_size, SOURCE)
    length = end - start
    before = tl.cumsum(length, 0) - length
    return before, start - end_before, tl.sum(length, 0)


@triton.jit
def load_blocks(sel_ptr, first, n, limit, block_size, SPANS: tl.constexpr, BLOCK_L: tl.constexpr):
    """``SPANS`` blocks of one row from number ``first`` on, for :func:`tile_start`; each takes slots in whole tiles.

    Returns ``start [SPANS]`` (first key), ``before [SPANS]`` (slots of earlier blocks of this chunk), ``slots [SPANS]``
    and their ``total``. Padding, and what lies past ``limit``, takes none.
    """
    j = tl.arange(0, SPANS)  # [SPANS]
    block = tl.load(sel_ptr + first + j, mask=first + j < n, other=-1)
    listed = (block >= 0) & (block <= (limit - 1) // block_size)
    start = tl.where(listed, block, 0).to(tl.int32) * block_size
    slots = tl.where(listed, tl.cdiv(tl.minimum(block_size, limit - start), BLOCK_L) * BLOCK_L, 0)
    return start, tl.cumsum(slots, 0) - slots, slots, tl.sum(slots, 0)


@triton.jit
def tile_start(start, before, slots, begin):
    """First key of the tile at slot ``begin``, which lies in one of the blocks of :func:`load_blocks`."""
    here = (before <= begin) & (begin < before + slots)
    return tl.sum(tl.where(here, start + (begin - before), 0), 0)


@triton.jit
def key_positions(slot, before, jump, AXIS: tl.constexpr):
    """Key of each selected slot: ``slot`` plus the jumps of all spans that begin at or before it, in its shape.

    Jumps telescope, so empty spans need no care; a slot past the last key yields a position that must be masked.
    ``AXIS``: the number of axes of ``slot``.
    """
    begun = before <= tl.expand_dims(slot, AXIS)  # [..., SPANS]
    return slot + tl.sum(tl.where(begun, jump, 0), AXIS)


@triton.jit
def softmax_step(scores, m, l, acc, AXIS: tl.constexpr):
    """One step of the online softmax in base 2: new maximum, sum and rescaled accumulator, and this tile's weights.

    scores ``[BLOCK_G, BLOCK_L]``, ``-inf`` where masked; m, l ``[BLOCK_G]``; acc ``[BLOCK_G, BLOCK_DV]``; or each with
    an axis of lanes before. ``AXIS``: that of the keys, the last of ``scores``.
    """
    m_new = tl.maximum(m, tl.max(scores, AXIS))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    p = tl.exp2(scores - tl.expand_dims(m_safe, AXIS))
    alpha = tl.exp2(m - m_safe)
    return m_new, l * alpha + tl.sum(p, AXIS), acc * tl.expand_dims(alpha, AXIS), p


@triton.jit
def merge_lanes(m, l, acc):
    """One softmax of several over different keys: m, l ``[LANES, BLOCK_G]``, acc ``[LANES, BLOCK_G, BLOCK_DV]``."""
    m_new = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(m_new == float("-inf"), 0.0, m_new)[None, :])  # [LANES, BLOCK_G]
    return m_new, tl.sum(l * weight, 0), tl.sum(acc * weight[:, :, None], 0)
