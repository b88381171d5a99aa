"""The pytest side of baselines and the gate: options, refusals, recording, and the hooks that judge and report.

`gate.py` decides, `gated_run.py` keeps what came of one run, `baselines.py` keeps files; this part knows pytest and
pytest-benchmark.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.storage.file import FileStorage

from nsa.settings import device_slug
from nsa.testing import baselines, outputs
from nsa.testing.baselines import Key
from nsa.testing.gated_run import Again, Gate, Info, report
from nsa.testing.physics import undetectable
from nsa.testing.timing import Timing

NOT_CORE = ("nsa_full", *outputs.BY_HAND, "nsa_impl", "nsa_update_thresholds", "nsa_update_schedules")
STORAGE = "--benchmark-storage"
UPSTREAM_STORAGE = "file://./.benchmarks"  # pytest-benchmark's default, which means: not given
_compare_key = pytest.StashKey[Any]()  # what --benchmark-compare said


gate_key = pytest.StashKey[Gate | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nsa", "selection attention")
    group.addoption(
        "--nsa-save-baseline",
        action="store_true",
        help="run the perf session in three processes, and keep the results as this device's baseline if all are green",
    )
    group.addoption(
        "--nsa-accept-regression", action="store_true", help="a regression does not keep a baseline from being saved"
    )
    group.addoption(
        "--nsa-strict", action="store_true", help="what is ambiguous, or was not gated at all, fails (exit status 1)"
    )
    group.addoption("--nsa-recording", action="store_true", help=argparse.SUPPRESS)  # a process of --nsa-save-baseline


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(config: pytest.Config) -> str | None:
    """Why what was asked for would pass without having compared or recorded anything; None if it would not.

    pytest-benchmark disables itself under xdist, and says so in a warning only.
    """
    option = config.option
    names = ("benchmark_compare", "benchmark_compare_fail", "benchmark_save", "benchmark_autosave")
    asked = [name for name in (*names, "nsa_save_baseline", "nsa_recording") if getattr(option, name)]
    if not asked:
        return None
    first = outputs.spelled(asked[0])
    if getattr(option, "dist", "no") != "no" or getattr(option, "numprocesses", None):
        return f"{first} needs benchmarks, and under xdist there are none: leave out -n"
    if option.benchmark_disable and not option.benchmark_enable:
        return f"{first} needs benchmarks: leave out --benchmark-disable"
    if option.benchmark_skip and not option.benchmark_only:
        return f"{first} needs benchmarks: leave out --benchmark-skip"
    baseline = option.nsa_save_baseline or option.nsa_recording
    if not option.benchmark_compare and not baseline:
        return None
    if not baseline and config.inipath is None and STORAGE in map(str, config.invocation_params.args):
        folder = option.benchmark_storage
        return f"{STORAGE} {folder}: pytest takes it for a path of tests: write {STORAGE}={folder}"
    if option.nsa_hot:
        return f"{first}: baselines are of cold buffers: leave out --nsa-hot"
    if option.nsa_no_check:
        return f"{first}: what nobody checked is neither gated nor recorded: leave out --nsa-no-check"
    if baseline and option.nsa_sweep:
        return f"{first}: a sweep is no baseline: leave out --nsa-sweep"
    sampled = list(outputs.sampled_otherwise(config))
    for what, wrong in (("", [name for name in NOT_CORE if getattr(option, name)]), (", sampled as ever", sampled)):
        if baseline and wrong:
            other = outputs.spelled(wrong[0])
            return f"{first}: a baseline is of core{what}: leave out {other} (--benchmark-json keeps everything)"
    return None


# --- recording -------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """`--nsa-save-baseline`: this process only starts the three that measure."""
    option = config.option
    if not option.nsa_save_baseline or option.nsa_recording or option.collectonly:
        return None
    storage = _storage(config) if config.pluginmanager.hasplugin("benchmark") else None
    reason = "pytest-benchmark is switched off" if storage is None else refusal(config)
    if option.benchmark_json if storage is not None else False:
        reason = "--nsa-save-baseline: each process writes its own JSON: leave out --benchmark-json"
    if reason is not None or storage is None:
        print(f"ERROR: {reason}", file=sys.stderr)
        return 1
    params = config.invocation_params
    arguments = ["--nsa-recording", *_one_word(a for a in map(str, params.args) if a != "--nsa-save-baseline")]
    from nsa.testing.plugin import commit

    try:
        saved = baselines.record(storage, arguments, params.dir, commit()[:7])
    except baselines.NotSaved as e:
        print(f"no baseline saved: {e}", file=sys.stderr)
        return e.status
    except KeyboardInterrupt:
        print("no baseline saved: interrupted", file=sys.stderr)
        return int(pytest.ExitCode.INTERRUPTED)
    except OSError as e:
        print(f"no baseline saved: {e}", file=sys.stderr)
        return 1
    print("baseline saved:", *saved, sep="\n  ")
    return 0


def _one_word(arguments: Iterable[str]) -> list[str]:
    """`--benchmark-storage FOLDER` as one word: a word that is a folder counts as a path of tests, and tests would be
    named from there.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == STORAGE:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


# --- pytest-benchmark's storage: one folder per device ---------------------------------------------------------------


class _BaselineStorage(FileStorage):
    @property
    def location(self) -> str:
        return str(self.path)  # upstream's is relative to the working directory, and raises when that is elsewhere


def _storage(config: pytest.Config) -> Path | None:
    """The folder of baselines; None if they are kept elsewhere than in files."""
    where = str(config.option.benchmark_storage)
    if where == UPSTREAM_STORAGE:
        return config.rootpath / "tests" / "perf" / "baselines"
    if "://" in where and not where.startswith("file://"):
        return None
    return Path(config.invocation_params.dir, where.removeprefix("file://"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-benchmark's session exists; `pytest_sessionstart` does the rest, once it does."""
    config.stash[gate_key] = None
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("benchmark"):
        return
    reason = refusal(config)
    if reason is not None:
        pytest.exit(reason, returncode=1)
    config.stash[_compare_key] = config.option.benchmark_compare
    config.option.benchmark_compare = []  # or it would load from the folder of Python and operating system
    storage = _storage(config)
    if storage is not None:
        config.option.benchmark_storage = f"file://{storage}"


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)  # the object pytest-benchmark's own hooks are given
    if benchmarks is None or _compare_key not in config.stash:
        return
    from nsa.testing.plugin import device_name

    benchmarks.machine_id = device_slug(device_name())
    if isinstance(benchmarks.storage, FileStorage):
        path, logger = benchmarks.storage.path, benchmarks.logger
        benchmarks.storage = _BaselineStorage(path, logger, benchmarks.machine_id)  # type: ignore[no-untyped-call]
    compare = config.option.benchmark_compare = config.stash[_compare_key]
    option = config.option
    if not compare and not option.nsa_recording:
        return
    gate = config.stash[gate_key] = _open(benchmarks, option)
    if compare and (compare is not True or gate.baseline is not None):
        latest = gate.baseline.paths[-1] if gate.baseline is not None else None
        benchmarks.compare = str(latest) if compare is True else compare
        with warnings.catch_warnings():
            # Two machine descriptions in full on one line; what can matter is in the key.
            warnings.filterwarnings("ignore", "Benchmark machine_info is different")
            benchmarks.handle_loading()


def _open(benchmarks: Any, option: argparse.Namespace) -> Gate:
    key = Key.of(benchmarks.get_machine_info())
    flags = (option.nsa_recording, option.nsa_accept_regression, option.nsa_strict)
    if not isinstance(benchmarks.storage, FileStorage):
        return Gate(key, None, *flags, "baselines are files, and --benchmark-storage names something else")
    folder = Path(benchmarks.storage.path) / key.device
    try:
        baseline = baselines.find(folder, key)
    except ValueError as e:
        pytest.exit(f"a baseline cannot be read: {e}", returncode=1)
    return Gate(key, baseline, *flags, "--nsa-full is everything, the gate is for core" if option.nsa_full else None)


def compared_with(config: pytest.Config) -> list[Path]:
    """The files that this run is gated against or shown beside, oldest first; none if there are none."""
    gate = config.stash.get(gate_key, None)
    return [] if gate is None or gate.baseline is None else gate.baseline.paths


# --- verdicts --------------------------------------------------------------------------------------------------------


def gated(config: pytest.Config, name: str, samples: Timing, info: Info, again: Again | None) -> tuple[Timing, Info]:
    """What is to be stored of a benchmark, after judging it if this run is gated."""
    gate = config.stash[gate_key]
    return (samples, info) if gate is None else gate.judge(name, samples, info, again)


def enforce(config: pytest.Config, name: str) -> None:
    """A failing benchmark is a failing test: it reaches JUnit and the exit status."""
    gate = config.stash[gate_key]
    reason = None if gate is None else gate.failure(name)
    if reason is not None:
        pytest.fail(reason, pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    gate = session.config.stash.get(gate_key, None)
    ungated = gate is not None and (not gate.on or not gate.verdicts)
    if gate is not None and gate.strict and not gate.recording and ungated and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's tables, where it is seen
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session, gate = getattr(config, "_benchmarksession", None), config.stash.get(gate_key, None)
    if session is not None and config.option.nsa_no_check:
        terminalreporter.section("NOBODY CHECKED RESULTS (--nsa-no-check)")
        for line in undetectable({bench.fullname: bench.extra_info for bench in session.benchmarks}):
            terminalreporter.write_line(line)
    if session is None or gate is None:
        return
    ran = [bench.fullname for bench in session.benchmarks if not bench.has_error]
    terminalreporter.section("gate")
    for line in report(gate, ran):
        terminalreporter.write_line(line)
