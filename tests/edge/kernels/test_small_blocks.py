"""Small blocks: one list for all KV heads, and what else `test_unions.py`, which has their tiles, does not ask."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import nsa
from nsa import settings
from nsa.call import Call
from nsa.kernels import launches
from nsa.kernels.families import BACKWARDS, FAMILIES, OF_SCHEDULE
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared import sizes
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.shape import shape_of
from nsa.kernels.small_backward import plan as small_backward
from nsa.kernels.small_blocks import tiles
from nsa.testing.matrix import caches

from ...conftest import bitwise
from ...parity.test_caches import serve

pytestmark = pytest.mark.usefixtures("fresh_plans")
SMALL = {"backend": "triton", "schedule": "small_blocks", "return_lse": True}
SIZE, KEYS, G, HKV = 4, 48, 4, 2  # a tile of fp32 holds 4 tokens of 4 heads
ALWAYS = tiles.Choice(worth=sizes.ALWAYS, least=0)


@pytest.fixture
def served(monkeypatch):
    """What the last call wrote into `served`, `[tokens, lists]`."""
    seen, real = [], launching.divided

    def divided(device, sizes):
        seen[:] = real(device, sizes)
        for piece in seen:
            if piece is not None:
                piece.tensor().fill_(77)
        return seen.copy()

    monkeypatch.setattr(launching, "divided", divided)
    return lambda: [x == 1 for x in seen[-1].tensor().tolist()]


@pytest.fixture
def prompt(draw):
    """Queries of two tiles, and keys that they all see."""
    return lambda S=8, **how: draw(S=S, S_kv=KEYS, HKV=HKV, G=G, dtype=torch.float32, **how)


def blocks_of(device, *rows):
    """One list for all KV heads."""
    return {
        "block_indices": torch.tensor(rows, dtype=torch.int32, device=device).view(1, len(rows), 1, -1),
        "block_size": SIZE,
        "causal": False,
    }


def check(qkv, selection):
    """Equal to query-major, within rounding."""
    got = nsa.selection_attention(*qkv, **selection, **SMALL)
    want = nsa.selection_attention(*qkv, **selection, **SMALL | {"schedule": "query_major"})
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_values_past_the_filled_keys_are_not_read(device, pin, served):
    """A block that the sequence fills in part, beside NaN in the cache."""
    pin(small_blocks=ALWAYS)
    cache = caches.draw([18], KEYS, 8, HKV=HKV, D=16, Dv=16, dtype=torch.float32, device=device, seed=1)
    q = torch.randn(1, 4, HKV * G, 16, generator=torch.Generator().manual_seed(2)).to(device)
    selection = blocks_of(device, *[[0, 4]] * 4) | {"causal": True}
    serve(q, cache, selection, schedule="small_blocks")
    assert served() == [True] * 4


def copied(selection):
    """The list copied for each KV head."""
    return {name: x.repeat_interleave(HKV, 2) if torch.is_tensor(x) else x for name, x in selection.items()}


OF_BLOCKS, OF_BOTH = ["small_blocks", "union"], ["query_major", "key_major", "sdpa", "reference"]


def test_a_block_in_two_pages_is_in_no_union(device, pin):
    """Behind a page lies another. A NaN there would send the tile to the kernel of rows, so this cache has none."""
    pin(small_blocks=ALWAYS)
    g = torch.Generator().manual_seed(0)
    for page, union in ((6, False), (8, True)):
        before = launches.copy()
        cache = caches.draw([KEYS], KEYS, page, HKV=HKV, D=16, Dv=16, dtype=torch.float32, device=device, seed=0)
        cache = dataclasses.replace(cache, k=cache.k.nan_to_num(0.5), v=cache.v.nan_to_num(0.5))
        q = torch.randn(1, 8, HKV * G, 16, generator=g).to(device)
        serve(q, cache, blocks_of(device, *[[1, 4, 7, 10]] * 8), schedule="small_blocks")
        assert ("small_blocks unions" in launches - before) == union


@pytest.mark.parametrize(
    ("route", "spans"), [*((route, False) for route in OF_BLOCKS + OF_BOTH), *((route, True) for route in OF_BOTH)]
)
def test_one_list_for_all_heads(prompt, device, route, spans):
    """The same bits as a copy of the list for each KV head."""
    selection = blocks_of(device, *[[0, 3, -1], [5, 1, 3]] * 4)
    if spans:
        selection = {"ranges": nsa.ranges_from_blocks(selection["block_indices"], SIZE), "causal": False}
    plain = route in ("sdpa", "reference")
    how = {"return_lse": True} | ({"backend": route} if plain else {"backend": "triton", "schedule": route})
    shared, each = (nsa.selection_attention(*prompt(), **x, **how) for x in (selection, copied(selection)))
    assert bitwise(shared, each)


def test_gradients_through_one_list(prompt, device):
    selection, found = blocks_of(device, *[[0, 3, -1], [5, 1, 3]] * 4), []
    for chosen in (selection, copied(selection)):
        leaves = [x.requires_grad_() for x in prompt()]
        o = nsa.selection_attention(*leaves, **chosen, backend="triton")
        found.append(torch.autograd.grad(o.square().sum(), leaves))
    assert bitwise(*found)


DOORS = {
    "compiled": lambda attend: torch.compile(attend, backend="aot_eager"),
    "operator": lambda attend: lambda *x: with_mode(attend, *x),
    "torch.func": lambda attend: lambda *x: torch.func.vjp(attend, *x)[0],
}


def with_mode(attend, *tensors):
    with FlopCounterMode(display=False):  # a dispatch mode, so the call is an operator
        return attend(*tensors)


@pytest.mark.parametrize("door", DOORS)
def test_one_list_through_every_door(prompt, device, door):
    selection = blocks_of(device, *[[0, 3, -1], [5, 1, 3]] * 4)
    backend = "reference" if door == "torch.func" else "auto"

    def attend(q, k, v):
        return nsa.selection_attention(q, k, v, **selection, backend=backend)

    qkv = prompt()
    torch.testing.assert_close(DOORS[door](attend)(*qkv), attend(*qkv), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_lists_are_read_where_they_lie(prompt, device, shared):
    """A slice of wider lists, and lists with the head as first axis, are not copied."""
    wide = torch.randint(-1, 12, (1, 8, 1 if shared else HKV, 9), device=device, dtype=torch.int32)
    chosen = wide[..., 2:7]
    call = Call.of(*prompt(), block_indices=chosen, block_size=SIZE)
    launch = OF_SCHEDULE["small_blocks"].plan(call, shape_of(call), "small_blocks")
    assert launch.lists == (1 if shared else HKV)
    assert launch.steps == (9 * launch.lists, 0 if shared else 9)
    check(prompt(), {"block_indices": chosen, "block_size": SIZE})
    across = wide.transpose(-1, -2).contiguous().transpose(-1, -2)[..., :5]
    check(prompt(), {"block_indices": across, "block_size": SIZE})  # the entries of a list are apart: copied


@pytest.mark.parametrize(("S", "steps"), [(8, None), (1, (11 * 5, 0)), (11, (5, 0))])
def test_lists_of_some_tokens_of_each_sequence(prompt, device, S, steps):
    """A slice of longer sequences is copied, unless one number leads from each token to the next."""
    wide = torch.randint(-1, 12, (2, 11, 1, 5), device=device, dtype=torch.int32)
    selection = {"block_indices": wide[:, 11 - S :], "block_size": SIZE}
    call = Call.of(*prompt(S=S, B=2), **selection)
    assert OF_SCHEDULE["small_blocks"].plan(call, shape_of(call), "small_blocks").steps == steps
    check(prompt(S=S, B=2), selection)


def test_rows_do_not_depend_on_neighbours_with_batch_invariant(prompt, device):
    (q, k, v), selection = prompt(), blocks_of(device, *[[0, 3]] * 8)
    with settings.configure(batch_invariant=True):
        whole = nsa.selection_attention(q, k, v, **selection, **SMALL)
        one = nsa.selection_attention(
            q[:, 5:6], k, v, **selection | {"block_indices": selection["block_indices"][:, 5:6]}, **SMALL
        )
    assert torch.equal(whole[0][:, 5:6], one[0])


def test_it_says_what_it_takes(prompt, same, device):
    with pytest.raises(DoesNotFit, match="expected block_indices, got ranges"):
        nsa.selection_attention(*prompt(), ranges=same([(0, 9)], 1, 8, HKV), **SMALL)
    with pytest.raises(DoesNotFit, match="expected blocks of 16 keys or fewer, got 17"):
        nsa.selection_attention(*prompt(), **blocks_of(device, *[[0]] * 8) | {"block_size": 17}, **SMALL)


@pytest.mark.parametrize("family", [*FAMILIES[:2], BACKWARDS[0]], ids=lambda family: family.name)
def test_more_heads_than_an_axis_of_a_grid_has(family):
    """Tensors without data: shapes decide."""
    q = torch.empty(1, 2, 65_536, 16, dtype=torch.bfloat16, device="meta")
    for heads in (65_535, 65_536):
        x, blocks = q[:, :, :heads], torch.empty(1, 2, heads, 66, dtype=torch.int32, device="meta")
        call = Call.of(x, x, x, block_indices=blocks, block_size=SIZE)
        said = f"{family.name}: expected at most 65535 KV heads, got 65536" if heads == 65_536 else None
        assert family.why_not(call, shape_of(call)) == said


def test_strides_of_a_list_past_2_31_are_not_narrow(prompt):
    """Such a list is part of a larger buffer."""
    blocks = torch.empty_strided((1, 8, HKV, 2), (0, 2, 1 << 31, 1), dtype=torch.int32, device="meta")
    call = Call.of(*(x.cpu() for x in prompt()), block_indices=blocks, block_size=SIZE)
    assert not OF_SCHEDULE["small_blocks"].plan(call, shape_of(call), "small_blocks").narrow
    assert not small_backward.plan(call, shape_of(call)).narrow


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize(("B", "S", "S_kv", "n"), [(0, 2, 64, 70), (2, 0, 64, 70), (1, 2, 0, 70), (1, 2, 64, 0)])
def test_calls_of_nothing(device, dtype, B, S, S_kv, n):
    q, k, v = (
        torch.randn(B, length, heads, 16, dtype=dtype, device=device, requires_grad=True)
        for length, heads in ((S, 4), (S_kv, 2), (S_kv, 2))
    )
    blocks = torch.zeros(B, S, 2, n, dtype=torch.int32, device=device)
    o, lse = nsa.selection_attention(q, k, v, block_indices=blocks, block_size=SIZE, **SMALL)
    assert o.shape == q.shape
    assert not o.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), (q, k, v)))
