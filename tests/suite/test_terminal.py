"""What a perf run prints at its end, on small projects whose benchmarks have the names and times of real ones."""

import json
import math
import shutil
import subprocess
import sys

import pytest

from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import long_context
from nsa.testing.report import terminal

from .small_project import ROOT, lay_out, off_gpu, section, write

BASELINE = ROOT / "tests" / "perf" / "baselines" / "nvidia-h100-80gb-hbm3"
BENCHMARKS = """
import json, pathlib, pytest
from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import Timing, clock

pytestmark = pytest.mark.benchmark(timer=clock)
DATA = json.loads(pathlib.Path(__file__).with_name("names.json").read_text())

def bench(function):
    @pytest.mark.parametrize("name", DATA[function])
    def test(name, publish):
        group, seconds = DATA[function][name]
        times = {name: Timing([seconds * (1 + i * 1e-3) for i in range(20)], "host", False, 1, 1) for name in "ab"}
        publish(group, times["a"], gate_figures(times, "b", "a") | {"gpu": "NVIDIA H100 80GB HBM3"})
    return test

globals().update({function: bench(function) for function in DATA})

def test_fails():
    assert False
"""


def of_the_h100() -> dict[str, tuple[str, float]]:
    """Of each group of the committed recordings the benchmarks with the three longest names, and their times."""
    documents = [json.loads(path.read_text()) for path in sorted(BASELINE.glob("*.json"))]
    found = {b["name"]: (b["group"], b["stats"]["median"]) for d in documents for b in d["benchmarks"]}
    groups = {group for group, _ in found.values()}
    longest = [sorted((n for n in found if found[n][0] == group), key=len)[-3:] for group in sorted(groups)]
    return {name: found[name] for names in longest for name in names}


def of_the_full_matrix() -> dict[str, tuple[str, float]]:
    """The longest ids there are: training on prompts of which neighbours share blocks."""
    prompts = [case for case in long_context() if case.dist == "prefill"]
    words = {"backward": "backward", "step": "forward and backward"}
    return {f"test_training[{case.id}-{word}]": (words[word], case.N * 1e-7) for case in prompts for word in words}


def of_the_cpu() -> dict[str, tuple[str, float]]:
    """Those of `tests/perf/test_cpu.py` with the longest ids."""
    cases = [Case(8, 128, 128, L, 16, "few", "fp32", source="ranges") for L in (64, 1024)]
    cases += [Case(16, 128, 128, 1024, 4 * B, "decode", "fp32", HKV=4, S_kv=2048) for B in (1, 4)]
    bounds = ("bounded", "unbounded")
    found = {f"test_packed_sdpa[{b}-{case.id}]": (f"packed SDPA, {b}", case.L * 7e-6) for b in bounds for case in cases}
    return found | {"test_after_a_failure[H4-D64-Dv64-L64-N1-decode-fp32-Skv256]": ("after a failure", 3.6e-6)}


THIRD = "examples.your_kernel:attend"
OTHERS = {
    f"test_selection[{THIRD}-H8-D128-Dv128-L{L}-N1024-many-bf16]": (f"many, ranges, {THIRD}", L * 1e-7)
    for L in (64, 256, 1024)
}
LONGEST = max(of_the_full_matrix().items(), key=lambda item: len(item[0]) + len(item[1][0]))
ALL = {
    "cpu": of_the_cpu(),
    "h100": of_the_h100() | of_the_full_matrix(),
    "third-party": OTHERS,
    "alone": {LONGEST[0]: ("alone", LONGEST[1][1])},
}


@pytest.fixture
def named(tmp_path):
    """`named(names)`: a rootdir with this repository's configuration and benchmarks of these names."""
    lay_out(tmp_path, {"tests/perf/test_named.py": BENCHMARKS})

    def make(names):
        functions: dict[str, dict[str, tuple[str, float]]] = {}
        for name, times in names.items():
            function, _, words = name.partition("[")
            functions.setdefault(function, {})[words.removesuffix("]")] = times
        write(tmp_path, {"tests/perf/names.json": json.dumps(functions)})

    return make


@pytest.fixture
def run(run_pytest, tmp_path):
    def make(*options):
        done = run_pytest("-m", "perf", *options, cwd=tmp_path, environment=off_gpu(NSA_COMMIT="abc1234567"))
        assert done.returncode == 1, "one test fails, on purpose"
        return done.stdout.splitlines()

    return make


def tables(lines):
    """Those of pytest-benchmark, from the first title to the legend."""
    start = next(i for i, line in enumerate(lines) if line.strip("-").startswith(" benchmark "))
    return lines[start : lines.index("Legend:")]


def rows(lines):
    """Names in the tables, as shown."""
    shown = [line for line in tables(lines) if line.strip("-") and not line.startswith(("-", "Name (", " "))]
    return [line.split("  ")[0] for line in shown]


def test_tables_fit_120_columns_with_and_without_a_baseline_and_the_gate_is_last(named, run, tmp_path):
    names = {name: times for found in ALL.values() for name, times in found.items()}
    named(names)
    alone = run("--benchmark-json=run.json")
    # What it wrote is the baseline of the device that it names: a worker of xdist has fewer threads.
    text = (tmp_path / "run.json").read_text()
    device = json.loads(text)["machine_info"]["device"]
    write(tmp_path, {f"tests/perf/baselines/{device}/0091_20261124-abc1234.json": text})
    named({name: (group, 3 * seconds) for name, (group, seconds) in names.items()})
    beside = run("--benchmark-compare")
    for lines, times in ((alone, 1), (beside, 2)):
        shown = tables(lines)
        assert max(map(len, shown)) <= 120, max(shown, key=len)
        assert len(rows(lines)) == times * len(names)
        assert next(line for line in shown if line.startswith("Name (")).split()[4:] == ["Median", "IQR", "Rounds"]
        assert max(map(len, section(lines, "selection attention: ratios of medians of this run"))) <= 100
    pairs = rows(beside)
    assert [name.endswith(" (NOW)") for name in pairs] == [i % 2 == 1 for i in range(len(pairs))]
    assert [name.removesuffix(" (NOW)") for name in pairs[1::2]] == [n.removesuffix(" (0091)") for n in pairs[::2]]
    # Tables, summary, pytest's own short summary, the gate, and how to repeat a failure.
    text = ["Legend:", "= selection attention", "= short test summary info =", "= gate =", "= replay one failure ="]
    places = [max(i for i, line in enumerate(beside) if words in line) for words in text]
    assert places == sorted(places)
    assert [line.strip("= ") for line in beside[places[0] :] if line.startswith("=")][:-1] == [
        "selection attention: ratios of medians of this run", "short test summary info", "gate", "replay one failure",
    ]  # fmt: skip
    assert not [line for line in beside if "machine_info" in line]


@pytest.mark.parametrize("where", ["command line", "addopts and environment"])
def test_what_the_user_gives_wins(named, run, tmp_path, where, monkeypatch):
    """Also where it is pytest-benchmark's default, which `normal` is."""
    named(of_the_cpu())
    given = [f"--benchmark-{words}" for words in ("columns=min,ops", "name=normal", "sort=max", "group-by=func")]
    if where != "command line":
        file = tmp_path / "pyproject.toml"
        file.write_text(file.read_text().replace("addopts = [", f"addopts = [{', '.join(map(repr, given[:2]))}, "))
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(given[2:]))
    lines = run(*(given if where == "command line" else []))
    heads = [line.split()[4:] for line in tables(lines) if line.startswith("Name (")]
    assert [head[:2] for head in heads] == [["Min", "OPS"]] * 2
    titles = [line.strip("- ") for line in tables(lines) if " benchmark " in line]
    assert titles == ["benchmark 'test_after_a_failure': 1 tests", "benchmark 'test_packed_sdpa': 8 tests"]
    assert sorted(rows(lines)) == sorted(of_the_cpu())


def test_options_from_a_file_of_arguments_win_and_leave_our_other_defaults(named, run, tmp_path):
    named(of_the_cpu())
    (tmp_path / "arguments.txt").write_text("--benchmark-columns=min,ops\n")
    lines = run("@arguments.txt")
    assert {" ".join(line.split()[4:6]) for line in tables(lines) if line.startswith("Name (")} == {"Min OPS"}
    assert "packed_sdpa[H16-L1024-N4-decode-HKV4]" in rows(lines)


def test_pytest_benchmark_compares_files_in_a_checkout(tmp_path):
    """It imports conftest.py, and with it the package, before pytest could rewrite the package's assertions."""
    files = {"PKG-INFO": "Metadata-Version: 2.1\nName: nsa\nVersion: 0\n", "SOURCES.txt": "nsa/__init__.py\n"}
    files["entry_points.txt"] = "[pytest11]\nnsa_pytest = nsa_pytest\n"
    write(tmp_path / "nsa.egg-info", files)  # as `pip install -e` leaves it
    write(tmp_path, {"nsa/__init__.py": "", "tests/test_x.py": "", "conftest.py": "import nsa\n"})
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    recording = min(BASELINE.glob("*.json"), key=lambda path: path.stat().st_size)
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(recording)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-500:]) == (0, "")
    assert "Legend:" in done.stdout


def test_names_that_fit_are_left_alone():
    table = "few, rows", [{"name": "test_selection[H8-D128-few]"}, {"name": "test_selection[H4-D128-few]"}]
    assert terminal.narrow(*table) == table


def test_no_word_of_a_name_is_lost():
    """What all names share is in the title, or is part of it already; the rest stays in the row."""
    for found in ALL.values():
        groups = {}
        for name, (group, _) in found.items():
            groups.setdefault(group, []).append({"name": name, "kept": math.pi})
        for group, benchmarks in groups.items():
            title, short = terminal.narrow(group, benchmarks)
            assert title.startswith(group)
            for old, new in zip(benchmarks, short, strict=True):
                assert new["kept"] == math.pi
                words, left = terminal._words(old["name"]), terminal._words(new["name"])
                assert new["name"].partition("[")[0] == old["name"].partition("[")[0]
                assert set(left) <= set(words)
                assert all(word in title for word in words if word not in left), title
            assert len({bench["name"] for bench in short}) == len(benchmarks), "two rows of one name"


def test_a_word_that_some_names_lack_stays_in_the_row():
    ids = ["H1-D128-" + "x" * 60 + "-backward", "H2-D128-" + "x" * 60]
    title, table = terminal.narrow("backward", [{"name": f"test_training[{words}]"} for words in ids])
    assert title == f"backward: D128-{'x' * 60}"
    assert [bench["name"] for bench in table] == ["test_training[H1-backward]", "test_training[H2]"]


def test_a_table_without_a_title_gets_the_shared_words():
    benchmarks = [{"name": f"test_training[H{H}-{'x' * 60}]"} for H in (1, 2)]
    assert terminal.narrow(None, benchmarks)[0] == "x" * 60
    plain = [{"name": "test_" + "x" * 90}]
    assert terminal.narrow(None, plain) == (None, plain)
