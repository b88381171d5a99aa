"""The report: `python -m nsa.testing.report [JSON…] -o DIR`, and `--readme` for README.md and `docs/results/`.

Without a file, it is of the newest baseline: of `nsa-baselines/` in the current folder, where kernels of others have
theirs, or else of the checkout. The report is written as Markdown, CSV and a self-contained HTML page. Of two
recordings, before and after, it also shows the changes. Pictures need matplotlib and pages need jinja2
(`pip install 'nsa[report]'`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.files import write_whole
from nsa.gpu import device_slug
from nsa.testing.report import summary, table, tables
from nsa.testing.report.recording import Fact, Recording, geomean, history, kernels, load, newest
from nsa.testing.report.table import Column, Table
from nsa.tuning import thresholds

ROOT = Path(__file__).parents[3]
BASELINES = ROOT / "tests" / "perf" / "baselines"
THEIRS = Path("nsa-baselines")
RESULTS = Path("docs", "results")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
THIS_RUN = "this run"  # the source of the recording that `artifacts.this_run` makes
MOVED = 0.1  # a change of more than 10% is listed by name


@dataclass(frozen=True)
class Section:
    """A heading, and any of text, pictures (SVG, or a path; None: nothing to draw), a table and code."""

    title: str
    text: str = ""
    pictures: Sequence[str | None] = ()
    table: Table | None = None
    code: str = ""

    @classmethod
    def of(cls, table: Table, text: str = "", pictures: Sequence[str | None] = ()) -> Section:
        """A table below its legend and its example."""
        return cls(table.title, "\n\n".join(filter(None, (text, table.legend, table.explained()))), pictures, table)


# --- the report of a recording ---------------------------------------------------------------------------------------


def write(recordings: Sequence[Recording], folder: Path) -> Path:
    """Write report.md, report.csv and report.html of the last recording. Returns the path of report.html.

    Args:
        recordings: one recording, or two: before and after.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is missing.
        OSError: the folder cannot be written.
    """
    import jinja2  # noqa: F401  # before anything is drawn

    context = describe(recordings)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("report.md", "report.html"):
        (folder / name).write_text(rendered(name, context), encoding="utf-8")
    table.write_csv(tables.csv_of(recordings[-1].facts), folder / "report.csv")
    return folder / "report.html"


def rendered(name: str, context: dict[str, Any]) -> str:
    """A page made of the template `name`. Raises ModuleNotFoundError without jinja2."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    def marked(text: str) -> Markup:
        """`*term*` and `` `code` `` of a legend as HTML, paragraphs as line breaks."""
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*([^*]+)\*", r"<em>\1</em>", str(escape(text))))
        return Markup(text.replace("\n\n", "<br>"))  # escaped above

    how = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    pages = Environment(loader=PackageLoader("nsa.testing.report"), autoescape=name.endswith("html"), **how)  # type: ignore[arg-type]
    pages.filters |= {"markdown": table.markdown, "marked": marked}
    return pages.get_template(f"{name}.j2").render(context)


def describe(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The variables of the templates: title, subtitle, verdict, rationale and sections."""
    from nsa.testing.report import plots

    now = recordings[-1]
    decision, on_packed = thresholds.decide(now.facts), thresholds.decide(now.facts, against="best")
    bars = plots.prefill_bars(now.facts, now.gpu or now.device)
    sections = [
        *(Section.of(one, pictures=[bars] if one.title == "Prefill" else []) for one in tables.of(now.facts)),
        Section(
            "Speedup over L",
            "Ratios of medians from one run, implementations sampled in turn. Bars divide the ends of the two 95% "
            "bootstrap intervals, if both are recorded, so they are never too short; most are smaller than the marks.",
            [plots.speedup_over_L(now.facts, name) for name in (plots.REPLACED, plots.BEST)],
        ),
        *_workloads(now.facts),
        Section("Roofline", _timing_note(now.facts), [plots.roofline(now.facts)]),
        Section(
            "Drift",
            "Each benchmark's time, divided by its control's, over the recordings that lie beside this one.",
            [plots.drift(*history(recordings))],
        ),
        *([_change(recordings[0], now)] if len(recordings) == 2 else []),
        Section.of(tables.threshold(decision, on_packed)),
        Section.of(tables.make("cases", (fact for fact in now.facts if not fact.get("layouts")))),
        Section.of(_environment(recordings)),
        Section("How to reproduce", code=_commands(recordings)),
    ]
    return {
        "title": f"Selection attention on {now.gpu or now.device}",
        "subtitle": f"torch {now.torch}, Triton {now.triton}, commit {now.commit}, {now.environment['date']}",
        "verdict": verdict(now),
        "rationale": rationale(now, decision, on_packed),
        "sections": [s for s in sections if any(s.pictures) or (s.table and s.table.rows) or s.code],
    }


def verdict(recording: Recording) -> str:
    """The threshold in force on the recording's device, and its source."""
    if recording.gpu is None:
        return "sel_triton_min_L is not used on this device: without a GPU, calls run packed SDPA."
    return f"sel_triton_min_L in force: {summary.in_force(recording.gpu, live=recording.source == THIS_RUN)}."


def rationale(recording: Recording, decision: thresholds.Decision, on_packed: thresholds.Decision) -> list[str]:
    """Sentences that say which threshold the recording measured, and why."""
    if recording.gpu is None:
        return []
    return [f"This recording {summary.outcome(decision)}.", *thresholds.rationale(decision, on_packed)]


def _workloads(facts: list[Fact]) -> list[Section]:
    """The table of workloads, and a picture for each peer and the control."""
    if not any(fact.get("workload") for fact in facts):
        return []
    from nsa.testing.report import plots
    from nsa.testing.workloads import mix

    mixes = mix.by_mix(facts)
    others = mix.others(fact for rows in mixes.values() for fact in rows)
    return [Section.of(tables.workloads(mixes), pictures=[plots.workloads(mixes, other) for other in others])]


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
    changes = []
    for fact in after.facts:
        then = old.get(fact["name"])
        if then is None:
            continue
        was, now = (_ratio_to(then.get("control"), each) for each in (then, fact))
        ratio = now / was if was and now else fact["median"] / then["median"]
        changes.append((fact["name"], fact["group"], ratio, then["median"], fact["median"]))
    return changes


def _ratio_to(control: str | None, fact: Fact) -> float | None:
    """The fact's median over that of `control`, which need not be its own control; None if that was not timed."""
    if control == fact.get("control"):
        return fact.get("ratio_to_control")
    seconds = (fact.get("medians") or {}).get(control)
    return fact["median"] / seconds if seconds else None


def _change(before: Recording, after: Recording) -> Section:
    from nsa.testing.report import plots

    pairs = changes(before, after)
    moved = sorted((pair for pair in pairs if abs(pair[2] - 1) > MOVED), key=lambda pair: -pair[2])
    names = [{fact["name"] for fact in recording.facts} for recording in (before, after)]
    return Section(
        "Before and after",
        f"{len(pairs)} benchmarks in both, {len(names[0] - names[1])} only before, {len(names[1] - names[0])} only "
        f"after. Geometric mean of the changes {geomean(p[2] for p in pairs) or 1:.3f}×; {len(moved)} above 10%.",
        [plots.before_after([(name, ratio) for name, _, ratio, _, _ in pairs])],
        tables.make("changes", moved),
    )


def _environment(recordings: Sequence[Recording]) -> Table:
    names = ("before", "after") if len(recordings) == 2 else ("this run",)
    columns = [Column("", lambda name: name)]
    columns += [
        Column(name, recording.environment.__getitem__) for name, recording in zip(names, recordings, strict=True)
    ]
    return Table("Environment", columns, list(recordings[0].environment))


def _commands(recordings: Sequence[Recording]) -> str:
    now = recordings[-1]
    revision, _, dirty = now.commit.partition("-")
    impls = dict.fromkeys(str(fact["impl"]) for fact in now.facts if ":" in str(fact.get("impl")))
    suite = "".join([" --pyargs nsa.testing.suite" * bool(impls), *(f" --nsa-impl {impl}" for impl in impls)])
    source = "'/path/to/nsa[test,report]'" if impls else "-e '.[test,report]'"
    # Merged recordings come from the baselines, which the command finds without a name.
    files = ["run.json" if r.source == THIS_RUN else r.source for r in recordings if not r.merged]
    return "\n".join(
        [
            f"git checkout {revision}{'   # there were uncommitted changes' if dirty else ''}",
            f"pip install {source} torch=={now.torch.partition('+')[0]}   # Triton {now.triton}",
            f"pytest -m perf{suite} --benchmark-json=run.json"
            + " --nsa-update-thresholds" * (now.gpu is not None and not impls),
            " ".join(("python -m nsa.testing.report", *files, "-o report")),
        ]
    )


# --- README and docs/results -----------------------------------------------------------------------------------------


def documents(recordings: Sequence[Recording], readme: str) -> dict[str, str]:
    """README.md with its measured part rewritten, and the pages and pictures of `docs/results/`, by path.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is missing.
        ValueError: `readme` lacks a marker.
    """
    from nsa.testing.report import plots

    shown = [recording for recording in recordings if recording.gpu] or list(recordings)
    written = {"README.md": with_block(readme, readme_block(shown))}
    for recording in shown:
        path = RESULTS / device_slug(recording.gpu or recording.device)
        written[f"{path}.md"] = results(recording)
        picture = plots.prefill_bars(recording.facts, recording.gpu or recording.device)
        if picture is not None:
            written[f"{path}.svg"] = picture
    return written


def results(recording: Recording) -> str:
    """The page of a device in `docs/results/`: all tables, each with the commits and dates of its benchmarks."""
    name = recording.gpu or recording.device
    prompts = tables.longest_prompts(recording.facts)
    picture = [f"![{_alternative(name, prompts)}]({device_slug(name)}.svg)"] if prompts else []
    sections = [
        Section.of(one, f"Recorded at {_when(recording, one)}.", picture if one.title == "Prefill" else [])
        for one in tables.of(recording.facts)
    ]
    source = (
        f"torch {recording.torch}, Triton {recording.triton}. `python -m nsa.testing.report --readme` makes this page "
        "from the baselines in `tests/perf/baselines/`. Ratios are of medians of one run."
    )
    return rendered("report.md", {"title": f"Measured on {name}", "subtitle": source, "sections": sections})


def _when(recording: Recording, one: Table) -> str:
    """`commit, date` of a table's benchmarks, because the tables of a page may come from different days."""
    facts = [fact for row in one.rows for fact in (row[1] if isinstance(row, tuple) else [row])]
    return "; ".join(recording.taken(facts))


def readme_block(recordings: Sequence[Recording]) -> str:
    """The measured part of README.md: a picture and a table of the device with the most benchmarks; pages of all."""
    text: list[str] = []
    most = max(recordings, key=lambda recording: len(recording.facts))
    for recording in recordings:
        name = recording.gpu or recording.device
        path, prompts = RESULTS / device_slug(name), tables.longest_prompts(recording.facts)
        where = f"**{name}**, torch {recording.torch}, Triton {recording.triton}"
        if recording is most and prompts is not None:
            one = tables.headline(recording.facts)
            text += [f"![{_alternative(name, prompts)}]({path}.svg)", "", f"{where}. {one.legend}", ""]
            text += [table.markdown(one), "", one.explained()]
            where = "All tables"
        text += [f"{where}: [{path}.md]({path}.md).", ""]
    return "\n".join([BEGIN, *text[:-1], END])


def _alternative(gpu: str, prompts: dict[str, Any]) -> str:
    """The picture's alternative text: the bars at its top."""
    heads, first = next(iter(prompts["milliseconds"].items()))
    said = "; ".join(f"{name}: {value}" for name, value in first.items())
    return f"Prefill of {prompts['T']} tokens on {gpu}, milliseconds with {heads} heads: {said}"


def with_block(readme: str, block: str) -> str:
    """`readme` with a new block between the markers. Raises ValueError unless each marker occurs once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md: expected one {BEGIN} and one {END}")
    return readme[: readme.index(BEGIN)] + block + readme[readme.index(END) + len(END) :]


# --- the command line ------------------------------------------------------------------------------------------------


def _update_documents() -> str:
    written = documents(_baselines(BASELINES), (ROOT / "README.md").read_text(encoding="utf-8"))
    for name, text in written.items():
        write_whole(ROOT / name, text)
    return ", ".join(written)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa.testing.report", description=__doc__)
    parser.add_argument("json", nargs="*", type=Path, help="one recording, or before and after; default: the baselines")
    parser.add_argument("-o", metavar="DIR", type=Path, help="where report.md, report.csv and report.html go")
    parser.add_argument("--readme", action="store_true", help="rewrite README.md's measured part and docs/results/")
    args = parser.parse_args(argv)
    if len(args.json) > 2:
        parser.error(f"expected one recording, or before and after, got {len(args.json)} files")
    if args.readme == (args.o is not None):
        parser.error("expected either -o DIR or --readme")
    try:
        done = _update_documents() if args.readme else str(write([*map(load, args.json)] or _baselines()[:1], args.o))
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name not in ("matplotlib", "jinja2"):
            raise
        print(f"error: the report needs {name}: pip install 'nsa[report]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {done}")
    return 0


def _baselines(folder: Path | None = None) -> list[Recording]:
    recordings = newest(folder or (THEIRS if THEIRS.is_dir() else BASELINES))
    if not recordings:
        where = BASELINES if BASELINES.is_dir() else THEIRS.absolute()
        raise ValueError(f"no baseline in {where}; record one with: pytest -m perf --nsa-save-baseline")
    return recordings
