"""Files of settings and measurements with odd values: read, or refused in one line that names the file."""

import copy
import re

import pytest
import yaml

from nsa import gpu, settings

from .odd_files import changed, nodes, refused

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{x}: &{x} [{', '.join([f'*{y}'] * 9)}]\n" for y, x in zip("abcdefgh", "bcdefghi", strict=True)
)
ODD = {
    "2026-02-31": "expected a valid timestamp, got '2026-02-31'",
    "2026-01-01T99:00:00": "expected a valid timestamp",
    "!!timestamp x": "expected a valid timestamp",
    "!!bool maybe": "expected a valid bool",
    "!!int _": "expected a valid int",
    "9" * 5000: "expected a valid int, got '999",
    "0x" + "f" * 5000: "expected an integer of at most 64 bits, got 20000",
}
FUZZ = (
    *ODD, "&x [*x]", "", "~", "yes", "x", "-1", "0", "1.5", ".nan", ".inf", "1e999", "[]", "[1]", "{}", "{a: 1}",
    "[[[{a: [[]]}]]]", "!!binary x", "!!set {b}", "!!omap [b]", "!!python/object:os.system x", "{[1]: 2}", "2026-02-28",
    "\x00", "'", "{",
)  # fmt: skip
VALID = {
    "threshold": {"sel_triton_min_L": 64, "sdpa_layout": "expanded"},
    "costs": {"narrow": {"query_major": {"calls": 5, "numbers": 0.25}}},
    "tiles": {"query_major": [{}]},
}


@pytest.mark.parametrize("value", ODD, ids=[re.sub(r"\W+", "-", value[:20]) for value in ODD])
def test_the_text_names_file_and_line(value, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(f"runtime:\n  probe: {value}\n")
    assert refused(path, settings.read_yaml).startswith(f"{path}: line 2: {ODD[value]}")
    path.write_text(f"tiles:\n  query_major:\n  - {{best: [1, {value}]}}\n")
    assert refused(path, gpu.read).startswith(f"{path}: line 3: {ODD[value]}")


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize("text", [
    "[" * 200_000, "{a: " * 200_000, BOMB, "&x [*x, 2026-02-31]", "{a: {b: !!foo x}, c: 2026-02-31}", "a\n",
], ids=["lists", "mappings", "bomb", "circle", "two", "scalar"])  # fmt: skip
def test_a_file_that_is_none_is_refused(text, loader, tmp_path, monkeypatch):
    monkeypatch.setattr(yaml, "CSafeLoader", getattr(yaml, loader), raising=False)
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert refused(path, gpu.read)


def test_any_odd_value_in_a_file_of_measurements_is_read_or_refused(tmp_path):
    from nsa.kernels.query_major.tiles import Choice, Point

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
