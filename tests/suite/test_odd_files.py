"""Baselines, settings and measurements with odd values: read, or refused in one line that names the file."""

import copy
import json
import logging
import re
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from pytest_benchmark.stats import normalize_stats
from pytest_benchmark.table import TableResults
from pytest_benchmark.utils import time_unit

from nsa import gpu, settings
from nsa.kernels.query_major.tiles import Choice, Point
from nsa.testing.clock.timing import Timing
from nsa.testing.gate import store
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Key
from nsa.testing.report.document import read
from nsa.testing.report.recording import load, newest_of


def nodes(value, path=()):
    """The path of each node of a document, its root first."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[key], (*path, key))


def changed(document, path, values):
    """The document with each value in the place of one node in turn."""
    parent = box = {"root": copy.deepcopy(document)}
    *way, last = ("root", *path)
    for key in way:
        parent = parent[key]
    for value in values:
        parent[last] = value
        yield box["root"]


def refused(path, call):
    """The text with which `call(path)` refuses a file, one line that names it; None if it does not."""
    try:
        call(path)
    except ValueError as error:
        said = str(error)
    else:
        return None
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    assert len(said) < len(str(path)) + 500
    return said


# --- baselines --------------------------------------------------------------------------------------------------------

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


# --- settings and measurements ----------------------------------------------------------------------------------------

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{x}: &{x} [{', '.join([f'*{y}'] * 9)}]\n" for y, x in zip("abcdefgh", "bcdefghi", strict=True)
)
ODD_WORDS = {
    "2026-02-31": "expected a valid timestamp, got '2026-02-31'",
    "2026-01-01T99:00:00": "expected a valid timestamp",
    "!!timestamp x": "expected a valid timestamp",
    "!!bool maybe": "expected a valid bool",
    "!!int _": "expected a valid int",
    "9" * 5000: "expected a valid int, got '999",
    "0x" + "f" * 5000: "expected an integer of at most 64 bits, got 0xfff",
}
FUZZ = (
    *ODD_WORDS, "&x [*x]", "", "~", "yes", "x", "-1", "0", "1.5", ".nan", ".inf", "1e999", "[]", "[1]", "{}", "{a: 1}",
    "[[[{a: [[]]}]]]", "!!binary x", "!!set {b}", "!!omap [b]", "!!python/object:os.system x", "{[1]: 2}", "2026-02-28",
    "\x00", "'", "{",
)  # fmt: skip
VALID = {
    "threshold": {"sel_triton_min_L": 64, "sdpa_layout": "expanded"},
    "costs": {"narrow": {"query_major": {"calls": 5, "numbers": 0.25}}},
    "tiles": {"query_major": [{}]},
}


@pytest.mark.parametrize("value", ODD_WORDS, ids=[re.sub(r"\W+", "-", value[:20]) for value in ODD_WORDS])
def test_the_text_names_file_and_line(value, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(f"runtime:\n  probe: {value}\n")
    assert refused(path, settings.read_yaml).startswith(f"{path}: line 2: {ODD_WORDS[value]}")
    path.write_text(f"tiles:\n  query_major:\n  - {{best: [1, {value}]}}\n")
    assert refused(path, gpu.read).startswith(f"{path}: line 3: {ODD_WORDS[value]}")


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize("text", [
    "[" * 200_000, "{a: " * 200_000, BOMB, "&x [*x, 2026-02-31]", "{a: {b: !!foo x}, c: 2026-02-31}", "a\n",
], ids=["lists", "mappings", "bomb", "circle", "two", "scalar"])  # fmt: skip
def test_a_file_of_measurements_that_is_none_is_refused(text, loader, tmp_path, monkeypatch):
    monkeypatch.setattr(yaml, "CSafeLoader", getattr(yaml, loader), raising=False)
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert refused(path, gpu.read)


def test_any_odd_value_in_a_file_of_measurements_is_read_or_refused(tmp_path):
    valid = copy.deepcopy(VALID)
    for name in ("threshold", "costs"):
        valid[name]["provenance"] = dict.fromkeys(gpu.PROVENANCE[name], "x")
    [entry] = valid["tiles"]["query_major"]
    entry["provenance"] = dict.fromkeys(gpu.PROVENANCE["tiles"], "x")
    entry["shape"] = {"one_span": True} | dict.fromkeys(("D", "Dv", *Point._fields), 64)
    entry["best"] = [dict.fromkeys(Choice._fields, 1)]
    path, taken = tmp_path / "x.yaml", 0
    path.write_text(yaml.safe_dump(valid))
    assert refused(path, gpu.read) is None
    for where in filter(None, nodes(valid)):
        (document,) = changed(valid, where, ["ODDVALUE"])
        text = yaml.safe_dump(document, default_flow_style=True)
        for value in FUZZ:
            path.write_text(text.replace("ODDVALUE", value))
            taken += refused(path, gpu.read) is not None
    assert taken > 700
