"""Whether what was timed is what was right: outputs are read after the clock, and inputs change in place.

A kernel may be right when it is checked and do less when it is timed. So every timed call keeps its last output. After
the last sample these outputs are compared with the checked one. Then the inputs of the contestant change in place, its
outputs are filled with NaN, every buffer set is replayed once more as it was timed, and some rows are compared with
fp64. The inputs must stay as they are, and so must torch, the suite and the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.testing.clock.timing import Fn, InvalidMeasurement
from nsa.testing.contestants.contract import Contract
from nsa.testing.contestants.fit import arranged
from nsa.testing.judge.forward import fp64
from nsa.testing.matrix.caches import Cache
from nsa.testing.matrix.problem import Problem

EXACT_BYTES = 1 << 26  # of the keys and values in fp64 of the rows that are compared
EXACT_TOKENS = 16  # whose rows are compared, at most
LATER_S = 0.1  # a result that is right after this time, and was not when the clock stopped, came too late
LOOKS, LOOK_S, BUSY = 10, 1e-3, 0.5  # threads that work at more than this share of so many looks, so long apart
LEFT_S = 1e-3  # work that the GPU still does so long after the stream of the clock is done
IDLE_SYNCS = 4  # waits for an idle GPU, which take long where other processes use it
FLAGS: dict[str, Callable[[], object]] = {
    "torch.get_num_threads": torch.get_num_threads,
    "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
}
"""What decides how fast the control is."""


class Kept:
    """A call that keeps its last output. Captured in a graph, that is the output of the graph's last such call."""

    def __init__(self, call: Fn) -> None:
        self.call = call
        self.last: Any = None

    def __call__(self) -> object:
        self.last = self.call()
        return self.last

    @property
    def output(self) -> Tensor:
        """`O` of the last call."""
        output: Tensor = self.last[0] if isinstance(self.last, tuple) else self.last
        return output.detach()


# --- the contestant's surroundings -----------------------------------------------------------------------------------

_sealed: dict[str, dict[str, object]] = {}
_flags: dict[str, object] = {}


def seal() -> None:
    """Remember the functions of torch and of the suite, and the flags. Called before a contestant is imported."""
    if _sealed:
        return
    ours = [name for name in sys.modules if name.startswith("nsa.testing.")]
    for name in ("torch", "torch.nn.functional", "torch.cuda", "time", "statistics", *ours):
        names = vars(sys.modules[name])
        _sealed[name] = {key: value for key, value in names.items() if callable(value) and not key.startswith("__")}
    _flags.update((name, read()) for name, read in FLAGS.items())


def _of_torch(function: object) -> bool:
    """Whether a function is torch's own: its compiler replaces some when it is imported."""
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


def patched() -> str:
    """A function of torch or of the suite that is another one than when `seal` was called; empty if none is."""
    for module, functions in _sealed.items():
        now = vars(sys.modules[module])
        for key, value in functions.items():
            if now.get(key) is not value and not _of_torch(now.get(key)):
                return f"{module}.{key}"
    return ""


def unchanged(name: str) -> None:
    """Check that torch, the suite and the machine are as they were when `seal` was called.

    Raises:
        InvalidMeasurement: a function was patched, a flag was set, or threads or the GPU are at work.
    """
    if patch := patched():
        raise InvalidMeasurement(f"invalid measurement: {name} patched {patch}")
    for flag, value in _flags.items():
        if FLAGS[flag]() != value:
            text = f"{flag} was {value} and is {FLAGS[flag]()}"
            raise InvalidMeasurement(f"invalid measurement: {name} changed how fast its control is: {text}")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
        waited, *idle = (_synchronized() for _ in range(1 + IDLE_SYNCS))
        if waited > LEFT_S + IDLE_SYNCS * max(idle):
            raise InvalidMeasurement(f"invalid measurement: {name} left work on a stream that the clock does not see")
    if sum(_threads_work() for _ in range(LOOKS)) > BUSY * LOOKS:
        raise InvalidMeasurement(f"invalid measurement: {name} slows its control down: its threads never rest")


def _threads_work() -> bool:
    """Whether another thread of Python runs, or could run if a core were free, a moment from now."""
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        return False
    time.sleep(LOOK_S)
    for number in others:
        try:
            text = Path(f"/proc/self/task/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the thread has ended, or the system has no such files
            continue
        if text.rpartition(")")[2].split()[0] == "R":
            return True
    return False


def _synchronized() -> float:
    """Seconds of waiting until the GPU has nothing to do."""
    began = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - began


# --- outputs ----------------------------------------------------------------------------------------------------------


def same(name: str, kept: Sequence[Kept], want: Tensor, limit: float) -> None:
    """Compare the outputs of the last timed calls with the checked one, which all buffer sets have.

    Raises:
        InvalidMeasurement: an output is another one.
    """
    shots = torch.stack([each.output for each in kept])  # queued at once: what is written later is not in it
    if _error(shots, want) > limit:
        before = f"{name} was right before the clock started"
        _in_time(name, kept, lambda outputs: _error(outputs, want) <= limit)
        _complete(shots, before)
        _equal(shots, want, limit, before)


def _in_time(name: str, kept: Sequence[Kept], right: Callable[[Tensor], bool]) -> None:
    """Raise InvalidMeasurement if outputs that were wrong when the clock stopped are right a moment later."""
    if torch.cuda.is_available() and kept[0].output.is_cuda:
        torch.cuda.synchronize()
    time.sleep(LATER_S)
    if right(torch.stack([each.output for each in kept])):
        raise InvalidMeasurement(f"invalid measurement: {name} filled its result after the clock had stopped")


def _complete(shots: Tensor, before: str) -> None:
    """Raise InvalidMeasurement if rows of outputs `[sets, ..., Dv]` are NaN. before: the beginning of its text."""
    missing = shots.isnan().any(-1)
    count, rows = int(missing.sum()), missing.numel()
    if count:
        what = "did nothing" if count == rows else f"left out {count} of {rows} rows"
        raise InvalidMeasurement(f"invalid measurement: {before}; called again, it {what}")


def _equal(shots: Tensor, want: Tensor, limit: float, before: str) -> None:
    """Raise InvalidMeasurement if outputs `[sets, ...]` differ from `want` by more than `limit`."""
    error = _error(shots, want)
    if not error <= limit:
        text = f"{before}; called again, it is wrong by {error:.3g} where {limit:.3g} is allowed"
        raise InvalidMeasurement(f"invalid measurement: {text}")


def _error(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().nan_to_num(math.inf).max()) if x.numel() else 0.0


def again(
    name: str, kept: Sequence[Kept], sets: Sequence[Problem], contract: Contract | None, limit: float, replay: Fn
) -> None:
    """Change the inputs of all buffer sets in place, replay them, compare some rows with fp64, and restore the inputs.

    Args:
        kept: the calls of the buffer sets `sets`, which hold equal inputs.
        limit: the largest absolute error allowed.
        replay: calls every buffer set once, as it was timed.

    Raises:
        InvalidMeasurement: the outputs are not those of the changed inputs.
    """
    before = f"{name} was right before its inputs changed in place"
    old = next(each.output.clone() for each in kept if each.last is not None)
    restore = change(sets, contract)
    try:
        torch._foreach_add_([each.output for each in kept if each.last is not None], math.nan)
        replay()
        shots = torch.stack([each.output for each in kept])
        few, pick = some(shortened(sets[0]))
        want = fp64(few)[0]

        def chosen(outputs: Tensor) -> Tensor:
            return torch.stack([pick(x).double() for x in outputs])

        got = chosen(shots)
        if _error(got, want) <= limit:
            return _complete(shots, before)
        if _error(got, pick(old).double()) <= limit:
            raise InvalidMeasurement(f"invalid measurement: {before}; called again, it returned its earlier result")
        _in_time(name, kept, lambda outputs: _error(chosen(outputs), want) <= limit)
        _complete(shots, before)
        _equal(got, want, limit, before)
    finally:
        restore()


# --- inputs -----------------------------------------------------------------------------------------------------------


def _caches(p: Problem) -> list[Cache]:
    return [made for made in p.__dict__.get("_derived", {}).values() if isinstance(made, Cache)]


def change(sets: Sequence[Problem], contract: Contract | None) -> Fn:
    """Change queries, values, selections and lengths in place. Returns a function that restores them.

    The first number of each tensor stays, by which a kernel might recognize an input. Values of caches stay. Each row
    loses the first block or span that it lists, as far as the contract allows. Caches lose their last key.
    """
    undo: list[Fn] = []

    def put(x: Tensor | None, value: Tensor | None) -> None:
        if x is not None and value is not None:
            for axis in range(x.dim()):  # all KV heads may share the memory of one list
                if x.stride(axis) == 0:
                    x, value = x.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
            undo.append(functools.partial(x.copy_, x.clone()))
            x.copy_(value)

    p = sets[0]
    if p.case.source in ("ranges", "blocks") and p.ranges.numel():
        chosen = p.chosen.clone()
        chosen[(..., 0, slice(None)) if p.block_indices is None else (..., 0)] = 0 if p.block_indices is None else -1
        other = arranged(p.choosing(chosen), contract)
        put(p.block_indices, other.block_indices)  # all buffer sets share a selection
        put(p.ranges, other.ranges)
    negated = [x for one in sets for x in (one.q, None if _caches(one) else one.v) if x is not None and x.numel()]
    first = [x[(0,) * x.dim()] for x in negated]

    def negate() -> None:  # a thousand buffer sets in a few launches
        torch._foreach_neg_(negated)
        torch._foreach_neg_(first)

    if negated:
        negate()
        undo.append(negate)
    lengths = [cache.cache_seqlens for one in sets if shortened(one) is not one for cache in _caches(one)]
    if lengths:
        torch._foreach_sub_(lengths, 1)
        undo.append(functools.partial(torch._foreach_add_, lengths, 1))
    return lambda: [back() for back in reversed(undo)]


def shortened(p: Problem) -> Problem:
    """The problem with one key less if caches hold its keys, as `change` leaves them. Otherwise the problem, anew."""
    if not _caches(p) or p.cu_seqlens is not None or p.k.shape[1] <= p.q.shape[1]:
        return p
    return dataclasses.replace(p, k=p.k[:, :-1], v=p.v[:, :-1])


def some(p: Problem) -> tuple[Problem, Callable[[Tensor], Tensor]]:
    """A part of a problem for which fp64 takes little memory, and what picks its rows of an output."""
    p = dataclasses.replace(p)  # what was derived from the old inputs is forgotten
    HKV, width = p.ranges.shape[-3], p.case.L * (p.case.D + p.case.Dv) * 8
    count = max(2, min(EXACT_TOKENS, EXACT_BYTES // max(1, HKV * width)))
    if p.cu_seqlens is not None:
        at = _spread(p.q.shape[0], count, p.q.device)
        return p.at(at), lambda x: x[at]
    entries = slice(None, None, max(1, -(-p.q.shape[0] // count)))
    blocks, positions = (None if x is None else x[entries] for x in (p.block_indices, p.q_positions))
    one = dataclasses.replace(
        p, q=p.q[entries], k=p.k[entries], v=p.v[entries], ranges=p.ranges[entries], block_indices=blocks,
        q_positions=positions,
    )  # fmt: skip
    at = _spread(p.q.shape[1], max(2, count // max(1, one.q.shape[0])), p.q.device)
    return one.at(at), lambda x: x[entries][:, at]


def _spread(length: int, count: int, device: torch.device) -> Tensor:
    """At most `count` numbers below `length`, the first and the last among them."""
    numbers: Tensor = torch.linspace(0, max(0, length - 1), min(length, count)).long().unique().to(device)
    return numbers
