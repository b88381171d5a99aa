"""Hypothesis strategies for selections: every shape of span that a caller may pass by design or by mistake.

Shapes are arguments, values are drawn: a test fixes its shapes so that examples do not recompile a kernel.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

HUGE = 2**62  # far past any tensor, and short of overflow when two are subtracted
Span = tuple[int, int]


def _span(S_kv: int) -> st.SearchStrategy[Span]:
    """One span, sound or not."""
    key = st.integers(0, S_kv - 1)
    inside = st.tuples(key, key).map(lambda ab: (min(ab), max(ab) + 1))
    return st.one_of(
        inside,
        key.map(lambda a: (a, a)),  # empty
        key.map(lambda a: (a, a + 1)),  # a single key
        inside.map(lambda ab: (ab[1], ab[0])),  # reversed
        st.tuples(st.integers(-2 * S_kv, -1), key),  # starts before the first key
        st.tuples(st.integers(-9, -5), st.integers(-4, 0)),  # lies before the first key
        st.tuples(key, st.integers(S_kv, 3 * S_kv)),  # runs past the last
        st.tuples(st.integers(S_kv, 2 * S_kv), st.integers(S_kv, 3 * S_kv)),  # lies past the last
        st.sampled_from([(-HUGE, HUGE), (0, HUGE), (-HUGE, 1), (HUGE, -HUGE), (HUGE, HUGE), (-HUGE, -HUGE)]),
    )


@st.composite
def _adjacent(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """Each span begins where the one before ends."""
    cuts = sorted(draw(st.lists(st.integers(0, S_kv), min_size=n + 1, max_size=n + 1)))
    return list(zip(cuts, cuts[1:], strict=False))


@st.composite
def _overlapping(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """All spans around one place: neighbours share keys."""
    at, reach = draw(st.integers(0, S_kv - 1)), draw(st.integers(1, max(1, S_kv // 4)))
    shifts = draw(st.lists(st.integers(0, reach), min_size=n, max_size=n))
    return [(at + s, at + s + reach) for s in shifts]


@st.composite
def _long_and_tiny(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """One span over most keys in any slot, the others of one or two keys."""
    keys = draw(st.lists(st.integers(0, S_kv - 1), min_size=n, max_size=n))
    spans = [(a, a + 1 + a % 2) for a in keys]
    spans[draw(st.integers(0, n - 1))] = (keys[0] // 8, S_kv - keys[-1] // 8)
    return spans


def _row(n: int, S_kv: int) -> st.SearchStrategy[list[Span]]:
    """The spans of one row: one pattern, in order or not."""
    one = _span(S_kv)
    patterns = st.one_of(
        st.lists(one, min_size=n, max_size=n),
        _adjacent(n, S_kv),
        _overlapping(n, S_kv),
        _long_and_tiny(n, S_kv),
        one.map(lambda span: [span] * n),  # duplicates
        st.just([(0, 0)] * n),  # an empty row
    )
    return patterns.flatmap(lambda spans: st.one_of(st.just(spans), st.permutations(spans)))


@st.composite
def ranges(draw: st.DrawFn, lead: tuple[int, ...], n: int, S_kv: int) -> Tensor:
    """Spans `[*lead, n, 2]` (int64, CPU) over `S_kv` keys; `lead`: `(B, S, HKV)`, or `(T, HKV)` if packed."""
    rows = math.prod(lead)
    spans = draw(st.lists(_row(n, S_kv), min_size=rows, max_size=rows))
    return torch.tensor(spans, dtype=torch.int64).view(*lead, n, 2)


@st.composite
def block_indices(draw: st.DrawFn, lead: tuple[int, ...], n: int, blocks: int) -> Tensor:
    """Block indices `[*lead, n]` (int32, CPU): any order, twice, padding in any slot, one past the end."""
    index = st.one_of(st.integers(0, blocks), st.just(-1), st.integers(-(2**31), -1))
    count = math.prod(lead) * n
    drawn = draw(st.lists(index, min_size=count, max_size=count))
    return torch.tensor(drawn, dtype=torch.int32).view(*lead, n)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of the tensors' values."""
    return st.integers(0, 2**16)
