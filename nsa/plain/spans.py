"""Turns the selection of a call into clamped spans, packs the keys in the spans, and merges spans.

A *row* is one (query token, KV head). Spans are half-open ``[start, end)``. All functions run on the device of their
inputs, without a Python loop over rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.call import Call
from nsa.torch_modes import capturing, forward_mode, odd, transforms_active, without_grad
from nsa.validate import INDEX_DTYPES, check_blocks, check_packing, check_tensors


class RowSpans(NamedTuple):
    """Clamped spans of every row of a call.

    Attributes:
        starts: ``[tokens, HKV, n]`` int32, first key of each span, as its position in the token's sequence.
        ends: ``[tokens, HKV, n]`` int32, ``ends >= starts``; equal for an empty span.
        batch: ``[tokens]`` int64, the batch entry of K that the token reads; 0 for varlen.
        offset: ``[tokens]`` int64, the key of K at which the token's sequence begins; 0 unless varlen.
    """

    starts: Tensor
    ends: Tensor
    batch: Tensor
    offset: Tensor

    def lengths(self) -> Tensor:
        """``L`` of each row, ``[tokens, HKV]`` int64. A key that is selected twice counts twice."""
        return (self.ends - self.starts).sum(-1, dtype=torch.int64)


def key_limits(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """How many keys of its sequence each query token may see, and where that sequence is in K.

    Returns:
        ``limit``, ``batch`` and ``offset``, each ``[tokens]`` int64; see :class:`RowSpans` for the last two. The first
        sequence of ``cu_seqlens`` begins at token 0. A token after the last sequence sees no key.
    """
    cu_seqlens_q, cu_seqlens_k, table = call.cu_seqlens_q, call.cu_seqlens_k, call.block_table
    S, S_kv = call.q.shape[-3], call.k.shape[-3] * (1 if table is None else table.shape[1])
    token = torch.arange(math.prod(call.q.shape[:-2]), device=call.q.device)
    zero, B = torch.zeros_like(token), -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if B == 0:
        return zero, zero, zero
    if cu_seqlens_q is not None and call.cache_seqlens is not None:
        ends = cu_seqlens_q[1:].long().clamp(min=0)
        seq = torch.searchsorted(ends.sort().values, token, right=True)  # counts the ends, in whatever order they are
        batch, offset = seq.clamp(max=B - 1), zero
        seqlen_k = call.cache_seqlens.long().clamp(0, S_kv)[batch] * (seq < B)
        s, seqlen_q = token, ends[batch]  # both counted from token 0
    elif cu_seqlens_q is None or cu_seqlens_k is None:
        seqlen_k = torch.full_like(token, S_kv)
        seqlen_q = torch.full_like(token, S)
        s = token % max(S, 1)
        batch, offset = token // max(S, 1), zero
        if call.cache_seqlens is not None:
            seqlen_k = call.cache_seqlens.long().clamp(0, S_kv)[batch]
    else:
        seq = torch.searchsorted(cu_seqlens_q[1:].long().contiguous(), token, right=True)
        inside = seq < B
        seq = seq.clamp(max=B - 1)
        begin_q, begin_k = (c.long()[:-1][seq] for c in (cu_seqlens_q, cu_seqlens_k))
        batch, offset = zero, begin_k.clamp(0, S_kv)
        seqlen_k = (cu_seqlens_k.long()[1:][seq].clamp(0, S_kv) - offset).clamp(min=0) * inside
        offset = offset * (seqlen_k > 0)  # a sequence without keys may begin after the last key of K
        seqlen_q = cu_seqlens_q.long()[1:][seq] - begin_q
        s = token - begin_q
    if not call.causal:
        return seqlen_k, batch, offset
    t = seqlen_k - seqlen_q + s if call.q_positions is None else call.q_positions.reshape(-1).long()
    return torch.minimum(t, seqlen_k - 1).clamp(min=-1) + 1, batch, offset


def of_call(call: Call) -> RowSpans:
    """The spans of a call, clamped to the keys that each token may see."""
    ranges = call.ranges
    if ranges is None:
        assert call.block_indices is not None and call.block_size is not None
        ranges = ranges_from_blocks(call.block_indices, call.block_size)
    return row_spans(ranges, *key_limits(call))


def row_spans(ranges: Tensor, limit: Tensor, batch: Tensor, offset: Tensor) -> RowSpans:
    """Clamp spans to ``[0, limit)`` of each token.

    Args:
        ranges: ``[..., HKV, n, 2]`` int32 or int64 of any values; spans may be reversed, negative or too long.
        limit, batch, offset: from :func:`key_limits`.
    """
    flat = ranges.reshape(limit.shape[0], *ranges.shape[-3:])  # [tokens, HKV, n, 2]
    top = limit.to(flat.dtype).view(-1, 1, 1)  # clamps in the dtype of `ranges`: int64 values may not fit int32
    starts = torch.minimum(flat[..., 0].clamp(min=0), top)
    ends = torch.maximum(torch.minimum(flat[..., 1].clamp(min=0), top), starts)
    return RowSpans(starts.int(), ends.int(), batch, offset)


def gather_positions(starts: Tensor, ends: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """The key that each slot of a packed row holds.

    Args:
        starts, ends: ``[R, n]`` int32 clamped spans.
        L: slots per row. Rows with fewer keys are padded; of rows with more keys, the last ones are dropped.

    Returns:
        ``positions [R, L]`` int64, and ``valid [R, L]``; 0 and False in padded slots.
    """
    R, n = starts.shape
    spans = (ends - starts).long()
    after = spans.cumsum(-1)
    if n == 0 or L == 0:
        return after.new_zeros(R, L), after.new_zeros(R, L, dtype=torch.bool)
    # From slot to slot the key grows by 1. At the first slot of a span it jumps from the end of the previous span to
    # the start of this one. The jumps of empty spans are at the same slot and add up.
    jump = starts.long()
    jump[:, 1:] -= ends[:, :-1]
    steps = torch.ones(R, L + 1, dtype=torch.int64, device=starts.device)
    steps[:, 0] = 0
    steps.scatter_add_(1, (after - spans).clamp(max=L), jump)
    positions = steps[:, :L].cumsum(-1)
    valid = torch.arange(L, device=starts.device) < after[:, -1:]
    return positions.masked_fill_(~valid, 0), valid


def in_pages(
    block_table: Tensor, pages: int, page_size: int, batch: Tensor, position: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up where keys are in a paged cache of ``pages`` pages.

    Args:
        block_table: ``[B, width]``, the pages of each sequence.
        batch, position: sequence of each key, and its position in the sequence. valid: False for padding.

    Returns:
        ``page`` int64 (0 if not valid), ``place`` int64, the key's index in its page, and ``valid``, which is False
        also for keys whose page is outside ``[0, pages)``.
    """
    if 0 in block_table.shape or pages == 0:
        return torch.zeros_like(position), torch.zeros_like(position), torch.zeros_like(valid)
    page = block_table[batch.expand_as(position), position // page_size].long()
    valid = valid & (page >= 0) & (page < pages)
    return torch.where(valid, page, 0), position % page_size, valid


def flat_rows(x: Tensor, gaps: bool = True) -> tuple[Tensor, tuple[int, int, int]]:
    """View ``x [B, S, H, D]`` as rows of ``D`` elements in memory order. Copies ``x`` if there is no such view.

    Dense tensors are not copied. K that shares a tensor with V is not copied either, unless it needs a gradient. With
    ``gaps`` the view may contain rows that are not in ``x``, those of V for example.

    Returns:
        ``rows [rows, D]`` and factors ``(fb, fs, fh)``: ``x[b, s, h]`` is ``rows[b * fb + s * fs + h * fh]``.
    """
    strides = x.stride()
    traced = torch.compiler.is_compiling() or transforms_active() or forward_mode()
    traced = traced or (torch.is_grad_enabled() and x.requires_grad)
    pitch = 0  # elements from a row to the next
    if not traced and x.numel() and strides[3] == 1:
        pitch = math.gcd(*(stride for size, stride in zip(x.shape[:3], strides[:3], strict=True) if size > 1))
    if pitch >= x.shape[3]:
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides[:3], strict=True)) // pitch
        if gaps or last < math.prod(x.shape[:3]):
            fb, fs, fh = (stride // pitch for stride in strides[:3])
            return x.as_strided((last + 1, x.shape[3]), (pitch, 1)), (fb, fs, fh)
    # Dynamo cannot sort symbolic strides, so a traced call copies a tensor whose dimensions are not in this order.
    order = [0, 1, 2] if torch.compiler.is_compiling() else sorted(range(3), key=lambda i: -strides[i])
    factors, step = [0, 0, 0], 1
    for i in reversed(order):
        factors[i] = step
        step *= x.shape[i]
    return x.permute(*order, 3).reshape(step, x.shape[3]), (factors[0], factors[1], factors[2])


def max_length(lengths: Tensor, max_selected: int | None) -> tuple[int, bool]:
    """``(L, masked)``: the slots of a packed row, and whether rows may have fewer keys than that.

    With ``max_selected`` nothing is read from the device. Without it the longest row is read, which is the only sync
    of a packed call.

    Raises:
        RuntimeError: the call would sync under ``torch.compile`` or CUDA graph capture, or the values are fake.
    """
    if max_selected is not None:
        return max_selected, True
    if lengths.numel() == 0:
        return 0, False
    if not readable(lengths):
        raise RuntimeError(
            "packing needs the longest row on the host: expected max_selected=<int> under torch.compile or CUDA graph "
            "capture, and for fake tensors, got None"
        )
    shortest, longest = torch.stack(lengths.aminmax()).tolist()
    return int(longest), bool(shortest != longest)


def readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now."""
    if torch.compiler.is_compiling():
        return False
    x = without_grad(x)
    if x.is_meta or odd(x):
        return False
    return not capturing(x)


class PackedRows(NamedTuple):
    """The selected keys and values of each row, side by side.

    Attributes:
        K: ``[N, L, D]``, 0 after a row's last key. The ``N = B * S * HKV`` rows are ordered by batch, position, head.
        V: ``[N, L, Dv]``, likewise.
        lengths: ``[N]`` int64, keys of each row in ``K``, at most ``L``.
    """

    K: Tensor
    V: Tensor
    lengths: Tensor


class Source(NamedTuple):
    """K or V of a call, as rows to gather from."""

    rows: Tensor  # [rows, D]; with `Gather.zero_row` the last row is zero
    first: Tensor  # [N], for each packed row the row of this tensor with the first key of its sequence
    step: int  # rows from a key to the next
    jump: int  # rows from a page to the next; without pages from a batch entry to the next


class Pages(NamedTuple):
    """Where the keys of a paged cache are."""

    block_table: Tensor  # [B, width]
    pages: int
    page_size: int  # keys
    batch: Tensor  # [N], the sequence of each packed row


class Gather(NamedTuple):
    """What is needed to pack any slice of the rows of a call."""

    starts: Tensor  # [N, n]
    ends: Tensor  # [N, n]
    k: Source
    v: Source
    zero_row: bool  # padded slots read a zero row; else they are set to zero after the copy
    pages: Pages | None

    def buffers(self, rows: int, L: int) -> tuple[Tensor, Tensor]:
        """Memory for :meth:`pack` to reuse. On a CPU the page faults of new memory take as long as the copy."""
        K, V = (x.rows.new_empty(rows * L, x.rows.shape[1]) for x in (self.k, self.v))
        return K, V

    def pack(
        self, rows: slice, L: int, masked: bool, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(K [R, L, D], V [R, L, Dv], valid [R, L])`` of some rows. If ``masked``, padded slots are zero."""
        positions, valid = gather_positions(self.starts[rows], self.ends[rows], L)
        page = None
        if self.pages is not None:
            table, pages, page_size, batch = self.pages
            page, positions, valid = in_pages(table, pages, page_size, batch[rows, None], positions, valid)
        padding = ~valid if masked else None  # padded slots must be 0: their weight is 0, but 0 * NaN would be NaN

        def packed(x: Source, memory: Tensor | None) -> Tensor:
            index = (positions * x.step).add_(x.first[rows, None])
            if page is not None:
                index.add_(page, alpha=x.jump)
            if padding is not None and self.zero_row:
                index.masked_fill_(padding, x.rows.shape[0] - 1)
            out = take_rows(x.rows, index, None if memory is None else memory[: index.numel()])
            return out.masked_fill_(padding[..., None], 0) if padding is not None and not self.zero_row else out

        k_memory, v_memory = into or (None, None)
        return packed(self.k, k_memory), packed(self.v, v_memory), valid


def take_rows(x: Tensor, index: Tensor, into: Tensor | None = None) -> Tensor:
    """``x[index]``, ``[*index.shape, D]``, for ``x [rows, D]``. Its gradient is bitwise equal from run to run.

    Args:
        into: ``[index.numel(), D]``, memory that the result may use; for calls without gradients.
    """
    flat = index.reshape(-1)
    if forward_mode():  # the other ways lose tangents or raise
        out = x[flat]
    elif x.requires_grad and torch.is_grad_enabled():
        # Two gradients differ from run to run: index_select's on a GPU (atomics), and indexing's on a CPU (threads).
        out = x[flat] if x.is_cuda else F.embedding(flat, x)
    elif x.is_cuda and not torch.compiler.is_compiling() and sixteens(x):
        # Each thread copies 16 bytes: 2.2 TB/s on an H100. For rows of 128 to 256 bytes, index_select uses a kernel
        # with one row a block, which reaches 0.4 to 0.8 TB/s.
        out = torch.take_along_dim(x.view(torch.complex128), flat[:, None], 0).view(x.dtype)
    else:
        out = torch.index_select(x, 0, flat, out=into)
    return out.view(*index.shape, x.shape[1])


def sixteens(x: Tensor) -> bool:
    """Whether the rows of ``x [rows, D]`` are whole elements of 16 bytes, as ``x.view(complex128)`` takes them."""
    whole = (x.shape[1], x.stride(0), x.storage_offset())
    return x.stride(1) == 1 and all(n * x.element_size() % 16 == 0 for n in whole) and aligned(x)


def aligned(x: Tensor) -> bool:
    """Whether the memory of ``x`` begins at a multiple of 16 bytes. False if ``x`` has no memory of its own.

    The storage offset does not tell: a slice that another library passes by DLPack has an offset of 0.
    """
    return not odd(x) and x.data_ptr() % 16 == 0


def gather_for(k: Tensor, v: Tensor, spans: RowSpans, L: int, block_table: Tensor | None = None) -> Gather:
    """Prepare to pack ``L`` slots a row.

    Args:
        k, v: ``[B, S_kv, HKV, D]`` or ``[T, HKV, D]``. With ``block_table`` they are ``[pages, page_size, HKV, D]``,
            and rows must then be packed ``masked``.
    """
    k4, v4 = (x if x.dim() == 4 else x[None] for x in (k, v))
    HKV, n = spans.starts.shape[1:]
    N = spans.batch.shape[0] * HKV
    head = torch.arange(HKV, device=k.device)
    # Adding a zero row copies K and V. Without it, padded slots are zeroed in one more pass over the packed copy.
    zero_row = k4[..., 0].numel() * 2 <= N * L

    def source(x: Tensor) -> Source:
        rows, (fb, fs, fh) = flat_rows(x, gaps=not zero_row)  # gaps would be copied with the zero row
        entry = spans.batch * fb if block_table is None else torch.zeros_like(spans.batch)
        first = (entry + spans.offset * fs)[:, None] + head * fh
        if zero_row or rows.shape[0] == 0:
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        return Source(rows, first.reshape(-1), fs, fb)

    starts, ends = spans.starts.reshape(N, n), spans.ends.reshape(N, n)
    pages = None
    if block_table is not None:
        pages = Pages(block_table, k.shape[0], k.shape[1], spans.batch.repeat_interleave(HKV))
    return Gather(starts, ends, source(k4), source(v4), zero_row, pages)


def pack_rows(k: Tensor, v: Tensor, ranges: Tensor, *, max_selected: int | None = None) -> PackedRows:
    """Copy the selected keys and values of each row side by side.

    Args:
        k: ``[B, S_kv, HKV, D]``, fp16, bf16, fp32 or fp64, any strides.
        v: ``[B, S_kv, HKV, Dv]``, dtype and device of ``k``, any strides.
        ranges: ``[B, S, HKV, n, 2]`` int32 or int64, half-open spans. They are clamped to ``[0, S_kv]``, not causally.
        max_selected: ``L`` of the result. A row that selects more keys is cut to its first ``max_selected`` ones. If
            None, ``L`` is the length of the longest row, which takes one device sync to read.

    Returns:
        :class:`PackedRows`: ``K [N, L, D]``, ``V [N, L, Dv]`` and ``lengths [N]``. Keys are in the order of their
        spans. A key in several spans is copied several times.

    Raises:
        TypeError: an argument is not a tensor, or a dtype or the type of ``max_selected`` is not as above.
        ValueError: a shape or device does not fit ``k``, or ``max_selected < 0``.
        RuntimeError: without ``max_selected`` under ``torch.compile`` or CUDA graph capture.
    """
    check_tensors(k=k, v=v, ranges=ranges)
    check_packing(k, v, ranges, max_selected)
    B, S = ranges.shape[:2]
    batch = torch.arange(B * S, device=k.device) // max(S, 1)
    spans = row_spans(ranges, torch.full_like(batch, k.shape[1]), batch, torch.zeros_like(batch))
    lengths = spans.lengths().view(-1)
    L, masked = max_length(lengths, max_selected)
    K, V, _ = gather_for(k, v, spans, L).pack(slice(None), L, masked)
    return PackedRows(K, V, lengths if max_selected is None else lengths.clamp_(max=L))


def ranges_from_blocks(block_indices: Tensor, block_size: int, seqlen_k: int | None = None) -> Tensor:
    """The spans of blocks: block ``b`` is ``[b * block_size, (b + 1) * block_size)``.

    Args:
        block_indices: ``[..., n]`` int32 or int64. A negative index, in any slot, is padding and gives ``[0, 0)``.
        block_size: keys per block, at least 1.
        seqlen_k: keys of the sequence, at least 0. Ends are clamped to this; blocks that begin at or after it give
            ``[0, 0)``.

    Returns:
        ``[..., n, 2]`` in the dtype of ``block_indices``.

    Raises:
        TypeError: ``block_indices`` is not a tensor or has another dtype, or a number is not an int.
        ValueError: ``block_size < 1`` or ``seqlen_k < 0``.
    """
    check_blocks(block_indices, block_size, seqlen_k)
    top = torch.iinfo(block_indices.dtype).max
    if seqlen_k is not None:
        top = min(top, seqlen_k)
    block_size = min(block_size, max(top, 1))
    # A block whose end would overflow the dtype is beyond any tensor. Its span is empty, as is that of padding.
    blocks = top // block_size if seqlen_k is None else -(-top // block_size)
    inside = (block_indices >= 0) & (block_indices < blocks)
    start = torch.where(inside, block_indices, 0) * block_size
    length = torch.where(inside, (top - start).clamp(max=block_size), 0)
    return torch.stack((start, start + length), -1)


def merge_ranges(ranges: Tensor) -> Tensor:
    """Merge the spans of each row, so that the result selects the same keys, each once.

    Args:
        ranges: ``[..., n, 2]`` int32 or int64, half-open. Empty and reversed spans select nothing.

    Returns:
        ``[..., n, 2]`` in the dtype of ``ranges``: spans that are sorted and neither overlap nor touch, followed by
        empty spans ``[0, 0)``.

    Raises:
        TypeError: ``ranges`` is not a tensor.
        ValueError: ``ranges`` has another dtype or shape.
    """
    check_tensors(ranges=ranges)
    if ranges.dim() < 2 or ranges.shape[-1] != 2 or ranges.dtype not in INDEX_DTYPES:
        raise ValueError(f"ranges: expected int32 or int64 [..., n, 2], got {ranges.dtype} {list(ranges.shape)}")
    if ranges.numel() == 0:
        return torch.zeros_like(ranges)
    flat = ranges.reshape(-1, *ranges.shape[-2:])
    big = torch.iinfo(ranges.dtype).max
    small = torch.iinfo(ranges.dtype).min
    start, end = flat.unbind(-1)
    empty = end <= start
    start, order = start.masked_fill(empty, big).sort(-1)  # puts empty spans last
    end = end.masked_fill(empty, small).gather(-1, order)
    reach = end.cummax(-1).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[:, 1:] = start[:, 1:] > reach[:, :-1]
    group = opens.cumsum(-1) - 1
    merged_start = torch.full_like(start, big).scatter_reduce_(-1, group, start, "amin")
    merged_end = torch.full_like(end, small).scatter_reduce_(-1, group, end, "amax")
    used = merged_end > merged_start
    return torch.stack((merged_start * used, merged_end * used), -1).view(ranges.shape)
