"""Lists of a backward pass: which tiles read unions, and which rows selected each block.

The selection alone decides them, so they can be made before keys are there, and for more KV heads than have keys. The
kernels are in ``union/kernel.py`` and ``shared/inverse_index.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.shared.launch import workspaces
from nsa.kernels.shared.shape import RANGES

if TYPE_CHECKING:
    from nsa.kernels.backward.plan import Launch, Pass, Unions

COUNTED = 32  # slots that a program of the order kernel takes at a time
ELEMENTS = 1024  # elements that a program of the scan or scatter kernel takes at a time
STRIPPED = 32  # blocks of a program of the strip kernel
Index = tuple[Tensor | None, ...]


class Lists(NamedTuple):
    """The lists of some KV heads, from the first of the selection on. ``tiles`` set ``served``, so they come first."""

    tiles: Iterable[Tiles]
    served: Tensor | None  # [tokens, HKV] int32: 1 for rows of tiles that read unions, else 0
    passes: tuple[tuple[Pass, Iterable[Window]], ...]


class Tiles(NamedTuple):
    """The unions of some tiles, for all KV heads. Tensors are pieces of a workspace, as the list kernel writes them."""

    first: int  # the number of the first tile
    tiles: int
    lists: Any
    count: Any


class Window(NamedTuple):
    """The units of a window of tokens, block by block. Tensors are pieces of a workspace, as the kernels write them."""

    head0: int  # the first of its KV heads
    heads: int
    first: int  # its first token
    now: int
    block: Any  # None if no parts of dQ are written
    span: Any
    unit: Any
    count: Any
    start: Any
    part: Any
    work: Any


def make(launch: Launch, index: Index, heads: int, parts: bool = True, keep: bool = False) -> Lists:
    """Lists of so many KV heads.

    Args:
        index: the selection, query positions, `cu_seqlens_q` and `cu_seqlens_k`.
        parts: whether dQ is wanted from these lists: from unions, and from parts. If not, neither is listed.
        keep: lists have memory of their own, and all are made now. Otherwise each is made when it is asked for, in the
            memory of the one before it.
    """
    unions = launch.unions if parts else None
    ways = ((launch.parts if parts and launch.parts is not None else launch.alone, 0),)
    tiles: Iterable[Tiles] = ()
    served = None
    if unions is not None:
        room = launch.shape.tokens * unions.sizes["HKV"], torch.int32
        (served,) = workspaces(launch.device, served=room)  # used after the lists of unions are freed
        tiles, ways = _tiles(launch, index, unions, heads, served, keep), ((launch.alone, 1), *ways)
    passes = ((how, _windows(launch, index, how, heads, served, mark, keep)) for how, mark in ways)
    if not keep:
        return Lists(tiles, served, tuple(passes))
    return Lists(list(tiles), served, tuple((how, list(windows)) for how, windows in passes))


def _tiles(launch: Launch, index: Index, unions: Unions, heads: int, served: Tensor, keep: bool) -> Iterator[Tiles]:
    """List the unions of all tiles, and set ``served``."""
    tile, HKV, room = unions.tile, unions.sizes["HKV"], None
    tiles_of_call = -(-launch.shape.tokens // tile.TOKENS)
    for first in range(0, tiles_of_call, unions.at_once):
        now = min(unions.at_once, tiles_of_call - first)
        if keep or room is None:
            room = workspaces(
                launch.device,
                lists=(now * HKV * tile.TOKENS * tile.SLOTS, torch.int64),
                count=(now * HKV, torch.int32),
            )
        sizes = unions.sizes | {"first": first}
        launch.run(unions.kernels, sizes, "list", (now, heads, 1), (*index, *room, served))
        yield Tiles(first, now, *room)


def _windows(
    launch: Launch, index: Index, how: Pass, total: int, served: Tensor | None, mark: int, keep: bool
) -> Iterator[Window]:
    """List the units of ``total`` KV heads window by window: of all of them at once if lists are kept.

    Args:
        served: only rows whose entry is ``mark`` take part; None: all rows do.
    """
    device, w, tokens = launch.device, how.windows, launch.shape.tokens
    heads, strip, i32 = w.heads, w.strip, torch.int32
    if keep:
        heads, strip = total, backward_tiles.strip_of(w.window, total, w.blocks)
    row, blocks, parts = heads * w.slots, heads * w.blocks, how is launch.parts
    units, listed = (w.window * row, i32), -(-3 * heads * w.work // 4) * 4
    counts = -(-w.window // strip) * blocks
    unit = None
    if keep:  # windows share what is read only while a window is listed
        rank, counted, shared = workspaces(device, rank=units, counted=(counts, i32), block=None if parts else units)
    order = "order" if served is None else "order_some"
    for head0, first in itertools.product(range(0, total, heads), range(0, tokens, w.window)):
        now = min(w.window, tokens - first)
        strips = -(-now // strip)
        if keep or unit is None:
            # `work` has block, first unit and number of units of shares. If lists are not kept, the counts of strips
            # lie behind these, so that one launch sets all to zero.
            block, span, unit, count, start, part, work, own = workspaces(
                device,
                block=units if parts or not keep else None,
                span=units if launch.shape.source == RANGES else None,
                unit=units,
                count=(blocks, i32),
                start=(blocks, i32),
                part=(blocks, i32),
                work=(listed if keep else listed + counts, i32),
                rank=None if keep else units,
            )
            if not keep:
                rank, counted = own, work.behind(listed)
            elif block is None:
                block = shared
        work.zero_()
        if keep:
            counted.zero_()
        sizes = {"heads": heads, "head0": head0, "first": first, "now": now, "strip": strip, "strips": strips}
        run = partial(launch.run, how.kernels, {**how.sizes, **sizes, "mark": mark})
        run(order, (strips, heads, 1), (*index, served, block, span, rank, counted))
        run("strip", (-(-w.blocks // STRIPPED), heads, 1), (counted, count))
        run("scan", (heads, 1, 1), (count, start, work, part, None))
        run("scatter", (-(-now * row // ELEMENTS), 1, 1), (block, rank, start, counted, unit))
        yield Window(head0, heads, first, now, block if parts else None, span, unit, count, start, part, work)
