"""`out=`: written completely, wherever it lies, and nothing beside it."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa
from nsa import overlap


@pytest.fixture
def problem(draw, same, dtype):
    """`(q, k, v), selection`: one row in three is empty, so that zeros have to be written too."""
    q, k, v = draw(B=2, S=3, Dv=24, dtype=dtype)
    ranges = same([(0, 9), (12, 20)], 2, 3, 2)
    ranges[:, 1] = 0
    return (q, k, v), {"ranges": ranges}


@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no-lse"])
def test_poisoned_out_is_written_completely(attend_all, problem, return_lse):
    qkv, selection = problem
    want = attend_all(*qkv, **selection)
    out = torch.full_like(want, math.nan)
    got = attend_all(*qkv, **selection, return_lse=return_lse, out=out)
    assert (got[0] if return_lse else got) is out
    assert torch.equal(out, want)


# Views of a larger buffer: the shape of the buffer, and how to get [2, 3, 4, 24] out of it.
VIEWS = {
    "heads-first": ((2, 4, 3, 24), lambda x: x.transpose(1, 2)),
    "sequence-first": ((3, 2, 4, 24), lambda x: x.transpose(0, 1)),
    "head-slice": ((2, 3, 9, 24), lambda x: x[:, :, 3:7]),
    "every-other-head": ((2, 3, 8, 24), lambda x: x[:, :, ::2]),
    "wider-rows": ((2, 3, 4, 31), lambda x: x[..., 5:29]),
    "every-other-token": ((2, 6, 4, 24), lambda x: x[:, 1::2]),
    "corner": ((3, 5, 6, 40), lambda x: x[1:, 2:, 1:5, 16:]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_out_leaves_its_gaps_alone(attend, problem, view):
    qkv, selection = problem
    want = attend(*qkv, **selection)
    shape, cut = VIEWS[view]
    buffer = torch.full(shape, -7.0, dtype=want.dtype, device=want.device)
    out = cut(buffer)
    assert attend(*qkv, **selection, out=out) is out
    assert torch.equal(out, want)
    untouched = torch.ones(shape, dtype=torch.bool, device=want.device)
    cut(untouched).fill_(False)
    assert (buffer[untouched] == -7.0).all()
    assert int((~untouched).sum()) == want.numel()


@pytest.mark.usefixtures("split")
def test_split_rows_into_a_strided_out(attend, draw, same, dtype):
    """The kernel that merges parts writes strides of its own."""
    q, k, v = draw(B=2, S=2, S_kv=40, HKV=1, Dv=24, dtype=dtype)
    selection = {"ranges": same([(10, 38)], 2, 2, 1)}
    want, want_lse = attend(q, k, v, **selection, return_lse=True)
    buffer = torch.full((2, 4, 3, 40), -7.0, dtype=dtype, device=q.device)
    out = buffer.transpose(1, 2)[:, 1:3, 2:, 8:32]
    got, lse = attend(q, k, v, **selection, out=out, return_lse=True)
    assert got is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert (buffer == -7.0).sum() == buffer.numel() - want.numel()


def test_varlen_out(attend, draw, same, device):
    q, k, v = draw(S=5, S_kv=9, Dv=24, varlen=True)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    selection = {"ranges": same([(0, 4)], 5, 2), "cu_seqlens": cu}
    want = attend(q, k, v, **selection)
    buffer = torch.full((4, 5, 30), math.nan, device=device)
    out = buffer.transpose(0, 1)[..., 3:27]
    assert attend(q, k, v, **selection, out=out) is out
    assert torch.equal(out, want)
    assert buffer.isnan().sum() == buffer.numel() - want.numel()


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_out_of_the_front_door(problem, backend):
    """Whatever route `auto` takes."""
    qkv, selection = problem
    for min_L in (0, 10**6):
        out = qkv[0].new_full((2, 3, 4, 24), math.nan)
        with nsa.configure(sel_triton_min_L=min_L):
            assert nsa.selection_attention(*qkv, **selection, max_selected=17, backend=backend, out=out) is out
        assert not out.isnan().any()


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
def test_result_is_written_over_stale_memory(attend, problem):
    """Without `out` the output is allocated uninitialized."""
    qkv, selection = problem
    want = attend(*qkv, **selection, return_lse=True)
    for _ in range(3):
        for x in want:
            torch.full_like(x, math.nan)  # freed at once: the next allocation of this size gets it
        torch.testing.assert_close(attend(*qkv, **selection, return_lse=True), want, rtol=0, atol=0)
