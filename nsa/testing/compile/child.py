"""The process that compiles for one GPU that is not here: `python -m nsa.testing.compile.child sm_90 full`.

It calls the real launchers on meta tensors. Triton's launch is replaced by its warm-up, so that every kernel is
specialised and configured exactly as on that GPU. The process prints one JSON line per kernel on stdout, and the point
that it compiles on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from nsa.call import Call
from nsa.kernels.shared.sizes import PATTERN_BYTES
from nsa.settings import Settings
from nsa.testing.compile.matrix import OVERHEARD, Compiled, minor
from nsa.testing.compile.points import ARCHITECTURES, Architecture, Point, points

DESCRIPTOR = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{18,20});")
"""An address and the constant added to it. Bits 62 and 63 of the constant say how the matrix is swizzled."""

DECLARED = re.compile(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]")
"""Statically sized shared memory, which lies before the dynamically sized one."""


def main(name: str, extent: str) -> None:
    architecture = ARCHITECTURES[name]
    kernels, reports = _pretend(architecture)
    seen: set[str] = set()
    for point in points(architecture, extent):
        kernels.clear()
        reports.clear()
        print(f"compiling {point.id} for {name}", file=sys.stderr, flush=True)
        _call(point)
        if not kernels:
            raise RuntimeError(f"expected {point.id} to launch a kernel")
        fresh = list({kernel.hash: kernel for kernel in kernels if kernel.hash not in seen}.values())
        for i, kernel in enumerate(fresh):
            report = reports[i] if len(reports) == len(fresh) else None
            print(json.dumps(dataclasses.asdict(_describe(architecture, point, kernel, report))), flush=True)
        seen.update(kernel.hash for kernel in fresh)


def _call(point: Point) -> None:
    from nsa.kernels.families import BACKWARD, FAMILIES, OF_SCHEDULE
    from nsa.kernels.shared.shape import shape_of

    schedule = next((name for name in point.options if name in OF_SCHEDULE), FAMILIES[-1].name)
    family = OF_SCHEDULE[schedule]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[point.dtype]
    index = torch.int64 if "int64" in point.options else torch.int32

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, HKV, G, D, Dv = point.rows, point.HKV, point.G, point.D, point.Dv
    lead: tuple[int, ...]
    cache: tuple[int, ...]
    sequences = meta(rows + 1, dtype=torch.int32)
    tensors: dict[str, Any] = {}
    block_size = None
    if point.source == "dense":
        lead, cache = (rows,), (rows, point.L)
    elif point.source == "varlen":
        lead, cache = (rows,), (rows * point.L,)
        tensors["cu_seqlens_k"] = sequences
    else:
        lead = (rows,) if "cu_seqlens" in point.options else (1, rows)
        cache = (*lead[:-1], max(rows, 8192), HKV)
        if point.source == "ranges":
            tensors["ranges"] = meta(*lead, HKV, point.n, 2, dtype=index)
        else:
            tensors["block_indices"], block_size = meta(*lead, HKV, point.n, dtype=index), point.L // point.n
        if "cu_seqlens" in point.options:
            tensors.update(cu_seqlens_q=sequences, cu_seqlens_k=sequences)
        paged = [int(option.removeprefix("page")) for option in point.options if option.startswith("page")]
        if paged or "cache" in point.options:
            width = 65536 // paged[0] if paged else 0
            B = rows if family is FAMILIES[-1] else 2
            lead = (B, rows // B)
            cache = (B * width, paged[0], HKV) if paged else (B, 65536, HKV)
            name = "ranges" if point.source == "ranges" else "block_indices"
            tensors[name] = meta(*lead, *tensors[name].shape[2:], dtype=index)
            tensors["cache_seqlens"] = meta(B, dtype=torch.int32)
            tensors["block_table"] = meta(B, width, dtype=torch.int32) if paged else None
            if "ragged" in point.options:
                lead = (rows,)
                tensors[name] = meta(*lead, *tensors[name].shape[2:], dtype=index)
                tensors["cu_seqlens_q"] = meta(B + 1, dtype=torch.int32)
        if "q_positions" in point.options:
            tensors["q_positions"] = meta(*lead, dtype=torch.int64)
    q, k, v = meta(*lead, HKV * G, D), meta(*cache, D), meta(*cache, Dv)
    if "e4m3" in point.options:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        tensors.update(k_scale=meta(HKV, dtype=torch.float32), v_scale=meta(1, dtype=torch.float32))
    if "far" in point.options:
        k, v = (x.as_strided(x.shape, (*x.stride()[:-3], 16 * 2**27, *x.stride()[-2:])) for x in (k, v))
    pins = (("query_major", point.choice),)
    current = Settings(sel_triton_db="unpipelined" not in point.options, pins=pins)
    call = Call(
        q, k, v, **tensors, block_size=block_size, causal=point.causal, return_lse=point.source != "dense",
        settings=current,
    )  # fmt: skip
    if "backward" in point.options:
        out, lse = meta(*lead, HKV * G, Dv), meta(*lead, HKV * G, dtype=torch.float32)
        launch = BACKWARD.plan(call, shape_of(call, point.L), "backward")
        BACKWARD.kernels.backward(launch, call, out, lse, out, lse, "backward")
        return
    launch = family.plan(call, shape_of(call, point.L), schedule)
    family.kernels.forward(launch, call, point.source)


def _pretend(architecture: Architecture) -> tuple[list[Any], list[str]]:
    """Make this process behave as with a GPU of `architecture`, but launch nothing.

    Returns two lists that grow from now on: the kernels that were compiled instead of launched, and the reports of
    `ptxas -v`.
    """
    if architecture.backend == "hip":
        torch.version.hip = "6.4"  # our kernels read this when they are imported
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nsa.kernels.shared import device

    kernels: list[Any] = []
    reports: list[str] = []
    launch, run = JITFunction.run, subprocess.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **keywords))
        return kernels[-1]

    def overhear(command: Any, *args: Any, **keywords: Any) -> Any:
        done = run(command, *args, **keywords)
        if "-v" in command and Path(command[0]).name.startswith("ptxas"):  # or ptxas-blackwell
            reports.append(Path(keywords["stderr"].name).read_text())
        return done

    driver.set_active(_AbsentGPU(architecture))
    JITFunction.run = warm_up
    subprocess.run = overhear  # type: ignore[assignment]
    device.limits = lambda device: (architecture.capability, architecture.processors)  # type: ignore[assignment]
    device.gpu_name = lambda device: architecture.gpu  # type: ignore[assignment]
    return kernels, reports


class _AbsentGPU:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.architecture.backend, self.architecture.target, self.architecture.warp)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _describe(architecture: Architecture, point: Point, kernel: Any, report: str | None) -> Compiled:
    if architecture.backend == "hip":
        return _describe_amd(point, kernel)
    registers, spills = None, None
    if minor() >= OVERHEARD:
        if report is None:
            raise RuntimeError("the kernel compiled, but ptxas left no report: this Triton calls it in another way")
        registers = _number(r"Used (\d+) registers", report)
        spills = _number(r"(\d+) bytes spill stores", report)
    ptx = kernel.asm["ptx"]
    early = bool(getattr(kernel.metadata, "launch_pdl", False))
    first = re.search(r"griddepcontrol\.wait|\b(ld|st|atom|red)\.\S*global|cp\.async\.c[ag]\b", ptx)
    return Compiled(
        point.id,
        kernel.metadata.name,
        kernel.metadata.shared,
        registers,
        spills,
        mma=re.search(r"\b(wgmma\.)?mma[._]", ptx) is not None,
        cluster="barrier.cluster" in ptx,
        early=early,
        hasty=early and (first is None or first[0] != "griddepcontrol.wait"),
        mixed=mixed(ptx),
        askew=askew(ptx),
    )


def mixed(ptx: str) -> bool:
    """Whether `wgmma` descriptors of matrices with different swizzles are made from one address.

    ptxas 12.8 may then lose the address, and add the second matrix's constants to a register with another value. On an
    H100, `_dkdv_kernel` without a pipeline computed a wrong dQ or read past shared memory.
    """
    swizzles: dict[str, set[int]] = {}
    if "wgmma" in ptx:
        for address, constant in DESCRIPTOR.findall(ptx):
            swizzles.setdefault(address, set()).add(int(constant) >> 62 & 3)
    return any(len(kinds) > 1 for kinds in swizzles.values())


def askew(ptx: str) -> bool:
    """Whether tensor cores read swizzled tiles that are not aligned to the swizzle's pattern.

    Triton lays out tiles as if they began at the start of shared memory. But memory that inline assembly declares comes
    first. Unless its size is a multiple of the pattern's, `wgmma` reads other elements than were written. On an H100
    this happened with 33 heads and more.
    """
    before = sum(int(size) for size in DECLARED.findall(ptx))
    return ("wgmma" in ptx or "tcgen05" in ptx) and before % PATTERN_BYTES != 0


def _describe_amd(point: Point, kernel: Any) -> Compiled:
    """Read the metadata of the code object. A spilled vector register counts as 4 bytes a thread."""
    text = kernel.asm["amdgcn"]
    shared = max(kernel.metadata.shared, _number(r"\.group_segment_fixed_size: +(\d+)", text))
    registers = _number(r"\.vgpr_count: +(\d+)", text)
    spills = 4 * _number(r"\.vgpr_spill_count: +(\d+)", text)
    mma = "v_mfma" in text
    return Compiled(point.id, kernel.metadata.name, shared, registers, spills, mma, False, False, False)


def _number(words: str, report: str) -> int:
    found = re.search(words, report)
    if found is None:
        raise RuntimeError(f"expected {words!r} in the assembler's report, got {report[-2000:]!r}")
    return int(found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
