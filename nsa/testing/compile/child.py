"""The process that compiles for one GPU that is not here: `python -m nsa.testing.compile.child sm_90 full`.

It calls the real launchers on meta tensors. Triton's launch is replaced by its warm-up, so that every kernel is
specialised and configured exactly as on that GPU. The process prints one JSON line per kernel on stdout, and the point
that it compiles on stderr. Of the quick points it compiles only the launches that `cover` chooses.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa.call import Call
from nsa.kernels.shared.sizes import PATTERN_BYTES
from nsa.kernels.union.tiles import Choice as Union
from nsa.settings import Settings
from nsa.testing.compile.budgets import FEW, Compiled
from nsa.testing.compile.matrix import OVERHEARD, minor
from nsa.testing.compile.points import ARCHITECTURES, Architecture, Point, points
from nsa.testing.matrix.case import DTYPES

DESCRIPTOR = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{18,20});")
"""An address and the constant added to it. Bits 62 and 63 of the constant say how the matrix is swizzled."""

DECLARED = re.compile(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]")
"""Statically sized shared memory, which lies before the dynamically sized one."""

PLACE = re.compile(r"\s*(?:/\*([0-9a-f]{4,})\*/|(\.LBB\w+):)")
"""An address in NVIDIA's assembly, or a label in AMD's, where a branch may lead."""

BRANCH = re.compile(r"\bBRA\b[^;]*\b0x([0-9a-f]+)|\bs_c?branch\w* (\.LBB\w+)")
LOCAL = re.compile(r"\b(?:LDL|STL)(?:\.\w+)*|\bscratch_(?:load|store)_\w+")
"""An access to local memory."""

SIZES_OR_0 = ("CLUSTER", "PAGE")
"""Compile-time arguments whose 0 leaves out a part of the kernel. They count as switches, as Booleans do."""


@dataclasses.dataclass
class Launches:
    """What the launchers did since the last `clear`.

    variants: of each launch, the kernel's name and which of its compile-time switches are set. wanted: the launches to
    compile, by position. kernels, reports: what was compiled, and the reports of `ptxas -v`.
    """

    variants: list[frozenset[tuple[str, ...]]] = dataclasses.field(default_factory=list)
    wanted: Container[int] = ()
    kernels: list[Any] = dataclasses.field(default_factory=list)
    reports: list[str] = dataclasses.field(default_factory=list)


def main(name: str, extent: str) -> None:
    architecture = ARCHITECTURES[name]
    launches = _pretend(architecture)
    chosen = points(architecture, extent)
    if extent == "quick":
        for point in chosen:
            _call(point)
        launches.wanted = cover(launches.variants)
        launches.variants.clear()
    else:
        launches.wanted = range(sys.maxsize)
    seen: set[str] = set()
    for point in chosen:
        before = len(launches.variants)
        launches.kernels.clear()
        launches.reports.clear()
        print(f"compiling {point.id} for {name}", file=sys.stderr, flush=True)
        _call(point)
        if len(launches.variants) == before:
            raise RuntimeError(f"expected {point.id} to launch a kernel")
        tell(architecture, point.id, launches, seen)


def tell(architecture: Architecture, id: str, launches: Launches, seen: set[str]) -> None:
    """Print a line for each kernel that a point compiled first, and add it to `seen`, the hashes of earlier ones."""
    fresh = list({kernel.hash: kernel for kernel in launches.kernels if kernel.hash not in seen}.values())
    for i, kernel in enumerate(fresh):
        report = launches.reports[i] if len(launches.reports) == len(fresh) else None
        print(json.dumps(dataclasses.asdict(_describe(architecture, id, kernel, report))), flush=True)
    seen.update(kernel.hash for kernel in fresh)


def cover(variants: Sequence[frozenset[tuple[str, ...]]]) -> set[int]:
    """Positions of a few launches that together have every kernel, and every compile-time switch set and not set.

    Greedy: the next launch is the one that adds most.
    """
    missing = set().union(*variants)
    choices = set()
    while missing:
        best = max(range(len(variants)), key=lambda i: len(variants[i] & missing))
        choices.add(best)
        missing -= variants[best]
    return choices


def _call(point: Point) -> None:
    from nsa.kernels.families import OF_SCHEDULE, SERVES_ALL, backward_of
    from nsa.kernels.shared.shape import shape_of

    schedule = next((name for name in point.options if name in OF_SCHEDULE), SERVES_ALL.name)
    family = OF_SCHEDULE[schedule]
    dtype = DTYPES[point.dtype]
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
        page = next((int(option.removeprefix("page")) for option in point.options if option.startswith("page")), 0)
        cached = bool(page) or "cache" in point.options
        B = 1 if not cached else rows if family is SERVES_ALL else 2
        lead = (rows,) if {"cu_seqlens", "ragged"} & set(point.options) else (B, rows // B)
        cache = (*lead[:-1], max(rows, 8192), HKV)
        if "cu_seqlens" in point.options:
            tensors.update(cu_seqlens_q=sequences, cu_seqlens_k=sequences)
        if cached:
            cache = (B * (65536 // page), page, HKV) if page else (B, 65536, HKV)
            tensors["cache_seqlens"] = meta(B, dtype=torch.int32)
            tensors["block_table"] = meta(B, 65536 // page, dtype=torch.int32) if page else None
        if "ragged" in point.options:
            tensors["cu_seqlens_q"] = meta(B + 1, dtype=torch.int32)
        if point.source == "ranges":
            tensors["ranges"] = meta(*lead, HKV, point.n, 2, dtype=index)
        else:
            tensors["block_indices"], block_size = meta(*lead, HKV, point.n, dtype=index), point.L // point.n
        if "q_positions" in point.options:
            tensors["q_positions"] = meta(*lead, dtype=torch.int64)
    q, k, v = meta(*lead, HKV * G, D), meta(*cache, D), meta(*cache, Dv)
    if "e4m3" in point.options:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        tensors.update(k_scale=meta(HKV, dtype=torch.float32), v_scale=meta(1, dtype=torch.float32))
    if "far" in point.options:
        k, v = (x.as_strided(x.shape, (*x.stride()[:-3], 16 * 2**27, *x.stride()[-2:])) for x in (k, v))
    pins = ("query_major", point.choice), ("union", Union(by_row="by_row" in point.options))
    current = Settings(sel_triton_db="unpipelined" not in point.options, pins=pins)
    call = Call(
        q, k, v, **tensors, block_size=block_size, causal=point.causal, return_lse=point.source != "dense",
        settings=current,
    )  # fmt: skip
    if "backward" in point.options:
        out, lse = meta(*lead, HKV * G, Dv), meta(*lead, HKV * G, dtype=torch.float32)
        shape = shape_of(call, point.L)
        of_gradients = backward_of(call, shape)
        launch = of_gradients.plan(call, shape, "backward")
        of_gradients.kernels.backward(launch, call, out, lse, out, lse, "backward")
        return
    launch = family.plan(call, shape_of(call, point.L), schedule)
    family.kernels.forward(launch, call, point.source)


def _pretend(architecture: Architecture) -> Launches:
    """Make this process behave as with a GPU of `architecture`, but launch nothing. Returns what grows from now on."""
    if architecture.backend == "hip":
        torch.version.hip = "6.4"  # our kernels read this when they are imported
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nsa.kernels.shared import device

    launches = Launches()
    launch, run = JITFunction.run, subprocess.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        launches.variants.append(_variant(self, args, keywords))
        if len(launches.variants) - 1 not in launches.wanted:
            return None
        launches.kernels.append(launch(self, *args, grid=grid, warmup=True, **keywords))
        return launches.kernels[-1]

    def overhear(command: Any, *args: Any, **keywords: Any) -> Any:
        done = run(command, *args, **keywords)
        if "-v" in command and Path(command[0]).name.startswith("ptxas"):  # or ptxas-blackwell
            launches.reports.append(Path(keywords["stderr"].name).read_text())
        return done

    driver.set_active(_AbsentGPU(architecture))
    JITFunction.run = warm_up
    subprocess.run = overhear  # type: ignore[assignment]
    device.chip = lambda device: architecture.chip  # type: ignore[assignment]
    return launches


def _variant(kernel: Any, args: Sequence[Any], keywords: dict[str, Any]) -> frozenset[tuple[str, ...]]:
    """The kernel's name, alone and with each compile-time switch and whether the switch is set."""
    name = kernel.fn.__name__
    values = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    arguments = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    switches = {key: value for key, value in arguments.items() if isinstance(value, bool) or key in SIZES_OR_0}
    return frozenset({(name,), *((name, key, str(bool(value))) for key, value in switches.items())})


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


def _describe(architecture: Architecture, id: str, kernel: Any, report: str | None) -> Compiled:
    if architecture.backend == "hip":
        return _describe_amd(id, kernel)
    registers = local = in_loop = None
    if minor() >= OVERHEARD:
        if report is None:
            raise RuntimeError("the kernel compiled, but ptxas left no report: this Triton calls it in another way")
        registers = _number(r"Used (\d+) registers", report)
        local = _number(r"(\d+) bytes stack frame", report)
        in_loop = looped(_disassembled(kernel.asm["cubin"])) if local > FEW else 0
    ptx = kernel.asm["ptx"]
    early = bool(getattr(kernel.metadata, "launch_pdl", False))
    first = re.search(r"griddepcontrol\.wait|\b(ld|st|atom|red)\.\S*global|cp\.async\.c[ag]\b", ptx)
    return Compiled(
        id,
        kernel.metadata.name,
        kernel.metadata.shared,
        registers,
        local,
        in_loop,
        32 * kernel.metadata.num_warps,
        mma=re.search(r"\b(wgmma\.)?mma[._]", ptx) is not None,
        cluster="barrier.cluster" in ptx,
        early=early,
        hasty=early and (first is None or first[0] != "griddepcontrol.wait"),
        mixed=mixed(ptx),
        askew=askew(ptx),
    )


def _disassembled(cubin: bytes) -> str:
    from triton.tools import disasm

    tool = disasm.path_to_cuobjdump()  # Triton 3.3 returns the version, too
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool[0] if isinstance(tool, tuple) else tool, "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if not LOCAL.search(text):
        raise RuntimeError(f"expected accesses to local memory in the disassembly, got {text[-2000:]!r}")
    return text


def looped(assembly: str) -> int:
    """Bytes of local memory that a thread loads and stores in one turn of a loop: the most of all innermost loops."""
    places: dict[str, int] = {}
    ends: dict[int, int] = {}
    before = [0]  # bytes accessed before each line
    for i, line in enumerate(assembly.splitlines()):
        if place := PLACE.match(line):
            places[(place[1] or place[2]).lstrip("0")] = i
        if branch := BRANCH.search(line):
            start = places.get((branch[1] or branch[2]).lstrip("0"))
            if start is not None:
                ends[start] = i
        access = LOCAL.search(line)
        width = re.search(r"\.(64|128)\b|x([234])", access[0]) if access else None
        size = 4 if width is None else int(width[1]) // 8 if width[1] else 4 * int(width[2])
        before.append(before[-1] + (size if access else 0))
    innermost = ((s, e) for s, e in ends.items() if not any(s < t and ends[t] <= e for t in ends))
    return max((before[e + 1] - before[s] for s, e in innermost), default=0)


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


def _describe_amd(id: str, kernel: Any) -> Compiled:
    """Read the metadata of the code object."""
    text = kernel.asm["amdgcn"]
    shared = max(kernel.metadata.shared, _number(r"\.group_segment_fixed_size: +(\d+)", text))
    registers = _number(r"\.vgpr_count: +(\d+)", text)
    local = _number(r"\.private_segment_fixed_size: +(\d+)", text)
    mma = "v_mfma" in text
    name, threads = kernel.metadata.name, 64 * kernel.metadata.num_warps
    return Compiled(id, name, shared, registers, local, looped(text), threads, mma, False, False, False)


def _number(words: str, report: str) -> int:
    match = re.search(words, report)
    if match is None:
        raise RuntimeError(f"expected {words!r} in the assembler's report, got {report[-2000:]!r}")
    return int(match[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
