"""Ragged batches over caches: chunks of prompts and decode steps in one call, against the oracle of one sequence."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nsa
from nsa.kernels import pinned
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import sizes
from nsa.kernels.shared.sizes import STEPS
from nsa.testing.matrix import caches, strategies
from nsa.testing.matrix.strategies import BLOCKS, HUGE, RANGES, Drawn, DrawnCache
from nsa.testing.plugin import current_lane

from .test_kvcache import DTYPES, check, draw_blocks, draw_ranges

ROOM = 256
# A chunk, no queries, a decode step, a padded row of a captured graph, a speculative step, more queries than keys. On a
# GPU the last two are the longest step and the shortest chunk.
LENGTHS = [203, 77, ROOM, 0, 30, 1]
QUERIES = (64, 0, 1, 1, 8, 9) if current_lane() == "gpu" else (9, 0, 1, 1, 2, 2)
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
    "union": (16, "union", None, None),
}


def ends_of(queries, device, dtype=torch.int32):
    return torch.tensor([0, *queries], device=device).cumsum(0).to(dtype)


def drawn_queries(T, device, dtype, HQ=6, D=32):
    return torch.randn(T, HQ, D, generator=torch.Generator().manual_seed(T)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_triton_sel_parity_ragged(device, page, route, dtype, pin):
    size, schedule, choice, key_choice = ROUTES[route]
    cache = caches.draw(LENGTHS, ROOM, page, HKV=2, D=32, Dv=16, dtype=dtype, device=device, seed=3)
    T = sum(QUERIES) + UNUSED
    q = drawn_queries(T, device, dtype)
    picked = draw_ranges(1, T, 2, 3, seed=4)[0] if size is None else draw_blocks(1, T, 2, 3, size, seed=4)[0]
    selection = {"ranges": picked.int()} if size is None else {"block_indices": picked.int(), "block_size": size}
    selection = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in selection.items()}
    out = torch.full((T, 6, 16), math.nan, dtype=dtype, device=device)
    pin(key_major=key_choice)
    nsa.settings.reload()
    before, cu = nsa.kernels.launches.copy(), ends_of(QUERIES, device)
    with pinned(query_major=choice):
        got = nsa.selection_attention_with_kvcache(
            q, cache.k, cache.v, **cache.arguments, **selection, cu_seqlens_q=cu, max_seqlen_q=max(QUERIES),
            backend="triton", schedule=schedule, return_lse=True, out=out,
        )  # fmt: skip
    nsa.settings.reload()
    launched = nsa.kernels.launches - before
    assert launched[schedule] == 1
    assert launched["steps"] == (schedule != "query_major" and size is not None)
    check(got, caches.oracle(q, cache, cu, **selection), dtype)
    assert not got[0][-UNUSED:].any()


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_triton_sel_parity_ragged_e4m3(device, page, schedule):
    dtype, T = torch.bfloat16 if current_lane() == "gpu" else torch.float16, sum(QUERIES) + UNUSED
    cache = caches.quantized(caches.draw(LENGTHS, ROOM, page, HKV=2, D=32, Dv=16, dtype=dtype, device=device, seed=3))
    q, cu = drawn_queries(T, device, dtype), ends_of(QUERIES, device)
    selection = {"block_indices": draw_blocks(1, T, 2, 3, 64, seed=4)[0].int().to(device), "block_size": 64}
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, cu_seqlens_q=cu, backend="triton", schedule=schedule,
        return_lse=True,
    )  # fmt: skip
    check(got, caches.oracle(q, cache, cu, **selection), dtype)
    assert not got[0][-UNUSED:].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("source", ["ranges", "blocks"])
@pytest.mark.parametrize("backend", ["sdpa", "reference", "triton"])
def test_triton_sel_parity_ragged_backends(device, backend, source, causal):
    """In int64, with pages."""
    dtype, T = next(iter(DTYPES.values())), sum(QUERIES) + UNUSED
    cache = caches.draw(LENGTHS, ROOM, 64, dtype=dtype, index=torch.int64, device=device, seed=1)
    q, cu = drawn_queries(T, device, dtype, 4, 16), ends_of(QUERIES, device, torch.int64)
    selection = {"ranges": draw_ranges(1, T, 2, 3, seed=3)[0].to(device)}
    if source == "blocks":
        selection = {"block_indices": draw_blocks(1, T, 2, 3, 32, seed=3)[0].to(device), "block_size": 32}
    selection |= {"causal": causal, "scale": 0.3}
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, cu_seqlens_q=cu, backend=backend, return_lse=True
    )
    check(got, caches.oracle(q, cache, cu, **selection), dtype)


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
def test_triton_sel_parity_ragged_is_the_call_with_equal_numbers(device, schedule):
    """Sequences of as many queries each: packed or not, the same bits."""
    dtype, S = next(iter(DTYPES.values())), 2 if schedule == "query_major" else STEPS + 1
    cache = caches.draw([203, 64], ROOM, 16, D=32, Dv=32, dtype=dtype, device=device)
    q = drawn_queries(2 * S, device, dtype, HQ=4)
    blocks = draw_blocks(2, S, 2, 3, 64, seed=3).to(device, torch.int32)
    how = {"block_size": 64, "backend": "triton", "schedule": schedule, "return_lse": True} | cache.arguments
    want = nsa.selection_attention_with_kvcache(q.view(2, S, 4, 32), cache.k, cache.v, block_indices=blocks, **how)
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, block_indices=blocks.flatten(0, 1), cu_seqlens_q=ends_of((S, S), device), **how
    )
    assert all(torch.equal(a, b.flatten(0, 1)) for a, b in zip(got, want, strict=True))


# Four tokens: rows with spans, or blocks, in any order.
SPANS, FIVE = Drawn.same(RANGES, [(-3, 9), (30, 73), (0, 1), (5, 4)]), Drawn.same(BLOCKS, [2, 1, 9, -1, 1])


@settings(max_examples=settings().max_examples // 2)
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
    out = torch.full((*q.shape[:-1], p.case.Dv), math.nan, dtype=q.dtype, device=device)
    nsa.settings.reload()  # forgets plans
    with patch.object(sizes, "STEPS", steps):
        got = nsa.selection_attention_with_kvcache(
            q, cache.k, cache.v, **cache.arguments, **picked, cu_seqlens_q=cu, backend="triton", schedule=schedule,
            return_lse=True, out=out,
        )  # fmt: skip
    want = caches.oracle(q, cache, cu, **picked)
    check(got, want, q.dtype)
    plain = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **picked, cu_seqlens_q=cu, backend="sdpa", return_lse=True
    )
    check(plain, want, q.dtype)
