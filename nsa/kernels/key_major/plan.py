"""Key-major forward: lists which rows selected each block, computes partial results block by block, merges them by row.

The host does not wait for the device: grids follow from shapes, and a program without work returns at once. Tokens are
processed in windows whose partial results share one buffer, so the workspace is bounded for any length. The kernels are
in ``kernel.py`` and ``shared/inverse_index.py``. ``plan`` and ``forward`` are called as those of query-major.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import settings
from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.key_major import kernel as key_kernels
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared import inverse_index, sizes
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.errors import ODD, DoesNotFit
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import Size, Variant, remembered, workspaces
from nsa.kernels.shared.shape import E4M3, RAGGED, RANGES, TILED, Shape, prepared, shape_of
from nsa.kernels.shared.sizes import INT32_MAX, pairs, span_bucket

logger = logging.getLogger("nsa")

WIDE_FROM = INT32_MAX  # if the last element of q lies farther than this from the first, offsets take 64 bits
COUNTED = 64  # slots that a program of the count kernel takes at a time
ELEMENTS = 1024  # elements that a program of the scan or scatter kernel takes at a time
MERGE_CHUNK = 16
SCARCE = (4, 16)  # divisors of the workspace's limits, tried in turn if memory is lacking


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    lists: tuple[Variant, ...]  # count, scan and scatter, or one kernel that does all for few units
    partial: Variant
    merge: Variant
    merge_lse: Variant
    device: torch.device
    sized: tuple[int, ...]  # arguments of `key_tiles.windows`
    windows: key_tiles.Windows
    room: tuple[Size, ...]  # the workspace of `windows`
    tile: key_tiles.Tile
    shape: Shape
    size: int  # keys of a block
    narrow: bool  # all sizes fit int32
    scale: float  # of a call that names none
    steps: Any  # query-major's launch for the sequences of few queries of a ragged batch, which seldom share blocks
    likely: int  # all blocks; of a ragged batch, those that probably have units
    pins: dict[str, Exact]  # with these, another call compiles the same variants
    queries: int = 3  # of the guard's small call

    @property
    def variants(self) -> tuple[Variant, ...]:
        steps = () if self.steps is None else self.steps.variants
        return (*self.lists, self.partial, self.merge, self.merge_lse, *steps)

    def serve(self, call: Call, route: str | None, served: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """:func:`forward` for a family that leaves rows to this launch."""
        return forward(self, call, route, served, lse)

    def serve_steps(self, call: Call, lse: Tensor | None) -> Tensor:
        """Launch query-major for the steps of a ragged batch, with LSE to ``lse``. ``call`` has ``out``.

        Returns ``served`` for :func:`forward`.
        """
        served: Tensor = workspaces(self.device, served=(self.shape.tokens * self.shape.HKV, torch.int32))[0].zero_()
        self.steps.serve(call, "steps", served, lse)
        return served


def plan(call: Call, shape: Shape | None = None, skips: bool = False, steps: Any = None) -> Launch:
    """Tiles, windows and run-time sizes of a launch.

    A row's result never depends on the values of other rows. With ``batch_invariant`` it depends neither on the length
    of the call nor on the number of sequences. A row whose ranges have more than ``bound`` keys may come out as NaN.

    Args:
        skips: every :func:`forward` of the launch gets ``served``, otherwise none does.
        steps: the launch that serves the steps of a ragged batch, see :func:`has_steps`; None without.

    Raises:
        DoesNotFit: more keys or KV heads than the kernels count, or a workspace that is too large.
    """
    device, dtype, block_size = call.q.device, call.q.dtype, call.block_size
    g = shape_of(call) if shape is None else shape
    S_kv, HKV, G, D, Dv, n = g.S_kv, g.HKV, g.G, g.D, g.Dv, g.n
    spans = block_size is None
    size, blocks, slots = key_tiles.grid("key_major", g.B, S_kv, HKV, n, block_size, g.packed, g.bound)
    capability = gpu.chip(device).capability
    ragged = g.layout == RAGGED
    chunks, likely = 1, blocks
    if ragged:  # how many sequences probably have units, if each has at most `longest` queries
        longest = max(call.max_seqlen_q or 1, -(-g.tokens // max(g.B, 1)), 1)
        chunks = min(g.B, max(1, (2 * g.tokens + longest) // (2 * longest)))
        likely = blocks // max(g.B, 1) * chunks
    walk = key_tiles.walks(g.S, S_kv * chunks, call.settings.batch_invariant)
    listed = block_size or size  # not cut to S_kv, because S_kv must not change a row's tiles
    reads = g.tokens * n // max(likely, 1)
    pin = call.settings.pin.get("key_major")
    if isinstance(pin, Exact):
        tile = key_tiles.Tile(*pin.tile)
    else:
        tile = key_tiles.select(capability, dtype.itemsize, G, D, Dv, listed, pin, walk, call.k.dtype == E4M3, reads)
    bucket = span_bucket(n, S_kv)
    tiled = listed % tile.BLOCK_L == 0 and bucket * size + S_kv <= INT32_MAX
    farthest = sum((size - 1) * stride for size, stride in zip(call.q.shape, call.q.stride(), strict=True)) + D
    wide = farthest > WIDE_FROM
    walked = 0 if spans else n * tile.walked // 16
    slots -= walked
    sized = (g.tokens, HKV, G, D, Dv, dtype.itemsize, slots, blocks, tile.share, spans)
    windows = key_tiles.windows(*sized)
    # AMD GPUs take three launches, because one program relies on a barrier between its stores and its atomics, and that
    # was not checked on them.
    few = key_tiles.few(windows, g.B if ragged else 0) and not (spans or g.packed) and capability != gpu.AMD
    if isinstance(pin, Exact):
        bucket, tiled, wide, few = pin.more
    variants = _variants(
        (device, dtype, *call.dtypes(), skips or steps is not None), tile, bucket,
        0 if steps is None else sizes.STEPS, few, walked > 0, TILED if tiled else g.source,
        ONE_TILE=listed <= tile.BLOCK_N, WIDE=wide, G=G, D=D, Dv=Dv, SOURCE=g.source, LAYOUT=g.layout,
        PAGE=g.page, CAUSAL=call.causal, STRIDE_UNIT=g.unit, K_STEP=g.k_step, V_STEP=g.v_step,
        PAIRS=g.pairs and pairs(tile.merge_heads, tile.BLOCK_DV), INPUT_PRECISION="ieee",
    )  # fmt: skip
    narrow = max(g.B, g.S, S_kv, HKV, n, size, *g.strides, g.pages, g.stride_tb) <= INT32_MAX
    return Launch(
        *variants, device, sized, windows, _sizes(g, windows, dtype), tile, g, size, narrow, 1.0 / math.sqrt(D), steps,
        likely, {"key_major": Exact(tuple(tile), (bucket, tiled, wide, few))} | ({} if steps is None else steps.pins),
    )  # fmt: skip


@remembered
def _variants(
    kinds: tuple[Any, ...], tile: key_tiles.Tile, spans: int, steps: int, few: bool, walk: bool, walk_source: int,
    **shared: Any,
) -> tuple[tuple[Variant, ...], Variant, Variant, Variant]:  # fmt: skip
    """The kernels for a tile and the compile-time arguments ``shared``. Plans that differ only in sizes share them.

    Kernels for another device or other dtypes, and kernels that skip rows (``kinds``), are other entries of the cache.
    """
    source = shared["SOURCE"]
    count = {name: shared[name] for name in ("SOURCE", "LAYOUT", "CAUSAL")}
    count |= {"CHUNK": COUNTED, "SPANS": spans if source == RANGES else 1}
    scan = {"SHARE": tile.share, "STEPS": steps, "CHUNK": ELEMENTS}
    blocks = {"BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV}
    partial = {name: x for name, x in shared.items() if name not in ("V_STEP", "PAIRS")}
    partial |= {**blocks, "HEADS": tile.HEADS, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
    merge = {name: x for name, x in shared.items() if name not in ("ONE_TILE", "WIDE")} | blocks
    merge |= {"SOURCE": walk_source if walk else source, "WALK": walk, "SPANS": spans if walk else 1}
    merge |= {"PAIRS": walk and shared["PAIRS"]}
    merge |= {"HEADS": tile.merge_heads, "BLOCK_L": tile.BLOCK_L, "CHUNK": MERGE_CHUNK, "AT_ONCE": tile.at_once}
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": 1 if shared["ONE_TILE"] else 2}
    merging: dict[str, Any] = {"num_warps": 1, "num_stages": tile.walk_stages if walk else 1}
    if gpu.chip(kinds[0]).ptx:
        options |= {} if tile.registers is None else {"maxnreg": tile.registers}
        merging |= {} if tile.walk_registers is None else {"maxnreg": tile.walk_registers}
    lists: tuple[Variant, ...] = (
        Variant(inverse_index._count_kernel, count, {"num_warps": 1}),
        Variant(inverse_index._scan_kernel, scan, {"num_warps": 4}),
        Variant(inverse_index._scatter_kernel, {"CHUNK": ELEMENTS}, {"num_warps": 4}),
    )
    if few:
        once = {name: shared[name] for name in ("LAYOUT", "CAUSAL")} | {"SHARE": tile.share, "CHUNK": ELEMENTS}
        lists = (Variant(inverse_index._lists_kernel, once, {"num_warps": 8}),)
    without_lse, with_lse = (Variant(key_kernels._merge_kernel, merge, merging) for _ in range(2))
    return lists, Variant(key_kernels._partial_kernel, partial, options), without_lse, with_lse


def _sizes(g: Shape, w: key_tiles.Windows, dtype: torch.dtype) -> tuple[Size, ...]:
    """Workspace for windows ``w``, in the order of :func:`forward`."""
    units, groups, i32 = w.tokens * w.row, w.most * w.heads, torch.int32
    return (
        (w.window * w.row * g.G * g.Dv, dtype),  # partial results
        (w.window * w.row * g.G, torch.float32),  # their LSE
        (units, i32),  # block and rank of units
        (units, i32),
        (units, i32) if g.source == RANGES else None,  # their spans
        (w.most * w.window * w.row, i32),  # lists of units
        (groups * w.blocks, i32),  # where the list of a block begins
        (groups * (3 * w.work + w.blocks), i32),  # block, first unit, and number of units of shares; counters of blocks
    )


def workspace_bytes(g: Shape, w: key_tiles.Windows, dtype: torch.dtype) -> int:
    """Bytes that a call allocates beside its results, without the gaps between them."""
    return sum(size[0] * size[1].itemsize for size in _sizes(g, w, dtype) if size is not None)


_scarce: dict[tuple[torch.device, tuple[int, ...]], key_tiles.Windows] = {}
"""Smaller windows, for shapes that a device once lacked memory for."""
settings.ON_RELOAD.append(_scarce.clear)


def reserve(launch: Launch, dtype: torch.dtype) -> tuple[key_tiles.Windows, list[Any]]:
    """Windows of a call and their workspace. If memory is lacking, windows are smaller, which is slower.

    A row's result stays the same, bit by bit. The smaller windows are logged and remembered for the shape. A larger
    workspace is not tried again, because a failing allocator first gives back all memory that it had cached.
    """
    w, sizes = launch.windows, launch.room
    while True:
        if _scarce and (less := _scarce.get((launch.device, launch.sized))) is not None:
            w, sizes = less, _sizes(launch.shape, less, dtype)
        try:
            return w, launching.divided(launch.device, sizes)
        except torch.OutOfMemoryError:
            less = _less(launch, w, dtype)
            if less is None:
                raise
            _scarce[launch.device, launch.sized] = less


def _less(launch: Launch, w: key_tiles.Windows, dtype: torch.dtype) -> key_tiles.Windows | None:
    """Windows for this shape that take less memory than ``w``: fewer tokens or KV heads at once. None if none do."""
    before = workspace_bytes(launch.shape, w, dtype)
    for times in SCARCE:
        try:
            smaller = key_tiles.windows(*launch.sized, times)
        except ValueError:  # the partial results of one token do not fit
            return None
        taken = workspace_bytes(launch.shape, smaller, dtype)
        if taken < before:
            logger.warning(
                "key_major: out of memory for a workspace of %.0f MiB; from now on calls of this shape use %.0f MiB, "
                "which is slower", before / 2**20, taken / 2**20,
            )  # fmt: skip
            return smaller
    return None


def _programs(launch: Launch, w: key_tiles.Windows) -> int:
    """Programs of the partial kernel for a KV head: as many as there may be shares.

    In a ragged batch as many as there probably are, which may be a twentieth. A program without work takes 2 ns. If
    there are more shares, programs take several.
    """
    if launch.shape.layout != RAGGED:
        return w.work
    return min(w.work, max(-(-w.window * w.slots // launch.tile.share), launch.likely))


def forward(
    launch: Launch, call: Call, route: str | None, served: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels. Arguments and results as of :func:`nsa.kernels.query_major.plan.forward`.

    Args:
        served: int32 ``[tokens, HKV]``, not 0 for rows of blocks that are served already; they are left as they are.
            None: no row is served yet; this function then serves the steps first.
        lse: where LSE goes; None: a new tensor if the call asks for LSE.
    """
    q, k, v = call[:3]
    device, tile, g, narrow = launch.device, launch.tile, launch.shape, launch.narrow
    out, lse, *index, block_table = prepared(call, g, lse)
    if g.tokens == 0:
        return out, lse
    if launch.merge.constexprs["PAIRS"] and v.data_ptr() % 2:
        raise DoesNotFit(ODD)
    w, (parts, part_lse, block, rank, span, unit, start, lists) = reserve(launch, q.dtype)
    if served is None and launch.steps is not None:
        served = launch.serve_steps(call.into(out), lse)
    if route is not None:
        launches[route] += 1
    k_scale, v_scale = call.k_scale, call.v_scale
    if g.copies:
        k_scale, v_scale = (x if x is None else x.contiguous() for x in (k_scale, v_scale))
    scale = launch.scale if call.scale is None else call.scale
    heads, most = w.heads, w.most
    groups = most * heads
    # Counters of blocks lie behind the shares, so that one launch sets both to zero.
    counts = lists.behind(3 * groups * w.work)
    ends = None if launch.steps is None else index[2]
    programs = _programs(launch, w)
    for head0, first in itertools.product(range(0, g.HKV, heads), range(0, g.tokens, w.tokens)):
        tokens = min(w.tokens, g.tokens - first)
        sizes = (g.B, g.S, g.S_kv, g.HKV, heads, head0, g.n, launch.size, w.slots)
        if w.slots and len(launch.lists) == 1:
            launch.lists[0].launch(
                (groups, 1, 1), device, (*index, served, block, rank, counts, start, lists, unit),
                (*sizes, w.blocks, first, tokens, w.window, w.work, w.slot_bits), narrow,
            )  # fmt: skip
        elif w.slots:
            count, scan, scatter = launch.lists
            lists.zero_()
            count.launch(
                (tokens, 1, 1), device, (*index, served, block, span, rank, counts),
                (*sizes, w.blocks, first, w.window), narrow,
            )  # fmt: skip
            scan.launch((groups, 1, 1), device, (counts, start, lists, None, ends), (g.B, w.blocks, w.work), narrow)
            scatter.launch(
                (-(-tokens * w.row // ELEMENTS), 1, 1), device, (block, rank, start, None, unit),
                (heads, w.slots, w.blocks, tokens, w.window, w.window, w.slot_bits), narrow,
            )  # fmt: skip
        for i in range(-(-tokens // w.window)):
            here = first + i * w.window
            if w.slots:
                launch.partial.launch(
                    (programs, heads, -(-g.G // tile.HEADS)), device,
                    (q, k, v, parts, part_lse, *index, block_table, k_scale, span, unit, lists),
                    (
                        *sizes, here, w.window, i, most, w.work, w.slot_bits, g.pages, *g.strides[:9], scale,
                        g.stride_tb,
                    ),
                    narrow,
                )  # fmt: skip
            now = min(w.window, tokens - i * w.window)
            (launch.merge if lse is None else launch.merge_lse).launch(
                (now * heads, -(-g.G // tile.merge_heads), 1), device,
                (parts, part_lse, block, q, k, v, out, lse, *index, block_table, served, k_scale, v_scale),
                (*sizes, here, now, i * w.window, g.pages, *g.strides, scale, g.stride_tb), narrow,
            )  # fmt: skip
    return out, lse
