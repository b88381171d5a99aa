"""Selections and tensors that a model may pass to a kernel by design or by mistake, within the kernel's contract."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa.testing.contestants.contract import Contract
from nsa.testing.contestants.fit import arranged, fitted
from nsa.testing.contestants.named import Wrong, prove, returns
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested
from nsa.testing.judge.conduct import copied, same_bits
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.machine import current_lane
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.inputs import drowned
from nsa.testing.matrix.problem import Problem
from nsa.testing.matrix.strategies import LANE_DTYPES

INTERPRETED = current_lane() == "interpreter"
CASES = [
    made
    for dtype in LANE_DTYPES
    for made in (
        Case(2, 32, 16, 24, 12, "mixed", dtype, source="ranges", HKV=2, S=3, S_kv=40),
        Case(3, 32, 32, 48, 12, "prefill", dtype, HKV=2, S=3, S_kv=77, block_size=16),
        Case(4, 32, 16, 33, 2, "few", dtype),
    )
]
REPLACED = ("q", "k", "v", "ranges", "block_indices")
Twist = Callable[[Problem], Problem]


def drawn(p: Problem, low: int, high: int, which: int) -> Tensor:
    """Random integers of the selection's shape. `which` selects the seed."""
    g = torch.Generator().manual_seed(p.seed + which)
    return torch.randint(low, high, p.chosen.shape, generator=g).to(p.q.device)


def nothing(p: Problem) -> Problem:
    return p.choosing(torch.full_like(p.chosen, 5 if p.block_indices is None else -1))


def half_of_it(p: Problem) -> Problem:
    """Every other query selects nothing."""
    empty = nothing(p)
    kept = p.chosen.clone()
    kept[:, ::2] = empty.chosen[:, ::2]
    return p.choosing(kept)


def noise(p: Problem) -> Problem:
    """Reversed spans, spans before the first key and past the last, and the largest numbers of their dtype."""
    far = torch.iinfo(p.ranges.dtype).max if p.block_indices is None else 2**27 - 2  # blocks that end within int32
    keys = p.k.shape[1] if p.block_indices is None else -(-p.k.shape[1] // p.block_size)
    ends = torch.tensor([-far, -1, 0, keys, far], device=p.q.device)[drawn(p, 0, 5, 0)]
    return p.choosing(torch.where(drawn(p, 0, 3, 1) == 0, ends, drawn(p, -keys, 2 * keys, 2)))


def far(p: Problem) -> Problem:
    """As `noise`, in int64: a kernel may not cut a number to 32 bits before it clamps it."""
    return noise(dataclasses.replace(p, ranges=p.ranges.long()))


def twice(p: Problem) -> Problem:
    """Every key is listed twice, and counts twice."""
    return p.choosing(torch.cat((p.chosen, p.chosen), -2 if p.block_indices is None else -1))


def one_key(p: Problem) -> Problem:
    """The first key, which every query may see; for blocks, padding and then the first block."""
    one = torch.zeros_like(p.chosen)
    if p.block_indices is None:
        one[..., 0, 1] = 1
    else:
        one[..., :-1] = -1
    return p.choosing(one)


def strided(p: Problem) -> Problem:
    """Views of larger tensors that hold NaN elsewhere. Values lie head by head, so that v has other strides than k."""
    v = drowned(p.v.transpose(-3, -2)).transpose(-3, -2)
    return dataclasses.replace(p, q=drowned(p.q), k=drowned(p.k), v=v)


def large_scores(p: Problem) -> Problem:
    """Scores whose exp overflows fp32 unless the maximum is subtracted."""
    return dataclasses.replace(p, q=p.q * 64)


def negative_scores(p: Problem) -> Problem:
    """In every other head, scores so far below 0 that their exp is 0, unless the running maximum starts at -inf."""
    q = p.q.clone()
    q[..., ::2, :] = q[..., ::2, :].abs() * -256
    return dataclasses.replace(p, q=q, k=p.k.abs())


def no_queries(p: Problem) -> Problem:
    short = p.choosing(p.chosen[:, :0])
    return dataclasses.replace(short, q=p.q[:, :0])


def no_sequences(p: Problem) -> Problem:
    none = p.choosing(p.chosen[:0])
    return dataclasses.replace(none, q=p.q[:0], k=p.k[:0], v=p.v[:0])


def scaled(p: Problem) -> Problem:
    return dataclasses.replace(p, scale=0.3)


def without_the_last(p: Problem) -> Problem:
    """Rows that list the last key, or its block, list the first key or block instead."""
    last = p.k.shape[1] - 1
    if p.block_indices is None:
        one = torch.tensor([0, 1], dtype=p.ranges.dtype, device=p.ranges.device)
        return p.choosing(torch.where((p.ranges[..., 1:] > last), one, p.ranges))
    return p.choosing(p.block_indices.masked_fill(p.block_indices == last // p.block_size, 0))


OF_ANY: dict[str, Twist] = {
    "strided": strided, "large-scores": large_scores, "negative-scores": negative_scores, "no-sequences": no_sequences,
}  # fmt: skip
OF_A_SELECTION: dict[str, Twist] = {
    "nothing": nothing, "half": half_of_it, "noise": noise, "far": far, "twice": twice, "one-key": one_key,
    "scaled": scaled, "no-queries": no_queries,
}  # fmt: skip
TWISTS = OF_ANY | OF_A_SELECTION


CALLS = 4  # with inputs that change in place
NEEDED = {
    "strided": "contiguous", "large-scores": "small scores", "negative-scores": "small scores", "nothing": "nonempty",
    "half": "nonempty", "noise": "visible", "far": "visible", "twice": "distinct", "scaled": "default scale",
    "no-queries": "some queries", "no-sequences": "some queries",
}  # fmt: skip
"""For each twist the need of a contract that excludes the twist."""


def fitting(impl):
    """`CASES` within a contract."""
    return dict.fromkeys(fitted(case, impl.contract, INTERPRETED) for case in CASES)


def twisted(impl):
    """Each twist of each case. Large scores are left out in fp32, where the order of additions decides their result."""
    for case in fitting(impl):
        twists = OF_ANY if case.source in ("rows", "varlen") else TWISTS
        for twist in twists:
            unfair = twist in ("large-scores", "negative-scores") and case.dtype == "fp32"
            unfair = unfair or twist == "no-queries" and not impl.contract.chunks  # the call still has keys
            unfair = unfair or twist == "far" and not (case.source == "ranges" and impl.contract.int64)
            if not unfair and NEEDED.get(twist) not in impl.contract.needs:
                yield from ((case, twist, wanted) for wanted in returns(impl))


def selected(impl):
    """Cases in which some key is selected by no row."""
    every = {"finite", "own block"} & set(impl.contract.needs)
    for case in fitting(impl):
        one_block = "blocks" in impl.contract.takes and case.S_kv <= case.block_size
        if not every and not one_block and case.source not in ("rows", "varlen"):
            yield from ((case, wanted) for wanted in returns(impl))


@contested(twisted, "twist", "wanted")
def test_what_a_model_may_hand_over(contestant, problem, twist, wanted):
    p = arranged(TWISTS[twist](problem), contestant.contract)
    prove(contestant, p, Oracle.of(p), wanted)


@contested(selected, "wanted")
def test_keys_that_no_row_selects_may_be_nan(contestant, problem, wanted):
    """NaN is put only outside of the listed spans and blocks. A kernel may read keys within them, and mask those."""
    p = arranged(without_the_last(problem), contestant.contract)
    seen = torch.zeros(p.k.shape[:3], dtype=torch.bool, device=p.k.device)  # [B, S_kv, HKV]
    for b, s, h, i in torch.cartesian_prod(*(torch.arange(n) for n in p.ranges.shape[:-1])).tolist():
        start, end = p.ranges[b, s, h, i].tolist()
        seen[b, max(start, 0) : max(end, 0), h] = True
    assert not bool(seen.all())
    k, v = (x.masked_fill(~seen[..., None], math.nan) for x in (p.k, p.v))
    prove(contestant, dataclasses.replace(p, k=k, v=v), Oracle.of(p), wanted)


def remade(p: Problem, contract: Contract) -> Problem:
    """Other values in tensors of the same shapes."""
    other = p.with_tensors(p.q.flip(-1), p.k.roll(1, -1), p.v.flip(-1))
    if p.case.source in ("rows", "varlen"):
        return other
    return arranged(other.choosing(p.case.make(p.q.device, p.seed + 1).chosen), contract)


@contested(lambda impl: [(c, returns(impl)[-1]) for c in fitting(impl)], "wanted")
def test_inputs_that_change_in_place(contestant, problem, wanted):
    """A kernel may not know a call again by its tensors' addresses, nor change a result that it returned."""
    own = {name: x.clone() for name in REPLACED if (x := getattr(problem, name)) is not None}
    p = dataclasses.replace(problem, **own)
    now, results = problem, []
    for _ in range(CALLS):  # outputs may be taken from a ring of several
        try:
            result = prove(contestant, p, Oracle.of(now), wanted)
        except Wrong as error:
            if results and error.result is not None and same_bits(error.result, results[-1][1]):
                raise Wrong(f"{contestant.name}: gave the last call's result, though inputs changed in place") from None
            raise
        results.append((result, copied(result)))
        now = remade(now, contestant.contract)
        for name, x in own.items():
            x.copy_(getattr(now, name))
    if not all(same_bits(result, kept) for result, kept in results):
        raise Wrong(f"{contestant.name}: a later call changed a result that was returned")


@pytest.mark.skipif(current_lane() != "gpu", reason="streams need a GPU")
@contested(lambda impl: [(case,) for case in fitting(impl)])
def test_the_current_stream_is_waited_for(contestant, problem, oracle):
    """Inputs are written late, on the current stream. A kernel that is launched on another stream reads NaN."""
    prove(contestant, problem, oracle, "O")  # compiles
    late = dataclasses.replace(problem, **{name: torch.full_like(getattr(problem, name), math.nan) for name in "qkv"})
    if problem.case.source == "rows":
        assert late.rows.K.isnan().all()  # makes the views here, because that synchronizes
    stream = torch.cuda.Stream(problem.q.device)
    torch.cuda.synchronize(problem.q.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in "qkv":
            getattr(late, name).copy_(getattr(problem, name))
        result = contestant.run(late)
    stream.synchronize()
    assert_parity(result, oracle, contestant.name)
    for name in "qkv":
        assert same_bits(getattr(late, name), getattr(problem, name)), f"{contestant.name}: wrote to its input {name}"
