"""Where the tokens of each rank lie in the whole sequence.

``contiguous``: rank ``r`` has the tokens after those of the ranks before it. ``zigzag``: the sequence is cut into twice
as many pieces as there are ranks, and rank ``r`` has the ``r``-th piece from the start, then the ``r``-th from the end.
In both orders shards may have different lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ORDERS = ("contiguous", "zigzag")


class Piece(NamedTuple):
    """Tokens that are neighbours in the sequence and in a rank's shard."""

    rank: int
    local: int  # first token in the shard
    first: int  # the same token in the whole sequence
    length: int


class Layout(NamedTuple):
    """How an axis is divided among ranks."""

    order: str
    lengths: tuple[int, ...]  # tokens of each rank; even numbers in zigzag order

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest shard."""
        return max(self.lengths)

    def pieces(self) -> list[Piece]:
        """All pieces in the order of the sequence, without empty ones. Raises ValueError for odd lengths in zigzag."""
        if self.order == "contiguous":
            cut = [(rank, 0, length) for rank, length in enumerate(self.lengths)]
        else:
            if any(length % 2 for length in self.lengths):
                raise ValueError(f"lengths: expected even numbers in zigzag order, got {self.lengths}")
            there = [(rank, 0, length // 2) for rank, length in enumerate(self.lengths)]
            back = [(rank, length // 2, length // 2) for rank, length in enumerate(self.lengths)]
            cut = there + back[::-1]
        pieces, first = [], 0
        for rank, local, length in cut:
            if length:
                pieces.append(Piece(rank, local, first, length))
            first += length
        return pieces

    def of(self, rank: int) -> list[Piece]:
        """The pieces of one rank, in the order of its shard."""
        return [piece for piece in self.pieces() if piece.rank == rank]

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """``[tokens of the rank]`` int32: where each of its tokens lies in the whole sequence."""
        ranges = [
            torch.arange(x.first, x.first + x.length, dtype=torch.int32, device=device) for x in self.of(rank)
        ]  # fmt: skip
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int32, device=device)


def query_positions(queries: Layout, S_kv: int, rank: int, batch: int, device: torch.device) -> Tensor:
    """``[batch, S]`` int32: the position of each query of a rank. The last query of all is at the last key."""
    return (queries.positions(rank, device) + (S_kv - queries.total)).expand(batch, -1)


def packed_positions(queries: Layout, rank: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """``(q_positions, cu_seqlens_q)`` of a rank's packed queries.

    Args:
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, of the whole batch.

    Returns:
        ``q_positions [T]``, each query's position in its sequence, and ``[B + 1]``, how many of the rank's queries come
        before the end of each sequence. A sequence may have none.
    """
    token = queries.positions(rank, cu_seqlens_q.device).to(cu_seqlens_q.dtype)
    ends = cu_seqlens_q[1:].contiguous()
    sequence = torch.searchsorted(ends, token, right=True).clamp_(max=max(ends.shape[0] - 1, 0))
    if ends.shape[0] == 0:  # no sequences
        return token, cu_seqlens_q
    shift = cu_seqlens_k[1:].to(token.dtype) - ends  # a sequence's last query is at its last key
    if token.numel() == 0:
        return token, torch.zeros_like(cu_seqlens_q)
    own = torch.zeros_like(cu_seqlens_q)
    for piece in queries.of(rank):
        own = own + (cu_seqlens_q - piece.first).clamp(0, piece.length)
    own[0] = 0  # the first sequence begins at token 0
    # A position counts from the start of a sequence's keys, which begin at `cu_seqlens_k[sequence]`.
    begin = torch.cat((torch.zeros_like(cu_seqlens_k[:1]), cu_seqlens_k[1:-1]))
    return token + (shift - begin.to(token.dtype))[sequence], own


def joined(parts: Tensor, layout: Layout, axis: int) -> Tensor:
    """The whole sequence from the shards of all ranks.

    Args:
        parts: ``[ranks, …]``, each shard filled up to the longest.
        axis: that of tokens, in a shard.
    """
    even = all(length == layout.longest for length in layout.lengths)
    if layout.order == "contiguous" and even and (axis == 0 or parts.shape[1] == 1):  # a view
        return parts.reshape(*(1,) * axis, -1, *parts.shape[axis + 2 :])
    pieces = [parts[x.rank].narrow(axis, x.local, x.length) for x in layout.pieces()]
    return torch.cat(pieces, axis) if pieces else parts[0].narrow(axis, 0, 0)


def divided(whole: Tensor, layout: Layout, axis: int, into: Tensor) -> None:
    """Write the shards of all ranks, one after the other, into the flat ``into``. Casts to its dtype."""
    per_token = whole.numel() // max(whole.shape[axis], 1)
    begins = [0]
    for length in layout.lengths:
        begins.append(begins[-1] + length * per_token)
    for x in layout.pieces():
        shape = [*whole.shape]
        shape[axis] = layout.lengths[x.rank]
        shard = into[begins[x.rank] : begins[x.rank + 1]].view(shape)
        shard.narrow(axis, x.local, x.length).copy_(whole.narrow(axis, x.first, x.length))
