"""Tiles of neighbouring tokens that read the union of their blocks, in union, small blocks and dQ: which tiles those
are, and what a neighbour must not do to a row.
"""

import math

import pytest
import torch

import nsa
from nsa import settings
from nsa.call import Call
from nsa.kernels.backward import plan as backward
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.families import OF_SCHEDULE
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles as query_tiles
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared import sizes
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.shape import shape_of
from nsa.kernels.shared.sizes import ALWAYS, Worth
from nsa.kernels.small_blocks import tiles as small_tiles
from nsa.kernels.union import tiles
from nsa.plain.oracle import selection_reference
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...parity.test_caches import serve
from .gradients import close, exact, gradients, like

pytestmark = pytest.mark.usefixtures("fresh_plans")  # plans keep what `worth` was
TRITON = {"backend": "triton", "return_lse": True}
UNION = TRITON | {"schedule": "union"}
SIZE, KEYS = 16, 90  # the last block has 10 keys
ALIKE = [[0, 3], [3, 0], [0, -1], [-1, 3]]
APART = [[0, 1], [2, 3], [4, 5], [-1, -1]]
NEIGHBOURS = [[0, 1], [1, 3], [0, 1], [1, 0], *[[4, 1]] * 4]  # block 3 is the second token's alone


class Forward:
    """Results are O and LSE, of fp32; equal to key-major's. Unions of a group of 4 heads: a tile holds 4 tokens."""

    G, dtype, tolerance, poisoned = 4, torch.float32, 2e-5, ["v"]
    schedule, equal = "union", "key_major"
    of_lists = torch.int64  # the workspace of this dtype is made with `served`

    def __init__(self, pin, monkeypatch):
        self.pin, self.made, real = pin, [], launching.divided

        def divided(device, sizes):
            made = real(device, sizes)
            if self.of_lists in [size[1] for size in sizes if size is not None]:
                self.made[:] = made
            return made

        monkeypatch.setattr(launching, "divided", divided)

    def worth(self, worth):
        self.pin(union=tiles.Choice(worth=worth))

    def served(self):
        """What the last call wrote into `served`, `[tokens * HKV]`."""
        return self.made[-1].tensor().bool().tolist()

    def results(self, q, k, v, do, **selection):
        return nsa.selection_attention(q, k, v, **selection, **TRITON, schedule=self.schedule)

    def check(self, q, k, v, do, **selection):
        got = self.results(q, k, v, do, **selection)
        want = nsa.selection_attention(q, k, v, **selection, **TRITON, schedule=self.equal)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
        return got


class ByRow(Forward):
    """Query-major, not key-major, serves the rows without a union."""

    equal = "query_major"

    def worth(self, worth):
        self.pin(union=tiles.Choice(worth=worth, by_row=True))


class SmallBlocks(Forward):
    """Equal to query-major's."""

    schedule, equal, splits = "small_blocks", "query_major", 1
    of_lists = torch.int16

    def worth(self, worth):
        how = small_tiles.Choice(worth=worth, splits=self.splits, union_splits=self.splits, least=0)
        self.pin(small_blocks=how)

    def served(self):
        return [x == 1 for x in self.made[-1].tensor().tolist()]


class SplitBlocks(SmallBlocks):
    """The rows that tiles leave are split like the unions, and one kernel merges both."""

    splits = 2


class Backward:
    """Results are gradients, of fp16; equal to the oracle's, and bitwise equal the second time."""

    G, dtype, tolerance, poisoned = 16, torch.float16, 2e-3, ["k", "v"]

    def __init__(self, pin, monkeypatch):
        self.pin, self.seen, real = pin, [], backward._by_unions
        monkeypatch.setattr(backward, "_by_unions", lambda *given: real(*given) or self.seen.append(given[1].served))

    def worth(self, worth, queries=0):
        self.pin(backward_unions=backward_tiles.Unions(queries, 4, worth))

    def served(self):
        return self.seen[-1].bool().flatten().tolist() if self.seen else None

    def results(self, *given, **selection):
        return gradients(*given, **selection)

    def check(self, *given, **selection):
        got = gradients(*given, **selection)
        close(got, exact(*given, **selection))
        assert all(map(torch.equal, got, gradients(*given, **selection)))
        return got


@pytest.fixture
def way(request, pin, monkeypatch):
    """Unions of any size, in a call of any length."""
    made = (request.param if hasattr(request, "param") else Backward)(pin, monkeypatch)
    made.worth(ALWAYS)
    return made


WAYS = {"forward": Forward, "by_row": ByRow, "small": SmallBlocks, "split": SplitBlocks, "backward": Backward}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS, indirect=True)
forward = pytest.mark.parametrize("way", [Forward], ids=["forward"], indirect=True)


@pytest.fixture
def prompt(draw, way):
    """Queries of two tiles, keys, values, and the gradient of the output."""

    def make(S=8, **how):
        how = {"S": S, "S_kv": KEYS, "HKV": 1, "G": way.G, "dtype": way.dtype} | how
        q, k, v = draw(**how)
        return q, k, v, like(q)

    return make


def blocks_of(device, *rows, causal=False):
    blocks = torch.tensor(rows, dtype=torch.int32, device=device).view(1, len(rows), 1, -1)
    return {"block_indices": blocks, "block_size": SIZE, "causal": causal}


def worth(way):
    """Three blocks of a union for four listed ones."""
    return Worth(4 if isinstance(way, SmallBlocks) else 4 * way.G, 3)


YES, NO = [True] * 4, [False] * 4


@every_way
def test_tiles_whose_rows_share_blocks_are_served(prompt, device, way):
    """Rows of one tile by its union, rows of the other one by one, since a union saves them no read."""
    way.worth(worth(way))
    way.check(*prompt(), **blocks_of(device, *ALIKE, *APART))
    assert way.served() == YES + NO
    way.check(*prompt(), **blocks_of(device, *APART, *ALIKE))
    assert way.served() == NO + YES


@every_way
def test_positions(prompt, device, way):
    where = torch.tensor([[0, 89, 40, -3, 17, 10**12, 16, 50]], device=device)
    way.check(*prompt(), **blocks_of(device, *ALIKE, *APART, causal=True), q_positions=where)
    assert way.served() == YES + YES


@every_way
@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_holds_tokens_of_one_sequence(prompt, device, way, causal):
    """The last tile has no sequence, and reads nothing."""
    cu = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 6, 12, 12, 16], [0, 40, 62, 70, KEYS]))
    selection = blocks_of(device, *ALIKE * 3, *APART, *ALIKE, causal=causal) | {"cu_seqlens": cu}
    selection["block_indices"] = selection["block_indices"][0]
    got = way.check(*prompt(S=20, varlen=True), **selection)
    assert way.served() == YES + NO + YES * 3
    assert not got[0][16:].any()


@pytest.mark.parametrize("way", [Forward, Backward], ids=["forward", "backward"], indirect=True)
def test_two_sequences_of_a_batch(prompt, device, way):
    """No tile of small blocks reaches from one to the other."""
    blocks = torch.tensor([ALIKE + APART[:1]] * 2, dtype=torch.int32, device=device)[:, :, None]
    way.check(*prompt(B=2, S=5), block_indices=blocks, block_size=SIZE, causal=True)
    assert way.served() == YES + NO + [True] * 2


@every_way
@pytest.mark.parametrize("twice", [[2, 2], [1, 1]], ids=["new", "known"])
def test_a_block_listed_twice_counts_twice(prompt, device, way, twice):
    """Block 2 is new to the tile's union when it is listed twice, block 1 is known."""
    way.check(*prompt(), **blocks_of(device, [0, 1], twice, [1, 0], [0, 1], *[[4, 1]] * 4))
    assert way.served() == NO + YES


@every_way
def test_several_passes(prompt, device, way, monkeypatch):
    """Lists that hold one tile at a time, and of small blocks are made by one program."""
    way.worth(worth(way))
    monkeypatch.setattr(sizes, "LIST_BYTES", 1)
    monkeypatch.setattr(sizes, "LIST_PLACES", 1)
    way.check(*prompt(S=12), **blocks_of(device, *ALIKE, *APART, *ALIKE))
    assert way.served() == YES + NO + YES


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says so when the interpreter computes with infinities
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("way", "where"),
    [pytest.param(way, where, id=f"{name}-{where}") for name, way in WAYS.items() for where in way.poisoned],
    indirect=["way"],
)
def test_a_key_that_only_a_neighbour_selected_does_not_matter(prompt, device, way, poison, where):
    """Its weight, or its dS, is zero, and zero times NaN is NaN: such a tile is computed row by row, or dQ again."""
    q, k, v, do = prompt()
    selection = blocks_of(device, *NEIGHBOURS)
    clean = way.results(q, k, v, do, **selection)
    (k if where == "k" else v)[:, 3 * SIZE + 2, :, 1] = poison
    got = way.results(q, k, v, do, **selection)
    assert way.served() == (YES if isinstance(way, Backward) else NO) + YES
    near = {"rtol": way.tolerance, "atol": way.tolerance}
    for s in (0, 2, 3, 4):
        torch.testing.assert_close(got[0][:, s], clean[0][:, s], **near)
    assert not got[0][0, 1].isfinite().all()
    if isinstance(way, Forward):
        torch.testing.assert_close(got[1], clean[1], **near)
    for s in (0, 2, 3, 4) if isinstance(way, Backward) else ():
        assert torch.equal(got[0][:, s], clean[0][:, s])
    for x, y in zip(got[1:], clean[1:], strict=True) if isinstance(way, Backward) else ():
        assert torch.equal(x[:, 4 * SIZE :], y[:, 4 * SIZE :])  # only the row of the bad key reads blocks 1 and 3
        torch.testing.assert_close(x[:, :SIZE], y[:, :SIZE], **near)


@every_way
@pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")
def test_replays_with_other_selections(prompt, device, way):
    """The device decides which tiles are served, so a captured graph serves others for other selections."""
    way.worth(worth(way))
    q, k, v, do = prompt()
    selection, other = blocks_of(device, *ALIKE, *APART), blocks_of(device, *APART, *ALIKE)
    want = way.results(q, k, v, do, **other)
    o, lse = selection_reference(Call.of(q.double(), k, v, **selection, return_lse=True))
    o, lse, call = o.to(q.dtype), lse.float(), Call.of(q, k, v, **selection)
    launch = backward.plan(call)

    def run():
        if isinstance(way, Forward):
            return way.results(q, k, v, do, **selection)
        return backward.backward(launch, call, do, None, o, lse, "backward")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    selection["block_indices"].copy_(other["block_indices"])
    for x, y in zip((o, lse), selection_reference(Call.of(q.double(), k, v, **other, return_lse=True)), strict=True):
        x.copy_(y)
    graph.replay()
    assert way.served() == NO + YES
    assert all(map(torch.equal, got, want))


# --- forward ----------------------------------------------------------------------------------------------------------


@forward
def test_what_unions_leave_of_some_heads(prompt, device, way, monkeypatch):
    """Key-major lists one KV head at a time. Unions serve all rows of the first, and none of the second."""
    monkeypatch.setattr(key_tiles, "heads_at_once", lambda *_: 1)
    blocks = torch.tensor([ALIKE * 2, [[4, 4]] * 8], dtype=torch.int32, device=device).transpose(0, 1)[None]
    way.check(*prompt(HKV=2), block_indices=blocks.contiguous(), block_size=SIZE, causal=False)
    assert way.served() == [True, False] * 8


@forward
@pytest.mark.parametrize("size", [1 << 12, 1 << 33])
def test_a_block_of_more_keys_than_there_are(prompt, device, way, size):
    """It has no tiles past the last key, and other blocks have no keys."""
    selection = blocks_of(device, *[[0, 3]] * 4, *[[2**31 - 1, 0]] * 4) | {"block_size": size}
    given = prompt()
    way.check(*given, **selection)
    call = Call(*given[:3], block_indices=selection["block_indices"], block_size=size)
    assert OF_SCHEDULE["union"].plan(call, shape_of(call), "union").size == 96  # whole tiles


@forward
def test_key_major_beside_unions(prompt, device, way):
    """Key-major that skips rows, and key-major alone, are two kernels, in either order."""
    selection, given = blocks_of(device, *[[0, 3]] * 8), prompt()
    call = Call(*given[:3], **selection)
    launch = OF_SCHEDULE["union"].plan(call, shape_of(call), "union")
    assert not set(launch.variants) & set(key_major.plan(call).variants)
    for _ in range(2):
        way.check(*given, **selection)


@forward
@pytest.mark.parametrize("size", [16, 128])
def test_a_pin_of_tiles_leaves_alone_which_unions_are_read(prompt, device, way, pin, size):
    """A sweep of tiles must read the unions that calls without a pin read."""
    call = Call(*prompt()[:3], block_indices=blocks_of(device, *[[0, 3]] * 8)["block_indices"], block_size=size)
    alone = OF_SCHEDULE["union"].plan(call, shape_of(call), "union")
    pin(union=tiles.Choice(rows=32))
    call = call._replace(settings=settings.get())
    pinned = OF_SCHEDULE["union"].plan(call, shape_of(call), "union")
    assert pinned.worth == alone.worth


@pytest.mark.parametrize("way", [ByRow], ids=["by_row"], indirect=True)
def test_query_major_beside_unions(prompt, device, way, pin):
    """It leaves out rows that are served. A program holds a whole row even if splits are pinned: without its parts, a
    row that is left out cannot be merged.
    """
    way.worth(worth(way))
    pin(query_major=query_tiles.Choice(2, 1, 16, 1, 2))
    selection, given = blocks_of(device, *ALIKE, *APART), prompt()
    call = Call(*given[:3], **selection, settings=settings.get())
    rest = OF_SCHEDULE["union"].plan(call, shape_of(call), "union").rest
    assert ({x.kernel.fn.__name__ for x in rest.variants}, rest.splits) == ({"_fwd_kernel"}, 1)
    served, out = torch.tensor([1, 0] * 4, dtype=torch.int32, device=device), torch.full_like(given[0], math.nan)
    rest.serve(call._replace(out=out), None, served, None)
    assert out[0].isnan().flatten(1).all(1).tolist() == served.bool().tolist()
    before = nsa.kernels.launches.copy()
    way.check(*given, **selection)
    assert way.served() == YES + NO
    assert nsa.kernels.launches - before == {"union": 1, "query_major": 1, "split": 1}


@forward
def test_rows_do_not_depend_on_neighbours_with_batch_invariant(prompt, device, way):
    qkv, selection = prompt()[:3], blocks_of(device, *[[0, 3]] * 8)
    with settings.configure(batch_invariant=True):
        with pytest.raises(DoesNotFit, match="batch_invariant"):
            nsa.selection_attention(*qkv, **selection, **UNION)
        before = nsa.kernels.launches.copy()
        nsa.selection_attention(*qkv, **selection, schedule="union")
    assert not (nsa.kernels.launches - before)["union"]


def test_keys_of_all_blocks_are_counted_in_int32():
    """Those of the last block, too, which may end past the last key."""
    most = 2**31 - 1 - 256
    assert all(tiles.fits(most, size) for size in (32, 64, 128, most, 2**40))
    assert not tiles.fits(most + 1, 64)
    assert tiles.fits(2**31 - 400, 2**30 - 200)
    assert not tiles.fits(2**31 - 400, 2**30 + 1)


@forward
def test_a_group_that_no_tile_holds_twice_is_told_what_fits(device, way):
    q, k = (torch.zeros(1, 4, heads, 16, device=device) for heads in (16, 1))
    with pytest.raises(DoesNotFit, match="at most 32 query heads .*, got 16 heads and 2 blocks$"):
        nsa.selection_attention(q, k, k, **blocks_of(device, *[[0, 1]] * 4), **UNION)


@pytest.mark.parametrize("way", [ByRow], ids=["by_row"], indirect=True)
def test_keys_that_are_not_counted_are_told(device, way):
    q, k = (torch.zeros(1, 4, heads, 16, device=device).half() for heads in (4, 1))
    k = k[:, :1].expand(1, 2**31 - 400, 1, 16)
    said = "union: expected at most 2147483391 keys .*, got 2147483248 keys in blocks of 1073741825$"
    with pytest.raises(DoesNotFit, match=said):
        nsa.selection_attention(q, k, k, **blocks_of(device, *[[0, 1]] * 4) | {"block_size": 2**30 + 1}, **UNION)


@forward
def test_ranges_have_no_unions(prompt, same, way):
    with pytest.raises(DoesNotFit, match="expected block_indices, got ranges"):
        nsa.selection_attention(*prompt()[:3], ranges=same([(0, 9)], 1, 8, 1), **UNION)


@pytest.mark.parametrize("way", [Forward, ByRow], ids=["forward", "by_row"], indirect=True)
def test_ragged_batches(device, way, monkeypatch):
    """A tile that reaches past the last sequence is left to the others, which give unused tokens zeros."""
    cache = caches.draw([90, 50], 96, 32, HKV=1, dtype=torch.float32, device=device, seed=1)
    q = torch.randn(20, way.G, 16, generator=torch.Generator().manual_seed(2)).to(device)
    selection = {"block_indices": torch.tensor([[[0, 5]]] * 9 + [[[3, 1]]] * 11, device=device), "block_size": SIZE}
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    if isinstance(way, ByRow):
        monkeypatch.setattr(key_major, "forward", None)
    o, _ = serve(q, cache, selection, cu, Dv=16, schedule="union", max_seqlen_q=9)
    assert way.served() == YES + YES + NO + YES + NO
    assert not o[18:].any()


# --- backward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("G", [4, 5, 8, 16])
def test_causal_prompts_with_every_group(prompt, device, way, G):
    """The last tile is partial, and rows see a part of their own block; also the gradient of LSE."""
    S = 21
    q, k, v, do = prompt(S=S, S_kv=S + 12, HKV=2, G=G, D=20, Dv=20)
    g = torch.Generator().manual_seed(1)
    order = torch.rand(1, S, 2, 3, generator=g).argsort(-1)
    dlse = torch.randn(q.shape[:-1], generator=g).to(device)
    way.check(q, k, v, do, dlse, block_indices=order.int().to(device), block_size=SIZE, causal=True)
    assert way.served() == [True] * S * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_query_spoils_only_what_it_reads(prompt, device, way):
    q, k, v, do = prompt()
    selection = blocks_of(device, *NEIGHBOURS)
    clean = gradients(q, k, v, do, **selection)
    q[:, 1, 0] = math.nan
    dq, dk, dv = gradients(q, k, v, do, **selection)
    assert dq[0, 1, 0].isnan().all()
    for s in (0, 2, 3, 4):
        torch.testing.assert_close(dq[:, s], clean[0][:, s], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(dk[:, :SIZE], clean[1][:, :SIZE], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(dv[:, :SIZE], clean[2][:, :SIZE], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "limits", [{"INDEX_BYTES": 12 * 2 * 3}, {"DQ_BYTES": 2 * Backward.G * 16 * 2 * 3}, {"SUM_BYTES": 1}]
)
def test_windows(prompt, device, way, limits, pin, monkeypatch):
    """Rows of both kinds, in windows shorter than a tile, in shares of one tile; unions one tile at a time."""
    for name, value in limits.items():
        monkeypatch.setattr(backward_tiles, name, value)
    pin(backward=backward_tiles.Choice(32, 4, 2, 1, True, 16, 1, 1))
    test_several_passes(prompt, device, way, monkeypatch)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (True, True, False)])
def test_frozen_inputs(prompt, device, way, wanted):
    """Unions serve calls that want all; others get the same gradients, within rounding."""
    given, selection = prompt(), blocks_of(device, *ALIKE, *APART)
    for got, want, wants in zip(
        gradients(*given, wanted=wanted, **selection), exact(*given, **selection), wanted, strict=True
    ):
        assert (got.numel() > 0) == wants
        if wants:
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-2 * float(want.abs().max()))
    assert (way.served() is not None) == (wanted[0] and any(wanted[1:]))


def test_no_unions(prompt, device, way):
    """`batch_invariant` forbids that neighbours matter; short calls and small groups would not gain."""

    def plan(dtype=torch.float16, **how):
        qkv = (x.to(dtype) for x in prompt(**how)[:3])
        return backward.plan(Call.of(*qkv, **blocks_of(device, *ALIKE, *APART), settings=settings.get()))

    assert plan().unions is not None
    assert plan(G=3).unions is None
    assert plan(torch.float32).unions is None
    with settings.configure(batch_invariant=True):
        assert plan().unions is None
    way.worth(ALWAYS, 8 * way.G * way.G + 1)
    assert plan().unions is None


def test_rows_of_both_kinds_share_no_kernels(prompt, device, way, monkeypatch):
    """Not even with equal tiles: a kernel that leaves parts of dQ is compiled otherwise than one that leaves none."""
    real = backward_tiles.select
    monkeypatch.setattr(backward_tiles, "select", lambda *given: real(*given[:-1])._replace(keep_dq=True))
    launch = backward.plan(Call.of(*prompt()[:3], **blocks_of(device, *ALIKE, *APART)))
    assert launch.parts is not None
    assert launch.parts.tile == launch.alone.tile
    assert not set(launch.parts.kernels.values()) & set(launch.alone.kernels.values())
    assert len(set(launch.variants)) == len(launch.variants)


def test_tiles_fit_every_architecture():
    for capability in (80, 89, 90, 100, 120, 9):
        for group in (4, 8, 16):
            for D in (16, 64, 100, 128):
                tile = backward_tiles.union(capability, 2, group, D, D, 16, 64)
                assert tile is not None
                assert tile.TOKENS >= 2
                assert tile.TOKENS * tile.HEADS in (32, 64)
