"""The plugin of the perf lane: its cases, and how measurements reach pytest-benchmark and the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.testing import artifacts, options
from nsa.testing.clock import timing
from nsa.testing.fixtures import known, register
from nsa.testing.gate import hooks
from nsa.testing.gate.run import Again
from nsa.testing.machine import current_lane
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import core, full, long_context
from nsa.testing.owned import folders, is_ours
from nsa.testing.report.terminal import notes_key, published_key

__all__ = ["by_hand", "machine_sampling", "publish", "sampling"]  # the fixtures, see `fixtures`
MINUTES = "test_training.py"  # takes longer than core, which takes two minutes
ON_REQUEST = {"test_threshold.py": "nsa_update_thresholds", MINUTES: "nsa_full"}
rows_key = pytest.StashKey[list[dict[str, Any]]]()  # rows of the CSV of shapes by hand


def pytest_configure(config: pytest.Config) -> None:
    config.stash[published_key], config.stash[rows_key] = [], []


def timed(config: pytest.Config, prompts: bool) -> list[Case]:
    """The cases of core, or with `--nsa-full` all cases: either the prompts or the others.

    Without a GPU there is only the first case, so that a run shows one skip and not a hundred.
    """
    cases = full() + long_context() if config.getoption("nsa_full") else core()
    cases = [case for case in cases if (case.dist == "prefill") == prompts]
    return cases if current_lane() == "gpu" else cases[:1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize shapes by hand, and training by the prompts of core."""
    if not is_ours(metafunc.config, metafunc.definition.path):
        return
    if "by_hand" in metafunc.fixturenames:
        shapes = options.shapes(metafunc.config)
        metafunc.parametrize("case", register(shapes), indirect=True, scope="module")
    elif metafunc.definition.path.parts[-2:] == ("perf", MINUTES) and "problem" in metafunc.fixturenames:
        cases = timed(metafunc.config, prompts=True)
        metafunc.parametrize("case", register(cases), indirect=True, scope="module")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raise pytest.UsageError for benchmarks under pytest-codspeed, which replaces pytest-benchmark."""
    codspeed = session.config.pluginmanager.get_plugin("codspeed_plugin")
    if codspeed is None or not codspeed.is_codspeed_enabled:
        return
    if any(is_ours(session.config, item.path) and item.get_closest_marker("perf") for item in session.items):
        raise pytest.UsageError(
            "--codspeed switches off pytest-benchmark, which holds what the suite's benchmarks measure: leave out "
            "--codspeed, or the suite's benchmarks (-m 'not perf')"
        )


@pytest.fixture(scope="session")
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of this run before its first benchmark that publishes, if there are many."""
    ours = [item for item in request.session.items if is_ours(request.config, item.path)]
    items = [item for item in ours if item.get_closest_marker("perf") and hasattr(item, "callspec")]
    on_gpu = ("gpu", "contested")  # marks of the benchmarks of kernels
    items = [item for item in items if "case" in item.callspec.params and any(map(item.get_closest_marker, on_gpu))]
    if current_lane() != "gpu" or not items or request.config.getoption("nsa_impl"):
        return
    from nsa.testing.clock import precompile  # imports Triton

    trained = known(item.callspec.params["case"] for item in items if item.path.name == MINUTES)
    cases = known(item.callspec.params["case"] for item in items if item.path.name != MINUTES)
    worth = len(cases) >= precompile.WORTH or len(trained) > 1
    if worth and not request.config.getoption("nsa_sweep"):
        device = torch.device("cuda", 0)
        precompile.compile_ahead(precompile.jobs(cases, trained), device, precompile.processes(device))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """With `--benchmark-disable`, as under xdist, a benchmark checks its results and calls what it would time once."""
    if not pyfuncitem.get_closest_marker("perf") or not pyfuncitem.config.getoption("benchmark_disable", False):
        return (yield)
    with timing.unmeasured():
        try:
            return (yield)
        except timing.Unmeasured:
            return True


@pytest.fixture
def sampling(request: pytest.FixtureRequest) -> dict[str, int]:
    """`--nsa-iters` and `--nsa-warmup` as the timing functions take them."""
    return {"iters": request.config.getoption("nsa_iters"), "warmup": request.config.getoption("nsa_warmup")}


@pytest.fixture
def machine_sampling(request: pytest.FixtureRequest, sampling: dict[str, int]) -> dict[str, Any]:
    """`sampling`, and `--nsa-hot`, `--nsa-streams` and `--nsa-no-check` as `measure` takes them."""
    option = request.config.option
    return sampling | {"hot": option.nsa_hot, "streams": option.nsa_streams, "check": not option.nsa_no_check}


@pytest.fixture
def by_hand(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """A function that adds a line to the CSV of `--nsa-csv`."""
    return request.config.stash[rows_key].append


@pytest.fixture
def publish(request: pytest.FixtureRequest, benchmark: Any, compiled_ahead: None) -> Iterator[Callable[..., None]]:
    """A function that hands samples and facts to pytest-benchmark and to the summary, under a group's name.

    again: measures once more. A gated run calls it if the first measurement is slower than the baseline. core: False
    for benchmarks that run on request only, which are in no baseline.
    """
    config, name = request.config, request.node.name

    def publish(
        group: str, samples: timing.Timing, info: dict[str, Any], again: Again | None = None, core: bool = True
    ) -> None:
        slower, gate = None, config.stash[hooks.gate_key] if core else None
        if gate is not None:
            try:
                samples, info, slower = gate.judge(name, samples, info, again)
            except ValueError as error:
                pytest.fail(str(error), pytrace=False)
        benchmark.group = group
        benchmark.extra_info.update(info)
        timing.feed(benchmark, samples)
        config.stash[published_key].append(info | {"group": group, "name": name, "median": samples.median})
        if slower is not None:  # the verdict fails the test, and so reaches JUnit and the exit status
            pytest.fail(slower, pytrace=False)

    yield publish
    if config.getoption("benchmark_disable") and not benchmark._mode:  # ended unmeasured: not a fixture in vain
        benchmark.pedantic(lambda: None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Select the files of a run: only the one of its special kind (`ALONE`, shapes by hand), or the usual ones.

    Files in `ON_REQUEST` run only if their option is given.
    """
    ours = [folder / "perf" for folder in folders(config)]
    if collection_path.parent.resolve() not in ours or not collection_path.name.startswith("test_"):
        return None
    name, alone = collection_path.name, {file for asked, file in options.ALONE.items() if config.getoption(asked)}
    if alone or name in options.ALONE.values():
        return None if name in alone else True
    wanted = options.by_hand(config) == (name == "test_shape.py")
    asked = name not in ON_REQUEST or config.getoption(ON_REQUEST[name])
    return None if wanted and asked else True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    config.stash[notes_key] = artifacts.finish(session, config.stash[published_key], config.stash[rows_key])
