"""The texts of the gate: the verdicts of a run in words, at most 100 columns wide."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from nsa.testing.gate.rule import LIMIT, Change, Verdict, function
from nsa.testing.report.tables import seconds

WIDTH = 100
LEVEL = 0.03  # a smaller change counts as no change
MOVED = 0.05  # a machine is called slower or faster only if the median of its controls changed by more than this
TOGETHER = 0.8  # and only if at least this share of the controls changed in the same direction
KINDS = ("pass", "FAIL", "AMBIGUOUS", "cannot gate")


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Each benchmark that failed or is in doubt, with its change; then what could not be gated, by test function."""
    bad = sorted((v for v in verdicts if v.kind in ("FAIL", "AMBIGUOUS")), key=lambda v: v.kind != "FAIL")
    lines = []
    for v in bad:
        lines.append(f"{v.kind:<10} {v.name}")
        lines += wrapped(f"{seen(v)}{f'; {v.reason}' if v.reason else ''}", 11, 11)
    return lines + _ungated([v for v in verdicts if v.kind == "cannot gate"])


def counts(verdicts: Sequence[Verdict]) -> str:
    """The last line of the report: how many benchmarks got each verdict."""
    text = ", ".join(f"{sum(v.kind == kind for v in verdicts)} {kind}" for kind in KINDS)
    again = sum(v.kind == "pass" and v.again is not None for v in verdicts)
    return f"gate: {text}" + (f"; {again} passed when measured again" if again else "")


def narrowed(lines: Iterable[str]) -> list[str]:
    """The same lines, where each line wider than `WIDTH` is broken."""
    return [part for line in lines for part in (wrapped(line) if len(line) > WIDTH else [line])]


def wrapped(text: str, first: int = 0, others: int = 0) -> list[str]:
    """Lines of at most `WIDTH` columns. first, others: the indentation of the first line and of the others."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * first, subsequent_indent=" " * others, break_on_hyphens=False
    )


def seen(v: Verdict) -> str:
    """How the ratio of a benchmark and its time changed, and why, if the two seem to disagree.

    Figures are of the first measurement. Those of the second are added where they are smaller: the smaller decides.
    """
    times = f"{seconds(v.old.time, 4)} -> {seconds(v.new.time, 4)}"
    if v.change is None or v.old.ratio is None or v.new.ratio is None:
        return times
    slower = _more(v.change.ratio)
    ratios = f"{v.old.ratio:.4g} -> {v.old.ratio * (1 + v.change.ratio):.4g} times its time"
    if v.again is not None:
        ratios += f", measured again {v.old.ratio * (1 + v.again.ratio):.4g}"
        if v.again.ratio < v.change.ratio:
            slower += f", and {_more(v.again.ratio)} when measured again,"
    return f"{slower} beside its control {v.old.by} ({ratios}); {_agreement(v.change, v.again)}: {times}"


def _agreement(change: Change, again: Change | None) -> str:
    """How the benchmark's time changed, and its control's time if that explains why ratio and time differ."""
    if change.scaled:
        later = f", and {_changed(again.time)} when measured again" if again and again.time < change.time else ""
        return f"its time, scaled by the read ceilings of both runs, {_changed(change.time)}{later}"
    own = f"its time {_changed(change.time)}"
    if abs(change.time) <= LEVEL:
        own = "as long as before"
    if abs(change.control) <= LEVEL or abs(change.time - change.ratio) <= LEVEL:
        return own
    return f"{own}, while its control became {_more(change.control, 0)}"


def _more(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%} slower" if share > 0 else f"{1 / (1 + share) - 1:.{digits}%} faster"


def _changed(share: float) -> str:
    if abs(share) <= LEVEL:
        return "is as before"
    return f"is {share:.0%} longer" if share > 0 else f"is {-share:.0%} shorter"


def _ungated(verdicts: Sequence[Verdict]) -> list[str]:
    """One entry for each test function and reason: how many benchmarks, why, and which slowdown would be a FAIL."""
    groups: dict[tuple[str, bool, str], list[Verdict]] = {}
    for v in verdicts:
        noisy = v.resolution > LIMIT
        groups.setdefault((function(v.name), noisy, "" if noisy else v.reason), []).append(v)
    lines = []
    for (name, noisy, reason), group in groups.items():
        what = group[0].name if len(group) == 1 else f"{name}, {len(group)} benchmarks"
        if noisy:
            spreads = _range([max(v.old.spread, v.new.spread) for v in group])
            limits = _range([v.resolution for v in group])
            subject = "its ratio spreads" if len(group) == 1 else "their ratios spread"
            reason = f"{subject} by {spreads}, so only a slowdown of more than {limits} would be a FAIL"
        lines += wrapped(f"cannot gate {what}: {reason}", 0, 11)
    return lines


def _range(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


def machine(verdicts: Iterable[Verdict]) -> str | None:
    """A line such as "this machine is 40% slower", if most controls changed alike. The line is not a verdict."""
    moves = [v.change.control for v in verdicts if v.change is not None and not v.change.scaled]
    if not moves:
        return None
    typical = statistics.median(moves)
    same_way = sum(move * typical > 0 and abs(move) > abs(typical) / 3 for move in moves)
    if abs(typical) <= MOVED or same_way < TOGETHER * len(moves):
        return None
    than = "than when the baseline was recorded"
    return f"this machine is {_more(typical, 0)} {than} (median of {len(moves)} controls)"
