"""Asks a child process about the kernels of a call, waits for its end, and judges what it said and how it ended.

Each question has a child of its own, so that an earlier call is never taken for the cause of a fault. Only first
compiles use a child, not launches of compiled kernels. A first compile during CUDA graph capture does not disturb the
capture, because the child captures nothing and this process only asks CUDA for its version.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import torch

from nsa import settings
from nsa.guard import memory
from nsa.guard.memory import Verdict
from nsa.kernels.families import BACKWARDS, FAMILIES
from nsa.kernels.shared import passed, sources
from nsa.kernels.shared.asking import Untried

logger = logging.getLogger("nsa")

LIMIT_S = 120.0  # seconds for a trial, which takes a few; a longer one hangs, and the child's own alarm ends it
START_S = 300.0  # more seconds for a child to import torch, perhaps from a cold file system, and to find its GPU
REAP_S = 5.0  # seconds to wait for the end of a killed child
# Signals that only a compiler or a kernel raises. SIGKILL and SIGTERM come from outside, as when memory is short.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
AT_WORK = ("compiling", "running")  # phases in which a death or a hang is the kernel's fault

# The child's `sys.path` is that of this process. The child reads the question before it imports anything from the
# current folder, whose files could shadow the standard library.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; question = json.loads(sys.argv[1]); "
    "sys.path[:] = question['path']; from nsa.guard.child import serve; serve(question)"
)

_asking = threading.Lock()  # held while a child is asked
os.register_at_fork(after_in_child=_asking._at_fork_reinit)  # type: ignore[attr-defined]  # its thread may be gone


class ProbeFailed(RuntimeError):
    """The kernels of a call were refused before they were compiled here. ``lasting`` is that of the verdict."""

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
        seen = not any(family.unseen and name in family.functions() for family in (*FAMILIES, *BACKWARDS))
        if device.type == "cpu" or (seen and passed.passed(sources.triton_version(), sources.architecture(device))):
            return
    described = variant.describe(tensors)
    if memory.key_of(described, device) not in memory.admitted:
        raise Untried(described)


def admit(untried: Untried, described: dict[str, Any], device: torch.device) -> None:
    """Have a child make the small call ``described`` (:func:`nsa.guard.small.describe`), unless one has made it before.

    Raises:
        ProbeFailed: the kernels of the call must not be compiled in this process.
    """
    verdict = find_out(described, device)
    if verdict.cause is None:
        memory.admitted |= {memory.key_of(variant, device) for variant in verdict.variants}
        if memory.key_of(untried.variant, device) in memory.admitted:
            return
        alike = [x for x in verdict.variants if x["kernel"] == untried.variant["kernel"]]
        verdict = _unsure(f"the child compiled another variant: expected {untried.variant}, got {alike}")
    raise ProbeFailed(str(verdict.cause), verdict.lasting)


def find_out(described: dict[str, Any], device: torch.device) -> Verdict:
    """Whether the kernels of the call ``described`` may be compiled here.

    If several threads ask at the same time, a child is asked once. If the verdict is not lasting, the next call asks a
    child again.
    """
    key = memory.key_of(described, device)
    before = memory.verdicts.get(key)
    with _asking:
        verdict = memory.verdicts.get(key)
        if verdict is None or (verdict is before and not verdict.lasting):  # else another thread asked meanwhile
            verdict = memory.read(key)
            if verdict is None:
                logger.info("%s: compiled first in a child process (NSA_PROBE=never: not)", described["kernel"])
                verdict = ask(described, device)
                if verdict.lasting:
                    memory.write(key, verdict, described)
            memory.verdicts[key] = verdict
    return verdict


def ask(described: dict[str, Any], device: torch.device) -> Verdict:
    """Have a child make the call, and end it with the compilers that it started.

    The child, which runs `nsa.guard.child`, answers in the file that is its stdin, because libraries print to the other
    streams. The child leads a process group of its own. It is a new program, not a fork, which CUDA would not survive.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    question = {"call": described, "device": str(device), "arch": sources.architecture(device), "path": path}
    command = [sys.executable or "python", "-c", _BOOT, json.dumps(question | {"limit_s": LIMIT_S})]
    environment = settings.child_environment(described["interpreted"])
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as prints:
        try:
            child = subprocess.Popen(
                command, stdin=answers, stdout=prints, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            return _unsure(f"no child process could be started: {error}")
        try:
            status = child.wait(START_S + LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # also after KeyboardInterrupt
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(REAP_S)
        said, printed = (os.pread(file.fileno(), 1 << 24, 0).decode("utf-8", "replace") for file in (answers, prints))
    return judge(status, {"phase": "starting"} | dict(map(json.loads, said.split("\n")[:-1])), printed)


def judge(status: int | None, says: dict[str, str], printed: str) -> Verdict:
    """The verdict that follows from what a child said and printed, and how it ended.

    ``status`` is its exit status, as subprocess gives it, or None if the time for start and trial ran out.
    """
    phase, error = says["phase"], says.get("broken", says.get("error"))
    if "result" in says:
        if says["result"] == "right":
            return Verdict(None, True, tuple(json.loads(says["variants"])))
        return Verdict(f"wrong result: {says['result']}", True)
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last, lasting = f": {lines[-1][:300]}" if lines else "", False
    if status is None or status == -signal.SIGALRM:
        limit = START_S + LIMIT_S if status is None else LIMIT_S
        cause, lasting = f"no answer in {limit:g} s while {phase}", phase in AT_WORK
    elif error is not None and status > 0:
        cause, lasting = f"{error} while {phase}", "broken" in says and phase == "compiling"
    elif status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        cause, lasting = f"killed by {name} while {phase}{last}", name in CRASHES and phase in AT_WORK
    else:
        cause = f"exit status {status} without an answer while {phase}{last}"
    return Verdict(cause, True) if lasting else _unsure(cause)


def _unsure(cause: str) -> Verdict:
    return Verdict(f"{cause} (NSA_PROBE=never launches the kernel without this check)", False)
