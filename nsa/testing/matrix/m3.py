"""The shapes of MiniMax-M3's sparse attention (arXiv 2606.13392), by names that a person can type, and their caches.

64 query heads, 4 KV heads, D = Dv = 128; a query selects 16 blocks of 128 keys for each KV head. A page of the cache
holds one block. Keys and values of a page lie side by side in one tensor, as servers of this model keep them.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.testing.matrix.caches import E4M3, LARGEST, Cache
from nsa.testing.matrix.case import Case, batch
from nsa.testing.matrix.problem import Problem

LONG, K = 65_536, 1024
SMALL_PAGE = 64  # keys of a page whose blocks have fewer than 16 keys. Other pages hold one block
K_SCALE, V_SCALE = 9 / 512, 13 / 512  # of fp8 caches: 448 of them are about 8; `in_e4m3` says why they have four bits


class Shape(NamedTuple):
    """A case, and where its keys are: in a cache in fp8, in pages, or in plain tensors. Queries are never in fp8."""

    case: Case
    fp8: bool = False
    paged: bool = True


def case(B: int, S: int, S_kv: int, shared: float = 0.0) -> Case:
    """`S` queries of each of `B` sequences of `S_kv` keys."""
    return batch(B, S, S_kv, size=128, shared=shared)


def _named() -> dict[str, Shape]:
    steps = {f"decode-B{B}": case(B, 1, S_kv) for B, S_kv in ((1, LONG), (8, LONG), (64, 16 * K), (256, 8 * K))}
    found = {f"m3-{name}": Shape(step) for name, step in steps.items()}
    for name, B, S in (("speculative", 8, 4), ("chunk512", 1, 512), ("chunk4096", 1, 4096), ("prompt", 1, LONG)):
        found |= {f"m3-{name}": Shape(case(B, S, LONG)), f"m3-{name}-shared0.9": Shape(case(B, S, LONG, 0.9))}
    seqlens, kv_seqlens = (512,) * 3 + (1,) * 61, (LONG,) * 3 + (16 * K,) * 61
    ragged = Case(
        16, 128, 128, 2048, sum(seqlens) * 4, "prefill", "bf16", HKV=4, block_size=128, seqlens=seqlens,
        kv_seqlens=kv_seqlens,
    )  # fmt: skip
    found["m3-ragged"] = Shape(ragged)
    steps |= {"chunk4096": case(1, 4096, LONG), "prompt": case(1, LONG, LONG)}
    return found | {f"m3-fp8-{name}": Shape(step, fp8=True) for name, step in steps.items()}


NAMED = _named()
"""The shapes that are timed, by id. `ragged` has three chunks of 512 queries and 61 decode steps."""


def make(shape: Shape, device: torch.device | str, seed: int | None = None) -> Problem:
    """Draw a shape's tensors. Keys and values are `[B, S_kv, HKV, D]`; `combined` puts them into pages."""
    p = shape.case.make(device, seed)
    return in_e4m3(p) if shape.fp8 else p


def in_e4m3(p: Problem) -> Problem:
    """The problem whose keys and values are what a cache of `float8_e4m3fn` stands for, without rounding.

    A number of that format has four significant bits. So has each scale, and the product has at most eight, as bf16
    has. So the oracle and comparators without fp8 compute with exactly the numbers of the quantised cache. The scales
    are `[HKV]`, the same for all heads: vLLM's fastest fp8 call takes one number.
    """

    def rounded(x: Tensor, scale: float) -> Tensor:
        return (x / scale).clamp(-LARGEST, LARGEST).to(E4M3).to(x.dtype) * scale

    k_scale, v_scale = (torch.full((p.case.HKV,), x, device=p.k.device) for x in (K_SCALE, V_SCALE))
    tensors = p.with_tensors(p.q, rounded(p.k, K_SCALE), rounded(p.v, V_SCALE))
    return dataclasses.replace(tensors, scales=(k_scale, v_scale))


class Group(NamedTuple):
    """`B` sequences of a batch with `S` queries and `S_kv` keys each. `first` and `token`: the first of each."""

    first: int
    token: int
    B: int
    S: int
    S_kv: int

    def of(self, x: Tensor) -> Tensor:
        """The group's part of a tensor of all tokens, as a batch: `[B, S, ...]`."""
        mine: Tensor = x[self.token : self.token + self.B * self.S].unflatten(0, (self.B, self.S))
        return mine


def groups(case: Case) -> list[Group]:
    """The groups of a batch: one, or of a ragged batch the chunks and the steps."""
    if not case.seqlens:
        return [Group(0, 0, case.B, case.S, case.S_kv)]
    found: list[Group] = []
    first = token = 0
    for (S, S_kv), some in itertools.groupby(case.sequences):
        found.append(Group(first, token, len(list(some)), S, S_kv))
        first, token = first + found[-1].B, token + found[-1].B * S
    return found


@dataclass(frozen=True)
class Combined(Cache):
    """A cache whose `k` and `v` are views of `pages [pages, HKV, block_size, D + Dv]`."""

    pages: Tensor = torch.empty(0)


def combined(p: Problem) -> Combined:
    """A full cache of a problem's keys, pages in random order, in fp8 if the problem has scales. For `Problem.derived`.

    Block tables are int32, as wide as the longest sequence needs, and padded by page 0.
    """
    return _in_pages(p, p.scales)


def block_table(lengths: Tensor, size: int, seed: int) -> tuple[Tensor, int]:
    """Pages in random order for sequences of `lengths [B]` keys: a table `[B, width]` (int32), and their number."""
    counts = (-(-lengths // size)).tolist()
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table, sum(counts)


def combined_16(p: Problem) -> Combined:
    """The same in the problem's own dtype, also if the problem has scales."""
    return _in_pages(p, None)


def _in_pages(p: Problem, scales: tuple[Tensor, Tensor] | None) -> Combined:
    case, device, size = p.case, p.k.device, p.case.block_size
    size = size if size >= 16 else SMALL_PAGE
    lengths = torch.tensor([S_kv for _, S_kv in case.sequences], dtype=torch.int32)
    if bool((lengths % size).any()):
        raise ValueError(f"expected sequences of whole pages of {size} keys, got {sorted(set(lengths.tolist()))}")
    table, count = block_table(lengths, size, p.seed)
    order = torch.cat([row[: length // size] for row, length in zip(table, lengths.tolist(), strict=True)])
    dtype = p.k.dtype if scales is None else E4M3
    pages = torch.empty(count, case.HKV, size, case.D + case.Dv, dtype=dtype, device=device)
    place = order.to(device, torch.int64)
    for part, x, scale in zip((slice(0, case.D), slice(case.D, None)), (p.k, p.v), scales or (None, None), strict=True):
        x, into = x.reshape(-1, size, case.HKV, x.shape[-1]).transpose(1, 2), pages
        if scale is not None:  # exact, as `in_e4m3` says. Bytes are moved, because torch may not move fp8
            x, into = (x / scale.to(x.dtype).view(-1, 1, 1)).to(E4M3).view(torch.uint8), pages.view(torch.uint8)
        into[..., part].index_copy_(0, place, x)
    k, v = (x.transpose(1, 2) for x in (pages[..., : case.D], pages[..., case.D :]))
    k_scale, v_scale = scales or (None, None)
    return Combined(k, v, lengths.to(device), table.to(device), k_scale, v_scale, pages)
