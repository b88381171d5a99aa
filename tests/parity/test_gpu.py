"""What only a GPU can show: graph capture, streams, addresses past 2^31 elements, a prefill of many rows."""

import pytest
import torch
import triton
import triton.language as tl

from nsa.kernels.query_major.tiles import Choice
from nsa.kernels.shared.compiler import gdc_launch_dependents
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import core
from nsa.testing.matrix.problem import Problem

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
    assert launched["query_major"] == 1
    assert_parity(result, oracle, "ranges")


@pytest.mark.gpu(memory_gib=40)
@over([Case(16, 128, 128, 1024, 8192, "prefill", "bf16", HKV=4, S=2048, S_kv=8192)])
@pytest.mark.parametrize("name", ["blocks", "ranges", "sdpa"])
def test_triton_sel_parity_gpu_prefill(oracle: Oracle, name: str) -> None:
    result, _ = OURS[name].run_counted(oracle.problem, return_lse=True)
    assert_parity(result, oracle, name)


@pytest.mark.gpu(memory_gib=40)
@over([c for c in core() if c.dist == "prefill"])
@pytest.mark.parametrize("name", ["auto", "query_major", "key_major"])
def test_triton_sel_parity_gpu_core_prefill(oracle: Oracle, name: str) -> None:
    """Up to 65,536 tokens: some queries are compared, what is not written of the others is seen."""
    impl = OURS[name]
    for return_lse in (False, True):
        result, launched = impl.run_counted(oracle.problem, return_lse)
        assert_parity(result, oracle, name)
        assert impl.route is None or launched[impl.route], f"{name} launched {launched}"


@triton.jit
def _writes_late(x_ptr, y_ptr, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Let the next kernel begin, and copy x to y a good while later."""
    gdc_launch_dependents()
    for _ in range(300):
        tl.inline_asm_elementwise("nanosleep.u32 1000; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
    for begin in range(tl.program_id(0) * BLOCK, n, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@pytest.mark.skipif(gdc_launch_dependents is None, reason="needs programmatic dependent launch: Triton 3.5 or newer")
@pytest.mark.parametrize(
    "choice", [None, Choice(1, 1, 128, 4, 1), Choice(2, 1, 64, 4, 3, 1), Choice(4, 1, 64, 4, 2, 0)], ids=str
)
@over(ONE_EACH)
def test_triton_sel_parity_gpu_waits(problem: Problem, choice: Choice | None, device: torch.device, pin) -> None:
    """A kernel that may begin before the one before it has ended sees what that one wrote last."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs programmatic dependent launch: sm_90 or newer")
    p = problem
    impl, oracle = OURS[OF[p.case.source]], Oracle.of(p)
    keys = {"rows": p.rows, "varlen": p.varlen}.get(p.case.source, (p.q, p.k))[1]
    pin(query_major=choice)
    assert keys.is_contiguous()
    saved = keys.clone()
    impl.run(p)
    for _ in range(3):
        keys.zero_()
        torch.cuda.synchronize()
        _writes_late[32,](saved, keys, keys.numel(), 32, 1024)
        result = impl.run(p)
        torch.cuda.synchronize()
        assert_parity(result, oracle, f"after a kernel that writes late, {choice}")
