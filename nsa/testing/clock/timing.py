"""Samples of how long calls take, their statistics, and timing by the host's clock (on a GPU: `cuda.py`).

Implementations to compare are sampled in turn, in one process, because noise is larger between processes than within
one. If the clock rate of the processor drifts, it changes all implementations alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Fn = Callable[[], object]
LEAST = 10  # samples of each implementation, even if they exceed the budget
SAMPLE_S = 1e-3  # the least length of a sample, far above the time that it takes to read the clock
RESOLUTION = 0.01  # the longest tick of a timer, as a share of a sample
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for a core, number of time slices


class InvalidMeasurement(AssertionError):
    """A time that cannot be right: the hardware is slower than that, or the timer is too coarse to measure it."""


class Unmeasured(BaseException):
    """Ends a benchmark of a run without measurements, after each call was made once. Not an error to handle."""


_measuring = True


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Within it every timing function calls what it is given once, and raises `Unmeasured`."""
    global _measuring
    _measuring = False
    try:
        yield
    finally:
        _measuring = True


def once_if_unmeasured(calls: Iterable[Fn]) -> None:
    """What each timing function calls first, with all that it would time.

    Raises:
        Unmeasured: this run measures nothing; each call was made once.
    """
    if not _measuring:
        for call in calls:
            call()
        raise Unmeasured


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one implementation, seconds per call.

    how: "graph", "eager" (on a GPU, not capturable) or "host". cold: no call finds its inputs in L2. sets: buffer sets
    that were rotated. calls: calls in a sample. tick: resolution of the timer, seconds. refused: why the call was not
    captured, if it was timed eagerly.
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
        """The timer's tick as a share of a sample."""
        return self.tick / max(self.median * self.calls, 1e-12)

    def manner(self) -> dict[str, Any]:
        """How the samples were measured, as JSON can hold it."""
        return {"how": self.how, "cold": self.cold, "calls_per_sample": self.calls, "resolution": self.resolution}

    def figure(self) -> dict[str, Any]:
        """Median, 95% interval and how they were measured, as JSON can hold it."""
        found = {"median_s": self.median, "ci95_s": list(self.interval()), "samples": len(self.samples)}
        return found | self.manner()

    def resolved(self, name: str) -> Timing:
        """This timing, if its samples are long enough for its timer.

        Raises:
            InvalidMeasurement: the error names the length of a sample and the tick.
        """
        if self.resolution > RESOLUTION:
            raise InvalidMeasurement(
                f"invalid measurement: {name} took {self.median * self.calls * 1e6:.2f} us for {self.calls} calls, "
                f"and its timer ticks every {self.tick * 1e6:.2f} us: expected {1 / RESOLUTION:.0f} ticks or more"
            )
        return self

    def interval(self, confidence: float = 0.95, draws: int = 1000) -> tuple[float, float]:
        """Bootstrap interval of the median, seconds. The draws have a fixed seed."""
        x = torch.tensor(self.samples, dtype=torch.float64)
        g = torch.Generator().manual_seed(0)
        medians = x[torch.randint(len(x), (draws, len(x)), generator=g)].quantile(0.5, dim=1)
        tail = (1 - confidence) / 2
        low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return low, high


def together(takes: Sequence[Mapping[str, Timing]]) -> dict[str, Timing]:
    """Several measurements of the same calls, joined into one that has the samples of all."""
    return {
        name: dataclasses.replace(
            first, samples=[x for take in takes for x in take[name].samples], calls=min(t[name].calls for t in takes)
        )
        for name, first in takes[0].items()
    }


def in_turn(counts: dict[str, int]) -> Iterator[str]:
    """Names in rounds. A name with a smaller count is spread evenly over the rounds."""
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
    afterwards: Callable[[str, Fn], None] | None = None,
) -> dict[str, Timing]:
    """Time calls by the host's clock, implementations in turn.

    A sample repeats its call until it lasts `sample_s`. Given one call per buffer set, a sample goes through all sets,
    and repeats the whole rotation.

    `sync`, such as `torch.cuda.synchronize`, is called after each sample and is not timed. With it, the time is the
    latency of an eager call: what the host spends while the GPU still works.

    After the last sample, `afterwards` is called for each implementation, with a function that calls all its buffer
    sets once as they were timed.

    torch runs on one thread, because several threads wait for the slowest of them, which may lose its core for
    milliseconds. Freed memory stays with the process, see `_keep_memory`.
    """
    once_if_unmeasured(fn if callable(fn) else fn[0] for fn in fns.values())
    _keep_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rotations = {name: [fn] if callable(fn) else list(fn) for name, fn in fns.items()}
        times = _time_host(rotations, iters, warmup, budget_s, sample_s, least, sync)
        if afterwards is not None:
            for name, calls in rotations.items():
                afterwards(name, functools.partial(each, calls))
        return times
    finally:
        torch.set_num_threads(threads)


def each(calls: Iterable[Fn]) -> None:
    """Make each call once."""
    for call in calls:
        call()


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
        samples[name] = [once / len(calls)] if once >= budget_s else []  # a long call already counts as a sample
        once = min(once, _host_sample(calls, 1, sync) * len(calls)) if once < 0.1 * budget_s else once
        repeats[name] = max(1, min(10_000, math.ceil(sample_s / max(once, 1e-7))))
        counts[name] = max(least, min(iters, int(budget_s / (once * repeats[name]))))
        for _ in range(min(warmup, int(0.2 * budget_s / (once * repeats[name])))):
            _host_sample(calls, repeats[name], sync)
    for name in in_turn({name: count - len(samples[name]) for name, count in counts.items()}):
        samples[name].append(_host_sample(fns[name], repeats[name], sync))
    tick = max(time.get_clock_info("perf_counter").resolution, _clock_cost())
    return {
        name: Timing(samples[name], "host", False, len(calls), repeats[name] * len(calls), tick).resolved(name)
        for name, calls in fns.items()
    }


def _host_sample(calls: Sequence[Fn], repeats: int, sync: Fn | None) -> float:
    """Wall time of a call, without the time in which this thread waited for a core.

    A wait may fall between a reading of the clock and a reading of the counter of waits. So if there was a wait, the
    wall time includes both readings of the counter. A disturbance may then add microseconds, but never subtract any.
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
    """Seconds for which this thread has waited for a core; 0 if the system does not count them."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@functools.cache
def _keep_memory() -> bool:
    """Let glibc keep freed memory, in pieces of up to 32 MiB, which is its limit. Returns whether that was possible.

    By default glibc may return freed memory to the system. A tensor of some MiB then takes new pages, one page fault
    each: on a virtual machine 32 MiB take 13 ms to fill instead of 0.45 ms. Whether this happens depends on what the
    process freed before, so that ratios differ by half from one process to the next.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return False
    trim, top_pad, mmap = (-1, 1 << 30), (-2, 64 << 20), (-3, 32 << 20)  # malloc.h: M_TRIM_THRESHOLD, …
    return all(mallopt(*option) == 1 for option in (trim, top_pad, mmap))


@functools.cache
def _clock_cost() -> float:
    """Seconds between two successive readings of the clock."""
    readings = [time.perf_counter() for _ in range(101)]
    return statistics.median(b - a for a, b in itertools.pairwise(readings))


class _VirtualClock:
    """A clock that moves only when its attribute `now` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


clock = _VirtualClock()
"""The timer of every benchmark that replays samples: `pytestmark = pytest.mark.benchmark(timer=timing.clock)`."""


def feed(benchmark: Any, timing: Timing) -> None:
    """Replay samples through pytest-benchmark, so that its tables, files and comparisons contain exactly these."""
    samples = iter(timing.samples)

    def step() -> None:
        clock.now += next(samples)

    benchmark.pedantic(step, rounds=len(timing.samples), iterations=1)
