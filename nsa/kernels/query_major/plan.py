"""Query-major forward: how a call is cut into programs, and its launch. The kernel is in ``kernel.py``."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsa import settings
from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.query_major import kernel as query_kernels
from nsa.kernels.query_major import tiles
from nsa.kernels.shared.clusters import sending
from nsa.kernels.shared.combine import combine
from nsa.kernels.shared.launch import INT32_MAX, TRITON, Variant
from nsa.kernels.shared.primitives import (
    BATCH,
    BLOCKS,
    CACHE,
    PACKED,
    RANGES,
    TILED,
    VARLEN,
    WHOLE,
    gdc_wait,
)

TUPLES = TRITON >= (3, 4)  # in kernels, as they are used here
CLUSTERS = TRITON >= (3, 6)  # before, launches tell of them in another way


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
    stride_tb: int  # entries from one row of the page table to the next
    copies_table: bool  # a row of the page table is not contiguous

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that a call may launch."""
        return self.variant, self.variant_lse


def plan(call: Call, bound: int | None = None, per_head: bool = False) -> Launch:
    """How a call is launched: tiles, splits, grid and run-time sizes. Holds for every call of the same key.

    Args:
        call: valid. Packed rows come as they are: ``q [N, H, D]`` with ``k [N, L, D]``, or ``[sum L, D]`` and
            ``cu_seqlens_k``; row ``i`` is sequence ``i``.
        bound: host bound on the keys of a row.
        per_head: a query head a program, for comparison.

    With ``batch_invariant`` few rows are launched like many, and without a bound like rows of a fixed length.
    """
    q, k, v, selection, block_size, causal = call.q, call.k, call.v, call.selection, call.block_size, call.causal
    device, dtype, Dv = q.device, q.dtype, v.shape[-1]
    pipelined, invariant, cache = call.settings.sel_triton_db, call.settings.batch_invariant, call.cache_seqlens
    sequences = None if call.cu_seqlens_k is None else call.cu_seqlens_k.shape[0] - 1
    width = None if call.block_table is None else call.block_table.shape[1]
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    strides: tuple[tuple[int, ...], ...] = (q.stride(), k.stride(), v.stride())
    like_q = Dv == q_shape[-1] and strides[0] == contiguous(q_shape)
    written = contiguous((*q_shape[:-1], Dv)) if call.out is None else call.out.stride()
    if selection is None:  # one KV head, and without sequences one position: axes of size 1
        causal = False
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
    packed = call.cu_seqlens_q is None
    layout = BATCH.value if sequences is None else PACKED.value if packed else VARLEN.value
    if cache is not None:
        layout = CACHE.value
    source, n = WHOLE.value, 0
    if selection is not None:
        source, n = (RANGES.value, selection.shape[-2]) if block_size is None else (BLOCKS.value, selection.shape[-1])
    longest = bound if bound is not None else tiles.UNBOUNDED if invariant else S_kv
    capability, processors = device_limits(device)
    spans = 1 if source == WHOLE.value else tiles.span_bucket(n, S_kv)
    tile, splits, merged = tiles.choose(
        gpu_name(device), capability, processors, dtype.itemsize, G, D, Dv, longest, spans, rows, per_head, pipelined,
        tiles.forced, largest_cluster(device, capability, processors), invariant,
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
    copies_table, stride_tb = table_rows(call.block_table)
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
            (*call.dtypes(), with_lse),
        )
        for with_lse in (False, True)
    )  # fmt: skip
    grid = (programs, 1, 1) if merged else (programs, splits, 1)
    return Launch(
        variant, variant_lse, device, grid, splits, merged, tokens, sizes, max(*sizes, stride_tb) <= INT32_MAX,
        1.0 / math.sqrt(D), like_q, stride_tb, copies_table,
    )  # fmt: skip


def table_rows(table: Tensor | None) -> tuple[bool, int]:
    """``(copied, stride)`` of a page table: whether it is copied for the kernel, and entries from one row to the next.

    A kernel reads the table where it lies, also a slice ``table[:, :width]``. It is copied if a row is not contiguous.
    """
    if table is None:
        return False, 0
    width = table.shape[1]
    copied = width > 1 and table.stride(1) != 1
    return copied, width if copied else table.stride(0)


def each_asked(tile: tiles.Tile, source: int, chunked: bool) -> bool:
    """Whether every thread asks for all spans of its row, few ranges, and works out by itself which keys are its own.

    Where tiles are not pipelined, what lies between the spans' arrival and the first key is waited for.
    """
    return TUPLES and source == RANGES.value and tile.num_stages == 1 and tile.SPANS <= 8 and not chunked


def _with_position(stride: tuple[int, ...]) -> tuple[int, ...]:
    """Of a packed row's query or output, with the position axis it lacks."""
    return (stride[0], 0, *stride[1:])


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape."""
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
    return Variant(query_kernels._fwd_kernel, constexprs, options, cluster, shared)


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


def forward(launch: Launch, call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernel.

    Args:
        launch: of :func:`plan` for this call.
        route: name counted in :data:`nsa.kernels.launches`.

    Returns:
        ``(O, LSE)``, LSE fp32 ``q.shape[:-1]`` or None.
    """
    (
        q, k, v, ranges, selection, q_positions, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, out, _, _,
        scale, _, _, _, return_lse, _,
    ) = call  # fmt: skip
    if out is None:
        out = torch.empty_like(q) if launch.like_q else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[:-1], device=launch.device, dtype=torch.float32) if return_lse else None
    if launch.tokens == 0:
        return out, lse
    parts = None
    if launch.splits > 1 and not launch.merged:
        heads = launch.splits * launch.tokens * q.shape[-2]
        parts = torch.empty(heads * (v.shape[-1] + 2), device=launch.device, dtype=torch.float32)
    if ranges is not None:
        selection = ranges
    if selection is not None and not selection.is_contiguous():
        selection = selection.contiguous()
    if q_positions is not None and not q_positions.is_contiguous():
        q_positions = q_positions.contiguous()
    if cu_seqlens_k is not None:
        cu_seqlens_k = cu_seqlens_k.contiguous()
        cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    if cache_seqlens is not None:
        cu_seqlens_k = cache_seqlens.contiguous()
        if block_table is not None and launch.copies_table:
            block_table = block_table.contiguous()
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
        (*launch.sizes, launch.scale if scale is None else scale, launch.stride_tb),
        launch.narrow,
    )
    launches[route] += 1
    if launch.splits > 1:
        launches["split"] += 1
    if parts is not None:
        combine(parts, launch.splits, out, lse, bool(variant.constexprs["OVERLAP"]))
    return out, lse
