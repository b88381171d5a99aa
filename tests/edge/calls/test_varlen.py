"""Packed batches, `[T, H, D]` with `cu_seqlens`: each sequence on its own, and nothing beyond the tensors."""

import math

import pytest
import torch

BIG = 2**62


@pytest.fixture
def cu(device):
    """`cu(0, 3, 7)`: cumulative lengths on the device."""

    def make(*ends, dtype=torch.int32):
        return torch.tensor(ends, dtype=dtype, device=device)

    return make


def rows_of(n, T, HKV=2, low=-3, high=14, seed=0, device=None):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (T, HKV, n, 2), generator=g, dtype=torch.int32).to(device)


LENGTHS = {
    "one": [5],
    "several": [3, 1, 4],
    "empty-first": [0, 2, 3],
    "empty-between": [2, 0, 0, 3],
    "empty-last": [4, 0],
    "all-empty": [0, 0],
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_sequences(attend, agrees, draw, cu, device, kind, causal):
    lengths = LENGTHS[kind]
    T = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    q, k, v = draw(S=T, S_kv=T, varlen=True)
    o, lse = agrees(attend, q, k, v, ranges=rows_of(3, T, high=6, device=device), cu_seqlens=cu(*ends), causal=causal)
    assert o.shape == (T, 4, 16)
    assert (lse.shape, lse.dtype) == ((T, 4), torch.float32)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_queries_and_keys_of_different_lengths(attend_all, agrees, draw, cu, device, dtype, causal):
    """Fewer queries than keys, more queries than keys, no keys, no queries."""
    q, k, v = draw(S=9, S_kv=24, varlen=True, dtype=dtype)
    pair = cu(0, 2, 6, 8, 8, 9), cu(0, 11, 13, 13, 20, 24)
    agrees(attend_all, q, k, v, ranges=rows_of(3, 9, device=device), cu_seqlens=pair, causal=causal)


def test_sequence_is_a_batch_entry(attend, draw, cu, device):
    """The same call as a batch of equal sequences."""
    q, k, v = draw(B=2, S=3, S_kv=12)
    ranges = rows_of(2, 6, device=device)
    want = attend(q, k, v, ranges=ranges.view(2, 3, 2, 2, 2), return_lse=True)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    got = attend(*flat, ranges=ranges, cu_seqlens=(cu(0, 3, 6), cu(0, 12, 24)), return_lse=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.view_as(b), b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_blocks(attend, agrees, draw, cu, device, causal):
    """Block numbers are local to the sequence."""
    q, k, v = draw(S=5, S_kv=30, varlen=True)
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(-1, 5, (5, 2, 3), generator=g, dtype=torch.int32).to(device)
    pair = cu(0, 2, 5), cu(0, 13, 30)
    agrees(attend, q, k, v, block_indices=blocks, block_size=4, cu_seqlens=pair, causal=causal)


def test_q_positions(attend, agrees, draw, cu, device):
    """Local to the sequence, as the spans are."""
    q, k, v = draw(S=5, S_kv=24, varlen=True)
    positions = torch.tensor([7, -1, 400, 0, BIG], device=device)
    pair = cu(0, 2, 5), cu(0, 11, 24)
    agrees(attend, q, k, v, ranges=rows_of(3, 5, device=device), cu_seqlens=pair, q_positions=positions)


def test_int32_and_int64_cu_seqlens_agree_bitwise(attend, draw, cu, device):
    q, k, v = draw(S=5, S_kv=24, varlen=True)
    ranges = rows_of(3, 5, device=device)
    results = []
    for width in (torch.int32, torch.int64):
        pair = cu(0, 2, 5, dtype=width), cu(0, 11, 24, dtype=width)
        results.append(attend(q, k, v, ranges=ranges, cu_seqlens=pair, return_lse=True))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tokens_past_the_last_sequence_are_empty_rows(attend, agrees, draw, cu, same, causal):
    q, k, v = draw(S=6, S_kv=20, varlen=True)
    pair = cu(0, 2, 4), cu(0, 9, 13)
    o, lse = agrees(attend, q, k, v, ranges=same([(0, 20)], 6, 2), cu_seqlens=pair, causal=causal)
    assert not o[4:].any()
    assert (lse[4:] == -math.inf).all()
    assert lse[:4].isfinite().all()


def test_many_sequences(attend, agrees, draw, cu, device):
    """More than a program looks through at a time."""
    lengths = torch.zeros(300, dtype=torch.int64)
    lengths[[3, 127, 128, 129, 299]] = 1
    ends = [0, *lengths.cumsum(0).tolist()]
    q, k, v = draw(S=5, S_kv=5, HKV=1, varlen=True)
    ranges = rows_of(1, 5, HKV=1, low=0, high=1, device=device) + torch.tensor([0, 1], device=device)
    _, lse = agrees(attend, q, k, v, ranges=ranges, cu_seqlens=cu(*ends))
    assert lse.isfinite().all()


def test_last_sequences_without_keys(attend, agrees, draw, cu, same, dtype):
    """They begin where the keys end; nothing may be looked up there."""
    q, k, v = draw(S=5, S_kv=9, varlen=True, dtype=dtype)
    pair = cu(0, 2, 4, 5), cu(0, 9, 9, 9)
    o, lse = agrees(attend, q, k, v, ranges=same([(0, 20)], 5, 2), cu_seqlens=pair)
    assert not o[2:].any()
    assert (lse[2:] == -math.inf).all()


# Lengths that are wrong: any result, but from memory of the call only, and nothing that stops it.
GARBAGE = {
    "decreasing": ([0, 4, 2], [0, 20, 9]),
    "past-the-end": ([0, 3, 99], [0, 70, 99]),
    "negative": ([-3, 2, 5], [-8, -2, 24]),
    "everywhere": ([7, -9, 3], [2**31 - 1, -(2**31), 12]),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_wrong_lengths_read_nothing_outside(attend, draw, cu, same, kind, width, causal):
    """K and V lie between NaNs: a read past either end shows in the output."""
    q, k, v = draw(S=5, S_kv=24, HKV=1, varlen=True)
    arena_k, arena_v = (torch.cat((x * math.nan, x, x * math.nan)) for x in (k, v))
    ends_q, ends_k = GARBAGE[kind]
    if width == torch.int64 and kind == "everywhere":
        ends_k = [BIG, -BIG, 12]
    pair = cu(*ends_q, dtype=width), cu(*ends_k, dtype=width)
    ranges = same([(0, 9), (-(2**31), 2**31 - 1)], 5, 1)
    o, lse = attend(q, arena_k[24:48], arena_v[24:48], ranges=ranges, cu_seqlens=pair, causal=causal, return_lse=True)
    assert not o.isnan().any()
    assert not lse.isnan().any()
