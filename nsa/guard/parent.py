"""Asks a child process about kernels, waits for its answers, and judges what its end means.

One child answers question after question. It is started at the first question, and at the next one after its death. It
ends with this process, or when no question has come for ``IDLE_S`` seconds. A launch of a compiled kernel does not come
here. Under CUDA graph capture nothing changes: the child captures nothing, this process asks CUDA for its version only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch

from nsa import settings
from nsa.guard import memory
from nsa.guard.memory import Verdict
from nsa.kernels.shared import passed, sources

logger = logging.getLogger("nsa")

START_S = 300.0  # seconds a child may take to import torch, from a cold file system, and to find its GPU
LIMIT_S = 120.0  # seconds from then on until it is taken to hang; it needs a few
IDLE_S = 30.0  # seconds for which a child waits for the next question, with its CUDA context
POLL_S = 0.02  # seconds between two looks at a child
REAP_S = 5.0  # seconds for a killed child to be gone
# Only a compiler or a kernel raises these. SIGKILL and SIGTERM come from outside, as when memory is short.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
AT_WORK = ("compiling", "running")  # phases in which a death or a hang speaks of the kernel

UNSEEN: frozenset[str] = frozenset()
"""Kernels, by name, that the GPU lane has not passed yet. A child tries them first on every GPU, also on one that the
compile matrix has passed. A new kernel begins here."""

# The child imports what this process would, from whichever folder it was started. The first question is read before a
# file of the current folder can shadow an import.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; question = json.loads(sys.stdin.readline()); "
    "sys.path[:] = question['path']; from nsa.guard.child import serve; serve(question, int(sys.argv[1]))"
)

_asking = threading.RLock()  # held while a child is asked
_child: Child | None = None  # which waits for a question


class ProbeFailed(RuntimeError):
    """A kernel was refused before it was compiled in this process; the text says why."""


def require(variant: Any, device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Called before Triton compiles ``variant`` (:class:`Variant`) for a launch on ``tensors``.

    Raises:
        ProbeFailed: the variant must not be compiled in this process.
    """
    mode = settings.get().probe
    if mode == "never" or device.type not in ("cuda", "cpu"):
        return
    if mode == "auto" and device.type == "cpu":
        return
    here = sources.triton_version(), sources.architecture(device)
    if mode == "auto" and variant.kernel.fn.__name__ not in UNSEEN and passed.passed(*here):
        return
    cause = find_out(variant.describe(tensors), device)
    if cause is not None:
        raise ProbeFailed(cause)


def find_out(what: dict[str, Any], device: torch.device) -> str | None:
    """Why the kernel described by ``what`` must not be compiled here; None if it may.

    A child is asked once, however many threads want to know, and again only if the last one could not say.
    """
    key = memory.key_of(what, device)
    verdict = before = memory.known.get(key)
    if verdict is None or not verdict.lasting:
        with _asking:
            verdict = memory.known.get(key)
            if verdict is None or verdict is before:  # no other thread has asked while this one waited
                verdict = memory.read(key)
                if verdict is None:
                    logger.info("%s: its first compile runs in a child process (NSA_PROBE=never: not)", what["kernel"])
                    verdict = ask(what, device)
                    if verdict.lasting:
                        memory.write(key, verdict.cause, what)
                memory.known[key] = verdict
    return verdict.cause


def ask(what: dict[str, Any], device: torch.device) -> Verdict:
    """Have a child compile and run the kernel, for at most ``LIMIT_S`` seconds once it compiles.

    What a used child says against a variant may be an earlier variant's doing: then a new child is asked.
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
    finally:  # also where the caller was interrupted
        if child is not None and _child is not child:
            child.end()
    return ask(what, device) if used else verdict


class Child:
    """A process of `nsa.guard.child`. It answers in a file of its own: what libraries print there is no answer.

    Files, no pipes: what a child leaves behind can hold them open, and nothing waits for that. Its process group is its
    own, to be killed with the compilers it started. Popen starts a new program: CUDA would not survive a fork.
    """

    def __init__(self, executable: str, environment: dict[str, str], path: list[str]) -> None:
        self.started_as = executable, environment, path
        with contextlib.ExitStack() as stack:
            self.files = [stack.enter_context(tempfile.TemporaryFile()) for _ in ("answers", "prints")]
            handle = self.files[0].fileno()
            self.process = subprocess.Popen(
                [executable, "-c", _BOOT, str(handle)], stdin=subprocess.PIPE, stdout=self.files[1], bufsize=0,
                stderr=subprocess.STDOUT, pass_fds=[handle], env=environment, start_new_session=True,
            )  # fmt: skip
            assert self.process.stdin is not None
            self.questions = stack.enter_context(self.process.stdin)
            self.disown = stack.pop_all().close  # a child ends by itself once no process can ask it any more

    def ask(self, question: dict[str, Any]) -> Verdict:
        for file in self.files:  # of the last question; the child writes on from where they are
            file.seek(0)
            file.truncate()
        with contextlib.suppress(BrokenPipeError):  # why the child is dead is about to be found out
            self.questions.write(json.dumps(question).encode() + b"\n")
        began, limit = time.monotonic(), START_S
        while True:
            status = self.process.poll()
            texts = (os.pread(at := file.fileno(), os.fstat(at).st_size, 0) for file in self.files)
            answers, printed = (text.decode("utf-8", "replace") for text in texts)
            says = {"phase": "starting"} | dict(json.loads(line) for line in answers.split("\n")[:-1])
            if status is not None or "result" in says or time.monotonic() - began > limit:
                return judge(0 if "result" in says else status, says, printed)
            if limit == START_S and says["phase"] != "starting":  # importing torch has a time of its own
                began, limit = time.monotonic(), LIMIT_S
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill the child and what it started, or what it left behind; then reap it."""
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
    """In a fork: the child belongs to the process that started it, and a thread that holds the lock may not exist."""
    global _child, _asking
    child, _child, _asking = _child, None, threading.RLock()
    if child is not None:
        child.disown()
        child.process.returncode = 0


os.register_at_fork(after_in_child=_forked)


def judge(status: int | None, says: dict[str, str], printed: str) -> Verdict:
    """What a child's end means.

    Args:
        status: as ``Popen.returncode``, 0 with an answer; None: neither an end nor an answer came in time.
        says: its phase, and its ``result``, an ``error`` or what is ``broken``. printed: by it and by what it started.
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
        return Verdict(None if says["result"] == "right" else f"wrong result: {says['result']}", True)
    else:
        cause, lasting = f"exit status {status} without an answer while {phase}{last}", False
    return Verdict(cause, True) if lasting else _unsure(cause)


def _unsure(cause: str) -> Verdict:
    return Verdict(f"{cause} (NSA_PROBE=never launches it all the same)", False)
