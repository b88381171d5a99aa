"""What a compiler reports of a kernel, the limits of that, and the committed list of what has passed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from nsa.kernels.shared import sources
from nsa.testing.compile.points import Architecture

PACKAGE = Path(__file__).parents[2]
PASSED = PACKAGE / "configs" / "compiled.yaml"

MOST_LOCAL = 1280
"""Most bytes of local memory of a thread. At a kernel's first launch the driver reserves this for each thread that the
GPU can hold at a time: 1 KiB is 277 MB on an H100."""

MOST_LOOPED = 640
"""Most bytes of local memory that a thread loads and stores in one turn of an innermost loop."""

FEW = 64
"""Bytes of local memory of which any part may be in a loop. The assembler spills a few loop invariants even if
registers are left, and which ones depends on its version."""

REGISTERS = {"cuda": 65_536, "hip": 131_072}
"""Registers of a multiprocessor, which the threads of one program share."""

MULTIPLY = tuple(f"_{name}_kernel" for name in ("fwd", "partial", "union", "rows", "unions", "dkdv", "dq"))
"""Kernels that consist of dot products."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compilers' report of one kernel."""

    point: str
    kernel: str
    shared: int  # bytes of shared memory
    registers: int | None  # registers of a thread; None: this Triton's report cannot be read
    local: int | None  # bytes of local memory of a thread; None likewise
    looped: int | None  # bytes of it that a turn of a loop accesses (`child.looped`); 0 on NVIDIA if it has very few
    threads: int  # of a program
    mma: bool  # whether it uses the tensor cores
    cluster: bool  # whether programs of a cluster wait for each other
    early: bool  # whether it may be launched before the previous kernel has ended
    hasty: bool  # whether it is launched early and accesses memory before it waits for the previous kernel
    mixed: bool = False  # see `child.mixed`
    askew: bool = False  # see `child.askew`


def complaints(architecture: Architecture, compiled: Compiled) -> Iterator[str]:
    """Why one kernel fails the compile matrix."""
    if compiled.shared > architecture.shared_bytes:
        yield f"{compiled.shared} bytes of shared memory, {architecture.name} has {architecture.shared_bytes}"
    # AMD's matrix cores multiply fp32, NVIDIA's do not.
    multiplies = compiled.kernel in MULTIPLY and (architecture.backend == "hip" or "-fp32-" not in compiled.point)
    if multiplies and not compiled.mma:
        yield "no matrix instruction in its assembly: the dot products do not reach the tensor cores"
    if compiled.hasty:
        yield "is launched early, and accesses memory before it waits for the previous kernel"
    if compiled.mixed:
        yield "matrices with different swizzles share an address, which ptxas 12.8 may lose (`child.mixed`)"
    if compiled.askew:
        yield "tiles that `wgmma` reads are not aligned to their swizzle's pattern (`child.askew`)"
    if compiled.registers is None or compiled.local is None or compiled.looped is None:
        return
    used, most = compiled.registers * compiled.threads, REGISTERS[architecture.backend]
    if used > most:
        yield f"{used} registers a program, a multiprocessor has {most}"
    if compiled.local > MOST_LOCAL:
        yield f"{compiled.local} bytes of local memory a thread, {MOST_LOCAL} are allowed"
    if compiled.local > FEW and compiled.looped > MOST_LOOPED:
        yield f"spills in a loop: {compiled.looped} bytes a turn, {MOST_LOOPED} are allowed"


def all_complaints(architecture: Architecture, kernels: list[Compiled]) -> list[str]:
    """Why one architecture fails."""
    return [f"{k.point} {k.kernel}: {line}" for k in kernels for line in complaints(architecture, k)]


def record(release: str, architecture: str, kernels: int, date: str, commit: str, path: Path = PASSED) -> None:
    """Record how many kernels of these sources passed with this release; with 0, delete the entry of this pair."""
    known: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["passed"] if path.exists() else []
    known = [entry for entry in known if (entry["triton"], entry["arch"]) != (release, architecture)]
    if kernels:
        entry = {"kernels": kernels, "date": date, "commit": commit, "sources": sources.kernel_sources()}
        known.append({"triton": release, "arch": architecture} | entry)
    lines = [
        "# What the kernels compile for, by Triton release, as `python -m nsa.testing.compile --record` writes it.",
        "passed:" if known else "passed: []",
    ]
    for e in sorted(known, key=lambda e: ([*map(int, e["triton"].split("."))], e["arch"])):
        fields = f'triton: "{e["triton"]}", arch: {e["arch"]}, kernels: {e["kernels"]}, date: {e["date"]}'
        lines.append(f'- {{{fields}, commit: "{e["commit"]}", sources: "{e.get("sources", "")}"}}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
