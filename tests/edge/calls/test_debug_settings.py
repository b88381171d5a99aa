"""`debug_timing`, `debug_compare`, `debug_shapes`: what each logs, and that nothing is logged without them."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

import nsa
from nsa import debug, dispatch
from nsa.kernels.query_major import plan as query_major

pytestmark = pytest.mark.usefixtures("fresh_routes")


@pytest.fixture
def logged(caplog, draw, same):
    """`logged(backend=…, **settings)`: what one call logs; messages of the logger `nsa`."""

    def make(backend="sdpa", return_lse=False, **settings):
        q, k, v = draw(B=2)
        caplog.clear()
        with nsa.configure(sel_triton_min_L=0, **settings), caplog.at_level(logging.DEBUG, logger="nsa"):
            nsa.selection_attention(q, k, v, ranges=same([(0, 7)], 2, 3, 2), backend=backend, return_lse=return_lse)
        return [r.getMessage() for r in caplog.records if r.name == "nsa"]

    return make


def test_shapes_and_strides(logged):
    (line,) = logged(debug_shapes=True)
    assert line == (
        "shapes: q [2, 3, 4, 16] strides (192, 64, 16, 1), k [2, 24, 2, 16] strides (768, 32, 16, 1), "
        "v [2, 24, 2, 16] strides (768, 32, 16, 1), ranges [2, 3, 2, 1, 2] strides (12, 4, 2, 2, 1)"
    )


REASONS = {
    "auto": ("query_major", "rows are long enough for Triton"),
    "triton": ("query_major", "backend='triton' asked for"),
    "sdpa": ("sdpa", "backend='sdpa' asked for"),
    "reference": ("reference", "backend='reference' asked for"),
}


@pytest.mark.parametrize("backend", REASONS)
def test_timing_names_the_route_and_compare_the_error(logged, backend):
    """And without a setting nothing is logged."""
    route, reason = REASONS[backend]
    assert logged(backend) == []
    (line,) = logged(backend, debug_timing=True)
    assert re.fullmatch(rf"route {route} \({re.escape(reason)}\): \d+\.\d{{3}} ms, host and device", line)
    for return_lse in (True, False):
        (line,) = logged(backend, return_lse, debug_compare=True)
        match = re.fullmatch(rf"route {route} against the reference: max error (\d\.\d{{3}}e[+-]\d\d)", line)
        assert match
        assert float(match[1]) < 1e-5


def test_compare_finds_a_wrong_kernel(logged, monkeypatch):
    forward = query_major.forward

    def wrong(*args, **keywords):
        o, lse = forward(*args, **keywords)
        return o.add_(0.25), lse

    monkeypatch.setattr(query_major, "forward", wrong)
    assert logged("triton", debug_compare=True) == ["route query_major against the reference: max error 2.500e-01"]


def test_compare_of_nothing(draw, same, caplog):
    q, k, v = draw(B=0)
    with nsa.configure(debug_compare=True), caplog.at_level(logging.INFO, logger="nsa"):
        nsa.selection_attention(q, k, v, ranges=same([(0, 7)], 0, 3, 2), backend="sdpa")
    assert [r.getMessage() for r in caplog.records] == ["route sdpa against the reference: max error 0.000e+00"]


def test_all_three_log_in_order(logged):
    lines = logged(debug_shapes=True, debug_timing=True, debug_compare=True)
    assert [line.split()[0] for line in lines] == ["shapes:", "route", "route"]
    assert "ms" in lines[1]
    assert "error" in lines[2]


@pytest.mark.parametrize("setting", ["debug_timing", "debug_compare"])
def test_route_that_fell_back_is_named_as_it_ran(logged, monkeypatch, setting):
    """The kernel failed: what was timed, and compared, is packed SDPA."""

    def broken(*args, **keywords):
        raise RuntimeError("broken")

    monkeypatch.setattr(query_major, "forward", broken)
    logged("auto")
    (line,) = logged("auto", **{setting: True})
    assert line.startswith("route sdpa ")


def test_results_do_not_change(draw, same):
    q, k, v = draw()
    ranges = same([(0, 7)], 1, 3, 2)
    want = nsa.selection_attention(q, k, v, ranges=ranges, return_lse=True)
    with nsa.configure(debug_shapes=True, debug_timing=True, debug_compare=True):
        out = torch.empty_like(q)
        got = nsa.selection_attention(q, k, v, ranges=ranges, return_lse=True, out=out)
        assert got[0] is out
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        q.requires_grad_()
        nsa.selection_attention(q, k, v, ranges=ranges).sum().backward()
        assert q.grad.isfinite().all()


def test_nothing_waits_for_a_call_that_is_captured(logged, monkeypatch):
    """Else the capture of the CUDA graph would fail."""
    monkeypatch.setattr(dispatch, "capturing", lambda x: True)
    (line,) = logged(debug_shapes=True, debug_timing=True, debug_compare=True)
    assert line.startswith("shapes: ")


@pytest.mark.gpu
def test_a_call_is_captured_with_all_settings(draw, same):
    q, k, v = draw()
    given = {"ranges": same([(0, 7)], 1, 3, 2), "max_selected": 7}
    want = nsa.selection_attention(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with nsa.configure(debug_shapes=True, debug_timing=True, debug_compare=True), torch.cuda.graph(graph):
        got = nsa.selection_attention(q, k, v, **given)
    graph.replay()
    assert torch.equal(got, want)


def test_threads_that_begin_at_once_are_counted_together(monkeypatch):
    """One file holds the counts of a process, so first calls of two threads must not be counted apart."""
    written, finalizers = [], []

    def write(path, text, encoding):
        written.append(text)
        if len(written) == 1:  # what another thread does while the first one writes the empty file
            debug.count_shape(None, "folder")

    monkeypatch.setattr(debug, "Finalize", lambda of, function, exitpriority: finalizers.insert(0, function))
    monkeypatch.setattr(debug, "_words", lambda call: None)
    monkeypatch.setattr(Path, "write_text", write)
    debug.count_shape(None, "folder")
    for function in finalizers:  # the last one that was registered runs first
        function()
    assert json.loads(written[-1]) == {debug.LEFT_OUT: 2}
