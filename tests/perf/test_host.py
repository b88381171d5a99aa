"""What the host spends on an eager call while the GPU works behind it: most of a decode step that is not captured."""

from typing import Any

import pytest
import torch

from nsa.testing import timing
from nsa.testing.cases import Case
from nsa.testing.impls import OURS, PACKED
from nsa.testing.measure import gate_figures, run_facts

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
CASES = {
    "dense_group": Case(4, 64, 64, 64, 16, "few", "bf16"),
    "varlen_group": Case(4, 64, 64, 64, 16, "few", "bf16", source="varlen"),
    "ranges": Case(4, 64, 64, 64, 16, "many", "bf16"),
    "blocks": Case(4, 64, 64, 512, 16, "decode", "bf16"),
    "sdpa": Case(4, 64, 64, 64, 16, "many", "bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_eager_call(name: str, device: torch.device, publish, sampling: dict[str, int]) -> None:
    case = CASES[name]
    problem, rows = case.make(device), Case(4, 64, 64, 64, 16, "few", "bf16").make(device)
    problem.rows, problem.varlen  # noqa: B018  (packing is not what is timed)
    fns = {"ours": lambda: OURS[name].run(problem), "direct_sdpa": lambda: PACKED.run(rows)}

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host(fns, sync=torch.cuda.synchronize, budget_s=0.3, **sampling)
        facts = {"impl": name} | gate_figures(times, "direct_sdpa")
        return times["ours"], run_facts(device) | case.fields() | facts

    publish("eager call, host", *take(), again=take)
