"""The schedule for small blocks over the matrix: single rows, and tiles of neighbouring tokens."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.kernels import pinned
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.small_blocks import tiles
from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import lane_cases, register
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import caches, strategies
from nsa.testing.matrix.strategies import DrawnCache
from nsa.testing.plugin import current_lane
from nsa.testing.profiles import drawing

from .pairs import covering, in_pairs
from .test_caches import serve

GPU = current_lane() == "gpu"
# A union has several steps, and a row several tiles.
UNIONS = tiles.Choice(worth=ALWAYS, least=0, union_keys=16)
CHOICES = {
    "rule": tiles.RULES,
    "left": tiles.Choice(least=0),  # tiles leave rows
    "left-together": tiles.Choice(least=0, left=0),  # a program computes all that a tile left
    "rows": tiles.Choice(keys=16, rows=0),
    "split": tiles.Choice(splits=2, keys=16, rows=0),
    "unions": UNIONS,
    "split-unions": UNIONS._replace(union_splits=2),
    "split-rule": tiles.Choice(union_splits=2, keys=16, least=0),  # tiles leave rows, split alike
}


def chosen() -> list[tuple[str, str]]:
    """Cases and choices; interpreted, each case once, and each choice with each value of what cases differ in."""

    def pairs(row):
        case, name = row
        of_case = {
            "size": case.block_size, "dtype": case.dtype, "dist": case.dist, "HKV": case.HKV, "S": case.S > 1,
            "seqlens": bool(case.seqlens), "causal": case.causal, "positions": case.positions, "scores": case.scores,
            "padded": case.D != case.Dv, "rows": case.H > 16,
        }  # fmt: skip
        return [case.id, *((name, *value) for value in of_case.items())]

    cases = [case for case in lane_cases() if OURS["small_blocks"].supports(case) is None]
    rows = list(itertools.product(cases, CHOICES))
    return [(register([case])[0], name) for case, name in (rows if GPU else covering(rows, pairs))]


@pytest.mark.parametrize(("case", "choice"), chosen(), indirect=["case"], scope="module")
def test_triton_sel_parity_small_blocks(oracle: Oracle, choice: str) -> None:
    with pinned(small_blocks=CHOICES[choice]):
        result, launched = OURS["small_blocks"].run_counted(oracle.problem, oracle.problem.case.seed % 2 == 0)
    assert_parity(result, oracle, "small_blocks")
    assert {"small_blocks"} <= set(launched) <= {"small_blocks", "small_blocks unions", "split"}, f"launched {launched}"


@pytest.mark.parametrize(
    ("page", "ragged", "e4m3", "choice"),
    in_pairs(
        {f"page{page}": page for page in (None, 8, 64, 6)}, {"batch": False, "ragged": True},
        {"16bit": None, "e4m3": "heads", "e4m3-one-scale": "number"}, CHOICES,
    ),
)  # fmt: skip
def test_triton_sel_parity_small_blocks_kvcache(device, pin, page, ragged, e4m3, choice):
    """Sequences of any length with one list for all KV heads; blocks within a page, and across the ends of pages."""
    pin(small_blocks=choice)
    dtype = torch.bfloat16 if GPU else torch.float16
    lengths, S, size, n, HKV = [130, 0, 67], 5, 4, 20, 2  # five tiles of 16 keys a row, so that a part has three
    room = 132 if page is None else -(-130 // page) * page
    cache = caches.draw(lengths, room, page, HKV=HKV, D=32, Dv=16, dtype=dtype, device=device, seed=size)
    cache = caches.quantized(cache) if e4m3 else cache
    if e4m3 == "number":  # a larger one follows it in memory
        scales = torch.tensor([[0.01, 9.0], [0.02, 9.0]], device=device)
        cache = dataclasses.replace(cache, k_scale=scales[0, 0], v_scale=scales[1, 0])
    g = torch.Generator().manual_seed(page or 0)
    q = torch.randn(len(lengths), S, HKV * 5, 32, generator=g).to(device, dtype)
    blocks = torch.stack([torch.randperm(room // size + 2, generator=g)[:n] - 1 for _ in range(len(lengths) * S)])
    blocks = blocks.view(len(lengths), S, 1, n).to(device, torch.int32)
    blocks[:, 1:4] = blocks[:, :1]
    ends = None
    if ragged:
        q, blocks, ends = q.flatten(0, 1), blocks.flatten(0, 1), torch.tensor([0, 7, 7, 14], device=device)
    selection = {"block_indices": blocks, "block_size": size}
    serve(q, cache, selection, ends, Dv=16, schedule="small_blocks")


@drawing(2 / 5)
@given(
    strategies.cached_calls("blocks") | strategies.ragged_calls("blocks"), st.sampled_from(list(CHOICES)), st.booleans()
)
def test_triton_sel_parity_small_blocks_any_caches(
    device: torch.device, drawn: DrawnCache, choice: str, shared: bool
) -> None:
    """``shared``: one list for all KV heads, and unions for the tokens of a tile."""
    cache, p = drawn.cache(device), drawn.call.problem(device)
    blocks = p.block_indices[..., :1, :].contiguous() if shared else p.block_indices
    q, cu = p.q.half() if drawn.e4m3 and p.q.dtype == torch.float32 else p.q, None
    if drawn.ends:
        q, blocks, cu = q.flatten(0, 1), blocks.flatten(0, 1), drawn.cu_seqlens_q(device)
    picked = {"block_indices": blocks, "block_size": min(p.block_size, tiles.LARGEST), "causal": p.causal}
    with pinned(small_blocks=CHOICES[choice]):
        serve(q, cache, picked, cu, Dv=p.case.Dv, schedule="small_blocks")
