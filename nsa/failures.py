"""Which kernels failed in this process, and when a failed kernel is tried again.

A kernel that the compiler refuses, or that failed in a child process of `nsa.guard`, stays off until
`nsa.dispatch.reset`. An error of the system (a cache that another process cleans, a full disk, too many open files, no
C compiler) may be over a moment later. Such a kernel is tried again after a pause, which doubles with each failure.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import subprocess
import time
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nsa import guard
from nsa.kernels.shared import errors

logger = logging.getLogger("nsa")

PAUSE_S = 1.0  # seconds after the first error of the system
LONGEST_PAUSE_S = 64.0

# Texts of driver errors that are not the kernel's fault: memory is full, an earlier kernel broke the context, or a
# stream is being captured. Comments give the codes, because Triton's errors contain only the texts.
OF_THE_DRIVER = frozenset((
    "out of memory",  # 2
    "an illegal memory access was encountered",  # 700
    "the launch timed out and was terminated",  # 702
    "device-side assert triggered",  # 710
    "an illegal instruction was encountered",  # 715
    "misaligned address",  # 716
    "unspecified launch failure",  # 719
    "operation not permitted when stream is capturing",  # 900
    "operation failed due to a previous error during capture",  # 901
    "operation would make the legacy stream depend on a capturing blocking stream",  # 906
))  # fmt: skip


class Failure(NamedTuple):
    """Why a kernel is off. ``tries``: failures in a row. ``until``: the second of `now` at which it is tried again."""

    cause: str
    tries: int
    until: float


broken: dict[Any, Failure] = {}
"""The kernels that are off, by the compiled variants of their launch, or by the signature before there are any."""

now = time.monotonic


@lru_cache(maxsize=1)
def caught() -> tuple[type[BaseException], ...]:
    """The errors that compiling or launching a kernel may raise. No other error is caught.

    ImportError comes from a missing Triton or a damaged launcher, JSONDecodeError from a damaged cache, RuntimeError
    from the MLIR pass manager and the driver, OSError and CalledProcessError from the C compiler of Triton's launcher.
    """
    of_system = ImportError, RuntimeError, OSError, json.JSONDecodeError, subprocess.CalledProcessError
    return (*errors.compile_errors(), *of_system)


def of_the_kernel(error: BaseException) -> bool:
    """Whether a call that met a caught error may fall back. It may not for lack of memory and a lost CUDA context."""
    if isinstance(error, guard.ProbeFailed):
        return True  # decided first, because its text may quote a driver error of the child process
    if isinstance(error, RuntimeError) and type(error).__module__.startswith("torch"):
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        return False  # the system has no memory or process for the assembler or the C compiler
    if errors.starved(error):
        return False
    driver = re.match(r"Triton Error \[(?:CUDA|HIP)\]: (.*)", str(error))
    of_torch = str(error).startswith(("CUDA error: ", "HIP error: "))  # before 2.8 torch raises a plain RuntimeError
    return not (of_torch or driver is not None and driver[1].strip() in OF_THE_DRIVER)


def passing(error: BaseException) -> bool:
    """Whether an error of :func:`caught` is one of the system, which may be over at the next try."""
    if isinstance(error, guard.ProbeFailed):
        return not error.lasting
    of_system = isinstance(error, (ImportError, OSError, json.JSONDecodeError, subprocess.CalledProcessError))
    return of_system or errors.of_system(error)


def cause_of(key: Any) -> str | None:
    """The cause if the kernel of ``key`` is off now, else None."""
    failure = broken.get(key)
    return None if failure is None or now() >= failure.until else failure.cause


def remember(key: Any, route: str, error: BaseException, server: str) -> str:
    """Remember that a kernel failed, and log it: a warning the first time. Returns the reason for calls that ``server``
    serves instead.

    A failure during CUDA graph capture is not remembered, because CUDA may refuse to load a kernel then.

    Raises:
        ``error``, if it is not the kernel's fault.
    """
    if not of_the_kernel(error):
        raise error
    cause = f"{route} kernel failed: {type(error).__name__}: {str(error).strip() or 'no message'}"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return f"{cause} (under CUDA graph capture)"
    before = broken.get(key)
    tries = 1 if before is None else before.tries + 1
    if not passing(error):
        broken[key] = Failure(cause, tries, math.inf)
        logger.warning("%s; %s serves this signature from now on", cause, server)
        return cause
    pause = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (tries - 1))
    broken[key] = Failure(f"{cause}; tried again after a pause", tries, now() + pause)
    level = logging.WARNING if tries == 1 else logging.DEBUG
    logger.log(level, "%s; %s serves this signature, and the kernel is tried again in %g s", cause, server, pause)
    return broken[key].cause


def works(key: Any) -> None:
    """Forget that the kernel of ``key`` failed, because it has just run."""
    failure = broken.pop(key, None)
    if failure is not None:
        cause = failure.cause.partition(";")[0]
        logger.warning("the kernel runs again after %d failed tries: %s", failure.tries, cause)


def forget() -> None:
    """Forget all failures, so that all kernels are tried again. Files of `nsa.guard` stay."""
    broken.clear()
    guard.forget()
