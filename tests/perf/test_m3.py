"""The shapes of MiniMax-M3's sparse attention over its cache, in bf16 and fp8, beside installed public kernels."""

import math
from functools import partial
from typing import Any

import pytest
import torch

import nsa
from nsa.testing.clock import timing
from nsa.testing.clock.measure import Measurement, gate_figures, measure, run_facts
from nsa.testing.contestants.m3 import APART, DENSE, M3, M3_16, arguments
from nsa.testing.contestants.peers import VLLM, installed, peers, vllm, vllm_arguments, xunhao
from nsa.testing.contestants.sdpa import END_TO_END, PACKED
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import m3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.03
ROOM = 40 << 30  # bytes of GPU memory; the ragged batch, its copy and the oracle's packed rows take about 30 GiB
HOST_BUDGET_S, ROUNDS = 0.06, 8  # as in `test_host.py`


@pytest.fixture
def problem(name: str, device: torch.device, request: pytest.FixtureRequest) -> Problem:
    """The tensors of a shape, made for one test because they and their copies may take 30 GiB."""
    shape = m3.NAMED[name]
    torch.cuda.empty_cache()
    if torch.cuda.get_device_properties(device).total_memory < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB of GPU memory")
    if shape.fp8 and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("our kernels take fp8 caches from compute capability 8.9 on")
    seed = (shape.case.seed + request.config.getoption("nsa_seed")) % 2**32
    print(f"{name}: {shape.case.id}, seed {seed}")
    return m3.make(shape, device, seed)


@pytest.mark.parametrize("name", m3.NAMED)
def test_m3(name: str, problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    controls = END_TO_END if problem.case.dist == "decode" else {DENSE.name: DENSE}
    of_ours = [M3_16] if problem.scales else [APART] if problem.case.seqlens else []
    contiguous = [one for one in (peers() | xunhao()).values() if not one.supports(problem.case)]
    beside = [*vllm().values(), *contiguous, *of_ours, *controls.values()]

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        result = measure(problem, M3, beside, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info([], controls) | facts(name, result)

    publish("m3, fp8" if problem.scales else f"m3, {name.split('-')[1].rstrip('0123456789')}", *take(), again=take)


def facts(name: str, result: Measurement) -> dict[str, Any]:
    """Ratios to public kernels and to other calls of ours, and the share of the rate at which this GPU reads memory."""
    return {
        "case": name,  # one in fp8 has the fields of the one in bf16
        "speedup_vs_vllm": result.speedup("vllm"),
        "speedup_vs_fla": result.speedup("fla"),
        "speedup_vs_xunhao": result.speedup("xunhao"),
        "speedup_vs_calls_apart": result.speedup(APART.name),
        "speedup_vs_bf16": result.speedup(M3_16.name),
        "share_of_read": result.problem.unique_bytes / result.ours.median / result.ceilings.read,
    }


@pytest.mark.parametrize("name", ["m3-decode-B8"])
def test_m3_eager(name: str, problem: Problem, device: torch.device, publish, sampling: dict[str, int]) -> None:
    """What the host spends on a decode step that is not captured. Both calls are given their arguments ready made."""
    oracle, out = Oracle.of(problem), torch.empty_like(problem.q)
    rows = Case(4, 64, 64, 64, 16, "few", "bf16").make(device)
    rows.rows  # noqa: B018  (packing is not what is timed)
    calls = {"ours": partial(nsa.selection_attention_with_kvcache, **arguments(problem), out=out)}
    if vllm():
        step = installed(VLLM).minimax_m3_sparse_attn_decode
        calls["vllm"] = partial(step, **vllm_arguments(problem)[0][1], output=out.flatten(0, 1))
    for who, call in calls.items():
        out.fill_(math.nan)
        call()
        assert_parity(out, oracle, who)
    calls[PACKED.name] = partial(PACKED.run, rows)
    how: dict[str, Any] = sampling | {"sync": torch.cuda.synchronize, "budget_s": HOST_BUDGET_S}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.together([timing.time_host(calls, **how) for _ in range(ROUNDS)])
        medians = {who: t.median for who, t in times.items()}
        found = {"case": f"{name}, eager", "impl": M3.name, "us": medians["ours"] * 1e6, "medians": medians}
        found["speedup_vs_vllm"] = medians["vllm"] / medians["ours"] if "vllm" in medians else None
        return times["ours"], run_facts(device) | problem.case.fields() | gate_figures(times, [PACKED.name]) | found

    publish("m3, host", *take(), again=take)
