"""Inputs within a contract: cases are changed to fit the contract, and selections are changed to meet its needs.

A case that a kernel does not take is not skipped. It is replaced by the nearest case that the kernel promises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nsa.testing.contestants.contract import Contract
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem, bounds

ENOUGH = 50  # with fewer distinct cases a kernel is not proved
PLENTY = 64  # if fewer cases fit a contract, more are added up to this number
MOST = 160  # cases of a contract at most, because a kernel may be compiled for each of them
SMALL_CHUNK, CHUNK = 24, 448  # queries of a prompt with S = S_kv: a block and 24 if interpreted, 448 on a GPU


def fitted(case: Case, contract: Contract, interpreted: bool = False) -> Case:
    """The nearest case to `case` that a contract takes.

    interpreted: prefer dtypes that Triton's interpreter computes correctly.
    """
    c = _source(case, contract)
    dtypes = [d for d in contract.dtypes if not interpreted or d != "bf16"] or list(contract.dtypes)
    dtype = c.dtype if c.dtype in dtypes else dtypes[c.seed % len(dtypes)]
    D, H = nearest(c.D, contract.dims), nearest(c.H, contract.groups)
    Dv = nearest(c.Dv, contract.value_dims) if contract.unequal_dims else D
    packed = c.source in ("rows", "varlen")
    causal = c.causal if packed or c.causal in contract.causal else contract.causal[0]
    size = nearest(c.block_size, contract.block_sizes) if c.source == "blocks" else c.block_size
    c = dataclasses.replace(
        c, dtype=dtype, D=D, Dv=Dv, H=H, causal=causal, int64=c.int64 and contract.int64,
        positions=c.positions and contract.positions and causal,
    )  # fmt: skip
    if c.seqlens and not contract.sequences:
        S, S_kv = max(sum(c.seqlens), 1), max(sum(c.kv_seqlens or c.seqlens), 1)
        c = dataclasses.replace(c, seqlens=(), kv_seqlens=(), S=S, S_kv=max(S, S_kv), N=S * c.HKV)
    if c.kv_seqlens and not contract.chunks:
        c = dataclasses.replace(c, kv_seqlens=(), S_kv=max(c.seqlens))
    if size != c.block_size:
        c = _resized(c, size)
    if c.dist == "overlap" and "distinct" in contract.needs:
        c = dataclasses.replace(c, dist="prefill" if c.source == "blocks" else "mixed", n=0)
    if c.scores != 1 and "small scores" in contract.needs:
        c = dataclasses.replace(c, scores=1.0)
    if not packed and not contract.chunks and c.S != c.S_kv and not c.seqlens:
        S = (c.block_size + SMALL_CHUNK if interpreted else max(CHUNK, 2 * c.block_size)) + c.seed % 64
        S = min(S, c.S_kv)
        L = min(c.L, S)
        c = dataclasses.replace(c, S=S, S_kv=S, N=S * c.HKV, L=L, shared=0.0)
    return c


def _source(case: Case, contract: Contract) -> Case:
    """The case with a source that the contract takes."""
    if case.source in contract.takes:
        return case
    target, shape = contract.takes[0], (case.H, case.D, case.Dv)
    if target in ("rows", "varlen"):
        L, N = max(1, case.L), min(case.N, 1024)
        return Case(*shape, L, N, "few", case.dtype, source=target, scores=case.scores)
    if case.source in ("rows", "varlen"):
        dist = "many" if target == "blocks" else "few"
        S_kv = max(257, case.L + 31) if case.L < 2048 else 2 * case.L
        size = min(64, max(16, case.L // 4 // 16 * 16))
        return Case(
            *shape, max(case.L, 16), case.N, dist, case.dtype, source=target, S_kv=S_kv, block_size=size,
            scores=case.scores,
        )  # fmt: skip
    dist = {"prefill": "mixed", "decode": "many", "overlap": "overlap"}.get(case.dist, "mixed")
    if target == "blocks":
        dist = "overlap" if case.dist == "overlap" else "prefill" if case.S > 1 or case.seqlens else "many"
        L = max(case.L, 2 * case.block_size)
        return dataclasses.replace(case, source="blocks", dist=dist, L=L, n=0)
    return dataclasses.replace(case, source="ranges", dist=dist, n=0, shared=0.0)


def _resized(case: Case, size: int) -> Case:
    """The case with another block size, as many block slots, and a last block that is partly filled."""
    n, spare = case.n, case.n * case.block_size - case.L
    grown = -(-case.S_kv * size // case.block_size)
    S_kv = case.S_kv if case.seqlens else max(case.S, grown - grown % size + case.S_kv % case.block_size % size)
    return dataclasses.replace(case, block_size=size, n=n, L=max(1, n * size - min(spare, size - 1)), S_kv=S_kv)


def nearest(value: int, taken: tuple[int, ...]) -> int:
    return value if not taken or value in taken else min(taken, key=lambda x: (abs(x - value), x))


def cases_of(contract: Contract, matrix: Iterable[Case], interpreted: bool = False) -> list[Case]:
    """The cases of a matrix, changed to fit a contract, each once. If there are fewer than `PLENTY`, more are added.

    Added cases have other lengths, and go through the promised sizes, dtypes and sources in turn.
    """
    found = dict.fromkeys(fitted(case, contract, interpreted) for case in matrix)
    turns: tuple[tuple[Any, ...], ...] = (
        contract.takes, contract.dims or (64,), contract.groups or (4,), contract.block_sizes or (32,),
        contract.causal, contract.dtypes,
    )  # fmt: skip
    for i in range(20 * PLENTY):
        if len(found) >= PLENTY:
            break
        source, D, H, size, causal, dtype = (values[i // (k + 1) % len(values)] for k, values in enumerate(turns))
        n, S, HKV = 2 + i % 3, 1 + i % 4, 1 + (i % 3 == 0)
        if source in ("rows", "varlen"):
            case = Case(H, D, D, 17 + 7 * i, 2 + i % 3, "few", dtype, source=source)
        else:
            S_kv = (n + 2) * size + 5 + 3 * i
            dist = "prefill" if source == "blocks" else "mixed"
            L = n * size if source == "blocks" else 20 + i
            case = Case(
                H, D, D, L, S * HKV, dist, dtype, source=source, HKV=HKV, S=S, S_kv=S_kv, block_size=size, causal=causal
            )
        found[fitted(case, contract, interpreted)] = None
    # The hardest cases come first. The others follow in the order of their seeds, so that the cut removes no kind.
    return sorted(found, key=lambda case: (case.dist != "overlap" and case.scores == 1, case.seed))[:MOST]


def arranged(p: Problem, contract: Contract | None) -> Problem:
    """The problem with a selection that meets the contract's needs."""
    if contract is None or not contract.needs or p.case.source in ("rows", "varlen"):
        return p
    return with_limit(p, contract, bounds(p)[2].view(p.q.shape[:-2]))


def with_limit(p: Problem, contract: Contract, limit: Tensor) -> Problem:
    """As `arranged`, where `limit [...]` is one past the last key that a query may see."""
    needs, blocks = set(contract.needs), p.block_indices
    limit = limit[..., None, None].expand(*limit.shape, p.ranges.shape[-3], 1)
    if "one list" in needs:  # that of the first KV head
        p = dataclasses.replace(p, ranges=p.ranges[..., :1, :, :].expand_as(p.ranges))
        blocks = None if blocks is None else blocks[..., :1, :].expand_as(blocks)
    if "blocks" not in contract.takes or blocks is None:
        spans = _arranged_spans(p.ranges, limit, needs)
        return dataclasses.replace(p, ranges=spans.to(p.ranges.dtype), block_indices=None, block_size=None)
    assert p.block_size is not None
    return p.choosing(_arranged_blocks(blocks.to(torch.int64), limit, p.block_size, needs))


def _arranged_blocks(blocks: Tensor, limit: Tensor, size: int, needs: set[str]) -> Tensor:
    if "visible" in needs:
        blocks = blocks.masked_fill((blocks < 0) | (blocks * size >= limit), -1)
    if "own block" in needs and blocks.shape[-1]:  # goes into the last slot of rows that lack it
        own = (limit - 1).clamp(min=0) // size
        missing = ~(blocks == own).any(-1, keepdim=True)
        blocks = torch.cat((blocks[..., :-1], torch.where(missing, own, blocks[..., -1:])), -1)
    if "distinct" in needs:
        ordered, where = blocks.sort(dim=-1, stable=True)
        again = torch.zeros_like(ordered, dtype=torch.bool)
        again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
        blocks = blocks.masked_fill(torch.zeros_like(again).scatter(-1, where, again), -1)
    if "nonempty" in needs and blocks.shape[-1]:
        nothing = ((blocks < 0) | (blocks * size >= limit)).all(-1)
        first_only = torch.arange(blocks.shape[-1], device=blocks.device).clamp(max=1).neg()  # 0, -1, -1, ...
        blocks = torch.where(nothing[..., None], first_only, blocks)
    if not {"sorted", "padding last"} & needs:
        return blocks
    padding, last = blocks < 0, torch.iinfo(torch.int64).max
    if "sorted" in needs:
        order = blocks.masked_fill(padding, last) if "padding last" in needs else blocks.masked_fill(padding, -1)
    else:
        order = padding.long()
    return blocks.gather(-1, order.argsort(dim=-1, stable=True)).clamp(min=-1)


def _arranged_spans(spans: Tensor, limit: Tensor, needs: set[str]) -> Tensor:
    start, end = spans.to(torch.int64).unbind(-1)
    if "visible" in needs:
        start, end = (x.clamp(min=0).minimum(limit) for x in (start, end))
        end = end.maximum(start)
    if "distinct" in needs:
        start, end = _ordered(start, end, end.le(start))
        before = torch.cat((torch.zeros_like(end[..., :1]), end.cummax(-1).values[..., :-1]), -1)
        start = start.maximum(before)
        end = end.maximum(start)
    if {"sorted", "padding last"} & needs:
        empty = end <= start
        start, end = _ordered(start if "sorted" in needs else torch.zeros_like(start), end, empty, (start, end))
    if "nonempty" in needs and spans.shape[-2]:
        nothing = (end.minimum(limit) <= start.clamp(min=0)).all(-1)
        one = torch.zeros_like(end)
        one[..., 0] = 1
        start, end = start.masked_fill(nothing[..., None], 0), torch.where(nothing[..., None], one, end)
    return torch.stack((start, end), -1)


def _ordered(
    key: Tensor, end: Tensor, empty: Tensor, spans: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Starts and ends `[..., n]` in the order of `key`, empty spans last."""
    order = key.masked_fill(empty, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    start, end = spans or (key, end)
    return start.gather(-1, order), end.gather(-1, order)


def promises(contract: Contract) -> dict[str, str]:
    """What a run of the parity lane must have tested: the key of each promise, and its words in a verdict."""
    flags = {
        "LSE": bool(contract.lse), "gradients": contract.gradients, "repeatable": contract.repeatable,
        "cu_seqlens": contract.sequences, "q_positions": contract.positions, "caches in fp8": contract.fp8,
        "ragged queries": contract.ragged,
    } | {f"caches ({kind})": True for kind in contract.caches}  # fmt: skip
    words = {"O": "outputs", "repeatable": "equal bits each time"}
    return {key: words.get(key, key) for key in ("O", *(key for key, promised in flags.items() if promised))}
