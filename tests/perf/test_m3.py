"""The shapes of MiniMax-M3's sparse attention over its cache, in bf16 and fp8, beside vLLM's kernels if installed."""

from functools import partial
from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.measure import Measurement, gate_figures, measure, run_facts
from nsa.testing.contestants.m3 import APART, DENSE, M3, M3_16
from nsa.testing.contestants.peers import vllm
from nsa.testing.contestants.sdpa import END_TO_END, PACKED
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import m3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.03
HOST_BUDGET_S, ROUNDS = 0.06, 8  # as in `test_host.py`


@pytest.fixture
def problem(name: str, device: torch.device, request: pytest.FixtureRequest) -> Problem:
    """The tensors of a shape, made for one test because they and their copies may take 20 GiB."""
    torch.cuda.empty_cache()
    shape = m3.NAMED[name]
    seed = (shape.case.seed + request.config.getoption("nsa_seed")) % 2**32
    print(f"{name}: {shape.case.id}, seed {seed}")
    return m3.make(shape, device, seed)


@pytest.mark.parametrize("name", m3.NAMED)
def test_m3(name: str, problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    controls = END_TO_END if problem.case.dist == "decode" else {DENSE.name: DENSE}
    of_ours = [M3_16] if problem.scales else [APART] if problem.case.seqlens else []
    beside = [*vllm().values(), *of_ours, *controls.values()]

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        result = measure(problem, M3, beside, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info([], controls) | facts(name, result)

    publish("m3, fp8" if problem.scales else f"m3, {name.split('-')[1].rstrip('0123456789')}", *take(), again=take)


def facts(name: str, result: Measurement) -> dict[str, Any]:
    """Ratios to vLLM and to other calls of ours, and the share of the rate at which this GPU reads memory."""
    found = {"shape": name} | {
        "speedup_vs_vllm": result.speedup("vllm"),
        "speedup_vs_calls_apart": result.speedup(APART.name),
        "speedup_vs_bf16": result.speedup(M3_16.name),
        "share_of_read": result.problem.unique_bytes / result.ours.median / result.ceilings.read,
    }
    words = [f"{name}: {result.ours.median * 1e6:.1f} us", f"{found['share_of_read']:.1%} of the read ceiling"]
    named = {"vllm": "vLLM", APART.name: "two calls", M3_16.name: "bf16"}
    words += [f"{result.speedup(x):.2f}x {word}" for x, word in named.items() if x in result.times]
    return found | {"note": ", ".join(words)}


@pytest.mark.parametrize("name", ["m3-decode-B8"])
def test_eager_call(name: str, problem: Problem, device: torch.device, publish, sampling: dict[str, int]) -> None:
    """What the host spends on a decode step that is not captured."""
    oracle = Oracle.of(problem)
    impls = {"ours": M3} | vllm()
    for impl in impls.values():
        assert_parity(impl.run(problem), oracle, impl.name)
    rows = Case(4, 64, 64, 64, 16, "few", "bf16").make(device)
    rows.rows  # noqa: B018  (packing is not what is timed)
    calls = {who: partial(impl.run, problem) for who, impl in impls.items()} | {PACKED.name: partial(PACKED.run, rows)}
    how: dict[str, Any] = sampling | {"sync": torch.cuda.synchronize, "budget_s": HOST_BUDGET_S}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.together([timing.time_host(calls, **how) for _ in range(ROUNDS)])
        us = {who: t.median * 1e6 for who, t in times.items()}
        found = {"shape": name, "impl": M3.name, "us": us["ours"], "medians": {who: x / 1e6 for who, x in us.items()}}
        found["speedup_vs_vllm"] = us["vllm"] / us["ours"] if "vllm" in us else None
        found["note"] = f"{name}, eager: " + ", ".join(f"{who} {x:.1f} us" for who, x in us.items())
        return times["ours"], run_facts(device) | problem.case.fields() | gate_figures(times, [PACKED.name]) | found

    publish("m3, host", *take(), again=take)
