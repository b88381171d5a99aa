"""The end of a run: verdicts on contestants, and how to repeat a failure.

A verdict says on how many cases a contestant is right, what a wrong one computes, and where one raised an exception. Of
equal failures of a contestant of `--nsa-impl` the screen shows the first.

A run that does not prove a contestant ends red: if the parity lane has fewer than `fit.ENOUGH` cases, if no test
exercised a promise, if nothing ran in a lane, or if a test has no result. So does a run that found a wrong result, even
if a plugin ran that test again and it passed.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch

from nsa.testing import replay
from nsa.testing.clock import honest
from nsa.testing.contestants import named, traces
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.fit import ENOUGH, promises
from nsa.testing.contestants.named import Wrong
from nsa.testing.judge.diagnosis import diagnose
from nsa.testing.machine import current_lane

WIDTH = 100
KINDS = 5  # kinds of failures of a contestant that are shown and counted; others are summed up
REPLAYED = 3  # commands that repeat a failure
MESSAGE = 20  # lines of a message; a compiler prints whole kernels
NAME = "nsa-verdicts"
UNKNOWN = "no known mistake fits"
LANES = ("parity", "edge")


Kinds = dict[str, str]
"""What failed in a case: the text that equal failures share, and what the first of them says."""


@dataclass
class Tally:
    """The results of one contestant in one lane, by case. A case counts once, even if several tests ran on it."""

    right: set[str] = field(default_factory=set)
    wrong: dict[str, Kinds] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # the reason for each case
    exercised: set[str] = field(default_factory=set)  # keys of `fit.promises`


class Verdicts:
    """A plugin of one session: gathers reports, also from xdist's workers, and prints the verdicts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.known: dict[str, list[str]] = {}  # findings of this process so far, by contestant
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.whole = True  # False if tests were selected by id
        self.failed: dict[str, Kinds] = {}  # by the ids of tests that failed in this process
        self.expected: dict[str, None] = {}  # ids of the tests of this run, in order
        self.told: set[str] = set()  # ids of tests with a result
        self.spoiled: set[str] = set()  # ids of tests that also ended without a result

    @property
    def specs(self) -> list[str]:
        """The values of `--nsa-impl`, each once."""
        return list(dict.fromkeys(self.config.getoption("nsa_impl")))

    # --- in the process that runs a test -----------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expected.update(dict.fromkeys(item.nodeid for item in session.items))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around plugins that run a test again, and pytest's own for xfail
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        mark = item.get_closest_marker("contested")
        if mark is None or "promise" not in mark.kwargs or not hasattr(item, "callspec"):
            return report  # type: ignore[no-any-return]
        if report.when == "teardown" or (report.when == "setup" and report.outcome == "passed"):
            return report  # type: ignore[no-any-return]
        params = item.callspec.params
        case = "-".join(str(params[name]) for name in ("case", "twist", "page") if params.get(name) not in (None, ""))
        lane = next((lane for lane in (*LANES, "perf") if item.get_closest_marker(lane)), "")
        error = None if call.excinfo is None else _first(call.excinfo.value)
        if report.outcome != "failed":
            judged = lane in LANES  # the suite itself skips benchmarks, and a slow one may be fast in the next run
            hidden = (
                error is not None and report.when == "call" and not _unsupported(error, item)
                and (judged or bool(traces.of(error)))
            )  # fmt: skip
            if hidden or (judged and item.nodeid in self.failed):
                report.outcome, report.longrepr = "failed", "failed before this run of the test"
                report.__dict__.pop("wasxfail", None)
        kinds = self.failed.get(item.nodeid, {})
        if self.specs and report.outcome == "passed" and (patch := honest.patched()):
            said = f"{params['contestant']} patched {patch}"
            report.outcome, report.longrepr = "failed", said
            kinds = self.failed[item.nodeid] = {said: said}
        if report.outcome == "failed" and error is not None:
            kinds = self.failed[item.nodeid] = self._kinds(error, params["contestant"], params["case"])
            if self.specs:
                report.longrepr = _text(error, kinds) or report.longrepr
            elif isinstance(error, Wrong):
                report.sections.append(("diagnosis", "; ".join(kinds.values())))
        reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
        exercised = [mark.kwargs["promise"] or str(params.get("wanted", "O"))]
        exercised += ["cu_seqlens"] * ("-seqs" in case) + ["q_positions"] * ("-positions" in case)
        # The gate's verdict: the result is right. An xfail is a subclass of pytest's exception for it.
        slower = lane == "perf" and type(error) is pytest.fail.Exception
        outcome = "passed" if slower else report.outcome
        report.user_properties.append(
            ("nsa_contest", [params["contestant"], lane, case, outcome, kinds, reason, exercised])
        )
        return report  # type: ignore[no-any-return]

    def _kinds(self, error: BaseException, spec: str, case: str) -> Kinds:
        """What failed: the findings of a wrong result, or the exception and its line in the contestant's code."""
        diagnoses = self._diagnosed(error, spec) if isinstance(error, Wrong) else []
        if diagnoses:
            return {text: text for text in diagnoses}
        place = traces.place(error)
        if place is not None:
            raised = f"{type(error).__name__} at {place}"
            return {raised: f"{raised}: {traces.said(error)}"}
        said = re.sub(rf"{re.escape(spec)}( on {re.escape(case)}( \[.*?\])?)?: ", "", traces.said(error))
        said = said.replace(case, "a case")
        if isinstance(error, Wrong) and error.result is not None:
            return {UNKNOWN: f"{UNKNOWN}: {said}"}
        kind = re.split(r"; the first at |: (?:got )?\[", said)[0]  # without places and lists of blocks
        return {re.sub(r"\d[\d.]*(e[+-]\d+)?|\binf\b", "#", kind): said}

    def _diagnosed(self, error: Wrong, spec: str) -> list[str]:
        if error.result is None or error.oracle is None:
            return []
        known = self.known.setdefault(spec, [])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with small tensors on a busy machine, two threads take thirty times as long as one
        try:
            diagnoses = diagnose(error.result, error.oracle, known)
        finally:
            torch.set_num_threads(threads)
        known += [text for text in diagnoses if text not in known]
        return diagnoses

    # --- in the process that reports ---------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expected.update(dict.fromkeys(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts_of = [facts for name, facts in report.user_properties if name == "nsa_contest"]
        if facts_of:
            self.told.add(report.nodeid)
        elif report.outcome not in ("passed", "skipped"):  # of a worker that died, or of a teardown
            self.spoiled.add(report.nodeid)
        for facts in facts_of:
            told: Any = facts
            spec, lane, case, outcome, kinds, reason, exercised = told
            tally = self.tallies.setdefault((str(spec), str(lane)), Tally())
            if outcome == "skipped":
                tally.skipped.setdefault(case, reason)
                continue
            tally.exercised.update(exercised)
            if outcome == "passed":
                tally.right.add(case)
            else:
                tally.wrong[case] = tally.wrong.get(case, {}) | kinds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        # A run of tests by id, such as a replay command, does not have to prove a contestant.
        self.whole = not any("::" in str(word) for word in self.config.args)
        said = "\n".join(self._verdicts())
        green = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if green and (": not proved" in said or ": WRONG" in said):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around all others, the gate's included: verdicts come last
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> Iterator[None]:
        stats = terminalreporter.stats
        everything: dict[str, list[Any]] = {name: stats[name] for name in ("failed", "error") if name in stats}
        failures = [report for reports in everything.values() for report in reports]
        shown = self._first_of_each_kind(failures)
        if self.specs and not self.config.option.verbose > 0:
            stats.update({name: [x for x in reports if x in shown] for name, reports in everything.items()})
        try:
            return (yield)
        finally:
            hidden = len(failures) - sum(len(stats.get(name, ())) for name in everything)
            stats.update(everything)
            self._conclude(terminalreporter, hidden, shown)
            if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (self.config.option.keyword or self.specs):
                word = self.config.option.keyword
                why = f"no test matches -k {word!r}" if word else "expected -m parity, which has tests of every kernel"
                why += "; a test has no cases if the contract takes none of them" if word and self.specs else ""
                terminalreporter.write_line(f"nothing ran: {why}")

    def _first_of_each_kind(self, reports: list[Any]) -> list[Any]:
        """The first report of each kind of failure of a contestant, at most `KINDS`, and all other reports."""
        first: dict[Any, Any] = {}
        for report in reports:
            facts = dict(getattr(report, "user_properties", ())).get("nsa_contest")
            first.setdefault((facts[0], *facts[4]) if facts else id(report), report)
        kinds = [key for key in first if isinstance(key, tuple)]
        return [report for key, report in first.items() if key not in kinds[KINDS:]]

    def _conclude(self, reporter: pytest.TerminalReporter, hidden: int, failures: list[Any]) -> None:
        if self.config.option.collectonly:
            return
        verdicts = self._verdicts()
        if verdicts:
            reporter.section("contestants")
        for line in verdicts + [f"{hidden} more failures of these kinds: -v shows them"] * bool(hidden):
            for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False):
                reporter.write_line(part)
        commands = replay.commands(self.config, failures)[:REPLAYED]
        if commands:
            reporter.section("replay one failure")
        for line in commands:
            reporter.write_line(line)

    def _verdicts(self) -> list[str]:
        if not self.specs:  # our own kernels: only wrong results are printed
            wrong = {key: tally for key, tally in self.tallies.items() if tally.wrong}
            return [line for (spec, lane), tally in wrong.items() for line in _wrong(f"{spec}, {lane}", tally)]
        lines = []
        for spec in self.specs:
            mine = {lane: self.tallies[spec, lane] for lane in (*LANES, "perf") if (spec, lane) in self.tallies}
            lines += [line for lane, tally in mine.items() for line in self._of_lane(named.load(spec), lane, tally)]
            lines += [] if any(tally.wrong for tally in mine.values()) else self._lost(spec)
        return lines

    def _lost(self, spec: str) -> list[str]:
        """A line if tests of a contestant have no result, as after a crash of the process that ran them."""
        begins = f"[{spec}-".encode("unicode_escape").decode()  # as pytest escapes ids
        lost = [name for name in self.expected if begins in name and (name not in self.told or name in self.spoiled)]
        count = f"{len(lost)} test{'s' * (len(lost) != 1)} ended"
        return [f"{spec}: not proved: {count} without a result, the first is {lost[0]}"] if lost else []

    def _of_lane(self, impl: Contestant, lane: str, tally: Tally) -> list[str]:
        assert impl.contract is not None
        head = f"{impl.name}, {lane}"
        right = tally.right - tally.wrong.keys()
        lines = []
        if tally.wrong:
            lines = _wrong(head, tally)
        elif lane == "perf":  # its figures are in the tables
            return []
        else:
            missing = impl.contract.not_promised()
            apart = f"; does not promise: {'; '.join(missing)}" if missing else ""
            lines.append(f"{head}: right on {_cases(len(right))}{apart}")
        if tally.skipped:
            reasons = Counter(reason.replace(f"{case}: ", "") for case, reason in tally.skipped.items())
            reason, _ = reasons.most_common(1)[0]
            count = len(tally.skipped.keys() - tally.right)
            lines += [f"  {_cases(count)} not run: {reason.removeprefix('Skipped: ')}"] if count else []
        if self.whole and not tally.wrong and "bf16" in impl.contract.dtypes and not any("-bf16" in x for x in right):
            why = "" if current_lane() == "gpu" else ": that takes a GPU"
            lines.append(f"  bf16 is promised, and was not tested{why}")
        return lines + [f"{head}: not proved: {text}" for text in self._unproved(impl, lane, tally, len(right))]

    def _unproved(self, impl: Contestant, lane: str, tally: Tally, right: int) -> list[str]:
        assert impl.contract is not None
        if tally.wrong or not self.whole:
            return []
        if lane != "parity":
            return [] if right else ["no test ran to its end"]
        wanted = promises(impl.contract)
        lines = [f"{right} distinct cases, {ENOUGH} are needed"] if right < ENOUGH else []
        missing = [text for key, text in wanted.items() if key not in tally.exercised]
        return lines + [f"{text}: promised, and no test of this run asked for it" for text in missing]


def _first(error: BaseException) -> BaseException:
    """The error itself; the first of a group, as a Hypothesis test raises it; or what an interpreted kernel raised."""
    inner = getattr(error, "exceptions", None) or [error.__cause__] * (type(error).__name__ == "InterpreterError")
    return error if not inner or inner[0] is None else _first(inner[0])


def _text(error: BaseException, kinds: Kinds) -> str:
    """What a failing test of a contestant prints: nothing of the suite. Empty if the suite itself raised the error."""
    if isinstance(error, Wrong):
        lines = [str(error), *(UNKNOWN if key == UNKNOWN else text for key, text in kinds.items())]
    elif traces.of(error):
        lines = traces.text(error).splitlines()
        if isinstance(error, pytest.skip.Exception | pytest.xfail.Exception):
            lines.insert(0, f"expected a result, got {type(error).__name__}: {error}")
    else:
        lines = str(error).splitlines() if isinstance(error, AssertionError | pytest.fail.Exception) else []
    if len(lines) > MESSAGE:
        lines[MESSAGE // 2 : -MESSAGE // 2] = ["..."]
    return "\n".join(lines)


def _unsupported(error: BaseException, item: pytest.Item) -> bool:
    """Whether a test was skipped because of a `NotImplementedError` from a kernel whose contract was not declared."""
    impl: Contestant = item.funcargs["contestant"]  # type: ignore[attr-defined]
    refused = isinstance(error, pytest.skip.Exception) and isinstance(error.__cause__, NotImplementedError)
    return refused and not impl.declared


def _wrong(head: str, tally: Tally) -> list[str]:
    count = len(tally.right | tally.wrong.keys())
    return [f"{head}: WRONG on {len(tally.wrong)} of {_cases(count)}", *(f"  {x}" for x in _diagnosis(tally.wrong))]


def _cases(count: int) -> str:
    return f"{count} case{'s' * (count != 1)}"


def _diagnosis(wrong: dict[str, Kinds]) -> list[str]:
    """A few kinds that explain the wrong cases, the most common first, each with the number of cases it explains."""
    left, lines = dict(wrong), list[str]()
    while any(left.values()) and len(lines) < KINDS:
        best, count = Counter(key for kinds in left.values() for key in kinds).most_common(1)[0]
        shown = next(kinds[best] for kinds in left.values() if best in kinds)
        lines.append(f"{shown} ({_cases(count)})")
        left = {case: kinds for case, kinds in left.items() if best not in kinds}
    return lines + [f"{_cases(len(left))} failed in other ways"] * bool(left)


def _without_exits() -> Callable[[], None]:
    """Let `os._exit` raise in this process, which would otherwise end with status 0 and without a verdict.

    Returns what puts it back. A function that was kept, as by `atexit`, raises nevertheless.
    """
    real, here = os._exit, os.getpid()

    def raises(status: int) -> NoReturn:
        if os.getpid() != here:  # a fork of this process
            real(status)
        raise RuntimeError(f"os._exit({status}) was called, which ends a process without a verdict")

    def put(function: Callable[[int], NoReturn]) -> None:
        for name in ("os", os.name):  # `os` has it from `posix`
            vars(sys.modules[name])["_exit"] = function

    put(raises)
    return lambda: put(real)


def pytest_configure(config: pytest.Config) -> None:
    """Load the contestants before tests are collected, so that a wrong name or signature ends the run at once."""
    if config.getoption("nsa_impl") and not hasattr(config, "workerinput"):
        config.add_cleanup(_without_exits())  # a worker that dies is noticed by xdist
    try:
        for spec in dict.fromkeys(config.getoption("nsa_impl")):
            named.load(spec)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Verdicts(config), NAME)
