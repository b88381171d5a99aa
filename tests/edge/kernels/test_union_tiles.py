"""Which tiles a union serves, and what a neighbour must not do to a row."""

import math

import pytest
import torch

import nsa
from nsa import settings
from nsa.call import Call
from nsa.kernels.families import OF_SCHEDULE
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.shape import shape_of
from nsa.kernels.union import tiles
from nsa.testing.judge.forward import cached_parity
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

pytestmark = pytest.mark.usefixtures("fresh_plans")  # plans keep what `worth` was
UNION = {"backend": "triton", "schedule": "union", "return_lse": True}
SIZE, KEYS, G = 16, 96, 4  # a tile of fp32 holds 4 tokens of 4 heads


@pytest.fixture
def served(monkeypatch, fresh_plans):
    """What the last call wrote into `served`, `[tokens, HKV]`. No test plans with the bounds of another."""
    seen = []

    def workspace(size, dtype, device):
        if dtype == torch.int64:  # the lists, which a call makes first
            seen.clear()
        seen.append(torch.empty(size, dtype=dtype, device=device))
        return seen[-1]

    monkeypatch.setattr(launching, "workspace", workspace)
    return lambda: seen[2].bool().tolist()


@pytest.fixture
def prompt(draw):
    """Queries of two tiles, and keys that they all see."""
    return lambda S=8, **how: draw(S=S, S_kv=KEYS, HKV=1, G=G, dtype=torch.float32, **how)


def blocks_of(device, *rows):
    return {
        "block_indices": torch.tensor(rows, dtype=torch.int32, device=device).view(1, len(rows), 1, -1),
        "block_size": SIZE,
        "causal": False,
    }


def check(qkv, selection, got=None):
    """Equal to key-major, within rounding."""
    got = nsa.selection_attention(*qkv, **selection, **UNION) if got is None else got
    want = nsa.selection_attention(*qkv, **selection, **UNION | {"schedule": "key_major"})
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, equal_nan=True)
    return got


def test_tiles_whose_rows_share_blocks_are_served(prompt, device, served, pin):
    """Four tokens that agree are served; four that have nothing in common are not, since a union saves them no read."""
    pin(union=tiles.Choice(worth=tiles.Worth(4 * G, 3)))  # up to three blocks for four listed ones
    alike, apart = [[0, 3], [3, 0], [0, -1], [-1, 3]], [[0, 1], [2, 3], [4, 5], [-1, -1]]
    check(prompt(), blocks_of(device, *alike, *apart))
    assert served() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("size", [1 << 12, 1 << 33])
def test_a_block_of_more_keys_than_there_are(prompt, device, served, pin, size):
    """It has no tiles past the last key, and other blocks have no keys."""
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    selection = blocks_of(device, *[[0, 3]] * 4, *[[2**31 - 1, 0]] * 4) | {"block_size": size}
    check(prompt(), selection)
    call = Call(*prompt(), block_indices=selection["block_indices"], block_size=size)
    assert OF_SCHEDULE["union"].plan(call, shape_of(call), "union").size == KEYS


def test_a_block_listed_twice_counts_twice(prompt, device, served, pin):
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    check(prompt(), blocks_of(device, [0, 1], [2, 2], [1, 0], [0, 1], *[[4, 1]] * 4))
    assert served() == [False] * 4 + [True] * 4


def test_a_tile_holds_tokens_of_one_sequence(draw, device, served, pin):
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    q, k, v = draw(S=12, S_kv=KEYS, HKV=1, G=G, dtype=torch.float32, varlen=True)
    cu = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 6, 8], [0, 50, KEYS]))
    selection = blocks_of(device, *[[0, 1]] * 12)
    selection["block_indices"] = selection["block_indices"][0]
    o, lse = check((q, k, v), selection | {"cu_seqlens": cu})
    assert served() == [True] * 4 + [False] * 4 + [True] * 4  # the last tile has no sequence, and reads nothing
    assert not o[8:].any()
    assert lse[8:].isneginf().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says so when the interpreter computes with infinities
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_value_that_only_a_neighbour_selected_does_not_matter(prompt, device, served, poison, pin):
    """Its weight is zero, and zero times NaN is NaN: such a tile is computed row by row."""
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    q, k, v = prompt()
    selection = blocks_of(device, [0, 1], [1, 3], [0, 1], [1, 0], *[[4, 1]] * 4)
    clean = nsa.selection_attention(q, k, v, **selection, **UNION)
    v[:, 3 * SIZE + 2, :, 1] = poison
    o, lse = check((q, k, v), selection)
    assert served() == [False] * 4 + [True] * 4
    for s in (0, 2, 3, 4):
        torch.testing.assert_close(o[:, s], clean[0][:, s], rtol=2e-5, atol=2e-5)
    assert not o[0, 1, :, 1].isfinite().any()
    torch.testing.assert_close(lse, clean[1], rtol=2e-5, atol=2e-5)


def test_several_passes(prompt, device, served, pin, monkeypatch):
    """Lists that hold one tile at a time."""
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    monkeypatch.setattr(tiles, "LIST_BYTES", 1)
    check(prompt(), blocks_of(device, *[[0, 3]] * 4, *[[2, 5]] * 4))
    assert all(served())


def test_key_major_beside_unions(prompt, device):
    """Key-major that skips rows, and key-major alone, are two kernels, in either order."""
    selection = blocks_of(device, *[[0, 3]] * 8)
    qkv = prompt()
    call = Call(*qkv, **selection)
    launch = OF_SCHEDULE["union"].plan(call, shape_of(call), "union")
    assert not set(launch.variants) & set(key_major.plan(call).variants)
    for _ in range(2):
        check(qkv, selection)


def test_rows_do_not_depend_on_neighbours_with_batch_invariant(prompt, device):
    qkv, selection = prompt(), blocks_of(device, *[[0, 3]] * 8)
    with settings.configure(batch_invariant=True):
        with pytest.raises(DoesNotFit, match="batch_invariant"):
            nsa.selection_attention(*qkv, **selection, **UNION)
        before = nsa.kernels.launches.copy()
        nsa.selection_attention(*qkv, **selection, schedule="union")
    assert not (nsa.kernels.launches - before)["union"]


def test_ranges_have_no_unions(prompt, same):
    with pytest.raises(DoesNotFit, match="expected block_indices, got ranges"):
        nsa.selection_attention(*prompt(), ranges=same([(0, 9)], 1, 8, 1), **UNION)


@pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")
def test_replays_with_other_selections(prompt, device, served, pin):
    """The device decides which tiles are served, so a captured graph serves others for other selections."""
    pin(union=tiles.Choice(worth=tiles.Worth(4 * G, 3)))
    q, k, v = prompt()
    selection = blocks_of(device, *[[0, 3]] * 4, *[[2, 5]] * 4)
    run = lambda: nsa.selection_attention(q, k, v, **selection, **UNION)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    other = blocks_of(device, *[[0, 1], [2, 3], [4, 5], [-1, -1]], *[[1, 3]] * 4)
    selection["block_indices"].copy_(other["block_indices"])
    graph.replay()
    assert served() == [False] * 4 + [True] * 4
    check((q, k, v), selection, got)


def test_ragged_batches(device, served, pin):
    """A tile that reaches past the last sequence is left to key-major, which gives unused tokens zeros."""
    pin(union=tiles.Choice(worth=tiles.ALWAYS))
    cache = caches.draw([90, 50], KEYS, 32, HKV=1, dtype=torch.float32, device=device, seed=1)
    q = torch.randn(20, G, 16, generator=torch.Generator().manual_seed(2)).to(device)
    selection = {"block_indices": torch.tensor([[[0, 5]]] * 9 + [[[3, 1]]] * 11, device=device), "block_size": SIZE}
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, cu_seqlens_q=cu, max_seqlen_q=9, **UNION
    )
    assert served() == [True] * 8 + [False] * 4 + [True] * 4 + [False] * 4
    cached_parity(got, caches.oracle(q, cache, cu, **selection), torch.float32, "union")
    assert not got[0][18:].any()
