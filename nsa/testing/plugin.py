"""The pytest plugin of the suite: lanes, marks by folder, skip reasons, replay commands, and where baselines live.

The lane itself is chosen by the root `conftest.py`, which runs before Triton is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest
import torch
from pytest_benchmark.storage.file import FileStorage

from nsa.settings import device_slug
from nsa.testing import outputs
from nsa.testing.machine import Lane as Lane
from nsa.testing.machine import commit as commit
from nsa.testing.machine import current_lane as current_lane
from nsa.testing.machine import device_name as device_name
from nsa.testing.machine import triton_version as triton_version

FOLDERS = ("parity", "edge", "perf")
WORKERS_PER_GPU = 4  # compiling is CPU work, so several share a GPU; each CUDA context takes about half a GiB
UPSTREAM_STORAGE = "file://./.benchmarks"  # pytest-benchmark's default, which means: not given

_compare_key = pytest.StashKey[Any]()  # what --benchmark-compare said
_notes_key = pytest.StashKey[list[str]]()  # lines for the end of a run


# --- lane ------------------------------------------------------------------------------------------------------------


def missing_gpu(capability: tuple[int, int] | None = None, memory_gib: float | None = None) -> str | None:
    """Why this process lacks the GPU asked for (compute capability, GiB of memory), or None if it has it."""
    if current_lane() == "interpreter":
        off = os.environ.get("NSA_TEST_TRITON_SEL") == "0"
        return f"needs an NVIDIA GPU: {'NSA_TEST_TRITON_SEL=0 keeps the suite off it' if off else 'none is visible'}"
    gpu = torch.cuda.get_device_properties(0)
    if capability is not None and (gpu.major, gpu.minor) < capability:
        needed, found = ".".join(map(str, capability)), f"{gpu.major}.{gpu.minor}"
        return f"needs compute capability {needed}: {gpu.name} has {found}"
    if memory_gib is not None and gpu.total_memory < memory_gib * 2**30:
        return f"needs {memory_gib:g} GiB of GPU memory: {gpu.name} has {gpu.total_memory / 2**30:.0f}"
    return None


@pytest.fixture(scope="session")
def lane() -> Lane:
    """`gpu`, or `interpreter`: Triton kernels run on CPU tensors, in fp32 and fp16, slowly."""
    return current_lane()


@pytest.fixture(scope="session")
def device(lane: Lane) -> torch.device:
    """The device on which the lane's tensors live."""
    return torch.device("cuda", 0) if lane == "gpu" else torch.device("cpu")


# --- options and configuration ---------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nsa", "selection attention")
    group.addoption(
        "--nsa-impl",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION[@blocks|@dense]",
        help="also test this function; called as f(q, k, v, *, ranges, causal, scale, return_lse=False), with "
        "block_indices and block_size for @blocks, or on packed rows for @dense (repeatable)",
    )
    group.addoption("--nsa-full", action="store_true", help="benchmark the full matrix, not core")
    group.addoption("--nsa-iters", type=int, default=50, metavar="N", help="samples per benchmark (default: 50)")
    group.addoption("--nsa-warmup", type=int, default=5, metavar="N", help="warm-ups per benchmark (default: 5)")
    group.addoption("--nsa-seed", type=int, default=0, metavar="N", help="added to each case's own seed (default: 0)")
    outputs.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_notes_key] = []
    _set_hypothesis_profiles()
    reportchars = getattr(config.option, "reportchars", "")
    if not set("sSaAN") & set(reportchars):
        config.option.reportchars = reportchars + "s"
    if hasattr(config, "workerinput"):
        _share_cores(int(config.workerinput["workercount"]))
    elif config.pluginmanager.hasplugin("benchmark"):
        _refuse_silent_benchmarks(config)
        outputs.check(config)
        _take_over_storage(config)


def _set_hypothesis_profiles() -> None:
    """Profiles before Hypothesis' own `pytest_configure`, which loads the one named by --hypothesis-profile."""
    settings, slow = hypothesis.settings, [hypothesis.HealthCheck.too_slow]  # an interpreted kernel takes seconds
    common = settings(deadline=None, print_blob=True, suppress_health_check=slow)
    settings.register_profile("ci", common, max_examples=25, derandomize=True, database=None)
    settings.register_profile("deep", common, max_examples=10_000, derandomize=False)
    settings.load_profile("ci")


def _share_cores(workers: int) -> None:
    """torch takes every core for itself; xdist workers doing the same slow each other down."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if current_lane() == "interpreter" or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist's own answer
    return min(len(os.sched_getaffinity(0)), WORKERS_PER_GPU * torch.cuda.device_count())


def pytest_report_header(config: pytest.Config) -> list[str]:
    if current_lane() == "gpu":
        where = f"GPU: {torch.cuda.get_device_name(0)}"
        if torch.cuda.device_count() > 1:
            where += f" (1 of {torch.cuda.device_count()}; with -n, one for each worker in turn)"
    else:
        where = "CPU: Triton interpreter, fp32/fp16 on small shapes"
    versions = f"torch {torch.__version__}, triton {triton_version()}"
    return [f"nsa lane: {where}", f"nsa: {versions}, seed {config.getoption('nsa_seed')}, commit {commit()}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """The folder is the mark. First, so that `-m` sees it. And what needs a GPU that is not there is skipped."""
    for item in items:
        for mark in item.iter_markers("gpu"):
            reason = missing_gpu(*mark.args, **mark.kwargs)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.path.is_relative_to(config.rootpath):
            folders = item.path.relative_to(config.rootpath).parts[:-1]
            for folder in FOLDERS:
                if folder in folders:
                    item.add_marker(folder)


# --- baselines: pytest-benchmark's files, in one folder per device ----------------------------------------------------


class _BaselineStorage(FileStorage):
    @property
    def location(self) -> str:
        return str(self.path)  # upstream's is relative to the working directory, and raises when that is elsewhere


def _refuse_silent_benchmarks(config: pytest.Config) -> None:
    """pytest-benchmark disables itself under xdist: a comparison would then pass without having compared."""
    names = ("compare", "compare_fail", "save", "autosave")
    asked = [f"--benchmark-{name.replace('_', '-')}" for name in names if config.getoption(f"benchmark_{name}")]
    if not asked:
        return
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError(f"{asked[0]} needs benchmarks, and under xdist there are none: leave out -n")
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        raise pytest.UsageError(f"{asked[0]} needs benchmarks: leave out --benchmark-disable")


def _take_over_storage(config: pytest.Config) -> None:
    """Before pytest-benchmark's session exists; `pytest_sessionstart` does the rest, once it does."""
    config.stash[_compare_key] = config.option.benchmark_compare
    config.option.benchmark_compare = []  # or it would load from the folder of Python and operating system
    if config.option.benchmark_storage == UPSTREAM_STORAGE:
        config.option.benchmark_storage = f"file://{config.rootpath / 'tests' / 'perf' / 'baselines'}"


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)  # the object pytest-benchmark's own hooks are given
    if benchmarks is None or _compare_key not in config.stash:
        return
    benchmarks.machine_id = device_slug(device_name())
    if isinstance(benchmarks.storage, FileStorage):
        path, logger = benchmarks.storage.path, benchmarks.logger
        benchmarks.storage = _BaselineStorage(path, logger, benchmarks.machine_id)  # type: ignore[no-untyped-call]
    compare = config.option.benchmark_compare = config.stash[_compare_key]
    if compare is True and isinstance(benchmarks.storage, FileStorage) and not list(benchmarks.storage.load()):
        config.stash[_notes_key] += [
            f"not compared: no baseline for {benchmarks.machine_id} in {benchmarks.storage.location}",
            "record one with: pytest -m perf --benchmark-save=NAME",
        ]
    elif compare:
        benchmarks.compare = compare
        with warnings.catch_warnings():
            # Two machine descriptions in full on one line; what can matter is noted by the hook below.
            warnings.filterwarnings("ignore", "Benchmark machine_info is different")
            benchmarks.handle_loading()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    for name in ("torch", "triton"):
        then, now = compared_benchmark["machine_info"].get(name), machine_info[name]
        if then != now:
            config.stash[_notes_key].append(f"the baseline was recorded with {name} {then}, this run has {now}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    gpu = torch.cuda.get_device_name(0) if current_lane() == "gpu" else None
    machine_info.update(
        device=device_slug(device_name()), gpu=gpu, torch=torch.__version__, triton=triton_version(),
        threads=torch.get_num_threads(),
    )  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    if os.environ.get("NSA_COMMIT"):
        commit_info["id"] = commit()


# --- the end of a run ------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's tables, where it is seen
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    commands = _replay_commands(terminalreporter, config)
    if commands:
        terminalreporter.section("replay one failure")
    for line in [*commands, *config.stash[_notes_key]]:
        terminalreporter.write_line(line)


def _replay_commands(reporter: pytest.TerminalReporter, config: pytest.Config) -> list[str]:
    failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    nodeids = [report.nodeid for report in failed if set(FOLDERS) & set(getattr(report, "keywords", ()))]
    options = "".join(f" --nsa-impl {impl}" for impl in config.getoption("nsa_impl"))
    if config.getoption("nsa_seed"):
        options += f" --nsa-seed {config.getoption('nsa_seed')}"
    if config.getoption("nsa_full"):
        options += " --nsa-full"
    lane = "NSA_TEST_TRITON_SEL=0 " if os.environ.get("NSA_TEST_TRITON_SEL") == "0" else ""
    return [f'{lane}pytest "{config.cwd_relative_nodeid(nodeid)}"{options}' for nodeid in dict.fromkeys(nodeids)]
