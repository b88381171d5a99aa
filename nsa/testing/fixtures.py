"""Fixtures: `lane`, `device`, `case` (by id), `problem` (its tensors), `oracle` (the right answer), and `contestant`.

The plugin registers them for all tests. The modules of the suite import them as well, with `*`: a fixture of a module
precedes one of the same name in a project's conftest.py. A test gets its cases from `over`, which needs no plugin, or
from `contested`, which runs it for each contestant over that contestant's cases.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import pytest
import torch

from nsa.testing.contestants import named
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.fit import arranged
from nsa.testing.contestants.ours import NSA, OURS
from nsa.testing.judge.forward import Oracle
from nsa.testing.lane import Misuse, choose
from nsa.testing.machine import Lane, current_lane
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import parity, small
from nsa.testing.matrix.problem import Problem

__all__ = ["case", "contestant", "device", "lane", "oracle", "problem"]
choose()
T = TypeVar("T")
Row = tuple[Any, ...]  # a case, and the values of a test's other arguments
NONE = "none"  # the parameter of a `contested` test without rows
_by_id: dict[str, Case] = {}


def lane_cases() -> list[Case]:
    """The matrix of this lane."""
    return parity() if current_lane() == "gpu" else small()


def over(cases: list[Case] | Callable[[Case], bool]) -> Callable[[T], T]:
    """Run a test once per case, or per case of the lane's matrix that satisfies a predicate.

    The test's module gets those of the fixtures `case`, `problem` and `oracle` whose names it does not have. So `over`
    works where the plugin is not registered. Parameters are ids, because pytest-benchmark stores parameters as JSON.

    Raises:
        Misuse: `cases` is something else.
    """
    chosen = [c for c in lane_cases() if cases(c)] if callable(cases) else cases
    if not all(isinstance(c, Case) for c in chosen):
        raise Misuse(f"over: expected a list of nsa.testing.matrix.case.Case or a predicate of one, got {cases!r}")
    mark = pytest.mark.parametrize("case", register(chosen), indirect=True, scope="module")

    def decorate(test: T) -> T:
        module = sys.modules.get(test.__module__)  # None for code that is executed from a string
        for name in ("case", "problem", "oracle") if module else ():
            vars(module).setdefault(name, globals()[name])
        return cast(T, mark(test))

    return decorate


def contested(
    of: Callable[..., Iterable[Row]],
    *names: str,
    ours: Callable[..., Iterable[tuple[Contestant, Row]]] | None = None,
    promise: str = "",
    selects: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test that has the arguments `contestant` and `case` once for each row of each contestant.

    The contestants are those of `--nsa-impl`; without that option, our own.

    Args:
        of: `of(contestant)`, or `of(contestant, config)`, returns the rows of a contestant. A row is a case, then
            values of the arguments `names`.
        ours: returns `(contestant, row)` pairs for our own contestants; by default, the rows of `NSA`.
        selects: whether the contestants are those that choose blocks, not those that attend.
        promise: the key of `fit.promises` that the test exercises; empty: the value of its argument `wanted`.
    """
    mark = pytest.mark.contested(of=of, names=names, ours=ours, promise=promise, selects=selects)
    # NumPy warns if an interpreted kernel computes with infinities. The test checks the result instead.
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
    return lambda test: mark(quiet(test))


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that is marked by `contested`. The plugin's `pytest_generate_tests` calls this.

    Raises:
        Misuse: a test does not use what `over` or `contested` gives it.
    """
    mark = metafunc.definition.get_closest_marker("contested")
    if mark is None or "of" not in mark.kwargs:
        marks = [m for m in metafunc.definition.iter_markers("parametrize") if len(m.args) == 2 and m.args[0] == "case"]
        lists = [m.args[1] for m in marks if isinstance(m.args[1], list | tuple)]  # not iterators, which end
        if any(name in _by_id for names in lists for name in names if isinstance(name, str)):
            _needs(metafunc, "over", "case", text="case, problem or oracle")
        return
    of, names, ours = (mark.kwargs[word] for word in ("of", "names", "ours"))
    _needs(metafunc, "contested", "contestant", "case", *names)
    specs = list(dict.fromkeys(metafunc.config.getoption("nsa_impl")))
    if specs:
        impls = [impl for impl in map(named.load, specs) if (impl.selects is not None) == mark.kwargs["selects"]]
        pairs = [(impl, tuple(row)) for impl in impls for row in _told(of, metafunc.config, impl)]
    elif ours is not None:
        pairs = [(impl, tuple(row)) for impl, row in _told(ours, metafunc.config)]
    else:
        pairs = [(NSA, tuple(row)) for row in _told(of, metafunc.config, NSA)]
    register([row[0] for _, row in pairs])
    params: list[Any] = []
    for impl, (made, *values) in pairs:
        words = [made.id, *(str(value) for value in values)]
        words = [impl.name, *words] if specs or ours is None else words
        params.append(pytest.param(impl.name, made.id, *values, id="-".join(words)))
    if not params:
        params = [pytest.param(NSA.name, NONE, *[NONE] * len(names), id=NONE)]  # `plugin` deselects it
    arguments = ["contestant", "case", *names]
    metafunc.parametrize(arguments, params, indirect=["contestant", "case"], scope="module")


def _needs(metafunc: pytest.Metafunc, mark: str, *names: str, text: str = "") -> None:
    """Raise Misuse if a marked test uses one of the fixtures `names` neither itself nor by another fixture."""
    missing = [name for name in names if name not in metafunc.fixturenames]
    if missing:
        wanted = text or " and ".join(missing)
        raise Misuse(f"{metafunc.definition.name} is marked by {mark}: give it the argument {wanted}")


def _told(rows: Callable[..., Iterable[Any]], config: pytest.Config, *args: Any) -> Iterable[Any]:
    """`rows(*args)`, or `rows(*args, config)` if `rows` has an argument `config`."""
    asks = rows is not tuple and "config" in inspect.signature(rows).parameters
    return rows(*args, config) if asks else rows(*args)


def register(cases: list[Case]) -> list[str]:
    """Make cases known to the fixture `case`. Returns their ids."""
    _by_id.update((c.id, c) for c in cases)
    return [c.id for c in cases]


def known(ids: Iterable[str]) -> list[Case]:
    """The cases of attention with these ids, each once; calls of a selector are left out."""
    cases: Iterable[Any] = (_by_id[name] for name in dict.fromkeys(ids))
    return [case for case in cases if isinstance(case, Case)]


@pytest.fixture(scope="session")
def lane() -> Lane:
    """`gpu` or `interpreter`. In the interpreter lane Triton kernels run on CPU tensors, in fp32 and fp16."""
    return current_lane()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the lane's tensors live."""
    return _device()


def _device() -> torch.device:
    return torch.device("cuda", 0) if current_lane() == "gpu" else torch.device("cpu")


@pytest.fixture(scope="module")
def contestant(request: pytest.FixtureRequest) -> Contestant:
    """The contestant of a test that `contested` marks: a kernel of `--nsa-impl`, or one of ours."""
    found = NSA if request.param == NSA.name else OURS.get(request.param)
    return named.load(request.param) if found is None else found


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The case of a test that `over` or `contested` marks."""
    if not hasattr(request, "param"):
        needed = "the fixtures case, problem and oracle need cases: write @over(...) above the test"
        pytest.fail(f"{needed} (from nsa.testing.fixtures import over)", pytrace=False)
    return _by_id[request.param]


@pytest.fixture(scope="module")
def problem(case: Case, request: pytest.FixtureRequest) -> Problem:
    """The case's tensors, within the contract of the contestant. The seed is printed, so that a failure shows it."""
    seed = (case.seed + request.config.getoption("nsa_seed", 0)) % 2**32
    print(f"{case.id}: seed {seed}")
    made = case.make(_device(), seed)
    if "contestant" in request.fixturenames:
        made = arranged(made, request.getfixturevalue("contestant").contract)
    return made


@pytest.fixture(scope="module")
def oracle(problem: Problem) -> Oracle:
    """The right answer of the problem, and SDPA's error."""
    return Oracle.of(problem)
