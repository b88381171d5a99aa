"""Is a benchmark slower than its baseline? Verdicts from ratios, and the tables that tell them. Pure functions.

A *ratio* is a benchmark's time over that of its control, the plain-torch call that would be made in its place, sampled
in turn in one process. Milliseconds orient; ratios decide.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LIMIT = 0.10  # worse than this is a regression
NOISY = 0.05  # a spread above this cannot resolve LIMIT
MOVED = 0.05  # a machine that differs by less than this is the same machine
TOGETHER = 0.8  # share of the controls that moved the same way, for "this machine is slower"


@dataclass(frozen=True)
class Figures:
    """One benchmark of one run: ratio to its control, and the raw medians, seconds."""

    ratio: float | None
    median: float
    control: float | None
    by: str | None = None  # the control's name
    beside: Mapping[str, float] = field(default_factory=dict)  # medians of all that were timed beside it

    @classmethod
    def of(cls, info: Mapping[str, Any], median: float) -> Figures:
        """From what a perf test publishes, or a file's `extra_info`."""
        ratio = info.get("gate_ratio", info.get("ratio_to_control"))
        return cls(ratio, median, info.get("control_median"), info.get("control"), info.get("medians") or {})

    def over(self, control: str | None) -> Figures:
        """The same with this control: the fastest comparator may be another one today. No ratio if it was not timed."""
        if control is None or self.by is None or control == self.by:
            return self
        seconds = self.beside.get(control)
        return replace(self, ratio=self.median / seconds if seconds else None, control=seconds, by=control)


@dataclass(frozen=True)
class Stored:
    """One benchmark of a baseline: medians over its files, and the spread of the ratio, (max - min) / median."""

    ratio: float | None
    median: float
    control: float | None
    spread: float
    files: int
    by: str | None = None  # the control's name

    @classmethod
    def of(cls, runs: Sequence[Figures]) -> Stored:
        """From the same benchmark in each file, over one control: that of the first."""
        by = next((run.by for run in runs if run.by), None)
        runs = [run.over(by) for run in runs]
        ratios = [run.ratio for run in runs if run.ratio]
        controls = [run.control for run in runs if run.control]
        ratio = statistics.median(ratios) if ratios else None
        return cls(
            ratio=ratio,
            median=statistics.median(run.median for run in runs),
            control=statistics.median(controls) if controls else None,
            spread=(max(ratios) - min(ratios)) / ratio if ratio else 0.0,
            files=len(runs),
            by=by,
        )


def pooled(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same, each spread at least the median of its test function's.

    Three recordings tell one benchmark's spread badly: on a machine where ratios wander by 12%, one benchmark in ten
    shows under 5% by luck, and would fail by luck the other way.
    """
    spreads: dict[str, list[float]] = {}
    for name, old in stored.items():
        spreads.setdefault(_function(name), []).append(old.spread)
    return {
        name: replace(old, spread=max(old.spread, statistics.median(spreads[_function(name)])))
        for name, old in stored.items()
    }


def _function(name: str) -> str:
    return name.partition("[")[0]


@dataclass(frozen=True)
class Verdict:
    """kind: "pass", "FAIL", "AMBIGUOUS" or "cannot gate". again: the ratio when it was measured once more."""

    kind: str
    name: str
    old: Stored
    new: Figures
    again: float | None = None
    reason: str = ""

    @property
    def change(self) -> float | None:
        """Of the ratio, the smaller of both measurements; 0.15 is 15% worse."""
        if not self.old.ratio or not self.new.ratio:
            return None
        return min(r for r in (self.new.ratio, self.again) if r) / self.old.ratio - 1

    def __str__(self) -> str:
        again = "" if self.again is None else f", measured again {self.again:.4f}"
        change = "" if self.change is None else f" ({self.change:+.1%}, spread {self.old.spread:.1%})"
        return f"{_number(self.old.ratio)} -> {_number(self.new.ratio)} times its control{again}{change}"


def judge(name: str, old: Stored, new: Figures, again: Callable[[], float | None] | None = None) -> Verdict:
    """More than 10% worse, twice, is a FAIL beyond twice the stored spread and AMBIGUOUS within it.

    Nor does a ratio fail within what its control has moved by itself: that is plain torch of the same version, so the
    machine has changed, and then two kinds of work need not change alike.

    A spread above 5% cannot resolve 10%: the benchmark is listed as "cannot gate" as long as it is not AMBIGUOUS, and
    fails beyond twice its spread only.

    Args:
        again: measures once more and returns the ratio; called only if the first one is more than 10% worse.
    """
    timed, new = new.by, new.over(old.by)
    if not old.ratio or not new.ratio:
        where = "in the baseline" if not old.ratio else "in this run"
        reason = f"no control {where}" if timed == new.by else f"its control {old.by} was not timed, but {timed}"
        return Verdict("cannot gate", name, old, new, reason=reason)
    noisy = f"spread {old.spread:.1%}" if old.spread > NOISY else ""
    fine = "cannot gate" if noisy else "pass"
    if new.ratio <= old.ratio * (1 + LIMIT):
        return Verdict(fine, name, old, new, reason=noisy)
    second = again() if again is not None else None
    worse = min(new.ratio, second or new.ratio) / old.ratio - 1
    if worse <= LIMIT:
        return Verdict(fine, name, old, new, second, noisy)
    doubt = max(2 * old.spread, _moved(old.control, new.control))
    return Verdict("FAIL" if worse > doubt else "AMBIGUOUS", name, old, new, second, noisy)


def _moved(old: float | None, new: float | None) -> float:
    """By how much a control is faster or slower; 0.25 is a quarter more time, or a fifth less."""
    return max(new / old, old / new) - 1 if old and new else 0.0


def machine(verdicts: Iterable[Verdict]) -> str | None:
    """ "this machine is 40% slower", if the controls say so together; never a verdict."""
    moves = [v.new.control / v.old.control - 1 for v in verdicts if v.new.control and v.old.control]
    if not moves:
        return None
    typical = statistics.median(moves)
    same_way = sum(move * typical > 0 and abs(move) > abs(typical) / 3 for move in moves)
    if abs(typical) <= MOVED or same_way < TOGETHER * len(moves):
        return None
    slower = f"{typical:.0%} slower" if typical > 0 else f"{1 / (1 + typical) - 1:.0%} faster"
    return f"this machine is {slower} than when the baseline was recorded (median of {len(moves)} controls)"


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """Old and new, a name and a line of figures each."""
    lines = [
        f"{'verdict':12}{'old ratio':>10}{'new':>9}{'again':>9}{'change':>9}{'spread':>8}"
        f"{'old time':>12}{'new time':>12}{'control':>9}"
    ]
    for v in verdicts:
        moved = f"{v.new.control / v.old.control - 1:+.1%}" if v.new.control and v.old.control else "-"
        change = "-" if v.change is None else f"{v.change:+.1%}"
        again = "-" if v.again is None else _number(v.again)
        lines += [
            v.name,
            f"  {v.kind:10}{_number(v.old.ratio):>10}{_number(v.new.ratio):>9}{again:>9}{change:>9}"
            f"{v.old.spread:>8.1%}{_time(v.old.median):>12}{_time(v.new.median):>12}{moved:>9}",
        ]
    return lines


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.4f}"


def _time(seconds: float) -> str:
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= s or u == "us")
    return f"{seconds / scale:.4g} {unit}"
