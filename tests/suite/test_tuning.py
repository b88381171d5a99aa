"""Tuning on made-up times: the threshold's rule and its file; costs that choose a schedule, and theirs."""

import itertools
import json
import logging
import random
import re
import statistics
from pathlib import Path

import pytest

from nsa import gpu, schedules, settings
from nsa.testing import artifacts, regret
from nsa.testing.report.recording import load, speedup
from nsa.tuning import costs, files, thresholds
from nsa.work import SCHEDULES, work

from .small_project import Session

DATA = Path(__file__).parent / "data" / "h100-core-trimmed.json"  # an H100 run as recorded, some benchmarks and keys
FACTS = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "triton": "3.6.0", "commit": "abc123"}


def fact(ratio, L, *, H=8, D=128, dist="many", noise=0.01, best=1.0, source="ranges"):
    """A benchmark `ratio` times faster than the path it replaces; each interval is `noise` wide to both sides."""
    ours, medians = 1e-5, {"ranges": 1e-5, "sdpa": ratio * 1e-5, "enable_gqa": best * 1e-5}
    interval = {name: [t * (1 - noise), t * (1 + noise)] for name, t in medians.items()}
    return {
        "impl": "ranges", "source": source, "H": H, "D": D, "Dv": D, "L": L, "N": 64, "dist": dist, "median": ours,
        "medians": medians, "intervals": interval, "ci95": interval["ranges"], "sdpa_best": "enable_gqa",
        "case": f"H{H}-D{D}-L{L}-{dist}", **FACTS,
    }  # fmt: skip


def everywhere(ratio=5.0, lengths=thresholds.LENGTHS, **keywords):
    """Every required group at every length."""
    facts = []
    for (H, D, Dv, dist), L in itertools.product(thresholds.required(), lengths):
        facts.append(fact(ratio, L, H=H, D=D, dist=dist, **keywords) | {"Dv": Dv})
    return facts


def test_fast_everywhere_is_on_from_the_shortest_length():
    decision = thresholds.decide(everywhere())
    assert (decision.min_L, decision.missing, decision.blocker) == (16, [], None)
    assert set(decision.groups.values()) == {16}


def test_one_slow_group_keeps_the_threshold_above_it():
    facts = everywhere() + [fact(1.1, 128, H=4, D=64, dist="mixed")]
    decision = thresholds.decide(facts)
    assert decision.min_L == 256
    assert decision.groups[4, 64, 64, "mixed"] == 256
    assert decision.groups[8, 64, 64, "mixed"] == 16
    assert decision.blocker.case == "H4-D64-L128-mixed"


@pytest.mark.parametrize(("other", "min_L"), [
    (fact(0.9, 512), 1024),  # a win at 16 says nothing if 512 loses
    (fact(1.22, 128, noise=0.001), 16),
    (fact(1.22, 128, noise=0.02), 256),  # the margin is inside the noise
], ids=["slow above", "clear", "within noise"])  # fmt: skip
def test_from_l_on(other, min_L):
    assert thresholds.decide([*everywhere(noise=0.001), other]).min_L == min_L


@pytest.mark.parametrize(("facts", "why"), [
    ([*everywhere(), fact(1.19, 1024)], "^Triton stays off: there is no L from which on it is 1.2x"),
    ([f | {"intervals": {}} for f in everywhere(ratio=50)], "no confidence interval"),
], ids=["slow at the longest rows", "no interval"])  # fmt: skip
def test_triton_stays_off(facts, why):
    decision = thresholds.decide(facts)
    assert decision.min_L is None
    assert re.search(why, thresholds.rationale(decision)[0])


def test_only_lengths_that_all_groups_measured_qualify():
    """Decode at 1024 alone neither raises the threshold nor vouches for shorter rows of others."""
    facts = everywhere(lengths=(64, 256, 1024)) + [fact(5, 16), fact(5, 1024, H=16, dist="decode")]
    assert thresholds.decide(facts).min_L == 64
    slow_decode = fact(1.0, 512, H=16, dist="decode")
    assert thresholds.decide([*facts, slow_decode]).min_L == 1024


def test_packed_rows_replace_nothing():
    assert thresholds.points([fact(5, 64, source="rows") | {"impl": "dense_group"}], "sdpa") == []


def test_verdict_on_packed_rows_is_its_own():
    facts = everywhere(best=0.9)
    assert thresholds.decide(facts).min_L == 16
    on_packed = thresholds.decide(facts, against="best")
    assert on_packed.min_L is None
    assert "rows already packed" in thresholds.rationale(thresholds.decide(facts), on_packed)[2]
    assert "worst 0.90x" in thresholds.rationale(thresholds.decide(facts), on_packed)[2]


def test_interval_divides_the_far_ends():
    ratio, low, high = speedup(fact(2, 64, noise=0.1), "sdpa")
    assert (ratio, low, high) == pytest.approx((2, 2 * 0.9 / 1.1, 2 * 1.1 / 0.9))


def test_cases_cover_what_is_required():
    """Whatever `cases` times, `decide` calls complete; square dims are enough for calibration."""
    for dims in (thresholds.DIMS, thresholds.SQUARE):
        cases = thresholds.cases(dims, (1024,))
        assert {(c.H, c.D, c.Dv, c.dist) for c in cases} == set(thresholds.required(dims))
        assert {c.L for c in cases} == set(thresholds.LENGTHS)
        assert {(c.source, c.S_kv) for c in cases} == {("ranges", 2048)}  # the packing is part of what is replaced


def test_layout_needs_masked_and_unmasked():
    plain = {"masked": False, "layouts": {"heads_as_queries": 1.0, "expanded": 4.0, "enable_gqa": 2.0}}
    masked = {"masked": True, "layouts": {"heads_as_queries": 9.0, "expanded": 4.0, "enable_gqa": 2.0}}
    assert thresholds.best_layout([plain]) is None
    assert thresholds.best_layout([plain, masked]) == "enable_gqa"  # geomeans 3, 4, 2
    unable = {"masked": True, "layouts": {"heads_as_queries": 9.0}}
    assert thresholds.best_layout([plain, masked, unable]) == "heads_as_queries"


@pytest.mark.parametrize(("slow", "min_L"), [([], 16), ([fact(0.5, 1024)], gpu.TRITON_OFF)], ids=["on", "off"])
def test_written_file_is_what_settings_read(gpus, caplog, slow, min_L):
    decision = thresholds.decide(everywhere() + slow)
    path = thresholds.write(decision, "enable_gqa", FACTS, settings.user_gpus())
    assert path == gpus.parent / "config" / "nsa" / "gpus" / "nvidia-h100-80gb-hbm3.yaml"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert gpu.min_L_for(FACTS["gpu"]) == min_L
    assert not caplog.records
    threshold = gpu.measured(FACTS["gpu"]).threshold
    assert threshold.sdpa_layout == "enable_gqa"
    assert threshold.provenance["commit"] == "abc123"
    assert threshold.provenance["margin"].startswith("1.2x packed SDPA with its packing")
    assert "H4-D64-Dv128-mixed" in path.read_text()  # each combination's own threshold, as a comment


def test_incomplete_or_undecided_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="23 combinations were not measured"):
        thresholds.write(thresholds.decide([fact(5, 64)]), None, FACTS, tmp_path)
    undecided = thresholds.decide([f | {"intervals": {}} for f in everywhere()])
    with pytest.raises(ValueError, match="no confidence interval"):
        thresholds.write(undecided, None, FACTS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    decision = thresholds.decide(everywhere())
    path = thresholds.write(decision, None, FACTS, tmp_path)
    before = path.read_text()
    monkeypatch.setattr(files.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        thresholds.write(decision, "expanded", FACTS, tmp_path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_recorded_h100_core_is_not_enough():
    """As recorded: 13x and more, but no interval of packed SDPA, and H = 4 or `few` never read from the cache."""
    decision = thresholds.decide(load(DATA).facts)
    assert decision.min_L is None
    assert min(p.speedup for p in decision.points) > 12
    assert (4, 64, 64, "many") in decision.missing
    assert (8, 64, 64, "few") in decision.missing


def test_green_run_updates_the_packaged_thresholds(gpus):
    session = Session("nsa_update_thresholds")
    [note] = artifacts.finish(session, everywhere(), [])
    assert note == f"thresholds: sel_triton_min_L = 16 written to {gpus / 'nvidia-h100-80gb-hbm3.yaml'}"
    assert session.exitstatus == pytest.ExitCode.OK


def test_red_or_incomplete_run_updates_nothing(gpus):
    red = Session("nsa_update_thresholds", exitstatus=pytest.ExitCode.TESTS_FAILED)
    assert "only a green run" in artifacts.finish(red, everywhere(), [])[0]
    incomplete = Session("nsa_update_thresholds")
    assert "combinations were not measured" in artifacts.finish(incomplete, [fact(5, 64)], [])[0]
    assert incomplete.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert list(gpus.iterdir()) == []


# --- costs ------------------------------------------------------------------------------------------------------------

TRUE = {
    "query_major": {"calls": 5.0, "numbers": 0.25},
    "key_major": {"calls": 40.0, "numbers_of_blocks": 0.5, "products": 0.005},
    "union": {"calls": 30.0, "products_wgmma": 0.003, "products_mma": 0.003, "rest": 1.0},
}
WITHOUT_UNION = {name: TRUE[name] for name in SCHEDULES[:2]}
OF_ROWS = {"gpu": "NVIDIA Nobody 1", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc123"}


def rows(count=160, noise=0.0):
    """Drawn shapes, with times that follow from `TRUE`."""
    found, r = [], random.Random(0)
    for seed in range(count):
        shape = regret.drawn(seed)
        case = shape.case
        row = OF_ROWS | {
            "seed": seed, "B": case.B, "S": case.S, "S_kv": case.S_kv, "HQ": case.HQ, "HKV": case.HKV, "G": case.H,
            "D": case.D, "Dv": case.Dv, "block_size": case.block_size, "n": case.n, "shared": case.shared,
            "paged": shape.paged, "fp8": shape.fp8,
        }  # fmt: skip
        us = schedules.times(TRUE if not shape.fp8 else WITHOUT_UNION, costs.job(row))
        found.append(row | {"us": {name: x * 2 ** r.uniform(-noise, noise) for name, x in us.items()}})
    return found


def narrow(measured):
    """Those of one kind. Each kind takes a fit of one to two seconds for any number of rows, and five to hold out."""
    return [row for row in measured if costs.job(row).kind == "narrow"]


def test_long_keys_are_of_the_kind_of_their_tiles():
    """With D = 192 and Dv = 128 tiles are those of narrow head dims on Hopper only. Rows of an H100 may not say so."""
    row = next(row for row in rows() if row["D"] == 192 and not row["fp8"])
    kinds = [costs.job(row | of).kind for of in ({}, {"capability": 90}, {"capability": 80})]
    assert kinds == ["narrow", "narrow", "wide"]


@pytest.fixture(scope="module")
def fitted():
    """The costs of `rows()`."""
    return costs.fit(rows())


def test_costs_are_found_again(fitted):
    assert set(fitted) >= {"narrow", "wide", "narrow_e4m3"}
    assert "union" not in fitted["narrow_e4m3"]
    for name, known in TRUE.items():
        found = fitted["narrow"][name]
        assert {term: found.get(term, 0) for term in known} == pytest.approx(known, rel=0.05)


def test_models_are_held_out(monkeypatch):
    """Each row is judged once, by costs that no row of its model was fitted to."""
    measured, judged = rows(), []

    def model(row):
        return tuple(row[name] for name in ("HQ", "HKV", "D", "Dv", "n", "block_size"))

    def ratios(some, fitted):
        assert not set(map(model, some)) & fitted
        judged.extend(row["seed"] for row in some)
        return [1.0] * len(some)

    monkeypatch.setattr(costs, "fit", lambda some: set(map(model, some)))
    monkeypatch.setattr(costs, "ratios", ratios)
    costs.held_out(measured)
    assert sorted(judged) == [row["seed"] for row in measured]


def test_the_choice_is_as_fast_as_the_fastest(fitted):
    """Of shapes whose times were not fitted, too, and with times that are noisy."""
    assert statistics.mean(costs.ratios(rows(), fitted)) < 1.1
    measured = narrow(rows(noise=0.1))
    held_out = costs.held_out(measured)
    assert len(held_out) == len(measured)
    first = [row["us"]["query_major"] / min(row["us"].values()) for row in measured]  # were there no costs
    assert statistics.median(held_out) < 1.1
    assert statistics.mean(held_out) < statistics.mean(first) / 2


def test_rows_without_a_union_are_priced_as_the_schedule_that_serves_them():
    """What serves them does not depend on the overlap, because the host does not know it."""
    jobs = [costs.job(row) for row in rows() if not row["fp8"]]
    alone = [[schedules.times(WITHOUT_UNION, job._replace(shared=x)) for x in (0.0, 0.9)] for job in jobs]
    assert any(min(a, key=a.get) != min(b, key=b.get) for a, b in alone), "else the overlap decides nothing"
    for job in (job for job in jobs if "union" in schedules.times(TRUE, job)):
        served = {schedules.rest(TRUE, job._replace(shared=x)) for x in (0.0, 0.5, 0.9)}
        assert len(served) == 1
        (name,) = served
        left = work(job, "union")["rest"]
        alone = schedules.times(WITHOUT_UNION, job)
        assert schedules.of_union(job, alone, name)["rest"] == left * alone[name]
        known = sum(TRUE["union"].get(term, 0.0) * x for term, x in schedules.of_union(job, alone, name).items())
        assert schedules.times(TRUE, job)["union"] == pytest.approx(known)


def test_a_schedule_without_costs_of_what_it_leans_on_is_not_chosen():
    for job in (costs.job(row) for row in rows() if not row["fp8"]):
        without = {name: TRUE[name] for name in ("query_major", "union")}
        assert "union" not in schedules.times(without, job)


def test_a_few_odd_times_do_not_decide():
    measured = narrow(rows())
    for row in measured[::12]:
        row["us"]["query_major"] *= 20
    assert costs.fit(measured)["narrow"]["query_major"]["numbers"] == pytest.approx(0.25, rel=0.15)


@pytest.mark.parametrize(("taken", "got"), [
    ([], "got 0 of no GPU"),
    (rows(3), "got 3 of NVIDIA Nobody 1"),
    ([*rows(16), rows(1)[0] | {"gpu": "NVIDIA Somebody"}], "got 17 of NVIDIA Nobody 1, NVIDIA Somebody"),
], ids=["none", "few", "two-gpus"])  # fmt: skip
def test_too_little_writes_nothing(taken, got, gpus):
    with pytest.raises(ValueError, match=f"costs not written: expected 16 calls or more of one GPU, {got}"):
        costs.write(taken, gpus)
    assert not list(gpus.iterdir())


@pytest.mark.parametrize("line", ["[1, 2]", "{", '{"us": {}, "gpu": "a"}', "7", "\udcff"])
def test_a_line_that_is_no_row_is_named(gpus, tmp_path, capsys, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(rows(1)[0])}\n{line}\n", errors="surrogateescape")
    assert costs.main([str(path)]) == 1
    got = line.replace("\udcff", "\N{REPLACEMENT CHARACTER}")
    assert capsys.readouterr().err == f"{path}:2: expected a row of nsa.testing.regret, got {got}\n"
    assert not list(gpus.iterdir())


def test_what_the_command_writes_is_read_and_chosen_by(gpus, tmp_path, capsys):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    measured = narrow(rows())
    for path, some in zip(files, (measured[:20], measured[20:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    assert costs.main(list(map(str, files))) == 0
    said = capsys.readouterr().out
    settings.reload()
    found = gpu.measured(OF_ROWS["gpu"]).costs
    assert schedules.measured(OF_ROWS["gpu"]) is found
    assert said.startswith(f"schedules: {len(measured)} drawn shapes, ")
    assert said.endswith(f"; written to {found.path}\n")
    assert found.kinds["narrow"]["query_major"]["numbers"] == pytest.approx(0.25, rel=0.05)
    assert found.provenance["commit"] == "abc123"
    assert "worst" in found.path.read_text().partition("narrow:")[0]  # how good the choice is stands above the costs
    assert costs.main([str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err
