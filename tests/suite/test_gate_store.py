"""Recordings on their way into the store: named safely, never lost, never over one another; and how they drift."""

import fcntl
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsa import gpu
from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import Timing
from nsa.testing.gate import children, store
from nsa.testing.gate.rule import Reading, quartile
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Key
from nsa.testing.report import plots
from nsa.testing.report.document import read
from nsa.testing.report.recording import history, load
from nsa.tuning import files


def run_of(samples, info, **more):
    """What pytest-benchmark writes of one benchmark `x`, with made-up statistics."""
    stats = dict.fromkeys(("min", "max", "mean", "median", "stddev", "iqr"), 1 / 3)
    stats |= {"rounds": len(samples), "iterations": 1, "outliers": "0;0", "data": samples}
    bench = {"name": "x", "fullname": "x", "group": None, "options": {"timer": "x"}, "extra_info": info, "stats": stats}
    return {"machine_info": {"device": "gpu"}, "benchmarks": [bench]} | more


@pytest.mark.parametrize(("text", "name"), [
    ("fix/abc", "fix-abc"), ("abc1234", "abc1234"), ("../../x", "x"), ("..", "unnamed"), ("", "unnamed"),
    ("a b\0c\nd", "a-b-c-d"), ("nvidia-h100-80gb-hbm3", "nvidia-h100-80gb-hbm3"), (".hidden", "hidden"),
    ("my.package:attend@blocks", "my.package-attend@blocks"), ("noyau_é", "noyau_é"), ("\udcff", "unnamed"),
])  # fmt: skip
def test_any_text_makes_a_name_of_a_file(text, name, tmp_path):
    assert store.file_name(text) == name
    (tmp_path / name).touch()


def test_long_names_stay_apart(tmp_path):
    names = {store.file_name("ü" * 300 + end) for end in "ab"}
    assert len(names) == 2
    for name in names:
        (tmp_path / f"0001_20261126-{name}.json").touch()


@pytest.fixture
def measured(monkeypatch):
    """Processes that measure nothing and leave a file."""

    def run(arguments, cwd):
        Path(arguments[2].partition("=")[2]).write_text(json.dumps(run_of([1.0], {})))
        return 0

    monkeypatch.setattr(children, "run", run)


def test_a_commit_that_is_no_name_of_a_file_loses_nothing(measured, tmp_path):
    saved = store.record(tmp_path / "baselines", [], tmp_path, "fix/abc", "../mine:f")
    assert [path.name[:5] + path.name[13:] for path in saved] == [f"000{i}_-fix-abc.json" for i in (1, 2, 3)]
    assert {path.parent for path in saved} == {tmp_path / "baselines" / "gpu" / "mine-f"}
    assert all(path.is_file() for path in saved)
    assert [path.name for path in (tmp_path / "baselines").iterdir()] == ["gpu"]


@pytest.mark.parametrize("what", ["benchmark", "machine"])
def test_runs_that_do_not_hold_the_same_are_not_kept(tmp_path, monkeypatch, what):
    """A case that one process skipped, or a runner that was exchanged."""

    def run(arguments, cwd):
        file, document = Path(arguments[2].partition("=")[2]), run_of([1.0], {})
        if file.name == "2.json" and what == "machine":
            document["machine_info"]["device"] = "another"
        elif file.name == "2.json":
            document["benchmarks"][0]["name"] = "y"
        file.write_text(json.dumps(document))
        return 0

    monkeypatch.setattr(children, "run", run)
    with pytest.raises(store.NotSaved, match="the runs do not hold the same benchmarks of the same machine"):
        store.record(tmp_path / "baselines", [], tmp_path, "abc")
    assert [*(tmp_path / "baselines").iterdir()] == []


def test_a_baseline_of_another_device_is_refused(tmp_path):
    """A copied folder."""
    key = store.Key("here", "2.11", "3.6")
    information = {"device": "elsewhere", "torch": "2.11", "triton": "3.6"}
    (tmp_path / "0001_x.json").write_text(json.dumps({"machine_info": information, "benchmarks": []}))
    with pytest.raises(ValueError, match="0001_x.json: machine_info.device: expected here, got elsewhere"):
        store.find(tmp_path, key)


def test_recordings_that_cannot_be_moved_stay_where_they_are(measured, tmp_path):
    storage = tmp_path / "baselines"
    storage.mkdir()
    (storage / "gpu").write_text("a file in the place of the folder")
    with pytest.raises(store.NotSaved, match=r"the recordings stay in (.*)") as raised:
        store.record(storage, [], tmp_path, "abc")
    kept = Path(str(raised.value).partition("stay in ")[2])
    assert [path.name for path in sorted(kept.iterdir())] == ["1.json", "2.json", "3.json"]


def test_a_baseline_keeps_all_that_the_gate_reads_and_shows_an_edit(tmp_path):
    g = random.Random(0)
    samples = {name: [g.uniform(1e-5, 2e-5) for _ in range(51)] for name in ("ours", "plain", "other")}
    controls = {name: samples[name] for name in ("plain", "other")}
    info = {"control": "plain", "control_samples": controls, "ceiling_gbps": 1 / 3, "gate": {"verdict": "pass"}}
    path, given = tmp_path / "0001_x.json", run_of(samples["ours"], info)
    path.write_text(store.kept(given))
    (small,) = read(path)["benchmarks"]
    assert Reading.of(small["stats"]["data"], small["extra_info"]) == Reading.of(samples["ours"], info)
    assert (small["stats"]["data"], small["stats"]["median"]) == ([quartile(samples["ours"])], 0.33333)
    assert {"options"} == given["benchmarks"][0].keys() - small.keys()
    assert {"gate"} == info.keys() - small["extra_info"].keys()
    path.write_text(path.read_text().replace("0.33333,", "0.33334,", 1))
    with pytest.raises(ValueError, match="0001_x.json: expected the contents that were written with this checksum"):
        read(path)


def recordings(folder, text="{}"):
    folder.mkdir()
    made = [folder / f"{i}.json" for i in range(3)]
    for file in made:
        file.write_text(text)
    return made


def test_a_failing_rename_takes_back_the_files_before_it(tmp_path, monkeypatch):
    made = recordings(tmp_path / "work")
    rename = Path.rename

    def once_full(self, target):
        if self == made[2]:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", once_full)
    with pytest.raises(OSError, match="No space left"):
        store._move(made, tmp_path / "device", "label")
    assert list((tmp_path / "device").iterdir()) == []
    assert all(file.is_file() for file in made)


def test_recordings_at_the_same_time_have_numbers_of_their_own(tmp_path, monkeypatch):
    """Of the same commit and day, so that equal numbers would be equal names. A killed process left its lock's file."""
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / ".lock").touch()
    made = [recordings(tmp_path / f"work{i}", json.dumps(i)) for i in range(6)]
    together = threading.Barrier(len(made))
    rename = Path.rename

    def slow(self, target):
        time.sleep(0.002)  # the others choose their numbers meanwhile, if they may
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slow)

    def move(group):
        together.wait()
        store._move(group, tmp_path / "device", "label")

    with ThreadPoolExecutor(len(made)) as threads:
        list(threads.map(move, made))
    found = sorted((tmp_path / "device").iterdir())
    assert [int(path.name[:4]) for path in found] == list(range(1, 19))
    contents = [json.loads(path.read_text()) for path in found]
    assert all(contents[i] == contents[i + 1] == contents[i + 2] for i in range(0, 18, 3))


def test_the_lock_is_held_by_one_and_leaves_no_file(tmp_path):
    inside, most = [], []

    def work(_):
        for _ in range(20):
            with files.locked(tmp_path):
                inside.append(1)
                time.sleep(0.0005)  # the others come in, if they may
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert set(most) == {1}
    assert list(tmp_path.iterdir()) == []


def test_a_section_is_read_and_written_under_the_lock(tmp_path, monkeypatch):
    """Otherwise two processes that write two sections of a GPU's file would lose one."""
    seen = []

    def read(path, text):
        with (tmp_path / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(text)

    monkeypatch.setattr(gpu, "read", read)
    path = files.write_section(tmp_path, "NVIDIA X", "threshold", {"sel_triton_min_L": 16}, [])
    assert seen == [path.read_text()]
    assert list(tmp_path.iterdir()) == [path]


# --- many small steps: what each recording made a little slower fails beside the best that it was ---------------------

MACHINE = {"device": "gpu", "torch": "2.11.0", "triton": "3.6.0", "node": "x"}
KEY = Key.of(MACHINE)


def timings(ratio):
    times = {"ours": Timing([ratio * 1e-3] * 5, "host", False, 1, 1), "plain": Timing([1e-3] * 5, "host", False, 1, 1)}
    return times["ours"], gate_figures(times, ["plain"])


def record(folder, ratio, drift=()):
    """Three files as `--nsa-save-baseline` leaves them. Returns why the benchmark failed, and then no file is kept."""
    number = len(list(folder.glob("*.json")))
    baseline = store.find(folder, KEY)
    for i in range(number + 1, number + 4):
        gate = Gate(KEY, baseline, recording=True, drift=drift)
        samples, info, failure = gate.judge("x", *timings(ratio), lambda: timings(ratio))
        if failure:
            return failure
        commit, date = {"id": f"commit{number // 3}abcdefgh"}, f"2026-11-{number // 3 + 1:02}T00:00:00"
        made = run_of(samples.samples, info, machine_info=MACHINE, commit_info=commit, datetime=date)
        (folder / f"{i:04}_x.json").write_text(json.dumps(made))
    return None


def test_five_recordings_each_a_little_slower_fail_at_the_fourth(tmp_path):
    assert record(tmp_path, 1.0) is None
    said = [record(tmp_path, 1.03**i) for i in range(1, 6)]
    assert said[:3] == [None] * 3
    text = "12.6% slower than at commit0abcde, in small steps: accepted by --nsa-accept-drift 'x' alone"
    assert said[3] == f"performance regression: {text}"
    assert said[4].startswith("performance regression: 15.9% slower than at commit0abcde, in small steps")


def test_five_equal_recordings_fail_never(tmp_path):
    assert [record(tmp_path, ratio) for ratio in (1.0, 1.01, 0.995, 1.0, 1.005)] == [None] * 5
    assert store.find(tmp_path, KEY).best["x"].ratio == pytest.approx(0.995)


def test_what_was_accepted_by_name_begins_anew(tmp_path):
    for i in range(4):
        assert record(tmp_path, 1.03**i) is None
    assert record(tmp_path, 1.03**4, drift=["other"]) is not None
    assert record(tmp_path, 1.03**4, drift=["x"]) is None
    assert store.find(tmp_path, KEY).best["x"].commit.startswith("commit4")
    assert record(tmp_path, 1.03**5) is None


def test_a_name_that_accepts_nothing_is_said(tmp_path):
    assert record(tmp_path, 1.0) is None
    gate = Gate(KEY, store.find(tmp_path, KEY), drift=["x", "other"])
    gate.judge("x", *timings(1.0), None)
    start = "not accepted by --nsa-accept-drift:"
    assert [line for line in gate.report(["x"]) if line.startswith(start)] == [
        f"{start} x is not slower in small steps", f"{start} other is no benchmark of this run",
    ]  # fmt: skip


def test_another_control_begins_anew(tmp_path):
    for i in range(4):
        assert record(tmp_path, 1.03**i) is None
    for path in sorted(tmp_path.glob("*.json"))[-3:]:
        path.write_text(path.read_text().replace("plain", "other"))
    assert store.find(tmp_path, KEY).best["x"].by == "other"


def test_a_best_that_is_none_names_its_file(tmp_path):
    assert record(tmp_path, 1.0) is None
    path = sorted(tmp_path.glob("*.json"))[-1]
    document = json.loads(path.read_text())
    document["benchmarks"][0]["extra_info"]["best"] = {"ratio": -1, "by": "plain", "commit": "x"}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"x.json: x: extra_info.best.ratio: expected a ratio from 1e-09 to 1e"):
        store.find(tmp_path, KEY)


def test_ratios_over_recordings_are_drawn(tmp_path):
    for i in range(4):
        record(tmp_path, 1.03**i)
    found, commits = history([load(sorted(tmp_path.glob("*.json"))[-1])])
    assert commits == ["commit0", "commit1", "commit2", "commit3"]
    assert found["x"] == {commit: pytest.approx(1.03**i) for i, commit in enumerate(commits)}
    pytest.importorskip("matplotlib")
    picture = plots.drift({"y": {"commit0": 1.0, "commit2": 1.2}} | found, commits)
    assert re.findall(r"<!-- (commit\d) -->", picture) == commits, "a benchmark that lacks a commit moves none"
    assert plots.drift({"x": {"commit0": 1.0}}, commits) is None
