"""A tile of keys: where its keys lie in memory, loading keys and values, and attending to them."""

import triton
import triton.language as tl

from nsa.kernels.shared.compiler import not_before
from nsa.kernels.shared.e4m3 import add_pairs, half_of
from nsa.kernels.shared.softmax import softmax_step


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


@triton.jit
def expect_table(table_row, width):
    """Prefetch a row of the page table to L2, at most its first 128 lines. NVIDIA only."""
    LINE: tl.constexpr = 1024 // table_row.dtype.element_ty.primitive_bitwidth  # entries of a line
    at = tl.minimum(tl.arange(0, 128) * LINE, tl.maximum(width - 1, 0))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(table_row + at).to(tl.int64)], tl.int32, False, 1
    )
