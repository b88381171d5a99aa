"""The answers, in fp64, of kernels that do one thing wrong. `diagnosis` compares a wrong result with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.testing.judge.evidence import Answer, Evidence, Finding, Reading, differ, finite, first_keys
from nsa.testing.matrix.caches import E4M3
from nsa.testing.matrix.problem import Problem, bounds

TILES = (16, 32, 64, 128)  # keys that a kernel may read at a time
LOG2E = math.log2(math.e)


def over_slots(text: str, e: Evidence, keep: Callable[[Reading], Tensor]) -> Finding:
    """A kernel that reads only the slots `keep(reading) [N, L]` of each row."""

    def answer(rows: Tensor) -> Answer:
        reading = e.read(rows)
        return reading.attend(keep(reading))

    return Finding(text, answer)


def instead(text: str, p: Problem, **fields: Any) -> Finding:
    """A kernel that solves `p` with other fields."""
    other = dataclasses.replace(p, **fields)
    return Finding(text, lambda rows: Reading(other, rows).attend())


def wrong_keys(e: Evidence) -> Iterator[Finding]:
    """Kernels that leave out keys, or read too many."""
    p = e.oracle.seen
    yield over_slots("misses the last key of a row", e, lambda r: r.slot < r.lengths - 1)
    yield from other_problems(e)
    if p.ranges.shape[-2] > 1:
        yield over_slots("misses the last key of each span", e, _but_the_last_of_spans)
        shorter = torch.stack((p.ranges[..., 0], p.ranges[..., 1] - 1), -1)
        text = "misses the last key of each span that causality leaves whole"
        yield instead(text, p, ranges=shorter, block_indices=None)
    if p.case.source in ("ranges", "blocks"):
        start, end = p.ranges.long().unbind(-1)
        longer = torch.stack((start, end + (end > start)), -1)
        yield instead("reads one key more at the end of each span", p, ranges=longer, block_indices=None)
    yield over_slots("misses the first key of a row", e, lambda r: r.slot > 0)
    yield from other_lists(p)
    yield over_slots("counts a key that is listed twice only once", e, lambda r: r.first_mention)


def _but_the_last_of_spans(r: Reading) -> Tensor:
    place, keys = r.extents["each span"]
    return place < keys - 1


def other_problems(e: Evidence) -> Iterator[Finding]:
    """Kernels that solve another problem: with another causal limit, or sequences as one."""
    p, whole, pick = e.oracle.seen, e.oracle.problem, e.oracle.pick
    if not p.causal:
        yield instead("hides keys ahead of the query although causal=False", p, causal=True)
    if p.causal:
        where = p.positions().view(p.q.shape[:-2])
        yield instead("ends the causal window one key early", p, q_positions=where - 1)
        yield instead("ends the causal window one key late", p, q_positions=where + 1)
        yield instead("reads keys beyond the causal limit", p, causal=False)
        if whole.q_positions is not None:
            usual = dataclasses.replace(whole, q_positions=None).positions().view(whole.q.shape[:-2])
            yield instead("ignores q_positions", p, q_positions=pick(usual))
        order = torch.arange(whole.q.shape[p.q.dim() - 3], device=p.q.device).expand(whole.q.shape[:-2])
        packed = p.cu_seqlens is not None
        text = "takes a query's place among all packed queries" if packed else "takes the first query"
        yield instead(text + (" for its position" if packed else " for position 0"), p, q_positions=pick(order))
    if p.cu_seqlens_k is not None:
        yield instead("takes cu_seqlens of the queries for those of the keys", p, cu_seqlens_k=None)
    if p.cu_seqlens is not None:
        names = ("q", "k", "v", "ranges", "block_indices", "q_positions")
        one = {name: x[None] for name in names if (x := getattr(p, name)) is not None}
        yield instead("takes packed sequences for one sequence", p, **one, cu_seqlens=None, cu_seqlens_k=None)


def other_lists(p: Problem) -> Iterator[Finding]:
    """Kernels that read only a part of a row's list of blocks or spans, or take its padding for a block."""
    blocks, rows = p.block_indices, p.ranges.shape[:-1]
    what, pad = ("spans", "empty span") if blocks is None else ("blocks", "padding (-1)")
    place = torch.arange(rows[-1], device=p.q.device)

    def without(text: str, gone: Tensor) -> Finding:
        if blocks is None:
            return instead(text, p, ranges=p.ranges.masked_fill(gone.expand(rows)[..., None], 0))
        return instead(text, p.choosing(blocks.masked_fill(gone, -1)))

    empty = p.ranges[..., 1] <= p.ranges[..., 0]
    gone = empty.cumsum(-1) > 0
    if bool(((~gone).any(-1) & (gone & ~empty).any(-1)).any()):  # else it is a kernel that gives 0 for some rows
        yield without(f"stops at the first {pad} of a row", gone)
    if rows[-1] > 1:
        yield without(f"leaves out the last slot of a row's list of {what}", place == rows[-1] - 1)
    for count in (x for x in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256) if x < rows[-1]):
        yield without(f"reads only the first {count} slots of a row's list of {what}", place >= count)
    if blocks is not None:
        assert p.block_size is not None
        last = (bounds(p)[1].view(*p.q.shape[:-2], 1, 1) - 1).clamp(min=0) // p.block_size
        rounded = 1 << (p.block_size - 1).bit_length()
        for size in sorted({16, 32, 64, 128, rounded} - {p.block_size}):
            other = dataclasses.replace(p, block_size=size).choosing(blocks)
            yield instead(f"takes blocks of {p.block_size} keys for blocks of {size}", other)
        yield instead("takes padding (-1) for block 0", p.choosing(blocks.clamp(min=0)))
        yield instead("takes padding (-1) for the last block", p.choosing(torch.where(blocks < 0, last, blocks)))


def partial_blocks(e: Evidence) -> Iterator[Finding]:
    """Lengths rounded down or up to a whole number of tiles, and spans of which one tile is read."""

    def whole(r: Reading, size: int, extent: str) -> Tensor:
        place, keys = r.extents[extent]
        return place < keys - keys % size

    def first(r: Reading, size: int) -> Tensor:
        return r.extents["each span"][0] < size

    def rounded_up(rows: Tensor, size: int) -> Answer:
        return e.right.pick(rows).beside((-e.oracle.seen.lengths[rows] % size).double().log()[:, None])

    for extent in _extents(e):
        for size in TILES:
            text = f"drops the last partial block of {size} keys of {extent}"
            yield over_slots(text, e, partial(whole, size=size, extent=extent))
            if extent == "each span":
                yield over_slots(f"reads only the first {size} keys of each span", e, partial(first, size=size))
    for size in TILES:
        text = f"counts empty slots of the last block of {size} keys as keys of score 0"
        yield Finding(text, partial(rounded_up, size=size))


def _extents(e: Evidence) -> tuple[str, ...]:
    """What a kernel may cut into tiles, of `Reading.extents`."""
    return ("a row", "each span") if e.oracle.seen.ranges.shape[-2] > 1 else ("a row",)


RESCALED = {
    "its accumulator": (True, False),
    "its sum of weights": (False, True),
    "its accumulator and its sum of weights": (True, True),
}
"""What a kernel may forget to rescale: whether the accumulator, and whether the sum."""


def not_rescaled(e: Evidence) -> Iterator[Finding]:
    """Online softmax in which what was added up is not rescaled when the running maximum grows."""

    def answer(rows: Tensor, size: int, extent: str, accumulator: bool, total: bool) -> Answer:
        r = e.read(rows)
        place, keys = r.extents[extent]
        last = (r.slot + torch.minimum(size - place % size, keys - place) - 1).clamp(0, r.slot.numel() - 1)
        running = r.scores.cummax(-1).values.gather(-1, last[:, None].expand_as(r.scores))  # at the end of each tile
        largest = r.scores.amax(-1, keepdim=True)
        stale, right = ((r.scores - finite(x)).exp() for x in (running, largest))
        summed = (stale if total else right).sum(-1)
        out = (stale if accumulator else right) @ r.values / summed.clamp(min=1e-300)[..., None]
        return Answer(out, largest[..., 0] + summed.log())

    if int(e.oracle.seen.lengths.max()) < 2:
        return
    for what, (accumulator, total) in RESCALED.items():
        for extent in _extents(e):
            for size in TILES:
                text = f"does not rescale {what} when the running maximum grows (tiles of {size} keys of {extent})"
                how = partial(answer, size=size, extent=extent, accumulator=accumulator, total=total)
                yield Finding(text, how)


def wrong_scales(e: Evidence) -> Iterator[Finding]:
    """Wrong factors of the scores that have a known cause."""
    D, scale = e.oracle.problem.case.D, e.oracle.problem.scale
    named = [("does not divide scores by sqrt(D)", D**0.5), ("divides scores by D, not by sqrt(D)", D**-0.5)]
    padded = 1 << (D - 1).bit_length()
    named += [("divides scores by sqrt(Dv), not by sqrt(D)", (D / e.oracle.problem.case.Dv) ** 0.5)]
    named += [("rounds D up to a power of two in the scale", (D / padded) ** 0.5)]
    named += [(f"divides scores by sqrt({fixed}) for any D", (D / fixed) ** 0.5) for fixed in (64, 128)]
    named = [(text, factor) for text, factor in named if factor != 1]
    if scale:
        named = [("ignores the scale asked for, and divides by sqrt(D)", D**-0.5 / scale)]
    named += [("multiplies scores by log2(e) once too often", LOG2E)]
    named += [("forgets the factor log2(e) of scores that go to exp2", 1 / LOG2E)]
    yield from (scaled(text, factor, e) for text, factor in named)
    if e.oracle.problem.q.dtype != torch.float32:
        yield Finding("rounds the scaled query to the dtype of its input", partial(_rounded_query, e.oracle.seen))


def wrong_cache_scales(e: Evidence) -> Iterator[Finding]:
    """Kernels that take another scale for the keys or values of an fp8 cache."""
    p = e.oracle.seen
    if p.scales is None:
        return
    of_k, of_v = (x.double().reshape(-1, 1).expand(p.case.HKV, 1) for x in p.scales)
    # The numbers of the cache. `p` has them times the scale in 16 bits, too coarse for scores that lack the scale.
    k, v = ((x / scale).float().to(E4M3).double() for x, scale in ((p.k, of_k), (p.v, of_v)))
    yield instead("scales keys by v_scale", p, k=k * of_v)
    yield instead("scales values by k_scale", p, v=v * of_k)
    yield instead("takes k_scale and v_scale for one another", p, k=k * of_v, v=v * of_k)
    for part, x, scale in (("k", k, of_k), ("v", v, of_v)):
        yield instead(f"ignores {part}_scale", p, **{part: x})
        yield instead(f"takes the {part}_scale of the first KV head for all", p, **{part: x * scale[0]})
    yield instead("ignores k_scale and v_scale", p, k=k, v=v)
    yield instead("takes the scales of the first KV head for all", p, k=k * of_k[0], v=v * of_v[0])


def _rounded_query(p: Problem, rows: Tensor) -> Answer:
    """The answer of a kernel that rounds `q` times the scale to 16 bits before it multiplies by `k`."""
    q = (p.q.float() * p.softmax_scale).to(p.q.dtype).double() / (p.softmax_scale or 1.0)
    return Reading(p.with_tensors(q, p.k, p.v), rows).attend()


def scaled(text: str, factor: float, e: Evidence) -> Finding:
    """A kernel whose scores are `factor` times the right ones."""
    return Finding(text, lambda rows: e.read(rows).attend(factor=factor), max(1.0, abs(factor)))


PARTS = {
    "the keys and values, and the selection,": "skv",
    "the keys and values": "kv",
    "the values": "v",
    "the keys": "k",
    "the selection": "s",
    "the queries": "q",
    "everything": "qskv",
}
"""Which parts of another KV head, batch entry or sequence are read."""


def mixed_up(e: Evidence) -> Iterator[Finding]:
    """Kernels that take batch entries, packed sequences or packed rows for one another."""
    p, HKV = e.oracle.seen, e.oracle.seen.case.HKV
    base, rows_of = first_keys(p), torch.arange(p.lengths.numel(), device=p.q.device)
    parts = [text for text, part in PARTS.items() if set(part) <= set("kv")]
    if p.cu_seqlens_pair is not None:
        cu_q, cu_k = p.cu_seqlens_pair
        what, base = "sequence", cu_k[:-1].long()
        member = torch.repeat_interleave(cu_q.diff().long() * HKV)
        each = 0
    elif p.case.source == "varlen":
        what, member, each = "packed row", rows_of, 0
    else:
        each = p.q.shape[1] * HKV
        what, base, member, parts = "batch entry", base[::each], rows_of // each, list(PARTS)

    def answer(rows: Tensor, part: str, order: Tensor) -> Answer:
        own, other = member[rows], order[member[rows]]
        moved = rows + (other - own) * each
        if part == "qskv":
            return e.right.pick(moved)
        k, v = (base[other if name in part else own] for name in "kv")
        chosen = p.choosing(p.chosen[order]) if "s" in part else p
        return Reading(chosen, moved if "q" in part else rows, rows, key_base=k, value_base=v).attend()

    here = torch.arange(len(base), device=base.device)
    orders = {"each reads those of the first": here * 0, "each reads those of the next": here.roll(-1)}
    orders |= {"each reads those of the one before": here.roll(1), "each reads those of its mirror image": here.flip(0)}
    told: list[Tensor] = [here]
    for how, order in orders.items():
        if any(torch.equal(order, known) for known in told):
            continue
        told.append(order)
        for text in parts:
            yield Finding(f"reads {text} of another {what}: {how}", partial(answer, part=PARTS[text], order=order))


def from_kv_head(p: Problem, rows: Tensor, head: int, text: str) -> Answer:
    """The answer if rows read from KV head `head` the parts that `text` names."""
    other, part = torch.full_like(rows, head), PARTS[text]
    k, v = (other if name in part else None for name in "kv")
    listed = rows - rows % p.k.shape[-2] + head if "s" in part else None
    return Reading(p, rows, listed, k, v).attend()


def from_kv_heads(p: Problem, heads: Tensor, text: str, rows: Tensor) -> Answer:
    """As `from_kv_head`, where `heads [HKV, H]` is the KV head of each query head."""
    out, lse = Reading(p, rows).attend()
    wanted = heads[rows % p.k.shape[-2]]  # [N, H]
    for head in heads.unique().tolist():
        other = from_kv_head(p, rows, head, text)
        out = torch.where((wanted == head)[..., None], other.out, out)
        lse = torch.where(wanted == head, other.lse, lse)
    return Answer(out, lse)


def sinks(e: Evidence) -> Iterator[Finding]:
    """Kernels whose softmax has one more score, of a key of value 0: 0, or one that each query head learned."""
    heads = e.oracle.problem.case.HQ
    yield _sink("adds a sink to the softmax: one more score, 0", e, e.out.new_zeros(heads))
    out, right = (x.reshape(-1, heads, x.shape[-1]) for x in (e.out, e.right.out))
    lse = e.right.lse.reshape(-1, heads)
    kept = (out * right).sum(-1) / right.square().sum(-1)  # [tokens, HQ]: the weight that is left for the keys
    if counted := e.lse is not None and bool(e.lse_off.any()):
        kept = (lse - e.lse.reshape(-1, heads)).exp()
    token = (kept - 0.5).abs().masked_fill(~((kept > 0) & (kept < 1)), math.inf).argmin(0, keepdim=True)  # [1, HQ]
    kept = kept.gather(0, token)
    score = (lse.gather(0, token) + (1 / kept - 1).log())[0]
    smaller = right * kept[..., None]  # without an LSE that tells, an output that is smaller by a factor is no sink
    if bool(score.isfinite().all()) and (counted or bool(differ(out, smaller, e.bound(smaller)).any())):
        yield _sink("adds a sink to the softmax: one more score, learned by each query head", e, score, weak=True)


def _sink(text: str, e: Evidence, score: Tensor, weak: bool = False) -> Finding:
    """A sink of `score [HQ]`, which the LSE may leave out."""
    by_row = score.view(-1, e.oracle.problem.case.H)  # [HKV, H]

    def answer(rows: Tensor) -> Answer:
        right = e.right.pick(rows)
        found = right.beside(by_row[rows % len(by_row)])
        if e.lse is None:
            return found
        left_out = (right.lse == -math.inf) & (e.lse[rows] == -math.inf)  # of rows that select nothing
        return found._replace(lse=torch.where(left_out | ~e.lse_off.any(), right.lse, found.lse))

    return Finding(text, answer, weak=weak)
