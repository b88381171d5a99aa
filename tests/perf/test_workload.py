"""What `--nsa-workload` times: every shape of a workload, beside dense attention, its control, and its peers."""

from functools import partial
from pathlib import Path

import pytest
import torch

import nsa
from nsa.testing.clock import timing
from nsa.testing.clock.precompile import compile_ahead, processes
from nsa.testing.clock.serving import pool
from nsa.testing.workloads import file, mix

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]


def entries(config: pytest.Config) -> tuple[Path, dict[str, file.Entry]]:
    path = file.find(config.getoption("nsa_workload"))
    return path, {f"{path.stem}-{entry.id}": entry for entry in file.read(path)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", entries(metafunc.config)[1])


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, device: torch.device) -> None:
    names = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    found = entries(request.config)[1]
    compile_ahead([(mix.warm, found[name]) for name in names], device, processes(device))


def test_workload(name: str, compiled: None, device: torch.device, publish, pytestconfig: pytest.Config) -> None:
    path, found = entries(pytestconfig)
    take = partial(mix.time_entry, path.stem, found[name], pool(device))
    with nsa.configure(probe="never"):  # the kernels were compiled ahead
        samples, info = take()
        publish(info["group"], samples, info, again=take)
