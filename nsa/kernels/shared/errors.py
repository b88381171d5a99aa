"""Which errors say that a kernel is broken. Imports Triton only if a caller asks for its errors."""

from __future__ import annotations

import functools
import re
import signal
import subprocess

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit statuses, of a process and of a shell that started one


@functools.cache
def compile_errors() -> tuple[type[BaseException], ...]:
    """Triton's own: CompilationError, OutOfResources, since 3.3 PTXASError; none where there is no Triton."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def broken(error: BaseException) -> bool:
    """Whether an error says that Triton cannot compile a kernel, here and at any other time."""
    of_triton = isinstance(error, compile_errors()) or "PassManager::run failed" in str(error)
    return of_triton and not starved(error)


def starved(error: BaseException) -> bool:
    """Whether a compiler's process was killed (SIGKILL), as where memory is short. The kernel is fine."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode in KILLED
    found = re.search(r"`?ptxas`? failed with error code (-?\d+)", str(error))
    return found is not None and int(found[1]) in KILLED
