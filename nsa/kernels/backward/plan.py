"""Backward: lists which rows selected each block and sums dK and dV block by block.

dQ is computed in one of three ways: from parts, which the kernel of dK and dV writes for each block of a row; row by
row; or tile by tile from the union of the blocks of neighbouring tokens. If both unions and parts serve a call, blocks
are listed once for the rows of each. Rows with unions need no parts, and a launch that writes none is faster. All lists
follow from the selection, so they can be made for KV heads whose keys are not there yet (``lists.py``).

The host does not wait for the device: grids follow from shapes. There are no float atomics, and every sum has a fixed
order, so gradients are equal bit by bit from run to run. Tokens are processed in windows, which bounds the workspace.
The kernels are in ``shared/inverse_index.py``, ``kernel.py`` and ``union_dq.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.backward import kernel as backward_kernels
from nsa.kernels.backward import lists as listing
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.backward.lists import COUNTED, ELEMENTS, STRIPPED, Lists, Window
from nsa.kernels.backward.union_dq import _union_dq_kernel
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared import inverse_index
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import TRITON, Variant, remembered, workspaces
from nsa.kernels.shared.shape import RANGES, TILED, Shape, shape_of
from nsa.kernels.shared.sizes import ALWAYS, INT32_MAX, span_bucket, tiles_at_once
from nsa.kernels.union import kernel as union_kernels
from nsa.kernels.union import tiles as union_tiles

STATS_ROWS = 4
GATHERED = 16  # query heads of a program that adds parts of dQ; fewer programs mean less time for rows without parts
SUM_ROWS = 16  # keys of a program that adds partial sums
MOST_KEYS = (2**16 - 1) * SUM_ROWS  # of a block, because the third axis of a grid has at most 65,535 programs
PIPELINES = TRITON >= (3, 3)  # Triton 3.1 cannot pipeline loads whose addresses were loaded, too
STRIDES = " ".join(f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split())
SHARES = "slots blocks first tokens window work slot_bits several"
NUMBERS: dict[str, Any] = {  # a kernel's ints at run time, picked from their names' values, in the kernel's order
    name: itemgetter(*names.split())
    for name, names in {
        "dq": f"B S S_kv HKV n size tokens {STRIDES}",
        "list": "B S S_kv HKV n size tokens first cost gain",
        "union_dq": f"B S S_kv HKV list0 size tokens first tiles {STRIDES}",
        "order": "B S S_kv HKV heads head0 n size slots blocks first now strip mark",
        "strip": "heads blocks strips",
        "scan": "B blocks work",
        "scatter": "heads slots blocks now window strip slot_bits",
        "dkdv": f"B S S_kv HKV sum_heads heads head0 list0 n size {SHARES} {STRIDES}",
        "sum": "B S_kv sum_heads head0 list0 size slots blocks first window slot_bits several",
        "gather": "HKV heads here head0 list0 served0 slots first",
    }.items()
}


class Pass(NamedTuple):
    """How blocks are listed, and dK and dV summed over the lists, with or without parts of dQ."""

    kernels: dict[str, Variant]
    windows: backward_tiles.Windows
    tile: backward_tiles.Tile
    sizes: dict[str, int]  # run-time arguments by name, except those that differ between windows


class Unions(NamedTuple):
    """How dQ of tiles of neighbouring tokens is taken from the union of their blocks."""

    kernels: dict[str, Variant]
    tile: union_tiles.Tile
    sizes: dict[str, int]
    at_once: int  # tiles of one launch


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    kernels: dict[str, Variant]
    parts: Pass | None  # for rows whose dQ is summed from parts
    alone: Pass  # for other rows: writes no parts of dQ
    unions: Unions | None
    device: torch.device
    shape: Shape
    narrow: bool  # all sizes fit int32
    scale: float  # the default, for calls without `scale`
    pins: dict[str, Exact]  # with these, another call compiles the same variants, and reads unions of any size
    unites: bool  # no row of the guard's small call may list a block twice

    @property
    def queries(self) -> int:
        """Of the guard's small call: so many that a block has several shares, if all rows select it; or a tile."""
        if self.unions is not None:
            return self.unions.tile.TOKENS + 1
        return min(3 + max(self.usual.tile.share, self.alone.tile.share) // max(self.shape.n - 2, 1), 300)

    @property
    def usual(self) -> Pass:
        """The pass of all rows where there are no unions."""
        return self.parts or self.alone

    @property
    def variants(self) -> tuple[Variant, ...]:
        groups = (self, *(group for group in (self.parts, self.alone, self.unions) if group is not None))
        return tuple(variant for group in groups for variant in group.kernels.values())

    def list_bytes(self, heads: int) -> int:
        """Bytes that :func:`lists` keeps for so many KV heads, to within a few in a hundred.

        Lists of unions have room for all KV heads of the larger call.
        """
        unions, total = self.unions, 0
        if unions is not None:
            total = self.shape.tokens * unions.sizes["HKV"] * (8 * unions.tile.SLOTS + 4)
        for how in (self.usual,) if self.unions is None else (self.usual, self.alone):
            w, windows = how.windows, -(-self.shape.tokens // how.windows.window)
            kept = 1 + (how is self.parts) + (self.shape.source == RANGES)
            total += heads * windows * 4 * (kept * w.window * w.slots + 3 * w.blocks + 3 * w.work)
        return total

    def run(
        self, kernels: dict[str, Variant], sizes: dict[str, int], name: str, grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...], *more: float,
    ) -> None:  # fmt: skip
        """Launch one of ``kernels`` with the sizes that `NUMBERS` names for it."""
        numbers = NUMBERS[name.removesuffix("_some")](sizes)
        kernels[name].launch(grid, self.device, tensors, (*numbers, *more), self.narrow)


def plan(call: Call, shape: Shape | None = None, within: int | None = None) -> Launch:
    """Tiles, windows and run-time sizes of a backward pass. They hold for every call with the same key.

    Args:
        within: KV heads of the larger call of which ``call`` has some, see :func:`add`. The parts of dQ of few heads
            take three quarters of `DQ_BYTES`, because few heads have long windows with less memory, too.

    Raises:
        DoesNotFit: more keys or KV heads than the kernels count, blocks of more than `MOST_KEYS` keys, or a workspace
            that is too large.
    """
    device, dtype = call.q.device, call.q.dtype
    g = (shape_of(call) if shape is None else shape).without_output()
    G, D, Dv, spans = g.G, g.D, g.Dv, call.block_size is None
    size, blocks, slots = key_tiles.grid("backward", g.B, g.S_kv, g.HKV, g.n, call.block_size, g.packed, g.bound)
    if size > MOST_KEYS:
        raise DoesNotFit(f"backward: expected blocks of {MOST_KEYS} keys or fewer, got {size}")
    capability = gpu.chip(device).capability
    HKV = within or g.HKV
    sizes = {"B": g.B, "S": g.S, "S_kv": g.S_kv, "HKV": HKV, "n": g.n, "size": size, "tokens": g.tokens}
    sizes |= {"sum_heads": g.HKV, "rows": g.tokens * G * HKV} | dict(zip(STRIDES.split(), g.strides, strict=True))
    dq_bytes = backward_tiles.DQ_BYTES * max(4 * g.HKV, 3 * HKV) // (4 * HKV)
    shared = {"G": G, "D": D, "Dv": Dv, "LAYOUT": g.layout, "CAUSAL": call.causal, "STRIDE_UNIT": g.unit}
    shared |= {"INPUT_PRECISION": "ieee"}
    kinds = device, dtype, *call.dtypes()
    pin = call.settings.pin.get("backward")
    exact = pin if isinstance(pin, Exact) else None
    bucket = span_bucket(g.n, g.S_kv) if exact is None else exact.more[2]

    def pass_of(parts: bool) -> Pass:
        if exact is not None:
            tile = backward_tiles.Tile(*(exact.tile if parts else exact.more[0]))
        else:
            tile = backward_tiles.select(capability, dtype.itemsize, G, D, Dv, size, spans, pin, PIPELINES, parts)
        w = backward_tiles.windows(
            g.tokens, g.HKV, G, D, Dv, dtype.itemsize, slots, blocks, size, tile.share, tile.keep_dq, spans, dq_bytes
        )
        window = {name: getattr(w, name) for name in "heads slots blocks window work slot_bits strip several".split()}
        kernels = _pass((*kinds, parts), tile, bucket, g.source, **shared)
        return Pass(kernels, w, tile, sizes | window)

    usual = pass_of(True)
    tile = usual.tile
    alone = pass_of(False) if tile.keep_dq else usual
    tiled = not spans and size % tile.BLOCK_L == 0 and bucket * size + g.S_kv <= INT32_MAX
    tiled = tiled if exact is None else exact.more[3]
    source = TILED if tiled else g.source
    by_row = _by_row(kinds, tile, bucket, source, **shared)
    unions = _unions(call, g, sizes, shared, exact) if tile.keep_dq else None
    narrow = max(*alone.sizes.values(), *usual.sizes.values()) <= INT32_MAX
    told = Exact(tuple(tile), (tuple(alone.tile), None if unions is None else tuple(unions.tile), bucket, tiled))
    parts, scale = usual if tile.keep_dq else None, 1.0 / math.sqrt(D)
    return Launch(by_row, parts, alone, unions, device, g, narrow, scale, {"backward": told}, unions is not None)


def _unions(
    call: Call, g: Shape, sizes: dict[str, int], shared: dict[str, Any], exact: Exact | None
) -> Unions | None:
    """How unions are read, or None: for small calls or groups, `batch_invariant`, old Tritons, or if no tile fits."""
    rule: backward_tiles.Unions = call.settings.pin.get("backward_unions") or backward_tiles.Unions()
    if exact is not None:
        rule = backward_tiles.Unions(0 if exact.more[1] else 2**62, 0, ALWAYS)
    small = g.tokens * g.G * g.HKV * g.G < rule.rows or g.G < rule.least_G
    if small or call.settings.batch_invariant or not PIPELINES:
        return None
    tile = backward_tiles.union(
        gpu.chip(call.q.device).capability, call.q.dtype.itemsize, g.G, g.D, g.Dv, g.n, sizes["size"]
    )
    tile = tile if exact is None else union_tiles.Tile(*exact.more[1])
    if tile is None or not union_tiles.fits(g.S_kv, sizes["size"]):
        return None
    cost, gain = rule.worth
    at_once = tiles_at_once(-(-g.tokens // tile.TOKENS), 8 * sizes["HKV"] * tile.TOKENS * tile.SLOTS)
    kernels = _by_union((call.q.device, call.q.dtype, *call.dtypes()), tile, **shared)
    return Unions(kernels, tile, sizes | {"cost": cost, "gain": gain * tile.HEADS}, at_once)


@remembered
def _pass(
    kinds: tuple[object, ...], tile: backward_tiles.Tile, spans: int, source: int, **shared: Any
) -> dict[str, Variant]:
    """The kernels of a pass for a tile and the compile-time arguments ``shared``. Plans of other sizes share them.

    Kernels for another device or other dtypes, and kernels that may leave parts of dQ (``kinds``), are other entries
    of the cache.
    """
    wide = {"BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV}
    order = {"SOURCE": source, "LAYOUT": shared["LAYOUT"], "CAUSAL": shared["CAUSAL"], "CHUNK": COUNTED}
    order |= {"SPANS": spans if source == RANGES else 1}
    dkdv = {**shared, **wide, "SOURCE": source, "SHARE": tile.share}
    dkdv |= {"HEADS": tile.HEADS, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
    total = {**wide, "D": shared["D"], "Dv": shared["Dv"], "LAYOUT": shared["LAYOUT"]}
    total |= {"SHARE": tile.share, "AT_ONCE": 4, "BLOCK_N": min(SUM_ROWS, tile.BLOCK_N)}
    gather = {"G": shared["G"], "D": shared["D"], "BLOCK_D": tile.BLOCK_D}
    gather |= {"HEADS": min(tile.dq_heads, GATHERED), "AT_ONCE": 4}
    one, four, some = {"num_warps": 1}, {"num_warps": 4}, {"num_warps": max(1, gather["HEADS"] // 4)}
    return {
        "order": Variant(inverse_index._order_kernel, order, one),
        "strip": Variant(inverse_index._strip_kernel, {"CHUNK": STRIPPED, "AT_ONCE": 32}, four),
        "scan": Variant(inverse_index._scan_kernel, {"SHARE": tile.share, "STEPS": 0, "CHUNK": ELEMENTS}, four),
        "scatter": Variant(inverse_index._scatter_kernel, {"CHUNK": ELEMENTS}, four),
        "dkdv": Variant(backward_kernels._dkdv_kernel, dkdv, {"num_warps": tile.warps, "num_stages": tile.stages}),
        "sum": Variant(backward_kernels._sum_kernel, total, four),
        "gather": Variant(backward_kernels._gather_kernel, gather, some),
        # Launches that leave out rows are variants of their own.
        "order_some": Variant(inverse_index._order_kernel, order, one),
        "gather_some": Variant(backward_kernels._gather_kernel, gather, some),
    }


@remembered
def _by_row(
    kinds: tuple[object, ...], tile: backward_tiles.Tile, spans: int, source: int, **shared: Any
) -> dict[str, Variant]:
    """The kernels that go by rows, not by blocks. Arguments as of :func:`_pass`."""
    dq = shared | {"BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV, "SOURCE": source, "SPANS": spans}
    dq |= {"HEADS": tile.dq_heads, "BLOCK_G": tile.BLOCK_G, "BLOCK_L": tile.BLOCK_L}
    options = {"num_warps": tile.dq_warps, "num_stages": tile.dq_stages}
    return delta_kernels(shared["Dv"], tile.BLOCK_DV) | {"dq": Variant(backward_kernels._dq_kernel, dq, options)}


def delta_kernels(Dv: int, block_dv: int) -> dict[str, Variant]:
    """The kernels of :func:`statistics`, without and with gradients of LSE."""
    delta = {"Dv": Dv, "BLOCK_DV": block_dv, "ROWS": STATS_ROWS}
    return {name: Variant(backward_kernels._delta_kernel, delta, {"num_warps": 1}) for name in ("delta", "delta_lse")}


@remembered
def _by_union(kinds: tuple[object, ...], tile: union_tiles.Tile, **shared: Any) -> dict[str, Variant]:
    """The kernels that list unions and take dQ from them. Arguments as of :func:`_pass`."""
    cut = {"TOKENS": tile.TOKENS, "SLOTS": tile.SLOTS}
    lists = {"LAYOUT": shared["LAYOUT"], "CAUSAL": shared["CAUSAL"], "STEPS": False, **cut}
    dq = shared | cut | {name: getattr(tile, name) for name in ("HEADS", "BLOCK_D", "BLOCK_DV", "BLOCK_N")}
    return {
        "list": Variant(union_kernels._list_kernel, lists, {"num_warps": 4 if tile.TOKENS * tile.SLOTS > 256 else 1}),
        "union_dq": Variant(_union_dq_kernel, dq, {"num_warps": tile.warps, "num_stages": tile.stages}),
    }


def backward(
    launch: Launch, call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, route: str,
    wanted: tuple[bool, ...] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a forward call.

    Args:
        do, dlse: gradients of ``o`` and ``lse``, in their shapes and dtypes; ``dlse`` may be None.
        o, lse: what the forward call returned; ``lse`` natural log.
        route: name counted in :data:`nsa.kernels.launches`.
        wanted: which gradients of ``q``, ``k`` and ``v`` are needed. Others are returned as empty tensors. dK and dV
            are computed together.

    Returns:
        ``(dq, dk, dv)``, contiguous, in the shapes and dtypes of ``q, k, v``.
    """
    q, k, v = call.q, call.k, call.v
    assert call.selection is not None
    g = launch.shape
    dq = torch.empty(q.shape if wanted[0] else (0,), dtype=q.dtype, device=launch.device)
    if g.tokens == 0 or k.shape[:-2].numel() == 0 or g.n == 0:
        return dq.zero_(), k.new_zeros(k.shape if wanted[1] else 0), v.new_zeros(v.shape if wanted[2] else 0)
    do, o, lse, dlse = (x if x is None else x.contiguous() for x in (do, o, lse, dlse))  # type: ignore[assignment]
    if not call.selection.is_contiguous():
        name = "block_indices" if call.ranges is None else "ranges"
        call = call._replace(**{name: call.selection.contiguous()})
    stats = statistics(launch, do, dlse, o, lse)
    if not (wanted[1] or wanted[2]):
        add(launch, call, do, stats, dq, None, route)
        return dq, k.new_empty(0), v.new_empty(0)
    keys = k.shape[:-2].numel()
    dk = torch.zeros((keys, g.HKV, g.D), dtype=torch.float32, device=launch.device)
    dv = torch.zeros((keys, g.HKV, g.Dv), dtype=torch.float32, device=launch.device)
    add(launch, call, do, stats, dq if wanted[0] else None, (dk, dv), route)
    dk = dk.view(k.shape).to(k.dtype) if wanted[1] else k.new_empty(0)
    return dq, dk, dv.view(v.shape).to(v.dtype) if wanted[2] else v.new_empty(0)


def statistics(launch: Any, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor) -> Tensor:
    """What the other kernels need of each row: ``[2, rows]`` fp32, base-2 LSE and delta. All tensors are contiguous.

    ``launch`` is of this family or of small blocks, with the kernels of :func:`delta_kernels`.
    """
    rows = lse.numel()
    (stats,) = workspaces(launch.device, stats=(2 * rows, torch.float32))
    name, grid = "delta" if dlse is None else "delta_lse", (-(-rows // STATS_ROWS), 1, 1)
    launch.kernels[name].launch(grid, launch.device, (o, do, lse, dlse, stats), (rows,), launch.narrow)
    return stats


def add(
    launch: Launch, call: Call, do: Tensor, stats: Tensor, dq: Tensor | None, sums: tuple[Tensor, Tensor] | None,
    route: str, made: Lists | None = None, head: int = 0,
) -> None:  # fmt: skip
    """Write dQ, and add to dK and dV; None for gradients that are not needed.

    The call may have some KV heads of a larger one (``within`` of :func:`plan`). Then the selection, ``do``, ``stats``
    and ``dq`` are views of the larger call's tensors, which are contiguous, from the first of these heads on.

    Args:
        stats: of :func:`statistics`.
        sums: dK and dV ``[keys, HKV, D | Dv]`` fp32.
        route: as of :func:`backward`.
        made: the :func:`lists` of these and other KV heads, if they were made before. Then neither ``dq`` nor ``sums``
            may be None.
        head: number of the call's first KV head in ``made``.
    """
    launches[route] += 1
    index = _index(call)
    scale = launch.scale if call.scale is None else call.scale
    x = _Inputs(launch, (call.q, call.k, call.v, do, stats), index, scale)
    if dq is not None and (launch.parts is None or sums is None):
        g, usual = launch.shape, launch.usual
        grid = (g.tokens * g.HKV, -(-g.G // usual.tile.dq_heads), 1)
        launch.run(launch.kernels, usual.sizes, "dq", grid, (*x.given, dq, *x.index), scale)
    if sums is None:
        return
    made = made or listing.make(launch, index, launch.shape.HKV, parts=dq is not None)
    if made.served is not None:
        assert dq is not None
        _by_unions(x, made, dq, head)
    for how, windows in made.passes:
        _by_blocks(x, how, windows, sums, dq if how is launch.parts else None, made.served, head)


def lists(launch: Launch, call: Call, heads: int) -> Lists:
    """The lists of so many KV heads of a larger call, for several calls of :func:`add` with its launch.

    ``call`` is as of :func:`add`, but its selection begins with the first of these heads. Only the selection, positions
    and lengths are read.
    """
    return listing.make(launch, _index(call), heads, keep=True)


def _index(call: Call) -> tuple[Tensor | None, ...]:
    index = (x if x is None else x.contiguous() for x in (call.q_positions, call.cu_seqlens_q, call.cu_seqlens_k))
    return call.selection, *index


class _Inputs(NamedTuple):
    """What the kernels of a pass read."""

    launch: Launch
    given: tuple[Tensor, ...]  # q, k, v, dO and the statistics of rows
    index: tuple[Tensor | None, ...]  # the selection, query positions, `cu_seqlens_q` and `cu_seqlens_k`
    scale: float


def _by_unions(x: _Inputs, made: Lists, dq: Tensor, head: int) -> None:
    """Write dQ of tiles whose union is worth reading."""
    launch, given, index, scale = x
    unions = launch.unions
    assert unions is not None
    for at in made.tiles:
        sizes = unions.sizes | {"list0": head, "first": at.first, "tiles": at.tiles}
        tensors = (*given, dq, *index[1:], at.lists, at.count)
        launch.run(unions.kernels, sizes, "union_dq", (at.tiles * launch.shape.HKV, 1, 1), tensors, scale)


def _by_blocks(
    x: _Inputs, how: Pass, windows: Iterable[Window], sums: tuple[Tensor, Tensor], dq: Tensor | None,
    served: Tensor | None, head: int,
) -> None:  # fmt: skip
    """Add to dK and dV window by window; write ``dq``, if its parts are kept, too, but not for rows that are served."""
    launch, given, index, scale = x
    w, tile, g = how.windows, how.tile, launch.shape
    here, size, f32 = w.heads, how.sizes["size"], torch.float32
    dk_part, dv_part, dq_part = workspaces(
        launch.device,
        dk_part=(here * w.several * size * g.D, f32),
        dv_part=(here * w.several * size * g.Dv, f32),
        dq_part=None if dq is None else (w.window * here * w.slots * g.G * g.D, given[0].dtype),
    )
    sum_rows = how.kernels["sum"].constexprs["BLOCK_N"]
    gathered = how.kernels["gather"].constexprs["HEADS"]
    some = "" if served is None else "_some"
    for at in windows:
        for first in range(max(head, at.head0), min(head + g.HKV, at.head0 + at.heads), here):
            of_heads = {"heads": at.heads, "head0": first - head, "list0": first - at.head0, "served0": first}
            run = partial(launch.run, how.kernels, {**how.sizes, **of_heads, "here": here, "first": at.first})
            run(
                "dkdv", (w.work, here, -(-size // tile.BLOCK_N)),
                (
                    *given, *sums, dk_part, dv_part, dq_part, *index, at.span, at.unit, at.count, at.start, at.part,
                    at.work,
                ),
                scale,
            )  # fmt: skip
            run(
                "sum", (w.blocks, here, -(-size // sum_rows)),
                (dk_part, dv_part, *sums, at.unit, at.count, at.start, at.part, *index[2:]),
            )  # fmt: skip
            if dq_part is not None:
                grid = (at.now * here, -(-g.G // gathered), 1)
                run(f"gather{some}", grid, (dq_part, at.block, served, dq))
