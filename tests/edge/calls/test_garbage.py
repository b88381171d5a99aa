"""Selections that are noise, tensors in a sea of NaN: every key named that exists is used, and nothing else."""

import math

import pytest
import torch

import nsa
from nsa.testing.matrix.inputs import drowned
from nsa.testing.plugin import current_lane

from ...parity.pairs import in_pairs
from ..conftest import LANE_DTYPES, ROUTES

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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("attend_all", "dtype", "source"),
    in_pairs(list(ROUTES), LANE_DTYPES, ("ranges", "blocks", "varlen")),
    indirect=["attend_all", "dtype"],
)
def test_in_a_sea_of_nan(attend_all, draw, device, dtype, source):
    """Bitwise as on clean tensors: no value outside of K, V, Q and the selection is used, however wild the spans."""
    g = torch.Generator().manual_seed(5)
    varlen = source == "varlen"
    q, k, v = draw(B=2, S=6 if varlen else 3, S_kv=KEYS, HKV=2, dtype=dtype, varlen=varlen)
    lead = (6, 2) if varlen else (2, 3, 2)
    selection = {}
    if source == "blocks":
        selection = {"block_indices": torch.randint(-2, 9, (*lead, 6), generator=g).to(device), "block_size": 13}
    else:
        spans = noise(math.prod(lead), 5, g).view(*lead, 5, 2).to(device)
        selection = {"ranges": spans}
    if varlen:
        pair = ([0, 2, 6], [0, 40, KEYS])
        selection["cu_seqlens"] = tuple(torch.tensor(c, dtype=torch.int32, device=device) for c in pair)
    want = attend_all(q, k, v, **selection, return_lse=True)
    assert not want[0].isnan().any()
    arena = [drowned(x) for x in (q, k, v)]
    inside = {name: drowned(x) if isinstance(x, torch.Tensor) else x for name, x in selection.items()}
    got = attend_all(*arena, **inside, return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_packed_rows_in_a_sea_of_nan(draw, device):
    g = torch.Generator().manual_seed(6)
    Q, K, V = (torch.randn(*shape, 16, generator=g).to(device) for shape in ((12, 4), (12, 40), (12, 40)))
    want = nsa.sel_attn_fwd_dense_group(Q, K, V, return_lse=True)
    got = nsa.sel_attn_fwd_dense_group(*(drowned(x) for x in (Q, K, V)), return_lse=True)
    lengths = [0, 40, 3, 17, 40, 1, 0, 12, 30, 5, 8, 9]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    K_all, V_all = (x.flatten(0, 1)[: int(cu[-1])] for x in (K, V))
    bound = {"max_selected": 40, "return_lse": True}
    want += nsa.sel_attn_fwd_varlen_group(Q, K_all, V_all, cu, **bound)
    got += nsa.sel_attn_fwd_varlen_group(*(drowned(x) for x in (Q, K_all, V_all)), cu, **bound)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
