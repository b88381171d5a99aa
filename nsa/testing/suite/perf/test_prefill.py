"""The prompts of core: our front door, or a contestant, beside our schedules by name, fla-core, and dense SDPA."""

import pytest
import torch

from nsa.testing.benchmarks import *  # noqa: F403  (as below)
from nsa.testing.benchmarks import timed
from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure
from nsa.testing.contestants import prefill
from nsa.testing.contestants.fit import fitted
from nsa.testing.contestants.named import skipping
from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested

BUDGET_S = 0.6  # seconds of samples for each: at least 40 samples of ours, and 10 of dense attention at 0.2 s a call


def ours(config):
    return [(OURS["auto"], (case,)) for case in timed(config, prompts=True)]


def theirs(impl, config):
    if {"rows", "varlen"} & set(impl.contract.takes):
        return []
    return [(case,) for case in dict.fromkeys(fitted(case, impl.contract) for case in timed(config, prompts=True))]


@pytest.mark.gpu
@pytest.mark.benchmark(timer=timing.clock)
@contested(theirs, ours=ours)
def test_prefill(contestant, problem, publish, machine_sampling):
    def take():
        torch.cuda.empty_cache()  # frees the memory pools of the previous case's graphs
        result = measure(problem, contestant, prefill.beside(), budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info([], prefill.BACKENDS) | prefill.facts(result)

    name = "prefill" if contestant is OURS["auto"] else f"prefill, {contestant.name}"
    with skipping(contestant, problem.case):
        publish(name, *take(), again=take)
