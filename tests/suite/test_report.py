"""The report made from a recorded H100 run, the terminal's summary, and the table in README.md."""

import copy
import csv
import dataclasses
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import nsa.gpu
from nsa import settings
from nsa.testing.report import pages, summary, tables
from nsa.testing.report.recording import grouped, load, newest

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data" / "h100-core-trimmed.json"  # an H100 run as recorded, some benchmarks and keys
BASELINES = ROOT / "tests" / "perf" / "baselines"


@pytest.fixture(scope="module")
def recorded():
    return json.loads(DATA.read_text())


def many_figures(recorded):
    """Geomean and worst of what was recorded for `many`, worked out here."""
    infos = [b["extra_info"] for b in recorded["benchmarks"] if b["group"] == "many, ranges"]
    keys = ("fallback", "sdpa_end_to_end", "sdpa_best", "sdpa_expanded")
    columns = [[info[f"speedup_vs_{key}"] for info in infos] for key in keys]
    return [f"{f(column):.2f}" for column in columns for f in (statistics.geometric_mean, min)]


@pytest.fixture
def slowed(recorded, tmp_path):
    """The same run with one benchmark 30% slower, one gone and one new; ours alone, the control stands."""
    changed = copy.deepcopy(recorded)
    slow, gone = changed["benchmarks"][10], changed["benchmarks"].pop(20)
    slow["stats"]["median"] *= 1.3
    slow["extra_info"]["ratio_to_control"] *= 1.3
    changed["benchmarks"].append(copy.deepcopy(slow) | {"name": "test_selection[new]"})
    path = tmp_path / "after.json"
    path.write_text(json.dumps(changed))
    return path, slow["name"], gone["name"]


def test_report_from_a_recording(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    assert pages.main([str(DATA), "-o", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out == f"written: {out / 'report.html'}\n"
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md", "report.csv"}
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.count("<svg") == 3  # over the replaced path, over the best SDPA, roofline
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", ""))  # self-contained
    assert len(re.findall(r'id="([^"]+)"', page)) > 50
    expected = ("NVIDIA H100 80GB HBM3", "2.11.0+cu130", "3.6.0", "How to reproduce", "This recording cannot decide it")
    assert [words for words in expected if words not in page or words not in text] == []
    with (out / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 48
    row = next(r for r in rows if r["case"] == "H8-D64-Dv64-L256-N64-many-bf16")
    assert float(row["median_us"]) == pytest.approx(6.7535, rel=1e-4)
    assert float(row["speedup_vs_fallback"]) == pytest.approx(22.3546, rel=1e-4)


def test_the_same_recording_gives_the_same_report(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    first, second = (pages.write([load(DATA)], tmp_path / name).read_text() for name in ("first", "second"))
    assert first == second


def test_before_and_after_names_what_moved(slowed):
    path, slow, gone = slowed
    changes = tables.changes(load(DATA), load(path))
    assert [(name, round(ratio, 6)) for name, _, ratio, _, _ in changes if abs(ratio - 1) > 0.1] == [(slow, 1.3)]
    assert gone not in [name for name, *_ in changes]
    pytest.importorskip("matplotlib")
    sections = {s.title: s for s in tables.describe([load(DATA), load(path)])["sections"]}
    change = sections["Before and after"]
    assert change.text.startswith("47 benchmarks in both, 1 only before, 1 only after.")
    assert [row[0] for row in change.rows] == [slow]
    assert change.rows[0][2] == "+30.0%"
    assert len(change.pictures) == 1


def test_change_is_over_the_control_of_before(recorded, tmp_path):
    """The fastest comparator was another one: twice as slow is twice as slow, over a control twice as slow, too."""
    one = copy.deepcopy(recorded | {"benchmarks": recorded["benchmarks"][10:11]})
    info = one["benchmarks"][0]["extra_info"]
    median, other = one["benchmarks"][0]["stats"]["median"], next(n for n in info["medians"] if n != info["control"])
    info |= {"medians": {info["control"]: median, other: 2 * median}, "ratio_to_control": 1.0}
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    paths[0].write_text(json.dumps(one))
    one["benchmarks"][0]["stats"]["median"] = 2 * median
    info["control"] = other
    paths[1].write_text(json.dumps(one))
    ((_, _, ratio, _, _),) = tables.changes(*map(load, paths))
    assert ratio == pytest.approx(2.0)


def test_machine_that_slowed_as_a_whole_changes_nothing(recorded, tmp_path):
    """Ratios to the control are compared, not times."""
    slower = copy.deepcopy(recorded)
    for benchmark in slower["benchmarks"]:
        benchmark["stats"]["median"] *= 1.4
    path = tmp_path / "slower.json"
    path.write_text(json.dumps(slower))
    assert {round(ratio, 6) for _, _, ratio, _, _ in tables.changes(load(DATA), load(path))} == {1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "expected the JSON of a pytest"), ("{}", "machine_info: expected a mapping"), (None, "cannot be read")],
)
def test_unreadable_recording_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert pages.main([str(path), "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert message in error
    assert error.count("\n") == 1


def test_without_the_extra_the_report_says_what_to_install(tmp_path):
    block = "import sys; sys.modules[{!r}] = None; from nsa.testing.report.pages import main; sys.exit(main({!r}))"
    for name in ("matplotlib", "jinja2"):
        program = block.format(name, [str(DATA), "-o", str(tmp_path)])
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, f"error: the report needs {name}: pip install 'nsa[report]'\n")


def test_summary_is_narrow_and_says_what_counts(recorded, user_folder):
    lines = summary.lines(load(DATA).facts)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "\nsel_triton_min_L in force: 16, measured 2026-11-21 at commit 7554f5187b46,\n" in text
    assert "\n  this run cannot decide it: it holds no intervals of the comparators\n" in text
    [many] = [line for line in lines if line.startswith("many, ranges")]
    assert many.split()[2:] == ["12", *many_figures(recorded)[:8], "2923", "92.1%"]
    assert len(lines) <= 15


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
    lines = summary.lines(facts)
    assert [line.split()[:4] for line in lines[1:]] == [
        ["routing", "9", "0.19", "0.10"], ["routing", "costs", "10.0", "us"], ["packing", "9", "0.50", "0.50"],
    ]  # fmt: skip


# --- the threshold in force ------------------------------------------------------------------------------------------


@pytest.fixture
def user_folder(monkeypatch, tmp_path):
    """No file of this user's own, and no variable."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("NSA_SEL_TRITON_MIN_L", raising=False)
    settings.reload()
    yield tmp_path / "nsa" / "gpus"
    monkeypatch.undo()
    settings.reload()


H100 = "NVIDIA H100 80GB HBM3"
PACKAGED = "16, measured 2026-11-21 at commit 7554f5187b46, nsa/configs/gpus/nvidia-h100-80gb-hbm3.yaml"


def committed(packed):
    """Of the committed GPU baseline, the kernels of packed rows, which no threshold rests on, or all the others."""
    whole = next(r for r in newest(BASELINES) if r.gpu)
    kernels = [fact for fact in whole.facts if fact["name"].startswith("test_selection")]
    return dataclasses.replace(whole, facts=[fact for fact in kernels if (fact["dist"] == "few") == packed])


def test_report_of_the_committed_baseline_says_what_is_in_force(tmp_path, user_folder):
    """The packaged file of the recording's GPU is read, though this recording measured no threshold."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    pages.write([committed(packed=True)], tmp_path / "out")
    for name in ("report.md", "report.html"):
        page = (tmp_path / "out" / name).read_text()
        assert f"sel_triton_min_L in force: {PACKAGED}." in page
        assert "This recording did not measure it." in page
        assert str(nsa.gpu.DEFAULT_MIN_L) not in re.split("(## |<h2>)Summary", page)[0]


def test_report_says_what_a_recording_measured_beside_what_is_in_force(user_folder):
    recording = committed(packed=False)
    box = tables.describe([recording])
    assert box["verdict"] == f"sel_triton_min_L in force: {PACKAGED}."
    measured = "measured 64 in 6 combinations of heads, dims and distribution; a threshold needs 20 more"
    assert box["rationale"][0] == f"This recording {measured}."
    text = " ".join("\n".join(summary.lines(recording.facts)).split())
    assert f"sel_triton_min_L in force: {PACKAGED} this run {measured}" in text


def test_a_gpu_without_a_file_has_the_safe_default(user_folder):
    recording = load(DATA)
    unknown = dataclasses.replace(recording, gpu="Some GPU")
    assert tables.verdict(unknown) == (
        "sel_triton_min_L in force: 2048, the safe default: no file has measurements of this GPU."
    )
    cpu = dataclasses.replace(recording, gpu=None)
    assert tables.verdict(cpu) == "sel_triton_min_L is not used on this device: without a GPU, calls run packed SDPA."


def test_a_setting_of_this_process_is_in_force_in_its_own_run_only(user_folder, monkeypatch):
    recording = load(DATA)
    live = dataclasses.replace(recording, source="this run")
    with nsa.configure(sel_triton_min_L=7):
        assert tables.verdict(live) == "sel_triton_min_L in force: 7, set by nsa.configure."
        assert tables.verdict(recording) == f"sel_triton_min_L in force: {PACKAGED}."
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


# --- README ----------------------------------------------------------------------------------------------------------


def test_readme_block_replaces_only_what_is_between_the_markers(recorded):
    block = pages.readme_block([load(DATA)])
    text = pages.with_block(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n", block)
    assert text.startswith("before\n<!-- measured: begin -->\n**NVIDIA H100 80GB HBM3**")
    assert text.endswith("<!-- measured: end -->\nafter\n")
    assert "old" not in text
    a, b, c, d, e, f = many_figures(recorded)[:6]
    assert f"| many, ranges | 12 | {a}× ({b}×) | {c}× ({d}×) | {e}× ({f}×) | 92.1% |" in text
    assert pages.with_block(text, block) == text
    with pytest.raises(ValueError, match="expected one"):
        pages.with_block("no markers", block)


def test_newest_recording_of_each_device(recorded, tmp_path):
    for number, date in (("0001", "2026-01-01"), ("0002", "2026-03-01"), ("0003", "2026-02-01")):
        folder = tmp_path / "nvidia-h100-80gb-hbm3"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}_x.json").write_text(json.dumps(recorded | {"datetime": date}))
    assert [r.date for r in newest(tmp_path)] == ["2026-03-01"]
    assert newest(tmp_path)[0].facts == load(tmp_path / "nvidia-h100-80gb-hbm3" / "0002_x.json").facts
    assert newest(tmp_path / "nothing") == []


def test_recordings_of_parts_make_one(recorded, tmp_path):
    """The newest figures of each benchmark; other versions of Triton do not count."""
    whole, part, other = (json.loads(json.dumps(recorded)) for _ in range(3))
    names = [b["name"] for b in whole["benchmarks"]]
    part["benchmarks"] = part["benchmarks"][:2]
    for b in part["benchmarks"]:
        b["extra_info"]["commit"] = "fedcba9876543210"
        b["stats"]["median"] = 1.5
    other["benchmarks"][-1]["name"] = "of another Triton"
    other["machine_info"]["triton"] = "3.1.0"
    for number, document, date in ((1, whole, "2026-01-01"), (2, other, "2026-02-01"), (3, part, "2026-03-01")):
        (tmp_path / f"000{number}_x.json").write_text(json.dumps(document | {"datetime": date}))
    (found,) = newest(tmp_path)
    assert [fact["name"] for fact in found.facts] == names
    assert [fact["median"] == 1.5 for fact in found.facts] == [True, True] + [False] * (len(names) - 2)
    assert found.commits == f"fedcba987654, {load(tmp_path / '0001_x.json').commit[:12]}"
    both = f"fedcba987654, 2026-03-01; {load(tmp_path / '0001_x.json').commit[:12]}, 2026-01-01"
    assert f"geometric mean (worst) ({both})" in pages.readme_block([found])


def test_groups_are_ordered_as_core_is():
    """Whatever was recorded last."""
    facts = load(DATA).facts
    of_core = ["few, rows", "many, ranges", "mixed, ranges", "decode, blocks"]
    assert list(grouped(facts)) == [*of_core, "fallback", "eager call, host"]
    assert list(grouped(reversed(facts))) == [*of_core, "eager call, host", "fallback"]


def test_readme_shows_the_committed_baseline():
    recordings = newest(BASELINES)
    if not recordings:
        pytest.skip("no baseline is committed")
    readme = (ROOT / "README.md").read_text()
    expected = pages.with_block(readme, pages.readme_block(recordings))
    assert readme == expected, "README.md is out of date: python -m nsa.testing.report --readme"
