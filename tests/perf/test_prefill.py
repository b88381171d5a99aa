"""Prefill over core: our front door beside its schedules by name, fla-core, and dense causal SDPA of that length."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure
from nsa.testing.contestants import prefill
from nsa.testing.contestants.ours import OURS, Impl
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.6  # of samples for each: 40 of ours at least, 10 of dense attention at 0.2 s a call


def test_prefill(problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    compare(OURS["auto"], problem, publish, machine_sampling)


def test_prefill_third_party(third_party: Impl, problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    try:
        compare(third_party, problem, publish, machine_sampling)
    except NotImplementedError as e:
        pytest.skip(f"unsupported: {problem.case.id}: {e}")


def compare(impl: Impl, problem: Problem, publish, sampling: dict[str, Any]) -> None:
    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()  # graphs of the case before hold pools of their own
        result = measure(problem, impl, prefill.beside(), budget_s=BUDGET_S, **sampling)
        return result.ours, result.info([], prefill.BACKENDS) | prefill.facts(result)

    publish("prefill" if impl is OURS["auto"] else f"prefill, {impl.name}", *take(), again=take)
