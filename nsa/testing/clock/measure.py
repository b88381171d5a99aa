"""One measurement: check a contestant and its comparators against the oracle, then time them in turn.

A comparator whose result is wrong is listed as wrong, and is not timed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.failures import caught
from nsa.testing.clock import honest
from nsa.testing.clock.cuda import buffer_sets, time_gpu, time_streams
from nsa.testing.clock.guard import Ceilings, detectable, guard
from nsa.testing.clock.timing import Fn, InvalidMeasurement, Timing, time_host
from nsa.testing.contestants.contract import Contestant
from nsa.testing.judge.conduct import untouched
from nsa.testing.judge.forward import Oracle, Result, assert_parity, largest, mean_abs_error
from nsa.testing.machine import commit, device_name, triton_version
from nsa.testing.matrix.problem import Problem

LATENCY_BUDGET_S = 0.02
HOST_S = 1e-3  # an eager call longer than this measures the kernel, not the host's overhead


@dataclass(frozen=True)
class Measurement:
    """Times of `name` and of its comparators on one problem. `left_out`: why a comparator has no time."""

    problem: Problem
    name: str
    times: dict[str, Timing]
    left_out: dict[str, str]
    mae: float | None  # None: not checked (--nsa-no-check)
    ceilings: Ceilings | None = None  # None on a CPU
    extra: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Timing] = field(default_factory=dict)  # other times: call_latency, packing, concurrency

    @property
    def ours(self) -> Timing:
        """The timing under test."""
        return self.times[self.name]

    def best(self, names: Iterable[str]) -> str | None:
        """The fastest of some comparators, or None if none of them ran."""
        ran = [n for n in names if n in self.times]
        return min(ran, key=lambda n: self.times[n].median) if ran else None

    def speedup(self, name: str | None) -> float | None:
        """How many times as fast as `name` the implementation under test is; None if `name` was not timed."""
        return None if name not in self.times else self.times[name].median / self.ours.median

    def info(self, layouts: Iterable[str], controls: Iterable[str]) -> dict[str, Any]:
        """The facts to store beside the samples, as JSON can hold them. Ratios are of medians of one run.

        Args:
            layouts: the comparators that run SDPA on rows already packed.
            controls: the plain-torch calls that do the same work. The fastest of them is the gate's control.
        """
        p, ours, best = self.problem, self.ours, self.best(layouts)
        bandwidth = p.unique_bytes / ours.median
        info = run_facts(p.q.device) | p.case.fields()
        info |= {
            "impl": self.name,
            "seed": p.seed,
            "bytes": p.unique_bytes,
            "flops": p.flops,
            "gbps": bandwidth / 1e9,
            "share_of_ceiling": bandwidth / self.ceilings.memory if self.ceilings else None,
            "ceiling_gbps": self.ceilings.memory / 1e9 if self.ceilings else None,
            "ceiling_tflops": self.ceilings.matmul / 1e12 if self.ceilings else None,
            "speedup_vs_sdpa_packed": self.speedup("packed"),
            "speedup_vs_sdpa_expanded": self.speedup("expanded_flash"),
            "speedup_vs_sdpa_best": self.speedup(best),
            "sdpa_best": best,
            "speedup_vs_sdpa_end_to_end": self.speedup("gather_gqa"),
            "speedup_vs_fallback": self.speedup("sdpa"),
            "mae": self.mae,
            "intervals": {name: list(t.interval()) for name, t in self.times.items()},
            "medians": {name: t.median for name, t in self.times.items()},
            "left_out": self.left_out,
        }
        return gate_figures(self.times, controls, self.name) | info | self._figures() | self.extra

    def _figures(self) -> dict[str, Any]:
        """`figures`: call latency, packing and concurrency, each with its own interval."""
        figures = {name: t.figure() for name, t in self.figures.items()}
        if "concurrency" in self.figures:
            together = self.figures["concurrency"]
            streams = int(self.extra["streams"])
            figures["concurrency"] |= {"streams": streams, "gain": streams * self.ours.median / together.median}
        limits = self.ceilings
        claim = detectable(self.ours, self.problem.unique_bytes, self.problem.flops, limits) if limits else None
        return {"figures": figures, "checked": self.mae is not None, "share_of_guard": claim}


def run_facts(device: torch.device) -> dict[str, Any]:
    """The machine, versions and commit of a measurement."""
    return {
        "gpu": device_name() if device.type == "cuda" else None,
        "device": device_name(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": commit(),
    }


def verdict(impl: Contestant, oracle: Oracle, outputs: dict[str, Tensor] | None = None) -> str | None:
    """None if the implementation runs and is right; otherwise the reason, in one line. outputs: gets its output."""
    p = oracle.problem

    def check() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns why a backend of SDPA does not take a call
            result = impl.run(p)
        if outputs is not None:
            outputs[impl.name] = _output(result)
        if impl.other is None:
            assert_parity(result, oracle, impl.name)
        else:
            impl.other.check(p, _output(result))

    return why_not(impl.supports(p.case), check)


def _output(result: Result) -> Tensor:
    """A copy of `O`."""
    return (result[0] if isinstance(result, tuple) else result).detach().clone()


def why_not(unsupported: str | None, check: Callable[[], object]) -> str | None:
    """None if `unsupported` is None and `check` raises nothing; otherwise the reason, in one line."""
    if unsupported is not None:
        return f"unsupported: {unsupported}"
    try:
        check()
    except NotImplementedError as e:
        return f"unsupported: {e}"
    except AssertionError as e:
        return f"wrong: {e}"
    except caught() as e:
        return f"cannot run: {type(e).__name__}: {(str(e).splitlines() or ['no message'])[0][:150]}"
    return None


def measure(
    p: Problem,
    ours: Contestant,
    others: Iterable[Contestant],
    *,
    iters: int,
    warmup: int,
    budget_s: float,
    least: int = 10,
    hot: bool = False,
    streams: int = 1,
    check: bool = True,
) -> Measurement:
    """Check `ours` and `others` on `p`, then time them in turn. A large problem (`Case.large`) has no call latency.

    Args:
        hot: use one buffer set, which lies in L2, instead of cold, rotated ones.
        streams: if 2 or more, also measure the wall time of that many CUDA streams at the same time.
        check: False leaves `ours` unchecked, to see which wrong kernels `guard` alone refuses.

    Raises:
        AssertionError: `ours` is wrong, or a time is impossible on this hardware (`InvalidMeasurement`).
        NotImplementedError: `ours` does not take this case.
    """
    oracle = Oracle.of(p)
    result, launched = ours.run_counted(p)
    mae, outputs, limit = None, {ours.name: _output(result)}, 2 * oracle.bound
    if check:
        assert_parity(result, oracle, ours.name)
        mae = mean_abs_error(result[0] if isinstance(result, tuple) else result, oracle)
    reasons = {impl.name: verdict(impl, oracle, outputs) for impl in others}
    impls = [ours, *(impl for impl in others if reasons[impl.name] is None)]
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    del oracle, result  # to free memory for the buffer sets
    sets, cold = buffer_sets(p, hot=hot)
    rotations = {impl.name: [honest.Kept(partial(impl.run, s)) for s in sets] for impl in impls}
    sampling: dict[str, Any] = {"iters": iters, "warmup": warmup, "budget_s": budget_s}
    if check:
        sampling["afterwards"] = partial(_read, {impl.name: impl for impl in impls}, rotations, sets, outputs, limit)
    with untouched(ours.name, p) if check else contextlib.nullcontext():
        if p.q.device.type == "cuda":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rotated = time_gpu(rotations | _packing(sets), **sampling, cold=cold)
        else:
            rotated = time_host(rotations, **sampling, least=least)
    for kept in (kept for rotation in rotations.values() for kept in rotation):
        kept.last = None  # frees the memory of graphs
    if check and ours.contract is not None:
        honest.unchanged(ours.name)
    extra: dict[str, Any] = {"launched": dict(launched)}
    if p.q.device.type != "cuda":
        return Measurement(p, ours.name, rotated, left_out, mae, extra=extra)

    from nsa.testing.clock.ceilings import ceilings  # needs Triton and a GPU

    sampling = {"iters": iters, "warmup": warmup}
    calls = [each.call for each in rotations[ours.name]]
    figures = {} if "packing" not in rotated else {"packing": rotated.pop("packing")}
    if not p.case.large:  # calls of a large problem in one sample would keep the GPU busy for seconds
        figures |= time_host(
            {"call_latency": calls[0]}, **sampling, budget_s=LATENCY_BUDGET_S, sync=torch.cuda.synchronize
        )
    if streams > 1:
        together = time_streams(calls, streams, **sampling, budget_s=budget_s, cold=cold)
        figures |= {} if together is None else {"concurrency": together}
    # The time of an eager call includes the host's overhead. Only a contestant of `--nsa-impl`, and slow comparators of
    # a large problem, may be timed eagerly.
    for name in [name for name, timing in rotated.items() if timing.how != "graph"]:
        if name == ours.name and launched:  # our own kernel, which must be capturable
            raise InvalidMeasurement(f"invalid measurement: {name} was not captured: {rotated[name].refused}")
        if name != ours.name and not (p.case.large and rotated[name].median > HOST_S):
            left_out[name] = f"not captured: {rotated.pop(name).refused}"
    limits = ceilings(p.q.device)
    work = {impl.name: impl.other.flops(p) for impl in impls if impl.other is not None}
    for name, timing in rotated.items():
        guard(name, timing, p.unique_bytes, work.get(name, p.flops), limits)
        timing.resolved(name)
    if "concurrency" in figures:
        name, many = f"{ours.name} on {streams} streams", figures["concurrency"]
        guard(name, many, streams * p.unique_bytes, streams * p.flops, limits)
    return Measurement(p, ours.name, rotated, left_out, mae, limits, extra | {"streams": streams}, figures)


def _read(
    impls: dict[str, Contestant],
    rotations: dict[str, list[honest.Kept]],
    sets: list[Problem],
    outputs: dict[str, Tensor],
    limit: float,
    name: str,
    replay: Fn,
) -> None:
    """Compare what an implementation, the first of which is under test, computed while it was timed.

    Args:
        outputs: the checked outputs. limit: the largest absolute error of the implementation under test.
        name, replay: as `time_gpu` passes them to `afterwards`.

    Raises:
        AssertionError: a timed output is wrong.
    """
    kept = [each for each in rotations.get(name, ()) if each.last is not None]
    if not kept:  # not one of the implementations, or not called
        return
    impl, want = impls[name], outputs[name]
    if impl.other is not None:  # it may leave parts of its output as they are
        return impl.other.check(sets[0], kept[0].output)
    honest.same(name, kept, want, max(limit, 16 * torch.finfo(want.dtype).eps * largest(want)))
    if name == next(iter(impls)):
        honest.again(name, rotations[name], sets, impl.contract, limit, replay)


def _packing(sets: list[Problem]) -> dict[str, list[Any]]:
    """Calls that only pack rows from cache and spans: a figure of its own, no part of a kernel's time."""
    p = sets[0]
    if p.case.large or p.case.source in ("rows", "varlen") or p.cu_seqlens is not None or p.q_positions is not None:
        return {}
    L = p.key_index[0].shape[1]
    return {"packing": [partial(nsa.pack_rows, s.k, s.v, s.ranges, max_selected=L) for s in sets]}


def gate_figures(times: dict[str, Timing], controls: Iterable[str], ours: str = "ours") -> dict[str, Any]:
    """The fields that the gate reads: the control, and the samples of every call that may be the control.

    Args:
        controls: names of those calls. The fastest that was timed is the control.
    """
    mine, others = times[ours], {name: times[name] for name in controls if name in times}
    control = min(others, key=lambda name: others[name].median, default=None)
    fields: dict[str, Any] = {"control": control, "control_median": None, "ratio_to_control": None}
    if control is not None:
        fields["control_median"] = others[control].median
        fields["ratio_to_control"] = mine.median / others[control].median
        fields["control_samples"] = {name: [_short(x) for x in t.samples] for name, t in others.items()}
    return fields | {
        "ci95": list(mine.interval()),
        "timing": {"sets": mine.sets} | mine.manner(),
    }


def _short(seconds: float) -> float:
    """Rounded to seven digits, to keep files small: they hold thousands of samples."""
    return float(f"{seconds:.7g}")
