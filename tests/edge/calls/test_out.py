"""`out=`: which tensors it may not share memory with. `test_calls.py` sees what is written."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa
from nsa import overlap

SHARED = "out: expected a tensor with memory of its own, got one that shares memory with {}"


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_out_that_shares_memory_with_an_input_is_refused(draw, same, name, backend):
    """One query head a KV head and equal lengths: then inputs have the shape of the output."""
    qkv = dict(zip("qkv", draw(S=8, S_kv=8, G=1), strict=True))
    with pytest.raises(ValueError, match=f"^{SHARED.format(name)}$"):
        nsa.selection_attention(**qkv, ranges=same([(0, 4)], 1, 8, 2), backend=backend, out=qkv[name])


def test_out_of_a_cache_or_of_packed_rows_that_shares_memory_is_refused(draw, same, device):
    q, k, v = draw(S=1, S_kv=8, G=1)
    blocks = {"block_indices": same([0], 1, 1, 2), "block_size": 4}
    with pytest.raises(ValueError, match=SHARED.format("k_cache")):
        nsa.selection_attention_with_kvcache(q, k, v, **blocks, cache_seqlens=8, out=k[:, 3:4])
    Q, K, V = (torch.randn(2, 9, 16, device=device) for _ in range(3))
    with pytest.raises(ValueError, match=SHARED.format("K")):
        nsa.sel_attn_fwd_dense_group(Q, K, V, out=K)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_out_in_the_memory_of_a_selection_is_refused(draw, backend):
    qkv = draw(S=8, S_kv=8, G=1)
    memory = torch.zeros(4 * 8 * 2 * 16, dtype=torch.int32, device=qkv[0].device)
    ranges = memory[:64].view(1, 8, 2, 2, 2)
    for begin, shared in ((0, True), (64, False)):
        out = memory[begin : begin + 256].view(torch.float32).view(1, 8, 2, 16)
        call = partial(nsa.selection_attention, *qkv, ranges=ranges, backend=backend, out=out)
        if shared:
            with pytest.raises(ValueError, match=f"^{SHARED.format('ranges')}$"):
                call()
        else:
            assert call() is out


@pytest.mark.parametrize("kind", ["negative", "zeros"])
def test_out_without_memory_of_its_own_is_refused(draw, same, kind):
    q, k, v = draw(S=8, S_kv=8)
    wide = torch.complex(*torch.empty(2, *q.shape, device=q.device)).conj().imag
    out = wide if kind == "negative" else torch._efficientzerotensor(q.shape, dtype=q.dtype, device=q.device)
    with pytest.raises(ValueError, match="^out: expected (a tensor with memory of its own|a contiguous last dim)"):
        nsa.selection_attention(q, k, v, ranges=same([(0, 4)], 1, 8, 2), out=out)


def test_which_slices_of_one_buffer_share_memory(draw, same):
    """Exact for slices of one buffer, as of a fused projection."""
    fused, spans = torch.cat(draw(S=8, S_kv=8, G=1), 2), same([(0, 4)], 1, 8, 2)
    fused = torch.cat([fused, fused], 2)
    q, k, v, out = fused[:, :, 0:2], fused[:, :, 2:4], fused[:, :, 4:6], fused[:, :, 6:8]
    want = nsa.selection_attention(q.clone(), k.clone(), v.clone(), ranges=spans)
    assert torch.equal(nsa.selection_attention(q, k, v, ranges=spans, out=out), want)
    for near in (fused[:, :, 5:7], fused[:, :, 2:6:2]):
        with pytest.raises(ValueError, match="shares memory with [kv]"):
            nsa.selection_attention(q, k, v, ranges=spans, out=near)


@given(data=st.data())
def test_shared_memory_is_never_overlooked(data):
    """Against all addresses of both tensors."""
    buffer, views = torch.arange(240), []
    for _ in range(2):
        x = buffer.view(data.draw(st.sampled_from([(4, 60), (6, 5, 8), (2, 12, 10), (240,)])))
        for axis in range(x.dim()):
            begin, step = data.draw(st.integers(0, x.shape[axis] - 1)), data.draw(st.integers(1, 3))
            x = x.narrow(axis, begin, data.draw(st.integers(1, x.shape[axis] - begin)))
            x = x[(slice(None),) * axis + (slice(None, None, step),)]
        views.append(x)
    a, b = views
    shared = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
    assert overlap._shared(a, b, b.data_ptr() - a.data_ptr()) >= shared


@pytest.mark.gpu
def test_result_is_written_over_stale_memory(attend, draw, same, dtype):
    """Without `out` the output is allocated uninitialized. One row in three is empty, so zeros have to be written."""
    qkv, ranges = draw(B=2, S=3, Dv=24, dtype=dtype), same([(0, 9), (12, 20)], 2, 3, 2)
    ranges[:, 1] = 0
    want = attend(*qkv, ranges=ranges, return_lse=True)
    for _ in range(3):
        for x in want:
            torch.full_like(x, math.nan)  # freed at once: the next allocation of this size gets it
        torch.testing.assert_close(attend(*qkv, ranges=ranges, return_lse=True), want, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["query_major", "per_head", "key_major", "union", "small_blocks"])
def test_out_with_strides_of_its_own_and_gradients(draw, device, schedule):
    """Kernels write an output of their own, which is copied to `out`."""
    q, k, v = (x.requires_grad_() for x in draw(B=2, S=6, S_kv=32, dtype=torch.float32))
    blocks = torch.randint(-1, 9, (2, 6, k.shape[2], 5), generator=torch.Generator().manual_seed(0)).to(device)
    chosen = {"block_indices": blocks, "block_size": 4}
    want = nsa.selection_attention(q, k, v, **chosen, backend="reference")
    wide = torch.full((*want.shape[:2], 2 * want.shape[2], want.shape[3] + 24), 7.0, device=device)
    out = wide[:, :, ::2, 3 : 3 + want.shape[3]]
    got = nsa.selection_attention(q, k, v, **chosen, backend="triton", schedule=schedule, out=out)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert (wide[:, :, 1::2] == 7).all()
    pairs = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (got, want))
    torch.testing.assert_close(*pairs, rtol=2e-5, atol=2e-5)
