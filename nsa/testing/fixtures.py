"""The matrix as fixtures: `case` (by id), `problem` (its tensors) and `oracle` (what is right), shared by the folders.

A conftest.py imports the fixtures it wants; a test names its cases with `over`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nsa.testing.cases import Case, parity, small
from nsa.testing.compare import Oracle
from nsa.testing.plugin import current_lane
from nsa.testing.problem import Problem

_by_id: dict[str, Case] = {}


def lane_cases() -> list[Case]:
    """The matrix this lane can afford."""
    return parity() if current_lane() == "gpu" else small()


def over(cases: list[Case] | Callable[[Case], bool]) -> pytest.MarkDecorator:
    """Run a test once per case, or per case of the lane's matrix that satisfies a predicate.

    Parameters are ids, not `Case`s: pytest-benchmark stores parameters as JSON, and `-k` sees the words.
    """
    chosen = [c for c in lane_cases() if cases(c)] if callable(cases) else cases
    _by_id.update((c.id, c) for c in chosen)
    return pytest.mark.parametrize("case", [c.id for c in chosen], indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The case a test runs on; a test asks for it with `over`."""
    return _by_id[request.param]


@pytest.fixture(scope="module")
def problem(case: Case, device: torch.device, request: pytest.FixtureRequest) -> Problem:
    """Its tensors. The seed is printed, so that a failure shows it."""
    seed = (case.seed + request.config.getoption("nsa_seed")) % 2**32
    print(f"{case.id}: seed {seed}")
    return case.make(device, seed)


@pytest.fixture(scope="module")
def oracle(problem: Problem) -> Oracle:
    """The fp64 answer, and SDPA's error."""
    return Oracle.of(problem)
