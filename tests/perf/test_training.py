"""Training on the prompts of core: backward pass and step of our front door beside dense attention and fla-core."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import timing, training
from nsa.testing.clock.measure import gate_figures, run_facts
from nsa.testing.contestants import prefill as dense
from nsa.testing.matrix.cases import prefill
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.6  # of samples for each: 10 of dense attention at 0.3 s a call
MEMORY_VS_FLASH = 1.5  # bytes of a step at 32,768 tokens, 64/4, over those of flash attention on the same tensors


@pytest.mark.parametrize("what", training.WHAT)
def test_training(what: str, problem: Problem, publish, sampling: dict[str, int]) -> None:
    from nsa.testing.clock.ceilings import ceilings  # needs Triton and a GPU

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        everybody = training.ours(), *training.beside()
        result = training.train(problem, everybody, budget_s=BUDGET_S, what=(what,), **sampling)
        times = result.times[what]
        figures = gate_figures(times, dense.BACKENDS)
        assert figures["control"] is not None, f"dense attention did not run: {result.left_out}"
        info = run_facts(problem.q.device) | problem.case.fields() | figures
        info["ceiling_gbps"] = ceilings(problem.q.device).memory / 1e9
        return times["ours"], info | training.facts(result, what)

    publish({"backward": "backward", "step": "forward and backward"}[what], *take(), again=take)


def test_memory_of_a_step(device: torch.device) -> None:
    """Beside inputs, outputs and gradients included, of a prompt of 32,768 tokens."""
    problem = prefill(32_768, 64, 4).make(device)
    flash = next(one for one in training.beside() if one.name == "dense_flash")
    result = training.train(problem, [training.ours(), flash], iters=1, warmup=0, budget_s=0.0)
    ratio = result.peaks["ours"] / result.peaks["dense_flash"]
    assert ratio <= MEMORY_VS_FLASH, f"peaks {result.peaks}"
