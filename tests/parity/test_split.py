"""Few rows and many keys: the keys of a row are shared among programs and merged by LSE. And nothing wobbles."""

import pytest
import torch

from nsa.kernels.query_major import plan as query_major
from nsa.kernels.query_major import tiles
from nsa.kernels.shared.launch import TRITON
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem
from nsa.testing.plugin import current_lane

LONG = [
    Case(4, 64, 64, 1024, 1, "few", "fp16"),
    Case(2, 64, 32, 1000, 2, "few", "fp32"),
    Case(4, 64, 64, 1024, 2, "few", "fp16", source="varlen"),
    Case(4, 64, 64, 1000, 1, "many", "fp16"),
    Case(4, 64, 64, 1000, 2, "overlap", "fp16", scores=64),
    Case(3, 64, 100, 1024, 2, "decode", "fp32", HKV=2, S_kv=1500),
]


@pytest.fixture(params=["kernel", "cluster"])
def merged(request, device, monkeypatch, fresh_plans):
    """Parts merged by a kernel of their own, and where the GPU has clusters in those."""
    if request.param == "cluster" and (current_lane() != "gpu" or torch.cuda.get_device_capability(device) < (9, 0)):
        pytest.skip("needs clusters: an NVIDIA GPU, sm_90 or newer")
    if request.param == "cluster" and TRITON < (3, 6):
        pytest.skip("needs clusters: Triton 3.6 or newer")
    limit = 8 if request.param == "cluster" else 0
    monkeypatch.setattr(tiles, "fits_clusters", lambda programs, splits, *_: 1 < splits <= limit)
    monkeypatch.setattr(tiles, "measured", lambda *_: None)
    planned, plan = [], query_major.plan
    monkeypatch.setattr(query_major, "plan", lambda *args: planned.append(plan(*args)) or planned[-1])
    yield
    assert all(launch.merged == (request.param == "cluster") for launch in planned if launch.splits > 1)


@pytest.mark.usefixtures("merged")
@over(LONG)
def test_triton_sel_parity_split(oracle: Oracle) -> None:
    name = OF[oracle.problem.case.source]
    for return_lse in (False, True):
        result, launched = OURS[name].run_counted(oracle.problem, return_lse)
        assert launched == {OURS[name].route: 1, "split": 1}
        assert_parity(result, oracle, name)


@pytest.mark.usefixtures("merged")
@over([*LONG, Case(8, 64, 64, 100, 8, "mixed", "fp16", S_kv=128), Case(4, 64, 64, 100, 9, "few", "fp32")])
def test_runs_are_bitwise_equal(problem: Problem) -> None:
    impl = OURS[OF[problem.case.source]]
    first = impl.run(problem, return_lse=True)
    for _ in range(3):
        torch.testing.assert_close(first, impl.run(problem, return_lse=True), rtol=0, atol=0)
