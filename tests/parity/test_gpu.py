"""What only a GPU can show: graph capture, streams, addresses past 2^31 elements, a prefill of many rows."""

import pytest
import torch

from nsa.testing.cases import Case
from nsa.testing.compare import Oracle, assert_parity
from nsa.testing.fixtures import over
from nsa.testing.impls import OF, OURS

pytestmark = pytest.mark.gpu
ONE_EACH = [
    Case(8, 128, 128, 512, 256, "few", "bf16"),
    Case(8, 128, 128, 512, 64, "few", "bf16", source="varlen"),
    Case(8, 128, 128, 512, 64, "mixed", "bf16"),
    Case(16, 128, 128, 1024, 4, "decode", "bf16", HKV=4, S_kv=8192),
]


@over(ONE_EACH)
def test_triton_sel_parity_gpu_captured(oracle: Oracle) -> None:
    """A captured call (no sync, no allocation outside the pool) replays on new values in the same tensors."""
    p = oracle.problem
    impl = OURS[OF[p.case.source]]
    saved = p.q.clone()
    p.rows, p.varlen  # noqa: B018  (packing is not what is captured)
    impl.run(p)
    p.q.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = impl.run(p)
    p.q.copy_(saved)
    graph.replay()
    assert_parity(result, oracle, "graph replay")


@over(ONE_EACH)
def test_triton_sel_parity_gpu_two_streams(oracle: Oracle) -> None:
    """Calls in flight on two streams share nothing."""
    p = oracle.problem
    impl = OURS[OF[p.case.source]]
    impl.run(p)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for i in range(8):
        with torch.cuda.stream(streams[i % 2]):
            results.append(impl.run(p, return_lse=True))
    torch.cuda.synchronize()
    for result in results:
        assert_parity(result, oracle, "two streams")


@pytest.mark.gpu(memory_gib=40)
@over([Case(8, 128, 128, 512, 8, "mixed", "bf16", HKV=8, S_kv=2_200_000)])
def test_triton_sel_parity_gpu_int64_addresses(oracle: Oracle) -> None:
    """K and V of 2.25e9 elements: 32-bit offsets would wrap."""
    assert oracle.problem.k.numel() > 2**31
    result, launched = OURS["ranges"].run_counted(oracle.problem, return_lse=True)
    assert launched["ranges"] == 1
    assert_parity(result, oracle, "ranges")


@pytest.mark.gpu(memory_gib=40)
@over([Case(16, 128, 128, 1024, 8192, "prefill", "bf16", HKV=4, S=2048, S_kv=8192)])
@pytest.mark.parametrize("name", ["blocks", "ranges", "sdpa"])
def test_triton_sel_parity_gpu_prefill(oracle: Oracle, name: str) -> None:
    result, _ = OURS[name].run_counted(oracle.problem, return_lse=True)
    assert_parity(result, oracle, name)
