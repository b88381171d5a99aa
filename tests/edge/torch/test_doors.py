"""Tensors that have no memory of their own, or memory that means something else, at every public function.

PyTorch serves them, or an error refuses them: no launch gets their address, and no kernel counts as broken.
"""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import nsa
from nsa import failures
from nsa.call import Call
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.launch import Variant
from nsa.plain.oracle import selection_reference

SHAPE = dict(S=2, S_kv=9, HKV=1, Dv=24)


@pytest.fixture
def blocks(same):
    return dict(block_indices=same([0, 2], 1, 2, 1), block_size=3)


class Wrapper(torch.Tensor):
    """A subclass without memory, whose operators run on the tensor it holds."""

    @staticmethod
    def __new__(cls, held):
        x = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        x.held = held
        return x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = [x.held if isinstance(x, cls) else x for x in args]
        return function(*bare, **(kwargs or {}))


def negative(x):
    return torch.complex(torch.zeros_like(x), -x).conj().imag if x.is_floating_point() else x.clone()


FAKE = FakeTensorMode()
MEMORY = {
    "plain": lambda x: x.clone(),
    "parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "negative": negative,
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "meta": lambda x: x.to("meta"),
    "fake": FAKE.from_tensor,
    "wrapped": Wrapper,
    "functional": torch._to_functional_tensor,
}
# What PyTorch and our checks raise (AssertionError: fake tensors beside others). A kernel that read such memory would
# give a wrong result or lose the process.
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError)


@contextlib.contextmanager
def no_bad_address(monkeypatch):
    """Fails at its end if a launch did not refuse a tensor that is not an ordinary one."""
    launch, bad = Variant.launch, []

    def watched(self, grid, device, tensors, *rest):
        given = [x for x in tensors if isinstance(x, torch.Tensor)]  # not those of a workspace
        odd = [x for x in given if x.is_neg() or (x.numel() and x.data_ptr() == 0)]
        try:
            launch(self, grid, device, tensors, *rest)
        except DoesNotFit:
            odd = []
            raise
        finally:
            bad.extend(odd)

    with monkeypatch.context() as patch:
        patch.setattr(Variant, "launch", watched)
        yield
    assert not bad


ODD = sorted(set(MEMORY) - {"plain"})
INPUTS = "q", "k", "v", "selection", "gradient"


@pytest.fixture
def served_or_refused(draw, same, monkeypatch):
    """`served_or_refused(kinds, spans, grad, cached)`: one call, whose inputs by name are of a kind of `MEMORY`."""

    def check(kinds, spans, grad, cached):
        q, k, v = draw(**SHAPE)
        plain = {"q": q, "k": k, "v": v, "selection": same([(0, 4), (2, 7)] if spans else [0, 2], 1, 2, 1)}
        given = {name: MEMORY[kinds.get(name, "plain")](x) for name, x in plain.items()}
        exact = {name: x * 0 if kinds.get(name) == "zeros" else x for name, x in plain.items()}
        selection, exact_selection = given.pop("selection"), exact.pop("selection")
        how = ("ranges", None) if spans else ("block_indices", 3)
        call = {"block_size": how[1], "max_selected": 9}
        want = selection_reference(Call.of(*exact.values(), **call, **{how[0]: exact_selection}, return_lse=True))
        call[how[0]] = selection
        inputs, got = list(given.values()), None
        with no_bad_address(monkeypatch), contextlib.suppress(*REFUSALS):
            if cached:
                got = nsa.selection_attention_with_kvcache(*inputs, cache_seqlens=9, return_lse=True, **call)
            else:
                if grad:
                    inputs = [x.detach().requires_grad_() for x in inputs]
                got = nsa.selection_attention(*inputs, return_lse=True, **call)
                if grad:
                    do = MEMORY[kinds.get("gradient", "plain")](torch.ones_like(want[0]))
                    torch.autograd.grad(got[0], inputs, do)
        if got is not None and not {"meta", "fake", "wrapped"} & set(kinds.values()):
            bare = [torch._from_functional_tensor(x) if torch._is_functional_tensor(x) else x for x in got]
            for a, b in zip(bare, want, strict=True):
                torch.testing.assert_close(a.resolve_neg() + 0, b, rtol=0, atol=1e-5)
        assert not failures.broken

    return check


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", INPUTS)
def test_one_odd_tensor_is_served_or_refused(served_or_refused, name, kind):
    for spans in (False, True):
        served_or_refused({name: kind}, spans, True, False)
        if name != "gradient":
            served_or_refused({name: kind}, spans, False, spans)


def test_any_tensors_are_served_or_refused(served_or_refused):
    @given(
        kinds=st.dictionaries(st.sampled_from(INPUTS), st.sampled_from(ODD), min_size=2),
        spans=st.booleans(), grad=st.booleans(), cached=st.booleans(),
    )  # fmt: skip
    def each(kinds, spans, grad, cached):
        served_or_refused(kinds, spans, grad, cached)

    each()


@pytest.mark.parametrize("kind", sorted(set(MEMORY) - {"plain", "parameter"}))
def test_packed_rows_refuse_them(device, monkeypatch, kind):
    Q, K, V = (torch.randn(shape, device=device) for shape in ((2, 4, 16), (2, 9, 16), (2, 9, 16)))
    with no_bad_address(monkeypatch):
        for at in range(3):
            given = [MEMORY[kind](x) if i == at else x for i, x in enumerate((Q, K, V))]
            with pytest.raises(REFUSALS):
                nsa.sel_attn_fwd_dense_group(*given)
    assert not failures.broken


def test_negative_views_are_refused_and_their_gradients_served(qkv, blocks):
    """Their last dimension has stride 2, so validation refuses them. A gradient may have any strides."""
    for at, name in enumerate("qkv"):
        given = [negative(x) if i == at else x for i, x in enumerate(qkv)]
        assert given[at].is_neg()
        with pytest.raises(ValueError, match=f"{name}: expected a contiguous last dimension"):
            nsa.selection_attention(*given, **blocks)
    leaves = [x.requires_grad_() for x in qkv]
    o = nsa.selection_attention(*leaves, **blocks)
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, leaves, do, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(o, leaves, negative(do)), want))


def test_integers_of_numpy_are_sizes(qkv, blocks):
    want = nsa.selection_attention(*qkv, **blocks)
    size, bound = np.int64(3), np.int32(6)
    indices = blocks["block_indices"]
    got = nsa.selection_attention(*qkv, block_indices=indices, block_size=size, max_selected=bound)
    assert torch.equal(got, want)
    lengths = torch.full((1,), qkv[1].shape[1], dtype=torch.int32, device=indices.device)
    for cached in (lengths, np.int64(qkv[1].shape[1])):
        got = nsa.selection_attention_with_kvcache(
            *qkv, block_indices=indices, block_size=size, max_selected=bound, cache_seqlens=cached
        )
        torch.testing.assert_close(got, want)
    with pytest.raises(TypeError, match="block_size: expected an int, got float"):
        nsa.selection_attention(*qkv, block_indices=indices, block_size=np.float32(3))


# --- gradients in batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_batched_gradients_are_those_one_by_one(qkv, blocks, backend, monkeypatch):
    """`is_grads_batched` maps the backward pass, whose operator has a rule for that."""
    leaves = [x.requires_grad_() for x in qkv]
    o, lse = nsa.selection_attention(*leaves, **blocks, backend=backend, return_lse=True)
    dos, dlses = torch.randn(3, *o.shape, device=o.device), torch.randn(3, *lse.shape, device=o.device)
    pairs = list(zip(dos, dlses, strict=True))
    one_by_one = [torch.autograd.grad((o, lse), leaves, pair, retain_graph=True) for pair in pairs]
    with no_bad_address(monkeypatch):
        got = torch.autograd.grad((o, lse), leaves, (dos, dlses), retain_graph=True, is_grads_batched=True)
        alone = torch.autograd.grad(o, leaves[1], dos, is_grads_batched=True)[0]
    for x, *each in zip(got, *one_by_one, strict=True):
        assert torch.equal(x, torch.stack(each))
    assert alone.shape == (3, *qkv[1].shape)
    assert not failures.broken


def test_a_vectorized_jacobian(qkv, blocks):
    q, k, v = qkv
    jacobian = torch.autograd.functional.jacobian
    f = lambda q: nsa.selection_attention(q, k, v, **blocks)[..., :2]  # noqa: E731
    assert torch.equal(jacobian(f, q, vectorize=True), jacobian(f, q))


# --- what looks at the dispatcher -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("leaf", [False, True], ids=["forward", "backward"])
def test_make_fx(qkv, blocks, tracing, leaf):
    def f(q, k, v, indices):
        o = nsa.selection_attention(q, k, v, block_indices=indices, block_size=3)
        return torch.autograd.grad(o.sum(), (q, k, v)) if leaf else (o,)

    given = *(x.requires_grad_(leaf) for x in qkv), blocks["block_indices"]
    graph = make_fx(f, tracing_mode=tracing)(*given)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "nsa.selection_attention.default" in targets
    assert ("nsa.selection_attention_backward.default" in targets) == leaf
    assert all(map(torch.equal, graph(*given), f(*given)))


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", id="gpu")])
def test_fake_tensors_need_no_memory(backend, kind):
    """Nor a GPU. Shapes, gradients' shapes and errors are those on the device that the tensors pretend to be on."""
    if kind == "cuda" and backend == "sdpa" and torch.version.cuda is None:
        pytest.skip("a CPU build of torch computes no shapes of operators on fake CUDA tensors")
    with FakeTensorMode():
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        q, k, v = (torch.empty(1, 2, 4, D, device=kind, dtype=dtype) for D in (16, 16, 24))
        if kind == "cpu":  # autograd asks the driver for the device
            q, k, v = (x.requires_grad_() for x in (q, k, v))
        ranges = torch.zeros(1, 2, 4, 3, 2, dtype=torch.int32, device=kind)
        o, lse = nsa.selection_attention(q, k, v, ranges=ranges, max_selected=9, backend=backend, return_lse=True)
        assert (o.shape, o.dtype, o.device.type) == (v.shape, dtype, kind)
        assert (lse.shape, lse.dtype) == ((1, 2, 4), torch.float32)
        if kind == "cpu":
            assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]
        with pytest.raises(ValueError, match="ranges: expected"):
            nsa.selection_attention(q, k, v, ranges=torch.empty_like(q, dtype=torch.int32), backend=backend)
    assert not failures.broken


def test_ranges_without_a_bound_on_fake_tensors():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 4, 16) for _ in range(3))
        ranges = torch.zeros(1, 2, 4, 3, 2, dtype=torch.int32)
        assert nsa.selection_attention(q, k, v, ranges=ranges).shape == q.shape
        with pytest.raises(RuntimeError, match="expected max_selected=<int>.*fake tensors, got None"):
            nsa.selection_attention(q, k, v, ranges=ranges, backend="sdpa")


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa", "reference"])
def test_plain_calls_do_not_go_through_the_dispatcher(qkv, blocks, backend, monkeypatch):
    """An operator takes the host four times as long. Results are the same without gradients."""
    monkeypatch.setattr(nsa.ops, "_operator", None)
    want = nsa.selection_attention(*qkv, **blocks, backend=backend)
    for leaf, mode in itertools.product((False, True), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        given = [x.detach().requires_grad_(leaf) for x in qkv]
        with mode():
            got = nsa.selection_attention(*given, **blocks, backend=backend)
            assert got.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(got, want)
        assert got.requires_grad == (leaf and mode is torch.enable_grad)
