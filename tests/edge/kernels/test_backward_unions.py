"""dQ of tiles of neighbouring tokens, which read the union of their blocks: which tiles, and what neighbours change."""

import math

import pytest
import torch

from nsa import settings
from nsa.call import Call
from nsa.kernels.backward import plan as backward
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.union import tiles as union_tiles
from nsa.plain.oracle import selection_reference
from nsa.testing.plugin import current_lane

from .gradients import close, exact, gradients, like

G, SIZE, KEYS = 16, 16, 90  # a tile holds 4 tokens; the last block has 10 keys
ALIKE = [[0, 3], [3, 0], [0, -1], [-1, 3]]
APART = [[0, 1], [2, 3], [4, 5], [-1, -1]]


@pytest.fixture
def served(pin, monkeypatch, fresh_plans):
    """Unions of any size, in a call of any length. `served()`: what the last call marked, `[tokens][HKV]`."""
    pin(backward_unions=backward_tiles.Unions(0, 4, union_tiles.ALWAYS))
    seen = []
    real = backward._by_unions
    monkeypatch.setattr(backward, "_by_unions", lambda *given: seen.append(real(*given)) or seen[-1])
    return lambda: seen[-1].bool().tolist() if seen else None


@pytest.fixture
def prompt(draw):
    """Queries of two tiles, keys, and the gradient of the output."""

    def make(S=8, **how):
        q, k, v = (x.half() for x in draw(**{"S": S, "S_kv": KEYS, "HKV": 1, "G": G} | how))
        return q, k, v, like(q)

    return make


def blocks_of(device, *rows, causal=False):
    blocks = torch.tensor(rows, dtype=torch.int32, device=device).view(1, len(rows), 1, -1)
    return {"block_indices": blocks, "block_size": SIZE, "causal": causal}


def check(q, k, v, do, dlse=None, **selection):
    """As the oracle, and bitwise equal the second time."""
    got = gradients(q, k, v, do, dlse, **selection)
    close(got, exact(q, k, v, do, dlse, **selection))
    again = gradients(q, k, v, do, dlse, **selection)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    return got


def test_tiles_whose_rows_share_blocks_are_served(prompt, device, served, pin):
    """Rows of one tile by its union, rows of the other by parts: dK and dV sum both."""
    pin(backward_unions=backward_tiles.Unions(0, 4, union_tiles.Worth(4 * G, 3)))  # three blocks for four listed ones
    check(*prompt(), **blocks_of(device, *ALIKE, *APART))
    assert served() == [True] * 4 + [False] * 4
    check(*prompt(), **blocks_of(device, *APART, *ALIKE))
    assert served() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("G", [4, 5, 8, 16])
def test_causal_prompts_with_every_group(prompt, device, served, G):
    """The last tile is partial, and rows see a part of their own block; also the gradient of LSE."""
    S = 21
    q, k, v, do = prompt(S=S, S_kv=S + 12, HKV=2, G=G, D=20, Dv=20)
    g = torch.Generator().manual_seed(1)
    order = torch.rand(1, S, 2, 3, generator=g).argsort(-1)
    dlse = torch.randn(q.shape[:-1], generator=g).to(device)
    check(q, k, v, do, dlse, block_indices=order.int().to(device), block_size=SIZE, causal=True)
    assert served() == [True] * S * 2


def test_positions(prompt, device, served):
    where = torch.tensor([[0, 89, 40, -3, 17, 10**12, 16, 50]], device=device)
    check(*prompt(), **blocks_of(device, *ALIKE, *APART, causal=True), q_positions=where)
    assert all(served())


@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_holds_tokens_of_one_sequence(prompt, device, served, causal):
    q, k, v, do = prompt(S=16, varlen=True)
    cu = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 6, 12, 12, 16], [0, 40, 62, 70, KEYS]))
    selection = blocks_of(device, *ALIKE * 3, *APART, causal=causal)
    selection["block_indices"] = selection["block_indices"][0]
    check(q, k, v, do, **selection, cu_seqlens=cu)
    assert served() == [True] * 4 + [False] * 4 + [True] * 8


def test_two_sequences_of_a_batch(prompt, device, served):
    blocks = torch.tensor([ALIKE + APART[:1]] * 2, dtype=torch.int32, device=device)[:, :, None]
    check(*prompt(B=2, S=5), block_indices=blocks, block_size=SIZE, causal=True)
    assert served() == [True] * 4 + [False] * 4 + [True] * 2


def test_a_block_listed_twice_counts_twice(prompt, device, served):
    check(*prompt(), **blocks_of(device, [0, 1], [2, 2], [1, 0], [0, 1], *[[4, 1]] * 4))
    assert served() == [False] * 4 + [True] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says so when the interpreter computes with infinities
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_key_that_only_a_neighbour_selected_does_not_matter(prompt, device, served, poison, where):
    """Its dS is zero, and zero times NaN is NaN: such a tile is left to the parts of dQ."""
    q, k, v, do = prompt()
    selection = blocks_of(device, [0, 1], [1, 3], [0, 1], [1, 0], *[[4, 1]] * 4)
    clean = gradients(q, k, v, do, **selection)
    (k if where == "k" else v)[:, 3 * SIZE + 2, :, 1] = poison
    dq, dk, dv = gradients(q, k, v, do, **selection)
    assert served() == [False] * 4 + [True] * 4
    for s in (0, 2, 3, 4):
        torch.testing.assert_close(dq[:, s], clean[0][:, s], rtol=2e-3, atol=2e-3)
    assert not dq[0, 1].isfinite().all()
    for x, y in ((dk, clean[1]), (dv, clean[2])):  # only the row of the bad key reads blocks 1 and 3
        assert torch.equal(x[:, 4 * SIZE :], y[:, 4 * SIZE :])
        torch.testing.assert_close(x[:, :SIZE], y[:, :SIZE], rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_query_spoils_only_what_it_reads(prompt, device, served):
    q, k, v, do = prompt()
    selection = blocks_of(device, [0, 1], [1, 3], [0, 1], [1, 0], *[[4, 1]] * 4)
    clean = gradients(q, k, v, do, **selection)
    q[:, 1, 0] = math.nan
    dq, dk, dv = gradients(q, k, v, do, **selection)
    assert dq[0, 1, 0].isnan().all()
    for s in (0, 2, 3, 4):
        torch.testing.assert_close(dq[:, s], clean[0][:, s], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(dk[:, :SIZE], clean[1][:, :SIZE], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(dv[:, :SIZE], clean[2][:, :SIZE], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("limits", [{"INDEX_BYTES": 12 * 2 * 3}, {"DQ_BYTES": 2 * G * 16 * 2 * 3}, {"SUM_BYTES": 1}])
def test_windows(prompt, device, served, limits, pin, monkeypatch):
    """Rows of both kinds, in windows shorter than a tile, in shares of one tile; unions one tile at a time."""
    for name, value in limits.items():
        monkeypatch.setattr(backward_tiles, name, value)
    pin(backward=backward_tiles.Choice(32, 4, 2, 1, True, 16, 1, 1))
    pin(backward_unions=backward_tiles.Unions(0, 4, union_tiles.Worth(4 * G, 3)))
    monkeypatch.setattr(union_tiles, "LIST_BYTES", 1)
    check(*prompt(S=12), **blocks_of(device, *ALIKE, *APART, *ALIKE))
    assert served() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (True, True, False)])
def test_frozen_inputs(prompt, device, served, wanted):
    """Unions serve calls that want all; others get the same gradients, within rounding."""
    given, selection = prompt(), blocks_of(device, *ALIKE, *APART)
    for got, want, wants in zip(
        gradients(*given, wanted=wanted, **selection), exact(*given, **selection), wanted, strict=True
    ):
        assert (got.numel() > 0) == wants
        if wants:
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-2 * float(want.abs().max()))
    assert (served() is not None) == (wanted[0] and any(wanted[1:]))


def test_no_unions(prompt, device, served, pin):
    """`batch_invariant` forbids that neighbours matter; short calls and small groups would not gain."""

    def plan(dtype=torch.float16, **how):
        qkv = (x.to(dtype) for x in prompt(**how)[:3])
        return backward.plan(Call.of(*qkv, **blocks_of(device, *ALIKE, *APART), settings=settings.get()))

    assert plan().unions is not None
    assert plan(G=3).unions is None
    assert plan(torch.float32).unions is None
    with settings.configure(batch_invariant=True):
        assert plan().unions is None
    pin(backward_unions=backward_tiles.Unions(8 * G * G + 1, 4))
    assert plan().unions is None


def test_rows_of_both_kinds_share_no_kernels(prompt, device, served, monkeypatch):
    """Not even with equal tiles: a kernel that leaves parts of dQ is compiled otherwise than one that leaves none."""
    real = backward_tiles.select
    monkeypatch.setattr(backward_tiles, "select", lambda *given: real(*given[:-1])._replace(keep_dq=True))
    launch = backward.plan(Call.of(*prompt()[:3], **blocks_of(device, *ALIKE, *APART)))
    assert launch.parts is not None
    assert launch.parts.tile == launch.alone.tile
    assert not set(launch.parts.kernels.values()) & set(launch.alone.kernels.values())
    assert len(set(launch.variants)) == len(launch.variants)


@pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")
def test_replays_with_other_selections(prompt, device, served, pin):
    pin(backward_unions=backward_tiles.Unions(0, 4, union_tiles.Worth(4 * G, 3)))
    q, k, v, do = prompt()
    first, second = blocks_of(device, *ALIKE, *APART), blocks_of(device, *APART, *ALIKE)
    want = gradients(q, k, v, do, **second)
    o, lse = selection_reference(Call.of(q.double(), k, v, **first, return_lse=True))
    o, lse = o.to(q.dtype), lse.float()
    call = Call.of(q, k, v, **first)
    launch = backward.plan(call)
    run = lambda: backward.backward(launch, call, do, None, o, lse, "backward")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    other = selection_reference(Call.of(q.double(), k, v, **second, return_lse=True))
    first["block_indices"].copy_(second["block_indices"])
    o.copy_(other[0])
    lse.copy_(other[1])
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_tiles_fit_every_architecture():
    for capability in (80, 89, 90, 100, 120, 9):
        for group in (4, 8, 16):
            for D in (16, 64, 100, 128):
                tile = backward_tiles.union(capability, 2, group, D, D, 16, 64)
                assert tile is not None
                assert tile.TOKENS >= 2
                assert tile.TOKENS * tile.HEADS in (32, 64)
