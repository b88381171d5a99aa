"""How many blocks neighbouring queries have in common, in drawn selections and in one that scores make.

    python -m nsa.testing.matrix.overlap

prints the table of docs/notebook/union.md. Shapes: blocks ``[..., S, HKV, n]``, -1 is padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOKENS = 4  # of a tile of the union kernel with 16 heads a group


def in_common(blocks: Tensor) -> float:
    """The share of its blocks that a query has in common with the query before it, on average."""
    now, before = blocks[..., 1:, :, :], blocks[..., :-1, :, :]
    same = (now[..., :, None] == before[..., None, :]).any(-1)
    return int((same & (now >= 0)).sum()) / int((now >= 0).sum())


def in_unions(blocks: Tensor, tokens: int = TOKENS) -> float:
    """Blocks in the union of ``tokens`` neighbouring queries, as a share of the blocks that these queries list."""
    whole = blocks.shape[-3] // tokens * tokens
    tiles = blocks[..., :whole, :, :].unflatten(-3, (-1, tokens)).transpose(-3, -2).flatten(-2).sort(-1).values
    listed, first = tiles >= 0, tiles >= 0
    first[..., 1:] &= tiles[..., 1:] != tiles[..., :-1]
    return int(first.sum()) / int(listed.sum())


def by_scores(S: int, window: int, *, G: int = 16, D: int = 128, n: int = 16, size: int = 64, seed: int = 0) -> Tensor:
    """Blocks ``[S, 1, n]`` that random projections of smooth hidden states select, as NSA selects them.

    A hidden state sums ``window`` consecutive noise vectors, so states of tokens further apart than that are
    independent. A block scores the softmax of ``q · mean(K)`` over the blocks up to the query's own, summed over the
    heads of the group. The first block and the own block are always selected.
    """
    g = torch.Generator().manual_seed(seed)
    sums = torch.randn(S + window, D, generator=g).cumsum(0)
    hidden = (sums[window:] - sums[:-window]) / math.sqrt(window)
    project = torch.randn(G + 1, D, D, generator=g) / math.sqrt(D)
    means = torch.stack([x.mean(0) for x in (hidden @ project[G]).split(size)])
    own, block = torch.arange(S)[:, None] // size, torch.arange(len(means))
    scores = torch.zeros(S, len(means))
    for of_head in project[:G]:
        products = (hidden @ of_head) @ means.T / math.sqrt(D)
        scores += products.masked_fill(block > own, -math.inf).softmax(-1)
    scores.masked_fill_((block == 0) | (block == own), 2.0 * G).masked_fill_(block > own, -1.0)
    best, blocks = scores.topk(min(n, len(means)), -1)
    return blocks.masked_fill(best < 0, -1)[:, None]


def main() -> None:
    """Print the overlap of selections by scores, for hidden states of different smoothness."""
    print("| states smoothed over | in common with the query before | blocks in a tile's union, of 64 listed |")
    print("| --- | --- | --- |")
    for window in (1, 16, 64, 256, 1024):
        blocks = by_scores(16_384, window)[4096:]
        print(f"| {window} token{'s' * (window > 1)} | {in_common(blocks):.2f} | {64 * in_unions(blocks):.0f} |")


if __name__ == "__main__":
    main()
