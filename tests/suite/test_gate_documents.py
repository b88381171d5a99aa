"""Baselines that are damaged, foreign or hold numbers that no clock gives: refused in a line, never half believed."""

import copy
import json
import logging
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest
from pytest_benchmark.stats import normalize_stats
from pytest_benchmark.table import TableResults
from pytest_benchmark.utils import time_unit

from nsa.testing.clock.timing import Timing
from nsa.testing.gate import store
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Key
from nsa.testing.report.document import read
from nsa.testing.report.recording import load, newest_of

from .odd_files import changed, nodes, refused

RECORDED = Path(__file__).parents[1] / "perf" / "baselines" / "nvidia-h100-80gb-hbm3"
ODD = {
    "null": None, "true": True, "string": "x", "number in a string": "1.0", "zero": 0, "negative": -1.0, "large": 1e300,
    "huge": 10**400, "NaN": float("nan"), "infinite": float("inf"), "empty list": [], "list": [None],
    "empty mapping": {}, "mapping": {"x": [1]}, "nested": [[[[{"a": [[]]}]]]],
}  # fmt: skip
NOT_TIMES = {name: ODD[name] for name in ("NaN", "infinite", "zero", "negative", "huge", "true", "string", "list")}


@pytest.fixture(scope="module")
def valid():
    """The newest file of the committed baseline with one benchmark of two samples."""
    document = json.loads(sorted(RECORDED.glob("*.json"))[-1].read_text())
    b = document["benchmarks"][0]
    b["stats"]["data"] *= 2
    b["extra_info"]["control_samples"] = {k: x * 2 for k, x in b["extra_info"]["control_samples"].items()}
    del document["checksum"]
    for content, name in ((document["machine_info"], "cpu"), (b["extra_info"], "figures")):
        content[name] = {}  # many values that nothing reads
    return document | {"benchmarks": [b]}


def show(document):
    """The table that pytest-benchmark makes of a stored run."""
    columns = ["min", "max", "mean", "stddev", "median", "iqr", "outliers", "ops", "rounds", "iterations"]
    stats = [
        normalize_stats(b["stats"]) | {"name": b["name"], "fullname": b["fullname"]} for b in document["benchmarks"]
    ]

    def scale(unit, best, sort, **_):
        return time_unit(best[sort]) if unit == "seconds" else ("", 1.0)

    def progress(items, *_, **__):
        return ((None, item) for item in items)

    table = TableResults(columns, "min", None, itemgetter("name"), logging, scale)
    table.display(Mock(), [("group", stats)], progress_reporter=progress)


def use(path):
    """All that a gated run with a report does with a baseline's file, but for the pictures."""
    document = read(path)
    key = Key.of(document["machine_info"])
    gate = Gate(key, store.find(path.parent, key))
    for b in document["benchmarks"]:
        timing = Timing(b["stats"]["data"], "graph", True, 2, 100, 5e-7)
        gate.judge(b["name"], timing, b["extra_info"], None)
    gate.report([b["name"] for b in document["benchmarks"]])
    if document["benchmarks"]:
        show(document)
    assert newest_of([path])[0].facts == load(path).facts


def test_any_odd_value_in_a_baseline_is_harmless_or_refused(valid, tmp_path):
    path = tmp_path / "0001_x.json"
    path.write_text(json.dumps(valid))
    assert refused(path, use) is None
    taken = 0
    for where in nodes(valid):
        for document in changed(valid, where, ODD.values()):
            path.write_text(json.dumps(document))
            taken += refused(path, use) is not None
    assert taken > 700


@pytest.mark.parametrize("content", [
    b"[" * 200_000, b'{"a":' * 200_000, b"", b"null", b"\xff\xfe", b"\0", b"9" * 5000, b"{} {}", b'"x"',
], ids=["lists", "mappings", "empty", "null", "no-utf-8", "nul", "digits", "two", "string"])  # fmt: skip
def test_a_file_that_is_no_run_is_refused(content, tmp_path):
    path = tmp_path / "0001_x.json"
    path.write_bytes(content)
    assert refused(path, use)
    assert refused(path, load)


@pytest.mark.parametrize("where", ["stats.data", "extra_info.control_samples", "extra_info.ceiling_gbps"])
@pytest.mark.parametrize("value", NOT_TIMES.values(), ids=NOT_TIMES)
def test_a_number_that_decides_and_is_no_measurement_is_refused(valid, tmp_path, where, value):
    """In a baseline the line names file and benchmark, in a run the benchmark."""
    document = copy.deepcopy(valid)
    b = document["benchmarks"][0]
    info, samples = b["extra_info"], b["stats"]["data"]
    control = info["control"]
    if where == "stats.data":
        samples[1], where = value, "stats.data[1]"
    elif where == "extra_info.control_samples":
        info["control_samples"][control][1], where = value, f"{where}.{control}[1]"
    else:
        info["ceiling_gbps"] = value
    path = tmp_path / "0001_x.json"
    path.write_text(json.dumps(document))
    said = refused(path, use)
    assert f"{b['name']}: {where}: expected " in said
    gate = Gate(Key("gpu", "2.11", "3.6"), None, recording=True)  # a first recording: no baseline
    with pytest.raises(ValueError, match="^this run: test_") as raised:
        gate.judge(b["name"], Timing(samples, "graph", True, 2, 100, 5e-7), info, None)
    assert f"{b['name']}: {where}: expected " in str(raised.value)
