"""What a prefill is timed beside, and how: dense attention with an oracle of its own, and nothing packed."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from nsa.testing.clock import measure
from nsa.testing.clock.cuda import buffer_sets
from nsa.testing.contestants import prefill
from nsa.testing.contestants.ours import OURS
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case

CASE = Case(2, 32, 32, 64, 128, "prefill", "fp32", HKV=2, S=64, S_kv=64, block_size=16)
DENSE = {impl.name: impl for impl in prefill.beside() if impl.other is not None}


@pytest.fixture
def problem(monkeypatch):
    monkeypatch.setattr(prefill, "_chosen", {})
    return CASE.make("cpu")


def attend(p, **how):
    """Dense attention by torch's own choice of kernel."""
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how).transpose(1, 2)


@pytest.mark.parametrize("gqa", [True, False])
def test_dense_attention_heads_grouped_or_expanded(problem, gqa):
    got = prefill._attend(problem, SDPBackend.MATH, gqa)
    torch.testing.assert_close(got, attend(problem, is_causal=True), rtol=0, atol=1e-5)
    assert ("expanded" in problem.extra) == (not gqa)


def test_wrong_dense_attention_is_listed_as_wrong(problem):
    """One that is not causal agrees with the right one at the last query alone."""
    oracle, flash = Oracle.of(problem), DENSE["dense_flash"]
    impl = dataclasses.replace(flash, call=lambda p, *_: attend(p, is_causal=True))
    assert measure.verdict(impl, oracle) is None
    for wrong in (lambda p, *_: attend(p), lambda p, *_: attend(p, is_causal=True, scale=1.0)):
        said = measure.verdict(dataclasses.replace(flash, call=wrong), oracle)
        assert said.startswith("wrong: dense attention on H2-D32-Dv32-L64-N128-prefill")


def test_a_backend_that_refuses_is_listed(problem, monkeypatch):
    monkeypatch.setattr(prefill, "_seconds", lambda *_: None)
    said = measure.verdict(DENSE["dense_cudnn"], Oracle.of(problem))
    assert said == "cannot run: RuntimeError: CUDNN_ATTENTION takes heads neither grouped nor expanded"


def test_heads_are_laid_out_as_is_fast_and_tried_once(problem, monkeypatch):
    tried = []
    grouped_and_expanded = {
        SDPBackend.MATH: (1.0, 2.0),
        SDPBackend.EFFICIENT_ATTENTION: (None, 1.0),
        SDPBackend.FLASH_ATTENTION: (1.1, 1.0),
        SDPBackend.CUDNN_ATTENTION: (1.01, 1.0),  # a tie, which takes less memory
        SDPBackend.OVERRIDEABLE: (1.0, None),
    }

    def seconds(p, backend, gqa):
        tried.append((backend, gqa))
        return grouped_and_expanded[backend][0 if gqa else 1]

    monkeypatch.setattr(prefill, "_seconds", seconds)
    for _ in range(2):
        chosen = [prefill._with_gqa(problem, backend) for backend in grouped_and_expanded]
        assert chosen == [True, False, False, True, True]
    assert len(tried) == 10
    assert not prefill._with_gqa(dataclasses.replace(CASE, H=1).make("cpu"), SDPBackend.MATH)


@pytest.mark.parametrize("change", [{"causal": False}, {"positions": True}, {"S_kv": 70}])
def test_dense_attention_is_of_whole_prompts(change):
    assert DENSE["dense_flash"].supports(CASE) is None
    assert "whole prompts" in DENSE["dense_flash"].supports(dataclasses.replace(CASE, **change))


def test_flops_of_dense_attention(problem):
    """Each query of each head sees the keys up to its own."""
    pairs = sum(s + 1 for s in range(CASE.S)) * CASE.HQ * CASE.B
    assert prefill.DENSE.flops(problem) == 2 * pairs * (CASE.D + CASE.Dv)


def test_a_large_problem_is_measured_as_it_lies(large, problem):
    """No copies, nothing packed; the dense call is what ours is compared with."""
    others = [dataclasses.replace(dense, call=lambda p, *_: attend(p, is_causal=True)) for dense in DENSE.values()]
    result = measure.measure(problem, OURS["reference"], others, iters=3, warmup=1, budget_s=0.01, least=3)
    assert not {"rows", "varlen", "key_index"} & set(problem.__dict__)
    assert buffer_sets(problem)[0] == [problem]
    control = result.best(prefill.BACKENDS)
    info = result.info([], [control]) | prefill.facts(result)
    assert info["control"] == control
    assert info["ratio_to_control"] == pytest.approx(1 / info[f"speedup_vs_{control[6:]}"])
    assert info["speedup_vs_key_major"] is None
    assert info["ns_per_token"] == pytest.approx(info["ms"] * 1e6 / CASE.S / CASE.B)
    assert info["launched"] == {}
    assert measure._packing([problem]) == {}
