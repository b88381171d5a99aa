"""Selections and lengths that are noise: every key named that exists is used, and nothing else."""

import math

import pytest
import torch

from nsa.testing.plugin import current_lane

from ...parity.pairs import in_pairs
from ..conftest import BACKENDS

KEYS = 96
FAR = 2**62
# Span sets of a backend; an interpreted program takes ten milliseconds, so there are fewer of those.
SETS = {"triton": 10_240 if current_lane() == "gpu" else 512, "sdpa": 10_240, "reference": 10_240}
SETS["key_major"] = SETS["triton"]
BATCH = 256  # sets of a call


def noise(sets: int, n: int, g: torch.Generator) -> torch.Tensor:
    """Raw int64 spans `[sets, n, 2]`: anywhere in 64 bits, around the edges of 32, and near the keys, in any order."""
    shape = (sets, n, 2)
    kinds = [
        torch.randint(-FAR, FAR, shape, generator=g),
        torch.randint(-(2**33), 2**33, shape, generator=g),
        torch.randint(-KEYS, 2 * KEYS, shape, generator=g),
        torch.randint(0, KEYS + 1, shape, generator=g),
        torch.tensor([-FAR, -(2**31), -1, 0, 1, KEYS - 1, KEYS, 2**31 - 1, 2**31, FAR])[
            torch.randint(0, 10, shape, generator=g)
        ],
    ]
    kind = torch.randint(0, len(kinds), (sets, n, 1), generator=g).expand(shape)
    return torch.stack(kinds).gather(0, kind[None])[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_raw_spans(attend, agrees, draw, device, capsys, causal):
    """As the oracle has it, set by set; the number of sets is printed."""
    sets, g = SETS[attend.name] // 2, torch.Generator().manual_seed(int(causal))
    spans, ran = noise(sets, 5, g), 0
    for first in range(0, sets, BATCH):
        some = spans[first : first + BATCH].to(device)
        q, k, v = draw(B=1, S=len(some) // 2, S_kv=KEYS, HKV=2, seed=first)
        o, _ = agrees(attend, q, k, v, ranges=some.view(1, -1, 2, 5, 2), causal=causal)
        ran += o.shape[1] * 2  # rows of two KV heads
    with capsys.disabled():
        print(f" {ran} span sets, {attend.name}", end="")
    assert ran == sets
    assert 2 * ran >= 10_000 or (attend.triton and current_lane() == "interpreter")


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_raw_blocks(attend, agrees, draw, device, width):
    sets, g = SETS[attend.name] // 8, torch.Generator().manual_seed(2)
    info = torch.iinfo(torch.int32) if width == torch.int32 else torch.iinfo(torch.int64)
    wild = torch.randint(info.min // 2, info.max // 2, (sets, 6), generator=g)
    near = torch.randint(-3, KEYS // 16 + 3, (sets, 6), generator=g)
    blocks = torch.where(torch.rand(sets, 6, generator=g) < 0.3, wild, near).to(width)
    for first in range(0, sets, BATCH):
        some = blocks[first : first + BATCH].to(device)
        q, k, v = draw(B=1, S=len(some) // 2, S_kv=KEYS, HKV=2, seed=first)
        agrees(attend, q, k, v, block_indices=some.view(1, -1, 2, 6), block_size=16)


# Lengths that are wrong: any result, but from memory of the call only, and nothing that stops it.
GARBAGE = {
    "decreasing": ([0, 4, 2], [0, 20, 9]),
    "past-the-end": ([0, 3, 99], [0, 70, 99]),
    "negative": ([-3, 2, 5], [-8, -2, 24]),
    "everywhere": ([7, -9, 3], [2**31 - 1, -(2**31), 12]),
}


@pytest.mark.parametrize(
    ("attend", "kind", "width", "causal"),
    in_pairs(
        BACKENDS, GARBAGE.keys(), {"int32": torch.int32, "int64": torch.int64}, {"causal": True, "full": False},
    ),
    indirect=["attend"],
)  # fmt: skip
def test_wrong_lengths_read_nothing_outside(attend, draw, device, same, kind, width, causal):
    """K and V lie between NaNs: a read past either end shows in the output."""
    q, k, v = draw(S=5, S_kv=24, HKV=1, varlen=True)
    arena_k, arena_v = (torch.cat((x * math.nan, x, x * math.nan)) for x in (k, v))
    ends_q, ends_k = GARBAGE[kind]
    if width == torch.int64 and kind == "everywhere":
        ends_k = [FAR, -FAR, 12]
    pair = tuple(torch.tensor(ends, dtype=width, device=device) for ends in (ends_q, ends_k))
    ranges = same([(0, 9), (-(2**31), 2**31 - 1)], 5, 1)
    o, lse = attend(q, arena_k[24:48], arena_v[24:48], ranges=ranges, cu_seqlens=pair, causal=causal, return_lse=True)
    assert not o.isnan().any()
    assert not lse.isnan().any()
