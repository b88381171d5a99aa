"""Packed rows and the original wrapper's layout: the same kernels seen differently, so the same semantics."""

import math

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.matrix.inputs import drowned

from ...conftest import compare
from ...parity.pairs import in_pairs
from ..conftest import LANE_DTYPES

DENSE = {"group": nsa.sel_attn_fwd_dense_group, "per_head": nsa.sel_attn_fwd_dense}
VARLEN = {"group": nsa.sel_attn_fwd_varlen_group, "per_head": nsa.sel_attn_fwd_varlen}
HEADS = (1, 3, 64, 100, 128)
# Sizes and arguments of a call; `ends` are the cu_seqlens of rows with lengths of their own.
ROWS = {
    **{"usual": {}, "scale": {"scale": -0.3}, "no-rows": {"N": 0}, "no-keys": {"L": 0}, "nothing": {"N": 0, "L": 0}},
    **{f"H{H}": {"H": H} for H in HEADS},
    **{f"varlen-H{H}": {"H": H, "ends": (0, 4, 9)} for H in HEADS},
    **{f"some-empty-bound-{L}": {"ends": (0, 0, 3, 3, 12, 12), "max_selected": L} for L in (None, 9, 40)},
    **{"varlen-no-rows": {"ends": (0,)}, "varlen-no-keys": {"ends": (0, 0, 0, 0)}},
    "one-cache-for-all": {"one": True},
}


@pytest.fixture
def draw_rows(device):
    """`(Q [N, H, D], K [N, L, D], V [N, L, Dv])`, or with `total` keys for all rows `K_all [total, D]`."""

    def make(N=3, H=4, L=9, D=16, Dv=24, total=None, dtype=torch.float32):
        g = torch.Generator().manual_seed(0)
        keys = (N, L) if total is None else (total,)
        return [torch.randn(*s, generator=g).to(device, dtype) for s in ((N, H, D), (*keys, D), (*keys, Dv))]

    return make


def check(schedule, draw_rows, dtype, ends=None, scale=None, one=False, max_selected=None, **sizes):
    """Amid NaN, into a tensor of NaN whose surroundings stay as they are: what the oracle says. Without LSE: the same
    bits.
    """
    attend, how = DENSE[schedule], {"scale": scale}
    if ends is not None:
        attend, how["max_selected"] = VARLEN[schedule], max_selected
        sizes |= {"N": len(ends) - 1, "total": ends[-1]}
    Q, K, V = rows = draw_rows(**sizes, dtype=dtype)
    cu = () if ends is None else (torch.tensor(ends, device=Q.device),)
    spans = [(0, K.shape[1])] * len(Q) if ends is None else list(zip(ends, ends[1:], strict=False))
    if one or ends is not None:
        K, V = (x[None if ends else slice(1)].expand(len(Q), -1, -1) for x in (K, V))
    rows = [Q, K, V] if one else rows
    ranges = torch.tensor(spans, dtype=torch.int64, device=Q.device).view(len(Q), 1, 1, 1, 2)
    call = Call.of(Q[:, None].double(), K[:, :, None], V[:, :, None], ranges=ranges, causal=False, scale=scale)
    want = [x[:, 0] for x in selection_reference(call._replace(return_lse=True))]
    out = drowned(Q.new_full((*Q.shape[:2], V.shape[-1]), math.nan), 2)
    amid = rows if one else [drowned(x, room) for room, x in enumerate(rows, 3)]  # no two have the same strides
    got = attend(*amid, *cu, **how, out=out, return_lse=True)
    assert got[0] is out
    compare(got, want, dtype)
    assert out._base.isnan().sum() == out._base.numel() - out.numel()
    assert torch.equal(attend(*rows, *(x.int() for x in cu), **how), out)


# A head of "per_head" is a program of its own, so that their number is that of programs.
PER_HEAD = {name: row for name, row in ROWS.items() if row.get("H", 0) <= 3}


@pytest.mark.parametrize(
    ("schedule", "row", "dtype"),
    in_pairs(["group"], ROWS, LANE_DTYPES) + in_pairs(["per_head"], PER_HEAD, LANE_DTYPES), indirect=["dtype"],
)  # fmt: skip
def test_rows(draw_rows, schedule, row, dtype):
    check(schedule, draw_rows, dtype, **row)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("schedule", DENSE)
@pytest.mark.parametrize("row", [{"N": 2, "L": 40}, {"ends": (0, 73, 73, 80)}], ids=["dense", "varlen"])
def test_split_rows(draw_rows, schedule, row, dtype):
    check(schedule, draw_rows, dtype, **row)


@pytest.fixture(params=VARLEN)
def varlen(request):
    return VARLEN[request.param]


def test_other_rows_do_not_matter(varlen, draw_rows, device, dtype):
    rows, ends = draw_rows(total=27, dtype=dtype), torch.tensor([0, 9, 18, 27], dtype=torch.int32, device=device)
    want = varlen(*rows, ends)[1]
    rows[0][[0, 2]], rows[1][:9], rows[1][18:], rows[2][:9], rows[2][18:] = [math.nan] * 5
    assert torch.equal(varlen(*rows, ends)[1], want)


@pytest.mark.parametrize(
    "ends", [(0, 50, 99, 200), (-70, -3, 4, 9), (9, 4, -2, 2), (2**31 - 1, -(2**31), 3, 2**31 - 1)]
)
def test_wrong_cu_seqlens_read_nothing_outside(varlen, draw_rows, device, ends):
    Q, K, V = draw_rows(total=9)
    K, V = (torch.cat((x * math.nan, x, x * math.nan))[9:18] for x in (K, V))
    o, lse = varlen(Q, K, V, torch.tensor(ends, dtype=torch.int32, device=device), return_lse=True)
    assert not o.isnan().any()
    assert not lse.isnan().any()


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
