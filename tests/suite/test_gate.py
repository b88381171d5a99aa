"""The gate, run on small projects whose samples a JSON file holds: what it says, and what pytest exits with."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from nsa.testing import plugin
from nsa.testing.gate import store
from nsa.testing.machine import triton_version

pytest_plugins = ["pytester"]
ROOT = Path(plugin.__file__).parents[2]
ALIKE = {name: {"ours": [2.0], "control": 1.0} for name in ("alpha", "beta", "gamma", "delta")}  # ms, by attempt
INJECTED_PATH = "tests/perf/test_injected.py"
INJECTED = """
import json, pathlib, pytest
from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import Timing, clock

pytestmark = pytest.mark.benchmark(timer=clock)
DATA = json.loads(pathlib.Path(__file__).with_name("samples.json").read_text())

def timing(ms):
    return Timing([ms * 1e-3 * (1 + i * 1e-4) for i in range(20)], "host", False, 1, 1)

@pytest.mark.parametrize("name", DATA)
def test_bench(name, publish):
    ours = iter(DATA[name]["ours"])

    def take():
        times = {"ours": timing(next(ours)), "plain": timing(DATA[name]["control"])}
        return times["ours"], gate_figures(times, ["plain"])

    publish("injected", *take(), again=take)
    assert not DATA[name].get("wrong"), "wrong result"
"""


def lay_out(path, samples):
    """A rootdir with this repository's configuration and perf lane, and one file of benchmarks."""
    perf = path / "tests" / "perf"
    perf.mkdir(parents=True)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, path)
    (perf / "test_injected.py").write_text(INJECTED)
    inject(path, samples)


def inject(path, samples):
    (path / "tests" / "perf" / "samples.json").write_text(json.dumps(samples))


def environment():
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": str(ROOT), "NSA_TEST_TRITON_SEL": "0", "NSA_COMMIT": "abc1234567"}


@pytest.fixture(scope="module")
def recorded(shared_folder):
    """Three files as `--nsa-save-baseline` leaves them, and what it printed; recorded once for all xdist workers."""
    path = shared_folder / "recorded"
    with FileLock(f"{path}.lock"):
        if not (path / "printed").exists():
            shutil.rmtree(path, ignore_errors=True)
            lay_out(path, ALIKE)
            command = [sys.executable, "-m", "pytest", "-m", "perf", "--nsa-save-baseline"]
            done = subprocess.run(command, cwd=path, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (path / "printed").write_text(done.stdout)
    return sorted((path / "tests" / "perf" / "baselines").rglob("*.json")), (path / "printed").read_text()


@pytest.fixture
def project(forked_project, monkeypatch, recorded):
    """The same project with that baseline; `project.baseline` are its own copies of the files."""
    pytester = forked_project
    lay_out(pytester.path, ALIKE)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    folder = pytester.path / "tests" / "perf" / "baselines" / recorded[0][0].parent.name
    shutil.copytree(recorded[0][0].parent, folder)
    pytester.baseline = sorted(folder.iterdir())
    return pytester


def change(files, edit):
    """Edit stored documents."""
    for i, file in enumerate(files):
        document = json.loads(file.read_text())
        edit(i, document)
        file.write_text(json.dumps(document))


def spread(name, ratios):
    def edit(i, document):
        for b in document["benchmarks"]:
            if b["name"] == f"test_bench[{name}]":
                b["stats"]["data"] = [ratios[i] * x for x in b["extra_info"]["control_samples"]["plain"]]

    return edit


def compare(project, *arguments):
    return project.runpytest_subprocess("-m", "perf", "--benchmark-compare", *arguments)


def section(result):
    """The lines of the gate."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if " gate " in line and line.startswith("="))
    stop = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("=")), len(lines))
    return lines[start + 1 : stop]


def named(result):
    """The benchmarks that the gate's lines name."""
    return [name for name in ALIKE for line in section(result) if f"[{name}]" in line]


def test_recording_is_three_files_of_three_processes(recorded):
    files, printed = recorded
    assert [f.name[:5] for f in files] == ["0001_", "0002_", "0003_"]
    assert all(f.name.endswith("-abc1234.json") for f in files)
    documents = [json.loads(f.read_text()) for f in files]
    assert len({d["datetime"] for d in documents}) == 3
    for machine in (d["machine_info"] for d in documents):
        assert machine["device"] == files[0].parent.name
        assert machine["device"].endswith(f"-{machine['threads']}threads")
        assert (machine["gpu"], machine["torch"], machine["triton"]) == (None, torch.__version__, triton_version())
        assert all(d["commit_info"]["id"] == "abc1234567" for d in documents)
    assert all(len(d["benchmarks"]) == 4 for d in documents)
    assert not list(files[0].parents[1].glob(".recording-*"))
    assert "first recording for" in printed
    assert "baseline saved:" in printed


def test_the_same_again_passes(project):
    result = compare(project)
    assert result.ret == 0
    assert section(result)[-1] == "gate: 4 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    assert not named(result)


def test_it_compares_from_another_folder(project, tmp_path, monkeypatch):
    """pytest-benchmark raises where the storage is outside of the working directory."""
    monkeypatch.chdir(tmp_path)
    compared = compare(project, "--", f"{project.path}/tests")
    assert compared.ret == 0
    for run in ("NOW", "0003"):
        compared.stdout.fnmatch_lines([f"bench[[]alpha[]] ({run})*"])
    compared.stdout.no_fnmatch_line("*machine_info is different*")
    assert not list(tmp_path.rglob("*.json"))


def test_15_percent_slower_fails_and_is_the_only_one_named(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.3, 2.32], "control": 1.0}})
    result = compare(project, "--junit-xml=out.xml")
    assert result.ret == 1
    result.assert_outcomes(passed=3, failed=1)
    assert named(result) == ["beta"]
    result.stdout.fnmatch_lines(
        [
            "performance regression: 15.0% slower beside its control plain (2 -> 2.3 times its time, measured again "
            "2.32); its time is 15% longer: 2.001 ms -> 2.301 ms",
            "FAIL       test_bench[[]beta[]]",
            "           15.0% slower beside its control plain (2 -> 2.3 times its time, measured again 2.32); its",
            "           time is 15% longer: 2.001 ms -> 2.301 ms",
            "gate: 3 pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate",
        ]
    )
    [suite] = ET.parse(project.path / "out.xml").getroot().iter("testsuite")
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("1", "0", "4")
    assert max(map(len, section(result))) <= 100


@pytest.mark.parametrize("strict", [[], ["--nsa-strict"]], ids=["lenient", "strict"])
def test_the_replay_line_of_a_regression_finds_it_again(project, strict):
    inject(project.path, ALIKE | {"beta": {"ours": [2.3, 2.32], "control": 1.0}})
    [line] = [line for line in compare(project, *strict).outlines if line.startswith("NSA_TEST_TRITON_SEL=0 pytest ")]
    words = shlex.split(line)[2:]
    assert words == [f"{INJECTED_PATH}::test_bench[beta]", "--benchmark-compare", *strict]
    replayed = project.runpytest_subprocess(*words)
    assert replayed.ret == 1
    replayed.assert_outcomes(failed=1)
    replayed.stdout.fnmatch_lines(["performance regression: *"])


def test_5_percent_slower_passes(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.1], "control": 1.0}})
    result = compare(project)
    assert result.ret == 0
    assert not named(result)


def test_slower_once_only_is_measured_again_and_passes(project):
    inject(project.path, ALIKE | {"beta": {"ours": [3.0, 2.05], "control": 1.0}})
    result = compare(project, "--benchmark-json=out.json")
    assert result.ret == 0
    assert section(result)[-1].endswith("; 1 passed when measured again")
    [beta] = [b for b in json.loads((project.path / "out.json").read_text())["benchmarks"] if "beta" in b["name"]]
    assert beta["stats"]["median"] == pytest.approx(2.05e-3, rel=2e-3)
    assert beta["extra_info"]["gate"]["verdict"] == "pass"
    assert "(2 -> 3 times its time, measured again 2.05)" in beta["extra_info"]["gate"]["seen"]


def test_a_slower_machine_passes_and_is_told(project):
    inject(project.path, {name: {"ours": [2.8], "control": 1.4} for name in ALIKE})
    result = compare(project)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["this machine is 40% slower than when the baseline was recorded (median of 4 controls)"]
    )
    assert not named(result)


def test_15_percent_on_a_machine_that_changed_as_much_is_named_and_passes(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.3 * 1.2, 2.3 * 1.2], "control": 1.2}})
    result = compare(project)
    assert result.ret == 0
    said = " ".join(line.strip() for line in section(result))
    assert "AMBIGUOUS  test_bench[beta] 15.0% slower beside its control plain (2 -> 2.3 times its time" in said
    assert "while its control became 20% slower: 2.001 ms -> 2.761 ms; no more than the control itself changed" in said
    assert set(named(result)) == {"beta"}


@pytest.mark.parametrize("strict", [[], ["--nsa-strict"]], ids=["lenient", "strict"])
def test_within_twice_the_spread_is_ambiguous(project, strict):
    change(project.baseline, spread("beta", [1.92, 2.0, 2.08]))  # 8%
    inject(project.path, ALIKE | {"beta": {"ours": [2.3, 2.3], "control": 1.0}})
    result = compare(project, *strict)
    assert result.ret == (1 if strict else 0)
    result.assert_outcomes(passed=3 if strict else 4, failed=1 if strict else 0)
    result.stdout.fnmatch_lines(["AMBIGUOUS  test_bench[[]beta[]]", "*within twice the spread of 8.0%"])
    assert set(named(result)) == {"beta"}


def test_a_noisy_benchmark_cannot_be_gated_but_a_catastrophe_is_one(project):
    change(project.baseline, spread("beta", [1.92, 2.0, 2.08]))
    result = compare(project)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "cannot gate test_bench[[]beta[]]: its ratio spreads by 8%, so only a slowdown of more than 16% would be*",
            "gate: 3 pass, * 1 cannot gate",
        ]
    )
    inject(project.path, ALIKE | {"beta": {"ours": [4.0, 4.0], "control": 1.0}})
    assert compare(project).ret == 1


def test_missing_on_either_side_is_listed(project):
    inject(project.path, {k: v for k, v in ALIKE.items() if k != "beta"} | {"epsilon": ALIKE["beta"]})
    result = compare(project)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "in the baseline, not in this run: test_bench[[]beta[]]",
            "in this run, not in the baseline: test_bench[[]epsilon[]]",
            "gate: 3 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate",
        ]
    )


@pytest.mark.parametrize("strict", [[], ["--nsa-strict"]], ids=["lenient", "strict"])
def test_no_baseline(project, strict):
    shutil.rmtree(project.baseline[0].parent)
    inject(project.path, ALIKE | {"beta": {"ours": [9.0], "control": 1.0}})
    result = compare(project, *strict)
    assert result.ret == len(strict)
    result.assert_outcomes(passed=4)
    record = "record one: the same command with --nsa-save-baseline instead of --benchmark-compare"
    result.stdout.fnmatch_lines(["not gated: no baseline for *threads, torch *, triton *", record])


@pytest.mark.parametrize("strict", [[], ["--nsa-strict"]], ids=["lenient", "strict"])
def test_other_versions_on_a_cpu_cannot_be_gated_and_say_so(project, strict):
    """Those of a GPU are judged: `test_gate_rules.py`. Times of a CPU have no memory rate to compare them by."""
    change(project.baseline, lambda i, document: document["machine_info"].update(torch="2.5.1+cu124"))
    inject(project.path, ALIKE | {"beta": {"ours": [9.0], "control": 1.0}})
    result = compare(project, *strict)
    assert result.ret == len(strict)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        [
            "baseline: *torch 2.5, *",
            "this run: *",
            "cannot gate test_bench, 4 benchmarks: other versions of torch or Triton, and without a measured*",
            "gate: 0 pass, 0 FAIL, 0 AMBIGUOUS, 4 cannot gate",
        ]
    )


def test_a_file_of_other_versions_in_between_is_no_part_of_the_baseline(project):
    change(project.baseline[-1:], lambda i, document: document["machine_info"].update(triton="3.1.0"))
    result = compare(project)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["2 of 3 recordings: spreads are not known; *", "gate: 4 pass*"])


def test_a_recording_of_some_benchmarks_leaves_the_others_in_force(project, tmp_path_factory):
    """Elsewhere, too: pytest takes the word after an option for a path, if there is one, and names tests from there."""
    storage = tmp_path_factory.mktemp("elsewhere")
    folder = storage / project.baseline[0].parent.name
    shutil.copytree(project.baseline[0].parent, folder)
    inject(project.path, ALIKE | {"beta": {"ours": [2.3, 2.3], "control": 1.0}})
    recording = ("-m", "perf", "--nsa-save-baseline", "-k", "beta", "--benchmark-storage", str(storage))
    result = project.runpytest_subprocess(*recording, "--nsa-accept-regression")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["accepted by --nsa-accept-regression"])
    assert left(project) == []
    files = sorted(folder.iterdir())
    documents = [json.loads(f.read_text()) for f in files]
    assert [len(d["benchmarks"]) for d in documents] == [4, 4, 4, 1, 1, 1]
    assert {b["fullname"] for d in documents[3:] for b in d["benchmarks"]} == {f"{INJECTED_PATH}::test_bench[beta]"}
    result = compare(project, f"--benchmark-storage={storage}")  # would fail, were the first three still in force
    assert result.ret == 0
    result.stdout.fnmatch_lines(["baseline: *: 0001, 0002, 0003, 0004, 0005, 0006", "gate: 4 pass, 0 FAIL*"])


def test_a_file_that_was_left_out_is_one_line(project):
    """As benchmarks are that take minutes and run where they are named."""

    def move(i, document):
        for b in document["benchmarks"][:2]:
            b["name"] = b["name"].replace("test_bench", "test_other")

    change(project.baseline, move)
    result = compare(project)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["in the baseline, not in this run: test_other, all 2"])


def test_a_damaged_file_is_an_error(project):
    """The baseline's, and one that pytest-benchmark shows beside this run. `test_gate_documents.py` has all damages."""

    def no_time(i, document):
        document["benchmarks"][1]["stats"]["data"][3] = float("nan")

    change(project.baseline[1:2], no_time)
    stored = project.path / "tests" / "perf" / "stored.json"
    document = json.loads(project.baseline[0].read_text())
    del document["benchmarks"][0]["stats"]["outliers"]
    stored.write_text(json.dumps(document))
    said = "*0002_*.json: test_bench[[]beta[]]: stats.data[[]3[]]: expected seconds from *, got nan*"
    shown = "*stored.json: *alpha[]]: stats.outliers: expected a string*"
    for named, status, line in (("", 1, said), (f"={stored}", 4, shown)):
        if named:
            shutil.copy(project.baseline[0], project.baseline[1])
        result = project.runpytest_subprocess("-m", "perf", f"--benchmark-compare{named}")
        assert result.ret == status
        assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
        (result.stderr if named else result.stdout).fnmatch_lines([line])


def test_a_run_whose_samples_are_no_times_fails(project):
    odd = {"beta": {"ours": [float("nan")], "control": 1.0}, "gamma": {"ours": [2.0], "control": -1.0}}
    inject(project.path, ALIKE | odd)
    result = compare(project)
    assert result.ret == 1
    result.assert_outcomes(passed=2, failed=2)
    for where in ("[[]beta[]]: stats.data[[]0[]]", "[[]gamma[]]: extra_info.control_samples.plain[[]0[]]"):
        result.stdout.fnmatch_lines([f"this run: test_bench{where}: expected seconds from *"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-n", "2"], "--benchmark-compare needs benchmarks, and under xdist there are none: leave out -n"),
        (["--benchmark-disable"], "--benchmark-compare needs benchmarks: leave out --benchmark-disable"),
        (["--benchmark-skip"], "--benchmark-compare needs benchmarks: leave out --benchmark-skip"),
        (["--nsa-hot"], "--benchmark-compare: gated and recorded times are of cold buffers: leave out --nsa-hot"),
        (["--nsa-no-check"], "*gated and recorded benchmarks are checked first: leave out --nsa-no-check"),
    ],
    ids=["xdist", "disabled", "skipped", "hot", "unchecked"],
)
def test_what_would_pass_without_comparing_is_refused(project, arguments, reason):
    result = compare(project, *arguments)
    assert result.ret == 1
    result.stderr.fnmatch_lines([f"*{reason}"])


USELESS = {
    "--benchmark-compare=": "--benchmark-compare: its value is empty: type --benchmark-compare, or leave the*",
    "--nsa-against=": "--nsa-against: its value is empty: type --nsa-against=HEAD, or leave the option out",
    "--nsa-strict": "--nsa-strict needs --benchmark-compare or --nsa-against or --nsa-save-baseline: add it, or leave*",
}


def test_an_option_that_would_do_nothing_is_a_usage_error(project):
    """`test_options.py` has all of them."""
    for option, said in USELESS.items():
        result = project.runpytest_subprocess("-m", "perf", option)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {said}"])


NOT_CORE = (
    "--nsa-full", "--nsa-update-thresholds", "--nsa-update-schedules", "--nsa-shape=N=2,L=16", "--nsa-dist=few",
    "--nsa-decode", "--nsa-csv=out.csv", "--nsa-seed=7", "--nsa-iters=10",
    "--nsa-warmup=0", "--nsa-streams=2",
)  # fmt: skip


def test_a_baseline_is_of_core_only(project):
    for given in NOT_CORE:
        option = given.partition("=")[0]
        result = project.runpytest_subprocess("-m", "perf", "--nsa-save-baseline", given)
        assert result.ret == 1
        result.stderr.fnmatch_lines([f"*--nsa-save-baseline: a baseline is of core*: leave out {option}*"])
    assert left(project) == []


def test_without_compare_nothing_is_gated(project):
    inject(project.path, ALIKE | {"beta": {"ours": [9.0], "control": 1.0}})
    result = project.runpytest_subprocess("-m", "perf")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*= gate =*")


def test_slow_runs_that_pytest_benchmark_saved_do_not_become_the_baseline(project):
    inject(project.path, ALIKE | {"beta": {"ours": [3.0], "control": 1.0}})
    for _ in range(store.FILES):
        assert project.runpytest_subprocess("-m", "perf", "--benchmark-autosave").ret == 0
    assert left(project) == []
    inject(project.path, ALIKE | {"beta": {"ours": [3.0, 3.0], "control": 1.0}})
    result = compare(project)
    assert result.ret == 1
    assert section(result)[-1] == "gate: 3 pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate"


def test_a_ratio_that_was_doubled_by_hand_lets_nothing_pass(project):
    def edit(i, document):
        for b in document["benchmarks"]:
            b["extra_info"] |= {"gate_ratio": 4.0, "ratio_to_control": 4.0, "control_median": 5e-4}

    change(project.baseline, edit)
    inject(project.path, ALIKE | {"beta": {"ours": [3.0, 3.0], "control": 1.0}})
    result = compare(project)
    assert result.ret == 1
    assert section(result)[-1] == "gate: 3 pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate"


@pytest.mark.parametrize(
    "option",
    ["--benchmark-json=out.json", "--junitxml=out.xml", "--benchmark-compare", "--nsa-save-baseline", "--nsa-sweep"],
)
def test_two_trees_leave_nothing_behind(project, option):
    """Each tree has several processes, which would write to the same file."""
    result = project.runpytest_subprocess("-m", "perf", "--nsa-against=HEAD", option)
    assert result.ret == 1
    given = option.partition("=")[0]
    assert f"--nsa-against starts several processes, and {given} is for one" in result.stderr.str()


def test_a_users_own_compare_fail_works_on_top(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.1], "control": 1.0}})  # fine for the gate
    result = compare(project, "--benchmark-compare-fail=median:3%")
    assert result.ret != 0
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()


# --- saving ----------------------------------------------------------------------------------------------------------


def left(project):
    """Every file under the baselines, but for what was there before."""
    found = (project.path / "tests" / "perf" / "baselines").rglob("*")
    return sorted(path.name for path in found if path.is_file() and path not in project.baseline)


def test_a_regression_is_not_saved_unless_accepted(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.3, 2.3], "control": 1.0}})
    result = project.runpytest_subprocess("-m", "perf", "--nsa-save-baseline")
    assert result.ret == 1
    assert left(project) == []
    result.stderr.fnmatch_lines(["no baseline saved: run 1 of 3 was red (exit status 1)"])


def test_a_wrong_result_is_not_saved_whatever_is_accepted(project):
    inject(project.path, ALIKE | {"beta": {"ours": [2.0], "control": 1.0, "wrong": True}})
    assert project.runpytest_subprocess("-m", "perf", "--nsa-save-baseline", "--nsa-accept-regression").ret == 1
    assert left(project) == []


@pytest.mark.parametrize("joined", [False, True], ids=["two-words", "one-word"])
def test_a_storage_elsewhere_that_pytest_takes_for_a_path_is_refused(project, tmp_path_factory, joined):
    storage = tmp_path_factory.mktemp("elsewhere") / "baselines"
    shutil.move(project.baseline[0].parent.parent, storage)
    result = compare(
        project, *([f"--benchmark-storage={storage}"] if joined else ["--benchmark-storage", str(storage)])
    )
    if joined:
        assert section(result)[-1] == "gate: 4 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    else:
        assert result.ret == 1
        result.stderr.fnmatch_lines([f"*takes the folder for a path of tests: write --benchmark-storage={storage}"])


def test_the_report_has_what_was_gated_beside_this_run(project, tmp_path_factory):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    storage = tmp_path_factory.mktemp("elsewhere") / "baselines"
    shutil.copytree(project.baseline[0].parent.parent, storage)
    change(project.baseline, lambda i, document: document["commit_info"].update(id="0" * 40))  # nobody's business now
    [last] = storage.rglob("0003_*.json")
    newer = shutil.copy(last, last.with_name("0004_newer.json"))  # of other versions: the gate does not read it
    change([newer], lambda i, document: document["machine_info"].update(triton="3.1.0"))
    change([newer], lambda i, document: document.update(datetime="2100-01-01T00:00:00"))
    result = compare(project, f"--benchmark-storage={storage}", "--nsa-report=report")
    assert result.ret == 0
    text = (project.path / "report" / "report.md").read_text()
    assert "4 benchmarks in both" in text
    assert "000000000000" not in text
    assert f"| recorded in | {last} | this run |" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
def test_an_interrupted_recording_leaves_nothing(project, number):
    slow = INJECTED + "\n\ndef test_slow():\n    import time\n    print('slow', flush=True)\n    time.sleep(1000)\n"
    (project.path / "tests" / "perf" / "test_injected.py").write_text(slow)
    # A shell's background job ignores Ctrl-C, and so would all that it starts, this test's children among them.
    hears = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import pytest; "
    program = hears + "sys.exit(pytest.main(['-m', 'perf', '-s', '--nsa-save-baseline']))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=project.path, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert any(line.strip().endswith("slow") for line in process.stdout)
        assert list((project.path / "tests" / "perf" / "baselines").glob(".recording-*"))
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(timeout=300) == pytest.ExitCode.INTERRUPTED
    assert left(project) == []
    assert not list((project.path / "tests" / "perf" / "baselines").glob(".recording-*"))


def test_a_full_disk_while_recording_leaves_nothing(project):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"  # bytes a file may have
    (project.path / "tests" / "perf" / "test_injected.py").write_text(limit + INJECTED)
    assert project.runpytest_subprocess("-m", "perf", "-p", "no:cacheprovider", "--nsa-save-baseline").ret == 1
    assert left(project) == []


@pytest.mark.parametrize("path", [INJECTED_PATH, "tests/perf", f"{INJECTED_PATH}::test_bench"])
def test_a_path_after_compare_is_refused(project, path):
    """pytest-benchmark takes the word after the option for a stored run; pytest then runs all files but this one."""
    result = compare(project, path)
    assert result.ret == 1
    said = result.stderr.str()
    assert f"write the path before the option, pytest -m perf {path} --benchmark-compare" in said
    before = project.runpytest_subprocess("-m", "perf", path, "--benchmark-compare")
    assert before.ret == 0
    assert section(before)[-1].startswith("gate: 4 pass, 0 FAIL")
