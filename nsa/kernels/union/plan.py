"""Union forward: lists the union of each tile and computes tiles whose union is small. Another family does the rest.

The host does not wait for the device. The other family is launched for all rows and skips those that are served, so a
captured graph replays with other selections. The kernels are in ``kernel.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.launch import TMA, Size, Variant, remembered
from nsa.kernels.shared.shape import Shape, prepared
from nsa.kernels.shared.sizes import ALWAYS, INT32_MAX, MOST_END, MOST_KEYS, Worth, tiles_at_once
from nsa.kernels.union import kernel as union_kernels
from nsa.kernels.union import tiles


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    list: Variant
    unions: tuple[Variant, Variant]  # without LSE, and with it
    by_pointers: tuple[Variant, Variant]  # the same without TMA, if a tensor is misaligned or the scale not positive
    device: torch.device
    tile: tiles.Tile
    worth: Worth
    shape: Shape
    size: int  # keys of a block
    tiles_of_call: int
    at_once: int  # tiles of a pass
    room: tuple[Size, ...]  # the workspace of a pass: lists, numbers of their blocks, and `served` of all passes
    narrow: bool  # all sizes fit int32
    scale: float  # of a call that names none
    rest: Any  # key-major's or query-major's launch, for the other tiles
    pins: dict[str, Exact]  # with these, another call compiles the same variants, and reads unions of any size
    unites: bool = True  # no row of the guard's small call may list a block twice

    @property
    def queries(self) -> int:
        """Of the guard's small call: a tile, and a token."""
        return self.tile.TOKENS + 1

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (self.list, *self.unions, *self.by_pointers, *self.rest.variants)


def plan(call: Call, shape: Shape, rest: Any) -> Launch:
    """Tiles and run-time sizes of a launch.

    Args:
        rest: key-major's or query-major's launch, which skips rows that are served.

    Raises:
        DoesNotFit: the call has more query heads, slots or keys than a tile holds.
    """
    g, device, dtype, block_size = shape, call.q.device, call.q.dtype, call.block_size
    assert block_size is not None
    capability = gpu.chip(device).capability
    pin = call.settings.pin.get("union")
    exact = isinstance(pin, Exact)
    if exact:
        tile: tiles.Tile | None = tiles.Tile(*pin.tile)
    else:
        tile = tiles.select(capability, dtype.itemsize, g.G, g.D, g.Dv, g.n, block_size, pin)
    if tile is None:
        heads = "at most 32 query heads a KV head (16 with wide head dims, 8 in fp32)"
        blocks = f"1 to {tiles.MOST_ENTRIES // 2} blocks a row"
        raise DoesNotFit(f"union: expected {heads}, {blocks}, got {g.G} heads and {g.n} blocks")
    if not tiles.fits(g.S_kv, block_size):
        most = f"at most {MOST_KEYS} keys in {tiles.MOST_BLOCKS} blocks that end at {MOST_END} or before"
        raise DoesNotFit(f"union: expected {most}, got {g.S_kv} keys in blocks of {block_size}")
    pins = {"union": Exact(tuple(tile)), **rest.pins}
    tiled = block_size % tile.BLOCK_N == 0
    size = min(block_size, -(-max(g.S_kv, 1) // tile.BLOCK_N) * tile.BLOCK_N)  # no tiles past the last key
    # TMA takes strides of K and V that are positive multiples of 16 bytes. A tile must lie in one page.
    aligned = g.unit * call.k.dtype.itemsize % 16 == 0 and g.page % tile.BLOCK_N == 0
    positive = all(min(x.stride()[:-1]) > 0 and x.numel() > 0 for x in (call.k, call.v))
    tile = tile._replace(TMA=tile.TMA and TMA and tiled and aligned and positive)
    shared: dict[str, Any] = {
        "G": g.G, "D": g.D, "Dv": g.Dv, "LAYOUT": g.layout, "PAGE": g.page, "CAUSAL": call.causal, "TILED": tiled,
        "ONE_TILE": block_size <= tile.BLOCK_N, "STRIDE_UNIT": g.unit, "INPUT_PRECISION": "ieee",
    }  # fmt: skip
    kinds, steps = (device, dtype, *call.dtypes()), rest.steps is not None
    lists, *unions = _variants(kinds, tile, steps, **shared)
    _, *by_pointers = _variants(kinds, tile._replace(TMA=False), steps, **shared)
    narrow = max(g.B, g.S, g.S_kv, g.HKV, g.n, size, *g.strides, g.pages, g.stride_tb) <= INT32_MAX
    worth = ALWAYS if exact else (pin and pin.worth) or tiles.worth(block_size)
    worth = worth._replace(gain=worth.gain * tile.HEADS)
    tiles_of_call, listed = -(-g.tokens // tile.TOKENS), g.HKV * tile.TOKENS * tile.SLOTS
    at_once = tiles_at_once(tiles_of_call, 8 * listed)
    room = (
        (at_once * listed, torch.int64),
        (at_once * g.HKV, torch.int32),
        None if steps else (g.tokens * g.HKV, torch.int32),  # the steps' launch makes it
    )
    return Launch(
        lists, tuple(unions), tuple(by_pointers), device, tile, worth, g, size, tiles_of_call, at_once, room,
        narrow, 1.0 / math.sqrt(g.D), rest, pins,
    )  # fmt: skip


@remembered
def _variants(kinds: tuple[object, ...], tile: tiles.Tile, steps: bool, **shared: Any) -> tuple[Variant, ...]:
    """The kernels for a tile and the compile-time arguments ``shared``. Plans that differ only in sizes share them.

    Returns the list kernel, and the union kernel without and with LSE. Kernels for another device or other dtypes
    (``kinds``) are other entries of the cache.
    """
    lists = {name: shared[name] for name in ("LAYOUT", "CAUSAL")} | {"STEPS": steps}
    lists |= {"TOKENS": tile.TOKENS, "SLOTS": tile.SLOTS}
    whole = shared | {name: getattr(tile, name) for name in tiles.Tile._fields if name.isupper()}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    of_tma = {1: [1, 1, tile.BLOCK_N, tile.BLOCK_D], 2: [1, 1, tile.BLOCK_N, tile.BLOCK_DV]} if tile.TMA else {}
    return (
        Variant(union_kernels._list_kernel, lists, {"num_warps": 4 if tile.TOKENS * tile.SLOTS > 256 else 1}),
        *(Variant(union_kernels._union_kernel, whole, options, blocks=of_tma) for _ in range(2)),
    )


def forward(launch: Launch, call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels. Arguments and results as of :func:`nsa.kernels.query_major.plan.forward`."""
    q, k, v = call[:3]
    device, tile, g, narrow = launch.device, launch.tile, launch.shape, launch.narrow
    out, lse, selection, *index, block_table = prepared(call, g)
    if g.tokens == 0:
        return out, lse
    call = call if call.out is out else call.into(out)
    scale = launch.scale if call.scale is None else call.scale
    lists, count, served = launching.divided(device, launch.room)
    launches[route] += 1
    tma = tile.TMA and scale > 0 and (k.data_ptr() | v.data_ptr()) % 16 == 0
    union = (launch.unions if tma else launch.by_pointers)[lse is not None]
    if served is None:
        served = launch.rest.serve_steps(call, lse)
    for first in range(0, launch.tiles_of_call, launch.at_once):
        now = min(launch.at_once, launch.tiles_of_call - first)
        sizes = (g.B, g.S, g.S_kv, g.HKV)
        launch.list.launch(
            (now, g.HKV, 1), device, (selection, *index, lists, count, served),
            (*sizes, g.n, launch.size, g.tokens, first, *launch.worth), narrow,
        )  # fmt: skip
        union.launch(
            (now * g.HKV, 1, 1), device, (q, k, v, out, lse, *index, block_table, lists, count, served),
            (*sizes, launch.size, g.tokens, first, now, g.pages, *g.strides, scale, g.stride_tb), narrow,
        )  # fmt: skip
    return launch.rest.serve(call, None, served, lse)  # type: ignore[no-any-return]
