"""Times of calls that choose blocks. Some lists of each call are judged: before the clock starts, and after it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nsa.selecting.request import Request
from nsa.testing.clock import honest
from nsa.testing.clock.cuda import ALONE, COLD, time_gpu
from nsa.testing.clock.guard import guard
from nsa.testing.clock.measure import gate_figures, run_facts, why_not
from nsa.testing.clock.timing import Fn, InvalidMeasurement, Timing
from nsa.testing.contestants.choosing import Comparator, dense
from nsa.testing.contestants.selectors import OURS
from nsa.testing.judge.conduct import untouched
from nsa.testing.judge.selections import diagnose, findings
from nsa.testing.matrix.selecting import Served, as_request, seen

UNWRITTEN = 2**31 - 1
DISPUTED = 3  # tokens
Call = tuple[Tensor, Tensor, dict[str, Any]]  # `q`, `k` and keywords


def work(r: Request) -> tuple[int, int]:
    """Bytes that a call must read or write once, and FLOP of its products, each computed once."""
    keys = seen(r)
    row = r.HK * r.k.shape[-1] * r.k.element_size()
    moved = int(keys.amax(1).sum()) * row + r.q.numel() * r.q.element_size() + math.prod(r.shape) * 4
    return moved, 2 * int(keys.sum()) * r.q.shape[-2] * r.q.shape[-1]


def measure(
    case: Served, device: torch.device, ours: Comparator, others: Iterable[Comparator], controls: Iterable[str], *,
    iters: int, warmup: int, budget_s: float,
) -> tuple[Timing, dict[str, Any]]:  # fmt: skip
    """Judge what everybody chooses, then time them in turn. Returns the time of `ours`, and the facts to store.

    controls: names of `others`, the fastest of which is the gate's control.

    Raises:
        AssertionError: `ours` is wrong, chooses something else when called again, or is faster than the GPU can be.
    """
    from nsa.testing.clock.ceilings import ceilings  # needs Triton and a GPU

    call = case.make(device)
    r = as_request(*call)
    moved, flops = work(r)
    checked: dict[str, Tensor] = {}

    def judge(one: Comparator) -> None:
        out = one.tidy(one.prepare(*call)(), r).clone()
        if not any(torch.equal(out, right) for right in checked.values()):
            _judge(one.name, out, r)
        checked[one.name] = out

    given = {"q": call[0], "k": call[1]} | call[2]
    with untouched(ours.name, given):
        judge(ours)
    left_out: dict[str, str] = {}
    for one in others:
        why = why_not(None if one.takes(r) else "another call", functools.partial(judge, one))
        left_out |= {} if why is None else {one.name: why}
    _judge(ours.name, checked[ours.name], r, [checked[name] for name in checked if name not in left_out])
    timed = [ours, *(one for one in others if one.name not in left_out)]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = 0 if moved >= ALONE * cache else math.ceil(COLD * cache / moved) - 1
    sets = [call, *(_copy(call) for _ in range(copies))]
    rotations = {one.name: [honest.Kept(one.prepare(*each)) for each in sets] for one in timed}
    impls = {one.name: one for one in timed}

    def afterwards(name: str, replay: Fn) -> None:
        if name not in impls:
            return
        one, kept = impls[name], [each for each in rotations[name] if each.last is not None]
        if not all(torch.equal(one.tidy(each.last, r), checked[name]) for each in kept):
            raise InvalidMeasurement(f"invalid measurement: {name} chose other blocks while it was timed")
        if one is ours:
            _again(name, [each.last for each in kept], sets, replay)

    with untouched(ours.name, given):
        times = time_gpu(rotations, iters=iters, warmup=warmup, budget_s=budget_s, cold=True, afterwards=afterwards)
    if ours.name not in OURS:
        honest.unchanged(ours.name)
    limits = ceilings(device)
    for name, timing in times.items():
        guard(name, timing, moved, flops, limits)
        timing.resolved(name)
    mine = times[ours.name]
    medians = {name: t.median for name, t in times.items()}
    info = run_facts(device) | gate_figures(times, controls, ours.name) | {
        "case": case.id, "impl": ours.name, "seed": case.seed, "bytes": moved, "flops": flops, "checked": True,
        "gbps": moved / mine.median / 1e9, "tflops": flops / mine.median / 1e12, "share_of_read": moved / mine.median
        / limits.read, "medians": medians, "intervals": {name: list(t.interval()) for name, t in times.items()},
        "left_out": left_out,
    }  # fmt: skip
    if "vllm" in medians:
        theirs, ratio = medians["vllm"] * 1e6, medians["vllm"] / mine.median
        info["note"] = f"{case.id}: {mine.median * 1e6:,.1f} us, vLLM {theirs:,.1f} us: {ratio:.2f}x as fast"
    return mine, info


def _copy(call: Call) -> Call:
    q, k, how = call
    return q.clone(), k.clone(), {name: x.clone() if isinstance(x, Tensor) else x for name, x in how.items()}


def _judge(name: str, out: Tensor, r: Request, others: Iterable[Tensor] = ()) -> None:
    """Raise AssertionError if lists of a token in the middle or of the last one are wrong, or of the first ones for
    which another right selector chose other blocks.
    """
    tokens = {r.T // 3, r.T - 1}
    for other in others:
        differs = (out != other).view(r.T, -1).any(-1)
        tokens |= set(differs.nonzero()[:DISPUTED, 0].tolist())
    found = findings(out, r, tokens=sorted(tokens))
    if found:
        raise AssertionError(f"{name}: {diagnose(out, r, found)}")


def _again(name: str, outputs: list[Tensor], sets: list[Call], replay: Fn) -> None:
    """Change queries, pages and lengths in place, replay as it was timed, judge the new lists, and restore the inputs.

    Raises:
        InvalidMeasurement: a list is not that of the changed inputs.
    """
    _change(sets, -1)
    for out in outputs:
        out.fill_(UNWRITTEN)
    try:
        replay()
        try:
            _judge(name, outputs[0], as_request(*sets[0]), [dense(*sets[0])])
            assert all(torch.equal(out, outputs[0]) for out in outputs), "equal calls chose different blocks"
        except AssertionError as error:
            text = f"{name} was right before its inputs changed in place; called again: {error}"
            raise InvalidMeasurement(f"invalid measurement: {text}") from None
    finally:
        _change(sets, 1)


def _change(sets: list[Call], by: int) -> None:
    """Negate queries, turn the order of pages round, and add to lengths. Twice, with 1 and -1, is nothing."""
    for q, _, how in sets:
        q.neg_()
        if "block_table" in how:
            how["block_table"].copy_(how["block_table"].flip(-1))
            how["cache_seqlens"].add_(by)
