"""The compile matrix: compiles our kernels for GPUs that are not here, and checks the compilers' reports.

Each architecture has a child process (`child`), because an MLIR abort kills its process, and Triton does not compile if
TRITON_INTERPRET is set. `python -m nsa.testing.compile` compiles all `points` with the installed Triton, and records
which architectures have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsa import settings
from nsa.testing.compile import budgets
from nsa.testing.compile.budgets import Compiled
from nsa.testing.compile.points import ARCHITECTURES, Architecture
from nsa.testing.machine import commit, git, triton_version

ROOT = Path(__file__).parents[3]
OVERHEARD = (3, 3)
"""The first Triton with which the assembler's report can be read. 3.1 runs ptxas in a shell and deletes the report."""


def minor(version: str | None = None) -> tuple[int, int]:
    """The minor release of a Triton version, (3, 6) for 3.6.0; by default of the installed Triton."""
    major, minor = (version or triton_version()).split(".")[:2]
    return int(major), int(minor)


def unsupported(architecture: Architecture, release: tuple[int, int]) -> str | None:
    """Why a Triton release does not compile for `architecture`; None if it does."""
    if release >= architecture.since:
        return None
    return f"{architecture.name} is not supported by Triton {_dotted(release)}: first by {_dotted(architecture.since)}"


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def compile_for(name: str, extent: str = "full", timeout: float = 900) -> list[Compiled]:
    """Compile the points of architecture `name` in a child process.

    Args:
        extent: `quick` or `full`.
        timeout: seconds.

    Raises:
        RuntimeError: the child failed or died. The error has the point that it compiled and the end of its output.
    """
    environment = settings.child_environment(interpret=False)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "nsa.testing.compile.child", name, extent]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache  # an empty cache, because the assembler's report is not cached
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        said = done.stderr.splitlines()
        last = next((line for line in reversed(said) if line.startswith("compiling ")), "before it compiled anything")
        tail = "\n".join(said[-25:])
        raise RuntimeError(f"{' '.join(command[1:])} exited with {done.returncode}, {last}:\n{tail}")
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nsa.testing.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCH", help=f"of {', '.join(ARCHITECTURES)}; default: all")
    parser.add_argument("--record", action="store_true", help="write which architectures have passed with this Triton")
    options = parser.parse_args(arguments)
    unknown = set(options.architectures) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"expected architectures of {', '.join(ARCHITECTURES)}, got {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compile, print what fails, and record what passes if asked. The exit status is 1 if anything fails."""
    options = _options(arguments)
    if options.record:
        done = git(ROOT, "status", "--porcelain", "--", "nsa/kernels/*.py", "nsa/testing/compile", "nsa/configs/gpus")
        done.check_returncode()
        if done.stdout:
            print("expected the compiled sources to be committed, because a record names the commit", file=sys.stderr)
            return 1
    chosen = []
    for architecture in (ARCHITECTURES[name] for name in options.architectures or ARCHITECTURES):
        reason = unsupported(architecture, minor())
        if reason is None:
            chosen.append(architecture)
        else:
            print(reason)
    failed = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as children:
        for architecture, outcome in zip(chosen, children.map(_try, chosen), strict=True):
            failed = bool(_judge(architecture, *outcome, options)) or failed
    return int(failed)


def _try(architecture: Architecture) -> tuple[list[Compiled], str, float]:
    """The kernels, or an error text, and the seconds that it took."""
    start = time.monotonic()
    try:
        return compile_for(architecture.name), "", time.monotonic() - start
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [], str(error), time.monotonic() - start


def _judge(
    architecture: Architecture, kernels: list[Compiled], error: str, seconds: float, options: argparse.Namespace
) -> list[str]:
    """Print the results of one architecture, record it if asked, and return why it fails."""
    name, release = architecture.name, _dotted(minor())
    complaints = [error] if error else budgets.all_complaints(architecture, kernels)
    if options.record:
        passed = 0 if complaints else len(kernels)
        budgets.record(release, name, passed, time.strftime("%Y-%m-%d"), commit().partition("-")[0][:12])
    print(f"{name}, Triton {release}: {_summary(kernels)} in {seconds:.0f} s", flush=True)
    for line in complaints:
        print(f"  {line}", flush=True)
    return complaints


def _summary(kernels: list[Compiled]) -> str:
    largest = [
        f"up to {max(values)} {what}" if values else f"no report of {what}"
        for what, values in (
            ("registers", [k.registers for k in kernels if k.registers is not None]),
            ("bytes of local memory", [k.local for k in kernels if k.local is not None]),
            ("of them in a loop", [k.looped for k in kernels if k.looped is not None]),
            ("bytes shared", [k.shared for k in kernels]),
        )
    ]
    return f"{len(kernels)} kernels, {', '.join(largest)}"
