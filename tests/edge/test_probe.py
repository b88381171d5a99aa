"""A kernel's first compile in a child process: whatever happens to the child, the caller gets the right result.

The children are real, and so is what happens to them: a `sitecustomize` that only they import aborts, crashes, hangs.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import nsa
from nsa import probe
from nsa.call import Call
from nsa.reference import selection_reference
from nsa.testing.plugin import current_lane

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans", "untried")
ROOT = Path(nsa.__file__).parents[1]
HINT = " (NSA_PROBE=never launches it all the same)"
AT_LAUNCH = """
import ctypes, os, signal, sys
sys.path.insert(0, {root!r})
import torch
from nsa.kernels import launch
real = launch.Variant.launch
def broken(self, grid, device, tensors, numbers, common=True):
    {body}
launch.Variant.launch = broken
"""


@pytest.fixture
def inject(monkeypatch, tmp_path):
    """`inject(body)`: what the child's launches do; `inject(body, start=True)`: what it does before anything else."""

    def make(body, start=False):
        folder = tmp_path / "injected"
        folder.mkdir()
        text = body if start else AT_LAUNCH.format(root=str(ROOT), body=body)
        (folder / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))

    return make


@pytest.fixture
def asked(monkeypatch):
    """What each child was asked to try."""
    whats, ask = [], probe.ask
    monkeypatch.setattr(probe, "ask", lambda what, device: whats.append(what) or ask(what, device))
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


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]


# --- what happens to the child ----------------------------------------------------------------------------------------

# What its launch does, the cause, and whether it is kept for other processes.
FAULTS = {
    "abort": ("os.abort()", "killed by SIGABRT while compiling", True),
    "segfault": ("ctypes.string_at(0)", "killed by SIGSEGV while compiling", True),
    "wrong": (
        "real(self, grid, device, tensors, numbers, common); tensors[3].mul_(1.01)",
        "wrong result: max error 0.0",
        True,
    ),
    "passes": (
        "raise RuntimeError('PassManager::run failed')",
        "RuntimeError: PassManager::run failed while compiling",
        True,
    ),
    "compilation": (
        "from triton.compiler.errors import CompilationError; import ast; "
        "raise CompilationError('a = b', ast.parse('a').body[0], 'no')",
        "CompilationError: at 1:0:",
        True,
    ),
    "resources": (
        "from triton.runtime.errors import OutOfResources; raise OutOfResources(300_000, 232_448, 'shared memory')",
        "OutOfResources: out of resource: shared memory, Required: 300000, Hardware limit: 232448",
        True,
    ),
    "assembler-killed": (
        "raise RuntimeError('`ptxas` failed with error code -9')",
        f"RuntimeError: `ptxas` failed with error code -9 while compiling{HINT}",
        False,
    ),
    "exception": (
        "raise RuntimeError('no C compiler')",
        f"RuntimeError: no C compiler while compiling{HINT}",
        False,
    ),
    "memory": (
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB while compiling{HINT}",
        False,
    ),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", f"killed by SIGKILL while compiling{HINT}", False),
    "silent": ("os._exit(0)", f"exit status 0 without an answer while compiling{HINT}", False),
    "another": (
        "self.constexprs = self.constexprs | {'BLOCK_L': 7}; real(self, grid, device, tensors, numbers, common)",
        "RuntimeError: the child would compile another variant, (expected, got): {'constexprs': ",
        False,
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_at_launch(call, inject, asked, caplog, kind, kept):
    body, cause, lasting = FAULTS[kind]
    inject(body)
    for _ in range(3):
        call()
    (record,) = nsa.routes()
    assert (record.route, record.calls) == ("sdpa", 3)
    assert record.reason.startswith(f"ranges kernel failed: ProbeFailed: {cause}")
    assert warnings_of(caplog) == [f"{record.reason}; sdpa serves this signature from now on"]
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^" + cause.partition("(")[0]):
            call(backend="triton")
    assert len(asked) == (1 if lasting else 3), "who names it may have it tried again"
    assert [json.loads(path.read_text())["cause"] for path in kept()] == (
        [record.reason.removeprefix("ranges kernel failed: ProbeFailed: ")] if lasting else []
    )


HANG = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
print({phase!r}, flush=True)
open({pid!r}, "w").write(str(child.pid))
time.sleep(1000)
"""


@pytest.fixture
def limits(monkeypatch):
    """`limits(start, work)`: seconds that a child has."""

    def make(start, work):
        monkeypatch.setattr(probe, "START_S", start)
        monkeypatch.setattr(probe, "LIMIT_S", work)

    return make


@pytest.mark.parametrize("phase", ["starting", "compiling"])
def test_hang(call, inject, limits, tmp_path, phase, kept):
    """It ends with whatever it started, and speaks of the kernel only if that was being compiled."""
    limits(*((2.0, 100.0) if phase == "starting" else (100.0, 2.0)))
    pid = tmp_path / "pid"
    inject(HANG.format(phase=json.dumps({"nsa": "phase", "says": phase}), pid=str(pid)), start=True)
    began = time.monotonic()
    call()
    assert 2.0 < time.monotonic() - began < 2.0 + probe.REAP_S
    assert nsa.routes()[0].reason == f"ranges kernel failed: ProbeFailed: no answer in 2 s while {phase}" + (
        HINT if phase == "starting" else ""
    )
    assert len(kept()) == (phase == "compiling")
    assert gone(int(pid.read_text()))


def test_a_slow_start_is_no_hang(call, inject, limits, kept):
    """As from a cold file system: the kernel is given its time from when it is compiled."""
    limits(100.0, 4.0)
    inject("import time; time.sleep(5)", start=True)
    call()
    assert [record.route for record in nsa.routes()] == ["ranges"]
    (path,) = kept()
    assert json.loads(path.read_text())["cause"] is None


def test_what_a_death_leaves_behind_is_ended(call, inject, tmp_path):
    """A compiler that the child started, and that holds its output open. Nothing waits for it."""
    pid = tmp_path / "pid"
    text = HANG.format(phase=json.dumps({"nsa": "phase", "says": "compiling"}), pid=str(pid))
    inject(text.replace("time.sleep(1000)", "import os; os.abort()"), start=True)
    began = time.monotonic()
    call()
    assert time.monotonic() - began < 20
    assert nsa.routes()[0].reason == "ranges kernel failed: ProbeFailed: killed by SIGABRT while compiling"
    assert gone(int(pid.read_text()))


def test_what_a_right_child_leaves_behind_is_ended(call, inject, tmp_path):
    """It does not hold the output open."""
    pid = tmp_path / "pid"
    inject(
        "import subprocess; child = subprocess.Popen(['sleep', '1000'], stdout=-3, stderr=-3); "
        f"open({str(pid)!r}, 'w').write(str(child.pid)); real(self, grid, device, tensors, numbers, common)"
    )
    call()
    assert [record.route for record in nsa.routes()] == ["ranges"]
    assert gone(int(pid.read_text()))


def test_others_who_bury_children(call, kept):
    """Nobody learns how a child ended; its answer says enough."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        call()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [record.route for record in nsa.routes()] == ["ranges"]
    assert len(kept()) == 1


def test_no_child_has_children(call, monkeypatch, tmp_path):
    """Where `sys.executable` is an application, what is started is the application, which calls us."""
    log, application = tmp_path / "log", tmp_path / "application"
    script = f"#!{sys.executable}\nimport os; open({str(log)!r}, 'a').write(os.environ['NSA_PROBE'] + ' ')\n"
    application.write_text(script)
    application.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(application))
    monkeypatch.setenv("NSA_PROBE", "always")
    call()
    assert log.read_text().split() == ["never"]


def said(*phases, **says):
    answers = [{"nsa": "phase", "says": phase} for phase in phases] + [{"nsa": k, "says": v} for k, v in says.items()]
    return "".join(json.dumps(answer) + "\n" for answer in answers)


GARBAGE = '{"nsa": ["phase"], "says": "x"}\n{"nsa": "phase", "says": 1}\n{"nsa": {}, "says": {}}\n' + "[" * 200_000


@pytest.mark.parametrize(
    ("status", "out", "err", "verdict"),
    [
        (0, said("compiling", "running", "comparing", result="right"), "a warning", (None, True)),
        (0, said("comparing", result="max error 1"), "", ("wrong result: max error 1", True)),
        (-11, said("running"), "", ("killed by SIGSEGV while running", True)),
        (-6, said("compiling"), "a\nassert x\n\n", ("killed by SIGABRT while compiling: assert x", True)),
        (-6, "", "", (f"killed by SIGABRT while starting{HINT}", False)),
        (-15, said("compiling"), "", (f"killed by SIGTERM while compiling{HINT}", False)),
        (-99, said("compiling"), "", (f"killed by signal 99 while compiling{HINT}", False)),
        (1, said("compiling", error="OSError: no cc"), "", (f"OSError: no cc while compiling{HINT}", False)),
        (2, "noise", "usage", (f"exit status 2 without an answer while starting: usage{HINT}", False)),
        (1, said(result="right"), "", (f"exit status 1 without an answer while starting{HINT}", False)),
        (None, said("running"), "", ("no answer in 120 s while running", True)),
        (None, "", "", (f"no answer in 300 s while starting{HINT}", False)),
        (None, said("comparing"), "", (f"no answer in 120 s while comparing{HINT}", False)),
        (1, said("compiling", broken="PTXASError: 255"), "", ("PTXASError: 255 while compiling", True)),
        (1, said("starting", broken="PTXASError: 255"), "", (f"PTXASError: 255 while starting{HINT}", False)),
        (-6, said("compiling") + GARBAGE, "", ("killed by SIGABRT while compiling", True)),
    ],
)
def test_judge(status, out, err, verdict):
    assert probe.judge(status, out, err) == verdict


def gone(pid):
    """Whether a process has ended within a second; nobody may have buried it yet."""
    for _ in range(20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_import_error(call, inject, kept):
    inject("import sys; sys.modules['triton'] = None", start=True)
    call()
    (record,) = nsa.routes()
    assert record.route == "sdpa"
    assert "ModuleNotFoundError: import of triton" in record.reason
    assert record.reason.endswith(f" while starting{HINT}")
    assert kept() == []


NOISE = r"""os.write(1, b'\xff\xfe{"nsa": \n{"nsa": "result"}\n[1]\n{"nsa": ["x"], "says": 1}\n')"""
FORGED = """os.write(1, b'{"nsa": "result", "says": "forged"}\\n')"""


@pytest.mark.parametrize("when", ["start", "end"])
def test_what_others_print_is_no_answer(call, inject, asked, kept, when):
    if when == "start":
        inject(f"import os; {NOISE}", start=True)
    else:
        text = "import atexit; atexit.register(lambda: {}); real(self, grid, device, tensors, numbers, common)"
        inject(text.format(FORGED))
    call()
    assert [record.route for record in nsa.routes()] == ["ranges"]
    assert len(asked) == 1
    (path,) = kept()
    assert json.loads(path.read_text())["cause"] is None


def test_a_child_is_as_this_process_was_started(call, asked, monkeypatch, tmp_path):
    """Whatever lies in the current folder, and whatever became of the variable that Triton read long ago."""
    for module in ("json", "torch", "triton", "nsa", "sys"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "0" if current_lane() == "interpreter" else "1")
    call()
    assert [record.route for record in nsa.routes()] == ["ranges"]
    assert [what["interpreted"] for what in asked] == [current_lane() == "interpreter"]


def test_no_child_can_be_started(call, monkeypatch, tmp_path, kept):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    call()
    (record,) = nsa.routes()
    assert record.route == "sdpa"
    assert "no child process could be started: [Errno 2]" in record.reason
    with pytest.raises(probe.ProbeFailed), nsa.configure(probe="always"):
        call(backend="triton")
    with nsa.configure(probe="never"):
        call(backend="triton")
    assert kept() == []


def test_an_interrupt_ends_the_child(call, inject, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    inject(HANG.format(phase="", pid=str(pid)), start=True)

    def interrupted(child):
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert gone(int(pid.read_text()))
    assert nsa.routes() == []


def test_packed_rows_raise(answer, device):
    whats = answer(probe.Verdict("killed by SIGABRT while compiling", True))
    Q, K = torch.ones(2, 4, 16, device=device), torch.ones(2, 9, 16, device=device)
    for _ in range(2):
        with pytest.raises(probe.ProbeFailed, match="^killed by SIGABRT while compiling$"):
            nsa.sel_attn_fwd_dense_group(Q, K, K)
    assert len(whats) == 1


def test_a_compiled_call_falls_back(answer, draw, same):
    """The operator that `torch.compile` sees routes, probes and falls back when it runs."""
    whats = answer(probe.Verdict("killed by SIGABRT while compiling", True))
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
    whats = answer(probe.Verdict("RuntimeError: CUDA error: an illegal memory access while running", False))
    call()
    call()
    assert [(record.route, record.calls) for record in nsa.routes()] == [("sdpa", 2)]
    assert len(whats) == 1
