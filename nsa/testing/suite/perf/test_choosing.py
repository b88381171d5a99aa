"""Choosing blocks as models do: our kernels, or a contestant, beside plain PyTorch and vLLM's kernels."""

import pytest
import torch

from nsa.testing.benchmarks import *  # noqa: F403  (as below)
from nsa.testing.clock import timing
from nsa.testing.clock.selecting import measure
from nsa.testing.contestants import choosing, named, selectors
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested
from nsa.testing.matrix.selecting import SERVED

BUDGET_S = 0.1  # seconds of samples for each
KERNELS = selectors.OURS[0]


def theirs(impl):
    return [(case,) for case in SERVED if impl.contract.has(case)]


def ours():
    impl = named.load(KERNELS)
    yield from ((impl, row) for row in theirs(impl))


@pytest.mark.gpu
@pytest.mark.benchmark(timer=timing.clock)
@contested(theirs, ours=ours, selects=True)
def test_selecting(contestant, case, device, publish, sampling):
    def take():
        torch.cuda.empty_cache()  # frees the memory pools of the previous case's graphs
        beside = [choosing.DENSE, *choosing.vllm()]
        everybody = choosing.comparator(contestant), beside, [choosing.DENSE.name]
        return measure(case, device, *everybody, budget_s=BUDGET_S, **sampling)

    name = "selecting" if contestant.name == KERNELS else f"selecting, {contestant.name}"
    publish(name, *take(), again=take)
