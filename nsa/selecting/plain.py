"""Selecting in plain PyTorch, for CPUs and for calls that the kernels do not take: exact, and without a device sync.

Queries are taken in blocks, and their keys in chunks. The best ``n`` blocks so far are kept, so that the scores never
stand in memory as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels.shared.shape import CACHE, E4M3, RAGGED, VARLEN
from nsa.plain.spans import in_pages
from nsa.selecting.request import Request

ELEMENTS = 2**22  # scores that stand in memory at a time


class Tokens(NamedTuple):
    """By token: its sequence, the sequence's first index key, the number of index keys it sees, and its position."""

    seq: Tensor
    first: Tensor
    seen: Tensor
    position: Tensor


def tokens_of(r: Request) -> Tokens:
    """What each token sees, computed on the device."""
    token = torch.arange(r.T, device=r.q.device)
    first = torch.zeros_like(token)
    if r.cu_q is None:
        seq, known, begin, end = token // r.S, token >= 0, token // r.S * r.S, (token // r.S + 1) * r.S
    else:
        ends = r.cu_q.long().clone()
        ends[:1] = 0
        seq = torch.searchsorted(ends[1:].contiguous(), token, right=True)
        known = seq < r.B
        seq = seq.clamp(max=max(r.B - 1, 0))
        begin, end = (ends[seq], ends[seq + 1]) if r.B else (token, token)
    if r.layout in (CACHE, RAGGED):
        assert r.cache_seqlens is not None
        lengths = r.cache_seqlens.long() if r.B else token.new_zeros(1)
        length = lengths[seq].clamp(0, r.rows * r.stride + r.window - 1)
        keys = torch.where(length >= r.window, (length - r.window) // r.stride + 1, 0).clamp(max=r.rows)
        position = length - end + token
    else:
        keys = torch.full_like(token, r.rows)
        if r.layout == VARLEN:
            assert r.cu_k is not None
            ends = r.cu_k.long().clamp(0, r.rows)
            first, keys = (ends[seq], ends[seq + 1] - ends[seq]) if r.B else (first, first)
            keys = keys.clamp(min=0)
        length = keys * r.stride + r.window - 1
        position = length - end + token if r.window == 1 else token - begin
    if r.q_positions is not None:
        position = r.q_positions.reshape(-1).long()
    position = torch.where(known, torch.minimum(position, length - 1).clamp(min=-1), -1)
    seen = torch.where(position + 1 >= r.window, (position + 1 - r.window) // r.stride + 1, 0)
    return Tokens(seq, first, torch.minimum(seen, keys), position)


def _dtype(r: Request) -> torch.dtype:
    return torch.float64 if r.q.dtype == torch.float64 else torch.float32


def _products(r: Request, about: Tokens, here: slice, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Products of the queries ``here`` and of the index keys ``begin`` to ``end`` of their sequences, ``[t, lists, G,
    keys]``, and which keys a query sees, ``[t, keys]``. What it does not see is 0 in the products.
    """
    key = torch.arange(begin, end, device=r.q.device)
    visible = (key >= 0) & (key < about.seen[here, None])  # [t, keys]
    key = key.clamp(0, max(r.rows - 1, 0))
    if r.block_table is not None:
        key = key.expand_as(visible)
        page, place, visible = in_pages(r.block_table, r.k.shape[0], r.page, about.seq[here, None], key, visible)
        rows, at = r.k.flatten(0, 1), page * r.page + place
    elif r.layout == VARLEN:
        rows, at = r.k, about.first[here, None] + key
    else:
        rows, at = r.k.flatten(0, 1), about.seq[here, None] * r.rows + key
    at = torch.where(visible, at, 0)
    rows = rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])
    # fp8 cannot be indexed everywhere, so its bytes are.
    k = rows.view(torch.uint8)[at].view(E4M3).float() if rows.dtype == E4M3 else rows[at].to(_dtype(r))
    if r.k_scale is not None:
        k = k * r.k_scale.reshape(-1, 1)
    k = torch.where(visible[:, :, None, None], k, 0.0)  # [t, keys, HK, D]
    q = r.q.reshape(r.T, r.HK, r.q.shape[-2] // r.HK, r.q.shape[-1])[here].to(_dtype(r))
    s = torch.matmul(q, k.permute(0, 2, 3, 1))  # [t, HK, heads of a key head, keys]
    return s.reshape(s.shape[0], r.lists, r.G, s.shape[-1]), visible


def count_nan(r: Request) -> tuple[int, int]:
    """How many products of a query head and an index key that it sees are NaN, and of how many tokens. Waits for the
    device.
    """
    about, chunk = tokens_of(r), max(1, ELEMENTS // (r.q.shape[-1] * r.HK))  # keys of one token
    count, tokens = 0, 0
    for token in range(r.T):
        here = slice(token, token + 1)
        parts = (_products(r, about, here, begin, min(begin + chunk, r.rows)) for begin in range(0, r.rows, chunk))
        mine = sum(int((s.isnan() & visible[:, None, None]).sum()) for s, visible in parts)
        count, tokens = count + mine, tokens + (mine > 0)
    return count, tokens


def _lse(r: Request, about: Tokens, here: slice, chunk: int) -> Tensor:
    """Natural LSE ``[t, lists, G]`` of the scaled scores."""
    if r.lse is not None:
        return r.lse.reshape(r.T, r.lists, r.G)[here].to(_dtype(r))
    parts = []
    for begin in range(0, r.rows, chunk):
        s, visible = _products(r, about, here, begin, min(begin + chunk, r.rows))
        unseen = ~visible[:, None, None] | s.isnan()
        parts.append(torch.logsumexp((s * r.scale).masked_fill(unseen, -torch.inf), -1))
    if not parts:
        return r.q.new_full((about.seen[here].shape[0], r.lists, r.G), -torch.inf, dtype=_dtype(r))
    return torch.logsumexp(torch.stack(parts), 0)


def _scores(r: Request, about: Tokens, here: slice, first: int, last: int, lse: Tensor | None) -> Tensor:
    """Scores of the blocks ``first`` to ``last``, ``[t, lists, blocks]``; -inf for those without a key, and for NaN."""
    begin, end = first * r.size, last * r.size
    if r.score == "softmax":
        assert lse is not None
        overlap = r.window // r.stride
        s, visible = _products(r, about, here, begin - overlap + 1, end)
        p = torch.exp(s * r.scale - lse[..., None]).masked_fill(~visible[:, None, None], 0.0).sum(2)
        strides = torch.stack([p[..., i : p.shape[-1] - (overlap - 1 - i)] for i in range(overlap)]).sum(0)
        scores = strides.unflatten(-1, (last - first, r.size)).sum(-1)
    else:
        s, visible = _products(r, about, here, begin, end)
        if r.score == "relu":
            s = torch.relu(s)
            if r.weights is not None:
                s = s * r.weights.reshape(r.T, r.lists, r.G)[here].to(s.dtype)[..., None]
            s = s.sum(2)
            s = s.masked_fill(~visible[:, None] | s.isnan(), -torch.inf)
        else:
            s = s.masked_fill(~visible[:, None, None] | s.isnan(), -torch.inf).amax(2)
        scores = s.unflatten(-1, (last - first, r.size)).amax(-1)
    found: Tensor = scores.masked_fill(scores.isnan(), -torch.inf)
    return found


def select(r: Request, out: Tensor) -> Tensor:
    """Choose the blocks of all rows, into ``out``."""
    if r.B == 0:  # tokens of no sequence
        return out.fill_(-1)
    about = tokens_of(r)
    D = r.q.shape[-1]
    chunk = max(1, min(r.blocks, ELEMENTS // max(1, 16 * r.size * max(D, r.q.shape[-2]))))  # blocks at a time
    step = max(1, ELEMENTS // (chunk * r.size * max(D * r.HK, r.q.shape[-2])))  # tokens
    result = out.view(r.T, r.lists, r.shape[-1])
    for start in range(0, r.T, step):
        here = slice(start, min(start + step, r.T))
        _select_some(r, about, here, chunk, result[here])
    return out


def _select_some(r: Request, about: Tokens, here: slice, chunk: int, out: Tensor) -> None:
    position, seen = about.position[here, None, None], about.seen[here, None, None]
    blocks = (position + 1) // r.block_size if r.tail else (position + r.block_size) // r.block_size
    scored = -(-seen // r.size)
    if r.score == "softmax":
        scored = torch.where(seen > 0, ((seen - 1) * r.stride + r.window - 1) // r.block_size + 1, 0)
    lse = _lse(r, about, here, chunk * r.size) if r.score == "softmax" else None
    # A key of the sort is the score; infinity for a forced block and -infinity for what cannot be chosen, and so an
    # infinite score counts as the largest finite number.
    lowest, highest, most = -torch.inf, torch.inf, torch.finfo(_dtype(r)).max
    shape = out.shape[0], r.lists, 0
    key, block = (torch.empty(shape, dtype=dtype, device=out.device) for dtype in (_dtype(r), torch.int64))
    for first in range(0, r.blocks, chunk):
        last = min(first + chunk, r.blocks)
        b = torch.arange(first, last, device=out.device)
        scores = _scores(r, about, here, first, last, lse) + 0.0  # -0.0 becomes 0.0
        new = torch.where(b < scored, scores.clamp(-most, most), lowest)
        forced = (b < r.first) | (b >= blocks - r.newest)
        new = torch.where(b < blocks, torch.where(forced, highest, new), lowest)
        key, block = torch.cat((key, new), -1), torch.cat((block, b.expand_as(new)), -1)
        if key.shape[-1] > r.n:
            # Blocks are in rising order and the sort is stable, so ties go to the smaller block.
            key, order = key.sort(dim=-1, descending=True, stable=True)
            block = block.gather(-1, order)[..., : r.n]
            key = key[..., : r.n]
            block, order = block.sort(-1)
            key = key.gather(-1, order)
    last_block = torch.iinfo(torch.int64).max
    block = torch.where(key == lowest, last_block, block)
    if r.tail:
        own = torch.where((position + 1) % r.block_size != 0, blocks, last_block)
        block = torch.cat((block, own.expand(-1, r.lists, 1)), -1)
    block = block.sort(-1).values
    out.fill_(-1)
    out[..., : block.shape[-1]] = torch.where(block == last_block, -1, block).to(out.dtype)
