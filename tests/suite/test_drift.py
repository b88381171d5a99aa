"""Many small steps: a benchmark that each recording made a little slower fails beside the best that it ever was."""

import json
import re

import pytest

from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import Timing
from nsa.testing.gate import store
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Key
from nsa.testing.report import plots
from nsa.testing.report.recording import history, load

from .test_gate_store import run_of

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
