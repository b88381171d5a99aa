"""Gradients: exact against finite differences and against the fp64 oracle, zero where nothing was selected."""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import nsa
from nsa.plain import packed_sdpa
from nsa.testing.judge.gradients import assert_gradients
from nsa.testing.matrix.strategies import BLOCKS, RANGES, Drawn
from nsa.testing.profiles import drawing

from ...parity.test_drawn import SOURCES, oracle_of, through_lse, trained
from ..kernels.gradients import exact, like


@pytest.mark.parametrize("bound", [None, 9], ids=["unbounded", "bound"])
def test_finite_differences(problem, attend_plain, bound):
    """Of O and LSE, which is -inf for a query that sees nothing."""
    qkv, selection = problem
    leaves = [x.double().requires_grad_() for x in qkv]

    def call(q, k, v):
        o, lse = attend_plain(q, k, v, **selection | {"max_selected": bound}, return_lse=True)
        return o, lse.clamp(min=-100)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@drawing(3 / 5)
@given(st.sampled_from(SOURCES).flatmap(trained), st.sampled_from(["sdpa", "reference"]), st.booleans())
# Keys that a row lists twice, and rows that list none.
@example(Drawn.same(RANGES, [(3, 40), (2, 50), (3, 5), (0, 1)]), "sdpa", True)
@example(Drawn.same(RANGES, [(3, 40), (2, 50), (3, 5), (0, 1)]), "sdpa", False)
@example(Drawn.same(RANGES, [(0, 0)] * 4), "sdpa", True)
@example(Drawn.same(BLOCKS, [-1, 1, 1, 0, 5], dtype=torch.int32), "reference", False)
def test_gradients_of_plain_torch_of_any_calls(device, drawn, backend, bounded):
    """Through O and LSE, against the fp64 oracle: exactly 0 for empty rows, and for keys that no row lists."""
    drawn = dataclasses.replace(drawn, case=dataclasses.replace(drawn.case, dtype="fp32"))
    oracle = oracle_of(drawn.problem(device))
    p = oracle.problem
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    bound = p.case.L if bounded else None
    outputs = nsa.selection_attention(*leaves, **p.selection, backend=backend, max_selected=bound, return_lse=True)
    dlse = torch.randn(oracle.lse.shape, generator=torch.Generator().manual_seed(drawn.seed + 2)).to(device)
    got = torch.autograd.grad(outputs, leaves, (oracle.do, dlse))
    assert_gradients(got, through_lse(oracle, dlse), backend)


@pytest.mark.parametrize("bound", [None, 9], ids=["unbounded", "bound"])
def test_gradients_of_packed_sdpa_in_a_training_dtype(problem, dtype, bound):
    """Against the oracle's fp64 gradients of the same (rounded) inputs."""
    qkv, selection = problem
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    o = nsa.selection_attention(*leaves, **selection | {"max_selected": bound}, backend="sdpa")
    do = like(o)
    for a, b in zip(torch.autograd.grad(o, leaves, do), exact(*leaves, do, **selection), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=max(1e-5, 16 * torch.finfo(dtype).eps) * b.abs().max())


def test_unselected_nan_does_not_reach_gradients(draw, same, attend_plain):
    q, k, v = draw(S=2)
    ranges = same([(3, 7)], 1, 2, 2)
    ranges[:, 1, 1] = 0
    want = None
    for poison in (0.0, math.nan):
        bad = [x.clone() for x in (k, v)]
        for x in bad:
            x[:, :3], x[:, 7:] = poison, poison
        leaves = [x.requires_grad_() for x in (q.clone(), *bad)]
        got = torch.autograd.grad(attend_plain(*leaves, ranges=ranges, max_selected=9).sum(), leaves)
        want = want or got
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def broken(*args):
    raise RuntimeError("PassManager::run failed")


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
def test_hooks_that_save_copies_with_other_strides(device, schedule):
    """Offloading of activations gives back contiguous copies of views of a fused projection."""
    g = torch.Generator().manual_seed(0)
    fused = torch.randn(1, 8, 8, 16, generator=g).to(device)
    blocks = torch.randint(0, 3, (1, 8, 2, 2), generator=g).to(device)
    grads = []
    for pack in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        leaf = fused.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = nsa.selection_attention(
                *leaf.split([4, 2, 2], -2), block_indices=blocks, block_size=4, backend="triton", schedule=schedule
            )
        o.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.fixture
def many_rows(draw, device):
    """`(q, k, v), selection` of 64 rows."""
    blocks = torch.randint(-1, 5, (1, 32, 2, 3), generator=torch.Generator().manual_seed(0)).to(device)
    return draw(S=32, S_kv=40, HKV=2, G=2), {"block_indices": blocks, "block_size": 8}


@pytest.fixture
def small_chunks(monkeypatch, device):
    def make():
        monkeypatch.setitem(packed_sdpa.WORKSPACE_BYTES, device.type, 1 << 14)
        monkeypatch.setattr(packed_sdpa, "KEPT_BYTES", 1 << 15)

    return make


@pytest.mark.parametrize("route", ["sdpa", "fallback"])
def test_packed_keys_of_many_rows_are_not_kept(many_rows, small_chunks, monkeypatch, route):
    """Autograd keeps less than one chunk of them; gradients are the same, also where a backward kernel is broken."""
    (qkv, selection), kept = many_rows, []

    def gradients(route="sdpa"):
        leaves = [x.detach().requires_grad_() for x in qkv]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
            backend = "sdpa" if route == "sdpa" else "auto"
            o, lse = nsa.selection_attention(*leaves, **selection, backend=backend, return_lse=True)
        if route == "fallback":
            monkeypatch.setattr("nsa.backward._launch", broken)
        return torch.autograd.grad(o.sum() + lse.clamp(min=-100).sum(), leaves)

    want = gradients()
    assert sum(kept) > 64 * 24 * 16 * 4 * 2, "packed keys and values of 64 rows"
    small_chunks()
    torch.testing.assert_close(gradients(route), want, rtol=0, atol=2e-5)
    assert sum(kept) < 64 * 24 * 16 * 4


def test_torch_func_differentiates_many_rows(many_rows, small_chunks):
    """Which cannot forget what it has packed."""
    (q, k, v), selection = many_rows

    def loss(q):
        return nsa.selection_attention(q, k, v, **selection, backend="sdpa").sum()

    want = torch.func.grad(loss)(q)
    small_chunks()
    torch.testing.assert_close(torch.func.grad(loss)(q), want, rtol=0, atol=2e-5)
