"""The gate's part in pytest: runs of several processes, and the hooks that judge and report."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.storage.file import FileStorage

from nsa.testing import options, refusals
from nsa.testing.clock.guard import undetectable
from nsa.testing.gate import against, children, store, words
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Baseline, Key
from nsa.testing.machine import commit, under_test
from nsa.testing.options import STORAGE
from nsa.testing.report.document import read

UPSTREAM_STORAGE = "file://./.benchmarks"  # pytest-benchmark's default: the option was not given
compare_key = pytest.StashKey[Any]()  # the value of --benchmark-compare
gate_key = pytest.StashKey[Gate | None]()
_forbidden_key = pytest.StashKey[list[str]]()  # what --benchmark-compare-fail found


# --- runs of several processes ---------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With `--nsa-save-baseline` or `--nsa-against`, this process measures nothing. It starts processes that do."""
    refusals.check_values(config)
    refusals.check_paths(config)
    option = config.option
    if option.collectonly or option.nsa_recording or not (option.nsa_save_baseline or option.nsa_against):
        return None
    reason = refusals.refused_of_several(config)
    if reason is not None:
        print(f"ERROR: {reason}", file=sys.stderr)
        return 1
    run, failed = (_against, "nothing was compared") if option.nsa_against else (_record, "no baseline saved")
    try:
        with children.ended_is_interrupted():
            return run(config)
    except KeyboardInterrupt:
        print(f"{failed}: interrupted", file=sys.stderr)
        return int(pytest.ExitCode.INTERRUPTED)
    except (against.NotCompared, store.NotSaved, OSError) as e:
        print(f"{failed}: {e}", file=sys.stderr)
        return getattr(e, "status", 1)


def _against(config: pytest.Config) -> int:
    ref, arguments = config.option.nsa_against, list(map(str, config.invocation_params.args))
    paths = [word for word in arguments if word in config.args]
    for path in paths if not config.option.pyargs else ():
        if not Path(config.invocation_params.dir, path.partition("::")[0]).exists():
            raise against.NotCompared(f"file or directory not found: {path}")
    contestant = _contestant(config)
    root = config.invocation_params.dir if contestant else config.rootpath
    module = contestant.partition(":")[0].partition(".")[0]
    return against.compare(ref, arguments, paths, root, config.option.nsa_strict, module or "nsa")


def _record(config: pytest.Config) -> int:
    params = config.invocation_params
    arguments = ["--nsa-recording", *_one_word(a for a in map(str, params.args) if a != "--nsa-save-baseline")]
    contestant = _contestant(config)
    under_test(contestant.partition(":")[0] or "nsa")
    saved = store.record(_storage(config), arguments, params.dir, commit()[:7], contestant)
    print("baseline saved:", *saved, sep="\n  ")
    return 0


def _one_word(arguments: Iterable[str]) -> list[str]:
    """Join `--benchmark-storage FOLDER` into one word.

    pytest takes a word that names a folder for a path of tests, and would write the ids of tests relative to it.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == STORAGE:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


# --- where baselines are ---------------------------------------------------------------------------------------------


class _Stored(FileStorage):
    """The files of one device's baseline, as pytest-benchmark reads them."""

    @property
    def location(self) -> str:
        return str(self.path)  # pytest-benchmark's version raises if the folder is outside the working directory


def _storage(config: pytest.Config) -> Path:
    """The folder of baselines: the folder of `--benchmark-storage`, if that option names one.

    Otherwise `tests/perf/baselines` of the checkout for our own kernels, and `nsa-baselines` in the folder where pytest
    was started for other kernels.

    Only `--nsa-save-baseline` writes there, one folder for each device. What pytest-benchmark itself saves
    (`--benchmark-save`, `--benchmark-autosave`) goes to its own folders, and is never a baseline.
    """
    where = str(config.option.benchmark_storage)
    if where == UPSTREAM_STORAGE or ("://" in where and not where.startswith("file://")):
        checkout = config.rootpath / "tests" / "perf" / "baselines"
        ours = not config.option.nsa_impl and checkout.parent.is_dir()
        return checkout if ours else Path(config.invocation_params.dir, "nsa-baselines")
    folder = Path(config.invocation_params.dir, where.removeprefix("file://"))
    if folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"{STORAGE} {where}: expected a folder, got a file")
    return folder


def _contestant(config: pytest.Config) -> str:
    """The contestant whose baseline it is; empty for our own kernels."""
    return "".join(config.option.nsa_impl[:1])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that contradict each other. pytest-benchmark's session does not exist yet at this point."""
    config.stash[gate_key] = None
    if hasattr(config, "workerinput") or not options.has_benchmarks(config):
        return
    reason = refusals.refused(config)
    if reason is not None:
        pytest.exit(reason, returncode=1)
    config.stash[compare_key] = config.option.benchmark_compare
    config.option.benchmark_compare = []  # `pytest_sessionstart` sets the option again, once the file is known


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)  # the object that pytest-benchmark passes to its hooks
    if benchmarks is None or compare_key not in config.stash:
        return
    compare = config.option.benchmark_compare = config.stash[compare_key]
    if not compare and not config.option.nsa_recording:
        return
    key = Key.of(benchmarks.get_machine_info())
    folder = store.folder_of(_storage(config), key.device, _contestant(config))
    gate = config.stash[gate_key] = _open(key, folder, config.option)
    if compare:
        _show_beside(benchmarks, compare, folder, gate.baseline)


def _show_beside(benchmarks: Any, compare: Any, folder: Path, baseline: Baseline | None) -> None:
    """Let pytest-benchmark load the stored run that its table shows beside this run.

    Without a name in `compare`, that is the newest file of the baseline. A named run is looked for among the baselines
    first, then among the files that pytest-benchmark itself saved.
    """
    own = benchmarks.storage
    stored = _Stored(folder, benchmarks.logger) if folder.is_dir() else None  # type: ignore[no-untyped-call]
    if compare is True and baseline is not None:
        benchmarks.compare, benchmarks.storage = baseline.paths[-1].stem, stored
    elif compare is True:
        return
    else:
        benchmarks.compare = compare
        try:
            benchmarks.storage = stored if stored is not None and stored.query(compare) else own  # type: ignore[no-untyped-call]
            for path in benchmarks.storage.query(compare) if isinstance(benchmarks.storage, FileStorage) else ():
                read(path, needs="stats")
        except ValueError as error:
            raise pytest.UsageError(f"--benchmark-compare={compare}: {error}") from error
    with warnings.catch_warnings():
        # The warning prints two whole machine descriptions on one line. `Key` holds the fields that matter.
        warnings.filterwarnings("ignore", "Benchmark machine_info is different")
        benchmarks.handle_loading()
    benchmarks.storage = own


def _open(key: Key, folder: Path, option: argparse.Namespace) -> Gate:
    try:
        baseline = store.find(folder, key)
    except ValueError as e:
        pytest.exit(f"a baseline cannot be read: {e}", returncode=1)
    flags = (option.nsa_recording, option.nsa_accept_regression, option.nsa_strict, option.nsa_accept_drift)
    return Gate(key, baseline, *flags, "--nsa-full runs everything, the gate is for core" if option.nsa_full else None)


def compared_with(config: pytest.Config) -> list[Path]:
    """The baseline files that this run is compared with, oldest first."""
    gate = config.stash.get(gate_key, None)
    return [] if gate is None or gate.baseline is None else gate.baseline.paths


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """End a green run red if it gated nothing under `--nsa-strict`, or if pytest-benchmark's own rule forbids it.

    A slower benchmark has already failed its test (`benchmarks.publish`). All other hooks come first, so results are
    still written.
    """
    yield
    config = session.config
    gate, option = config.stash.get(gate_key, None), config.option
    forbidden = config.stash[_forbidden_key] = _forbidden(getattr(config, "_benchmarksession", None))
    excused = gate is None or gate.recording or option.collectonly
    unproved = gate is not None and gate.strict and not gate.on and not excused
    if (unproved or forbidden) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _forbidden(benchmarks: Any) -> list[str]:
    """What pytest-benchmark's --benchmark-compare-fail found, and would raise below its tables, with a traceback."""
    if benchmarks is None or not benchmarks.compare_fail:
        return []
    found = [f"{name}: {fail}" for name, fail in benchmarks.performance_regressions]
    if not benchmarks.compared_mapping:
        found = ["nothing was compared, because no stored run was found"]
    benchmarks.compare_fail, benchmarks.performance_regressions = [], []
    return [f"--benchmark-compare-fail: {text}" for text in found]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Print the verdicts last, below all other tables and pytest's list of failures."""
    try:
        return (yield)
    finally:
        _summarize(terminalreporter, config)


def _summarize(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session, gate = getattr(config, "_benchmarksession", None), config.stash.get(gate_key, None)
    if session is None:
        return
    if config.option.nsa_no_check:
        terminalreporter.section("RESULTS WERE NOT CHECKED (--nsa-no-check)")
        for line in undetectable({bench.fullname: bench.extra_info for bench in session.benchmarks}):
            terminalreporter.write_line(line)
    if gate is not None:
        terminalreporter.section("gate")
        forbidden: list[str] = config.stash.get(_forbidden_key, [])
        lines = gate.report(bench.name for bench in session.benchmarks if not bench.has_error)
        for line in [*lines, *words.narrowed(forbidden)]:
            terminalreporter.write_line(line)
