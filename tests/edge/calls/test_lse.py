"""LSE: natural log of the sum of exponentials of the scaled scores, in fp32; and the scale itself."""

import math

import pytest
import torch

import nsa


def expected(q, k, keys, scale):
    """`[B, S, HQ]` of one KV head, in fp64."""
    scores = torch.einsum("bshd,bkd->bshk", q.double(), k[:, keys, 0].double()) * scale
    return torch.logsumexp(scores, -1)


@pytest.mark.parametrize("scale", [None, 1.0, 0.03, -0.5, 0.0], ids=["default", "one", "small", "negative", "zero"])
def test_scale(attend, agrees, draw, same, dtype, scale):
    q, k, v = draw(S=2, HKV=1, D=24, dtype=dtype)
    o, lse = agrees(attend, q, k, v, ranges=same([(2, 9), (11, 15)], 1, 2, 1), causal=False, scale=scale)
    keys = [*range(2, 9), *range(11, 15)]
    want = expected(q, k, keys, 1 / math.sqrt(24) if scale is None else scale)
    assert (lse.shape, lse.dtype) == ((1, 2, 2), torch.float32)
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5)
    if scale == 0.0:
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(11)), rtol=0, atol=1e-6)
        mean = v[:, keys, 0].double().mean(1)[:, None, None].expand_as(o)
        torch.testing.assert_close(o.double(), mean, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [60.0, -60.0], ids=["peaked", "peaked-negative"])
def test_large_scores_do_not_overflow(attend, draw, same, scale):
    """Scores of several hundred: exp of them is no fp32 number."""
    q, k, v = draw(S=1, HKV=1)
    o, lse = attend(q, k, v, ranges=same([(0, 20)], 1, 1, 1), scale=scale, return_lse=True)
    want = expected(q, k, range(20), scale)
    assert want.abs().max() > 200
    assert o.isfinite().all()
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-3)


def test_output_does_not_depend_on_the_lse(attend_all, draw, same, dtype):
    q, k, v = draw(dtype=dtype)
    ranges = same([(2, 9), (11, 15)], 1, 3, 2)
    assert torch.equal(attend_all(q, k, v, ranges=ranges), attend_all(q, k, v, ranges=ranges, return_lse=True)[0])


def test_lse_merges_disjoint_selections(attend, agrees, draw, same):
    """What LSE is for: two calls over two halves make one over both."""
    q, k, v = draw()
    halves = [attend(q, k, v, ranges=same([s], 1, 3, 2), return_lse=True) for s in ((2, 9), (11, 15))]
    whole, lse = agrees(attend, q, k, v, ranges=same([(2, 9), (11, 15)], 1, 3, 2))
    merged = torch.logaddexp(halves[0][1], halves[1][1])
    torch.testing.assert_close(merged, lse, rtol=0, atol=1e-5)
    o = sum(o * (part - merged).exp()[..., None] for o, part in halves)
    torch.testing.assert_close(o, whole, rtol=0, atol=1e-5)


def test_lse_of_auto(draw, same, device):
    """The same shapes and dtypes on every route, and for a packed batch."""
    for min_L in (0, 10**6):
        with nsa.configure(sel_triton_min_L=min_L):
            q, k, v = draw(B=2)
            o, lse = nsa.selection_attention(q, k, v, ranges=same([(2, 9)], 2, 3, 2), max_selected=7, return_lse=True)
            assert (o.shape, lse.shape, lse.dtype) == ((2, 3, 4, 16), (2, 3, 4), torch.float32)
            q, k, v = draw(S=3, S_kv=3, varlen=True)
            cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
            ranges = same([(0, 2)], 3, 2)
            o, lse = nsa.selection_attention(q, k, v, ranges=ranges, cu_seqlens=cu, max_selected=2, return_lse=True)
            assert (o.shape, lse.shape, lse.dtype) == ((3, 4, 16), (3, 4), torch.float32)
