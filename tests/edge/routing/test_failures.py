"""A kernel that fails: said once with its cause, and packed SDPA from then on, or until the system may be well."""

import ast
import errno
import json
import logging
import os
import subprocess

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import errors
from triton.runtime.errors import OutOfResources

import nsa
from nsa import failures
from nsa.call import Call
from nsa.guard import ProbeFailed
from nsa.kernels.query_major import plan as query_major
from nsa.plain.oracle import selection_reference

pytestmark = pytest.mark.usefixtures("fresh_routes")

PTXASError = getattr(errors, "PTXASError", RuntimeError)  # before Triton 3.3 it is one

FAILURES = {
    "compilation": CompilationError("a = b", ast.parse("a").body[0], "it does not compile"),
    "resources": OutOfResources(300_000, 232_448, "shared memory"),
    "assembler": PTXASError("`ptxas` failed with error code 255"),
    "assembler-crashed": PTXASError("`ptxas` raised SIGSEGV"),
    "runtime": RuntimeError("PassManager::run failed"),
    "probe": ProbeFailed("killed by SIGABRT while compiling"),
    "no-message": RuntimeError(""),
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


@pytest.fixture(autouse=True)
def long_rows():
    with nsa.configure(sel_triton_min_L=0):
        yield


@pytest.fixture
def break_kernel(monkeypatch):
    """`tries = break_kernel(error)`: launching raises it, every time; `tries` lists the dtypes it was tried with."""

    def make(error):
        tries = []

        def forward(launch, call, route):
            tries.append(call.q.dtype)
            raise error

        monkeypatch.setattr(query_major, "forward", forward)
        return tries

    return make


@pytest.fixture
def call(draw, same):
    """A call on `auto`; keywords of `draw` change its signature."""

    def make(backend="auto", causal=True, **shape):
        q, k, v = draw(**shape)
        ranges = same([(0, 7), (9, 13)], q.shape[0], q.shape[1], k.shape[2])
        o = nsa.selection_attention(q, k, v, ranges=ranges, causal=causal, backend=backend)
        want = selection_reference(Call.of(q.double(), k, v, ranges=ranges, causal=causal))[0]
        torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-2 if q.dtype == torch.float16 else 1e-5)
        return o

    return make


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]


def cause(error):
    return f"query_major kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"


@pytest.mark.parametrize("kind", FAILURES)
def test_failure_is_tried_and_logged_once(call, break_kernel, caplog, kind):
    error = FAILURES[kind]
    tries = break_kernel(error)
    with caplog.at_level(logging.INFO, logger="nsa"):
        for _ in range(4):
            call()
    assert tries == [torch.float32]
    assert warnings_of(caplog) == [f"{cause(error)}; sdpa serves this signature from now on"]
    assert nsa.routes() == [nsa.RouteRecord("sdpa", cause(error), 4)]


@pytest.mark.parametrize("kind", PASSING)
def test_an_error_of_the_system_is_retried_after_a_pause(call, break_kernel, caplog, monkeypatch, kind):
    """At most once a second, ever more rarely, until the kernel runs. Only the first failure is a warning."""
    forward, error, clock = query_major.forward, PASSING[kind], [100.0]
    monkeypatch.setattr(failures, "now", lambda: clock[0])
    tries = break_kernel(error)
    for pause, count in ((0, 1), (0.99, 1), (0.01, 2), (1.99, 2), (0.01, 3), (3.99, 3)):
        clock[0] += pause
        call()
        call()
        assert len(tries) == count
    reason = f"{cause(error)}; tried again after a pause"
    assert warnings_of(caplog) == [
        f"{cause(error)}; sdpa serves this signature, and the kernel is tried again in 1 s"
    ]
    assert nsa.routes() == [nsa.RouteRecord("sdpa", reason, 12)]
    monkeypatch.setattr(query_major, "forward", forward)
    clock[0] += 0.01
    call()
    assert warnings_of(caplog)[1] == f"the kernel runs again after 3 failed tries: {cause(error).partition(';')[0]}"
    assert [record.calls for record in nsa.routes() if record.route == "query_major"] == [1]
    assert not failures.broken


def test_the_pause_has_an_upper_limit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(failures, "now", lambda: clock[0])
    for _ in range(12):
        failures.remember("key", "ranges", OSError(28, "No space left on device"), "sdpa")
        clock[0] = failures.broken["key"].until
    assert failures.broken["key"].until - failures.LONGEST_PAUSE_S <= clock[0]
    assert failures.cause_of("key") is None


def test_once_per_variant(call, break_kernel, caplog):
    """Sequence lengths that launch the same kernel are one variant; what compiles another kernel is another one."""
    tries = break_kernel(RuntimeError("broken"))
    for shape in ({}, {"S": 2}, {"S": 2, "S_kv": 26}):
        call(**shape)
    assert len(tries) == 1
    for count, shape in enumerate(({"D": 32}, {"Dv": 32}, {"G": 3}, {"dtype": torch.float16}, {"causal": False}), 2):
        call(**shape)
        call(**shape)
        assert len(tries) == count
    assert len(warnings_of(caplog)) == 6


def test_another_route_is_another_signature(draw, same, break_kernel):
    tries = break_kernel(RuntimeError("broken"))
    q, k, v = draw()
    ranges = {"ranges": same([(0, 7)], 1, 3, 2)}
    blocks = {"block_indices": same([0], 1, 3, 2), "block_size": 7}
    for selection in (ranges, blocks, ranges | {"schedule": "per_head"}) * 2:
        nsa.selection_attention(q, k, v, **selection)
    assert len(tries) == 3


def test_kernel_that_works_again_is_not_tried(call, break_kernel, monkeypatch):
    """Sticky: until `reset`, or another process."""
    forward = query_major.forward
    break_kernel(RuntimeError("broken"))
    call()
    monkeypatch.setattr(query_major, "forward", forward)
    call()
    assert [r.route for r in nsa.routes()] == ["sdpa"]
    nsa.dispatch.reset()
    call()
    assert [r.route for r in nsa.routes()] == ["query_major"]


def test_fallback_without_packing_is_the_reference(call, break_kernel, caplog):
    break_kernel(RuntimeError("broken"))
    with nsa.configure(use_sel_pack=False):
        call()
    assert [r.route for r in nsa.routes()] == ["reference"]
    text = "query_major kernel failed: RuntimeError: broken; reference serves this signature from now on"
    assert warnings_of(caplog) == [text]


@pytest.mark.parametrize("kind", FAILURES)
def test_named_backend_raises_the_original_error(call, break_kernel, caplog, kind):
    """Every time, unchanged, and also after `auto` gave up."""
    error = FAILURES[kind]
    tries = break_kernel(error)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            call(backend="triton")
        assert raised.value is error
    assert len(tries) == 2
    assert warnings_of(caplog) == []
    call()
    with pytest.raises(type(error)):
        call(backend="triton")
    assert len(tries) == 4


PASSED_ON = {
    "out-of-memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "out-of-memory-by-type": torch.OutOfMemoryError("allocation failed"),
    "out-of-memory-of-the-driver": RuntimeError("Triton Error [CUDA]: out of memory"),
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


@pytest.mark.parametrize("kind", PASSED_ON)
def test_what_is_no_kernel_failure_is_passed_on(call, break_kernel, caplog, kind):
    """Memory may be there next time, a lost context never is, and a bug must be seen. None is remembered."""
    error = PASSED_ON[kind]
    tries = break_kernel(error)
    for count in (1, 2):
        with pytest.raises(type(error)) as raised:
            call()
        assert raised.value is error
        assert len(tries) == count
    assert warnings_of(caplog) == []
    assert nsa.routes() == []


def test_a_thousand_calls_try_it_once(draw, same, break_kernel):
    """What they cost is timed in the perf lane."""
    tries = break_kernel(RuntimeError("broken"))
    q, k, v = draw(S=1)
    ranges = same([(0, 7)], 1, 1, 2)
    want = nsa.selection_attention(q, k, v, ranges=ranges, max_selected=7)
    for _ in range(1000):
        assert torch.equal(nsa.selection_attention(q, k, v, ranges=ranges, max_selected=7), want)
    assert len(tries) == 1
    assert nsa.routes() == [nsa.RouteRecord("sdpa", "query_major kernel failed: RuntimeError: broken", 1001)]


def test_memory_may_be_there_next_time(call, break_kernel, monkeypatch):
    """Out of memory is the caller's to handle, and the kernel runs as soon as there is some."""
    forward = query_major.forward
    break_kernel(PASSED_ON["out-of-memory"])
    with pytest.raises(torch.OutOfMemoryError):
        call()
    monkeypatch.setattr(query_major, "forward", forward)
    call()
    assert [r.route for r in nsa.routes()] == ["query_major"]


def test_out_is_written_by_the_fallback(draw, same, break_kernel):
    break_kernel(RuntimeError("broken"))
    q, k, v = draw()
    ranges = same([(0, 7)], 1, 3, 2)
    out = torch.full_like(q, float("nan"))
    for _ in range(2):
        o, lse = nsa.selection_attention(q, k, v, ranges=ranges, out=out.fill_(float("nan")), return_lse=True)
        assert o is out
        assert not o.isnan().any()
        assert lse.isfinite().all()


def test_original_wrapper_falls_back(draw, same, break_kernel):
    tries = break_kernel(RuntimeError("broken"))
    q, k, v = draw()
    for _ in range(2):
        nsa.selection_attention_triton(
            q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), same([(0, 7)], 1, 3, 2)
        )
    assert len(tries) == 1
    assert nsa.routes() == [nsa.RouteRecord("sdpa", "query_major kernel failed: RuntimeError: broken", 2)]


def test_packed_rows_never_fall_back(draw, break_kernel):
    error = RuntimeError("broken")
    tries = break_kernel(error)
    Q, K, V = torch.ones(2, 4, 16), torch.ones(2, 9, 16), torch.ones(2, 9, 16)
    device = draw()[0].device
    for count in (1, 2):
        with pytest.raises(RuntimeError, match="^broken$"):
            nsa.sel_attn_fwd_dense_group(Q.to(device), K.to(device), V.to(device))
        assert len(tries) == count
