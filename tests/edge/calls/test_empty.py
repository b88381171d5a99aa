"""Nothing to attend to: rows, batches and caches without keys give O = 0 and LSE = -inf exactly, and no NaN."""

import math

import pytest
import torch

# What a row can list that selects nothing, over 24 keys.
NOTHING = {
    "empty-span": {"ranges": [(5, 5)]},
    "reversed": {"ranges": [(9, 2), (24, 0)]},
    "past-the-end": {"ranges": [(24, 40), (2**30, 2**30 + 9)]},
    "before-the-first": {"ranges": [(-9, -1), (-4, 0)]},
    "n0": {"ranges": torch.empty(0, 2).tolist()},
    "padding": {"block_indices": [-1, -7, -(2**31)], "block_size": 16},
    "block-past-the-end": {"block_indices": [2, 2**31 - 1], "block_size": 16},
    "n0-blocks": {"block_indices": [], "block_size": 16},
}


def selection(kind, same, *lead):
    given = dict(NOTHING[kind])
    name = "ranges" if "ranges" in given else "block_indices"
    if kind == "n0":
        given[name] = same([], *lead).view(*lead, 0, 2)
    else:
        given[name] = same(given[name], *lead)
    return given


def is_nothing(o, lse):
    assert not o.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("kind", NOTHING)
def test_row_selects_nothing(attend_all, draw, same, dtype, kind):
    q, k, v = draw(S=2, HKV=1, Dv=24, dtype=dtype)
    out = q.new_full((1, 2, 2, 24), math.nan)
    o, lse = attend_all(q, k, v, **selection(kind, same, 1, 2, 1), causal=False, out=out, return_lse=True)
    is_nothing(o, lse)
    assert o is out
    assert (lse.shape, lse.dtype) == ((1, 2, 2), torch.float32)


@pytest.mark.parametrize(("kind", "bound"), [("empty-span", 0), *((kind, 40) for kind in NOTHING)])
def test_row_selects_nothing_with_a_bound(attend, draw, same, kind, bound):
    """The bound promises at most so many keys; it makes none."""
    q, k, v = draw(S=1, HKV=1)
    is_nothing(*attend(q, k, v, **selection(kind, same, 1, 1, 1), max_selected=bound, return_lse=True))


def test_empty_rows_among_full_ones(attend, agrees, draw, same, dtype):
    q, k, v = draw(B=2, S=2, dtype=dtype)
    ranges = same([(0, 9), (12, 20)], 2, 2, 2)
    ranges[0, 1, 0] = ranges[1, 0, 1] = 0
    o, lse = agrees(attend, q, k, v, ranges=ranges)
    is_nothing(o[0, 1, :2], lse[0, 1, :2])
    is_nothing(o[1, 0, 2:], lse[1, 0, 2:])
    assert lse.isfinite().sum() == 12


@pytest.mark.usefixtures("split")
def test_split_among_programs(attend, agrees, draw, same):
    """No program finds a key, or only the first does."""
    q, k, v = draw(S=2, HKV=1)
    ranges = same([(7, 7)], 1, 2, 1)
    is_nothing(*attend(q, k, v, ranges=ranges, return_lse=True))
    ranges[0, 1, 0, 0, 1] = 9
    _, lse = agrees(attend, q, k, v, ranges=ranges)
    assert lse.isfinite().sum() == 2


def test_no_keys_at_all(attend, draw, same, dtype):
    q, k, v = draw(S_kv=0, dtype=dtype)
    is_nothing(*attend(q, k, v, ranges=same([(0, 9)], 1, 3, 2), return_lse=True))
    blocks = same([0, -1, 3], 1, 3, 2)
    is_nothing(*attend(q, k, v, block_indices=blocks, block_size=16, causal=False, return_lse=True))
    is_nothing(*attend(q, k, v, ranges=same([(0, 9)], 1, 3, 2), max_selected=9, return_lse=True))


@pytest.mark.parametrize(
    ("shape", "lead"), [({"B": 0}, (0, 3, 2)), ({"S": 0}, (1, 0, 2)), ({"B": 0, "S_kv": 0}, (0, 3, 2))]
)
def test_no_rows(attend, draw, same, shape, lead):
    q, k, v = draw(**shape, Dv=32)
    for given in ({"ranges": same([(0, 9)], *lead)}, {"block_indices": same([0], *lead), "block_size": 16}):
        o, lse = attend(q, k, v, **given, return_lse=True)
        assert (o.shape, o.dtype) == ((lead[0], lead[1], 4, 32), q.dtype)
        assert (lse.shape, lse.dtype) == ((lead[0], lead[1], 4), torch.float32)


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]], ids=["no-sequence", "one-empty", "two-empty"])
def test_no_tokens_in_a_packed_batch(attend, draw, same, device, cu):
    q, k, v = draw(S=0, S_kv=0, varlen=True)
    cu = torch.tensor(cu, dtype=torch.int32, device=device)
    o, lse = attend(q, k, v, ranges=same([(0, 9)], 0, 2), cu_seqlens=cu, return_lse=True)
    assert o.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_packed_batch_without_sequences(attend, draw, same, device):
    """Tokens that belong to no sequence see nothing."""
    q, k, v = draw(S=2, varlen=True)
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    is_nothing(*attend(q, k, v, ranges=same([(0, 9)], 2, 2), cu_seqlens=cu, return_lse=True))


@pytest.mark.parametrize("S_kv", [1, 24])
def test_one_key(attend, draw, same, dtype, S_kv):
    """The weight of a single key is 1: the output is its value, and the LSE its score."""
    q, k, v = draw(S_kv=S_kv, dtype=dtype)
    last = S_kv - 1
    o, lse = attend(q, k, v, ranges=same([(last, last + 1)], 1, 3, 2), causal=False, return_lse=True)
    values = v[:, last].repeat_interleave(2, 1)[:, None].expand_as(o)  # [B, 1, HQ, Dv]
    torch.testing.assert_close(o, values, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    score = (q.double() * k[:, last].double().repeat_interleave(2, 1)[:, None]).sum(-1) / 4
    torch.testing.assert_close(lse.double(), score, rtol=1e-6, atol=1e-6)
