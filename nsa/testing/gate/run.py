"""One gated session: its baseline, its verdicts, and the lines that it prints at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nsa.testing.clock.timing import Timing
from nsa.testing.contestants.ours import OURS
from nsa.testing.gate import store, words
from nsa.testing.gate.rule import LIMIT, Reading, Side, Verdict, function, judge
from nsa.testing.gate.store import Baseline, Key

Info = dict[str, Any]
Again = Callable[[], tuple[Timing, Info]]
OTHER_VERSIONS = "SDPA, the control, is another program there, so a FAIL takes a ratio and a time that are both worse."
RECORD = "record one: the same command with --nsa-save-baseline instead of --benchmark-compare"


@dataclass
class Gate:
    """The baseline that this session is gated against, and the verdicts so far."""

    key: Key
    baseline: Baseline | None  # of this key, or of the same device with other versions
    recording: bool = False
    accept: bool = False
    strict: bool = False
    drift: Collection[str] = ()  # benchmarks that may be slower than their best
    why_not: str | None = None  # why nothing is gated although there is a baseline
    verdicts: list[Verdict] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # benchmarks that the baseline does not hold

    @property
    def on(self) -> bool:
        """Whether anything was gated."""
        return any(v.kind != "cannot gate" for v in self.verdicts)

    @property
    def versions(self) -> bool:
        """Whether torch and Triton are those of the baseline."""
        return self.baseline is not None and self.baseline.key == self.key

    def judge(self, name: str, samples: Timing, info: Info, again: Again | None) -> tuple[Timing, Info, str | None]:
        """Compare one benchmark with its baseline. Returns its last measurement, which is to be stored, and why its
        test has to fail, which is None if it passes.

        Raises:
            ValueError: the control is our own code, so that a change that slows down both would not show in their
                ratio; or a sample cannot be a measurement. The text names the benchmark.
        """
        if info.get("control") in OURS:
            raise ValueError(f"control of {name}: expected plain torch, got our own {info['control']}")
        reading = self._reading(name, samples, info)
        if self.baseline is None or self.why_not is not None:
            return samples, info, None
        best = self.baseline.best.get(name) if self.versions else None
        old = self.baseline.benchmarks.get(name)
        if old is None:
            self.new.append(name)
            return samples, info, None
        if old.by in OURS:  # in files older than the check above
            old = replace(old, by=None)
        kept = samples, info

        def once_more() -> tuple[Side, Side]:
            nonlocal kept
            assert again is not None
            kept = again()
            return old, Side.of([self._reading(name, *kept)])

        more = None if again is None else once_more
        verdict = judge(name, old, Side.of([reading]), more, versions=self.versions, best=best)
        self.verdicts.append(verdict)
        outcome = {"verdict": verdict.kind, "seen": words.seen(verdict), "reason": verdict.reason}
        # A slowdown that was accepted is the first of a new series: its recording holds nothing better.
        accepted = name in self.drift if verdict.drift else verdict.kind == "FAIL" and self.accept
        known = {} if best is None or accepted else {"best": asdict(best)}
        return kept[0], kept[1] | {"gate": outcome} | known, self._failure(verdict)

    @staticmethod
    def _reading(name: str, samples: Timing, info: Info) -> Reading:
        try:
            return Reading.of(samples.samples, info)
        except ValueError as error:
            raise ValueError(f"this run: {name}: {error}") from error

    def _failure(self, v: Verdict) -> str | None:
        if v.drift and v.name not in self.drift:
            return f"performance regression: {v.reason}: accepted by --nsa-accept-drift '{v.name}' alone"
        if v.kind == "FAIL" and not v.drift and not self.accept:
            return f"performance regression: {words.seen(v)}"
        if v.kind == "AMBIGUOUS" and self.strict:
            return f"ambiguous under --nsa-strict: {words.seen(v)}; {v.reason}"
        return None

    def report(self, ran: Iterable[str]) -> list[str]:
        """The lines of the gate's report, with the counts of verdicts last. `ran`: the benchmarks of this run."""
        return words.narrowed(self._said(list(ran)))

    def _said(self, ran: list[str]) -> list[str]:
        if self.why_not is not None:
            return [f"not gated: {self.why_not}"]
        if self.baseline is None:
            first = f"first recording for {self.key}"
            return [first] if self.recording else [f"not gated: no baseline for {self.key}", RECORD]
        files = min((len(side.readings) for side in self.baseline.benchmarks.values()), default=0)
        lines = [f"baseline: {self.baseline.key}: {', '.join(path.name[:4] for path in self.baseline.paths)}"]
        if not self.versions:
            lines.append(f"this run: {self.key}. {OTHER_VERSIONS}")
        if files < store.FILES:
            makes = f"--nsa-save-baseline makes {store.FILES}"
            lines.append(f"{files} of {store.FILES} recordings: spreads are not known; {makes}")
        judged = {v.name for v in self.verdicts}
        for name in (name for name in ran if name in self.baseline.benchmarks and name not in judged):
            side = self.baseline.benchmarks[name]  # timed by pytest-benchmark itself, so without a control
            self.verdicts.append(Verdict("cannot gate", name, side, side, reason="no control"))
        lines += words.table(self.verdicts)
        if self.accept and any(v.kind == "FAIL" and not v.drift for v in self.verdicts):
            lines.append("accepted by --nsa-accept-regression")
        accepted = [v.name for v in self.verdicts if v.drift and v.name in self.drift]
        lines += [f"accepted by --nsa-accept-drift: {name}" for name in accepted]
        for name in (name for name in self.drift if name not in accepted):
            why = "is not slower in small steps" if name in ran else "is no benchmark of this run"
            lines.append(f"not accepted by --nsa-accept-drift: {name} {why}")
        lines += self._explained()
        lines += self._missing(set(ran))
        if not self.verdicts:
            lines.append("nothing was gated: no benchmark of the baseline ran")
        return [*lines, words.counts(self.verdicts)]

    def _explained(self) -> list[str]:
        """Why benchmarks passed although pytest-benchmark's table shows longer times."""
        moved = words.machine(self.verdicts)
        if moved:
            return [moved]
        longer = [v for v in self.verdicts if v.kind == "pass" and v.change and not v.again and v.change.time > LIMIT]
        if not longer:
            return []
        many = f"{len(longer)} benchmarks took" if len(longer) > 1 else f"{longer[0].name} took"
        return [f"passed although {many} more than {LIMIT:.0%} longer: so did the control"]

    def _missing(self, ran: set[str]) -> list[str]:
        """Benchmarks that only one side has. If no benchmark of a test function ran, only the function is named."""
        assert self.baseline is not None
        missing = [name for name in self.baseline.benchmarks if name not in ran]
        functions = {function(name) for name in ran}
        lines = [f"in the baseline, not in this run: {name}" for name in missing if function(name) in functions]
        whole = Counter(function(name) for name in missing if function(name) not in functions)
        lines += [f"in the baseline, not in this run: {name}, all {count}" for name, count in whole.items()]
        return lines + [f"in this run, not in the baseline: {name}" for name in self.new]
