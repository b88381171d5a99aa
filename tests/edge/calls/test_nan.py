"""NaN and infinity: what other rows selected never reaches a row; what it selected propagates as in SDPA.

`test_calls.py` poisons the keys that no row selects.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa

# NumPy says so when the interpreter computes with infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEYS = 20
KEY_MAJOR = {"backend": "triton", "schedule": "key_major", "return_lse": True}
POISON = {"nan": math.nan, "inf": math.inf, "minus-inf": -math.inf}


@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("size", [6, 200])
def test_key_major_keeps_nan_within_blocks_that_a_row_selected(draw, same, device, dtype, poison, where, size):
    """Values of a key that is clamped away in a selected block may leak, keys do not; other blocks never do.

    That is what the specification allows a key-major kernel: weights of zero are multiplied with a block's values.
    """
    q, k, v = draw(S=3, S_kv=3 * size, HKV=1, dtype=dtype)
    blocks = {"block_indices": same([0, -1], 1, 2, 1), "block_size": size}
    blocks["block_indices"] = torch.cat((blocks["block_indices"], same([0, 1], 1, 1, 1)), 1)
    blocks["q_positions"] = torch.tensor([[3 * size - 1, size - 1, size + 1]], device=device)
    clean = nsa.selection_attention(q, k, v, **blocks, **KEY_MAJOR)
    (k if where == "keys" else v)[:, size + 2 :] = POISON[poison]  # the third row's second block ends before it
    o, lse = nsa.selection_attention(q, k, v, **blocks, **KEY_MAJOR)
    assert torch.equal(o[:, :2], clean[0][:, :2])
    assert torch.equal(lse, clean[1])
    if where == "keys":
        assert torch.equal(o, clean[0])
    else:
        assert not o[:, 2].isfinite().any(), "no leak any more: say so in the specification's terms, and drop this"


@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_reaches_rows_of_key_major_that_selected_it(draw, same, dtype, where):
    q, k, v = draw(S=2, S_kv=40, HKV=1, dtype=dtype)
    (k if where == "keys" else v)[:, 21, :, 3] = math.nan
    ranges = torch.cat((same([(0, 9), (11, 22)], 1, 1, 1), same([(0, 0), (0, 0)], 1, 1, 1)), 1)
    o, lse = nsa.selection_attention(q, k, v, ranges=ranges, causal=False, **KEY_MAJOR)
    assert o[0, 0, :, 3].isnan().all()
    assert lse[0, 0].isnan().all() == (where == "keys")
    assert not o[0, 1].any()
    assert lse[0, 1].isneginf().all()


def test_other_rows_heads_and_batches_do_not_matter(attend, draw, same, dtype):
    """The query, the keys and the values of everybody else may be NaN."""
    q, k, v = draw(B=2, S=3, S_kv=KEYS, dtype=dtype)
    ranges = same([(0, KEYS)], 2, 3, 2)
    want = attend(q, k, v, ranges=ranges, return_lse=True)
    bad_q, bad_k, bad_v = (torch.full_like(x, math.nan) for x in (q, k, v))
    bad_q[1, 1, :2], bad_k[1, :, 0], bad_v[1, :, 0] = q[1, 1, :2], k[1, :, 0], v[1, :, 0]
    o, lse = attend(bad_q, bad_k, bad_v, ranges=ranges, return_lse=True)
    assert torch.equal(o[1, 1, :2], want[0][1, 1, :2])
    assert torch.equal(lse[1, 1, :2], want[1][1, 1, :2])
    assert o.isnan().sum() == o.numel() - 2 * 16


def test_other_sequences_do_not_matter(attend, draw, same, device):
    q, k, v = draw(S=5, S_kv=24, varlen=True)
    pair = tuple(torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 2, 4, 5], [0, 7, 19, 24]))
    selection = {"ranges": same([(-9, 3), (5, 99)], 5, 2), "cu_seqlens": pair}
    want = attend(q, k, v, **selection, return_lse=True)
    for x in (k, v):
        x[:7], x[19:] = math.nan, math.nan
    for a, b in zip(attend(q, k, v, **selection, return_lse=True), want, strict=True):
        assert torch.equal(a[2:4], b[2:4])
        assert a[[0, 1, 4]].isnan().all()


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_in_one_part_reaches_the_row(attend, draw, same, where):
    """A maximum that ignores NaN must not lose it when parts are merged."""
    q, k, v = draw(S=1, S_kv=40, HKV=1)
    for key in (0, 39):
        bad = {"k": k.clone(), "v": v.clone()}
        bad[where[0]][:, key] = math.nan
        o, lse = attend(q, **bad, ranges=same([(0, 40)], 1, 1, 1), return_lse=True)
        assert o.isnan().all()
        assert lse.isnan().all() if where == "keys" else lse.isfinite().all()


@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_reaches_exactly_the_rows_that_selected_it(attend_exact, draw, device, dtype, where):
    """Rows of one cache with spans of their own: which outputs are NaN is decided key by key."""
    q, k, v = draw(S=6, S_kv=KEYS, HKV=1, dtype=dtype)
    g = torch.Generator().manual_seed(2)
    start = torch.randint(0, KEYS, (1, 6, 1, 2), generator=g)
    ranges = torch.stack((start, start + torch.tensor([3, 2])), -1)
    bad = (4, 13)
    (k if where == "keys" else v)[:, list(bad), 0, 3] = math.nan
    hit = [any(a <= j < b for a, b in row for j in bad) for row in ranges[0, :, 0].tolist()]
    assert 0 < sum(hit) < 6
    o, lse = attend_exact(q, k, v, ranges=ranges.to(device), causal=False, return_lse=True)
    hit = torch.tensor(hit, device=device)
    if where == "keys":
        assert torch.equal(o[0].isnan(), hit[:, None, None].expand_as(o[0]))
        assert torch.equal(lse[0].isnan(), hit[:, None].expand_as(lse[0]))
    else:
        assert torch.equal(o[0, :, :, 3].isnan(), hit[:, None].expand(6, 2))
        assert o.isnan().sum() == 2 * hit.sum()
        assert lse.isfinite().all()


def sdpa(q, k, v):
    """What SDPA says of one row, `q [1, 1, G, D]` over all keys of `k [1, L, 1, D]`: its plain definition, in fp64.

    Its fused CPU kernels disagree with that and with each other (torch 2.13: zeros for a NaN query without a mask).
    """
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.double().cpu().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


INFINITIES = {
    "plus-inf-key": ("k", [(6, 3, math.inf)]),
    "minus-inf-key": ("k", [(6, 3, -math.inf)]),
    "nan-key": ("k", [(6, 3, math.nan)]),
    "two-inf-keys": ("k", [(6, 3, math.inf), (9, 3, math.inf)]),
    "inf-minus-inf-in-a-key": ("k", [(6, 3, math.inf), (6, 4, -math.inf)]),
    "plus-inf-value": ("v", [(6, 3, math.inf)]),
    "minus-inf-value": ("v", [(6, 3, -math.inf)]),
    "inf-minus-inf-values": ("v", [(6, 3, math.inf), (9, 3, -math.inf)]),
    "inf-in-other-columns": ("v", [(6, 3, math.inf), (9, 4, -math.inf)]),
    "nan-value": ("v", [(6, 3, math.nan)]),
    "inf-query": ("q", [(0, 3, math.inf)]),
    "nan-query": ("q", [(0, 3, math.nan)]),
}


@pytest.mark.parametrize("L", [12, 100], ids=lambda L: f"L{L}")
@pytest.mark.parametrize("kind", INFINITIES)
def test_selected_infinities_propagate_as_in_sdpa(attend, draw, same, dtype, kind, L):
    """One head sees the key with a positive, one with a negative sign. Within one tile, and across several."""
    which, places = INFINITIES[kind]
    q, k, v = draw(S=1, S_kv=L, HKV=1, dtype=dtype)
    q[0, 0, :, 3], q[0, 0, :, 4] = torch.tensor([0.5, -0.5]).to(q), torch.tensor([0.25, 0.25]).to(q)
    for key, column, value in places:
        {"q": q, "k": k, "v": v}[which][:, key, 0, column] = value
    with sdpa_kernel(SDPBackend.MATH):
        o = attend(q, k, v, ranges=same([(0, L)], 1, 1, 1), causal=False)
    want = sdpa(q, k, v)
    torch.testing.assert_close(o.double().cpu(), want, rtol=0, atol=3e-2, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2])
def test_all_selected_scores_are_minus_infinity(attend, draw, same, dtype, n):
    """SDPA gives such a row zeros, as if it had selected nothing."""
    q, k, v = draw(S=1, S_kv=n, HKV=1, dtype=dtype)
    q[..., 3], k[..., 3] = 1.0, -math.inf
    with sdpa_kernel(SDPBackend.MATH):
        o = attend(q, k, v, ranges=same([(0, n)], 1, 1, 1), causal=False)
    torch.testing.assert_close(o.double().cpu(), sdpa(q, k, v), rtol=0, atol=0, equal_nan=True)


def test_bound_that_was_broken_reads_nothing_outside(attend, draw, same):
    """More keys than `max_selected` promised: any result, but from the tensors."""
    q, k, v = draw(S=2, S_kv=KEYS, HKV=1)
    k, v = (torch.cat((x * math.nan, x, x * math.nan), 1)[:, KEYS : 2 * KEYS] for x in (k, v))
    o = attend(q, k, v, ranges=same([(0, KEYS), (3, 99)], 1, 2, 1), max_selected=5)
    assert not o.isnan().any()
