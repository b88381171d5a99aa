"""Hypothesis strategies for calls: selections, positions and caches that a caller may pass by design or by mistake.

Shapes are drawn too. In the interpreter any small shape is drawn. On a GPU each new shape compiles kernels, so shapes
come from a short fixed list.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa.testing.lane import choose
from nsa.testing.machine import current_lane
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem, spans_of_blocks

HUGE = 2**62  # far past any tensor, but the difference of two such numbers does not overflow
INT32 = 2**31  # the first number past int32
ROWS = 32  # rows of a selection that are drawn one by one; Hypothesis gives up on draws of more than 8,192 bytes
Span = tuple[int, int]

choose()
GPU = current_lane() == "gpu"
LANE_DTYPES = ("bf16", "fp16", "fp32") if GPU else ("fp32", "fp16")
# `L` is the host's bound n * S_kv, because each of the n spans may be as long as the cache.
RANGES = Case(3, 32, 32, 72 * 4, 4, "mixed", "fp32", HKV=2, S=2, S_kv=72, n=4)
BLOCKS = Case(4, 32, 16, 16 * 5, 4, "prefill", "fp16", HKV=2, S=2, S_kv=72, block_size=16)
PACKED = Case(3, 32, 32, 5 * 4, 8, "mixed", "fp32", HKV=2, seqlens=(1, 3), kv_seqlens=(5, 3), n=4)
FIXED = {
    "ranges": [RANGES, Case(33, 64, 64, 130 * 3, 4, "mixed", "bf16", S=2, S_kv=130, n=3)],
    "blocks": [BLOCKS, Case(8, 64, 128, 64 * 4, 6, "prefill", "bf16", HKV=2, S=3, S_kv=200)],
    "packed": [PACKED, dataclasses.replace(PACKED, N=12, L=70 * 4, seqlens=(4, 0, 2), kv_seqlens=(9, 70, 0))],
}
"""The shapes of calls on a GPU, by the strategy's `source`."""

OF_CONTESTANTS = [
    *(RANGES, dataclasses.replace(RANGES, causal=False, dtype="fp16")),
    dataclasses.replace(BLOCKS, S_kv=65),  # the first query is the last of its block, and the next block has one key
    dataclasses.replace(BLOCKS, causal=False, dtype=LANE_DTYPES[0]),
    dataclasses.replace(PACKED, causal=False),
    Case(4, 32, 16, 33, 2, "few", "fp16"),
]
"""The shapes of drawn calls to contestants. They are few, because a kernel may be compiled for each."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A drawn call: its shape, its selection, and the seed of its tensors' values.

    selection: `ranges [*lead, HKV, n, 2]`, or `block_indices [*lead, HKV, n]` if the case's source is "blocks", where
    `lead` is the case's. positions: `q_positions [*lead]`, or None.
    """

    case: Case
    selection: Tensor
    seed: int = 0
    positions: Tensor | None = None

    @classmethod
    def same(
        cls, case: Case, selection: list[Any], positions: int | None = None, dtype: torch.dtype = torch.int64
    ) -> Drawn:
        """A call in which every row has this selection and every query this position."""
        chosen = torch.tensor(selection, dtype=dtype).reshape(-1, *([2] if case.source == "ranges" else []))
        at = None if positions is None else torch.full(case.lead, positions)
        return cls(case, chosen.expand(*case.lead, case.HKV, *chosen.shape).contiguous(), positions=at)

    def problem(self, device: torch.device) -> Problem:
        """The tensors of the call on a device."""
        made, chosen = self.case.make(device, self.seed), self.selection.to(device)
        at = None if self.positions is None else self.positions.to(device)
        if self.case.source != "blocks":
            return dataclasses.replace(made, ranges=chosen, q_positions=at)
        spans = spans_of_blocks(chosen, self.case.block_size)
        return dataclasses.replace(made, ranges=spans, block_indices=chosen, q_positions=at)


# --- spans and blocks ------------------------------------------------------------------------------------------------


def _span(S_kv: int, far: int) -> st.SearchStrategy[Span]:
    """One span, valid or not."""
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
        st.sampled_from([(-far, far), (0, far), (-far, 1), (far, -far), (far, far), (-far, -far)]),
    )


@st.composite
def _adjacent(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """Each span begins where the one before ends."""
    cuts = sorted(draw(st.lists(st.integers(0, S_kv), min_size=n + 1, max_size=n + 1)))
    return list(zip(cuts, cuts[1:], strict=False))


@st.composite
def _overlapping(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """Spans around one place, which have keys in common."""
    at, reach = draw(st.integers(0, S_kv - 1)), draw(st.integers(1, max(1, S_kv // 4)))
    shifts = draw(st.lists(st.integers(0, reach), min_size=n, max_size=n))
    return [(at + s, at + s + reach) for s in shifts]


@st.composite
def _long_and_tiny(draw: st.DrawFn, n: int, S_kv: int) -> list[Span]:
    """One span over most keys, in any slot. The others have one or two keys."""
    keys = draw(st.lists(st.integers(0, S_kv - 1), min_size=n, max_size=n))
    spans = [(a, a + 1 + a % 2) for a in keys]
    spans[draw(st.integers(0, n - 1))] = (keys[0] // 8, S_kv - keys[-1] // 8)
    return spans


def _row(n: int, S_kv: int, far: int) -> st.SearchStrategy[list[Span]]:
    """The spans of one row, of one pattern, in any order."""
    one = _span(S_kv, far)
    patterns = st.one_of(
        st.just([(0, 0)] * n),  # an empty row
        st.lists(one, min_size=n, max_size=n),
        _adjacent(n, S_kv),
        _overlapping(n, S_kv),
        _long_and_tiny(n, S_kv),
        one.map(lambda span: [span] * n),  # duplicates
    )
    return patterns.flatmap(lambda spans: st.one_of(st.just(spans), st.permutations(spans)))


@st.composite
def ranges(draw: st.DrawFn, lead: tuple[int, ...], n: int, S_kv: int, far: int = HUGE) -> Tensor:
    """Spans `[*lead, n, 2]` (CPU) over `S_kv` keys, between `-far` and `far`: int32 if that holds `far`, else int64."""
    rows = min(math.prod(lead), ROWS)
    spans = draw(st.lists(_row(n, S_kv, far), min_size=rows, max_size=rows))
    drawn = draw(_spread(torch.tensor(spans, dtype=torch.int64).view(rows, n, 2), lead))
    return drawn.int() if far < INT32 else drawn


@st.composite
def block_indices(draw: st.DrawFn, lead: tuple[int, ...], n: int, blocks: int, far: int = INT32 - 1) -> Tensor:
    """Block indices `[*lead, n]` (int32, CPU), at most `far`: unsorted, repeated, past the end, padding in any slot."""
    index = st.one_of(st.integers(0, blocks), st.just(-1), st.integers(-INT32, -1), st.just(far))
    rows = min(math.prod(lead), ROWS)
    drawn = draw(st.lists(index, min_size=rows * n, max_size=rows * n))
    return draw(_spread(torch.tensor(drawn, dtype=torch.int32).view(rows, n), lead))


@st.composite
def _spread(draw: st.DrawFn, drawn: Tensor, lead: tuple[int, ...]) -> Tensor:
    """`[*lead, ...]` of the drawn rows: as they are if they are as many, else each row takes one of them."""
    rows = math.prod(lead)
    if rows > len(drawn):
        drawn = drawn[torch.randint(len(drawn), (rows,), generator=torch.Generator().manual_seed(draw(seeds())))]
    return drawn.view(*lead, *drawn.shape[1:])


@st.composite
def positions(draw: st.DrawFn, lead: tuple[int, ...], S_kv: int) -> Tensor:
    """`q_positions [*lead]` (int64, CPU) in any order, also before the first key and past the last."""
    count = math.prod(lead)
    one = st.one_of(st.integers(0, S_kv - 1), st.integers(-3, 2 * S_kv), st.sampled_from([-HUGE, HUGE]))
    return torch.tensor(draw(st.lists(one, min_size=count, max_size=count)), dtype=torch.int64).view(lead)


# --- whole calls -----------------------------------------------------------------------------------------------------


@st.composite
def _cases(draw: st.DrawFn, source: str) -> Case:
    """A shape small enough for the interpreter, where each row takes ten milliseconds or more."""
    H, (D, Dv) = draw(heads()), draw(dims())
    HKV = draw(st.integers(1, 2))
    size, n = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    dtype, causal = draw(st.sampled_from(LANE_DTYPES)), draw(st.booleans())
    if source == "packed":
        sequence = st.tuples(st.integers(0, 3), st.integers(0, 40))  # its queries and keys
        some = st.lists(sequence, min_size=1, max_size=4).filter(lambda pairs: any(queries for queries, _ in pairs))
        lengths = draw(some)
        queries, keys = zip(*lengths, strict=True)
        S_kv = max(1, *keys)
        return Case(
            H, D, Dv, S_kv * n, sum(queries) * HKV, "mixed", dtype, HKV=HKV, causal=causal, seqlens=queries,
            kv_seqlens=keys, n=n,
        )  # fmt: skip
    B, S, S_kv = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 80))
    how: dict[str, Any] = {"HKV": HKV, "S": S, "S_kv": S_kv, "causal": causal}
    if source == "blocks":
        return Case(H, D, Dv, size * n, B * S * HKV, "prefill", dtype, **how, block_size=size, n=n)
    return Case(H, D, Dv, S_kv * n, B * S * HKV, "mixed", dtype, **how, n=n)


def heads() -> st.SearchStrategy[int]:
    """Query heads of a row: few, or about the sizes of tiles and above."""
    return st.one_of(st.integers(1, 8), st.sampled_from([16, 17, 33, 40]))


def dims() -> st.SearchStrategy[tuple[int, int]]:
    """`(D, Dv)`, any sizes."""
    return st.tuples(st.integers(16, 40), st.integers(16, 40))


@st.composite
def selections(draw: st.DrawFn, case: Case, far: int = HUGE) -> Tensor:
    """The selection of a shape: `ranges` within `-far` and `far`, or `block_indices` up to `far`, in int32."""
    rows = (*case.lead, case.HKV)
    if case.source == "blocks":
        return draw(block_indices(rows, case.n, -(-case.S_kv // case.block_size), min(far, INT32 - 1)))
    return draw(ranges(rows, case.n, max(1, case.S_kv), far))


@st.composite
def calls(draw: st.DrawFn, source: str, explicit: bool = True) -> Drawn:
    """A call with `source` "ranges", "blocks", or "packed" (ranges over packed sequences).

    explicit: causal calls may have `q_positions`.
    """
    case = draw(st.sampled_from(FIXED[source]) if GPU else _cases(source))
    selection = draw(selections(case, draw(st.sampled_from([HUGE, INT32 - 1]))))
    at = draw(st.none() | positions(case.lead, max(1, case.S_kv))) if explicit and case.causal else None
    return Drawn(case, selection, draw(seeds()), at)


@dataclass(frozen=True, eq=False)
class DrawnCache:
    """A drawn call over a cache with room for `call.case.S_kv` keys a sequence.

    lengths: the `cache_seqlens` that the caller passes. page: keys of a page; None for a contiguous cache.
    missing: entries of the block table, counted along its rows, that name a page which does not exist.
    ends: `cu_seqlens_q` without its 0, in any order, if the call's tokens are the packed queries of a ragged batch.
    e4m3: the cache is quantised, with a scale for each KV head; its queries must be fp16 or bf16.
    """

    call: Drawn
    lengths: tuple[int, ...]
    page: int | None = None
    missing: frozenset[int] = frozenset()
    e4m3: bool = False
    ends: tuple[int, ...] = ()

    def cu_seqlens_q(self, device: torch.device) -> Tensor:
        """The ends as a ragged call takes them: int32, or int64 where that is needed."""
        wide = max(map(abs, self.ends), default=0) >= INT32
        return torch.tensor([0, *self.ends], dtype=torch.int64 if wide else torch.int32, device=device)

    def cache(self, device: torch.device) -> caches.Cache:
        """The cache on a device. Every place outside the sequences is NaN."""
        case = self.call.case
        made = caches.draw(
            self.lengths, case.S_kv, self.page, HKV=case.HKV, D=case.D, Dv=case.Dv, dtype=case.torch_dtype,
            device=device, seed=self.call.seed,
        )  # fmt: skip
        if self.e4m3:
            made = caches.quantized(made)
        if made.block_table is None:
            return made
        table = made.block_table.flatten()
        for i, place in enumerate(sorted(self.missing)):
            table[place] = caches.NOWHERE[i % len(caches.NOWHERE)]
        return dataclasses.replace(made, block_table=table.view_as(made.block_table))


@st.composite
def cached_calls(draw: st.DrawFn, source: str) -> DrawnCache:
    """A call over a cache with `source` "ranges" or "blocks": any lengths, any page size that fits, missing pages."""
    call = draw(calls(source, explicit=False))
    return dataclasses.replace(draw(_caches(call, call.case.B)), e4m3=draw(st.sampled_from([False, False, True])))


@st.composite
def ragged_calls(draw: st.DrawFn, source: str) -> DrawnCache:
    """A ragged call over a cache with `source` "ranges" or "blocks": sequences without queries, tokens of no sequence,
    ends in no order, lengths shorter than the number of queries.
    """
    call = draw(calls(source, explicit=False))
    T, B = call.case.N // call.case.HKV, draw(st.integers(1, 4))
    ends = st.lists(st.integers(0, T), min_size=B, max_size=B)
    wild = st.lists(st.integers(-2, 2 * T) | st.sampled_from([-HUGE, HUGE, -INT32, INT32 - 1]), min_size=B, max_size=B)
    return dataclasses.replace(draw(_caches(call, B)), ends=tuple(draw(st.one_of(ends.map(sorted), wild))))


@st.composite
def _caches(draw: st.DrawFn, call: Drawn, B: int) -> DrawnCache:
    """The call over a cache of `B` sequences."""
    room = call.case.S_kv
    length = st.integers(0, room) | st.sampled_from([0, room, -5, room + 7])
    lengths = draw(st.lists(length, min_size=B, max_size=B))
    sizes = (1, 8, 10, 36) if GPU else range(1, room + 1)  # kernels are compiled for the size of a page
    page = draw(st.none() | st.sampled_from([size for size in sizes if room % size == 0]))
    places = st.integers(0, B * (room // page) - 1) if page else st.nothing()
    return DrawnCache(call, tuple(lengths), page, draw(st.frozensets(places, max_size=3 if page else 0)))


def seeds() -> st.SearchStrategy[int]:
    """Seeds of the tensors' values."""
    return st.integers(0, 2**16)
