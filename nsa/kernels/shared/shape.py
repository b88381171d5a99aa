"""The sizes, strides and layout of a call, derived once, in the form in which all kernels take them.

Imports no Triton. ``LAYOUT`` and ``SOURCE`` are explained in `sequences.py` and `spans.py`, whose
constants have these values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from nsa.call import Call
from nsa.kernels.shared import sizes

E4M3 = torch.float8_e4m3fn  # dtype that a cache may have instead of the dtype of its queries
MAX_GROUP = 128
WHOLE, RANGES, BLOCKS, TILED = range(4)  # SOURCE
BATCH, VARLEN, PACKED, CACHE, RAGGED = range(5)  # LAYOUT


class Shape(NamedTuple):
    """What shapes and strides say about a call. Sizes have the names of the kernels' arguments."""

    B: int  # sequences
    S: int
    S_kv: int  # keys of a sequence, the free room of a cache included; or of all sequences of a packed batch
    HKV: int
    G: int
    D: int
    Dv: int
    n: int  # spans or blocks of a row; 0 for packed rows
    tokens: int
    bound: int | None  # upper bound of the keys of a row that the host knows
    varlen: bool  # queries are packed
    page: int  # keys of a page; 0 without pages
    pages: int  # pages of the cache
    stride_tb: int  # entries from a row of the page table to the next; 0 without pages
    copies_table: bool  # the page table must be copied, because the entries of a row are not contiguous
    copies: bool  # the page table, a tensor of `Call.about_keys` or a scale is not contiguous, and must be copied
    layout: int  # BATCH, VARLEN, PACKED, CACHE or RAGGED
    source: int  # WHOLE, RANGES or BLOCKS
    packed: bool  # cu_seqlens say where sequences of keys begin
    strides: tuple[int, ...]  # (batch, position, head) of q, k, v and the output, divided by `unit`
    unit: int  # the common factor of all strides, at most 16
    like_q: bool  # a new output has the shape and strides of q
    k_step: int  # elements of k_scale from one KV head to the next: 0 for one number, or none
    v_step: int
    pairs: bool  # values are e4m3, and strides allow kernels to read them in pairs

    def without_output(self) -> Shape:
        """The shape for kernels that take no output, whose strides then have a common factor of their own."""
        flat = [s * self.unit for s in self.strides[:9]]
        unit = math.gcd(16, *flat)
        return self._replace(strides=tuple(s // unit for s in flat), unit=unit)


def shape_of(call: Call, bound: int | None = None) -> Shape:
    """The shape of a valid call. ``bound``: of the keys of a row, as validation found it."""
    q, k, v, selection = call.q, call.k, call.v, call.selection
    q_shape, k_shape, Dv = tuple(q.shape), tuple(k.shape), v.shape[-1]
    cu = call.cu_seqlens_k if call.cache_seqlens is None else call.cu_seqlens_q
    sequences = None if cu is None else cu.shape[0] - 1
    out_stride = contiguous((*q_shape[:-1], Dv)) if call.out is None else call.out.stride()
    like_q = Dv == q_shape[-1] and q.stride() == contiguous(q_shape)
    strides: list[tuple[int, ...]] = [q.stride(), k.stride(), v.stride(), out_stride]
    if selection is None:  # packed rows lack the axis of KV heads and, without sequences, that of positions
        k_shape = (*k_shape[:-1], 1, k_shape[-1])
        strides[1:3] = ((*x[:-1], 0, x[-1]) for x in strides[1:3])
        if sequences is None:
            q_shape = (q_shape[0], 1, *q_shape[1:])
            strides[::3] = ((x[0], 0, *x[1:]) for x in strides[::3])
    B, S = q_shape[:2] if len(q_shape) == 4 else (sequences or 0, q_shape[0])
    S_kv, HKV = k_shape[-3:-1]
    pages, page, stride_tb, copies_table = 0, 0, 0, False
    if call.block_table is not None:  # a slice `table[:, :width]` is read where it lies
        pages, page, width = k_shape[0], S_kv, call.block_table.shape[1]
        S_kv = page * width
        copies_table = width > 1 and call.block_table.stride()[1] != 1
        stride_tb = width if copies_table else call.block_table.stride()[0]
    layout = BATCH if sequences is None else PACKED if call.cu_seqlens_q is None else VARLEN
    if call.cache_seqlens is not None:
        layout = CACHE if sequences is None else RAGGED
    source, n = WHOLE, 0
    if selection is not None:
        source, n = (RANGES, selection.shape[-2]) if call.block_size is None else (BLOCKS, selection.shape[-1])
    flat = [s for x in strides for s in ((0,) if len(x) == 3 else ()) + tuple(x[:-1])]  # a 3-D tensor has no batch
    unit = math.gcd(16, *flat)
    scales = call.k_scale, call.v_scale
    copies = copies_table or not all(x is None or x.is_contiguous() for x in (*call.about_keys, *scales))
    return Shape(
        B, S, S_kv, HKV, q_shape[-2] // HKV, q_shape[-1], Dv, n, math.prod(q_shape[:-2]), bound,
        call.cu_seqlens_q is not None, page, pages, stride_tb, copies_table, copies, layout, source,
        call.cu_seqlens_k is not None, tuple(s // unit for s in flat), unit, like_q,
        *(int(x is not None and x.numel() > 1) for x in scales),
        v.dtype == E4M3 and unit % 2 == 0 and Dv % 2 == 0,
    )  # fmt: skip


def has_steps(call: Call, shape: Shape) -> bool:
    """Whether query-major serves sequences of at most `STEPS` queries in a launch of its own, since such queries seldom
    share blocks: in a ragged batch with blocks.

    Not if the call must be ``batch_invariant``, because the number of sequences decides tiles; nor if ``max_seqlen_q``
    is so small that every sequence must have more than `STEPS` queries.
    """
    if shape.layout != RAGGED or call.block_size is None or call.settings.batch_invariant:
        return False
    return call.max_seqlen_q is None or shape.tokens <= (shape.B - 1) * call.max_seqlen_q + sizes.STEPS


def prepared(call: Call, g: Shape, lse: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Tensors of a call as kernels take them.

    Returns:
        Where ``O`` and LSE go: what the call or ``lse`` brings, else new tensors; LSE is None if it is not wanted. Then
        the tensors that say which keys a row reads, contiguous: the selection, query positions, ends of sequences of
        queries, ends or lengths of sequences of keys, and the page table.
    """
    q, out, table = call.q, call.out, call.block_table
    if out is None:
        out = torch.empty_like(q) if g.like_q else q.new_empty((*q.shape[:-1], g.Dv))
    if call.return_lse and lse is None:
        lse = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    if g.copies:
        index = (x if x is None else x.contiguous() for x in call.about_keys)
        return out, lse, *index, table.contiguous() if table is not None and g.copies_table else table
    return out, lse, *call.about_keys, table


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
