"""Calls as Hypothesis draws them: whatever the selection says, the kernel reads what the oracle reads.

Past bugs are examples that always run, each with what was wrong. Gradients and caches: `test_drawn.py`.
"""

import dataclasses

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nsa.kernels import pinned
from nsa.kernels.query_major import tiles
from nsa.testing.contestants.ours import OURS
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import strategies
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.strategies import BLOCKS, HUGE, INT32, PACKED, RANGES, Drawn
from nsa.testing.profiles import drawing

VARLEN = Case(2, 32, 32, 100, 3, "few", "fp32", source="varlen")


@drawing(2 / 5)
@given(strategies.calls("ranges"))
# Ends as far off as int64 and int32 go: a kernel that adds to them, or counts their keys in 32 bits, reads outside.
@example(Drawn.same(RANGES, [(-HUGE, HUGE), (HUGE, -HUGE), (0, HUGE), (-HUGE, 1)]))
@example(Drawn.same(RANGES, [(-INT32, INT32 - 1), (INT32 - 1, INT32 - 1), (70, INT32 - 1), (0, 0)], dtype=torch.int32))
# Spans that end before they begin: they have no keys, not a negative number of them.
@example(Drawn.same(RANGES, [(9, 2), (70, 71), (71, 3), (5, 5)]))
# The suite's own noise never drew the edges of the keys (fd7cb45).
@example(Drawn.same(RANGES, [(-1, 1), (71, 73), (72, 73), (-1, 0)]))
# Rows without keys (0, -inf, no NaN), and rows of one key, whose score is their LSE.
@example(Drawn.same(RANGES, [(0, 0)] * 4))
@example(Drawn.same(RANGES, [(0, 0), (0, 1), (0, 0), (0, 0)]))
# A key that is listed twice counts twice.
@example(Drawn.same(RANGES, [(3, 40)] * 4))
# The first report's kernel saw 64 of a row's keys (docs/rtx4090-report.md).
@example(Drawn.same(RANGES, [(0, 72), (0, 0), (0, 0), (0, 0)]))
# The first report's reference let a causal row with one query see its first key only.
@example(Drawn.same(dataclasses.replace(RANGES, S=1, N=2), [(3, 40), (60, 72), (0, 1), (5, 4)]))
# Heads past those of a tile of 32 rows.
@example(Drawn.same(dataclasses.replace(RANGES, H=33), [(3, 40), (60, 72), (0, 1), (5, 4)]))
# A query that stands before the first key sees nothing, one past the last key sees them all.
@example(Drawn.same(RANGES, [(0, 72), (1, 2), (0, 0), (0, 0)], positions=-1))
@example(Drawn.same(RANGES, [(0, 72), (1, 2), (0, 0), (0, 0)], positions=HUGE))
def test_triton_sel_parity_ranges_any_spans(device: torch.device, drawn: Drawn) -> None:
    problem = drawn.problem(device)
    check("ranges", problem)
    check("sdpa", problem)


@drawing(2 / 5)
@given(strategies.calls("packed"))
# Packed SDPA failed on sequences without keys; the last of them may begin past the last key (5104ed0).
@example(Drawn.same(dataclasses.replace(PACKED, N=4, seqlens=(1, 1), kv_seqlens=(5, 0)), [(0, 5)] * 4))
@example(Drawn.same(dataclasses.replace(PACKED, N=4, seqlens=(1, 1), kv_seqlens=(0, 0)), [(0, 5)] * 4))
# A sequence without queries, then one whose keys begin elsewhere than its queries do.
@example(Drawn.same(dataclasses.replace(PACKED, N=6, seqlens=(0, 3), kv_seqlens=(2, 5)), [(0, 9), (-3, 2)]))
# Spans that reach for the keys of the sequences before and behind.
@example(Drawn.same(PACKED, [(-HUGE, HUGE), (2, 9), (3, 4), (0, 0)]))
def test_triton_sel_parity_ranges_any_spans_packed_batch(device: torch.device, drawn: Drawn) -> None:
    problem = drawn.problem(device)
    check("ranges", problem)
    check("sdpa", problem)


# By the rules; and with tiles that a block holds one of, split or not.
CHOICES = (None, tiles.Choice(1, 1, 16, 1, 2), tiles.Choice(2, 1, 16, 1, 1))


@drawing(2 / 5)
@given(strategies.calls("blocks"), st.sampled_from(CHOICES))
# Padding in any slot, and nothing but padding.
@example(Drawn.same(BLOCKS, [-1, 2, -INT32, 0, -1], dtype=torch.int32), None)
@example(Drawn.same(BLOCKS, [-1] * 5, dtype=torch.int32), CHOICES[2])
# The same block twice; one past the last; the last, which the cache fills in part (0434c84).
@example(Drawn.same(BLOCKS, [1, 1, 5, 4, 0], dtype=torch.int32), CHOICES[1])
# Blocks whose first key int32 does not hold: tiled blocks went past it (ca7e0be).
@example(Drawn.same(BLOCKS, [INT32 - 1, 2**27, 2**28, 1, -1], dtype=torch.int32), None)
@example(Drawn.same(BLOCKS, [INT32 - 1, 2**27, 2**28, 1, -1], dtype=torch.int32), CHOICES[2])
# A cache that is shorter than a block.
@example(Drawn.same(dataclasses.replace(BLOCKS, S_kv=7), [0, 1, -1, 0, 3], dtype=torch.int32), None)
# A group above 32 heads, in blocks of a size that no tile has.
@example(Drawn.same(dataclasses.replace(BLOCKS, H=40, block_size=13), [5, 0, -1, 2, 5], dtype=torch.int32), CHOICES[1])
def test_triton_sel_parity_blocks_any_indices(device: torch.device, drawn: Drawn, choice: tiles.Choice | None) -> None:
    problem = drawn.problem(device)
    with pinned(query_major=choice):
        check("blocks", problem)
    check("sdpa", problem)


@drawing(2 / 5)
@given(strategies.calls("blocks"))
# A block that every query of a sequence selects, twice: its list is as long as all rows.
@example(Drawn.same(BLOCKS, [0, 0, 4, 4, 1], dtype=torch.int32))
# Blocks that no query selects have no list.
@example(Drawn.same(BLOCKS, [-1, -1, -1, -1, 5], dtype=torch.int32))
def test_triton_sel_parity_key_major_any_indices(device: torch.device, drawn: Drawn) -> None:
    check("key_major", drawn.problem(device))


@drawing(2 / 5)
@given(st.lists(st.integers(0, VARLEN.L), min_size=VARLEN.N, max_size=VARLEN.N), strategies.seeds())
# Empty rows first, last, everywhere: there may be no keys at all.
@example([0, 100, 0], 0)
@example([0, 0, 0], 0)
@example([1, 0, 1], 0)
def test_triton_sel_parity_varlen_any_lengths(device: torch.device, lengths: list[int], seed: int) -> None:
    problem = VARLEN.make(device, seed)
    ends = torch.tensor(lengths).cumsum(0)
    spans = torch.stack((ends - torch.tensor(lengths), ends), -1).view(1, VARLEN.N, 1, 1, 2).to(device)
    g = torch.Generator(device).manual_seed(seed)
    k, v = (torch.randn(1, sum(lengths), 1, 32, generator=g, device=device) for _ in range(2))
    check("varlen_group", dataclasses.replace(problem, ranges=spans, k=k, v=v))


def check(name: str, problem) -> None:
    result, launched = OURS[name].run_counted(problem, return_lse=True)
    assert_parity(result, Oracle.of(problem), name)
    route = OURS[name].route
    assert route is None or launched[route] > 0, f"{name} launched {launched}"
