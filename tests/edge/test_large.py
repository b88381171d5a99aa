"""Tensors of more than 2^31 elements: every address is computed in 64 bits. The rest of them is NaN."""

import math

import pytest
import torch

import nsa

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


def agree(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=2e-2)


def test_one_long_sequence(attend_all, cache):
    q, k = queries(cache, 1, 2, 4), cache.view(1, KEYS, 1, D)
    ranges = torch.tensor([[KEYS - TAIL, 2**40], [3, 9]], device=k.device).expand(1, 2, 1, 2, 2)
    got = attend_all(q, k, k, ranges=ranges, max_selected=64, return_lse=True)
    short = torch.cat((k[:, :TAIL], k[:, -TAIL:]), 1)
    ranges = torch.tensor([[TAIL, 2 * TAIL], [3, 9]], device=k.device).expand(1, 2, 1, 2, 2)
    agree(got, attend_all(q, short, short, ranges=ranges, max_selected=64, return_lse=True))


def test_blocks_of_one_long_sequence(attend_all, cache):
    q, k = queries(cache, 1, 2, 4), cache.view(1, KEYS, 1, D)
    blocks = torch.tensor([KEYS // 8 - 1, -1, 0], device=k.device).expand(1, 2, 1, 3)
    got = attend_all(q, k, k, block_indices=blocks, block_size=8, causal=False, return_lse=True)
    short = torch.cat((k[:, -8:], k[:, :8]), 1)
    ranges = torch.tensor([[0, 16]], device=k.device).expand(1, 2, 1, 1, 2)
    agree(got, attend_all(q, short, short, ranges=ranges, causal=False, max_selected=16, return_lse=True))


def test_last_batch_entry(attend_all, cache):
    """And keys that lie far apart: the sequence axis is the slow one."""
    k = cache.view(KEYS // 8, 8, 1, D).transpose(0, 1)[:, -5:]  # [8 batches, 5 keys, 1, D]
    q = queries(cache, 8, 1, 4)
    ranges = torch.tensor([[0, 5]], device=k.device).expand(8, 1, 1, 1, 2)
    got = attend_all(q, k, k, ranges=ranges, max_selected=5, return_lse=True)
    short = k.contiguous()
    assert not short.isnan().any()
    agree(got, attend_all(q, short, short, ranges=ranges, max_selected=5, return_lse=True))


def test_packed_rows(cache):
    Q = queries(cache, 2, 4)
    cu = torch.tensor([KEYS - TAIL, KEYS - 9, KEYS], device=cache.device)
    got = nsa.sel_attn_fwd_varlen_group(Q, cache, cache, cu, max_selected=64, return_lse=True)
    tail = cache[-TAIL:]
    agree(got, nsa.sel_attn_fwd_varlen_group(Q, tail, tail, cu - (KEYS - TAIL), max_selected=64, return_lse=True))


def test_output(attend_all, cache):
    """The last rows of an output that lies in such a buffer."""
    q, k = queries(cache, 1, 2, 4), cache[:TAIL].view(1, TAIL, 1, D)
    ranges = torch.tensor([[0, TAIL]], device=k.device).expand(1, 2, 1, 1, 2)
    buffer = cache.new_empty(KEYS, D)
    out = buffer.view(1, 2, 4, KEYS // 8, D)[..., -1, :]  # heads lie KEYS / 8 rows apart
    assert out.stride(2) * 7 > 2**30
    assert attend_all(q, k, k, ranges=ranges, max_selected=64, out=out) is out
    agree((out,), (attend_all(q, k, k, ranges=ranges, max_selected=64),))
