"""What a selection may say: any span and any block, sound or not, selects exactly the keys it names that exist."""

import itertools
import math
from functools import partial

import pytest
import torch

import nsa
from nsa.kernels import pinned
from nsa.kernels.query_major import tiles

triton = partial(nsa.selection_attention, backend="triton")
KEYS = 24
BIG = 2**62
# What is written, and the sane spans that select the same keys (in the same order) out of 24.
SPANS = {
    "past-the-end": ([(20, 99), (3, 5)], [(20, 24), (3, 5)]),
    "far-past-the-end": ([(4, 6), (24, 30), (2**31 - 2, 2**31 - 1)], [(4, 6)]),
    "negative-start": ([(-6, 4), (-(2**31), 2)], [(0, 4), (0, 2)]),
    "negative": ([(-6, -2), (3, 9)], [(3, 9)]),
    "reversed": ([(9, 3), (5, 8), (23, 0)], [(5, 8)]),
    "unsorted": ([(17, 23), (0, 2), (8, 13)], [(17, 23), (0, 2), (8, 13)]),
    "adjacent": ([(3, 8), (8, 9), (9, 14)], [(3, 14)]),
    "empty-slots": ([(0, 0), (2, 7), (9, 9), (11, 12), (24, 24)], [(2, 7), (11, 12)]),
    "everything": ([(-(2**31), 2**31 - 1)], [(0, 24)]),
}
SPANS_64 = {
    "everything": ([(-BIG, BIG)], [(0, 24)]),
    "huge-ends": ([(20, BIG), (2, 2**32 + 3)], [(20, 24), (2, 24)]),
    "huge-starts": ([(-BIG, 3), (-(2**32) + 1, 2)], [(0, 3), (0, 2)]),
    "huge-outside": ([(BIG, BIG + 5), (-BIG, -BIG + 5), (BIG, -BIG), (5, 9), (2**32, 2**32 + 9)], [(5, 9)]),
}
# Overlap counts twice, so these have no sane equal; the oracle decides.
OVERLAPS = {"overlap": [(2, 12), (6, 20)], "nested": [(0, 24), (5, 8), (6, 7)], "duplicates": [(3, 9), (3, 9), (3, 9)]}


@pytest.mark.parametrize("kind", [*SPANS, *(f"int64-{name}" for name in SPANS_64)])
def test_spans_are_clamped(attend_all, agrees, draw, same, kind):
    wide = kind.startswith("int64-")
    given, sane = SPANS_64[kind.removeprefix("int64-")] if wide else SPANS[kind]
    q, k, v = draw(S=1, HKV=1, S_kv=KEYS)
    ranges = same(given, 1, 1, 1, dtype=torch.int64 if wide else torch.int32)
    o, lse = agrees(attend_all, q, k, v, ranges=ranges, causal=False)
    o_sane, lse_sane = attend_all(q, k, v, ranges=same(sane, 1, 1, 1), causal=False, return_lse=True)
    if attend_all.name == "key_major":  # merges what each span gave
        torch.testing.assert_close((o, lse), (o_sane, lse_sane), rtol=0, atol=1e-5)
    else:
        assert torch.equal(o, o_sane)
        assert torch.equal(lse, lse_sane)


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlap_counts_twice(attend, agrees, draw, same, dtype, kind):
    q, k, v = draw(S=2, HKV=1, dtype=dtype)
    agrees(attend, q, k, v, ranges=same(OVERLAPS[kind], 1, 2, 1))


def test_duplicates_add_to_the_lse(attend, draw, same):
    """Every key three times: same weights, and log 3 more."""
    q, k, v = draw(S=2, HKV=1)
    o, lse = attend(q, k, v, ranges=same([(3, 9)], 1, 2, 1), return_lse=True)
    o3, lse3 = attend(q, k, v, ranges=same([(3, 9)] * 3, 1, 2, 1), return_lse=True)
    torch.testing.assert_close(o3, o, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse3, lse + math.log(3), rtol=0, atol=1e-5)


def test_rows_have_their_own_spans(attend, agrees, draw, device, dtype):
    """Lengths from 0 to more than the cache, drawn per row."""
    q, k, v = draw(B=2, S=2, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    ranges = torch.randint(-4, KEYS + 8, (2, 2, 2, 5, 2), generator=g, dtype=torch.int32).to(device)
    agrees(attend, q, k, v, ranges=ranges)


def test_many_spans_of_a_row(attend, agrees, draw, device):
    """More spans than a program holds at a time."""
    q, k, v = draw(S=1, HKV=1, G=2, S_kv=40)
    g = torch.Generator().manual_seed(0)
    start = torch.randint(-2, 40, (1, 1, 1, 150), generator=g)
    ranges = torch.stack((start, start + torch.randint(-1, 3, start.shape, generator=g)), -1).to(device)
    agrees(attend, q, k, v, ranges=ranges, causal=False)


@pytest.mark.parametrize("choice", [(1, 1, 16, 1, 2), (1, 1, 32, 2, 2), (3, 1, 16, 1, 2), (1, 1, 16, 1, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_blocks_of_whole_tiles(agrees, draw, device, variants, choice, causal):
    """Blocks of one tile or two, more than a program holds at a time, with padding, blocks past the end, and a block
    that the end cuts: only what exists is walked.
    """
    from nsa.kernels.shared.primitives import TILED

    q, k, v = draw(S=2, HKV=1, S_kv=100)
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(-2, 6, (1, 2, 1, 70), generator=g).to(device)
    blocks[:, 0, :, :66] = -1
    with pinned(query_major=tiles.Choice(*choice)):
        agrees(triton, q, k, v, block_indices=blocks, block_size=32, causal=causal)
    assert {made["SOURCE"] for made in variants} == {TILED.value}


@pytest.mark.parametrize(
    ("block_size", "parts"), [*itertools.product((32, 24, 16), (1, 2, 6)), *itertools.product((64, 96), (3, 6))]
)
@pytest.mark.parametrize("more", [0, 1], ids=["all-that-fit", "one-more"])
def test_programs_of_one_tile(agrees, draw, device, variants, block_size, parts, more):
    """As many blocks as their programs' tiles hold, and fewer: some programs have none of them, some a part of one."""
    n = 32 * parts // block_size + more
    q, k, v = draw(S=6, HKV=1, S_kv=200)
    blocks = torch.stack([torch.randperm(200 // block_size + 1)[:n] for _ in range(6)]).view(1, 6, 1, n).to(device)
    blocks[:, 1] = -1
    blocks[:, 2, :, 1:] = -1
    blocks[:, 3, :, : n - 1] = -1
    with pinned(query_major=tiles.Choice(parts, 1, 32, 2, 1)):
        agrees(triton, q, k, v, block_indices=blocks, block_size=block_size, causal=False)
    assert {made["SINGLE"] for made in variants} == {0 if more else max(1, block_size // 32)}


@pytest.mark.parametrize("parts", [1, 3])
def test_packed_rows_of_one_tile(draw, variants, parts):
    """And of one key more, which is another tile."""
    for L in (1, 32 * parts - 7, 32 * parts, 32 * parts + 1):
        q, k, v = draw(B=2, S=1, HKV=1, G=3, S_kv=L)
        want = nsa.selection_attention(
            q, k, v, ranges=torch.tensor([[0, L]], device=q.device).expand(2, 1, 1, 1, 2), backend="reference"
        )
        with pinned(query_major=tiles.Choice(parts, 1, 32, 2, 1)):
            got = nsa.sel_attn_fwd_dense_group(q[:, 0], k[:, :, 0], v[:, :, 0])
        torch.testing.assert_close(got, want[:, 0], rtol=0, atol=1e-5)
        assert variants[-1]["SINGLE"] == (L <= 32 * parts)


def test_huge_blocks_cost_what_they_hold(agrees, draw, same, fresh_plans):
    """Of a block of 2^20 keys ten exist: with a tile walked for every key that it might hold this would not end."""
    q, k, v = draw(S=1, HKV=1, S_kv=10)
    with pinned(query_major=tiles.Choice(1, 1, 16, 1, 2)):
        agrees(triton, q, k, v, block_indices=same([-1] * 7 + [0], 1, 1, 1), block_size=2**20)


@pytest.mark.parametrize("source", ["ranges", "blocks"])
def test_int32_and_int64_agree_bitwise(attend, draw, device, source):
    q, k, v = draw(S=2)
    g = torch.Generator().manual_seed(3)
    if source == "ranges":
        selection = {"ranges": torch.randint(-4, 30, (1, 2, 2, 3, 2), generator=g)}
    else:
        selection = {"block_indices": torch.randint(-2, 6, (1, 2, 2, 3), generator=g), "block_size": 5}
    results = []
    for width in (torch.int32, torch.int64):
        given = {name: x.to(device, width) if isinstance(x, torch.Tensor) else x for name, x in selection.items()}
        results.append(attend(q, k, v, **given, return_lse=True))
    torch.testing.assert_close(*results, rtol=0, atol=0)


# --- blocks -----------------------------------------------------------------------------------------------------------

BLOCKS = {
    "padding-first": [-1, 0, 1],
    "padding-between": [1, -1, -5, 0],
    "padding-last": [0, -(2**31)],
    "unsorted": [1, 0],
    "twice": [0, 0, 1],
    "past-the-end": [0, 2**31 - 1, 9, 2**30],
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("size", [1, 16, 24, 64], ids=lambda size: f"size{size}")
def test_blocks_are_spans(attend, agrees, draw, same, kind, size):
    """24 keys: blocks of one key, blocks cut short by the end, one block of all, and blocks larger than the cache."""
    q, k, v = draw(S=1, HKV=1)
    blocks = BLOCKS[kind]
    o, lse = agrees(attend, q, k, v, block_indices=same(blocks, 1, 1, 1), block_size=size, max_selected=3 * KEYS)
    spans = [(b * size, min(b * size + size, KEYS)) for b in blocks if 0 <= b * size < KEYS]
    o_spans, lse_spans = attend(
        q, k, v, ranges=same(spans, 1, 1, 1, dtype=torch.int64), max_selected=3 * KEYS, return_lse=True
    )
    torch.testing.assert_close(o, o_spans, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, lse_spans, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**62], ids=["int32-max", "past-int32", "huge"])
@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_block_larger_than_any_cache(attend, draw, same, size, width):
    """Block 0 is then all keys."""
    q, k, v = draw(S=1, HKV=1)
    blocks = same([0, 1, -1], 1, 1, 1, dtype=width)
    got = attend(q, k, v, block_indices=blocks, block_size=size, max_selected=KEYS, return_lse=True)
    want = attend(q, k, v, ranges=same([(0, KEYS)], 1, 1, 1), max_selected=KEYS, return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 16, 64], ids=lambda size: f"size{size}")
def test_huge_block_indices_select_nothing(attend, agrees, draw, same, size):
    """Their keys, `index * block_size`, would not fit int64."""
    q, k, v = draw(S=1, HKV=1)
    blocks = same([BIG, 0, -BIG, 2**63 - 1, -(2**63), 2**58, 2**32], 1, 1, 1, dtype=torch.int64)
    got = agrees(attend, q, k, v, block_indices=blocks, block_size=size)
    want = attend(q, k, v, block_indices=same([0], 1, 1, 1), block_size=size, return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_blocks_of_rows(attend, agrees, draw, device, dtype):
    q, k, v = draw(B=2, S=2, S_kv=50, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(-2, 5, (2, 2, 2, 3), generator=g, dtype=torch.int32).to(device)
    agrees(attend, q, k, v, block_indices=blocks, block_size=12)
