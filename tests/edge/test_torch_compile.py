"""torch.compile: one graph, the same numbers as eager, forward on `auto` and with gradients on packed SDPA.

`aot_eager` traces and differentiates as every compiler backend does, without generating code.
"""

import pytest
import torch

import nsa
import nsa.kernels
from nsa import settings


@pytest.fixture(autouse=True)
def no_compiled_code():
    """Settings are read before tracing, as by any earlier call; nothing compiled is left over."""
    settings.get()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
        before = nsa.kernels.launches.total()
        got = graph(*qkv, **tensors)
        assert (nsa.kernels.launches.total() > before) == (min_L == 0)
        for a, b in zip(got, eager(*qkv, **tensors), strict=True):
            assert torch.equal(a, b)


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
    assert torch.equal(graph(*qkv, **tensors, out=out), want)
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no-lse"])
def test_gradients_equal_those_of_eager(problem, backend, return_lse):
    qkv, tensors, keywords = problem
    results = []
    for call in compiled(**keywords, backend=backend, return_lse=return_lse):
        leaves = [x.clone().requires_grad_() for x in qkv]
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
    count = torch._dynamo.testing.CompileCounter()
    graph = torch.compile(lambda q, k, v, r: nsa.selection_attention(q, k, v, ranges=r), backend=count, fullgraph=True)
    for S in (2, 3, 4, 5, 6):
        q, k, v = draw(S=S, S_kv=10 + S)
        ranges = same([(0, 7), (9, 24)], 1, S, 2)
        want = nsa.selection_attention(q, k, v, ranges=ranges)
        torch.testing.assert_close(graph(q, k, v, ranges), want, rtol=0, atol=0)
    assert count.frame_count <= 2


def test_operator_is_registered_as_torch_wants_it(draw, same):
    """Schema, and shapes and dtypes of the fake kernel."""
    q, k, v = draw(S=2, Dv=24)
    args = (q, k, v, same([(0, 7)], 1, 2, 2), None, None, True, None, None, None, None, 7, "auto", "auto")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.nsa.selection_attention.default, args, test_utils=checks)


def test_first_call_of_a_process_may_be_compiled(draw, same):
    """Nothing has read the settings yet."""
    q, k, v = draw()
    q.requires_grad_()
    ranges = same([(0, 7)], 1, 3, 2)
    _, graph = compiled(max_selected=7)
    settings.reload()
    graph(q, k, v, ranges=ranges)


def test_errors_say_the_same(draw, same):
    """A wrong call is refused with the words of eager, somewhere in what dynamo raises."""
    q, k, v = draw()
    _, graph = compiled(backend="sdpa", max_selected=7)
    with pytest.raises(Exception, match=r"ranges: expected \[B, S, HKV, n, 2\]"):  # noqa: B017, PT011
        graph(q, k, v, ranges=same([(0, 7)], 1, 3))
