"""Gradients for small blocks: rows that list a block twice, NaN, one list for all KV heads, several passes, routing."""

import contextlib
import dataclasses
import json
import math

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.families import backward_of
from nsa.kernels.shared import sizes
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.shape import shape_of
from nsa.kernels.small_backward import plan as small_backward
from nsa.kernels.small_backward import tiles
from nsa.kernels.small_blocks.tiles import MOST_SLOTS

from ...conftest import bitwise

pytestmark = pytest.mark.usefixtures("fresh_plans")
SIZE, KEYS, G, HKV, D = 4, 24, 3, 2, 16
TILES = tiles.Choice(window=4, rows=16, keys=16, dq_rows=6, dq_keys=16)


def gradients(qkv, selection, do, backend="triton", tile=TILES):
    leaves = [x.detach().requires_grad_() for x in qkv]
    small = small_backward.launches["backward"]
    with pinned(small_backward=tile):
        o = nsa.selection_attention(*leaves, **selection, backend=backend)
        got = torch.autograd.grad(o, leaves, do)
    assert small_backward.launches["backward"] == small + (backend == "triton")
    return got


@pytest.fixture
def draw(device):
    g = torch.Generator().manual_seed(3)

    def tensors(S=8, keys=KEYS):
        q, k, v = (torch.randn(1, s, h, D, generator=g).to(device) for s, h in ((S, HKV * G), (keys, HKV), (keys, HKV)))
        do = torch.randn(1, S, HKV * G, D, generator=g).to(device)
        return (q, k, v), do

    return tensors


def listed(device, *rows):
    """One list for all KV heads."""
    blocks = torch.tensor(rows, dtype=torch.int32, device=device).view(1, len(rows), 1, -1)
    return {"block_indices": blocks, "block_size": SIZE, "causal": False}


def check(got, want):
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("twice", [[2, 2, 0], [1, 0, 1], [4, 4, 4]], ids=["new", "known", "thrice"])
def test_a_block_counts_as_often_as_it_is_listed(draw, device, twice):
    """Block 2 is new to its window when it is listed twice, block 1 is known."""
    qkv, do = draw()
    selection = listed(device, [0, 1, 3], twice, [1, 0, 2], [0, 1, -1], *[[4, 1, 5]] * 4)
    got = gradients(qkv, selection, do)
    check(got, gradients(qkv, selection, do, "reference"))
    assert bitwise(got, gradients(qkv, selection, do))


@pytest.mark.parametrize("row", [[0] * 9, [0, 1, 2, 3] + [0] * 28], ids=["one", "padded"])
def test_rows_may_list_more_blocks_than_there_are(draw, device, row):
    """Each of them takes an entry of a list, also if it is there already."""
    qkv, do = draw(keys=4 * max(row) + 4)
    selection = listed(device, *[row] * 8)
    check(gradients(qkv, selection, do), gradients(qkv, selection, do, "reference"))


@pytest.mark.parametrize("first", [True, False])
def test_hooks_that_save_copies(draw, device, first):
    """A copy of one list for all KV heads has a stride over heads, as `torch.autograd.graph.save_on_cpu` makes it."""
    qkv, do = draw()
    selection = listed(device, *[[0, 3]] * 3, *[[2, 5]] * 5)
    selection["block_indices"] = selection["block_indices"].expand(1, 8, HKV, 2)
    want = gradients(qkv, selection, do, "reference")
    for hooked in (first, not first):
        with torch.autograd.graph.saved_tensors_hooks(_copied, lambda x: x) if hooked else contextlib.nullcontext():
            check(gradients(qkv, selection, do), want)


def _copied(x):
    return x.clone(memory_format=torch.contiguous_format)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinite_query_spoils_only_the_keys_that_it_selected(draw, device):
    """All its scores are -inf, and so is its LSE."""
    qkv, do = draw()
    selection = listed(device, [0, 1], [1, 2], *[[0, 3]] * 6)
    qkv[1][..., 0] = -qkv[1][..., 0].abs() - 0.1
    qkv[0][:, 1, :, 0] = math.inf
    _, dk, _ = gradients(qkv, selection, do)
    assert dk.isnan().flatten(2).any(2)[0].nonzero().flatten().tolist() == [*range(4, 12)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says so when the interpreter computes with infinities
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["k", "v", "q", "do"])
def test_a_number_spoils_no_row_that_does_not_see_it(draw, device, poison, which):
    """Of a key that a neighbour selected; or of a query that selected other keys."""
    qkv, do = draw()
    selection = listed(device, [0, 1], [1, 3], [0, 1], [1, 0], *[[4, 1]] * 4)
    clean = gradients(qkv, selection, do)
    key, query = 3 * SIZE + 2, 1
    tensor = {"q": qkv[0], "k": qkv[1], "v": qkv[2], "do": do}[which]
    tensor[:, query if which in ("q", "do") else key, :, 1] = poison
    dq, dk, dv = gradients(qkv, selection, do)
    others = [s for s in range(8) if s != query]
    torch.testing.assert_close(dq[:, others], clean[0][:, others], rtol=2e-5, atol=2e-5)
    unseen = [*range(SIZE), *range(4 * SIZE, 5 * SIZE)]  # of the query
    for x, y in ((dk, clean[1]), (dv, clean[2])):
        torch.testing.assert_close(x[:, unseen], y[:, unseen], rtol=2e-5, atol=2e-5)
    if which == "q":
        assert not dk[:, SIZE : 2 * SIZE].isfinite().any()
    if which == "do":
        assert not dv[:, SIZE : 2 * SIZE, :, 1].isfinite().any()


def test_one_list_for_all_heads_gives_what_copies_of_it_give(draw, device):
    qkv, do = draw()
    selection = listed(device, *[[0, 3]] * 3, *[[2, 5]] * 5)
    copied = selection | {"block_indices": selection["block_indices"].repeat(1, 1, HKV, 1)}
    assert bitwise(gradients(qkv, selection, do), gradients(qkv, copied, do))


def test_several_passes(draw, device, monkeypatch):
    """Lists that hold one tile at a time, made by one program."""
    qkv, do = draw()
    selection = listed(device, *[[0, 3]] * 3, *[[2, 5]] * 5)
    want = gradients(qkv, selection, do)
    monkeypatch.setattr(sizes, "LIST_BYTES", 1)
    monkeypatch.setattr(sizes, "LIST_PLACES", 1)
    assert bitwise(gradients(qkv, selection, do), want)


def test_sums_have_one_order(draw, device):
    """Many windows add to the same keys. Programs of a window take other shares, and start at other times."""
    S, repeats = (40, 1) if device.type == "cpu" else (400, 20)
    qkv, do = draw(S)
    selection = listed(device, *([i % 6, (i + 1 + i % 3) % 6, (i // 7) % 6] for i in range(S)))
    want = gradients(qkv, selection, do)
    for programs in (1, 2, 96) * repeats:
        assert bitwise(gradients(qkv, selection, do, tile=TILES._replace(programs=programs)), want)


def test_a_window_of_many_blocks(draw, device):
    """More than are sorted at a time."""
    qkv, do = draw(keys=400)
    selection = listed(device, *([(i * i + 7 * j) % 100 for j in range(40)] for i in range(8)))
    check(gradients(qkv, selection, do), gradients(qkv, selection, do, "reference"))


def test_sequences_that_do_not_follow_each_other(draw, device):
    """A window has tokens of both. Tokens of another sequence lie elsewhere than the next in memory."""
    qkv, do = draw()
    apart = [x.new_zeros(2, x.shape[1] + 3, *x.shape[2:])[:, : x.shape[1] - 1] for x in (*qkv, do)]
    for x, y in zip(apart, (*qkv, do), strict=True):
        x.copy_(torch.cat([y[:, 1:], -y[:, :-1]]))
    rows = [[0, 3, 1], [3, 2, 1], [0, 4, 2], *[[2, 0, 3]] * 4]
    selection = listed(device, *rows, *rows[::-1])
    selection["block_indices"] = selection["block_indices"].view(2, len(rows), 1, -1)
    got = gradients(apart[:3], selection, apart[3])
    check(got, gradients(apart[:3], selection, apart[3], "reference"))


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=["q", "k", "v"]
)
def test_one_gradient_alone(draw, device, wanted):
    qkv, do = draw()
    selection = listed(device, *[[0, 3]] * 8)
    with pinned(small_backward=TILES):
        leaves = [x.requires_grad_(want) for x, want in zip(qkv, wanted, strict=True)]
        o = nsa.selection_attention(*leaves, **selection, backend="triton")
        (got,) = torch.autograd.grad(o, [x for x in leaves if x.requires_grad], do)
    want = gradients(qkv, selection, do, "reference")[wanted.index(True)]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def call_of(n, size, dtype=torch.float16, **more):
    q, k = torch.empty(1, 64, HKV * G, D, dtype=dtype), torch.empty(1, 4096, HKV, D, dtype=dtype)
    return Call.of(q, k, k, block_indices=torch.zeros(1, 64, 1, n, dtype=torch.int32), block_size=size, **more)


@pytest.mark.parametrize(
    ("call", "family"),
    [
        (call_of(65, 4), "small_backward"),
        (call_of(64, 4), "backward"),
        (call_of(65, 32), "backward"),
        (call_of(65, 4, torch.float32), "backward"),
        (call_of(MOST_SLOTS + 1, 4), "backward"),
    ],
    ids=["many", "few", "large", "fp32", "too many"],
)
def test_rows_of_many_small_blocks_are_served(call, family):
    assert backward_of(call, shape_of(call)).name == family


def test_with_batch_invariant_other_kernels_serve():
    call = call_of(65, 4)
    call = call._replace(settings=dataclasses.replace(call.settings, batch_invariant=True))
    assert backward_of(call, shape_of(call)).name == "backward"


def test_a_pin_repeats_the_tiles(draw, device):
    """As a child of the guard gets them, through JSON."""
    call = call_of(65, 4)
    launch = small_backward.plan(call, shape_of(call))
    ((name, pin),) = json.loads(json.dumps(launch.pins)).items()
    pins = ((name, Exact(tuple(pin[0]), tuple(pin[1]))),)
    few = call_of(3, 4)._replace(settings=dataclasses.replace(call.settings, pins=pins))
    assert backward_of(few, shape_of(few)).name == "small_backward"
    again = small_backward.plan(few, shape_of(few))
    assert [x.constexprs for x in again.variants] == [x.constexprs for x in launch.variants]
