"""The union schedule over the matrix: every tile served by its union, and tiles served as the data says."""

import dataclasses

import pytest
import torch

from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.union import tiles
from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import current_lane

from .test_caches import serve

GPU = current_lane() == "gpu"


def tiled(case: Case) -> bool:
    """Prompts and packed sequences that a tile holds; of a GPU's matrix those without a thousand rows each."""
    if OURS["union"].supports(case) is not None:
        return False
    return case.S > 1 or bool(case.seqlens) or (GPU and case.N == 64 and case.L in (64, 1024))


@pytest.fixture(params=["always", "worth", "by_row"])
def worth(request, pin):
    """by_row: query-major serves the rows without a union."""
    if request.param != "worth":
        pin(union=tiles.Choice(worth=ALWAYS) if request.param == "always" else tiles.Choice(by_row=True))
    return request.param


@over(tiled)
def test_triton_sel_parity_union(oracle: Oracle, worth: str) -> None:
    modes = (False, True) if GPU else (oracle.problem.case.seed % 2 == 0,)
    for return_lse in modes:
        result, launched = OURS["union"].run_counted(oracle.problem, return_lse)
        assert_parity(result, oracle, "union")
        assert set(launched) == {"union"}, f"launched {launched}"


@pytest.mark.parametrize("size", [16, 48, 64], ids=lambda size: f"block{size}")
@pytest.mark.parametrize("page", [None, 8, 64, 128, 5], ids=lambda page: f"page{page}")
def test_triton_sel_parity_union_kvcache(device, page, size, pin):
    """Chunks of sequences of any length; keys of a tile in a page, in several, and across their ends.

    Keys of no sequence are NaN, then finite: another kernel serves tiles whose result has a NaN, and so would hide that
    the union read a wrong value.
    """
    dtype = torch.bfloat16 if GPU else torch.float16
    pin(union=tiles.Choice(worth=ALWAYS))
    room = 130 if page is None else -(-130 // page) * page
    lengths, S = [130, 0, 67], 4
    cache = caches.draw(lengths, room, page, HKV=1, D=32, Dv=16, dtype=dtype, device=device, seed=size)
    g = torch.Generator().manual_seed(size)
    q = torch.randn(len(lengths), S, 16, 32, generator=g).to(device, dtype)
    blocks = torch.stack([torch.randperm(-(-room // size) + 2, generator=g)[:3] - 1 for _ in range(len(lengths) * S)])
    selection = {"block_indices": blocks.view(len(lengths), S, 1, 3).to(device, torch.int32), "block_size": size}
    finite = dataclasses.replace(cache, k=cache.k.nan_to_num(99.0), v=cache.v.nan_to_num(99.0))
    for same_keys in (cache, finite):
        serve(q, same_keys, selection, Dv=16, schedule="union")
