"""Calls whose keys and values the union kernel loads by TMA, and calls whose tensors TMA cannot read."""

import functools
import math

import pytest
import torch

import nsa
from nsa.kernels.shared import launch
from nsa.kernels.shared.launch import Variant
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.union import plan as union
from nsa.kernels.union import tiles
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...parity.test_caches import serve

pytestmark = pytest.mark.skipif(
    not launch.TMA or (current_lane() == "gpu" and torch.cuda.get_device_capability() != (9, 0)),
    reason="host descriptors need Triton 3.4 and a Hopper GPU, or the interpreter",
)

DTYPE = torch.bfloat16 if current_lane() == "gpu" else torch.float16
UNION = {"backend": "triton", "schedule": "union", "return_lse": True}
SIZE = 64


@pytest.fixture(autouse=True)
def always(pin, fresh_plans):
    """Every tile is served by its union. A plan of another test may have other bounds."""
    pin(union=tiles.Choice(worth=ALWAYS))


@pytest.fixture
def by_tma(monkeypatch):
    """For each launch of the union kernel, whether TMA loaded keys and values."""
    seen, real = [], Variant.launch

    def launch(self, *arguments, **keywords):
        if "TMA" in self.constexprs:
            seen.append(self.constexprs["TMA"])
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Variant, "launch", launch)
    return seen


def normal(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, DTYPE)


def blocks(device, *lead, keys=200, n=3):
    """Blocks of which some do not exist; the tokens of a tile have the first block in common."""
    g = torch.Generator().manual_seed(n)
    there = -(-keys // SIZE) + 1
    rows = torch.stack([torch.randperm(there, generator=g)[:n] for _ in range(math.prod(lead))])
    rows[:, 0] = torch.where((rows[:, 1:] == 0).any(1), rows[:, 0], 0)
    return {"block_indices": rows.view(*lead, n).to(device, torch.int32), "block_size": SIZE}


@pytest.fixture
def check(agrees):
    """`check(q, k, v, selection, …)`: a call of union into NaN, compared with the oracle."""
    union = functools.partial(nsa.selection_attention, backend="triton", schedule="union")

    def make(q, k, v, selection, **more):
        out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
        agrees(union, q, k, v, out=out, **selection, **more)

    return make


def qkv(device, B=1, S=8, HKV=1, D=64, keys=200):
    return [normal(device, B, *shape, D, seed=i) for i, shape in enumerate(((S, 16 * HKV), (keys, HKV), (keys, HKV)))]


CALLS = {  # sizes, other arguments, and whether TMA loads keys and values
    **{f"D{D}": ({"B": 2, "S": 9, "HKV": 2, "D": D}, {}, True) for D in (16, 64, 80, 128)},
    **{f"scale{scale}": ({}, {"scale": scale}, scale > 0) for scale in (-0.25, 0.0, 3.0)},
    "bidirectional": ({}, {"causal": False}, True),
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls(device, check, by_tma, kind):
    """Keys end within a block, and heads of some sizes within a tile."""
    sizes, how, loads = CALLS[kind]
    q, k, v = qkv(device, **sizes)
    check(q, k, v, blocks(device, *q.shape[:2], k.shape[2]), **how)
    assert by_tma == [loads]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of keys that no row sees
def test_packed_sequences(device, check, by_tma):
    """Sequences begin within a tile of keys, and one is empty. TMA reads keys past the last one, which are NaN."""
    q, k, v = normal(device, 150, 16, 64), normal(device, 150, 1, 64, seed=1), normal(device, 150, 1, 64, seed=2)
    cu = torch.tensor([0, 50, 50, 129, 140], dtype=torch.int32, device=device)
    k[140:], v[140:] = math.nan, math.inf
    check(q, k, v, blocks(device, 150, 1, keys=79, n=2), cu_seqlens=(cu, cu))
    assert by_tma == [True]


@pytest.mark.parametrize("size", [64, 128], ids=lambda size: f"block{size}")
@pytest.mark.parametrize("page", [None, 64, 128], ids=lambda page: f"page{page}")
@pytest.mark.parametrize("ragged", [False, True], ids=["batch", "ragged"])
def test_caches(device, by_tma, page, size, ragged):
    """Unfilled places are NaN. Past a sequence's end, and once within, the table names pages that do not exist."""
    lengths, S, room = [250, 0, 67], 4, 256
    cache = caches.draw(lengths, room, page, HKV=1, D=32, Dv=16, dtype=DTYPE, device=device, seed=size)
    if page:
        cache.block_table[0, 0] = caches.NOWHERE[1]
    q, cu = normal(device, len(lengths), S, 16, 32), None
    selection = blocks(device, len(lengths), S, 1, keys=room * SIZE // size, n=2) | {"block_size": size}
    if ragged:
        q, cu = q.flatten(0, 1), torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=device)
        selection["block_indices"] = selection["block_indices"].flatten(0, 1)
    serve(q, cache, selection, cu, schedule="union")
    assert by_tma == [True]


def test_views_of_one_cache(device, check, by_tma):
    """K and V side by side in one tensor, with room between heads."""
    both = normal(device, 1, 200, 2, 160)
    check(normal(device, 1, 8, 32, 64, seed=1), both[..., :64], both[..., 80:144], blocks(device, 1, 8, 2))
    assert by_tma == [True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says so when the interpreter computes with infinities
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_a_neighbours_nan(device, where, poison):
    """Only the first token selects the block with the NaN, or the infinity. Others get what they get without it."""
    q, k, v = qkv(device, S=4)
    rows = torch.tensor([[0, 1], [0, -1], [2, 0], [0, 2]], dtype=torch.int32, device=device)
    selection = {"block_indices": rows.view(1, 4, 1, 2), "block_size": SIZE, "causal": False}
    clean = nsa.selection_attention(q, k, v, **selection, **UNION)
    (k if where == "keys" else v)[:, SIZE + 2] = poison
    got = nsa.selection_attention(q, k, v, **selection, **UNION)
    for x, y in zip(got, clean, strict=True):
        torch.testing.assert_close(x[:, 1:], y[:, 1:], rtol=2e-2, atol=2e-2)
    assert not got[0][:, 0].isfinite().all() or where == "keys"


def odd_heads(device):
    return normal(device, 1, 200, 2, 100)


def odd_rows(device):
    return normal(device, 1, 200, 2, 68)[..., :64]


def one_head_for_all(device):
    return normal(device, 1, 200, 1, 64).expand(1, 200, 2, 64)


@pytest.mark.parametrize("make", [odd_heads, odd_rows, one_head_for_all])
def test_strides_that_tma_cannot_take(device, check, by_tma, make):
    k = make(device)
    q = normal(device, 1, 8, 32, k.shape[-1], seed=1)
    check(q, k, k, blocks(device, 1, 8, 2))
    assert by_tma == [False]


def test_pages_smaller_than_a_tile(device, by_tma):
    cache = caches.draw([130], 192, 32, HKV=1, D=32, Dv=32, dtype=DTYPE, device=device, seed=1)
    q, selection = normal(device, 1, 4, 16, 32), blocks(device, 1, 4, 1, n=2)
    serve(q, cache, selection, schedule="union")
    assert by_tma == [False]


@pytest.mark.parametrize("which", ["k", "v"])
def test_an_address_that_tma_cannot_take(device, check, by_tma, which):
    """Calls of the same shapes and strides have one plan. The address decides at the launch."""
    q, k, v = qkv(device)
    moved = torch.empty(k.numel() + 1, dtype=DTYPE, device=device)[1:].view(k.shape)
    selection = blocks(device, 1, 8, 1)
    check(q, k, v, selection)
    check(q, moved.copy_(k) if which == "k" else k, moved.copy_(v) if which == "v" else v, selection)
    check(q, k, v, selection)
    assert by_tma == [True, False, True]


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_gpus_read_by_pointers(capability):
    assert tiles.select(90, 2, 16, 128, 128, 16, 64).TMA
    assert not tiles.select(capability, 2, 16, 128, 128, 16, 64).TMA


def test_triton_without_descriptors(device, check, by_tma, monkeypatch):
    monkeypatch.setattr(union, "TMA", False)
    q, k, v = qkv(device)
    check(q, k, v, blocks(device, 1, 8, 1))
    assert by_tma == [False]


@pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")
def test_replays_with_other_keys(device):
    """A captured launch holds a descriptor, as it holds an address: it reads what lies there at the replay."""
    q, k, v = qkv(device)
    selection = blocks(device, 1, 8, 1)
    run = lambda: nsa.selection_attention(q, k, v, **selection, **UNION)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    k.copy_(normal(device, *k.shape, seed=3))
    v.copy_(normal(device, *v.shape, seed=4))
    graph.replay()
    for x, y in zip(got, run(), strict=True):
        assert torch.equal(x, y)
