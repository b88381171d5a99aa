"""Chooses the lane before Triton is imported, because Triton reads TRITON_INTERPRET when a kernel is defined.

In the GPU lane torch sees an NVIDIA GPU, and neither NSA_TEST_TRITON_SEL=0 nor TRITON_INTERPRET is set. Each xdist
worker is pinned to one GPU. In the interpreter lane kernels run on the CPU, and GPUs are hidden.

The modules of the suite that need a lane call `choose` when they are imported: `fixtures`, and with it the plugin, and
`strategies`. The first call decides.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from nsa import settings


class Misuse(pytest.UsageError, pytest.Collector.CollectError):  # type: ignore[misc]
    """An error that pytest prints in one line, whether it loads plugins or collects tests."""


@functools.cache
def choose() -> None:
    """Set the environment of the lane, once per process. Raises Misuse if the lane cannot run."""
    # The suite itself tests whether kernels work. With a trial of each kernel in a child process it would take an hour.
    os.environ.setdefault("NSA_PROBE", "never")
    imported_to_compile = "triton" in sys.modules and not settings.interpreter()
    problem = _choose()
    if problem is None and imported_to_compile and settings.interpreter():
        problem = (
            "Triton was imported before the suite chose its lane, here Triton's interpreter: set TRITON_INTERPRET=1, "
            'or write pytest_plugins = ["nsa.testing.plugin"] in the root conftest.py and import kernels in tests only'
        )
    if problem is not None:
        raise Misuse(problem)


def _choose() -> str | None:
    switch = os.environ.get("NSA_TEST_TRITON_SEL", "1")
    if switch not in ("0", "1"):
        return f"NSA_TEST_TRITON_SEL={switch!r}: expected 0 (keep the suite off the GPU) or 1"
    if switch == "0" or settings.interpreter():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _interpret()
        return None
    _pin_worker(os.environ.get("PYTEST_XDIST_WORKER", ""))
    if torch.cuda.is_available():
        return None
    _interpret()
    device = _visible_device()
    if device is None:
        return None
    cuda = torch.version.cuda
    cause = "is built without CUDA" if cuda is None else f"(CUDA {cuda}) finds no usable driver"
    return (
        f"an NVIDIA GPU is visible ({device}), but torch {torch.__version__} {cause}: "
        "install a build of torch that fits the driver, or set NSA_TEST_TRITON_SEL=0 to test on the CPU"
    )


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    settings.interpreter.cache_clear()


def _pin_worker(worker: str) -> None:
    """Pin xdist worker `gw<n>` to one GPU, in turn. `device_count` asks NVML, which does not start CUDA."""
    if not worker:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def _visible_device() -> str | None:
    """The first NVIDIA device file of this machine; None without one, or if CUDA_VISIBLE_DEVICES hides all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return None
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/proc/driver/nvidia/gpus").glob("*")]
    return str(min(devices)) if devices else None
