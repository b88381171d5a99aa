"""Tensors of more than 2^31 elements: every address is computed in 64 bits. The rest of them is NaN."""

import math

import pytest
import torch

import nsa
from nsa import validate
from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.judge.forward import reference_at

KEYS, D = 2**24 + 64, 128  # 2^31 + 8192 elements, 4 GiB in bf16
TAIL = 40

pytestmark = pytest.mark.gpu(memory_gib=24)


@pytest.fixture(scope="module")
def cache(device):
    """`[KEYS, D]`, keys and values in one; only the first and the last `TAIL` of them are numbers."""
    x = torch.full((KEYS, D), math.nan, device=device, dtype=torch.bfloat16)
    g = torch.Generator(device).manual_seed(0)
    for part in (x[:TAIL], x[-TAIL:]):
        part.copy_(torch.randn(TAIL, D, generator=g, device=device))
    return x


def queries(cache, *shape):
    g = torch.Generator(cache.device).manual_seed(1)
    return torch.randn(*shape, D, generator=g, device=cache.device).to(cache)


def largest_offset(x):
    """Elements from the first of a tensor to its last: what a kernel computes of the strides that it is given."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def agree(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=2e-2)


def test_one_long_sequence(attend_exact, cache):
    q, k = queries(cache, 1, 2, 4), cache.view(1, KEYS, 1, D)
    ranges = torch.tensor([[KEYS - TAIL, 2**40], [3, 9]], device=k.device).expand(1, 2, 1, 2, 2)
    got = attend_exact(q, k, k, ranges=ranges, max_selected=64, return_lse=True)
    short = torch.cat((k[:, :TAIL], k[:, -TAIL:]), 1)
    ranges = torch.tensor([[TAIL, 2 * TAIL], [3, 9]], device=k.device).expand(1, 2, 1, 2, 2)
    agree(got, attend_exact(q, short, short, ranges=ranges, max_selected=64, return_lse=True))


def test_blocks_of_one_long_sequence(attend_all, cache):
    q, k = queries(cache, 1, 2, 4), cache.view(1, KEYS, 1, D)
    blocks = torch.tensor([KEYS // 8 - 1, -1, 0], device=k.device).expand(1, 2, 1, 3)
    got = attend_all(q, k, k, block_indices=blocks, block_size=8, causal=False, return_lse=True)
    short = torch.cat((k[:, -8:], k[:, :8]), 1)
    ranges = torch.tensor([[0, 16]], device=k.device).expand(1, 2, 1, 1, 2)
    agree(got, attend_all(q, short, short, ranges=ranges, causal=False, max_selected=16, return_lse=True))


def test_last_batch_entry(attend_all, cache):
    """And keys that lie far apart: the sequence axis is the slow one."""
    apart = KEYS // 5  # rows from one key to the next
    k = cache.as_strided((8, 5, 1, D), ((KEYS - 1 - 4 * apart) // 7 * D, apart * D, D, 1))
    assert largest_offset(k) > 2**31
    q, short = queries(cache, 8, 1, 4), queries(cache, 8, 5, 1)
    nothing = k.clone()
    k.copy_(short)
    ranges = torch.tensor([[0, 5]], device=k.device).expand(8, 1, 1, 1, 2)
    got = attend_all(q, k, k, ranges=ranges, max_selected=5, return_lse=True)
    k.copy_(nothing)
    agree(got, attend_all(q, short, short, ranges=ranges, max_selected=5, return_lse=True))


def test_packed_rows(cache):
    Q = queries(cache, 2, 4)
    cu = torch.tensor([KEYS - TAIL, KEYS - 9, KEYS], device=cache.device)
    got = nsa.sel_attn_fwd_varlen_group(Q, cache, cache, cu, max_selected=64, return_lse=True)
    tail = cache[-TAIL:]
    agree(got, nsa.sel_attn_fwd_varlen_group(Q, tail, tail, cu - (KEYS - TAIL), max_selected=64, return_lse=True))


def test_output(attend_all, cache):
    """Its rows are spread over such a buffer, the last head of the last token at its very end."""
    q, k = queries(cache, 1, 2, 4), cache[:TAIL].view(1, TAIL, 1, D)
    ranges = torch.tensor([[0, TAIL]], device=k.device).expand(1, 2, 1, 1, 2)
    buffer = cache.new_empty(KEYS, D)
    apart = KEYS // 8  # rows from one head to the next
    out = buffer.as_strided((1, 2, 4, D), (KEYS * D, (KEYS - 1 - 3 * apart) * D, apart * D, 1))
    assert largest_offset(out) > 2**31
    assert attend_all(q, k, k, ranges=ranges, max_selected=64, out=out) is out
    agree((out,), (attend_all(q, k, k, ranges=ranges, max_selected=64),))


@pytest.mark.parametrize("schedule", ["query_major", "per_head", "key_major"])
def test_prefill_of_262144_tokens(device, schedule):
    """64 heads in a buffer of 66: offsets into Q and O pass 2^31 long before the last token."""
    T, g = 262_144, torch.Generator(device).manual_seed(0)
    q = torch.empty(1, T, 66, D, device=device, dtype=torch.bfloat16)
    q.copy_(torch.randn(1, 1, 66, D, generator=g, device=device).bfloat16() * torch.rand(T, 1, 1, device=device))
    q, out = q[:, :, 2:], torch.full_like(q, math.nan)[:, :, 2:]
    k, v = (torch.randn(1, T, 4, D, generator=g, device=device).bfloat16() for _ in range(2))
    seen = torch.arange(T, device=device)[:, None, None] // 64 + 1
    blocks = (torch.rand(1, T, 4, 16, generator=g, device=device) * seen).to(torch.int32)
    selection = {"block_indices": blocks, "block_size": 64}
    assert q.stride(1) * (T - 1) > 2**31
    o, lse = nsa.selection_attention(
        q, k, v, **selection, backend="triton", schedule=schedule, out=out, return_lse=True
    )
    assert not o.isnan().any()
    crossing = 2**31 // q.stride(1)
    for rows in (slice(0, 8), slice(crossing - 8, crossing + 8), slice(T - 16, T)):
        agree((o[:, rows], lse[:, rows]), reference_at(q, k, v, rows, **selection))


def test_selection_past_two_billion_entries(device):
    """1,024 spans for each of a million rows; the last one of each row says something."""
    T, n = 262_144 + 64, 1024
    g = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, T, 4, 16, generator=g, device=device).bfloat16() for _ in range(3))
    ranges = torch.zeros(1, T, 4, n, 2, device=device, dtype=torch.int32)
    token = torch.arange(T, device=device, dtype=torch.int32)[:, None]
    ranges[0, :, :, -1, 0], ranges[0, :, :, -1, 1] = token - 30, token - 3
    assert ranges.numel() > 2**31
    o, lse = nsa.selection_attention(q, k, v, ranges=ranges, max_selected=27, backend="triton", return_lse=True)
    for rows in (slice(0, 40), slice(T - 40, T)):
        agree((o[:, rows], lse[:, rows]), reference_at(q, k, v, rows, ranges=ranges))


def test_more_rows_times_heads_than_int32_counts(device, monkeypatch):
    """Batch x heads x tokens pass 2^31: so do offsets into LSE. Q is one query, and O one place to write to, which is
    refused otherwise: as memory of its own it would take 64 GiB.
    """
    monkeypatch.setattr(validate, "_check_out", lambda *_: None)
    S, g = 2**23 + 64, torch.Generator(device).manual_seed(0)
    q = torch.randn(1, 1, 128, 16, generator=g, device=device).bfloat16().expand(2, S, 128, 16)
    k, v = (torch.randn(2, 40, 1, 16, generator=g, device=device).bfloat16() for _ in range(2))
    ranges = torch.tensor([[3, 9]], device=device, dtype=torch.int32).repeat(2, S, 1, 1, 1)
    ranges[-1, -2:] = torch.tensor([[1, 30]], device=device, dtype=torch.int32)
    out = torch.empty(1, 1, 128, 16, device=device, dtype=torch.bfloat16).expand(2, S, 128, 16)
    how = {"max_selected": 32, "causal": False}
    _, lse = nsa.selection_attention(q, k, v, ranges=ranges, **how, backend="triton", out=out, return_lse=True)
    assert lse.numel() > 2**31
    some = [(b, s) for b in (0, 1) for s in (0, 1, S // 2, S - 3, S - 2, S - 1)]
    for b, s in some:
        at = slice(b, b + 1), slice(s, s + 1)
        own = q[at].double(), k[b : b + 1], v[b : b + 1]
        _, want = selection_reference(Call.of(*own, ranges=ranges[at], causal=False, return_lse=True))
        torch.testing.assert_close(lse[at].double(), want, rtol=0, atol=2e-2)
    assert (lse[0] == lse[0, 0]).all(), "equal rows, equal numbers"
