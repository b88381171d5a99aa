"""The matrix as fixtures: `case` (by id), `problem` (its tensors) and `oracle` (what is right), shared by the folders.

A conftest.py imports the fixtures it wants; a test names its cases with `over`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from nsa.testing.contestants.named import load
from nsa.testing.contestants.ours import Impl
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case, parity, small
from nsa.testing.matrix.problem import Problem
from nsa.testing.plugin import current_lane

Of = Callable[[Impl, Case], Iterable[tuple[str, ...]]]
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


def once(impl: Impl, case: Case) -> list[tuple[str, ...]]:
    """One test of each case, without further arguments."""
    return [()]


def over_third_parties(metafunc: pytest.Metafunc, cases: list[Case], names: Sequence[str] = (), of: Of = once) -> None:
    """Run a test that asks for `third_party` and `case` for each `--nsa-impl` and case that it takes.

    One that takes none has one skip that says so, under its own id: what the end of a run says of it is made from ids.
    To be called from a `pytest_generate_tests`.

    Args:
        names: further arguments of the test.
        of: their values, `of(impl, case)`, one tuple for each test.
    """
    indirect = ["third_party", "case"]

    def skipped(spec: str, reason: str, id: str | None = None) -> Any:
        return pytest.param(spec, cases[0].id, *["none"] * len(names), marks=pytest.mark.skip(reason=reason), id=id)

    params: list[Any] = []
    for spec in metafunc.config.getoption("nsa_impl"):
        impl = load(spec)
        taken = [(spec, c.id, *more) for c in cases if impl.supports(c) is None for more in of(impl, c)]
        params += taken or [skipped(spec, f"{spec} takes none of this test's cases", f"{spec}-none")]
    register(cases)
    params = params or [skipped("none", "no --nsa-impl given")]
    metafunc.parametrize([*indirect, *names], params, indirect=indirect, scope="module")


@pytest.fixture(scope="module")
def third_party(request: pytest.FixtureRequest) -> Impl:
    """Somebody else's kernel, from `--nsa-impl`."""
    return load(request.param)
