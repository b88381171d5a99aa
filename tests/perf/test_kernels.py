"""Our kernels, and third parties', over core: CUDA-graph replay on cold buffers, SDPA in every layout beside them."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure
from nsa.testing.contestants.ours import END_TO_END, OF, OURS, PACKED, Impl, packed_layouts
from nsa.testing.contestants.peers import peers
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.01  # of samples for each: about ten of a millisecond. Core has 126 cases of these and 2 minutes


def test_selection(problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    compare(OURS[OF[problem.case.source]], problem, publish, machine_sampling)


def test_selection_third_party(third_party: Impl, problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    try:
        compare(third_party, problem, publish, machine_sampling)
    except NotImplementedError as e:
        pytest.skip(f"unsupported: {problem.case.id}: {e}")


def compare(impl: Impl, problem: Problem, publish, sampling: dict[str, Any]) -> None:
    layouts = {"packed": PACKED} | packed_layouts(problem.q.device)
    # From the cache, a fallback has to pack first; rows lie packed already.
    ends = {} if problem.case.source == "rows" else END_TO_END | {"sdpa": OURS["sdpa"]}
    beside = peers() if problem.case.source == "blocks" else {}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()  # graphs of the case before hold pools of their own
        result = measure(
            problem, impl, [*layouts.values(), *ends.values(), *beside.values()], budget_s=BUDGET_S, **sampling
        )
        return result.ours, result.info(layouts, layouts if problem.case.source == "rows" else END_TO_END)

    name = f"{problem.case.dist}, {problem.case.source}" + ("" if impl.route else f", {impl.name}")
    publish(name, *take(), again=take)
