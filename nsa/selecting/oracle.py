"""What a selection should be, in fp64: scores of blocks as the papers define them, one query at a time.

It is slow and shares no code with the paths that it judges.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels.shared.shape import E4M3
from nsa.selecting.request import Request


class Row(NamedTuple):
    """The blocks that a token may choose from.

    scores: fp64 ``[lists, blocks]`` on the CPU, of the blocks up to the query's own; -inf for one without a score, and
    for a NaN. scored: ``[blocks]``, whether a block has a score. forced: ``[blocks]``. tail: the block that is listed
    beside the others, or None.
    """

    scores: Tensor
    scored: Tensor
    forced: Tensor
    tail: int | None

    def choose(self, n: int) -> Tensor:
        """The ``n`` best blocks of each list, ``[lists, up to n]``, sorted; ties go to the smaller block."""
        key = torch.where(self.forced, math.inf, self.scores)
        allowed = (self.scored | self.forced).nonzero()[:, 0].tolist()
        chosen = []
        for row, forced in zip(key.tolist(), [self.forced.tolist()] * len(key), strict=True):
            best = sorted(allowed, key=lambda b: (not forced[b], -row[b], b))[:n]
            chosen.append(sorted(best))
        return torch.tensor(chosen, dtype=torch.int32).reshape(len(key), -1)


def sequence_of(r: Request, token: int) -> tuple[int, int, int, int]:
    """Sequence of a token, its number of index keys and of tokens, and the token's position; -1 if it sees nothing."""
    keys = tokens = 0
    position = seq = -1
    if r.cu_q is None:
        seq, s = divmod(token, r.S)
        queries = r.S
    else:
        ends = r.cu_q.tolist()
        ends[0] = 0
        seq = next((b for b in range(r.B) if ends[b] <= token < ends[b + 1]), -1)
        if seq < 0:
            return -1, 0, 0, -1
        s, queries = token - ends[seq], ends[seq + 1] - ends[seq]
    if r.cache_seqlens is not None:
        tokens = min(max(int(r.cache_seqlens[seq]), 0), r.rows * r.stride + r.window - 1)
        keys = min(max((tokens - r.window) // r.stride + 1, 0), r.rows)
        position = tokens - queries + s
    else:
        keys = r.rows if r.cu_k is None else int(r.cu_k[seq + 1]) - int(r.cu_k[seq])
        tokens = keys * r.stride + r.window - 1
        position = tokens - queries + s if r.window == 1 else s
    if r.q_positions is not None:
        position = int(r.q_positions.reshape(-1)[token])
    return seq, keys, tokens, max(min(position, tokens - 1), -1)


def keys_of(r: Request, seq: int, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` index keys of a sequence, fp64 ``[count, HK, D]``, and which of them exist, ``[count]``."""
    exists = torch.ones(count, dtype=torch.bool)
    if count == 0 or len(r.k) == 0:
        return torch.zeros(count, *r.k.shape[-2:], dtype=torch.float64), ~exists
    if r.block_table is not None:
        at = torch.arange(count)
        page = r.block_table[seq].cpu().long()[at // r.page]
        exists = (page >= 0) & (page < r.k.shape[0])
        here = (torch.where(exists, page, 0).to(r.k.device), (at % r.page).to(r.k.device))
        # fp8 cannot be indexed everywhere, so its bytes are.
        k = r.k.view(torch.uint8)[here].cpu().view(E4M3) if r.k.dtype == E4M3 else r.k[here].cpu()
    elif r.cu_k is not None:
        first = int(r.cu_k[seq])
        k = r.k[first : first + count].cpu()
    else:
        k = r.k[seq, :count].cpu()
    k = k.double() if r.k.dtype != E4M3 else k.float().double()
    if r.k_scale is not None:
        k = k * r.k_scale.cpu().double().view(-1, 1)
    return k, exists


def row_of(r: Request, token: int) -> Row:
    """Scores of the blocks of one token."""
    seq, keys, _, position = sequence_of(r, token)
    seen = min(keys, (position + 1 - r.window) // r.stride + 1) if position + 1 >= r.window else 0
    q = r.q.reshape(r.T, r.q.shape[-2], -1)[token].cpu().double()  # [HI, D]
    k, exists = keys_of(r, seq, seen)
    heads = q.unflatten(0, (r.HK, q.shape[0] // r.HK))
    s = torch.matmul(heads, k.permute(1, 2, 0)).flatten(0, 1)  # [HI, seen]
    blocks = position // r.block_size + 1
    open_block = r.tail and (position + 1) % r.block_size != 0
    if open_block:
        blocks -= 1
    if r.score == "softmax":
        given = None if r.lse is None else r.lse.reshape(r.T, -1)[token].cpu().double()
        s = torch.where(exists, s * r.scale, -math.inf)
        lse = torch.logsumexp(torch.where(s.isnan(), -math.inf, s), 1) if given is None else given
        p = torch.exp(s - lse[:, None]).unflatten(0, (r.lists, r.G)).sum(1)  # [lists, seen]
        p = torch.where(exists, p, 0.0)
    elif r.score == "relu":
        weights = torch.ones(q.shape[0]) if r.weights is None else r.weights.reshape(r.T, -1)[token].cpu()
        p = (torch.relu(s) * weights.double()[:, None]).unflatten(0, (r.lists, r.G)).sum(1)
        p = torch.where(exists & ~p.isnan(), p, -math.inf)
    else:
        s = torch.where(exists & ~s.isnan(), s, -math.inf)
        p = s.unflatten(0, (r.lists, r.G)).amax(1)
    of_keys, of_blocks, scored = p.tolist(), [[-math.inf] * blocks for _ in range(r.lists)], [False] * blocks
    for b in range(blocks):
        begin, end = b * r.block_size, (b + 1) * r.block_size
        for i in range(max(0, (begin - r.window) // r.stride + 1), min(seen, (end - 1) // r.stride + 1)):
            key_begin = i * r.stride
            overlap = min(end, key_begin + r.window) - max(begin, key_begin)
            if overlap <= 0 or (r.score != "softmax" and key_begin < begin):
                continue
            for of_key, of_block in zip(of_keys, of_blocks, strict=True):
                if r.score == "softmax":
                    of_block[b] = (of_block[b] if scored[b] else 0.0) + of_key[i] * (overlap // r.stride)
                else:
                    of_block[b] = max(of_block[b], of_key[i])
            scored[b] = True
    scores = torch.tensor(of_blocks, dtype=torch.float64).view(r.lists, blocks)
    at = torch.arange(blocks)
    forced = (at < r.first) | (at >= blocks - r.newest)
    tail = blocks if open_block else None
    return Row(torch.where(scores.isnan(), -math.inf, scores), torch.tensor(scored, dtype=torch.bool), forced, tail)


def select_reference(r: Request) -> Tensor:
    """The exact selection, int32, as :func:`nsa.select_blocks` returns it."""
    out = torch.full((r.T, r.lists, r.n + r.tail), -1, dtype=torch.int32)
    for token in range(r.T):
        row = row_of(r, token)
        chosen = row.choose(r.n)
        out[token, :, : chosen.shape[1]] = chosen
        if row.tail is not None:
            out[token, :, chosen.shape[1]] = row.tail
    return out.view(r.shape).to(r.q.device)
