"""The report's pictures, as text in SVG. Needs matplotlib (`pip install 'nsa[report]'`)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from nsa.testing.report.recording import Fact, kernels, speedup
from nsa.tuning.thresholds import MARGIN

COLORS = {64: "#7fb2d9", 256: "#2f7fb8", 1024: "#0b3c5d"}  # by N, light to dark
DIST_MARKS = {"few": "o", "many": "^", "mixed": "v", "decode": "s", "prefill": "D"}
DIST_COLORS = {"few": "#0b3c5d", "many": "#d1741f", "mixed": "#3c8d5a", "decode": "#a03a78", "prefill": "#777777"}
PANEL = (3.0, 3.1)  # inches
REPLACED, BEST = "sdpa", "best"
TITLES = {
    REPLACED: "Speedup over the path Triton replaces: packed SDPA with its packing",
    BEST: "Speedup over the best SDPA call on rows already packed",
}


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
    wide = min(len(series), 4)
    deep = -(-len(series) // wide)
    figure = Figure(figsize=(max(PANEL[0] * wide, 6.5), PANEL[1] * deep + 0.7), layout="constrained")
    axes = figure.subplots(deep, wide, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for ax, ((dist, H), lines) in zip(axes.flat, sorted(series.items()), strict=False):
        for (N, D, Dv), found in sorted(lines.items()):
            label = f"N={N}, D={D}" + (f", Dv={Dv}" if Dv != D else "")
            handles[label] = _line(ax, sorted(found), N, D, Dv)
        ax.set_title(f"{dist}, H={H}", fontsize=10)
        _log2_lengths(ax, [L for found in lines.values() for L, _ in found])
        ax.axhline(1, color="#444444", lw=0.9, zorder=1)
        ax.axhline(MARGIN, color="#b03030", lw=0.9, ls=":", zorder=1)
    _speedup_axis(axes[:, 0], [r[0] for p in series.values() for f in p.values() for _, r in f])
    for ax in axes.flat[len(series) :]:
        ax.set_axis_off()
    order = sorted(handles, key=lambda label: [int(n) for n in re.findall(r"\d+", label)])
    columns = {1: 3, 2: 3}.get(wide, 6)
    drawn = [handles[name] for name in order]
    figure.legend(drawn, order, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.suptitle(f"{TITLES[against]}  (dotted: {MARGIN:g}×)", fontsize=11)
    return _svg(figure)


def _line(ax: Axes, found: list[tuple[int, Any]], N: int, D: int, Dv: int) -> Any:
    x, y = [L for L, _ in found], [ratio[0] for _, ratio in found]
    style = {(64, 64): "--", (128, 128): "-"}.get((D, Dv), ":")
    below = [ratio[0] - (ratio[1] or ratio[0]) for _, ratio in found]
    bars = [below, [(ratio[2] or ratio[0]) - ratio[0] for _, ratio in found]]
    color = COLORS.get(N, "#555555")
    drawn = ax.errorbar(x, y, yerr=bars, color=color, ls=style, marker="o", ms=3.2, lw=1.3, elinewidth=1, capsize=2)
    return drawn


def _log2_lengths(ax: Axes, lengths: Iterable[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=8)
    ax.set_xlabel("L, keys selected in a row", fontsize=8)
    ax.grid(alpha=0.25, lw=0.6)


def _speedup_axis(axes: Iterable[Axes], ratios: list[float]) -> None:
    low, high = min(*ratios, 1.0) / 1.08, max(*ratios, MARGIN) * 1.08
    ticks = [t for t in (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 30, 50, 100) if low <= t <= high]
    for ax in axes:
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        ax.yaxis.set_major_locator(FixedLocator(ticks))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylabel("speedup", fontsize=8)


def roofline(facts: list[Fact]) -> str | None:
    """Left: FLOP/s over FLOP per byte, with the roofline. Right: GB/s over bytes per call, which shows latency."""
    known = kernels(facts)
    if not known:
        return None
    figure = Figure(figsize=(11.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    roof = max(float(fact["ceiling_gbps"]) for fact in known)
    matrix = max((float(fact["ceiling_tflops"]) for fact in known if fact.get("ceiling_tflops")), default=None)
    intensity = [fact["flops"] / fact["bytes"] for fact in known]
    for dist in dict.fromkeys(fact["dist"] for fact in known):
        some = [fact for fact in known if fact["dist"] == dist]
        style: dict[str, Any] = {"color": DIST_COLORS[dist], "marker": DIST_MARKS[dist], "label": dist}
        style |= {"s": 18, "alpha": 0.75, "linewidths": 0}
        rate = [fact["flops"] / fact["median"] / 1e12 for fact in some]
        left.scatter([fact["flops"] / fact["bytes"] for fact in some], rate, **style)
        right.scatter([fact["bytes"] / 2**20 for fact in some], [fact["gbps"] for fact in some], **style)
    span = [min(intensity) / 2, max(intensity) * 2]
    if matrix is not None:
        span[1] = max(span[1], matrix * 2e3 / roof)
        left.axhline(matrix, color="#b03030", lw=1, ls="--", label=f"matrix product, {matrix:.0f} TFLOP/s")
    left.plot(span, [x * roof / 1e3 for x in span], color="#444444", lw=1.2, label=f"memory, {roof:.0f} GB/s")
    left.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="Roofline")
    right.axhline(roof, color="#444444", lw=1.2, label=f"memory, {roof:.0f} GB/s")
    right.set(xscale="log", xlabel="unique bytes of a call, MiB", ylabel="GB/s", title="Share of memory bandwidth")
    right.set_ylim(0, roof * 1.12)
    for ax in (left, right):
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.grid(alpha=0.25, lw=0.6)
        ax.legend(fontsize=8, frameon=False, loc="lower right")
    left.xaxis.set_major_locator(FixedLocator([2.0**i for i in range(-2, 11) if span[0] <= 2.0**i <= span[1]]))
    left.xaxis.set_minor_formatter(NullFormatter())
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    return _svg(figure)


PEER_COLORS = {"ours": "#0b3c5d", "ours, 50% shared": "#2f7fb8", "ours, 90% shared": "#7fb2d9", "fla-core": "#3c8d5a"}
PEER_COLORS |= {"dense cuDNN": "#d1741f", "dense flash": "#b8b8b8"}


def prefill_bars(shown: dict[str, Any]) -> str:
    """README's picture of :func:`nsa.testing.report.tables.longest_prompts`. The SVG also holds that as JSON.

    Bars begin at zero, so that their lengths can be compared. The figures beside them are those of README's table.
    """
    groups: dict[str, dict[str, str]] = shown["milliseconds"]
    bars = [(heads, name, value) for heads, found in groups.items() for name, value in found.items()]
    figure = Figure(
        figsize=(8.4, 0.23 * len(bars) + 0.18 * len(groups) + 1.25), layout="constrained", facecolor="white"
    )
    ax = figure.subplots()
    y = 0.0
    place: list[float] = []
    middle: dict[str, float] = {}
    for heads, found in groups.items():
        middle[heads] = y + (len(found) - 1) / 2
        place += [y + i for i in range(len(found))]
        y += len(found) + 0.8
    longest = max(float(value) for _, _, value in bars)
    for at, (_, name, value) in zip(place, bars, strict=True):
        ax.barh(at, float(value), height=0.86, color=PEER_COLORS[name])
        weight = "bold" if name == "ours" else "normal"
        ax.text(float(value) + longest / 120, at, value, va="center", fontsize=8.5, fontweight=weight)
    ax.set_yticks(list(middle.values()), [f"HQ/HKV\n{heads}" for heads in middle], fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.09)
    ax.set_xlabel(
        "milliseconds of one forward pass, median; shorter is better\n"
        "ours, fla-core: 16 blocks of 64 keys a row; dense: causal attention over all keys",
        fontsize=9,
    )
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25, lw=0.6)
    ax.set_axisbelow(True)
    named = [name for name in PEER_COLORS if any(name == other for _, other, _ in bars)]
    handles = [ax.barh(0, 0, color=PEER_COLORS[name], label=name) for name in named]
    ax.legend(handles, named, loc="lower right", fontsize=9, frameon=False)
    ax.set_title(f"{shown['gpu']}: prefill of {shown['T']} tokens, forward", fontsize=11, loc="left")
    return _svg(figure, {"Creator": None, "Description": json.dumps(shown)})


def before_after(pairs: list[tuple[str, str, float]]) -> str | None:
    """The changes of all benchmarks `(name, group, ratio of new to old)`, sorted. The band is the gate's 10%."""
    if not pairs:
        return None
    figure = Figure(figsize=(11.5, 3.4), layout="constrained")
    ax = figure.subplots()
    ordered = sorted(pairs, key=lambda pair: pair[2])
    change = [100 * (ratio - 1) for _, _, ratio in ordered]
    colors = ["#b03030" if c > 10 else "#3c8d5a" if c < -10 else "#2f7fb8" for c in change]
    ax.axhspan(-10, 10, color="#dddddd", alpha=0.5, lw=0, label="within 10%")
    ax.bar(range(len(change)), change, color=colors, width=0.8)
    ax.axhline(0, color="#444444", lw=0.9)
    largest = max(12.0, *(abs(c) for c in change)) * 1.1
    ax.set(ylim=(-largest, largest), xlim=(-1, len(change)), ylabel="time relative to control, change in %")
    ax.set(xlabel=f"{len(change)} benchmarks, fastest change first", title="After over before (above 0: slower)")
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    ax.grid(alpha=0.25, lw=0.6, axis="y")
    return _svg(figure)


def _svg(figure: Figure, metadata: dict[str, str | None] | None = None) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    title = figure.get_suptitle() or figure.axes[0].get_title() or figure.axes[0].get_title(loc="left")
    with rc_context({"svg.hashsalt": title}):  # otherwise ids are random, and equal reports differ
        figure.savefig(text, format="svg", metadata={"Date": None} | (metadata or {}))
    body = re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE)
    return body[body.index("<svg") :]
