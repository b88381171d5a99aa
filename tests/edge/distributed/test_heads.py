"""The backward kernels on some KV heads of a larger call: equal bit by bit to the call of all heads."""

import collections
import weakref
from types import SimpleNamespace

import pytest
import torch

import nsa
import nsa.kernels
from nsa import backward, dispatch, routing, settings
from nsa.call import Call
from nsa.distributed import passes
from nsa.distributed.shards import Layout
from nsa.kernels.backward import tiles
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.launch import Variant

SHAPES = {
    # dtype, G, HKV, selected blocks of two, ranges, unions
    "query-major dq": (torch.float32, 2, 4, None, False, False),
    "ranges": (torch.float32, 2, 3, None, True, False),
    "unions": (torch.float16, 8, 4, [0, 1], False, True),
    "parts": (torch.float16, 4, 3, None, False, False),
}


@pytest.fixture
def in_turn(draw, device, fresh_plans):
    """`in_turn(name, at_once)`: gradients of a shape by groups of heads, those of the call of all heads, and the launch
    of the last group."""

    def step(name):
        """A call, gradients of its outputs, and these."""
        dtype, G, HKV, blocks, ranges, _ = SHAPES[name]
        q, k, v = draw(S=16, S_kv=16, HKV=HKV, G=G, Dv=32, dtype=dtype)
        do, dlse = torch.randn_like(q[..., :1].expand(*q.shape[:-1], 32)), torch.randn(q.shape[:-1], device=device)
        listed = torch.tensor(blocks or [1, 0], device=device).expand(1, 16, HKV, 2).contiguous()
        selection = {"block_indices": listed, "block_size": 8}
        if ranges:
            selection = {"ranges": nsa.ranges_from_blocks(listed, 8), "max_selected": 16}
        call = Call(q, k, v, **selection, backend="triton", settings=settings.get(), return_lse=True)
        return call, do, dlse, *dispatch.run(routing.plan(call), call)

    def run(name, at_once):
        call, *given = step(name)
        want, (q, k, v), HKV = backward.backward(routing.plan(call), call, *given), call[:3], SHAPES[name][2]
        s = passes.Sharded(call, None, Layout("contiguous", (16,)), passes.groups(HKV, at_once), "none")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernels = passes.Kernels(s, *given, dq)
        launched.clear()
        for heads in s.heads[::-1]:
            kv = torch.cat((k, v), -1)[:, :, slice(*heads)].contiguous()
            part = s.part(heads, kv)
            sums = kernels.serve(part, heads)
            assert sums is not None
            for whole, some in zip((dk, dv), sums, strict=True):
                whole[:, :, slice(*heads)] = some
        launch = routing.plan(part).backward_launches[HKV][1]
        assert (launch.unions is not None) == SHAPES[name][-1]
        return (dq, dk, dv), want, launch

    launched = []
    real = Variant.launch

    def count(self, *given):
        launched.append(self.kernel.fn.__name__)
        return real(self, *given)

    run.launched, run.step = launched, step
    with (
        pytest.MonkeyPatch.context() as patch,
        nsa.configure(sel_triton_min_L=0),
        nsa.kernels.pinned(backward_unions=tiles.Unions(rows=0)),
    ):
        patch.setattr(Variant, "launch", count)
        yield run


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_heads_in_turn(in_turn, name, at_once):
    got, want, _ = in_turn(name, at_once)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("room", ["all", "two heads", "none", "windows"])
@pytest.mark.parametrize("name", SHAPES)
def test_lists_are_made_for_many_heads_at_once(in_turn, monkeypatch, name, room):
    """For all groups of one head in turn, or for as many as there is room for; equal bit by bit."""
    if room == "windows":  # of 8 tokens
        monkeypatch.setattr(tiles, "even", lambda tokens, most: 8)
    HKV = SHAPES[name][2]
    heads = {"all": HKV, "two heads": 2, "none": 1, "windows": HKV}[room]
    if heads < HKV:
        *_, launch = in_turn(name, 1)
        monkeypatch.setattr(passes, "LISTS_BYTES", launch.list_bytes(heads) if room == "two heads" else 0)
    got, want, launch = in_turn(name, 1)
    assert all(map(torch.equal, got, want))
    times, windows = -(-HKV // heads), 2 if room == "windows" else 1
    counted = collections.Counter(in_turn.launched)
    lists = times * windows * (1 if launch.unions is None else 2)
    for kernel in ("_order_kernel", "_strip_kernel", "_scan_kernel", "_scatter_kernel"):
        assert counted[kernel] == lists
    assert counted["_list_kernel"] == (0 if launch.unions is None else times)
    assert counted["_dkdv_kernel"] == HKV * lists // times


@pytest.mark.parametrize("unions", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_lists_take_the_memory_that_was_expected(monkeypatch, device, fresh_plans, heads, unions):
    """Lists of unions have room for all heads of the larger call, also if one is listed. Nothing is launched."""
    S, HKV, G = 2048, 4, 8
    q, kv = torch.empty(1, S, HKV * G, 32, device=device), torch.empty(1, S, HKV, 64, device=device)
    q, kv = q.half(), kv.half()
    listed = torch.zeros(1, S, HKV, 4, dtype=torch.int32, device=device)
    call = Call(q, kv[..., :32], kv[..., 32:], block_indices=listed, block_size=8, backend="triton")
    taken, real = [], launching.workspace

    def workspace(*given):
        whole = real(*given)
        taken.append(weakref.ref(whole))
        return whole

    with nsa.kernels.pinned(backward_unions=tiles.Unions(rows=0 if unions else 2**62)):
        call = call._replace(settings=settings.get())
        s = passes.Sharded(call, None, Layout("contiguous", (S,)), passes.groups(HKV, 1), "none")
        part = s.part((3, 4), kv[:, :, 3:])
        kernel, launch, *_ = backward.attach(routing.plan(part), part, HKV)
    assert (launch.unions is not None) == unions
    monkeypatch.setattr(Variant, "launch", lambda *_: None)
    monkeypatch.setattr(launching, "workspace", workspace)
    lists = kernel.lists(launch, s.selecting((HKV - heads, HKV)), heads)
    kept = sum(x().nbytes for x in taken if x() is not None)
    assert lists.passes
    assert 0.9 * kept < launch.list_bytes(heads) < 1.1 * kept


def test_memory_of_a_group_is_free_while_the_next_is_computed(in_turn, monkeypatch):
    """Of what ranks gathered, only the next group's parts live beside K and V of this one; sums are of one group."""
    parts, sums, steps = [], [], []

    def keep(found, x):
        found.append(weakref.ref(x))
        return x

    def living(found):
        return sum(x() is not None for x in found)

    stand_in = SimpleNamespace(
        all_gather_into_tensor=lambda shard, *_: keep(parts, shard.repeat(2, *[1] * (shard.dim() - 1))),
        all_to_all_single=lambda x, *_: x.clone(),
        wait_tensor=lambda x: x,
    )
    monkeypatch.setattr(passes, "collectives", stand_in)
    real = passes.Kernels.serve

    def serve(self, part, heads):
        steps.append((living(parts), living(sums)))
        return tuple(keep(sums, x) for x in real(self, part, heads))

    call, do, dlse, o, lse = in_turn.step("parts")
    call = call._replace(k=call.k[:, :8], v=call.v[:, :8])
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="")
    s = passes.Sharded(call, group, Layout("zigzag", (8, 8)), passes.groups(3, 1), "none")
    monkeypatch.setattr(passes.Kernels, "serve", serve)
    passes.backward(s, {}, do, dlse, o, lse, (True, True, True))
    assert steps == [(1, 0), (1, 0), (0, 0)]


def test_groups_have_every_head_once():
    for HKV in range(1, 9):
        for at_once in range(1, 10):
            found = passes.groups(HKV, at_once)
            assert [head for heads in found for head in range(*heads)] == list(range(HKV))
            assert max(last - first for first, last in found) <= max(at_once, 1)
