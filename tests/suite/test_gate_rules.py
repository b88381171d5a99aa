"""The gate's rules and the physics guard as functions of numbers, on a recorded H100 run where that says more."""

import copy
import json
import re
from pathlib import Path

import pytest

from nsa.testing.clock.guard import Ceilings, detectable, guard, undetectable
from nsa.testing.clock.timing import InvalidMeasurement, Timing
from nsa.testing.gate import store, words
from nsa.testing.gate.rule import Best, Reading, Side, judge, pooled
from nsa.testing.gate.run import Gate
from nsa.testing.gate.store import Baseline, Key
from nsa.testing.report.recording import kernels, newest

RECORDED = Path(__file__).parents[1] / "perf" / "baselines" / "nvidia-h100-80gb-hbm3"
LIMITS = Ceilings(copy=3.0e12, read=3.1e12, matmul=0.8e15)
KEY = Key("gpu", "2.11", "3.6")


def side(*ratios, control=1e-5, **fields):
    return Side.of(Reading(ratio * control, {"plain": control}, "plain", **fields) for ratio in ratios)


@pytest.mark.parametrize(("ratios", "new", "again", "kind"), [
    ((1.0, 1.0, 1.0), 1.099, None, "pass"),
    ((1.0, 1.0, 1.0), 0.2, None, "pass"),
    ((1.0, 1.0, 1.0), 1.11, 1.11, "FAIL"),
    ((1.0, 1.0, 1.0), 1.5, 1.09, "pass"),
    ((1.0, 1.0, 1.0), 1.11, 3.0, "FAIL"),
    ((0.98, 1.0, 1.03), 1.12, 1.12, "FAIL"),  # twice 5% is less than 12%
    ((0.96, 1.0, 1.04), 1.09, None, "cannot gate"),
    ((0.96, 1.0, 1.04), 1.15, 1.15, "AMBIGUOUS"),
    ((0.96, 1.0, 1.04), 1.5, 1.15, "AMBIGUOUS"),
    ((0.96, 1.0, 1.04), 1.17, 1.18, "FAIL"),
    ((0.5, 1.0, 2.0), 3.0, 3.0, "AMBIGUOUS"),
])  # fmt: skip
def test_rule(ratios, new, again, kind):
    """`again`: None if nothing may be measured again, which would raise TypeError."""
    old = side(*ratios)
    assert judge("x", old, side(new), lambda: (old, side(again))).kind == kind


@pytest.mark.parametrize(("worse", "control", "kind"), [
    (1.20, 0.75, "AMBIGUOUS"),  # with work that does not gain from faster memory, a ratio may rise by a third
    (1.20, 1.25, "AMBIGUOUS"),
    (1.32, 0.75, "AMBIGUOUS"),
    (1.35, 0.75, "FAIL"),
    (1.15, 1.10, "FAIL"),
    (1.09, 0.50, "pass"),
])  # fmt: skip
def test_what_its_control_moved_by_itself_is_no_regression(worse, control, kind):
    new = side(worse, control=control * 1e-5)
    assert judge("x", side(1.0, 1.0, 1.0), new, lambda: (side(1.0), new)).kind == kind


def test_spread_and_ratio_are_of_the_files():
    old = side(1.02, 0.99, 1.0)
    assert old.ratio == 1.0
    assert old.spread == pytest.approx(0.03)


def test_another_control_today_is_no_other_ratio():
    """The fastest comparator is the control, which may change: over a slower one, twice as slow looks as fast."""

    def read(time, by, **controls):
        return Side.of([Reading(time, controls, by)])

    both = {"cudnn": 1e-5, "flash": 2e-5}
    old = Side.of([Reading(1e-5, both, "cudnn")] * 3)
    twice = read(2e-5, "flash", **both)
    assert judge("x", old, twice, lambda: (old, twice)).kind == "FAIL"
    assert judge("x", old, read(1e-5, "flash", **both)).kind == "pass"
    gone = judge("x", old, read(2e-5, "flash", flash=2e-5))
    assert (gone.kind, gone.reason) == ("cannot gate", "its control cudnn was not timed, but flash")
    mixed = Side.of([Reading(1e-5, both, "cudnn"), Reading(1e-5, both, "flash")])
    assert (mixed.ratio, mixed.spread) == (1.0, 0.0)


def test_a_ratio_is_of_the_lower_quartiles_of_samples():
    info = {"control": "plain", "control_samples": {"plain": [1.0, 1.0, 1.2, 1.4]}}
    assert Reading.of([2.0, 2.0, 3.0, 9.0], info).ratio("plain") == 2.0
    assert Reading.of([3.0], info).ratio("plain") == 3.0
    assert Reading.of([1.0] * 30 + [2.0] * 10, {}).time == 1.0


def test_a_ratio_that_a_file_states_without_samples_decides_nothing():
    """`gate_ratio` doubled by hand made a kernel that was 50% slower pass."""
    old = {"control": "plain", "control_median": 1.0, "ratio_to_control": 2.0, "gate_ratio": 2.0}
    assert Reading.of([2.0] * 4, old).ratio("plain") is None


def test_the_committed_files_agree_with_their_samples():
    baseline = store.find(RECORDED, Key(RECORDED.name, "2.11", "3.6"))
    assert len(baseline.benchmarks) >= 150
    assert all(old.ratio for old in baseline.benchmarks.values())


# --- other versions of torch and Triton ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relabelled(tmp_path_factory):
    """The committed H100 baseline as if torch 2.13 and Triton 3.9 had written it, and its files' documents."""
    folder = tmp_path_factory.mktemp("relabelled")
    documents = []
    for path in sorted(RECORDED.glob("*.json")):
        document = json.loads(path.read_text())
        document["machine_info"] |= {"torch": "2.13.0+cu130", "triton": "3.9.0"}
        del document["checksum"]
        (folder / path.name).write_text(json.dumps(document))
        documents.append(document)
    return store.find(folder, Key(RECORDED.name, "2.11", "3.6")), documents


def slowed(documents, ours, control):
    """`(name, samples, info)` of the newest reading of each benchmark, ours and its controls slower by factors."""
    newest = {b["name"]: b for document in documents for b in document["benchmarks"]}
    for name, benchmark in newest.items():
        info = copy.deepcopy(benchmark["extra_info"])
        theirs = {by: [x * control for x in samples] for by, samples in info["control_samples"].items()}
        samples = [x * ours for x in benchmark["stats"]["data"]]
        yield name, Timing(samples, "graph", True, 2, 100, 5e-7), info | {"control_samples": theirs}


@pytest.mark.parametrize(("ours", "control", "kind", "words_of_it"), [
    (1.0, 1.0, "pass", ""),
    (1.25, 1.0, "FAIL", r"is 2\d% longer"),
    (1.0, 0.75, "AMBIGUOUS", "is as before"),  # a torch whose SDPA is faster
    (1.25, 1.25, "AMBIGUOUS", r"is 2\d% longer"),  # both: this machine, or the compiler of both
    (1.0, 1.25, "pass", ""),
], ids=["alike", "ours", "faster control", "both", "slower control"])  # fmt: skip
def test_a_baseline_of_other_versions_is_judged_by_ratio_and_time(relabelled, ours, control, kind, words_of_it):
    baseline, documents = relabelled
    gate = Gate(Key(RECORDED.name, "2.11", "3.6"), baseline)
    assert not gate.versions
    for name, samples, info in slowed(documents, ours, control):
        gate.judge(name, samples, info, lambda samples=samples, info=info: (samples, info))
    judged = [v for v in gate.verdicts if v.old.ceiling]
    assert len(judged) >= 140
    quiet = [v for v in judged if v.old.spread < 0.02]
    assert len(quiet) >= 120
    assert {v.kind for v in quiet} == {kind}
    assert all(re.search(words_of_it, words.seen(v)) for v in quiet)
    assert gate.on
    report = gate.report([v.name for v in gate.verdicts])
    assert "torch 2.13, triton 3.9" in report[0]
    assert max(map(len, report)) <= words.WIDTH


def test_one_of_ratio_and_time_alone_is_ambiguous_though_measured_twice():
    old = side(1.0, 1.0, 1.0, ceiling=3e12)
    ratio_only = side(1.3, control=0.77e-5, ceiling=3e12)
    assert judge("x", old, ratio_only, lambda: (old, ratio_only), versions=False).kind == "AMBIGUOUS"
    both = side(1.3, ceiling=3e12)
    assert judge("x", old, both, lambda: (old, both), versions=False).kind == "FAIL"
    assert judge("x", old, both, lambda: (old, old), versions=False).kind == "pass"
    slower_memory = side(1.3, ceiling=2.3e12)  # the time is what this card's memory explains
    assert judge("x", old, slower_memory, lambda: (old, slower_memory), versions=False).kind == "AMBIGUOUS"


def test_a_best_of_other_versions_decides_nothing():
    old, new, best = side(1.0, 1.0, 1.0, ceiling=3e12), side(1.05, ceiling=3e12), Best(0.5, "plain", "abc")
    assert judge("x", old, new, lambda: (old, new), best=best).kind == "FAIL"
    assert judge("x", old, new, lambda: (old, new), versions=False, best=best).kind == "pass"


# --- two trees, in processes that take turns -------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "head", "again", "kind"), [
    ((1.0, 1.0, 1.0), (1.05, 1.05, 1.05), None, "pass"),
    ((1.0, 1.0, 1.0), (1.2, 1.2, 1.2), (1.2, 1.2, 1.2), "FAIL"),
    ((1.0, 1.0, 1.0), (1.2, 1.2, 1.2), (1.0, 1.0, 1.2), "pass"),
    ((0.9, 1.0, 1.1), (1.2, 1.25, 1.3), (1.2, 1.25, 1.3), "FAIL"),  # a spread of 20%, and yet apart
    ((0.9, 1.0, 1.21), (1.2, 1.25, 1.3), (1.2, 1.25, 1.3), "AMBIGUOUS"),
    ((0.9, 1.0, 1.1), (1.0, 1.0, 1.0), None, "cannot gate"),
])  # fmt: skip
def test_two_trees(base, head, again, kind):
    old = side(*base)
    found = judge("x", old, side(*head), again and (lambda: (old, side(*again))), paired=True)
    assert found.kind == kind
    if kind == "AMBIGUOUS":
        assert found.reason == "not in every process: highest ratio of the base 1.21, lowest of this tree 1.2"


# --- a session -------------------------------------------------------------------------------------------------------


def gate_over(old):
    return Gate(KEY, Baseline(KEY, [Path("0001_x.json")], {"test_decode[x]": old}))


@pytest.mark.parametrize("control", ["auto", "sdpa"])
def test_a_control_of_ours_is_refused(control):
    """What slows both would not show."""
    with pytest.raises(ValueError, match=f"expected plain torch, got our own {control}"):
        gate_over(side(1.0)).judge("test_decode[x]", timing(1e-5), {"control": control}, None)


def test_a_stored_control_of_ours_gates_nothing():
    """In recordings from before such a control was refused."""
    old = Side.of([Reading(1.03e-5, {"auto": 1e-5}, "auto")] * 3)
    gate = gate_over(old)
    info = {"control": "gather_gqa", "control_samples": {"gather_gqa": [6e-5] * 4, "auto": [3e-5] * 4}}
    gate.judge("test_decode[x]", timing(3.1e-5), info, None)
    (verdict,) = gate.verdicts
    assert (verdict.kind, verdict.reason) == ("cannot gate", "no control in the baseline")


def test_no_control_cannot_be_gated():
    without = Side.of([Reading(1.0)])
    assert judge("x", without, side(1.0)).reason == "no control in the baseline"
    assert judge("x", side(1.0), without).reason == "no control in this run"


@pytest.mark.parametrize(("ours", "control", "again", "said"), [
    (1.3, 1.0, None, "30.0% slower beside its control plain (1 -> 1.3 times its time); its time is 30% longer"),
    (1.0, 0.87, None, "as long as before, while its control became 15% faster: 10 us -> 10 us"),
    (1.4, 1.2, None, "16.7% slower beside its control plain (1 -> 1.167 times its time); "
                     "its time is 40% longer, while"),
    (1.58, 1.0, 1.467, "58.0% slower, and 46.7% slower when measured again, beside its control plain (1 -> 1.58 "
                       "times its time, measured again 1.467); its time is 58% longer: 10 us -> 15.8 us"),
])  # fmt: skip
def test_a_verdict_in_words(ours, control, again, said):
    """A ratio and a time that seem to disagree are explained. A second measurement is told where it is smaller."""
    old, new = side(1.0, 1.0, 1.0), side(ours / control, control=control * 1e-5)
    assert said in words.seen(judge("x", old, new, again and (lambda: (old, side(again)))))


def test_machine_speaks_only_of_what_moved_together():
    def moved(*factors):
        return words.machine([judge("x", side(1.0), side(1.0, control=f * 1e-5)) for f in factors])

    assert "40% slower" in moved(1.4, 1.4, 1.4, 1.4)
    assert "25% faster" in moved(0.8, 0.8, 0.8, 0.8)
    assert moved(1.4, 1.0, 1.0, 1.0) is None
    assert moved(1.4, 1.4, 1.4, 0.7, 0.7) is None
    assert moved(1.03, 1.03) is None


def test_a_spread_is_at_least_what_is_usual_for_its_test():
    """Three recordings that agree by luck, among benchmarks that do not, are no quiet benchmark."""
    noisy = {f"test_a[{i}]": side(1.0 - s / 2, 1.0, 1.0 + s / 2) for i, s in enumerate((0.01, 0.1, 0.12, 0.3))}
    quiet = {f"test_b[{i}]": side(0.999, 1.0, 1.001) for i in range(3)}
    spreads = {name: old.spread for name, old in pooled(noisy | quiet).items()}
    assert [spreads[name] for name in noisy] == pytest.approx([0.11, 0.11, 0.12, 0.3])
    assert [spreads[name] for name in quiet] == pytest.approx([0.002] * 3)


# --- the guard -------------------------------------------------------------------------------------------------------


def timing(seconds, cold=True):
    return Timing([seconds] * 10, "graph", cold, 2, 100, 5e-7)


def test_memory_and_matrix_rates_are_limits():
    guard("x", timing(1e-5), int(3.2e12 * 1e-5), 0, LIMITS)  # within the slack
    with pytest.raises(InvalidMeasurement, match="x took 10.00 us for 33000000 unique bytes, 3300 GB/s"):
        guard("x", timing(1e-5), int(3.3e12 * 1e-5), 0, LIMITS)
    guard("x", timing(1e-5, cold=False), int(9e12 * 1e-5), 0, LIMITS)  # L2 is no verdict
    with pytest.raises(InvalidMeasurement, match="900 TFLOP/s"):
        guard("x", timing(1e-5, cold=False), 0, int(9e15 * 1e-6), LIMITS)


@pytest.fixture(scope="module")
def packed():
    """The committed H100 run of packed rows, as facts."""
    return [fact for fact in kernels(newest(RECORDED)[0].facts) if fact["source"] == "rows"]


def test_recorded_h100_run_is_within_the_limits(packed):
    for b in packed:
        guard(b["case"], timing(b["median"]), b["bytes"], b["flops"], LIMITS)


def test_a_kernel_that_sees_64_keys_is_refused_where_its_rate_is_impossible_and_else_listed(packed):
    """Its time is the run's own at L = 64."""
    sixty_four = {(b["H"], b["D"], b["Dv"], b["N"]): b["median"] for b in packed if b["L"] == 64}
    refused, infos = [], {}
    for b in packed:
        t = timing(sixty_four[b["H"], b["D"], b["Dv"], b["N"]])
        infos[b["case"]] = {"checked": False, "share_of_guard": detectable(t, b["bytes"], b["flops"], LIMITS)}
        try:
            guard(b["case"], t, b["bytes"], b["flops"], LIMITS)
        except InvalidMeasurement:
            refused.append(b["case"])
            del infos[b["case"]]
        else:
            assert b["bytes"] / t.median <= 1.05 * LIMITS.memory
    assert "H8-D128-Dv128-L1024-N1024-few-bf16" in refused
    assert "H8-D128-Dv128-L64-N1024-few-bf16" not in refused
    lines = undetectable(infos)
    assert lines[0].startswith(f"undetectable by speed: {len(infos)} of {len(infos)}")
    assert all(any(case in line for line in lines) for case in infos)


def test_a_kernel_that_launches_nothing_is_refused_everywhere(packed):
    nothing = Timing([2e-6 / 64000] * 10, "graph", True, 1280, 64000, 5e-7)  # an empty graph takes 2 us
    for b in packed:
        with pytest.raises(InvalidMeasurement):
            guard(b["case"], nothing, b["bytes"], b["flops"], LIMITS)
    with pytest.raises(InvalidMeasurement, match="for 64000 calls, and its timer ticks every 0.50 us"):
        nothing.resolved("nothing")
