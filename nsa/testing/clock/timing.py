"""Samples of how long calls take, their statistics, and the host's clock that takes them (a GPU's: `cuda.py`).

Implementations that are to be compared are sampled in turn, in one process: noise lies between runs, and a clock that
drifts moves both sides.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Fn = Callable[[], object]
LEAST = 10  # samples, whatever the budget says; calls of seconds may ask for fewer
SAMPLE_S = 1e-3  # a sample is long against the clock's own cost
RESOLUTION = 0.01  # of a sample, the most that a tick of its timer may be
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, time slices


class InvalidMeasurement(AssertionError):
    """A time that cannot be right: this hardware cannot have taken it, or its timer cannot tell it."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one implementation, seconds per call.

    how: "graph", "eager" (GPU, not capturable) or "host". cold: no call finds its inputs in L2. sets: buffer sets that
    were rotated. calls: calls in a sample. tick: resolution of the timer, seconds. refused: why CUDA did not
    capture the call, if it is not timed as a graph.
    """

    samples: list[float]
    how: str
    cold: bool
    sets: int
    calls: int
    tick: float = 0.0
    refused: str = ""

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

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


def together(takes: Sequence[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Several measurements of the same calls as one, with the samples of all."""
    return {
        name: dataclasses.replace(
            first, samples=[x for take in takes for x in take[name].samples], calls=min(t[name].calls for t in takes)
        )
        for name, first in takes[0].items()
    }


def in_turn(counts: dict[str, int]) -> Iterator[str]:
    """Names in rounds; what is sampled less often is spread evenly over the rounds."""
    most = max(counts.values())
    for i in range(most):
        yield from (name for name, n in counts.items() if (i + 1) * n // most != i * n // most)


def time_host(
    fns: Mapping[str, Fn | Sequence[Fn]],
    *,
    iters: int = 50,
    warmup: int = 5,
    budget_s: float = 0.5,
    sample_s: float = SAMPLE_S,
    least: int = LEAST,
    sync: Fn | None = None,
) -> dict[str, Timing]:
    """Time calls by the host's clock, implementations in turn. A sample repeats its call until it lasts `sample_s`.

    Given one call per buffer set, a sample goes through all of them, and repeats that.

    With `sync` (say `torch.cuda.synchronize`), called after each sample and not timed, this is the latency of an eager
    call: what the host spends, while the GPU works behind it.

    On one thread: a team of threads waits for its slowest member, and one that lost its core loses milliseconds. And
    on memory that the process keeps: see `_keep_memory`.
    """
    _keep_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rotations = {name: [fn] if callable(fn) else list(fn) for name, fn in fns.items()}
        return _time_host(rotations, iters, warmup, budget_s, sample_s, least, sync)
    finally:
        torch.set_num_threads(threads)


def _time_host(
    fns: Mapping[str, Sequence[Fn]],
    iters: int,
    warmup: int,
    budget_s: float,
    sample_s: float,
    least: int,
    sync: Fn | None,
) -> dict[str, Timing]:
    repeats, counts = {}, {}
    samples: dict[str, list[float]] = {}
    for name, calls in fns.items():
        calls[0]()
        once = _host_sample(calls, 1, sync) * len(calls)  # seconds of a rotation
        samples[name] = [once / len(calls)] if once >= budget_s else []  # a call of seconds is not made in vain
        once = min(once, _host_sample(calls, 1, sync) * len(calls)) if once < 0.1 * budget_s else once
        repeats[name] = max(1, min(10_000, math.ceil(sample_s / max(once, 1e-7))))
        counts[name] = max(least, min(iters, int(budget_s / (once * repeats[name]))))
        for _ in range(min(warmup, int(0.2 * budget_s / (once * repeats[name])))):
            _host_sample(calls, repeats[name], sync)
    for name in in_turn({name: count - len(samples[name]) for name, count in counts.items()}):
        samples[name].append(_host_sample(fns[name], repeats[name], sync))
    tick = max(time.get_clock_info("perf_counter").resolution, _clock_cost())
    return {
        name: Timing(
            samples[name], "host", False, len(calls), repeats[name] * len(calls), tick
        ).resolved(name)
        for name, calls in fns.items()
    }  # fmt: skip


def _host_sample(calls: Sequence[Fn], repeats: int, sync: Fn | None) -> float:
    """Wall time of a call, less what this thread waited for a core because another process had it.

    A wait may fall between the clock and the counter of waits, so where there was one, the counter is read inside the
    time it is taken from: a disturbance may add the microseconds of those readings, and never takes any away.
    """
    outer = time.perf_counter()
    before, start = _waited(), time.perf_counter()
    for _ in range(repeats):
        for call in calls:
            call()
    elapsed = time.perf_counter() - start
    waited = _waited() - before
    if waited > 0:
        elapsed = time.perf_counter() - outer
    if sync is not None:
        sync()
    return max(elapsed - waited, 0.1 * elapsed) / (repeats * len(calls))


def _waited() -> float:
    """Seconds this thread has been ready to run without a core; 0 where the kernel does not say."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@functools.cache
def _keep_memory() -> bool:
    """Have glibc keep what is freed, up to 32 MiB a piece (its limit); whether that was possible.

    By default it depends on what the process freed before whether a tensor of some MiB is new memory from the kernel,
    page by page: on a virtual machine 32 MiB take 13 ms to fill instead of 0.45, and ratios differ by half from one
    process to the next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return False
    trim, top_pad, mmap = (-1, 1 << 30), (-2, 64 << 20), (-3, 32 << 20)  # malloc.h: M_TRIM_THRESHOLD, …
    return all(mallopt(*option) == 1 for option in (trim, top_pad, mmap))


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
