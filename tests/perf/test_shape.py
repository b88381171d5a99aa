"""Shapes by hand, `--nsa-shape`: our kernel beside the path it would replace, on the CPU lane that path alone."""

from typing import Any

import pytest

from nsa.dispatch import failures
from nsa.testing import timing
from nsa.testing.byhand import NO_TRITON, measure_shape, reference_of, row
from nsa.testing.plugin import Lane
from nsa.testing.problem import Problem

pytestmark = pytest.mark.benchmark(timer=timing.clock)
BUDGET_S = 1.0  # few cases, and somebody waits for them: as many samples as were asked for


def test_shape(problem: Problem, lane: Lane, publish, by_hand, machine_sampling, request) -> None:
    streams = request.config.getoption("nsa_streams")

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        result, layouts = measure_shape(problem, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info(layouts, None if lane == "interpreter" else reference_of(problem.case).name)

    try:
        samples, info = take()
    except (*failures(), AssertionError, ValueError) as e:  # ValueError: a shape that the path does not take
        by_hand(row(problem, None, f"failed: {(str(e).splitlines() or [type(e).__name__])[0]}", streams))
        raise
    by_hand(row(problem, info, "ok" if lane == "gpu" else NO_TRITON, streams))
    publish(f"by hand: {problem.case.dist}", samples, info, again=take)
