"""The shapes of Qwen's sparse attention over its cache, in bf16 and fp8, beside vLLM's kernel; and its gradients."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import timing, training
from nsa.testing.clock.measure import gate_figures, measure, run_facts
from nsa.testing.contestants import prefill as dense
from nsa.testing.contestants.m3 import DENSE, M3
from nsa.testing.contestants.peers import vllm_qsa
from nsa.testing.contestants.sdpa import END_TO_END
from nsa.testing.matrix import m3, qsa
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S, TRAINING_BUDGET_S = 0.03, 0.6
ROOM = 40 << 30  # bytes of GPU memory


@pytest.fixture
def problem(name: str, device: torch.device, request: pytest.FixtureRequest) -> Problem:
    """The tensors of a shape, made for one test because they and their copies may take 20 GiB."""
    shape = qsa.NAMED[name] if name in qsa.NAMED else m3.Shape(qsa.TRAINED[name])
    torch.cuda.empty_cache()
    if torch.cuda.get_device_properties(device).total_memory < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GiB of GPU memory")
    if shape.fp8 and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("our kernels take fp8 caches from compute capability 8.9 on")
    seed = (shape.case.seed + request.config.getoption("nsa_seed")) % 2**32
    print(f"{name}: {shape.case.id}, seed {seed}")
    return qsa.make(shape, device, seed)


@pytest.mark.parametrize("name", qsa.NAMED)
def test_qsa(name: str, problem: Problem, publish, machine_sampling: dict[str, Any]) -> None:
    controls = END_TO_END if problem.case.dist == "decode" else {DENSE.name: DENSE}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        beside = [*vllm_qsa().values(), *controls.values()]
        result = measure(problem, M3, beside, budget_s=BUDGET_S, **machine_sampling)
        facts = {
            "case": name,  # one in fp8 has the fields of one in bf16
            "speedup_vs_vllm": result.speedup("vllm"),
            "share_of_read": problem.unique_bytes / result.ours.median / result.ceilings.read,
        }
        return result.ours, result.info([], controls) | facts

    publish("qsa, fp8" if problem.scales else f"qsa, {name.split('-')[1].rstrip('0123456789')}", *take(), again=take)


@pytest.mark.parametrize("what", training.WHAT)
@pytest.mark.parametrize("name", qsa.TRAINED)
def test_qsa_training(name: str, what: str, problem: Problem, publish, sampling: dict[str, int]) -> None:
    """One list for both KV heads, beside dense attention."""

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        everybody = training.ours(), *training.beside()
        result = training.train(problem, everybody, budget_s=TRAINING_BUDGET_S, what=(what,), **sampling)
        figures = gate_figures(result.times[what], dense.BACKENDS)
        assert figures["control"] is not None, f"dense attention did not run: {result.left_out}"
        info = run_facts(problem.q.device) | problem.case.fields() | figures | {"case": name}
        return result.times[what]["ours"], info | training.facts(result, what)

    publish(f"qsa, training: {what}", *take(), again=take)
