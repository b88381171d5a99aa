"""Prefills and training: what they are timed beside, how, and that gradients are checked before."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from nsa.testing.clock import measure, training
from nsa.testing.clock.cuda import buffer_sets
from nsa.testing.clock.guard import Ceilings
from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import InvalidMeasurement, Timing
from nsa.testing.clock.training import Trainee
from nsa.testing.contestants import prefill
from nsa.testing.contestants.ours import OURS
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case

PROMPT = Case(2, 32, 32, 64, 128, "prefill", "fp32", HKV=2, S=64, S_kv=64, block_size=16)
DENSE = {impl.name: impl for impl in prefill.beside() if impl.other is not None}


@pytest.fixture
def prompt(monkeypatch):
    monkeypatch.setattr(prefill, "_chosen", {})
    return PROMPT.make("cpu")


def attend(p, **how):
    """Dense attention by torch's own choice of kernel."""
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how).transpose(1, 2)


@pytest.mark.parametrize("gqa", [True, False])
def test_dense_attention_heads_grouped_or_expanded(prompt, gqa):
    got = prefill._attend(prompt, SDPBackend.MATH, gqa)
    torch.testing.assert_close(got, attend(prompt, is_causal=True), rtol=0, atol=1e-5)
    assert ("expanded" in prompt.extra) == (not gqa)


def test_wrong_dense_attention_is_listed_as_wrong(prompt):
    """One that is not causal agrees with the right one at the last query alone."""
    oracle, flash = Oracle.of(prompt), DENSE["dense_flash"]
    impl = dataclasses.replace(flash, call=lambda p, *_: attend(p, is_causal=True))
    assert measure.verdict(impl, oracle) is None
    for wrong in (lambda p, *_: attend(p), lambda p, *_: attend(p, is_causal=True, scale=1.0)):
        said = measure.verdict(dataclasses.replace(flash, call=wrong), oracle)
        assert said.startswith("wrong: dense attention on H2-D32-Dv32-L64-N128-prefill")


def test_a_backend_that_refuses_is_listed(prompt, monkeypatch):
    monkeypatch.setattr(prefill, "_seconds", lambda *_: None)
    said = measure.verdict(DENSE["dense_cudnn"], Oracle.of(prompt))
    assert said == "cannot run: RuntimeError: CUDNN_ATTENTION takes heads neither grouped nor expanded"


def test_heads_are_laid_out_as_is_fast_and_tried_once(prompt, monkeypatch):
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
        chosen = [prefill._with_gqa(prompt, backend) for backend in grouped_and_expanded]
        assert chosen == [True, False, False, True, True]
    assert len(tried) == 10
    assert not prefill._with_gqa(dataclasses.replace(PROMPT, H=1).make("cpu"), SDPBackend.MATH)


@pytest.mark.parametrize("change", [{"causal": False}, {"positions": True}, {"S_kv": 70}])
def test_dense_attention_is_of_whole_prompts(change):
    assert DENSE["dense_flash"].supports(PROMPT) is None
    assert "whole prompts" in DENSE["dense_flash"].supports(dataclasses.replace(PROMPT, **change))


def test_flops_of_dense_attention(prompt):
    """Each query of each head sees the keys up to its own."""
    pairs = sum(s + 1 for s in range(PROMPT.S)) * PROMPT.HQ * PROMPT.B
    assert prefill.DENSE.flops(prompt) == 2 * pairs * (PROMPT.D + PROMPT.Dv)


def test_a_large_problem_is_measured_as_it_lies(large, prompt):
    """No copies, nothing packed; the dense call is what ours is compared with."""
    others = [dataclasses.replace(dense, call=lambda p, *_: attend(p, is_causal=True)) for dense in DENSE.values()]
    result = measure.measure(prompt, OURS["reference"], others, iters=3, warmup=1, budget_s=0.01, least=3)
    assert not {"rows", "varlen", "key_index"} & set(prompt.__dict__)
    assert buffer_sets(prompt)[0] == [prompt]
    control = result.best(prefill.BACKENDS)
    info = result.info([], [control]) | prefill.facts(result)
    assert info["control"] == control
    assert info["ratio_to_control"] == pytest.approx(1 / info[f"speedup_vs_{control[6:]}"])
    assert info["speedup_vs_key_major"] is None
    assert info["ns_per_token"] == pytest.approx(info["ms"] * 1e6 / PROMPT.S / PROMPT.B)
    assert info["launched"] == {}
    assert measure._packing([prompt]) == {}


# --- training: gradients are checked before they are timed, also where not all of them are computed -------------------

CASE = Case(2, 16, 16, 32, 128, "prefill", "fp32", HKV=2, S=64, S_kv=64, block_size=8)
ALWAYS = {"supports": lambda case: None}


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """Nobody has looked at anybody's gradients yet."""
    monkeypatch.setattr(training, "_verdicts", {})


@pytest.fixture(params=["whole", "large"])
def problem(request):
    """Also as one that counts as large, of which some queries and blocks are looked at."""
    if request.param == "large":
        request.getfixturevalue("large")
    return CASE.make("cpu")


def dense(p, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_everybody_is_timed(problem):
    others = [Trainee(name, dense, **ALWAYS, selects=False) for name in ("dense_cudnn", "dense_flash")]
    result = training.train(problem, [training.ours("sdpa"), *others], iters=3, warmup=1, budget_s=0.01)
    assert set(result.times) == set(training.WHAT)
    assert not result.left_out
    for what in training.WHAT:
        control = gate_figures(result.times[what], prefill.BACKENDS)["control"]
        facts = training.facts(result, what)
        fastest = min(facts["speedup_vs_cudnn"], facts["speedup_vs_flash"])
        assert fastest == pytest.approx(facts["medians"][control] / facts["medians"]["ours"])
        assert facts["speedup_vs_fla"] is None
        assert facts["ns_per_query"] == pytest.approx(facts["ms"] * 1e6 / CASE.S / CASE.B)


def test_a_wrong_gradient_is_noticed(problem):
    """In the last query or the last block, and in the first block, which has too many readers for the same check."""
    do = training.draw_do(problem)
    right = training.gradients(training.ours("sdpa"), problem, do)
    training.check_gradients(problem, do, list(right), "right")
    for which, name in enumerate(("dq", "dk", "dv")):
        wrong = [((0, -1, 0), damage, rf"wrong on H2-D16.*: {name}") for damage in (0.1, float("nan"))]
        wrong += [((0, 1, 1), right[which][0, 1, 1] * 0.01, rf"{name} of the first block, KV head 1")] * (which > 0)
        for at, damage, said in wrong:
            got = [x.clone() for x in right]
            got[which][at] += damage
            with pytest.raises(AssertionError, match=said):
                training.check_gradients(problem, do, got, "wrong")


def test_who_is_wrong_or_cannot_is_left_out(problem):
    def attend(p, q, k, v):
        return training.ours("sdpa").attend(p, q, k * 1.01, v)

    def refuse(p, q, k, v):
        raise NotImplementedError("not today")

    def broken(p, q, k, v):
        raise RuntimeError("no kernel\nmore")

    others = [
        Trainee("wrong", attend, **ALWAYS),
        Trainee("refuses", refuse, **ALWAYS),
        Trainee("broken", broken, **ALWAYS),
        Trainee("never", attend, supports=lambda case: "takes nothing"),
    ]
    result = training.train(problem, [training.ours("sdpa"), *others], iters=1, warmup=0, budget_s=0.0)
    assert result.left_out.pop("wrong").startswith("wrong: wrong on H2-D16")
    assert result.left_out == {
        "refuses": "unsupported: not today",
        "broken": "cannot run: RuntimeError: no kernel",
        "never": "unsupported: takes nothing",
    }
    assert set(result.times["step"]) == {"ours"}


def test_ours_wrong_is_an_error(problem):
    wrong = dataclasses.replace(training.ours("sdpa"), attend=lambda p, q, k, v: dense(p, q, k, v))
    with pytest.raises(AssertionError, match="dq"):
        training.train(problem, [wrong], iters=1, warmup=0, budget_s=0.0)


def timing(seconds):
    return Timing([seconds], "eager", False, 1, 1)


@pytest.mark.parametrize(("name", "selects"), [("ours", True), ("dense_flash", False)])
def test_an_impossible_time_is_refused(problem, name, selects):
    """Twice the products of a forward pass, and a step three times; of dense attention its own."""
    one = Trainee(name, lambda *_: None, lambda case: None, selects)
    flops = problem.flops if selects else prefill.DENSE.flops(problem)
    limits = Ceilings(copy=1e30, read=1e30, matmul=1e12)
    for what, times in (("backward", 2), ("step", 3)):
        least = times * flops / 1e12
        training._possible(problem, [one], what, {name: timing(least)}, limits)
        with pytest.raises(InvalidMeasurement, match=f"invalid measurement: {name}, {what} took"):
            training._possible(problem, [one], what, {name: timing(0.9 * least)}, limits)


def test_control_is_the_faster_dense_attention():
    times = {"ours": timing(1.0), "dense_cudnn": timing(3.0), "dense_flash": timing(2.0)}
    figures = gate_figures(times, prefill.BACKENDS)
    assert (figures["control"], figures["ratio_to_control"]) == ("dense_flash", 0.5)
    assert figures["control_samples"] == {"dense_cudnn": [3.0], "dense_flash": [2.0]}
    assert gate_figures({"ours": timing(1.0)}, prefill.BACKENDS)["control"] is None


def test_exact_gradients_of_a_part(problem):
    """Of queries that nobody else joins: of keys that only they read, they are the gradients of the whole."""
    do = training.draw_do(problem)
    whole = training._exact(problem, do, torch.arange(CASE.S), slice(None))
    block = CASE.S // CASE.block_size - 2
    readers = (problem.block_indices[:, :, 1] == block).any(-1).any(0).nonzero()[:, 0]
    assert 0 < readers.numel() < CASE.S
    part = training._exact(problem, do, readers, slice(1, 2))
    keys = slice(block * CASE.block_size, (block + 1) * CASE.block_size)
    for which in (1, 2):
        torch.testing.assert_close(part[which][:, keys, 0], whole[which][:, keys, 1], rtol=0, atol=1e-12)
