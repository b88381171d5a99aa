"""Compares a wrong result with the right answer, and with the answer of a finding: a kernel that does one thing wrong.

A finding fits if the result agrees with its answer in every row, within the bound of `forward`, and that answer differs
from the right one by more than the bound. A sample of wrong rows is compared first, because it rules out most findings.
Keys come from the suite's own index arithmetic (`Problem.key_index`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.problem import Problem

SAMPLE = 32  # rows that are compared first
CHUNK = 1 << 24  # elements of keys and values that are gathered at a time, 128 MiB in fp64


class Answer(NamedTuple):
    """`out [N, H, Dv]` and `lse [N, H]` of `N` rows, fp64."""

    out: Tensor
    lse: Tensor

    def pick(self, rows: Tensor) -> Answer:
        """The answer of some rows."""
        return Answer(self.out[rows], self.lse[rows])

    def beside(self, more: Tensor) -> Answer:
        """The answer with further keys of value 0. `more [N, H]` is the logarithm of the sum of their weights."""
        total = self.lse.logaddexp(more)
        return Answer(self.out * (self.lse - finite(total)).exp()[..., None], total)


@dataclass(frozen=True, eq=False)
class Finding:
    """A possible mistake of a kernel.

    text: the mistake, as a verb phrase about the kernel. answer: the answer of such a kernel for some rows; None: the
    mistake is known to fit. strain: the factor by which its scores, and so its rounding errors, exceed the right ones.
    weak: it is told only if no other finding fits.
    """

    text: str
    answer: Callable[[Tensor], Answer] | None = None
    strain: float = 1.0
    weak: bool = False


@dataclass(frozen=True, eq=False)
class Reading:
    """The keys and values that rows `rows [N]` of a problem read, in fp64: a slot for each key, in the order listed.

    What is read instead of each row's own, each `[N]`. listed: the rows whose selection is read. key_head, value_head:
    KV heads. key_base, value_base: the first keys of other sequences.
    """

    p: Problem
    rows: Tensor
    listed: Tensor | None = None
    key_head: Tensor | None = None
    value_head: Tensor | None = None
    key_base: Tensor | None = None
    value_base: Tensor | None = None

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
    def extents(self) -> dict[str, tuple[Tensor, Tensor]]:
        """`(place, keys)`, each `[N, L]`, by "a row" and "each span": a slot's place in it, and its number of keys."""
        _, start, end = self.p.clamped
        size = self._listed(end - start)
        last = size.cumsum(1)
        slot = self.slot.expand(self.index.shape).contiguous()
        which = torch.searchsorted(last, slot, right=True).clamp(max=size.shape[1] - 1)
        of_span = slot - (last - size).gather(1, which), size.gather(1, which)
        return {"a row": (slot, self.lengths.expand(slot.shape)), "each span": of_span}

    @cached_property
    def scores(self) -> Tensor:
        """`[N, H, L]`, scaled; -inf in slots without a key."""
        p = self.p
        q = p.q.reshape(-1, p.case.H, p.case.D)[self.rows].double()
        k = self._gather(p.k, self.key_head, self.key_base)
        return (q @ k.mT * p.softmax_scale).masked_fill(~self.valid[:, None], -math.inf)

    @cached_property
    def values(self) -> Tensor:
        """`[N, L, Dv]`, zero in slots without a key."""
        return self._gather(self.p.v, self.value_head, self.value_base)

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
        return Answer((scores - finite(lse)[..., None]).exp() @ self.values, lse)

    def _listed(self, x: Tensor) -> Tensor:
        return x[self.rows if self.listed is None else self.listed]

    def _gather(self, x: Tensor, head: Tensor | None, base: Tensor | None) -> Tensor:
        head = self.rows % x.shape[-2] if head is None else head
        moved = 0 if base is None else (base - self._listed(first_keys(self.p)))[:, None]
        x = x.flatten(0, -3)
        at = (self.index + moved).clamp(0, max(0, x.shape[0] - 1))
        return x[at, head[:, None]].double().masked_fill(~self.valid[..., None], 0.0)


def first_keys(p: Problem) -> Tensor:
    """`[N]`: the first key of each row's sequence, or of the row itself if rows are packed."""
    base, start, _ = p.clamped
    return start[:, 0] if p.case.source == "varlen" else base


@dataclass(frozen=True, eq=False)
class Evidence:
    """A result and the right answer, as rows in fp64: `out [N, H, Dv]`, and `lse [N, H]` or None.

    known: findings of earlier results, which are tried first.
    """

    oracle: Oracle
    out: Tensor
    lse: Tensor | None
    right: Answer
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, out: Tensor, lse: Tensor | None, oracle: Oracle) -> Evidence:
        """Of a result, the queries whose right answer is known."""
        H, Dv = oracle.problem.case.H, oracle.problem.case.Dv
        right = Answer(oracle.out.reshape(-1, H, Dv), oracle.lse.reshape(-1, H))
        seen = None if lse is None else oracle.pick(lse).reshape(-1, H).double()
        return cls(oracle, oracle.pick(out).reshape(-1, H, Dv).double(), seen, right)

    @cached_property
    def off(self) -> Tensor:
        """`[N, H, Dv]` bool: which elements of the output are wrong."""
        return differ(self.out, self.right.out, self.oracle.bound)

    @cached_property
    def lse_off(self) -> Tensor:
        """`[N, H]` bool: which LSE are wrong; all False without an LSE."""
        if self.lse is None:
            return torch.zeros_like(self.right.lse, dtype=torch.bool)
        return differ(self.lse, self.right.lse, self.oracle.lse_atol)

    @cached_property
    def wrong_rows(self) -> Tensor:
        """The rows with a wrong output or LSE."""
        return (self.off.any(-1) | self.lse_off).any(-1).nonzero()[:, 0]

    @cached_property
    def sample(self) -> Tensor:
        """Up to `SAMPLE` rows: all rows if there are so few, otherwise wrong ones, half of them with the most keys."""
        if self.out.shape[0] <= SAMPLE:
            return torch.arange(self.out.shape[0], device=self.out.device)
        longest = self.oracle.seen.lengths[self.wrong_rows].argsort(descending=True)[: SAMPLE // 2]
        some = torch.linspace(0, self.wrong_rows.numel() - 1, SAMPLE // 2, device=self.out.device).long()
        return self.wrong_rows[torch.cat((longest, some)).unique()]

    @cached_property
    def _sampled(self) -> Reading:
        return Reading(self.oracle.seen, self.sample)

    def read(self, rows: Tensor) -> Reading:
        """The keys and values that rows of the right problem read."""
        return self._sampled if rows is self.sample else Reading(self.oracle.seen, rows)

    def bound(self, answer: Tensor, strain: float = 1.0) -> float:
        """The bound of `forward` for another answer."""
        eps, peak = torch.finfo(self.oracle.problem.q.dtype).eps, self.oracle.peak
        return 2 * self.oracle.err_sdpa * strain + 4 * eps * max(peak, float(answer.abs().max()))

    def fits(self, finding: Finding) -> bool:
        """Whether the result agrees with the finding's answer in all rows, and that answer is not the right one."""
        if finding.answer is None:
            return True
        agrees, differs = self._compare(finding, finding.answer, self.sample)
        if not agrees or self.sample.numel() == self.out.shape[0]:
            return agrees and differs
        p = self.oracle.seen
        size = max(1, CHUNK // (max(1, int(p.lengths.max())) * (p.case.D + p.case.Dv)))
        for rows in torch.arange(self.out.shape[0], device=self.out.device).split(size):
            agrees, here = self._compare(finding, finding.answer, rows)
            if not agrees:
                return False
            differs = differs or here
        return differs

    def distance(self, finding: Finding) -> float:
        """The mean difference between the result's outputs and the finding's, over the sample."""
        assert finding.answer is not None
        return float((self.out[self.sample] - finding.answer(self.sample).out).abs().mean())

    def _compare(self, finding: Finding, give: Callable[[Tensor], Answer], rows: Tensor) -> tuple[bool, bool]:
        """Whether the result agrees with an answer in some rows, and whether that answer differs from the right one."""
        answer = give(rows)
        bound, atol = self.bound(answer.out, finding.strain), self.oracle.lse_atol * finding.strain
        if bool(differ(self.out[rows], answer.out, bound).any()):
            return False, False
        differs = bool(differ(answer.out, self.right.out[rows], bound).any())
        if self.lse is None:
            return True, differs
        if bool(differ(self.lse[rows], answer.lse, atol).any()):
            return False, False
        return True, differs or bool(differ(answer.lse, self.right.lse[rows], atol).any())


def finite(lse: Tensor) -> Tensor:
    """`lse`, with 0 for rows without keys, so that differences are not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def differ(x: Tensor, y: Tensor, bound: float) -> Tensor:
    """Where `x` and `y` differ by more than `bound`. Equal infinities do not differ; NaN differs from everything."""
    return ~(((x - y).abs() <= bound) | (x == y))


def without_empty_rows(e: Evidence) -> tuple[Evidence, list[str]]:
    """Findings about rows that select nothing, and the evidence in which those rows are corrected."""
    empty, found = e.oracle.seen.lengths == 0, []
    out, lse = e.out, e.lse
    if bool(empty.any()):
        if bool(out[empty].isnan().all()) and not bool(out.isnan().all()):
            found.append("gives NaN for rows that select nothing")
            out = out.masked_fill(empty[:, None, None], 0.0)
        if lse is not None:
            value = lse[empty].flatten()[0]
            named = bool(value.isnan()) or float(value) in (0.0, math.inf) or -math.inf < float(value) < -1e4
            if named and bool((lse[empty].nan_to_num(math.pi) == value.nan_to_num(math.pi)).all()):
                found.append(f"gives an LSE of {float(value):.4g} instead of -inf for rows that select nothing")
                lse = lse.masked_fill(empty[:, None], -math.inf)
    return dataclasses.replace(e, out=out, lse=lse), found
