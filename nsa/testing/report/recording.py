"""Recordings: pytest-benchmark's JSON, read back as facts.

A *fact* is a dict for one benchmark: its `extra_info`, `group`, `name` and `median` (seconds). A running perf session
keeps the same facts, so that code which reads facts works on both.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.testing.matrix import m3, qsa
from nsa.testing.matrix.case import SOURCES
from nsa.testing.report.document import read

Fact = dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """One run of the perf lane."""

    facts: list[Fact]
    device: str
    gpu: str | None
    torch: str
    triton: str
    commit: str
    date: str  # ISO 8601, UTC
    source: str  # the file, or "this run"
    merged: bool = False  # whether benchmarks that it lacks were added from older recordings

    @property
    def commits(self) -> str:
        """The commits of its benchmarks, in order of appearance."""
        return ", ".join(self.taken(self.facts, dated=False)) or self.commit[:12]

    def taken(self, facts: Iterable[Fact], dated: bool = True) -> list[str]:
        """The commits of some of its benchmarks, and their dates if `dated`."""
        names = [
            str(fact.get("commit") or self.commit)[:12] + f", {str(fact.get('date') or self.date)[:10]}" * dated
            for fact in facts
        ]
        return list(dict.fromkeys(names))

    @property
    def environment(self) -> dict[str, str]:
        """The table of the section Environment of a report."""
        return {
            "device": self.gpu or self.device,
            "torch": self.torch,
            "triton": self.triton,
            "commit": self.commits,
            "date": self.date[:19].replace("T", " ") + " UTC",
            "recorded in": self.source,
        }


def load(path: Path) -> Recording:
    """Read a file that pytest-benchmark wrote.

    Raises:
        ValueError: the file cannot be read, or a value in it is not what it should be. The error names both.
    """
    document = read(path, needs="median")
    machine, benchmarks, date = document["machine_info"], document["benchmarks"], document.get("datetime")
    commit = (document.get("commit_info") or {}).get("id")
    if date is None or commit is None:
        raise ValueError(f"{path}: expected a datetime and a commit_info.id, got {date!r} and {commit!r}")
    facts = [
        b["extra_info"] | {"group": b["group"], "name": b["name"], "median": b["stats"]["median"], "date": date}
        for b in benchmarks
    ]
    first = facts[0] if facts else {}
    return Recording(
        facts=facts,
        device=str(first.get("device") or machine.get("device") or machine.get("node")),
        gpu=machine.get("gpu"),
        torch=str(machine.get("torch")),
        triton=str(machine.get("triton")),
        commit=str(first.get("commit") or commit),
        date=date,
        source=str(path),
    )


def history(recordings: Sequence[Recording]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The ratio to the control of each benchmark by commit, and all commits in the order of their first files: of the
    recordings, and of the files that lie beside them and are of the same versions. Of several files of a commit, the
    median.
    """
    now, paths = recordings[-1], {Path(recording.source) for recording in recordings}
    beside = {path for known in paths if known.is_file() for path in known.parent.glob("[0-9][0-9][0-9][0-9]_*.json")}
    same = (now.device, now.torch, now.triton)
    files = [one for one in map(load, sorted(beside)) if (one.device, one.torch, one.triton) == same]
    files += [] if Path(now.source) in beside else [now]
    ratios_of: dict[str, dict[str, list[float]]] = {}
    for one in files:
        for fact in one.facts:
            if ratio := fact.get("ratio_to_control"):
                ratios_of.setdefault(fact["name"], {}).setdefault(one.commit[:7], []).append(ratio)
    series = {
        name: {commit: statistics.median(ratios) for commit, ratios in by.items()} for name, by in ratios_of.items()
    }
    return series, list(dict.fromkeys(one.commit[:7] for one in files))


def newest(folder: Path) -> list[Recording]:
    """The newest recording of each device below `folder`, as `newest_of` its files."""
    return newest_of(sorted(folder.rglob("*.json")))


def newest_of(files: Iterable[Path]) -> list[Recording]:
    """The newest recording of each device, GPUs first.

    Benchmarks that a recording lacks are added from older recordings of the same versions of torch and Triton.
    """
    latest: dict[str, Recording] = {}
    for recording in sorted(map(load, files), key=lambda r: r.date, reverse=True):
        known = latest.setdefault(recording.device, recording)
        if (known.torch, known.triton) == (recording.torch, recording.triton):
            names = {fact["name"] for fact in known.facts}
            older = [fact for fact in recording.facts if fact["name"] not in names]
            if older:
                latest[recording.device] = replace(known, facts=known.facts + older, merged=True)
    return sorted(latest.values(), key=lambda r: (r.gpu is None, r.device))


def grouped(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    """Facts by benchmark group: first the groups of core in core's order, then the others in order of appearance.

    Without that order, a table of merged recordings would begin with the benchmarks that were recorded last.
    """
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(str(fact["group"]), []).append(fact)
    rank = {dist: i for i, dist in enumerate(SOURCES)}  # a group's name begins with it
    return dict(sorted(groups.items(), key=lambda item: rank.get(item[0].partition(",")[0], len(rank))))


def kernels(facts: Iterable[Fact]) -> list[Fact]:
    """The facts of kernels on a GPU, which have a share of the memory rate."""
    return [fact for fact in facts if fact.get("share_of_ceiling")]


def by_kind(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    """Facts by the table that shows them.

    Prompts and the shapes of MiniMax-M3 and QSA are in a fixed order, because a merged recording begins with the newest
    facts.
    """
    kinds = ("prefill", "training", "serving", "m3", "qsa", "sharded", "kernels", "others")
    facts_of: dict[str, list[Fact]] = {kind: [] for kind in kinds}
    for fact in facts:
        # `layouts`: times of packed SDPA's layouts, which a threshold needs. Workloads have a table of their own.
        if not fact.get("layouts") and not fact.get("workload"):
            facts_of[_kind(fact)].append(fact)
    for name in ("prefill", "training"):
        facts_of[name].sort(key=lambda x: (x["S"], -x["HQ"], x["HKV"], x.get("shared", 0.0), x["group"]))
    rank = {name: i for i, name in enumerate([*m3.NAMED, *qsa.NAMED, *qsa.TRAINED])}
    for name in ("m3", "qsa"):
        facts_of[name].sort(key=lambda fact: (rank.get(str(fact["case"]), len(rank)), str(fact["group"])))
    return facts_of


def _kind(fact: Fact) -> str:
    if str(fact["group"]).startswith("qsa,") and fact.get("case"):
        return "qsa"
    if fact.get("impl") == "m3":
        return "m3"
    if re.fullmatch(r"kvcache|paged\d+", str(fact.get("impl"))):
        return "serving"
    kinds = dict(ns_per_token="prefill", ns_per_query="training", world_of_1="sharded", share_of_ceiling="kernels")
    return next((kind for figure, kind in kinds.items() if fact.get(figure)), "others")


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the values that are known; None if none is."""
    known = [value for value in values if value]
    return math.exp(math.fsum(map(math.log, known)) / len(known)) if known else None


def within(ratios: Sequence[float], near: Iterable[float]) -> str:
    """`88% within 5%, worst 1.20x`: how many ratios are at most so far above 1."""
    shares = [f"{sum(x <= 1 + share for x in ratios) / len(ratios):.0%} within {share:.0%}" for share in near]
    return f"{', '.join(shares)}, worst {max(ratios):.2f}x"


def speedup(fact: Fact, against: str | None) -> tuple[float, float | None, float | None] | None:
    """How many times as fast as comparator `against`: `(ratio of medians, low, high)`; None if that was not timed.

    `low` and `high` divide the ends of the two 95% intervals of the medians, so that their interval is never too
    narrow. They are None if the recording does not hold both intervals.
    """
    medians = fact.get("medians") or {}
    if against not in medians:
        return None
    ratio = medians[against] / fact["median"]
    theirs, ours = (fact.get("intervals") or {}).get(against), fact.get("ci95")
    if not theirs or not ours:
        return ratio, None, None
    return ratio, theirs[0] / ours[1], theirs[1] / ours[0]
