"""Compares a wrong result with the right answer and with the answer of a finding.

A finding fits if the result agrees with its answer in every row, within the bound of `forward`, and that answer differs
from the right one by more than the bound. A sample of wrong rows is compared first, because it rules out most findings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nsa.testing.judge.counterfactual import Answer, Finding, Reading
from nsa.testing.judge.forward import Oracle

SAMPLE = 32  # rows that are compared first
CHUNK = 1 << 24  # elements of keys and values that are gathered at a time, 128 MiB in fp64


@dataclass(frozen=True, eq=False)
class Evidence:
    """A result and the right answer, as rows in fp64: `out [N, H, Dv]`, and `lse [N, H]` or None."""

    oracle: Oracle
    out: Tensor
    lse: Tensor | None
    right: Answer

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
