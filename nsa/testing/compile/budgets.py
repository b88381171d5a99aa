"""The limits of the compile matrix, and its two committed files: register budgets, and what has passed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nsa.kernels.shared import sources
from nsa.testing.compile.points import Architecture

if TYPE_CHECKING:
    from nsa.testing.compile.matrix import Compiled

PACKAGE = Path(__file__).parents[2]
BUDGETS = PACKAGE / "kernels" / "budgets.yaml"
PASSED = PACKAGE / "configs" / "compiled.yaml"
COMMAND = "python -m nsa.testing.compile {} --update-budgets"

SPILLS = 64
"""Bytes that a thread may spill without a recorded budget. The assembler spills a few loop invariants even if registers
are left, and which ones depends on its version."""

SPILLS_KNOWN = {
    "ranges-fp32-G16-D256-Dv256-N1024-L1024-n64-causal-q_positions": 8192,  # 7772 on sm_89, Triton 3.3
    "varlen-fp32-G3-D100-Dv96-N256-L256-n1": 512,  # 440 on sm_90, Triton 3.6
    "blocks-fp32-G16-D128-Dv128-N1024-L1024-n16-causal": 512,  # 436 on sm_89, Triton 3.7
    "dense-bf16-G128-D256-Dv256-N1024-L1024-n1": 384,  # 332 on sm_80, Triton 3.3
    "ranges-bf16-G128-D192-Dv128-N4096-L1024-n16-causal": 256,  # 196 on sm_100, Triton 3.7
    "blocks-bf16-G64-D128-Dv128-N64-L1024-n16-causal": 256,  # 160 on sm_100, Triton 3.6
    # The backward pass. On sm_90 it spills outside of the loop, which is faster. On other GPUs its tiles are not timed.
    "ranges-fp16-G1-D64-Dv64-N4096-L1024-n16-causal-HKV16-backward-cu_seqlens": 4096,  # 3420 on gfx942, Triton 3.5
    "blocks-fp16-G8-D128-Dv64-N4096-L1024-n16-causal-HKV4-backward-cu_seqlens": 768,  # 760 on gfx942, Triton 3.6
    "blocks-bf16-G128-D256-Dv256-N4096-L2048-n16-causal-backward": 640,  # 636 on sm_80, Triton 3.5
    "blocks-bf16-G1-D128-Dv128-N8192-L1024-n16-causal-HKV16-backward": 640,  # 620 on gfx942, Triton 3.5
    "ranges-bf16-G16-D192-Dv128-N4096-L1024-n16-causal-backward": 640,  # 516 on gfx942, Triton 3.6
    "blocks-bf16-G3-D100-Dv96-N1000-L512-n16-backward-q_positions-int64": 640,  # 568 on gfx942, Triton 3.5
    "blocks-bf16-G16-D128-Dv128-N8192-L1024-n16-causal-HKV4-backward": 512,  # 484 on sm_90, Triton 3.9
    "blocks-bf16-G4-D128-Dv128-N8192-L1024-n16-causal-HKV8-backward": 512,  # 480 on sm_90, Triton 3.7
    "blocks-bf16-G64-D128-Dv128-N4096-L1024-n16-causal-backward": 384,  # 356 on gfx942, Triton 3.6
    # Key-major with Triton 3.3.
    "blocks-bf16-G16-D128-Dv128-N8192-L1024-n16-causal-HKV4-key_major": 256,  # 180 on sm_90
    "blocks-bf16-G4-D128-Dv128-N8192-L1024-n16-causal-HKV8-key_major": 192,  # 144 on sm_120
    "blocks-bf16-G64-D256-Dv256-N4096-L2048-n16-causal-key_major": 128,  # 100 on sm_90
    "blocks-bf16-G1-D128-Dv128-N8192-L1024-n16-causal-HKV16-key_major": 128,  # 96 on sm_90
    # Unions, ragged batches and caches in fp8.
    "blocks-fp16-G3-D100-Dv96-N1000-L384-n16-union-q_positions-int64": 768,  # 652 on sm_80, Triton 3.4
    "blocks-bf16-G4-D128-Dv128-N8192-L1024-n16-causal-HKV8-union-cache": 160,  # 136 on sm_80, Triton 3.3
    "blocks-bf16-G4-D128-Dv128-N4096-L4096-n16-causal-HKV8-key_major-page64-e4m3": 640,  # 632 on sm_100, Triton 3.6
    "blocks-bf16-G64-D128-Dv64-N64-L1024-n16-causal-cache-e4m3": 256,  # 256 on sm_89, Triton 3.4
    "blocks-bf16-G16-D128-Dv128-N65536-L2048-n16-causal-HKV4-key_major-page128-e4m3": 192,  # 192 on sm_89, Triton 3.3
    "ranges-bf16-G4-D128-Dv128-N4096-L1024-n16-causal-key_major-cache-ragged": 96,  # 80 on sm_90, Triton 3.6
}
"""Points that may spill more than `SPILLS` without a recorded budget. Comments name the most that was seen."""

MULTIPLY = ("_fwd_kernel", "_partial_kernel", "_union_kernel", "_dkdv_kernel", "_dq_kernel")
"""Kernels that consist of dot products."""

Limits = dict[str, tuple[int, int]]
"""Registers and spilled bytes of each kernel, as recorded for one Triton minor release and architecture."""


@dataclasses.dataclass
class Budgets:
    """The file of budgets, by architecture, kernel and Triton minor release."""

    entries: dict[str, dict[str, dict[str, list[int]]]]

    def of(self, release: str, architecture: str) -> Limits:
        """The limits of a release and architecture; empty if none are recorded."""
        kernels = self.entries.get(architecture, {})
        return {name: (seen[release][0], seen[release][1]) for name, seen in kernels.items() if release in seen}


def load(path: Path = BUDGETS) -> Budgets:
    """Read the file. Raises ValueError, naming the file, if it has not the form that `update` writes."""
    entries = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}
    for architecture, kernels in entries.items():
        for name, seen in kernels.items():
            if not all(isinstance(release, str) and len(pair) == 2 for release, pair in seen.items()):
                where = f"{path}: {architecture} {name}"
                raise ValueError(f"{where}: expected {{release: [registers, spills]}}, got {seen}")
    return Budgets(entries)


def complaints(architecture: Architecture, compiled: Compiled, limits: Limits) -> Iterator[str]:
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
    if compiled.registers is None or compiled.spills is None:
        return
    if not limits:
        most = SPILLS_KNOWN.get(compiled.point, SPILLS)
        if compiled.spills > most:
            yield f"spills {compiled.spills} bytes a thread, {most} are allowed without a budget of its own"
    elif compiled.name not in limits:
        yield f"has no budget: {COMMAND.format(architecture.name)}"
    else:
        for what, seen, most in zip(
            ("registers", "spilled bytes"), (compiled.registers, compiled.spills), limits[compiled.name], strict=True
        ):
            if seen > most:
                yield f"{seen} {what}, the budget is {most}; if that is worth it: {COMMAND.format(architecture.name)}"


def all_complaints(architecture: Architecture, kernels: list[Compiled], limits: Limits) -> list[str]:
    """Why one architecture fails. A budget whose kernel is no longer compiled is a reason too."""
    found = [f"{k.name}: {line}" for k in kernels for line in complaints(architecture, k, limits)]
    gone = sorted(limits.keys() - {k.name for k in kernels})
    command = COMMAND.format(architecture.name)
    return found + [f"{name}: has a budget, but is no longer compiled: {command}" for name in gone]


def notes(architecture: Architecture, kernels: list[Compiled], limits: Limits, release: str) -> list[str]:
    """Lines that do not fail a run: limits that could not be checked, and kernels that need less than their budget."""
    where = f"{architecture.name}, Triton {release}"
    if any(k.registers is None for k in kernels):
        return [f"{where}: compiled only: with this Triton the assembler's report cannot be read"]
    if not limits:
        return [f"{where}: no budgets of this release: only absolute limits hold; {COMMAND.format(architecture.name)}"]
    seen = _largest(kernels)
    fewer = sum(any(x < most for x, most in zip(seen[k], limits[k], strict=True)) for k in seen.keys() & limits.keys())
    return [f"{where}: {fewer} kernels need less than budgeted: {COMMAND.format(architecture.name)}"] * bool(fewer)


def _largest(kernels: list[Compiled]) -> Limits:
    """The most registers and spilled bytes by name, as a point may launch two variants of one kernel."""
    found: Limits = {}
    for k in kernels:
        registers, spills = found.get(k.name, (0, 0))
        found[k.name] = max(registers, k.registers or 0), max(spills, k.spills or 0)
    return found


def update(release: str, architecture: str, kernels: list[Compiled], path: Path = BUDGETS) -> None:
    """Write the registers and spills of all kernels of one architecture as the budgets of this release.

    Raises:
        ValueError: a kernel has no report.
    """
    entries = load(path).entries
    known = entries.setdefault(architecture, {})
    for seen in known.values():
        seen.pop(release, None)
    if any(k.registers is None for k in kernels):
        raise ValueError(f"expected a report of registers, Triton {release} gives none")
    for kernel, pair in _largest(kernels).items():
        known.setdefault(kernel, {})[release] = list(pair)
    lines = [
        "# Registers and spilled bytes of a thread by Triton release, as compiled, not written by hand:",
        f"# `{COMMAND.format('[ARCH]')}`. More fails the compile matrix.",
    ]
    for name in sorted(entries):
        lines.append(f"{name}:")
        for kernel, seen in sorted(entries[name].items()):
            if seen:
                pairs = ", ".join(f'"{r}": [{seen[r][0]}, {seen[r][1]}]' for r in sorted(seen, key=_order))
                lines.append(f"  {kernel}: {{{pairs}}}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def record(release: str, architecture: str, kernels: int, date: str, commit: str, path: Path = PASSED) -> None:
    """Record how many kernels of these sources passed with this release; with 0, delete the entry of this pair."""
    known: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["passed"] if path.exists() else []
    known = [entry for entry in known if (entry["triton"], entry["arch"]) != (release, architecture)]
    if kernels:
        found = {"kernels": kernels, "date": date, "commit": commit, "sources": sources.kernel_sources()}
        known.append({"triton": release, "arch": architecture} | found)
    lines = [
        "# What the kernels compile for, by Triton release, as `python -m nsa.testing.compile --record` writes it.",
        "passed:" if known else "passed: []",
    ]
    for e in sorted(known, key=lambda e: (_order(e["triton"]), e["arch"])):
        fields = f'triton: "{e["triton"]}", arch: {e["arch"]}, kernels: {e["kernels"]}, date: {e["date"]}'
        lines.append(f'- {{{fields}, commit: "{e["commit"]}", sources: "{e.get("sources", "")}"}}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(x) for x in release.split("."))
