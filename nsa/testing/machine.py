"""The lane, device, versions and commit of a measurement. Does not import pytest."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from nsa import settings

Lane = Literal["gpu", "interpreter"]


def current_lane() -> Lane:
    """The lane of this process, as `nsa.testing.lane` chose it."""
    return "interpreter" if settings.interpreter() or not torch.cuda.is_available() else "gpu"


def triton_version() -> str:
    """The installed Triton's version, found without an import, because importing Triton would fix the lane."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def device_name() -> str:
    """The GPU's name; in the interpreter lane the processor and torch's number of threads, `AMD EPYC 2threads`."""
    if current_lane() == "gpu":
        return torch.cuda.get_device_name(0)
    return f"{_cpu_brand()} {torch.get_num_threads()}threads"


@functools.cache
def _cpu_brand() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def commit() -> str:
    """The commit under test: NSA_COMMIT if set (for a copy without git), otherwise git's, otherwise "unknown"."""
    named = os.environ.get("NSA_COMMIT")
    if named:
        return named
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"
