"""The processes that the gate starts: without a caller's git, and ended with this process however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from nsa.testing.machine import without_git

GRACE = 10  # seconds from SIGTERM to SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Linux sends the child SIGTERM when this process is gone, which cannot do so itself after SIGKILL. `exec` keeps that.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def run(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, output: IO[str] | None = None
) -> int:
    """Run Python with these arguments in a session of its own. Returns the exit status, of a signal as in subprocess.

    When this function returns or raises, no process of that session's group is left.

    Args:
        environment: by default, this process's. Git's variables are left out.
        output: takes stdout and stderr. By default, the child writes to those of this process.
    """
    command = [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env=without_git(environment), stdin=subprocess.DEVNULL, stdout=output,
        stderr=None if output is None else subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    ended = os.P_PID, process.pid, os.WEXITED | os.WNOWAIT  # leaves the process to `wait`
    try:
        os.waitid(*ended)
    except BaseException:
        _signal(process.pid, signal.SIGTERM)
        stop = time.monotonic() + GRACE
        while os.waitid(*ended[:2], ended[2] | os.WNOHANG) is None and time.monotonic() < stop:
            time.sleep(0.02)
        raise
    finally:
        _signal(process.pid, signal.SIGKILL)  # before `wait`, which frees the number of the group for other processes
        process.wait()
    return process.returncode


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def ended_is_interrupted() -> Iterator[None]:
    """Treat SIGTERM, by which CI cancels a job, and SIGHUP as Ctrl-C, so that children end and files are removed.

    Only the first signal interrupts. Later ones would interrupt the removal. A signal that this process ignores, as
    `nohup` has it, stays ignored.
    """
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise KeyboardInterrupt

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
