"""From times of both schedules to the file that routing reads: the rule on made-up figures, and what guards them."""

import dataclasses
import random
from collections import Counter

import pytest
import torch

import nsa
import nsa.kernels
from nsa.kernels.key_major import family as key_major
from nsa.testing import artifacts, options
from nsa.testing.report import summary
from nsa.tuning import crossover
from nsa.tuning.crossover import CONTEXTS, HEADS, TOKENS, Point

from .small_project import Session

FACTS = {"gpu": "NVIDIA Nobody 1", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc123", "device": "x"}
STARTS = {1: 64, 2: 256, 4: 1024, 8: 16384, 16: None, 64: None}


def measured(starts=STARTS, ratio=1.5):
    """Every point; key-major is `ratio` times as fast from `starts` on, and 1% before."""
    shapes = [(t, None) for t in TOKENS] + [(t, context) for context, tokens in CONTEXTS.items() for t in tokens]
    return [
        Point(G, t, 1e-5 * (ratio if starts[G] is not None and t >= starts[G] else 1.01), 1e-5, context)
        for G in HEADS for t, context in shapes
    ]  # fmt: skip


def facts(points):
    return [
        {
            "crossover": dataclasses.asdict(p),
            "group": f"crossover: G = {p.G}",
            "name": f"G{p.G}-T{p.tokens}-{p.context}",
        }
        | {"median": p.key_major, "control": "query_major", "ratio_to_control": 1 / p.speedup, **FACTS}
        for p in points
    ]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_by_group_size():
    assert crossover.decide(measured()) == STARTS


def test_chunks_are_decided_apart():
    """At every length of prompt at which so few queries read a block often enough that routing would ask."""
    points = measured()
    assert crossover.decide(points, chunks=True) == {1: 64, 2: 256, 4: 1024, 8: None, 16: None, 64: None}
    slow = [
        dataclasses.replace(p, query_major=p.key_major) if p.context == 4096 and p.tokens == 512 else p for p in points
    ]
    assert crossover.decide(slow, chunks=True)[1] == 1024
    assert crossover.decide(slow) == STARTS
    seldom = [dataclasses.replace(p, query_major=0.0) if p.context and p.reuse < 4 else p for p in points]
    assert crossover.decide(seldom, chunks=True) == crossover.decide(points, chunks=True)
    assert any(p.query_major == 0.0 for p in seldom)


@pytest.mark.parametrize(("ratio", "start"), [(1.02, 64), (1.0199, None)])
def test_the_margin(ratio, start):
    points = [Point(1, t, ratio, 1.0) for t in TOKENS]
    assert crossover.decide(points) == {1: start}


def test_fast_below_a_slow_point_does_not_count():
    """`At that T and at all larger ones`, whatever the order in which they were measured."""
    points = [Point(1, t, 0.9 if t == 1024 else 2.0, 1.0) for t in reversed(TOKENS)]
    assert crossover.decide(points) == {1: 2048}
    assert crossover.decide([*points, Point(1, TOKENS[-1] * 2, 1.0, 1.0)]) == {1: None}


def walked(points):
    """What is measured where only points that decide are."""
    known, found = {p.key: p for p in points}, {}
    for key in crossover.needed(found):
        found[key] = known[key]
    return list(found.values())


@pytest.mark.parametrize("seed", range(5))
def test_points_that_decide_decide_as_all_of_them(seed):
    generator = random.Random(seed)
    points = [dataclasses.replace(p, query_major=p.key_major * generator.uniform(0.9, 1.9)) for p in measured()]
    few = walked(points)
    for chunks in (False, True):
        assert crossover.decide(few, chunks=chunks) == crossover.decide(points, chunks=chunks)
    assert len(few) < len(points)
    assert len(walked([dataclasses.replace(p, query_major=0.0) for p in points])) == 2 * len(HEADS)


def test_points_that_decide_are_enough_to_write(gpus):
    path = crossover.write(walked(measured()), FACTS, gpus, "python -m nsa calibrate")
    schedule = key_major.measured(FACTS["gpu"])
    assert dict(schedule.tokens) == STARTS
    assert schedule.provenance["command"] == "python -m nsa calibrate"
    assert "#   G = 16: 16384 " in path.read_text()


def test_a_point_measured_again_counts_once():
    first, again = Point(1, 64, 2.0, 1.0), Point(1, 64, 1.0, 1.0)
    assert crossover.points([*facts([first]), {"layouts": {}}, *facts([again])]) == [again]


def test_what_is_measured():
    """Groups of 1 to 64 heads, powers of two from 64 queries on; block 0 and the own one are always selected."""
    assert {G: HQ // HKV for G, (HQ, HKV) in HEADS.items()} == {G: G for G in (1, 2, 4, 8, 16, 64)}
    assert TOKENS == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    p = crossover.case(8, 256).make("cpu")
    assert (p.q.shape, p.k.shape, p.v.shape) == ((1, 256, 32, 128), (1, 256, 4, 128), (1, 256, 4, 128))
    assert p.block_indices.shape == (1, 256, 4, 16)
    own = torch.arange(256)[:, None, None] // 64
    for block in (torch.zeros_like(own), own):
        assert bool((p.block_indices == block[None]).any(-1).all())


# --- the file ---------------------------------------------------------------------------------------------------------


def test_written_file_is_what_routing_reads(gpus):
    assert key_major.key_major_from(FACTS["gpu"], 1) is None  # and that is forgotten when the file is written
    said = crossover.update(facts(measured()))
    path = gpus / "nvidia-nobody-1.yaml"
    starts = "G = 1 64, G = 2 256, G = 4 1024, G = 8 16384, G = 16 never, G = 64 never"
    chunks = "G = 1 64, G = 2 256, G = 4 1024, G = 8 never, G = 16 never, G = 64 never"
    assert said == f"schedules: key-major from {starts} queries on, of chunks {chunks}, written to {path}"
    schedule = key_major.measured(FACTS["gpu"])
    assert dict(schedule.tokens) == STARTS
    assert schedule.start(4, chunk=True) == 1024
    assert schedule.path == path
    assert schedule.provenance["commit"] == "abc123"
    assert schedule.provenance["command"] == crossover.COMMAND
    shape = schedule.provenance["shape"]
    assert "S = S_kv from 64 to 16384, chunks of 64 to 2048 at S_kv = 4096 and 65536, " in shape
    assert "D = Dv = 128, bf16, causal, block 64, top-16" in shape
    assert "#   G = 2: 64 10.1 10.0, 128 10.1 10.0, 256 15.0 10.0, " in path.read_text()
    assert "#   G = 2, of 4096 keys: 64 10.1 10.0, 128 10.1 10.0, 256 15.0 10.0, 512 15.0 10.0\n" in path.read_text()
    assert [p.name for p in gpus.iterdir()] == [path.name]


def test_incomplete_is_not_written(tmp_path):
    """102: all but chunks of 64 and 128 at 65,536 keys, whose blocks too few queries read for routing to ask."""
    for points, text in ((measured()[1:], r"1 points were not measured \(G1-T64\)"), ([], "102 points .*G1-T4096, …")):
        with pytest.raises(ValueError, match=text):
            crossover.update(facts(points), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def updates(monkeypatch):
    """What the end of a run had written, without writing it."""
    seen = []
    monkeypatch.setattr(crossover, "update", lambda facts: seen.append(facts) or "schedules: written")
    return seen


def test_green_run_updates_and_red_does_not(updates):
    green, unasked = Session("nsa_update_schedules"), Session()
    red = Session("nsa_update_schedules", exitstatus=pytest.ExitCode.TESTS_FAILED)
    assert artifacts.finish(green, facts(measured()), []) == ["schedules: written"]
    text = "--nsa-update-schedules: schedules not written: only a green run may change them"
    assert artifacts.finish(red, facts(measured()), []) == [text]
    assert artifacts.finish(unasked, facts(measured()), []) == []
    assert len(updates) == 1


def test_green_run_that_cannot_write_ends_red():
    session = Session("nsa_update_schedules")
    assert "101 points were not measured" in artifacts.finish(session, facts(measured()[:1]), [])[0]
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("update", ["nsa_update_thresholds", "nsa_update_schedules"])
@pytest.mark.parametrize("option", ["nsa_hot", "nsa_no_check", "nsa_shape", "nsa_sweep"])
def test_measurements_need_cold_checked_cases_of_their_own(monkeypatch, update, option):
    monkeypatch.setattr(options, "current_lane", lambda: "gpu")
    other = options.spelled(update if option == "nsa_sweep" else option)
    with pytest.raises(pytest.UsageError, match=f"leave out {other}"):
        options.check(Session(update, dist="no", **{option: ["L=64"] if option == "nsa_shape" else True}))


def test_table_fits_a_terminal():
    lines = crossover.table(measured())
    assert len(lines) == 1 + len(HEADS) * (1 + len(CONTEXTS))
    assert lines[1 + len(HEADS)] == f"{'  G = 1 of 4096 keys':39}{'  1.50' * 4}{'     -' * 5}  64"
    assert lines[2] == f"{'  G = 2':39}  1.01  1.01{'  1.50' * 7}  256"
    assert lines[5].endswith("  never")
    shown = summary.lines(facts(measured()))
    assert shown[-len(lines) :] == lines
    assert max(map(len, shown)) <= summary.WIDTH
    assert crossover.table([]) == []


# --- the measurement --------------------------------------------------------------------------------------------------


@pytest.fixture
def results(monkeypatch):
    """`results[schedule] = (O, LSE)` that a call returns; each counts a launch of what it should be, or of `ran`."""
    found = {name: (torch.ones(1, 4, 2, 16), torch.zeros(1, 4, 2)) for name in crossover.SCHEDULES}
    ran = {name: name for name in crossover.SCHEDULES}
    monkeypatch.setattr(nsa.kernels, "launches", Counter())

    def attend(q, k, v, *, schedule, backend, return_lse, **selection):
        assert (backend, selection) == ("triton", {"block_indices": None, "block_size": 64})
        nsa.kernels.launches[ran[schedule]] += 1
        return found[schedule] if return_lse else found[schedule][0]

    monkeypatch.setattr(nsa, "selection_attention", attend)
    found["ran"] = ran
    return found


def test_equal_results_pass(results):
    crossover.check((None, None, None, None))


@pytest.mark.parametrize("which", [0, 1], ids=["O", "LSE"])
@pytest.mark.parametrize("wrong", [1.01, float("nan")], ids=["off", "NaN"])
def test_what_differs_is_not_timed(results, which, wrong):
    pair = [x.clone() for x in results["key_major"]]
    pair[which][0, 3, 1] = pair[which][0, 3, 1] + wrong - 1
    results["key_major"] = tuple(pair)
    with pytest.raises(AssertionError, match="of key-major and" if which else "^key-major and query-major differ"):
        crossover.check((None, None, None, None))


def test_the_wrong_kernel_is_noticed(results):
    """Two times of one kernel would say that the other is as fast."""
    results["ran"]["key_major"] = "blocks"
    with pytest.raises(AssertionError, match="expected a launch of key_major, got {'blocks': 1}"):
        crossover.check((None, None, None, None))


def test_rotation_is_cold_where_it_can_be():
    inputs = tuple(torch.arange(1024, dtype=torch.uint8) for _ in range(4))
    for cache, copies in ((1024, 2), (8192, 6), (8193, 7)):
        sets, cold = crossover.rotation(inputs, cache)
        assert (len(sets), cold) == (copies, True)
        assert len({x.data_ptr() for s in sets for x in s}) == 4 * copies
        assert all(torch.equal(x, inputs[0]) for s in sets for x in s)
    sets, cold = crossover.rotation(tuple(x[:1] for x in inputs), 10**9)
    assert (len(sets), cold) == (crossover.MOST_SETS, False)
