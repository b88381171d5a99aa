"""The pytest side of the gate: options, refusals, recording, and the hooks that judge and report."""

from __future__ import annotations

import argparse
import re
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
from nsa.testing.gate import against, store
from nsa.testing.gate.run import Again, Gate, Info
from nsa.testing.gate.store import Baseline, Key
from nsa.testing.machine import commit

NOT_CORE = ("nsa_full", *options.BY_HAND, "nsa_update_thresholds", "nsa_update_schedules")
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
    group.addoption(
        "--nsa-against",
        metavar="REF",
        help="run the perf session in this tree and in a git worktree of REF, in processes that take turns, and gate "
        "one against the other; needs no baseline",
    )
    group.addoption("--nsa-recording", action="store_true", help=argparse.SUPPRESS)  # a process of --nsa-save-baseline


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(config: pytest.Config) -> str | None:
    """Why what was asked for would pass without having compared or recorded anything; None if it would not.

    pytest-benchmark disables itself under xdist, and says so in a warning only.
    """
    option = config.option
    names = ("benchmark_compare", "benchmark_compare_fail", "benchmark_save", "benchmark_autosave")
    asked = [name for name in (*names, "nsa_save_baseline", "nsa_recording", "nsa_against") if getattr(option, name)]
    if not asked:
        return None
    first = options.spelled(asked[0])
    if getattr(option, "dist", "no") != "no" or getattr(option, "numprocesses", None):
        return f"{first} needs benchmarks, and under xdist there are none: leave out -n"
    if option.benchmark_disable and not option.benchmark_enable:
        return f"{first} needs benchmarks: leave out --benchmark-disable"
    if option.benchmark_skip and not option.benchmark_only:
        return f"{first} needs benchmarks: leave out --benchmark-skip"
    baseline = option.nsa_save_baseline or option.nsa_recording
    if not option.benchmark_compare and not baseline and not option.nsa_against:
        return None
    if not baseline and config.inipath is None and STORAGE in map(str, config.invocation_params.args):
        folder = option.benchmark_storage
        return f"{STORAGE} {folder}: pytest takes it for a path of tests: write {STORAGE}={folder}"
    swallowed = _swallowed(config, option.benchmark_compare)
    if swallowed is not None:
        return swallowed
    if option.nsa_hot:
        return f"{first}: what is gated or recorded is timed on cold buffers: leave out --nsa-hot"
    if option.nsa_no_check:
        return f"{first}: what is gated or recorded is checked first: leave out --nsa-no-check"
    if baseline and option.nsa_sweep:
        return f"{first}: a sweep is no baseline: leave out --nsa-sweep"
    if len(set(option.nsa_impl)) > 1:
        return f"{first}: a baseline is of one contestant: leave out all but one --nsa-impl"
    sampled = list(options.sampled_otherwise(config))
    for what, wrong in (("", [name for name in NOT_CORE if getattr(option, name)]), (", sampled as ever", sampled)):
        if baseline and wrong:
            other = options.spelled(wrong[0])
            return f"{first}: a baseline is of core{what}: leave out {other} (--benchmark-json keeps everything)"
    return None


def _swallowed(config: pytest.Config, value: object) -> str | None:
    """Why the value of `--benchmark-compare` is a test path and not a stored run; None if it is not.

    pytest-benchmark takes the word after the option for the run to compare with. A path there would silently leave
    that path out of the run and compare nothing.
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
    """`--nsa-save-baseline` and `--nsa-against`: this process only starts those that measure."""
    option = config.option
    if option.collectonly or option.nsa_recording or not (option.nsa_save_baseline or option.nsa_against):
        return None
    reason = _refused_parent(config)
    if reason is not None:
        print(f"ERROR: {reason}", file=sys.stderr)
        return 1
    return _against(config) if option.nsa_against else _record(config)


def _refused_parent(config: pytest.Config) -> str | None:
    """Why several processes cannot do what was asked for; None if they can."""
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
        return f"{first} starts several processes, and {given} is for one: leave out {given}"
    return refusal(config)


def _against(config: pytest.Config) -> int:
    ref, given = config.option.nsa_against, list(map(str, config.invocation_params.args))
    apart = {"--nsa-against": 2, f"--nsa-against={ref}": 1, "--nsa-strict": 1}  # words that each takes
    arguments: list[str] = []
    while given:
        width = apart.get(given[0], 0)
        arguments += [] if width else given[:1]
        del given[: width or 1]
    try:
        paths = [word for word in arguments if word in config.args]
        return against.compare(ref, arguments, paths, config.rootpath, config.option.nsa_strict)
    except against.NotCompared as e:
        print(f"nothing was compared: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nothing was compared: interrupted", file=sys.stderr)
        return int(pytest.ExitCode.INTERRUPTED)


def _record(config: pytest.Config) -> int:
    params = config.invocation_params
    arguments = ["--nsa-recording", *_one_word(a for a in map(str, params.args) if a != "--nsa-save-baseline")]
    try:
        saved = store.record(_storage(config), arguments, params.dir, commit()[:7], _contestant(config))
    except store.NotSaved as e:
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


# --- where baselines are ---------------------------------------------------------------------------------------------


class _Stored(FileStorage):
    """The files of one device, to be shown beside a run."""

    @property
    def location(self) -> str:
        return str(self.path)  # upstream's is relative to the working directory, and raises when that is elsewhere


def _storage(config: pytest.Config) -> Path:
    """The folder of baselines: that of `--benchmark-storage`, if it names one.

    Else that of the checkout, `tests/perf/baselines`, for our own kernels, and `nsa-baselines` of the folder where
    pytest was started for any other.

    Only `--nsa-save-baseline` writes below it, one folder a device. What pytest-benchmark saves by itself
    (`--benchmark-save`, `--benchmark-autosave`) goes where pytest-benchmark puts it, one folder a platform, and is
    never a baseline.
    """
    where = str(config.option.benchmark_storage)
    if where == UPSTREAM_STORAGE or ("://" in where and not where.startswith("file://")):
        checkout = config.rootpath / "tests" / "perf" / "baselines"
        ours = not config.option.nsa_impl and checkout.parent.is_dir()
        return checkout if ours else Path(config.invocation_params.dir, "nsa-baselines")
    return Path(config.invocation_params.dir, where.removeprefix("file://"))


def _contestant(config: pytest.Config) -> str:
    """The folder of a contestant's baselines, below that of the device; ours need none."""
    return "".join(re.sub(r"[^\w.@-]+", "-", spec) for spec in config.option.nsa_impl[:1])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-benchmark's session exists; `pytest_sessionstart` does the rest, once it does."""
    config.stash[gate_key] = None
    if hasattr(config, "workerinput") or not options.has_benchmarks(config):
        return
    reason = refusal(config)
    if reason is not None:
        pytest.exit(reason, returncode=1)
    config.stash[_compare_key] = config.option.benchmark_compare
    config.option.benchmark_compare = []  # until `pytest_sessionstart` says which file that is


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    benchmarks = getattr(config, "_benchmarksession", None)  # the object pytest-benchmark's own hooks are given
    if benchmarks is None or _compare_key not in config.stash:
        return
    compare = config.option.benchmark_compare = config.stash[_compare_key]
    if not compare and not config.option.nsa_recording:
        return
    key = Key.of(benchmarks.get_machine_info())
    folder = _storage(config) / key.device / _contestant(config)
    gate = config.stash[gate_key] = _open(key, folder, config.option)
    if compare:
        _show_beside(benchmarks, compare, folder, gate.baseline)


def _show_beside(benchmarks: Any, compare: Any, folder: Path, baseline: Baseline | None) -> None:
    """Have pytest-benchmark load the run that its table shows beside this one.

    That is the newest file of the baseline, or the one named: among the baselines, else among pytest-benchmark's own.
    """
    own = benchmarks.storage
    stored = _Stored(folder, benchmarks.logger) if folder.is_dir() else None  # type: ignore[no-untyped-call]
    if compare is True and baseline is not None:
        benchmarks.compare, benchmarks.storage = baseline.paths[-1].stem, stored
    elif compare is True:
        return
    else:
        benchmarks.compare = compare
        benchmarks.storage = stored if stored is not None and stored.query(compare) else own  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # Two machine descriptions in full on one line; what can matter is in the key.
        warnings.filterwarnings("ignore", "Benchmark machine_info is different")
        benchmarks.handle_loading()
    benchmarks.storage = own


def _open(key: Key, folder: Path, option: argparse.Namespace) -> Gate:
    try:
        baseline = store.find(folder, key)
    except ValueError as e:
        pytest.exit(f"a baseline cannot be read: {e}", returncode=1)
    flags = (option.nsa_recording, option.nsa_accept_regression, option.nsa_strict)
    return Gate(key, baseline, *flags, "--nsa-full is everything, the gate is for core" if option.nsa_full else None)


def compared_with(config: pytest.Config) -> list[Path]:
    """The files that this run is gated against or shown beside, oldest first; none if there are none."""
    gate = config.stash.get(gate_key, None)
    return [] if gate is None or gate.baseline is None else gate.baseline.paths


def gated_again(config: pytest.Config) -> str:
    """The options by which another run is gated as this one, for a command line; empty if it was not gated."""
    compare, option = config.stash.get(_compare_key, None), config.option
    if not compare:
        return ""
    words = ["--benchmark-compare" if compare is True else f"--benchmark-compare={compare}"]
    words += ["--nsa-strict"] if option.nsa_strict else []
    words += [] if option.benchmark_storage == UPSTREAM_STORAGE else [f"{STORAGE}={option.benchmark_storage}"]
    return f" {shlex.join(words)}"


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


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """`--nsa-strict`: a run that gated nothing ends red. After all else: what was measured is still written."""
    yield
    gate, option = session.config.stash.get(gate_key, None), session.config.option
    excused = gate is None or gate.recording or option.collectonly or session.exitstatus != pytest.ExitCode.OK
    if gate is not None and gate.strict and not gate.on and not excused:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """After all other tables and pytest's list of failures: the verdict is the last thing on the screen."""
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
