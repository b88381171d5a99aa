"""What `--nsa-update-thresholds` decides from: Triton from the cache beside what it would replace, and the layouts."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure, run_facts
from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import over
from nsa.testing.matrix.problem import Problem
from nsa.tuning.calibrate import LAYOUT_SHAPES, fast_layouts, layout_times
from nsa.tuning.thresholds import cases

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.02  # of samples for each implementation


@over(cases())
def test_threshold(problem: Problem, publish, sampling: dict[str, int]) -> None:
    layouts = fast_layouts(problem.q.device)

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        result = measure(problem, OURS["ranges"], [OURS["sdpa"], *layouts.values()], budget_s=BUDGET_S, **sampling)
        return result.ours, result.info(layouts, ["sdpa"])

    publish(f"threshold: {problem.case.dist}", *take(), again=take, core=False)


@pytest.mark.parametrize("mask", ["masked", "unmasked"])
@pytest.mark.parametrize("shape", LAYOUT_SHAPES)
def test_packed_layout(shape: str, mask: str, device: torch.device, publish, sampling: dict[str, int]) -> None:
    times = layout_times(shape, mask == "masked", device, budget_s=BUDGET_S, **sampling)
    fastest = min(times.values(), key=lambda t: t.median)
    medians = {name: t.median for name, t in times.items()}
    facts = {"layouts": medians, "masked": mask == "masked", "shape": shape}
    publish("packed SDPA layouts", fastest, run_facts(device) | facts, core=False)
