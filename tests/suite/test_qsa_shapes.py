"""The shapes of QSA in the perf lane: one list for all KV heads, and what vLLM's kernel is given."""

import pytest
import torch

from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.m3 import M3
from nsa.testing.contestants.peers import call_qsa
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import m3, qsa
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.m3 import Shape

CHUNK = Case(2, 16, 16, 20, 12, "prefill", "fp16", HKV=2, S=6, S_kv=64, block_size=4, n=5, shared=0.9)
STEPS = Case(2, 16, 16, 20, 6, "decode", "fp16", HKV=2, S_kv=128, block_size=4, n=5)


def attend(
    q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out, k_scale=1.0, v_scale=1.0,
    *, output_gate,
):  # fmt: skip
    """vLLM's function in plain torch: the first keys of a row, as many as its last column says."""
    page, G = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for t, row in enumerate(logical_indices):
        keys = row[: row[-1]].long()
        assert (keys >= 0).all()
        pages = block_table[token_to_req[t]].long()[keys // page]
        k, v = (
            x.double()[pages, keys % page].repeat_interleave(G, 1) * scale
            for x, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        p = torch.einsum("hd,lhd->hl", q[t].double(), k).mul(q.shape[-1] ** -0.5).softmax(-1)
        out[t] = torch.einsum("hl,lhd->hd", p, v).to(q.dtype) * output_gate.view_as(q)[t].sigmoid()


@pytest.mark.parametrize("shape", [Shape(CHUNK), Shape(STEPS), Shape(CHUNK, fp8=True)], ids=["chunk", "steps", "fp8"])
def test_both_kernels_read_what_the_oracle_reads(shape, device):
    p = qsa.make(shape, device)
    assert p.block_indices.stride()[-2] == 0
    assert p.derived(m3.combined).pages.shape[2] == m3.SMALL_PAGE
    oracle = Oracle.of(p)
    assert_parity(M3.run(p), oracle, "ours")
    assert_parity(Contestant("vllm", call_qsa(attend), lse=False).run(p), oracle, "vllm")


def test_shapes_are_those_of_the_model():
    for name, shape in qsa.NAMED.items():
        case = shape.case
        assert (case.HQ, case.HKV, case.D, case.block_size, case.n) == (24, 2, 256, 4, 513), name
        assert ("fp8" in name) == shape.fp8
        assert ("shared" in name) == bool(case.shared)
