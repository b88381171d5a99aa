"""One measurement: is everybody right, then how long does each take, then what that means.

Ours, SDPA in every layout and third parties are checked against the oracle before they are timed: a fast wrong answer
is listed as wrong, not as fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nsa.testing.compare import Oracle, assert_parity, mean_abs_error
from nsa.testing.impls import Impl
from nsa.testing.machine import commit, device_name, triton_version
from nsa.testing.problem import Problem
from nsa.testing.timing import Timing, buffer_sets, time_gpu, time_host


@dataclass(frozen=True)
class Measurement:
    """Times of `name` and of its comparators on one problem; `left_out` says why a comparator has none."""

    problem: Problem
    name: str
    times: dict[str, Timing]
    left_out: dict[str, str]
    mae: float
    ceilings: Any = None  # roofline.Ceilings, on a GPU
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Timing:
        """The timing under test."""
        return self.times[self.name]

    def best(self, names: Iterable[str]) -> str | None:
        """The fastest of some comparators, or None if none of them ran."""
        ran = [n for n in names if n in self.times]
        return min(ran, key=lambda n: self.times[n].median) if ran else None

    def speedup(self, name: str | None) -> float | None:
        """How many times faster than `name` the implementation under test is."""
        return None if name not in self.times else self.times[name].median / self.ours.median

    def info(self, layouts: Iterable[str], control: str | None) -> dict[str, Any]:
        """Everything worth storing beside the samples, as JSON can hold it. Ratios are of medians of one run.

        Args:
            layouts: the comparators that do SDPA on rows already packed.
            control: the plain-torch call that does the same work (design.md, Gate).
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
            "speedup_vs_sdpa_packed": self.speedup("packed"),
            "speedup_vs_sdpa_expanded": self.speedup("expanded_flash"),
            "speedup_vs_sdpa_best": self.speedup(best),
            "sdpa_best": best,
            "speedup_vs_sdpa_end_to_end": self.speedup("gather_gqa"),
            "speedup_vs_fallback": self.speedup("sdpa"),
            "mae": self.mae,
            "control": control,
            "control_median": self.times[control].median if control in self.times else None,
            "ratio_to_control": ours.median / self.times[control].median if control in self.times else None,
            "ci95": list(ours.interval()),
            "intervals": {name: list(t.interval()) for name, t in self.times.items()},
            "timing": {"how": ours.how, "cold": ours.cold, "sets": ours.sets, "calls_per_sample": ours.calls},
            "medians": {name: t.median for name, t in self.times.items()},
            "left_out": self.left_out,
        }
        return info | self.extra


def run_facts(device: torch.device) -> dict[str, Any]:
    """Where and of what a figure was taken."""
    return {
        "gpu": device_name() if device.type == "cuda" else None,
        "device": device_name(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": commit(),
    }


def verdict(impl: Impl, oracle: Oracle) -> str | None:
    """None if the implementation runs and is right, else why not, in a line."""
    p = oracle.problem
    if (reason := impl.supports(p.case)) is not None:
        return f"unsupported: {reason}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where torch says why a backend of SDPA refuses
            assert_parity(impl.run(p), oracle, impl.name)
    except NotImplementedError as e:
        return f"unsupported: {e}"
    except AssertionError as e:
        return f"wrong: {e}"
    except RuntimeError as e:
        return f"cannot run: {str(e).splitlines()[0][:150]}"
    return None


def measure(
    p: Problem, ours: Impl, others: Iterable[Impl], *, iters: int, warmup: int, budget_s: float, least: int = 10
) -> Measurement:
    """Check, then time `ours` and `others` on `p`, in turn.

    Raises:
        AssertionError: `ours` is wrong, or a time is impossible on this hardware (`InvalidMeasurement`).
        NotImplementedError: `ours`, a third party's, does not do this case.
    """
    oracle = Oracle.of(p)
    result = ours.run(p)
    assert_parity(result, oracle, ours.name)
    mae = mean_abs_error(result[0] if isinstance(result, tuple) else result, oracle)
    reasons = {impl.name: verdict(impl, oracle) for impl in others}
    impls = [ours, *(impl for impl in others if reasons[impl.name] is None)]
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    del oracle, result  # memory for the buffer sets
    if p.q.device.type != "cuda":
        fns = {impl.name: partial(impl.run, p) for impl in impls}
        times = time_host(fns, iters=iters, warmup=warmup, budget_s=budget_s, least=least)
        return Measurement(p, ours.name, times, left_out, mae)

    from nsa.testing.roofline import ceilings, guard  # needs Triton and a GPU

    sets, cold = buffer_sets(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rotations = {impl.name: [partial(impl.run, s) for s in sets] for impl in impls}
        times = time_gpu(rotations, iters=iters, warmup=warmup, budget_s=budget_s, cold=cold)
    limits = ceilings(p.q.device)
    for name, timing in times.items():
        guard(name, timing, p.unique_bytes, p.flops, limits)
    return Measurement(p, ours.name, times, left_out, mae, limits)
