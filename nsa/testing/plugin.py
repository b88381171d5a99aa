"""The pytest plugin of the suite: lanes, options, skip reasons and replay commands.

Registered by `nsa_pytest`, or by a root conftest.py: `pytest_plugins = ["nsa.testing.plugin"]`. Its import chooses the
lane (see `lane`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from nsa.gpu import device_slug
from nsa.testing import options, profiles, refusals
from nsa.testing.fixtures import *  # noqa: F403  (registers the fixtures for all tests)
from nsa.testing.fixtures import NONE, parametrize
from nsa.testing.interpreter import quicken
from nsa.testing.judge import addresses
from nsa.testing.machine import GIB_PER_WORKER, commit, current_lane, device_name, triton_version, under_test
from nsa.testing.machine import Lane as Lane
from nsa.testing.owned import is_ours, module_of

# `benchmarks` comes last and `hooks` first: plugins import one another, and pytest cannot rewrite the assertions of a
# plugin that was imported before.
pytest_plugins = [
    "nsa.testing.gate.hooks", "nsa.testing.verdicts", "nsa.testing.report.terminal", "nsa.testing.shipped",
    "nsa.testing.benchmarks",
]  # fmt: skip
WORKERS_PER_GPU = 16  # xdist workers that share a GPU, because most of their time is compiling, on the CPU
KEPT_BYTES = 512 << 20  # memory that torch may keep in its cache after a test, in each worker


# --- lane ------------------------------------------------------------------------------------------------------------


def missing_gpu(capability: tuple[int, int] | None = None, memory_gib: float | None = None) -> str | None:
    """Why this process has no GPU of that compute capability and memory; None if it has one."""
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


# --- options and configuration ---------------------------------------------------------------------------------------


pytest_addoption = options.add
pytest_generate_tests = parametrize


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose `worksteal`, because xdist's default leaves the slow tests of a file to few workers at the end."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contested(of, names, ours, promise, selects): runs once for each contestant")
    if not config.pluginmanager.hasplugin("warnings"):  # with `-p no:warnings`, whose mark our tests have
        config.addinivalue_line("markers", "filterwarnings(warning): does nothing without pytest's plugin of warnings")
    for impl in config.option.nsa_impl[:1]:
        under_test(impl.partition(":")[0])
    profiles.choose(config)
    profiles.check(config)
    reportchars = getattr(config.option, "reportchars", "")
    if not set("sSaAN") & set(reportchars):
        config.option.reportchars = reportchars + "s"
    asked = ("benchmark_enable", "benchmark_only", "benchmark_skip", "benchmark_compare", "nsa_save_baseline")
    parallel = hasattr(config, "workerinput") or getattr(config.option, "numprocesses", None)
    if parallel and not any(getattr(config.option, name, None) for name in asked):
        config.option.benchmark_disable = True  # pytest-benchmark would do the same, with a warning
    if hasattr(config, "workerinput"):
        # By default torch uses all cores in each worker, which is slower.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(config.workerinput["workercount"])))
    elif options.has_benchmarks(config):
        refusals.check(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if current_lane() == "interpreter" or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist chooses
    memory = torch.cuda.get_device_properties(0).total_memory
    each = max(1, min(WORKERS_PER_GPU, memory // (GIB_PER_WORKER << 30)))
    return min(len(os.sched_getaffinity(0)), each * torch.cuda.device_count())


def pytest_report_header(config: pytest.Config) -> list[str]:
    if current_lane() == "gpu":
        where = f"GPU: {torch.cuda.get_device_name(0)}"
        if torch.cuda.device_count() > 1:
            where += f" (1 of {torch.cuda.device_count()}; with -n, one for each worker in turn)"
    else:
        where = "CPU: Triton interpreter, fp32/fp16 on small shapes"
    versions = f"torch {torch.__version__}, triton {triton_version()}"
    lines = [f"nsa lane: {where}", f"nsa: {versions}, seed {config.getoption('nsa_seed')}, commit {commit()}"]
    if config.option.nsa_hot:
        lines.append("nsa: HOT buffers (--nsa-hot): data is read from L2, so bandwidths are not checked")
    if config.option.nsa_no_check:
        lines.append("nsa: RESULTS ARE NOT CHECKED (--nsa-no-check): only impossible times are refused")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU that is not there, and leave out tests of promises that no contestant makes."""
    nothing = [item for item in items if item.get_closest_marker("contested") and item.name.endswith(f"[{NONE}]")]
    if nothing:
        items[:] = [item for item in items if item not in nothing]
        config.hook.pytest_deselected(items=nothing)
    for item in items:
        for mark in item.iter_markers("gpu") if is_ours(config, item.path) else ():
            reason = missing_gpu(*mark.args, **mark.kwargs)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the process for the tests that `-k` and `-m` have left."""
    profiles.reproduce(session.config, session.items)
    ours = [item for item in session.items if is_ours(session.config, item.path)]
    if ours and not __debug__:
        raise pytest.UsageError(
            "the suite judges by assert, which -O and PYTHONOPTIMIZE remove: leave out -O, unset PYTHONOPTIMIZE"
        )
    if ours and current_lane() == "interpreter":
        quicken()
        if any(item.get_closest_marker(mark) for item in ours for mark in ("parity", "edge")):
            addresses.watch()


def large_tests_lock() -> Path:
    """The lock of tests that need much of the GPU's memory."""
    slug = device_slug(torch.cuda.get_device_properties(0).name)
    return Path(tempfile.gettempdir()) / f"nsa-large-tests-{slug}-{os.getuid()}.lock"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run tests that name the GPU memory they need one at a time, over all workers; empty torch's cache after tests.

    Addresses of interpreted kernels are checked in the suite's own tests alone.
    """
    addresses.checking = is_ours(item.config, item.path)
    addresses.outside.clear()
    if current_lane() != "gpu" or not addresses.checking:
        return (yield)
    large = any(mark.kwargs.get("memory_gib") for mark in item.iter_markers("gpu"))
    with FileLock(large_tests_lock()) if large else contextlib.nullcontext():
        try:
            return (yield)
        finally:
            with contextlib.suppress(RuntimeError):  # a lost CUDA context; `pytest_runtest_makereport` reports it
                if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > (0 if large else KEPT_BYTES):
                    torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Stop the run after an illegal access, because this process cannot use the GPU any more. Name the failing test.

    The report also gets what the command that replays the test needs: whether the test is ours, the name of its module
    for `--pyargs` (the id of a test that ships is no path), and the call that a failing test drew.
    """
    report = yield
    report.nsa_ours, report.nsa_module = addresses.checking, module_of(item.path)  # type: ignore[attr-defined]
    report.nsa_call = "" if call.excinfo is None else profiles.drawn(call.excinfo.value)  # type: ignore[attr-defined]
    if call.excinfo is not None and current_lane() == "gpu":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            item.session.shouldfail = f"{item.nodeid} lost the CUDA context: {str(error).splitlines()[0]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test in which an interpreted kernel left its tensors, even if the error was caught. Fixtures count too."""
    with profiles.shrinking() if addresses.checking else contextlib.nullcontext():
        result = yield
    if addresses.outside:
        pytest.fail(f"out of bounds: {addresses.outside[0]}", pytrace=False)
    return result


# --- what pytest-benchmark stores ------------------------------------------------------------------------------------


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
