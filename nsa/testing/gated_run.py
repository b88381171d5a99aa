"""One gated run: the baseline it is compared with, its verdicts, and what it has to say at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nsa.testing import baselines
from nsa.testing.baselines import Baseline, Key
from nsa.testing.gate import Figures, Verdict, judge, machine, table
from nsa.testing.impls import OURS
from nsa.testing.timing import Timing

Info = dict[str, Any]
Again = Callable[[], tuple[Timing, Info]]
# Timed on request beside core, in no baseline.
NOT_CORE = tuple(f"tests/perf/test_{name}.py::" for name in ("threshold", "crossover", "shape"))


@dataclass
class Gate:
    """What this run is gated against, and what came of it so far."""

    key: Key
    baseline: Baseline | None  # of this key, or of the same device and other versions
    recording: bool
    accept: bool
    strict: bool
    why_not: str | None = None  # why nothing is gated, whatever is stored
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def on(self) -> bool:
        """Whether there is a baseline of this very key."""
        return self.why_not is None and self.baseline is not None and self.baseline.key == self.key

    def judge(self, name: str, samples: Timing, info: Info, again: Again | None) -> tuple[Timing, Info]:
        """Compare one benchmark with its baseline. Returns what is to be stored: the last measurement of it.

        Raises:
            ValueError: its control is a kernel of ours, or our fallback: what slows both would not show.
        """
        if info.get("control") in OURS and not name.startswith(NOT_CORE):
            raise ValueError(f"control of {name}: expected plain torch, got our own {info['control']}")
        stored = self.baseline.benchmarks.get(name) if self.baseline is not None else None
        if stored is not None and stored.by in OURS:
            stored = replace(stored, ratio=None, control=None, by=None)  # as if it had none
        if stored is None or self.why_not is not None:
            return samples, info
        kept = samples, info

        def once_more() -> float | None:
            nonlocal kept
            assert again is not None
            kept = again()
            return Figures.of(kept[1], kept[0].median).over(stored.by).ratio

        new = Figures.of(info, samples.median)
        if not self.on:  # side by side
            self.verdicts.append(Verdict("not gated", name, stored, new))
            return kept
        verdict = judge(name, stored, new, None if again is None else once_more)
        self.verdicts.append(verdict)
        outcome = {"verdict": verdict.kind, "old": stored.ratio, "first": new.ratio, "again": verdict.again}
        return kept[0], kept[1] | {"gate": outcome}

    def failure(self, name: str) -> str | None:
        """Why this benchmark's test has to fail, if it does."""
        for v in (v for v in self.verdicts if v.name == name):
            if v.kind == "FAIL" and not self.accept:
                return f"performance regression: {v}"
            if v.kind == "AMBIGUOUS" and self.strict:
                return f"ambiguous under --nsa-strict: {v}"
        return None


def report(gate: Gate, ran: Iterable[str]) -> list[str]:
    """Everything the gate has to say, the offenders in a table."""
    ran = list(ran)
    if not gate.on:
        return [*_not_gated(gate), *_missing(gate, ran)]
    assert gate.baseline is not None
    names = ("pass", "FAIL", "AMBIGUOUS", "cannot gate")
    kinds = {kind: [v for v in gate.verdicts if v.kind == kind] for kind in names}
    bad, noisy = [*kinds["FAIL"], *kinds["AMBIGUOUS"]], [v for v in kinds["cannot gate"] if v.reason]
    files = min((stored.files for stored in gate.baseline.benchmarks.values()), default=0)
    lines = [f"baseline: {gate.key}: {', '.join(path.name[:4] for path in gate.baseline.paths)}"]
    if files < baselines.FILES:
        lines.append(f"{files} of {baselines.FILES} recordings: spreads are not known; --nsa-save-baseline makes 3")
    lines += table(bad) if bad else []
    if gate.accept and kinds["FAIL"]:
        lines.append("accepted by --nsa-accept-regression")
    lines += [f"cannot gate: {v.name}: {v.reason}" for v in noisy]
    moved = machine(gate.verdicts)
    lines += [moved] if moved else []
    lines += _missing(gate, ran)
    if not gate.verdicts:
        lines.append("nothing was gated: no benchmark of the baseline ran")
    again = sum(v.kind == "pass" and v.again is not None for v in gate.verdicts)
    counts = ", ".join(f"{len(kinds[kind])} {kind}" for kind in names)
    return [*lines, f"gate: {counts}" + (f"; {again} passed when measured again" if again else "")]


def _not_gated(gate: Gate) -> list[str]:
    if gate.why_not is not None:
        return [f"not gated: {gate.why_not}"]
    if gate.recording:
        lines = [f"first recording for {gate.key}"]
    else:
        lines = [f"not gated: no baseline for {gate.key}; record one with pytest -m perf --nsa-save-baseline"]
    if gate.baseline is not None:
        lines += [f"side by side with {gate.baseline.key}, ungated:", *table(gate.verdicts)]
    return lines


def _file(name: str) -> str:
    return name.partition("::")[0]


def _missing(gate: Gate, ran: list[str]) -> list[str]:
    """Benchmarks on one side only, by name."""
    if gate.baseline is None or gate.why_not is not None:
        return []
    stored, judged = gate.baseline.benchmarks, {v.name for v in gate.verdicts}
    missing = [name for name in stored if name not in ran and name not in judged]
    files = {_file(name) for name in (*ran, *judged)}
    lines = [f"in the baseline, not in this run: {name}" for name in missing if _file(name) in files]
    whole = Counter(_file(name) for name in missing if _file(name) not in files)  # of which nothing ran
    lines += [f"in the baseline, not in this run: {file}, all {count}" for file, count in whole.items()]
    new = [name for name in ran if name not in stored and not name.startswith(NOT_CORE)]
    lines += [f"in this run, not in the baseline: {name}" for name in new]
    return lines + [f"cannot gate: {name}: no control" for name in ran if name in stored and name not in judged]
