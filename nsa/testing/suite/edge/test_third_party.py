"""Somebody else's kernel, `--nsa-impl package.module:function`, on what a live model may hand it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from nsa.testing.contestants.named import prove, returns
from nsa.testing.contestants.ours import Impl
from nsa.testing.fixtures import case, over_third_parties, problem, third_party
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.inputs import drowned
from nsa.testing.matrix.problem import Problem
from nsa.testing.matrix.strategies import LANE_DTYPES
from nsa.testing.plugin import current_lane

__all__ = ["case", "problem", "third_party"]

CASES = [
    made
    for dtype in LANE_DTYPES
    for made in (
        Case(2, 32, 16, 24, 12, "mixed", dtype, source="ranges", HKV=2, S=3, S_kv=40),
        Case(3, 32, 32, 48, 12, "prefill", dtype, HKV=2, S=3, S_kv=77, block_size=16),
        Case(4, 32, 16, 33, 2, "few", dtype),
    )
]
Twist = Callable[[Problem], Problem]


def selecting(p: Problem, chosen: Tensor) -> Problem:
    """The problem with other spans, or other block ids."""
    if p.block_indices is None:
        return dataclasses.replace(p, ranges=chosen.to(p.ranges.dtype), extra={})
    size, ids = p.block_size, chosen.long()
    spans = torch.stack((ids * size, (ids + 1) * size), -1).masked_fill((ids < 0)[..., None], 0)
    return dataclasses.replace(
        p, block_indices=chosen.to(p.block_indices.dtype), ranges=spans.to(p.ranges.dtype), extra={}
    )


def chosen(p: Problem) -> Tensor:
    return p.ranges if p.block_indices is None else p.block_indices


def drawn(p: Problem, low: int, high: int, which: int) -> Tensor:
    """Of the selection's shape, on its device; others for another `which`."""
    g = torch.Generator().manual_seed(p.seed + which)
    return torch.randint(low, high, chosen(p).shape, generator=g).to(p.q.device)


def nothing(p: Problem) -> Problem:
    return selecting(p, torch.full_like(chosen(p), 5 if p.block_indices is None else -1))


def half_of_it(p: Problem) -> Problem:
    """The other rows select nothing."""
    empty = nothing(p)
    kept = chosen(p).clone()
    kept[:, ::2] = chosen(empty)[:, ::2]
    return selecting(p, kept)


def noise(p: Problem) -> Problem:
    """Backwards, before the first key, past the last, and as far off as int32 goes."""
    far = 2**31 - 1 if p.block_indices is None else 2**27 - 2  # whose end is within int32
    keys = p.k.shape[1] if p.block_indices is None else -(-p.k.shape[1] // p.block_size)
    ends = torch.tensor([-far, -1, 0, keys, far], device=p.q.device)[drawn(p, 0, 5, 0)]
    return selecting(p, torch.where(drawn(p, 0, 3, 1) == 0, ends, drawn(p, -keys, 2 * keys, 2)))


def twice(p: Problem) -> Problem:
    """A key that is listed twice counts twice."""
    return selecting(p, torch.cat((chosen(p), chosen(p)), -2 if p.block_indices is None else -1))


def one_key(p: Problem) -> Problem:
    """The first, which is every query's to see; blocks: the first block, and padding before it."""
    one = torch.zeros_like(chosen(p))
    if p.block_indices is None:
        one[..., 0, 1] = 1
    else:
        one[..., :-1] = -1
    return selecting(p, one)


def strided(p: Problem) -> Problem:
    """Views of larger tensors that hold NaN elsewhere."""
    return dataclasses.replace(p, q=drowned(p.q), k=drowned(p.k), v=drowned(p.v), extra={})


def large_scores(p: Problem) -> Problem:
    """Past what `exp` takes in fp32, unless the maximum is subtracted first."""
    return dataclasses.replace(p, q=p.q * 64, extra={})


def no_queries(p: Problem) -> Problem:
    short = selecting(p, chosen(p)[:, :0])
    return dataclasses.replace(short, q=p.q[:, :0])


def no_sequences(p: Problem) -> Problem:
    none = selecting(p, chosen(p)[:0])
    return dataclasses.replace(none, q=p.q[:0], k=p.k[:0], v=p.v[:0])


def scaled(p: Problem) -> Problem:
    return dataclasses.replace(p, scale=0.3, extra={})


OF_ANY: dict[str, Twist] = {"strided": strided, "large-scores": large_scores, "no-sequences": no_sequences}
OF_A_SELECTION: dict[str, Twist] = {
    "nothing": nothing, "half": half_of_it, "noise": noise, "twice": twice, "one-key": one_key, "scaled": scaled,
    "no-queries": no_queries,
}  # fmt: skip
TWISTS = OF_ANY | OF_A_SELECTION


def fits(twist: str, made: Case) -> bool:
    """In fp32 the order of additions decides what large scores come to; elsewhere rounding of the inputs does."""
    return twist != "large-scores" or made.dtype != "fp32"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "third_party" not in metafunc.fixturenames:
        return
    names = [name for name in ("twist", "wanted") if name in metafunc.fixturenames]

    def of(impl: Impl, made: Case) -> Iterable[tuple[str, ...]]:
        packed = impl.name.endswith("@dense") or made.source == "rows"
        if "twist" not in names and packed:
            return []
        twists = [twist for twist in (OF_ANY if packed else TWISTS) if fits(twist, made)]
        values = {"twist": twists, "wanted": returns(impl)}
        return itertools.product(*(values[name] for name in names))

    over_third_parties(metafunc, CASES, names, of)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, when the interpreter computes with infinities
def test_third_party_edge(third_party: Impl, problem: Problem, twist: str, wanted: str) -> None:
    p = TWISTS[twist](problem)
    prove(third_party, p, Oracle.of(p), wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_third_party_keys_that_nobody_selects(third_party: Impl, problem: Problem, wanted: str) -> None:
    """They may be NaN, outside of what rows select and of what they may see; key-major kernels: outside of blocks."""
    p = problem
    seen = torch.zeros(p.k.shape[:3], dtype=torch.bool, device=p.k.device)  # [B, S_kv, HKV]
    for b, s, h, i in torch.cartesian_prod(*(torch.arange(n) for n in p.ranges.shape[:-1])).tolist():
        start, end = p.ranges[b, s, h, i].tolist()
        seen[b, max(start, 0) : max(end, 0), h] = True
    assert not bool(seen.all())
    k, v = (x.masked_fill(~seen[..., None], math.nan) for x in (p.k, p.v))
    prove(third_party, dataclasses.replace(p, k=k, v=v, extra={}), Oracle.of(p), wanted)


@pytest.mark.skipif(current_lane() != "gpu", reason="streams need a GPU")
def test_third_party_waits_for_the_current_stream(third_party: Impl, problem: Problem) -> None:
    """Inputs are written late, on a stream of their own: a kernel launched on another one reads NaN."""
    p = problem
    oracle = Oracle.of(p)
    try:
        third_party.run(p)  # compiles
    except NotImplementedError as e:
        pytest.skip(f"unsupported: {p.case.id}: {e}")
    late = dataclasses.replace(p, **{name: torch.full_like(getattr(p, name), math.nan) for name in "qkv"}, extra={})
    if p.case.source == "rows":
        assert late.rows.K.isnan().all()  # views, made here: that takes a sync, which behind the copies would wait
    stream = torch.cuda.Stream(p.q.device)
    torch.cuda.synchronize(p.q.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in "qkv":
            getattr(late, name).copy_(getattr(p, name))
        result = third_party.run(late)
    stream.synchronize()
    assert_parity(result, oracle, third_party.name)
