"""Recall from far back, and a model small enough to learn it in seconds: does training through a selection work?

The task. A sequence is ``BLOCKS`` blocks of ``BLOCK_SIZE`` tokens, nearly all of them blank. Each of the first
``PAIRS`` blocks has one token that says "key i has value j", at a random place; each of the last ``PAIRS`` blocks has
one that asks for a key, and there the value is to be told. A sequence's keys differ and each is asked once, in any
order: nothing nearer than ``BLOCKS - 2 * PAIRS`` blocks helps with the answer. Values are drawn independently, so who
cannot see the pair has a loss of ``CHANCE`` at best.

The model. Two layers of attention and MLP, without positions, as the task has none. What it has to learn: queries of
askers that match the keys of pairs whatever the value, and values that carry it. The choice of blocks has no gradient;
it has to become right because it ranks by the same queries and keys as the attention that learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa

BLOCKS, BLOCK_SIZE = 32, 4
PAIRS = 6  # pairs of a sequence, and its askers
KEYS, VALUES = 6, 4
BLANK, PLANTED, ASKED, TOLD = 0, 1, 1 + KEYS, 1 + 2 * KEYS  # where symbols of a kind begin
SYMBOLS = TOLD + VALUES
CHANCE = math.log(VALUES)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> O, as `dense`
Score = Callable[[Tensor, Tensor], Tensor]  # (q, k) -> [B, S, HKV, BLOCKS], the blocks with the highest are chosen


class Batch(NamedTuple):
    """Sequences and what they ask for."""

    tokens: Tensor  # [B, S, 2]: two symbols a token, (PLANTED + key, TOLD + value), (ASKED + key, BLANK) or blanks
    asked: Tensor  # [B, PAIRS]: positions of the askers
    answers: Tensor  # [B, PAIRS]: the values they ask for


def make_batch(B: int, g: torch.Generator, device: torch.device) -> Batch:
    """``B`` sequences, drawn on the CPU."""
    tokens = torch.full((B, BLOCKS * BLOCK_SIZE, 2), BLANK)
    keys = torch.rand(B, KEYS, generator=g).argsort(-1)[:, :PAIRS]
    values = torch.randint(VALUES, (B, PAIRS), generator=g)
    order = torch.rand(B, PAIRS, generator=g).argsort(-1)
    starts = torch.arange(PAIRS) * BLOCK_SIZE
    planted = starts + torch.randint(BLOCK_SIZE, (B, PAIRS), generator=g)
    asked = starts + (BLOCKS - PAIRS) * BLOCK_SIZE + torch.randint(BLOCK_SIZE, (B, PAIRS), generator=g)
    rows = torch.arange(B)[:, None]
    tokens[rows, planted] = torch.stack((PLANTED + keys, TOLD + values), -1)
    tokens[rows, asked, 0] = ASKED + keys.gather(1, order)
    return Batch(*(x.to(device) for x in (tokens, asked, values.gather(1, order))))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to every key; ``q`` ``[B, S, HQ, D]``, ``k`` and ``v`` ``[B, S, HKV, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def score_means(q: Tensor, k: Tensor) -> Tensor:
    """``q · mean(K)`` of each block, summed over a group's heads: ``[B, S, HKV, S / BLOCK_SIZE]``."""
    means = k.unflatten(1, (-1, BLOCK_SIZE)).mean(2)
    return torch.einsum("bshd,bnhd->bshn", q.unflatten(2, (k.shape[2], -1)).sum(3), means)


def select_blocks(scores: Tensor, chosen: int) -> Tensor:
    """Each row's own block and the ``chosen`` before it that score best, ``[B, S, HKV, 1 + chosen]``.

    -1 where there are fewer. The score of a block before a row's own knows no key of its future.
    """
    S, n = scores.shape[1], scores.shape[3]
    own = (torch.arange(S, device=scores.device) // BLOCK_SIZE)[:, None, None]
    earlier = torch.arange(n, device=scores.device) < own
    best, index = scores.masked_fill(~earlier, -math.inf).topk(chosen, -1)
    return torch.cat((own.expand(*index.shape[:-1], 1), index.masked_fill(best == -math.inf, -1)), -1)


def score_randomly(g: torch.Generator) -> Score:
    """Scores that know nothing, alike for the queries of a block.

    Were each query to draw its own, a block's queries would in the first layer see blocks from everywhere, and the
    answer were two hops away from every asker: a model learns that in time.
    """

    def score(q: Tensor, k: Tensor) -> Tensor:
        n = q.shape[1] // BLOCK_SIZE
        scores = torch.rand(q.shape[0], n, k.shape[2], n, generator=g)
        return scores.repeat_interleave(BLOCK_SIZE, 1).to(q.device)

    return score


@dataclass(frozen=True)
class Selection:
    """Selection attention to each row's own block and the ``chosen`` blocks before it that score best."""

    chosen: int
    backend: str = "auto"
    score: Score = score_means
    watch: Callable[[Tensor], None] | None = None  # is given the blocks of every call

    @property
    def share(self) -> float:
        """Keys of a row, of all keys of its sequence, at most."""
        return (1 + self.chosen) / BLOCKS

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            blocks = select_blocks(self.score(q, k), self.chosen)
        if self.watch is not None:
            self.watch(blocks)
        return nsa.selection_attention(q, k, v, block_indices=blocks, block_size=BLOCK_SIZE, backend=self.backend)


class Layer(nn.Module):
    """Attention and MLP, each with a norm before and the residual around."""

    def __init__(self, width: int, HQ: int, HKV: int, D: int) -> None:
        super().__init__()
        self.heads, self.HQ, self.HKV = (HQ + 2 * HKV, D), HQ, HKV
        self.qkv = nn.Linear(width, (HQ + 2 * HKV) * D, bias=False)
        self.out = nn.Linear(HQ * D, width, bias=False)
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """``[B, S, width]`` to the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, self.heads).split((self.HQ, self.HKV, self.HKV), 2)
        x = x + self.out(attention(q, k, v).flatten(2))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Model(nn.Module):
    """Two layers of ``G = HQ // HKV`` query heads a KV head; an answer is read off the asker's last state."""

    def __init__(self, attention: Attention, width: int = 64, HQ: int = 2, HKV: int = 1, D: int = 32) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.layers = nn.ModuleList(Layer(width, HQ, HKV, D) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VALUES))

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy of the answers, in nats."""
        x = self.embedding(batch.tokens).sum(2)
        for layer in self.layers:
            x = layer(x, self.attention)
        answering = x.take_along_dim(batch.asked[..., None], 1)
        return F.cross_entropy(self.head(answering).flatten(0, 1), batch.answers.flatten())


def train(
    attention: Attention, *, steps: int, seed: int, device: torch.device, B: int = 8, lr: float = 5e-3
) -> list[float]:
    """Loss of each step in nats, on new sequences every time; these and the initial weights depend on the seed alone.

    AdamW, its rate rising over 10 steps to ``lr`` and falling linearly to 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(attention).to(device)
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    losses = []
    for _ in range(steps):
        loss = model.loss(make_batch(B, g, device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()
