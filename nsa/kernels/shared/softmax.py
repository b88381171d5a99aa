"""Steps of the online softmax, and merging of partial results."""

import triton
import triton.language as tl


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
