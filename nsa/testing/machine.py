"""The lane, device, versions and commit of a measurement. Does not import pytest."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from nsa import settings

Lane = Literal["gpu", "interpreter"]
GIB_PER_WORKER = 6  # GPU memory of a worker: its CUDA context, packed SDPA with 1 GiB of workspace, and the oracle
OF_A_REPOSITORY = {
    f"GIT_{name}" for name in (
        "ALTERNATE_OBJECT_DIRECTORIES", "COMMON_DIR", "CONFIG", "DIR", "GRAFT_FILE", "IMPLICIT_WORK_TREE", "INDEX_FILE",
        "INTERNAL_SUPER_PREFIX", "NO_REPLACE_OBJECTS", "OBJECT_DIRECTORY", "PREFIX", "REPLACE_REF_BASE", "SHALLOW_FILE",
        "WORK_TREE",
    )
}  # fmt: skip
"""Variables by which git tells its hooks which repository and index they serve, `git rev-parse --local-env-vars`.
GIT_CONFIG_COUNT and GIT_CONFIG_PARAMETERS are not among them. git too keeps those for its work in other repositories,
because they may hold `safe.directory`.
"""


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


_under_test = Path(__file__).parent


def under_test(module: str) -> None:
    """From now on, :func:`commit` is of the repository that holds this module, which another project may have."""
    global _under_test
    try:
        found = importlib.util.find_spec(module.partition(".")[0])  # finds a top-level name without importing it
    except (ImportError, ValueError):
        return
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    files = [place for place in places if place and os.path.exists(place)]
    if files:
        _under_test = Path(files[0]).resolve()
        commit.cache_clear()


@functools.cache
def commit() -> str:
    """The commit under test: NSA_COMMIT if set (for a copy without git), otherwise git's, otherwise "unknown".

    It is the commit of `nsa`, or, after :func:`under_test`, that of a contestant.
    """
    named = os.environ.get("NSA_COMMIT")
    if named:
        return named
    try:
        folder = _under_test if _under_test.is_dir() else _under_test.parent
        done = git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except FileNotFoundError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, on the repository of that folder even inside a hook of another. Raises FileNotFoundError."""
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=folder, env=without_git(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def without_git(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment, by default this process's, without the variables by which git names a repository."""
    return {name: value for name, value in (environment or os.environ).items() if name not in OF_A_REPOSITORY}
