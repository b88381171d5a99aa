"""Backward: lists the rows that selected each block, sums dK and dV block by block, and dQ by block or by row.

The host does not wait for the device: grids follow from shapes. There are no float atomics, and every sum has a fixed
order, so gradients are equal bit by bit from run to run. Tokens are processed in windows, which bounds the workspace.
The kernels are in ``shared/inverse_index.py`` and ``kernel.py``.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.backward import kernel as backward_kernels
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.query_major.tiles import span_bucket
from nsa.kernels.shared import inverse_index
from nsa.kernels.shared.geometry import Geometry, geometry
from nsa.kernels.shared.launch import INT32_MAX, TRITON, Variant, workspace
from nsa.kernels.shared.primitives import RANGES, TILED

COUNTED = 32  # slots that a program of the order kernel takes at a time
ELEMENTS = 1024  # elements that a program of the scan or scatter kernel takes at a time
STRIPPED = 32  # blocks of a program of the strip kernel
STATS_ROWS = 4
SUM_ROWS = 16  # keys of a program that adds partial sums
PIPELINES = TRITON >= (3, 3)  # Triton 3.1 cannot pipeline loads whose addresses were loaded, too
STRIDES = " ".join(f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split())


class Launch(NamedTuple):
    """All that shapes, strides and dtypes decide about a call."""

    kernels: dict[str, Variant]
    device: torch.device
    windows: backward_tiles.Windows
    tile: backward_tiles.Tile
    geometry: Geometry
    sizes: dict[str, int]  # run-time arguments by name, except those that differ between windows
    narrow: bool  # all sizes fit int32
    scale: float  # the default, for calls without `scale`

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that a call may launch."""
        return tuple(self.kernels.values())


def plan(call: Call, bound: int | None = None) -> Launch:
    """Tiles, windows and run-time sizes of a backward pass. They hold for every call with the same key.

    Raises:
        ValueError: there are more keys or KV heads than the kernels count; or the workspace cannot hold the counters of
            blocks, or the lists of one token (of ranges without a bound, for example).
    """
    assert call.selection is not None
    device, dtype = call.q.device, call.q.dtype
    g = geometry(call, output=False)
    G, D, Dv, spans = g.G, g.D, g.Dv, call.block_size is None
    size, blocks, slots = key_tiles.grid("backward", g.B, g.S_kv, g.HKV, g.n, call.block_size, g.packed, bound)
    capability, _ = query_major.device_limits(device)
    tile = backward_tiles.select(capability, dtype.itemsize, G, D, Dv, size, spans, backward_tiles.forced, PIPELINES)
    w = backward_tiles.windows(
        g.tokens, g.HKV, G, D, Dv, dtype.itemsize, slots, blocks, size, tile.share, tile.keep_dq, spans
    )
    bucket = span_bucket(g.n, g.S_kv)
    tiled = not spans and size % tile.BLOCK_L == 0 and bucket * size + g.S_kv <= INT32_MAX
    sizes = {"B": g.B, "S": g.S, "S_kv": g.S_kv, "HKV": g.HKV, "n": g.n, "size": size, "tokens": g.tokens}
    sizes |= {"rows": g.tokens * G * g.HKV, "heads": w.heads, "slots": w.slots, "blocks": w.blocks, "window": w.window}
    sizes |= {"work": w.work, "slot_bits": w.slot_bits, "strip": w.strip, "several": w.several}
    sizes |= dict(zip(STRIDES.split(), g.strides, strict=True))
    kernels = _variants(
        device, dtype, call.dtypes(), tile, bucket, g.source, TILED.value if tiled else g.source, G=G, D=D, Dv=Dv,
        LAYOUT=g.layout, CAUSAL=call.causal, STRIDE_UNIT=g.unit, INPUT_PRECISION="ieee",
    )  # fmt: skip
    return Launch(kernels, device, w, tile, g, sizes, max(sizes.values()) <= INT32_MAX, 1.0 / math.sqrt(D))


@lru_cache(maxsize=1024)
def _variants(
    device: torch.device,
    dtype: torch.dtype,
    kinds: tuple[object, ...],
    tile: backward_tiles.Tile,
    spans: int,
    source: int,
    walk_source: int,
    **shared: Any,
) -> dict[str, Variant]:
    """The kernels for a tile and the compile-time arguments ``shared``. Plans that differ only in sizes share them.

    Kernels for other dtypes of the inputs, or of the index tensors (``kinds``), are other entries of the cache.
    """
    layout, D, Dv = shared["LAYOUT"], shared["D"], shared["Dv"]
    wide = {"BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV}
    order = {"SOURCE": source, "LAYOUT": layout, "CAUSAL": shared["CAUSAL"], "CHUNK": COUNTED}
    order |= {"SPANS": spans if source == RANGES.value else 1}
    delta = {"Dv": Dv, "BLOCK_DV": tile.BLOCK_DV, "ROWS": STATS_ROWS}
    dq = {**shared, **wide, "SOURCE": walk_source, "SPANS": spans}
    dq |= {"HEADS": tile.dq_heads, "BLOCK_G": tile.BLOCK_G, "BLOCK_L": tile.BLOCK_L}
    dkdv = {**shared, **wide, "SOURCE": source, "SHARE": tile.share}
    dkdv |= {"HEADS": tile.HEADS, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
    total = {**wide, "D": D, "Dv": Dv, "LAYOUT": layout, "SHARE": tile.share, "AT_ONCE": 4}
    total |= {"BLOCK_N": min(SUM_ROWS, tile.BLOCK_N)}
    gather = {"G": shared["G"], "D": D, "HEADS": min(tile.dq_heads, 4), "BLOCK_D": tile.BLOCK_D, "AT_ONCE": 4}
    dq_options = {"num_warps": tile.dq_warps, "num_stages": tile.dq_stages}
    dkdv_options = {"num_warps": tile.warps, "num_stages": tile.stages}
    one, four = {"num_warps": 1}, {"num_warps": 4}
    return {
        "order": Variant(inverse_index._order_kernel, order, one),
        "strip": Variant(inverse_index._strip_kernel, {"CHUNK": STRIPPED, "AT_ONCE": 32}, four),
        "scan": Variant(inverse_index._scan_kernel, {"SHARE": tile.share, "STEPS": 0, "CHUNK": ELEMENTS}, four),
        "scatter": Variant(inverse_index._scatter_kernel, {"CHUNK": ELEMENTS}, four),
        "delta": Variant(backward_kernels._delta_kernel, delta, one),
        "delta_lse": Variant(backward_kernels._delta_kernel, delta, one),
        "dq": Variant(backward_kernels._dq_kernel, dq, dq_options),
        "dkdv": Variant(backward_kernels._dkdv_kernel, dkdv, dkdv_options),
        # A separate variant for launches without parts of dQ.
        "dkdv_alone": Variant(backward_kernels._dkdv_kernel, dkdv, dkdv_options),
        "sum": Variant(backward_kernels._sum_kernel, total, four),
        "gather": Variant(backward_kernels._gather_kernel, gather, one),
    }


def tile_fields(kernel: str, constexprs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tile that make :func:`_variants` return this variant of the kernel with that name."""
    fields = {"share": constexprs["SHARE"]} if "SHARE" in constexprs else {}
    if kernel == "_dq_kernel":
        fields |= {"dq_heads": constexprs["HEADS"], "BLOCK_G": constexprs["BLOCK_G"], "BLOCK_L": constexprs["BLOCK_L"]}
        fields |= {"dq_warps": options["num_warps"], "dq_stages": options["num_stages"]}
    elif kernel == "_dkdv_kernel":
        fields |= {name: constexprs[name] for name in ("HEADS", "BLOCK_M", "BLOCK_N")}
        fields |= {"warps": options["num_warps"], "stages": options["num_stages"]}
    return fields


def backward(
    launch: Launch,
    call: Call,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    route: str,
    wanted: tuple[bool, ...] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a forward call.

    Args:
        launch: what :func:`plan` returned for this call.
        do: gradient of ``o``, in the shape and dtype of ``o``.
        dlse: gradient of ``lse``, fp32 ``q.shape[:-1]``, or None.
        o, lse: what the forward call returned; ``lse`` natural log.
        route: name counted in :data:`nsa.kernels.launches`.
        wanted: which gradients of ``q``, ``k`` and ``v`` are needed. Others are returned as empty tensors. dK and dV
            are computed together.

    Returns:
        ``(dq, dk, dv)``, contiguous, in the shapes and dtypes of ``q, k, v``.
    """
    q, k, v = call.q, call.k, call.v
    assert call.selection is not None
    tile, g, sizes = launch.tile, launch.geometry, launch.sizes
    of_queries, of_keys = wanted[0], wanted[1] or wanted[2]
    dq = torch.empty(q.shape if of_queries else (0,), dtype=q.dtype, device=launch.device)
    if g.tokens == 0 or k.shape[:-2].numel() == 0 or g.n == 0:
        return dq.zero_(), k.new_zeros(k.shape if wanted[1] else 0), v.new_zeros(v.shape if wanted[2] else 0)
    launches[route] += 1
    do, o, lse, selection = (x.contiguous() for x in (do, o, lse, call.selection))
    dlse, *about = (
        x if x is None else x.contiguous() for x in (dlse, call.q_positions, call.cu_seqlens_q, call.cu_seqlens_k)
    )
    scale = launch.scale if call.scale is None else call.scale
    run = _Run(launch, sizes)
    stats = workspace(2 * sizes["rows"], torch.float32, launch.device)
    grid = (-(-sizes["rows"] // STATS_ROWS), 1, 1)
    run("delta" if dlse is None else "delta_lse", grid, (o, do, lse, dlse, stats), "rows")
    if of_queries and not (tile.keep_dq and of_keys):
        grid = (g.tokens * g.HKV, -(-g.G // tile.dq_heads), 1)
        run("dq", grid, (q, k, v, do, stats, dq, selection, *about), f"B S S_kv HKV n size tokens {STRIDES}", scale)
    if not of_keys:
        return dq, k.new_empty(0), v.new_empty(0)
    dk, dv = _by_blocks(launch, (q, k, v, do, stats), dq if of_queries else None, selection, about, scale)
    dk = dk.view(k.shape).to(k.dtype) if wanted[1] else k.new_empty(0)
    return dq, dk, dv.view(v.shape).to(v.dtype) if wanted[2] else v.new_empty(0)


def _by_blocks(
    launch: Launch,
    given: tuple[Tensor, ...],
    dq: Tensor | None,
    selection: Tensor,
    about: list[Tensor | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dK and dV ``[keys, HKV, D | Dv]`` fp32, window by window; ``dq``, if its parts are kept, is written here, too.

    given: q, k, v, dO and the statistics of rows. about: query positions, ``cu_seqlens_q`` and ``cu_seqlens_k``.
    """
    device, w, tile, g, sizes = launch.device, launch.windows, launch.tile, launch.geometry, launch.sizes
    heads, size, keys = w.heads, sizes["size"], given[1].shape[:-2].numel()
    row, blocks, shares = heads * w.slots, heads * w.blocks, heads * w.work
    dk = torch.zeros((keys, g.HKV, g.D), dtype=torch.float32, device=device)
    dv = torch.zeros((keys, g.HKV, g.Dv), dtype=torch.float32, device=device)
    block, rank, unit = (workspace(w.window * row, torch.int32, device) for _ in range(3))
    span = workspace(w.window * row, torch.int32, device) if g.source == RANGES.value else None
    counted = workspace(-(-w.window // w.strip) * blocks, torch.int32, device)
    count, start, part = (workspace(blocks, torch.int32, device) for _ in range(3))
    work = workspace(3 * shares, torch.int32, device)
    dk_part = workspace(heads * w.several * size * g.D, torch.float32, device)
    dv_part = workspace(heads * w.several * size * g.Dv, torch.float32, device)
    dq_part = workspace(w.window * row * g.G * g.D, given[0].dtype, device) if tile.keep_dq and dq is not None else None
    sum_rows = launch.kernels["sum"].constexprs["BLOCK_N"]
    gathered = launch.kernels["gather"].constexprs["HEADS"]
    for head0, first in itertools.product(range(0, g.HKV, heads), range(0, g.tokens, w.window)):
        now = min(w.window, g.tokens - first)
        strips = -(-now // w.strip)
        run = _Run(launch, sizes | {"head0": head0, "first": first, "now": now, "strips": strips})
        counted.zero_()
        work[2 * shares :].zero_()
        run(
            "order", (strips, heads, 1), (selection, *about, block, span, rank, counted),
            "B S S_kv HKV heads head0 n size slots blocks first now strip",
        )  # fmt: skip
        run("strip", (-(-w.blocks // STRIPPED), heads, 1), (counted, count), "heads blocks strips")
        run("scan", (heads, 1, 1), (count, start, work, part, None), "B blocks work")
        run(
            "scatter", (-(-now * row // ELEMENTS), 1, 1), (block, rank, start, counted, unit),
            "heads slots blocks now window strip slot_bits",
        )  # fmt: skip
        run(
            "dkdv_alone" if dq is None else "dkdv", (w.work, heads, -(-size // tile.BLOCK_N)),
            (*given, dk, dv, dk_part, dv_part, dq_part, selection, *about, span, unit, count, start, part, work),
            "B S S_kv HKV heads head0 n size slots blocks first tokens window work slot_bits several " + STRIDES, scale,
        )  # fmt: skip
        run(
            "sum", (w.blocks, heads, -(-size // sum_rows)),
            (dk_part, dv_part, dk, dv, unit, count, start, part, *about[1:]),
            "B S_kv HKV head0 size slots blocks first window slot_bits several",
        )  # fmt: skip
        if dq_part is not None:
            run("gather", (now * heads, -(-g.G // gathered), 1), (dq_part, block, dq), "HKV heads head0 slots first")
    return dk, dv


class _Run:
    """Launches kernels of a call by name, with run-time arguments by name."""

    def __init__(self, launch: Launch, sizes: dict[str, int]) -> None:
        self.launch, self.sizes = launch, sizes

    def __call__(
        self, name: str, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: str, *more: float
    ) -> None:
        numbers = (*(self.sizes[size] for size in sizes.split()), *more)
        self.launch.kernels[name].launch(grid, self.launch.device, tensors, numbers, self.launch.narrow)
