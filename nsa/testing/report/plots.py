"""The report's pictures, as text in SVG. Needs matplotlib (`pip install 'nsa[report]'`)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

from nsa.testing.report.recording import Fact, kernels, speedup
from nsa.testing.report.tables import NAMES, longest_prompts
from nsa.tuning.thresholds import MARGIN

COLORS = {64: "#7fb2d9", 256: "#2f7fb8", 1024: "#0b3c5d"}  # by N, light to dark
DISTS = {
    "few": ("o", "#0b3c5d"), "many": ("^", "#d1741f"), "mixed": ("v", "#3c8d5a"), "decode": ("s", "#a03a78"),
    "prefill": ("D", "#777777"),
}  # fmt: skip
REPLACED, BEST = "sdpa", "best"
TITLES = {
    REPLACED: "Speedup over the path Triton replaces: packed SDPA with its packing",
    BEST: "Speedup over the best SDPA call on rows already packed",
}
DRIFTING = 8  # benchmarks whose ratios over recordings are drawn
BARS = 40  # that fit a picture with their names
WIDTH = 8.6  # inches: as wide as a page of 830 pixels, where text keeps its size
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "figure.titlesize": 11, "axes.grid": True,
    "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True,
    "svg.hashsalt": "nsa",  # otherwise ids are random, and equal reports differ
}  # fmt: skip


@rc_context(STYLE)  # type: ignore[arg-type]
def speedup_over_L(facts: list[Fact], against: str) -> str | None:
    """Speedup over L: a panel per distribution and head count, a line per N (colour) and D (style), 95% intervals."""
    series: dict[tuple[str, int], dict[tuple[int, int, int], list[tuple[int, Any]]]] = {}
    for fact in kernels(facts):
        ratio = speedup(fact, fact.get("sdpa_best") if against == BEST else against)
        if ratio is not None and fact["dist"] in ("few", "many", "mixed"):
            panel = series.setdefault((fact["dist"] + (", rows" if fact["source"] == "rows" else ""), fact["H"]), {})
            panel.setdefault((fact["N"], fact["D"], fact["Dv"]), []).append((fact["L"], ratio))
    if not series:
        return None
    wide = min(len(series), 2)
    deep = -(-len(series) // wide)
    figure = Figure(figsize=(WIDTH, 3 * deep + 0.7))
    axes = figure.subplots(deep, wide, sharey=True, squeeze=False)
    handles: dict[tuple[int, int, int], Any] = {}
    for ax, ((dist, H), lines) in zip(axes.flat, sorted(series.items()), strict=False):
        for line, points in sorted(lines.items()):
            handles[line] = _line(ax, sorted(points), *line)
        ax.set(title=f"{dist}, H={H}", xscale="log", xlabel="L, keys selected in a row")
        _ticks(ax.xaxis, sorted({L for points in lines.values() for L, _ in points}), "{x:g}")
        ax.axhline(1, color="#444444", lw=0.9, zorder=1)
        ax.axhline(MARGIN, color="#b03030", lw=0.9, ls=":", zorder=1)
    ratios = [ratio[0] for panel in series.values() for points in panel.values() for _, ratio in points]
    low, high = min(*ratios, 1.0) / 1.08, max(*ratios, MARGIN) * 1.08
    for ax in axes.flat:
        ax.set(yscale="log", ylim=(low, high), ylabel="speedup")
        _ticks(ax.yaxis, [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 30, 50, 100], "{x:g}×")
    for ax in axes.flat[len(series) :]:
        ax.set_axis_off()
    named = {f"N={N}, D={D}" + f", Dv={Dv}" * (Dv != D): handles[N, D, Dv] for N, D, Dv in sorted(handles)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=4)
    figure.suptitle(f"{TITLES[against]}  (dotted: {MARGIN:g}×)")
    return _svg(figure)


def _line(ax: Axes, points: list[tuple[int, Any]], N: int, D: int, Dv: int) -> Any:
    x, y = [L for L, _ in points], [ratio[0] for _, ratio in points]
    style = {(64, 64): "--", (128, 128): "-"}.get((D, Dv), ":")
    bars = [[abs((ratio[i] or ratio[0]) - ratio[0]) for _, ratio in points] for i in (1, 2)]
    color = COLORS.get(N, "#555555")
    return ax.errorbar(x, y, yerr=bars, color=color, ls=style, marker="o", ms=3.2, lw=1.3, elinewidth=1, capsize=2)


def _ticks(axis: Any, places: Iterable[float], form: str) -> None:
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(StrMethodFormatter(form))
    axis.set_minor_formatter(NullFormatter())


@rc_context(STYLE)  # type: ignore[arg-type]
def roofline(facts: list[Fact]) -> str | None:
    """Left: FLOP/s over FLOP per byte, with the roofline. Right: GB/s over bytes per call, which shows latency."""
    known = kernels(facts)
    if not known:
        return None
    figure = Figure(figsize=(WIDTH, 4.2))
    left, right = figure.subplots(1, 2)
    roof = max(float(fact["ceiling_gbps"]) for fact in known)
    matrix = max((float(fact["ceiling_tflops"]) for fact in known if fact.get("ceiling_tflops")), default=None)
    intensity = [fact["flops"] / fact["bytes"] for fact in known]
    for dist in dict.fromkeys(fact["dist"] for fact in known):
        some = [fact for fact in known if fact["dist"] == dist]
        style: dict[str, Any] = dict(zip(("marker", "color"), DISTS[dist], strict=True), s=18, alpha=0.75, linewidths=0)
        rate = [fact["flops"] / fact["median"] / 1e12 for fact in some]
        left.scatter([fact["flops"] / fact["bytes"] for fact in some], rate, label=dist, **style)
        right.scatter([fact["bytes"] / 2**20 for fact in some], [fact["gbps"] for fact in some], **style)
    span = [min(intensity) / 2, max(intensity) * 2]
    if matrix is not None:
        span[1] = max(span[1], matrix * 2e3 / roof)
        left.axhline(matrix, color="#b03030", lw=1, ls="--", label=f"matrix product, {matrix:.0f} TFLOP/s")
    left.plot(span, [x * roof / 1e3 for x in span], color="#444444", lw=1.2, label=f"memory, {roof:.0f} GB/s")
    left.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="Roofline")
    right.axhline(roof, color="#444444", lw=1.2)
    right.set(xscale="log", xlabel="unique bytes of a call, MiB", ylabel="GB/s", ylim=(0, roof * 1.12))
    right.set_title("Share of memory bandwidth")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    figure.legend(loc="outside lower center", ncols=4)
    return _svg(figure)


PEERS = {"ours, random": "#0b3c5d", "ours, 50% shared": "#2f7fb8", "ours, 90% shared": "#7fb2d9", "fla-core": "#3c8d5a"}
PEERS |= {"dense cuDNN": "#d1741f", "dense flash": "#b8b8b8"}


@rc_context(STYLE)  # type: ignore[arg-type]
def prefill_bars(facts: Iterable[Fact], gpu: str) -> str | None:
    """Times of the longest prompts, as :func:`nsa.testing.report.tables.longest_prompts`, which the SVG holds as JSON.

    Bars begin at zero, so that their lengths can be compared. Each has its name and its figure.
    """
    shown = longest_prompts(facts)
    if shown is None:
        return None
    groups = shown["milliseconds"]
    figure = Figure(figsize=(WIDTH, 0.9 + sum(0.25 * len(times) + 0.15 for times in groups.values())))
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=[*map(len, groups.values())])
    for ax, (heads, times) in zip(axes.flat, groups.items(), strict=True):
        bars = ax.barh(list(times), [float(value) for value in times.values()], color=[PEERS[name] for name in times])
        ax.bar_label(bars, list(times.values()), padding=3)
        ax.set_ylabel(f"HQ/HKV\n{heads}", rotation=0, ha="right", va="center", fontweight="bold")
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes.flat[-1].set_xlabel(
        "milliseconds of one forward pass, median; shorter is better\n"
        "ours, fla-core: 16 blocks of 64 keys a row; dense: causal attention over all keys"
    )
    figure.suptitle(f"{gpu}: prefill of {shown['T']} tokens, forward")
    return _svg(figure, Creator=None, Description=json.dumps(shown))


@rc_context(STYLE)  # type: ignore[arg-type]
def workloads(mixes: Mapping[tuple[str, str], list[Fact]], other: str) -> str | None:
    """How many times as fast as `other`: a dot a shape, its area by weight, a colour for each workload and variant."""
    figure = Figure(figsize=(WIDTH, 4.2))
    ax, marks = figure.subplots(), []
    for i, (mix, facts) in enumerate(mixes.items()):
        rows = [fact for fact in facts if other in fact["medians"]]
        if not rows:
            continue
        ours = [fact["medians"][fact["impl"]] for fact in rows]
        ratios = [fact["medians"][other] / mine for fact, mine in zip(rows, ours, strict=True)]
        most = max(fact["workload"]["weight"] for fact in rows) or 1
        size = [8 + 150 * fact["workload"]["weight"] / most for fact in rows]
        ax.scatter([mine * 1e6 for mine in ours], ratios, s=size, alpha=0.5, linewidths=0, color=f"C{i}")
        marks.append(Line2D([], [], marker="o", ls="", color=f"C{i}", label=", ".join(filter(None, mix))))
    if not marks:
        return None
    ax.axhline(1, color="#444444", lw=0.9, zorder=1)
    ax.set(xscale="log", yscale="log", xlabel="ours, us a call", ylabel="times as fast")
    _ticks(ax.xaxis, [10**i for i in range(8)], "{x:,g}")
    _ticks(ax.yaxis, [0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500], "{x:g}×")
    figure.legend(handles=marks, loc="outside lower center", ncols=4)
    figure.suptitle(f"Each shape: how many times as fast as {NAMES.get(other, other)} ours is; areas by weight")
    return _svg(figure)


@rc_context(STYLE)  # type: ignore[arg-type]
def before_after(pairs: list[tuple[str, float]]) -> str | None:
    """The largest changes of benchmarks `(name, ratio of new to old)`, by name. The band is the gate's 10%."""
    if not pairs:
        return None
    largest = sorted(sorted(pairs, key=lambda pair: -abs(pair[1] - 1))[:BARS], key=lambda pair: pair[1])
    change = {name.removeprefix("test_"): 100 * (ratio - 1) for name, ratio in largest}
    colors = ["#b03030" if c > 10 else "#3c8d5a" if c < -10 else "#2f7fb8" for c in change.values()]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.17 * len(change)))
    ax = figure.subplots()
    ax.axvspan(-10, 10, color="#dddddd", alpha=0.5, lw=0)
    ax.barh(list(change), list(change.values()), color=colors, height=0.8)
    ax.axvline(0, color="#444444", lw=0.9)
    ax.tick_params(axis="y", labelsize=7, length=0)
    ax.set(ylim=(-0.8, len(change) - 0.2), xlabel="time relative to control, change in % (grey: within 10%)")
    ax.margins(x=0.1)
    figure.suptitle(f"After over before (right of 0: slower): the largest changes, {len(change)} of {len(pairs)}")
    return _svg(figure)


@rc_context(STYLE)  # type: ignore[arg-type]
def drift(history: Mapping[str, Mapping[str, float]], commits: Sequence[str]) -> str | None:
    """Ratios to the control by commit, of the benchmarks furthest behind their best. ``commits``: all, in order."""
    known = {name: by for name, by in history.items() if len(by) > 1}
    behind = {name: [*by.values()][-1] / min(by.values()) for name, by in known.items()}
    shown = sorted(behind, key=lambda name: -behind[name])[:DRIFTING]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 4.6))
    ax = figure.subplots()
    ticks = [commit for commit in commits if any(commit in by for by in known.values())]
    for name in shown:
        by, low = known[name], min(known[name].values())
        ratios = [ratio / low for ratio in by.values()]
        ax.plot([*map(ticks.index, by)], ratios, marker="o", ms=3, lw=1.2, label=name.removeprefix("test_"))
    ax.axhline(1.1, color="#b03030", lw=0.9, ls=":")
    ax.set_xticks(range(len(ticks)), ticks, rotation=30)
    ax.set(ylabel="ratio to the control, over the best one")
    figure.legend(loc="outside lower center", ncols=1, fontsize=8)
    figure.suptitle(f"Ratios over recordings, the {len(shown)} furthest behind their best (dotted: 10%, a FAIL)")
    return _svg(figure)


def _svg(figure: Figure, **metadata: str | None) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, **metadata})
    body = re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE)
    return body[body.index("<svg") :]
