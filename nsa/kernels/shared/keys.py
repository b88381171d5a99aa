"""A tile of keys: where its keys lie in memory, loading keys and values, and attending to them."""

import triton
import triton.language as tl

from nsa.kernels.shared.e4m3 import add_pairs, half_of
from nsa.kernels.shared.primitives import in_page, not_before, softmax_step, tile_in_pages


@triton.jit
def places_of_block(
    table_row, key, limit, pages, stride_kb, stride_vb, PAGE: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """Find where a tile's keys lie: ``(k_page, v_page, place, valid)``. The tile begins at ``key``, in one block.

    Args:
        limit: one past the last key that may be read.
        table_row: the sequence's row of the page table. Without pages it is not read.

    Returns:
        k_page, v_page: int64 offsets of the pages in K and V, of one page or of each key; 0 without pages.
        place ``[BLOCK_L]``: the keys' numbers within their pages, or within the sequence.
        valid ``[BLOCK_L]``: which keys exist and lie before ``limit``.
    """
    i = tl.arange(0, BLOCK_L)
    if PAGE == 0:
        place = key + i
        valid = place < limit
        k_page = 0
        v_page = 0
    elif PAGE % BLOCK_L == 0:
        stop = limit - key
        k_page, v_page, key, exists = in_page(table_row, key, stop > 0, pages, stride_kb, stride_vb, PAGE)
        valid = i < tl.where(exists, stop, 0)
        place = key + i
    elif BLOCK_L % PAGE == 0 and BLOCK_L <= 8 * PAGE:
        k_page, v_page, place, valid = tile_in_pages(table_row, key, limit, pages, stride_kb, stride_vb, PAGE, BLOCK_L)
    else:
        key = key + i
        k_page, v_page, place, valid = in_page(table_row, key, key < limit, pages, stride_kb, stride_vb, PAGE)
    return k_page, v_page, place, valid


@triton.jit
def places_of_each(table_row, key, valid, pages, stride_kb, stride_vb, PAGE: tl.constexpr):
    """As :func:`places_of_block`, for any keys ``[BLOCK_L]``."""
    k_page = 0
    v_page = 0
    if PAGE:
        k_page, v_page, key, valid = in_page(table_row, key, valid, pages, stride_kb, stride_vb, PAGE)
    return k_page, v_page, key, valid


@triton.jit
def load_tile(base, at, valid, column, columns, STRIDE_UNIT: tl.constexpr):
    """Rows of K or V at offsets ``at [BLOCK_L]`` from ``base``, in units of ``STRIDE_UNIT`` elements.

    column: ``arange`` over the columns, of which there are ``columns``. Elements past them, and keys that are not
    ``valid [BLOCK_L]``, are 0.
    """
    rows = base + at[:, None] * STRIDE_UNIT + column[None, :]
    return tl.load(rows, mask=valid[:, None] & (column[None, :] < columns), other=0.0)


@triton.jit
def load_tiles(k_base, v_base, k_at, v_at, valid, d, dv, D, Dv, STRIDE_UNIT: tl.constexpr, PAIRS: tl.constexpr):
    """K ``[BLOCK_L, BLOCK_D]`` and V ``[BLOCK_L, BLOCK_DV]`` of a tile, see :func:`load_tile`.

    PAIRS: ``v_base`` points to pairs of bytes, and ``dv`` numbers them.
    """
    k = load_tile(k_base, k_at, valid, d, D, STRIDE_UNIT)
    if PAIRS:
        return k, load_tile(v_base, v_at, valid, dv, Dv // 2, STRIDE_UNIT // 2)
    else:
        return k, load_tile(v_base, v_at, valid, dv, Dv, STRIDE_UNIT)


@triton.jit
def attend(
    q, fit, k, v, valid, scale, m, l, acc, acc_odd,
    E4M3: tl.constexpr, FIT: tl.constexpr, PAIRS: tl.constexpr, UPFRONT: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a tile of keys: the online softmax's maximum, sum and accumulators, updated.

    Args:
        q ``[BLOCK_G, BLOCK_D]``; k ``[BLOCK_L, BLOCK_D]``; v ``[BLOCK_L, BLOCK_DV]``, or pairs of bytes (``PAIRS``).
        fit ``[BLOCK_G]``: what ``q`` was divided by to fit fp16; read only if ``FIT``.
        m, l, acc: as for :func:`softmax_step`.
        acc_odd: the accumulator of odd columns; changed only if ``PAIRS``.
        UPFRONT: wait for keys and values here, where they are used, so that both loads are issued before.
    """
    if UPFRONT:
        k = not_before(k)
    if E4M3:
        k = half_of(k)
    if FIT:
        scores = tl.dot(q, tl.trans(k)) * (fit * (scale * 1.4426950408889634))[:, None]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
    scores = tl.where(valid[None, :], scores, float("-inf"))  # [BLOCK_G, BLOCK_L]
    m_old = m
    m, l, acc, p = softmax_step(scores, m, l, acc)
    if UPFRONT:
        v = not_before(v)
    if PAIRS:
        acc, acc_odd = add_pairs(p, v, acc, acc_odd, m_old, m)
    else:
        if E4M3:
            v = half_of(v)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
    return m, l, acc, acc_odd
