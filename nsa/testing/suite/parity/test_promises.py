"""The promises of a contract beside outputs and LSE: gradients, equal bits in each call, and calls over a cache."""

import dataclasses
import functools
import itertools

import torch

from nsa.testing.contestants.contract import CACHES
from nsa.testing.contestants.fit import cases_of, fitted, with_limit
from nsa.testing.contestants.named import Wrong
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested, lane_cases
from nsa.testing.judge.conduct import copied, same_bits, tensors, untouched
from nsa.testing.judge.forward import Oracle, cached_parity
from nsa.testing.judge.gradients import NAMES, GradientOracle, assert_gradients
from nsa.testing.machine import current_lane
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.inputs import drowned

INTERPRETED = current_lane() == "interpreter"
CACHED = [
    Case(H, D, D if HKV == 1 else 96 - D, n * size, S * HKV * 4, "prefill", dtype, HKV=HKV, S=S, S_kv=256,
         block_size=size, n=n, causal=i not in (2, 3))
    for i, (S, size, n) in enumerate(((1, 16, 4), (1, 64, 3), (3, 32, 3), (2, 128, 2), (1, 128, 2), (2, 16, 6)))
    for H, D, dtype in [((4, 32, "fp32"), (16, 64, "fp16"), (2, 64, "fp32"))[i % 3]] for HKV in (1 + i % 2,)
]  # fmt: skip
PAGES = (16, 64, 128)  # of a contract that takes any
FULL = 2**31  # or more than a cache holds
LENGTHS = (203, 0, 1, FULL)  # an end within a page, no keys, one key, a full cache
ROOMY = (203, 70, 128, FULL)  # lengths with which each query sees a key


def some(impl, count):
    """The `count` smallest cases of different sizes, first those with more than one query."""
    cases = [c for c in cases_of(impl.contract, lane_cases(), INTERPRETED) if not c.large and c.scores == 1]
    small = sorted(cases, key=lambda c: (c.S == 1 and not c.seqlens, c.N * c.L * c.H))
    kinds = {(c.dtype, c.D, c.H, c.block_size, c.causal, bool(c.seqlens), c.positions): c for c in reversed(small)}
    return [(c,) for c in sorted(kinds.values(), key=small.index)[:count]]


@contested(lambda impl: some(impl, 8 * impl.contract.gradients), promise="gradients")
def test_triton_sel_parity_gradients(contestant, problem):
    """Gradients of sum(O * dO) for a random dO. tests/parity/test_backward.py tests ours on more cases.

    A second pass has a dO with other strides, as the layers above may make it.
    """
    oracle = GradientOracle.of(problem)
    assert_gradients(gradients(contestant, problem, oracle.do), oracle, contestant.name)
    if "contiguous" in contestant.contract.needs:
        return
    got = gradients(contestant, problem, drowned(oracle.do))
    try:
        assert_gradients(got, oracle, contestant.name)
    except AssertionError as error:
        head = f"{contestant.name}: gradients are right for a contiguous dO, not for a strided one"
        raise Wrong(f"{head}: {error}") from None


def gradients(contestant, problem, do):
    """`(dq, dk, dv)` of a contestant. None of them may be missing."""
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    p = problem.with_tensors(*leaves)
    with untouched(contestant.name, p, {"dO": do}):
        out = contestant.run(p)
        if not out.requires_grad:
            raise Wrong(f"{contestant.name}: promises gradients, and its O has no grad_fn, so autograd stops there")
        got = torch.autograd.grad(out, leaves, do, allow_unused=True)
    if missing := [name for name, x in zip(NAMES, got, strict=True) if x is None]:
        raise Wrong(f"{contestant.name}: promises gradients, and autograd gives none for {', '.join(missing)}")
    return got


@contested(lambda impl: some(impl, 5 * impl.contract.repeatable), promise="repeatable")
def test_triton_sel_parity_twice(contestant, problem):
    """Repeated calls give equal bits. They are copied, because a later call could write to the same memory."""
    results, copies = [], []
    for _ in range(3):
        with untouched(contestant.name, problem):
            results.append(contestant.run(problem))
        copies.append(copied(results[-1]))
    head = f"{contestant.name} on {problem.case.id}"
    if not all(same_bits(copies[0], x) for x in copies[1:]):
        raise Wrong(f"{head}: two calls with equal inputs gave different bits")
    if not all(map(same_bits, results, copies)):
        raise Wrong(f"{head}: a later call changed a result that was returned")


def over(impl):
    """The cases of calls over a cache."""
    return list(dict.fromkeys(fitted(case, impl.contract, INTERPRETED) for case in CACHED))


def pages_of(impl, kind):
    """The keys of a page of each cache of a kind; empty for a contiguous cache."""
    if kind not in impl.contract.caches:
        return []
    return list(impl.contract.pages or PAGES) if kind == "pages" else [""]


def cached(kind):
    return lambda impl: [(c, page) for c in over(impl) for page in pages_of(impl, kind)]


def each_once(promise):
    """Each case and each page in one row at least, if the contract has a promise."""

    def of(impl):
        cases, pages = over(impl), [page for kind in CACHES for page in pages_of(impl, kind)]
        rows = max(len(cases), len(pages)) if getattr(impl.contract, promise) else 0
        return [(cases[i % len(cases)], pages[i % len(pages)]) for i in range(rows)]

    return of


def in_16_bits(impl):
    """`each_once` of caches in fp8, whose queries have 16 bits."""
    dtypes = [x for x in impl.contract.dtypes if x != "fp32" and not (INTERPRETED and x == "bf16")]
    dtypes = dtypes or [x for x in impl.contract.dtypes if x != "fp32"]
    rows = each_once("fp8")(impl)
    return [(dataclasses.replace(c, dtype=dtypes[i % len(dtypes)]), page) for i, (c, page) in enumerate(rows)]


@contested(cached("contiguous"), "page", promise="caches (contiguous)")
def test_triton_sel_parity_caches(contestant, case, device, page):
    over_a_cache(contestant, case, device, page)


@contested(cached("pages"), "page", promise="caches (pages)")
def test_triton_sel_parity_pages(contestant, case, device, page):
    over_a_cache(contestant, case, device, page)


@contested(in_16_bits, "page", promise="caches in fp8")
def test_triton_sel_parity_fp8(contestant, case, device, page):
    """Keys and values in float8_e4m3fn, each with a scale for each KV head. The oracle reads them dequantised."""
    over_a_cache(contestant, case, device, page, fp8=True)


@contested(each_once("ragged"), "page", promise="ragged queries")
def test_triton_sel_parity_ragged_queries(contestant, case, device, page):
    """Sequences of different numbers of queries, one of none, end to end."""
    over_a_cache(contestant, case, device, page, counts=(case.S, 0, 1, case.S + 2))


def over_a_cache(contestant, case, device, page, fp8=False, counts=()):
    """Sequences of unequal length. Every place of the cache outside the sequences, spare pages included, is NaN.

    Two calls, the second with other values in the same memory: a kernel may not know a call again by its tensors'
    addresses, nor change a result that it returned.

    counts: queries of each sequence of a ragged batch.
    """
    head = f"{contestant.name} on {case.id}"
    turns = [a_cache(contestant.contract, case, device, page, fp8, counts, turn) for turn in (0, 1)]
    given, returned = turns[0][0], []
    for turn, (_, want, plain) in enumerate(turns):
        for name, x in tensors(given).items():
            x.copy_(tensors(turns[turn][0])[name])
        q, cache, chosen = given
        return_lse = contestant.lse and turn == 1
        with untouched(contestant.name, {"q": q}, cache, chosen):
            got = contestant.cached(q, cache, return_lse=return_lse, **chosen)
        try:
            cached_parity(got if return_lse else (got, None), want, case.torch_dtype, head)
        except AssertionError as error:
            results = [x.flatten(0, 1) if q.dim() == 4 else x for x in (got if return_lse else (got,))]
            result = tuple(results) if return_lse else results[0]
            nan = "; NaN is in every place of the cache that no sequence has" * bool(results[0].isnan().any())
            raise Wrong(f"{error}{nan}", result, Oracle.of(plain())) from None
        returned.append((got, copied(got)))
    if not all(same_bits(*pair) for pair in returned):
        raise Wrong(f"{head}: a later call changed a result that was returned")


def a_cache(contract, case, device, page, fp8, counts, turn):
    """`(q, cache, selection)` of a call, its right `(O, LSE)`, and a function that makes the call without a cache.

    `turn` chooses lengths and values, not shapes.
    """
    step = page or 128
    room = max(-(-case.S_kv // step), 2) * step  # a table of two pages at least
    case, needs = dataclasses.replace(case, S_kv=room), contract.needs
    lengths = [min(length, room) for length in (ROOMY if {"nonempty", "visible"} & set(needs) else LENGTHS)]
    lengths, counts = (x[turn:] + x[:turn] for x in (lengths, counts))
    cache = caches.draw(
        lengths, room, page or None, HKV=case.HKV, D=case.D, Dv=case.Dv, dtype=case.torch_dtype, device=device,
        seed=case.seed + turn,
    )  # fmt: skip
    if "finite" in needs:
        cache = dataclasses.replace(cache, k=cache.k.nan_to_num(), v=cache.v.nan_to_num())
    cache = caches.quantized(cache) if fp8 else cache
    B, S = (1, sum(counts)) if counts else (len(lengths), case.S)  # a ragged batch is drawn as one sequence
    drawn = dataclasses.replace(case, N=B * S * case.HKV, S=S)
    p = drawn.make(device, drawn.seed + turn)
    ends = list(zip(lengths, counts or (S,) * B, strict=True))
    at = torch.cat([torch.arange(count) - count + length for length, count in ends]).view(B, S)
    keys = torch.cat([torch.full((count,), length) for length, count in ends]).view(B, S)
    limit = (at + 1 if case.causal else keys).clamp(min=0).to(device)
    p = with_limit(p, contract, limit)
    p = dataclasses.replace(p, scale=case.D**-0.5 if "default scale" in needs else 0.3)
    plain = functools.partial(caches.end_to_end, p, cache, counts or (S,) * B)
    q, chosen = p.q, p.picked | {"causal": p.causal, "scale": p.scale}
    if not counts:
        return (q, cache, chosen), caches.oracle(q, cache, **chosen), plain
    q, chosen = q[0], chosen | {name: chosen[name][0] for name in caches.PER_ROW if name in chosen}
    cu_seqlens_q = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    want = caches.oracle(q, cache, cu_seqlens_q, **chosen)
    return (q, cache, chosen | {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(counts)}), want, plain
