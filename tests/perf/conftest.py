"""What a perf run shares: its cases, how a measurement reaches pytest-benchmark, and what is kept for its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.testing import options
from nsa.testing.clock import precompile, timing
from nsa.testing.fixtures import case, known, over_third_parties, problem, register, third_party
from nsa.testing.gate import hooks
from nsa.testing.matrix.case import core, full, long_context
from nsa.testing.plugin import current_lane
from nsa.testing.report.terminal import notes_key, published_key

__all__ = ["case", "problem", "third_party"]
ON_REQUEST = {"nsa_update_thresholds": "test_threshold.py", "nsa_update_schedules": "test_crossover.py"}
MINUTES = "test_training.py"  # more than all of core, which is to take two; where it is named, or with --nsa-full
rows_key = pytest.StashKey[list[dict[str, Any]]]()  # of the CSV of shapes by hand


def pytest_configure(config: pytest.Config) -> None:
    config.stash[published_key], config.stash[rows_key] = [], []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kernel benchmarks run over core, or over everything; a machine without a GPU shows one skip, not a hundred."""
    if "by_hand" in metafunc.fixturenames:
        shapes = options.shapes(metafunc.config)
        return metafunc.parametrize("case", register(shapes), indirect=True, scope="module")
    cases = full() + long_context() if metafunc.config.getoption("nsa_full") else core()
    # Timed beside dense attention, not beside packing.
    prompts = metafunc.definition.path.name in ("test_prefill.py", "test_training.py")
    cases = [case for case in cases if (case.dist == "prefill") == prompts]
    cases = cases if current_lane() == "gpu" else cases[:1]
    if "third_party" in metafunc.fixturenames:
        over_third_parties(metafunc, cases)
    elif _without_cases(metafunc):
        metafunc.parametrize("case", register(cases), indirect=True, scope="module")


def _without_cases(metafunc: pytest.Metafunc) -> bool:
    """Whether a kernel benchmark leaves it to this file what it runs over."""
    if not metafunc.definition.get_closest_marker("gpu") or "case" not in metafunc.fixturenames:
        return False
    return all(mark.args[0] != "case" for mark in metafunc.definition.iter_markers("parametrize"))


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Kernels that many benchmarks of this run need, compiled before the first of them."""
    items = [item for item in request.session.items if item.get_closest_marker("gpu") and hasattr(item, "callspec")]
    items = [item for item in items if "case" in item.callspec.params]
    trained = known(item.callspec.params["case"] for item in items if item.path.name == MINUTES)
    cases = known(item.callspec.params["case"] for item in items if item.path.name != MINUTES)
    worth = len(cases) >= precompile.WORTH or len(trained) > 1
    if current_lane() == "gpu" and worth and not request.config.getoption("nsa_sweep"):
        device = request.getfixturevalue("device")
        precompile.compile_ahead(cases, device, precompile.processes(device), trained)


@pytest.fixture
def sampling(request: pytest.FixtureRequest) -> dict[str, int]:
    """`--nsa-iters` and `--nsa-warmup` as the timing functions take them."""
    return {"iters": request.config.getoption("nsa_iters"), "warmup": request.config.getoption("nsa_warmup")}


@pytest.fixture
def machine_sampling(request: pytest.FixtureRequest, sampling: dict[str, int]) -> dict[str, Any]:
    """`sampling`, and how `measure` is to use the GPU: `--nsa-hot`, `--nsa-streams`, `--nsa-no-check`."""
    option = request.config.option
    return sampling | {"hot": option.nsa_hot, "streams": option.nsa_streams, "check": not option.nsa_no_check}


@pytest.fixture
def by_hand(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Add a line to the CSV of `--nsa-csv`."""
    return request.config.stash[rows_key].append


@pytest.fixture
def publish(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., None]:
    """Hand samples and what they mean to pytest-benchmark and to the summary, under a group's name.

    `again()` measures once more: a gated run calls it before it calls a benchmark a regression. `core`: False for what
    is timed on request, which is in no baseline.
    """
    config, name = request.config, request.node.name

    def publish(
        group: str, samples: timing.Timing, info: dict[str, Any], again: hooks.Again | None = None, core: bool = True
    ) -> None:
        samples, info = hooks.gated(config, name, samples, info, again) if core else (samples, info)
        benchmark.group = group
        benchmark.extra_info.update(info)
        timing.feed(benchmark, samples)
        config.stash[published_key].append(info | {"group": group, "name": request.node.name, "median": samples.median})
        hooks.enforce(config, name)

    return publish


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Shapes by hand run alone, and are nobody's business otherwise; what routing rests on is timed on request."""
    if collection_path.parent != Path(__file__).parent or not collection_path.name.startswith("test_"):
        return None
    name = collection_path.name
    if config.getoption("nsa_sweep") or name == "test_sweep.py":
        return None if config.getoption("nsa_sweep") and name == "test_sweep.py" else True
    wanted = options.by_hand(config) == (name == "test_shape.py")
    for asked, needed in ON_REQUEST.items():
        wanted = wanted and (name != needed or config.getoption(asked))
    if name == MINUTES:
        wanted = wanted and config.getoption("nsa_full")
    return None if wanted else True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    config.stash[notes_key] = options.finish(session, config.stash[published_key], config.stash[rows_key])
