"""Group sizes from 1 to 128 and head dims from 16 to 256, powers of two or not, D and Dv independent."""

import pytest
import torch

from ...parity.pairs import in_pairs
from ..conftest import LANE_DTYPES

GROUPS = (1, 2, 3, 7, 16, 33, 64, 100, 128)
DIMS = ((16, 256), (256, 16), (17, 33), (24, 40), (64, 64), (64, 100), (96, 64), (100, 192), (128, 128), (192, 24))
SPLIT = ({"G": 100, "D": 24}, {"G": 3, "D": 24, "Dv": 100}, {"G": 64, "D": 64, "Dv": 32}, {"G": 33, "D": 128, "Dv": 16})
LIST = [(3, 9), (12, 17), (13, 14)]


@pytest.mark.parametrize(
    ("G", "HKV", "source", "dtype"),
    in_pairs(
        {f"G{G}": G for G in GROUPS}, {"one-kv-head": 1, "two-kv-heads": 2}, ("ranges", "blocks"), LANE_DTYPES,
        full=False,
    ),
    indirect=["dtype"],
)  # fmt: skip
def test_group_sizes(attend, agrees, draw, same, G, HKV, source, dtype):
    q, k, v = draw(S=1, HKV=HKV, G=G, seed=G, dtype=dtype)
    selection = {"ranges": same(LIST, 1, 1, HKV), "max_selected": 12}
    if source == "blocks":
        selection = {"block_indices": same([1, -1, 0], 1, 1, HKV), "block_size": 7}
    agrees(attend, q, k, v, **selection)


@pytest.mark.parametrize(("D", "Dv"), DIMS, ids=lambda d: str(d))
def test_head_dims(attend, agrees, draw, same, dtype, D, Dv):
    q, k, v = draw(S=2, HKV=1, D=D, Dv=Dv, dtype=dtype)
    o, _ = agrees(attend, q, k, v, ranges=same(LIST, 1, 2, 1))
    assert o.shape == (1, 2, 2, Dv)


@pytest.mark.parametrize("G", [3, 128], ids=lambda G: f"G{G}")
def test_largest_of_everything(attend, agrees, draw, same, dtype, G):
    """Where shared memory is short."""
    q, k, v = draw(S=1, S_kv=90, HKV=1, G=G, D=256, Dv=256, dtype=dtype)
    agrees(attend, q, k, v, ranges=same([(0, 90)], 1, 1, 1), max_selected=90)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("shape", SPLIT, ids=lambda shape: "-".join(f"{name}{size}" for name, size in shape.items()))
def test_split_among_programs(attend, agrees, draw, same, dtype, shape):
    """Heads and dims that are not powers of two, merged from parts."""
    q, k, v = draw(S=1, S_kv=60, HKV=1, **shape, dtype=dtype)
    agrees(attend, q, k, v, ranges=same([(0, 25), (30, 57)], 1, 1, 1))


def test_bf16_on_plain_backends(attend_plain, agrees, draw, same):
    """On every lane; Triton's bf16 needs a GPU."""
    q, k, v = draw(dtype=torch.bfloat16)
    agrees(attend_plain, q, k, v, ranges=same(LIST, 1, 3, 2))


def test_fp64_on_plain_backends(attend_plain, agrees, draw, same):
    q, k, v = draw(dtype=torch.float64)
    o, lse = agrees(attend_plain, q, k, v, ranges=same(LIST, 1, 3, 2))
    assert (o.dtype, lse.dtype) == (torch.float64, torch.float64)
