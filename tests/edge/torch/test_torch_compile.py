"""torch.compile: one graph, the same numbers as eager; on `auto` one operator for each direction.

`aot_eager` traces and differentiates as every compiler backend does, without generating code.
"""

import contextlib

import pytest
import torch

import nsa
import nsa.kernels
from nsa import settings


@pytest.fixture(autouse=True)
def no_compiled_code():
    """Settings are read before tracing, as by any earlier call; rows are long; nothing compiled is left over."""
    torch._dynamo.reset()
    with nsa.configure(sel_triton_min_L=0):
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


@pytest.fixture(params=["ranges", "blocks", "positions", "varlen"])
def problem(request, draw, same, device):
    """`(q, k, v), tensors, keywords`."""
    if request.param == "varlen":
        cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
        tensors = {"ranges": same([(0, 7), (9, 13)], 3, 2), "cu_seqlens": (cu, cu * 7)}
        return draw(S=3, S_kv=21, varlen=True), tensors, {"max_selected": 11}
    if request.param == "blocks":
        return draw(), {"block_indices": same([1, -1, 0], 1, 3, 2)}, {"block_size": 7}
    tensors = {"ranges": same([(0, 7), (9, 24)], 1, 3, 2)}
    if request.param == "positions":
        tensors["q_positions"] = torch.tensor([[3, -1, 23]], device=device)
    return draw(), tensors, {"max_selected": 22}


@pytest.mark.parametrize("min_L", [0, 10**6], ids=["long", "short"])
def test_forward_on_auto(problem, min_L):
    qkv, tensors, keywords = problem
    with nsa.configure(sel_triton_min_L=min_L):
        eager, graph = compiled(**keywords, return_lse=True)
        with launching(forward=int(min_L == 0), backward=0):
            got = graph(*qkv, **tensors)
        torch.testing.assert_close(got, eager(*qkv, **tensors), rtol=0, atol=0)


def test_forward_without_a_bound_on_auto(draw, same):
    """The whole call is one operator: what it packs inside is not traced."""
    q, k, v = draw()
    for selection in ({"use_triton_sel": False}, {"use_triton_sel": True}):
        with nsa.configure(**selection):
            eager, graph = compiled()
            ranges = same([(0, 7), (9, 24)], 1, 3, 2)
            assert torch.equal(graph(q, k, v, ranges=ranges), eager(q, k, v, ranges=ranges))


def test_forward_into_out(problem):
    qkv, tensors, keywords = problem
    eager, graph = compiled(**keywords)
    want = eager(*qkv, **tensors)
    out = torch.full_like(want, float("nan"))
    with launching(forward=1, backward=0):
        assert torch.equal(graph(*qkv, **tensors, out=out), want)
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no-lse"])
def test_gradients_equal_those_of_eager(problem, backend, return_lse):
    qkv, tensors, keywords = problem
    results, ours = [], int(backend == "auto")
    for call in compiled(**keywords, backend=backend, return_lse=return_lse):
        leaves = [x.clone().requires_grad_() for x in qkv]
        with launching(forward=ours, backward=ours):
            got = call(*leaves, **tensors)
            o, lse = got if return_lse else (got, None)
            loss = (o * torch.arange(o.shape[-1], device=o.device)).sum()
            if lse is not None:
                loss = loss + lse.masked_fill(lse.isinf(), 0).sum()
            results.append((o.detach(), *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        # An eager call takes the SDPA layout measured on this GPU, a traced one does not: other sums, other rounding.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * max(1.0, float(b.abs().max())))


def test_forward_on_sdpa_by_name(problem):
    qkv, tensors, keywords = problem
    eager, graph = compiled(**keywords, backend="sdpa")
    torch.testing.assert_close(graph(*qkv, **tensors), eager(*qkv, **tensors), rtol=0, atol=1e-6)


def test_inside_a_larger_graph(draw, same):
    """As a model calls it: projections around it, and the result used."""
    q, k, v = draw()
    ranges = same([(0, 7), (9, 24)], 1, 3, 2)
    w = torch.eye(16, device=q.device) * 2

    def layer(q, k, v):
        return nsa.selection_attention(q @ w, k.relu(), v, ranges=ranges).sum(2) + 1

    torch.testing.assert_close(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v), layer(q, k, v), rtol=0, atol=1e-5
    )


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


@pytest.mark.parametrize(
    ("kind", "backend"), [("ranges", "auto"), ("blocks", "auto"), ("varlen", "auto"), ("ranges", "sdpa")]
)
def test_training_lengths_change_without_compiling_for_each(draw, same, device, kind, backend):
    """Lengths above 1, which is a graph of its own everywhere in torch; that of no other axis, or torch takes them for
    the same. Packed SDPA asked for by name is traced itself, without a break.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    count = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, selection, cu):
        how = {"block_indices": selection, "block_size": 4} if kind == "blocks" else {"ranges": selection}
        cu_seqlens = cu if kind == "varlen" else None
        return nsa.selection_attention(q, k, v, **how, cu_seqlens=cu_seqlens, max_selected=8, backend=backend)

    graph = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for S in (5, 6, 9, 7):
        varlen = kind == "varlen"
        tensors = draw(S=S, S_kv=7 + S if not varlen else S, HKV=1, varlen=varlen)
        lead = (S, 1) if varlen else (1, S, 1)
        selection = same([1, 0], *lead) if kind == "blocks" else same([(0, 4), (3, 7)], *lead)
        cu = torch.tensor([0, 1, S], dtype=torch.int32, device=device)
        results, ours = [], int(backend == "auto")
        for attend in (graph, call):
            leaves = [x.clone().requires_grad_() for x in tensors]
            with launching(forward=ours, backward=ours):
                o = attend(*leaves, selection, cu)
                weights = torch.arange(o.shape[-1], device=o.device)
                results.append((o.detach(), *torch.autograd.grad((o * weights).sum(), leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * max(1.0, float(b.abs().max())))
    assert count.frame_count == 1


@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no-lse"])
def test_one_operator_for_each_direction(problem, return_lse):
    """And nothing else that reads keys: what is routed and launched inside is not traced."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep_graph(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    keep = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph)
    qkv, tensors, keywords = problem
    call, _ = compiled(**keywords, return_lse=return_lse)
    leaves = [x.requires_grad_() for x in qkv]
    with launching(forward=1, backward=1):
        got = torch.compile(call, backend=keep, fullgraph=True)(*leaves, **tensors)
        o = got[0] if return_lse else got
        o.sum().backward()
    found = [[str(node.target) for node in g.graph.nodes if node.op == "call_function"] for g in graphs]
    ours = ["nsa.selection_attention.default"], ["nsa.selection_attention_backward.default"]
    assert tuple([name for name in names if name.startswith("nsa")] for names in found) == ours
    harmless = ("nsa.", "<built-in function getitem>", "aten.expand", "aten.detach", "aten.full_like", "aten.zeros")
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


def test_inference_mode_and_no_grad(problem):
    """The same graph or another, but no gradient and the same numbers."""
    qkv, tensors, keywords = problem
    eager, graph = compiled(**keywords)
    want = eager(*qkv, **tensors)
    leaves = [x.clone().requires_grad_() for x in qkv]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), launching(forward=1, backward=0):
            got = graph(*leaves, **tensors)
        assert not got.requires_grad
        assert torch.equal(got, want)
    assert graph(*leaves, **tensors).requires_grad


def test_first_call_of_a_process_may_be_compiled(draw, same):
    """Nothing has read the settings yet."""
    q, k, v = draw()
    q.requires_grad_()
    ranges = same([(0, 7)], 1, 3, 2)
    _, graph = compiled(max_selected=7)
    settings.reload()
    graph(q, k, v, ranges=ranges)


def test_wrong_calls_of_the_operator_say_the_same(draw, same):
    """When they run: tracing sees shapes only."""
    q, k, v = draw()
    _, graph = compiled(max_selected=7)
    with pytest.raises(ValueError, match=r"ranges: expected \[B, S, HKV, n, 2\]"):
        graph(q, k, v, ranges=same([(0, 7)], 1, 3))


def test_errors_say_the_same(draw, same):
    """A wrong call is refused with the words of eager, somewhere in what dynamo raises."""
    q, k, v = draw()
    _, graph = compiled(backend="sdpa", max_selected=7)
    with pytest.raises(Exception, match=r"ranges: expected \[B, S, HKV, n, 2\]"):  # noqa: B017, PT011
        graph(q, k, v, ranges=same([(0, 7)], 1, 3))
