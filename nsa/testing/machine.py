"""What a figure was taken on: the lane, the device, the versions, the commit. Imports nothing of pytest."""

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
    """Read from the installed package: importing Triton here would fix the lane of whoever asks."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def device_name() -> str:
    """The GPU's name, or on the CPU lane the processor's brand and the threads torch uses: `AMD EPYC 2threads`."""
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
    """The revision under test: NSA_COMMIT if set (a machine may hold a copy without git), else git's, else unknown."""
    named = os.environ.get("NSA_COMMIT")
    if named:
        return named
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"
