"""The judges of the suite: an implementation that is wrong in one way only is red, one within its bound is green."""

import contextlib
import dataclasses
import math

import pytest
import torch

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.contestants.named import load, prove
from nsa.testing.judge import forward, gradients
from nsa.testing.judge.forward import Oracle, assert_parity, fp64
from nsa.testing.judge.gradients import NAMES, GradientOracle, assert_gradients
from nsa.testing.matrix.case import Case

from .test_conduct import spoiling

SPANS = Case(2, 16, 16, 24, 6, "overlap", "fp32", HKV=2, S=3, S_kv=40)  # rows 1 and 4 list nothing
BLOCKS = dataclasses.replace(SPANS, source="blocks", L=64, block_size=16)
PROMPT = Case(2, 16, 16, 64, 400, "prefill", "fp32", HKV=2, S=100, S_kv=130, block_size=16)
FULL, EMPTY = (0, 0, 0), (0, 0, 2)  # query heads of rows 0 and 1
EPS = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}


def right(oracle):
    """The right `(O, LSE)` of all queries, in the dtypes of a kernel."""
    out, lse = fp64(oracle.problem)
    return out.to(oracle.problem.q.dtype), lse.float()


def moved(x, at, by, exact):
    """`x` with one element `by` off what is exact."""
    x = x.clone()
    x[at] = (exact[at] + by).to(x.dtype)
    return x


def with_value(x, at, value):
    x = x.clone()
    x[at] = value
    return x


def bound_of(error, peak, dtype):
    """As docs/proving.md has it."""
    return 2 * error + 4 * EPS[dtype] * float(peak)


def largest(x):
    return float(x.abs().max())


# What an output is made of it, and what the judge says.
WRONG_OUTPUTS = {
    "shape": (lambda o, lse: (o[..., :-1], lse), "expected shape"),
    "dtype": (lambda o, lse: (o.double(), lse), "expected torch.float32, got torch.float64"),
    "NaN": (lambda o, lse: (with_value(o, (*FULL, 0), math.nan), lse), "error inf > bound .* 1 NaN"),
    "NaN-in-an-empty-row": (lambda o, lse: (with_value(o, (*EMPTY, 0), math.nan), lse), "error inf > bound .* 1 NaN"),
    "empty-row": (lambda o, lse: (with_value(o, EMPTY, 1e-30), lse), "rows that select no key must be exactly 0"),
    "LSE-shape": (lambda o, lse: (o, lse[..., None]), "expected LSE shape"),
    "LSE-dtype": (lambda o, lse: (o, lse.half()), "expected LSE in float32, got torch.float16"),
    "LSE-NaN": (lambda o, lse: (o, with_value(lse, FULL, math.nan)), "LSE error inf"),
    "LSE-minus-infinite": (lambda o, lse: (o, with_value(lse, FULL, -math.inf)), "LSE error inf"),
    "LSE-plus-infinite": (lambda o, lse: (o, with_value(lse, FULL, math.inf)), "LSE error inf"),
    "LSE-of-an-empty-row": (lambda o, lse: (o, with_value(lse, EMPTY, -1e30)), "LSE error inf"),
    "LSE-of-an-empty-row-plus-infinite": (lambda o, lse: (o, with_value(lse, EMPTY, math.inf)), "LSE error inf"),
}


@pytest.mark.parametrize("case", [SPANS, BLOCKS], ids=lambda c: c.source)
@pytest.mark.parametrize("wrong", WRONG_OUTPUTS)
def test_a_wrong_output_is_red(wrong, case):
    oracle = Oracle.of(case.make("cpu"))
    change, message = WRONG_OUTPUTS[wrong]
    assert_parity(right(oracle), oracle)
    with pytest.raises(AssertionError, match=message):
        assert_parity(change(*right(oracle)), oracle)


@pytest.mark.parametrize("dtype", EPS)
def test_one_element_outside_the_bound_is_red(dtype):
    """The bound is worked out anew here: a judge that allowed ten times as much would be green."""
    p = dataclasses.replace(SPANS, dtype=dtype).make("cpu")
    oracle = Oracle.of(p)
    error = largest(forward.sdpa_same_keys(p).double() - oracle.out)
    if dtype == "fp32":
        error = max(error, 2 * forward.one_by_one(p))
    bound = bound_of(error, largest(oracle.out), dtype)
    out, _ = right(oracle)
    assert_parity(moved(out, (*FULL, 3), 0.5 * bound, oracle.out), oracle)
    said = r"error .* > bound .*; the first at batch 0, query 0, head 0, dimension 3: .* 1 of 192 off, 0 NaN"
    with pytest.raises(AssertionError, match=said):
        assert_parity(moved(out, (*FULL, 3), 1.5 * bound, oracle.out), oracle)


# Of a call over a cache: what is made of `(O, LSE)`, and what the judge says.
WRONG_OVER_A_CACHE = {
    "shape": (lambda o, lse: (o[:, :1].expand_as(o)[..., :1], lse), "expected O of shape"),
    "LSE-shape": (lambda o, lse: (o, lse[:1, :1]), "expected an LSE of shape"),
    "dtype": (lambda o, lse: (o.double(), lse), "expected torch.float32, got torch.float64"),
    "NaN": (lambda o, lse: (with_value(o, (*FULL, 0), math.nan), lse), "error inf > bound"),
    "empty-row": (lambda o, lse: (with_value(o, EMPTY, 1e-30), lse), "rows that select nothing must be exactly 0"),
    "LSE-dtype": (lambda o, lse: (o, lse.double()), "expected an LSE in float32"),
    "LSE-of-an-empty-row": (lambda o, lse: (o, with_value(lse, EMPTY, -1e30)), "LSE error exceeds its bound"),
}


@pytest.mark.parametrize("wrong", WRONG_OVER_A_CACHE)
def test_a_wrong_result_over_a_cache_is_red(wrong):
    p = SPANS.make("cpu")
    want, (o, lse) = fp64(p), right(Oracle.of(p))
    forward.cached_parity((o, lse), want, torch.float32, "x")
    forward.cached_parity((o, None), want, torch.float32, "x")
    change, message = WRONG_OVER_A_CACHE[wrong]
    with pytest.raises(AssertionError, match=f"^x: {message}"):
        forward.cached_parity(change(o, lse), want, torch.float32, "x")


@pytest.mark.parametrize("dtype", EPS)
def test_one_element_outside_the_bound_over_a_cache_is_red(dtype):
    p = dataclasses.replace(SPANS, dtype=dtype).make("cpu")
    want, (o, lse) = fp64(p), right(Oracle.of(p))
    bound = max(6 * EPS[dtype], 1e-5) * max(1.0, largest(want[0]))
    of_lse = 2e-5 + 1e-5 * abs(float(want[1][FULL]))
    for by in (0.5, 1.5):
        for wrong in ((moved(o, (*FULL, 3), by * bound, want[0]), lse), (o, moved(lse, FULL, by * of_lse, want[1]))):
            with contextlib.nullcontext() if by < 1 else pytest.raises(AssertionError, match="bound"):
                forward.cached_parity(wrong, want, p.q.dtype, "x")


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_wrong_element_is_named_and_not_the_worst(packed):
    """Packed sequences have no batch: queries are counted over all of them."""
    oracle = Oracle.of(dataclasses.replace(SPANS, seqlens=(1, 2) if packed else ()).make("cpu"))
    out, _ = right(oracle)
    first, worst = ((2, 1, 4), (2, 3, 0)) if packed else ((0, 2, 1, 4), (0, 2, 3, 0))
    out = moved(moved(out, first, 2 * oracle.bound, oracle.out), worst, 100.0, oracle.out)
    where = ("" if packed else "batch 0, ") + "query 2, head 1, dimension 4"
    with pytest.raises(AssertionError, match=rf"error 100 > bound .*; the first at {where}: .* 2 of 192 off, 0 NaN"):
        assert_parity(out, oracle)


def test_weights_by_an_lse_in_fp32_are_right():
    """``exp(score - LSE)``. One key has nearly all the weight, so that SDPA is nearly exact, and the LSE is large."""
    p = Case(2, 32, 32, 33, 2, "few", "fp32", source="ranges", S_kv=257, scores=64).make("cpu")
    Q, K, V, lengths = p.rows
    unused = torch.arange(K.shape[1]) >= lengths[:, None, None]
    scores = (Q @ K.mT * p.softmax_scale).masked_fill(unused, -math.inf)
    P = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    assert_parity(p.unpack(P @ V), Oracle.of(p))


def test_a_mean_error_outside_its_bound_is_red():
    """A thousandth, in rows of 16 keys and more: every element is within the bound of one element."""
    p = dataclasses.replace(SPANS, dtype="fp16", dist="many", L=16).make("cpu")
    oracle = Oracle.of(p)
    assert_parity((oracle.out + 0.5e-3).to(p.q.dtype), oracle)
    with pytest.raises(AssertionError, match="mean absolute error"):
        assert_parity((oracle.out + 1.5e-3).to(p.q.dtype), oracle)
    short = Oracle.of(dataclasses.replace(p.case, L=15).make("cpu"))
    assert_parity((short.out + 1.5e-3).to(p.q.dtype), short)


@pytest.mark.parametrize("large", [False, True])
def test_an_lse_outside_its_bound_is_red(large, monkeypatch):
    monkeypatch.setattr(Case, "large", property(lambda _: large))
    p = PROMPT.make("cpu")
    oracle = Oracle.of(p)
    norms = p.case.D**-0.5 * largest(p.q.norm(dim=-1)) * largest(p.k.norm(dim=-1))
    bound = 2.0**-23 * (p.case.D * norms + 16 * (norms + 16))
    out, lse = right(oracle)
    exact = fp64(p)[1]
    for at in (FULL, (1, 99, 3)):
        assert_parity((out, moved(lse, at, 0.5 * bound, exact)), oracle)
        batch, query, head = at
        said = f"LSE error .* > bound .* batch {batch}, query {query}, head {head}: got"
        with pytest.raises(AssertionError, match=said):
            assert_parity((out, moved(lse, at, 1.5 * bound, exact)), oracle)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("positions", [False, True])
def test_of_a_large_problem_some_queries_are_compared_and_none_may_be_nan(positions):
    p = dataclasses.replace(PROMPT, positions=positions).make("cpu")
    oracle = Oracle.of(p)
    out, _ = right(oracle)
    exact = fp64(p)[0]
    seen, unseen = int(oracle.at[7]), next(s for s in range(100) if s not in oracle.at)
    assert_parity(moved(out, (1, unseen, 3, 5), 1.0, exact), oracle)
    with pytest.raises(AssertionError, match=f"error .* > bound .* batch 1, query {seen}, head 3, dimension 5: got"):
        assert_parity(moved(out, (1, seen, 3, 5), 1.5 * oracle.bound, exact), oracle)
    for query in (seen, unseen):
        with pytest.raises(AssertionError, match="1 NaN"):
            assert_parity(with_value(out, (1, query, 3, 5), math.nan), oracle)


@pytest.mark.parametrize("dtype", EPS)
def test_an_oracle_that_sdpa_contradicts_is_refused(dtype, monkeypatch):
    """By more than 16 eps of the largest output, or of 1; in fp32 1e-4 of it."""
    p = dataclasses.replace(SPANS, dtype=dtype).make("cpu")
    exact = fp64(p)[0]
    rounding = max(16 * EPS[dtype], 1e-4 if dtype == "fp32" else 0.0) * max(1.0, largest(exact))

    def off(by):
        monkeypatch.setattr(forward, "sdpa_same_keys", lambda p: moved(exact.to(p.q.dtype), (*FULL, 0), by, exact))
        return Oracle.of(p)

    off(0.5 * rounding)
    for by in (1.5 * rounding, -1.5 * rounding, math.nan):
        with pytest.raises(AssertionError, match="differ by .*one of the two is wrong"):
            off(by)


def with_large_scores():
    """Every second key is the key before it, so that no key has all the weight."""
    p = dataclasses.replace(SPANS, scores=1024.0).make("cpu")
    return p.with_tensors(p.q, p.k[:, ::2].repeat_interleave(2, 1), p.v)


def test_the_sum_over_values_rounds_too():
    """With scores of 0 the only other rounding is that of the LSE, the logarithm of the number of keys."""
    p = SPANS.make("cpu")
    p = p.with_tensors(torch.zeros_like(p.q), p.k, p.v)
    _, _, V, lengths = p.rows
    count = lengths.clamp(min=1)[:, None]
    V = V.masked_fill((torch.arange(V.shape[1]) >= lengths[:, None])[..., None], 0.0) / count[..., None]
    variance = 2.0**-48 / 9 * count * (V.sum(1).square() + V.square().sum(1) / 2)
    variance += (2.0**-23 * count.log() * V.sum(1)).square() / 12
    assert forward.one_by_one(p) == pytest.approx(float(variance.max()) ** 0.5, rel=1e-4)


def test_an_oracle_that_sdpa_contradicts_is_refused_with_large_scores(monkeypatch):
    """With large scores 8 standard deviations of sums in fp32 are allowed."""
    p = with_large_scores()
    exact, rounding = fp64(p)[0], 8 * forward.one_by_one(p)
    assert rounding > 2e-4 * max(1.0, largest(exact))
    for by in (0.5 * rounding, 1.5 * rounding):
        sdpa = moved(exact.to(p.q.dtype), (*FULL, 0), by, exact)
        monkeypatch.setattr(forward, "sdpa_same_keys", lambda p, sdpa=sdpa: sdpa)
        with contextlib.nullcontext() if by < rounding else pytest.raises(AssertionError, match="is wrong"):
            Oracle.of(p)


@pytest.mark.parametrize("judge", [forward, gradients], ids=["output", "gradients"])
def test_an_oracle_that_is_wrong_is_refused(judge, monkeypatch):
    """Its scale is 2% off, as that of a kernel may be."""

    def wrong(call):
        return selection_reference(call._replace(scale=1.02 * call.q.shape[-1] ** -0.5))

    p = SPANS.make("cpu")
    monkeypatch.setattr(judge, "selection_reference", wrong)
    with pytest.raises(AssertionError, match="differ by .*one of the two is wrong"):
        (Oracle if judge is forward else GradientOracle).of(p)


@pytest.fixture(scope="module", params=EPS)
def judged(request):
    """An oracle of gradients, the right ones in the problem's dtype, and the bound of each, worked out anew."""
    p = dataclasses.replace(SPANS, dtype=request.param).make("cpu")
    oracle = GradientOracle.of(p)
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    sdpa = torch.autograd.grad(gradients.dense_sdpa(p, *leaves), leaves, oracle.do)
    errors = [largest(x.double() - want) for x, want in zip(sdpa, oracle.exact, strict=True)]
    if request.param == "fp32":
        one = gradients.one_by_one(p, oracle.do, oracle.o, oracle.lse, oracle.exact)
        errors = [max(error, 2 * x) for error, x in zip(errors, one, strict=True)]
    pairs = zip(errors, oracle.exact, strict=True)
    bounds = [bound_of(error, largest(want), request.param) for error, want in pairs]
    return oracle, [x.to(p.q.dtype) for x in oracle.exact], bounds


def replaced(right, i, x):
    return (*right[:i], x, *right[i + 1 :])


@pytest.mark.parametrize("i", range(3), ids=NAMES)
def test_a_gradient_outside_its_bound_is_red(judged, i):
    oracle, right, bounds = judged
    at = (0, 2, 2, 3) if i == 0 else (0, 38, 1, 3)
    assert_gradients(right, oracle, "right")
    assert_gradients(replaced(right, i, moved(right[i], at, 0.5 * bounds[i], oracle.exact[i])), oracle, "near")
    with pytest.raises(AssertionError, match=f"{NAMES[i]}: error .* > bound"):
        assert_gradients(replaced(right, i, moved(right[i], at, 1.5 * bounds[i], oracle.exact[i])), oracle, "far")


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: x[..., :-1], "expected shape"),
    (lambda x: x.double(), "expected torch.*, got torch.float64"),
    (lambda x: with_value(x, (0, 2, 1, 3), math.nan), "error inf > bound .* batch 0, PLACE: got nan, .* 1 NaN"),
    (lambda x: with_value(x, (0, 2, 1, 3), -math.inf), "error inf > bound .* batch 0, PLACE: got -inf, .* 0 NaN"),
], ids=["shape", "dtype", "NaN", "infinite"])  # fmt: skip
@pytest.mark.parametrize("i", range(3), ids=NAMES)
def test_a_wrong_gradient_is_red(judged, i, change, message):
    oracle, right, _ = judged
    message = message.replace("PLACE", f"{'key 2, KV head 1' if i else 'query 2, head 1'}, dimension 3")
    with pytest.raises(AssertionError, match=f"{NAMES[i]}: {message}"):
        assert_gradients(replaced(right, i, change(right[i])), oracle, "wrong")


def of_heads(p, do, which):
    """Gradients in which one query head of each KV head counts."""
    leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
    o, _ = selection_reference(Call.of(*leaves, **p.selection, return_lse=True))
    kept = torch.zeros_like(do, dtype=torch.float64)
    kept[..., which :: p.case.H, :] = do[..., which :: p.case.H, :].double()
    return torch.autograd.grad(o, leaves, kept)


def without_delta(p, do, lse):
    """Gradients of a softmax whose sum is a constant."""
    leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(p.case.H, 1) for x in (k, v))
    times = gradients.multiplicity(p).repeat_interleave(p.case.H, 2).transpose(1, 2)
    scores = q @ k.mT * p.q.shape[-1] ** -0.5 - lse.double().transpose(1, 2)[..., None]
    o = (scores.masked_fill(times == 0, -math.inf).exp() * times) @ v
    return torch.autograd.grad(o, leaves, do.double().transpose(1, 2))


@pytest.mark.parametrize(("give", "text", "names"), [
    (lambda o: [x * o.problem.q.shape[-1] ** 0.5 for x in o.exact], "lacks the factor of the scale", "dq dk"),
    (lambda o: without_delta(o.problem, o.do, o.lse), "is of dP, without delta", "dq dk"),
    (lambda o: [x / o.problem.case.H for x in o.exact], "is the mean over the query heads .*, not the sum", "dk dv"),
    (lambda o: of_heads(o.problem, o.do, 0), "is of the first query head of each KV head alone", "dk dv"),
    (lambda o: of_heads(o.problem, o.do, o.problem.case.H - 1), "is of the last query head of .* alone", "dk dv"),
])  # fmt: skip
def test_a_wrong_gradient_is_named(judged, give, text, names):
    oracle, right, bounds = judged
    given = give(oracle)
    for name in names.split():
        i = NAMES.index(name)
        with pytest.raises(AssertionError, match=f"wrong on .*: {name} {text}: error .* > bound"):
            assert_gradients(replaced(right, i, given[i].to(right[i].dtype)), oracle, "wrong")
        garbage = torch.randn(right[i].shape, generator=torch.Generator().manual_seed(0)).to(right[i].dtype)
        assert gradients.mistake(name, garbage, oracle, bounds[i]) == ""


def test_gradients_of_keys_that_rows_list_twice_are_named():
    """A scatter without addition: in dK and dV, each row adds to a key once."""
    oracle = GradientOracle.of(SPANS.make("cpu"))
    p, right = oracle.problem, [x.float() for x in oracle.exact]
    times = gradients.multiplicity(p).repeat_interleave(p.case.H, 2).double()  # [B, S, HQ, keys]
    assert bool((times > 1).any())
    k, v = (x.double().repeat_interleave(p.case.H, 2) for x in (p.k, p.v))
    scores = torch.einsum("bshd,bkhd->bshk", p.q.double(), k) * p.case.D**-0.5
    weights = (scores - oracle.lse.double()[..., None]).exp().masked_fill(times == 0, 0.0)
    dp = torch.einsum("bshd,bkhd->bshk", oracle.do.double(), v)
    ds = weights * (dp - (oracle.do * oracle.o).double().sum(-1, keepdim=True)) * p.case.D**-0.5
    for i, rows, x in ((1, ds, p.q), (2, weights, oracle.do)):
        once = torch.einsum("bshk,bshd->bkhd", rows, x.double()).unflatten(2, (-1, p.case.H)).sum(3).float()
        with pytest.raises(AssertionError, match=f"{NAMES[i]} counts a key that a row lists twice only once: error"):
            assert_gradients(replaced(right, i, once), oracle, "wrong")


@pytest.mark.parametrize("i", range(3), ids=NAMES)
def test_a_gradient_that_nothing_asks_for_must_be_zero(judged, i):
    """A query whose row lists nothing, a key that no row lists: however little it is, it is not rounding."""
    oracle, right, _ = judged
    at = tuple((oracle.exact[i] == 0).all(-1).nonzero()[0].tolist())
    little = torch.finfo(right[i].dtype).tiny
    with pytest.raises(AssertionError, match=f"{NAMES[i]}: expected exactly 0 for empty rows and for keys"):
        assert_gradients(replaced(right, i, with_value(right[i], at, little)), oracle, "wrong")


@pytest.mark.parametrize("large_scores", [False, True])
@pytest.mark.parametrize("i", range(3), ids=NAMES)
def test_gradients_that_sdpa_contradicts_are_refused(i, large_scores, monkeypatch):
    p = with_large_scores() if large_scores else SPANS.make("cpu")
    oracle = GradientOracle.of(p)
    exact, one = oracle.exact, gradients.one_by_one(p, oracle.do, oracle.o, oracle.lse, oracle.exact)[i]
    rounding = max(1e-4 * max(1.0, largest(exact[i])), 8 * one)
    assert (rounding == 8 * one) == large_scores
    dense = gradients.dense_sdpa

    def off(by):
        """Adds `by` to one element of one gradient, whatever the gradient of the output is."""

        def wrong(p, *leaves):
            leaves[i].register_hook(lambda g: with_value(g, (0, 2, 1, 3), exact[i][0, 2, 1, 3] + by))
            return dense(p, *leaves)

        monkeypatch.setattr(gradients, "dense_sdpa", wrong)
        return GradientOracle.of(p)

    off(0.5 * rounding)
    with pytest.raises(AssertionError, match=f"{NAMES[i]} of the fp64 oracle and of dense SDPA differ"):
        off(1.5 * rounding)


def answer(q, k, v, *, return_lse, **args):
    out, lse = selection_reference(Call.of(q, k, v, **args, return_lse=True))
    return (out, lse) if return_lse else out


def returning(change):
    return lambda *args, **more: change(answer(*args, **more))


WRONG_KERNELS = {
    "not-a-tensor": (returning(lambda r: r.tolist()), "O", "expected a tensor O, got a list"),
    "pair-not-asked-for": (returning(lambda r: (r, r)), "O", "expected a tensor O, got a tuple of 2"),
    "nothing": (returning(lambda r: None), "O", "expected a tensor O, got a NoneType"),
    "shape": (returning(lambda r: r.mT), "O", r"expected O of shape \(1, 3, 4, 16\), got \(1, 3, 16, 4\)"),
    "dtype": (returning(lambda r: r.half()), "O", "expected O in torch.float32, as q, got torch.float16"),
    "value": (returning(lambda r: r * 1.01), "O", "error .* > bound"),
    "no-pair": (returning(lambda r: r[0]), "LSE", r"expected \(O, LSE\) with return_lse=True, got a Tensor"),
    "three": (returning(lambda r: (*r, r[1])), "LSE", r"expected \(O, LSE\) with return_lse=True, got a tuple of 3"),
    "list": (returning(list), "LSE", r"expected \(O, LSE\) with return_lse=True, got a list"),
    "LSE-not-a-tensor": (returning(lambda r: (r[0], 0.0)), "LSE", "expected a tensor LSE, got a float"),
    "LSE-shape": (returning(lambda r: (r[0], r[1][..., None])), "LSE",
                  r"expected LSE of shape \(1, 3, 4\), got \(1, 3, 4, 1\)"),
    "LSE-dtype": (returning(lambda r: (r[0], r[1].double())), "LSE", "expected an LSE in float32, got torch.float64"),
    "LSE-value": (returning(lambda r: (r[0], r[1] / math.log(2))), "LSE", "LSE error .* > bound"),
} | {
    f"writes-{name}": (spoiling(name), "O", f"wrote to its input {name}$")
    for name in ("q", "k", "v", "ranges", "block_indices")
}  # fmt: skip


@pytest.fixture
def third_party(importable):
    """Loads a function as `--nsa-impl` does, in one of its short forms."""

    def make(kernel, form=""):
        importable("a_third_party", kernel=kernel)
        return load(f"a_third_party:kernel{form}")

    return make


@pytest.mark.parametrize("wrong", WRONG_KERNELS)
def test_a_wrong_third_party_is_red(third_party, wrong):
    kernel, wanted, message = WRONG_KERNELS[wrong]
    p, form = (BLOCKS, "@blocks") if wrong == "writes-block_indices" else (SPANS, "")
    p = p.make("cpu")
    oracle = Oracle.of(p)
    for right in ("O", "LSE"):
        prove(third_party(answer, form), p, oracle, right)
    with pytest.raises(AssertionError, match=f"^a_third_party:kernel.*{message}"):
        prove(third_party(kernel, form), p, oracle, wanted)


def test_packed_rows_of_another_shape_are_red(third_party):
    p = Case(2, 16, 16, 9, 2, "few", "fp32").make("cpu")
    with pytest.raises(AssertionError, match=r"expected O of shape \(2, 2, 16\), got \(64,\)"):
        prove(third_party(lambda Q, K, V: Q.flatten(), "@dense"), p, Oracle.of(p), "O")
