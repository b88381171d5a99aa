"""Compile our kernels for GPUs that are not there, and read what the compilers say of them.

One child process per architecture (`python -m nsa.testing.aot 90`): an MLIR abort kills the process it happens in, and
Triton does not compile where TRITON_INTERPRET is set. The child calls the real launchers on meta tensors with Triton's
launch replaced by its warm-up, so every kernel is specialised and configured exactly as on that GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from nsa.kernels import tiles

PROCESSORS = {80: 108, 89: 128, 90: 132}  # multiprocessors, which decide whether keys are split: A100, RTX 4090, H100
NAMES = {90: "NVIDIA H100 80GB HBM3"}  # whose table of tiles is compiled


@dataclasses.dataclass(frozen=True)
class Point:
    """One call of the forward launcher: which kernel it compiles follows from the shapes."""

    source: str  # dense, varlen, ranges or blocks
    dtype: str
    G: int
    D: int
    Dv: int
    rows: int  # B * S
    L: int  # keys a row may read
    n: int = 1  # spans
    causal: bool = False
    HKV: int = 1
    options: tuple[str, ...] = ()  # of cu_seqlens, q_positions, int64, per_head, unpipelined
    choice: tiles.Choice | None = None  # as a sweep forces it; else the tables and rules of `tiles`

    @property
    def id(self) -> str:
        words = ["causal"] * self.causal + [f"HKV{self.HKV}"] * (self.HKV > 1)
        words += [*self.options, *(str(x) for x in self.choice or ())]
        return "-".join(
            [self.source, self.dtype, f"G{self.G}", f"D{self.D}", f"Dv{self.Dv}", f"N{self.rows}", f"L{self.L}", *words]
        )


POINTS = (
    Point("dense", "bf16", 8, 128, 128, 1024, 512),
    Point("dense", "bf16", 4, 64, 64, 1024, 16),
    Point("dense", "fp16", 8, 128, 64, 64, 1024),  # few rows: split, and combined
    Point("dense", "bf16", 128, 256, 256, 1024, 1024),  # the largest tiles there are
    Point("varlen", "bf16", 8, 128, 128, 1024, 512),
    Point("ranges", "bf16", 8, 128, 128, 1024, 1024, n=8),
    Point("ranges", "fp16", 3, 96, 100, 1024, 256, n=8, causal=True, options=("int64", "unpipelined")),
    Point("ranges", "bf16", 4, 64, 128, 4096, 1024, n=16, causal=True, HKV=2, options=("cu_seqlens",)),
    Point("ranges", "fp32", 16, 256, 256, 1024, 1024, n=64, causal=True, options=("q_positions",)),
    Point("blocks", "bf16", 16, 128, 128, 65536, 1024, n=16, causal=True, HKV=4),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True),  # decode: split
    Point("blocks", "bf16", 8, 128, 128, 1024, 1024, n=16, causal=True, options=("per_head",)),
    Point("dense", "bf16", 8, 128, 128, 64, 128, choice=tiles.Choice(1, 1, 128, 4, 1)),  # a tile's loads all at once
    Point("ranges", "bf16", 8, 128, 128, 64, 256, n=8, choice=tiles.Choice(2, 1, 64, 4, 3)),  # clusters where there are
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, choice=tiles.Choice(16, 1, 64, 4, 2)),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, choice=tiles.Choice(8, 1, 128, 8, 1, 0)),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compilers said of one kernel."""

    point: str
    kernel: str
    shared: int  # bytes of shared memory
    registers: int  # of a thread
    spills: int  # bytes a thread stores to local memory because registers ran out
    mma: bool  # whether the tensor cores are used
    cluster: bool  # whether programs of a cluster wait for each other
    early: bool  # whether it may be launched before the kernel before it has ended
    hasty: bool  # whether it is, and touches memory before it has waited


def compile_for(capability: int, timeout: float = 300) -> list[Compiled]:
    """Compile `POINTS` for `capability` (90 for sm_90) in a child process; `timeout` in seconds.

    Raises RuntimeError with the point being compiled and the end of the child's output if that process fails or dies.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "nsa.testing.aot", str(capability)]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache  # empty: the assembler's report is not cached
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command[1:])} exited with {done.returncode}:\n{tail}")
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def main(capability: int) -> None:
    """The child: one JSON line per kernel on stdout, the point being compiled on stderr."""
    kernels, reports = _pretend(capability)
    described = 0
    for point in POINTS:
        print(f"compiling {point.id} for sm_{capability}", file=sys.stderr, flush=True)
        _call(point)
        described += len(kernels)
        for kernel, report in zip(kernels, reports, strict=True):
            print(json.dumps(dataclasses.asdict(_describe(point, kernel, report))), flush=True)
        kernels.clear()
        reports.clear()
    if not described:
        raise RuntimeError("every kernel compiled, but this Triton calls ptxas in a way that was not overheard")


def _call(point: Point) -> None:
    from nsa.kernels.query_major import forward, launch_for

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
        lead, cache = (rows, 1), (rows, point.L, HKV)
    elif point.source == "varlen":
        lead, cache = (rows,), (rows * point.L, HKV)
        tensors["cu_seqlens_k"] = sequences
    else:
        lead = (rows,) if "cu_seqlens" in point.options else (1, rows)
        cache = (*lead[:-1], max(rows, 8192), HKV)
        if point.source == "ranges":
            tensors["selection"] = meta(*lead, HKV, point.n, 2, dtype=index)
        else:
            tensors["selection"], block_size = meta(*lead, HKV, point.n, dtype=index), point.L // point.n
        if "cu_seqlens" in point.options:
            tensors.update(cu_seqlens_q=sequences, cu_seqlens_k=sequences)
        if "q_positions" in point.options:
            tensors["q_positions"] = meta(*lead, dtype=torch.int64)
    q, k, v = meta(*lead, HKV * G, D), meta(*cache, D), meta(*cache, Dv)
    tiles.forced = point.choice
    launch = launch_for(
        q, k, v, **tensors, block_size=block_size, causal=point.causal, bound=point.L,
        per_head="per_head" in point.options, pipelined="unpipelined" not in point.options,
    )  # fmt: skip
    forward(launch, q, k, v, **tensors, route=point.source, return_lse=point.source != "dense")


def _pretend(capability: int) -> tuple[list[Any], list[str]]:
    """Make this process believe in a GPU of `capability`, and launch nothing.

    Returns the lists to which each kernel compiled from now on is added, and what `ptxas -v` said of it.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nsa.kernels import query_major

    kernels: list[Any] = []
    reports: list[str] = []
    launch, run = JITFunction.run, subprocess.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        compiled = len(reports)
        kernel = launch(self, *args, grid=grid, warmup=True, **keywords)
        if len(reports) > compiled:  # else this process has compiled it before
            kernels.append(kernel)
        return kernel

    def overhear(command: Any, *args: Any, **keywords: Any) -> Any:
        done = run(command, *args, **keywords)
        if "-v" in command and "ptxas" in Path(command[0]).name:
            reports.append(Path(keywords["stderr"].name).read_text())
        return done

    driver.set_active(_AbsentGPU(capability))
    JITFunction.run = warm_up
    subprocess.run = overhear  # type: ignore[assignment]
    query_major.device_limits = lambda device: (capability, PROCESSORS[capability])  # type: ignore[assignment]
    query_major.gpu_name = lambda device: NAMES.get(capability)  # type: ignore[assignment]
    return kernels, reports


class _AbsentGPU:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _describe(point: Point, kernel: Any, report: str) -> Compiled:
    registers, spills = (re.search(words, report) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    if registers is None or spills is None:
        raise RuntimeError(f"expected ptxas -v to report registers and spills, got {report!r}")
    ptx = kernel.asm["ptx"]
    mma = re.search(r"\b(wgmma\.)?mma[._]", ptx) is not None
    cluster = "barrier.cluster" in ptx
    early = bool(getattr(kernel.metadata, "launch_pdl", False))
    first = re.search(r"griddepcontrol\.wait|\b(ld|st|atom|red)\.\S*global|cp\.async\.c[ag]\b", ptx)
    hasty = early and (first is None or first[0] != "griddepcontrol.wait")
    sizes = kernel.metadata.shared, int(registers[1]), int(spills[1])
    return Compiled(point.id, kernel.metadata.name, *sizes, mma, cluster, early, hasty)


if __name__ == "__main__":
    main(int(sys.argv[1]))
