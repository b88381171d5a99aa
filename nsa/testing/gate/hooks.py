"""The gate's part in pytest: options, refusals, recording, and the hooks that judge and report."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.storage.file import FileStorage

from nsa.testing import options
from nsa.testing.clock.guard import undetectable
from nsa.testing.clock.timing import Timing
from nsa.testing.gate import against, children, store, words
from nsa.testing.gate.run import Again, Gate, Info
from nsa.testing.gate.store import Baseline, Key
from nsa.testing.machine import commit, under_test
from nsa.testing.report.document import read

NOT_CORE = ("nsa_full", *options.BY_HAND, "nsa_update_thresholds", "nsa_regret")
STORAGE = "--benchmark-storage"
UPSTREAM_STORAGE = "file://./.benchmarks"  # pytest-benchmark's default: the option was not given
_compare_key = pytest.StashKey[Any]()  # the value of --benchmark-compare
gate_key = pytest.StashKey[Gate | None]()
_regressed_key = pytest.StashKey[list[str]]()  # what --benchmark-compare-fail found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nsa", "selection attention")
    flags = {
        "--nsa-save-baseline": "run the perf session in three processes, and keep the results as the baseline of this "
        "device if all three pass",
        "--nsa-accept-regression": "save a baseline even if a benchmark became slower",
        "--nsa-strict": "exit with status 1 also if a verdict is ambiguous or if nothing was gated",
    }
    options.add_flags(group, flags)
    group.addoption(
        "--nsa-against",
        metavar="REF",
        help="run the perf session in this tree and in a git worktree of REF, in processes that take turns, and gate "
        "this tree against REF; needs no baseline",
    )
    group.addoption(
        "--nsa-accept-drift",
        action="append",
        default=[],
        metavar="BENCHMARK",
        help="let this benchmark be slower than its best recording, which it became in small steps (repeatable)",
    )
    group.addoption("--nsa-recording", action="store_true", help=argparse.SUPPRESS)  # a process of --nsa-save-baseline


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(config: pytest.Config) -> str | None:
    """Why a run with these options would pass without comparing or recording anything; None if it would not.

    For instance, pytest-benchmark disables itself under xdist, and only warns.
    """
    option = config.option
    names = ("benchmark_compare", "benchmark_compare_fail", "benchmark_save", "benchmark_autosave")
    asked = [name for name in (*names, "nsa_save_baseline", "nsa_recording", "nsa_against") if getattr(option, name)]
    if not asked:
        return None
    first = options.spelled(asked[0])
    if (reason := options.without_benchmarks(config, first)) is not None:
        return reason
    if option.benchmark_skip and not option.benchmark_only:
        return f"{first} needs benchmarks: leave out --benchmark-skip"
    baseline = option.nsa_save_baseline or option.nsa_recording
    if not option.benchmark_compare and not baseline and not option.nsa_against:
        return None
    if not baseline and config.inipath is None and STORAGE in map(str, config.invocation_params.args):
        folder = option.benchmark_storage
        return f"{STORAGE} {folder}: pytest takes the folder for a path of tests: write {STORAGE}={folder}"
    swallowed = _swallowed(config, option.benchmark_compare)
    if swallowed is not None:
        return swallowed
    if option.nsa_hot:
        return f"{first}: gated and recorded times are of cold buffers: leave out --nsa-hot"
    if option.nsa_no_check:
        return f"{first}: gated and recorded benchmarks are checked first: leave out --nsa-no-check"
    if baseline and option.nsa_sweep:
        return f"{first}: a sweep is no baseline: leave out --nsa-sweep"
    if len(set(option.nsa_impl)) > 1:
        return f"{first}: a baseline is of one contestant: leave out all but one --nsa-impl"
    sampled = list(options.sampled_otherwise(config))
    for what, wrong in (("", [name for name in NOT_CORE if getattr(option, name)]), (", sampled by default", sampled)):
        if baseline and wrong:
            other = options.spelled(wrong[0])
            return f"{first}: a baseline is of core{what}: leave out {other} (--benchmark-json keeps everything)"
    return None


def _swallowed(config: pytest.Config, value: object) -> str | None:
    """An error text if the value of `--benchmark-compare` is a path of tests; None if it is a stored run.

    pytest-benchmark takes the word after the option for the stored run to compare with. If that word is a path of
    tests, pytest does not run those tests, and nothing is compared.
    """
    if not isinstance(value, str):
        return None
    path = Path(config.invocation_params.dir, value.partition("::")[0])
    if "::" in value or path.is_dir() or path.suffix == ".py":
        return (
            f"--benchmark-compare takes {value} for the stored run to compare with: write the path before the option, "
            f"pytest -m perf {value} --benchmark-compare"
        )
    return None


# --- runs of several processes ---------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With `--nsa-save-baseline` or `--nsa-against`, this process measures nothing. It starts processes that do."""
    options.check_values(config)
    option = config.option
    if option.collectonly or option.nsa_recording or not (option.nsa_save_baseline or option.nsa_against):
        return None
    reason = _refused_parent(config)
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


def _refused_parent(config: pytest.Config) -> str | None:
    """Why a run of several processes cannot have these options; None if it can."""
    option = config.option
    if not options.has_benchmarks(config):
        return "pytest-benchmark is switched off"
    first = "--nsa-against" if option.nsa_against else "--nsa-save-baseline"
    each = {"--benchmark-json": option.benchmark_json}
    if option.nsa_against:
        each |= {"--junitxml": option.xmlpath} | {options.spelled(n): getattr(option, n) for n in options.WRITES}
        each |= {"--benchmark-compare": option.benchmark_compare, "--nsa-save-baseline": option.nsa_save_baseline}
    given = next((name for name, value in each.items() if value), None)
    if given is not None:
        return f"{first} starts several processes, and {given} is for one process: leave out {given}"
    return refusal(config)


def _against(config: pytest.Config) -> int:
    ref, arguments = config.option.nsa_against, list(map(str, config.invocation_params.args))
    paths = [word for word in arguments if word in config.args]
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
    return Path(config.invocation_params.dir, where.removeprefix("file://"))


def _contestant(config: pytest.Config) -> str:
    """The contestant whose baseline it is; empty for our own kernels."""
    return "".join(config.option.nsa_impl[:1])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that contradict each other. pytest-benchmark's session does not exist yet at this point."""
    config.stash[gate_key] = None
    if hasattr(config, "workerinput") or not options.has_benchmarks(config):
        return
    reason = refusal(config)
    if reason is not None:
        pytest.exit(reason, returncode=1)
    config.stash[_compare_key] = config.option.benchmark_compare
    config.option.benchmark_compare = []  # `pytest_sessionstart` sets the option again, once the file is known


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)  # the object that pytest-benchmark passes to its hooks
    if benchmarks is None or _compare_key not in config.stash:
        return
    compare = config.option.benchmark_compare = config.stash[_compare_key]
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


def gated_again(config: pytest.Config) -> str:
    """The command-line options that gate another run as this one; empty if this run is not gated."""
    compare, option = config.stash.get(_compare_key, None), config.option
    if not compare:
        return ""
    typed = ["--benchmark-compare" if compare is True else f"--benchmark-compare={compare}"]
    typed += ["--nsa-strict"] if option.nsa_strict else []
    typed += [] if option.benchmark_storage == UPSTREAM_STORAGE else [f"{STORAGE}={option.benchmark_storage}"]
    return f" {shlex.join(typed)}"


# --- verdicts --------------------------------------------------------------------------------------------------------


def gated(config: pytest.Config, name: str, samples: Timing, info: Info, again: Again | None) -> tuple[Timing, Info]:
    """Judge a benchmark if this run is gated. Returns the samples and facts to store."""
    gate = config.stash[gate_key]
    try:
        return (samples, info) if gate is None else gate.judge(name, samples, info, again)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)


def enforce(config: pytest.Config, name: str) -> None:
    """Fail the test of a benchmark that failed the gate, so that the verdict reaches JUnit and the exit status."""
    gate = config.stash[gate_key]
    reason = None if gate is None else gate.failure(name)
    if reason is not None:
        pytest.fail(reason, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail a green run that gated nothing under `--nsa-strict`, or that `--benchmark-compare-fail` forbids.

    All other hooks come first, so results are still written.
    """
    yield
    config = session.config
    gate, option = config.stash.get(gate_key, None), config.option
    regressed = config.stash[_regressed_key] = _regressed(getattr(config, "_benchmarksession", None))
    excused = gate is None or gate.recording or option.collectonly
    unproved = gate is not None and gate.strict and not gate.on and not excused
    if (unproved or regressed) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _regressed(benchmarks: Any) -> list[str]:
    """What --benchmark-compare-fail found. pytest-benchmark would raise it below its tables, with a traceback."""
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
        for line in gate.report(bench.name for bench in session.benchmarks if not bench.has_error):
            terminalreporter.write_line(line)
        regressed = config.stash.get(_regressed_key, [])
        for line in words.narrowed(regressed):
            terminalreporter.write_line(line)
