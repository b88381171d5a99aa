"""Draws the inputs of a `Case`: its tensors and its selection.

One generator, on the device of the inputs, draws all of them, so that the seed alone reproduces them.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa.testing.matrix.problem import Problem, spans_of_blocks

if TYPE_CHECKING:
    from nsa.testing.matrix.case import Case


def draw(case: Case, device: torch.device, seed: int) -> Problem:
    """Draw N(0, 1) inputs, queries times `case.scores`, and the selection."""
    g = torch.Generator(device).manual_seed(seed)
    ranges, blocks = _select(case, g)
    lengths = case.kv_seqlens or case.seqlens
    keys = sum(lengths) if lengths else int(ranges[..., 1].max()) if case.source == "varlen" else case.S_kv

    def ends(lengths: tuple[int, ...]) -> Tensor | None:
        cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cu.to(device) if lengths else None

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=case.torch_dtype)

    q = normal(*case.lead, case.HQ, case.D)
    return Problem(
        case=case,
        seed=seed,
        q=q if case.scores == 1 else q * case.scores,
        k=normal(*case.lead[:-1], keys, case.HKV, case.D),
        v=normal(*case.lead[:-1], keys, case.HKV, case.Dv),
        ranges=ranges.to(torch.int64 if case.int64 else torch.int32),
        block_indices=blocks,
        block_size=None if blocks is None else case.block_size,
        causal=case.causal,
        q_positions=_positions(case, device) if case.positions else None,
        cu_seqlens=ends(case.seqlens),
        cu_seqlens_k=ends(case.kv_seqlens),
    )


def blocks_of(case: Case, g: torch.Generator) -> Tensor:
    """Block indices `[..., HKV, n]` (int32) of a prefill or decode step with two slots or more, in little memory."""
    visible, extent = (x.repeat_interleave(case.HKV) for x in _visible(case, g.device))
    return shared_blocks(case, visible, extent, g).view(*case.lead, case.HKV, case.n)


def _positions(case: Case, device: torch.device) -> Tensor:
    """Query positions `[B, S]`, spread over the keys: neither bottom-right nor in order."""
    steps = torch.arange(case.B * case.S, device=device).view(case.B, case.S)
    return (steps * 7919 + case.S_kv // 2) % case.S_kv


def _visible(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """`[tokens]`: how many keys each token may see; and how many keys its sequence has."""
    if case.seqlens:
        t = torch.cat([torch.arange(n_kv - n, n_kv, device=device) for n, n_kv in case.sequences])
        total = torch.cat([torch.full((n,), n_kv, device=device) for n, n_kv in case.sequences])
    else:
        t = (torch.arange(case.S, device=device) + case.S_kv - case.S).repeat(case.B)
        total = torch.full_like(t, case.S_kv)
    if case.positions:
        t = _positions(case, device).flatten()
    return (t + 1 if case.causal else total), total


def _select(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """`ranges [B,S,HKV,n,2]` (int64), and `block_indices [B,S,HKV,n]` (int32) if the source is blocks."""
    # Spans lie anywhere in the sequence. For S = 1 a row has exactly L keys; otherwise causality may clamp some.
    visible, extent = (x.repeat_interleave(case.HKV) for x in _visible(case, g.device))
    lead = (*case.lead, case.HKV)
    if case.source == "blocks":
        many = case.large and case.n > 1 and not case.positions
        draw_blocks = shared_blocks if case.dist == "prefill" and (case.shared or many) else _blocks
        draw_blocks = _overlapping if case.dist == "overlap" else draw_blocks
        blocks = draw_blocks(case, visible, extent, g).view(*lead, -1)
        return spans_of_blocks(blocks, case.block_size), blocks
    if case.source == "rows":
        full = torch.tensor([0, case.L], device=g.device)
        return full.expand(*lead, 1, 2).contiguous(), None
    if case.source == "varlen":
        lens = torch.randint(0, case.L + 1, (case.N,), generator=g, device=g.device)
        lens[:1], lens[-1:] = case.L, 0 if case.N > 1 else case.L  # always one row of L keys and one empty row
        ends = lens.cumsum(0)
        return torch.stack((ends - lens, ends), -1).view(*lead, 1, 2), None
    spans = _overlapping(case, visible, extent, g) if case.dist == "overlap" else _spans(case, extent, g)
    return spans.view(*lead, -1, 2), None


def _spans(case: Case, extent: Tensor, g: torch.Generator) -> Tensor:
    """Disjoint spans `[N, n, 2]` of `L` keys in total, with random gaps within `extent [N]` keys."""
    N, device = case.N, g.device
    n = {"few": 1, "many": 8, "mixed": 8}[case.dist]
    if case.dist == "mixed":
        used = torch.tensor([2, 4, 8], device=device)[torch.randint(0, 3, (N,), generator=g, device=device)]
        weight = torch.rand(N, n, generator=g, device=device) + 0.05
        weight = torch.where(torch.arange(n, device=device) < used[:, None], weight, 0.0)
        # The slots are shuffled, so that empty spans stand in any place.
        weight = weight.gather(1, torch.rand(N, n, generator=g, device=device).argsort(1))
        ends = (weight.cumsum(1) / weight.sum(1, keepdim=True) * case.L).round().long().clamp(max=case.L)
        ends[:, -1] = case.L
    else:
        ends = torch.arange(1, n + 1, device=device).mul(case.L).div(n, rounding_mode="floor").expand(N, n)
    lens = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    free = (extent - case.L).clamp(min=0)
    cuts = torch.rand(N, n, generator=g, device=device).sort(1).values
    gaps = (cuts * (free[:, None] + 1)).long().minimum(free[:, None])
    start = gaps + ends - lens
    return torch.stack((start, start + lens), -1)


def _overlapping(case: Case, visible: Tensor, extent: Tensor, g: torch.Generator) -> Tensor:
    """Spans `[N, 4, 2]`, or block indices `[N, 4]` (int32), that have keys in common. Every third row lists nothing.

    Spans: a random one, one that overlaps half of it, the first again, and one that ends with the query's own key or,
    in every other row, one key later. Blocks: a random one, the query's own, padding, and the first again.
    """
    size = case.block_size if case.source == "blocks" else case.L // 4
    row = torch.arange(case.N, device=g.device)[:, None]
    drawn = torch.rand(case.N, generator=g, device=g.device)
    if case.source == "blocks":
        own = (visible - 1).clamp(min=0) // size
        first = (drawn * (own + 1)).long()
        blocks = torch.stack((first, own, torch.full_like(own, -1), first), -1)
        return blocks.masked_fill(row % 3 == 1, -1).to(torch.int32)
    first = (drawn * (visible - size - size // 2).clamp(min=0)).long()
    start = torch.stack((first, first + size // 2, first, visible - size + (row[:, 0] + 1) % 2), -1)
    return torch.stack((start, torch.where(row % 3 == 1, start, start + size)), -1)


def _blocks(case: Case, visible: Tensor, extent: Tensor, g: torch.Generator) -> Tensor:
    """Block indices `[N, n]` (int32), padded by -1. Decode and prefill always list the first and the own block."""
    N, size = case.N, case.block_size
    n, ordered = case.n, case.dist in ("decode", "prefill")
    last = ((visible if ordered else extent) - 1).clamp(min=0) // size  # the last block that may be drawn
    count = -(-case.S_kv // size)
    score = torch.rand(N, count, generator=g, device=g.device)
    index = torch.arange(count, device=g.device)
    if ordered:
        own = (visible - 1).clamp(min=0) // size
        score[:, 0] = 2.0
        score.scatter_(1, own[:, None], 3.0)
    score = score.masked_fill(index > last[:, None], -1.0)
    top, picked = score.topk(min(n, count), dim=1)
    picked = picked.masked_fill(top < 0, -1)
    if picked.shape[1] < n:
        picked = torch.cat((picked, picked.new_full((N, n - picked.shape[1]), -1)), 1)
    return picked.sort(1).values.to(torch.int32)


def shared_blocks(case: Case, visible: Tensor, extent: Tensor, g: torch.Generator) -> Tensor:
    """Block indices `[N, n]` (int32) of a prefill: the first block, the own block, and `n - 2` that queries may share.

    Each of the `n - 2` slots draws from its own residue class of blocks, so that no two blocks of a row are equal. This
    takes memory for `N n` numbers, while `_blocks` needs a number for each row and block of the cache.

    In each slot a query keeps the block of the query before it in its sequence, or draws a new one. The probability
    follows from `case.shared`, which also counts the first block and the own block. A class with at most one block is
    always drawn.
    """
    HKV, n, device = case.HKV, case.n, g.device
    T, free = case.N // HKV, n - 2
    own = (visible - 1).clamp(min=0).view(T, HKV, 1) // case.block_size  # [T, HKV, 1]
    slot = torch.arange(free, device=device)
    choice = (own - 1 - slot).add(free - 1).div(max(free, 1), rounding_mode="floor")  # blocks 1 + slot + i*free < own
    drawn = torch.rand(T, HKV, free, generator=g, device=device)
    blocks = torch.where(choice > 0, 1 + slot + free * (drawn * choice).long().minimum(choice - 1), -1).to(torch.int32)
    if case.shared and free:
        equal = (case.shared * n - 2) / free  # the wanted share of equal slots among `free`; some are equal by chance
        keep = (equal * choice - 1) / (choice - 1).clamp(min=1)
        fresh = torch.rand(T, HKV, free, generator=g, device=device) >= keep
        first = itertools.accumulate(case.seqlens or (case.S,) * case.B, initial=0)
        fresh[[token for token in first if token < T]] = True  # the first query of each sequence
        since = torch.where(fresh, torch.arange(T, device=device)[:, None, None], 0).cummax(0).values
        blocks = blocks.gather(0, since)
    own = own.to(torch.int32)
    first_block = torch.where(own > 0, 0, -1).to(torch.int32)  # the own block may be the first
    return torch.cat((first_block, blocks, own), -1).sort(-1).values.view(case.N, n)


def drowned(x: Tensor, room: int = 3) -> Tensor:
    """A view equal to `x` within a larger tensor of NaN (integers: huge values), before, after and between its rows."""
    arena_shape = [s + 2 * room for s in x.shape[:-1]] + [x.shape[-1] + 16]
    poison = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max // 3
    arena = torch.full(arena_shape, poison, dtype=x.dtype, device=x.device)
    middle = [slice(room, room + s) for s in x.shape[:-1]]
    inside = arena[tuple([*middle, slice(8, 8 + x.shape[-1])])]
    inside.copy_(x)
    assert inside.stride(-1) == 1
    return inside
