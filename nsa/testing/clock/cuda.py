"""Times of calls on a GPU: CUDA graphs are replayed over cold, rotated buffers, on one stream or several.

Implementations to compare are sampled in turn, as on the host (`timing.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nsa.testing.clock.timing import LEAST, Fn, Timing, each, in_turn, once_if_unmeasured
from nsa.testing.matrix.problem import Problem

COLD = 3.0  # between two uses of a buffer, a rotation reads this many times the size of the L2 cache
ALONE = 2.0  # a call that reads this many times the size of L2 finds no inputs there from the call before it
MOST_SETS = 1280
HOST_SETS = 6
REPLAY_S = 1e-3  # the least length of a sample; its events and the start of a replay take microseconds
LEAD_S = 4e-3  # a sample of this length is not affected by what the implementation before it left in L2
MOST_CALLS = 4096  # calls in a sample, at most
SKIPPED = 3  # parts of a rotation that may be skipped to reach one on which an implementation was not timed yet
EVENT_TICK_S = 5e-7  # the resolution of event times, as CUDA documents it


def buffer_sets(p: Problem, memory_share: float = 0.4, hot: bool = False) -> tuple[list[Problem], bool]:
    """Copies of a problem to rotate through, and whether every call finds its inputs outside L2.

    On a GPU a rotation through the copies reads at least `COLD` times the size of L2, if memory allows. There are at
    least two copies, but a large problem (`Case.large`) is not copied. On a CPU there are a few copies, because the
    addresses of tensors can change the times of a whole process by a quarter.

    hot: return the problem alone, so that a GPU reads it from L2 if it fits there.
    """
    on_gpu = p.q.device.type == "cuda"
    if hot or (p.case.large and not on_gpu):
        return [p], False
    if not on_gpu:
        return [p, *(p.clone() for _ in range(HOST_SETS - 1))], False
    cache = torch.cuda.get_device_properties(p.q.device).L2_cache_size
    if p.case.large:  # one call reads more than L2 holds, and copies would not fit into memory
        return [p], p.unique_bytes >= ALONE * cache
    footprint = sum(x.numel() * x.element_size() for x in (p.q, p.k, p.v))
    if p.case.source != "rows":  # SDPA reads a packed copy
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
    afterwards: Callable[[str, Fn], None] | None = None,
) -> dict[str, Timing]:
    """Time calls on the current GPU by replaying CUDA graphs, implementations in turn.

    Before a sample shorter than `LEAD_S`, as many replays run untimed. Otherwise the sample would include the time to
    write back what another implementation left in L2: up to 50 MB on an H100, which takes 16 us.

    Args:
        fns: one call per buffer set for each implementation, the implementation under test first. A sample calls them
            in order, again and again until it lasts `replay_s`. If one rotation takes several times `replay_s`, the
            rotation is cut into parts, and a sample replays one part. Of an implementation that is much faster than
            the one under test, a sample replays several parts.
        iters: samples of each implementation; fewer if they would take longer than `budget_s`, but at least `LEAST`.
            The untimed replays come on top.
        warmup: replays before the first sample, at most.
        cold: whether no call finds its inputs in L2, as `buffer_sets` says. The timing records it.
        afterwards: as for `time_host`. Before it, all parts of the implementation are replayed once more: graphs share
            memory, so the last replays of another implementation may have overwritten its outputs.
    """
    once_if_unmeasured(calls[0] for calls in fns.values())
    pool = torch.cuda.graph_pool_handle()
    first = next(iter(fns.values()))
    whole = _replayable(first, replay_s, pool)  # kept until all are captured: the pool is freed with its last graph
    # Every implementation has as many parts as the one under test needs.
    parts = max(1, min(len(first), int(whole.rotation_s / replay_s)))
    runs: dict[str, _Run] = {}
    for name, calls in fns.items():
        if whole.refused or any(run.refused for run in runs.values()):
            pool = torch.cuda.graph_pool_handle()  # after a failed capture the old pool may still be recording
        runs[name] = whole if calls is first and parts == 1 else _replayable(calls, replay_s, pool, parts)
    del whole
    counts = {name: max(LEAST, min(iters, int(budget_s / run.sample_s))) for name, run in runs.items()}
    # Each replay takes the next part, so that a whole rotation lies between two uses of the same buffers.
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
        for _ in range(skipped):  # the implementation under test replays them, because another may be far slower
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
    if afterwards is not None:
        for name, run in runs.items():
            each(run.replays)
            afterwards(name, functools.partial(each, run.replays))
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
    """The order of the samples, as names of implementations, and how many parts are skipped before each sample.

    The number skipped, at most `SKIPPED`, is the one after which the sample contains the most parts on which its
    implementation was not timed yet. Without skipping, an implementation would always be timed on the same few parts,
    if the parts replayed in a round and the parts of the rotation have a common factor.

    Args:
        counts: samples of each implementation. leads, replayed: parts replayed before a sample, and in a sample.
        parts: parts of the rotation.
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
    """Wall time of one call on each of `streams` CUDA streams, all at the same time.

    Each stream replays its own graph over its own share of the buffer sets. All streams start after one event, and the
    sample ends when the last stream is done. Returns None if the call cannot be captured.

    Args:
        calls: one call per buffer set, as for `time_gpu`.
    """
    shares = [calls[i::streams] or calls for i in range(streams)]
    length = min(map(len, shares))  # each stream does the same work
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
    count = max(LEAST, min(iters, int(budget_s / elapsed_s(together))))
    samples = [elapsed_s(together) / first.calls[0] for _ in range(count)]
    return Timing(samples, "graph", cold, length * streams, first.calls[0], EVENT_TICK_S)


@dataclass
class _Run:
    """How the calls of one implementation are replayed."""

    replays: list[Fn]  # one for each part of the rotation
    calls: list[int]  # calls in each part
    how: str
    replayed: int  # parts in a sample; several if one part is shorter than a sample has to be
    sample_s: float  # estimated seconds of a sample
    rotation_s: float  # seconds of one rotation through all buffer sets
    refused: str  # why the calls were not captured; empty if they were


def _replayable(calls: Sequence[Fn], replay_s: float, pool: Any, parts: int = 1) -> _Run:
    """Capture a rotation over the buffer sets, in `parts` graphs. If capture fails, the calls are replayed eagerly.

    A rotation in one part is repeated within its graph until it lasts `replay_s`.
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
    except RuntimeError as error:  # the call synchronizes or allocates, as some kernels of others and of torch do
        torch.cuda.synchronize()
        replays, how = [functools.partial(each, piece) for piece in pieces], "eager"
        refused = str(error).partition("\n")[0]
    replays[0]()
    enough = 0.9 * replay_s
    once = part_s = min(elapsed_s(replays[0]) for _ in range(2))
    cycles = 1
    for _ in range(2 if parts == 1 else 0):  # twice, because on an idle GPU `once` includes time of the host
        wanted = min(math.ceil(cycles * replay_s / part_s), MOST_CALLS // len(calls))
        if part_s >= enough or wanted <= cycles:
            break
        cycles = wanted
        replays = [_capture(calls, cycles, pool) if how == "graph" else functools.partial(each, [*calls] * cycles)]
        replays[0]()
        part_s = min(elapsed_s(replays[0]) for _ in range(2))
    replayed = min(parts, math.ceil(enough / part_s))
    calls_each = [cycles * len(piece) for piece in pieces]
    return _Run(replays, calls_each, how, replayed, replayed * part_s, once * parts, refused)


# One stream for all graphs: a graph captured on a fifth stream takes 0.2 us longer a launch (docs/notebook/timing.md).
@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs are captured, as in `torch.cuda.graph`."""
    return torch.cuda.Stream(device)


@functools.cache
def _lane(device: int, number: int) -> torch.cuda.Stream:
    """One of the streams on which graphs are replayed at the same time."""
    return torch.cuda.Stream(device)


def _capture(calls: Sequence[Fn], cycles: int, pool: Any) -> Fn:
    """As `torch.cuda.graph`, without its `gc.collect()` and `empty_cache()`, which would take longer than the timing.

    All graphs share a memory pool, because they are replayed one after the other. A caller may hold their outputs.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # the collector could free a CUDA object, which is forbidden during capture
    try:
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool=pool)
                for _ in range(cycles):
                    each(calls)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # reports the failed capture once more
                    graph.capture_end()
                _capture_stream.cache_clear()  # the stream may still be recording
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def elapsed_s(call: Fn) -> float:
    """Seconds between an event before a call and one after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3, 1e-6)
