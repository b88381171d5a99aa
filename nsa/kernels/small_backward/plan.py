"""Backward for small blocks: dQ tile by tile, dK and dV window by window.

The host does not wait for the device: grids follow from shapes. Every sum has a fixed order, so gradients are equal bit
by bit from run to run. Lists are made in passes, which bounds the workspace. The kernels are in ``kernel.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.backward.plan import delta_kernels, statistics
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import Variant, remembered, workspaces
from nsa.kernels.shared.shape import BATCH, Shape
from nsa.kernels.shared.sizes import INT32_MAX, list_programs, tiles_at_once
from nsa.kernels.small_backward import kernel as kernels
from nsa.kernels.small_backward import tiles
from nsa.kernels.small_blocks.plan import steps_of

FEW = 16  # keys, and query rows, of a step of marked windows; also the programs of a marked window


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    kernels: dict[str, Variant]
    tile: tiles.Tile
    device: torch.device
    shape: Shape
    keys: int  # of all sequences
    lists: int  # of a token: 1 if all KV heads share one, else one for each
    steps: tuple[int, int] | None  # as of the forward pass
    programs: int  # of dK and dV, for each window and KV head
    narrow: bool  # all sizes fit int32
    scale: float  # of a call that names none
    pins: dict[str, Exact]  # with these, another call compiles the same variants

    @property
    def queries(self) -> int:
        """Of the guard's small call: more than a window has."""
        return self.tile.WINDOW + 3

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(self.kernels.values())


def plan(call: Call, shape: Shape) -> Launch:
    """Tiles and run-time sizes of a backward pass. They hold for every call with the same key."""
    device, dtype = call.q.device, call.q.dtype
    g = shape.without_output()
    capability = gpu.chip(device).capability
    pin = call.settings.pin.get("small_backward")
    choice = tiles.RULES if pin is None or isinstance(pin, Exact) else pin
    tile = tiles.select(capability, dtype.itemsize, g.G, g.D, g.Dv, g.n, choice)
    tile = tiles.Tile(*pin.tile) if isinstance(pin, Exact) else tile
    assert call.block_indices is not None
    lists = 1 if call.block_indices.stride()[-2] == 0 else g.HKV
    heads = {"G": g.G, "D": g.D, "Dv": g.Dv, "HKV": g.HKV, "STRIDE_UNIT": g.unit, "INPUT_PRECISION": "ieee"}
    size = call.block_size or 1
    programs = max(1, min(choice.programs or tiles.PROGRAMS, -(-tile.WINDOW * g.n * size // tile.BLOCK_N)))
    keys = tiles.keys_of(call, g)
    steps = steps_of(call.block_indices)
    sizes = g.B, g.S, g.S_kv, g.n, g.tokens * g.G * g.HKV, keys, *g.strides, *(steps or ())
    branch = capability == 90 and dtype.itemsize == 2  # for `wgmma`
    long = zip((0, 3, 6), (g.S, g.S_kv, g.S_kv), strict=True)
    flat = g.layout != BATCH or g.B == 1 or all(g.strides[i] == length * g.strides[i + 1] for i, length in long)
    made = _kernels((device, dtype, *call.dtypes()), tile, call.causal, size, g.layout, branch, FLAT=flat, **heads)
    return Launch(
        made, tile, device, g, keys, lists, steps, programs, max(sizes) <= INT32_MAX,
        1.0 / math.sqrt(g.D), {"small_backward": Exact(tuple(tile))},
    )  # fmt: skip


@remembered
def _kernels(
    kinds: tuple[object, ...], tile: tiles.Tile, causal: bool, size: int, layout: int, branch: bool, **heads: Any
) -> dict[str, Variant]:
    """The kernels of a pass. Kernels for another device or other dtypes (``kinds``) are other entries of the cache."""
    made = {"CAUSAL": causal, "SLOTS": tile.SLOTS, "SIZE": size, "LAYOUT": layout}
    wide = heads | {"SIZE": size, "BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV}
    few = {"num_warps": 4 if tile.SLOTS > 128 else 1}
    dq = wide | {name: getattr(tile, name) for name in ("TOKENS", "HEADS", "ROWS", "DQ_N")}
    dkdv = wide | {name: getattr(tile, name) for name in ("WINDOW", "BLOCK_M", "BLOCK_N")}
    often = {"BLOCK_M": FEW, "BLOCK_N": FEW, "OFTEN": True, "BRANCH": False}
    return {
        **delta_kernels(heads["Dv"], tile.BLOCK_DV),
        "lists of tiles": Variant(kernels._unite_kernel, made | {"TOKENS": tile.TOKENS}, few),
        "lists of windows": Variant(kernels._unite_kernel, made | {"TOKENS": tile.WINDOW}, few),
        "dq": Variant(kernels._small_dq_kernel, dq, {"num_warps": tile.dq_warps, "num_stages": tile.dq_stages}),
        "dkdv": Variant(
            kernels._small_dkdv_kernel,
            dkdv | {"OFTEN": False, "BRANCH": branch},
            {"num_warps": tile.warps, "num_stages": tile.stages},
        ),
        "dkdv_often": Variant(kernels._small_dkdv_kernel, dkdv | often, {"num_warps": 4, "num_stages": 1}),
    }


def backward(
    launch: Launch, call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, route: str,
    wanted: tuple[bool, ...] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a forward call. Arguments and results as of :func:`nsa.kernels.backward.plan.backward`."""
    q, k, v, selection = call.q, call.k, call.v, call.block_indices
    assert selection is not None
    g, device, tile, lists = launch.shape, launch.device, launch.tile, launch.lists
    dq = torch.empty(q.shape if wanted[0] else (0,), dtype=q.dtype, device=device)
    if g.tokens == 0 or launch.keys == 0 or g.n == 0:
        return dq.zero_(), k.new_zeros(k.shape if wanted[1] else 0), v.new_zeros(v.shape if wanted[2] else 0)
    do, o, lse, dlse = (x if x is None else x.contiguous() for x in (do, o, lse, dlse))  # type: ignore[assignment]
    steps = launch.steps
    if steps is None:
        selection = selection[..., :lists, :].contiguous()
        steps = lists * g.n, g.n if lists > 1 else 0
    index = [x if x is None else x.contiguous() for x in (call.q_positions, call.cu_seqlens_q, call.cu_seqlens_k)]
    scale, narrow = launch.scale if call.scale is None else call.scale, launch.narrow
    launches[route] += 1
    stats = statistics(launch, do, dlse, o, lse)
    given = q, k, v, do, stats

    def listed(name: str, tokens: int, stats: Tensor | None) -> Any:
        """Make the lists of tiles of so many tokens, pass by pass: the pass's first tile, its tiles, and its lists."""
        room = tokens * g.n  # entries that the union may take: a row that lists a new block twice takes two
        number = -(-g.tokens // tokens)
        once = tiles_at_once(number, 8 * lists * room)
        programs = list_programs(once, lists * launch.keys)
        places, masks, count, bound, where, unsorted = workspaces(
            device,
            places=(once * lists * room, torch.int32),
            masks=(once * lists * room, torch.int32),
            count=(once * lists, torch.int32),
            bound=(2 * g.tokens, torch.int32),
            where=(programs * lists * launch.keys, torch.int32),
            unsorted=None if stats is None else (2 * programs * lists * room, torch.int32),
        )
        for first in range(0, number, once):
            now = min(once, number - first)
            launch.kernels[name].launch(
                (min(now, programs), lists, 1), device,
                (selection, *index, stats, places, masks, count, bound, where, unsorted),
                (g.B, g.S, g.S_kv, g.n, g.tokens, lists, first, now, room, launch.keys, g.G * g.HKV, *steps), narrow,
            )  # fmt: skip
            yield first, now, room, (selection, places, masks, count, bound)

    if wanted[0]:
        for first, now, room, made in listed("lists of tiles", tile.TOKENS, None):
            launch.kernels["dq"].launch(
                (now * -(-g.G // tile.HEADS), g.HKV, 1), device, (*given, dq, *made),
                (g.S, g.S_kv, g.n, g.tokens, lists, first, room, *steps, *g.strides, scale), narrow,
            )  # fmt: skip
    if not (wanted[1] or wanted[2]):
        return dq, k.new_empty(0), v.new_empty(0)
    dk, dv = (torch.zeros((launch.keys, g.HKV, d), dtype=torch.float32, device=device) for d in (g.D, g.Dv))
    for first, now, room, made in listed("lists of windows", tile.WINDOW, stats):
        turns = torch.zeros(2 + now * g.HKV, dtype=torch.int32, device=device)
        for name, programs in ("dkdv", launch.programs), ("dkdv_often", min(launch.programs, FEW)):
            launch.kernels[name].launch(
                (now * g.HKV * programs, 1, 1), device, (*given, dk, dv, *made, turns),
                (g.S, g.S_kv, g.n, g.tokens, lists, first, programs, room, *steps, *g.strides, scale), narrow,
            )  # fmt: skip
    dk = dk.view(k.shape).to(k.dtype) if wanted[1] else k.new_empty(0)
    return dq, dk, dv.view(v.shape).to(v.dtype) if wanted[2] else v.new_empty(0)
