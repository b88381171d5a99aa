"""The verdicts on the contestants of `--nsa-impl`: on how many cases each is right, and what a wrong one computes.

A run that does not prove a contestant ends red: if the parity lane has fewer than `fit.ENOUGH` cases, if no test
exercised a promise, if nothing ran in a lane, or if a test has no result. So does a run that found a wrong result, even
if a plugin ran that test again and it passed.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nsa.testing.contestants import named
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.fit import ENOUGH, promises
from nsa.testing.contestants.named import Wrong
from nsa.testing.judge.diagnosis import diagnose

WIDTH = 100
NAME = "nsa-verdicts"
LANES = ("parity", "edge")


@dataclass
class Tally:
    """The results of one contestant in one lane, by case. A case counts once, even if several tests ran on it."""

    right: set[str] = field(default_factory=set)
    wrong: dict[str, list[str] | None] = field(default_factory=dict)  # findings of each case; None: not diagnosed
    skipped: dict[str, str] = field(default_factory=dict)  # the reason for each case
    exercised: set[str] = field(default_factory=set)  # keys of `fit.promises`


class Verdicts:
    """A plugin of one session: gathers reports, also from xdist's workers, and prints the verdicts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.known: list[str] = []  # findings of this process so far
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.whole = True  # False if tests were selected by id
        self.failed: dict[str, list[str] | None] = {}  # ids of tests that failed in this process, and the findings
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
        if mark is None or not hasattr(item, "callspec"):
            return report  # type: ignore[no-any-return]
        if report.when == "teardown" or (report.when == "setup" and report.outcome == "passed"):
            return report  # type: ignore[no-any-return]
        params = item.callspec.params
        case = "-".join(str(params[name]) for name in ("case", "twist", "page") if params.get(name) not in (None, ""))
        lane = next((lane for lane in (*LANES, "perf") if item.get_closest_marker(lane)), "")
        error = None if call.excinfo is None else call.excinfo.value
        if report.outcome != "failed" and lane in LANES:
            hidden = report.when == "call" and error is not None and not _unsupported(error, item)
            if hidden or item.nodeid in self.failed:
                said = f"expected a result, got {type(error).__name__}: {error}"
                report.outcome, report.longrepr = "failed", said if hidden else "failed before this run of the test"
                report.__dict__.pop("wasxfail", None)
        diagnoses = self.failed.get(item.nodeid)
        if isinstance(error, Wrong):
            diagnoses = self._diagnosed(error)
            said = "; ".join(diagnoses) if diagnoses else "no known mistake fits"
            if self.specs:  # a traceback through the suite does not help the kernel's author
                report.longrepr = f"{error}\n{said}"
            else:
                report.sections.append(("diagnosis", said))
        elif isinstance(error, AssertionError) and report.outcome == "failed" and self.specs:
            report.longrepr = str(error)
        if report.outcome == "failed":
            self.failed[item.nodeid] = diagnoses
        reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
        exercised = [mark.kwargs["promise"] or str(params.get("wanted", "O"))]
        exercised += ["cu_seqlens"] * ("-seqs" in case) + ["q_positions"] * ("-positions" in case)
        report.user_properties.append(
            ("nsa_contest", [params["contestant"], lane, case, report.outcome, diagnoses, reason, exercised])
        )
        return report  # type: ignore[no-any-return]

    def _diagnosed(self, error: Wrong) -> list[str]:
        if error.result is None or error.oracle is None:
            return []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with small tensors on a busy machine, two threads take thirty times as long as one
        try:
            diagnoses = diagnose(error.result, error.oracle, self.known)
        finally:
            torch.set_num_threads(threads)
        self.known += [text for text in diagnoses if text not in self.known]
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
            spec, lane, case, outcome, diagnoses, reason, exercised = told
            tally = self.tallies.setdefault((str(spec), str(lane)), Tally())
            if outcome == "skipped":
                tally.skipped.setdefault(case, reason)
                continue
            tally.exercised.update(exercised)
            if outcome == "passed":
                tally.right.add(case)
            elif diagnoses is None:
                tally.wrong.setdefault(case, None)
            else:
                tally.wrong[case] = [*(tally.wrong.get(case) or []), *diagnoses]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        # A run of tests by id, such as a replay command, does not have to prove a contestant.
        self.whole = not any("::" in str(word) for word in self.config.args)
        said = "\n".join(line for _, lines in self._verdicts() for line in lines)
        green = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if green and (": not proved" in said or ": WRONG" in said):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)  # below the replay commands
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        verdicts = self._verdicts()
        if not verdicts or self.config.option.collectonly:
            return
        terminalreporter.section("contestants")
        for _, lines in verdicts:
            for line in lines:
                for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False):
                    terminalreporter.write_line(part)

    def _verdicts(self) -> list[tuple[str, list[str]]]:
        lines: list[tuple[str, list[str]]] = []
        if not self.specs:  # our own kernels: only wrong results are printed
            wrong = {key: tally for key, tally in self.tallies.items() if tally.wrong}
            return [(spec, _wrong(f"{spec}, {lane}", tally)) for (spec, lane), tally in wrong.items()]
        for spec in self.specs:
            mine = {lane: self.tallies[spec, lane] for lane in LANES if (spec, lane) in self.tallies}
            said = [line for lane, tally in mine.items() for line in self._of_lane(named.load(spec), lane, tally)]
            said += [] if any(tally.wrong for tally in mine.values()) else self._lost(spec)
            if said:
                lines.append((spec, said))
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
        else:
            missing = impl.contract.not_promised()
            apart = f"; does not promise: {'; '.join(missing)}" if missing else ""
            lines.append(f"{head}: right on {_cases(len(right))}{apart}")
        if tally.skipped:
            reason, _ = Counter(tally.skipped.values()).most_common(1)[0]
            count = len(tally.skipped.keys() - tally.right)
            lines += [f"  {_cases(count)} not run: {reason.removeprefix('Skipped: ')}"] if count else []
        return lines + [f"{head}: not proved: {text}" for text in self._unproved(impl, lane, tally, len(right))]

    def _unproved(self, impl: Contestant, lane: str, tally: Tally, right: int) -> list[str]:
        assert impl.contract is not None
        if tally.wrong or not self.whole:
            return []
        if lane == "edge":
            return [] if right else ["no test ran to its end"]
        wanted = promises(impl.contract)
        lines = [f"{right} distinct cases, {ENOUGH} are needed"] if right < ENOUGH else []
        missing = [text for key, text in wanted.items() if key not in tally.exercised]
        return lines + [f"{text}: promised, and no test of this run asked for it" for text in missing]


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


def _diagnosis(wrong: dict[str, list[str] | None]) -> list[str]:
    """A few findings that explain the wrong cases, the most common first, each with the number of cases it explains."""
    left = {case: diagnoses for case, diagnoses in wrong.items() if diagnoses is not None}
    others, lines = len(wrong) - len(left), []
    while any(left.values()):
        counted = Counter(text for diagnoses in left.values() for text in dict.fromkeys(diagnoses))
        best, count = max(counted.items(), key=lambda pair: pair[1])
        lines.append(f"{best} (fits {_cases(count)})")
        left = {case: diagnoses for case, diagnoses in left.items() if best not in diagnoses}
    lines += [f"no known mistake fits {_cases(len(left))}"] * bool(left)
    return lines + [f"{_cases(others)} failed for another reason, see above"] * bool(others)


def pytest_configure(config: pytest.Config) -> None:
    """Load the contestants before tests are collected, so that a wrong name or signature ends the run at once."""
    try:
        for spec in dict.fromkeys(config.getoption("nsa_impl")):
            named.load(spec)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Verdicts(config), NAME)
