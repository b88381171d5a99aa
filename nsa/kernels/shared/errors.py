"""Which errors mean that a kernel is broken. Triton is imported only when a caller asks for its errors."""

from __future__ import annotations

import functools
import re
import signal
import subprocess

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit status of a process, and of the shell that started it


@functools.cache
def compile_errors() -> tuple[type[BaseException], ...]:
    """Triton's own errors: CompilationError, OutOfResources, since 3.3 PTXASError. Empty where Triton is missing."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def broken(error: BaseException) -> bool:
    """Whether an error means that Triton cannot compile the kernel, now or later."""
    of_triton = isinstance(error, compile_errors()) or "PassManager::run failed" in str(error)
    return of_triton and not starved(error)


def starved(error: BaseException) -> bool:
    """Whether a compiler's process was killed (SIGKILL), for example for lack of memory. The kernel is not at fault."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode in KILLED
    found = re.search(r"`?ptxas`? failed with error code (-?\d+)", str(error))
    return found is not None and int(found[1]) in KILLED
