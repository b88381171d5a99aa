"""The fp64 oracle, every row of the semantics table, against a loop over rows that tests keys one by one."""

import math

import pytest
import torch

from nsa.call import Call
from nsa.plain.oracle import selection_reference

HUGE = 2**62
B, S, S_KV, HKV, G, D, DV = 2, 3, 20, 2, 3, 16, 24


def one_row(q, k, v, listed, limit, scale):
    """Attention of `q [G, D]` over keys `k [S_kv, D]`, each as often as `listed` spans hold it, below `limit`."""
    keys = [j for start, end in listed for j in range(min(limit, len(k))) if start <= j < end]
    if not keys:
        return q.new_zeros(len(q), v.shape[-1]), q.new_full((len(q),), -math.inf)
    scores = q @ k[keys].T * scale
    weights = scores.exp()
    return weights @ v[keys] / weights.sum(-1, keepdim=True), weights.sum(-1).log()


def by_hand(q, k, v, ranges, limits, sequence=None, scale=None):
    """Loop over tokens and KV heads. `q [tokens, HQ, D]`, `k [batches, S_kv, …]`, `ranges [tokens][HKV][n]`.

    `limits`: per token, how many keys of its sequence are visible; `sequence`: per token, `(batch, first, last)`.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1])
    for t in range(len(q)):
        batch, first, last = sequence[t]
        for h in range(k.shape[2]):
            heads = slice(h * (q.shape[1] // k.shape[2]), (h + 1) * (q.shape[1] // k.shape[2]))
            rows = (x[batch, first:last, h] for x in (k, v))
            o[t, heads], lse[t, heads] = one_row(q[t, heads], *rows, ranges[t][h], limits[t], scale)
    return o, lse


def spans_of_blocks(blocks, size):
    return [[[(b * size, b * size + size) if b >= 0 else (0, 0) for b in row] for row in token] for token in blocks]


def drawn(*lead, low, high, seed=0):
    return torch.randint(low, high, lead, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def qkv(device):
    """Dense random q, k, v in fp64."""
    g = torch.Generator().manual_seed(1)
    shapes = (B, S, HKV * G, D), (B, S_KV, HKV, D), (B, S_KV, HKV, DV)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(device) for s in shapes]


def check(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.view(x.shape), rtol=0, atol=1e-12)


# Spans as a caller may write them, the same for every row; None: every row has its own random ones.
SPANS = {
    "random": None,
    "dense": [(0, S_KV)],
    "empty": [(0, 0), (7, 7)],
    "duplicates": [(2, 9), (2, 9), (5, 6)],
    "overlap": [(2, 9), (4, 15)],
    "unsorted": [(15, 18), (1, 4), (8, 10)],
    "reversed": [(9, 2), (3, 6)],
    "negative": [(-7, 3), (-5, -1)],
    "past-the-end": [(17, 90), (40, 50)],
    "huge": [(-HUGE, 3), (18, HUGE), (HUGE, -HUGE), (HUGE, HUGE)],
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", SPANS)
def test_oracle_ranges(qkv, device, kind, causal):
    q, k, v = qkv
    if SPANS[kind] is None:
        ranges = drawn(B, S, HKV, 4, 2, low=-3, high=S_KV + 4)
    else:
        ranges = torch.tensor(SPANS[kind]).expand(B, S, HKV, -1, 2)
    got = selection_reference(Call.of(q, k, v, ranges=ranges.to(device), causal=causal, return_lse=True))
    limits = [S_KV - S + s + 1 if causal else S_KV for s in range(S)] * B
    whole = [(b, 0, S_KV) for b in range(B) for _ in range(S)]
    check(got, by_hand(q.flatten(0, 1), k, v, ranges.flatten(0, 1).tolist(), limits, whole))


@pytest.mark.parametrize("size", [1, 3, 16, 24, 64])
def test_oracle_blocks(qkv, device, size):
    q, k, v = qkv
    blocks = drawn(B, S, HKV, 5, low=-2, high=-(-S_KV // size) + 1, seed=size)
    blocks[0, 0, 0, 1], blocks[1, 2, 1, 0] = HUGE, -HUGE
    got = selection_reference(
        Call.of(q, k, v, block_indices=blocks.to(device), block_size=size, scale=-0.7, return_lse=True)
    )
    limits = [S_KV - S + s + 1 for s in range(S)] * B
    whole = [(b, 0, S_KV) for b in range(B) for _ in range(S)]
    spans = spans_of_blocks(blocks.flatten(0, 1).tolist(), size)
    check(got, by_hand(q.flatten(0, 1), k, v, spans, limits, whole, scale=-0.7))


def test_oracle_more_queries_than_keys(qkv, device):
    """The first queries sit before the first key: they see nothing."""
    q, k, v = qkv
    k, v = k[:, :2], v[:, :2]
    ranges = drawn(B, S, HKV, 3, 2, low=0, high=3)
    ranges[..., 0, :] = torch.tensor([0, 2])
    got = selection_reference(Call.of(q, k, v, ranges=ranges.to(device), return_lse=True))
    whole = [(b, 0, 2) for b in range(B) for _ in range(S)]
    check(got, by_hand(q.flatten(0, 1), k, v, ranges.flatten(0, 1).tolist(), [0, 1, 2] * B, whole))
    assert (got[1][:, 0] == -math.inf).all()


def test_oracle_q_positions(qkv, device):
    q, k, v = qkv
    positions = torch.tensor([[4, -1, 19], [0, HUGE, -HUGE]])
    ranges = drawn(B, S, HKV, 3, 2, low=0, high=S_KV)
    got = selection_reference(
        Call.of(q, k, v, ranges=ranges.to(device), q_positions=positions.to(device), return_lse=True)
    )
    limits = [max(0, t + 1) for t in positions.flatten().tolist()]
    whole = [(b, 0, S_KV) for b in range(B) for _ in range(S)]
    check(got, by_hand(q.flatten(0, 1), k, v, ranges.flatten(0, 1).tolist(), limits, whole))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_oracle_varlen(qkv, device, causal):
    """Sequences of their own lengths, one without queries, one without keys, one with more queries than keys."""
    q, k, v = (x.flatten(0, 1) for x in qkv)  # 6 queries, 40 keys
    q = torch.cat((q, q[:2]))
    cu_q, cu_k = [0, 3, 3, 4, 7], [0, 11, 20, 20, 22]  # the last token belongs to no sequence
    ranges = drawn(8, HKV, 3, 2, low=-2, high=14)
    cu = tuple(torch.tensor(c, dtype=torch.int32, device=device) for c in (cu_q, cu_k))
    got = selection_reference(Call.of(q, k, v, ranges=ranges.to(device), cu_seqlens=cu, causal=causal, return_lse=True))
    sequence, limits = [], []
    for (q0, q1), (k0, k1) in zip(zip(cu_q, cu_q[1:], strict=False), zip(cu_k, cu_k[1:], strict=False), strict=True):
        for s in range(q1 - q0):
            sequence.append((0, k0, k1))
            limits.append(max(0, k1 - k0 - (q1 - q0) + s + 1) if causal else k1 - k0)
    sequence.append((0, 0, 0))
    limits.append(0)
    check(got, by_hand(q, k[None], v[None], ranges.tolist(), limits, sequence))


def test_oracle_result_is_in_the_dtype_of_q(qkv, device):
    """Half inputs are computed in fp64 and rounded once."""
    q, k, v = (x.half() for x in qkv)
    ranges = drawn(B, S, HKV, 3, 2, low=0, high=S_KV).to(device)
    exact, exact_lse = selection_reference(Call.of(q.double(), k.double(), v.double(), ranges=ranges, return_lse=True))
    o, lse = selection_reference(Call.of(q, k, v, ranges=ranges, return_lse=True))
    assert torch.equal(o, exact.half())
    assert torch.equal(lse, exact_lse.float())
    assert torch.equal(selection_reference(Call.of(q.double(), k, v, ranges=ranges))[0], exact)
