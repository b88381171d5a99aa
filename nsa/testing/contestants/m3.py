"""Contestants over the caches of MiniMax-M3 (`matrix/m3.py`): ours, in one call and in others, and dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa.testing.contestants.contract import Call, Contestant, OtherWork
from nsa.testing.contestants.ours import BLOCKS
from nsa.testing.judge.forward import reference_at
from nsa.testing.matrix.m3 import Combined, Group, combined, combined_16, groups
from nsa.testing.matrix.problem import Problem

TAIL = 4096  # queries of a sequence that dense attention computes, at most: its last ones


def arguments(p: Problem, make: Callable[[Problem], Combined] = combined) -> dict[str, Any]:
    """Our arguments for the whole batch in one call; `cu_seqlens_q` among them if it is ragged."""
    cache = p.derived(make)
    found = {"q": p.q, "k_cache": cache.k, "v_cache": cache.v, **cache.arguments, "causal": p.causal, "scale": p.scale}
    found |= p.picked | {"max_selected": p.case.L}
    found |= {"cu_seqlens_q": p.cu_seqlens, "max_seqlen_q": max(p.case.seqlens)} if p.case.seqlens else {}
    return found | {"backend": "triton"}


def one_call(make: Callable[[Problem], Combined] = combined, **how: str) -> Call:
    """Our call over the cache. how: `backend` and `schedule`; by default "triton" and "auto"."""
    entry: Callable[..., Any] = nsa.selection_attention_with_kvcache

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        return entry(**arguments(p, make) | how, return_lse=return_lse, out=out)

    return call


def _apart(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
    """A call for each group of equal sequences, into one output: what a server without ragged batches does."""
    cache, q, blocks = p.derived(combined), p.q.flatten(0, -3), p.block_indices
    assert blocks is not None
    assert cache.block_table is not None
    blocks = blocks.flatten(0, -3)
    o = p.q.new_empty(*p.q.shape[:-1], p.case.Dv) if out is None else out
    scales = {name: x for name, x in cache.arguments.items() if name.endswith("scale")}
    for group in groups(p.case):
        where = slice(group.first, group.first + group.B)
        nsa.selection_attention_with_kvcache(
            group.of(q), cache.k, cache.v, **scales,
            cache_seqlens=cache.cache_seqlens[where], block_table=cache.block_table[where],
            block_indices=group.of(blocks), block_size=p.block_size,
            causal=p.causal, scale=p.scale, max_selected=p.case.L, backend="triton",
            out=group.of(o.flatten(0, -3)),
        )  # fmt: skip
    return o


def _of_group(p: Problem, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """`q [B, s, HQ, D]`, at most `TAIL` of a group's queries, and all of its `k` and `v [B, S_kv, HKV, D | Dv]`."""
    first = sum(other.B * other.S_kv for other in groups(p.case) if other.first < group.first)
    keys = slice(first, first + group.B * group.S_kv)
    k, v = (x.flatten(0, -3)[keys].unflatten(0, (group.B, group.S_kv)) for x in (p.k, p.v))
    return _tail(p.q, group), k, v


def _tail(x: Tensor, group: Group) -> Tensor:
    """The last `TAIL` queries of a group's sequences, or all if they have fewer: `[B, s, HQ, D]`."""
    return group.of(x.flatten(0, -3))[:, -TAIL:]


def _dense(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
    """The last queries over every key, those after them, too: no mask, which some backend may not take."""
    o = p.q.new_empty(*p.q.shape[:-1], p.case.Dv)
    for group in groups(p.case):
        q, k, v = (x.transpose(1, 2) for x in _of_group(p, group))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = F.scaled_dot_product_attention(q, k, v, scale=p.scale, enable_gqa=True)
        _tail(o, group).copy_(found.transpose(1, 2))
    return o


def _dense_flops(p: Problem) -> int:
    work = sum(group.B * min(group.S, TAIL) * group.S_kv for group in groups(p.case))
    flops: int = 2 * p.case.HQ * work * (p.case.D + p.case.Dv)
    return flops


def _check_dense(p: Problem, out: Tensor) -> None:
    """The first and the last of the queries, of at most two sequences of each group."""
    for group in groups(p.case):
        q, k, v = (x[:2] for x in _of_group(p, group))
        at = torch.tensor(sorted({0, q.shape[1] - 1}), device=out.device)
        all_keys = torch.tensor([0, group.S_kv], device=out.device).expand(*q.shape[:2], p.case.HKV, 1, 2)
        want, _ = reference_at(q, k, v, at, ranges=all_keys, causal=False, scale=p.scale)
        limit = 16 * torch.finfo(out.dtype).eps * want.abs().amax()
        error = (_tail(out, group)[:2].index_select(1, at).double() - want).abs().amax()
        assert bool(error <= limit), f"dense attention: error {float(error):.3g} > bound {float(limit):.3g}"


M3 = Contestant("m3", one_call(combined), None, BLOCKS, poison=True)
"""Our call over the cache, two views of one tensor."""
M3_16 = Contestant("m3_bf16", one_call(combined_16), None, BLOCKS)
"""The same over a cache in the queries' dtype, beside the one in fp8."""
APART = Contestant("calls_apart", _apart, None, BLOCKS, lse=False)
"""Our call, once for the chunks of a ragged batch and once for its steps."""
DENSE = Contestant("dense_flash", _dense, lse=False, other=OtherWork(_dense_flops, _check_dense))
"""What would be done without a selection: dense attention over all keys, of at most `TAIL` queries of a sequence."""
