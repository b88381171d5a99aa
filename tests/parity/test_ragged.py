"""Ragged batches over caches: chunks of prompts and decode steps in one call, against the oracle of one sequence."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import nsa
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import sizes
from nsa.kernels.shared.sizes import STEPS
from nsa.testing.matrix import caches, strategies
from nsa.testing.matrix.strategies import BLOCKS, HUGE, RANGES, Drawn, DrawnCache
from nsa.testing.plugin import current_lane
from nsa.testing.profiles import drawing

from .pairs import in_pairs
from .test_caches import DTYPES, draw_blocks, draw_ranges, serve

GPU, ROOM = current_lane() == "gpu", 256
# A chunk, no queries, a decode step, a padded row of a captured graph, a speculative step, more queries than keys. On a
# GPU the last two are the longest step and the shortest chunk.
LENGTHS = [203, 77, ROOM, 0, 30, 1]
QUERIES = (64, 0, 1, 1, 8, 9) if GPU else (9, 0, 1, 1, 2, 2)
UNUSED = 2  # tokens after the last sequence
SPLIT, WALK = tiles.Choice(2, 1, 32, 4, 2), key_tiles.FP32._replace(walked=8)
ROUTES = {  # keys of a block, or ranges; schedule; the tiles of query-major and of key-major, where not by the rules
    "blocks": (64, "query_major", None, None),
    "odd-blocks": (48, "query_major", None, None),
    "ranges": (None, "query_major", None, None),
    "split": (32, "query_major", SPLIT, None),
    "key-major": (64, "key_major", None, None),
    "key-major-split": (32, "key_major", SPLIT, None),
    "key-major-walk": (32, "key_major", None, WALK),
    "key-major-ranges": (None, "key_major", None, None),
    "key-major-many": (64, "key_major", None, None),  # units, so that lists take three launches
    "union": (16, "union", None, None),
}


def ends_of(queries, device, dtype=torch.int32):
    return torch.tensor([0, *queries], device=device).cumsum(0).to(dtype)


def drawn_queries(T, device, dtype, HQ=6, D=32):
    return torch.randn(T, HQ, D, generator=torch.Generator().manual_seed(T)).to(device, dtype)


def ragged(device, dtype, page, size, HKV=2, D=32, Dv=16, index=torch.int32):
    """Packed queries, a cache, blocks of a size or spans, and the queries' ends."""
    cache = caches.draw(LENGTHS, ROOM, page, HKV=HKV, D=D, Dv=Dv, index=index, dtype=dtype, device=device, seed=3)
    T, H = sum(QUERIES) + UNUSED, 3 * HKV
    selection = {"ranges": draw_ranges(1, T, HKV, 3, seed=4)[0].to(device, index)}
    if size is not None:
        selection = {"block_indices": draw_blocks(1, T, HKV, 3, size, seed=4)[0].to(device, index), "block_size": size}
    return drawn_queries(T, device, dtype, H, D), cache, selection, ends_of(QUERIES, device, index)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_triton_sel_parity_ragged(device, page, route, dtype, pin, monkeypatch, fresh_plans):
    monkeypatch.setattr(key_tiles, "FEW_UNITS", 0 if route == "key-major-many" else key_tiles.FEW_UNITS)
    size, schedule, choice, key_choice = ROUTES[route]
    call = ragged(device, dtype, page, size, HKV=2 if GPU or page is None else 1)
    pin(query_major=choice, key_major=key_choice)
    before = nsa.kernels.launches.copy()
    o, _ = serve(*call, Dv=16, schedule=schedule, max_seqlen_q=max(QUERIES))
    launched = nsa.kernels.launches - before
    assert launched[schedule] == 1
    assert launched["steps"] == (schedule != "query_major" and size is not None)
    assert not o[-UNUSED:].any()


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_triton_sel_parity_ragged_e4m3(device, page, schedule):
    q, cache, selection, cu = ragged(device, torch.bfloat16 if GPU else torch.float16, page, 64)
    o, _ = serve(q, caches.quantized(cache), selection, cu, schedule=schedule)
    assert not o[-UNUSED:].any()


@pytest.mark.parametrize(
    ("backend", "size", "causal"),
    in_pairs(("sdpa", "reference", "triton"), {"ranges": None, "blocks": 32}, {"causal": True, "all": False}),
)
def test_triton_sel_parity_ragged_backends(device, backend, size, causal):
    """In int64, with pages."""
    call = ragged(device, next(iter(DTYPES.values())), 64, size, D=16, index=torch.int64)
    serve(*call, backend=backend, causal=causal, scale=0.3)


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
def test_triton_sel_parity_ragged_is_the_call_with_equal_numbers(device, schedule):
    """Sequences of as many queries each: packed or not, the same bits."""
    dtype, S = next(iter(DTYPES.values())), 2 if schedule == "query_major" else STEPS + 1
    cache = caches.draw([203, 64], ROOM, 16, D=32, Dv=32, dtype=dtype, device=device)
    q = drawn_queries(2 * S, device, dtype, HQ=4)
    packed = {"block_indices": draw_blocks(1, 2 * S, 2, 3, 64, seed=3)[0].int().to(device), "block_size": 64}
    want = serve(q, cache, packed, ends_of((S, S), device), schedule=schedule)
    batch = packed | {"block_indices": packed["block_indices"].unflatten(0, (2, S))}
    got = serve(q.unflatten(0, (2, S)), cache, batch, schedule=schedule)
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(got, want, strict=True))


# Four tokens: rows with spans, or blocks, in any order.
SPANS, FIVE = Drawn.same(RANGES, [(-3, 9), (30, 73), (0, 1), (5, 4)]), Drawn.same(BLOCKS, [2, 1, 9, -1, 1])


@drawing(1 / 5)
@given(
    st.sampled_from(("ranges", "blocks")).flatmap(strategies.ragged_calls),
    st.sampled_from(["query_major", "key_major"]),
    st.sampled_from([1, 8]),
)
@example(DrawnCache(SPANS, (33, 0, 72), page=8, missing=frozenset((1,)), ends=(1, 2, 3)), "query_major", 8)
@example(DrawnCache(FIVE, (70, 5), page=36, ends=(3, 3)), "key_major", 8)
# Ends that cannot be: falling, negative, past the last token.
@example(DrawnCache(FIVE, (33, 60, 72), ends=(3, -HUGE, 1)), "query_major", 8)
@example(DrawnCache(SPANS, (33, 60, 72), page=8, ends=(HUGE, 2, -1)), "key_major", 8)
def test_triton_sel_parity_ragged_any_batches(
    device: torch.device, drawn: DrawnCache, schedule: str, steps: int
) -> None:
    """``steps``: the most queries of a step."""
    cache, p, cu = drawn.cache(device), drawn.call.problem(device), drawn.cu_seqlens_q(device)
    q, picked = p.q.flatten(0, 1), {"ranges": p.ranges.flatten(0, 1), "causal": p.causal}
    if p.block_indices is not None:
        del picked["ranges"]
        picked |= {"block_indices": p.block_indices.flatten(0, 1), "block_size": p.block_size}
    nsa.settings.reload()  # forgets plans
    with patch.object(sizes, "STEPS", steps):
        serve(q, cache, picked, cu, Dv=p.case.Dv, schedule=schedule)
    serve(q, cache, picked, cu, backend="sdpa")
