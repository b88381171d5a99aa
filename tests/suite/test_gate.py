"""The gate, run on small projects whose samples a JSON file holds: what it says, and what pytest exits with.

An inner run takes a third of a second, so one run has a benchmark for each verdict.
"""

import contextlib
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch
from filelock import FileLock

from nsa.testing.gate import hooks, store
from nsa.testing.machine import triton_version

from ..conftest import fork_children
from .small_project import configuration, joined, lay_out, off_gpu, outcome, replayed, section

NAMES = ("same", "slower_5", "slower_15", "once", "machine", "noisy", "doubtful", "missing")
ALIKE = {name: {"ours": [2.0], "control": 1.0} for name in NAMES}  # ms, by attempt
COUNT = len(ALIKE)
SLOWER = {"slower_15": {"ours": [2.3, 2.32], "control": 1.0}}
SLOW = {"slower_15": {"ours": [3.0, 3.0], "control": 1.0}}
PATH = "tests/perf/test_injected.py"
TEXT = """
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
COMPARE = ("-m", "perf", "--benchmark-compare")
SAVE = ("-m", "perf", "--nsa-save-baseline")


class Project:
    """The configuration and the perf lane of this repository, and one file of benchmarks."""

    def __init__(self, path, run_pytest):
        self.path, self.run_pytest = path, run_pytest
        self.baselines = path / "tests" / "perf" / "baselines"
        path.mkdir(parents=True, exist_ok=True)
        lay_out(path, {PATH: TEXT})
        self.inject()

    def inject(self, **samples):
        samples = {name: how for name, how in (ALIKE | samples).items() if how}
        (self.path / "tests" / "perf" / "samples.json").write_text(json.dumps(samples))

    def run(self, *arguments, cwd=None):
        done = self.run_pytest(*arguments, cwd=cwd or self.path, environment=off_gpu(NSA_COMMIT="abc1234567"))
        print(done.stdout, done.stderr, sep="\n")
        return done

    def compare(self, *arguments, **how):
        return self.run(*COMPARE, *arguments, **how)

    def compare_both(self, *arguments, cwd=None):
        """Leniently and strictly. Two runs in one process: their tests compute nothing."""
        runs = [(*COMPARE, *mode, *arguments) for mode in ([], ["--nsa-strict"])]
        both = self.run_pytest.each(runs, cwd=cwd or self.path, environment=off_gpu(NSA_COMMIT="abc1234567"))
        print(*(done.stdout + done.stderr for done in both), sep="\n")
        return both

    def left(self):
        """Every file under the baselines, but for those of the baseline, and unfinished recordings."""
        found = self.baselines.rglob("*")
        return sorted(path.name for path in found if path.is_file() and path not in self.files)


def save(run_pytest, monkeypatch, path, *arguments, **options):
    """The status of `--nsa-save-baseline`, in this process, with forks for its children."""
    fork_children(run_pytest, monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in off_gpu(NSA_COMMIT="abc1234567").items():
        monkeypatch.setenv(name, value)
    for name in ("check_values", "check_paths", "refused_of_several"):  # which REFUSED is about
        monkeypatch.setattr(hooks.refusals, name, lambda config: None)
    given = {"collectonly": False, "nsa_recording": False, "nsa_save_baseline": True, "nsa_against": None} | options
    return hooks.pytest_cmdline_main(configuration(path, *SAVE, *arguments, **given))


@pytest.fixture(scope="module")
def recorded(shared_folder, run_pytest):
    """Three files of `--nsa-save-baseline`, and what it printed; recorded once for all xdist workers.

    Elsewhere: pytest takes the word after an option for a path, if there is one, and names tests from there.
    """
    path, storage = shared_folder / "recorded", shared_folder / "recorded-elsewhere"
    with FileLock(f"{path}.lock"):
        if not (path / "printed").exists():
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(storage, ignore_errors=True)
            storage.mkdir()
            Project(path, run_pytest)
            words = "--benchmark-storage", str(storage)
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
                assert save(run_pytest, patch, path, *words, benchmark_storage=str(storage)) == 0
            (path / "printed").write_text(said.getvalue())
    return sorted(storage.rglob("*.json")), (path / "printed").read_text()


@pytest.fixture
def project(run_pytest, tmp_path, recorded):
    """The same project with that baseline; `project.files` are its own copies."""
    one = Project(tmp_path / "project", run_pytest)
    folder = one.baselines / recorded[0][0].parent.name
    shutil.copytree(recorded[0][0].parent, folder)
    one.files = sorted(folder.iterdir())
    return one


def change(files, edit):
    """Edit stored documents by `edit(number, document)`."""
    for i, file in enumerate(files):
        document = json.loads(file.read_text())
        document.pop("checksum", None)
        edit(i, document)
        file.write_text(json.dumps(document))


def spread(*names):
    """8% in the ratios of these benchmarks."""

    def edit(i, document):
        for b in document["benchmarks"]:
            if b["name"] in [f"test_bench[{name}]" for name in names]:
                b["stats"]["data"] = [[1.92, 2.0, 2.08][i] * x for x in b["extra_info"]["control_samples"]["plain"]]

    return edit


def gate(done):
    return section(done.stdout.splitlines(), "gate")


def named(done):
    """The benchmarks that the gate's lines name."""
    return set(re.findall(r"test_bench\[(\w+)\]", "\n".join(gate(done))))


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_recording_is_three_files_of_three_processes(recorded):
    files, printed = recorded
    assert [f.name[:5] for f in files] == ["0001_", "0002_", "0003_"]
    assert all(f.name.endswith("-abc1234.json") for f in files)
    documents = [json.loads(f.read_text()) for f in files]
    assert len({d["datetime"] for d in documents}) == 3
    for document in documents:
        machine = document["machine_info"]
        assert machine["device"] == files[0].parent.name
        assert machine["device"].endswith(f"-{machine['threads']}threads")
        assert (machine["gpu"], machine["torch"], machine["triton"]) == (None, torch.__version__, triton_version())
        assert document["commit_info"]["id"] == "abc1234567"
        assert [b["fullname"] for b in document["benchmarks"]] == [f"{PATH}::test_bench[{name}]" for name in NAMES]
    assert not list(files[0].parents[1].glob(".recording-*"))
    assert "first recording for" in printed
    assert "baseline saved:" in printed


def test_what_is_no_fail(project, tmp_path):
    """From another folder: pytest-benchmark raises where the storage is outside of the folder."""
    change(project.files, spread("noisy", "doubtful"))
    project.inject(
        slower_5={"ours": [2.1], "control": 1.0}, once={"ours": [3.0, 2.05], "control": 1.0},
        machine={"ours": [2.3 * 1.2] * 2, "control": 1.2}, doubtful=SLOWER["slower_15"],
        missing=None, new=ALIKE["same"],
    )  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lenient, strict = project.compare_both("--benchmark-json=out.json", "--", f"{project.path}/tests", cwd=elsewhere)
    assert (lenient.returncode, outcome(lenient)) == (0, {"passed": 8})
    assert (strict.returncode, outcome(strict)) == (1, {"failed": 2, "passed": 6})
    by_15 = "15.0% slower beside its control plain (2 -> 2.3 times its time"
    for done in (lenient, strict):
        assert gate(done)[-1] == "gate: 4 pass, 0 FAIL, 2 AMBIGUOUS, 1 cannot gate; 1 passed when measured again"
        assert named(done) == {"machine", "doubtful", "noisy", "missing", "new"}
        said = re.sub(" +", " ", joined(gate(done)))
        for text in (
            f"AMBIGUOUS test_bench[machine] {by_15}",
            "while its control became 20% slower: 2.001 ms -> 2.761 ms; no more than the control itself changed",
            f"AMBIGUOUS test_bench[doubtful] {by_15}", "within twice the spread of 8.0%",
            "cannot gate test_bench[noisy]: its ratio spreads by 8%, so only a slowdown of more than 16% would be",
            "in the baseline, not in this run: test_bench[missing]",
            "in this run, not in the baseline: test_bench[new]",
        ):  # fmt: skip
            assert text in said
        for run in ("NOW", "0003"):
            assert re.search(rf"^bench\[same\] \({run}\)", done.stdout, re.M)
        assert "machine_info is different" not in done.stdout
    assert [path.name for path in elsewhere.rglob("*.json")] == ["out.json"]
    [once] = [b for b in json.loads((elsewhere / "out.json").read_text())["benchmarks"] if "once" in b["name"]]
    assert once["stats"]["median"] == pytest.approx(2.05e-3, rel=2e-3)
    assert once["extra_info"]["gate"]["verdict"] == "pass"
    assert "(2 -> 3 times its time, measured again 2.05)" in once["extra_info"]["gate"]["seen"]


def test_what_fails_is_named_and_found_again_by_the_line_that_is_printed(project):
    change(project.files, spread("noisy"))
    nan, negative = {"ours": [float("nan")], "control": 1.0}, {"ours": [2.0], "control": -1.0}
    project.inject(**SLOWER, noisy={"ours": [4.0, 4.0], "control": 1.0}, same=nan, once=negative)
    both = project.compare_both("--junit-xml=out.xml")
    for strict, done in zip(([], ["--nsa-strict"]), both, strict=True):
        assert done.returncode == 1
        assert outcome(done) == {"failed": 4, "passed": COUNT - 4}
        assert named(done) == {"slower_15", "noisy", "same", "once"}
        for name in ("same", "once"):
            assert f"in the baseline, not in this run: test_bench[{name}]" in gate(done)
        text = "15.0% slower beside its control plain (2 -> 2.3 times its time, measured again 2.32); its time is 15%"
        assert f"performance regression: {text} longer: 2.001 ms -> 2.301 ms" in done.stdout.splitlines()
        first = "FAIL       test_bench[slower_15]\n           15.0% slower"
        assert first in "\n".join(gate(done))
        assert "its\n           time is 15% longer: " in "\n".join(gate(done))
        assert max(map(len, gate(done))) <= 100
        assert gate(done)[-1] == f"gate: {COUNT - 4} pass, 2 FAIL, 0 AMBIGUOUS, 0 cannot gate"
        for where in ("same]: stats.data[0]", "once]: extra_info.control_samples.plain[0]"):
            said = rf"^this run: test_bench\[{re.escape(where)}: expected seconds from "
            assert re.search(said, done.stdout, re.M)
        words = replayed(done, "slower_15")
        assert words == [f"{PATH}::test_bench[slower_15]", "--benchmark-compare", *strict]
    [suite] = ET.parse(project.path / "out.xml").getroot().iter("testsuite")
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("4", "0", str(COUNT))
    again = project.run(*words)
    assert (again.returncode, outcome(again)) == (1, {"failed": 1})
    assert re.search("^performance regression: ", again.stdout, re.M)


# --- baselines -------------------------------------------------------------------------------------------------------


def test_what_pytest_benchmark_saves_by_itself_is_no_baseline(project):
    """`--benchmark-autosave` and `--benchmark-save` work as upstream's documentation says; the gate reads neither.

    Nor can it be told by figures that it computes itself, here doubled by hand.
    """

    def double(i, document):
        for b in document["benchmarks"]:
            b["extra_info"] |= {"gate_ratio": 4.0, "ratio_to_control": 4.0, "control_median": 5e-4}

    change(project.files, double)
    project.inject(**SLOW)
    for how in ("--benchmark-autosave", "--benchmark-save=mine"):
        done = project.run("-m", "perf", how)
        assert done.returncode == 0
        assert " gate " not in done.stdout, "it was not asked for"
    saved = sorted((project.path / ".benchmarks").rglob("*.json"))
    assert [path.name[:5] for path in saved] == ["0001_", "0002_"]
    shutil.copy(saved[1], saved[1].with_name("0003_mine.json"))  # as many as a baseline has
    assert project.left() == []
    done = project.compare()
    assert done.returncode == 1
    assert gate(done)[-1] == f"gate: {COUNT - 1} pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    shutil.rmtree(project.baselines)
    done = project.run("-m", "perf", "--benchmark-compare=0002")
    assert gate(done)[0].startswith("not gated: no baseline for ")
    for run in ("NOW", "0002"):
        assert re.search(rf"^bench\[same\] \({run}", done.stdout, re.M)


def test_no_baseline(project):
    shutil.rmtree(project.baselines)
    project.inject(**SLOW)
    for status, done in enumerate(project.compare_both()):
        assert (done.returncode, outcome(done)) == (status, {"passed": COUNT})
        first, second = gate(done)
        assert re.match(r"not gated: no baseline for .*threads, torch .*, triton ", first)
        assert second == "record one: the same command with --nsa-save-baseline instead of --benchmark-compare"
    assert not list(project.path.rglob("00*.json")), "nothing is saved unless asked for"


def test_other_versions_on_a_cpu_cannot_be_gated_and_say_so(project):
    """Those of a GPU are judged: `test_gate_rules.py`. Times of a CPU have no memory rate to compare them by."""
    change(project.files, lambda i, document: document["machine_info"].update(torch="2.5.1+cu124"))
    project.inject(**SLOW)
    for status, done in enumerate(project.compare_both()):
        assert (done.returncode, outcome(done)) == (status, {"passed": COUNT})
        said = joined(gate(done))
        for text in (
            r"^baseline: .*torch 2\.5, .* this run: ",
            f"cannot gate test_bench, {COUNT} benchmarks: other versions of torch or Triton, and without a measured",
            f"gate: 0 pass, 0 FAIL, 0 AMBIGUOUS, {COUNT} cannot gate$",
        ):
            assert re.search(text, said), said


def test_a_file_of_other_versions_in_between_and_one_that_was_left_out(project):
    """Left out as benchmarks are that take minutes and run where they are named."""

    def move(i, document):
        for b in document["benchmarks"][:2]:
            b["name"] = b["name"].replace("test_bench", "test_other")

    change(project.files, move)
    change(project.files[-1:], lambda i, document: document["machine_info"].update(triton="3.1.0"))
    done = project.compare()
    assert done.returncode == 0
    assert "2 of 3 recordings: spreads are not known; --nsa-save-baseline makes 3" in gate(done)
    assert "in the baseline, not in this run: test_other, all 2" in gate(done)
    assert gate(done)[-1].startswith(f"gate: {COUNT - 2} pass")


def test_a_damaged_file_is_an_error(project):
    """The baseline's, and one that pytest-benchmark shows beside this run. `test_odd_files.py` has all damages."""
    stored = project.path / "tests" / "perf" / "stored.json"
    shutil.copy(project.files[0], stored)
    change([stored], lambda i, document: document["benchmarks"][0]["stats"].pop("outliers"))
    shown = project.run("-m", "perf", f"--benchmark-compare={stored}")
    assert shown.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"stored\.json: .*same\]: stats\.outliers: expected a string", shown.stderr)
    change(project.files[1:2], lambda i, document: document["benchmarks"][1]["stats"]["data"].insert(3, float("nan")))
    read = project.compare()
    assert read.returncode == 1
    where = r"0002_.*\.json: test_bench\[slower_5\]: stats\.data\[1\]: expected seconds from .*, got nan"
    assert re.search(where, read.stdout)
    assert "INTERNALERROR" not in shown.stdout + shown.stderr + read.stdout + read.stderr


def test_a_users_own_compare_fail_works_on_top(project):
    """What is worse is named below the gate's verdicts, without a traceback, also where nothing could be compared."""
    project.inject(slower_5={"ours": [2.1], "control": 1.0})  # fine for the gate
    done = project.compare("--benchmark-compare-fail=median:3%")
    assert done.returncode == 1
    counts, fail = joined(gate(done)).split("gate: ")[1].split(" --benchmark-compare-fail: ")
    assert counts == "8 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    assert re.fullmatch(r"bench\[slower_5\] \(0003\): Field 'median' has failed .*: 5.0\d* > 3.0\d*", fail)
    assert "Traceback" not in done.stdout + done.stderr
    for file in project.files:
        file.unlink()
    done = project.compare("--benchmark-compare-fail=median:3%")
    assert (done.returncode, gate(done)[-1].partition(", ")[0]) == (1, "--benchmark-compare-fail: nothing was compared")


def test_the_report_has_what_was_gated_beside_this_run(project, tmp_path, drawn):
    """In a folder that is elsewhere."""
    storage = tmp_path / "elsewhere" / "baselines"
    shutil.copytree(project.baselines, storage)
    change(project.files, lambda i, document: document["commit_info"].update(id="0" * 40))  # not read here
    [last] = storage.rglob("0003_*.json")
    newer = shutil.copy(last, last.with_name("0004_newer.json"))  # of other versions: the gate does not read it
    change([newer], lambda i, document: document["machine_info"].update(triton="3.1.0"))
    change([newer], lambda i, document: document.update(datetime="2100-01-01T00:00:00"))
    done = project.compare(f"--benchmark-storage={storage}", "--nsa-report=report")
    assert (done.returncode, named(done)) == (0, set())
    assert gate(done)[-1] == f"gate: {COUNT} pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    text = (project.path / "report" / "report.md").read_text()
    assert f"{COUNT} benchmarks in both" in text
    assert "000000000000" not in text
    assert f"| recorded in | {last} | this run |" in text


# --- refusals --------------------------------------------------------------------------------------------------------

NEEDS = "--benchmark-compare needs benchmarks"
OTHERS = "--nsa-against starts several processes, and {} is for one process: leave out {}"
BEFORE = "write the path before the option, pytest -m perf {} --benchmark-compare"
NOT_CORE = (
    "--nsa-full", "--nsa-update-thresholds", "--nsa-shape=N=2,L=16", "--nsa-dist=few",
    "--nsa-decode", "--nsa-csv=out.csv", "--nsa-seed=7", "--nsa-iters=10", "--nsa-warmup=0", "--nsa-streams=2",
    "--nsa-regret=2",
)  # fmt: skip
ONE = ("--benchmark-json=out.json", "--junitxml=out.xml", "--benchmark-compare", "--nsa-save-baseline", "--nsa-sweep")
CONTESTANTS = ["--nsa-impl", "mine:right", "--nsa-impl", "mine:wrong"]
REFUSED = [  # arguments, exit status, and what stderr says
    (["--benchmark-compare", "-n", "2"], 1, f"{NEEDS}, and under xdist there are none: leave out -n"),
    (["--benchmark-compare", "--benchmark-disable"], 1, f"{NEEDS}: leave out --benchmark-disable"),
    (["--benchmark-save=x", "--benchmark-disable"], 1, "--benchmark-save needs benchmarks: leave out --benchmark-d"),
    (["--benchmark-compare", "--benchmark-skip"], 1, f"{NEEDS}: leave out --benchmark-skip"),
    (["--benchmark-compare", "--nsa-hot"], 1, "--benchmark-compare: gated and recorded times are of cold buffers: le"),
    (["--benchmark-compare", "--nsa-no-check"], 1, "gated and recorded benchmarks are checked first: leave out --nsa-"),
    (["--benchmark-compare="], 4, "ERROR: --benchmark-compare: its value is empty: type --benchmark-compare, or leav"),
    (["--nsa-against="], 4, "ERROR: --nsa-against: its value is empty: type --nsa-against=HEAD, or leave the option"),
    (["--nsa-strict"], 4, "ERROR: --nsa-strict needs --benchmark-compare or --nsa-against or --nsa-save-baseline: add"),
    (["--benchmark-compare", "--benchmark-storage", "{elsewhere}"], 1, "write --benchmark-storage={elsewhere}"),
    (["--benchmark-compare", f"--benchmark-storage={PATH}"], 4, f"ERROR: --benchmark-storage {PATH}: expected a f"),
    (["--nsa-against=HEAD", "tests/nowhere.py"], 1, "nothing was compared: file or directory not found: tests/nowh"),
    (["--nsa-csv", "{elsewhere}"], 4, "/conftest.py: write --nsa-csv={elsewhere}"),
    (["--nsa-save-baseline", *CONTESTANTS], 1, "a baseline is of one contestant: leave out all but one --nsa-impl"),
    *[(["--nsa-save-baseline", option], 1, "--nsa-save-baseline: a baseline is of core") for option in NOT_CORE],
    *[(["--nsa-against=HEAD", option], 1, OTHERS.format(*[option.partition("=")[0]] * 2)) for option in ONE],
    # pytest-benchmark takes the word after the option for a stored run; pytest then runs all files but this one
    *[(["--benchmark-compare", p], 1, BEFORE.format(p)) for p in (PATH, "tests/perf", f"{PATH}::test_bench")],
]  # fmt: skip


def test_what_would_pass_without_comparing_or_recording_is_refused(project, tmp_path):
    """`test_options.py` has all options that would do nothing."""
    elsewhere = str(tmp_path / "elsewhere")
    shutil.copytree(project.baselines, elsewhere)
    (project.path / "mine.py").write_text("def right(q, k, v, *, ranges, causal, scale):\n    pass\n\nwrong = right\n")
    runs = [["-m", "perf", *(word.format(elsewhere=elsewhere) for word in words)] for words, *_ in REFUSED]
    for done, (words, status, said) in zip(
        project.run_pytest.each(runs, cwd=project.path, environment=off_gpu()), REFUSED, strict=True
    ):
        assert (done.returncode, words) == (status, words), done.stderr + done.stdout
        assert said.format(elsewhere=elsewhere) in done.stderr, words
        if "a baseline is of core" in said:
            assert re.search(rf"leave out {words[-1].partition('=')[0]}\b", done.stderr), words
    assert project.left() == []


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def record(project, monkeypatch):
    """`record(*arguments)`: the status of a recording of the project."""
    return lambda *arguments: save(project.run_pytest, monkeypatch, project.path, *arguments)


def test_a_recording_of_some_benchmarks_leaves_the_others_in_force(project, record, capsys):
    project.inject(**SLOWER)
    assert record("-k", "slower_15", "--nsa-accept-regression") == 0
    assert capsys.readouterr().out.count("accepted by --nsa-accept-regression\n") == store.FILES
    assert project.left() == sorted(path.name for path in project.files[0].parent.glob("000[456]_*-*.json"))
    documents = [json.loads(path.read_text()) for path in sorted(project.files[0].parent.iterdir())]
    assert [len(d["benchmarks"]) for d in documents] == [COUNT] * 3 + [1] * 3
    assert {b["fullname"] for d in documents[3:] for b in d["benchmarks"]} == {f"{PATH}::test_bench[slower_15]"}
    done = project.compare()  # would fail, were the first three still in force
    assert done.returncode == 0
    assert gate(done)[0].endswith(": 0001, 0002, 0003, 0004, 0005, 0006")
    assert gate(done)[-1].startswith(f"gate: {COUNT} pass, 0 FAIL")


# Bytes a file may have.
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
REPLACED = {"full disk": FULL_DISK + TEXT, "skipped": TEXT + "pytestmark = pytest.mark.skip\n"}


@pytest.mark.parametrize("why", ["regression", "wrong", "full disk", "skipped"])
def test_what_is_not_saved(project, record, capsys, why):
    """A regression unless it is accepted, a wrong result or a full disk whatever is accepted."""
    if why in REPLACED:
        (project.path / PATH).write_text(REPLACED[why])
    else:
        project.inject(**SLOWER if why == "regression" else {"same": ALIKE["same"] | {"wrong": True}})
    accepted = ["--nsa-accept-regression"] * (why != "regression")
    assert record(*accepted, "-p", "no:cacheprovider") == 1
    assert project.left() == []
    assert not list(project.baselines.glob(".recording-*"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("no baseline saved: run 1 of 3 ")
    ends = {"skipped": "measured no benchmark", "full disk": ""}
    assert said.endswith(ends.get(why, "was red (exit status 1)"))


INTERRUPTS = """
def test_interrupt():
    import os, signal, time
    if list(pathlib.Path(__file__).parent.glob("baselines/.recording-*")):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1000)
"""


def test_an_interrupted_recording_leaves_nothing(project):
    """By SIGTERM, in processes as a user starts them; `test_gate_children.py` has other signals."""
    (project.path / PATH).write_text(TEXT + INTERRUPTS)
    done = project.run(*SAVE)
    assert (done.returncode, project.left()) == (pytest.ExitCode.INTERRUPTED, [])
    assert done.stderr.splitlines()[-1] == "no baseline saved: interrupted"
    assert not list(project.baselines.glob(".recording-*"))
