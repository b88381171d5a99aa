"""Asks a child process about kernels, waits for its answers, and judges how the child ended.

One child answers all questions. It is started at the first question, and again at the first question after its death.
It ends with this process, or when no question has come for ``IDLE_S`` seconds. Only first compiles use the child, not
launches of compiled kernels. A first compile during CUDA graph capture does not disturb the capture, because the child
captures nothing and this process only asks CUDA for its version.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

import torch

from nsa import settings
from nsa.guard import memory
from nsa.guard.memory import Verdict
from nsa.kernels.families import BACKWARD, FAMILIES
from nsa.kernels.shared import passed, sources
from nsa.kernels.shared.asking import Untried

logger = logging.getLogger("nsa")

START_S = 300.0  # seconds in which a child must import torch, perhaps from a cold file system, and find its GPU
LIMIT_S = 120.0  # seconds for a trial after that; a trial takes a few seconds, so a longer one counts as hanging
IDLE_S = 30.0  # seconds for which an idle child keeps its CUDA context and waits for the next question
POLL_S = 0.02  # seconds between two looks at a child
REAP_S = 5.0  # seconds to wait for the end of a killed child
# Signals that only a compiler or a kernel raises. SIGKILL and SIGTERM come from outside, as when memory is short.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
AT_WORK = ("compiling", "running")  # phases in which a death or a hang is the kernel's fault

# The child's `sys.path` is that of this process. The child reads the first question before it imports anything from the
# current folder, whose files could shadow the standard library.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; question = json.loads(sys.stdin.readline()); "
    "sys.path[:] = question['path']; from nsa.guard.child import serve; serve(question, int(sys.argv[1]))"
)

_asking = threading.RLock()  # held while a child is asked
_child: Child | None = None  # the child that waits for a question


class ProbeFailed(RuntimeError):
    """The kernels of a call were refused before they were compiled in this process. The text says why.

    lasting: whether the verdict is about the kernels; else it is about this moment or environment.
    """

    def __init__(self, cause: str, lasting: bool = True) -> None:
        super().__init__(cause)
        self.lasting = lasting


def require(variant: Any, device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Called before Triton compiles ``variant`` (:class:`Variant`) for a launch on ``tensors``.

    Raises:
        Untried: the variant must not be compiled in this process until :func:`admit` has tried its call.
    """
    mode = settings.get().probe
    if mode == "never" or device.type not in ("cuda", "cpu"):
        return
    if mode == "auto":
        name = variant.kernel.fn.__name__
        seen = not any(family.unseen and name in family.functions() for family in (*FAMILIES, BACKWARD))
        if device.type == "cpu" or (seen and passed.passed(sources.triton_version(), sources.architecture(device))):
            return
    described = variant.describe(tensors)
    if memory.key_of(described, device) not in memory.admitted:
        raise Untried(described)


def admit(untried: Untried, what: dict[str, Any], device: torch.device) -> None:
    """Have a child make the small call ``what`` (:func:`nsa.guard.small.describe`), unless one has made it before.

    Raises:
        ProbeFailed: the kernels of the call must not be compiled in this process.
    """
    verdict = find_out(what, device)
    if verdict.cause is None:
        memory.admitted |= {memory.key_of(variant, device) for variant in verdict.variants}
        wanted = json.loads(json.dumps(untried.variant))
        if memory.key_of(wanted, device) in memory.admitted:
            return
        alike = [x for x in verdict.variants if x["kernel"] == wanted["kernel"]] or [dict.fromkeys(wanted)]
        other = {key: (wanted[key], alike[0][key]) for key in wanted if wanted[key] != alike[0][key]}
        verdict = _unsure(f"the child compiled another variant, (expected, got): {other}")
    raise ProbeFailed(str(verdict.cause), verdict.lasting)


def find_out(what: dict[str, Any], device: torch.device) -> Verdict:
    """Whether the kernels of the call ``what`` may be compiled here.

    If several threads ask at the same time, a child is asked once. If the verdict is not lasting, the next call asks a
    child again.
    """
    key = memory.key_of(what, device)
    verdict = before = memory.known.get(key)
    if verdict is None or not verdict.lasting:
        with _asking:
            verdict = memory.known.get(key)
            if verdict is None or verdict is before:  # no other thread has asked while this one waited
                verdict = memory.read(key)
                if verdict is None:
                    logger.info("%s: compiled first in a child process (NSA_PROBE=never: not)", what["kernel"])
                    verdict = ask(what, device)
                    if verdict.lasting:
                        memory.write(key, verdict.cause, what, verdict.variants)
                memory.known[key] = verdict
    return verdict


def ask(what: dict[str, Any], device: torch.device) -> Verdict:
    """Have a child make the call.

    An earlier call may have damaged a child that was used before. If such a child finds a fault, a new child is
    asked.
    """
    global _child
    path = [entry for entry in sys.path if isinstance(entry, str)]
    started_as = sys.executable or "python", settings.child_environment(what["interpreted"]), path
    if _child is not None and _child.started_as != started_as:
        end_child()
    used, child, _child = _child is not None, _child, None
    question = {"what": what, "device": str(device), "arch": sources.architecture(device), "path": path}
    try:
        child = child or Child(*started_as)
        verdict = child.ask(question | {"limit_s": START_S + LIMIT_S, "idle_s": IDLE_S})
        if verdict.cause is None:
            _child = child
            return verdict
    except OSError as error:
        return _unsure(f"no child process could be started: {error}")
    finally:  # also after KeyboardInterrupt
        if child is not None and _child is not child:
            child.end()
    return ask(what, device) if used else verdict


def _above_streams(file: IO[bytes]) -> IO[bytes]:
    """``file`` with a descriptor above 2. In a process whose stdin or stdout is closed, as a daemon's, a new file gets
    their number, and the child would take it for one of them.
    """
    if file.fileno() > 2:
        return file
    with file:
        return os.fdopen(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3), "w+b")


class Child:
    """A process that runs `nsa.guard.child`.

    It writes its answers to a file of their own, so that text printed by libraries is not taken for an answer. Files
    are used instead of pipes because a process that outlives the child could hold a pipe open, and reading would wait
    for it. The child leads a process group of its own, which is killed together with the compilers it started. A new
    program is started instead of a fork, which CUDA would not survive.
    """

    def __init__(self, executable: str, environment: dict[str, str], path: list[str]) -> None:
        self.started_as = executable, environment, path
        with contextlib.ExitStack() as stack:
            self.files = [stack.enter_context(_above_streams(tempfile.TemporaryFile())) for _ in ("answers", "prints")]
            handle = self.files[0].fileno()
            self.process = subprocess.Popen(
                [executable, "-c", _BOOT, str(handle)], stdin=subprocess.PIPE, stdout=self.files[1], bufsize=0,
                stderr=subprocess.STDOUT, pass_fds=[handle], env=environment, start_new_session=True,
            )  # fmt: skip
            assert self.process.stdin is not None
            self.questions = stack.enter_context(self.process.stdin)
            self.disown = stack.pop_all().close  # closes the files; the child ends once its stdin is closed

    def ask(self, question: dict[str, Any]) -> Verdict:
        """Send a question and wait until the child has answered, has ended or is out of time."""
        for file in self.files:  # empties them; the child shares the file positions
            file.seek(0)
            file.truncate()
        with contextlib.suppress(BrokenPipeError):  # the child is dead: `poll` finds out how it ended
            self.questions.write(json.dumps(question).encode() + b"\n")
        began, limit = time.monotonic(), START_S
        while True:
            status = self.process.poll()
            texts = (os.pread(at := file.fileno(), os.fstat(at).st_size, 0) for file in self.files)
            answers, printed = (text.decode("utf-8", "replace") for text in texts)
            says = {"phase": "starting"} | dict(json.loads(line) for line in answers.split("\n")[:-1])
            if status is not None or "result" in says or time.monotonic() - began > limit:
                return judge(0 if "result" in says else status, says, printed)
            if limit == START_S and says["phase"] != "starting":  # the start is over: the limit of the trial holds
                began, limit = time.monotonic(), LIMIT_S
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill the child's process group and reap the child."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_S)
        self.disown()


@atexit.register
def end_child() -> None:
    """End the child that waits for a question, if there is one."""
    global _child
    child, _child = _child, None
    if child is not None:
        child.end()


def _forked() -> None:
    """After a fork: the child process belongs to the parent, and the thread that held the lock may not exist."""
    global _child, _asking
    child, _child, _asking = _child, None, threading.RLock()
    if child is not None:
        child.disown()
        child.process.returncode = 0


os.register_at_fork(after_in_child=_forked)


def judge(status: int | None, says: dict[str, str], printed: str) -> Verdict:
    """The verdict that follows from what a child said and how it ended.

    Args:
        status: 0 if the child gave an answer, else its ``Popen.returncode``; None if its time ran out.
        says: the child's last ``phase``, and its ``result``, ``error`` or ``broken`` if there is one.
        printed: standard output and error of the child and of the processes it started.
    """
    phase, error = says["phase"], says.get("broken", says.get("error"))
    at_work = phase in AT_WORK
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if status is None:
        cause, lasting = f"no answer in {START_S if phase == 'starting' else LIMIT_S:g} s while {phase}", at_work
    elif error is not None and status > 0:
        cause, lasting = f"{error} while {phase}", "broken" in says and phase == "compiling"
    elif status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        cause, lasting = f"killed by {name} while {phase}{last}", name in CRASHES and at_work
    elif status == 0 and "result" in says:
        if says["result"] != "right":
            return Verdict(f"wrong result: {says['result']}", True)
        return Verdict(None, True, tuple(json.loads(says.get("variants", "[]"))))
    else:
        cause, lasting = f"exit status {status} without an answer while {phase}{last}", False
    return Verdict(cause, True) if lasting else _unsure(cause)


def _unsure(cause: str) -> Verdict:
    return Verdict(f"{cause} (NSA_PROBE=never launches the kernel without this check)", False)
