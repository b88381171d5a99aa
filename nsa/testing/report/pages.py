"""The report: `python -m nsa.testing.report [JSON…] -o DIR`, and `--readme` for the tables and pictures of README.md.

The report of a recording is written as Markdown, CSV and a self-contained HTML page. Of two recordings, before and
after, it also shows the changes. Pictures need matplotlib and pages need jinja2 (`pip install 'nsa[report]'`).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.gpu import device_slug
from nsa.testing.report.recording import (
    Fact,
    Recording,
    load,
    m3,
    newest,
    prefills,
    servings,
    speedup,
    trainings,
)
from nsa.testing.report.tables import (
    M3_HEADER,
    M3_TEXT,
    PREFILL_HEADER,
    SERVING_HEADER,
    TRAINING_HEADER,
    describe,
    longest_prompts,
    m3_rows,
    prefill_rows,
    serving_rows,
    summary_rows,
    training_rows,
)
from nsa.tuning import thresholds

ROOT = Path(__file__).parents[3]
BASELINES = ROOT / "tests" / "perf" / "baselines"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLUMNS = (
    "group", "case", "dist", "source", "H", "D", "Dv", "L", "N", "dtype", "impl", "median_us", "ci95_low_us",
    "ci95_high_us", "gbps", "share_of_ceiling", "speedup_vs_fallback", "fallback_low", "fallback_high",
    "speedup_vs_sdpa_best", "sdpa_best", "speedup_vs_sdpa_expanded", "HQ", "HKV", "S", "S_kv", "shared", "ns_per_token",
    "ns_per_query", "memory_vs_flash", "tflops", "share_of_matmul",
    "speedup_vs_cudnn", "speedup_vs_flash", "speedup_vs_fla", "speedup_vs_query_major",
    "speedup_vs_key_major", "speedup_vs_vllm", "speedup_vs_xunhao", "share_of_read",
    "control", "ratio_to_control", "mae", "seed",
    "how", "cold", "device", "torch", "triton", "commit",
)  # fmt: skip
README_PREFILL = (
    *("HQ/HKV", "T", "shared", "ours", "ns/token", "TFLOP/s", "fla-core", "dense cuDNN", "dense flash"),
    *("vs fla-core", "vs cuDNN", "vs flash"),
)
PREFILL_LEGEND = (
    "*shared*: the share of its blocks that a query has in common with the query before it; without a figure, blocks "
    "are random. *TFLOP/s*: of the selected keys."
)
README_TRAINING = tuple(name for name in TRAINING_HEADER if name != "ns/token")
SERVING_LEGEND = (
    "*vs*: how many times as fast. *over*: how many times as long. *no cache*: the same keys without lengths and "
    "pages; *its share*: the chunk's part of a whole prompt's time."
)
EXTRA_MISSING = "the report needs {}: pip install 'nsa[report]'"


def write(recordings: Sequence[Recording], folder: Path) -> Path:
    """Write report.md, report.csv and report.html of the last recording. Returns the path of report.html.

    Args:
        recordings: one recording, or two: before and after.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is missing.
        OSError: the folder cannot be written.
    """
    from jinja2 import Environment, PackageLoader

    context = describe(recordings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, escape in (("report.md", False), ("report.html", True)):
        options: dict[str, Any] = {"autoescape": escape, "trim_blocks": True, "lstrip_blocks": True}
        template = Environment(loader=PackageLoader("nsa.testing.report"), **options).get_template(f"{name}.j2")
        (folder / name).write_text(template.render(context) + "\n", encoding="utf-8")
    with (folder / "report.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(_line(fact) for fact in recordings[-1].facts if not fact.get("layouts"))
    return folder / "report.html"


def _line(fact: Fact) -> dict[str, Any]:
    """A line of report.csv, with times in microseconds."""
    line = {name: fact.get(name, "") for name in COLUMNS} | {"median_us": fact["median"] * 1e6}
    for name, end in zip(("ci95_low_us", "ci95_high_us"), fact.get("ci95") or (), strict=False):
        line[name] = end * 1e6
    ends = speedup(fact, thresholds.REPLACED)
    if ends is not None:
        line |= {"fallback_low": ends[1], "fallback_high": ends[2]}
    timing = fact.get("timing") or {}
    return line | {"case": fact.get("case") or fact["name"], "how": timing.get("how"), "cold": timing.get("cold")}


# --- README ----------------------------------------------------------------------------------------------------------


def readme_block(recordings: Sequence[Recording]) -> str:
    """The measured results for README.md, from the newest recording of each GPU, or of each CPU if there is no GPU."""
    text: list[str] = []
    for recording in _shown(recordings):
        picture = longest_prompts(recording)
        if picture is not None:
            text += [f"![{_alternative(picture)}]({picture_path(recording)})", ""]
        where = f"**{recording.gpu or recording.device}**, torch {recording.torch}, Triton {recording.triton}"
        text += [f"{where}; ratios are of one run.", ""]
        prompts, trained = prefills(recording.facts), trainings(recording.facts)
        served, of_m3 = servings(recording.facts), m3(recording.facts)
        if prompts:
            title = "Prefill, forward, 16 blocks of 64, D = 128, milliseconds, and how many times as fast"
            text += [f"{title} {_when(recording, prompts)}:", "", PREFILL_LEGEND, ""]
            text += _table(README_PREFILL, PREFILL_HEADER, prefill_rows(prompts))
        if trained:
            title = "Training on the same prompts (dQ, dK and dV, alone and with the forward pass before)"
            rows = _table(README_TRAINING, TRAINING_HEADER, training_rows(trained))
            text += _folded(f"{title} {_when(recording, trained)}", rows)
        if served:
            title = "Serving from a KV cache, 16 blocks of 64 a query, D = 128, microseconds, as a graph"
            rows = [SERVING_LEGEND, "", *_table(SERVING_HEADER, SERVING_HEADER, serving_rows(served))]
            text += _folded(f"{title} {_when(recording, served)}", rows)
        if of_m3:
            rows = [M3_TEXT, "", *_table(M3_HEADER, M3_HEADER, m3_rows(of_m3))]
            text += _folded(f"MiniMax-M3 over its cache, beside vLLM's kernels {_when(recording, of_m3)}", rows)
        rest = [fact for fact in recording.facts if fact not in (*prompts, *trained, *served, *of_m3)]
        others = _groups(rest)
        title = (
            f"Packed rows, spans and decode: how many times as fast, geometric mean (worst) {_when(recording, rest)}"
        )
        text += _folded(title, others) if prompts or trained else [f"{title}:", "", *others]
    return "\n".join([BEGIN, *text, END])


def _when(recording: Recording, facts: list[Fact]) -> str:
    """`(commit, date)` of some benchmarks, because the tables of README may come from different days."""
    return f"({'; '.join(recording.taken(facts))})"


def _shown(recordings: Sequence[Recording]) -> list[Recording]:
    return [r for r in recordings if r.gpu] or list(recordings)


def _groups(facts: list[Fact]) -> list[str]:
    """A Markdown table with a line for each group of benchmarks."""
    columns = (
        *("benchmarks", "cases", "vs what it replaces"),
        *("vs gather + SDPA", "vs best SDPA on packed rows", "of memory ceiling"),
    )
    text = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, cases, *cells in summary_rows(facts):
        replaced, gather, best, control = (_both(cells[i : i + 2]) for i in (0, 2, 4, 8))
        first = replaced if replaced != "-" else "-" if cells[-1] != "-" else f"{control} (control)"
        text.append(f"| {name} | {cases} | {first} | {gather} | {best} | {cells[-1]} |")
    return [*text, ""]


def _folded(title: str, body: list[str]) -> list[str]:
    """Markdown that a reader unfolds."""
    return ["<details>", f"<summary>{title}</summary>", "", *body, "</details>", ""]


def picture_path(recording: Recording) -> str:
    """The path of a device's picture, relative to the root of the repository."""
    return f"docs/{device_slug(recording.gpu or recording.device)}.svg"


def pictures(recordings: Sequence[Recording]) -> dict[str, str]:
    """The SVG files that README's block shows, by path.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from nsa.testing.report import plots

    found = {picture_path(recording): longest_prompts(recording) for recording in _shown(recordings)}
    return {path: plots.prefill_bars(shown) for path, shown in found.items() if shown is not None}


def _alternative(shown: dict[str, Any]) -> str:
    """The picture's alternative text."""
    said = [
        f"{heads} heads: " + ", ".join(f"{name} {value}" for name, value in found.items())
        for heads, found in shown["milliseconds"].items()
    ]
    return f"Prefill of {shown['T']} tokens on {shown['gpu']}, milliseconds. {'; '.join(said)}"


def _table(columns: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table of those of the columns that a row fills, and an empty line."""
    named = [dict(zip(header, row, strict=True)) for row in rows]
    columns = [name for name in columns if any(row[name] != "-" for row in named)]
    lines = [f"| {' | '.join(row[name] for name in columns)} |" for row in named]
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *lines, ""]


def _both(cells: Sequence[str]) -> str:
    return "-" if cells[0] == "-" else f"{cells[0]} ({cells[1]})"


def with_block(readme: str, block: str) -> str:
    """`readme` with a new block between the markers. Raises ValueError unless each marker occurs once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md: expected one {BEGIN} and one {END}")
    return readme[: readme.index(BEGIN)] + block + readme[readme.index(END) + len(END) :]


def _update_readme() -> str:
    recordings = _baselines()
    drawn = pictures(recordings)  # before README is written, because drawing may fail
    path = ROOT / "README.md"
    path.write_text(with_block(path.read_text(encoding="utf-8"), readme_block(recordings)), encoding="utf-8")
    for name, picture in drawn.items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(picture, encoding="utf-8")
    return ", ".join([str(path), *drawn])


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa.testing.report", description=__doc__)
    parser.add_argument("json", nargs="*", type=Path, help="one recording, or before and after; default: the baselines")
    parser.add_argument("-o", metavar="DIR", type=Path, help="where report.md, report.csv and report.html go")
    parser.add_argument("--readme", action="store_true", help="rewrite README.md's measured results and pictures")
    args = parser.parse_args(argv)
    if len(args.json) > 2:
        parser.error(f"expected one recording, or before and after, got {len(args.json)} files")
    if args.readme == (args.o is not None):
        parser.error("expected either -o DIR or --readme")
    try:
        done = _update_readme() if args.readme else str(write([load(p) for p in args.json] or _baselines()[:1], args.o))
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name not in ("matplotlib", "jinja2"):
            raise
        print(f"error: {EXTRA_MISSING.format(name)}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {done}")
    return 0


def _baselines() -> list[Recording]:
    recordings = newest(BASELINES)
    if not recordings:
        raise ValueError(f"no baseline in {BASELINES}; record one with: pytest -m perf --nsa-save-baseline")
    return recordings
