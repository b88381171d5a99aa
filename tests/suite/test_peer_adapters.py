"""Peers beside ours: what they are given, and what is said where they do not fit or are not there."""

import dataclasses
import sys

import pytest
import torch

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.clock.measure import verdict
from nsa.testing.contestants import choosing, peers
from nsa.testing.contestants.contract import Contestant
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.selecting import SERVED, as_request

DECODE = Case(16, 32, 32, 64, 4, "decode", "fp32", HKV=2, S_kv=128, block_size=16)


@pytest.fixture
def fla(importable, monkeypatch):
    """fla-core's selection forward, in plain torch: its order of arguments, causal from the last key back."""

    def parallel_nsa_fwd(q, k, v, block_indices, block_counts, block_size, scale):
        assert block_counts == block_indices.shape[-1]
        return selection_reference(Call.of(
            q, k, v, block_indices=block_indices, block_size=block_size, causal=True, scale=scale, return_lse=True
        ))  # fmt: skip

    importable(peers.FLA, parallel_nsa_fwd=parallel_nsa_fwd)
    monkeypatch.setattr(peers, "_tuned", {})
    return peers.peers()["fla"]


@pytest.mark.parametrize("error", [ImportError("no such module"), RuntimeError("0 active drivers")])
def test_who_cannot_be_imported_is_not_beside_us(importable, monkeypatch, error):
    def broken(module):
        raise error

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    assert peers.peers() == peers.xunhao() == peers.vllm() == peers.vllm_qsa() == {}


@pytest.mark.parametrize("scale", [None, 0.3])
def test_fla_is_given_the_same_problem(fla, device, scale):
    problem = dataclasses.replace(DECODE.make(device), scale=scale)
    assert fla.supports(problem.case) is None
    assert_parity(fla.run(problem, return_lse=True), Oracle.of(problem), "fla")
    assert isinstance(fla.run(problem), torch.Tensor)


def test_xunhao_is_given_the_same_problem(device, importable):
    """Whole prompts, a batch as sequences end to end."""

    def topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale=None):
        assert topk_idx.dtype == cu_seqlens.dtype == torch.int32
        blocks = topk_idx.transpose(0, 1)
        assert bool(((blocks[..., :-1] >= 0) | (blocks[..., 1:] < 0)).all()), "padding is not last"
        return selection_reference(Call.of(
            q, k, v, block_indices=blocks, block_size=block_size, cu_seqlens=cu_seqlens, scale=softmax_scale,
            causal=True,
        ))[0]  # fmt: skip

    importable(peers.XUNHAO, topk_sparse_attention=topk_sparse_attention)
    xunhao = peers.xunhao()["xunhao"]
    prompts = Case(2, 16, 16, 48, 80, "prefill", "fp32", HKV=1, S=40, S_kv=40, block_size=16)
    problem = dataclasses.replace(prompts.make(device), scale=0.3)
    assert xunhao.supports(prompts) is None
    assert_parity(xunhao.run(problem), Oracle.of(problem), "xunhao")
    refused = xunhao.supports(dataclasses.replace(prompts, S=20, N=40))
    assert refused == "takes causal blocks of whole prompts"


def test_a_peer_is_tuned_for_the_shape_at_hand(fla, device):
    """What fla-core chose for a prompt must not be timed at decode, nor what another process chose."""
    import triton

    def source(x, BS):
        pass

    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2)]
    kernel = triton.heuristics({"TWO": lambda args: True})(
        triton.autotune(configs=configs, key=["BS"])(triton.jit(source))
    )
    sys.modules[peers.FLA].kernel = kernel
    tuner = kernel.fn
    tuner.cache_results = True  # as fla-core asks for; the interpreter does not
    fla.run(DECODE.make(device))
    assert not tuner.cache_results
    for case, kept in ((DECODE, True), (dataclasses.replace(DECODE, N=8), False)):
        tuner.cache["BS"] = configs[0]
        fla.run(case.make(device))
        assert ("BS" in tuner.cache) == kept


def test_a_peer_of_another_version_says_so(fla, device, monkeypatch):
    monkeypatch.setattr(sys.modules[peers.FLA], "parallel_nsa_fwd", lambda q, k, v: None)
    said = verdict(peers.peers()["fla"], Oracle.of(DECODE.make(device)))
    assert said.startswith("unsupported: another version: TypeError: ")


@pytest.mark.parametrize("error", [RuntimeError("no kernel image\nfor this GPU"), OSError()])
def test_a_peer_that_breaks_is_listed_not_raised(device, error):
    def call(*_):
        raise error

    said = verdict(Contestant("broken", call), Oracle.of(DECODE.make(device)))
    assert said == f"cannot run: {type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}"


@pytest.mark.parametrize(("case", "reason"), [
    (Case(4, 64, 64, 512, 1, "decode", "bf16"), "needs a group and blocks of 16, 32, 64, …, got 4 and 64"),
    (Case(16, 64, 64, 64, 16, "many", "bf16"), "takes causal blocks of a batch, not ranges"),
], ids=["small group", "ranges"])  # fmt: skip
def test_what_fla_does_not_take_is_said(fla, case, reason):
    assert fla.supports(case) == reason


@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "decode"])
def test_vllm_chooses_for_the_same_calls(which, importable):
    """Its lists are by head, and in the order of the scores."""
    case = dataclasses.replace(SERVED[which], dtype="fp32", D=16, rows=640, n=8, batch=2, queries=(5, 1)[which])
    call = case.make("cpu")
    r, right = as_request(*call), choosing.dense(*call)

    def lists():
        return right.flatten(0, 1).transpose(0, 1).flip(-1)

    def score(q, keys, table, ends, lengths, before, most_queries, most, heads):
        assert (ends.tolist(), before.tolist(), most_queries, most, heads) == ([0, 5, 10], [635, 635], 5, 640, 4)
        assert (keys.shape, q.shape) == ((10, 128, 16), (10, 4, 16))

    def decode(q, keys, table, lengths, most, n, first, newest, heads, longest, queries):
        assert (most, n, first, newest, heads, longest, queries) == (640, 8, 1, 1, 4, 1, 1)
        return lists()

    chunks = {"minimax_m3_index_score": score, "minimax_m3_index_topk": lambda *_: lists()}
    module = importable(choosing.VLLM, **chunks, minimax_m3_index_decode=decode)
    (vllm,) = choosing.vllm()
    assert [vllm.takes(each) for each in (r, r._replace(score="relu"))] == [True, False]
    assert torch.equal(vllm.tidy(vllm.prepare(*call)(), r), right)
    del module.minimax_m3_index_decode
    assert choosing.vllm() == []
