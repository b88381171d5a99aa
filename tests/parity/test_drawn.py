"""Gradients and caches as Hypothesis draws them, against fp64. Past bugs are examples that always run."""

import dataclasses

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import nsa
import nsa.kernels
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.kernels.shared.sizes import ALWAYS
from nsa.plain.oracle import selection_reference
from nsa.testing.judge.gradients import GradientOracle, assert_gradients
from nsa.testing.matrix import strategies
from nsa.testing.matrix.problem import Problem
from nsa.testing.matrix.strategies import BLOCKS, HUGE, INT32, PACKED, RANGES, Drawn, DrawnCache
from nsa.testing.profiles import drawing

from .test_caches import serve

SOURCES = ("ranges", "blocks", "packed")
FOUR = [(3, 40), (60, 72), (0, 1), (5, 4)]
# By the rules; and in small shares, merged in order, with dQ taken query-major or from key blocks.
CHOICES = (None, *(backward_tiles.Choice(32, 4, 2, 1, keep_dq, 16, 1, 1) for keep_dq in (True, False)))


def gradients(p: Problem, do: torch.Tensor, dlse: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """`(dq, dk, dv)` of a call through our kernels, where `dO` and `dLSE` come back to it."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    before = nsa.kernels.launches["backward"]
    with poisoned_workspace():
        o, lse = nsa.selection_attention(
            *leaves, **p.selection, backend="triton", max_selected=p.case.L, return_lse=True
        )
        got = torch.autograd.grad(*(((o, lse), leaves, (do, dlse)) if dlse is not None else (o, leaves, do)))
    assert nsa.kernels.launches["backward"] == before + 1
    return got


def oracle_of(p: Problem) -> GradientOracle:
    """The oracle of a problem that may be one row of one key: there dP and delta are equal, and dQ and dK are 0.

    SDPA takes both for the same sum and is exact. A kernel adds `Dv` products of fp32 for each, in an order of its own,
    whatever the dtype of its inputs. An error of half a unit in the last place of their largest is granted for that.
    """
    oracle = GradientOracle.of(p)
    rows = [float(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max()) for x in (oracle.do, p.v)]
    scale = abs(p.softmax_scale)
    wrong_dS = 2.0**-24 * rows[0] * rows[1] * scale
    readers = (p.q.numel() // p.case.D) ** 0.5  # each adds an error of its own to a key's gradient
    floors = wrong_dS * float(p.k.abs().max()), wrong_dS * float(p.q.abs().max()) * readers, 0.0
    errors = tuple(max(pair) for pair in zip(oracle.err_sdpa, floors, strict=True))
    return dataclasses.replace(oracle, err_sdpa=errors)


def trained(source: str) -> st.SearchStrategy[Drawn]:
    """Calls with at least one key: dense SDPA has no gradients of none, and the edge lane sees that all are zero."""
    return strategies.calls(source).filter(lambda drawn: drawn.case.S_kv > 0)


def through_lse(oracle: GradientOracle, dlse: torch.Tensor) -> GradientOracle:
    """The oracle of a loss that takes the LSE, too."""
    p = oracle.problem
    leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
    outputs = selection_reference(Call.of(*leaves, **p.selection | {"cu_seqlens": p.cu_seqlens_pair}, return_lse=True))
    exact = torch.autograd.grad(outputs, leaves, (oracle.do.double(), dlse.double()))
    return dataclasses.replace(oracle, exact=exact)


@drawing(2 / 5)
@given(st.sampled_from(SOURCES).flatmap(trained), st.sampled_from(CHOICES))
# Keys that a row lists twice, and rows that list none: neither was looked at in gradients before.
@example(Drawn.same(RANGES, [(3, 40)] * 4), None)
@example(Drawn.same(RANGES, [(0, 0)] * 4), CHOICES[1])
@example(Drawn.same(BLOCKS, [1, 1, 5, 4, 0], dtype=torch.int32), CHOICES[2])
@example(Drawn.same(BLOCKS, [-1] * 5, dtype=torch.int32), None)
# One key: its weight is 1 whatever its score is, so dQ and dK are 0 but for rounding.
@example(Drawn.same(RANGES, [(0, 0), (0, 1), (0, 0), (0, 0)]), CHOICES[1])
# Ends as far off as int64 goes, and padding in any slot.
@example(Drawn.same(RANGES, [(-HUGE, HUGE), (HUGE, -HUGE), (0, HUGE), (-HUGE, 1)]), CHOICES[2])
@example(Drawn.same(BLOCKS, [-1, INT32 - 1, -INT32, 0, 2**27], dtype=torch.int32), None)
# A group above 32 heads.
@example(Drawn.same(dataclasses.replace(RANGES, H=33), FOUR), CHOICES[1])
# Sequences without keys or queries.
@example(Drawn.same(dataclasses.replace(PACKED, N=6, seqlens=(0, 3), kv_seqlens=(2, 5)), [(0, 9), (-3, 2)]), CHOICES[2])
def test_triton_sel_parity_backward_any_calls(
    device: torch.device, drawn: Drawn, choice: backward_tiles.Choice | None
) -> None:
    oracle = oracle_of(drawn.problem(device))
    with pinned(backward=choice):
        got = gradients(oracle.problem, oracle.do)
    assert_gradients(got, oracle, str(choice))


@drawing(1 / 5)
@given(st.sampled_from(SOURCES[1:]).flatmap(trained))
# A block listed twice, no block, and blocks that all rows share.
@example(Drawn.same(BLOCKS, [1, 1, 5, 4, 0], dtype=torch.int32))
@example(Drawn.same(BLOCKS, [-1] * 5, dtype=torch.int32))
@example(Drawn.same(BLOCKS, [3, 1, 5, -1, 0], dtype=torch.int32))
def test_triton_sel_parity_backward_unions_any_calls(device: torch.device, drawn: Drawn) -> None:
    """dQ of every tile that may have a union is taken from it."""
    oracle = oracle_of(drawn.problem(device))
    with pinned(backward_unions=backward_tiles.Unions(0, 1, ALWAYS)):
        got = gradients(oracle.problem, oracle.do)
    assert_gradients(got, oracle, "unions")


@drawing(1 / 5)
@given(st.sampled_from(SOURCES).flatmap(trained))
# One key, whose score is the LSE: all of dQ and dK comes through it. A row without keys: nothing, and no NaN.
@example(Drawn.same(RANGES, [(0, 0), (0, 1), (0, 0), (0, 0)]))
@example(Drawn.same(RANGES, [(0, 0)] * 4))
@example(Drawn.same(RANGES, [(3, 40)] * 4))
@example(Drawn.same(BLOCKS, [1, 1, 5, -1, 0], dtype=torch.int32))
def test_triton_sel_parity_lse_gradients_any_calls(device: torch.device, drawn: Drawn) -> None:
    oracle = oracle_of(drawn.problem(device))
    dlse = torch.randn(oracle.lse.shape, generator=torch.Generator().manual_seed(drawn.seed + 2)).to(device)
    got = gradients(oracle.problem, oracle.do, dlse)
    assert_gradients(got, through_lse(oracle, dlse), "backward through O and LSE")


# Four sequences with room for 48 keys each, as spans and as blocks.
SPANS = Drawn.same(dataclasses.replace(RANGES, S_kv=48, N=16), [(-3, 9), (30, 49), (0, 1), (5, 4)])
FIVE = Drawn.same(dataclasses.replace(BLOCKS, S_kv=48, N=16), [2, 1, 5, -1, 1], dtype=torch.int32)
LENGTHS = (33, 0, 1, 48)  # within a page, nothing, one key, no room left
IMPOSSIBLE = (-5, 55, -INT32, INT32 - 1)


@drawing(3 / 5)
@given(st.sampled_from(SOURCES[:2]).flatmap(strategies.cached_calls), st.sampled_from(["query_major", "key_major"]))
# Lengths that cannot be: negative ones are 0, others as long as there is room.
@example(DrawnCache(SPANS, IMPOSSIBLE), "query_major")
@example(DrawnCache(FIVE, IMPOSSIBLE, page=16), "query_major")
@example(DrawnCache(FIVE, IMPOSSIBLE), "key_major")
# Pages that do not exist, in the middle of a sequence, too: their keys are as if nothing had selected them.
@example(DrawnCache(SPANS, LENGTHS, page=16, missing=frozenset((0, 10))), "query_major")
@example(DrawnCache(FIVE, LENGTHS, page=16, missing=frozenset((0, 9, 10, 11))), "query_major")
@example(DrawnCache(FIVE, LENGTHS, page=16, missing=frozenset((1, 9, 11))), "key_major")
# Pages of one key, and of a size that no tile is made of (6e2a3ec); several queries, one of whose numbers Triton took
# for a key's place in its page (e55fe26).
@example(DrawnCache(SPANS, LENGTHS, page=1, missing=frozenset((4, 150))), "query_major")
@example(DrawnCache(FIVE, LENGTHS, page=3), "query_major")
@example(DrawnCache(FIVE, LENGTHS, page=48), "key_major")
@example(DrawnCache(FIVE, LENGTHS, page=16, missing=frozenset((1, 9)), e4m3=True), "query_major")
def test_triton_sel_parity_kvcache_any_caches(device: torch.device, drawn: DrawnCache, schedule: str) -> None:
    cache, p = drawn.cache(device), drawn.call.problem(device)
    blocks = p.block_indices is not None
    picked = {"block_indices": p.block_indices, "block_size": p.block_size} if blocks else {"ranges": p.ranges}
    picked["causal"] = p.causal
    q = p.q.half() if drawn.e4m3 and p.q.dtype == torch.float32 else p.q
    before = nsa.kernels.launches.copy()
    serve(q, cache, picked, Dv=p.case.Dv, schedule=schedule)
    ran = nsa.kernels.launches - before
    assert ran[schedule] > 0, f"expected {schedule} to be launched, got {dict(ran)}"
