"""Which keys each row reads: ranges, blocks and ``cu_seqlens`` as clamped spans, and utilities over them.

A *row* is one (query token, KV head). Everything here runs on the device of its inputs, without a Python loop over
rows. Spans are half-open ``[start, end)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.call import Call
from nsa.torch_modes import forward_mode, transforms_active
from nsa.validate import INDEX_DTYPES, check_blocks, check_packing, check_tensors


class RowSpans(NamedTuple):
    """Clamped spans of every row of a call.

    Attributes:
        starts: ``[tokens, HKV, n]`` int32, first key of each span, local to the row's sequence.
        ends: ``[tokens, HKV, n]`` int32, ``ends >= starts`` (an empty span has ``ends == starts``).
        batch: ``[tokens]`` int64, batch entry of K that the row reads (0 for varlen).
        offset: ``[tokens]`` int64, key at which the row's sequence begins (0 unless varlen).
    """

    starts: Tensor
    ends: Tensor
    batch: Tensor
    offset: Tensor

    def lengths(self) -> Tensor:
        """``[tokens, HKV]`` int64: the number of selected keys ``L``, duplicates counted."""
        return (self.ends - self.starts).sum(-1, dtype=torch.int64)


def key_limits(
    tokens: int,
    S: int,
    S_kv: int,
    *,
    causal: bool,
    device: torch.device,
    q_positions: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per query token: how many keys of its sequence it may see, and where that sequence lies.

    ``cache_seqlens``: ``[B]``, how many of the ``S_kv`` places of each batch entry hold keys.

    Returns:
        ``limit``, ``batch`` and ``offset`` (see :class:`RowSpans`), each ``[tokens]`` int64. A token after the last
        sequence of ``cu_seqlens`` sees nothing; the first begins at token 0.
    """
    token = torch.arange(tokens, device=device)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        seqlen_k = torch.full_like(token, S_kv)
        seqlen_q = torch.full_like(token, S)
        s = token % max(S, 1)
        batch, offset = token // max(S, 1), torch.zeros_like(token)
        if cache_seqlens is not None:
            seqlen_k = cache_seqlens.long().clamp(0, S_kv)[batch]
    else:
        B = cu_seqlens_q.shape[0] - 1
        if B == 0:
            zero = torch.zeros_like(token)
            return zero, zero, zero
        seq = torch.searchsorted(cu_seqlens_q[1:].long().contiguous(), token, right=True)
        inside = seq < B
        seq = seq.clamp(max=B - 1)
        begin_q, begin_k = (c.long()[:-1][seq] for c in (cu_seqlens_q, cu_seqlens_k))
        batch, offset = torch.zeros_like(token), begin_k.clamp(0, S_kv)
        seqlen_k = (cu_seqlens_k.long()[1:][seq].clamp(0, S_kv) - offset).clamp(min=0) * inside
        offset = offset * (seqlen_k > 0)  # a sequence without keys may begin past the last one: it points nowhere
        seqlen_q = cu_seqlens_q.long()[1:][seq] - begin_q
        s = token - begin_q
    if not causal:
        return seqlen_k, batch, offset
    t = seqlen_k - seqlen_q + s if q_positions is None else q_positions.reshape(-1).long()
    return torch.minimum(t, seqlen_k - 1).clamp(min=-1) + 1, batch, offset


def of_call(call: Call) -> RowSpans:
    """Clamped spans of a call."""
    q, k, table = call.q, call.k, call.block_table
    S_kv = k.shape[-3] if table is None else k.shape[1] * table.shape[1]
    limits = key_limits(
        math.prod(q.shape[:-2]), q.shape[-3], S_kv, causal=call.causal, device=q.device, q_positions=call.q_positions,
        cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, cache_seqlens=call.cache_seqlens,
    )  # fmt: skip
    return row_spans(call.ranges, call.block_indices, call.block_size, *limits)


def row_spans(
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    limit: Tensor,
    batch: Tensor,
    offset: Tensor,
) -> RowSpans:
    """Clamp a selection to what each token may see.

    Args:
        ranges: ``[..., HKV, n, 2]`` int32 or int64; any values, also reversed, negative or past the end.
        block_indices: ``[..., HKV, n]``; negative = padding, in any slot.
        block_size: keys per block.
        limit, batch, offset: from :func:`key_limits`.
    """
    if ranges is None:
        assert block_indices is not None and block_size is not None
        ranges = ranges_from_blocks(block_indices, block_size, None)
    flat = ranges.reshape(limit.shape[0], *ranges.shape[-3:])  # [tokens, HKV, n, 2]
    # Clamp in the dtype that came (int64 spans may be anything), only then narrow.
    top = limit.to(flat.dtype).view(-1, 1, 1)
    starts = torch.minimum(flat[..., 0].clamp(min=0), top)
    ends = torch.maximum(torch.minimum(flat[..., 1].clamp(min=0), top), starts)
    return RowSpans(starts.int(), ends.int(), batch, offset)


def gather_positions(starts: Tensor, ends: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """Key position of each selected slot.

    Args:
        starts, ends: ``[R, n]`` int32 clamped spans.
        L: slots per row; rows with fewer keys are padded, rows with more are cut.

    Returns:
        ``positions [R, L]`` int64 (0 where padded) and ``lengths [R]`` int64.
    """
    R, n = starts.shape
    spans = (ends - starts).long()
    after = spans.cumsum(-1)
    lengths = after[:, -1] if n else after.new_zeros(R)
    if n == 0 or L == 0:
        return after.new_zeros(R, L), lengths
    # Walking along a row the key grows by 1, and at a span's first slot it jumps from the previous span's end to the
    # span's start. Jumps of empty spans fall on the same slot and add up.
    jump = starts.long()
    jump[:, 1:] -= ends[:, :-1]
    steps = torch.ones(R, L + 1, dtype=torch.int64, device=starts.device)
    steps[:, 0] = 0
    steps.scatter_add_(1, (after - spans).clamp(max=L), jump)
    positions = steps[:, :L].cumsum(-1)
    slot = torch.arange(L, device=starts.device)
    return positions.masked_fill_(slot >= lengths[:, None], 0), lengths


def in_pages(
    block_table: Tensor, pages: int, page_size: int, batch: Tensor, position: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where keys of a paged cache lie: page, place in it, and which of them do.

    Args:
        block_table: ``[B, width]``, pages of each sequence. pages: how many there are. page_size: keys of one.
        batch, position: which sequence, and which key of it. valid: which of them count.

    Returns:
        ``page`` and ``place`` int64 (0 where there is none) and ``valid``, without the keys whose page does not exist.
    """
    if block_table.shape[1] == 0 or pages == 0:
        return torch.zeros_like(position), torch.zeros_like(position), torch.zeros_like(valid)
    page = block_table[batch.expand_as(position), position // page_size].long()
    valid = valid & (page >= 0) & (page < pages)
    return torch.where(valid, page, 0), position % page_size, valid


def flat_rows(x: Tensor, gaps: bool = True) -> tuple[Tensor, tuple[int, int, int]]:
    """View ``[B, S, H, D]`` as ``[rows, D]`` in memory order, with what lies between if that is whole rows.

    Dense memory is not copied, nor is half of a tensor (K and V in one) where no gradient is wanted.

    Args:
        gaps: rows may lie between those of ``x``; else they are all that there is.

    Returns:
        ``rows`` and factors ``(fb, fs, fh)``: the vector at ``[b, s, h]`` is ``rows[b * fb + s * fs + h * fh]``.
    """
    strides = x.stride()
    traced = torch.compiler.is_compiling() or transforms_active() or forward_mode()
    traced = traced or (torch.is_grad_enabled() and x.requires_grad)
    pitch = 0 if traced or not x.numel() or strides[3] != 1 else _pitch(x)
    if pitch >= x.shape[3]:
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides[:3], strict=True)) // pitch
        if gaps or last < math.prod(x.shape[:3]):
            fb, fs, fh = (stride // pitch for stride in strides[:3])
            return x.as_strided((last + 1, x.shape[3]), (pitch, 1)), (fb, fs, fh)
    # Dynamo cannot sort symbols: a traced call copies what is not in the usual order.
    order = [0, 1, 2] if torch.compiler.is_compiling() else sorted(range(3), key=lambda i: -strides[i])
    factors, step = [0, 0, 0], 1
    for i in reversed(order):
        factors[i] = step
        step *= x.shape[i]
    return x.permute(*order, 3).reshape(step, x.shape[3]), (factors[0], factors[1], factors[2])


def _pitch(x: Tensor) -> int:
    """Elements of which the vectors of ``x`` begin multiples from the first; 0 for a lone one."""
    return math.gcd(*(stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1))


def max_length(lengths: Tensor, max_selected: int | None) -> tuple[int, bool]:
    """The longest row, and whether shorter ones need a mask.

    With ``max_selected`` nothing is read from the device. Without it this is the one sync of a packed call, which
    CUDA graph capture and ``torch.compile`` forbid.
    """
    if max_selected is not None:
        return max_selected, True
    if lengths.numel() == 0:
        return 0, False
    if torch.compiler.is_compiling() or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(
            "packing needs the longest row on the host: expected max_selected=<int> under torch.compile or CUDA graph "
            "capture, got None"
        )
    shortest, longest = torch.stack(lengths.aminmax()).tolist()  # the one sync
    return int(longest), bool(shortest != longest)


class PackedRows(NamedTuple):
    """Rows with their selected keys side by side.

    Attributes:
        K: ``[N, L, D]``, zero past a row's length; ``N = B * S * HKV`` rows ordered batch, position, head.
        V: ``[N, L, Dv]``, likewise.
        lengths: ``[N]`` int64, how many keys of each row are in ``K``: at most ``L``.
    """

    K: Tensor
    V: Tensor
    lengths: Tensor


class Pages(NamedTuple):
    """Of a paged cache: what turns a key's position into the page it lies in."""

    table: Tensor  # [B, width]
    pages: int
    page_size: int
    batch: Tensor  # [N], whose page table a row reads
    k_jump: int  # rows of K from page to page
    v_jump: int


class Gather(NamedTuple):
    """What packing needs of one call, for any slice of its rows."""

    starts: Tensor  # [N, n]
    ends: Tensor  # [N, n]
    K: Tensor  # [rows of K, D]
    V: Tensor  # [rows of V, Dv]
    k_first: Tensor  # [N], row of K at which a row's sequence begins
    v_first: Tensor
    k_step: int
    v_step: int
    zero_row: bool  # the last row of K and of V is zero, for padding to point at
    pages: Pages | None = None

    def buffers(self, rows: int, L: int) -> tuple[Tensor, Tensor]:
        """Memory for :meth:`pack` to write ``rows`` rows to, again and again: on a CPU new pages cost as much."""
        return self.K.new_empty(rows * L, self.K.shape[1]), self.V.new_empty(rows * L, self.V.shape[1])

    def pack(
        self, rows: slice, L: int, masked: bool, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(K [R, L, D], V [R, L, Dv], valid [R, L])`` of some rows; unselected slots are zero if ``masked``."""
        positions, lengths = gather_positions(self.starts[rows], self.ends[rows], L)
        valid = torch.arange(L, device=positions.device) < lengths[:, None]
        page, pages = None, self.pages
        if pages is not None:
            batch = pages.batch[rows, None]
            page, positions, valid = in_pages(pages.table, pages.pages, pages.page_size, batch, positions, valid)
        # Padding must not let a key that was not selected (it may be NaN) meet a zero weight.
        padding = ~valid if masked else None

        def packed(x: Tensor, first: Tensor, step: int, jump: int, memory: Tensor | None) -> Tensor:
            index = (positions * step).add_(first[rows, None])
            if page is not None:
                index.add_(page, alpha=jump)
            if padding is not None and self.zero_row:
                index.masked_fill_(padding, x.shape[0] - 1)
            out = take_rows(x, index, None if memory is None else memory[: index.numel()])
            return out.masked_fill_(padding[..., None], 0) if padding is not None and not self.zero_row else out

        k_memory, v_memory = into or (None, None)
        k_jump, v_jump = (0, 0) if pages is None else (pages.k_jump, pages.v_jump)
        K = packed(self.K, self.k_first, self.k_step, k_jump, k_memory)
        return K, packed(self.V, self.v_first, self.v_step, v_jump, v_memory), valid


def take_rows(x: Tensor, index: Tensor, into: Tensor | None = None) -> Tensor:
    """``x[index]`` for ``x [rows, D]``: ``[*index.shape, D]``, bitwise repeatable in its gradient too.

    ``into``: ``[index.numel(), D]``, memory for the result where no gradient is wanted.
    """
    flat = index.reshape(-1)
    if forward_mode():  # other ways lose tangents, or refuse them
        out = x[flat]
    elif x.requires_grad and torch.is_grad_enabled():
        # Gradients add with atomics after index_select on a GPU, after indexing in several threads of a CPU.
        out = x[flat] if x.is_cuda else F.embedding(flat, x)
    elif x.is_cuda and not torch.compiler.is_compiling() and _sixteen_bytes(x):
        # 16 bytes a thread, all threads busy: 2.2 TB/s on an H100, where every index_select of 128 to 256 bytes a row
        # takes a kernel with one row a block and reaches 0.4 to 0.8.
        out = torch.take_along_dim(x.view(torch.complex128), flat[:, None], 0).view(x.dtype)
    else:
        out = torch.index_select(x, 0, flat, out=into)
    return out.view(*index.shape, x.shape[1])


def _sixteen_bytes(x: Tensor) -> bool:
    """Whether rows are of whole 16 bytes and begin on such boundaries."""
    return all(n * x.element_size() % 16 == 0 for n in (x.shape[1], x.stride(0), x.storage_offset()))


def gather_for(k: Tensor, v: Tensor, spans: RowSpans, L: int, block_table: Tensor | None = None) -> Gather:
    """Prepare packing ``L`` slots a row of ``spans`` from ``k`` and ``v``, ``[B, S_kv, HKV, D]`` or ``[T, HKV, D]``.

    With ``block_table`` they are ``[pages, page_size, HKV, D]``, and rows must be packed ``masked``.
    """
    k4, v4 = (x if x.dim() == 4 else x[None] for x in (k, v))
    HKV, n = spans.starts.shape[1:]
    head = torch.arange(HKV, device=k.device)
    N = spans.batch.shape[0] * HKV
    # A zero row costs a copy of K and V; without it the packed copy is masked, which is a pass over that.
    zero_row = k4[..., 0].numel() * 2 <= N * L
    flat, jumps = [], []
    for x in (k4, v4):
        rows, (fb, fs, fh) = flat_rows(x, gaps=not zero_row)  # they would be copied, too
        entry = spans.batch * fb if block_table is None else torch.zeros_like(spans.batch)
        first = (entry + spans.offset * fs)[:, None] + head * fh
        jumps.append(fb)
        if zero_row or rows.shape[0] == 0:
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        flat.append((rows, first.reshape(-1), fs))
    (K, k_first, k_step), (V, v_first, v_step) = flat
    starts, ends = spans.starts.reshape(N, n), spans.ends.reshape(N, n)
    pages = None
    if block_table is not None:
        pages = Pages(block_table, k.shape[0], k.shape[1], spans.batch.repeat_interleave(HKV), jumps[0], jumps[1])
    return Gather(starts, ends, K, V, k_first, v_first, k_step, v_step, zero_row, pages)


def pack_rows(k: Tensor, v: Tensor, ranges: Tensor, *, max_selected: int | None = None) -> PackedRows:
    """Copy each row's selected keys and values next to each other.

    Args:
        k: ``[B, S_kv, HKV, D]``. v: ``[B, S_kv, HKV, Dv]``. Floating, of one dtype and device, any strides.
        ranges: ``[B, S, HKV, n, 2]`` int32 or int64, half-open spans, clamped to ``[0, S_kv]`` (not causally).
        max_selected: host bound on the keys of a row; ``L`` of the result. Without it, one device sync. Of a row that
            selects more, the first ``max_selected`` keys are packed.

    Returns:
        ``K [N, L, D]``, ``V [N, L, Dv]`` and ``lengths [N]`` int64, see :class:`PackedRows`. Keys lie in the order of
        their spans, as often as these name them. ``L`` is ``max_selected``, or else the longest row.

    Raises:
        TypeError: an argument that is no tensor, or a dtype or ``max_selected`` of another type than said.
        ValueError: a shape or device that does not fit ``k``, or ``max_selected < 0``.
        RuntimeError: without ``max_selected`` under ``torch.compile`` or CUDA graph capture.
    """
    check_tensors(k=k, v=v, ranges=ranges)
    check_packing(k, v, ranges, max_selected)
    B, S = ranges.shape[:2]
    limit, batch, offset = key_limits(B * S, S, k.shape[1], causal=False, device=k.device)
    spans = row_spans(ranges, None, None, limit, batch, offset)
    lengths = spans.lengths().view(-1)
    L, masked = max_length(lengths, max_selected)
    K, V, _ = gather_for(k, v, spans, L).pack(slice(None), L, masked)
    return PackedRows(K, V, lengths if max_selected is None else lengths.clamp_(max=L))


def ranges_from_blocks(block_indices: Tensor, block_size: int, seqlen_k: int | None = None) -> Tensor:
    """Spans of blocks: block ``b`` is ``[b * block_size, (b + 1) * block_size)``.

    Args:
        block_indices: ``[..., n]`` int32 or int64; negative = padding, in any slot, becomes the empty span ``[0, 0)``.
        block_size: keys per block, at least 1.
        seqlen_k: clamp ends to this, 0 or more, and drop blocks that begin past it.

    Returns:
        ``[..., n, 2]`` in the dtype of ``block_indices``.

    Raises:
        TypeError: ``block_indices`` is no tensor or of another dtype, or a number is no int.
        ValueError: ``block_size < 1`` or ``seqlen_k < 0``.
    """
    check_blocks(block_indices, block_size, seqlen_k)
    top = torch.iinfo(block_indices.dtype).max
    if seqlen_k is not None:
        top = min(top, seqlen_k)
    block_size = min(block_size, max(top, 1))
    # A block so far out that its end would overflow lies past any tensor: it is empty, as is padding.
    inside = (block_indices >= 0) & (block_indices < top // block_size + int(seqlen_k is not None))
    start = torch.where(inside, block_indices, 0) * block_size
    length = torch.where(inside, (top - start).clamp(max=block_size), 0)
    return torch.stack((start, start + length), -1)


def merge_ranges(ranges: Tensor) -> Tensor:
    """The set of keys each row's spans cover, as sorted, disjoint, non-adjacent spans.

    Args:
        ranges: ``[..., n, 2]`` int32 or int64, half-open; empty and reversed spans cover nothing.

    Returns:
        ``[..., n, 2]`` in the dtype of ``ranges``, the merged spans first, then empty spans ``[0, 0)``.

    Raises:
        TypeError: ``ranges`` is no tensor.
        ValueError: ``ranges`` is of another dtype or shape.
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
    start, order = start.masked_fill(empty, big).sort(-1)  # empty spans go last
    end = end.masked_fill(empty, small).gather(-1, order)
    reach = end.cummax(-1).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[:, 1:] = start[:, 1:] > reach[:, :-1]
    group = opens.cumsum(-1) - 1
    merged_start = torch.full_like(start, big).scatter_reduce_(-1, group, start, "amin")
    merged_end = torch.full_like(end, small).scatter_reduce_(-1, group, end, "amax")
    used = merged_end > merged_start
    return torch.stack((merged_start * used, merged_end * used), -1).view(ranges.shape)
