"""Small blocks forward: cuts a call into rows, or into tiles of neighbouring tokens and the rows that these leave.

The host does not wait for the device. The kernel for rows is launched for all rows and skips those that tiles served,
so a captured graph replays with other selections. The kernels are in ``kernel.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.shared import compiler, sizes
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared.combine import combine
from nsa.kernels.shared.errors import ODD, DoesNotFit
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import Variant, remembered, workspaces
from nsa.kernels.shared.shape import BATCH, CACHE, Shape
from nsa.kernels.shared.sizes import ALWAYS, INT32_MAX, Worth
from nsa.kernels.small_blocks import kernel as kernels
from nsa.kernels.small_blocks import tiles


class Unions(NamedTuple):
    """The launch of tiles of neighbouring tokens."""

    list: Variant
    unions: tuple[Variant, Variant]  # without LSE, and with it
    tile: tiles.Unions
    worth: Worth
    tiles: int
    at_once: int  # tiles of a pass
    programs: int  # of the list kernel
    blocks: int  # of a sequence


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    rows: tuple[Variant, ...]  # without LSE, and with it
    device: torch.device
    splits: int
    grid: tuple[int, int, int]
    shape: Shape
    run: int  # tokens that follow each other; no tile takes tokens of two runs
    lists: int  # of a token: 1 if all KV heads share one, else one for each
    steps: tuple[int, int] | None  # elements from a token's list to the next, and from a KV head's; None: copied first
    narrow: bool  # all sizes fit int32
    scale: float  # of a call that names none
    alike: bool  # offsets of keys are those of values
    pairs: bool  # values are read in pairs of bytes
    unions: Unions | None
    unites: bool  # no row of the guard's small call may list a block twice
    pins: dict[str, Exact]  # with these, another call compiles the same variants, and reads unions of any size

    @property
    def queries(self) -> int:
        """A tile, and a token."""
        return 3 if self.unions is None else self.unions.tile.TOKENS + 1

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.rows if self.unions is None else (*self.rows, self.unions.list, *self.unions.unions)


def plan(call: Call, shape: Shape) -> Launch:
    """Tiles, splits and run-time sizes of a launch."""
    g, device, dtype, size = shape, call.q.device, call.q.dtype, call.block_size
    assert size is not None and call.block_indices is not None
    capability, processors, _, ptx = gpu.chip(device)
    pin = call.settings.pin.get("small_blocks")
    choice = tiles.RULES if pin is None or isinstance(pin, Exact) else pin
    items = call.k.dtype.itemsize, dtype.itemsize
    tile: tiles.Unions | None
    alike = g.strides[3:5] == g.strides[6:8]
    run = g.S if g.layout in (BATCH, CACHE) else max(g.tokens, 1)
    if isinstance(pin, Exact):
        rows, (splits, union, was_alike, together) = tiles.Rows(*pin.tile), pin.more
        alike = alike and was_alike
        tile, worth = None if union is None else tiles.Unions(*union), ALWAYS
    else:
        tile, worth = _unions(call, g, run, capability, items, choice), choice.worth
        if tile is not None:  # the rows that tiles leave are split like the unions, because one kernel merges both
            parts = tiles.union_splits(_tiles(g, run, tile) * g.HKV, processors, g.n * size, choice)
            choice = choice._replace(splits=parts)
        rows, splits = tiles.choose(
            capability, processors, *items, g.G, g.D, g.Dv, g.n * size, g.tokens * g.HKV, choice,
            call.settings.batch_invariant, call.settings.sel_triton_db,
        )  # fmt: skip
        # With many rows, one program computes all that a tile left: a program that returns at once takes time, too.
        programs = g.tokens * g.HKV * -(-g.G // rows.HEADS)
        together = tile is not None and splits == 1 and programs > choice.left * processors
    number = 0 if tile is None else _tiles(g, run, tile)
    lists = 1 if call.block_indices.stride()[-2] == 0 else g.HKV
    early = ptx and capability >= 90 and compiler.gdc_wait is not None
    pairs = g.pairs and sizes.pairs(rows.BLOCK_G, rows.BLOCK_DV)
    shared: dict[str, Any] = {
        "G": g.G, "D": g.D, "Dv": g.Dv, "HKV": g.HKV, "SIZE": size, "LAYOUT": g.layout, "PAGE": g.page,
        "CAUSAL": call.causal, "STRIDE_UNIT": g.unit, "K_STEP": g.k_step, "V_STEP": g.v_step, "INPUT_PRECISION": "ieee",
    }  # fmt: skip
    kinds = device, dtype, *call.dtypes()
    of_rows = _rows(
        (*kinds, tile is None), rows, splits > 1, early, PAIRS=pairs, ALIKE=alike,
        TOKENS=tile.TOKENS if tile is not None and together else 0, **shared,
    )  # fmt: skip
    unions = None
    if tile is not None:
        blocks = -(-g.S_kv // size)
        once = number if splits > 1 else sizes.tiles_at_once(number, 12 * lists * tile.TOKENS * g.n)
        lister, *united = _of_unions((*kinds, alike), tile, splits > 1, **shared)
        listing = sizes.list_programs(once, lists * blocks)
        unions = Unions(lister, (united[0], united[1]), tile, worth, number, once, listing, blocks)
    programs = (number if together else g.tokens) * g.HKV * -(-g.G // rows.HEADS)
    grid = (programs, splits, 1)
    if tile is not None and together:
        grid = (programs, max(1, min(tile.TOKENS, choice.left * processors // max(programs, 1))), 1)
    steps = steps_of(call.block_indices)
    narrow = max(g.B, g.S, g.S_kv, g.HKV, g.n, g.tokens, *g.strides, g.pages, g.stride_tb, *(steps or ())) <= INT32_MAX
    more = (splits, None if tile is None else tuple(tile), alike, together)
    return Launch(
        of_rows, device, splits, grid, g, run, lists, steps, narrow,
        1.0 / math.sqrt(g.D), alike, pairs, unions, unions is not None, {"small_blocks": Exact(tuple(rows), more)},
    )  # fmt: skip


def _unions(
    call: Call, g: Shape, run: int, capability: int, items: tuple[int, int], choice: tiles.Choice
) -> tiles.Unions | None:
    """Tile of neighbouring tokens for a call; None where rows are computed one by one: where a sequence has one query,
    where there are few tiles, and where a row's result must not depend on its neighbours.
    """
    apart = g.page % (call.block_size or 1) != 0  # a block may lie in two pages
    alone = g.S <= 1 if g.layout in (BATCH, CACHE) else call.max_seqlen_q is not None and call.max_seqlen_q <= 1
    if apart or alone or call.settings.batch_invariant or g.n == 0:
        return None
    assert call.block_size is not None
    choice = choice if call.settings.sel_triton_db else choice._replace(union_stages=1)
    tile = tiles.unions(capability, *items, g.G, g.D, g.Dv, g.n, -(-g.S_kv // call.block_size), choice)
    return None if tile is None or _tiles(g, run, tile) * g.HKV < choice.least else tile


def _tiles(g: Shape, run: int, tile: tiles.Unions) -> int:
    """The number of tiles of a call. No tile takes tokens of two runs of ``run`` tokens."""
    return g.tokens // max(run, 1) * -(-run // tile.TOKENS)


def steps_of(selection: Tensor) -> tuple[int, int] | None:
    """Elements from a token's list to the next, and from a KV head's list to the next, if one number says so."""
    *outer, head, last = selection.stride()
    if last != 1 and selection.shape[-1] > 1:
        return None
    token = outer[-1]
    if len(outer) == 2 and selection.shape[0] > 1 and selection.shape[1]:
        if selection.shape[1] > 1 and outer[0] != token * selection.shape[1]:
            return None
        token = outer[0] // selection.shape[1]
    return token, head


@remembered
def _rows(
    kinds: tuple[object, ...], tile: tiles.Rows, split: bool, early: bool, **decided: Any
) -> tuple[Variant, ...]:
    """The kernel for rows, without and with LSE. Kernels for another device or other dtypes, or with other tensors
    absent (``kinds``), are other entries of the cache.
    """
    constexprs = decided | {name: getattr(tile, name) for name in tile._fields if name.isupper()}
    constexprs |= {"SPLIT": split, "EARLY": early, "OVERLAP": early and split}
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | ({"launch_pdl": True} if early else {})
    return tuple(Variant(kernels._rows_kernel, constexprs, options) for _ in range(2))


@remembered
def _of_unions(kinds: tuple[object, ...], tile: tiles.Unions, split: bool, **shared: Any) -> tuple[Variant, ...]:
    """The list kernel, and the kernel for unions without and with LSE. ``kinds`` as of :func:`_rows`."""
    lists = {name: shared[name] for name in ("SIZE", "LAYOUT", "PAGE", "CAUSAL")}
    lists |= {"TOKENS": tile.TOKENS, "SLOTS": tile.SLOTS}
    whole = shared | {name: getattr(tile, name) for name in tile._fields if name.isupper() and name != "SLOTS"}
    whole |= {"SPLIT": split}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return (
        Variant(kernels._list_kernel, lists, {"num_warps": 4 if tile.SLOTS > 128 else 1}),
        *(Variant(kernels._unions_kernel, whole, options) for _ in range(2)),
    )


def forward(launch: Launch, call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels. Arguments and results as of :func:`nsa.kernels.query_major.plan.forward`."""
    q, k, v, out, selection = call.q, call.k, call.v, call.out, call.block_indices
    assert selection is not None
    device, g, narrow, unions, lists = launch.device, launch.shape, launch.narrow, launch.unions, launch.lists
    if out is None:
        out = torch.empty_like(q) if g.like_q else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[:-1], device=device, dtype=torch.float32) if call.return_lse else None
    if g.tokens == 0:
        return out, lse
    steps = launch.steps
    if steps is None:
        selection = selection[..., :lists, :].contiguous()
        steps = lists * g.n, g.n if lists > 1 else 0
    lengths = call.cu_seqlens_k if call.cache_seqlens is None else call.cache_seqlens
    *about, k_scale, v_scale = (
        x if x is None else x.contiguous()
        for x in (call.q_positions, call.cu_seqlens_q, lengths, call.k_scale, call.v_scale)
    )
    table = call.block_table.contiguous() if g.copies_table and call.block_table is not None else call.block_table
    if launch.pairs and v.data_ptr() % 2:
        raise DoesNotFit(ODD)
    scale = launch.scale if call.scale is None else call.scale
    served = parts = None
    if launch.splits > 1:
        (parts,) = workspaces(device, parts=(launch.splits * g.tokens * q.shape[-2] * (g.Dv + 2), torch.float32))
    direct = None if parts is not None else lse
    if unions is not None:
        tile, n = unions.tile, g.n
        room = tile.TOKENS * n
        every = unions.at_once * lists * room
        entries, keys, values, count, index, served = workspaces(
            device,
            entries=(every, torch.int32),
            keys=(every, torch.int64),
            values=None if launch.alike else (every, torch.int64),
            count=(unions.at_once * lists, torch.int32),
            index=(unions.programs * lists * unions.blocks, torch.int16),
            served=(g.tokens * lists, torch.int32),
        )
        for first in range(0, unions.tiles, unions.at_once):
            now = min(unions.at_once, unions.tiles - first)
            unions.list.launch(
                (min(now, unions.programs), lists, 1), device,
                (selection, *about, table, entries, keys, values, count, served, index),
                (g.B, g.S, g.S_kv, n, g.pages, lists, first, now, launch.run, unions.blocks, room, *unions.worth,
                 *steps, *g.strides[3:5], *g.strides[6:8], g.stride_tb), narrow,
            )  # fmt: skip
            unions.unions[direct is not None].launch(
                (now * g.HKV, launch.splits, 1), device,
                (q, k, v, out, direct, parts, *about, k_scale, v_scale, entries, keys, values, count, served),
                (g.B, g.S, g.S_kv, g.tokens, lists, first, now, launch.run, room, *g.strides, scale), narrow,
            )  # fmt: skip
        launches["small_blocks unions"] += 1
    variant = launch.rows[direct is not None]
    variant.launch(
        launch.grid, device,
        (q, k, v, out, direct, parts, selection, *about, table, k_scale, v_scale, served),
        (g.B, g.S, g.S_kv, g.n, g.tokens, g.pages, lists, launch.run, *steps, *g.strides, scale, g.stride_tb), narrow,
    )  # fmt: skip
    launches[route] += 1
    if parts is not None:
        launches["split"] += 1
        combine(parts, launch.splits, out, lse, bool(variant.constexprs["OVERLAP"]))
    return out, lse
