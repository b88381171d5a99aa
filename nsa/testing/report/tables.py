"""What the tables show of facts: on the screen after a run, in a report, and in `docs/results/`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from nsa.testing.report.recording import Fact, by_kind, geomean, grouped, speedup
from nsa.testing.report.table import EMPTY, Column, Table, Two
from nsa.tuning import thresholds

LEGENDS = Path(__file__).with_name("templates") / "legends.yaml"
VERSUS = {
    "replaced": "speedup_vs_fallback",  # packed SDPA with its packing, which routing would run instead
    "gather + SDPA": "speedup_vs_sdpa_end_to_end",  # gather from the cache and SDPA, with an index made beforehand
    "best SDPA": "speedup_vs_sdpa_best",  # the fastest SDPA layout, on rows already packed
    "expanded": "speedup_vs_sdpa_expanded",  # SDPA with K and V expanded to heads, on rows already packed
}
PEERS = {"fla": "fla-core"}  # names of nsa.testing.contestants.peers
DENSE = {"dense_cudnn": "dense cuDNN", "dense_flash": "dense flash"}
NAMES = {"vllm": "vLLM", "xunhao": "XunhaoLai"} | PEERS | DENSE
CSV = """
    group case dist source H D Dv L N dtype impl median_us ci95_low_us ci95_high_us gbps share_of_ceiling
    speedup_vs_fallback fallback_low fallback_high speedup_vs_sdpa_best sdpa_best speedup_vs_sdpa_expanded HQ HKV S S_kv
    shared ns_per_token ns_per_query memory_vs_flash tflops share_of_matmul speedup_vs_cudnn speedup_vs_flash
    speedup_vs_fla speedup_vs_query_major speedup_vs_key_major speedup_vs_vllm speedup_vs_xunhao share_of_read control
    ratio_to_control mae seed how cold device torch triton commit
""".split()


def of(facts: Iterable[Fact]) -> list[Table]:
    """The tables of a run or a recording, without the empty ones."""
    groups = ("kernels", "others")
    kinds = {kind: grouped(of_kind).items() if kind in groups else of_kind for kind, of_kind in by_kind(facts).items()}
    return [make(kind, rows) for kind, rows in kinds.items() if rows]


def make(kind: str, rows: Iterable[Any], columns: Sequence[Column] | None = None) -> Table:
    """The table of a kind of rows, with what `legends.yaml` says of it. columns: if they are not fixed."""
    return Table(columns=COLUMNS[kind] if columns is None else columns, rows=list(rows), **_legends()[kind])


@functools.cache
def _legends() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(LEGENDS.read_text(encoding="utf-8")))


# --- cells -----------------------------------------------------------------------------------------------------------


def times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}×"


def mean_and_worst(ratios: Iterable[float | None]) -> Two | None:
    """The geometric mean of the ratios that are known, and the smallest."""
    known = [ratio for ratio in ratios if ratio]
    return Two(f"{geomean(known):.2f}×", f"{min(known):.2f}×") if known else None


def seconds(value: float, digits: int = 3) -> str:
    """`1.25 ms`: significant digits and a unit."""
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if value >= s or u == "us")
    return f"{value / scale:.{digits}g} {unit}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f}"


def _microseconds(value: float) -> str:
    return f"{value * 1e6:.1f}"


def _three_digits(value: float) -> str:
    """Milliseconds, `15.0` or `0.885`."""
    return f"{value * 1e3:.{max(0, 2 - math.floor(math.log10(value * 1e3)))}f}"


def _key(name: str, key: str = "", form: str = "", place: Any = None) -> Column:
    """A fact as it is, or in a format; nothing for 0."""
    return Column(name, lambda fact: format(fact[key or name], form) if fact.get(key or name) else None, place)


def _faster(fact: Fact, comparator: str) -> str | None:
    """How many times as fast ours is; None if it is ours that is the comparator."""
    gain = None if comparator == fact.get("impl") else speedup(fact, comparator)
    return times(gain and gain[0])


def _beside(comparators: dict[str, str], shown: Callable[[float], str]) -> list[Column]:
    """Other implementations: their times and how many times as fast ours is; on the screen `vs name`, without times."""

    def both(fact: Fact, comparator: str) -> Two | None:
        ratio = _faster(fact, comparator)
        return None if ratio is None else Two(shown(fact["medians"][comparator]), ratio)

    columns = []
    for key, name in comparators.items():
        columns.append(Column(name, functools.partial(both, comparator=key), "page"))
        columns.append(Column(f"vs {name}", functools.partial(_faster, comparator=key), "screen"))
    return columns


def _ours(shown: Callable[[float], str]) -> Column:
    return Column("ours", lambda fact: shown(fact["median"]))


HEADS = Column("HQ/HKV", lambda fact: f"{fact['HQ']}/{fact['HKV']}")
OVERLAP = _key("shared", form=".0%")


def overlap(fact: Fact) -> float:
    """The share of its blocks that a query has in common with the query before it. Old recordings do not hold it."""
    return float(fact.get("shared") or 0.0)


def fallback(fact: Fact) -> bool:
    """Whether a benchmark times the path that Triton replaces."""
    return fact.get("impl") == thresholds.REPLACED


# --- columns ---------------------------------------------------------------------------------------------------------

Group = tuple[str, list[Fact]]
Mix = tuple[tuple[str, str], list[Fact]]  # a workload and its variant, and their facts


def _over(key: str) -> Callable[[Group], Two | None]:
    return lambda group: mean_and_worst(fact.get(key) for fact in group[1] if not fallback(fact))


def _over_controls(group: Group) -> Two | None:
    """How many times as fast as their controls. The fallback counts only if the group has no other benchmark."""
    counted = [fact for fact in group[1] if not fallback(fact)] or group[1]
    return mean_and_worst(1 / fact["ratio_to_control"] for fact in counted if fact.get("ratio_to_control"))


def _controls(group: Group) -> str | None:
    return ", ".join(dict.fromkeys(fact["control"] for fact in group[1] if fact.get("control"))) or None


def _top(group: Group) -> Fact:
    return max(group[1], key=lambda fact: float(fact["gbps"]))


def _qsa_shape(fact: Fact) -> str:
    """`chunk512-shared0.9`, `training-shared0.9, backward`."""
    return ", ".join(filter(None, (fact["case"].removeprefix("qsa-"), fact["group"].partition(": ")[2])))


GROUP = [Column("benchmarks", lambda group: group[0]), Column("cases", lambda group: len(group[1]))]
COLUMNS: dict[str, list[Column]] = {
    "prefill": [
        HEADS,
        _key("T", "S"),
        OVERLAP,
        Column("kernel", lambda fact: ", ".join(sorted(fact.get("launched") or ())) or fact.get("impl")),
        _ours(_milliseconds),
        _key("ns/token", "ns_per_token", ".1f", "page"),
        _key("TFLOP/s", "tflops", ".0f"),
        *_beside({"query_major": "query-major", "key_major": "key-major"} | PEERS | DENSE, _milliseconds),
        _key("of matrix rate", "share_of_matmul", ".1%", "page"),
    ],
    "training": [
        HEADS,
        _key("T", "S"),
        OVERLAP,
        _key("timed", "group"),
        _ours(_milliseconds),
        _key("ns/token", "ns_per_query", ".1f", "page"),
        *_beside(PEERS | DENSE, _milliseconds),
        Column("memory vs flash", lambda fact: times(fact.get("memory_vs_flash"))),
    ],
    "serving": [
        HEADS,
        _key("B"),
        _key("queries", "S"),
        _key("keys", "S_kv"),
        Column("pages", lambda fact: str(fact["impl"]).partition("paged")[2] or None),
        _ours(_microseconds),
        *_beside({"auto": "no cache", "kvcache": "contiguous"} | PEERS, _microseconds),
        Column("over its share", lambda fact: times(fact.get("times_its_share"))),
    ],
    "m3": [
        Column("shape", lambda fact: str(fact["case"]).removeprefix("m3-")),
        _ours(_microseconds),
        *_beside({"vllm": "vLLM"} | PEERS, _microseconds),
        *_beside({"xunhao": "XunhaoLai", "m3_bf16": "bf16 cache", "calls_apart": "two calls"}, _microseconds),
        _key("of read", "share_of_read", ".1%"),
    ],
    "qsa": [
        Column("shape", _qsa_shape),
        _ours(_microseconds),
        *_beside({"vllm": "vLLM"} | DENSE, _microseconds),
        Column("memory vs flash", lambda fact: times(fact.get("memory_vs_flash"))),
        _key("of read", "share_of_read", ".1%"),
    ],
    "sharded": [
        _key("GPUs", "world"),
        _key("T", "tokens"),
        _ours(_milliseconds),
        Column("one GPU", lambda fact: Two(_milliseconds(fact["control_median"]), times(fact["speedup"]) or EMPTY)),
        _key("hidden", form=".0%"),
        Column("memory", lambda fact: times(fact.get("memory"))),
        Column("world of 1", lambda fact: times(fact.get("world_of_1"))),
        Column("a million", lambda fact: times(fact.get("long"))),
    ],
    "kernels": [
        *GROUP,
        *(Column(f"vs {name}", _over(key)) for name, key in VERSUS.items()),
        Column("GB/s", lambda group: f"{_top(group)['gbps']:.0f}"),
        Column("of ceiling", lambda group: f"{_top(group)['share_of_ceiling']:.1%}"),
    ],
    "others": [
        *GROUP,
        Column("vs control", _over_controls),
        Column("fastest", lambda group: seconds(min(fact["median"] for fact in group[1]))),
        Column("slowest", lambda group: seconds(max(fact["median"] for fact in group[1]))),
        Column("control", _controls),
    ],
    "cases": [
        Column("case", lambda fact: fact["case"] if fact.get("share_of_ceiling") else fact["name"]),
        _key("group"),
        Column("median", lambda fact: seconds(fact["median"])),
        Column("95% interval", lambda fact: " – ".join(map(seconds, fact.get("ci95") or ())) or None),
        Column("GB/s", lambda fact: f"{fact['gbps']:.0f}" if fact.get("share_of_ceiling") else None),
        _key("of ceiling", "share_of_ceiling", ".1%"),
        Column("vs replaced", lambda fact: _faster(fact, thresholds.REPLACED)),
        Column("vs best SDPA", lambda fact: None if fallback(fact) else _faster(fact, str(fact.get("sdpa_best")))),
        _key("MAE", "mae", ".1e"),
    ],
    "changes": [
        Column("benchmark", lambda change: change[0]),
        Column("group", lambda change: change[1]),
        Column("change, to control", lambda change: f"{change[2] - 1:+.1%}"),
        Column("before", lambda change: seconds(change[3])),
        Column("after", lambda change: seconds(change[4])),
    ],
}


def csv_of(facts: Iterable[Fact]) -> Table:
    """A row for each benchmark, figures as they are; times in microseconds."""

    def line(fact: Fact) -> dict[str, Any]:
        ends = zip(("ci95_low_us", "ci95_high_us"), fact.get("ci95") or (), strict=False)
        bounds = zip(("fallback_low", "fallback_high"), (speedup(fact, thresholds.REPLACED) or ())[1:], strict=False)
        more = {"case": fact.get("case") or fact["name"], "median_us": fact["median"] * 1e6}
        return fact | (fact.get("timing") or {}) | more | {name: end * 1e6 for name, end in ends} | dict(bounds)

    columns = [Column(name, lambda line, name=name: line.get(name)) for name in CSV]  # type: ignore[misc]
    return Table("report.csv", columns, [line(fact) for fact in facts if not fact.get("layouts")])


def threshold(decision: thresholds.Decision, on_packed: thresholds.Decision) -> Table:
    """A row for each combination of heads, dims and distribution that decides `sel_triton_min_L`."""

    def row(key: thresholds.Key) -> dict[str, str | None]:
        mine = [point for point in decision.points if point.key == key]
        least, decided = min(mine, key=lambda point: point.speedup), any(point.low is not None for point in mine)
        starts = [str(by.groups.get(key) or "never") if decided else "undecided" for by in (decision, on_packed)]
        return dict(zip(("H", "D", "Dv", "distribution"), map(str, key), strict=True)) | {
            "L measured": ", ".join(map(str, sorted({point.L for point in mine}))),
            f"{thresholds.MARGIN:g}× the replaced path from L": starts[0],
            "slowest": times(least.speedup),
            "95% interval": None if least.low is None else f"{least.low:.2f}–{least.high:.2f}",
            "at L": str(least.L),
            f"{thresholds.MARGIN:g}× the best SDPA on packed rows from L": starts[1],
        }

    rows = [row(key) for key in sorted(decision.groups, key=lambda key: (key[3], key))]
    columns = [Column(name, lambda row, name=name: row[name]) for name in (rows or [{}])[0]]  # type: ignore[misc]
    return make("threshold", rows, columns)


def workloads(mixes: dict[tuple[str, str], list[Fact]]) -> Table:
    """A row for each workload and variant: our weighted mean time, and that of each other beside it."""
    from nsa.testing.workloads import mix  # here, because it imports Triton

    def beside(other: str) -> Callable[[Mix], Two | None]:
        def cell(row: Mix) -> Two | None:
            rows = [fact for fact in row[1] if other in fact["medians"]]
            if not rows:
                return None
            theirs = mix.mean(rows, other)
            return Two(_three_digits(theirs), f"{theirs / mix.mean(rows, 'auto'):.2f}×")

        return cell

    def worst_of(row: Mix) -> str | None:
        ratios = [
            (seconds / fact["medians"]["auto"], other, fact["workload"]["shape"])
            for fact in row[1] for other, seconds in fact["medians"].items() if other not in ("auto", *DENSE)
        ]  # fmt: skip
        ratio, other, shape = min(ratios, default=(0.0, "", ""))
        return f"{ratio:.2f}×, {shape}, {NAMES.get(other, other)}" if ratios else None

    others = mix.others(fact for facts in mixes.values() for fact in facts)
    columns = [
        Column("workload", lambda row: ", ".join(filter(None, row[0]))),
        Column("shapes", lambda row: len(row[1])),
        Column("ours", lambda row: _three_digits(mix.mean(row[1], "auto"))),
        *(Column(NAMES.get(other, other), beside(other)) for other in others),
        Column("worst shape", worst_of),
    ]
    return make("workloads", mixes.items(), columns)


# --- README ----------------------------------------------------------------------------------------------------------


def headline(facts: Iterable[Fact]) -> Table:
    """At most eight rows for README: the longest prompt, training on it, MiniMax-M3 and QSA; most overlap first."""
    kinds = by_kind(facts)
    widest = next(fact for fact in kinds["prefill"] if fact["S"] == kinds["prefill"][-1]["S"])
    calls = [("prefill", fact) for fact in kinds["prefill"]]
    calls += [("prefill with its backward pass", fact) for fact in kinds["training"] if fact["group"] != "backward"]
    alike = [(name, fact) for name, fact in calls if all(fact[x] == widest[x] for x in ("HQ", "HKV", "S"))]
    rows = [(f"{name}, {fact['S']:,} tokens", fact) for name, fact in alike if overlap(fact) in (0.9, 0.0)]
    named = {"m3-chunk4096": "chunk of 4,096 tokens", "m3-decode-B64": "decode step of 64 sequences"}
    shapes = [(named.get(str(fact["case"]).removesuffix("-shared0.9")), fact) for fact in kinds["m3"]]
    rows += [(f"MiniMax-M3, {name}", fact) for name, fact in shapes if name]
    rows += [("QSA, chunk of 512 tokens", fact) for fact in kinds["qsa"] if fact["case"] == "qsa-chunk512-shared0.9"]

    def of_fact(column: Column) -> Column:
        return Column(column.name, lambda row: column.of(row[1]), column.place)

    columns = [
        Column("call", lambda row: row[0]),
        of_fact(HEADS),
        Column("shared", lambda row: OVERLAP.of(row[1]) or "random"),
        of_fact(_ours(_three_digits)),
        *map(of_fact, _beside(PEERS | {"vllm": "vLLM", "dense_cudnn": "dense cuDNN"}, _three_digits)),
    ]
    return make("headline", sorted(rows, key=lambda row: -overlap(row[1])), columns)


def longest_prompts(facts: Iterable[Fact]) -> dict[str, Any] | None:
    """The contents of README's picture: milliseconds of the longest prompts, as in their table; None without prompts.

    `{"T": 65536, "milliseconds": {"64/4": {"ours, 90% shared": "6.62", "ours, random": …, "fla-core": …}}}`
    """
    rows = make("prefill", by_kind(facts)["prefill"]).cells()
    if not rows:
        return None
    milliseconds: dict[str, dict[str, str]] = {}
    for row in (row for row in rows if row["T"] == rows[-1]["T"]):
        mine, alone = milliseconds.setdefault(row["HQ/HKV"], {}), row.get("shared", EMPTY) == EMPTY
        others = {name: row.get(name, EMPTY) for name in (*PEERS.values(), *DENSE.values()) if alone}
        ours = {"ours, random" if alone else f"ours, {row['shared']} shared": row["ours"]}
        # Most overlap first, and the others last; rows come with the least overlap first.
        milliseconds[row["HQ/HKV"]] = ours | mine | {name: cell.first for name, cell in others.items() if cell != EMPTY}
    return {"T": int(rows[-1]["T"]), "milliseconds": milliseconds}
