"""Contestants over caches: pages, fp8 and ragged queries; what a wrong one is told."""

import dataclasses
import itertools

import pytest
import torch

from nsa.testing.contestants import named
from nsa.testing.contestants.contract import Contract
from nsa.testing.judge.diagnosis import diagnose
from nsa.testing.judge.forward import Oracle, fp64
from nsa.testing.matrix.case import Case
from nsa.testing.suite.parity.test_promises import a_cache, over, over_a_cache, pages_of

from .test_conduct import STEPS, right

OVER_A_CACHE = Contract(takes=("blocks",), caches=("contiguous", "pages"), fp8=True, ragged=True, lse="e")


def changed(words):
    """`right` with other arguments, `words(q, k, how)`."""
    return lambda q, k, v, **how: right(q, k, v, **how | words(q, k, how))


def without(name):
    """`right`, which takes another scale for 1."""
    return changed(lambda q, k, how: {} if how[name] is None else {name: how[name] * 0 + 1})


def one_query_early(q, k, how):
    """The second sequence begins with the last query of the first."""
    early = torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32, device=q.device)
    return {} if how["cu_seqlens_q"] is None else {"cu_seqlens_q": how["cu_seqlens_q"] - early}


def of_one_head(q, k, how):
    return {name: how[name][:1].expand(k.shape[-2]) for name in ("k_scale", "v_scale")}


FP8, RAGGED, TWO = {"fp8": True}, {"counts": (3, 0, 1, 5)}, dataclasses.replace(STEPS, N=2 * STEPS.N, HKV=2)
WRONG = {
    "no k_scale": (without("k_scale"), FP8, "ignores k_scale"),
    "no v_scale": (without("v_scale"), FP8, "ignores v_scale"),
    "no scales": (
        changed(lambda q, k, how: dict.fromkeys(("k_scale", "v_scale"))), FP8, "ignores k_scale and v_scale",
    ),
    "v_scale on keys": (changed(lambda q, k, how: {"k_scale": how["v_scale"]}), FP8, "scales keys by v_scale"),
    "first head": (changed(of_one_head), FP8, "takes the scales of the first KV head for all"),
    "one query early": (changed(one_query_early), RAGGED, None),
    "one scale": (
        changed(lambda q, k, how: {"scale": q.shape[-1] ** -0.5}), {},
        "ignores the scale asked for, and divides by sqrt(D)",
    ),
    # It reads the place behind the end of a sequence.
    "one key more": (changed(lambda q, k, how: {"cache_seqlens": how["cache_seqlens"] + 1}), {}, None),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.parametrize("page", ["", 64])
def test_over_a_cache(device, which, page):
    kernel, how, found = WRONG[which]
    one, wrong = (named.of_function("mine:kernel", f, OVER_A_CACHE, declared=True) for f in (right, kernel))
    over_a_cache(one, TWO, device, page, **how)
    said = "mine:kernel on .*bound .*; the first at .*head" + ".*; NaN is in every place" * (which == "one key more")
    with pytest.raises(named.Wrong, match=said) as error:
        over_a_cache(wrong, TWO, device, page, **how)
    assert found is None or found in diagnose(error.value.result, error.value.oracle)


@pytest.mark.parametrize("page", [1, 24, 256])
def test_pages_of_a_promised_size(device, page):
    """Of other sizes, too, than those of a contract that takes any. Every entry of a table counts."""

    def astray(which):
        def kernel(q, k, v, block_table, **how):
            table = block_table.clone()
            table[:, which] = table[:, :1]
            return right(q, k, v, block_table=table, **how)

        return kernel

    contract = dataclasses.replace(OVER_A_CACHE, pages=(page,))
    one, first_alone, last = (
        named.of_function("mine:kernel", f, contract, declared=True)
        for f in (right, astray(slice(None)), astray(slice(-1, None)))
    )
    assert pages_of(one, "pages") == [page]
    over_a_cache(one, TWO, device, page)
    for wrong in (first_alone, last):
        with pytest.raises(named.Wrong, match="bound"):
            over_a_cache(wrong, TWO, device, page)


@pytest.mark.parametrize(("D", "H"), [(16, 4), (32, 2), (128, 4)])
def test_large_scores_without_a_scale_are_named(device, D, H):
    """Where scores are numbers of e4m3, keys that were rounded to 16 bits would give another answer."""
    case = dataclasses.replace(TWO, D=D, Dv=D, H=H)
    wrong = named.of_function("mine:kernel", without("k_scale"), OVER_A_CACHE, declared=True)
    with pytest.raises(named.Wrong) as error:
        over_a_cache(wrong, case, device, 64, fp8=True)
    assert "ignores k_scale" in diagnose(error.value.result, error.value.oracle)


@pytest.mark.parametrize("counts", [(), (3, 0, 1, 5)], ids=["batch", "ragged"])
@pytest.mark.parametrize(("page", "fp8"), [("", False), (16, False), (16, True)])
def test_the_call_without_a_cache_has_the_same_answer(device, page, fp8, counts):
    """It is what a wrong result is diagnosed with."""
    cases = over(named.of_function("mine:f", right, OVER_A_CACHE))
    for case, turn in itertools.product(cases, (0, 1)):
        case = dataclasses.replace(case, dtype="fp16") if fp8 else case
        _, want, plain = a_cache(OVER_A_CACHE, case, device, page, fp8, counts, turn)
        found = fp64(plain())
        for got, right_one in zip(found, want, strict=True):
            assert torch.allclose(got.view_as(right_one), right_one, atol=2e-2 if fp8 else 1e-6)


@pytest.mark.parametrize("source", ["blocks", "ranges"])
def test_calls_over_a_cache_differ_in_all_that_a_contract_leaves_open(source):
    contract = Contract(takes=(source,), caches=("pages",), fp8=True, ragged=True)
    cases = over(named.of_function("mine:kernel", right, contract, declared=True))
    for name, values in (("HKV", {1, 2}), ("H", {2, 4, 16}), ("D", {32, 64}), ("causal", {True, False})):
        assert {getattr(case, name) for case in cases} == values
    assert any(case.Dv < case.D for case in cases)
    assert any(case.Dv > case.D for case in cases)
    assert source == "ranges" or {case.block_size for case in cases} == {16, 32, 64, 128}


def test_arguments_of_a_cache_are_none_in_calls_without_one(device):
    def kernel(q, k, v, ranges, causal, scale, cache_seqlens, block_table):
        """An adapter whose arguments have no defaults."""
        assert cache_seqlens is None is block_table
        return right(q, k, v, ranges=ranges, causal=causal, scale=scale, cu_seqlens=None)

    one = named.of_function("mine:kernel", kernel, Contract(caches=("pages",)), declared=True)
    p = Case(2, 16, 16, 24, 6, "mixed", "fp32", HKV=2, S=3, S_kv=40).make(device)
    named.prove(one, p, Oracle.of(p), "O")


@pytest.mark.parametrize(("promise", "argument"), [("fp8", "k_scale"), ("ragged", "cu_seqlens_q")])
def test_a_cache_that_the_signature_cannot_take_is_refused(promise, argument):
    def kernel(q, k, v, *, block_indices, block_size, causal, scale, cache_seqlens):
        """An adapter for decode steps in 16 bits."""

    contract = Contract(takes=("blocks",), caches=("contiguous",), **{promise: True})
    with pytest.raises(ValueError, match=f"the contract needs an argument '{argument}'"):
        named.of_function("mine:kernel", kernel, contract)
