"""A kernel that fails: said once with its cause; then what serves instead, or until the system may be well.

Three kernels fail at will: the forward's, which is query-major, key-major, and the backward's (`BackwardKernel`).
"""

import ast
import errno
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import errors
from triton.runtime.errors import OutOfResources

import nsa
from nsa import dispatch, failures, ops
from nsa.call import Call
from nsa.guard import ProbeFailed
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.shared.errors import DoesNotFit
from nsa.plain.oracle import selection_reference

from ..kernels.gradients import exact

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans", "long_rows")
LONG = "rows are long enough for Triton"
PTXASError = getattr(errors, "PTXASError", RuntimeError)  # before Triton 3.3 it is one

FAILURES = {
    "compilation": CompilationError("a = b", ast.parse("a").body[0], "it does not compile"),
    "resources": OutOfResources(300_000, 232_448, "shared memory"),
    "assembler": PTXASError("`ptxas` failed with error code 255"),
    "assembler-crashed": PTXASError("`ptxas` raised SIGSEGV"),
    "runtime": RuntimeError("PassManager::run failed"),
    "probe": ProbeFailed("killed by SIGABRT while compiling"),
    "no-message": RuntimeError(""),
    **{
        text: RuntimeError(text)
        for text in (
            "Triton Error [CUDA]: too many resources requested for launch",
            "Triton Error [CUDA]: device kernel image is invalid",
            "PassManager::run failed: out of memory words in a kernel's name",
        )
    },
}
PASSING = {
    "import": ImportError("no module named triton"),
    "launcher": ImportError("launcher.so: file too short"),
    "damaged-cache": json.JSONDecodeError("Expecting value", "", 0),
    "subprocess": subprocess.CalledProcessError(1, ["cc", "launcher.c"]),
    "assembler-without-disk": PTXASError("`ptxas` failed with error code 255\nwrite: No space left on device"),
    "probe-unsure": ProbeFailed("exit status 1 without an answer while starting", lasting=False),
    **{
        errno.errorcode[number].lower(): OSError(number, os.strerror(number), "kernel.json")
        for number in (errno.EBUSY, errno.ENOENT, errno.ESTALE, errno.ENOSPC, errno.EMFILE, errno.EACCES)
    },
}
PASSED_ON = {
    "out-of-memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "out-of-memory-by-type": torch.OutOfMemoryError("allocation failed"),
    "out-of-memory-of-the-driver": RuntimeError("Triton Error [CUDA]: out of memory"),
    "out-of-memory-of-amds-driver": RuntimeError("Triton Error [HIP]: out of memory"),
    "capture": RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
    "out-of-memory-of-the-host": OSError(12, "Cannot allocate memory"),
    "no-process-for-the-assembler": BlockingIOError(11, "Resource temporarily unavailable"),
    "assembler-killed": PTXASError("`ptxas` failed with error code -9\n`ptxas` stderr:\n"),
    "assembler-killed-in-a-shell": RuntimeError("`ptxas` failed with error code 137: \n"),
    "launcher-killed": subprocess.CalledProcessError(-9, ["cc", "launcher.c"]),
    "lost-context": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "lost-context-of-triton": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "value": ValueError("a bug"),
    "type": TypeError("a bug"),
    "index": IndexError("a bug"),
    "assertion": AssertionError("a bug"),
    "interrupt": KeyboardInterrupt(),
}
NAMES = {"query_major": "sdpa", "key_major": "query_major", "backward": "sdpa"}  # a kernel, and what serves instead
MISFIT = "expected at most 64 slots, got 65"


@dataclass
class Broken:
    """A kernel that raises `error`, or does not fit a call because of `misfit`; `tries` are dtypes of its launches."""

    error: BaseException | None = None
    misfit: str | None = None
    tries: list[torch.dtype] = field(default_factory=list)

    def put(self, monkeypatch, module):
        plan, forward = module.plan, module.forward

        def planned(*args, **how):
            if self.misfit is not None:
                raise DoesNotFit(self.misfit)
            return plan(*args, **how)

        def launched(launch, call, *rest, **how):
            self.tries.append(call.q.dtype)
            if self.error is not None:
                raise self.error
            return forward(launch, call, *rest, **how)

        monkeypatch.setattr(module, "plan", planned)
        monkeypatch.setattr(module, "forward", launched)
        return self


@pytest.fixture
def kernel(monkeypatch):
    return Broken().put(monkeypatch, query_major)


@pytest.fixture
def key_kernel(monkeypatch):
    return Broken().put(monkeypatch, key_major)


@pytest.fixture
def call(draw, same):
    """A call on `auto`, compared with the oracle; keywords of `draw` change its signature."""

    def make(backend="auto", causal=True, schedule="auto", blocks=False, max_selected=None, **shape):
        q, k, v = draw(**shape)
        selection = {"ranges": same([(0, 7), (9, 13)], q.shape[0], q.shape[1], k.shape[2])}
        if blocks:
            selection = {"block_indices": same([0, 1], q.shape[0], q.shape[1], k.shape[2]), "block_size": 7}
        how = {"causal": causal, "backend": backend, "schedule": schedule, "max_selected": max_selected}
        o = nsa.selection_attention(q, k, v, **selection, **how)
        want = selection_reference(Call.of(q.double(), k, v, **selection, causal=causal))[0]
        torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-2 if q.dtype == torch.float16 else 1e-5)

    return make


@pytest.fixture
def train(draw, same, backward_kernel):
    """`train(…) -> whether the kernel's gradients came back`; else they are compared with the oracle's."""

    def call(ranges=True, lse_too=False, dtype=torch.float32, block_size=5, **how):
        q, k, v = draw(S=2, S_kv=9, HKV=1, Dv=24, dtype=dtype)
        selection = {"ranges": same([(0, 4), (2, 7)], 1, 2, 1)}
        if not ranges:
            selection = {"block_indices": same([1, -1, 0], 1, 2, 1), "block_size": block_size}
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, lse = nsa.selection_attention(*leaves, **selection, return_lse=True, **how)
        do = torch.arange(24, device=o.device).expand_as(o)
        loss = (o * do).sum()
        got = torch.autograd.grad(loss + lse.sum() if lse_too else loss, leaves)
        assert all(a.dtype == dtype for a in got)
        if all(a.eq(backward_kernel.MARK).all() for a in got):
            return True
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        want = exact(q, k, v, do, torch.ones_like(lse) if lse_too else None, **selection)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))
        return False

    return call


@pytest.fixture
def part(request, call):
    """`(kernel, run)` of one of `NAMES`: the kernel that may fail, and a call that it serves, checked by the oracle."""
    if request.param == "backward":
        kernel = request.getfixturevalue("backward_kernel")
        kernel.tries = kernel.calls
        return kernel, request.getfixturevalue("train")
    if request.param == "query_major":
        return request.getfixturevalue("kernel"), call
    return request.getfixturevalue("key_kernel"), lambda **how: call(schedule="key_major", **how)


def with_parts(kinds, *of_the_others):
    """Each kind of error in the forward's kernel; in the others, which share their handling, a few."""
    rows = [(name, kind) for name in NAMES for kind in (kinds if name == "query_major" else of_the_others)]
    return pytest.mark.parametrize(("part", "kind"), rows, indirect=["part"])


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="nsa")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]


def cause(error, name="query_major"):
    return f"{name} kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"


def taken(name):
    """Routes and reasons of the calls of a kernel; those of a backward pass without the forward passes."""
    return [r for r in nsa.routes() if name != "backward" or r.route == "backward" or r.reason != LONG]


def record(route, reason, calls):
    return nsa.RouteRecord(route, reason, calls, "ranges" if route == "query_major" else "")


@with_parts(FAILURES, "runtime", "no-message")
def test_a_failure_is_tried_and_said_once(request, part, said, kind):
    """Sticky until `reset`, also if the kernel works again."""
    (kernel, run), name = part, request.node.callspec.params["part"]
    kernel.error = error = FAILURES[kind]
    for _ in range(4):
        run()
    assert len(kernel.tries) == 1
    assert said() == [f"{cause(error, name)}; {NAMES[name]} serves this signature from now on"]
    kernel.error = None
    run()
    assert taken(name) == [record(NAMES[name], cause(error, name), 5)]
    dispatch.reset()
    run()
    assert [r.route for r in taken(name)] == [name]


@pytest.mark.parametrize("kind", PASSING)
def test_an_error_of_the_system_is_retried_after_a_pause(call, kernel, said, monkeypatch, kind):
    """At most once a second, ever more rarely, until the kernel runs. Only the first failure is a warning."""
    error, clock = PASSING[kind], [100.0]
    kernel.error = error
    monkeypatch.setattr(failures, "now", lambda: clock[0])
    for pause, count in ((0, 1), (0.99, 1), (0.01, 2), (1.99, 2), (0.01, 3), (3.99, 3)):
        clock[0] += pause
        call()
        call()
        assert len(kernel.tries) == count
    assert said() == [f"{cause(error)}; sdpa serves this signature, and the kernel is tried again in 1 s"]
    assert nsa.routes() == [record("sdpa", f"{cause(error)}; tried again after a pause", 12)]
    kernel.error = None
    clock[0] += 0.01
    call()
    assert said()[1] == f"the kernel runs again after 3 failed tries: {cause(error).partition(';')[0]}"
    assert [record.calls for record in nsa.routes() if record.route == "query_major"] == [1]
    assert not failures.broken


def test_the_pause_has_an_upper_limit(monkeypatch):
    clock, pauses = [0.0], []
    monkeypatch.setattr(failures, "now", lambda: clock[0])
    for _ in range(12):
        failures.remember("key", "ranges", OSError(28, "No space left on device"), "sdpa")
        pauses.append(failures.broken["key"].until - clock[0])
        clock[0] = failures.broken["key"].until
    assert (pauses[0], pauses[-1]) == (failures.PAUSE_S, failures.LONGEST_PAUSE_S)
    assert failures.cause_of("key") is None


def test_once_per_variant(call, kernel, said):
    """Sequence lengths that launch the same kernel are one variant; what compiles another kernel is another one."""
    kernel.error = RuntimeError("broken")
    for shape in ({}, {"S": 2}, {"S": 2, "S_kv": 26}):
        call(**shape)
    assert len(kernel.tries) == 1
    others = {"D": 32}, {"Dv": 32}, {"G": 3}, {"dtype": torch.float16}, {"causal": False}, {"blocks": True}
    for count, shape in enumerate((*others, {"schedule": "per_head"}), 2):
        call(**shape)
        call(**shape)
        assert len(kernel.tries) == count
    assert len(said()) == 8


@with_parts(FAILURES, "runtime", "resources")
def test_a_named_backend_raises_the_original_error(part, said, kind):
    """Every time, unchanged, and also after `auto` gave up."""
    kernel, run = part
    kernel.error = error = FAILURES[kind]
    for count in (1, 2):
        with pytest.raises(type(error)) as raised:
            run(backend="triton")
        assert raised.value is error
        assert len(kernel.tries) == count
    assert said() == []
    run()
    with pytest.raises(type(error)):
        run(backend="triton")
    assert len(kernel.tries) == 4


@with_parts(PASSED_ON, "out-of-memory", "lost-context", "assertion")
def test_what_is_no_kernel_failure_is_passed_on(request, part, said, kind):
    """Memory may be there next time, a lost context never is, and a bug must be seen. None is remembered."""
    (kernel, run), name = part, request.node.callspec.params["part"]
    kernel.error = error = PASSED_ON[kind]
    for count in (1, 2):
        with pytest.raises(type(error)) as raised:
            run()
        assert raised.value is error
        assert len(kernel.tries) == count
    assert said() == []
    assert taken(name) == []
    kernel.error = None
    run()
    assert [r.route for r in taken(name)] == [name]


@pytest.mark.parametrize("part", ["key_major", "backward"], indirect=True)
def test_missing_kernels_are_broken_ones(request, part, said, monkeypatch):
    (_, run), name = part, request.node.callspec.params["part"]
    monkeypatch.setitem(sys.modules, f"nsa.kernels.{name}.plan", None)  # importing it raises
    run()
    run()
    assert len(said()) == 1
    ((route, reason, calls, _),) = taken(name)
    assert (route, calls) == (NAMES[name], 2)
    assert reason.startswith(f"{name} kernel failed: ModuleNotFoundError: ")


@pytest.mark.parametrize("part", ["key_major", "backward"], indirect=True)
def test_a_call_that_does_not_fit_is_served_by_another(request, part, said):
    """It is no broken kernel: nothing is warned of, and the next call that fits is served."""
    (kernel, run), name = part, request.node.callspec.params["part"]
    kernel.misfit = MISFIT
    for _ in range(2):
        run()
        with pytest.raises(ValueError, match=f"^{MISFIT}$"):
            run(backend="triton")
    assert said() == []
    reason = MISFIT if name == "key_major" else f"backward: {MISFIT}"
    assert record(NAMES[name], reason, 2) in nsa.routes()
    assert len(kernel.tries) == 0
    kernel.misfit = None
    dispatch.reset()
    run()
    assert [r.route for r in taken(name)] == [name]


def test_nothing_is_remembered_under_capture(call, kernel, monkeypatch):
    kernel.error, capturing = RuntimeError("broken"), [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    call(max_selected=14)
    capturing[0] = False
    for _ in range(3):
        call(max_selected=14)
    assert len(kernel.tries) == 2
    assert "under CUDA graph capture" in [record.reason for record in nsa.routes() if record.calls == 1][0]


def test_fallback_without_packing_is_the_reference(call, kernel, said):
    kernel.error = RuntimeError("broken")
    with nsa.configure(use_sel_pack=False):
        call()
    assert [r.route for r in nsa.routes()] == ["reference"]
    assert said() == [f"{cause(kernel.error)}; reference serves this signature from now on"]


def test_out_is_written_by_the_fallback(draw, same, kernel):
    kernel.error = RuntimeError("broken")
    q, k, v = draw()
    out = torch.full_like(q, float("nan"))
    for _ in range(2):
        o, lse = nsa.selection_attention(
            q, k, v, ranges=same([(0, 7)], 1, 3, 2), out=out.fill_(float("nan")), return_lse=True
        )
        assert o is out
        assert not o.isnan().any()
        assert lse.isfinite().all()


def test_other_entry_points(draw, same, kernel):
    """The original wrapper falls back, packed rows never do."""
    kernel.error = RuntimeError("broken")
    q, k, v = draw()
    original = q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), same([(0, 7)], 1, 3, 2)
    for _ in range(2):
        nsa.selection_attention_triton(*original)
    assert len(kernel.tries) == 1
    assert nsa.routes() == [record("sdpa", cause(kernel.error), 2)]
    rows = q[0], k[0, :3], v[0, :3]
    for count in (2, 3):
        with pytest.raises(RuntimeError, match="^broken$"):
            nsa.sel_attn_fwd_dense_group(*rows)
        assert len(kernel.tries) == count


BROKEN = RuntimeError("it does not compile")


def test_packed_sdpa_serves_where_key_major_and_query_major_are_broken(call, kernel, key_kernel, said):
    key_kernel.error = kernel.error = BROKEN
    for _ in range(3):
        call(schedule="key_major")
    assert (len(key_kernel.tries), len(kernel.tries)) == (1, 1)
    assert said() == [
        f"{cause(BROKEN, 'key_major')}; query_major serves this signature from now on",
        f"{cause(BROKEN)}; sdpa serves this signature from now on",
    ]
    assert nsa.routes() == [record("sdpa", cause(BROKEN), 3)]


def test_query_major_that_failed_is_not_tried_for_key_major_again(call, kernel, key_kernel):
    """And says nothing of key-major."""
    kernel.error = BROKEN
    call(schedule="query_major")
    call(schedule="key_major")
    assert [r.route for r in nsa.routes()] == ["sdpa", "key_major"]
    dispatch.reset()
    call(schedule="query_major")
    key_kernel.error = BROKEN
    call(schedule="key_major")
    assert (len(key_kernel.tries), len(kernel.tries)) == (2, 2)
    assert [r.route for r in nsa.routes()] == ["sdpa"]


def test_forward_and_backward_are_not_blamed_for_each_other(train, kernel, backward_kernel):
    backward_kernel.error = BROKEN
    for _ in range(2):
        assert not train()
    assert record("query_major", LONG, 2) in nsa.routes()
    dispatch.reset()
    backward_kernel.error, kernel.error = None, BROKEN
    assert train()
    assert [r.route for r in nsa.routes()] == ["sdpa", "backward"]


# --- the backward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lse_too", [False, True], ids=["o", "o-and-lse"])
@pytest.mark.parametrize("packed", [True, False], ids=["sdpa", "reference"])
@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "blocks"])
def test_what_recomputes(train, backward_kernel, dtype, lse_too, packed, ranges):
    """Packed SDPA, or the reference where packing is off, in the dtypes of the call."""
    backward_kernel.error = BROKEN
    with nsa.configure(use_sel_pack=packed):
        assert not train(lse_too=lse_too, dtype=dtype, ranges=ranges)
    assert taken("backward") == [record("sdpa" if packed else "reference", cause(BROKEN, "backward"), 1)]


@pytest.mark.parametrize("only", "qkv")
def test_one_input_alone_is_recomputed(draw, same, backward_kernel, only):
    """LSE does not depend on V."""
    backward_kernel.error = BROKEN
    given = dict(zip("qkv", draw(S=2, S_kv=9), strict=True))
    given[only].requires_grad_()
    spans = same([(0, 4), (2, 5)], 1, 2, 2)

    def gradient(**how):
        outputs = nsa.selection_attention(**given, ranges=spans, max_selected=7, return_lse=True, **how)
        return torch.autograd.grad(sum(x.sum() for x in outputs), given[only])[0]

    torch.testing.assert_close(gradient(), gradient(backend="reference"))


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
