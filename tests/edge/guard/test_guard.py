"""A kernel's first compile in a child process: whatever happens to the child, the caller gets the right result.

The children are real, and so is what happens to them: a `sitecustomize` that only they import aborts, crashes, hangs.
"""

import ast
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import nsa
from nsa import failures
from nsa.call import Call
from nsa.guard import ProbeFailed, parent
from nsa.guard.memory import Verdict
from nsa.kernels.shared import errors
from nsa.plain.oracle import selection_reference
from nsa.testing.plugin import current_lane

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans", "untried")
ROOT = Path(nsa.__file__).parents[1]
HINT = " (NSA_PROBE=never launches the kernel without this check)"
AGAIN = "; tried again after a pause"
REAL = "real(self, grid, device, tensors, numbers, common)"
AT_LAUNCH = """
import ast, ctypes, os, signal, sys
sys.path.insert(0, {root!r})
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from nsa.kernels.shared import launch
real = launch.Variant.launch
def broken(self, grid, device, tensors, numbers, common=True):
    {body}
launch.Variant.launch = broken
"""


@pytest.fixture
def inject(monkeypatch, tmp_path):
    """`inject(body, start)`: what the child's launches do, and what it does before anything else."""

    def make(body="", start=""):
        folder = tmp_path / "injected"
        folder.mkdir()
        text = AT_LAUNCH.format(root=str(ROOT), body=body) if body else ""
        (folder / "sitecustomize.py").write_text(f"{start}\n{text}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))

    return make


@pytest.fixture
def asked(monkeypatch):
    """What children were asked to try. The same question twice has the same answer, without another child."""
    whats, ask, verdicts = [], parent.ask, {}

    def once(what, device):
        whats.append(what)
        key = json.dumps(what)
        if key not in verdicts:
            verdicts[key] = ask(what, device)
        return verdicts[key]

    monkeypatch.setattr(parent, "ask", once)
    return whats


@pytest.fixture
def call(draw, same):
    """A call, compared with the reference."""
    q, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    want = selection_reference(Call.of(q.double(), k, v, ranges=ranges))[0]

    def make(backend="auto", **keywords):
        o = nsa.selection_attention(q, k, v, ranges=ranges, backend=backend, **keywords)
        torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-5)

    return make


# --- what happens to the child ----------------------------------------------------------------------------------------

HANG = "import subprocess, time; x = subprocess.Popen(['sleep', '100000']); open({!r}, 'w').write(str(x.pid)); "
# What its launch does, the cause, and whether it is kept for other processes.
FAULTS = {
    "abort": ("os.abort()", "killed by SIGABRT", True),
    "wrong": (f"{REAL}; tensors[3].mul_(1.01)", "wrong result: max error 0.0", True),
    "compilation": ("raise CompilationError('a = b', ast.parse('a').body[0], 'no')", "CompilationError: at 1:0:", True),
    "exception": ("raise RuntimeError('no C compiler')", "RuntimeError: no C compiler", False),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_at_launch(call, inject, asked, caplog, kind, kept, monkeypatch, tmp_path):
    """A compiler that the child started, and that holds its output open, ends with the child."""
    monkeypatch.setattr(failures, "now", lambda: 0.0)  # no pause ends
    body, cause, lasting = FAULTS[kind]
    cause += "" if kind in ("wrong", "compilation") else " while compiling" + HINT * (not lasting)
    inject(HANG.format(str(tmp_path / "pid")) + body)
    for _ in range(3):
        call()
    (record,) = nsa.routes()
    assert (record.route, record.calls) == ("sdpa", 3)
    assert record.reason.startswith(f"query_major kernel failed: ProbeFailed: {cause}")
    why = record.reason if lasting else record.reason.removesuffix(AGAIN)
    assert lasting or why != record.reason
    end = " from now on" if lasting else ", and the kernel is tried again in 1 s"
    warned = [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]
    assert warned == [f"{why}; sdpa serves this signature{end}"]
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^" + cause.partition("(")[0]):
            call(backend="triton")
    assert len(asked) == (1 if lasting else 3), "who names it may have it tried again"
    assert [json.loads(path.read_text())["cause"] for path in kept()] == (
        [record.reason.removeprefix("query_major kernel failed: ProbeFailed: ")] if lasting else []
    )
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("error", "broken"), [
    (RuntimeError("PassManager::run failed"), True),
    (CompilationError("a = b", ast.parse("a").body[0], "no"), True),
    (OutOfResources(300_000, 232_448, "shared memory"), True),
    (RuntimeError("`ptxas` failed with error code -9"), False),
    (RuntimeError("PassManager::run failed: `ptxas` failed with error code 137"), False),
    (RuntimeError("no C compiler"), False),
    (torch.OutOfMemoryError("no room"), False),
])  # fmt: skip
def test_errors_of_a_broken_kernel(error, broken):
    assert errors.broken(error) == broken


def test_a_child_that_compiles_something_else_admits_nothing(call, inject, asked):
    """Its verdict says nothing about what the caller is about to compile."""
    inject("self.options = self.options | {'num_warps': 8}; " + REAL)
    call()
    (record,) = nsa.routes()
    text = "query_major kernel failed: ProbeFailed: the child compiled another variant: expected {'kernel': '_fwd"
    assert record.reason.startswith(text)
    assert "'options': {'num_warps': 8" in record.reason
    assert record.reason.endswith(f"{HINT}{AGAIN}")
    assert (record.route, len(asked)) == ("sdpa", 1)


@pytest.mark.parametrize("phase", ["starting", "compiling"])
def test_hang(call, inject, monkeypatch, tmp_path, phase, kept):
    """It ends with whatever it started, and speaks of the kernel only if that was being compiled."""
    hang = HANG.format(str(tmp_path / "pid")) + "time.sleep(100000)"
    starts = phase == "starting"
    inject("" if starts else hang, hang if starts else "")
    monkeypatch.setattr(parent, "START_S", 3.0 if starts else 600.0)
    monkeypatch.setattr(parent, "LIMIT_S", 2.0)
    call()
    seconds, end = (5, HINT + AGAIN) if starts else (2, "")
    assert nsa.routes()[0].reason == (
        f"query_major kernel failed: ProbeFailed: no answer in {seconds} s while {phase}{end}"
    )
    assert len(kept()) == (not starts)
    assert gone(int((tmp_path / "pid").read_text()))


NOISE = r"""os.write(1, b'\xff\xfe["result", \n["result"]\n[1]\n["result", "wrong"]\n' + b'[' * 200_000 + b'\n')"""
START = f"""
import os, signal, sys
{NOISE}
def alarm(seconds):
    imported = "nsa" in sys.modules and sys.modules["torch"].zeros is not None
    open({{log!r}}, "a").write(f"{{{{seconds}}}} {{{{imported}}}} {{{{os.environ['NSA_PROBE']}}}}")
signal.alarm = alarm
"""


def test_a_right_child_is_right_in_any_surroundings(call, inject, asked, monkeypatch, tmp_path, kept):
    """Its time begins once torch is imported. What others print is no answer: before it begins, while it is at work,
    nor as its end might print it. A compiler that holds its output open ends with it. It is as this process
    was started, not as the current folder and TRITON_INTERPRET are. Others may bury it, so that its status is unknown.
    It asks no child of its own, which an application in the place of `sys.executable` might.
    """
    log, pid = tmp_path / "log", tmp_path / "pid"
    at_work = f"{NOISE}; import atexit; atexit.register(lambda: {NOISE}); "
    inject(at_work + HANG.format(str(pid)) + REAL, START.format(log=str(log)))
    for module in ("json", "torch", "triton", "nsa", "sys"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('not this one')")
    ask = parent.ask

    def ask_elsewhere(described, device):  # only then, because Triton reads the variable in later imports, too
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0" if current_lane() == "interpreter" else "1")
            return ask(described, device)

    monkeypatch.setattr(parent, "ask", ask_elsewhere)
    monkeypatch.setenv("NSA_PROBE", "always")
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        call()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [record.route for record in nsa.routes()] == ["query_major"]
    assert log.read_text() == "120 True never"
    assert [described["interpreted"] for described in asked] == [current_lane() == "interpreter"]
    assert [json.loads(path.read_text())["cause"] for path in kept()] == [None]
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize(("status", "phase", "says", "printed", "verdict"), [
    (-9, "comparing", {"result": "right", "variants": '[{"f": 1}]'}, "a warning", (None, True, ({"f": 1},))),
    (-9, "comparing", {"result": "max error 1"}, "", ("wrong result: max error 1", True)),
    (-11, "running", {}, "", ("killed by SIGSEGV while running", True)),
    (-6, "compiling", {}, "a\nassert x\n\n", ("killed by SIGABRT while compiling: assert x", True)),
    (-6, "starting", {}, "", (f"killed by SIGABRT while starting{HINT}", False)),
    (-9, "compiling", {}, "", (f"killed by SIGKILL while compiling{HINT}", False)),
    (0, "compiling", {}, "", (f"exit status 0 without an answer while compiling{HINT}", False)),
    (-15, "compiling", {}, "", (f"killed by SIGTERM while compiling{HINT}", False)),
    (-99, "compiling", {}, "", (f"killed by signal 99 while compiling{HINT}", False)),
    (1, "compiling", {"error": "OSError: no cc"}, "", (f"OSError: no cc while compiling{HINT}", False)),
    (2, "starting", {}, "usage", (f"exit status 2 without an answer while starting: usage{HINT}", False)),
    (-14, "running", {}, "", ("no answer in 120 s while running", True)),
    (None, "starting", {}, "", (f"no answer in 420 s while starting{HINT}", False)),
    (-14, "comparing", {}, "", (f"no answer in 120 s while comparing{HINT}", False)),
    (1, "compiling", {"broken": "PTXASError: 255"}, "", ("PTXASError: 255 while compiling", True)),
    (1, "starting", {"broken": "PTXASError: 255"}, "", (f"PTXASError: 255 while starting{HINT}", False)),
])  # fmt: skip
def test_judge(status, phase, says, printed, verdict):
    assert parent.judge(status, {"phase": phase} | says, printed) == Verdict(*verdict)


def gone(pid):
    """Whether a killed process ends; it may wait for its parent to reap it. Five minutes, for a busy machine."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_import_error(call, inject, kept):
    inject(start="import sys; sys.modules['triton'] = None")
    call()
    (record,) = nsa.routes()
    assert record.route == "sdpa"
    assert "ModuleNotFoundError: import of triton" in record.reason
    assert record.reason.endswith(f" while starting{HINT}{AGAIN}")
    assert kept() == []


def test_no_child_can_be_started(call, monkeypatch, tmp_path, kept):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    call()
    (record,) = nsa.routes()
    assert record.route == "sdpa"
    assert "no child process could be started: [Errno 2]" in record.reason
    with pytest.raises(ProbeFailed), nsa.configure(probe="always"):
        call(backend="triton")
    with nsa.configure(probe="never"):
        call(backend="triton")
    assert kept() == []


def test_an_interrupt_ends_the_child(call, inject, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    inject(start=HANG.format(str(pid)) + "time.sleep(100000)")

    wait = subprocess.Popen.wait

    def interrupted(child, seconds):
        if seconds == parent.REAP_S:
            return wait(child, seconds)
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert gone(int(pid.read_text()))
    assert nsa.routes() == []


def test_a_fork_can_ask_while_a_thread_of_its_parent_waits(answer):
    """The thread that holds the lock does not exist there. Without a new lock the fork waits until it is killed."""
    answer(Verdict("it aborts", True))
    with parent._asking, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads
        fork = os.fork()
        if fork == 0:
            signal.alarm(60)
            os._exit(parent.find_out({"kernel": "_fwd_kernel"}, torch.device("cpu")).cause != "it aborts")
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0


# --- callers ----------------------------------------------------------------------------------------------------------


def test_packed_rows_raise(answer, device):
    whats = answer(Verdict("killed by SIGABRT while compiling", True))
    Q, K = torch.ones(2, 4, 16, device=device), torch.ones(2, 9, 16, device=device)
    for _ in range(2):
        with pytest.raises(ProbeFailed, match="^killed by SIGABRT while compiling$"):
            nsa.sel_attn_fwd_dense_group(Q, K, K)
    assert len(whats) == 1


def test_a_compiled_call_falls_back(answer, draw, same):
    """The operator that `torch.compile` sees routes, probes and falls back when it runs."""
    whats = answer(Verdict("killed by SIGABRT while compiling", True))
    q, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    torch._dynamo.reset()
    graph = torch.compile(
        lambda q, k, v: nsa.selection_attention(q, k, v, ranges=ranges), backend="aot_eager", fullgraph=True
    )
    want = selection_reference(Call.of(q.double(), k, v, ranges=ranges))[0]
    for _ in range(2):
        torch.testing.assert_close(graph(q, k, v).double(), want, rtol=0, atol=1e-5)
    torch._dynamo.reset()
    assert [(record.route, record.calls) for record in nsa.routes()] == [("sdpa", 2)]
    assert len(whats) == 1


def test_what_happened_in_the_child_is_no_state_of_this_process(call, answer):
    """Its context was lost or its memory full; ours is not, so the error is the kernel's and remembered."""
    whats = answer(Verdict("RuntimeError: CUDA error: an illegal memory access while running", False))
    call()
    call()
    assert [(record.route, record.calls) for record in nsa.routes()] == [("sdpa", 2)]
    assert len(whats) == 1
