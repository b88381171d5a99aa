"""The backward kernels on some KV heads of a larger call: equal bit by bit to the call of all heads."""

import pytest
import torch

import nsa
import nsa.kernels
from nsa import backward, dispatch, routing, settings
from nsa.call import Call
from nsa.distributed import passes
from nsa.distributed.shards import Layout
from nsa.kernels.backward import tiles

SHAPES = {
    # dtype, G, HKV, selected blocks of two, ranges, unions
    "query-major dq": (torch.float32, 2, 4, None, False, False),
    "ranges": (torch.float32, 2, 3, None, True, False),
    "unions": (torch.float16, 8, 4, [0, 1], False, True),
    "parts": (torch.float16, 4, 3, None, False, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_heads_in_turn(draw, device, fresh_plans, name):
    dtype, G, HKV, blocks, ranges, unions = SHAPES[name]
    q, k, v = draw(S=16, S_kv=16, HKV=HKV, G=G, Dv=32, dtype=dtype)
    do, dlse = torch.randn_like(q[..., :1].expand(*q.shape[:-1], 32)), torch.randn(q.shape[:-1], device=device)
    listed = torch.tensor(blocks or [1, 0], device=device).expand(1, 16, HKV, 2).contiguous()
    selection = {"block_indices": listed, "block_size": 8}
    if ranges:
        selection = {"ranges": nsa.ranges_from_blocks(listed, 8), "max_selected": 16}
    with nsa.configure(sel_triton_min_L=0), nsa.kernels.pinned(backward_unions=tiles.Unions(rows=0)):
        call = Call(q, k, v, **selection, backend="triton", settings=settings.get(), return_lse=True)
        planned = routing.plan(call)
        o, lse = dispatch.run(planned, call)
        want = backward.backward(planned, call, do, dlse, o, lse)
        s = passes.Sharded(call, None, Layout("contiguous", (16,)), passes.groups(HKV, 2), "none")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernels = passes.Kernels(s, do, dlse, o, lse, dq)
        for heads in s.heads:
            kv = torch.cat((k, v), -1)[:, :, slice(*heads)].contiguous()
            part = s.part(heads, kv)
            sums = kernels.serve(part, heads)
            assert sums is not None
            for whole, some in zip((dk, dv), sums, strict=True):
                whole[:, :, slice(*heads)] = some
        launch = routing.plan(part).backward_launches[HKV][1]
    assert (launch.unions is not None) == unions
    for got, exact in zip((dq, dk, dv), want, strict=True):
        assert torch.equal(got, exact)


def test_groups_have_every_head_once():
    for HKV in range(1, 9):
        for at_once in range(1, 10):
            found = passes.groups(HKV, at_once)
            assert [head for heads in found for head in range(*heads)] == list(range(HKV))
            assert max(last - first for first, last in found) <= max(at_once, 1)
