"""Query-major forward: cuts a call into programs and launches them. The kernel is in ``kernel.py``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.query_major import kernel as query_kernels
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import compiler, sizes
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared.clusters import sending
from nsa.kernels.shared.combine import combine
from nsa.kernels.shared.errors import ODD, DoesNotFit
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import TRITON, Variant, remembered
from nsa.kernels.shared.shape import BATCH, BLOCKS, RANGES, TILED, WHOLE, Shape, shape_of
from nsa.kernels.shared.sizes import INT32_MAX

TUPLES = TRITON >= (3, 4)  # Triton compiles tuples as the kernel uses them
CLUSTERS = TRITON >= (3, 6)  # older versions pack the metadata of a launch differently


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a launch."""

    variant: Variant
    variant_lse: Variant  # also writes LSE
    device: torch.device
    grid: tuple[int, int, int]
    splits: int
    merged: bool  # the programs that share a row are a cluster and merge their results themselves
    places: int  # queries for which the grid has programs: all tokens, or for steps `STEPS` a sequence
    sizes: tuple[int, ...]  # the kernel's run-time ints: sizes, then strides in units
    narrow: bool  # all sizes fit int32
    scale: float  # the default, for calls without `scale`
    like_q: bool  # a new output has the shape and strides of q
    pairs: bool  # values are read in pairs of bytes
    stride_tb: int  # as in a `Shape`
    copies: bool  # as in a `Shape`
    copies_table: bool
    pins: dict[str, Exact]  # with these, another call compiles the same variants
    queries: int = 3  # of the guard's small call

    steps = None  # this launch needs no other one for the steps of a ragged batch

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.variant, self.variant_lse

    def serve(self, call: Call, route: str | None, served: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """:func:`forward` for a family that leaves rows to this launch."""
        return forward(self, call, route, served, lse)


def plan(
    call: Call, shape: Shape | None = None, per_head: bool = False, steps: bool = False, skips: bool = False
) -> Launch:
    """Tiles, splits, grid and run-time sizes of a launch. They hold for every call with the same key.

    With ``batch_invariant`` few rows are launched like many, and rows without a bound count as `tiles.UNBOUNDED` keys.

    Args:
        call: valid. Packed rows come as they are: ``q [N, H, D]`` with ``k [N, L, D]``, or with ``k [sum L, D]`` and
            ``cu_seqlens_k``; row ``i`` is sequence ``i``.
        per_head: one query head per program, for comparison.
        steps: serve only sequences of at most `STEPS` queries of a ragged batch. :func:`forward` gets ``served``.
            Tiles are chosen for one query a sequence, because only the device knows the number of queries.
        skips: leave out the rows that ``served`` marks, and launch few rows like many. :func:`forward` gets ``served``.
    """
    device, dtype, block_size = call.q.device, call.q.dtype, call.block_size
    pipelined, invariant = call.settings.sel_triton_db, call.settings.batch_invariant or skips
    g = shape_of(call) if shape is None else shape
    S_kv, G, D, Dv, source, bound = g.S_kv, g.G, g.D, g.Dv, g.source, g.bound
    rows = (g.B if steps else g.tokens) * g.HKV
    places = g.B * sizes.STEPS if steps else g.tokens
    causal = call.causal and source != WHOLE
    longest = bound if bound is not None else tiles.UNBOUNDED if invariant else S_kv
    chip = gpu.chip(device)
    spans = 1 if source == WHOLE else sizes.span_bucket(g.n, S_kv)
    pin, tiled = call.settings.pin.get("query_major"), True
    block = block_size & -block_size if source == BLOCKS and block_size is not None else 0
    if isinstance(pin, Exact):
        tile, (splits, merged, tiled) = tiles.Tile(*pin.tile), pin.more
    else:
        tile, splits, merged = tiles.tile_and_splits(
            chip.name, chip.capability, chip.processors, call.k.dtype.itemsize, G, D, Dv, longest, spans, rows,
            per_head, pipelined, pin, largest_cluster(chip), invariant, block,
        )  # fmt: skip
    if skips:
        splits, merged = 1, False  # rows that are left out have no parts to merge
    size = min(block_size or 1, max(S_kv, 1))  # keys of a block, at most those that exist
    if source == BLOCKS and block_size is not None and block_size % tile.BLOCK_L == 0:
        whole = min(block_size, max(-(-S_kv // tile.BLOCK_L), 1) * tile.BLOCK_L)
        if tiled and max(spans * whole, S_kv + whole) <= INT32_MAX:  # the kernel counts slots and keys in int32
            source, size = TILED, whole
    tile = tile._replace(UPFRONT=tile.UPFRONT and chip.ptx)
    early = chip.ptx and chip.capability >= 90 and compiler.gdc_wait is not None
    # SINGLE: for any spans, every program reads at most one tile, so the kernel needs no loop over tiles. This rule
    # counts `block_size` keys a block, not those that exist, so that other sequences of a batch cannot change SINGLE.
    most = INT32_MAX if source == RANGES else S_kv if block_size is None else g.n * block_size
    single = tile.num_stages == 1 and most <= splits * tile.BLOCK_L
    single = single and not (g.page and S_kv * g.B == 0)  # an empty page table has no entry to look up
    single = single and (source != WHOLE or g.layout == BATCH)
    tiles_of_block = size // tile.BLOCK_L if single and source == TILED else 0
    # FAR: a key's offset may not fit int32. The last tile may begin at the last key, so masked keys count, too.
    far = (S_kv + size + tile.BLOCK_L) * max(g.strides[4], g.strides[7]) > INT32_MAX
    variant, variant_lse = _variants(
        (device, dtype, *call.dtypes(), skips), tile, splits if merged else 0, early, G=G, D=D, Dv=Dv,
        SOURCE=source, LAYOUT=g.layout, PAGE=g.page, HKV=g.HKV, S_MANY=g.S > 1 and call.q.dim() == 4,
        STEPS=sizes.STEPS if steps else 0, CAUSAL=causal,
        CHUNKED=g.n > tile.SPANS and not tiles_of_block, FAR=far, SINGLE=tiles_of_block or int(single),
        SPLIT=splits > 1, STRIDE_UNIT=g.unit, K_STEP=g.k_step, V_STEP=g.v_step,
        PAIRS=g.pairs and sizes.pairs(tile.BLOCK_G, tile.BLOCK_DV),
    )  # fmt: skip
    programs = places * g.HKV * -(-G // tile.HEADS)
    grid = (programs, 1, 1) if merged else (programs, splits, 1)
    numbers = (g.B, g.S, S_kv, g.n, size, g.pages, *g.strides)
    return Launch(
        variant, variant_lse, device, grid, splits, merged, places, numbers, max(*numbers, g.stride_tb) <= INT32_MAX,
        1.0 / math.sqrt(D), g.like_q, bool(variant.constexprs["PAIRS"]), g.stride_tb, g.copies, g.copies_table,
        {"query_major": Exact(tuple(tile), (splits, merged, source == TILED))},
    )  # fmt: skip


@remembered
def _variants(
    kinds: tuple[Any, ...], tile: tiles.Tile, cluster: int, early: bool, **decided: int
) -> tuple[Variant, ...]:
    """The kernel for a tile and the other compile-time arguments, ``decided``, without and with LSE.

    Plans that differ only in sizes share a kernel, so that the first call with a longer cache does not launch slowly.
    Kernels for another device or other dtypes (``kinds``) are other entries of the cache.
    """
    device, dtype, *_ = kinds
    source, split, ptx = decided["SOURCE"], decided["SPLIT"], gpu.chip(device).ptx
    constexprs: dict[str, object] = {**tile._asdict(), **decided, "INPUT_PRECISION": "ieee"}
    options = {option: constexprs.pop(option) for option in ("num_warps", "num_stages")}
    # HOLD_Q: queries are loaded before the loop. More than 16 heads would spill. Packed rows do not use HOLD_Q, because
    # calls of many rows would be 0.5% slower, though calls of few rows 0.5% faster.
    hold_q = ptx and dtype.itemsize == 2 and tile.BLOCK_G <= 16 and not tile.STREAM_Q
    constexprs.update(HOLD=ptx, HOLD_Q=hold_q and source != WHOLE)
    # EACH: every thread loads all ranges of its row and finds its own keys. Tiles that are not pipelined gain by this,
    # because they wait for all that happens between the arrival of the ranges and the first load of keys.
    each = TUPLES and source == RANGES and tile.num_stages == 1 and tile.SPANS <= 8
    constexprs.update(EACH=each and not decided["CHUNKED"])
    box = tile.HEADS, tile.BLOCK_DV, cluster
    shared = sizes.exchange_bytes(*box)
    constexprs.update(CLUSTER=cluster, MINE=sizes.merged_heads(tile.HEADS, cluster), SHARED=shared)
    constexprs.update(SENDING=sending(*box, 32 * tile.num_warps) if cluster else None)
    constexprs.update(EARLY=early, OVERLAP=early and split and not cluster)
    if early:
        options["launch_pdl"] = True
    return tuple(Variant(query_kernels._fwd_kernel, constexprs, options, cluster, shared) for _ in range(2))


def largest_cluster(chip: gpu.Chip) -> int:
    """How many programs may share a row and merge their results as one cluster; 0 where there are no clusters.

    Every GPU with clusters promises 8. A cluster of 16 fits into a GPC of a whole H100 or B200. A slice of a GPU (MIG)
    may hold fewer than 8, so GPUs of fewer than 78 multiprocessors get none.
    """
    if not (CLUSTERS and chip.ptx) or chip.capability < 90 or chip.processors < 78:
        return 0
    return 16 if chip.capability in (90, 100) and chip.processors >= 128 else 8


def forward(
    launch: Launch, call: Call, route: str | None, served: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernel.

    Args:
        launch: what :func:`plan` returned for this call.
        route: name counted in :data:`nsa.kernels.launches`; None: it is not counted.
        served: int32 ``[tokens, HKV]``. Of steps: set to 1 for the rows that are served, else left as it is. Of a
            launch that skips: not 0 for the rows to leave out.
        lse: where LSE goes; None: a new tensor if the call asks for LSE.

    Returns:
        ``(O, LSE)``, LSE fp32 ``q.shape[:-1]`` or None.
    """
    (
        q, k, v, ranges, selection, q_positions, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, k_scale,
        v_scale, out, _, _, scale, _, _, _, _, return_lse, _,
    ) = call  # fmt: skip
    if out is None:
        out = torch.empty_like(q) if launch.like_q else q.new_empty((*q.shape[:-1], v.shape[-1]))
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:-1], device=launch.device, dtype=torch.float32)
    if launch.places == 0:
        return out, lse
    parts = None
    if launch.splits > 1 and not launch.merged:
        heads = launch.splits * launch.places * q.shape[-2]
        parts = torch.empty(heads * (v.shape[-1] + 2), device=launch.device, dtype=torch.float32)
    if ranges is not None:
        selection = ranges
    if cache_seqlens is not None:
        cu_seqlens_k = cache_seqlens
    if launch.copies:
        selection, q_positions, cu_seqlens_q, cu_seqlens_k, k_scale, v_scale = (
            x if x is None else x.contiguous()
            for x in (selection, q_positions, cu_seqlens_q, cu_seqlens_k, k_scale, v_scale)
        )
        if launch.copies_table and block_table is not None:
            block_table = block_table.contiguous()
    if launch.pairs and v.data_ptr() % 2:
        raise DoesNotFit(ODD)
    variant = launch.variant if lse is None or parts is not None else launch.variant_lse
    variant.launch(
        launch.grid,
        launch.device,
        (
            q, k, v, out, None if parts is not None else lse, parts, selection, q_positions, cu_seqlens_q,
            cu_seqlens_k, block_table, k_scale, v_scale, served,
        ),
        (*launch.sizes, launch.scale if scale is None else scale, launch.stride_tb),
        launch.narrow,
    )  # fmt: skip
    if route is not None:
        launches[route] += 1
    if launch.splits > 1:
        launches["split"] += 1
    if parts is not None:
        ends, steps = (None, 0) if served is None else (cu_seqlens_q, variant.constexprs["STEPS"])
        combine(parts, launch.splits, out, lse, bool(variant.constexprs["OVERLAP"]), ends, steps)
    return out, lse
