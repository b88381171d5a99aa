"""The sweep without a GPU: candidates, what a wrong one does, the table it writes and how tiles are found in it."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import yaml

import nsa
from nsa import gpu
from nsa.kernels import pinned
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.query_major import tiles
from nsa.kernels.query_major.tiles import Choice, Point
from nsa.kernels.shared import device as device_facts
from nsa.testing.clock.timing import Timing
from nsa.testing.matrix.case import Case
from nsa.tuning import sweep

H100 = "NVIDIA H100 80GB HBM3"
FACTS = {"gpu": H100, "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}
CASE = Case(4, 32, 32, 64, 2, "many", "fp32", S_kv=128)


@pytest.fixture
def table(gpus):
    """`table([(one_span, D, Dv, G, rows, L, choice), …])` makes that the H100's."""

    def make(shapes):
        entries = [
            dict(zip(sweep.SHAPE, shape, strict=True)) | {"best": [choice._asdict() | {"us": 1.0}]}
            for *shape, choice in shapes
        ]
        return sweep.write(entries, FACTS)

    return make


@pytest.fixture
def pretend_gpu(monkeypatch, fresh_plans):
    """Timing that prefers few splits, then small tiles, and calls everything once."""

    def time_gpu(fns, **sampling):
        times = {}
        for name, (call, *_) in fns.items():
            call()
            ran = seen[-1].variant.constexprs["BLOCK_L"] * 1e-6 + seen[-1].splits * 1e-3
            times[name] = Timing([ran], "graph", True, 1, 1)
        return times

    seen, plan = [], query_major.plan
    monkeypatch.setattr(query_major, "plan", lambda *args: seen.append(plan(*args)) or seen[-1])
    monkeypatch.setattr(sweep, "time_gpu", time_gpu)
    monkeypatch.setattr(sweep, "buffer_sets", lambda problem: ([problem], True))
    return seen


def test_candidates_give_every_program_a_tile():
    for case in sweep.cases():
        found = sweep.candidates(case, 132)
        assert len(found) == len(set(found)) >= 2
        for c in found:
            assert c.splits == 1 or case.L // c.splits >= 16
            assert c.BLOCK_L <= max(16, case.L // c.splits)


@pytest.mark.usefixtures("pretend_gpu")
def test_the_best_right_candidate_wins_and_a_failure_is_recorded(device, monkeypatch):
    choices = [Choice(2, 1, 32, 4, 2), Choice(1, 1, 64, 4, 2), Choice(1, 1, 32, 4, 2), Choice(1, 1, 16, 4, 2)]
    wrong, right = choices[3], sweep.assert_parity

    def check(result, oracle, name):
        assert name != str(wrong), "off by a lot"
        right(result, oracle, name)

    monkeypatch.setattr(sweep, "assert_parity", check)
    best, facts = sweep.sweep(CASE, choices, device)
    assert [(f["splits"], f["BLOCK_L"]) for f in facts] == [(1, 32), (1, 64), (2, 32), (1, 16)]
    assert facts[-1]["error"] == "AssertionError: off by a lot"
    assert "us" not in facts[-1]
    assert best.median == pytest.approx(1.032e-3)
    assert sweep.entry(CASE, facts)["best"][0]["us"] == pytest.approx(1032)
    assert sweep.entry(CASE, facts[-1:]) is None


def test_every_candidate_is_right(device):
    """What the sweep would try on a small shape, each against the oracle, with LSE; two programs a group included."""
    case = Case(16, 32, 32, 128, 2, "many", "fp32", S_kv=256)
    impl, problem = sweep.OURS["ranges"], case.make(device)
    oracle = sweep.Oracle.of(problem)
    choices = [c for c in sweep.candidates(case, 132) if c.num_stages == 2 and c.num_warps in (2, 4)]
    assert {c.head_tiles for c in choices} == {1, 2}
    for choice in choices:
        with pinned(query_major=choice):
            sweep.assert_parity(impl.run(problem, return_lse=True), oracle, str(choice))


def test_forced_holds_for_its_block_only(device, pretend_gpu):
    q, k = torch.zeros(1, 1, 4, 16, device=device), torch.zeros(1, 64, 1, 16, device=device)
    ranges = torch.tensor([[[[[0, 64]]]]], dtype=torch.int32, device=device)
    for choice in (Choice(2, 2, 32, 4, 2), None):
        with pinned(query_major=choice):
            nsa.selection_attention(q, k, k, ranges=ranges, backend="triton")
    assert [launch.splits for launch in pretend_gpu] == [2, 1]
    assert [launch.grid[0] for launch in pretend_gpu] == [2, 1]


def test_the_nearest_measured_shape_decides(table):
    near, far = Choice(2, 1, 32, 2, 3), Choice(1, 1, 64, 4, 2)
    path = table([(False, 128, 128, 8, 64, 256, near), (False, 128, 128, 8, 1024, 1024, far)])
    assert path.name == "nvidia-h100-80gb-hbm3.yaml"

    def found(rows, bound, one_span=False, D=100, G=8, itemsize=2, name=H100, chip=(90, 132)):
        return tiles.measured(name, *chip, itemsize, G, D, 128, bound, one_span, rows)

    assert found(64, 256) == found(80, 200) == near
    assert found(None, 256) == far  # a full launch: only what was measured on one
    assert found(64, 16) is found(128, 256) is None  # parts of 8 keys; twice as many programs
    assert found(900, 700) == found(4096, 1024) == far  # unsplit: fine for any number of rows
    assert found(1024, 4096) is None  # rows four times as long as any measured
    assert found(8, 256) is None  # fewer rows than measured: they want more splits
    assert found(64, 256, one_span=True) is None
    assert found(64, 256, D=64) is None
    assert found(64, 256, G=64) is None
    assert found(64, 256, itemsize=4) is None
    assert found(64, 256, name="NVIDIA A100", chip=(80, 108)) is found(64, 256, name=None) is None


def test_a_tile_of_the_table_is_used_and_cut_to_shared_memory(table):
    table([(True, 128, 128, 8, 64, 1024, Choice(4, 1, 128, 8, 4))])
    arguments = (132, 2, 8, 128, 128, 1024, 1, 64)  # processors, itemsize, G, D, Dv, bound, spans, rows
    tile, splits, cluster = tiles.tile_and_splits(H100, 90, *arguments)
    assert not cluster
    assert tiles.tile_and_splits(H100, 90, *arguments, largest=16)[2]
    assert not tiles.tile_and_splits(H100, 90, *arguments, largest=2)[2]
    assert (splits, tile.BLOCK_L, tile.num_warps, tile.num_stages) == (4, 128, 8, 4)
    tile, *_ = tiles.tile_and_splits(H100, 89, *arguments)
    assert (tile.num_stages - 1) * tile.BLOCK_L * 512 < device_facts.SHARED_BYTES[89]
    rules = tiles.tile_and_splits(None, 90, *arguments)
    assert tiles.tile_and_splits(H100, 90, *arguments, per_head=True)[0].HEADS == 1
    assert rules[0] != tile


def test_nothing_swept_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="no shape was swept"):
        sweep.write([], FACTS, tmp_path)
    assert not list(tmp_path.iterdir())


def test_committed_tables_are_whole():
    swept = [path.stem for path in gpu.PACKAGED.glob("*.yaml") if gpu.read(path).tiles is not None]
    assert swept
    for name in swept:
        tables = tiles.table(name, 90, 132)
        assert sum(map(len, tables.values())) >= len(sweep.cases())
        assert all(isinstance(p, Point) for points in tables.values() for p in points)


def test_a_choice_that_kills_the_compiler_is_found_and_not_tried_here(device, monkeypatch, pretend_gpu):
    choices = [Choice(1, 1, 32, w, s) for w in (1, 2) for s in (2, 3)]
    deadly = choices[2]
    compiled: list[Choice] = []
    monkeypatch.setattr(sweep, "OF_A_CHILD", 3)

    @contextlib.contextmanager
    def child(processes, mp_context):
        assert (processes, mp_context.get_start_method()) == (1, "spawn")
        yield SimpleNamespace(submit=submit)

    def submit(_, case, choices):
        assert len(choices) <= 3
        compiled.extend(choices)
        return SimpleNamespace(result=die if deadly in choices else lambda: None)

    def die():
        raise sweep.BrokenProcessPool("a child was aborted")

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", child)
    other = dataclasses.replace(CASE, L=32)
    found = sweep.compile_all([(CASE, choices), (other, choices[:2])], 2)
    assert found == {CASE: {deadly: "killed the process that compiled it"}, other: {}}
    assert set(compiled) == {*choices}
    _, facts = sweep.sweep(CASE, choices, device, found[CASE])
    assert len(facts) == 4
    assert facts[-1]["error"] == "killed the process that compiled it"
    tried = {(x.variant.options["num_warps"], x.variant.options["num_stages"]) for x in pretend_gpu}
    assert deadly[3:] not in tried


@pytest.mark.usefixtures("pretend_gpu")
def test_a_kernel_that_leaves_rows_unwritten_is_wrong(device, monkeypatch):
    """Also where its output memory still holds the right answer of the candidate before."""
    launch = query_major.Variant.launch

    def half(self, grid, *args, **keywords):
        launch(self, (grid[0] // (2 if self.constexprs["BLOCK_L"] == 16 else 1), *grid[1:]), *args, **keywords)

    monkeypatch.setattr(query_major.Variant, "launch", half)
    _, facts = sweep.sweep(CASE, [Choice(1, 1, 32, 4, 2), Choice(1, 1, 16, 4, 2)], device)
    assert [f["BLOCK_L"] for f in facts if "us" in f] == [32]
    assert facts[-1]["error"].startswith("AssertionError: Choice(splits=1, head_tiles=1, BLOCK_L=16")


def test_a_partial_sweep_keeps_the_other_shapes(table):
    old, new = Choice(2, 1, 32, 2, 3), Choice(1, 1, 64, 4, 2)
    table([(False, 128, 128, 8, 64, 256, old), (False, 128, 128, 8, 1024, 1024, old)])
    table([(False, 128, 128, 8, 64, 256, new)])
    found = tiles.table(H100, 90, 132)[False, 128, 128]
    assert found == {Point(8, 64, 256): new, Point(8, 1024, 1024): old}


@pytest.mark.parametrize(("us", "kept"), [(10.1, True), (10.11, False), (None, False)])
def test_what_is_used_stays_until_something_is_clearly_faster(tmp_path, us, kept):
    shape = {"one_span": False, "D": 128, "Dv": 128, "G": 8, "rows": 64, "L": 256}
    used, faster, other = Choice(2, 1, 32, 2, 3), Choice(1, 1, 64, 4, 2), Choice(4, 1, 16, 1, 1, 1)

    def measured(choice, us):
        return choice._asdict() | {"us": us, "us_now": us}

    sweep.write([shape | {"best": [measured(used, 12.0)]}], FACTS, tmp_path)
    best = [measured(faster, 10.0), measured(other, 10.05), *([measured(used, us)] if us else [])]
    path = sweep.write([shape | {"best": best}], FACTS, tmp_path)
    found = yaml.safe_load(path.read_text())["tiles"]["query_major"][0]["best"]
    assert [fact["us"] for fact in found] == ([us, 10.0, 10.05] if kept else [10.0, 10.05, *([us] if us else [])])
