"""The matrix as fixtures: `case` (by id), `problem` (its tensors) and `oracle` (what is right), shared by the folders.

A conftest.py imports the fixtures it wants; a test names its cases with `over`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from nsa.testing.cases import Case, parity, small
from nsa.testing.compare import Oracle
from nsa.testing.impls import Impl
from nsa.testing.plugin import current_lane
from nsa.testing.problem import Problem
from nsa.testing.third_party import load

_by_id: dict[str, Case] = {}


def lane_cases() -> list[Case]:
    """The matrix this lane can afford."""
    return parity() if current_lane() == "gpu" else small()


def over(cases: list[Case] | Callable[[Case], bool]) -> pytest.MarkDecorator:
    """Run a test once per case, or per case of the lane's matrix that satisfies a predicate.

    Parameters are ids, not `Case`s: pytest-benchmark stores parameters as JSON, and `-k` sees the words.
    """
    chosen = [c for c in lane_cases() if cases(c)] if callable(cases) else cases
    return pytest.mark.parametrize("case", register(chosen), indirect=True, scope="module")


def register(cases: list[Case]) -> list[str]:
    """Their ids, which the fixture `case` will know from now on."""
    _by_id.update((c.id, c) for c in cases)
    return [c.id for c in cases]


def known(ids: Iterable[str]) -> list[Case]:
    """The cases of these ids, each once."""
    return [_by_id[name] for name in dict.fromkeys(ids)]


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


def over_third_parties(metafunc: pytest.Metafunc, cases: list[Case]) -> None:
    """Run a test that asks for `third_party` and `case` once per `--nsa-impl` and case that it takes.

    Where there is none, one skip says so. To be called from a conftest's `pytest_generate_tests`.
    """
    specs = metafunc.config.getoption("nsa_impl")
    pairs = [(spec, c) for spec in specs for impl in [load(spec)] for c in cases if impl.supports(c) is None]
    params: list[Any] = [(spec, c.id) for spec, c in pairs]
    if not pairs:
        reason = "no --nsa-impl given" if not specs else "takes none of this lane's cases"
        params = [pytest.param("none", cases[0].id, marks=pytest.mark.skip(reason=reason))]
    register(cases)
    metafunc.parametrize("third_party,case", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def third_party(request: pytest.FixtureRequest) -> Impl:
    """Somebody else's kernel, from `--nsa-impl`."""
    return load(request.param)
