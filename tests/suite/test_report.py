"""The report made from a recorded H100 run: its tables, pages, pictures, the summary on the screen, and README.md."""

import copy
import csv
import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import nsa.gpu
from nsa import settings
from nsa.testing.matrix.cases import core
from nsa.testing.report import pages, summary, table, tables
from nsa.testing.report.pages import BASELINES, ROOT
from nsa.testing.report.recording import by_kind, grouped, load, newest
from nsa.testing.report.table import Column, Table, Two
from nsa.tuning import thresholds

DATA = Path(__file__).parent / "data" / "h100-core-trimmed.json"  # an H100 run as recorded, some benchmarks and keys
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def recorded():
    return json.loads(DATA.read_text())


def stored(path, document, **changed):
    """A recording of a changed document."""
    path.write_text(json.dumps(document | changed))
    return load(path)


# --- recordings of other kinds ---------------------------------------------------------------------------------------

BESIDE = {"dense_cudnn": 5.0, "dense_flash": 9.0, "query_major": 1.5, "key_major": 1.0, "fla": 2.0}


def made(like, name, case, median, impl, medians, **more):
    """A benchmark like a recorded one, of another case. The keys of `like` that name comparators are emptied."""
    found = copy.deepcopy(like)
    found |= {"group": name.partition("[")[0].removeprefix("test_"), "name": name}
    found["stats"] |= {"median": median}
    found["extra_info"] |= dict.fromkeys(tables.VERSUS.values()) | case.fields() | {
        "impl": impl, "medians": {impl: median} | medians, "intervals": {}, "ci95": [median, median], "left_out": {},
        "sdpa_best": None, "control": next(iter(medians)), "ratio_to_control": 0.2, **more,
    }  # fmt: skip
    return found


def prefilled(like, case, median):
    medians = {name: median * ratio for name, ratio in BESIDE.items() if name != "fla" or case.H >= 16}
    facts = {"ns_per_token": median * 1e9 / case.S, "tflops": 231.4, "share_of_matmul": 0.231, "gbps": 180.0}
    name = f"test_prefill[{case.id}]"
    return made(like, name, case, median, "auto", medians, launched={"key_major": 1}, speedup_vs_cudnn=5.0, **facts)


def trained(like, case, median=25e-3):
    """As `test_training` stores it: without a share of the memory rate."""
    names = [name for name in BESIDE if "major" not in name and (name != "fla" or case.H >= 16)]
    medians = {name: median * BESIDE[name] for name in names}
    facts = {"ns_per_query": median * 1e9 / case.S, "memory_vs_flash": 0.82, "share_of_ceiling": None}
    return made(like, f"test_backward[{case.id}]", case, median, "ours", medians, speedup_vs_cudnn=5.0, **facts)


def served(like, case, impl, median=6e-6, **others):
    return made(like, f"test_decode[{impl}-{case.id}]", case, median, impl, {"auto": 5e-6} | others)


@pytest.fixture(scope="module")
def whole(recorded, tmp_path_factory):
    """A recorded run of core with its prompts: for each length and heads, random ones and two that share blocks."""
    document = copy.deepcopy(recorded)
    like = next(b for b in document["benchmarks"] if "share_of_ceiling" in b["extra_info"])
    prompts = [c for c in core() if c.dist == "prefill"]
    step = next(c for c in core() if c.dist == "decode" and c.B == 8 and c.HKV == 4)
    chunk = served(like, prompts[0], "kvcache", 2e-4)
    chunk["extra_info"]["times_its_share"] = 1.6
    document["benchmarks"] += [
        *(prefilled(like, case, 6e-3 if case.shared else 12.5e-3) for case in prompts),
        *(trained(like, case) for case in prompts[3::-1]),  # as where the last were recorded first
        served(like, step, "kvcache", fla=9e-6),
        served(like, step, "paged16", kvcache=4e-6),
        chunk,
    ]
    return stored(tmp_path_factory.mktemp("whole") / "run.json", document)


# --- the model of a table and its writers ----------------------------------------------------------------------------

SMALL = Table(
    "Small",
    [
        Column("name", lambda row: row[0]),
        Column("a b", lambda row: row[1]),
        Column("never", lambda row: None),
        Column("pair", lambda row: row[2], "page"),
        Column("vs pair", lambda row: row[2] and row[2].second, "screen"),
    ],
    [("x", "1", None), ("long " * 25, "22", Two("3.0", "1.5×")), ("y", None, Two("4.0", "2.5×"))],
    caption="what it is",
    example=("{name} takes {a b}.", "The pair takes {pair.first}, so {pair.second}.", "Not {never}."),
)


def test_a_table_leaves_out_empty_columns_and_shows_other_columns_on_the_screen():
    assert table.markdown(SMALL).splitlines()[:3] == ["| name | a b | pair |", "| --- | --- | --- |", "| x | 1 | - |"]
    lines = table.screen(SMALL)
    assert lines[0] == "what it is"
    assert [line.split() for line in lines[1:3]] == [["a", "vs"], ["name", "b", "pair"]]
    assert lines[4] == "long " * 25, "a name that does not fit has a line of its own"
    assert lines[5].split() == ["22", "1.5×"]
    assert lines[-1].split() == ["y", "-", "2.5×"]
    assert {line.index("×") for line in lines if "×" in line} == {len(lines[-1]) - 1}, "aligned to the right"
    assert table.screen(dataclasses.replace(SMALL, rows=[])) == []
    assert table.markdown(dataclasses.replace(SMALL, rows=[])) == ""


def test_a_tables_example_is_the_row_of_which_most_can_be_said():
    assert SMALL.explained() == f"Example: {'long ' * 25} takes 22. The pair takes 3.0, so 1.5×."
    assert dataclasses.replace(SMALL, rows=SMALL.rows[:1]).explained() == "Example: x takes 1."
    assert dataclasses.replace(SMALL, example=()).explained() == ""


def test_a_csv_has_empty_columns_too(tmp_path):
    table.write_csv(dataclasses.replace(SMALL, rows=SMALL.rows[:1]), tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().splitlines() == ["name,a b,never,pair,vs pair", "x,1,,,"]


# --- tables of facts -------------------------------------------------------------------------------------------------


def cells(facts, title, place="page"):
    (found,) = [one for one in tables.of(facts) if one.title == title]
    return found.cells(place)


def test_groups_show_the_geometric_mean_and_the_worst(recorded):
    """Worked out here from what was recorded for `many`."""
    infos = [b["extra_info"] for b in recorded["benchmarks"] if b["group"] == "many, ranges"]
    columns = {name: [info[key] for info in infos] for name, key in tables.VERSUS.items()}
    want = {f"vs {n}": f"{statistics.geometric_mean(c):.2f}× ({min(c):.2f}×)" for n, c in columns.items()}
    row = cells(load(DATA).facts, "Packed rows, spans and decode")[1]
    want |= {"benchmarks": "many, ranges", "cases": "12", "GB/s": "2923", "of ceiling": "92.1%"}
    assert {name: str(cell) for name, cell in row.items()} == want


def test_each_kind_of_benchmark_has_a_table_of_its_own(whole):
    titles = [one.title for one in tables.of(whole.facts)]
    assert titles == ["Prefill", "Training", "Serving", "Packed rows, spans and decode", "Beside plain torch"]
    assert sum(len(facts) for facts in by_kind(whole.facts).values()) == len(whole.facts)
    of_core = ["few, rows", "many, ranges", "mixed, ranges", "decode, blocks"]
    for facts in (load(DATA).facts, load(DATA).facts[::-1]):  # whatever was recorded last
        assert [row["benchmarks"] for row in cells(facts, titles[3])] == of_core
        assert {row["benchmarks"] for row in cells(facts, titles[4])} == {"fallback", "eager call, host"}
    assert list(grouped(load(DATA).facts)) == [*of_core, "fallback", "eager call, host"]


def test_prompts(whole):
    rows = cells(whole.facts, "Prefill")
    assert len(rows) == 24
    assert [row["shared"] for row in rows] == ["-", "50%", "90%"] * 8
    assert {name: str(cell) for name, cell in rows[0].items()} == {
        "HQ/HKV": "64/4", "T": "8192", "shared": "-", "kernel": "key_major", "ours": "12.50",
        "ns/token": "1525.9", "TFLOP/s": "231", "of matrix rate": "23.1%",
        "query-major": "18.75 (1.50×)", "key-major": "12.50 (1.00×)", "fla-core": "25.00 (2.00×)",
        "dense cuDNN": "62.50 (5.00×)", "dense flash": "112.50 (9.00×)",
    }  # fmt: skip
    screen = cells(whole.facts, "Prefill", "screen")[21]
    assert " ".join(map(str, screen.values())) == "16/16 65536 - key_major 12.50 231 1.50× 1.00× - 5.00× 9.00×"
    assert thresholds.decide(whole.facts) == thresholds.decide(load(DATA).facts), "prompts decide no threshold"


def test_training(whole):
    rows = [" ".join(map(str, row.values())) for row in cells(whole.facts, "Training")]
    figures = "backward 25.00 3051.8 50.00 (2.00×) 125.00 (5.00×) 225.00 (9.00×) 0.82×"
    assert rows[:3] == [f"64/4 8192 {shared} {figures}" for shared in ("-", "50%", "90%")]
    assert rows[3] == f"32/4 8192 - {figures.replace('50.00 (2.00×)', '-')}"


def test_serving(whole):
    assert [" ".join(map(str, row.values())) for row in cells(whole.facts, "Serving")] == [
        "64/4 8 1 8192 - 6.0 5.0 (0.83×) - 9.0 (1.50×) -",
        "64/4 8 1 8192 16 6.0 5.0 (0.83×) 4.0 (0.67×) - -",
        "64/4 1 8192 8192 - 200.0 5.0 (0.03×) - - 1.60×",
    ]


def test_every_table_has_a_legend_and_an_example(whole):
    for one in [*tables.of(newest(BASELINES)[0].facts), *tables.of(whole.facts)]:
        assert one.legend
        assert one.explained().startswith("Example: ")
        assert one.caption


# --- recordings ------------------------------------------------------------------------------------------------------


def test_recordings_of_parts_make_one(recorded, tmp_path, drawn):
    """The newest figures of each benchmark; other versions of Triton do not count."""
    assert newest(tmp_path) == []
    part, other = (copy.deepcopy(recorded) for _ in range(2))
    names = [b["name"] for b in recorded["benchmarks"]]
    part["benchmarks"] = part["benchmarks"][:2]
    for b in part["benchmarks"]:
        b["extra_info"]["commit"] = "fedcba9876543210"
        b["stats"]["median"] = 1.5
    other["benchmarks"][-1]["name"] = "of another Triton"
    other["machine_info"]["triton"] = "3.1.0"
    first = stored(tmp_path / "0001_x.json", recorded, datetime="2026-01-01")
    stored(tmp_path / "0002_x.json", other, datetime="2026-02-01")
    assert [r.date for r in newest(tmp_path)] == ["2026-02-01"], "one of each device"
    stored(tmp_path / "0003_x.json", part, datetime="2026-03-01")
    (found,) = newest(tmp_path)
    assert [fact["name"] for fact in found.facts] == names
    assert [fact["median"] == 1.5 for fact in found.facts] == [True, True] + [False] * (len(names) - 2)
    assert found.facts[2:] == first.facts[2:]
    assert found.commits == f"fedcba987654, {first.commit[:12]}"
    assert f"Recorded at fedcba987654, 2026-03-01; {first.commit[:12]}, 2026-01-01." in pages.results(found)


# --- pages -----------------------------------------------------------------------------------------------------------


def test_report_from_a_recording(tmp_path, whole, drawn):
    out = tmp_path / "out"
    assert pages.write([whole], out) == out / "report.html"
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md", "report.csv"}
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.count("<svg") == 4  # prompts, over the replaced path, over the best SDPA, roofline
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", ""))  # self-contained
    expected = (H100, "2.11.0+cu130", "3.6.0", "How to reproduce", "This recording cannot decide it")
    assert [words for words in expected if words not in page or words not in text] == []
    words = re.sub(r"<svg.*?</svg>|<style>.*?</style>|<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert re.findall(r"[*`][a-zA-Z][^<]{0,40}", words) == [], "raw Markdown on a page"
    assert "<em>shared</em>" in words
    assert "| 64/4 | 8192 |" in text
    with (out / "report.csv").open() as file:
        rows = {row["case"] + row["impl"]: row for row in csv.DictReader(file)}
    assert len(rows) == 48 + 24 + 4 + 3
    row = rows["H8-D64-Dv64-L256-N64-many-bf16ranges"]
    assert float(row["median_us"]) == pytest.approx(6.7535, rel=1e-4)
    assert float(row["speedup_vs_fallback"]) == pytest.approx(22.3546, rel=1e-4)
    row = rows["H16-D128-Dv128-L1024-N32768-prefill-bf16-HKV4-S8192-Skv8192auto"]
    assert (row["HKV"], row["S"], row["speedup_vs_cudnn"], row["how"], row["memory_vs_flash"]) == (
        "4", "8192", "5.0", "graph", "",
    )  # fmt: skip
    from nsa.testing.report import plots

    assert plots.roofline(whole.facts) in page, "the same recording gives the same picture"


def test_before_and_after_names_what_moved(recorded, tmp_path, drawn):
    """One benchmark is 30% slower, one gone and one new; ours alone, the control stands."""
    changed = copy.deepcopy(recorded)
    slow, gone = changed["benchmarks"][10], changed["benchmarks"].pop(20)
    slow["stats"]["median"] *= 1.3
    slow["extra_info"]["ratio_to_control"] *= 1.3
    changed["benchmarks"].append(copy.deepcopy(slow) | {"name": "test_selection[new]"})
    before, after = load(DATA), stored(tmp_path / "after.json", changed)
    found = pages.changes(before, after)
    assert [(name, round(ratio, 6)) for name, _, ratio, _, _ in found if abs(ratio - 1) > 0.1] == [(slow["name"], 1.3)]
    assert gone["name"] not in [name for name, *_ in found]
    change = pages._change(before, after)
    assert change.text.startswith("47 benchmarks in both, 1 only before, 1 only after.")
    rows = [(row["benchmark"], row["change, to control"]) for row in change.table.cells()]
    assert rows == [(slow["name"], "+30.0%")]
    assert len(change.pictures) == 1


def test_change_is_over_the_control_of_before(recorded, tmp_path):
    """The fastest comparator was another one: twice as slow is twice as slow, over a control twice as slow, too."""
    one = copy.deepcopy(recorded | {"benchmarks": recorded["benchmarks"][10:11]})
    info, stats = (one["benchmarks"][0][name] for name in ("extra_info", "stats"))
    median, other = stats["median"], next(n for n in info["medians"] if n != info["control"])
    info |= {"medians": {info["control"]: median, other: 2 * median}, "ratio_to_control": 1.0}
    before = stored(tmp_path / "before.json", one)
    stats["median"], info["control"] = 2 * median, other
    ((_, _, ratio, _, _),) = pages.changes(before, stored(tmp_path / "after.json", one))
    assert ratio == pytest.approx(2.0)


def test_machine_that_slowed_as_a_whole_changes_nothing(recorded, tmp_path):
    """Ratios to the control are compared, not times."""
    slower = copy.deepcopy(recorded)
    for benchmark in slower["benchmarks"]:
        benchmark["stats"]["median"] *= 1.4
    found = pages.changes(load(DATA), stored(tmp_path / "slower.json", slower))
    assert {round(ratio, 6) for _, _, ratio, _, _ in found} == {1.0}


@pytest.mark.parametrize(("text", "message"), [
    (b"{", "expected the JSON of a pytest"), (b"{}", "machine_info: expected a mapping"), (None, "cannot be read"),
    (b"\xff" * 9000, "pytest-benchmark run: 'utf-8' codec can't decode byte 0xff in position 0"),
])  # fmt: skip
def test_unreadable_recording_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_bytes(text)
    assert pages.main([str(path), "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_without_the_extra_the_report_says_what_to_install_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "nsa.testing.report.plots", raising=False)
    monkeypatch.delattr("nsa.testing.report.plots", raising=False)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"{pages.BEGIN}\n{pages.END}\n")
    for arguments in ([str(DATA), "-o", str(tmp_path / "out")], ["--readme"]):
        assert pages.main(arguments) == 1
        assert capsys.readouterr().err == f"error: the report needs {name}: pip install 'nsa[report]'\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "README.md": f"{pages.BEGIN}\n{pages.END}\n"
    }


# --- README and docs/results -----------------------------------------------------------------------------------------


def carried(svg):
    """What a picture says it shows."""
    (said,) = ElementTree.fromstring(svg).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(said.text)


def test_documents_show_the_committed_baselines(drawn):
    """Pictures by their data: matplotlib's releases draw differently."""
    written = pages.documents(newest(BASELINES), (ROOT / "README.md").read_text(encoding="utf-8"))
    for name, text in written.items():
        there, stale = (ROOT / name).read_text(encoding="utf-8"), f"{name}: python -m nsa.testing.report --readme"
        if name.endswith(".svg"):
            assert carried(there) == carried(text), stale
            assert not {"<script", "<text"} & set(re.findall(r"<\w+", there)), "a reader's machine need not have fonts"
        else:
            assert there == text, stale
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "results").iterdir()} == set(written) - {
        "README.md"
    }
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_readme_shows_at_most_eight_rows_the_most_overlap_first(whole):
    rows = tables.headline(newest(BASELINES)[0].facts).cells()
    assert 2 <= len(rows) <= 8
    assert (rows[0]["shared"], rows[-1]["shared"]) == ("90%", "random")
    assert [str(cell) for cell in tables.headline(whole.facts).cells()[0].values()] == [
        "prefill, 65,536 tokens", "64/4", "90%", "6.00", "12.0 (2.00×)", "30.0 (5.00×)",
    ]  # fmt: skip


def test_readme_block_replaces_only_what_is_between_the_markers():
    block = pages.readme_block([load(DATA)])
    text = pages.with_block(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n", block)
    page = "docs/results/nvidia-h100-80gb-hbm3.md"
    where = f"**{H100}**, torch 2.11.0+cu130, Triton 3.6.0: [{page}]({page})."
    assert text == f"before\n{pages.BEGIN}\n{where}\n{pages.END}\nafter\n", "without prompts, only where the tables are"
    assert pages.with_block(text, block) == text
    with pytest.raises(ValueError, match="expected one"):
        pages.with_block("no markers", block)


def test_picture_shows_the_longest_prompts_by_overlap_beside_others(whole, drawn):
    """What did not run has no bar."""
    from nsa.testing.report import plots

    found = tables.longest_prompts(whole.facts)
    three = {"ours, 90% shared": "6.00", "ours, 50% shared": "6.00", "ours, random": "12.50"}
    three |= {"dense cuDNN": "62.50", "dense flash": "112.50"}
    assert found == {"T": 65_536, "milliseconds": {"64/4": three | {"fla-core": "25.00"}} | dict.fromkeys(
        ("32/4", "32/8", "16/16"), three
    )}  # fmt: skip
    picture = plots.prefill_bars(whole.facts, 'A <"GPU"> & more')
    assert carried(picture) == found
    assert not any(line.endswith(" ") for line in picture.splitlines())
    assert tables.longest_prompts(load(DATA).facts) is None
    assert plots.prefill_bars(load(DATA).facts, "x") is None


# --- the summary on the screen ---------------------------------------------------------------------------------------


def test_summary_is_narrow_and_says_what_counts(user_folder, whole):
    lines = summary.lines(load(DATA).facts)
    assert max(map(len, [*lines, *summary.lines(whole.facts)])) <= 100
    assert max(map(len, summary.lines(newest(BASELINES)[0].facts))) <= 100
    text = "\n".join(lines)
    assert "\nsel_triton_min_L in force: 16, measured 2026-11-21 at commit 7554f5187b46,\n" in text
    assert "\n  this run cannot decide it: it holds no intervals of the comparators\n" in text
    assert sum(line.startswith("many, ranges  ") for line in lines) == 1
    assert len(lines) <= 19


def test_summary_breaks_long_lines_and_cuts_nothing():
    words = " ".join(f"word{i}" for i in range(40))
    fact = {"group": "g" * 60, "case": "c", "median": 1.0, "note": words, "control": "x" * 90}
    lines = summary.lines([fact])
    assert max(map(len, lines)) <= 100
    assert " ".join("\n".join(lines).split()).endswith(words)
    assert [line for line in lines if "g" * 60 in line] == ["g" * 60]
    assert [line for line in lines if "x" * 90 in line]
    long_path = f"report: /{'p' * 120}"
    assert summary.fitted([long_path])[-1].strip() == long_path.removeprefix("report: "), "a path is not broken"


def test_summary_of_a_cpu_run_is_a_line_for_each_group():
    """Of costs in microseconds the highest is told, not each."""
    costs = {f"case{i}": 2.0 + i for i in range(9)}
    facts = [
        {"group": "routing", "case": case, "median": us * 1e-6, "control": "python", "ratio_to_control": us,
         "overhead_us": us, "note": f"routing costs {us:.1f} us a call"}
        for case, us in costs.items()
    ]  # fmt: skip
    facts += [{"group": "packing", "case": f"c{i}", "median": 1.0, "ratio_to_control": 2.0} for i in range(9)]
    assert [line.split()[:4] for line in summary.lines(facts)[2:]] == [
        ["routing", "9", "0.19×", "(0.10×)"], ["packing", "9", "0.50×", "(0.50×)"], ["routing", "costs", "10.0", "us"],
    ]  # fmt: skip


# --- the threshold in force ------------------------------------------------------------------------------------------

PACKAGED = "16, measured 2026-11-21 at commit 7554f5187b46, nsa/configs/gpus/nvidia-h100-80gb-hbm3.yaml"


def committed(packed):
    """Of the committed GPU baseline, the kernels of packed rows, which no threshold rests on, or all the others."""
    whole = next(r for r in newest(BASELINES) if r.gpu)
    kernels = [fact for fact in whole.facts if fact["name"].startswith("test_selection")]
    return dataclasses.replace(whole, facts=[fact for fact in kernels if (fact["dist"] == "few") == packed])


@pytest.mark.parametrize("packed", [True, False])
def test_report_says_what_a_recording_measured_beside_what_is_in_force(user_folder, packed):
    """The packaged file of the recording's GPU is read, also where the recording measured no threshold."""
    recording = committed(packed)
    decisions = [thresholds.decide(recording.facts, against=name) for name in (thresholds.REPLACED, "best")]
    assert pages.verdict(recording) == f"sel_triton_min_L in force: {PACKAGED}."
    measured = "measured 64 in 6 combinations of heads, dims and distribution; a threshold needs 20 more"
    said = "did not measure it" if packed else measured
    rationale = pages.rationale(recording, *decisions)
    assert rationale[0] == f"This recording {said}."
    assert rationale[1].startswith("No benchmark here times" if packed else "From L = 64 on")
    assert str(nsa.gpu.DEFAULT_MIN_L) not in " ".join(rationale)
    text = " ".join("\n".join(summary.lines(recording.facts)).split())
    assert f"sel_triton_min_L in force: {PACKAGED} this run {said}" in text
    rows = tables.threshold(*decisions).cells()
    assert len(rows) == len(decisions[0].groups) == (0 if packed else 6)
    for row in rows:
        H, D, Dv, dist = (row[name] for name in ("H", "D", "Dv", "distribution"))
        mine = [p for p in decisions[0].points if p.key == (int(H), int(D), int(Dv), dist)]
        assert row["slowest"] == f"{min(p.speedup for p in mine):.2f}×"
        assert row["1.2× the replaced path from L"] == str(min(p.L for p in mine)), "all points clear the margin"


def test_a_gpu_without_a_file_has_the_safe_default(user_folder):
    recording = load(DATA)
    unknown = dataclasses.replace(recording, gpu="Some GPU")
    assert pages.verdict(unknown) == (
        "sel_triton_min_L in force: 2048, the safe default: no file has measurements of this GPU."
    )
    cpu = dataclasses.replace(recording, gpu=None)
    assert pages.verdict(cpu) == "sel_triton_min_L is not used on this device: without a GPU, calls run packed SDPA."


def test_a_setting_of_this_process_is_in_force_in_its_own_run_only(user_folder, monkeypatch):
    recording = load(DATA)
    live = dataclasses.replace(recording, source="this run")
    with nsa.configure(sel_triton_min_L=7):
        assert pages.verdict(live) == "sel_triton_min_L in force: 7, set by nsa.configure."
        assert pages.verdict(recording) == f"sel_triton_min_L in force: {PACKAGED}."
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "9")
    settings.reload()
    assert summary.in_force(H100) == "9, set by NSA_SEL_TRITON_MIN_L"
    assert "sel_triton_min_L in force: 9, set by NSA_SEL_TRITON_MIN_L" in summary.lines(recording.facts)


def test_a_users_own_file_is_named_in_full(user_folder):
    user_folder.mkdir(parents=True)
    path = user_folder / "nvidia-h100-80gb-hbm3.yaml"
    packaged = (nsa.gpu.PACKAGED / path.name).read_text()
    path.write_text(packaged.replace("sel_triton_min_L: 16", "sel_triton_min_L: off"))
    settings.reload()
    assert summary.in_force(H100) == f"off, measured 2026-11-21 at commit 7554f5187b46, {path}"
