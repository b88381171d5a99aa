"""Training on a prompt: times of a backward pass and a whole step, of our front door and of comparators.

All are called through autograd, as in a model. The gradients of implementations that select are checked before they are
timed: dQ of some queries, dK and dV of some blocks. Dense attention is torch's own and is not checked. Eager
calls are timed by CUDA events, implementations in turn. The calls last milliseconds, so the host is ahead of the GPU.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.clock.cuda import EVENT_TICK_S, elapsed_s
from nsa.testing.clock.guard import Ceilings, guard
from nsa.testing.clock.measure import why_not
from nsa.testing.clock.timing import LEAST, Fn, Timing, in_turn, once_if_unmeasured
from nsa.testing.contestants import prefill
from nsa.testing.contestants.peers import FLA, call_fla, fla_supports, functions
from nsa.testing.judge.forward import describe, some_queries
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

Attend = Callable[[Problem, Tensor, Tensor, Tensor], Tensor]
Gradients = tuple[Tensor, ...]
WHAT = ("backward", "step")
BLOCKS = 3  # blocks of a large problem whose dK and dV are compared
LEAD_CYCLES = 4_000_000  # 2 ms of an H100, in which the host queues a whole step, so that launches are not timed


@dataclass(frozen=True)
class Trainee:
    """A differentiable implementation.

    attend: `attend(p, q, k, v)` returns `O [B,S,HQ,Dv]`. supports: None for a case that it takes, otherwise the reason
    why not. selects: it computes the selection, not dense attention.
    """

    name: str
    attend: Attend
    supports: Callable[[Case], str | None]
    selects: bool = True


@dataclass(frozen=True)
class Training:
    """Times of backward passes and steps on one problem, and the peak memory of a step beside its inputs."""

    problem: Problem
    times: dict[str, dict[str, Timing]]  # by "backward" or "step", then by name
    peaks: dict[str, int]  # bytes by name; empty on a CPU
    left_out: dict[str, str] = field(default_factory=dict)


@functools.cache
def ours(backend: str = "triton") -> Trainee:
    """The front door."""

    def attend(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = nsa.selection_attention(q, k, v, **p.selection, backend=backend)
        assert isinstance(o, Tensor)
        return o

    return Trainee("ours", attend, lambda case: None)


@functools.cache
def beside() -> tuple[Trainee, ...]:
    """The comparators: dense causal attention by cuDNN and flash, and fla-core if it is installed."""
    found = [
        Trainee(name, partial(prefill.attend, backend), prefill.plain, selects=False)
        for name, backend in prefill.BACKENDS.items()
    ]
    if of_fla := functions(FLA, "ParallelNSAFunction"):

        def fla(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = call_fla(of_fla[0].apply, p, q, k, v, None)
            assert isinstance(o, Tensor)
            return o

        found.append(Trainee("fla", fla, fla_supports))
    return tuple(found)


def train(
    p: Problem,
    trainees: Iterable[Trainee],
    *,
    iters: int,
    warmup: int,
    budget_s: float,
    what: Iterable[str] = WHAT,
    check: bool = True,
) -> Training:
    """Check the gradients of all trainees, then time them. The first is the one under test.

    Args:
        what: which of `WHAT` to time.
        check: False leaves the first trainee unchecked.

    Raises:
        AssertionError: the gradients of the first trainee are wrong, or a time is impossible on this hardware.
        NotImplementedError: the first trainee does not take this case.
    """
    first, *others = trainees
    do = draw_do(p)
    left_out: dict[str, str] = {}
    if check and _verdicts.get((first, describe(p)), "not checked yet") is not None:
        check_gradients(p, do, gradients(first, p, do), first.name)
        _verdicts[first, describe(p)] = None
    kept = [first]
    for one in others:
        key = one, describe(p)
        if key not in _verdicts:
            _verdicts[key] = verdict(one, p, do)
        reason = _verdicts[key]
        if reason is None:
            kept.append(one)
        else:
            left_out[one.name] = reason
    peaks = {one.name: peak_bytes(partial(gradients, one, p, do)) for one in kept} if p.q.is_cuda else {}
    times = {}
    for each in what:
        calls = {one.name: _call(each, one, p, do) for one in kept}
        times[each] = _time(calls, p, iters, warmup, budget_s)
        if p.q.is_cuda:
            from nsa.testing.clock.ceilings import ceilings  # needs Triton and a GPU

            _possible(p, kept, each, times[each], ceilings(p.q.device))
        del calls  # frees the graphs that backward passes keep
    return Training(p, times, peaks, left_out)


def _possible(p: Problem, timed: list[Trainee], what: str, times: dict[str, Timing], limits: Ceilings) -> None:
    """Refuse times that the GPU cannot reach. A backward pass has at least twice the FLOP of a forward pass."""
    for one in timed:
        flops = p.flops if one.selects else prefill.DENSE.flops(p)
        guard(f"{one.name}, {what}", times[one.name], p.unique_bytes, flops * {"backward": 2, "step": 3}[what], limits)


_verdicts: dict[tuple[Trainee, str], str | None] = {}
"""Results of `verdict` in this process, kept because exact gradients take longer than the timing."""


def draw_do(p: Problem) -> Tensor:
    """The gradient of the output, N(0, 1)."""
    g = torch.Generator(p.q.device).manual_seed(p.seed + 1)
    return torch.randn((*p.q.shape[:-1], p.case.Dv), generator=g, device=p.q.device).to(p.q.dtype)


def verdict(one: Trainee, p: Problem, do: Tensor) -> str | None:
    """None if it runs and, if it selects, its gradients are right; otherwise the reason."""

    def check() -> None:
        got = gradients(one, p, do)
        if one.selects:
            check_gradients(p, do, got, one.name)

    return why_not(one.supports(p.case), check)


def _leaves(p: Problem) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]


def gradients(one: Trainee, p: Problem, do: Tensor) -> Gradients:
    """``(dq, dk, dv)`` of ``sum(O * do)``, through autograd."""
    leaves = _leaves(p)
    return torch.autograd.grad(one.attend(p, *leaves), leaves, do)


def _call(what: str, one: Trainee, p: Problem, do: Tensor) -> Fn:
    if what == "step":
        return lambda: gradients(one, p, do)
    leaves = _leaves(p)
    o = one.attend(p, *leaves)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def peak_bytes(call: Fn) -> int:
    """Peak memory of a call on the current GPU, without its inputs and with what it returns."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _time(calls: dict[str, Fn], p: Problem, iters: int, warmup: int, budget_s: float) -> dict[str, Timing]:
    """Time calls in turn: `budget_s` seconds of samples for each, and at least `LEAST` samples."""
    once_if_unmeasured(calls.values())
    clock = event_s if p.q.is_cuda else host_s
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        once = min(clock(call) for _ in range(2))
        counts[name] = max(LEAST, min(iters, int(budget_s / max(once, 1e-9))))
        for _ in range(min(warmup, counts[name] // LEAST)):
            clock(call)
    for name in in_turn(counts):
        samples[name].append(clock(calls[name]))
    how, tick = ("eager", EVENT_TICK_S) if p.q.is_cuda else ("host", 1e-7)
    return {name: Timing(x, how, False, 1, 1, tick).resolved(name) for name, x in samples.items()}


def event_s(call: Fn, lead_cycles: int = LEAD_CYCLES) -> float:
    """Seconds that a call takes on the GPU. lead_cycles: for which the GPU waits, while the host queues the call."""
    torch.cuda._sleep(lead_cycles)
    return elapsed_s(call)


def host_s(call: Fn) -> float:
    """Seconds that a call takes on the host."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# --- are gradients right ----------------------------------------------------------------------------------------------


def check_gradients(p: Problem, do: Tensor, got: Gradients, name: str) -> None:
    """Check dq of some queries, and dk and dv of some blocks, the first block among them, against exact gradients.

    The bound is 8 eps times the largest exact number, because weights and their gradients are rounded to the dtype
    before thousands of them are added. All gradients must be finite.

    Raises:
        AssertionError: the error names the gradient, the place, the difference and the bound.
    """
    dq, dk, dv = got
    for which, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        odd = int(x.isfinite().logical_not().sum())
        assert not odd, f"{name} on {describe(p)}: {which}: {odd} are not finite"
    at = some_queries(p)
    exact = _exact(p, do, at, slice(None))[0]
    _assert_near(dq.index_select(1, at), exact, f"{name} on {describe(p)}: dq of some queries")
    if p.block_indices is None:
        return
    assert p.block_size is not None
    count = -(-p.k.shape[1] // p.block_size)
    # A few later blocks. Earlier ones are read by so many queries that exact gradients would take too long.
    later = sorted({count * i // BLOCKS - 1 for i in range(2, BLOCKS + 1)} | {count // 2})
    for block, head in itertools.product((None, *later), sorted({0, p.case.HKV - 1})):  # None: the first
        keys = slice((block or 0) * p.block_size, ((block or 0) + 1) * p.block_size)
        if block is None:
            exact_of_keys, where = _first_block(p, do, head), f"the first block, KV head {head}"
        else:
            listed: Tensor = p.block_indices[:, :, head] == block
            readers = listed.any(-1).any(0).nonzero()[:, 0]
            if not readers.numel():
                continue
            exact_k, exact_v = (x[:, keys, 0] for x in _exact(p, do, readers, slice(head, head + 1))[1:])
            exact_of_keys, where = (exact_k, exact_v), f"block {block}, KV head {head}, {readers.numel()} queries"
        for which, x, exact in zip(("dk", "dv"), (dk, dv), exact_of_keys, strict=True):
            _assert_near(x[:, keys, head], exact, f"{name} on {describe(p)}: {which} of {where}")


def _first_block(p: Problem, do: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """dK and dV ``[B, block, D | Dv]`` of the first block in fp64. Every query may read it, too many for `_exact`.

    They are computed from O and LSE of our forward pass, which the parity lane checks.
    """
    assert p.block_size is not None and p.block_indices is not None
    o, lse = nsa.selection_attention(p.q, p.k, p.v, **p.selection, return_lse=True)
    heads = slice(head * p.case.H, (head + 1) * p.case.H)
    K, V = (x[:, : p.block_size, head].double() for x in (p.k, p.v))
    dk, dv = torch.zeros_like(K), torch.zeros_like(V)
    key = torch.arange(K.shape[1], device=K.device)
    for some in torch.arange(p.q.shape[1], device=K.device).split(8192):
        q, grad, out = (x[:, some, heads].double() for x in (p.q, do, o))
        times = (p.block_indices[:, some, head] == 0).sum(-1).double()  # [B, s]: how often each row lists the block
        seen = key <= p.positions().view(p.q.shape[:2])[:, some, None] if p.causal else key >= 0
        weights = torch.exp(torch.einsum("bsgd,bkd->bsgk", q, K) * p.softmax_scale - lse[:, some, heads, None].double())
        weights = weights.masked_fill(~seen.expand(*times.shape, -1)[:, :, None], 0.0) * times[..., None, None]
        ds = weights * (torch.einsum("bsgd,bkd->bsgk", grad, V) - (grad * out).sum(-1, keepdim=True))
        dv += torch.einsum("bsgk,bsgd->bkd", weights, grad)
        dk += torch.einsum("bsgk,bsgd->bkd", ds, q) * p.softmax_scale
    return dk, dv


def _exact(p: Problem, do: Tensor, at: Tensor, heads: slice) -> Gradients:
    """Gradients in fp64 of a problem that has only the queries `at` and the KV heads `heads`."""
    seen = p.at(at)
    group = p.case.H
    of_q = slice((heads.start or 0) * group, None if heads.stop is None else heads.stop * group)
    leaves = [x.double().requires_grad_() for x in (seen.q[:, :, of_q], seen.k[:, :, heads], seen.v[:, :, heads])]
    selection: dict[str, Any] = {
        name: x[:, :, heads] if isinstance(x, Tensor) and name in ("ranges", "block_indices") else x
        for name, x in seen.selection.items()
    }
    o = selection_reference(Call.of(*leaves, **selection))[0]
    assert isinstance(o, Tensor)
    return torch.autograd.grad(o, leaves, do.index_select(1, at)[:, :, of_q].double())


def _assert_near(got: Tensor, want: Tensor, where: str) -> None:
    eps = torch.finfo(got.dtype).eps
    bound = max(8 * eps, 1e-4 if got.dtype == torch.float32 else 0.0) * max(float(want.abs().max()), 1e-30)
    error = float((got.double() - want).abs().max())
    assert error <= bound, f"{where}: error {error:.4g}, rounding explains {bound:.4g}"


# --- what to store ----------------------------------------------------------------------------------------------------


def facts(result: Training, what: str) -> dict[str, Any]:
    """Ratios to the comparators, milliseconds and memory, as JSON can hold them."""
    times, case = result.times[what], result.problem.case
    mine = times["ours"]
    ratios = {
        f"speedup_vs_{word}": times[name].median / mine.median if name in times else None
        for word, name in {"cudnn": "dense_cudnn", "flash": "dense_flash", "fla": "fla"}.items()
    }
    peak = result.peaks.get("ours")
    dense = result.peaks.get("dense_flash")
    return ratios | {
        "ms": mine.median * 1e3,
        "ns_per_query": mine.median * 1e9 / (case.B * case.S),
        "medians": {name: timing.median for name, timing in times.items()},
        "intervals": {name: list(timing.interval()) for name, timing in times.items()},
        "peak_bytes": result.peaks,
        "memory_vs_flash": peak / dense if peak and dense else None,
        "left_out": result.left_out,
    }
