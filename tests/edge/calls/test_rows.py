"""Packed rows and the original wrapper's layout: the same kernels seen differently, so the same semantics."""

import math

import pytest
import torch

import nsa
import nsa.kernels
from nsa.call import Call
from nsa.plain.oracle import selection_reference

DENSE = {"group": nsa.sel_attn_fwd_dense_group, "per_head": nsa.sel_attn_fwd_dense}
VARLEN = {"group": nsa.sel_attn_fwd_varlen_group, "per_head": nsa.sel_attn_fwd_varlen}


@pytest.fixture(params=DENSE)
def schedule(request):
    return request.param


@pytest.fixture
def dense(schedule):
    return DENSE[schedule]


@pytest.fixture
def varlen(schedule):
    return VARLEN[schedule]


@pytest.fixture
def draw_rows(device):
    """`(Q [N, H, D], K [N, L, D], V [N, L, Dv])`, or with `total` keys for all rows `K_all [total, D]`."""

    def make(N=3, H=4, L=9, D=16, Dv=24, total=None, dtype=torch.float32):
        g = torch.Generator().manual_seed(0)
        keys = (N, L) if total is None else (total,)
        return [torch.randn(*s, generator=g).to(device, dtype) for s in ((N, H, D), (*keys, D), (*keys, Dv))]

    return make


@pytest.fixture
def cu(device):
    def make(*ends, dtype=torch.int32):
        return torch.tensor(ends, dtype=dtype, device=device)

    return make


def check(got, Q, K, V, spans, scale=None):
    """Against the oracle: row `i` reads `spans[i]` of keys `K [N or 1, L, D]`."""
    q, k, v = Q[:, None].double(), K.expand(len(Q), -1, -1)[:, :, None], V.expand(len(Q), -1, -1)[:, :, None]
    ranges = torch.tensor(spans, device=Q.device).view(len(Q), 1, 1, 1, 2)
    o, lse = (
        x[:, 0]
        for x in selection_reference(Call.of(q, k, v, ranges=ranges, causal=False, scale=scale, return_lse=True))
    )
    assert (got[0].dtype, got[1].dtype) == (Q.dtype, torch.float32)
    torch.testing.assert_close(got[0].double(), o, rtol=0, atol=max(1e-5, 20 * torch.finfo(Q.dtype).eps))
    torch.testing.assert_close(got[1].double(), lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [None, -0.3], ids=["default-scale", "scale"])
def test_dense_rows(dense, draw_rows, dtype, scale):
    Q, K, V = draw_rows(dtype=dtype)
    o, lse = dense(Q, K, V, scale=scale, return_lse=True)
    assert (o.shape, lse.shape) == ((3, 4, 24), (3, 4))
    check((o, lse), Q, K, V, [(0, 9)] * 3, scale)
    assert torch.equal(dense(Q, K, V, scale=scale), o)


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("max_selected", [None, 9, 40], ids=["unbounded", "bound", "loose-bound"])
def test_varlen_rows(varlen, draw_rows, cu, dtype, width, max_selected):
    """An empty row first, between and last."""
    Q, K, V = draw_rows(N=5, total=12, dtype=dtype)
    ends = (0, 0, 3, 3, 12, 12)
    o, lse = varlen(Q, K, V, cu(*ends, dtype=width), max_selected=max_selected, return_lse=True)
    assert (o.shape, lse.shape) == ((5, 4, 24), (5, 4))
    check((o, lse), Q, K[None], V[None], list(zip(ends, ends[1:], strict=False)))
    for row in (0, 2, 4):
        assert not o[row].any()
        assert (lse[row] == -math.inf).all()


@pytest.mark.usefixtures("split")
def test_split_rows(dense, varlen, draw_rows, cu, dtype):
    Q, K, V = draw_rows(N=2, L=40, dtype=dtype)
    check(dense(Q, K, V, return_lse=True), Q, K, V, [(0, 40)] * 2)
    K, V = K.flatten(0, 1), V.flatten(0, 1)
    check(varlen(Q, K, V, cu(0, 73, 80), return_lse=True), Q, K[None], V[None], [(0, 73), (73, 80)])


def test_nothing_to_do(dense, varlen, draw_rows, cu):
    for N, L in ((0, 9), (3, 0), (0, 0)):
        o, lse = dense(*draw_rows(N=N, L=L), return_lse=True)
        assert (o.shape, lse.shape) == ((N, 4, 24), (N, 4))
        assert not o.any()
        assert (lse == -math.inf).all()
        o, lse = varlen(*draw_rows(N=N, total=0), cu(*[0] * (N + 1)), return_lse=True)
        assert (o.shape, lse.shape) == ((N, 4, 24), (N, 4))
        assert not o.any()
        assert (lse == -math.inf).all()


def test_out(dense, varlen, draw_rows, cu):
    Q, K, V = draw_rows()
    buffer = torch.full((4, 3, 31), math.nan, device=Q.device)
    out = buffer.transpose(0, 1)[..., 2:26]
    assert dense(Q, K, V, out=out) is out
    assert torch.equal(out, dense(Q, K, V))
    assert buffer.isnan().sum() == buffer.numel() - out.numel()
    out.fill_(math.nan)
    K, V = K.flatten(0, 1), V.flatten(0, 1)
    assert varlen(Q, K, V, cu(0, 9, 9, 20), out=out) is out
    assert torch.equal(out, varlen(Q, K, V, cu(0, 9, 9, 20)))


def test_any_strides(dense, varlen, draw_rows, cu):
    """Heads first, keys as every other one of a larger buffer, a cache shared by all rows."""
    Q, K, V = draw_rows()
    want = dense(Q, K, V)
    Q2 = Q.transpose(0, 1).contiguous().transpose(0, 1)
    K2, V2 = (torch.stack((x, x * math.nan), 2)[:, :, 0] for x in (K, V))
    torch.testing.assert_close(dense(Q2, K2, V2), want, rtol=0, atol=1e-6)
    one = dense(Q, K[:1].expand_as(K), V[:1].expand_as(V), return_lse=True)
    check(one, Q, K[:1], V[:1], [(0, 9)] * 3)
    K2, V2 = (torch.stack((x, x * math.nan), 1)[:, 0] for x in (K[0], V[0]))
    check(varlen(Q, K2, V2, cu(0, 2, 7, 9), return_lse=True), Q, K[:1], V[:1], [(0, 2), (2, 7), (7, 9)])


def test_other_rows_do_not_matter(dense, varlen, draw_rows, cu, dtype):
    Q, K, V = draw_rows(dtype=dtype)
    bad = [x.clone() for x in (Q, K, V)]
    for x in bad:
        x[[0, 2]] = math.nan
    assert torch.equal(dense(*bad)[1], dense(Q, K, V)[1])
    flat = (0, 9, 18, 27)
    want = varlen(Q, K.flatten(0, 1), V.flatten(0, 1), cu(*flat))
    assert torch.equal(varlen(bad[0], bad[1].flatten(0, 1), bad[2].flatten(0, 1), cu(*flat))[1], want[1])


@pytest.mark.parametrize(
    "ends", [(0, 50, 99, 200), (-70, -3, 4, 9), (9, 4, -2, 2), (2**31 - 1, -(2**31), 3, 2**31 - 1)]
)
def test_wrong_cu_seqlens_read_nothing_outside(varlen, draw_rows, cu, ends):
    Q, K, V = draw_rows(total=9)
    K, V = (torch.cat((x * math.nan, x, x * math.nan))[9:18] for x in (K, V))
    o, lse = varlen(Q, K, V, cu(*ends), return_lse=True)
    assert not o.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("H", [1, 3, 64, 100, 128], ids=lambda H: f"H{H}")
def test_heads_of_a_row(draw_rows, cu, H):
    Q, K, V = draw_rows(N=2, H=H)
    check(nsa.sel_attn_fwd_dense_group(Q, K, V, return_lse=True), Q, K, V, [(0, 9)] * 2)
    got = nsa.sel_attn_fwd_varlen_group(Q, K[0], V[0], cu(0, 4, 9), return_lse=True)
    check(got, Q, K[:1], V[:1], [(0, 4), (4, 9)])


def test_route_of_each_entry_point(draw_rows, cu):
    """They run their own kernel or raise."""
    Q, K, V = draw_rows()
    packed = K[0], V[0], cu(0, 3, 5, 9)
    for call, route in (
        (lambda: nsa.sel_attn_fwd_dense(Q, K, V), "per_head"),
        (lambda: nsa.sel_attn_fwd_dense_group(Q, K, V), "query_major"),
        (lambda: nsa.sel_attn_fwd_varlen(Q, *packed), "per_head"),
        (lambda: nsa.sel_attn_fwd_varlen_group(Q, *packed), "query_major"),
    ):
        before = nsa.kernels.launches.copy()
        call()
        assert nsa.kernels.launches - before == {route: 1}


# --- the original wrapper's layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [nsa.selection_attention_triton, nsa.grouped_selection_attention_packed])
@pytest.mark.parametrize("min_L", [0, 10**6], ids=["long", "short"])
def test_original_layout(draw, same, dtype, entry, min_L):
    """`Q [B, S, HKV, G, D]`, `K [B, HKV, S_kv, D]`; spans are taken as given unless `causal` is asked for."""
    q, k, v = draw(B=2, S=2, S_kv=12, Dv=24, dtype=dtype)
    ranges = same([(1, 5), (8, 40)], 2, 2, 2)
    original = q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2).contiguous()
    for causal in (False, True):
        with nsa.configure(sel_triton_min_L=min_L):
            o = entry(*original, ranges, causal=causal, scale=0.4, max_selected=16)
        want = selection_reference(Call.of(q.double(), k, v, ranges=ranges, causal=causal, scale=0.4))[0].unflatten(
            2, (2, 2)
        )
        assert (o.shape, o.dtype) == ((2, 2, 2, 2, 24), dtype)
        torch.testing.assert_close(o.double(), want, rtol=0, atol=max(1e-5, 20 * torch.finfo(dtype).eps))
    assert torch.equal(entry(*original, ranges), entry(*original, ranges, causal=False))


@pytest.mark.parametrize("entry", [nsa.selection_attention_triton, nsa.grouped_selection_attention_packed])
def test_original_layout_without_rows_or_keys(draw, same, entry):
    for shape in ({"B": 0}, {"S": 0}, {"S_kv": 0}):
        q, k, v = draw(**({"B": 1, "S": 2} | shape))
        ranges = same([(0, 5)], *q.shape[:2], 2)
        o = entry(q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), ranges)
        assert o.shape == (*q.shape[:2], 2, 2, 16)
        assert not o.any()
