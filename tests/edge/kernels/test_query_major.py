"""Tiles of query-major: blocks of whole tiles, programs of one tile, and blocks far longer than what they hold."""

import itertools
from functools import partial

import pytest
import torch

import nsa
from nsa.kernels import pinned
from nsa.kernels.query_major import tiles
from nsa.kernels.shared.spans import TILED

triton = partial(nsa.selection_attention, backend="triton")


CHOICES = [(1, 1, 16, 1, 2), (1, 1, 32, 2, 2), (3, 1, 16, 1, 2), (1, 1, 16, 1, 1), (1, 2, 16, 1, 2)]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_blocks_of_whole_tiles(agrees, draw, device, variants, choice, causal):
    """Blocks of one tile or two, more than a program holds at a time, with padding, blocks past the end, and a block
    that the end cuts: only what exists is walked. Rows of two KV heads, whose heads one program holds, or two.
    """
    q, k, v = draw(S=2, HKV=2, G=3, S_kv=100)
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(-2, 6, (1, 2, 2, 70), generator=g).to(device)
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


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", None], ids=["table", "rules"])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("pipelined", [True, False], ids=["stages", "one-stage"])
def test_tiles_lie_in_one_block(D, itemsize, name, pipelined):
    """A tile of several blocks looks up the page of each of its keys, which takes up to eight times as long. It is
    faster only if it holds all keys of a program, in 16 bits. And a program's sums fit its registers.
    """
    shapes = itertools.product((1, 8, 32, 64), (16, 32), (1, 64, 263, 264, 10**6), (64, 256, 2048))
    for G, block, rows, bound in shapes:
        how = {"largest": 16, "pipelined": pipelined, "block": block}
        tile, splits, _ = tiles.tile_and_splits(name, 90, 132, itemsize, G, D, D, bound, 64, rows, **how)
        if block % tile.BLOCK_L:
            assert (itemsize, rows < 264, tile.BLOCK_L * splits >= bound) == (2, True, True), (G, block, rows, bound)
        else:
            assert tile.BLOCK_G * tile.BLOCK_DV <= 4096 * tile.num_warps, (G, block, rows, bound)
        assert splits == 1 or rows < 264 and splits * 32 <= max(bound, 64), (G, block, rows, bound)


def test_few_rows_over_small_blocks_are_split_once_more():
    spans, blocks = (tiles.tile_and_splits(None, 90, 132, 2, 8, 128, 128, 1024, 64, 36, block=b) for b in (0, 32))
    assert blocks[1] == 2 * spans[1]
    assert blocks[0].BLOCK_L == 32 < spans[0].BLOCK_L


H100 = ("NVIDIA H100 80GB HBM3", 90, 132, 2)


@pytest.mark.parametrize(("rows", "bound"), [(4, 2624), (66, 3072), (144, 2688), (137, 2944)])
def test_few_rows_over_long_lists_have_tiles_of_one_block(rows, bound):
    """The table's tiles of 128 keys, measured over blocks of 128, take up to four times as long over blocks of 64."""
    tile, *_ = tiles.tile_and_splits(*H100, 16, 128, 128, bound, 64, rows, largest=16, block=64)
    assert tile.BLOCK_L == 64


def test_many_long_rows_have_longer_tiles():
    """Whatever the number of rows, so that a row's result does not depend on it."""
    for rows, (bound, keys) in itertools.product((264, 10**6), ((2047, 32), (2048, 64))):
        assert tiles.tile_and_splits(*H100, 16, 128, 128, bound, 16, rows, block=128)[0].BLOCK_L == keys


def test_huge_blocks_cost_what_they_hold(agrees, draw, same, fresh_plans):
    """Of a block of 2^20 keys ten exist: with a tile walked for every key that it might hold this would not end."""
    q, k, v = draw(S=1, HKV=1, S_kv=10)
    with pinned(query_major=tiles.Choice(1, 1, 16, 1, 2)):
        agrees(triton, q, k, v, block_indices=same([-1] * 7 + [0], 1, 1, 1), block_size=2**20)
