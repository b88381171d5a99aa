"""The summary that a perf run prints on the screen, and what is said of the threshold."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

import nsa.gpu
from nsa import settings
from nsa.testing.report import tables
from nsa.testing.report.recording import Fact, by_kind, grouped
from nsa.testing.report.table import WIDTH, screen
from nsa.tuning import thresholds


def lines(facts: list[Fact]) -> list[str]:
    """The lines of the summary, without the notes of what the run wrote."""
    kinds = by_kind(facts)
    text = [line for table in tables.of(facts) for line in screen(table)]
    text += [*_slow(kinds["kernels"]), *_peers(kinds["kernels"])]
    text += [note for infos in grouped(kinds["others"]).values() for note in _notes(infos)]
    text += [
        f"{fact['case']}: {name} not timed: {reason}"
        for fact in kinds["m3"]
        for name, reason in (fact.get("left_out") or {}).items()
    ]
    told = {id(fact) for fact in kinds["m3"]}
    text += [*_left_out(fact for fact in facts if id(fact) not in told), *_threshold(facts)]
    if rows := [fact["regret"] for fact in facts if fact.get("regret")]:
        from nsa.testing import regret  # here, because it imports Triton

        text += regret.summary(rows)
    if any(fact.get("workload") for fact in facts):
        from nsa.testing.workloads import mix

        text += mix.summary(facts)
    return fitted(text)


def fitted(text: Iterable[str]) -> list[str]:
    """Lines of at most `WIDTH` columns. They are broken at spaces only, so that a path or an id stays whole."""
    how = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return [part for line in text for part in textwrap.wrap(line, WIDTH, **how)]  # type: ignore[arg-type]


def _slow(facts: list[Fact]) -> list[str]:
    """How many kernels are slower than the best SDPA call on packed rows, and the slowest."""
    slow = {fact["case"]: ratio for fact in facts if 0 < (ratio := fact.get("speedup_vs_sdpa_best") or 0) < 1}
    if not slow:
        return []
    case, least = min(slow.items(), key=lambda item: item[1])
    return [f"slower than best SDPA on packed rows: {len(slow)} of {len(facts)}, worst {least:.2f}x {case}"]


def _peers(facts: list[Fact]) -> list[str]:
    """How many times as fast as the peers that ran."""
    text = []
    for name, peer in tables.PEERS.items():
        ratios = [fact["medians"][name] / fact["median"] for fact in facts if name in fact.get("medians", {})]
        if ratios:
            text.append(f"beside {peer}: {len(ratios)} cases, {tables.mean_and_worst(ratios)} as fast (worst)")
    return text


def _notes(infos: list[Fact]) -> list[str]:
    """The notes of a group's benchmarks. Of notes about costs in microseconds, only the highest is shown."""
    noted = [fact for fact in infos if fact.get("note")]
    costs = [fact for fact in noted if fact.get("overhead_us")]
    if costs:
        noted = [max(costs, key=lambda fact: float(fact["overhead_us"]))]
    return [str(fact["note"]) for fact in noted]


def _left_out(facts: Iterable[Fact]) -> list[str]:
    """The comparators that were not timed and why: the three most frequent pairs."""
    counts = Counter(
        f"{name}, {reason.partition(':')[0]}" for fact in facts for name, reason in (fact.get("left_out") or {}).items()
    )
    text = [f"{why} in {n}" for why, n in counts.most_common(3)]
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    return [f"comparators not timed: {'; '.join(text)}{more}"] if text else []


# --- the threshold ---------------------------------------------------------------------------------------------------


def _threshold(facts: list[Fact]) -> list[str]:
    """The `sel_triton_min_L` in force, and the one that this run measured."""
    gpu = next((str(fact["gpu"]) for fact in facts if fact.get("gpu")), None)
    if gpu is None:
        return []
    decision = thresholds.decide(facts)
    on_packed = thresholds.decide(facts, against="best")
    text = [f"sel_triton_min_L in force: {in_force(gpu)}", f"  this run {outcome(decision)}"]
    if not decision.points:
        return text
    beside = "never" if on_packed.min_L is None else f"from L = {on_packed.min_L}"
    return [*text, f"  {thresholds.MARGIN:g}x the best SDPA call on rows already packed: {beside}"]


def outcome(decision: thresholds.Decision) -> str:
    """What a run or a recording measured of the threshold: the rest of a sentence that begins with its name."""
    if not decision.points:
        return "did not measure it"
    if all(point.low is None for point in decision.points):
        return "cannot decide it: it holds no intervals of the comparators"
    text = f"measured {thresholds.shown(decision.min_L)}"
    if not decision.missing:
        return text
    known, missing = len(decision.groups), len(decision.missing)
    return f"{text} in {known} combinations of heads, dims and distribution; a threshold needs {missing} more"


def in_force(gpu: str, live: bool = True) -> str:
    """The `sel_triton_min_L` that routing uses on a GPU, and its source.

    live: the settings of this process count too, because an environment variable or `nsa.configure` may set it.
    """
    explicit, threshold = settings.get().sel_triton_min_L, nsa.gpu.measured(gpu).threshold
    if live and explicit is not None:
        return f"{explicit}, set by {settings.sources()['sel_triton_min_L']}"
    if threshold is None:
        return f"{nsa.gpu.DEFAULT_MIN_L}, the safe default: no file has measurements of this GPU"
    value = None if threshold.sel_triton_min_L == nsa.gpu.TRITON_OFF else threshold.sel_triton_min_L
    date, commit = threshold.provenance["date"], threshold.provenance["commit"][:12]
    # A packaged file is named relative to the repository, other files in full.
    file = str(threshold.path).removeprefix(f"{nsa.gpu.PACKAGED.parents[2]}/")
    return f"{thresholds.shown(value)}, measured {date} at commit {commit}, {file}"
