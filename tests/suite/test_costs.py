"""From times of drawn calls to costs that choose a schedule: on made-up times, whose costs are known."""

import json
import random
import statistics

import pytest

from nsa import gpu, schedules, settings
from nsa.testing import regret
from nsa.tuning import costs
from nsa.work import SCHEDULES, work

TRUE = {
    "query_major": {"calls": 5.0, "numbers": 0.25},
    "key_major": {"calls": 40.0, "numbers_of_blocks": 0.5, "products": 0.005},
    "union": {"calls": 30.0, "products_wgmma": 0.003, "products_mma": 0.003, "rest": 1.0},
}
WITHOUT_UNION = {name: TRUE[name] for name in SCHEDULES[:2]}
FACTS = {"gpu": "NVIDIA Nobody 1", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc123"}


def rows(count=160, noise=0.0):
    """Drawn shapes, with times that follow from `TRUE`."""
    found, r = [], random.Random(0)
    for seed in range(count):
        shape = regret.drawn(seed)
        case = shape.case
        row = FACTS | {
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


@pytest.mark.parametrize("line", ["[1, 2]", "{", '{"us": {}, "gpu": "a"}', "7"])
def test_a_line_that_is_no_row_is_named(gpus, tmp_path, capsys, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(rows(1)[0])}\n{line}\n")
    assert costs.main([str(path)]) == 1
    assert capsys.readouterr().err == f"{path}:2: expected a row of nsa.testing.regret, got {line}\n"
    assert not list(gpus.iterdir())


def test_what_the_command_writes_is_read_and_chosen_by(gpus, tmp_path, capsys):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    measured = narrow(rows())
    for path, some in zip(files, (measured[:20], measured[20:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    assert costs.main(list(map(str, files))) == 0
    said = capsys.readouterr().out
    settings.reload()
    found = gpu.measured(FACTS["gpu"]).costs
    assert schedules.measured(FACTS["gpu"]) is found
    assert said.startswith(f"schedules: {len(measured)} drawn shapes, ")
    assert said.endswith(f"; written to {found.path}\n")
    assert found.kinds["narrow"]["query_major"]["numbers"] == pytest.approx(0.25, rel=0.05)
    assert found.provenance["commit"] == "abc123"
    assert "worst" in found.path.read_text().partition("narrow:")[0]  # how good the choice is stands above the costs
    assert costs.main([str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err
