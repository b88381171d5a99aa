"""`sel_triton_min_L`: the number of keys from which on Triton serves a call, decided from measurements.

The threshold is the smallest L from which on Triton is at least `MARGIN` times as fast as the path it replaces, in
every head count, dim and distribution. That path is packed SDPA with its packing. So only cases that read from a cache
count. Packed rows (core's `few`) do not, because calls with packed rows are not routed; here `few` is one span of a
cache. A point reaches the margin if the lower end of its 95% interval does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nsa import gpu
from nsa.testing.matrix.case import Case
from nsa.testing.report.recording import Fact, geomean, speedup
from nsa.tuning.files import provenance, write_section

MARGIN = 1.2
REPLACED = "sdpa"  # the path that Triton replaces, by its name in `ours.OURS`
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
DISTS = ("few", "many", "mixed")
SQUARE = ((64, 64), (128, 128))
DIMS = (*SQUARE, (64, 128), (128, 64))
Key = tuple[int, int, int, str]  # H, D, Dv, dist


def cases(dims: Iterable[tuple[int, int]] = DIMS, rows: Iterable[int] = (64, 1024)) -> list[Case]:
    """The cases to time for a threshold: each head count, dim, distribution and length, from a cache, in bf16."""
    return [
        Case(H, D, Dv, L, N, dist, "bf16", source="ranges")
        for N in rows for D, Dv in dims for H in (4, 8) for dist in DISTS for L in LENGTHS
    ]  # fmt: skip


def required(dims: Iterable[tuple[int, int]] = DIMS) -> list[Key]:
    """The groups that a threshold needs."""
    return [(H, D, Dv, dist) for dist in DISTS for H in (4, 8) for D, Dv in dims]


@dataclass(frozen=True)
class Point:
    """One measured speedup, and its 95% interval; `low` and `high` are None if the recording holds no interval."""

    key: Key
    L: int
    case: str
    speedup: float
    low: float | None
    high: float | None

    @property
    def clears(self) -> bool:
        """Whether the whole interval lies at or above the margin; False without an interval."""
        return self.low is not None and self.low >= MARGIN

    def __str__(self) -> str:
        interval = "interval not recorded" if self.low is None else f"[{self.low:.2f}, {self.high:.2f}]"
        return f"{self.speedup:.2f}x {interval} in {self.case}"


@dataclass(frozen=True)
class Decision:
    """A threshold, and the measurements behind it.

    min_L: the threshold; None means that Triton stays off. groups: for each (H, D, Dv, dist) the smallest L from which
    on all points clear the margin. missing: needed groups that were not measured; such a decision is not written.
    worst: the slowest point at or above min_L. blocker: the point that keeps min_L from being lower.
    """

    min_L: int | None
    groups: dict[Key, int | None]
    points: list[Point]
    missing: list[Key]
    worst: Point | None
    blocker: Point | None


def shown(min_L: int | None) -> str:
    """A threshold as users read it."""
    return "off" if min_L is None else str(min_L)


def points(facts: Iterable[Fact], against: str) -> list[Point]:
    """Speedups of our kernels from a cache, over comparator `against`, or over the fastest packed SDPA for "best"."""
    made = []
    for fact in facts:
        if fact.get("impl") not in ("ranges", "blocks") or fact.get("source") != fact["impl"]:
            continue
        ratio = speedup(fact, fact.get("sdpa_best") if against == "best" else against)
        if ratio is not None:
            key = (fact["H"], fact["D"], fact["Dv"], fact["dist"])
            made.append(Point(key, fact["L"], fact["case"], *ratio))
    return made


def decide(facts: Iterable[Fact], *, needed: Iterable[Key] | None = None, against: str = REPLACED) -> Decision:
    """Apply the rule. needed: the groups that have to be measured, by default `required()`.

    Only an L at which every needed group was measured can become the threshold. Decode steps are not needed, but if one
    fails at some L, the threshold is above that L.
    """
    known = points(facts, against)
    needed = list(required() if needed is None else needed)
    measured: dict[Key, set[int]] = {}
    for point in known:
        measured.setdefault(point.key, set()).add(point.L)
    groups = {key: _from(lengths, [p for p in known if p.key == key]) for key, lengths in measured.items()}
    present = [key for key in needed if key in measured]
    # Without any needed group (decode alone), the others decide. Such a decision is incomplete.
    sets = [measured[key] for key in present or measured]
    candidates = set.intersection(*sets) if sets else set()
    min_L = _from(candidates, known)
    failing = [p for p in known if not p.clears]
    counted = [p for p in known if min_L is not None and min_L <= p.L]
    return Decision(
        min_L=min_L,
        groups=groups,
        points=known,
        missing=[key for key in needed if key not in measured],
        worst=min(counted, key=lambda p: p.speedup, default=None),
        blocker=max(failing, key=lambda p: (p.L, -p.speedup), default=None),
    )


def _from(lengths: Iterable[int], among: list[Point]) -> int | None:
    """The smallest of `lengths` at and above which every point clears the margin."""
    failing = [p.L for p in among if not p.clears]
    return min((L for L in lengths if L > max(failing, default=-1)), default=None)


def best_layout(facts: Iterable[Fact]) -> str | None:
    """The packed SDPA layout with the smallest geometric mean of times over all shapes, with and without a mask.

    None unless both were measured. A layout must run all shapes.
    """
    tables = [fact for fact in facts if fact.get("layouts")]
    if {bool(fact["masked"]) for fact in tables} != {False, True}:
        return None
    able = [name for name in gpu.SDPA_LAYOUTS if all(name in fact["layouts"] for fact in tables)]
    return min(able, key=lambda name: geomean(fact["layouts"][name] for fact in tables) or 0, default=None)


def rationale(decision: Decision, on_packed: Decision | None = None) -> list[str]:
    """Sentences: the threshold, why it is not lower, and the comparison on packed rows."""
    if not decision.points:
        return [
            "No benchmark here times a Triton kernel beside packed SDPA with its packing.",
            "`pytest -m perf --nsa-update-thresholds` measures the threshold, and so does `python -m nsa calibrate`.",
        ]
    margin, replaced = f"{MARGIN:g}x", "packed SDPA with its packing"
    part = f", in the {len(decision.groups)} combinations of heads, dims and distribution measured here"
    scope = part if decision.missing else ""
    if all(p.low is None for p in decision.points):
        first = (
            f"No threshold can be decided: the recording holds no confidence interval for packed SDPA, "
            f"and without an interval a point does not count as reaching the margin ({len(decision.points)} points)."
        )
    elif decision.min_L is None:
        first = f"Triton stays off: there is no L from which on it is {margin} as fast as {replaced}{scope}."
    else:
        first = (
            f"From L = {decision.min_L} on, Triton is at least {margin} as fast as {replaced}, "
            f"also at the lower end of each 95% interval{scope}."
        )
    slowest = decision.worst or min(decision.points, key=lambda p: p.speedup)
    if decision.min_L is not None and decision.blocker is not None:
        second = f"It is not lower because of {decision.blocker}; from there on the slowest is {slowest}."
    elif decision.min_L is not None:
        second = f"Shorter rows were not measured in every combination; the slowest point is {slowest}."
    else:
        second = f"The longest row that misses the margin is {decision.blocker}; the slowest point is {slowest}."
    return [first, second, _packed_sentence(on_packed)]


def _packed_sentence(on_packed: Decision | None) -> str:
    if on_packed is None or not on_packed.points:
        return "The best SDPA call on rows already packed was not timed."
    ratios = [p.speedup for p in on_packed.points]
    start = "from no L on" if on_packed.min_L is None else f"from L = {on_packed.min_L} on"
    return (
        f"Compared with the best SDPA call on rows already packed, Triton reading spans from a cache is "
        f"{MARGIN:g}x as fast {start} (geomean {geomean(ratios):.2f}x, worst {min(ratios):.2f}x)."
    )


def write(decision: Decision, layout: str | None, facts: Fact, folder: Path) -> Path:
    """Write the section `threshold` of the GPU of `facts`, and reload the settings.

    Raises:
        ValueError: the decision is incomplete, or intervals are missing; or as `files.write_section`.
        OSError: the folder cannot be written.
    """
    if reason := incomplete(decision):
        raise ValueError(f"thresholds not written: {reason}")
    slowest = decision.worst or decision.blocker
    margin = f"{MARGIN:g}x packed SDPA with its packing, 95% interval included; slowest: {slowest}"
    content = {
        "sel_triton_min_L": decision.min_L,
        "sdpa_layout": layout,
        "provenance": provenance(facts, margin=margin),
    }
    comments = [
        "Measured, not written by hand: `pytest -m perf --nsa-update-thresholds`, or `python -m nsa calibrate`.",
        f"Smallest L from which on Triton is {MARGIN:g}x packed SDPA with its packing:",
        *(f"  {_name(key)}: {'never' if L is None else L}" for key, L in sorted(decision.groups.items(), key=str)),
    ]
    return write_section(folder, str(facts["gpu"]), "threshold", content, comments)


def incomplete(decision: Decision) -> str:
    """Why a decision may not be written; empty if it may."""
    if not decision.points:
        return "nothing was measured from the cache"
    if decision.missing:
        names = ", ".join(_name(key) for key in decision.missing[:3])
        return f"{len(decision.missing)} combinations were not measured ({names}{', …' * (len(decision.missing) > 3)})"
    return "some comparators have no confidence interval" if any(p.low is None for p in decision.points) else ""


def _name(key: Key) -> str:
    H, D, Dv, dist = key
    return f"H{H}-D{D}-Dv{Dv}-{dist}"
