"""The gate's rules and the physics guard as functions of numbers, on a recorded H100 run where that says more."""

import json
from pathlib import Path

import pytest

from nsa.testing.baselines import Baseline, Key
from nsa.testing.gate import Figures, Stored, judge, machine, pooled
from nsa.testing.gated_run import Gate, report
from nsa.testing.physics import Ceilings, detectable, guard, undetectable
from nsa.testing.timing import InvalidMeasurement, Timing

H100 = json.loads((Path(__file__).parent / "data" / "h100_core.json").read_text())
LIMITS = Ceilings(copy=3.0e12, read=3.1e12, matmul=0.8e15)


def stored(*ratios, control=1e-5):
    return Stored.of([Figures(ratio, ratio * control, control) for ratio in ratios])


def verdict(old, new, *again):
    later = iter(again)
    return judge("x", old, Figures(new, new * 1e-5, 1e-5), lambda: next(later)).kind


@pytest.mark.parametrize(
    ("ratios", "new", "again", "kind"),
    [
        ((1.0, 1.0, 1.0), 1.099, [], "pass"),
        ((1.0, 1.0, 1.0), 0.2, [], "pass"),
        ((1.0, 1.0, 1.0), 1.11, [1.11], "FAIL"),
        ((1.0, 1.0, 1.0), 1.5, [1.09], "pass"),
        ((1.0, 1.0, 1.0), 1.11, [3.0], "FAIL"),
        ((0.98, 1.0, 1.03), 1.12, [1.12], "FAIL"),  # twice 5% is less than 12%
        ((0.96, 1.0, 1.04), 1.09, [], "cannot gate"),
        ((0.96, 1.0, 1.04), 1.15, [1.15], "AMBIGUOUS"),
        ((0.96, 1.0, 1.04), 1.5, [1.15], "AMBIGUOUS"),
        ((0.96, 1.0, 1.04), 1.17, [1.18], "FAIL"),
        ((0.5, 1.0, 2.0), 3.0, [3.0], "AMBIGUOUS"),
    ],
)
def test_rule(ratios, new, again, kind):
    assert verdict(stored(*ratios), new, *again) == kind


@pytest.mark.parametrize(
    ("worse", "control", "kind"),
    [
        (1.20, 0.75, "AMBIGUOUS"),  # with work that does not gain from faster memory, a ratio may rise by a third
        (1.20, 1.25, "AMBIGUOUS"),
        (1.32, 0.75, "AMBIGUOUS"),
        (1.35, 0.75, "FAIL"),
        (1.15, 1.10, "FAIL"),
        (1.09, 0.50, "pass"),
    ],
)
def test_what_its_control_moved_by_itself_is_no_regression(worse, control, kind):
    new = Figures(worse, worse * control * 1e-5, control * 1e-5)
    assert judge("x", stored(1.0, 1.0, 1.0), new, lambda: worse).kind == kind


def test_spread_and_ratio_are_of_the_files():
    old = stored(1.02, 0.99, 1.0)
    assert old.ratio == 1.0
    assert old.spread == pytest.approx(0.03)


def test_another_control_today_is_no_other_ratio():
    """The fastest comparator is the control, which may change: over a slower one, twice as slow looks as fast."""
    slower = {"cudnn": 1e-5, "flash": 2e-5}
    old = Stored.of([Figures(1.0, 1e-5, 1e-5, "cudnn", slower)] * 3)
    assert old.by == "cudnn"
    twice = Figures(1.0, 2e-5, 2e-5, "flash", slower)
    assert judge("x", old, twice, lambda: 2.0).kind == "FAIL"
    assert judge("x", old, Figures(0.5, 1e-5, 2e-5, "flash", slower)).kind == "pass"
    gone = judge("x", old, Figures(1.0, 2e-5, 2e-5, "flash", {"flash": 2e-5}))
    assert (gone.kind, gone.reason) == ("cannot gate", "its control cudnn was not timed, but flash")
    mixed = Stored.of([Figures(1.0, 1e-5, 1e-5, "cudnn", slower), Figures(0.5, 1e-5, 2e-5, "flash", slower)])
    assert (mixed.ratio, mixed.spread) == (1.0, 0.0)


@pytest.mark.parametrize("control", ["auto", "sdpa"])
def test_a_control_of_ours_is_refused(control):
    """What slows both would not show."""
    key, name = Key("gpu", "2.11", "3.6"), "tests/perf/test_kvcache.py::test_decode[x]"
    gate = Gate(key, Baseline(key, [Path("0001_x.json")], {name: stored(1.0)}), False, False, False)
    with pytest.raises(ValueError, match=f"expected plain torch, got our own {control}"):
        gate.judge(name, timing(1e-5), {"control": control, "ratio_to_control": 1.0}, None)


def test_a_stored_control_of_ours_gates_nothing():
    """Of recordings from before: else whoever is timed beside would be looked up by its name."""
    key, name = Key("gpu", "2.11", "3.6"), "tests/perf/test_kvcache.py::test_decode[x]"
    old = Stored.of([Figures(1.03, 1.03e-5, 1e-5, "auto")] * 3)
    gate = Gate(key, Baseline(key, [Path("0001_x.json")], {name: old}), False, False, False)
    info = {"control": "gather_gqa", "ratio_to_control": 0.5, "control_median": 6e-5, "medians": {"auto": 3e-5}}
    gate.judge(name, timing(3.1e-5), info, None)
    (verdict,) = gate.verdicts
    assert (verdict.kind, verdict.reason) == ("cannot gate", "no control in the baseline")


def test_a_noisy_benchmark_that_fails_is_not_listed_as_one_that_cannot_be_gated():
    key = Key("gpu", "2.11", "3.6")
    gate = Gate(key, Baseline(key, [Path("0001_x.json")], {"x": stored(0.96, 1.0, 1.04)}), False, False, False)
    gate.judge("x", timing(2e-5), {"ratio_to_control": 2.0, "control_median": 1e-5}, None)
    lines = report(gate, ["x"])
    assert lines[-1] == "gate: 0 pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    assert not [line for line in lines if line.startswith("cannot gate")]


def test_no_control_cannot_be_gated():
    assert judge("x", Stored(None, 1.0, None, 0.0, 3), Figures(1.0, 1.0, 1.0)).reason == "no control in the baseline"
    assert judge("x", stored(1.0), Figures(None, 1.0, None)).reason == "no control in this run"


def test_machine_speaks_only_of_what_moved_together():
    def moved(*factors):
        return machine(judge("x", stored(1.0), Figures(1.0, f * 1e-5, f * 1e-5)) for f in factors)

    assert "40% slower" in moved(1.4, 1.4, 1.4, 1.4)
    assert "25% faster" in moved(0.8, 0.8, 0.8, 0.8)
    assert moved(1.4, 1.0, 1.0, 1.0) is None
    assert moved(1.4, 1.4, 1.4, 0.7, 0.7) is None
    assert moved(1.03, 1.03) is None


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


def sixty_four(info):
    """What attending to the first 64 keys would have taken: the run's own time at L = 64."""
    return next(
        b for b in H100 if b["L"] == 64 and all(b[k] == info[k] for k in ("H", "D", "Dv", "N", "dist"))
    )["median"]  # fmt: skip


def test_recorded_h100_run_is_within_the_limits():
    for b in H100:
        guard(b["case"], timing(b["median"]), b["bytes"], b["flops"], LIMITS)


def test_a_kernel_that_sees_64_keys_is_refused_where_its_rate_is_impossible_and_else_listed():
    refused, infos = [], {}
    for b in H100:
        t = timing(sixty_four(b))
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


def test_a_spread_is_at_least_what_is_usual_for_its_test():
    """Three recordings that agree by luck, among benchmarks that do not, are no quiet benchmark."""
    noisy = {f"test_a[{i}]": stored(1.0 - s / 2, 1.0, 1.0 + s / 2) for i, s in enumerate((0.01, 0.1, 0.12, 0.3))}
    quiet = {f"test_b[{i}]": stored(0.999, 1.0, 1.001) for i in range(3)}
    spreads = {name: old.spread for name, old in pooled(noisy | quiet).items()}
    assert [spreads[name] for name in noisy] == pytest.approx([0.11, 0.11, 0.12, 0.3])
    assert [spreads[name] for name in quiet] == pytest.approx([0.002] * 3)


def test_what_a_threshold_needs_is_not_listed_as_missing():
    key = Key("gpu", "2.11", "3.6")
    gate = Gate(key, Baseline(key, [Path("0001_x.json")], {}), False, False, False)
    ran = ["tests/perf/test_threshold.py::test_threshold[x]", "tests/perf/test_kernels.py::test_new"]
    listed = [line for line in report(gate, ran) if line.startswith("in this run")]
    assert listed == ["in this run, not in the baseline: tests/perf/test_kernels.py::test_new"]


def test_a_kernel_that_launches_nothing_is_refused_everywhere():
    nothing = Timing([2e-6 / 64000] * 10, "graph", True, 1280, 64000, 5e-7)  # an empty graph takes 2 us
    for b in H100:
        with pytest.raises(InvalidMeasurement):
            guard(b["case"], nothing, b["bytes"], b["flops"], LIMITS)
    with pytest.raises(InvalidMeasurement, match="for 64000 calls, and its timer ticks every 0.50 us"):
        nothing.resolved("nothing")
