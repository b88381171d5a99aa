"""What selectors are timed beside: plain PyTorch as one would write it, and vLLM's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.selecting.request import Request
from nsa.testing.clock.timing import Fn
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.peers import VLLM_BLOCK, functions, this_version
from nsa.testing.matrix.selecting import as_request, positions, seen

DENSE_SCORES = 2**28  # that stand in memory at a time in `dense`
VLLM = "vllm.models.minimax_m3.common.ops.index_topk"


@dataclass(frozen=True)
class Comparator:
    """A way to choose. prepare: makes a timed call of `q`, `k` and keywords; what a server makes before the call
    is no part of it. tidy: the call's result as `nsa.select_blocks` returns it.
    """

    name: str
    prepare: Callable[[Tensor, Tensor, dict[str, Any]], Fn]
    tidy: Callable[[Any, Request], Tensor] = lambda result, r: result
    takes: Callable[[Request], bool] = lambda r: True


def comparator(impl: Contestant) -> Comparator:
    """A contestant as what is timed."""
    selects = impl.selects
    assert selects is not None
    return Comparator(impl.name, lambda q, k, how: functools.partial(selects, q, k, **how))


def dense(q: Tensor, k: Tensor, how: dict[str, Any]) -> Tensor:
    """A batch or a cache in pages without fp8 or weights, as one would write it in PyTorch: a matrix product, masks,
    reductions and `torch.topk`, over some queries at a time.
    """
    r = as_request(q, k, how)
    if r.block_table is not None:
        k = k[r.block_table.long()].flatten(1, 2)
    more = r.window // r.stride - 1 if r.score == "softmax" else 0  # a key counts in so many strides more
    spare = more + -(k.shape[1] + more) % r.size
    k = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, spare)).permute(0, 2, 3, 1)  # [B, HK, D, keys]
    q = q.unflatten(2, (r.HK, -1)).transpose(1, 2)  # [B, HK, S, heads, D]
    sees = seen(r)
    step = max(1, DENSE_SCORES // (r.B * r.lists * r.G * k.shape[-1]))
    parts = []
    for begin in range(0, r.S, step):
        here = slice(begin, min(begin + step, r.S))
        s = _products(q[:, :, here].flatten(2, 3), k).unflatten(2, (here.stop - begin, -1, r.G))
        parts.append(_best(s.movedim(1, 2).flatten(2, 3), sees[:, here], here, r))
    return torch.cat(parts, 1)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """`q @ k` with sums in fp32, which a GPU computes on its matrix units."""
    product: Tensor = q.float() @ k.float() if not q.is_cuda else torch.bmm(
        q.flatten(0, 1), k.flatten(0, 1), out_dtype=torch.float32
    ).unflatten(0, q.shape[:2])  # fmt: skip
    return product


def _best(s: Tensor, sees: Tensor, here: slice, r: Request) -> Tensor:
    """Lists of blocks of the products `[B, s, lists, G, keys]` of some queries that see the first `sees` keys."""
    hidden = torch.arange(s.shape[-1], device=s.device) >= sees[..., None, None, None]
    if r.score == "max":
        s = s.masked_fill_(hidden, -torch.inf).amax(3)
    elif r.score == "relu":
        s = s.relu_().sum(3).masked_fill_(hidden[:, :, 0], -torch.inf)
    else:
        assert r.lse is not None
        p = s.mul_(r.scale).sub_(r.lse[:, here].unflatten(2, (r.lists, r.G))[..., None]).exp_()
        p = p.masked_fill_(hidden, 0.0).sum(3)
        s = p.clone()
        for before in range(1, r.window // r.stride):
            s[..., before:] += p[..., :-before]
    s = s.unflatten(-1, (-1, r.size))
    s = s.sum(-1) if r.score == "softmax" else s.amax(-1)  # [B, s, lists, blocks]
    position = positions(r)[:, here, None, None]
    own, block = position // r.block_size, torch.arange(s.shape[-1], device=s.device)
    open_block = ((position + 1) % r.block_size != 0) & r.tail
    last = own - open_block.long()
    if r.score == "softmax":  # a block of which the query sees no key
        s = s.masked_fill((block * r.block_size - r.window) // r.stride + 1 >= sees[..., None, None], -torch.inf)
    s = s.masked_fill(block > last, -torch.inf)
    s = s.masked_fill((block <= last) & ((block < r.first) | (block > last - r.newest)), torch.inf)
    scores, blocks = s.topk(min(r.n, s.shape[-1]), -1)
    blocks = torch.where(scores > -torch.inf, blocks, s.shape[-1])
    blocks = torch.nn.functional.pad(blocks, (0, r.n - blocks.shape[-1]), value=s.shape[-1])
    if r.tail:
        blocks = torch.cat((blocks, torch.where(open_block, own, s.shape[-1]).expand(*blocks.shape[:-1], 1)), -1)
    return _sorted(blocks, s.shape[-1])


def _sorted(blocks: Tensor, none: int) -> Tensor:
    """Lists in rising order, `none` replaced by -1."""
    blocks = blocks.sort(-1).values
    return torch.where(blocks == none, -1, blocks).to(torch.int32)


DENSE = Comparator("dense_topk", lambda q, k, how: functools.partial(dense, q, k, how))


def vllm() -> list[Comparator]:
    """vLLM's kernels for MiniMax-M3, if they can be imported here."""
    found = functions(VLLM, "minimax_m3_index_score", "minimax_m3_index_topk", "minimax_m3_index_decode")
    if not found:
        return []
    score, topk, decode = found

    def prepare(q: Tensor, k: Tensor, how: dict[str, Any]) -> Fn:
        r = as_request(q, k, how)
        assert r.cache_seqlens is not None
        queries, keys, most = q.flatten(0, 1), k[:, :, 0], int(r.cache_seqlens.max())
        ends = torch.arange(r.B + 1, dtype=torch.int32, device=q.device) * r.S
        before = r.cache_seqlens - r.S

        def call() -> Any:
            with this_version():
                if r.S == 1:
                    rest = (r.n, r.first, r.newest, r.lists, 1, 1)
                    return decode(queries, keys, r.block_table, r.cache_seqlens, most, *rest)
                scores = score(queries, keys, r.block_table, ends, r.cache_seqlens, before, r.S, most, r.lists)
                return topk(scores, ends, before, r.S, r.n, r.first, r.newest)

        return call

    def tidy(result: Tensor, r: Request) -> Tensor:
        blocks = result.transpose(0, 1).reshape(r.shape)
        return _sorted(torch.where(blocks < 0, r.rows, blocks), r.rows)

    def takes(r: Request) -> bool:
        return r.score == "max" and r.page == r.block_size == VLLM_BLOCK and r.G == r.HK == 1

    return [Comparator("vllm", prepare, tidy, takes)]
