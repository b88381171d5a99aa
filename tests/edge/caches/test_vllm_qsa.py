"""vLLM's function of QSA on our kernels: against the oracle, and in vLLM's place."""

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch

import nsa
from nsa.integrations import vllm
from nsa.testing.matrix import caches

from .vllm_calls import DTYPE, D, close, refuse, refuses_other_axes, signature

pytestmark = pytest.mark.usefixtures("pristine")


def qsa_step(device, fp8=False, counts=(3, 0, 2), lengths=(90, 7, 41), page=8):
    """Arguments of QSA's function, and what the oracle says: whole blocks of 4 in any order, then the tail."""
    cache = caches.draw(list(lengths), 96, page, HKV=2, D=D, Dv=D, device=device, dtype=DTYPE)
    cache = caches.quantized(cache, per_head=False) if fp8 else cache
    g = torch.Generator().manual_seed(5)
    T, n = sum(counts) + 1, 6  # the last token is padding
    q = torch.randn(T, 6 * 2, D, generator=g).to(device, DTYPE)
    ids, owners, spans = torch.full((T, 4 * n), 10**6, dtype=torch.int32), torch.full((T,), -1, dtype=torch.int32), []
    positions = [(b, lengths[b] - S + s) for b, S in enumerate(counts) for s in range(S)]
    for token, (b, t) in enumerate(positions):
        owners[token] = b
        whole = torch.randperm((t + 1) // 4, generator=g)[: n - 1]
        keys = [4 * int(x) + i for x in whole for i in range(4)] + list(range((t + 1) // 4 * 4, t + 1))
        ids[token, : len(keys)] = torch.tensor(keys, dtype=torch.int32)
        ids[token, -1] = len(keys)
        spans.append([[x, x + 1] for x in keys] + [[0, 0]] * (4 * n - len(keys)))
    ids[-1, -1] = 9
    gate = torch.randn(T, 12 * D, generator=g).to(device, DTYPE)
    ranges = torch.tensor([*spans, [[0, 0]] * (4 * n)], device=device)[:, None].expand(-1, 2, -1, -1)
    cu = torch.tensor([0, *counts], device=device).cumsum(0)
    want = caches.oracle(q, cache, cu, ranges=ranges, causal=False)[0]
    arguments = {
        "q": q, "k_cache": cache.k, "v_cache": cache.v, "logical_indices": ids.to(device),
        "block_table": cache.block_table, "token_to_req": owners.to(device), "use_prefill_config": False,
        "out": torch.full_like(q, 7.0), "output_gate": gate,
    }  # fmt: skip
    if fp8:
        arguments |= {"k_scale": float(cache.k_scale), "v_scale": float(cache.v_scale)}
    return arguments, want, gate.view_as(q).double().sigmoid()


AXES = {
    "q": "[T, HQ, D]", "k_cache": "[pages, page_size, HKV, D]", "logical_indices": "[T, 4 n]",
    "block_table": "[B, width]", "token_to_req": "[T]",
}  # fmt: skip


@pytest.mark.parametrize("argument", AXES)
def test_other_axes_of_qsa_are_refused(device, argument):
    refuses_other_axes("qsa_sparse_paged_attention", qsa_step(device)[0], argument, AXES[argument])


@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("counts", [(3, 0, 2), (1, 1, 1), (9, 6, 11)], ids=["ragged", "decode", "chunks"])
def test_qsa_is_equal_to_the_oracle(device, monkeypatch, fp8, counts):
    monkeypatch.setattr(vllm, "_own", refuse)
    arguments, want, gate = qsa_step(device, fp8, counts, lengths=(90, 17, 41))
    got = vllm.qsa_sparse_paged_attention(**arguments)
    assert got is arguments["out"]
    close(got, want * gate)
    assert not got[-1].any()  # of no sequence
    assert [record.route for record in nsa.routes()] == ["small_blocks"]
    arguments["out"] = None
    assert torch.equal(vllm.qsa_sparse_paged_attention(**arguments), got)


REFUSED_QSA = {
    "width": (lambda a: {"logical_indices": a["logical_indices"][:, 1:]}, "logical_indices: expected 4 n columns"),
    "no-block": (lambda a: {"logical_indices": a["logical_indices"][:, -4:]}, "logical_indices: expected 4 n columns"),
    "page": (lambda a: {name: a[name][:, :6] for name in ("k_cache", "v_cache")}, "k_cache: expected pages of whole"),
    "bytes": (lambda a: {name: a[name].view(torch.uint8) for name in ("k_cache", "v_cache")}, "k_cache: expected"),
    "values": (lambda a: {"v_cache": a["v_cache"][..., :8]}, "(that of k_cache), got ["),
    "heads": (
        lambda a: {"q": a["q"][:, :11], "output_gate": a["output_gate"][:, : 11 * D]}, "heads: expected HQ = G * HKV"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED_QSA.values(), ids=REFUSED_QSA)
def test_vllm_serves_qsa_where_we_cannot(device, fake, caplog, change, reason):
    vllm.install()
    module = importlib.import_module(vllm.QSA_OPS)
    arguments = qsa_step(device)[0]
    arguments |= change(arguments)
    module.qsa_sparse_paged_attention(**arguments)
    assert len(module.calls) == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("logical_indices", "logical_indices: expected a row for each of 6 tokens, got 5"),
        ("token_to_req", "token_to_req: expected a row for each of 6 tokens, got 5"),
        ("output_gate", f"output_gate: expected {72 * D} elements, as many as q, got {60 * D}"),
    ],
)
def test_qsa_reads_nothing_beyond_its_tensors(device, name, text):
    arguments = qsa_step(device)[0]
    arguments[name] = arguments[name][:-1]
    with pytest.raises(ValueError, match=f"^{text}$"):
        vllm.qsa_sparse_paged_attention(**arguments)


def test_a_gate_of_qsa_may_have_strides(device, monkeypatch):
    monkeypatch.setattr(vllm, "_own", refuse)
    arguments = qsa_step(device)[0]
    want = vllm.qsa_sparse_paged_attention(**arguments).clone()
    arguments["output_gate"] = arguments["output_gate"].t().contiguous().t()
    assert torch.equal(vllm.qsa_sparse_paged_attention(**arguments), want)


def test_a_scale_of_qsa_that_a_graph_fills_is_not_remembered(device, monkeypatch):
    """Its memory is the graph's, and nothing is in it before the graph is replayed."""
    from nsa.integrations import qsa  # imports Triton

    monkeypatch.setattr(qsa, "_numbers", {})
    captured = [True, False, True]
    monkeypatch.setattr(qsa, "capturing", lambda x: captured.pop(0))
    q = torch.empty(0, device=device)
    in_graph, first, later = (qsa._tensor_of(0.5, q) for _ in range(3))
    assert in_graph is not first
    assert later is first
    assert captured == [True]  # a remembered one is not asked about
    assert {(x.item(), x.dtype) for x in (in_graph, first)} == {(0.5, torch.float32)}


def test_qsa_runs_on_the_gpu_of_its_tensors(monkeypatch):
    """Its own kernels, too, which Triton would launch on the current GPU."""
    from nsa.integrations import qsa

    class Entered(Exception):
        pass

    def enter(device):
        raise Entered(device)

    monkeypatch.setattr(qsa, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    call = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", 1)), block_table=None, out=None)
    with pytest.raises(Entered, match=r"^cuda:1$"):
        qsa.attend(call, None, None, 1.0, None)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs (without -n: a worker sees one)")
@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
def test_qsa_of_another_gpu(monkeypatch, fp8):
    monkeypatch.setattr(vllm, "_own", refuse)
    arguments, want, gate = qsa_step(torch.device("cuda", 1), fp8)
    assert torch.cuda.current_device() == 0
    close(vllm.qsa_sparse_paged_attention(**arguments), want * gate)
    assert torch.cuda.current_device() == 0


def test_qsa_is_put_in_place_and_restored(fake):
    """Its signature is vLLM's, and it does not wait for MiniMax-M3's module."""
    vllm.install()
    module = importlib.import_module(vllm.QSA_OPS)
    assert module.qsa_sparse_paged_attention is vllm.qsa_sparse_paged_attention
    assert vllm.installed() == [vllm.QSA_OPS]
    vllm.restore()
    assert signature(module.qsa_sparse_paged_attention) == signature(vllm.qsa_sparse_paged_attention)
    assert module.qsa_sparse_paged_attention is not vllm.qsa_sparse_paged_attention
