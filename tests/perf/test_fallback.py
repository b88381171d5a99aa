"""Packed SDPA against what it replaced, a Python loop over rows: 4 KV heads of 16 query heads, 16 spans of 64.

The gate's control is the same work in plain torch: a loop of seconds differs by a fifth from process to process, and
leaves time for three samples only, which is why it is timed by itself. On a GPU both of the gate's calls are timed by
CUDA events: waiting for each call, as one does who compares with the loop, takes a fifth longer in some processes.
"""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.cuda import time_gpu
from nsa.testing.clock.measure import gate_figures, run_facts
from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.sdpa import FROM_SPANS, ROW_LOOP
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import Lane

pytestmark = pytest.mark.benchmark(timer=timing.clock)
SHAPE = Case(16, 128, 128, 1024, 4 * 1024, "prefill", "bf16", HKV=4, S=1024, S_kv=4096)
GAIN = 100.0  # what the fallback owes on a GPU. On a CPU it is near 1, and neighbours decide: there the gate compares


def test_packed_sdpa_against_row_loop(
    lane: Lane, device: torch.device, publish, sampling: dict[str, int], request: pytest.FixtureRequest
) -> None:
    case = SHAPE
    if lane == "interpreter":
        # The loop's cost is the same for each row: on a CPU a sixteenth of them tells the ratio in seconds.
        S = SHAPE.S if request.config.getoption("nsa_full") else SHAPE.S // 16
        case = dataclasses.replace(SHAPE, S=S, N=S * SHAPE.HKV, dtype="fp32")
    problem = case.make(device)
    sync = torch.cuda.synchronize if lane == "gpu" else lambda: None
    oracle = Oracle.of(problem)
    impls = {impl.name: impl for impl in (OURS["sdpa"], OURS["sdpa_unbounded"], FROM_SPANS, ROW_LOOP)}
    for impl in impls.values():
        assert_parity(impl.run(problem), oracle, impl.name)
    fns = {name: lambda impl=impl: (impl.run(problem), sync()) for name, impl in impls.items()}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host({"row_loop": fns["row_loop"]}, budget_s=0.5, least=3, **sampling)
        times |= timing.time_host({name: fn for name, fn in fns.items() if name not in times}, budget_s=0.5, **sampling)
        medians = {name: t.median for name, t in times.items()}
        gain = medians["row_loop"] / medians["sdpa"]
        if lane == "gpu":
            gated = {name: [partial(impls[name].run, problem)] for name in ("sdpa", FROM_SPANS.name)}
            times = time_gpu(gated, budget_s=0.5, **sampling)
        where = f"S={case.S}, 4 KV heads of 16 query heads, 16 spans of 64"
        info = run_facts(device) | case.fields() | gate_figures(times, [FROM_SPANS.name], "sdpa") | {
            "impl": "sdpa", "medians": medians, "speedup_vs_row_loop": gain,
            "note": f"packed SDPA is {gain:.1f}x a per-row loop: {where}",
        }  # fmt: skip
        return times["sdpa"], info

    samples, info = take()
    publish("fallback", samples, info, again=take)
    if lane == "gpu":
        gain = info["speedup_vs_row_loop"]
        assert gain >= GAIN, f"expected packed SDPA at least {GAIN:g}x a per-row loop, got {gain:.2f}x"
