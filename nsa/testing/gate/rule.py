"""Is a benchmark slower than its baseline? Pure functions that make verdicts of samples.

Each benchmark is timed beside its *control*, the plain-torch call that would be made in its place. Both are sampled in
turn in one process. The time of each is the lower quartile of its samples, because a disturbance can only add time. The
*ratio* is the benchmark's time divided by its control's. A verdict FAIL makes
`nsa.testing.benchmarks` fail that benchmark's test.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nsa.testing.report.document import check_timing

LIMIT = 0.10  # a benchmark that is worse by more than this share is a regression


def quartile(samples: Sequence[float]) -> float:
    """The lower quartile of samples."""
    return statistics.quantiles(samples, method="inclusive")[0] if len(samples) > 1 else samples[0]


@dataclass(frozen=True)
class Reading:
    """One benchmark, timed in one process.

    time: lower quartile of its samples, seconds. controls: the same for each call that may be its control, by name.
    by: the name of its control. ceiling: the GPU's read rate in bytes per second, if the same process measured it.
    """

    time: float
    controls: Mapping[str, float] = field(default_factory=dict)
    by: str | None = None
    ceiling: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float], info: Mapping[str, Any]) -> Reading:
        """From a benchmark's samples (seconds) and its `extra_info`. Files of before 2026-11-24 hold no controls.

        Raises:
            ValueError: a number by which the gate would decide cannot be a measurement. The text names it.
        """
        check_timing(samples, info)
        time, by = quartile(samples), info.get("control")
        ceiling = info["ceiling_gbps"] * 1e9 if info.get("ceiling_gbps") else None
        controls = {name: quartile(theirs) for name, theirs in (info.get("control_samples") or {}).items()}
        return cls(time, controls, by, ceiling)

    def ratio(self, by: str | None) -> float | None:
        """The benchmark's time divided by that of the control `by`; None if `by` was not timed."""
        control = self.controls.get(by or "")
        return self.time / control if control else None


@dataclass(frozen=True)
class Side:
    """One benchmark, timed in several processes of a baseline or of this run.

    ratios: one for each process that timed the control `by`. ratio, time, control, ceiling: medians over the processes,
    times in seconds. spread: the range of the ratios divided by their median.
    """

    readings: tuple[Reading, ...]
    by: str | None
    spread: float

    @classmethod
    def of(cls, readings: Iterable[Reading], by: str | None = None) -> Side:
        """`by`: the control; by default, the control of the first reading that has one."""
        readings = tuple(readings)
        by = by or next((r.by for r in readings if r.by), None)
        ratios = [ratio for r in readings if (ratio := r.ratio(by))]
        spread = (max(ratios) - min(ratios)) / statistics.median(ratios) if ratios else 0.0
        return cls(readings, by, spread)

    @property
    def ratios(self) -> list[float]:
        return [ratio for r in self.readings if (ratio := r.ratio(self.by))]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def time(self) -> float:
        return statistics.median(r.time for r in self.readings)

    @property
    def control(self) -> float | None:
        values = [r.controls[self.by] for r in self.readings if self.by is not None and self.by in r.controls]
        return statistics.median(values) if values else None

    @property
    def ceiling(self) -> float | None:
        values = [r.ceiling for r in self.readings if r.ceiling]
        return statistics.median(values) if values else None


def pooled(sides: Mapping[str, Side]) -> dict[str, Side]:
    """The same sides, where each spread is at least the median spread of its test function.

    Three recordings are too few to estimate the spread of one benchmark. On a machine whose ratios vary by 12%, one
    benchmark in ten shows a spread under 5% by chance, and would later fail by chance.
    """
    spreads: dict[str, list[float]] = {}
    for name, side in sides.items():
        spreads.setdefault(function(name), []).append(side.spread)
    return {
        name: replace(side, spread=max(side.spread, statistics.median(spreads[function(name)])))
        for name, side in sides.items()
    }


def function(name: str) -> str:
    """The test function of a benchmark: `test_a` of `test_a[case]`."""
    return name.partition("[")[0]


@dataclass(frozen=True)
class Change:
    """How a benchmark changed, as shares: 0.15 means 15% more. If `scaled`, time is scaled by the read ceilings."""

    ratio: float
    time: float
    control: float
    scaled: bool = False

    @classmethod
    def of(cls, old: Side, new: Side, scaled: bool = False) -> Change:
        """Both sides must have a ratio over the same control, and if `scaled` also a ceiling."""
        assert old.ratio and new.ratio and old.control and new.control
        faster = new.ceiling / old.ceiling if scaled and new.ceiling and old.ceiling else 1.0
        return cls(new.ratio / old.ratio - 1, new.time / old.time * faster - 1, new.control / old.control - 1, scaled)

    def least(self, other: Change) -> Change:
        """The smaller of both changes, for ratio and for time."""
        return replace(self, ratio=min(self.ratio, other.ratio), time=min(self.time, other.time))


@dataclass(frozen=True)
class Best:
    """The lowest ratio that a benchmark ever had in a recording, to which control, and the commit of that recording."""

    ratio: float
    by: str
    commit: str

    @classmethod
    def of(cls, sides: Side, commit: str, stored: Mapping[str, Any] | None) -> Best | None:
        """The better one of a recording and of what it has stored of earlier ones, if both have the same control."""
        mine = Best(sides.ratio, sides.by, commit) if sides.ratio and sides.by else None
        earlier = Best(stored["ratio"], stored["by"], stored["commit"]) if stored else None
        if mine is None or earlier is None or earlier.by != mine.by:
            return mine
        return min(mine, earlier, key=lambda best: best.ratio)


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one benchmark.

    kind: "pass", "FAIL", "AMBIGUOUS" or "cannot gate". change: of the first measurement. again: of the second, if there
    was one. reason: why it is AMBIGUOUS, cannot be gated, or is a FAIL in small steps. resolution: a slowdown above
    this share would be a FAIL. drift: whether it is a FAIL because of many small steps.
    """

    kind: str
    name: str
    old: Side
    new: Side
    change: Change | None = None
    again: Change | None = None
    reason: str = ""
    resolution: float = LIMIT
    drift: bool = False


Again = Callable[[], "tuple[Side, Side]"]


def judge(
    name: str, old: Side, new: Side, again: Again | None = None, *, versions: bool = True, paired: bool = False,
    best: Best | None = None,
) -> Verdict:  # fmt: skip
    """A benchmark that is more than 10% worse in two measurements is a FAIL, or AMBIGUOUS if there is reason for doubt.

    One that passes beside its baseline is a FAIL, too, if two measurements are that much worse than its best ratio.

    Args:
        again: measures once more and returns the `(old, new)` to compare. Called only if the first measurement is more
            than 10% worse.
        versions: whether torch and Triton are those of the baseline. If not, the control is another program, and a FAIL
            takes a ratio and a time that are both worse.
        paired: whether old and new were measured on the same day, in processes that took turns.
        best: the best recording of the same versions.
    """
    if not old.ratio:
        return Verdict("cannot gate", name, old, new, reason="no control in the baseline")
    by, scaled = old.by, not versions
    used = replace(new, by=by)
    if not used.ratio:
        other = new.by not in (None, by)
        reason = f"its control {by} was not timed, but {new.by}" if other else "no control in this run"
        return Verdict("cannot gate", name, old, new, reason=reason)
    if scaled and not (old.ceiling and new.ceiling):
        reason = "other versions of torch or Triton, and without a measured memory rate times cannot be compared"
        return Verdict("cannot gate", name, old, used, Change.of(old, used), reason=reason)
    first = Change.of(old, used, scaled)
    spread = max(old.spread, used.spread) if paired else old.spread
    resolution = max(LIMIT, spread if paired else 2 * spread)
    not_worse, why = ("pass", "") if resolution == LIMIT else ("cannot gate", f"its ratio spreads by {spread:.1%}")
    comparable = best if versions and best is not None and best.by == by else None
    limit = comparable.ratio * (1 + resolution) if comparable is not None else float("inf")
    if not _worse(first) and used.ratio <= limit:
        return Verdict(not_worse, name, old, used, first, reason=why, resolution=resolution)
    second, both = None, first
    if again is not None:
        earlier, later = again()
        if earlier.ratio and (later := replace(later, by=by)).ratio:
            second = Change.of(earlier, later, scaled)
            both = first.least(second)
        if paired:
            old, used = (Side.of(a.readings + b.readings, by) for a, b in ((old, earlier), (used, later)))
    if not _worse(both):
        lowest = (old.ratio or 0.0) * (1 + both.ratio)
        if comparable is None or lowest <= limit:
            return Verdict(not_worse, name, old, used, first, second, why, resolution)
        text = f"{lowest / comparable.ratio - 1:.1%} slower than at {comparable.commit[:12]}, in small steps"
        return Verdict("FAIL", name, old, used, first, second, text, resolution, drift=True)
    doubt = _doubt(old, used, both, scaled, paired)
    return Verdict("AMBIGUOUS" if doubt else "FAIL", name, old, used, first, second, doubt, resolution)


def _worse(change: Change) -> bool:
    return change.ratio > LIMIT or (change.scaled and change.time > LIMIT)


def _doubt(old: Side, new: Side, seen: Change, scaled: bool, paired: bool) -> str:
    """Why a change seen twice may not be due to the kernel; empty if there is no such reason.

    If the control's time changed although its version of torch did not, then the machine changed. A machine may slow
    down two kinds of work by different amounts. Processes that take turns need no such rule: each process of the new
    side must be slower than each process of the old side.
    """
    if paired:
        slowest, fastest = max(old.ratios), min(new.ratios)
        if fastest > slowest:
            return ""
        return f"not in every process: highest ratio of the base {slowest:.4g}, lowest of this tree {fastest:.4g}"
    if scaled and not (seen.ratio > LIMIT and seen.time > LIMIT):
        return "only one of ratio and time is worse, and the versions of torch or Triton differ"
    if seen.ratio <= 2 * old.spread:
        return f"within twice the spread of {old.spread:.1%}"
    moved = 0.0 if scaled else max(1 + seen.control, 1 / (1 + seen.control)) - 1
    return f"no more than the control itself changed, {moved:.1%}" if seen.ratio <= moved else ""
