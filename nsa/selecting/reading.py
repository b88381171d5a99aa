"""Where the queries and index keys of a call lie, for the kernels that choose blocks.

An index key is a row of ``k``. Key ``i`` stands for the tokens ``i * STRIDE`` to ``i * STRIDE + WINDOW - 1`` of its
sequence, and a query at position ``t`` may see it if none of them is behind ``t``. The rows of a tile are its query
heads: row ``r`` has head ``r // LB`` of the list, and of ``LB = LISTS * TOKENS`` pairs of a list and a token the pair
``r % LB``.
"""

import triton
import triton.language as tl

from nsa.kernels.key_major.kernel import query_offset
from nsa.kernels.shared.e4m3 import fit_half, half_of
from nsa.kernels.shared.sequences import (
    CACHE,
    RAGGED,
    VARLEN,
    filled_keys,
    find_sequence,
    find_without_loop,
    last_query,
    sequence_keys,
)

MAX = tl.constexpr(0)
RELU = tl.constexpr(1)
SOFTMAX = tl.constexpr(2)

RUNTIME = "B S rows end lists tile0 run pages width splits n first newest".split()
RUNTIME += [f"stride_{axis}" for axis in "qb qs qh kb kn kh wb ws lb ls tb".split()]


@triton.jit
def tokens_of(tile, run, TOKENS: tl.constexpr):
    """First token of a tile, and one past its last. No tile takes tokens of two runs."""
    per_run = tl.cdiv(run, TOKENS)
    token0 = tile // per_run * run + tile % per_run * TOKENS
    return token0, tl.minimum(token0 + TOKENS, (tile // per_run + 1) * run)


@triton.jit
def find(token, B, S, cu_q_ptr, LAYOUT: tl.constexpr):
    """Sequence of a token; ``B`` for a token after the last sequence."""
    if LAYOUT == VARLEN:
        return find_sequence(cu_q_ptr, B, token, 128)
    elif LAYOUT == RAGGED:
        return find_without_loop(cu_q_ptr, B, token, 128)
    else:
        return token // S


@triton.jit
def sequence(
    seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """``(key0, keys, tokens, shift)`` of a sequence: its first index key (int64) and their number, how many tokens it
    has, and what makes a position of a token's number. A sequence from ``B`` on has none.
    """
    key0 = tl.zeros([], tl.int64)
    known = seq < B
    if LAYOUT == CACHE or LAYOUT == RAGGED:
        room = rows * STRIDE + WINDOW - 1
        tokens = filled_keys(tl.minimum(seq, tl.maximum(B - 1, 0)), room, cu_k_ptr) if LAYOUT == CACHE else 0
        if LAYOUT == RAGGED:
            tokens = tl.load(cu_k_ptr + seq, mask=known, other=0)
            tokens = tl.minimum(tl.maximum(tokens, 0), room).to(tl.int32)
        keys = tl.minimum(tl.where(tokens >= WINDOW, (tokens - WINDOW) // STRIDE + 1, 0), rows)
        end = (seq + 1) * S if LAYOUT == CACHE else last_query(cu_q_ptr, seq, known)
        shift = tokens - end
    elif LAYOUT == VARLEN:
        key0, keys = sequence_keys(seq, B, rows, cu_k_ptr)
        tokens = tl.where(known, keys * STRIDE + WINDOW - 1, 0)
        if WINDOW == 1:
            shift = tokens - last_query(cu_q_ptr, seq, known)
        else:
            begin = tl.load(cu_q_ptr + seq, mask=known & (seq > 0), other=0)
            shift = -tl.minimum(tl.maximum(begin, 0), 2147483647).to(tl.int32)
    else:
        keys = rows
        tokens = rows * STRIDE + WINDOW - 1
        shift = tokens - (seq + 1) * S if WINDOW == 1 else -seq * S
    return key0, keys, tokens, shift


@triton.jit
def position_of(token, valid, shift, tokens, pos_ptr):
    """Position of each token in its sequence; -1 for one that sees nothing."""
    if pos_ptr is None:
        position = token + shift
    else:
        position = tl.load(pos_ptr + token, mask=valid, other=-1)
    return tl.where(valid, tl.maximum(tl.minimum(position, tokens - 1), -1), -1).to(tl.int32)


@triton.jit
def keys_seen(position, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """How many index keys a query at ``position`` may see."""
    return tl.where(position + 1 >= WINDOW, (position + 1 - WINDOW) // STRIDE + 1, 0)


@triton.jit
def first_key(tile, SIZE: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """First index key of a tile."""
    return tile // PARTS * SIZE + tile % PARTS * N if PARTS else tile * N


@triton.jit
def page_of(table_row, key0, i, keys, pages, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Pages of the keys ``key0 + i``: one if the tile lies in one page, else ``[N]``. -1 if there is none.

    A tile's pages are looked up while the tile before it is computed, and carried to it. So Triton pipelines the loads
    of keys, and not the look-ups.
    """
    if PAGE and ONE_PAGE:
        page = tl.load(table_row + key0 // PAGE, mask=key0 < keys, other=-1)
        return tl.where((page >= 0) & (page < pages), page, -1).to(tl.int32)
    elif PAGE:
        key = key0 + i
        page = tl.load(table_row + key // PAGE, mask=key < keys, other=-1)
        return tl.where((page >= 0) & (page < pages), page, -1).to(tl.int32)
    else:
        return 0


@triton.jit
def load_keys(
    k_ptr, page, key0, i, keys, stride_kb, stride_kn, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Index keys ``key0 + i`` of a sequence, ``[N, BLOCK_D]``, transposed on request; and which of them exist, ``[N]``.

    ONE_PAGE: the tile lies in one page. MASKED: keys from ``keys`` on are not loaded.
    """
    key = key0 + i
    exists = key < keys
    if PAGE and ONE_PAGE:
        exists = key < tl.where(page >= 0, keys, 0)
        begin = tl.maximum(page, 0).to(tl.int64) * stride_kb + tl.cast(key0 % PAGE, tl.int64) * stride_kn
        at = i.to(tl.int64) * stride_kn
    elif PAGE:
        exists &= page >= 0
        begin = 0
        at = tl.maximum(page, 0).to(tl.int64) * stride_kb + (key % PAGE).to(tl.int64) * stride_kn
    else:
        begin = tl.cast(key0, tl.int64) * stride_kn
        at = i.to(tl.int64) * stride_kn
    k_ptr += begin * UNIT
    d = tl.arange(0, BLOCK_D)
    if TRANSPOSED:
        ptrs = k_ptr + at[None, :] * UNIT + d[:, None]
        wanted = exists[None, :] & (d[:, None] < D)
        inside = (d[:, None] < D) & (i[None, :] >= 0)
    else:
        ptrs = k_ptr + at[:, None] * UNIT + d[None, :]
        wanted = exists[:, None] & (d[None, :] < D)
        inside = (d[None, :] < D) & (i[:, None] >= 0)
    if MASKED:
        k = tl.load(ptrs, mask=wanted, other=0.0)
    elif BLOCK_D == D:
        k = tl.load(ptrs)
    else:
        k = tl.load(ptrs, mask=inside, other=0.0)
    if k.dtype == tl.float8e4nv:
        k = half_of(k)
    return k, exists


@triton.jit
def load_queries(
    q_ptr, token, head, valid, S, stride_qb, stride_qs, stride_qh, D: tl.constexpr, BLOCK_D: tl.constexpr,
    LAYOUT: tl.constexpr, UNIT: tl.constexpr, FIT: tl.constexpr,
):  # fmt: skip
    """Index queries ``[M, BLOCK_D]``, and the factor ``[M]`` by which their scores are too small."""
    d = tl.arange(0, BLOCK_D)
    at = query_offset(token, S, stride_qb, stride_qs, LAYOUT) + head.to(tl.int64) * stride_qh
    q = tl.load(q_ptr + at[:, None] * UNIT + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    if FIT:
        q, fit = fit_half(q)
    else:
        fit = tl.full([q.shape[0]], 1.0, tl.float32)
    return q, fit


@triton.jit
def in_registers(q, valid):
    """``q``, zeros where not valid, as it is already.

    The tensor cores read a left operand that was just loaded in shared memory, and one that was computed in registers,
    which is faster where a tile has many rows.
    """
    if q.dtype.primitive_bitwidth == 16 and q.shape[1] <= 128:  # else there are too few registers
        q = tl.where(valid[:, None], q, 0.0)
    return q


@triton.jit
def rows_of(
    end, lists, tile0, run,
    PER_KEY: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, LISTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The rows of a program's tile: ``(local, head_k, list0, token0, token1, token, head, g, valid)``.

    local: number of the tile in its pass. list0: its first list, of those of key head ``head_k``. The last four are
    ``[HEADS * LISTS * TOKENS]``: token, index head, that head's number in its list, and whether there is such a row.
    """
    PER_HEAD: tl.constexpr = (PER_KEY + LISTS - 1) // LISTS  # programs of a key head
    list_tiles = lists // PER_KEY * PER_HEAD
    local = tl.program_id(0) // list_tiles
    head_k = tl.program_id(0) % list_tiles // PER_HEAD
    list0 = tl.program_id(0) % list_tiles % PER_HEAD * LISTS
    token0, token1 = tokens_of(tile0 + local, run, TOKENS)
    token1 = tl.minimum(token1, end)
    r = tl.arange(0, HEADS * LISTS * TOKENS)
    token = token0 + r % TOKENS
    in_key = list0 + r // TOKENS % LISTS
    g = r // (LISTS * TOKENS)
    valid = (token < token1) & (in_key < PER_KEY) & (g < G)
    return local, head_k, list0, token0, token1, token, (head_k * PER_KEY + in_key) * G + g, g, valid


@triton.jit
def keys_from(
    k_ptr, head_k, key0, seq, B, stride_kb, stride_kn, stride_kh, PAGE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Pointer to the first index key of a sequence; with pages, to that of a page 0."""
    k_ptr += (tl.cast(head_k, tl.int64) * stride_kh + key0 * stride_kn) * UNIT
    if PAGE == 0:
        k_ptr += _known(seq, B) * stride_kb * UNIT
    return k_ptr


@triton.jit
def pages_of(table_ptr, seq, B, stride_tb):
    """A sequence's row of the page table."""
    return table_ptr + _known(seq, B) * stride_tb


@triton.jit
def _known(seq, B):
    """The number of a sequence, int64; that of the last for tokens after it, which see nothing."""
    return tl.cast(tl.minimum(seq, tl.maximum(B - 1, 0)), tl.int64)


@triton.jit
def among(token, seq, B, cu_q_ptr):
    """Which tokens of packed sequences are a sequence's."""
    first_token = tl.load(cu_q_ptr + seq, mask=(seq > 0) & (seq < B), other=0).to(tl.int32)
    return (token >= first_token) & (token < last_query(cu_q_ptr, seq, seq < B))
