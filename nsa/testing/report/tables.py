"""The contents of a report of one recording, or of two: verdict, tables and pictures, in the order of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nsa.testing.report import summary
from nsa.testing.report.recording import (
    Fact,
    Recording,
    geomean,
    grouped,
    kernels,
    m3,
    prefills,
    servings,
    speedup,
    trainings,
    worst,
)
from nsa.tuning import thresholds


@dataclass
class Section:
    """A heading, and any of text, pictures (SVG), a table and code."""

    title: str
    text: str = ""
    pictures: list[str] = field(default_factory=list)
    header: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    code: str = ""
    folded: bool = False


def describe(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The variables of the templates: title, verdict, rationale and sections."""
    from nsa.testing.report import plots

    now = recordings[-1]
    decision, on_packed = thresholds.decide(now.facts), thresholds.decide(now.facts, against="best")
    cases = [_case_row(fact) for fact in now.facts if "layouts" not in fact]
    sections = [
        Section("Summary", "Speedups over what the column names.", header=SUMMARY_HEADER, rows=summary_rows(now.facts)),
        Section(
            "Speedup over L",
            "Ratios of medians from one run, implementations sampled in turn. Bars divide the ends of the two 95% "
            "bootstrap intervals" + _interval_note(now.facts),
            [p for p in (plots.speedup_over_L(now.facts, name) for name in (plots.REPLACED, plots.BEST)) if p],
        ),
        Section("Prefill", PREFILL_TEXT, header=PREFILL_HEADER, rows=prefill_rows(now.facts)),
        Section("Training", TRAINING_TEXT, header=TRAINING_HEADER, rows=training_rows(now.facts)),
        Section("Serving", SERVING_TEXT, header=SERVING_HEADER, rows=serving_rows(now.facts)),
        Section("MiniMax-M3", M3_TEXT, header=M3_HEADER, rows=m3_rows(now.facts)),
        Section("Roofline", _timing_note(now.facts), [p for p in [plots.roofline(now.facts)] if p]),
    ]
    if len(recordings) == 2:
        sections.append(_change(recordings[0], now))
    if decision.points:
        sections.append(_threshold_section(decision, on_packed))
    columns = ORDINALS if len(recordings) == 2 else ("this run",)
    sections += [
        Section("All benchmarks", header=CASE_HEADER, rows=cases, folded=True),
        Section("Environment", header=("", *columns), rows=_environment(recordings)),
        Section("How to reproduce", code=_commands(recordings)),
    ]
    return {
        "title": f"Selection attention on {now.gpu or now.device}",
        "subtitle": f"torch {now.torch}, Triton {now.triton}, commit {now.commit}, {now.environment['date']}",
        "verdict": verdict(now),
        "rationale": rationale(now, decision, on_packed),
        "sections": [s for s in sections if s.pictures or s.rows or s.code],
    }


SUMMARY_HEADER = (
    "benchmarks", "cases", "replaced path: geomean", "worst", "gather + SDPA, index given: geomean", "worst",
    "best SDPA on packed rows: geomean", "worst", "expanded SDPA: geomean", "worst", "control: geomean", "worst",
    "best GB/s", "of ceiling",
)  # fmt: skip
PREFILL_TEXT = (
    "Forward, 16 blocks of 64 a row, milliseconds. Dense: causal SDPA over all keys of the same prompt. Ratios: how "
    "many times as fast ours is, from medians of one run. Shared: blocks that neighbouring queries have in common."
)
PREFILL_OTHERS = ("query_major", "key_major", "fla", "dense_cudnn", "dense_flash")
PREFILL_HEADER = (
    "HQ/HKV", "T", "shared", "kernel", "ours", "ns/token", "TFLOP/s", "query-major", "key-major", "fla-core",
    "dense cuDNN", "dense flash", "vs cuDNN", "vs flash", "vs fla-core", "of matrix rate",
)  # fmt: skip
TRAINING_TEXT = (
    "dQ, dK and dV of the prompts above, alone and with the forward pass before, milliseconds. Memory: the most that a "
    "step takes beside its inputs (outputs and gradients included), as a multiple of what dense flash attention takes."
)
TRAINING_OTHERS = ("fla", "dense_cudnn", "dense_flash")
TRAINING_HEADER = (
    "HQ/HKV", "T", "shared", "timed", "ours", "ns/token", "fla-core", "dense cuDNN", "dense flash", "vs fla-core",
    "vs cuDNN", "vs flash", "memory vs flash",
)  # fmt: skip
SERVING_TEXT = (
    "A decode step, and a chunk of a prompt, over a KV cache: 16 blocks of 64 a query, microseconds. No cache: the "
    "same keys without lengths or page table. Its share: the chunk's part, by tokens, of the whole prompt's time."
)
SERVING_OTHERS = {"no cache": "auto", "contiguous": "kvcache", "fla-core": "fla"}
SERVING_HEADER = (
    "HQ/HKV", "B", "queries", "keys", "pages", "ours", *SERVING_OTHERS, "over no cache", "over contiguous",
    "vs fla-core", "over its share",
)  # fmt: skip
M3_TEXT = (
    "64/4 heads, D = 128, 16 blocks of 128 a query, microseconds; contexts of 65,536 keys, of 16,384 for B = 64 and "
    "8,192 for B = 256. *speculative*: 8 sequences of 4 queries. *shared0.9*: a query has 90% of its blocks in common "
    "with the query before it. *ragged*: 3 chunks of 512 queries and 61 decode steps in one call. *eager*: the host's "
    "time. *vs*: how many times as fast; *bf16*: our call over the same cache in bf16; *apart*: our two calls, one "
    "for the chunks and one for the steps. fla-core and XunhaoLai read contiguous keys in bf16. *of read*: share of "
    "the measured read rate, which limits steps, not prompts."
)
M3_OTHERS = {"vLLM": "vllm", "fla-core": "fla", "XunhaoLai": "xunhao"}
M3_HEADER = ("shape", "ours", *M3_OTHERS, *(f"vs {name}" for name in summary.M3_VERSUS), "of read")
CASE_HEADER = ("case", "group", "median", "95% interval", "GB/s", "of ceiling", "vs replaced", "vs best SDPA", "MAE")
ORDINALS = ("before", "after")
THIS_RUN = "this run"  # the source of the recording that `artifacts.this_run` makes


def verdict(recording: Recording) -> str:
    """The threshold in force on the recording's device, and its source."""
    if recording.gpu is None:
        return "sel_triton_min_L is not used on this device: without a GPU, calls run packed SDPA."
    return f"sel_triton_min_L in force: {summary.in_force(recording.gpu, live=recording.source == THIS_RUN)}."


def rationale(recording: Recording, decision: thresholds.Decision, on_packed: thresholds.Decision) -> list[str]:
    """Sentences that say which threshold the recording measured, and why."""
    if recording.gpu is None:
        return []
    return [f"This recording {summary.measured(decision)}.", *thresholds.rationale(decision, on_packed)]


def summary_rows(facts: list[Fact]) -> list[Sequence[str]]:
    """One row per benchmark group."""
    rows: list[Sequence[str]] = []
    for name, infos in grouped(fact for fact in facts if "layouts" not in fact).items():
        ratios = [[fact.get(key) for fact in infos if not summary.fallback(fact)] for key in summary.VERSUS.values()]
        ratios.append(summary.over_controls(infos))
        top = max(kernels(infos), key=lambda fact: float(fact["gbps"]), default=None)
        cells = [_times(function(values)) for values in ratios for function in (geomean, worst)]
        best = ["-", "-"] if top is None else [f"{top['gbps']:.0f}", f"{top['share_of_ceiling']:.1%}"]
        rows.append([name, str(len(infos)), *cells, *best])
    return rows


def prefill_rows(facts: list[Fact]) -> list[Sequence[str]]:
    """One row per prompt: the milliseconds of each implementation, and how many times as fast ours is."""
    rows: list[Sequence[str]] = []
    for fact in prefills(facts):
        medians = fact.get("medians") or {}
        others = [f"{medians[name] * 1e3:.2f}" if name in medians else "-" for name in PREFILL_OTHERS]
        ratios = [_times(fact.get(key)) for key in list(summary.PREFILL_VERSUS.values())[:3]]
        share = fact.get("share_of_matmul")
        heads = f"{fact['HQ']}/{fact['HKV']}"
        rows.append(
            [heads, str(fact["S"]), _shared(fact), summary.kernel_of(fact),
             f"{fact['median'] * 1e3:.2f}", f"{fact['ns_per_token']:.1f}", summary.tflops(fact), *others, *ratios,
             "-" if not share else f"{share:.1%}"]
        )  # fmt: skip
    return rows


def longest_prompts(recording: Recording) -> dict[str, Any] | None:
    """The contents of README's picture: milliseconds of the longest prompts, as in its table; None if none were timed.

    `{"gpu", "T", "torch", "triton", "commits", "milliseconds": {"64/4": {"ours": "1.25", "ours, 50% shared": …}}}`
    """
    rows = [dict(zip(PREFILL_HEADER, row, strict=True)) for row in prefill_rows(recording.facts)]
    alone = [row for row in rows if row["shared"] == "-"]
    if not alone:
        return None
    T = max(int(row["T"]) for row in alone)
    found: dict[str, dict[str, str]] = {}
    for row in (row for row in alone if int(row["T"]) == T):
        alike = [other for other in rows if other not in alone and all(other[x] == row[x] for x in ("HQ/HKV", "T"))]
        others = {name: row[name] for name in ("fla-core", "dense cuDNN", "dense flash") if row[name] != "-"}
        shared = {f"ours, {other['shared']} shared": other["ours"] for other in alike}
        found[row["HQ/HKV"]] = {"ours": row["ours"]} | shared | others
    return {
        "gpu": recording.gpu or recording.device,
        "T": T,
        "torch": recording.torch,
        "triton": recording.triton,
        "commits": recording.commits,
        "milliseconds": found,
    }


def training_rows(facts: list[Fact]) -> list[Sequence[str]]:
    """One row per prompt for the backward pass and one for the whole step, as :func:`prefill_rows`."""
    rows: list[Sequence[str]] = []
    for fact in trainings(facts):
        medians = fact.get("medians") or {}
        others = [f"{medians[name] * 1e3:.2f}" if name in medians else "-" for name in TRAINING_OTHERS]
        ratios = [_times(fact.get(f"speedup_vs_{word}")) for word in ("fla", "cudnn", "flash")]
        rows.append(
            [f"{fact['HQ']}/{fact['HKV']}", str(fact["S"]), _shared(fact), str(fact["group"]),
             f"{fact['median'] * 1e3:.2f}", f"{fact['ns_per_query']:.1f}", *others, *ratios,
             _times(fact.get("memory_vs_flash"))]
        )  # fmt: skip
    return rows


def serving_rows(facts: list[Fact]) -> list[Sequence[str]]:
    """One row per step over a cache. "over": how many times as long ours takes; "vs": how many times as fast it is."""
    rows: list[Sequence[str]] = []
    for fact in servings(facts):
        ours, medians = fact["median"], fact.get("medians") or {}
        medians = {name: t for name, t in medians.items() if name != fact["impl"]}
        others = [f"{medians[name] * 1e6:.2f}" if name in medians else "-" for name in SERVING_OTHERS.values()]
        over = [_times(ours / medians[name] if name in medians else None) for name in ("auto", "kvcache")]
        page = str(fact["impl"]).removeprefix("paged") if fact["impl"] != "kvcache" else "-"
        where = [f"{fact['HQ']}/{fact['HKV']}", *(str(fact[name]) for name in ("B", "S", "S_kv")), page]
        faster = _times(medians["fla"] / ours if "fla" in medians else None)
        rows.append([*where, f"{ours * 1e6:.2f}", *others, *over, faster, _times(fact.get("times_its_share"))])
    return rows


def m3_rows(facts: list[Fact]) -> list[Sequence[str]]:
    """One row per shape of MiniMax-M3: the microseconds of each implementation, and how many times as fast ours is."""
    rows: list[Sequence[str]] = []
    for fact in m3(facts):
        medians, share = fact.get("medians") or {}, fact.get("share_of_read")
        others = [f"{medians[name] * 1e6:.1f}" if name in medians else "-" for name in M3_OTHERS.values()]
        ratios = [_times(fact.get(key)) for key in summary.M3_VERSUS.values()]
        name = str(fact["case"]).removeprefix("m3-")
        rows.append([name, f"{fact['median'] * 1e6:.1f}", *others, *ratios, f"{share:.1%}" if share else "-"])
    return rows


def _shared(fact: Fact) -> str:
    return f"{fact['shared']:.0%}" if fact.get("shared") else "-"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}×"


def _interval_note(facts: list[Fact]) -> str:
    known = [fact for fact in kernels(facts) if fact.get("medians")]
    if known and not any(fact.get("intervals") for fact in known):
        return "; this recording holds no intervals of the comparators, so it has no bars."
    return ", so they are never too short; most are smaller than the marks."


def _timing_note(facts: list[Fact]) -> str:
    how = {"graph": "CUDA graph replay", "eager": "eager calls", "host": "the host's clock"}
    timings = [t for fact in kernels(facts) if (t := fact.get("timing"))]
    counts = Counter(f"{how[t['how']]}, {'cold rotated' if t['cold'] else 'hot'} buffers" for t in timings)
    words = [f"{name} ({n} benchmarks)" for name, n in counts.most_common()]
    return f"Timed by {'; '.join(words)}. Ceilings were measured in the same run." if words else ""


def changes(before: Recording, after: Recording) -> list[tuple[str, str, float, float, float]]:
    """`(name, group, new / old ratio, old median, new median)` of the benchmarks that both recordings have.

    The ratios are those to the control, because the speed of a machine differs from day to day. Without a control they
    are medians.
    """
    old = {fact["name"]: fact for fact in before.facts}
    found = []
    for fact in after.facts:
        then = old.get(fact["name"])
        if then is None:
            continue
        was, now = (_ratio_to(then.get("control"), each) for each in (then, fact))
        ratio = now / was if was and now else fact["median"] / then["median"]
        found.append((fact["name"], fact["group"], ratio, then["median"], fact["median"]))
    return found


def _ratio_to(control: str | None, fact: Fact) -> float | None:
    """The fact's median over that of `control`, which need not be its own control; None if that was not timed."""
    if control == fact.get("control"):
        return fact.get("ratio_to_control")
    seconds = (fact.get("medians") or {}).get(control)
    return fact["median"] / seconds if seconds else None


def _change(before: Recording, after: Recording) -> Section:
    from nsa.testing.report import plots

    pairs = changes(before, after)
    picture = plots.before_after([(name, group, ratio) for name, group, ratio, _, _ in pairs])
    moved = sorted((p for p in pairs if abs(p[2] - 1) > 0.1), key=lambda p: -p[2])
    names = [{fact["name"] for fact in r.facts} for r in (before, after)]
    return Section(
        "Before and after",
        f"{len(pairs)} benchmarks in both, {len(names[0] - names[1])} only before, {len(names[1] - names[0])} only "
        f"after. Geometric mean of the changes {geomean(p[2] for p in pairs) or 1:.3f}×; {len(moved)} above 10%.",
        [picture] if picture else [],
        ("benchmark", "group", "change, to control", "before", "after"),
        [(n, g, f"{ratio - 1:+.1%}", summary.seconds(old), summary.seconds(new)) for n, g, ratio, old, new in moved],
    )


def _threshold_section(decision: thresholds.Decision, on_packed: thresholds.Decision) -> Section:
    rows: list[Sequence[str]] = []
    for key, L in sorted(decision.groups.items(), key=lambda item: (item[0][3], item[0])):
        mine = [p for p in decision.points if p.key == key]
        least = min(mine, key=lambda p: p.speedup)
        interval = "not recorded" if least.low is None else f"{least.low:.2f}–{least.high:.2f}"
        packed = on_packed.groups.get(key)
        lengths = ", ".join(str(n) for n in sorted({p.L for p in mine}))
        unknown = all(p.low is None for p in mine)
        starts = ["undecided" if unknown else _never(start) for start in (L, packed)]
        cells = (starts[0], f"{least.speedup:.2f}×", interval, str(least.L), starts[1])
        rows.append((key[3], *(str(n) for n in key[:3]), lengths, *cells))
    header = (
        "distribution", "H", "D", "Dv", "L measured", f"{decision.margin:g}× the replaced path from L", "slowest",
        "95% interval", "at L", f"{decision.margin:g}× the best SDPA on packed rows from L",
    )  # fmt: skip
    text = "Only selections that are read from a cache count, because calls with packed rows are not routed."
    return Section("Threshold", text, [], header, rows)


def _never(L: int | None) -> str:
    return "never" if L is None else str(L)


def _case_row(fact: Fact) -> Sequence[str]:
    interval = " – ".join(summary.seconds(end) for end in fact.get("ci95") or ())
    known = bool(fact.get("share_of_ceiling"))
    ends = tuple(_times((speedup(fact, name) or (None,))[0]) for name in (thresholds.REPLACED, fact.get("sdpa_best")))
    name = str(fact["case"] if known else fact["name"])
    if summary.fallback(fact):
        ends = ("-", "-")
    return (
        name, str(fact["group"]), summary.seconds(fact["median"]),
        interval or "-",
        f"{fact['gbps']:.0f}" if known else "-", f"{fact['share_of_ceiling']:.1%}" if known else "-",
        *ends, f"{fact['mae']:.1e}" if fact.get("mae") else "-",
    )  # fmt: skip


def _environment(recordings: Sequence[Recording]) -> list[Sequence[str]]:
    columns = [recording.environment for recording in recordings]
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


def _commands(recordings: Sequence[Recording]) -> str:
    now = recordings[-1]
    revision, _, dirty = now.commit.partition("-")
    # Merged recordings come from the baselines, which the command finds without a name.
    files = ["run.json" if r.source == THIS_RUN else r.source for r in recordings if not r.merged]
    return "\n".join(
        [
            f"git checkout {revision}{'   # there were uncommitted changes' if dirty else ''}",
            f"pip install -e '.[test,report]' torch=={now.torch.partition('+')[0]}   # Triton {now.triton}",
            "pytest -m perf --benchmark-json=run.json" + " --nsa-update-thresholds" * (now.gpu is not None),
            " ".join(("python -m nsa.testing.report", *files, "-o report")),
        ]
    )
