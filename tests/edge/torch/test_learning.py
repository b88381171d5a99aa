"""A model that learns: through a selection of 3/32 of the keys it gets as far as with dense attention.

The loss is in nats, the mean of the last `LAST` steps, each on sequences not seen before. `CHANCE` is ln 4 = 1.39.
"""

from collections import deque

import pytest
import torch

import nsa.kernels
from nsa.testing.matrix import overlap
from nsa.testing.plugin import current_lane

from . import recall
from .recall import CHANCE, Selection, score_randomly

CHOSEN = 2  # blocks beside a row's own
STEPS, LAST = 120, 12
CLOSE = 0.05  # nats of the final loss: a question in twenty answered by guessing would cost 0.07
BACKENDS = ["sdpa", "triton"] if current_lane() == "gpu" else ["sdpa"]  # the interpreter is not for training


def train(attention, steps, **how):
    """`recall.train`, and that Triton's kernels did it where they were asked to: two layers, there and back."""
    before = nsa.kernels.launches.copy()
    losses = recall.train(attention, steps=steps, seed=0, **how)
    launched = nsa.kernels.launches - before
    wanted = 2 * steps if attention is not recall.dense and attention.backend == "triton" else 0
    assert (launched["query_major"] + launched["key_major"], launched["backward"]) == (wanted, wanted)
    return losses


def final_loss(attention, device):
    losses = train(attention, STEPS, device=device)
    assert losses[0] > 0.9 * CHANCE, "knows the answer before it learnt anything"
    return sum(losses[-LAST:]) / LAST


@pytest.fixture(scope="module")
def dense_loss(device):
    return final_loss(recall.dense, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_learns_as_with_dense_attention(backend, device, dense_loss, record_property):
    last = deque(maxlen=2)  # the blocks of both layers in the last step
    selection = Selection(CHOSEN, backend, watch=last.append)
    assert selection.share <= 0.25
    loss = final_loss(selection, device)
    record_property("losses", (dense_loss, loss))
    record_property("in_common", common := [overlap.in_common(blocks) for blocks in last])
    assert min(common) > 0.5, "docs/notebook/union.md has what was measured"
    assert dense_loss < 0.1 * CHANCE
    assert loss == pytest.approx(dense_loss, rel=0, abs=CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_blocks_do_not_learn(backend, device):
    """As many blocks by the same route."""
    score = score_randomly(torch.Generator().manual_seed(1))
    assert final_loss(Selection(CHOSEN, backend, score), device) > 0.8 * CHANCE


def test_curves_of_both_backends_agree(device):
    """Step by step, from the same weights on the same sequences. The interpreter affords two steps of one sequence."""
    short = {"steps": 2, "B": 1} if device.type == "cpu" else {"steps": 30}
    packed, kernels = (train(Selection(CHOSEN, x), device=device, **short) for x in ("sdpa", "triton"))
    assert packed[-1] != packed[0]
    assert kernels == pytest.approx(packed, rel=1e-3)


@pytest.mark.parametrize("name", ["dense", *BACKENDS])
def test_training_is_deterministic(name, device):
    """On the GPU torch's own backward passes (of embeddings, of memory-efficient attention) may add in any order."""
    if device.type != "cpu":
        pytest.skip("torch's backward of embeddings and of attention is not deterministic on the GPU")
    attention = recall.dense if name == "dense" else Selection(CHOSEN, name)
    first, second = (train(attention, 4, device=device) for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


def test_the_answer_is_far(device):
    """Each asker's pair stands once, far before its own and the neighbouring block, and nothing else tells anything."""
    g = torch.Generator().manual_seed(0)
    tokens, asked, answers = recall.make_batch(64, g, device)
    keys = tokens[..., 0].gather(1, asked) - recall.ASKED
    planted = tokens[:, None, :, 0] == (recall.PLANTED + keys)[..., None]
    assert planted.sum(-1).eq(1).all()
    places = planted.int().argmax(-1)
    assert tokens[..., 1].gather(1, places).eq(recall.TOLD + answers).all()
    apart = asked // recall.BLOCK_SIZE - places // recall.BLOCK_SIZE
    assert apart.min() > recall.BLOCKS - 2 * recall.PAIRS > 1
    assert tokens.ne(recall.BLANK).any(-1).sum() == 64 * 2 * recall.PAIRS


def test_blocks_chosen_by_means(device):
    """The block that holds a query's own direction comes right after its own block; none from the future."""
    q = torch.zeros(1, 3 * recall.BLOCK_SIZE, 2, 8, device=device)
    k = torch.zeros(1, 3 * recall.BLOCK_SIZE, 1, 8, device=device)
    k[0, 1, 0, 0] = k[0, recall.BLOCK_SIZE, 0, 1] = k[0, -1, 0, 2] = 1
    q[..., 0], q[..., 1], q[..., 2] = 1, 2, 3
    blocks = recall.select_blocks(recall.score_means(q, k), 2)[0, :: recall.BLOCK_SIZE, 0]
    assert blocks.tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0]]
