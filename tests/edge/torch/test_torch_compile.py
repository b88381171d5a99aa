"""torch.compile: one graph, the same numbers as eager; on `auto` one operator for each direction.

`aot_eager` traces and differentiates as every compiler backend does, without generating code.
"""

import contextlib

import pytest
import torch

import nsa
import nsa.kernels
from nsa import settings

from .test_training_tools import close

ROUNDING = 1e-6  # an eager call takes the SDPA layout measured on this GPU, a traced one does not


@pytest.fixture(autouse=True)
def no_compiled_code():
    """Nothing compiled is left over."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def launching(forward, backward):
    """So many calls of our kernels are made inside, neither more nor fewer."""
    before = nsa.kernels.launches.copy()
    yield
    launched = nsa.kernels.launches - before
    found = launched.total() - launched["backward"] - launched["split"], launched["backward"]
    assert found == (forward, backward)


def compiled(**keywords):
    def call(q, k, v, **tensors):
        return nsa.selection_attention(q, k, v, **tensors, **keywords)

    return call, torch.compile(call, backend="aot_eager", fullgraph=True)


@pytest.fixture
def problem(problem):
    """`(q, k, v), tensors, keywords`."""
    qkv, selection = problem
    keywords = {name: x for name, x in selection.items() if isinstance(x, int | float)}
    return qkv, {name: x for name, x in selection.items() if name not in keywords}, keywords


def test_forward_on_auto(problem):
    """Into `out`, too; on Triton's route and on the fallback."""
    qkv, tensors, keywords = problem
    eager, graph = compiled(**keywords, return_lse=True)
    for min_L in (0, 10**6):
        with nsa.configure(sel_triton_min_L=min_L):
            want = eager(*qkv, **tensors)
            out = torch.full_like(want[0], float("nan"))
            with launching(forward=int(min_L == 0), backward=0):
                torch.testing.assert_close(graph(*qkv, **tensors, out=out), want, rtol=0, atol=0)
            assert torch.equal(out, want[0])


def test_forward_without_a_bound_on_auto(draw, same):
    """The whole call is one operator: what it packs inside is not traced."""
    q, k, v = draw()
    for selection in ({"use_triton_sel": False}, {"use_triton_sel": True}):
        with nsa.configure(**selection):
            eager, graph = compiled()
            ranges = same([(0, 7), (9, 24)], 1, 3, 2)
            assert torch.equal(graph(q, k, v, ranges=ranges), eager(q, k, v, ranges=ranges))


def gradients(call, problem, return_lse):
    """`(O, dq, dk, dv)`, through the LSE as well if there is one."""
    qkv, tensors, _ = problem
    leaves = [x.clone().requires_grad_() for x in qkv]
    got = call(*leaves, **tensors)
    o, lse = got if return_lse else (got, None)
    loss = (o * torch.arange(o.shape[-1], device=o.device)).sum()
    if lse is not None:
        loss = loss + lse.masked_fill(lse.isinf(), 0).sum()
    return o.detach(), *torch.autograd.grad(loss, leaves)


@pytest.fixture
def with_lse(problem):
    """Of blocks and of positions: what returns the LSE does not depend on the kind of selection."""
    return "block_indices" in problem[1] or "q_positions" in problem[1]


def test_gradients_of_sdpa_by_name(problem, with_lse):
    calls = compiled(**problem[2], backend="sdpa", return_lse=with_lse)
    with launching(forward=0, backward=0):
        close(*(gradients(call, problem, with_lse) for call in reversed(calls)), ROUNDING)


def test_lengths_change_without_compiling_for_each(draw, same):
    """A batch of another length is served by the same graph, once dimensions count as dynamic."""
    from torch._dynamo.testing import CompileCounter

    count = CompileCounter()
    graph = torch.compile(lambda q, k, v, r: nsa.selection_attention(q, k, v, ranges=r), backend=count, fullgraph=True)
    for S in (2, 3, 4, 5, 6):
        q, k, v = draw(S=S, S_kv=10 + S)
        ranges = same([(0, 7), (9, 24)], 1, S, 2)
        want = nsa.selection_attention(q, k, v, ranges=ranges)
        torch.testing.assert_close(graph(q, k, v, ranges), want, rtol=0, atol=0)
    assert count.frame_count <= 2


@pytest.mark.parametrize(("kind", "backend"), [("blocks", "auto"), ("varlen", "auto"), ("ranges", "sdpa")])
def test_training_lengths_change_without_compiling_for_each(draw, same, device, kind, backend):
    """Lengths above 1, which is a graph of its own everywhere in torch; that of no other axis, or torch takes them for
    the same. Packed SDPA asked for by name is traced itself, without a break.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    count = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, selection, cu_seqlens=None):
        how = {"block_indices": selection, "block_size": 4} if kind == "blocks" else {"ranges": selection}
        return nsa.selection_attention(q, k, v, **how, cu_seqlens=cu_seqlens, max_selected=8, backend=backend)

    graph = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for S in (5, 9, 6):
        varlen = kind == "varlen"
        qkv = draw(S=S, S_kv=7 + S if not varlen else S, HKV=1, varlen=varlen)
        lead = (S, 1) if varlen else (1, S, 1)
        tensors = {"selection": same([1, 0], *lead) if kind == "blocks" else same([(0, 4), (3, 7)], *lead)}
        tensors |= {"cu_seqlens": torch.tensor([0, 1, S], dtype=torch.int32, device=device)} if varlen else {}
        with launching(*[2 * (backend == "auto")] * 2):
            close(*(gradients(x, (qkv, tensors, {}), False) for x in (graph, call)), ROUNDING)
    assert count.frame_count == 1


def test_one_operator_for_each_direction(problem, with_lse):
    """The same gradients, and nothing else that reads keys: what is routed and launched inside is not traced."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep_graph(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    keep = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph)
    call, _ = compiled(**problem[2], return_lse=with_lse)
    with launching(forward=1, backward=1):
        got = gradients(torch.compile(call, backend=keep, fullgraph=True), problem, with_lse)
    close(got, gradients(call, problem, with_lse), ROUNDING)
    found = [[str(node.target) for node in g.graph.nodes if node.op == "call_function"] for g in graphs]
    ours = ["nsa.selection_attention.default"], ["nsa.selection_attention_backward.default"]
    assert tuple([name for name in names if name.startswith("nsa")] for names in found) == ours
    harmless = (
        "nsa.", "<built-in function getitem>", "aten.expand", "aten.detach", "aten.full_like", "aten.zeros", "aten.mul",
        "aten.arange", "aten.isinf", "aten.masked_fill", "aten.sum",
    )  # fmt: skip
    assert [name for names in found for name in names if not name.startswith(harmless)] == []


def test_gradients_of_fp64_need_no_triton(draw, same):
    """Nor a bound: what packs is inside the operator."""
    ranges = same([(0, 7), (9, 24)], 1, 3, 2)
    results = []
    for call in compiled():
        leaves = [x.clone().requires_grad_() for x in draw(dtype=torch.float64)]
        o = call(*leaves, ranges=ranges)
        assert o.dtype == torch.float64
        results.append((o.detach(), *torch.autograd.grad(o.square().sum(), leaves)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_inference_mode_and_no_grad(draw, same, backend):
    """The same graph or another, but no gradient and the same numbers."""
    qkv, ranges, ours = draw(), same([(0, 7), (9, 24)], 1, 3, 2), int(backend == "auto")
    eager, graph = compiled(max_selected=22, backend=backend)
    want = eager(*qkv, ranges=ranges)
    leaves = [x.clone().requires_grad_() for x in qkv]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), launching(forward=ours, backward=0):
            got = graph(*leaves, ranges=ranges)
        assert not got.requires_grad
        torch.testing.assert_close(got, want, rtol=0, atol=0 if ours else 1e-6)
    assert graph(*leaves, ranges=ranges).requires_grad


def test_first_call_of_a_process_may_be_compiled(draw, same):
    """Nothing has read the settings yet."""
    q, k, v = draw()
    q.requires_grad_()
    ranges = same([(0, 7)], 1, 3, 2)
    _, graph = compiled(max_selected=7)
    settings.reload()
    graph(q, k, v, ranges=ranges)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_errors_say_the_same(draw, same, backend):
    """The operator says so when it runs, because tracing sees shapes only; what is traced, somewhere in dynamo's."""
    _, graph = compiled(backend=backend, max_selected=7)
    with pytest.raises(ValueError if backend == "auto" else Exception, match=r"ranges: expected \[B, S, HKV, n, 2\]"):
        graph(*draw(), ranges=same([(0, 7)], 1, 3))
