"""Prefill, training and serving in what is told of a run: terminal, pages, README.md; baselines without them."""

import copy
import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsa.testing.clock.timing import Timing
from nsa.testing.gate import store
from nsa.testing.gate.run import Gate
from nsa.testing.matrix.case import core
from nsa.testing.report import pages, summary, tables
from nsa.testing.report.recording import load, newest
from nsa.tuning import thresholds

DATA = Path(__file__).parent / "data" / "h100-core-trimmed.json"
ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "tests" / "perf" / "baselines"
OTHERS = {"dense_cudnn": 5.0, "dense_flash": 9.0, "query_major": 1.5, "key_major": 1.0, "fla": 2.0}


def benchmark(like, case, median=12.5e-3):
    """As `test_prefill` stores it: whoever is beside ours takes a multiple of its time; fla-core from G = 16 on."""
    found = copy.deepcopy(like)
    ran = {name: ratio for name, ratio in OTHERS.items() if name != "fla" or case.H >= 16}
    words = {"dense_cudnn": "cudnn", "dense_flash": "flash"}
    found |= {"group": "prefill", "name": f"test_prefill[{case.id}]"}
    found["fullname"] = f"tests/perf/test_prefill.py::{found['name']}"
    found["stats"] = found["stats"] | {"median": median}
    found["extra_info"] |= case.fields() | {
        "impl": "auto", "launched": {"key_major": 1}, "ns_per_token": median * 1e9 / case.S, "ms": median * 1e3,
        "medians": {"auto": median} | {name: median * ratio for name, ratio in ran.items()},
        "intervals": {}, "ci95": [median, median], "bytes": 2 << 30, "flops": 10**12, "share_of_ceiling": 0.06,
        "gbps": 180.0, "tflops": 231.4, "share_of_matmul": 0.231, "control": "dense_cudnn", "ratio_to_control": 1 / 5.0,
        "left_out": {} if case.H >= 16 else {"fla": "unsupported: needs a group of 16"}, "sdpa_best": None,
        **{f"speedup_vs_{words.get(name, name)}": ran.get(name) for name in OTHERS},
        **{f"speedup_vs_{name}": None for name in ("fallback", "sdpa_best", "sdpa_end_to_end", "sdpa_expanded")},
    }  # fmt: skip
    return found


def trained(like, case, median=25e-3):
    """As `test_training` stores it."""
    found = copy.deepcopy(like)
    ran = {name: ratio for name, ratio in OTHERS.items() if "major" not in name and (name != "fla" or case.H >= 16)}
    words = {"dense_cudnn": "cudnn", "dense_flash": "flash"}
    found |= {"group": "backward", "name": f"test_training[{case.id}-backward]"}
    found["stats"] = found["stats"] | {"median": median}
    facts = ("gpu", "device", "torch", "triton", "commit")
    found["extra_info"] = {name: found["extra_info"][name] for name in facts} | case.fields() | {
        "ns_per_query": median * 1e9 / case.S, "ms": median * 1e3, "ci95": [median, median],
        "medians": {"ours": median} | {name: median * ratio for name, ratio in ran.items()}, "intervals": {},
        "control": "dense_cudnn", "ratio_to_control": 1 / 5.0, "left_out": {}, "memory_vs_flash": 0.82,
        **{f"speedup_vs_{words.get(name, name)}": ran.get(name) for name in OTHERS if "major" not in name},
    }  # fmt: skip
    return found


def served(like, case, impl, median=6e-6, **others):
    """As `test_kvcache` stores it."""
    found = copy.deepcopy(like)
    found |= {"group": "decode, pages", "name": f"test_decode[{impl}-{case.id}]"}
    found["stats"] = found["stats"] | {"median": median}
    found["extra_info"] |= case.fields() | {
        "impl": impl, "medians": {impl: median, "auto": 5e-6} | others, "intervals": {}, "ci95": [median, median],
        "share_of_ceiling": 0.8, "gbps": 2600.0, "control": "auto", "ratio_to_control": 1.2, "left_out": {},
        **dict.fromkeys(summary.VERSUS.values()), "sdpa_best": None,
    }  # fmt: skip
    return found


@pytest.fixture
def recorded(tmp_path):
    """A recorded run of core with its prompts: for each length and heads, random ones and two that share blocks."""
    document = json.loads(DATA.read_text())
    like = next(b for b in document["benchmarks"] if "share_of_ceiling" in b["extra_info"])
    prompts = [c for c in core() if c.dist == "prefill"]
    document["benchmarks"] += [benchmark(like, case, 6e-3 if case.shared else 12.5e-3) for case in prompts]
    document["benchmarks"] += [trained(like, case) for case in prompts[3::-1]]  # as where the last were recorded first
    step = next(c for c in core() if c.dist == "decode" and c.B == 8 and c.HKV == 4)
    chunk = served(like, prompts[0], "kvcache", 2e-4)
    chunk["extra_info"]["times_its_share"] = 1.6
    document["benchmarks"] += [
        served(like, step, "kvcache", fla=9e-6),
        served(like, step, "paged16", kvcache=4e-6),
        chunk,
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return load(path)


def test_terminal_shows_each_prompt(recorded):
    lines = summary.lines(recorded.facts)
    assert max(map(len, lines)) <= 100
    start = next(i for i, line in enumerate(lines) if line.startswith("prefill, HQ/HKV, T"))
    words = [line.split() for line in lines[start + 1 : start + 25]]
    assert words[0] == "64/4, 8192 12.5 ms 1525.9 5.00 9.00 2.00 1.50 1.00 231 key_major".split()
    assert words[21] == "16/16, 65536 12.5 ms 190.7 5.00 9.00 - 1.50 1.00 231 key_major".split()
    assert [line[2] for line in words[1:3]] == ["50%", "90%"]
    before = summary.lines(load(DATA).facts)
    assert [line for line in before if line not in lines and "comparators" not in line] == []
    assert not any("prefill" in line for line in before)


def test_report_has_a_table_of_prompts(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    sections = {s.title: s for s in tables.describe([recorded])["sections"]}
    row = dict(zip(tables.PREFILL_HEADER, sections["Prefill"].rows[0], strict=True))
    assert row == {
        "HQ/HKV": "64/4", "T": "8192", "shared": "-", "kernel": "key_major", "ours": "12.50",
        "ns/token": "1525.9", "TFLOP/s": "231",
        "query-major": "18.75", "key-major": "12.50", "fla-core": "25.00", "dense cuDNN": "62.50",
        "dense flash": "112.50", "vs cuDNN": "5.00×", "vs flash": "9.00×", "vs fla-core": "2.00×",
        "of matrix rate": "23.1%",
    }  # fmt: skip
    assert [r[2] for r in sections["Prefill"].rows] == ["-", "50%", "90%"] * 8
    assert len(sections["Speedup over L"].pictures) == 2
    pages.write([recorded], tmp_path / "out")
    assert "| 64/4 | 8192 |" in (tmp_path / "out" / "report.md").read_text()
    with (tmp_path / "out" / "report.csv").open() as file:
        line = next(r for r in csv.DictReader(file) if r["group"] == "prefill")
    assert (line["HKV"], line["S"], line["speedup_vs_cudnn"], line["impl"]) == ("4", "8192", "5.0", "auto")
    assert "Prefill" not in {s.title for s in tables.describe([load(DATA)])["sections"]}


def test_readme_has_a_table_of_prompts(recorded):
    block, before = pages.readme_block([recorded]), pages.readme_block([load(DATA)])
    assert "| 32/8 | 65536 | - | 12.50 | 190.7 | 231 | - | 62.50 | 112.50 | - | 5.00× | 9.00× |" in block
    assert "| prefill |" not in block, "no row among speedups over packed SDPA"
    rows = [line for line in before.splitlines() if line.startswith("|")]
    assert rows
    assert [line for line in rows if line not in block.splitlines()] == []


def test_readme_shows_prompts_first_and_folds_the_rest(recorded):
    lines = pages.readme_block([recorded]).splitlines()
    assert lines[1].startswith(
        "![Prefill of 65536 tokens on NVIDIA H100 80GB HBM3, milliseconds. 64/4 heads: ours 12.50"
    )
    assert lines[1].endswith("dense cuDNN 62.50, dense flash 112.50](docs/nvidia-h100-80gb-hbm3.svg)")
    start, end = lines.index("<details>"), len(lines) - 1 - lines[::-1].index("</details>")
    shown = [line for line in lines[:start] + lines[end:] if line.startswith("|")]
    assert len(shown) == 2 + 24, "24 prompts"
    assert shown[0].startswith("| HQ/HKV | T | shared | ours | ns/token | TFLOP/s | fla-core |")
    assert lines.count("<details>") == lines.count("</details>") == 3
    for at, line in enumerate(lines):
        if line.startswith("<summary>"):
            assert lines[at + 1] == "", "else a page shows bars instead of a table"


def test_picture_shows_the_longest_prompts(recorded):
    """By overlap, beside what was timed on random prompts. What did not run has no bar."""
    found = tables.longest_prompts(recorded)
    four = {"ours": "12.50", "ours, 50% shared": "6.00", "ours, 90% shared": "6.00"}
    four |= {"fla-core": "25.00", "dense cuDNN": "62.50", "dense flash": "112.50"}
    three = {name: value for name, value in four.items() if name != "fla-core"}
    assert found["milliseconds"] == {"64/4": four, "32/4": three, "32/8": three, "16/16": three}
    assert (found["gpu"], found["T"], found["torch"]) == ("NVIDIA H100 80GB HBM3", 65_536, recorded.torch)
    assert tables.longest_prompts(load(DATA)) is None
    assert pages.pictures([load(DATA)]) == {}


def carried(svg):
    """What a picture says it shows."""
    (said,) = ElementTree.fromstring(svg).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(said.text)


def test_picture_is_the_same_each_time_and_carries_what_it_shows(recorded):
    pytest.importorskip("matplotlib")
    recorded = dataclasses.replace(recorded, gpu='A <"GPU"> & more')
    ((path, picture),) = pages.pictures([recorded]).items()
    assert path == "docs/a-gpu-more.svg"
    assert carried(picture) == tables.longest_prompts(recorded)
    assert pages.pictures([recorded]) == {path: picture}
    assert "<script" not in picture
    assert "<text" not in picture, "fonts as paths: a reader's machine need not have them"
    assert not any(line.endswith(" ") for line in picture.splitlines())


def test_committed_pictures_are_current():
    """By their data: matplotlib's releases draw differently, and the lane may have none."""
    recordings = newest(BASELINES)
    want = {pages.picture_path(r): tables.longest_prompts(r) for r in recordings if r.gpu}
    want = {path: shown for path, shown in want.items() if shown is not None}
    assert want, "the front page shows no proof"
    for path, shown in want.items():
        assert carried((ROOT / path).read_text(encoding="utf-8")) == shown, "python -m nsa.testing.report --readme"
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("nvidia-*.svg")} == set(want)


def test_readme_without_matplotlib_says_what_to_install_and_writes_nothing(tmp_path):
    readme = f"{pages.BEGIN}\n{pages.END}\n"
    (tmp_path / "README.md").write_text(readme)
    program = (
        "import sys; sys.modules['matplotlib'] = None; from pathlib import Path; from nsa.testing.report import pages; "
        "pages.ROOT = Path(sys.argv[1]); sys.exit(pages.main(['--readme']))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the report needs matplotlib: pip install 'nsa[report]'\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"README.md": readme}


def test_training_is_shown_beside_dense_attention(recorded):
    lines = summary.lines(recorded.facts)
    start = next(i for i, line in enumerate(lines) if line.startswith("training, HQ/HKV, T"))
    assert lines[start].split()[3:] == ["time", "ns/token", "cuDNN", "flash", "fla", "memory"]
    assert lines[start + 1].split() == "64/4, 8192 25 ms 3051.8 5.00 9.00 2.00 0.82 backward".split()
    assert lines[start + 4].split() == "32/4, 8192 25 ms 3051.8 5.00 9.00 - 0.82 backward".split()
    assert not any(line.startswith("backward") for line in lines), "no row among what is timed beside plain torch"
    block = pages.readme_block([recorded])
    assert "| 64/4 | 8192 | 90% | backward | 25.00 | 50.00 | 125.00 | 225.00 | 2.00× | 5.00× | 9.00× | 0.82× |" in block
    assert not any(line.startswith("| backward |") for line in block.splitlines())


def test_report_has_a_table_of_training(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    sections = {s.title: s for s in tables.describe([recorded])["sections"]}
    assert [row[:6] for row in sections["Training"].rows] == [
        ["64/4", "8192", "-", "backward", "25.00", "3051.8"],
        ["64/4", "8192", "50%", "backward", "25.00", "3051.8"],
        ["64/4", "8192", "90%", "backward", "25.00", "3051.8"],
        ["32/4", "8192", "-", "backward", "25.00", "3051.8"],
    ]
    pages.write([recorded], tmp_path / "out")
    with (tmp_path / "out" / "report.csv").open() as file:
        line = next(r for r in csv.DictReader(file) if r["group"] == "backward" and r["HQ"] == "64")
    assert (line["memory_vs_flash"], line["speedup_vs_cudnn"]) == ("0.82", "5.0")


def test_serving_is_shown_beside_the_call_without_a_cache(recorded, tmp_path):
    lines = summary.lines(recorded.facts)
    start = next(i for i, line in enumerate(lines) if line.startswith("serving, HQ/HKV, B, queries"))
    assert lines[start].split()[4:] == ["time", "no", "cache", "contiguous", "fla", "share"]
    assert lines[start + 1].split() == "64/4, 8, 1 kvcache 6 us 1.20 - 0.67 -".split()
    assert lines[start + 2].split() == "64/4, 8, 1 paged16 6 us 1.20 1.50 - -".split()
    assert lines[start + 3].split() == "64/4, 1, 8192 kvcache 200 us 40.00 - - 1.60".split()
    assert not any(line.startswith("decode, pages") for line in lines), "no row among speedups over packed SDPA"
    block = pages.readme_block([recorded])
    assert "| 64/4 | 8 | 1 | 8192 | - | 6.00 | 5.00 | - | 9.00 | 1.20× | - | 1.50× | - |" in block
    assert "| 64/4 | 8 | 1 | 8192 | 16 | 6.00 | 5.00 | 4.00 | - | 1.20× | 1.50× | - | - |" in block
    assert "| 1.60× |" in block
    assert not any(line.startswith("| decode, pages") for line in block.splitlines())
    pytest.importorskip("matplotlib")
    sections = {s.title: s for s in tables.describe([recorded])["sections"]}
    assert [row[4] for row in sections["Serving"].rows] == ["-", "16", "-"]


def test_prompts_decide_no_threshold(recorded):
    assert thresholds.decide(recorded.facts) == thresholds.decide(load(DATA).facts)


def test_a_baseline_without_prompts_gates_the_rest(recorded, tmp_path):
    """What it does not hold is listed by name, and not judged."""
    documents = [store.read(path) for path in sorted(BASELINES.rglob("*.json"), reverse=True)]
    for document in documents:
        document["benchmarks"] = [b for b in document["benchmarks"] if b["name"].startswith("test_selection")]
    document = next(document for document in documents if document["benchmarks"])
    (tmp_path / "0001_without.json").write_text(json.dumps(document))
    key = store.Key.of(document["machine_info"])
    baseline = store.find(tmp_path, key)
    gate = Gate(key, baseline, strict=True)
    known, new = next(iter(baseline.benchmarks)), "test_prefill[new]"
    samples = Timing([1.0], "graph", True, 1, 1)
    for name in (known, new):
        gate.judge(name, samples, {}, None)
    assert [v.name for v in gate.verdicts] == [known]
    assert f"in this run, not in the baseline: {new}" in gate.report([*baseline.benchmarks, new])
    assert gate.failure(new) is None
