"""Times of calls on a GPU: CUDA graphs replayed over cold, rotated buffers, one stream or several.

Implementations that are to be compared are sampled in turn, as on the host (`timing.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nsa.testing.clock.timing import LEAST, Fn, Timing, in_turn
from nsa.testing.matrix.problem import Problem

COLD = 3.0  # a rotation touches this many times the L2 cache between two uses of the same buffer
ALONE = 2.0  # a call that touches this many times the L2 cache finds nothing of the call before it there
MOST_SETS = 1280
HOST_SETS = 6
REPLAY_S = 1e-3  # a sample is long against the microseconds of its events and of a replay's start
LEAD_S = 4e-3  # what another implementation left in L2 is next to nothing to a replay of this length
MOST_CALLS = 4096  # in a sample of calls that take next to no time
SKIPPED = 3  # parts of a rotation, at most, to come to one that an implementation has not met
EVENT_TICK_S = 5e-7  # what CUDA documents for the resolution of event times


def buffer_sets(p: Problem, memory_share: float = 0.4, hot: bool = False) -> tuple[list[Problem], bool]:
    """Copies of a problem to rotate through, and whether that makes every call cold.

    On a GPU enough copies that what a rotation reads is `COLD` times the L2 cache, two at least, as far as memory goes;
    a large problem (`Case.large`) alone.
    On a CPU a few: where tensors happen to lie moves the times of a whole process, by a quarter at times. `hot`: one
    set, on a GPU read from L2 as far as it fits.
    """
    if hot:
        return [p], False
    if p.case.large:  # what a call touches is more than the cache holds, and nobody has memory for copies
        cache = torch.cuda.get_device_properties(p.q.device).L2_cache_size if p.q.device.type == "cuda" else 0
        return [p], p.q.device.type == "cuda" and p.unique_bytes >= ALONE * cache
    if p.q.device.type != "cuda":
        return [p, *(p.clone() for _ in range(HOST_SETS - 1))], False
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

    A sample of less than `LEAD_S` is led in by as much again that nobody times: who begins where another has written
    pays for what that one left in L2, up to 50 MB on an H100, 16 us of writing.

    Args:
        fns: per implementation one call per buffer set, the one under test first. A sample goes through them in
            order as often as it takes to last `replay_s`; where one rotation takes that long several times over, it is
            cut into parts, and a sample is one of them; several of what is much faster than the one under test.
        iters: samples of each; fewer where they would take longer than `budget_s`, never under `LEAST`. What leads
            them in comes on top.
        warmup: replays before the first sample, fewer where there are few samples.
        cold: what `buffer_sets` said, for the record.
    """
    pool = torch.cuda.graph_pool_handle()
    first = next(iter(fns.values()))
    whole = _replayable(first, replay_s, pool)  # kept until all are captured: the pool dies with its last graph
    # By the first, which is the one under test, the rotation is cut for all.
    parts = max(1, min(len(first), int(whole.rotation_s / replay_s)))
    runs: dict[str, _Run] = {}
    for name, calls in fns.items():
        if whole.refused or any(run.refused for run in runs.values()):
            pool = torch.cuda.graph_pool_handle()  # what refused may have left the other one recording
        runs[name] = whole if calls is first and parts == 1 else _replayable(calls, replay_s, pool, parts)
    del whole
    counts = {name: max(LEAST, min(iters, int(budget_s / run.sample_s))) for name, run in runs.items()}
    # Whoever comes next replays the next part, so that a whole rotation lies between two uses of the same buffers.
    part = itertools.cycle(range(parts))
    for name, run in runs.items():
        for _ in range(max(parts, min(warmup, counts[name] // LEAST + 1))):  # a graph's first launch uploads it
            run.replays[next(part)]()
    torch.cuda.synchronize()
    # Keep the GPU busy until the host is ahead of it: an event recorded on an idle GPU would time the launch.
    torch.cuda._sleep(4_000_000)
    leads = {name: run.replayed if run.sample_s < LEAD_S else 0 for name, run in runs.items()}
    under_test = next(iter(runs.values()))
    samples: dict[str, list[tuple[int, torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for name, skipped in _schedule(counts, leads, {name: run.replayed for name, run in runs.items()}, parts):
        run = runs[name]
        for _ in range(skipped):  # of the others a part may take far longer than a sample
            under_test.replays[next(part)]()
        for _ in range(leads[name]):
            run.replays[next(part)]()
        here = [next(part) for _ in range(run.replayed)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in here:
            run.replays[index]()
        end.record()
        samples[name].append((sum(run.calls[index] for index in here), start, end))
    torch.cuda.synchronize()
    return {
        name: Timing(
            [start.elapsed_time(end) / 1e3 / calls for calls, start, end in samples[name]],
            run.how, cold, len(fns[name]), min(run.calls) * run.replayed, EVENT_TICK_S,
            run.refused,
        )
        for name, run in runs.items()
    }  # fmt: skip


def _schedule(
    counts: dict[str, int], leads: dict[str, int], replayed: dict[str, int], parts: int
) -> Iterator[tuple[str, int]]:
    """Whose samples follow one another, and how many parts are skipped before each.

    As few as bring most of the parts that it has not been timed on, `SKIPPED` at most. Without, where what a round
    replays and the number of parts have a common factor, an implementation would meet the same few for ever.

    Args:
        counts: samples of each. leads, replayed: parts replayed before a sample and in it.
        parts: of the rotation.
    """
    met: dict[str, set[int]] = {name: set() for name in counts}
    at = 0
    for name in in_turn(counts):
        begins = at + leads[name]
        samples = [{(begins + skipped + j) % parts for j in range(replayed[name])} for skipped in range(SKIPPED + 1)]
        new = [len(sample - met[name]) for sample in samples]
        skipped = new.index(max(new))
        met[name] |= samples[skipped]
        at = begins + skipped + replayed[name]
        yield name, skipped


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
    cycles = first.calls[0] // length
    replays = [first.replays[0], *(_capture(s, cycles, torch.cuda.graph_pool_handle()) for s in shares[1:])]
    lanes = [_lane(torch.cuda.current_device(), i) for i in range(streams)]

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
    samples = [_elapsed(together) / first.calls[0] for _ in range(count)]
    return Timing(samples, "graph", cold, length * streams, first.calls[0], EVENT_TICK_S)


@dataclass
class _Run:
    replays: list[Fn]  # one per part of the rotation
    calls: list[int]  # in each
    how: str
    replayed: int  # parts of a sample: a call much faster than the one under test needs several to last
    sample_s: float  # about as long as one takes
    rotation_s: float  # all buffer sets once
    refused: str  # why it was not captured


def _replayable(calls: Sequence[Fn], replay_s: float, pool: Any, parts: int = 1) -> _Run:
    """Capture a rotation over the buffer sets; eager calls where capture is refused.

    In one part it is repeated until it lasts `replay_s`.
    """
    bounds = [i * len(calls) // parts for i in range(parts + 1)]
    pieces = [calls[a:b] for a, b in itertools.pairwise(bounds)]
    for call in calls[:2]:  # compile and allocate before capture
        call()
    torch.cuda.synchronize()
    refused = ""
    try:
        replays: list[Fn] = [_capture(piece, 1, pool) for piece in pieces]
        how = "graph"
    except RuntimeError as error:  # a sync or an allocation inside the call of another's kernel, or of torch's own math
        torch.cuda.synchronize()
        replays, how = [functools.partial(_each, piece) for piece in pieces], "eager"
        refused = str(error).partition("\n")[0]
    replays[0]()
    enough = 0.9 * replay_s
    once = part_s = min(_elapsed(replays[0]) for _ in range(2))
    cycles, once_through = 1, replays[0]
    for _ in range(2 if parts == 1 else 0):  # from an idle GPU `once` is the host's time as much as the calls'
        wanted = min(math.ceil(cycles * replay_s / part_s), MOST_CALLS // len(calls))
        if part_s >= enough or wanted <= cycles:
            break
        cycles = wanted
        replays = [_capture(calls, cycles, pool) if how == "graph" else _repeat(once_through, cycles)]
        replays[0]()
        part_s = min(_elapsed(replays[0]) for _ in range(2))
    replayed = min(parts, math.ceil(enough / part_s))
    calls_each = [cycles * len(piece) for piece in pieces]
    return _Run(replays, calls_each, how, replayed, replayed * part_s, once * parts, refused)


def _each(calls: Sequence[Fn]) -> None:
    for call in calls:
        call()


def _repeat(fn: Fn, times: int) -> Fn:
    def repeated() -> None:
        for _ in range(times):
            fn()

    return repeated


# Always the same stream: graphs captured on a fifth one take 0.2 us longer a launch (H100; docs/notebook/timing.md).
@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The one that all graphs are captured on, as `torch.cuda.graph` has one."""
    return torch.cuda.Stream(device)


@functools.cache
def _lane(device: int, number: int) -> torch.cuda.Stream:
    """One of those that graphs are replayed on side by side."""
    return torch.cuda.Stream(device)


def _capture(calls: Sequence[Fn], cycles: int, pool: Any) -> Fn:
    """`torch.cuda.graph` without its `gc.collect()` and `empty_cache()`, which would take longer than the timing.

    All graphs share a memory pool: they are replayed one after the other and nobody reads their outputs.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # what it frees during capture could be a CUDA object, which capture forbids
    try:
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=pool)
                for _ in range(cycles):
                    for call in calls:
                        call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # says once more that capture failed
                    graph.capture_end()
                _capture_stream.cache_clear()  # it may still be recording
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
