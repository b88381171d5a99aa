"""A model that learns to recall: through a selection of 3/32 of the keys it gets as far as with dense attention.

A sequence is `BLOCKS` blocks of `SIZE` tokens, nearly all of them blank. Each of the first `PAIRS` blocks has one token
that says "key i has value j", each of the last `PAIRS` blocks one that asks for a key. Nothing nearer helps with the
answer, and values are independent: without the pair the loss is `CHANCE` at best. The choice of blocks has no gradient;
it becomes right because blocks are ranked by the queries and keys that learn. Losses are in nats, of new sequences in
every step.
"""

import functools
import math
from collections import deque
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa
import nsa.kernels
from nsa.testing.matrix import overlap
from nsa.testing.plugin import current_lane

BLOCKS, SIZE, PAIRS = 32, 4, 6
KEYS, VALUES = 6, 4
BLANK, PLANTED, ASKED, TOLD = 0, 1, 1 + KEYS, 1 + 2 * KEYS  # where symbols of a kind begin
CHANCE = math.log(VALUES)
CHOSEN = 2  # blocks beside a row's own
STEPS, LAST = 120, 12  # steps, and the last ones, whose mean loss counts
CLOSE = 0.05  # nats of the final loss: a question in twenty answered by guessing would cost 0.07
BACKENDS = ["sdpa", "triton"] if current_lane() == "gpu" else ["sdpa"]  # the interpreter is not for training


class Batch(NamedTuple):
    """Sequences and what they ask for."""

    tokens: Tensor  # [B, S, 2]: two symbols a token, (PLANTED + key, TOLD + value), (ASKED + key, BLANK) or blanks
    asked: Tensor  # [B, PAIRS]: positions of the tokens that ask
    answers: Tensor  # [B, PAIRS]: the values they ask for


def make_batch(B, g, device):
    """Drawn on the CPU."""
    tokens = torch.full((B, BLOCKS * SIZE, 2), BLANK)
    keys = torch.rand(B, KEYS, generator=g).argsort(-1)[:, :PAIRS]
    values = torch.randint(VALUES, (B, PAIRS), generator=g)
    order = torch.rand(B, PAIRS, generator=g).argsort(-1)
    starts = torch.arange(PAIRS) * SIZE
    planted = starts + torch.randint(SIZE, (B, PAIRS), generator=g)
    asked = starts + (BLOCKS - PAIRS) * SIZE + torch.randint(SIZE, (B, PAIRS), generator=g)
    rows = torch.arange(B)[:, None]
    tokens[rows, planted] = torch.stack((PLANTED + keys, TOLD + values), -1)
    tokens[rows, asked, 0] = ASKED + keys.gather(1, order)
    return Batch(*(x.to(device) for x in (tokens, asked, values.gather(1, order))))


def dense(q, k, v):
    """Causal attention to every key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def by_means(q, k):
    """`q · mean(K)` of each block, summed over a group's heads: `[B, S, HKV, BLOCKS]`."""
    means = k.unflatten(1, (-1, SIZE)).mean(2)
    return torch.einsum("bshd,bnhd->bshn", q.unflatten(2, (k.shape[2], -1)).sum(3), means)


def at_random(g, q, k):
    """As `by_means`, alike for the queries of a block: otherwise one layer would let a block see all others."""
    scores = torch.rand(q.shape[0], BLOCKS, k.shape[2], BLOCKS, generator=g)
    return scores.repeat_interleave(SIZE, 1).to(q.device)


def selected(q, k, v, backend="auto", score=by_means, watch=lambda blocks: None):
    """Attention to each row's own block and the `CHOSEN` blocks before it that score best."""
    with torch.no_grad():
        own = (torch.arange(q.shape[1], device=q.device) // SIZE)[:, None, None]
        earlier = torch.arange(BLOCKS, device=q.device) < own
        best, index = score(q, k).masked_fill(~earlier, -math.inf).topk(CHOSEN, -1)
        index = index.masked_fill(best == -math.inf, -1)  # padding, where fewer blocks are before
        blocks = torch.cat((own.expand(*index.shape[:-1], 1), index), -1)
    watch(blocks)
    return nsa.selection_attention(q, k, v, block_indices=blocks, block_size=SIZE, backend=backend)


class Layer(nn.Module):
    """Attention and MLP, each with a norm before and the residual around."""

    def __init__(self, width, HQ, HKV, D):
        super().__init__()
        self.heads, self.split = (HQ + 2 * HKV, D), (HQ, HKV, HKV)
        self.qkv = nn.Linear(width, (HQ + 2 * HKV) * D, bias=False)
        self.out = nn.Linear(HQ * D, width, bias=False)
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, self.heads).split(self.split, 2)
        x = x + self.out(attention(q, k, v).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Two layers without positions, as the task has none. Answers are read off the tokens that ask."""

    def __init__(self, attention, width=64):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(TOLD + VALUES, width)
        self.layers = nn.ModuleList(Layer(width, HQ=2, HKV=1, D=32) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VALUES))

    def loss(self, batch):
        x = self.embedding(batch.tokens).sum(2)
        for layer in self.layers:
            x = layer(x, self.attention)
        answering = x.take_along_dim(batch.asked[..., None], 1)
        return F.cross_entropy(self.head(answering).flatten(0, 1), batch.answers.flatten())


def train(attention, device, steps=STEPS, B=8, lr=5e-3):
    """The loss of each step. Sequences and initial weights are the same in every call.

    AdamW, whose rate rises over 10 steps to `lr` and falls linearly to 0. Triton's kernels, if asked for, must run
    in both layers, there and back.
    """
    before = nsa.kernels.launches.copy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(attention).to(device)
    g = torch.Generator().manual_seed(0)
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
    launched = nsa.kernels.launches - before
    wanted = 2 * steps if getattr(attention, "keywords", {}).get("backend") == "triton" else 0
    assert (launched["query_major"] + launched["key_major"], launched["backward"]) == (wanted, wanted)
    return torch.stack(losses).tolist()


def final_loss(attention, device):
    losses = train(attention, device)
    assert losses[0] > 0.9 * CHANCE, "knows the answer before it learnt anything"
    return sum(losses[-LAST:]) / LAST


@pytest.mark.parametrize("backend", BACKENDS)
def test_learns_as_with_dense_attention(backend, device, record_property):
    last = deque(maxlen=2)  # the blocks of both layers in the last step
    dense_loss = final_loss(dense, device)
    loss = final_loss(functools.partial(selected, backend=backend, watch=last.append), device)
    record_property("losses", (dense_loss, loss))
    record_property("in_common", common := [overlap.in_common(blocks) for blocks in last])
    assert min(common) > 0.5, "docs/notebook/union.md has what was measured"
    assert dense_loss < 0.1 * CHANCE
    assert loss == pytest.approx(dense_loss, rel=0, abs=CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_blocks_do_not_learn(backend, device):
    """As many blocks by the same route."""
    score = functools.partial(at_random, torch.Generator().manual_seed(1))
    assert final_loss(functools.partial(selected, backend=backend, score=score), device) > 0.8 * CHANCE


@pytest.mark.skipif(current_lane() != "gpu", reason="the interpreter is not for training")
def test_curves_of_both_backends_agree(device):
    """Step by step, from the same weights on the same sequences."""
    calls = (functools.partial(selected, backend=backend) for backend in ("sdpa", "triton"))
    packed, kernels = (train(call, device, steps=30) for call in calls)
    assert packed[-1] != packed[0]
    assert kernels == pytest.approx(packed, rel=1e-3)


def test_the_answer_is_far(device):
    """Each pair stands once, far before the token that asks for it, and nothing else tells anything."""
    tokens, asked, answers = make_batch(64, torch.Generator().manual_seed(0), device)
    keys = tokens[..., 0].gather(1, asked) - ASKED
    planted = tokens[:, None, :, 0] == (PLANTED + keys)[..., None]
    assert planted.sum(-1).eq(1).all()
    places = planted.int().argmax(-1)
    assert tokens[..., 1].gather(1, places).eq(TOLD + answers).all()
    assert (asked // SIZE - places // SIZE).min() > BLOCKS - 2 * PAIRS > 1
    assert tokens.ne(BLANK).any(-1).sum() == 64 * 2 * PAIRS
