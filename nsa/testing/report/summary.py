"""The summary that a perf run prints in the terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import nsa.gpu
from nsa import settings
from nsa.testing.report.recording import Fact, geomean, grouped, kernels, m3, prefills, servings, trainings, worst
from nsa.tuning import crossover, thresholds

WIDTH = 100
PREFILL_VERSUS = {
    "cuDNN": "speedup_vs_cudnn",  # dense causal attention, which reads all keys
    "flash": "speedup_vs_flash",
    "fla": "speedup_vs_fla",
    "q-major": "speedup_vs_query_major",  # our schedules, asked for by name
    "k-major": "speedup_vs_key_major",
}
M3_VERSUS = {
    "vLLM": "speedup_vs_vllm",
    "fla-core": "speedup_vs_fla",
    "XunhaoLai": "speedup_vs_xunhao",
    "bf16": "speedup_vs_bf16",  # our call over the same cache in bf16
    "apart": "speedup_vs_calls_apart",  # our calls, one for the chunks and one for the steps
}
PEERS = ("fla",)  # names of nsa.testing.contestants.peers
VERSUS = {
    "replaced": "speedup_vs_fallback",  # packed SDPA with its packing, which routing would run instead
    "gather+SDPA": "speedup_vs_sdpa_end_to_end",  # gather from the cache and SDPA, with an index made beforehand
    "best SDPA": "speedup_vs_sdpa_best",  # the fastest SDPA layout, on rows already packed
    "expanded": "speedup_vs_sdpa_expanded",  # SDPA with K and V expanded to heads, on rows already packed
}


def lines(facts: list[Fact]) -> list[str]:
    """The lines of the summary, without the notes of what the run wrote."""
    prompts = prefills(facts)
    trained = trainings(facts)
    served = servings(facts)
    of_m3 = m3(facts)
    named = {id(fact) for fact in (*kernels(facts), *prompts, *trained, *served, *of_m3)}
    apart = {id(fact) for fact in (*prompts, *served, *of_m3)}
    ours = [fact for fact in kernels(facts) if id(fact) not in apart]
    others = [fact for fact in facts if id(fact) not in named and not fact.get("layouts")]
    text = [
        *_kernel_table(ours),
        *_peers(ours),
        *_prefill_table(prompts),
        *_training_table(trained),
        *_serving_table(served),
        *_m3_table(of_m3),
        *_control_table(others),
        *_left_out(facts),
        *_threshold(facts),
    ]
    text += crossover.table(crossover.points(facts))
    return fitted(text)


def fitted(text: Iterable[str]) -> list[str]:
    """Lines of at most `WIDTH` columns. They are broken at spaces only, so that a path or an id stays whole."""
    how = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return [part for line in text for part in textwrap.wrap(line, WIDTH, **how)]  # type: ignore[arg-type]


def _named(name: str, width: int) -> tuple[list[str], str]:
    """A row's first cell. A name that is too long for the cell gets a line of its own above the row."""
    return ([], f"{name:{width}}") if len(name) < width else ([name], " " * width)


def _kernel_table(facts: list[Fact]) -> list[str]:
    """The geometric mean and the worst of the speedups, for each group."""
    if not facts:
        return []
    heads = "".join(f"{name:>13}" for name in VERSUS)
    text = [
        f"{'speedup: geomean, worst':24}{'cases':>5}{heads}{'GB/s':>6}{'of ceiling':>11}",
    ]
    for name, infos in grouped(facts).items():
        cells = "".join(f"{_pair(fact.get(key) for fact in infos):>13}" for key in VERSUS.values())
        top = max(infos, key=lambda fact: float(fact["gbps"]))
        above, first = _named(name, 24)
        text += [*above, f"{first}{len(infos):>5}{cells}{top['gbps']:>6.0f}{top['share_of_ceiling']:>11.1%}"]
    text.append("  replaced: packed SDPA with its packing; best SDPA, expanded: SDPA alone, on rows already packed")
    slow = [fact for fact in facts if 0 < (fact.get("speedup_vs_sdpa_best") or 0) < 1]
    if slow:
        least = min(slow, key=lambda fact: float(fact["speedup_vs_sdpa_best"]))
        text.append(
            f"slower than best SDPA on packed rows: {len(slow)} of {len(facts)}, "
            f"worst {least['speedup_vs_sdpa_best']:.2f}x {least['case']}"
        )
    return text


def _peers(facts: list[Fact]) -> list[str]:
    """How many times as fast as the peers that ran."""
    text = []
    for name in PEERS:
        ratios = [fact["medians"][name] / fact["median"] for fact in facts if name in fact.get("medians", {})]
        if ratios:
            text.append(f"beside {name}: {len(ratios)} cases, {_pair(ratios)} times as fast (geomean, worst)")
    return text


def _prefill_table(facts: list[Fact]) -> list[str]:
    """A line for each prompt: its time, the kernel that ran, and how many times as fast as the comparators it is."""
    if not facts:
        return []
    heads = "".join(f"{name:>8}" for name in PREFILL_VERSUS)
    text = [f"{'prefill, HQ/HKV, T':22}{'time':>9}{'ns/token':>9}{heads}{'TFLOP/s':>8}  kernel"]
    for fact in facts:
        cells = "".join(f"{_ratio(fact.get(key)):>8}" for key in PREFILL_VERSUS.values())
        text.append(
            f"{prompt(fact):22}{seconds(fact['median']):>9}{fact['ns_per_token']:>9.1f}{cells}"
            f"{tflops(fact):>8}  {kernel_of(fact)}"
        )
    text.append("  times as fast as dense attention, fla-core and our schedules by name; TFLOP/s of selected work")
    return text


def _training_table(facts: list[Fact]) -> list[str]:
    """As :func:`_prefill_table`, for backward passes and steps."""
    if not facts:
        return []
    heads = {name: key for name, key in PREFILL_VERSUS.items() if "major" not in name}
    text = [
        f"{'training, HQ/HKV, T':22}{'time':>9}{'ns/token':>9}{''.join(f'{name:>8}' for name in heads)}{'memory':>8}"
    ]
    for fact in facts:
        cells = "".join(f"{_ratio(fact.get(key)):>8}" for key in heads.values())
        memory = f"{_ratio(fact.get('memory_vs_flash')):>8}  {fact['group']}"
        text.append(f"{prompt(fact):22}{seconds(fact['median']):>9}{fact['ns_per_query']:>9.1f}{cells}{memory}")
    text.append("  times as fast as dense attention and fla-core; memory of a step over that of dense flash attention")
    return text


def _serving_table(facts: list[Fact]) -> list[str]:
    """A line for each step over a cache, with its time as a multiple of the time without a cache, or without pages."""
    if not facts:
        return []
    heads = {"no cache": "auto", "contiguous": "kvcache", "fla": "fla"}
    text = [f"{'serving, HQ/HKV, B, queries':30}{'time':>9}{''.join(f'{name:>12}' for name in heads)}{'share':>8}"]
    for fact in facts:
        medians = {name: t for name, t in (fact.get("medians") or {}).items() if name != fact["impl"]}
        over = [fact["median"] / medians[name] if name in medians else None for name in heads.values()]
        cells = "".join(f"{_ratio(value):>12}" for value in over)
        where = f"{fact['HQ']}/{fact['HKV']}, {fact['B']}, {fact['S']} {fact['impl']}"
        text.append(f"{where:30}{seconds(fact['median']):>9}{cells}{_ratio(fact.get('times_its_share')):>8}")
    text.append("  times as long as the call that the column names; share: as the chunk's part of a prompt's time")
    return text


def _m3_table(facts: list[Fact]) -> list[str]:
    """A line for each shape of MiniMax-M3, beside public kernels, our own bf16 cache, and one call for each length."""
    if not facts:
        return []
    heads = "".join(f"{name:>10}" for name in M3_VERSUS)
    text = [f"{'MiniMax-M3, times as fast as':30}{'time':>9}{heads}{'of read':>9}"]
    for fact in facts:
        cells = "".join(f"{_ratio(fact.get(key)):>10}" for key in M3_VERSUS.values())
        share = fact.get("share_of_read")
        text.append(f"{fact['case']:30}{seconds(fact['median']):>9}{cells}{'-' if not share else f'{share:.1%}':>9}")
        text += [f"  {name} not timed: {reason}" for name, reason in (fact.get("left_out") or {}).items()]
    text.append("  apart: chunks in one call, steps in another; of read: share of the measured read rate")
    return text


def prompt(fact: Fact) -> str:
    """`64/4, 65536`, and the share of blocks that neighbouring queries have in common, if the case has one."""
    return f"{fact['HQ']}/{fact['HKV']}, {fact['S']}" + (f", {fact['shared']:.0%}" if fact.get("shared") else "")


def tflops(fact: Fact) -> str:
    """TFLOP/s of the products with selected keys. Baselines of before 2026-11-26 lack them."""
    return f"{fact['tflops']:.0f}" if fact.get("tflops") else "-"


def kernel_of(fact: Fact) -> str:
    """The route of our kernel that ran, or the name of the contestant."""
    return ", ".join(sorted(fact.get("launched") or ())) or str(fact.get("impl", "-"))


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value else "-"


def _control_table(facts: list[Fact]) -> list[str]:
    """A line for each group of the other benchmarks: how many times as fast as their control, and their times."""
    if not facts:
        return []
    heads = f"{'geomean':>9}{'worst':>8}{'fastest':>10}{'slowest':>10}  control"
    text = [f"{'times as fast as control':28}{'cases':>6}{heads}"]
    for name, infos in grouped(facts).items():
        ratios = over_controls(infos)
        times = [float(fact["median"]) for fact in infos]
        controls = ", ".join(dict.fromkeys(str(fact["control"]) for fact in infos if fact.get("control")))
        above, first = _named(name, 28)
        text += [
            *above,
            f"{first}{len(infos):>6}{_ratio(geomean(ratios)):>9}{_ratio(worst(ratios)):>8}"
            f"{seconds(min(times)):>10}{seconds(max(times)):>10}  {controls or '-'}",
        ]
        text += _notes(infos)
    return text


def _notes(infos: list[Fact]) -> list[str]:
    """The notes of a group's benchmarks. Of notes about costs in microseconds, only the highest is shown."""
    noted = [fact for fact in infos if fact.get("note")]
    costs = [fact for fact in noted if fact.get("overhead_us")]
    if costs:
        noted = [max(costs, key=lambda fact: float(fact["overhead_us"]))]
    return [f"  {fact['note']}" for fact in noted]


def over_controls(infos: list[Fact]) -> list[float | None]:
    """How many times as fast as their controls. The fallback counts only if the group has no other benchmark."""
    counted = [fact for fact in infos if not fallback(fact)] or infos
    return [1 / fact["ratio_to_control"] if fact.get("ratio_to_control") else None for fact in counted]


def _left_out(facts: list[Fact]) -> list[str]:
    """The comparators that were not timed and why: the three most frequent pairs."""
    counts = Counter(
        f"{name}, {reason.partition(':')[0]}" for fact in facts for name, reason in (fact.get("left_out") or {}).items()
    )
    text = [f"{why} in {n}" for why, n in counts.most_common(3)]
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    return [f"comparators not timed: {'; '.join(text)}{more}"] if text else []


def _threshold(facts: list[Fact]) -> list[str]:
    """The `sel_triton_min_L` in force, and the one that this run measured."""
    gpu = next((str(fact["gpu"]) for fact in facts if fact.get("gpu")), None)
    if gpu is None:
        return []
    decision = thresholds.decide(facts)
    on_packed = thresholds.decide(facts, against="best")
    text = [f"sel_triton_min_L in force: {in_force(gpu)}", f"  this run {measured(decision)}"]
    if not decision.points:
        return text
    beside = "never" if on_packed.min_L is None else f"from L = {on_packed.min_L}"
    return [*text, f"  {decision.margin:g}x the best SDPA call on rows already packed: {beside}"]


def measured(decision: thresholds.Decision) -> str:
    """What a run or a recording measured of the threshold: the rest of a sentence that begins with its name."""
    if not decision.points:
        return "did not measure it"
    if all(point.low is None for point in decision.points):
        return "cannot decide it: it holds no intervals of the comparators"
    text = f"measured {_off(decision.min_L)}"
    if not decision.missing:
        return text
    known, missing = len(decision.groups), len(decision.missing)
    return f"{text} in {known} combinations of heads, dims and distribution; a threshold needs {missing} more"


def fallback(fact: Fact) -> bool:
    """Whether a benchmark times the path that Triton replaces."""
    return fact.get("impl") == thresholds.REPLACED


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
    return f"{_off(value)}, measured {date} at commit {commit}, {_shown(threshold.path)}"


def _off(min_L: int | None) -> str:
    return "off" if min_L is None else str(min_L)


def _shown(path: Path) -> str:
    """The path of a packaged file relative to the repository, `nsa/configs/gpus/<gpu>.yaml`; other paths in full."""
    root = nsa.gpu.PACKAGED.parents[2]
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _pair(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio]
    mean, least = geomean(known), worst(known)
    return "-" if mean is None or least is None else f"{mean:.2f} {least:.2f}"


def seconds(value: float) -> str:
    """`1.25 ms`: three digits and a unit."""
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if value >= s or u == "us")
    return f"{value / scale:.3g} {unit}"
