"""What `--nsa-regret` measures: `auto` beside every schedule and peer on drawn shapes. A seed is a shape."""

from typing import Any

import pytest
import torch

import nsa
from nsa.testing import regret
from nsa.testing.clock import timing
from nsa.testing.clock.measure import run_facts
from nsa.testing.clock.precompile import compile_ahead, processes
from nsa.testing.clock.serving import kind, pool

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = (metafunc.config.getoption(name) for name in ("nsa_seed", "nsa_regret"))
    metafunc.parametrize("seed", range(first, first + count))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, device: torch.device) -> None:
    seeds = [item.callspec.params["seed"] for item in request.session.items if item.module is request.module]
    compile_ahead([(regret.warm, seed) for seed in seeds], device, processes(device))


def test_regret(seed: int, compiled: None, device: torch.device, publish) -> None:
    def take() -> tuple[timing.Timing, dict[str, Any]]:
        with nsa.configure(probe="never"):  # the kernels were compiled ahead
            times, row = regret.time_seed(seed, pool(device))
        return times, run_facts(device) | {"regret": row}

    publish(f"regret: {kind(regret.drawn(seed).case)}", *take(), again=take, core=False)
