"""Steps of a ragged batch, which query-major serves beside union and key-major: which rows they are, and which not."""

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.sizes import ALWAYS, STEPS
from nsa.kernels.union import tiles as union_tiles
from nsa.testing.judge.forward import cached_parity
from nsa.testing.matrix import caches

ROOM, SIZE, HKV, G = 64, 16, 1, 4
pytestmark = pytest.mark.usefixtures("fresh_plans")


@pytest.fixture
def batch(device):
    """`batch(queries, unused)`: arguments of a call whose sequences have as many queries, and its oracle."""

    def make(queries, unused=0, size=SIZE):
        T, n = sum(queries) + unused, 3
        lengths = [ROOM - 5 * (b % 7) for b in range(len(queries))]
        cache = caches.draw(lengths, ROOM, SIZE, HKV=HKV, device=device, seed=1)
        g = torch.Generator().manual_seed(2)
        q = torch.randn(T, HKV * G, 16, generator=g).to(device)
        blocks = torch.rand(T, HKV, ROOM // size, generator=g).argsort(-1)[..., :n].int().to(device)
        cu = torch.tensor([0, *queries], device=device).cumsum(0).int()
        selection = {"block_indices": blocks, "block_size": size}
        call = {"q": q, "k_cache": cache.k, "v_cache": cache.v, **cache.arguments, **selection, "cu_seqlens_q": cu}
        return call, caches.oracle(q, cache, cu, **selection)

    return make


@pytest.fixture
def marked(monkeypatch):
    """What query-major marked in the last call, `[tokens]`; None if it was not launched for steps. With `after`, what
    is marked by now.
    """
    seen = []
    real = key_major.Launch.serve_steps

    def serve_steps(*arguments):
        served = real(*arguments)
        seen.append(None if served is None else (served.tolist(), served))
        return served

    monkeypatch.setattr(key_major.Launch, "serve_steps", serve_steps)
    return lambda after=False: (seen[-1][1].tolist() if after else seen[-1][0]) if seen and seen[-1] else None


def run(call, schedule, **more):
    return nsa.selection_attention_with_kvcache(**call, backend="triton", schedule=schedule, return_lse=True, **more)


@pytest.mark.parametrize("splits", [None, 2], ids=["whole", "split"])
@pytest.mark.parametrize("schedule", ["key_major", "union"])
def test_sequences_of_few_queries_are_steps(batch, marked, schedule, splits):
    """The longest step, the shortest chunk, no queries, and tokens of no sequence."""
    call, want = batch((STEPS + 1, STEPS, 0, 1), unused=2)
    with pinned(query_major=None if splits is None else tiles.Choice(splits, 1, 16, 4, 2, 0)):
        got = run(call, schedule)
    assert marked() == [0] * (STEPS + 1) + [1] * (STEPS + 1) + [0] * 2
    cached_parity(got, want, torch.float32, schedule)
    assert not got[0][-2:].any()


@pytest.mark.parametrize("few", [0, key_tiles.FEW_UNITS], ids=["three launches", "one program"])
def test_ends_in_no_order_hide_no_chunk(batch, monkeypatch, device, few):
    """The scan leaves out blocks of sequences of few queries. By its ends the second has none, yet it has 13."""
    monkeypatch.setattr(key_tiles, "FEW_UNITS", few)
    monkeypatch.setattr(key_major, "ELEMENTS", ROOM)  # blocks of one key, so the scan takes those of one sequence
    call, _ = batch((12, 4), size=1)
    call["cu_seqlens_q"] = torch.tensor([0, 99, 3], dtype=torch.int32, device=device)
    want = nsa.selection_attention_with_kvcache(**call, backend="reference", return_lse=True)
    cached_parity(run(call, "key_major"), want, torch.float32, "key_major")


def test_unions_leave_steps_alone(batch, marked, pin, monkeypatch):
    """Two tiles of four tokens are in a step. The device counts no block of theirs, and key-major skips them."""
    pin(union=union_tiles.Choice(worth=ALWAYS))
    seen, real = [], launching.divided

    def divided(device, sizes):
        seen.append(real(device, sizes))
        return seen[-1]

    monkeypatch.setattr(launching, "divided", divided)
    call, want = batch((12, 8))
    got = run(call, "union")
    assert [count >= 0 for count in seen[0][1].tensor().tolist()] == [True] * 3 + [False] * 2
    assert marked() == [0] * 12 + [1] * 8
    assert marked(after=True) == [1] * 20
    cached_parity(got, want, torch.float32, "union")


@pytest.mark.parametrize("schedule", ["key_major", "union"])
def test_no_steps_where_all_sequences_must_be_long(batch, marked, schedule):
    """Two sequences, the longer one of 12 queries, have 21 tokens: the other one has 9 or more."""
    call, want = batch((12, STEPS + 1))
    cached_parity(run(call, schedule, max_seqlen_q=12), want, torch.float32, schedule)
    assert marked() is None
    cached_parity(run(call, schedule, max_seqlen_q=13), want, torch.float32, schedule)
    assert marked() == [0] * 21
    cached_parity(run(call, schedule, max_seqlen_q=1), want, torch.float32, schedule)  # wrong


def test_ranges_have_no_steps(batch, marked, device):
    call, _ = batch((2, 1))
    blocks = call.pop("block_indices")
    spans = torch.stack((blocks, blocks + 1), -1) * call.pop("block_size")
    run(call, "key_major", ranges=spans)
    assert marked() is None


def test_no_steps_with_batch_invariant(batch, marked):
    """A sequence alone, and beside another one: the same bits."""
    call, want = batch((3, 1))
    with nsa.configure(batch_invariant=True):
        got = run(call, "key_major")
        assert marked() is None
        alone = {name: call[name][:3] for name in ("q", "block_indices")}
        alone |= {name: call[name][:1] for name in ("cache_seqlens", "block_table")}
        alone = run(call | alone | {"cu_seqlens_q": call["cu_seqlens_q"][:2]}, "key_major")
    cached_parity(got, want, torch.float32, "key_major")
    assert all(torch.equal(a[:3], b) for a, b in zip(got, alone, strict=True))


def test_a_program_goes_on_to_further_shares(batch, monkeypatch):
    """One program for each KV head, where there are many shares."""
    monkeypatch.setattr(key_major, "_programs", lambda launch, w: 1)
    call, want = batch((STEPS + 1, 1, STEPS + 1), size=8)
    cached_parity(run(call, "key_major"), want, torch.float32, "key_major")


def test_programs_follow_the_longest_chunk(batch):
    """As many as blocks of the sequences that would hold all tokens, or as shares of full length: 6 of 192 units."""
    call, _ = batch((32, *[1] * 32))
    call = {"k" if name == "k_cache" else "v" if name == "v_cache" else name: x for name, x in call.items()}
    programs = {}
    for longest in (None, 1, 16, 32, 2**40):
        launch = key_major.plan(Call(**call, max_seqlen_q=longest))
        programs[longest] = key_major._programs(launch, launch.windows)
    blocks = ROOM // SIZE
    assert programs == {None: 32 * blocks, 1: 32 * blocks, 16: 4 * blocks, 32: 2 * blocks, 2**40: 6}


@pytest.mark.parametrize("at", [0, 127, 129])
def test_a_chunk_among_more_sequences_than_are_looked_at_at_once(batch, marked, at):
    """128 are. The scan kernel looks only at blocks of sequences from the first to the last chunk, 1024 at a time.
    Block 2048 is the first after sequence 127.
    """
    queries = [0] * 130
    queries[0] = queries[127] = queries[129] = 1
    queries[at] = STEPS + 1
    call, want = batch(queries, size=4)
    cached_parity(run(call, "key_major"), want, torch.float32, "key_major")
    assert marked() == [int(count <= STEPS) for count in queries for _ in range(count)]
