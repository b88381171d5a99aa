"""Which errors mean that a kernel is broken. Triton is imported only when a caller asks for its errors."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import subprocess

ODD = "values of float8_e4m3fn are read in pairs: expected v_cache at an even address, got an odd one"
NO_MEMORY = "a tensor has no memory of its own, as in a transform of torch.func or under a dispatch mode"
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit status of a process, and of the shell that started it

# Errors of a file system that other processes use, too, and of limits that other processes may free.
PASSING = (
    errno.EBUSY, errno.ENOENT, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO,
    errno.EROFS, errno.ETXTBSY, errno.EINTR, errno.EACCES,
)  # fmt: skip


class DoesNotFit(ValueError):
    """A kernel cannot serve a call: its workspace would be too large, or a tensor has no memory of its own."""


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
    status = re.search(r"`?ptxas`? failed with error code (-?\d+)", str(error))
    return status is not None and int(status[1]) in KILLED


def of_system(error: BaseException) -> bool:
    """Whether an error quotes one of the operating system, which may be over at the next try.

    Triton and the assembler report such errors in texts of their own: "`ptxas` failed ... No space left on device".
    """
    return any(os.strerror(number) in str(error) for number in PASSING)
