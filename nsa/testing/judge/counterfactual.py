"""The answers, in fp64, of kernels that do one thing wrong. `diagnosis` compares a wrong result with them.

Keys come from the suite's own index arithmetic (`Problem.key_index`). Texts are verb phrases about the kernel, such as
"misses the last key of a row".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.problem import Problem

TILES = (16, 32, 64, 128)  # keys that a kernel may read at a time
LOG2E = math.log2(math.e)


class Answer(NamedTuple):
    """`out [N, H, Dv]` and `lse [N, H]` of `N` rows, fp64."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """The keys and values that rows `rows [N]` of a problem read, in fp64: a slot for each key, in the order listed.

    listed: `[N]`, the rows whose selection is read instead of each row's own. key_head, value_head: `[N]`, the KV heads
    that are read instead of each row's own.
    """

    p: Problem
    rows: Tensor
    listed: Tensor | None = None
    key_head: Tensor | None = None
    value_head: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """`[N, 1]`: the number of slots that hold keys."""
        return self._listed(self.p.lengths)[:, None]

    @cached_property
    def index(self) -> Tensor:
        """`[N, L]`: flat rows of `k`; in slots without a key, any row."""
        return self._listed(self.p.key_index[0])[:, : int(self.lengths.max())]

    @cached_property
    def slot(self) -> Tensor:
        """`[L]`: the number of each slot."""
        return torch.arange(self.index.shape[1], device=self.index.device)

    @cached_property
    def valid(self) -> Tensor:
        """`[N, L]` bool: which slots hold keys."""
        return self.slot < self.lengths

    @cached_property
    def span(self) -> tuple[Tensor, Tensor]:
        """`(place, size)`, each `[N, L]`: the place of a slot in its span, and the number of keys of that span."""
        _, start, end = self.p.clamped
        size = self._listed(end - start)
        last = size.cumsum(1)
        slot = self.slot.expand(self.index.shape).contiguous()
        which = torch.searchsorted(last, slot, right=True).clamp(max=size.shape[1] - 1)
        return slot - (last - size).gather(1, which), size.gather(1, which)

    @cached_property
    def scores(self) -> Tensor:
        """`[N, H, L]`, scaled; -inf in slots without a key."""
        p = self.p
        q = p.q.reshape(-1, p.case.H, p.case.D)[self.rows].double()
        scale = p.case.D**-0.5 if p.scale is None else p.scale
        return (q @ self._gather(p.k, self.key_head).mT * scale).masked_fill(~self.valid[:, None], -math.inf)

    @cached_property
    def values(self) -> Tensor:
        """`[N, L, Dv]`, zero in slots without a key."""
        return self._gather(self.p.v, self.value_head)

    @cached_property
    def first_mention(self) -> Tensor:
        """`[N, L]` bool: slots whose key is in no earlier slot of the row."""
        key, order = torch.where(self.valid, self.index, -1 - self.slot).sort(dim=1, stable=True)
        first = torch.ones_like(self.valid)
        first[:, 1:] = key.diff(dim=1) != 0
        return torch.empty_like(first).scatter_(1, order, first)

    def attend(self, keep: Tensor | None = None, factor: float = 1.0) -> Answer:
        """Attention over the slots `keep [N, L]` (default: all), with scores times `factor`."""
        scores = self.scores * factor
        if keep is not None:
            scores = scores.masked_fill(~keep.expand_as(self.valid)[:, None], -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        return Answer(weights @ self.values, lse)

    def _listed(self, x: Tensor) -> Tensor:
        return x[self.rows if self.listed is None else self.listed]

    def _gather(self, x: Tensor, head: Tensor | None) -> Tensor:
        head = self.rows % x.shape[-2] if head is None else head
        return x.flatten(0, -3)[self.index, head[:, None]].double().masked_fill(~self.valid[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class Finding:
    """A possible mistake of a kernel.

    text: the mistake in words. answer: the answer of such a kernel for some rows; None: the mistake is known to fit.
    strain: the factor by which its scores, and so its rounding errors, exceed those of the right answer.
    """

    text: str
    answer: Callable[[Tensor], Answer] | None = None
    strain: float = 1.0


Read = Callable[[Tensor], Reading]


def over_slots(text: str, read: Read, keep: Callable[[Reading], Tensor]) -> Finding:
    """A kernel that reads only the slots `keep(reading) [N, L]` of each row."""

    def answer(rows: Tensor) -> Answer:
        reading = read(rows)
        return reading.attend(keep(reading))

    return Finding(text, answer)


def wrong_keys(oracle: Oracle, read: Read) -> Iterator[Finding]:
    """Kernels that leave out keys, or read too many. `read(rows)`: what rows of the right problem read."""

    def instead(text: str, p: Problem) -> Finding:
        return Finding(text, lambda rows: Reading(p, rows).attend())

    p = oracle.seen
    yield over_slots("misses the last key of a row", read, lambda r: r.slot < r.lengths - 1)
    yield from (instead(text, other) for text, other in other_problems(oracle))
    if p.ranges.shape[-2] > 1:
        yield over_slots("misses the last key of each span", read, lambda r: r.span[0] < r.span[1] - 1)
        shorter = torch.stack((p.ranges[..., 0], p.ranges[..., 1] - 1), -1)
        other = _replace(p, ranges=shorter, block_indices=None)
        yield instead("misses the last key of each span that causality leaves whole", other)
    yield over_slots("misses the first key of a row", read, lambda r: r.slot > 0)
    yield over_slots("counts a key that is listed twice only once", read, lambda r: r.first_mention)


def partial_blocks(oracle: Oracle, read: Read) -> Iterator[Finding]:
    """Lengths rounded down or up to a whole number of tiles."""

    def rounded_up(size: int) -> Callable[[Tensor], Answer]:
        def answer(rows: Tensor) -> Answer:
            out, lse = read(rows).attend()
            more = (-oracle.seen.lengths[rows] % size).double().log()[:, None]  # keys of score 0 and value 0, as a log
            total = lse.logaddexp(more)
            return Answer(out * (lse - total.masked_fill(total == -math.inf, 0.0)).exp()[..., None], total)

        return answer

    for size in TILES:
        text = f"drops the last partial block of {size} keys of a row"
        yield over_slots(text, read, partial(_in_whole_blocks, size))
    for size in TILES:
        if oracle.seen.ranges.shape[-2] > 1:
            text = f"drops the last partial block of {size} keys of each span"
            yield over_slots(text, read, partial(_in_whole_blocks_of_span, size))
    for size in TILES:
        yield Finding(f"counts empty slots of the last block of {size} keys as keys of score 0", rounded_up(size))


def _in_whole_blocks(size: int, r: Reading) -> Tensor:
    return r.slot < r.lengths - r.lengths % size


def _in_whole_blocks_of_span(size: int, r: Reading) -> Tensor:
    place, keys = r.span
    return place < keys - keys % size


def other_problems(oracle: Oracle) -> Iterator[tuple[str, Problem]]:
    """Problems that a wrong kernel solves instead: with another causal limit, or with padding read as a block."""
    p, whole = oracle.seen, oracle.problem
    if p.causal:
        where = p.positions().view(p.q.shape[:-2])
        yield "ends the causal window one key early", _replace(p, q_positions=where - 1)
        yield "ends the causal window one key late", _replace(p, q_positions=where + 1)
        yield "reads keys beyond the causal limit", _replace(p, causal=False)
        if whole.q_positions is not None:
            usual = dataclasses.replace(whole, q_positions=None, extra={}).positions().view(whole.q.shape[:-2])
            yield "ignores q_positions", _replace(p, q_positions=oracle.pick(usual))
        if p.cu_seqlens is None:
            order = torch.arange(whole.q.shape[1], device=p.q.device).expand(whole.q.shape[:2])
            yield "takes the first query for position 0", _replace(p, q_positions=oracle.pick(order))
    if p.block_indices is not None:
        yield "takes padding (-1) for block 0", p.choosing(p.block_indices.clamp(min=0))


def wrong_scales(oracle: Oracle, read: Read) -> Iterator[Finding]:
    """Wrong factors of the scores that have a known cause."""
    D, scale = oracle.problem.case.D, oracle.problem.scale
    named = [("does not divide scores by sqrt(D)", D**0.5), ("divides scores by D, not by sqrt(D)", D**-0.5)]
    if scale:
        named = [("ignores the scale asked for, and divides by sqrt(D)", D**-0.5 / scale)]
    named += [("multiplies scores by log2(e) once too often", LOG2E)]
    named += [("forgets the factor log2(e) of scores that go to exp2", 1 / LOG2E)]
    yield from (scaled(text, factor, read) for text, factor in named)
    if oracle.problem.q.dtype != torch.float32:
        yield Finding("rounds the scaled query to the dtype of its input", partial(_rounded_query, oracle.seen))


def _rounded_query(p: Problem, rows: Tensor) -> Answer:
    """The answer of a kernel that rounds `q` times the scale to 16 bits before it multiplies by `k`."""
    scale = p.case.D**-0.5 if p.scale is None else p.scale
    q = (p.q.float() * scale).to(p.q.dtype).double() / (scale or 1.0)
    return Reading(p.with_tensors(q, p.k, p.v), rows).attend()


def scaled(text: str, factor: float, read: Read) -> Finding:
    """A kernel whose scores are `factor` times the right ones."""
    return Finding(text, lambda rows: read(rows).attend(factor=factor), max(1.0, abs(factor)))


KV_VARIANTS = {
    "the keys and values, and the selection,": (True, True, True),
    "the keys and values": (False, True, True),
    "the values": (False, False, True),
    "the keys": (False, True, False),
    "the selection": (True, False, False),
}
"""Which parts of another KV head are read: its selection, its keys, its values."""


def from_kv_head(p: Problem, rows: Tensor, head: int, variant: str) -> Answer:
    """The answer if rows read from KV head `head` the parts that `variant` names."""
    selection, keys, values = KV_VARIANTS[variant]
    own = rows % p.k.shape[-2]
    other = torch.full_like(rows, head)
    reading = Reading(
        p, rows, rows - own + head if selection else None, other if keys else None, other if values else None
    )
    return reading.attend()


def from_kv_heads(p: Problem, heads: Tensor, variant: str, rows: Tensor) -> Answer:
    """As `from_kv_head`, where `heads [HKV, H]` is the KV head of each query head."""
    out, lse = Reading(p, rows).attend()
    wanted = heads[rows % p.k.shape[-2]]  # [N, H]
    for head in heads.unique().tolist():
        other = from_kv_head(p, rows, head, variant)
        out = torch.where((wanted == head)[..., None], other.out, out)
        lse = torch.where(wanted == head, other.lse, lse)
    return Answer(out, lse)


def _replace(p: Problem, **fields: Any) -> Problem:
    """`p` with other fields, and without tensors derived from the old ones."""
    return dataclasses.replace(p, **fields, extra={})
