"""Kernels beside SDPA in every layout: on a GPU by replaying CUDA graphs on cold buffers. Plain torch also on a CPU."""

import pytest
import torch

from nsa.testing.benchmarks import *  # noqa: F403  (as below)
from nsa.testing.benchmarks import timed
from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure
from nsa.testing.contestants.fit import fitted
from nsa.testing.contestants.named import skipping
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.contestants.peers import peers
from nsa.testing.contestants.sdpa import END_TO_END, FROM_SPANS, PACKED, packed_layouts
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested
from nsa.testing.judge import addresses
from nsa.testing.machine import current_lane
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import missing_gpu

GPU = current_lane() == "gpu"
BUDGET_S = 0.01 if GPU else 0.15  # seconds of samples for each implementation; core times 126 cases in 2 minutes
ON_A_CPU = [
    Case(8, D, D, L, 32, dist, "fp32", source=source)
    for D in (64, 128) for L in (256, 1024) for dist, source in (("many", "ranges"), ("many", "blocks"))
]  # fmt: skip


def ours(config):
    for case in timed(config, prompts=False):
        yield OURS[OF[case.source]], (case,)


def theirs(impl, config):
    cases = timed(config, prompts=False) if GPU else ON_A_CPU
    return [(case,) for case in dict.fromkeys(fitted(case, impl.contract, not GPU) for case in cases)]


@pytest.mark.benchmark(timer=timing.clock)
@contested(theirs, ours=ours)
def test_selection(contestant, problem, publish, machine_sampling):
    mine = contestant in OURS.values()
    if mine and missing_gpu():
        pytest.skip(missing_gpu())
    rows = problem.case.source in ("rows", "varlen")
    layouts = {"packed": PACKED} | packed_layouts(problem.q.device)
    # If the source is not packed rows, the comparators have to pack first.
    ends = {} if rows else END_TO_END | {"sdpa": OURS["sdpa"]} if GPU else {FROM_SPANS.name: FROM_SPANS}
    beside = peers() if GPU and problem.case.source == "blocks" else {}

    def take():
        if GPU:
            torch.cuda.empty_cache()  # frees the memory pools of the previous case's graphs
        before = addresses.launched()
        timed = [*layouts.values(), *ends.values(), *beside.values()]
        result = measure(problem, contestant, timed, budget_s=BUDGET_S, **machine_sampling)
        if addresses.launched() > before:
            pytest.skip("a Triton kernel, interpreted on the CPU, is not timed")
        return result.ours, result.info(layouts, layouts if rows else END_TO_END if GPU else ends)

    name = f"{problem.case.dist}, {problem.case.source}" + ("" if mine else f", {contestant.name}")
    with skipping(contestant, problem.case):
        publish(name, *take(), again=take)
