"""A backward kernel that fails: tried once per signature, said once with its cause; then packed SDPA is recomputed.

The kernel is a stand-in (`BackwardKernel`), so that it fails at will; the forward's kernel is the real one.
"""

import ast
import logging
import sys

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import nsa
from nsa import dispatch, ops
from nsa.call import Call
from nsa.plain.oracle import selection_reference

LONG = "rows are long enough for Triton"
FORWARD = nsa.RouteRecord("query_major", LONG, 1, "ranges")
BROKEN = RuntimeError("PassManager::run failed")


def oracle(*qkv, **selection):
    return selection_reference(Call(*qkv, **selection))


@pytest.fixture
def train(draw, same, backward_kernel):
    """`train(…) -> whether the kernel's gradients came back`; else they are compared with the oracle's."""

    def call(ranges=True, lse_too=False, dtype=torch.float32, block_size=5, **how):
        q, k, v = draw(S=2, S_kv=9, HKV=1, Dv=24, dtype=dtype)
        selection = {"ranges": same([(0, 4), (2, 7)], 1, 2, 1)}
        if not ranges:
            selection = {"block_indices": same([1, -1, 0], 1, 2, 1), "block_size": block_size}
        gradients = []
        for attend, kind in ((nsa.selection_attention, dtype), (oracle, torch.float64)):
            leaves = [x.to(kind).detach().requires_grad_() for x in (q, k, v)]
            keywords = how if attend is nsa.selection_attention else {}
            o, lse = attend(*leaves, **selection, return_lse=True, **keywords)
            loss = (o * torch.arange(24, device=o.device)).sum()
            gradients.append(torch.autograd.grad(loss + lse.sum() if lse_too else loss, leaves))
        got, want = gradients
        assert all(a.dtype == dtype for a in got)
        if all(a.eq(backward_kernel.MARK).all() for a in got):
            return True
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))
        return False

    return call


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]


def cause(error):
    return f"backward kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"


def backward_routes():
    return [record for record in nsa.routes() if record.reason != LONG or record.route == "backward"]


def test_kernel_serves(train, backward_kernel):
    assert train()
    assert nsa.routes() == [FORWARD, nsa.RouteRecord("backward", LONG, 1)]
    assert len(backward_kernel.calls) == 1


FAILURES = {
    "compilation": CompilationError("a = b", ast.parse("a").body[0], "it does not compile"),
    "resources": OutOfResources(300_000, 232_448, "shared memory"),
    "runtime": BROKEN,
    "no-message": RuntimeError(""),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failure_is_tried_and_logged_once(train, backward_kernel, caplog, kind):
    backward_kernel.error = error = FAILURES[kind]
    with caplog.at_level(logging.INFO, logger="nsa"):
        for _ in range(3):
            assert not train()
    assert len(backward_kernel.calls) == 1
    assert warnings_of(caplog) == [f"{cause(error)}; sdpa serves this signature from now on"]
    assert backward_routes() == [nsa.RouteRecord("sdpa", cause(error), 3)]


def test_missing_kernels_are_broken_ones(train, backward_kernel, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nsa.kernels.backward.plan", None)  # importing it raises
    assert not train()
    assert not train()
    assert len(warnings_of(caplog)) == 1
    ((route, reason, calls, _),) = backward_routes()
    assert (route, calls) == ("sdpa", 2)
    assert reason.startswith("backward kernel failed: ModuleNotFoundError: ")


def test_forward_is_not_blamed(train, backward_kernel):
    """It keeps its kernel, and a broken forward keeps the backward's."""
    backward_kernel.error = BROKEN
    for _ in range(2):
        train()
    assert nsa.RouteRecord("query_major", LONG, 2, "ranges") in nsa.routes()


def test_broken_forward_is_not_blamed_on_the_backward(train, backward_kernel, monkeypatch):
    from nsa.kernels.query_major import plan as query_major

    def forward(*_):
        raise BROKEN

    monkeypatch.setattr(query_major, "forward", forward)
    assert train()
    assert [r.route for r in nsa.routes()] == ["sdpa", "backward"]


@pytest.mark.parametrize("lse_too", [False, True], ids=["o", "o-and-lse"])
@pytest.mark.parametrize("packed", [True, False], ids=["sdpa", "reference"])
@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "blocks"])
def test_what_recomputes(train, backward_kernel, dtype, lse_too, packed, ranges):
    """Packed SDPA, or the reference where packing is off, in the dtypes of the call."""
    backward_kernel.error = BROKEN
    with nsa.configure(use_sel_pack=packed):
        assert not train(lse_too=lse_too, dtype=dtype, ranges=ranges)
    assert backward_routes() == [nsa.RouteRecord("sdpa" if packed else "reference", cause(BROKEN), 1)]


def test_signatures_fail_on_their_own(train, backward_kernel):
    """Dtype, and blocks of another size, are another kernel."""
    backward_kernel.error = BROKEN
    kinds = [{}, {"dtype": torch.float16}, {"ranges": False}, {"ranges": False, "block_size": 3}]
    for kind in kinds * 2:
        assert not train(**kind)
    assert len(backward_kernel.calls) == 4


def test_schedule_of_the_forward_makes_no_other_signature(train, backward_kernel):
    backward_kernel.error = BROKEN
    for schedule in ("auto", "query_major", "per_head"):
        assert not train(schedule=schedule)
    assert len(backward_kernel.calls) == 1


def test_reset_tries_it_again(train, backward_kernel):
    backward_kernel.error = BROKEN
    assert not train()
    backward_kernel.error = None
    assert not train()
    dispatch.reset()
    assert train()


PASSED_ON = {
    "out-of-memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "out-of-memory-of-the-driver": RuntimeError("Triton Error [CUDA]: out of memory"),
    "lost-context": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "value": ValueError("a bug"),
    "assertion": AssertionError("a bug"),
}


@pytest.mark.parametrize("kind", PASSED_ON)
def test_what_is_no_kernel_failure_is_passed_on(train, backward_kernel, caplog, kind):
    """None is remembered: memory may be there next time."""
    backward_kernel.error = error = PASSED_ON[kind]
    for count in (1, 2):
        with pytest.raises(type(error)) as raised:
            train()
        assert raised.value is error
        assert len(backward_kernel.calls) == count
    assert warnings_of(caplog) == []
    assert backward_routes() == []
    backward_kernel.error = None
    assert train()


@pytest.mark.parametrize("error", [BROKEN, OutOfResources(300_000, 232_448, "shared memory")], ids=["pass", "memory"])
def test_named_backend_raises(train, backward_kernel, caplog, error):
    """Every time, also after `auto` has given up on the kernel, which it does not learn from this."""
    backward_kernel.error = error
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            train(backend="triton")
        assert raised.value is error
    assert warnings_of(caplog) == []
    assert not train()
    with pytest.raises(type(error)):
        train(backend="triton")
    assert len(backward_kernel.calls) == 4


# --- calls that do not fit the workspace ------------------------------------------------------------------------------


def test_call_that_does_not_fit_falls_back(train, backward_kernel, caplog):
    """It is no broken kernel: nothing is warned of, and the next call that fits is served."""
    backward_kernel.misfit = "expected at most 64 slots, got 65"
    for _ in range(2):
        assert not train()
    assert warnings_of(caplog) == []
    assert backward_routes() == [nsa.RouteRecord("sdpa", "backward: expected at most 64 slots, got 65", 2)]
    assert backward_kernel.calls == []
    backward_kernel.misfit = None
    assert train()


def test_named_call_that_does_not_fit_raises(train, backward_kernel):
    backward_kernel.misfit = "expected at most 64 slots, got 65"
    for _ in range(2):
        with pytest.raises(ValueError, match="^expected at most 64 slots, got 65$"):
            train(backend="triton")
    assert backward_routes() == [nsa.RouteRecord("query_major", "backend='triton' asked for", 2, "ranges")]


# --- routes that never come to the kernel -----------------------------------------------------------------------------

SHORT = "rows select at most 7 keys, sel_triton_min_L is 8"
SWITCHES = {
    "short": ({"sel_triton_min_L": 8}, "sdpa", SHORT),
    "short-without-packing": ({"sel_triton_min_L": 8, "use_sel_pack": False}, "reference", SHORT),
    "triton-off": ({"use_triton_sel": False}, "sdpa", "use_triton_sel is off"),
    "force-parity": ({"force_parity": True}, "reference", "force_parity is set"),
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches(draw, same, backward_kernel, kind):
    """An eager call is differentiated by torch; a compiled one comes to the operator, which decides the same."""
    changed, route, reason = SWITCHES[kind]
    q, k, v = (x.requires_grad_() for x in draw(S=2, S_kv=9))
    spans = same([(0, 4), (2, 5)], 1, 2, 2)
    with nsa.configure(**changed):
        eager = nsa.selection_attention(q, k, v, ranges=spans, max_selected=7)
        want = torch.autograd.grad(eager.sum(), (q, k, v))
        assert nsa.routes() == [nsa.RouteRecord(route, reason, 1)]
        o, _ = torch.ops.nsa.selection_attention(*ops._arguments(Call(q, k, v, ranges=spans, max_selected=7)))
        got = torch.autograd.grad(o.sum(), (q, k, v))
    assert nsa.routes() == [nsa.RouteRecord(route, reason, 2), nsa.RouteRecord(route, f"backward: {reason}", 1)]
    assert backward_kernel.planned == 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_settings_of_the_forward_hold_for_its_backward(draw, same, backward_kernel):
    """Autograd runs the backward pass on threads of its own, and after a `with` block has ended."""
    q, k, v = (x.requires_grad_() for x in draw(S=2, S_kv=9))
    selection = {"ranges": same([(0, 4)], 1, 2, 2)}
    o = nsa.selection_attention(q, k, v, **selection)
    with nsa.configure(use_triton_sel=False):
        off = nsa.selection_attention(q, k, v, **selection)
        o.sum().backward()
    assert q.grad.eq(backward_kernel.MARK).all()
    q.grad = None
    off.sum().backward()
    assert not q.grad.eq(backward_kernel.MARK).all()
    assert backward_kernel.planned == 1
