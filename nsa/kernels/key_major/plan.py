"""Key-major forward: invert the selection, take partial results block by block, merge them row by row.

No host sync: every grid comes from shapes, and programs without work leave at once. Tokens go through in windows whose
partial results share one buffer, so that the workspace is bounded however long the call. The kernels are in
``kernel.py`` and ``shared/inverse_index.py``; the launcher has the interface of :mod:`nsa.kernels.query_major.plan`.
"""

from __future__ import annotations

import itertools
import logging
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import settings
from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.key_major import kernel as key_kernels
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.query_major.tiles import span_bucket
from nsa.kernels.shared import inverse_index
from nsa.kernels.shared.launch import INT32_MAX, Variant
from nsa.kernels.shared.primitives import BATCH, BLOCKS, CACHE, RANGES, TILED, VARLEN

logger = logging.getLogger("nsa")

WIDE_FROM = INT32_MAX  # elements of q from which on their offsets take 64 bits
COUNTED = 64  # slots that a program which counts takes at a time
ELEMENTS = 1024  # of a program that scans or scatters
MERGE_CHUNK = 16
SCARCE = (4, 16)  # how many times smaller a workspace gets where there is no memory for it


class Launch(NamedTuple):
    """Everything about a call that shapes, strides and dtypes decide."""

    count: Variant
    scan: Variant
    scatter: Variant
    partial: Variant
    merge: Variant
    merge_lse: Variant
    device: torch.device
    sized: tuple[int, ...]  # what windows follow from
    windows: key_tiles.Windows
    tile: key_tiles.Tile
    tokens: int
    G: int
    heads: tuple[int, ...]  # B, S, S_kv, HKV, n, block size: what kernels are told, in this order
    q_strides: tuple[int, ...]  # of q, k and v, then of the output, in units
    o_strides: tuple[int, ...]
    narrow: bool
    scale: float
    like_q: bool
    spans: bool
    pages: int
    stride_tb: int  # entries from one row of the page table to the next
    copies_table: bool  # a row of the page table is not contiguous

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that a call may launch."""
        return self[:6]


def plan(call: Call, bound: int | None = None, per_head: bool = False) -> Launch:
    """How a call is launched: tiles, windows and run-time sizes; arguments as for query-major.

    A row's result never depends on what the rest of the call holds; with ``batch_invariant`` not on how long that is,
    either. ``per_head`` changes nothing. Rows of ranges with more than ``bound`` keys may come out as NaN.

    Raises:
        ValueError: a token's partial results, or the counters of blocks, do not fit the workspace (ranges of a row that
            nothing bounds, say), or there are more keys or KV heads than the kernels count.
    """
    q, k, v, selection, block_size, causal = call.q, call.k, call.v, call.selection, call.block_size, call.causal
    assert selection is not None
    device, dtype, Dv = q.device, q.dtype, v.shape[-1]
    cache = call.cache_seqlens is not None
    sequences = None if call.cu_seqlens_k is None else call.cu_seqlens_k.shape[0] - 1
    width = None if call.block_table is None else call.block_table.shape[1]
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    strides: tuple[tuple[int, ...], ...] = (q.stride(), k.stride(), v.stride())
    like_q = Dv == q_shape[-1] and strides[0] == query_major.contiguous(q_shape)
    written = query_major.contiguous((*q_shape[:-1], Dv)) if call.out is None else call.out.stride()
    S_kv, HKV = k_shape[-3:-1]
    pages, page = (0, 0) if width is None else (k_shape[0], S_kv)
    S_kv = S_kv if width is None else S_kv * width
    HQ, D = q_shape[-2:]
    tokens, G = math.prod(q_shape[:-2]), HQ // HKV
    B, S = q_shape[:2] if len(q_shape) == 4 else (sequences or 0, q_shape[0])
    spans = block_size is None
    n = selection.shape[-2] if spans else selection.shape[-1]
    size, blocks, slots = key_tiles.grid("key_major", B, S_kv, HKV, n, block_size, sequences is not None, bound)
    capability, _ = query_major.device_limits(device)
    walk = key_tiles.walks(S, S_kv, call.settings.batch_invariant)
    listed = block_size or size  # not what fits the keys: how many there are must not change a row's tiles
    tile = key_tiles.select(capability, dtype.itemsize, G, D, Dv, listed, key_tiles.forced, walk)
    walked = 0 if spans else n * tile.walked // 16
    slots -= walked
    sized = (tokens, HKV, G, D, Dv, dtype.itemsize, slots, blocks, tile.share, spans)
    windows = key_tiles.windows(*sized)
    all_strides = [s for x in (*strides, written) for s in ((0,) if len(x) == 3 else ()) + tuple(x[:-1])]
    unit = math.gcd(16, *all_strides)
    farthest = sum((size - 1) * stride for size, stride in zip(q_shape, strides[0], strict=True)) + D
    layout = CACHE.value if cache else BATCH.value if sequences is None else VARLEN.value
    units = tuple(s // unit for s in all_strides)
    source = RANGES.value if spans else BLOCKS.value
    bucket = span_bucket(n, S_kv)
    tiled = listed % tile.BLOCK_L == 0 and bucket * size + S_kv <= INT32_MAX
    variants = _variants(
        device, dtype, tile, source, TILED.value if tiled else source, layout, page, causal, listed <= tile.BLOCK_N,
        farthest > WIDE_FROM, bucket, walked > 0, G, D, Dv, unit, call.dtypes(),
    )  # fmt: skip
    sizes = (B, S, S_kv, HKV, n, size)
    copies_table, stride_tb = query_major.table_rows(call.block_table)
    narrow = max(*sizes, *units, pages, stride_tb) <= INT32_MAX
    return Launch(
        *variants, device, sized, windows, tile, tokens, G, sizes, units[:9], units[9:], narrow, 1.0 / math.sqrt(D),
        like_q, spans, pages, stride_tb, copies_table,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _variants(
    device: torch.device,
    dtype: torch.dtype,
    tile: key_tiles.Tile,
    source: int,
    walk_source: int,
    layout: int,
    page: int,
    causal: bool,
    one_tile: bool,
    wide: bool,
    spans: int,
    walk: bool,
    G: int,
    D: int,
    Dv: int,
    unit: int,
    kinds: tuple[torch.dtype | None, ...],
) -> tuple[Variant, ...]:
    """Shared by all plans that differ in sizes only."""
    count = {
        "SOURCE": source,
        "LAYOUT": layout,
        "CAUSAL": causal,
        "CHUNK": COUNTED,
        "SPANS": spans if source == RANGES.value else 1,
    }
    partial: dict[str, Any] = {"G": G, "D": D, "Dv": Dv, "SOURCE": source, "LAYOUT": layout, "CAUSAL": causal}
    partial |= {"PAGE": page, "ONE_TILE": one_tile, "WIDE": wide, "STRIDE_UNIT": unit, "INPUT_PRECISION": "ieee"}
    partial |= {name: getattr(tile, name) for name in ("HEADS", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N")}
    merge = {
        name: partial[name] for name in ("G", "D", "Dv", "LAYOUT", "PAGE", "CAUSAL", "STRIDE_UNIT", "INPUT_PRECISION")
    }
    merge |= {"SOURCE": walk_source if walk else source, "WALK": walk, "HEADS": tile.merge_heads}
    merge |= {
        "BLOCK_D": tile.BLOCK_D,
        "BLOCK_DV": tile.BLOCK_DV,
        "BLOCK_L": tile.BLOCK_L,
        "SPANS": spans if walk else 1,
    }
    merge |= {"CHUNK": MERGE_CHUNK, "AT_ONCE": tile.at_once}
    merging: dict[str, Any] = {"num_warps": 1, "num_stages": tile.walk_stages if walk else 1}
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": 1 if one_tile else 2}
    if tile.registers is not None and query_major.runs_ptx(device):
        options["maxnreg"] = tile.registers
    if tile.walk_registers is not None and query_major.runs_ptx(device):
        merging["maxnreg"] = tile.walk_registers
    return (
        Variant(inverse_index._count_kernel, count, {"num_warps": 1}),
        Variant(inverse_index._scan_kernel, {"SHARE": tile.share, "CHUNK": ELEMENTS}, {"num_warps": 4}),
        Variant(inverse_index._scatter_kernel, {"CHUNK": ELEMENTS}, {"num_warps": 4}),
        Variant(key_kernels._partial_kernel, partial, options),
        Variant(key_kernels._merge_kernel, merge, merging),
        Variant(key_kernels._merge_kernel, merge, merging),  # with LSE
    )


def tile_fields(kernel: str, constexprs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the tile with which :func:`_variants` makes this variant of the kernel of that name."""
    merging = kernel == "_merge_kernel"
    named = {"SHARE": "share", "AT_ONCE": "at_once"} | ({"HEADS": "merge_heads"} if merging else {})
    fields = {named.get(name, name): value for name, value in constexprs.items()}
    if merging:
        fields |= {"walked": 8 * constexprs["WALK"], "walk_registers": options.get("maxnreg")}
        fields |= {"walk_stages": options["num_stages"]} if constexprs["WALK"] else {}
    elif kernel == "_partial_kernel":
        fields |= {"warps": options["num_warps"], "registers": options.get("maxnreg")}
    return {name: value for name, value in fields.items() if name in key_tiles.Tile._fields}


def workspace(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that no kernel may read before it was written; tests fill it with what does harm."""
    return torch.empty(size, dtype=dtype, device=device)


class Memory(NamedTuple):
    """Workspace of a call, as the kernels name it."""

    parts: Tensor
    part_lse: Tensor
    block: Tensor
    rank: Tensor
    span: Tensor | None
    unit: Tensor
    start: Tensor
    lists: Tensor  # shares of work, their units last, and counters of blocks: what must be zero lies together


def allocate(launch: Launch, w: key_tiles.Windows, dtype: torch.dtype, Dv: int) -> Memory:
    """Workspace for windows ``w``; launches no kernel."""
    device, row, most = launch.device, w.row, w.most
    groups = most * w.heads
    return Memory(
        workspace(w.window * row * launch.G * Dv, dtype, device),
        workspace(w.window * row * launch.G, torch.float32, device),
        workspace(w.tokens * row, torch.int32, device),
        workspace(w.tokens * row, torch.int32, device),
        workspace(w.tokens * row, torch.int32, device) if launch.spans else None,
        workspace(most * w.window * row, torch.int32, device),
        workspace(groups * w.blocks, torch.int32, device),
        workspace(groups * (3 * w.work + w.blocks), torch.int32, device),
    )


_scarce: dict[tuple[torch.device, tuple[int, ...]], key_tiles.Windows] = {}
"""Windows that take less, of shapes for which a device had no memory once."""
settings.ON_RELOAD.append(_scarce.clear)


def reserve(launch: Launch, dtype: torch.dtype, Dv: int) -> tuple[key_tiles.Windows, Memory]:
    """Windows of a call and their workspace: less of it, which is slower, from when on there was no memory for more.

    A row's result is the same, bit by bit. Said once a shape, and more is not tried again: an allocator that fails
    gives back all it had kept, every time.

    Raises:
        torch.OutOfMemoryError: there is none for the least, either.
    """
    key = launch.device, launch.sized
    while True:
        w = _scarce.get(key, launch.windows)
        try:
            return w, allocate(launch, w, dtype, Dv)
        except torch.OutOfMemoryError:
            less = _less(launch.sized, w)
            if less is None:
                raise
            _scarce[key] = less


def _less(sized: tuple[int, ...], w: key_tiles.Windows) -> key_tiles.Windows | None:
    """Windows for this shape that take less than ``w``: shorter ones, or fewer KV heads at once. None if none do."""
    _, _, G, _, Dv, itemsize, *_, spans = sized
    before = key_tiles.workspace_bytes(w, G, Dv, itemsize, bool(spans))
    for times in SCARCE:
        try:
            found = key_tiles.windows(*sized, times)
        except ValueError:  # a token's partial results do not fit
            return None
        taken = key_tiles.workspace_bytes(found, G, Dv, itemsize, bool(spans))
        if taken < before:
            logger.warning(
                "key_major: out of memory for a workspace of %.0f MiB; from now on %.0f serve, which is slower",
                before / 2**20, taken / 2**20,
            )  # fmt: skip
            return found
    return None


def forward(launch: Launch, call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """Launch, as :func:`nsa.kernels.query_major.plan.forward` does.

    Returns:
        ``(O, LSE)``, LSE fp32 ``q.shape[:-1]`` or None.
    """
    q, k, v, out, scale, return_lse = call.q, call.k, call.v, call.out, call.scale, call.return_lse
    cache_seqlens, block_table = call.cache_seqlens, call.block_table
    assert call.selection is not None
    if out is None:
        out = torch.empty_like(q) if launch.like_q else q.new_empty((*q.shape[:-1], v.shape[-1]))
    device, tile = launch.device, launch.tile
    lse = torch.empty(q.shape[:-1], device=device, dtype=torch.float32) if return_lse else None
    if launch.tokens == 0:
        return out, lse
    w, (parts, part_lse, block, rank, span, unit, start, lists) = reserve(launch, q.dtype, v.shape[-1])
    launches[route] += 1
    selection = call.selection.contiguous()
    q_positions, cu_seqlens_q, cu_seqlens_k = (
        x if x is None else x.contiguous() for x in (call.q_positions, call.cu_seqlens_q, call.cu_seqlens_k)
    )
    if cache_seqlens is not None:
        cu_seqlens_k = cache_seqlens.contiguous()
        if block_table is not None and launch.copies_table:
            block_table = block_table.contiguous()
    B, S, S_kv, HKV, n, size = launch.heads
    heads = w.heads
    row, most = w.row, w.most
    groups = most * heads
    work, counts, zero = (lists[groups * i * w.work :] for i in (0, 3, 2))
    about = (q_positions, cu_seqlens_q, cu_seqlens_k)
    narrow = launch.narrow
    for head0, first in itertools.product(range(0, HKV, heads), range(0, launch.tokens, w.tokens)):
        tokens = min(w.tokens, launch.tokens - first)
        sizes = (B, S, S_kv, HKV, heads, head0, n, size, w.slots)
        if w.slots:
            zero.zero_()
            launch.count.launch(
                (tokens, 1, 1), device, (selection, *about, block, span, rank, counts),
                (*sizes, w.blocks, first, w.window), narrow,
            )  # fmt: skip
            launch.scan.launch((groups, 1, 1), device, (counts, start, work, None), (w.blocks, w.work), narrow)
            launch.scatter.launch(
                (-(-tokens * row // ELEMENTS), 1, 1), device, (block, rank, start, None, unit),
                (heads, w.slots, w.blocks, tokens, w.window, w.window, w.slot_bits), narrow,
            )  # fmt: skip
        for i in range(-(-tokens // w.window)):
            here = first + i * w.window
            if w.slots:
                launch.partial.launch(
                    (w.work, heads, -(-launch.G // tile.HEADS)), device,
                    (q, k, v, parts, part_lse, selection, *about, block_table, span, unit, work),
                    (
                        *sizes, here, w.window, i, most, w.work, w.slot_bits, launch.pages, *launch.q_strides,
                        launch.scale if scale is None else scale, launch.stride_tb,
                    ),
                    narrow,
                )  # fmt: skip
            now = min(w.window, tokens - i * w.window)
            (launch.merge if lse is None else launch.merge_lse).launch(
                (now * heads, -(-launch.G // tile.merge_heads), 1), device,
                (parts, part_lse, block, q, k, v, out, lse, selection, *about, block_table),
                (
                    *sizes, here, now, i * w.window, launch.pages, *launch.q_strides, *launch.o_strides,
                    launch.scale if scale is None else scale, launch.stride_tb,
                ),
                narrow,
            )  # fmt: skip
    return out, lse
