"""Regret: what is drawn, how a shape is measured (small ones, by a made-up clock), and what is said of the rows."""

import json
from functools import partial

import pytest
import torch

from nsa.testing import regret
from nsa.testing.clock.serving import Pool, kind, problems
from nsa.testing.clock.timing import Timing, each
from nsa.testing.contestants.contract import Contestant
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.m3 import Shape

CPU = torch.device("cpu")
SMALL = Case(2, 16, 16, 64, 20, "prefill", "fp16", HKV=2, S=10, S_kv=96, block_size=16, shared=0.5)
OURS = {"auto": 30.0, "query_major": 30.0, "key_major": 20.0, "union": 25.0, "sdpa": 90.0}
US = OURS | {"other": 24.0, "dense_flash": 60.0}


def clock(fns, **sampling):
    """Call everything once, and tell the times of `US`."""
    for name, calls in fns.items():
        each(calls)
        sampling["afterwards"](name, partial(each, calls))
    return {name: Timing([US[name] * 1e-6] * 3, "graph", True, 2, 2) for name in fns}


@pytest.fixture
def small(monkeypatch, request):
    """Every seed draws a small case, which no GPU of this test has to run."""
    monkeypatch.setattr(regret, "drawn", lambda seed: Shape(SMALL, False, request.param))
    return request.param


def test_shapes_are_those_of_training_and_serving():
    shapes = [regret.drawn(seed) for seed in range(400)]
    assert {kind(shape.case) for shape in shapes} == {"prompt", "chunk", "decode"}
    assert {shape.case.H for shape in shapes} >= {1, 2, 4, 8, 16, 32}
    assert {shape.case.block_size for shape in shapes} == {16, 32, 64, 128}
    assert {shape.case.shared for shape in shapes} == {0.0, 0.5, 0.9}
    assert {(shape.paged, shape.fp8) for shape in shapes} == {(False, False), (True, False), (True, True)}
    for shape in shapes:
        case = shape.case
        assert 1 <= case.H <= 32
        assert 64 <= case.D <= 256
        assert case.HQ <= 128
        assert case.S_kv <= 131_072 + case.block_size
        assert not shape.paged or case.S_kv % case.block_size == 0


def test_a_seed_names_its_shape_and_successive_ones_share_a_model():
    assert regret.drawn(17) == regret.drawn(17)
    models = {
        seed: (c.H, c.HKV, c.D, c.block_size) for seed in range(40) for c in [regret.drawn(seed).case]
    }  # fmt: skip
    assert all(models[seed] == models[seed - seed % regret.MODEL] for seed in models)
    assert len(set(models.values())) > 5


@pytest.mark.parametrize("small", [False, True], ids=["plain", "pages"], indirect=True)
def test_a_shape_is_checked_and_timed_with_every_schedule(small):
    times, row = regret.time_seed(7, Pool(CPU, 1 << 20), clock)
    assert times.median == US["auto"] * 1e-6
    assert row["us"] == OURS
    assert (row["best"], row["regret"], row["peer"]) == ("key_major", 1.5, None)
    assert (row["route"], row["seed"], row["paged"], row["G"], row["S"]) == ("sdpa", 7, small, 2, 10)  # few keys
    assert row["again"] == "pytest -m perf --nsa-regret 1 --nsa-seed 7"
    json.dumps(row)


@pytest.mark.parametrize("small", [False], indirect=True)
def test_buffer_sets_are_other_tensors_with_one_selection(small):
    first, second = problems(regret.drawn(0), 0, Pool(CPU, 1 << 20), 2)
    assert first.k.data_ptr() != second.k.data_ptr()
    assert torch.equal(first.block_indices, second.block_indices)
    assert not torch.equal(first.k, second.k)


@pytest.mark.parametrize("small", [True], indirect=True)
def test_what_a_peer_derives_is_made_before_it_is_timed(small, monkeypatch):
    """In a graph it could not be made."""
    made, timing = [], []
    auto = regret.contestants(regret.drawn(0))[0]

    def arguments(p):
        assert not timing
        made.append(p)
        return p

    peer = Contestant("other", lambda p, lse, out: auto.run(p.derived(arguments)), lse=False)
    monkeypatch.setattr(regret, "beside", lambda shape: [peer])
    regret.time_seed(0, Pool(CPU, 1 << 20), lambda fns, **how: timing.append(1) or clock(fns, **how))
    assert len(made) == 2


@pytest.mark.parametrize("small", [False, True], ids=["plain", "pages"], indirect=True)
def test_a_wrong_schedule_fails_and_a_wrong_peer_is_left_out(small, monkeypatch):
    auto, *others = regret.contestants(regret.drawn(0))
    wrong = [Contestant(name, lambda p, lse, out: auto.run(p) * 1.2, lse=False) for name in ("auto", "union", "other")]
    monkeypatch.setattr(regret, "beside", lambda shape: wrong[2:])
    row = regret.time_seed(0, Pool(CPU, 1 << 20), clock)[1]
    assert row["left_out"]["other"].startswith("wrong: other: an output differs by")
    assert "other" not in row["us"]
    for mine, said in (([auto, *others, wrong[1]], "union: wrong: union: an"), ([wrong[0]], "auto: an output differs")):
        monkeypatch.setattr(regret, "contestants", lambda shape, mine=mine: mine)
        with pytest.raises(AssertionError, match=said):
            regret.time_seed(0, Pool(CPU, 1 << 20), clock)


def made_up(seed, **us):
    return regret.judged({"seed": seed, "case": f"case{seed}", "route": "query_major", "us": us, "again": f"<{seed}>"})


def test_summary():
    rows = [made_up(seed, auto=100.0, query_major=100.0, other=200.0) for seed in range(8)]
    rows += [made_up(8, auto=112.0, query_major=112.0, union=100.0), made_up(9, auto=300.0, key_major=100.0, other=250)]
    assert regret.summary(rows) == [
        "auto beside our best schedule, 10 shapes: 80% within 5%, 90% within 15%, 90% within 50%, worst 3.00x",
        "auto beside the fastest peer, 9 shapes: 89% within 5%, 89% within 15%, 100% within 50%, worst 1.20x",
        "3.00x  auto 300 us (query_major), key_major 100: case9",
        "       <9>",
        "1.12x  auto 112 us (query_major), union 100: case8",
        "       <8>",
        "1.20x  auto 300 us (query_major), other 250: case9",
        "       <9>",
    ]
