"""Cuts a selection into launches of the kernels. The host does not wait for the device.

Scores of the queries of a pass stand in a workspace of at most `WORKSPACE` bytes. Grids depend on shapes only, so that
a captured graph replays with other lengths.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.kernels import launches
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared.launch import Variant, remembered, workspaces
from nsa.kernels.shared.shape import BATCH, CACHE
from nsa.kernels.shared.sizes import INT32_MAX, next_power_of_2, padded
from nsa.selecting.choose import _choose_kernel
from nsa.selecting.request import SCORES, Request
from nsa.selecting.scores import _lse_kernel, _scores_kernel

WORKSPACE = 256 * 2**20
"""Bytes of scores that stand in memory at a time, at most, unless one tile of queries needs more."""

SPARE = 6144
"""Bytes of shared memory that a program needs beside its queries and keys."""


class Tile(NamedTuple):
    """Tile of the score kernels. TOKENS, LISTS, HEADS: queries, lists and heads of a list; their product is 16 or more.
    N: index keys. programs: how many there should be, at least, if the keys suffice. BLOCK: blocks that the choosing
    kernel reads at a time, at most.
    """

    TOKENS: int
    LISTS: int
    HEADS: int
    N: int
    warps: int
    stages: int
    programs: int
    BLOCK: int = 8192


def tile_of(r: Request, processors: int, capability: int = 90) -> Tile:
    """The tile of a call, cut until it fits the shared memory of a GPU of a capability."""
    per_key = r.lists // r.HK
    queries = r.S if r.layout in (BATCH, CACHE) else r.max_seqlen_q or -(-r.T // max(r.B, 1))
    heads = next_power_of_2(r.G)
    wide = 128 if r.q.dtype != torch.float32 else 64  # rows of a tile
    tokens = max(1, min(next_power_of_2(max(queries, 1)), wide // heads))
    lists = max(1, min(next_power_of_2(per_key), wide // (heads * tokens)))
    heads = max(heads, 16 // (tokens * lists))
    N = 128 if r.size > 64 or r.size & (r.size - 1) == 0 else padded(r.size)
    few = tokens * lists * heads <= 32
    if r.q.dtype == torch.float32 or (r.score != "max" and not few):
        N = min(N, 64)
    if r.score == "softmax":
        N = max(N, r.size)
    stages = 2 if few or (r.score == "max" and r.k.dtype == r.q.dtype) else 3
    least = r.size if r.score == "softmax" else 16
    row = padded(r.q.shape[-1]) * r.q.dtype.itemsize

    def fits() -> bool:
        return row * (tokens * lists * heads + stages * N) + SPARE <= gpu.SHARED_BYTES[capability]

    while not fits() and stages > 2:
        stages -= 1
    while not fits() and N > max(least, 16):
        N //= 2
    while not fits() and tokens > 1:
        tokens, heads = tokens // 2, max(heads, 32 // (tokens * lists))
    return Tile(tokens, lists, heads, N, 4, stages, (16 if few else 8) * processors)


def obstacle(r: Request) -> str | None:
    """Why the kernels cannot serve a call, or None if they can."""
    power = r.size & (r.size - 1) == 0
    if r.q.dtype == torch.float64:
        return "float64"
    if r.score == "softmax" and (not power or r.size > 128):
        return "softmax over blocks that are not of a power of two of index keys, 128 at most"
    if r.score == "softmax" and r.window // r.stride > r.size + 1:
        return "softmax with a window of more than block_size + stride"
    if r.n > 8192:
        return "more than 8192 blocks"
    return None


@remembered
def _variants(
    device: torch.device, tile: Tile, kinds: tuple[object, ...], chunked: bool, lse_parts: int, block: int, kept: int,
    tail: bool, score: str, **sizes: Any,
) -> tuple[Variant, Variant, Variant]:  # fmt: skip
    """The kernels for LSE, scores and choice."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    size, N = sizes.pop("SIZE"), tile.N
    of_score = {"SIZE": size, "SCORE": SCORES.index(score)}
    parts = 0 if size & (size - 1) == 0 and size <= N else -(-size // N)
    common = sizes | {name: getattr(tile, name) for name in ("TOKENS", "LISTS", "HEADS", "N")}
    scored = common | of_score | {"PARTS": parts, "LSE_PARTS": lse_parts}
    chosen = {name: common[name] for name in ("LAYOUT", "STRIDE", "WINDOW", "TOKENS")} | of_score
    chosen |= {"TAIL": tail, "BLOCK": block, "KEPT": kept, "CHUNKED": chunked}
    warps = max(1, min(16, block // 1024))
    # Registers of a thread, so that three programs fit a multiprocessor. Triton for AMD has no such option.
    fewer = {"maxnreg": 80} if warps > 1 and gpu.chip(device).ptx else {}
    # `nsa.guard` tries calls of attention only. A kernel that does not compile raises, and plain PyTorch serves.
    return (
        Variant(_lse_kernel, common, options, tried_first=False),
        Variant(_scores_kernel, scored, options, tried_first=False),
        Variant(_choose_kernel, chosen, {"num_warps": warps} | fewer, tried_first=False),
    )


def _splits(programs: int, steps: int, wanted: int, at_once: int) -> int:
    """Programs that share the keys of a tile: as many as are ``wanted``, or up to twice as many if the last wave of
    ``at_once`` programs is then fuller.
    """
    least = max(1, min(steps, -(-wanted // programs)))

    def unused(splits: int) -> float:
        waves = -(-programs * splits // at_once)
        return waves * at_once / (programs * splits)

    return min(range(least, min(steps, 2 * least) + 1), key=unused)


def select(r: Request, out: Tensor, tile: Tile | None = None) -> Tensor:
    """Choose the blocks of all rows, into ``out``. ``tile``: of this call, instead of the one by rule."""
    if r.T == 0:
        return out
    device = r.q.device
    capability, processors, *_ = gpu.chip(device)
    tile = tile_of(r, processors, capability) if tile is None else tile
    width = -(-r.blocks // 16) * 16
    run = r.S if r.layout in (BATCH, CACHE) else r.T
    tiles = r.T // run * -(-run // tile.TOKENS)
    per_key = r.lists // r.HK
    programs = r.HK * -(-per_key // tile.LISTS)  # of a tile
    at_once = max(1, min(tiles, WORKSPACE // (4 * tile.TOKENS * r.lists * width)))
    steps = max(1, -(-r.rows // max(tile.N, r.size)))  # tiles of keys, or blocks
    splits = _splits(at_once * programs, steps, tile.programs, 2 * processors)
    lse_parts = min(splits, 8) if r.score == "softmax" and r.lse is None else 0
    block = next_power_of_2(min(r.blocks, tile.BLOCK))
    chunked = r.blocks > block
    q_strides = (0,) * (4 - r.q.dim()) + r.q.stride()[:-1]
    k_strides = (0,) * (4 - r.k.dim()) + r.k.stride()[:-1]
    unit = math.gcd(16, *q_strides, *k_strides)
    q_strides, k_strides = (tuple(s // unit for s in x) for x in (q_strides, k_strides))
    D = r.q.shape[-1]
    sizes = {
        "LAYOUT": r.layout, "PAGE": r.page, "STRIDE": r.stride, "WINDOW": r.window, "SIZE": r.size, "G": r.G, "D": D,
        "PER_KEY": per_key, "K_STEP": int(r.k_scale is not None and r.k_scale.numel() > 1), "UNIT": unit,
        "INPUT_PRECISION": "ieee", "BLOCK_D": padded(D),
    }  # fmt: skip
    lengths = r.cu_k if r.cache_seqlens is None else r.cache_seqlens
    *about, k_scale = (x if x is None else x.contiguous() for x in (r.q_positions, r.cu_q, lengths, r.k_scale))
    weights, lse = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (r.weights, r.lse))
    table = r.block_table
    if table is not None and table.shape[1] > 1 and table.stride(1) != 1:
        table = table.contiguous()
    kinds = tuple(x if x is None else x.dtype for x in (r.q, r.k, weights, lse, *about, table, k_scale))
    make_lse, make_scores, choose = _variants(
        device, tile, kinds, chunked, lse_parts, block, next_power_of_2(r.n), r.tail, r.score, **sizes
    )
    scores, kept, parts = workspaces(
        device,
        scores=(at_once * tile.TOKENS * r.lists * width, torch.float32),
        kept=(at_once * tile.TOKENS * r.lists * r.n, torch.int32) if chunked else None,
        parts=(2 * lse_parts * at_once * tile.TOKENS * r.q.shape[-2], torch.float32) if lse_parts else None,
    )
    w_strides, l_strides = (
        (0, 0) if x is None else ((0,) * (3 - x.dim()) + x.stride()[:-1]) for x in (weights, lse)
    )
    stride_tb = 0 if table is None else table.stride(0)
    pages = r.k.shape[0] if table is not None else 0
    numbers = (r.B, r.S, r.rows, r.T, r.lists)
    all_strides = (*q_strides, *k_strides, *w_strides, *l_strides, stride_tb)
    narrow = max(*numbers, width, pages, run, r.n, *all_strides) <= INT32_MAX
    for tile0 in range(0, tiles, at_once):
        now = min(at_once, tiles - tile0)
        if lse_parts:
            make_lse.launch(
                (now * programs, lse_parts, 1), device, (r.q, r.k, parts, *about, table, k_scale),
                (*numbers, tile0, run, pages, *q_strides, *k_strides, stride_tb, r.scale), narrow,
            )  # fmt: skip
        make_scores.launch(
            (now * programs, splits, 1), device,
            (r.q, r.k, weights, parts if lse_parts else lse, scores, *about, table, k_scale),
            (*numbers, tile0, run, pages, width, *all_strides, r.scale), narrow,
        )  # fmt: skip
        choose.launch(
            (now * tile.TOKENS * r.lists, 1, 1), device, (scores, out, kept, *about),
            (*numbers, tile0, run, width, r.n, r.first, r.newest), narrow,
        )  # fmt: skip
    launches["select"] += 1
    return out
