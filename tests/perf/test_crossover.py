"""What `--nsa-update-schedules` decides from: key-major beside query-major on prefills, by group size and queries."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from nsa.testing.clock import timing
from nsa.testing.clock.measure import gate_figures, run_facts
from nsa.tuning import crossover

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.02  # of samples for each kernel


SHAPES = [(tokens, None) for tokens in crossover.TOKENS]
SHAPES += [(tokens, context) for context, chunks in crossover.CONTEXTS.items() for tokens in chunks]


@pytest.mark.parametrize(
    ("tokens", "context"), SHAPES, ids=[f"T{t}{f'-K{context}' if context else ''}" for t, context in SHAPES]
)
@pytest.mark.parametrize("G", crossover.HEADS, ids=lambda G: f"G{G}")
def test_crossover(
    G: int,
    tokens: int,
    context: int | None,
    device: torch.device,
    publish,
    sampling: dict[str, int],
    pytestconfig,
) -> None:
    case = crossover.case(G, tokens, context=context)
    seed = (case.seed + pytestconfig.getoption("nsa_seed")) % 2**32
    print(f"{case.id}: seed {seed}")

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        times = crossover.compare(G, tokens, device, seed, context, budget_s=BUDGET_S, **sampling)
        point = crossover.Point(G, tokens, times["query_major"].median, times["key_major"].median, context)
        figures = gate_figures(times, ["query_major"], "key_major")
        return times["key_major"], run_facts(device) | figures | {"crossover": asdict(point), "seed": seed}

    publish(f"crossover: G = {G}", *take(), again=take, core=False)
