"""Where tokens of a shard lie in the whole, as numbers."""

import pytest
import torch

from nsa.distributed import Layout
from nsa.distributed.shards import divided, joined

CPU = torch.device("cpu")
POSITIONS = {
    ("contiguous", (2, 0, 3)): [[0, 1], [], [2, 3, 4]],
    ("zigzag", (4, 4)): [[0, 1, 6, 7], [2, 3, 4, 5]],  # as PyTorch's context parallel
    ("zigzag", (2, 2, 2)): [[0, 5], [1, 4], [2, 3]],
    ("zigzag", (2, 0, 4)): [[0, 5], [], [1, 2, 3, 4]],
}


@pytest.mark.parametrize(("order", "lengths"), POSITIONS)
def test_positions(order, lengths):
    layout = Layout(order, lengths)
    found = [layout.positions(rank, CPU).tolist() for rank in range(len(lengths))]
    assert found == POSITIONS[order, lengths]


def test_odd_lengths_have_no_positions_in_zigzag_order():
    """Half of an odd length is no number of tokens."""
    with pytest.raises(ValueError, match=r"^lengths: expected even numbers in zigzag order, got \(16, 15\)$"):
        Layout("zigzag", (16, 15)).positions(0, CPU)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("order", "lengths"), POSITIONS)
def test_shards_are_joined_and_divided(order, lengths, axis):
    layout = Layout(order, lengths)
    whole = torch.arange(layout.total * 6.0).view(*(2,) * axis, layout.total, *(6 // 2**axis,))
    shards = [whole.index_select(axis, layout.positions(rank, CPU)) for rank in range(len(lengths))]
    flat = torch.empty(whole.numel())
    divided(whole, layout, axis, flat)
    assert torch.equal(flat, torch.cat([shard.flatten() for shard in shards]))
    shape = [*whole.shape]
    shape[axis] = layout.longest
    parts = torch.full((len(lengths), *shape), torch.nan)
    for part, shard in zip(parts, shards, strict=True):
        part.narrow(axis, 0, shard.shape[axis]).copy_(shard)
    assert torch.equal(joined(parts, layout, axis), whole)
