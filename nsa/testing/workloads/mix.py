"""Times a workload, and says what a buyer wants to know: the weighted mean time of a call, beside each peer's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nsa.testing.clock import serving
from nsa.testing.clock.cuda import time_gpu
from nsa.testing.clock.measure import gate_figures, run_facts
from nsa.testing.clock.serving import Pool, Timer, beside, kind, ours, serve
from nsa.testing.clock.timing import Timing
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.m3 import DENSE
from nsa.testing.workloads.file import Entry

WORST = 3  # shapes that the summary names, for each peer
Fact = dict[str, Any]


def contestants(entry: Entry) -> tuple[list[Contestant], list[Contestant]]:
    """Our front door; and beside it the control, dense attention over all keys, and the peers."""
    return [ours(entry.shape, "auto", "auto")], [DENSE, *beside(entry.shape)]


def time_entry(workload: str, entry: Entry, numbers: Pool, timer: Timer = time_gpu) -> tuple[Timing, Fact]:
    """Check and time a shape. Returns our times, and the facts to publish.

    Raises:
        AssertionError: our result is wrong.
    """
    case = entry.shape.case
    served = serve(entry.shape, case.seed, *contestants(entry), numbers, timer)
    mine, medians = served.times["auto"], {name: t.median for name, t in served.times.items()}
    facts = run_facts(numbers.device) | case.fields() | gate_figures(served.times, [DENSE.name], "auto")
    mix = {"name": workload, "variant": entry.variant, "shape": entry.name, "weight": entry.weight}
    return mine, facts | {
        "workload": mix, "case": f"{workload}-{entry.id}", "impl": "auto", "group": f"{workload}: {kind(case)}",
        "medians": medians, "left_out": served.left_out, "route": served.route, "seed": case.seed,
        "bytes": served.problem.unique_bytes, "flops": served.problem.flops, "fp8": entry.shape.fp8,
    }  # fmt: skip


def warm(entry: Entry, device: torch.device) -> None:
    """Compile the kernels of a shape. For child processes (`clock/precompile.py`)."""
    mine, others = contestants(entry)
    serving.warm(entry.shape, [*mine, *(one for one in others if one is not DENSE)], device)


def by_mix(facts: Iterable[Fact]) -> dict[tuple[str, str], list[Fact]]:
    """The facts of each workload and variant."""
    mixes: dict[tuple[str, str], list[Fact]] = {}
    for fact in facts:
        if mix := fact.get("workload"):
            mixes.setdefault((mix["name"], mix["variant"]), []).append(fact)
    return mixes


def others(facts: Iterable[Fact]) -> list[str]:
    """The peers that were timed, and the control last."""
    names = dict.fromkeys(name for fact in facts for name in fact["medians"] if name != fact["impl"])
    return sorted(names, key=lambda name: name == DENSE.name)


def summary(facts: Iterable[Fact]) -> list[str]:
    """For each workload and variant: our weighted mean time of a call, each other's, and the worst shapes by name."""
    lines = []
    for (name, variant), rows in by_mix(facts).items():
        title = ", ".join(filter(None, (name, variant)))
        lines.append(f"{title}: {len(rows)} shapes, mean call {mean(rows, 'auto') * 1e3:.4g} ms")
        for other in others(rows):
            beside = [row for row in rows if other in row["medians"]]
            theirs, mine = mean(beside, other), mean(beside, "auto")
            on = "" if len(beside) == len(rows) else f" on {len(beside)} of them, where ours is {mine * 1e3:.4g} ms"
            lines.append(f"  {other} {theirs * 1e3:.4g} ms{on}: ours is {theirs / mine:.2f}x as fast")
            worst = sorted(beside, key=lambda row: row["medians"][other] / row["medians"]["auto"])
            for row in worst[:WORST] if other != DENSE.name else ():
                us = {who: seconds * 1e6 for who, seconds in row["medians"].items()}
                text = f"{us['auto']:.0f} us ({row['route']}) beside {us[other]:.0f}"
                lines.append(f"    {us[other] / us['auto']:.2f}x  {row['workload']['shape']}: {text}")
    return lines


def mean(rows: Iterable[Fact], who: str) -> float:
    """Seconds of a call. If all weights are 0, every shape counts alike."""
    rows = list(rows)
    weights = [row["workload"]["weight"] for row in rows]
    weights = weights if any(weights) else [1.0] * len(rows)
    total = sum(w * row["medians"][who] for w, row in zip(weights, rows, strict=True))
    return float(total / sum(weights))
