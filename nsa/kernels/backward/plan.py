"""Backward: turn the selection round, sum dK and dV block by block, take dQ from the same blocks or row by row.

No host sync and no float atomics: grids come from shapes, and every sum has an order, so gradients are equal bit by bit
from run to run. Tokens go through in windows, which bounds the workspace. Kernels: ``shared/inverse_index.py`` and
``kernel.py``.
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
from nsa.kernels.shared.launch import INT32_MAX, TRITON, Variant
from nsa.kernels.shared.primitives import BATCH, BLOCKS, RANGES, TILED, VARLEN

COUNTED = 32  # slots that a program which counts takes at a time
ELEMENTS = 1024  # of a program that scans or scatters
STRIPPED = 32  # blocks of a program that adds up strips
STATS_ROWS = 4
SUM_ROWS = 16  # keys of a program that adds partial sums
PIPELINES = TRITON >= (3, 3)  # 3.1 says of loads whose address was loaded that it scheduled them wrongly


class Launch(NamedTuple):
    """Everything about a call that shapes, strides and dtypes decide."""

    kernels: dict[str, Variant]
    device: torch.device
    windows: backward_tiles.Windows
    tile: backward_tiles.Tile
    tokens: int
    keys: int  # of all sequences
    G: int
    sizes: dict[str, int]  # run-time arguments by name, but for what varies from window to window
    narrow: bool
    scale: float
    spans: bool

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that a call may launch."""
        return tuple(self.kernels.values())


def plan(call: Call, bound: int | None = None) -> Launch:
    """How a call's gradients are launched: tiles, windows and run-time sizes. Holds for every call of the same key.

    Raises:
        ValueError: the lists of one token, or the counters of blocks, do not fit the workspace (ranges of a row that
            nothing bounds, say), or there are more keys or KV heads than the kernels count.
    """
    q, k, v, selection, block_size, causal = call.q, call.k, call.v, call.selection, call.block_size, call.causal
    assert selection is not None
    device, dtype, Dv = q.device, q.dtype, v.shape[-1]
    sequences = None if call.cu_seqlens_k is None else call.cu_seqlens_k.shape[0] - 1
    q_shape, k_shape, strides = q.shape, k.shape, (q.stride(), k.stride(), v.stride())
    S_kv, HKV = k_shape[-3:-1]
    HQ, D = q_shape[-2:]
    tokens, G = math.prod(q_shape[:-2]), HQ // HKV
    B, S = q_shape[:2] if len(q_shape) == 4 else (sequences or 0, q_shape[0])
    spans = block_size is None
    n = selection.shape[-2] if spans else selection.shape[-1]
    size, blocks, slots = key_tiles.grid("backward", B, S_kv, HKV, n, block_size, sequences is not None, bound)
    capability, _ = query_major.device_limits(device)
    tile = backward_tiles.select(capability, dtype.itemsize, G, D, Dv, size, spans, backward_tiles.forced, PIPELINES)
    windows = backward_tiles.windows(
        tokens, HKV, G, D, Dv, dtype.itemsize, slots, blocks, size, tile.share, tile.keep_dq, spans
    )
    all_strides = [s for x in strides for s in ((0,) if len(x) == 3 else ()) + tuple(x[:-1])]
    unit = math.gcd(16, *all_strides)
    bucket = span_bucket(n, S_kv)
    source = RANGES.value if spans else BLOCKS.value
    tiled = not spans and size % tile.BLOCK_L == 0 and bucket * size + S_kv <= INT32_MAX
    layout = BATCH.value if sequences is None else VARLEN.value
    w = windows
    sizes = {"B": B, "S": S, "S_kv": S_kv, "HKV": HKV, "n": n, "size": size}
    sizes |= {"heads": w.heads, "slots": w.slots, "blocks": w.blocks}
    sizes |= {"rows": tokens * HQ, "window": w.window, "work": w.work, "slot_bits": w.slot_bits, "strip": w.strip}
    sizes |= {"several": w.several, "tokens": tokens}
    names = "qb qs qh kb kn kh vb vn vh".split()
    sizes |= {f"stride_{name}": s // unit for name, s in zip(names, all_strides, strict=True)}
    variants = _variants(
        device, dtype, tile, source, TILED.value if tiled else source, layout, causal, bucket, G, D, Dv, unit,
        call.dtypes(),
    )
    keys = math.prod(k_shape[:-2])
    return Launch(
        variants, device, windows, tile, tokens, keys, G, sizes, max(sizes.values()) <= INT32_MAX, 1.0 / math.sqrt(D),
        spans,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _variants(
    device: torch.device,
    dtype: torch.dtype,
    tile: backward_tiles.Tile,
    source: int,
    walk_source: int,
    layout: int,
    causal: bool,
    spans: int,
    G: int,
    D: int,
    Dv: int,
    unit: int,
    kinds: tuple[object, ...],
) -> dict[str, Variant]:
    """Shared by all plans that differ in sizes only."""
    order = {"SOURCE": source, "LAYOUT": layout, "CAUSAL": causal, "CHUNK": COUNTED}
    order |= {"SPANS": spans if source == RANGES.value else 1}
    wide = {"BLOCK_D": tile.BLOCK_D, "BLOCK_DV": tile.BLOCK_DV}
    shared: dict[str, Any] = {"G": G, "D": D, "Dv": Dv, "LAYOUT": layout, "CAUSAL": causal, "STRIDE_UNIT": unit}
    shared |= {"INPUT_PRECISION": "ieee", **wide}
    dkdv = shared | {"SOURCE": source, "HEADS": tile.HEADS, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N}
    dq = shared | {"SOURCE": walk_source, "HEADS": tile.dq_heads, "BLOCK_G": tile.BLOCK_G, "BLOCK_L": tile.BLOCK_L}
    delta = {"Dv": Dv, "BLOCK_DV": tile.BLOCK_DV, "ROWS": STATS_ROWS}
    heads = min(tile.dq_heads, 4)
    total: dict[str, Any] = {"AT_ONCE": 4} | wide
    total |= {"D": D, "Dv": Dv, "LAYOUT": layout, "BLOCK_N": min(SUM_ROWS, tile.BLOCK_N), "SHARE": tile.share}
    dkdv_options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return {
        "order": Variant(inverse_index._order_kernel, order, {"num_warps": 1}),
        "strip": Variant(inverse_index._strip_kernel, {"CHUNK": STRIPPED, "AT_ONCE": 32}, {"num_warps": 4}),
        "scan": Variant(inverse_index._scan_kernel, {"SHARE": tile.share, "CHUNK": ELEMENTS}, {"num_warps": 4}),
        "scatter": Variant(inverse_index._scatter_kernel, {"CHUNK": ELEMENTS}, {"num_warps": 4}),
        "delta": Variant(backward_kernels._delta_kernel, delta, {"num_warps": 1}),
        "delta_lse": Variant(backward_kernels._delta_kernel, delta, {"num_warps": 1}),
        "dq": Variant(
            backward_kernels._dq_kernel,
            dq | {"SPANS": spans},
            {"num_warps": tile.dq_warps, "num_stages": tile.dq_stages},
        ),
        "dkdv": Variant(backward_kernels._dkdv_kernel, dkdv | {"SHARE": tile.share}, dkdv_options),
        # Where dQ is not wanted, it is not kept, which makes a variant of its own.
        "dkdv_alone": Variant(backward_kernels._dkdv_kernel, dkdv | {"SHARE": tile.share}, dkdv_options),
        "sum": Variant(backward_kernels._sum_kernel, total, {"num_warps": 4}),
        "gather": Variant(
            backward_kernels._gather_kernel,
            {"G": G, "D": D, "HEADS": heads, "BLOCK_D": tile.BLOCK_D, "AT_ONCE": 4},
            {"num_warps": 1},
        ),
    }


def tile_fields(kernel: str, constexprs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the tile with which :func:`_variants` makes this variant of the kernel of that name."""
    fields = {"share": constexprs["SHARE"]} if "SHARE" in constexprs else {}
    if kernel == "_dq_kernel":
        fields |= {"dq_heads": constexprs["HEADS"], "BLOCK_G": constexprs["BLOCK_G"], "BLOCK_L": constexprs["BLOCK_L"]}
        fields |= {"dq_warps": options["num_warps"], "dq_stages": options["num_stages"]}
    elif kernel == "_dkdv_kernel":
        fields |= {name: constexprs[name] for name in ("HEADS", "BLOCK_M", "BLOCK_N")}
        fields |= {"warps": options["num_warps"], "stages": options["num_stages"]}
    return fields


def workspace(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that no kernel may read before it was written; tests fill it with what does harm."""
    return torch.empty(size, dtype=dtype, device=device)


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
        launch: of :func:`plan` for this call.
        do: gradient of ``o``, like it. dlse: of ``lse``, fp32 ``q.shape[:-1]``, or None.
        o, lse: what the forward call returned; ``lse`` natural log.
        route: name counted in :data:`nsa.kernels.launches`.
        wanted: gradients of ``q``, ``k`` and ``v``. One that is not wanted comes back as an empty tensor; dK and dV are
            computed together.

    Returns:
        ``(dq, dk, dv)``, contiguous, in the shapes and dtypes of ``q, k, v``.
    """
    q, k, v = call.q, call.k, call.v
    assert call.selection is not None
    device, D, Dv = launch.device, q.shape[-1], v.shape[-1]
    w, tile, sizes = launch.windows, launch.tile, launch.sizes
    HKV = sizes["HKV"]
    of_queries, of_keys = wanted[0], wanted[1] or wanted[2]
    dq = torch.empty(q.shape if of_queries else (0,), dtype=q.dtype, device=device)
    if launch.tokens == 0 or launch.keys == 0 or sizes["n"] == 0:
        return dq.zero_(), k.new_zeros(k.shape if wanted[1] else 0), v.new_zeros(v.shape if wanted[2] else 0)
    launches[route] += 1
    do, o, lse, selection = (x.contiguous() for x in (do, o, lse, call.selection))
    dlse, *about = (
        x if x is None else x.contiguous() for x in (dlse, call.q_positions, call.cu_seqlens_q, call.cu_seqlens_k)
    )
    scale = launch.scale if call.scale is None else call.scale
    run = _Run(launch, sizes)

    rows = sizes["rows"]
    stats = workspace(2 * rows, torch.float32, device)
    run("delta" if dlse is None else "delta_lse", (-(-rows // STATS_ROWS), 1, 1), (o, do, lse, dlse, stats), "rows")
    if of_queries and not (tile.keep_dq and of_keys):
        grid = (launch.tokens * HKV, -(-launch.G // tile.dq_heads), 1)
        run("dq", grid, (q, k, v, do, stats, dq, selection, *about), f"B S S_kv HKV n size tokens {STRIDES}", scale)

    if not of_keys:
        return dq, k.new_empty(0), v.new_empty(0)
    dk = torch.zeros((launch.keys, HKV, D), dtype=torch.float32, device=device)
    dv = torch.zeros((launch.keys, HKV, Dv), dtype=torch.float32, device=device)
    heads = w.heads
    row, blocks = heads * w.slots, heads * w.blocks
    block, rank, unit = (workspace(w.window * row, torch.int32, device) for _ in range(3))
    span = workspace(w.window * row, torch.int32, device) if launch.spans else None
    strips = -(-w.window // w.strip)
    counted = workspace(strips * blocks, torch.int32, device)
    count, start, part = (workspace(blocks, torch.int32, device) for _ in range(3))
    work = workspace(3 * heads * w.work, torch.int32, device)
    dk_part = workspace(heads * w.several * sizes["size"] * D, torch.float32, device)
    dv_part = workspace(heads * w.several * sizes["size"] * Dv, torch.float32, device)
    dq_part = workspace(w.window * row * launch.G * D, q.dtype, device) if tile.keep_dq and of_queries else None
    key_tiles_of_block = -(-sizes["size"] // tile.BLOCK_N)
    sum_rows = launch.kernels["sum"].constexprs["BLOCK_N"]
    gathered = launch.kernels["gather"].constexprs["HEADS"]
    for head0, first in itertools.product(range(0, HKV, heads), range(0, launch.tokens, w.window)):
        now = min(w.window, launch.tokens - first)
        run = _Run(launch, sizes | {"head0": head0, "first": first, "now": now, "strips": -(-now // w.strip)})
        counted.zero_()
        work[2 * heads * w.work :].zero_()
        run(
            "order", (-(-now // w.strip), heads, 1), (selection, *about, block, span, rank, counted),
            "B S S_kv HKV heads head0 n size slots blocks first now strip",
        )  # fmt: skip
        run("strip", (-(-w.blocks // STRIPPED), heads, 1), (counted, count), "heads blocks strips")
        run("scan", (heads, 1, 1), (count, start, work, part), "blocks work")
        run(
            "scatter", (-(-now * row // ELEMENTS), 1, 1), (block, rank, start, counted, unit),
            "heads slots blocks now window strip slot_bits",
        )  # fmt: skip
        run(
            "dkdv" if of_queries else "dkdv_alone", (w.work, heads, key_tiles_of_block),
            (
                q, k, v, do, stats, dk, dv, dk_part, dv_part, dq_part, selection, *about, span, unit, count, start,
                part, work,
            ),
            "B S S_kv HKV heads head0 n size slots blocks first tokens window work slot_bits several " + STRIDES, scale,
        )  # fmt: skip
        run(
            "sum", (w.blocks, heads, -(-sizes["size"] // sum_rows)),
            (dk_part, dv_part, dk, dv, unit, count, start, part, *about[1:]),
            "B S_kv HKV head0 size slots blocks first window slot_bits several",
        )  # fmt: skip
        if dq_part is not None:
            grid = (now * heads, -(-launch.G // gathered), 1)
            run("gather", grid, (dq_part, block, dq), "HKV heads head0 slots first")
    dk = dk.view(k.shape).to(k.dtype) if wanted[1] else k.new_empty(0)
    return dq, dk, dv.view(v.shape).to(v.dtype) if wanted[2] else v.new_empty(0)


STRIDES = " ".join(f"stride_{axis}" for axis in "qb qs qh kb kn kh vb vn vh".split())


class _Run:
    """Launches kernels of a call by name, with run-time arguments by name."""

    def __init__(self, launch: Launch, sizes: dict[str, int]) -> None:
        self.launch, self.sizes = launch, sizes

    def __call__(
        self, name: str, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: str, *more: float
    ) -> None:
        numbers = (*(self.sizes[size] for size in sizes.split()), *more)
        self.launch.kernels[name].launch(grid, self.launch.device, tensors, numbers, self.launch.narrow)
