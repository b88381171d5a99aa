"""Shapes by hand, `--nsa-shape`: our kernel beside the path it would replace, on the CPU lane that path alone."""

from typing import Any

import pytest
import torch

from nsa.failures import caught
from nsa.testing.clock import timing
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem
from nsa.testing.plugin import Lane
from nsa.testing.shapes import NO_TRITON, measure_shape, reference_of, row

pytestmark = pytest.mark.benchmark(timer=timing.clock)
BUDGET_S = 1.0  # few cases, and somebody waits for them: as many samples as were asked for


def test_shape(case: Case, lane: Lane, device: torch.device, publish, by_hand, machine_sampling, request) -> None:
    streams = request.config.getoption("nsa_streams")
    problem: Problem | None = None

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        result, layouts = measure_shape(problem, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info(layouts, [] if lane == "interpreter" else [reference_of(case).name])

    try:
        problem = request.getfixturevalue("problem")  # here: one that memory does not hold has failed like any other
        samples, info = take()
    except (*caught(), AssertionError, ValueError) as e:  # ValueError: a shape that the path does not take
        status = f"failed: {(str(e).splitlines() or [type(e).__name__])[0]}"
        by_hand(row(case, problem, None, status, streams, device))
        raise
    by_hand(row(case, problem, info, "ok" if lane == "gpu" else NO_TRITON, streams, device))
    publish(f"by hand: {case.dist}", samples, info, again=take, core=False)
