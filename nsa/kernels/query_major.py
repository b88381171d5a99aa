"""Query-major forward: a program holds the query heads of one row and walks the row's keys where they lie.

One kernel, four span sources (dense rows, ``cu_seqlens`` rows, ranges, blocks): they differ in how a program learns its
next tile of key positions (``primitives``), the loop is written once. Source: NSA, arXiv 2502.11089, section 3.4 and
figure 3 (group-centric data loading); online softmax as in FlashAttention.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import settings
from nsa.kernels import launches, tiles
from nsa.kernels.clusters import exchange, merge_inbox, open_inbox, sending
from nsa.kernels.combine import combine
from nsa.kernels.launch import INT32_MAX, TRITON, Variant
from nsa.kernels.primitives import (
    BATCH,
    BLOCKS,
    CACHE,
    PACKED,
    RANGES,
    TILED,
    VARLEN,
    WHOLE,
    ask_each,
    ask_spans,
    clamp_span,
    expect_table,
    find_sequence,
    finish,
    gdc_launch_dependents,
    gdc_wait,
    in_page,
    key_of_each,
    key_positions,
    not_before,
    nothing_of,
    nothing_of_lanes,
    slots_of,
    slots_of_each,
    softmax_step,
    tile_in_pages,
    tile_start,
)

TUPLES = TRITON >= (3, 4)  # in kernels, as they are used here
CLUSTERS = TRITON >= (3, 6)  # before, launches tell of them in another way

# What varies from batch to batch must not compile a new kernel. Strides arrive divided by STRIDE_UNIT, which keeps
# what vector loads need to know of them without one variant per combination.
RUNTIME = [
    *("B", "S", "S_kv", "n", "block_size", "pages"),
    *(f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh ob os oh".split()),
]


@triton.jit(do_not_specialize=RUNTIME)
def _fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    part_ptr,
    sel_ptr,
    pos_ptr,
    cu_q_ptr,
    cu_k_ptr,
    table_ptr,
    B,
    S,
    S_kv,
    n,
    block_size,
    pages,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_ob,
    stride_os,
    stride_oh,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    SOURCE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PAGE: tl.constexpr,
    HKV: tl.constexpr,
    S_MANY: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    FAR: tl.constexpr,
    HOLD: tl.constexpr,
    HOLD_Q: tl.constexpr,
    SINGLE: tl.constexpr,
    EACH: tl.constexpr,
    SPLIT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SPANS: tl.constexpr,
    STREAM_Q: tl.constexpr,
    UPFRONT: tl.constexpr,
    CLUSTER: tl.constexpr,
    MINE: tl.constexpr,
    SHARED: tl.constexpr,
    SENDING: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()  # the merge may be set up; it waits for this kernel's end before it reads
    HEAD_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if CLUSTER:  # the programs that share a row are neighbours
        split = program % CLUSTER
        splits = CLUSTER
        program = program // CLUSTER
        programs = programs // CLUSTER
    row = program // HEAD_TILES
    head_tile = program % HEAD_TILES
    token = row // HKV
    head_kv = row % HKV

    if EARLY:
        gdc_wait()  # the kernel before it on the stream may still run: nothing in memory is touched before its end

    # First of all what decides which keys are read: the rest is worked out while it comes.
    if SOURCE != WHOLE:
        sel_row = sel_ptr + row.to(tl.int64) * n * (2 if SOURCE == RANGES else 1)
        if SINGLE and SOURCE == TILED:  # a program's tile is of one block, whatever the others are
            begin_of, end_of = ask_spans(sel_row, split // SINGLE, n, SOURCE)
        elif EACH:
            every = ask_each(sel_row, n, SPANS, SOURCE, HOLD)
        else:
            begin_of, end_of = ask_spans(sel_row, tl.arange(0, SPANS), n, SOURCE)
    if LAYOUT == CACHE:
        filled = tl.load(cu_k_ptr + (token // S if S_MANY else token).to(tl.int64))

    if CLUSTER:
        inbox = open_inbox(CLUSTER, MINE, BLOCK_DV, SHARED)

    # Whose row it is: where its query lies, and the keys of its sequence, [k_first, k_first + seqlen_k).
    if LAYOUT == BATCH or LAYOUT == CACHE:
        batch = (token // S if S_MANY else token).to(tl.int64)
        s = token % S if S_MANY else 0
        q_off = batch * stride_qb + tl.cast(s, tl.int64) * stride_qs
        o_off = batch * stride_ob + tl.cast(s, tl.int64) * stride_os
        k_off = batch * stride_kb
        v_off = batch * stride_vb
        if PAGE:
            k_off = tl.zeros([], tl.int64)
            v_off = tl.zeros([], tl.int64)
            table_row = table_ptr + batch * (S_kv // PAGE)
            if EARLY:
                expect_table(table_row, S_kv // PAGE)
        seqlen_k = S_kv
        t = S_kv - S + s  # bottom-right: the last query sees the last key
    else:
        seq = token
        if LAYOUT == VARLEN:
            seq = find_sequence(cu_q_ptr, B, token, 128)
        known = seq < B
        q_off = token.to(tl.int64) * stride_qs
        o_off = token.to(tl.int64) * stride_os
        k_first = tl.load(cu_k_ptr + seq, mask=known, other=0).to(tl.int64)
        k_last = tl.load(cu_k_ptr + seq + 1, mask=known, other=0).to(tl.int64)
        k_first = tl.minimum(tl.maximum(k_first, 0), S_kv)
        k_last = tl.minimum(tl.maximum(k_last, k_first), S_kv)
        k_off = k_first * stride_kn
        v_off = k_first * stride_vn
        seqlen_k = (k_last - k_first).to(tl.int32)
        t = seqlen_k - 1
        if CAUSAL:
            q_last = tl.load(cu_q_ptr + seq + 1, mask=known, other=0)
            t = (seqlen_k - q_last + token).to(tl.int32)
    limit = seqlen_k
    if CAUSAL:
        if pos_ptr is None:
            limit = tl.maximum(tl.minimum(t, seqlen_k - 1), -1) + 1
        else:
            position = tl.load(pos_ptr + token)
            limit = (tl.maximum(tl.minimum(position, seqlen_k - 1), -1) + 1).to(tl.int32)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    in_group = (g < HEADS) & (head_tile * HEADS + g < G)
    head = head_kv * G + head_tile * HEADS + g  # [BLOCK_G]

    q_ptrs = q_ptr + (q_off + head.to(tl.int64) * stride_qh)[:, None] * STRIDE_UNIT + d[None, :]
    q_mask = in_group[:, None] & (d[None, :] < D)
    if HOLD_Q:
        held = tl.load(q_ptrs, mask=q_mask, other=0.0)  # [BLOCK_G, BLOCK_D]
    k_off += tl.cast(head_kv, tl.int64) * stride_kh
    v_off += tl.cast(head_kv, tl.int64) * stride_vh
    k_base = k_ptr + k_off * STRIDE_UNIT
    v_base = v_ptr + v_off * STRIDE_UNIT

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G, BLOCK_L], tl.float32)  # added up over a tile's keys in the end
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)

    # A loop even where one chunk is all: what does not need the spans is worked out before it, while they come. So that
    # they are not waited for there, what is added to them is 0.
    if SOURCE == WHOLE:
        chunks = 1
    elif SINGLE and SOURCE == TILED:
        chunks = tl.minimum(n, 1)
    else:
        chunks = (n + SPANS - 1) // SPANS
    for chunk in range(0, chunks):
        visible = limit
        if SOURCE == WHOLE:
            total = limit
        else:
            here = 0
            if HOLD and EACH:
                here = nothing_of_lanes(chunk)
            elif HOLD:
                here = nothing_of(chunk)
            if LAYOUT == CACHE:  # no more than is there
                visible = tl.minimum(tl.maximum(filled + here, 0), S_kv).to(tl.int32)
                if CAUSAL:
                    visible = tl.maximum(visible - S + s + 1, 0)
            if SINGLE and SOURCE == TILED:
                start, visible = clamp_span(begin_of + here, end_of + here, visible, block_size, SOURCE)
                total = BLOCK_L
            elif EACH:
                shift, before, total = slots_of_each(every, here, visible, block_size, SPANS, SOURCE)
            else:
                start, before, length, total = slots_of(
                    begin_of + here, end_of + here, visible, block_size, SOURCE, BLOCK_L
                )
        first = 0
        last = total
        # This program's share of the chunk's selected slots, in whole tiles.
        if SPLIT and not (SINGLE and SOURCE == TILED):
            share = tl.cdiv(tl.cdiv(total, BLOCK_L), splits) * BLOCK_L
            first = tl.minimum(split * share, total)
            last = tl.minimum(first + share, total)
        # Queries are asked for together with the spans, or with every tile; else before the keys, but after the spans:
        # what is added is 0, or they would be loaded before the loop.
        if not STREAM_Q and not HOLD_Q:
            q = tl.load(q_ptrs + tl.minimum(chunk, 0) * 16, mask=q_mask, other=0.0)
        for tile in range(0 if SINGLE else first, BLOCK_L if SINGLE else last, BLOCK_L):
            begin = first if SINGLE else tile
            if HOLD_Q:
                q = not_before(held)  # nor is it waited for before the loop
            slot = begin + tl.arange(0, BLOCK_L)
            valid = slot < last
            if SOURCE == WHOLE:
                key = slot
            elif SOURCE == TILED:
                if SINGLE:
                    key = start + split % SINGLE * BLOCK_L
                else:
                    key = tile_start(begin, start, before, length)
                if PAGE and PAGE % BLOCK_L == 0:
                    stop = visible - key
                    k_page, v_page, key, exists = in_page(table_row, key, stop > 0, pages, stride_kb, stride_vb, PAGE)
                    valid = tl.arange(0, BLOCK_L) < tl.where(exists, stop, 0)
                    key = key + tl.arange(0, BLOCK_L)
                elif PAGE:
                    if BLOCK_L % PAGE == 0 and BLOCK_L <= 8 * PAGE:
                        k_page, v_page, key, valid = tile_in_pages(
                            table_row, key, visible, pages, stride_kb, stride_vb, PAGE, BLOCK_L
                        )
                    else:
                        key = key + tl.arange(0, BLOCK_L)
                        k_page, v_page, key, valid = in_page(
                            table_row, key, key < visible, pages, stride_kb, stride_vb, PAGE
                        )
                else:
                    key = key + tl.arange(0, BLOCK_L)
                    valid = key < visible
            else:
                if EACH:
                    key = key_of_each(slot, shift, before)
                else:
                    key = key_positions(slot, start, before, length)
                if PAGE:
                    k_page, v_page, key, valid = in_page(table_row, key, valid, pages, stride_kb, stride_vb, PAGE)
            if FAR:  # else a key's offset fits int32, in units
                key = key.to(tl.int64)
            k_at = (key * stride_kn).to(tl.int64)
            v_at = (key * stride_vn).to(tl.int64)
            if PAGE:
                k_at += k_page
                v_at += v_page
            k_ptrs = k_base + k_at[:, None] * STRIDE_UNIT + d[None, :]
            k = tl.load(k_ptrs, mask=valid[:, None] & (d[None, :] < D), other=0.0)  # [BLOCK_L, BLOCK_D]
            v_ptrs = v_base + v_at[:, None] * STRIDE_UNIT + dv[None, :]
            v = tl.load(v_ptrs, mask=valid[:, None] & (dv[None, :] < Dv), other=0.0)  # [BLOCK_L, BLOCK_DV]
            if STREAM_Q:
                q = tl.load(q_ptrs + tl.minimum(tile, 0) * 16, mask=q_mask, other=0.0)
            if UPFRONT:
                if SINGLE:  # no loop keeps them together, and ptxas would ask for values after keys have come
                    tl.debug_barrier()
                    q = not_before(q)
                k = not_before(k)
            scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * (scale * 1.4426950408889634)
            scores = tl.where(valid[None, :], scores, float("-inf"))  # [BLOCK_G, BLOCK_L]
            m, l, acc, p = softmax_step(scores, m, l, acc)
            if UPFRONT:
                v = not_before(v)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
        if CHUNKED:
            begin_of, end_of = ask_spans(sel_row, (chunk + 1) * SPANS + tl.arange(0, SPANS), n, SOURCE)

    if CLUSTER:  # each of its programs merges some heads
        exchange(inbox, split, m, tl.sum(l, 1), acc, g, in_group, HEADS, CLUSTER, MINE, SENDING)
        g = split + CLUSTER * tl.arange(0, MINE)
        in_group = (g < HEADS) & (head_tile * HEADS + g < G)
        head = head_kv * G + head_tile * HEADS + g  # [MINE]
        o, lse = merge_inbox(inbox, in_group, BLOCK_DV, CLUSTER, MINE)
    elif SPLIT:
        heads = (programs // HEAD_TILES).to(tl.int64) * G
        part = split * heads + token.to(tl.int64) * HKV * G + head
        tl.store(part_ptr + part[:, None] * Dv + dv[None, :], acc, mask=in_group[:, None] & (dv[None, :] < Dv))
        part += splits * heads * Dv  # m and l lie after all parts
        tl.store(part_ptr + part, m, mask=in_group)
        tl.store(part_ptr + splits * heads + part, tl.sum(l, 1), mask=in_group)
    else:
        o, lse = finish(m, tl.sum(l, 1), acc)
    if CLUSTER or not SPLIT:
        o_ptrs = o_ptr + (o_off + head.to(tl.int64) * stride_oh)[:, None] * STRIDE_UNIT + dv[None, :]
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=in_group[:, None] & (dv[None, :] < Dv))
        if lse_ptr is not None:
            tl.store(lse_ptr + token.to(tl.int64) * HKV * G + head, lse, mask=in_group)


class Launch(NamedTuple):
    """Everything about a launch that shapes, strides and dtypes decide."""

    variant: Variant
    variant_lse: Variant  # the one that also writes LSE
    device: torch.device
    grid: tuple[int, int, int]
    splits: int
    merged: bool  # by the same kernel, in clusters
    tokens: int
    sizes: tuple[int, ...]  # the kernel's run-time ints: sizes, then strides in units
    narrow: bool  # they fit int32
    scale: float  # where the call names none
    like_q: bool  # a new output has the shape and strides of q


@lru_cache(maxsize=4096)
def plan(
    device: torch.device,
    dtype: torch.dtype,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    Dv: int,
    strides: tuple[tuple[int, ...], ...],
    out_stride: tuple[int, ...] | None,
    selection_shape: tuple[int, ...] | None,
    block_size: int | None,
    causal: bool,
    sequences: int | None,
    packed: bool,
    bound: int | None,
    per_head: bool,
    pipelined: bool,
    invariant: bool,
    choice: tiles.Choice | None,
    rows_only: bool,
    kinds: tuple[torch.dtype | None, ...],
    cache: bool = False,
    width: int | None = None,
) -> Launch:
    """Tiles, splits, grid and run-time sizes of a call; remembered, because calls repeat.

    Args:
        q_shape, k_shape: of ``q`` and ``k``. strides: of ``q, k, v``. out_stride: of ``out``; None: it is new.
        sequences: of ``cu_seqlens_k``, None without. packed: row ``i`` is sequence ``i``. choice: what a sweep tries.
        rows_only: shapes are those of packed rows, see :func:`launch_for`.
        kinds: dtypes of selection, positions, both ``cu_seqlens``, lengths and page table, None where there is none.
        cache: ``k`` may hold fewer keys than it has room for. width: of the page table, None without.
    """
    like_q = Dv == q_shape[-1] and strides[0] == _contiguous(q_shape)
    out_shape = (*q_shape[:-1], Dv)
    written = _contiguous(out_shape) if out_stride is None else out_stride
    if rows_only:  # one KV head, and without sequences one position: axes of size 1
        k_shape, strides = (*k_shape[:-1], 1, k_shape[-1]), (strides[0], *((*x[:-1], 0, x[-1]) for x in strides[1:]))
        if sequences is None:
            q_shape, strides = (q_shape[0], 1, *q_shape[1:]), (_with_position(strides[0]), *strides[1:])
            written = _with_position(written)
    S_kv, HKV = k_shape[-3:-1]
    pages, page = (0, 0) if width is None else (k_shape[0], S_kv)
    S_kv = S_kv if width is None else S_kv * width
    HQ, D = q_shape[-2:]
    B, S = q_shape[:2] if len(q_shape) == 4 else (sequences or 0, q_shape[0])
    tokens = math.prod(q_shape[:-2])
    rows, G = tokens * HKV, HQ // HKV
    layout = BATCH.value if sequences is None else PACKED.value if packed else VARLEN.value
    if cache:
        layout = CACHE.value
    source, n = WHOLE.value, 0
    if selection_shape is not None:
        source, n = (RANGES.value, selection_shape[-2]) if block_size is None else (BLOCKS.value, selection_shape[-1])
    longest = bound if bound is not None else tiles.UNBOUNDED if invariant else S_kv
    capability, processors = device_limits(device)
    spans = 1 if source == WHOLE.value else tiles.span_bucket(n, S_kv)
    tile, splits, merged = tiles.choose(
        gpu_name(device), capability, processors, dtype.itemsize, G, D, Dv, longest, spans, rows, per_head, pipelined,
        choice, largest_cluster(device, capability, processors), invariant,
    )  # fmt: skip
    size = min(block_size or 1, max(S_kv, 1))  # of a block, which reaches no further than the cache
    if source == BLOCKS.value and block_size is not None and block_size % tile.BLOCK_L == 0:
        whole = min(block_size, max(-(-S_kv // tile.BLOCK_L), 1) * tile.BLOCK_L)
        if max(spans * whole, S_kv + whole) <= INT32_MAX:  # slots, and keys past the last one, are counted in int32
            source, size = TILED.value, whole
    programs = rows * -(-G // tile.HEADS)
    # Strides (b, s, h) of each; a 3-D tensor has no batch.
    all_strides = [s for x in (*strides, written) for s in ((0,) if len(x) == 3 else ()) + tuple(x[:-1])]
    unit = math.gcd(16, *all_strides)
    sizes = (B, S, S_kv, n, size, pages, *(s // unit for s in all_strides))
    tile = tile._replace(UPFRONT=tile.UPFRONT and runs_ptx(device))
    early = runs_ptx(device) and capability >= 90 and gdc_wait is not None
    # Whether what a program reads is one tile, whatever the spans are. Not by how much of a block exists: that may be
    # a matter of who else is in the call. And there is a page to look up.
    most = INT32_MAX if source == RANGES.value else S_kv if block_size is None else n * block_size
    single = tile.num_stages == 1 and most <= splits * tile.BLOCK_L and not (page and S_kv == 0)
    single = single and (source != WHOLE.value or layout == BATCH.value)
    direct = size // tile.BLOCK_L if single and source == TILED.value else 0  # tiles of a block, each a program's
    # Keys of a tile may lie past the last one; nobody loads those.
    far = (S_kv + size + tile.BLOCK_L) * max(x[-3] for x in strides[1:]) // unit > INT32_MAX
    variant, variant_lse = (
        _variant(
            device, dtype, tile, source, layout, page, HKV, S > 1 and sequences is None, causal, G, D, Dv,
            n > tile.SPANS and not direct, far, direct or int(single), splits > 1, splits if merged else 0, early, unit,
            (*kinds, with_lse),
        )
        for with_lse in (False, True)
    )  # fmt: skip
    grid = (programs, 1, 1) if merged else (programs, splits, 1)
    return Launch(
        variant, variant_lse, device, grid, splits, merged, tokens, sizes, max(sizes) <= INT32_MAX, 1.0 / math.sqrt(D),
        like_q,
    )  # fmt: skip


settings.ON_RELOAD.append(plan.cache_clear)


def each_asked(tile: tiles.Tile, source: int, chunked: bool) -> bool:
    """Whether every thread asks for all spans of its row, few ranges, and works out by itself which keys are its own.

    Where tiles are not pipelined, what lies between the spans' arrival and the first key is waited for.
    """
    return TUPLES and source == RANGES.value and tile.num_stages == 1 and tile.SPANS <= 8 and not chunked


def _with_position(stride: tuple[int, ...]) -> tuple[int, ...]:
    """Of a packed row's query or output, with the position axis it lacks."""
    return (stride[0], 0, *stride[1:])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@lru_cache(maxsize=1024)
def _variant(
    device: torch.device,
    dtype: torch.dtype,
    tile: tiles.Tile,
    source: int,
    layout: int,
    page: int,
    HKV: int,
    s_many: bool,
    causal: bool,
    G: int,
    D: int,
    Dv: int,
    chunked: bool,
    far: bool,
    single: int,
    split: bool,
    cluster: int,
    early: bool,
    unit: int,
    what: tuple[object, ...],
) -> Variant:
    """Shared by all plans that differ in sizes only, so that a longer cache does not launch slowly the first time."""
    constexprs = tile._asdict()
    options = {option: constexprs.pop(option) for option in ("num_warps", "num_stages")}
    constexprs.update(G=G, D=D, Dv=Dv, SOURCE=source, LAYOUT=layout, CAUSAL=causal, INPUT_PRECISION="ieee")
    constexprs.update(PAGE=page, HKV=HKV, S_MANY=s_many)
    box = tile.HEADS, tile.BLOCK_DV, cluster
    # More heads would be spilled; and many packed rows are slower by half a percent, which few gain.
    hold = runs_ptx(device)
    hold_q = hold and dtype.itemsize == 2 and tile.BLOCK_G <= 16 and not tile.STREAM_Q and source != WHOLE.value
    constexprs.update(CHUNKED=chunked, FAR=far, HOLD=hold, HOLD_Q=hold_q, SINGLE=single)
    constexprs.update(EACH=each_asked(tile, source, chunked))
    constexprs.update(SPLIT=split, CLUSTER=cluster, MINE=tiles.merged_heads(tile.HEADS, cluster), STRIDE_UNIT=unit)
    shared = tiles.exchange_bytes(*box)
    constexprs.update(SHARED=shared, SENDING=sending(*box, 32 * tile.num_warps) if cluster else None)
    constexprs.update(EARLY=early, OVERLAP=early and split and not cluster)
    if early:
        options["launch_pdl"] = True
    return Variant(_fwd_kernel, constexprs, options, cluster, shared)


@lru_cache(maxsize=64)
def device_limits(device: torch.device) -> tuple[int, int]:
    """Compute capability times ten and number of multiprocessors; the interpreter stands in for an H100."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:  # an MI250 says 9.0, too
        return tiles.AMD, properties.multi_processor_count
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def runs_ptx(device: torch.device) -> bool:
    """Whether kernels for ``device`` may contain NVIDIA's assembly."""
    return device.type != "cpu" and torch.version.hip is None and not settings.interpreter()


def largest_cluster(device: torch.device, capability: int, processors: int) -> int:
    """How many programs may be a cluster, those that share a row, to merge their results in the same kernel; 0 if none.

    8 is what every GPU with clusters promises; 16 fits a GPC of a whole H100 or B200. A slice (MIG) promises less.
    """
    if not (CLUSTERS and runs_ptx(device)) or capability < 90 or processors < 78:
        return 0
    return 16 if capability in (90, 100) and processors >= 128 else 8


@lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str | None:
    """By which a table of tiles is found."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def launch_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    selection: Tensor | None = None,
    block_size: int | None = None,
    causal: bool = False,
    q_positions: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    bound: int | None = None,
    per_head: bool = False,
    pipelined: bool = True,
    invariant: bool = False,
    out: Tensor | None = None,
    rows_only: bool = False,
) -> Launch:
    """How such a call is launched; holds for every call whose arguments agree in shape, strides, dtype and device.

    Args:
        q: ``[B, S, HQ, D]``, or ``[T, HQ, D]`` with ``cu_seqlens_k``. k, v: ``[B, S_kv, HKV, D | Dv]`` or 3-D likewise.
        selection: ranges ``[..., HKV, n, 2]``, or block indices ``[..., HKV, n]`` with ``block_size``; None reads the
            whole sequence.
        cu_seqlens_q: None with ``cu_seqlens_k`` given: row ``i`` is sequence ``i``.
        cache_seqlens: ``[B]``, keys that each entry of ``k`` holds. block_table: ``[B, width]``, for ``k``
            ``[pages, page_size, HKV, D]``.
        bound: host bound on the keys of a row.
        invariant: few rows are launched like many, and without a bound like rows of a fixed length.
        out: ``[..., HQ, Dv]`` to write to.
        rows_only: packed rows as they are, ``q [N, H, D]`` with ``k [N, L, D]``, or ``[sum L, D]`` and sequences.
    """
    return plan(
        q.device, q.dtype, q.shape, k.shape, v.shape[-1], (q.stride(), k.stride(), v.stride()),
        None if out is None else out.stride(), None if selection is None else selection.shape, block_size, causal,
        None if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1, cu_seqlens_q is None, bound, per_head, pipelined,
        invariant, tiles.forced, rows_only,
        tuple(
            None if x is None else x.dtype
            for x in (selection, q_positions, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table)
        ),
        cache_seqlens is not None, None if block_table is None else block_table.shape[1],
    )  # fmt: skip


def forward(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: str,
    selection: Tensor | None = None,
    q_positions: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernel on validated arguments.

    Args:
        launch: of :func:`launch_for` for these arguments, which says what they are.
        route: name counted in :data:`nsa.kernels.launches`.

    Returns:
        ``(O, LSE)``, LSE fp32 ``q.shape[:-1]`` or None.
    """
    if out is None:
        out = torch.empty_like(q) if launch.like_q else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[:-1], device=launch.device, dtype=torch.float32) if return_lse else None
    if launch.tokens == 0:
        return out, lse
    parts = None
    if launch.splits > 1 and not launch.merged:
        heads = launch.splits * launch.tokens * q.shape[-2]
        parts = torch.empty(heads * (v.shape[-1] + 2), device=launch.device, dtype=torch.float32)
    if selection is not None and not selection.is_contiguous():
        selection = selection.contiguous()
    if q_positions is not None and not q_positions.is_contiguous():
        q_positions = q_positions.contiguous()
    if cu_seqlens_k is not None:
        cu_seqlens_k = cu_seqlens_k.contiguous()
        cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    if cache_seqlens is not None:
        cu_seqlens_k = cache_seqlens.contiguous()
        block_table = None if block_table is None else block_table.contiguous()
    variant = launch.variant if lse is None or parts is not None else launch.variant_lse
    variant.launch(
        launch.grid,
        launch.device,
        (
            q,
            k,
            v,
            out,
            None if parts is not None else lse,
            parts,
            selection,
            q_positions,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
        ),
        (*launch.sizes, launch.scale if scale is None else float(scale)),
        launch.narrow,
    )
    launches[route] += 1
    if launch.splits > 1:
        launches["split"] += 1
    if parts is not None:
        assert parts is not None
        combine(parts, launch.splits, out, lse, bool(variant.constexprs["OVERLAP"]))
    return out, lse
