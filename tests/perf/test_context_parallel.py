"""A sharded step beside one GPU: the whole, communication alone, and memory. Runs where there are several GPUs."""

from typing import Any

import pytest
import torch

from nsa.testing.clock import sharded, timing
from nsa.testing.clock.cuda import EVENT_TICK_S
from nsa.testing.clock.measure import gate_figures, run_facts

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
WORLDS = 2, 4, 8
OFF = 2**-6  # a part of dK or dV, and their sum, are each rounded to bf16


@pytest.mark.parametrize("world", WORLDS, ids=[f"{world}gpus" for world in WORLDS])
def test_context_parallel(world: int, device: torch.device, publish) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
    torch.cuda.empty_cache()
    ask = sharded.Ask(world)

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        found = sharded.measure(ask)
        print(sharded.table(ask, found))
        first = found["sharded"][0]
        assert all(one["check"]["o"] for one in found["sharded"]), "O differs from that of one GPU"
        off = max(one["check"][name] for one in found["sharded"] for name in ("dq", "dk", "dv"))
        assert off < OFF, f"gradients differ from those of one GPU by {off:.1e} of the largest"
        times = {
            name: timing.Timing([ms / 1e3 for ms in samples], "eager", False, 1, 1, EVENT_TICK_S)
            for name, samples in (("ours", first["whole"]), ("one_gpu", found["one_gpu"]))
        }
        info = run_facts(device) | gate_figures(times, ["one_gpu"]) | sharded.ratios(ask, found, first)
        return times["ours"], info | {"world": world, "tokens": ask.tokens, "sharded": found}

    publish("context parallel", *take(), again=take)
