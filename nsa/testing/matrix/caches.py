"""KV caches for tests and benchmarks, contiguous or in pages, and the oracle for calls over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.matrix.problem import Problem, spans_of_blocks

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
NOWHERE = (-1, -(2**31), 2**31 - 1)  # numbers of pages that do not exist


@dataclass(frozen=True)
class Cache:
    """Keys and values of ``B`` sequences as :func:`nsa.selection_attention_with_kvcache` takes them.

    k, v: ``[B, S_max, HKV, D | Dv]``, or ``[pages, page_size, HKV, D | Dv]`` with a block table.
    cache_seqlens: ``[B]``. block_table: ``[B, width]`` or None. k_scale, v_scale: of a cache in fp8.
    """

    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of a call that describe the cache."""
        named = {"cache_seqlens": self.cache_seqlens, "block_table": self.block_table}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return named | {name: x for name, x in scales.items() if x is not None}

    @property
    def room(self) -> int:
        """The most keys that a sequence may have."""
        return int(self.k.shape[1]) * (1 if self.block_table is None else int(self.block_table.shape[1]))

    def sequence(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of a sequence in order, ``[length, HKV, D | Dv]``, and ``[length]`` whether each exists."""
        length = min(max(int(self.cache_seqlens[b]), 0), self.room)
        if self.block_table is None:
            return self.k[b, :length], self.v[b, :length], torch.ones(length, dtype=torch.bool)
        page = int(self.k.shape[1])
        numbers = [int(x) for x in self.block_table[b]]
        exists = torch.tensor([0 <= x < self.k.shape[0] for x in numbers], dtype=torch.bool)
        there = [x if 0 <= x < self.k.shape[0] else 0 for x in numbers]
        keys, values = (torch.cat([x[i] for i in there])[:length] for x in (self.k, self.v))
        return keys, values, exists.repeat_interleave(page)[:length]


def draw(
    lengths: Sequence[int],
    room: int,
    page_size: int | None,
    *,
    HKV: int = 2,
    D: int = 16,
    Dv: int = 16,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Cache:
    """A cache of N(0, 1) keys and values. Every place outside the sequences, spare pages included, is NaN.

    Pages are in random order. Past the end of a sequence, the block table names pages that do not exist.
    """
    g = torch.Generator().manual_seed(seed)
    B = len(lengths)
    k, v = (torch.randn(B, room, HKV, d, generator=g) for d in (D, Dv))
    for b, length in enumerate(lengths):
        for x in (k, v):
            x[b, max(length, 0) :] = math.nan
    table = None
    if page_size is not None:
        width = -(-room // page_size)
        assert width * page_size == room, f"expected whole pages of {page_size} in {room} keys"
        pages = B * width + 3
        order = torch.randperm(pages, generator=g)[: B * width].view(B, width)
        paged = [torch.full((pages, page_size, *x.shape[2:]), math.nan) for x in (k, v)]
        for cache, x in zip(paged, (k, v), strict=True):
            cache[order.flatten()] = x.view(B * width, page_size, *x.shape[2:])
        k, v = paged
        used = torch.arange(width) * page_size < torch.tensor(lengths)[:, None]
        nowhere = torch.tensor(NOWHERE)[torch.randint(0, len(NOWHERE), (B, width), generator=g)]
        table = torch.where(used, order, nowhere).to(index).to(device)
    return Cache(k.to(device, dtype), v.to(device, dtype), torch.tensor(lengths, dtype=index, device=device), table)


PER_ROW = ("ranges", "block_indices")


def quantized(cache: Cache, per_head: bool = True) -> Cache:
    """The cache in ``float8_e4m3fn``, with scales that make the largest magnitude 448, the largest of that format.

    Args:
        per_head: ``[HKV]`` scales, one for each KV head; else one number, ``[]``.
    """

    def convert(x: Tensor) -> tuple[Tensor, Tensor]:
        peak = x.float().abs().nan_to_num(0.0).amax((0, 1, 3) if per_head else (0, 1, 2, 3))
        scale = torch.where(peak > 0, peak / LARGEST, 1.0)
        return (x.float() / scale.view(-1, 1)).clamp(-LARGEST, LARGEST).to(E4M3), scale

    (k, k_scale), (v, v_scale) = convert(cache.k), convert(cache.v)
    return Cache(k, v, cache.cache_seqlens, cache.block_table, k_scale, v_scale)


def dequantized(cache: Cache) -> Cache:
    """The keys and values that a quantised cache stands for, in fp64. Other caches are returned as they are."""
    if cache.k.dtype != E4M3:
        return cache
    pairs = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    k, v = (x.double() * (1.0 if scale is None else scale.double().view(-1, 1)) for x, scale in pairs)
    return Cache(k, v, cache.cache_seqlens, cache.block_table)


def oracle(q: Tensor, cache: Cache, cu_seqlens_q: Tensor | None = None, **selection: Any) -> tuple[Tensor, Tensor]:
    """``(O, LSE)`` in fp64, one sequence after the other, over contiguous keys. None of our code for pages is used.

    cu_seqlens_q: of a ragged batch; a token's sequence is the number of ends at or before it, as in the kernels.
    selection: ``ranges``, or ``block_indices`` and ``block_size``; ``causal``, ``scale``.
    """
    cache = dequantized(cache)
    if cu_seqlens_q is not None:
        return _ragged(q, cache, cu_seqlens_q[1:].long(), selection)
    outputs = []
    for b in range(q.shape[0]):
        k, v, exists = cache.sequence(b)
        mine = {name: x[b : b + 1] if name in PER_ROW and x is not None else x for name, x in selection.items()}
        if not bool(exists.all()):
            mine = _without(mine, exists)
        outputs.append(selection_reference(Call.of(q[b : b + 1].double(), k[None], v[None], **mine, return_lse=True)))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse)


def _ragged(q: Tensor, cache: Cache, ends: Tensor, selection: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The oracle's answer where the queries ``q [T, HQ, D]`` of sequences end at ``ends [B]``."""
    token = torch.arange(q.shape[0], device=q.device)
    seq = (ends <= token[:, None]).sum(1)
    o = q.new_zeros(*q.shape[:2], cache.v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    for b in range(len(ends)):
        mine = (seq == b).nonzero()[:, 0]
        paged, only = cache.block_table is not None, slice(b, b + 1)
        one = Cache(
            cache.k if paged else cache.k[only], cache.v if paged else cache.v[only], cache.cache_seqlens[only],
            None if cache.block_table is None else cache.block_table[only],
        )  # fmt: skip
        picked = {name: x[mine][None] if name in PER_ROW and x is not None else x for name, x in selection.items()}
        if picked.get("causal", True):  # from the last query, which sees all keys
            picked["q_positions"] = (one.sequence(0)[0].shape[0] - ends[b].clamp(min=0) + mine)[None]
        found = oracle(q[mine][None], one, **picked)
        o[mine], lse[mine] = found[0][0], found[1][0]
    return o, lse


def end_to_end(p: Problem, cache: Cache, counts: Sequence[int]) -> Problem:
    """The same call without a cache, for the diagnosis: packed sequences of queries, over keys end to end.

    p: has the queries and the selection of the call. counts: queries of each sequence.
    """
    plain = dequantized(cache)
    keys, values, _ = zip(*(plain.sequence(b) for b in range(len(counts))), strict=True)
    lengths = tuple(map(len, keys))
    cu_q, cu_k = (torch.tensor([0, *x], device=p.q.device).cumsum(0, dtype=torch.int32) for x in (counts, lengths))
    case = dataclasses.replace(
        p.case, N=sum(counts) * p.case.HKV, S=1, S_kv=0, seqlens=tuple(counts), kv_seqlens=lengths, positions=False
    )
    scales = None if cache.k_scale is None or cache.v_scale is None else (cache.k_scale, cache.v_scale)
    return dataclasses.replace(
        p, case=case, q=p.q.flatten(0, 1), k=torch.cat(keys).to(p.q.dtype), v=torch.cat(values).to(p.q.dtype),
        ranges=p.ranges.flatten(0, 1), block_indices=None if p.block_indices is None else p.block_indices.flatten(0, 1),
        cu_seqlens=cu_q, cu_seqlens_k=cu_k, scales=scales,
    )  # fmt: skip


def _without(selection: dict[str, Any], exists: Tensor) -> dict[str, Any]:
    """The selection without the keys that do not exist, as spans of one key each."""
    spans = selection.get("ranges")
    if spans is None:
        spans = spans_of_blocks(selection["block_indices"], selection["block_size"])
    rows = [
        [key for start, end in row.tolist() for key in range(max(start, 0), min(end, len(exists))) if exists[key]]
        for row in spans.reshape(-1, *spans.shape[-2:])
    ]
    n = max(map(len, rows), default=0)
    single = torch.zeros(len(rows), n, 2, dtype=torch.int64)
    for i, keys in enumerate(rows):
        single[i, : len(keys), 0] = torch.tensor(keys, dtype=torch.int64)
        single[i, : len(keys), 1] = single[i, : len(keys), 0] + 1
    others = {name: x for name, x in selection.items() if name not in ("ranges", "block_indices", "block_size")}
    return others | {"ranges": single.view(*spans.shape[:-2], n, 2).to(spans.device)}


@lru_cache(maxsize=64)
def maker(page_size: int | None) -> Callable[[Problem], Cache]:
    """A function that makes a full cache of a problem's keys, pages in random order. For :meth:`Problem.derived`."""

    def make(p: Problem) -> Cache:
        B, S_kv = p.k.shape[:2]
        lengths = torch.full((B,), S_kv, dtype=torch.int32, device=p.k.device)
        if page_size is None:
            return Cache(p.k, p.v, lengths, None)
        width = S_kv // page_size
        order = torch.randperm(B * width, generator=torch.Generator().manual_seed(p.seed)).to(p.k.device)
        where = order.argsort()  # which part of the keys each page holds
        k, v = (x.reshape(B * width, page_size, *x.shape[2:])[where] for x in (p.k, p.v))
        return Cache(k, v, lengths, order.view(B, width).int())

    return make
