"""How samples on a GPU are cut and rotated, on a pretended one: a clock that calls move on."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from nsa.testing.clock import cuda


class FakeGPU:
    """What `cuda.py` asks of `torch.cuda`, and logs of which implementation read which buffer set."""

    def __init__(self):
        self.now = 0.0
        self.log, self.timed = [], []  # all calls, and those between two events
        self.events = 0
        self.start_s = 0.0  # of a replay, before its first call begins
        self.idle_s = 0.0  # what a call takes longer that an event finds with nothing before it
        self.left_s = 0.0  # what another implementation leaves to do: a quarter of each call's time, until it is done
        self.owed, self.before, self.idle, self.ahead = 0.0, None, False, False

    def Event(self, enable_timing):
        event = SimpleNamespace(at=None, synchronize=lambda: None)

        def record():
            event.at = self.now
            self.events += 1
            self.idle = not self.ahead

        event.record = record
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def sleep(self, cycles):
        """What comes next are samples, and the host is ahead of them."""
        self.log.clear()
        self.timed.clear()
        self.ahead, self.idle = True, False

    def calls(self, name, sets, seconds):
        def call(i):
            assert len(self.log) < 1_000_000, "this takes for ever"
            self.log.append((name, i))
            if self.events % 2:
                self.timed.append((name, i))
            if self.before != name:
                self.owed = self.left_s
            late = min(self.owed, seconds / 4)
            self.now += seconds + late + self.idle_s * self.idle
            self.before, self.owed, self.idle = name, self.owed - late, False

        return [lambda i=i: call(i) for i in range(sets)]


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGPU()

    class Graph:
        """As torch's: a memory pool dies with the last graph that uses it, and nothing can be captured into it then."""

        def __init__(self, calls, cycles, pool):
            if pool["dead"]:
                raise RuntimeError("the pool is gone")
            pool["graphs"] += 1
            self.calls, self.cycles, self.pool = calls, cycles, pool

        def __call__(self):
            gpu.now += gpu.start_s
            for _ in range(self.cycles):
                for call in self.calls:
                    call()

        def __del__(self):
            self.pool["graphs"] -= 1
            self.pool["dead"] |= self.pool["graphs"] == 0

    made_of = {"Event": gpu.Event, "synchronize": lambda: None, "_sleep": gpu.sleep}
    fake = SimpleNamespace(**made_of, graph_pool_handle=lambda: {"graphs": 0, "dead": False})
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(cuda, "_capture", Graph)
    return gpu


def test_short_rotations_are_repeated_until_they_last(gpu):
    times = cuda.time_gpu({"ours": gpu.calls("ours", 2, 1.1e-5), "slow": gpu.calls("slow", 2, 4e-4)})
    assert {name: (t.calls, t.sets) for name, t in times.items()} == {"ours": (92, 2), "slow": (4, 2)}
    assert {name: t.median for name, t in times.items()} == pytest.approx({"ours": 1.1e-5, "slow": 4e-4})


def test_the_start_of_a_replay_is_not_the_calls_time(gpu):
    """It takes a GPU several microseconds: by the time of one call alone samples would be a ninth as long."""
    gpu.start_s = 8e-6
    calls = {"ours": gpu.calls("ours", 1, 1e-6), "large": gpu.calls("large", 2, 5e-5)}
    times = cuda.time_gpu(calls, budget_s=0.0155)
    assert {name: t.median for name, t in times.items()} == pytest.approx({"ours": 1e-6, "large": 5e-5}, rel=0.01)
    assert {name: len(t.samples) for name, t in times.items()} == pytest.approx({"ours": 15, "large": 15}, abs=1)


@pytest.mark.parametrize("sets", [2, 400])
@pytest.mark.parametrize("first", ["ours", "gather", "many"])
def test_what_another_implementation_left_behind_is_not_our_time(gpu, first, sets):
    gpu.left_s = 1.6e-5
    seconds = {"ours": 2e-4, "gather": 7e-5, "many": 4e-6}
    fns = {name: gpu.calls(name, sets, seconds[name]) for name in {first: None, **seconds}}
    times = cuda.time_gpu(fns)
    assert {name: t.median for name, t in times.items()} == pytest.approx(seconds, rel=1e-3)


def test_a_call_that_takes_no_time_is_not_repeated_for_ever(gpu):
    gpu.start_s = 1e-6
    assert cuda.time_gpu({"nothing": gpu.calls("nothing", 3, 0.0)})["nothing"].calls <= cuda.MOST_CALLS


def test_long_rotations_are_cut_and_still_every_buffer_is_cold(gpu):
    """A call of 5 us over 2,001 sets takes 10 ms: ten samples' worth, for the call of 1 ms beside it two seconds."""
    sets, seconds = 2001, {"ours": 5e-6, "slow": 1e-3, "other": 7e-6}
    times = cuda.time_gpu({name: gpu.calls(name, sets, s) for name, s in seconds.items()}, budget_s=0.06)
    assert {name: t.median for name, t in times.items()} == pytest.approx(seconds)
    assert {(t.how, t.calls) for t in times.values()} == {("graph", 200)}
    assert len(times["slow"].samples) == cuda.LEAST
    assert {i for name, i in gpu.timed if name == "ours"} == set(range(sets))
    slow = [[which for which in log if which[0] == "slow"] for log in (gpu.log, gpu.timed)]
    assert len(slow[0]) == len(slow[1]), "a sample that takes long was led in"
    last = {}
    for at, (_, i) in enumerate(gpu.log):
        assert at - last.get(i, -math.inf) >= sets - 1, "a buffer was read again before the rest of the rotation"
        last[i] = at


def test_a_comparator_much_faster_than_ours_still_lasts_a_sample(gpu):
    calls = {"ours": gpu.calls("ours", 1000, 2e-4), "fast": gpu.calls("fast", 1000, 4e-6)}
    times = cuda.time_gpu(calls, budget_s=0.0155)
    assert times["fast"].median == pytest.approx(4e-6)
    assert times["fast"].calls * 4e-6 >= cuda.REPLAY_S * 0.89
    assert {name: len(t.samples) for name, t in times.items()} == {"ours": 15, "fast": 17}


@pytest.mark.parametrize("names", [1, 2, 5, 10, 11, 20])
def test_everybody_meets_every_buffer(gpu, names):
    """However many take turns: with a common factor of names and parts each would meet the same parts for ever."""
    sets = 1000  # ten parts of 1 ms
    fns = {str(i): gpu.calls(str(i), sets, 1.002e-5) for i in range(names)}
    cuda.time_gpu(fns, iters=40)
    for name in fns:
        assert {i for who, i in gpu.timed if who == name} == set(range(sets))


@pytest.mark.parametrize("slow", [2, 3, 5])
@pytest.mark.parametrize("parts", [8, 14, 15])
def test_who_is_sampled_less_often_meets_most_buffers(gpu, parts, slow):
    """Two of three are sampled ten times, the first more often: rounds are not all alike."""
    sets = 100 * parts
    seconds = {"ours": 1.002e-5, "slow": slow * 1e-5, "slower": 2 * slow * 1e-5}
    times = cuda.time_gpu({name: gpu.calls(name, sets, s) for name, s in seconds.items()}, budget_s=0.0205)
    assert len(times["ours"].samples) == 20
    for name, timing in times.items():
        met = {i // 100 for who, i in gpu.timed if who == name}
        assert len(met) >= 0.8 * min(parts, len(timing.samples)), name


@pytest.mark.parametrize(("sets", "seconds", "calls"), [(40, 1e-4, 10), (1, 1e-6, 1000)], ids=["cut", "repeated"])
def test_what_cannot_be_captured_is_called_eagerly(gpu, monkeypatch, sets, seconds, calls):
    def refuse(calls, cycles, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda, "_capture", refuse)
    gpu.idle_s = 8e-6
    timing = cuda.time_gpu({"ours": gpu.calls("ours", sets, seconds)}, replay_s=1e-3)["ours"]
    assert timing.how == "eager"
    assert timing.calls == pytest.approx(calls, rel=0.1)
    assert timing.refused == "operation not permitted when stream is capturing"
    assert timing.median == pytest.approx(seconds)


def test_captures_share_a_stream_until_one_fails(monkeypatch):
    made, began = [], []

    class Stream:
        wait_stream = lambda self, other: None  # noqa: E731

        def __init__(self, device):
            made.append(device)

    class CUDAGraph:
        capture_end = replay = lambda self: None

        def capture_begin(self, pool):
            began.append(pool)

    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    fake = SimpleNamespace(
        CUDAGraph=CUDAGraph,
        Stream=Stream,
        current_device=lambda: 0,
        current_stream=lambda: Stream.__new__(Stream),
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake))
    cuda._capture_stream.cache_clear()
    try:
        for _ in range(8):
            cuda._capture([lambda: None], 2, None)
        assert made == [0]
        with pytest.raises(RuntimeError, match="capturing"):
            cuda._capture([refuse], 1, None)
        for _ in range(8):
            cuda._capture([lambda: None], 2, None)
        assert made == [0, 0]
        assert len(began) == 17
    finally:
        cuda._capture_stream.cache_clear()
