"""The file of a GPU: its sections, the user's before the packaged, what serves without one, and each error's words."""

import re

import pytest
import torch

from nsa import gpu, routing, schedules, settings
from nsa.kernels.query_major import tiles
from nsa.kernels.query_major.tiles import Choice, Point
from nsa.tuning.files import HEAD, write_section

NAME = "NVIDIA Nobody 1"
OF = "gpu: G, torch: 2.11.0, triton: 3.6.0, date: 2026-01-31, commit: abc"
THRESHOLD = f"threshold: {{sel_triton_min_L: 64, sdpa_layout: expanded, provenance: {{{OF}, margin: 1.2}}}}\n"
COSTS = f"costs: {{wide: {{key_major: {{calls: 2, parts: 0.5}}}}, provenance: {{{OF}, command: c, shapes: s}}}}\n"
SHAPE = "one_span: false, D: 128, Dv: 128, G: 8, rows: 64, L: 256"
BEST = "splits: 2, head_tiles: 1, BLOCK_L: 32, num_warps: 2, num_stages: 3, cluster: 0"
TILES = f"tiles: {{query_major: [{{shape: {{{SHAPE}}}, provenance: {{{OF}}}, best: [{{{BEST}}}]}}]}}\n"
INTEGER = "expected a non-negative integer, null or off"


def writing(folder):
    """`write(text) -> path`: this GPU's file in a folder, or another's."""

    def write(text, name=NAME):
        path = folder / f"{gpu.device_slug(name)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        settings.reload()
        return path

    return write


@pytest.fixture
def packaged(gpus):
    """What ships with the package about this GPU."""
    return writing(gpus)


@pytest.fixture
def mine(gpus, user_folder):
    """What this user measured of it."""
    return writing(user_folder)


@pytest.mark.parametrize(("name", "slug"), [
    ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ("Intel(R) Xeon(R) CPU @ 2.20GHz 2threads", "intel-xeon-cpu-2-20ghz-2threads"),
])  # fmt: skip
def test_device_slug(name, slug):
    assert gpu.device_slug(name) == slug


def test_one_file_has_every_section(packaged):
    path = packaged(THRESHOLD + COSTS + TILES)
    found = gpu.measured(NAME)
    assert (found.threshold.sel_triton_min_L, found.threshold.sdpa_layout) == (64, "expanded")
    assert found.costs.kinds == {"wide": {"key_major": {"calls": 2, "parts": 0.5}}}
    assert found.tiles.query_major == {(False, 128, 128): {Point(8, 64, 256): Choice(2, 1, 32, 2, 3, 0)}}
    of = {"gpu": "G", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-31", "commit": "abc"}
    assert found.threshold.provenance == of | {"margin": "1.2"}
    assert found.costs.provenance == of | {"command": "c", "shapes": "s"}
    assert found.tiles.provenance == (of,)
    assert {found.threshold.path, found.costs.path, found.tiles.path} == {path}
    assert gpu.measured(NAME) is found


def test_every_packaged_file_is_valid():
    paths = sorted(gpu.PACKAGED.glob("*.yaml"))
    assert paths
    for path in paths:
        found = gpu.read(path)
        parts = [x.provenance for x in (found.threshold, found.costs) if x]
        parts += found.tiles.provenance if found.tiles else ()
        assert {gpu.device_slug(provenance["gpu"]) for provenance in parts} == {path.stem}


def test_the_users_sections_come_first(packaged, mine):
    first = packaged(THRESHOLD + COSTS)
    second = mine(THRESHOLD.replace("64", "32") + TILES)
    found = gpu.measured(NAME)
    assert found.threshold.sel_triton_min_L == 32
    assert (found.threshold.path, found.costs.path, found.tiles.path) == (second, first, second)


def test_a_whole_file_of_the_users_is_all_that_is_read(packaged, mine):
    packaged("[not read]")
    path = mine(THRESHOLD + COSTS + TILES)
    assert gpu.measured(NAME).tiles.path == path


NOT_MEASURED = (
    f"{NAME}: not measured, so rows of fewer than 2048 keys use packed SDPA, though Triton is probably faster; "
    "`python -m nsa calibrate` measures this GPU (a few minutes)"
)


def said(caplog):
    return [(record.name, record.getMessage()) for record in caplog.records]


def test_without_a_threshold_the_safe_default_serves_and_is_said_once(packaged, caplog, monkeypatch):
    packaged(COSTS + TILES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(routing, "why_not_triton", lambda device: None)
    assert routing._device_facts(torch.device("cuda", 0)) == (NAME, "heads_as_queries", None)
    assert [gpu.min_L_for(NAME) for _ in range(3)] == [2048] * 3
    assert said(caplog) == [("nsa", NOT_MEASURED)]
    assert gpu.measured(NAME).threshold is None
    assert schedules.measured(NAME).kinds["wide"]
    assert tiles.table(NAME, 90, 132)


def test_without_costs_those_of_the_stand_in_serve(packaged, gpus, caplog):
    packaged(THRESHOLD + TILES)
    assert schedules.measured(NAME) is None
    (gpus / "nvidia-h100-80gb-hbm3.yaml").write_text(COSTS)
    settings.reload()
    assert schedules.measured(NAME).kinds == {"wide": {"key_major": {"calls": 2, "parts": 0.5}}}
    assert gpu.min_L_for(NAME) == 64
    assert said(caplog) == []


def test_the_section_of_older_versions_is_said_and_not_read(packaged, caplog):
    path = packaged(THRESHOLD + "crossover: {key_major_from: {1: 2}}\n")
    assert gpu.measured(NAME).costs is None
    text = f"{path}: its section crossover is no longer read: `python -m nsa calibrate` measures costs"
    assert said(caplog) == [("nsa", text)]


@pytest.mark.parametrize(
    "of",
    ["union_apart: {}", "query_major: {parts: 1}", "union: {products: 1}"],  # union counts two kinds of products apart
    ids=["schedule", "term", "products of unions"],
)
def test_costs_of_another_version_are_said_and_not_read(packaged, mine, caplog, of):
    """`nsa calibrate` wrote them. It can write other sections of that file, and those costs anew."""
    packaged(COSTS)
    path = mine(COSTS.replace("key_major: {calls: 2, parts: 0.5}", of) + THRESHOLD)
    assert gpu.measured(NAME).costs.path != path
    assert gpu.measured(NAME).threshold.path == path
    key = f"costs.wide.{of.partition(':')[0]}"
    text = f"{path}: {key} is of another version, and no costs are read: `python -m nsa calibrate` measures them"
    assert said(caplog) == [("nsa", text)]


def test_without_tiles_the_rules_serve(packaged, caplog):
    arguments = (90, 132, 2, 8, 128, 128, 256, 8, 64)
    packaged(THRESHOLD + COSTS)
    assert tiles.table(NAME, 90, 132) == {}
    assert tiles.tile_and_splits(NAME, *arguments) == tiles.tile_and_splits(None, *arguments)
    packaged(TILES)
    assert tiles.tile_and_splits(NAME, *arguments) != tiles.tile_and_splits(None, *arguments)
    assert said(caplog) == []


def test_a_chip_like_the_stand_in_uses_its_tiles(packaged):
    def choices(name, capability=90, processors=132):
        return tiles.tile_and_splits(name, capability, processors, 2, 8, 128, 128, 256, 8, 64)

    packaged(TILES, gpu.STAND_IN)
    assert choices(NAME) == choices(gpu.STAND_IN) != choices(None)
    assert choices(NAME, processors=114) == choices(None, processors=114)
    assert choices(NAME, processors=148) == choices(None, processors=148)
    for capability in (80, 100):
        assert choices(NAME, capability) == choices(None, capability)
    packaged(TILES.replace("BLOCK_L: 32", "BLOCK_L: 64"))
    assert choices(NAME) != choices(gpu.STAND_IN), "its own come first"


def test_without_a_file_there_is_nothing(gpus):
    assert gpu.measured(NAME) == gpu.Gpu()


@pytest.mark.parametrize("value", ["null", "off"])
def test_triton_that_never_pays_stays_off(packaged, value):
    packaged(THRESHOLD.replace("64", value))
    assert gpu.min_L_for(NAME) == gpu.TRITON_OFF
    assert gpu.TRITON_OFF >= 2**62  # keys: more than any row


SHAPE_OF, BEST_OF = "tiles.query_major[0].shape", "tiles.query_major[0].best"
KEYS = "expected the keys gpu, torch, triton, commit, date"


WRONG = {
    "no-mapping": ("[1]", "expected a mapping of settings, got [1]"),
    "no-yaml": ("{", "expected YAML: "),
    "section": ("schedule: {}", "unknown key schedule, expected one of: threshold, costs, tiles"),
    "empty-section": ("threshold:", "threshold: expected a mapping, got None"),
    "no-min-L": (THRESHOLD.replace("sel_triton_min_L: 64, ", ""),
                 f"threshold.sel_triton_min_L: {INTEGER}, found no such key"),
    **{
        f"min-L-{value}": (THRESHOLD.replace("64", value), f"threshold.sel_triton_min_L: {INTEGER}, got {got}")
        for value, got in {"x": "'x'", "on": "True", "-1": "-1"}.items()
    },
    "layout": (THRESHOLD.replace("expanded", "best"),
               "threshold.sdpa_layout: expected one of heads_as_queries, expanded, enable_gqa, got 'best'"),
    "threshold-key": (THRESHOLD.replace("sdpa_layout: expanded", "speed: 2"),
                      "unknown key threshold.speed, expected one of: sel_triton_min_L, sdpa_layout, provenance"),
    "threshold-provenance": ("threshold: {sel_triton_min_L: 1}", f"threshold.provenance: {KEYS}, margin, got None"),
    "kind": ("costs: {small: {}}",
             "unknown key costs.small, expected one of: narrow, wide, narrow_e4m3, wide_e4m3, provenance"),
    "no-terms": ("costs: {wide: {query_major: 1}}", "costs.wide.query_major: expected a mapping, got 1"),
    **{
        f"cost-{cost}": (
            f"costs: {{wide: {{key_major: {{parts: {cost}}}}}}}",
            f"costs.wide.key_major.parts: expected microseconds, 0 or more, got {got}",
        )
        for cost, got in {"-1": "-1", ".nan": "nan", ".inf": "inf", "x": "'x'", "true": "True", "[1]": "[1]"}.items()
    },
    "part-of-a-provenance": (COSTS.replace(f"{{{OF}, command: c, shapes: s}}", "{gpu: x}"),
                             f"costs.provenance: {KEYS}, command, shapes, got {{'gpu': 'x'}}"),
    "family": ("tiles: {key_major: []}", "unknown key tiles.key_major, expected one of: query_major"),
    "no-shapes": ("tiles: {query_major: []}", "tiles.query_major: expected a list of shapes, got []"),
    "no-shape": ("tiles: {query_major: [1]}", "tiles.query_major[0]: expected a mapping, got 1"),
    **{
        f"tiles-{right}": (TILES.replace(right, wrong, 1), message)
        for right, wrong, message in (
            ("shape:", "shapes:", "unknown key tiles.query_major[0].shapes, expected one of: shape, provenance, best"),
            ("one_span: false", "one_span: 0", f"{SHAPE_OF}.one_span: expected true or false, got 0"),
            ("rows: 64", "rows: 0", f"{SHAPE_OF}.rows: expected a positive integer, got 0"),
            (f"[{{{BEST}}}]", "[]", f"{BEST_OF}: expected a list of choices, the best first, got []"),
            ("num_warps: 2", "num_warps: x", f"{BEST_OF}[0].num_warps: expected a positive integer, got 'x'"),
            (", cluster: 0", "", f"{BEST_OF}[0].cluster: expected a non-negative integer, got None"),
            (", commit: abc", "", f"tiles.query_major[0].provenance: {KEYS}, got {{"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("whose", ["packaged", "mine"])
def test_a_wrong_file_is_named(request, whose, kind):
    text, message = WRONG[kind]
    path = request.getfixturevalue(whose)(text)
    with pytest.raises(ValueError, match=r"\.yaml: ") as raised:
        gpu.measured(NAME)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_a_file_that_is_no_text_is_named(packaged):
    path = packaged("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: expected YAML"):
        gpu.measured(NAME)


CONTENT = {"sel_triton_min_L": 16, "provenance": dict.fromkeys(gpu.PROVENANCE["threshold"], "x")}


def test_a_section_is_written_and_the_others_stay_to_the_byte(packaged, gpus):
    path = packaged("# A note.\n" + TILES + COSTS.replace("\n", "  # as measured\n"))
    assert write_section(gpus, NAME, "threshold", CONTENT, ["first", "  second"]) == path
    text = path.read_text()
    assert text.startswith("# A note.\nthreshold:\n  # first\n  #   second\n  sel_triton_min_L: 16\n")
    assert text.endswith(COSTS.replace("\n", "  # as measured\n") + TILES)
    assert gpu.measured(NAME).threshold.sel_triton_min_L == 16
    write_section(gpus, NAME, "threshold", CONTENT | {"sel_triton_min_L": 8}, ["first", "  second"])
    assert path.read_text() == text.replace("sel_triton_min_L: 16", "sel_triton_min_L: 8")
    assert [p.name for p in gpus.iterdir()] == [path.name]
    path.unlink()
    write_section(gpus, NAME, "threshold", CONTENT, [])
    assert path.read_text().startswith(f"{HEAD}threshold:\n  sel_triton_min_L: 16\n  provenance: {{gpu: x, ")


def test_a_broken_section_is_replaced_and_another_broken_one_refuses(packaged, gpus):
    packaged("threshold: 5\n" + TILES)
    write_section(gpus, NAME, "threshold", CONTENT, [])
    assert gpu.measured(NAME).threshold.sel_triton_min_L == 16
    path = packaged("threshold: 5\ntiles: 6\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: tiles: expected a mapping, got 6$"):
        write_section(gpus, NAME, "threshold", CONTENT, [])
    assert path.read_text() == "threshold: 5\ntiles: 6\n"


def test_files_are_read_alike_without_libyaml(packaged, monkeypatch):
    import yaml

    packaged(THRESHOLD + COSTS + TILES)
    quick = gpu.measured(NAME)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    settings.reload()
    assert gpu.measured(NAME) == quick
