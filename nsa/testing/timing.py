"""Times of calls: CUDA graphs over cold, rotated buffers on a GPU, the host's clock elsewhere; and their statistics.

Implementations that are to be compared are sampled in turn, in one process: noise lies between runs, and a clock that
drifts moves both sides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa.testing.problem import Problem

Fn = Callable[[], object]
LEAST = 10  # samples, whatever the budget says; calls of seconds may ask for fewer
COLD = 3.0  # a rotation touches this many times the L2 cache between two uses of the same buffer
MOST_SETS = 1280
REPLAY_S = 5e-4  # a sample is long against the few microseconds by which events enclose it
SAMPLE_S = 1e-3  # likewise on the host
EVENT_TICK_S = 5e-7  # what CUDA documents for the resolution of event times
RESOLUTION = 0.01  # of a sample, the most that a tick of its timer may be
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, time slices


class InvalidMeasurement(AssertionError):
    """A time that cannot be right: this hardware cannot have taken it, or its timer cannot tell it."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one implementation, seconds per call.

    how: "graph", "eager" (GPU, not capturable) or "host". cold: no call finds its inputs in L2. sets: buffer sets that
    were rotated. calls: calls in a sample. tick: resolution of the timer, seconds.
    """

    samples: list[float]
    how: str
    cold: bool
    sets: int
    calls: int
    tick: float = 0.0

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def steady(self) -> float:
        """The lower quartile, seconds per call. What the gate compares: disturbances only ever add time."""
        return statistics.quantiles(self.samples, method="inclusive")[0] if len(self.samples) > 1 else self.median

    @property
    def resolution(self) -> float:
        """A tick of the timer as a share of a sample."""
        return self.tick / max(self.median * self.calls, 1e-12)

    def figure(self) -> dict[str, Any]:
        """Median, 95% interval and how they came about, as JSON can hold it."""
        return {
            "median_s": self.median,
            "ci95_s": list(self.interval()),
            "how": self.how,
            "cold": self.cold,
            "calls_per_sample": self.calls,
            "samples": len(self.samples),
            "resolution": self.resolution,
        }

    def resolved(self, name: str) -> Timing:
        """Itself, if its samples are long enough for its timer.

        Raises:
            InvalidMeasurement: naming the sample and the tick.
        """
        if self.resolution > RESOLUTION:
            raise InvalidMeasurement(
                f"invalid measurement: {name} took {self.median * self.calls * 1e6:.2f} us for {self.calls} calls, "
                f"and its timer ticks every {self.tick * 1e6:.2f} us: expected {1 / RESOLUTION:.0f} ticks or more"
            )
        return self

    def interval(self, confidence: float = 0.95, draws: int = 1000) -> tuple[float, float]:
        """Bootstrap interval of the median, seconds. Repeatable: its draws have a fixed seed."""
        x = torch.tensor(self.samples, dtype=torch.float64)
        g = torch.Generator().manual_seed(0)
        medians = x[torch.randint(len(x), (draws, len(x)), generator=g)].quantile(0.5, dim=1)
        tail = (1 - confidence) / 2
        low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return low, high


def buffer_sets(p: Problem, memory_share: float = 0.4, hot: bool = False) -> tuple[list[Problem], bool]:
    """Copies of a problem to rotate through, and whether that makes every call cold.

    Enough copies that what a rotation reads is `COLD` times the L2 cache, two at least, as far as memory goes. `hot`:
    one set, read from L2 as far as it fits.
    """
    if p.q.device.type != "cuda" or hot:
        return [p], False
    cache = torch.cuda.get_device_properties(p.q.device).L2_cache_size
    footprint = sum(x.numel() * x.element_size() for x in (p.q, p.k, p.v))
    if p.case.source != "rows":  # the packed copy that SDPA reads
        footprint += sum(x.numel() * x.element_size() for x in p.rows[1:3])
    unused = torch.cuda.memory_reserved(p.q.device) - torch.cuda.memory_allocated(p.q.device)
    room = int((torch.cuda.mem_get_info(p.q.device)[0] + unused) * memory_share / max(footprint, 1))
    wanted = max(2, math.ceil(COLD * cache / max(p.unique_bytes, 1)))
    sets = max(1, min(wanted, room, MOST_SETS))
    return [p, *(p.clone() for _ in range(sets - 1))], sets >= 2 and sets * p.unique_bytes >= COLD * cache * 0.99


def time_gpu(
    fns: Mapping[str, Sequence[Fn]],
    *,
    iters: int = 50,
    warmup: int = 5,
    budget_s: float = 0.15,
    cold: bool = False,
    replay_s: float = REPLAY_S,
) -> dict[str, Timing]:
    """Time calls on the current GPU by replaying CUDA graphs, implementations in turn.

    Args:
        fns: per implementation one call per buffer set. A graph goes through them in order, as often as it takes to
            last `replay_s`.
        iters: samples of each; fewer where they would take longer than `budget_s`, never under `LEAST`.
        warmup: replays before the first sample.
        cold: what `buffer_sets` said, for the record.
    """
    pool = torch.cuda.graph_pool_handle()
    runs = {name: _replayable(calls, replay_s, pool) for name, calls in fns.items()}
    counts = {name: max(LEAST, min(iters, int(budget_s / run.estimate_s))) for name, run in runs.items()}
    for run in runs.values():
        for _ in range(warmup):
            run.replay()
    torch.cuda.synchronize()
    # Keep the GPU busy until the host is ahead of it: an event recorded on an idle GPU would time the launch.
    torch.cuda._sleep(4_000_000)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for name in _in_turn(counts):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[name].replay()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: Timing(
            [a.elapsed_time(b) / 1e3 / run.calls for a, b in events[name]],
            run.how, cold, len(fns[name]), run.calls, EVENT_TICK_S,
        )
        for name, run in runs.items()
    }  # fmt: skip


def time_streams(
    calls: Sequence[Fn],
    streams: int = 2,
    *,
    iters: int = 50,
    warmup: int = 5,
    budget_s: float = 0.15,
    cold: bool = False,
    replay_s: float = REPLAY_S,
) -> Timing | None:
    """Wall time of one call on each of `streams` CUDA streams at once: of all together, not a sum.

    Every stream replays a graph of its own over its own share of the buffer sets, all behind one event; the sample ends
    when the last one has. None where the call cannot be captured.

    Args:
        calls: one per buffer set, as for `time_gpu`.
    """
    shares = [calls[i::streams] or calls for i in range(streams)]
    length = min(map(len, shares))  # the same work on each
    shares = [share[:length] for share in shares]
    # Graphs that run at the same time must not share memory.
    first = _replayable(shares[0], replay_s, torch.cuda.graph_pool_handle())
    if first.how != "graph":
        return None
    cycles = first.calls // length
    replays = [first.replay, *(_capture(s, cycles, torch.cuda.graph_pool_handle()) for s in shares[1:])]
    lanes = [torch.cuda.Stream() for _ in range(streams)]

    def together() -> None:
        main = torch.cuda.current_stream()
        for lane, replay in zip(lanes, replays, strict=True):
            lane.wait_stream(main)
            with torch.cuda.stream(lane):
                replay()
        for lane in lanes:
            main.wait_stream(lane)

    for _ in range(max(1, warmup)):
        together()
    torch.cuda.synchronize()
    count = max(LEAST, min(iters, int(budget_s / _elapsed(together))))
    samples = [_elapsed(together) / first.calls for _ in range(count)]
    return Timing(samples, "graph", cold, length * streams, first.calls, EVENT_TICK_S)


@dataclasses.dataclass
class _Run:
    replay: Fn
    how: str
    calls: int
    estimate_s: float


def _replayable(calls: Sequence[Fn], replay_s: float, pool: Any) -> _Run:
    """Capture a rotation over the buffer sets, repeated until it lasts; eager calls where capture is refused."""
    for call in calls[:2]:  # compile and allocate before capture
        call()
    torch.cuda.synchronize()
    try:
        replay: Fn = _capture(calls, 1, pool)
        how = "graph"
    except RuntimeError:  # a sync or an allocation inside the call: a third party's, or torch's own math
        torch.cuda.synchronize()

        def replay() -> None:
            for call in calls:
                call()

        how = "eager"
    replay()
    once = min(_elapsed(replay) for _ in range(2))
    cycles = max(1, math.ceil(replay_s / once))
    if cycles > 1 and how == "graph":
        replay = _capture(calls, cycles, pool)
    elif cycles > 1:
        replay = _repeat(replay, cycles)
    return _Run(replay, how, cycles * len(calls), cycles * once)


def _repeat(fn: Fn, times: int) -> Fn:
    def repeated() -> None:
        for _ in range(times):
            fn()

    return repeated


def _capture(calls: Sequence[Fn], cycles: int, pool: Any) -> Fn:
    """`torch.cuda.graph` without its `gc.collect()` and `empty_cache()`, which would take longer than the timing.

    All graphs share a memory pool: they are replayed one after the other and nobody reads their outputs.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # what it frees during capture could be a CUDA object, which capture forbids
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool)
            try:
                for _ in range(cycles):
                    for call in calls:
                        call()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):  # says once more that capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _elapsed(replay: Fn) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3, 1e-6)


def _in_turn(counts: dict[str, int]) -> Iterator[str]:
    """Names in rounds; what is sampled less often is spread evenly over the rounds."""
    most = max(counts.values())
    for i in range(most):
        yield from (name for name, n in counts.items() if (i + 1) * n // most != i * n // most)


def time_host(
    fns: Mapping[str, Fn],
    *,
    iters: int = 50,
    warmup: int = 5,
    budget_s: float = 0.5,
    sample_s: float = SAMPLE_S,
    least: int = LEAST,
    sync: Fn | None = None,
) -> dict[str, Timing]:
    """Time calls by the host's clock, implementations in turn. A sample repeats its call until it lasts `sample_s`.

    With `sync` (say `torch.cuda.synchronize`), called after each sample and not timed, this is the latency of an eager
    call: what the host spends, while the GPU works behind it.

    On one thread: a team of threads waits for its slowest member, and one that lost its core loses milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_host(fns, iters, warmup, budget_s, sample_s, least, sync)
    finally:
        torch.set_num_threads(threads)


def _time_host(
    fns: Mapping[str, Fn], iters: int, warmup: int, budget_s: float, sample_s: float, least: int, sync: Fn | None
) -> dict[str, Timing]:
    repeats, counts = {}, {}
    for name, fn in fns.items():
        fn()
        once = _host_sample(fn, 1, sync)
        once = min(once, _host_sample(fn, 1, sync)) if once < 0.1 * budget_s else once
        repeats[name] = max(1, min(10_000, math.ceil(sample_s / max(once, 1e-7))))
        counts[name] = max(least, min(iters, int(budget_s / (once * repeats[name]))))
        for _ in range(min(warmup, int(0.2 * budget_s / (once * repeats[name])))):
            _host_sample(fn, repeats[name], sync)
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for name in _in_turn(counts):
        samples[name].append(_host_sample(fns[name], repeats[name], sync))
    tick = max(time.get_clock_info("perf_counter").resolution, _clock_cost())
    return {
        name: Timing(samples[name], "host", False, 1, repeats[name], tick).resolved(name) for name in fns
    }  # fmt: skip


def _host_sample(fn: Fn, repeats: int, sync: Fn | None) -> float:
    """Wall time of a call, less what this thread waited for a core because another process had it."""
    before, start = _waited(), time.perf_counter()
    for _ in range(repeats):
        fn()
    elapsed = time.perf_counter() - start
    waited = _waited() - before
    if sync is not None:
        sync()
    return max(elapsed - waited, 0.1 * elapsed) / repeats


def _waited() -> float:
    """Seconds this thread has been ready to run without a core; 0 where the kernel does not say."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@functools.cache
def _clock_cost() -> float:
    """Seconds between two readings of the clock, one after the other."""
    readings = [time.perf_counter() for _ in range(101)]
    return statistics.median(b - a for a, b in itertools.pairwise(readings))


class _VirtualClock:
    """A clock that stands still until it is told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


clock = _VirtualClock()
"""The timer of every benchmark that replays samples: `pytestmark = pytest.mark.benchmark(timer=timing.clock)`."""


def feed(benchmark: Any, timing: Timing) -> None:
    """Replay samples through pytest-benchmark, so that its tables, files and comparisons see exactly these."""
    samples = iter(timing.samples)

    def step() -> None:
        clock.now += next(samples)

    benchmark.pedantic(step, rounds=len(timing.samples), iterations=1)
