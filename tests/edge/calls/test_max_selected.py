"""`max_selected`, the host's bound on the keys of a row: with it no call waits for the device."""

import contextlib
import re

import pytest
import torch

import nsa
import nsa.kernels
from nsa import settings
from nsa.kernels.shared.launch import Variant
from nsa.plain import packed_sdpa
from nsa.testing.plugin import current_lane

NEVER_SYNC = ["triton", "per_head", "key_major", "sdpa"]  # the oracle may read the device
NEEDS_BOUND = (
    "packing needs the longest row on the host: expected max_selected=<int> under torch.compile or CUDA graph capture, "
    "and for fake tensors, got None"
)
READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__", "__float__")


@pytest.fixture
def no_sync(monkeypatch):
    """`with no_sync():` makes reading a tensor's values on the host an error.

    Kernels are not run there without a GPU: the interpreter reads what it computes. All that leads to a launch is.
    """

    @contextlib.contextmanager
    def guard():
        def refuse(name):
            def read(*args, **kwargs):
                raise AssertionError(f"Tensor.{name} reads the device")

            return read

        with monkeypatch.context() as patch:
            patch.setattr(packed_sdpa, "READ_FREELY", ())  # as on a GPU
            for name in READS:
                patch.setattr(torch.Tensor, name, refuse(name))
            if current_lane() == "interpreter":
                patch.setattr(Variant, "launch", lambda *_: None)
            if torch.cuda.is_available():
                patch.setattr(torch.cuda, "synchronize", refuse("synchronize"))
            try:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("error")
                yield
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")

    return guard


@pytest.mark.parametrize("attend_all", NEVER_SYNC, indirect=True)
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no-lse"])
def test_no_sync_with_a_bound(problem, attend_all, no_sync, return_lse):
    """That of blocks is `n * block_size`."""
    qkv, selection = problem
    attend_all(*qkv, **selection, return_lse=return_lse)  # compiles
    with no_sync():
        attend_all(*qkv, **selection, return_lse=return_lse)


@pytest.mark.parametrize("attend_all", NEVER_SYNC, indirect=True)
def test_no_sync_in_training(problem, attend_all, no_sync):
    qkv, selection = problem
    for x in qkv:
        x.requires_grad_()
    before = nsa.kernels.launches["backward"]
    for guard in (contextlib.nullcontext, no_sync):  # the first one compiles
        with guard():
            o = attend_all(*qkv, **selection)
            torch.autograd.grad(o, qkv, torch.ones_like(o))
    assert nsa.kernels.launches["backward"] - before == 2 * attend_all.triton


@pytest.mark.parametrize("problem", ["ranges", "positions", "varlen"], indirect=True)  # blocks have a bound
def test_one_sync_without_a_bound(problem, monkeypatch):
    """One for the call, not one per row."""
    qkv, selection = problem
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.numel()) or tolist(x))
    for name in ("item", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name: pytest.fail(f"Tensor.{name}"))
    nsa.selection_attention(*qkv, **selection | {"max_selected": None}, backend="sdpa")
    assert reads == [2]  # the shortest and the longest row


def test_pack_rows_with_a_bound_does_not_sync(draw, same, no_sync):
    _, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    free = nsa.pack_rows(k, v, ranges)
    with no_sync():
        bound = nsa.pack_rows(k, v, ranges, max_selected=16)
    assert bound.K.shape == (6, 16, 16)
    assert torch.equal(bound.K[:, :11], free.K)
    assert torch.equal(bound.V[:, :11], free.V)
    assert not bound.K[:, 11:].any()
    assert not bound.V[:, 11:].any()
    assert torch.equal(bound.lengths, free.lengths)


# --- torch.compile and graph capture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["packed-sdpa", "pack_rows"])
def test_unbounded_packing_under_torch_compile_says_what_to_pass(draw, same, packing):
    """`auto` packs inside its operator, which is not traced."""
    ranges = same([(0, 7)], 1, 3, 2)

    def call(q, k, v):
        if packing == "pack_rows":
            return nsa.pack_rows(k, v, ranges)
        return nsa.selection_attention(q, k, v, ranges=ranges, backend="sdpa")

    settings.get()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(NEEDS_BOUND)):  # noqa: B017, PT011 - dynamo wraps it as it likes
        torch.compile(call, backend="eager", fullgraph=True)(*draw())


def test_pack_rows_with_a_bound_compiles(draw, same):
    """In one graph, checks and all."""
    _, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    torch._dynamo.reset()
    graph = torch.compile(lambda k, v: nsa.pack_rows(k, v, ranges, max_selected=9), backend="eager", fullgraph=True)
    for got, want in zip(graph(k, v), nsa.pack_rows(k, v, ranges, max_selected=9), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_unbounded_packing_under_capture_says_what_to_pass(draw, same):
    q, k, v = draw()
    ranges = same([(0, 7)], 1, 3, 2)
    nsa.selection_attention(q, k, v, ranges=ranges, backend="sdpa")
    with pytest.raises(RuntimeError, match=f"^{re.escape(NEEDS_BOUND)}$"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        nsa.selection_attention(q, k, v, ranges=ranges, backend="sdpa")
    with pytest.raises(RuntimeError, match=f"^{re.escape(NEEDS_BOUND)}$"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        nsa.pack_rows(k, v, ranges)


@pytest.mark.gpu
@pytest.mark.parametrize("attend_all", ["triton", "per_head", "sdpa"], indirect=True)
def test_capture_with_a_bound_replays_on_new_inputs(draw, same, attend_all):
    q, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    call = {"ranges": ranges, "max_selected": 11, "return_lse": True}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend_all(q, k, v, **call)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_all(q, k, v, **call)
    for x in (q, k, v):
        x.mul_(-0.5)
    ranges[0, 1] = torch.tensor([[4, 9], [0, 0]], device=ranges.device)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, attend_all(q, k, v, **call), rtol=0, atol=1e-6)
