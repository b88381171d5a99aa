"""What a diagnosis searches for, ranks and leaves alone: numbers of keys, the LSE alone, empty rows, right results.

The wrong kernels are those of `test_diagnosis.py`.
"""

import math

import pytest
import torch

from nsa.testing.contestants.ours import OURS
from nsa.testing.judge import evidence
from nsa.testing.judge.diagnosis import diagnose
from nsa.testing.judge.forward import Oracle, fp64
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import small

from .test_diagnosis import DTYPES, FAULTS, PROMPT, SMALL, cases, kernel, oracle_of, red

pytestmark = pytest.mark.usefixtures("one_thread")


def prefix(k):
    return f"reads only the first {k} keys of a row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 16, 48, 64, 100, 999])
def test_the_number_of_keys_that_are_read_is_found(k, dtype):
    """Not where the first keys have all the weight: there a larger or smaller number does as well."""
    found = [c for c in cases(dtype, lambda c: c.scores == 1, 1000) if c.L > k]
    long = Case(2, 64, 64, 1024, 3, "few", dtype, source="varlen"), Case(2, 64, 64, 1024, 1, "few", dtype)
    for c in (*found[:: max(1, len(found) // 4)], long[1]):
        oracle = oracle_of(c)
        result = kernel(oracle.problem, row=lambda keys: keys[:k])
        if red(result, oracle):
            assert prefix(k) in diagnose(result, oracle), c.id
            assert prefix(k) in diagnose(result[0], oracle), c.id
    oracle = oracle_of(long[0])
    assert diagnose(kernel(oracle.problem, row=lambda keys: keys[:k]), oracle) == [prefix(k)]


def test_a_number_of_keys_that_is_known_is_found_where_another_would_do():
    """Scores so large that the first key has all the weight among the first 20, not among all."""
    p = Case(1, 16, 16, 33, 2, "few", "fp32", causal=False).make("cpu")
    p.k[:, 0], p.k[:, 1:20], p.k[:, 20:] = 20 * p.q[:, 0], 0.0, 40 * p.q[:, :1]
    oracle = Oracle.of(p)
    out, _ = kernel(p, row=lambda keys: keys[:13])
    assert diagnose(out, oracle) == [prefix(16)]
    assert diagnose(out, oracle, [prefix(13)]) == [prefix(13)]
    assert diagnose(out, oracle, [prefix(25)]) == [prefix(16)]


def test_several_findings_that_fit_are_all_told_unless_one_of_them_is_known():
    oracle = oracle_of(Case(2, 16, 16, 17, 3, "few", "fp32", causal=False))
    result = kernel(oracle.problem, row=lambda keys: keys[:-1])
    last, block = "misses the last key of a row", "drops the last partial block of 16 keys of a row"
    assert diagnose(result, oracle) == [last, prefix(16), block]
    assert diagnose(result, oracle, [block]) == [block]
    assert diagnose(result, oracle, [prefix(8), "gives the LSE in base 2"]) == [last, prefix(16), block]


def test_exp_in_fp16_without_the_maximum():
    oracle = oracle_of(Case(4, 32, 32, 40, 6, "few", "fp16", scores=4))
    result = kernel(oracle.problem, exp=lambda scores: scores.exp().half().double())
    assert result[0].isfinite().any()
    assert diagnose(result[0], oracle) == [FAULTS["exp"][2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_running_maximum_that_starts_at_0(dtype):
    """Right where some score is positive, and where all scores are a little below 0. Without any maximum it is not."""
    text = "starts the running maximum at 0, not at -inf: the output is 0 where all scores are far below 0"
    p = Case(4, 32, 32, 40, 6, "few", dtype, scores=64).make("cpu")
    p.q[::2], p.k[::2] = -p.q[::2].abs(), p.k[::2].abs()
    oracle = Oracle.of(p)
    out, lse = kernel(p)
    gone = lse < -100
    assert gone.any()
    assert (lse > 100).any()
    result = out.masked_fill(gone[..., None], 0.0), lse.masked_fill(gone, -math.inf)
    assert diagnose(result, oracle)[0] == diagnose(result[0], oracle)[0] == text
    without = kernel(p, exp=lambda scores: scores.float().exp())
    found = diagnose(without, oracle)
    assert FAULTS["exp"][2] in found
    assert text not in found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("change", "text"), [
    (lambda lse, p: lse * math.log2(math.e), "gives the LSE in base 2"),
    (lambda lse, p: lse / math.log2(math.e), "gives the LSE times ln(2), as in base e where the contract says base 2"),
    (lambda lse, p: lse + 1, "is right except for the LSE"),
    (lambda lse, p: largest_score(p), "gives the largest score for the LSE"),
    (lambda lse, p: lse - largest_score(p).clamp(min=-1e6), "leaves the largest score out of the LSE"),
], ids=["base-2", "base-e", "plus-1", "largest-score", "no-largest"])  # fmt: skip
def test_an_lse_alone(change, text, dtype):
    for c in cases(dtype, lambda c: c.L > 1, 3):
        oracle = oracle_of(c)
        out, lse = kernel(oracle.problem)
        result = out, change(lse, oracle.problem)
        if red(result, oracle):
            assert diagnose(result, oracle)[0] == text, c.id
        assert diagnose(out, oracle) == []


def largest_score(p):
    """As the LSE of rows whose scores are a million times as far apart."""
    return kernel(p, factor=1e6)[1] / 1e6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["ranges", "blocks", "varlen"])
def test_rows_that_select_nothing(source, dtype):
    found = [c for c in SMALL if c.source == source and c.dtype == dtype and c.scores == 1]
    oracle = oracle_of(next(c for c in found if c.dist in ("overlap", "few")))
    out, lse = kernel(oracle.problem)
    empty = lse == -math.inf
    assert empty.any()
    nan = out.masked_fill(empty[..., None], math.nan)
    text = "gives NaN for rows that select nothing"
    assert diagnose(nan, oracle) == diagnose((nan, lse), oracle) == [text]
    for value, name in ((0.0, "0"), (math.nan, "nan"), (-1e30, "-1e+30"), (math.inf, "inf")):
        of_lse = f"gives an LSE of {name} instead of -inf for rows that select nothing"
        assert diagnose((out, lse.masked_fill(empty, value)), oracle) == [of_lse]
        assert diagnose((nan, lse.masked_fill(empty, value)), oracle) == [f"{text} and {of_lse}"]
    stale = out.masked_fill(empty[..., None], 0.5)
    assert diagnose((stale, lse), oracle) == ["is right except for rows that select nothing"]
    masked = (out, lse.masked_fill(empty, -9997.2))  # a masked score of -1e4 is no maximum that was not subtracted
    assert FAULTS["exp"][2] not in diagnose(masked, oracle)
    less, _ = kernel(oracle.problem, row=lambda keys: keys[:-1])
    both = f"misses the last key of a row, and {text}"
    less = less.masked_fill(empty[..., None], math.nan)
    assert both in diagnose(less, oracle)
    assert diagnose(less, oracle, [both]) == [both]


def test_rows_of_0_are_not_taken_for_lists_that_end_at_padding():
    """A kernel that gives 0 where its first tile is masked. No row has blocks both before and after padding."""
    p = Case(2, 16, 16, 32, 20, "prefill", "fp32", HKV=1, S=20, S_kv=64, block_size=16).make("cpu")
    blocks = p.block_indices.clone()
    blocks[:, ::2, :, 0] = -1
    oracle = Oracle.of(p.choosing(blocks))
    out, lse = kernel(oracle.problem)
    masked = blocks[..., 0].repeat_interleave(2, -1) < 0
    found = diagnose((out.masked_fill(masked[..., None], 0.0), lse.masked_fill(masked, -math.inf)), oracle)
    assert not any("padding" in text for text in found)


@pytest.mark.parametrize("c", [c for c in SMALL if c in small()], ids=str)
def test_a_right_result_and_garbage_have_no_finding(c):
    oracle = oracle_of(c)
    out, lse = fp64(oracle.problem)
    g = torch.Generator().manual_seed(0)
    for right in ((out.to(c.torch_dtype), lse.float()), OURS["sdpa"].run(oracle.problem, True)):
        assert diagnose(right, oracle) == diagnose(right[0], oracle) == []
    noise = torch.randn(out.shape, generator=g)
    assert diagnose(noise.to(c.torch_dtype), oracle) == []
    assert diagnose(((noise * 0.1).to(c.torch_dtype), torch.randn(lse.shape, generator=g)), oracle) == []
    assert diagnose(out[..., :-1], oracle) == []


@pytest.mark.parametrize("large", [False, True])
def test_every_row_decides(large, monkeypatch):
    """400 rows, and 32 of them rule findings out: of the rows that are right anyway, one more is put wrong."""
    monkeypatch.setattr(Case, "large", property(lambda _: large))
    monkeypatch.setattr(evidence, "CHUNK", 100 * 64 * 32)  # rows are verified in chunks of 100
    oracle = Oracle.of(PROMPT.make("cpu"))
    assert (oracle.at is not None) == large
    out, lse = kernel(oracle.problem, limit=lambda own, total: own + 2)
    text = "ends the causal window one key late"
    assert diagnose((out, lse), oracle) == [text]
    for _ in range(5):
        s = int(torch.randint(100, ()) if oracle.at is None else oracle.at[torch.randint(len(oracle.at), ())])
        wrong = out.clone()
        wrong[1, s, 3, 5] += 1.0
        assert diagnose((wrong, lse), oracle) == []


def test_an_answer_that_is_right_within_the_bound_explains_nothing():
    oracle = oracle_of(Case(1, 16, 16, 17, 2, "few", "fp32"))
    out, _ = kernel(oracle.problem)
    out[0, 0, 0, 3] += 1.5 * oracle.bound
    seen = evidence.Evidence.of(out, None, oracle)
    right = evidence.Finding("", seen.right.pick, strain=2.0)
    off = evidence.Finding("", lambda rows: evidence.Answer(seen.out[rows], seen.right.lse[rows]))
    assert not seen.fits(right)
    assert seen.fits(off)
