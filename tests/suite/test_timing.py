"""Samples and their statistics on the host."""

import time
from types import SimpleNamespace

import pytest

from nsa.testing import benchmarks
from nsa.testing.clock import timing
from nsa.testing.clock.timing import InvalidMeasurement, Timing, time_host


@pytest.fixture
def passes(monkeypatch):
    """`passes(seconds)`: time that passes on the clock of `timing`, which only this moves."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], get_clock_info=time.get_clock_info)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "_waited", lambda: 0.0)
    monkeypatch.setattr(timing, "_clock_cost", lambda: 1e-7)

    def make(seconds):
        now[0] += seconds

    return make


def test_iters_warmup_and_resolution(passes):
    calls = {"a": 0, "b": 0}

    def call(name):
        calls[name] += 1
        passes(2e-3)

    times = time_host({n: lambda n=n: call(n) for n in calls}, iters=17, warmup=3, budget_s=10)
    assert {n: len(t.samples) for n, t in times.items()} == {"a": 17, "b": 17}
    assert calls == {"a": 23, "b": 23}  # one before all, two to estimate, three to warm up
    assert all(t.resolution < 0.01 for t in times.values())


def test_a_call_over_its_budget_is_not_made_in_vain(passes):
    calls = []
    t = time_host({"slow": lambda: (calls.append(0), passes(0.02))}, iters=10, budget_s=0.01, least=3)["slow"]
    assert (len(t.samples), len(calls)) == (3, 4)  # the first of all may compile


def test_short_calls_are_repeated_inside_a_sample(passes):
    """A call of 4 us: 250 of them last the millisecond of a sample."""
    t = time_host({"short": lambda: passes(4e-6)}, iters=10, budget_s=0.1)["short"]
    assert t.calls in (250, 251)  # the sum of 4e-6 is not exact
    assert t.samples == pytest.approx([4e-6] * 10)
    assert t.resolution == pytest.approx(1e-4, rel=0.01)


def test_a_sample_goes_through_all_buffer_sets_and_is_told_per_call(passes):
    """Sets of 2 and 6 ms: 4 ms a call, in each sample."""
    seen = []
    calls = [lambda ms=ms: (seen.append(ms), passes(ms / 1e3)) for ms in (2, 6)]
    t = time_host({"x": calls}, iters=10, warmup=0, budget_s=1)["x"]
    assert (t.sets, t.calls) == (2, 2)
    assert seen[1:] == [2, 6] * (len(seen) // 2)  # the first of all may compile
    assert t.median == pytest.approx(0.004)


def test_a_sample_its_timer_cannot_tell_is_invalid():
    Timing([1e-4] * 3, "host", False, 1, 1, tick=1e-6).resolved("fine")
    with pytest.raises(InvalidMeasurement, match="short took 99.00 us for 1 calls"):
        Timing([9.9e-5] * 3, "host", False, 1, 1, tick=1e-6).resolved("short")


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_waiting_for_a_core_is_not_counted_but_sleeping_is(monkeypatch, where):
    """A call of 6 ms and a wait of 4 ms: in the call, or between a reading of the clock and one of the waits."""
    now, waits = [0.0], [0.0]

    def wait():
        now[0] += 0.004
        waits[0] += 0.004

    def waited():
        seen = waits[0]
        if where == "before" and now[0] == 0:
            wait()
        return seen

    def perf_counter():
        seen = now[0]
        if where == "after" and seen == pytest.approx(0.006) and not waits[0]:
            wait()
        return seen

    def call():
        now[0] += 0.006
        if where == "inside":
            wait()

    with monkeypatch.context() as patch:
        patch.setattr(timing, "_waited", waited)
        patch.setattr(timing, "time", SimpleNamespace(perf_counter=perf_counter))
        assert timing._host_sample([call], 1, None) == pytest.approx(0.006)
        assert waits == [0.004]
    assert timing._host_sample([lambda: time.sleep(0.01)], 1, None) >= 0.009


def test_one_thread_while_timing_and_as_many_as_before_afterwards():
    before, seen = timing.torch.get_num_threads(), []
    time_host({"x": lambda: seen.append(timing.torch.get_num_threads())}, iters=10, budget_s=0.01)
    assert set(seen) == {1}
    assert timing.torch.get_num_threads() == before


def test_median_and_interval():
    t = Timing([1.0] * 30 + [2.0] * 10, "host", False, 1, 1)
    assert (t.median, t.interval()) == (1.0, (1.0, 1.0))
    assert t.figure()["ci95_s"] == [1.0, 1.0]


def test_without_measurements_each_call_is_made_once():
    """The plugin turns its end into a pass of a benchmark; an assertion before it or in a call stays a failure."""
    calls = []
    with timing.unmeasured(), pytest.raises(timing.Unmeasured):
        time_host({"a": lambda: calls.append("a"), "b": [lambda: calls.append("b"), lambda: calls.append("c")]})
    assert calls == ["a", "b"]
    assert len(time_host({"a": lambda: None}, iters=10, budget_s=0.01)["a"].samples) == 10

    for disabled, mark, raised, ends in (
        (True, "perf", timing.Unmeasured, "passed"), (True, None, timing.Unmeasured, "raised"),
        (False, "perf", timing.Unmeasured, "raised"), (True, "perf", AssertionError, "raised"),
    ):  # fmt: skip
        config = SimpleNamespace(getoption=lambda *_, disabled=disabled: disabled)
        item = SimpleNamespace(config=config, get_closest_marker=lambda name, mark=mark: name == mark)
        hook = benchmarks.pytest_pyfunc_call(item)
        next(hook)
        assert timing._measuring == (not disabled or mark is None)
        with pytest.raises(StopIteration if ends == "passed" else raised):
            hook.throw(raised())
        assert timing._measuring
