"""The report of `python -m nsa`: GPU, versions, settings, measurements, and the kernels that would serve typical calls.

No call runs: the report asks `nsa.routing` for plans. The calls are those of the benchmarks: bf16, 64 query heads, 4 KV
heads, D = 128, 16 blocks of 64 keys a row.
"""

from __future__ import annotations

import importlib.util
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa import failures, gpu, routing, schedules, settings
from nsa.call import Call
from nsa.gpu import Gpu, Threshold
from nsa.guard import memory
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared import passed, sources

HQ, HKV, D, SLOTS, BLOCK = 64, 4, 128, 16, 64
LONG = 65_536  # keys
MOST_REFUSED = 3  # kernels that the report lists
SHAPE = f"bf16, HQ/HKV {HQ}/{HKV}, D = {D}, {SLOTS} blocks of {BLOCK} keys a row, causal"
NO_TRITON = "no Triton is installed"
WORDS = {
    "per_head": "query-major, a head a program",
    "sdpa": "packed SDPA",
    "reference": "the gather reference",
}


def report() -> list[str]:
    """The lines of the report. The last line names the next command to type.

    Raises:
        ValueError: a file of settings or measurements, or a variable, cannot be parsed. The text names it.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    why_not = routing.why_not_triton(device) if gpus else f"torch {torch.__version__} finds no NVIDIA GPU"
    if why_not is None and not triton_installed():
        why_not = NO_TRITON
    current, origins = settings.get(), settings.sources()
    lines = [
        f"GPU        {', '.join(dict.fromkeys(names)) or 'none'}{f' ({gpus} visible)' if gpus > 1 else ''}",
        f"versions   nsa {nsa.__version__}, torch {torch.__version__}, triton {_version('triton')}, "
        f"Python {platform.python_version()}",
        f"Triton     {'usable' if why_not is None else f'not used: {why_not}'}",
    ]
    if why_not is None:
        lines += [f"compiled   {_compiled(device)}", *_refused(device)]
    lines += [f"off        {failure.cause}" for failure in failures.broken.values()]  # where a process asks of itself
    lines.append(f"kernels    {SHAPE}")
    lines += [f"  {kind:21} {server}: {reason}" for kind, server, reason in served(device)]
    lines.append("settings")
    for name in settings.NAMES:
        value = getattr(current, name)
        shown = "measured per GPU" if value is None else str(value).lower()
        lines.append(f"  {name:18} {shown:18} {origins[name]}")
    checkout = _checkout()
    if not gpus:
        here = "pytest -m parity -n auto" if checkout else "python -m nsa, on a machine with an NVIDIA GPU"
        return [*lines, "threshold  none applies: packed SDPA serves every call", f"next       {here}"]
    measurements, explicit = gpu.measured(names[0]), current.sel_triton_min_L
    lines += [f"schedules  {schedules.describe(names[0])}", f"tiles      {_tiles(device_facts.chip(device), names[0])}"]
    if explicit is not None:
        lines.append(f"threshold  sel_triton_min_L = {explicit}, set by {origins['sel_triton_min_L']}")
    if measurements.threshold or explicit is None:
        lines += _threshold(measurements.threshold)
    stale = _stale(measurements)
    if stale:
        return [*lines, f"  {stale}", "next       python -m nsa calibrate"]
    after = "pytest -m perf --benchmark-compare" if checkout else "nsa.routes() after your calls: what ran, and why"
    return [*lines, f"next       {after}"]


def served(device: torch.device) -> list[tuple[str, str, str]]:
    """``(kind of call, what would serve it, why)`` for calls on ``device``. Raises ValueError as :func:`report`.

    Failures of kernels and verdicts of `nsa.guard` are not considered.
    """
    # The threshold is set as an argument here, because `gpu.min_L_for` would warn if this GPU was not measured.
    explicit, threshold = settings.get().sel_triton_min_L, None
    if device.type == "cuda":
        threshold = gpu.measured(torch.cuda.get_device_name(device)).threshold
    measured = gpu.DEFAULT_MIN_L if threshold is None else threshold.sel_triton_min_L
    with settings.configure(sel_triton_min_L=measured if explicit is None else explicit):
        prompt = _plan(device, S=8192)
        plans = {
            "spans": _plan(device, S=8192, spans=True),
            "blocks, 8192 queries": prompt,
            "blocks, 1 query": _plan(device, S=1, S_kv=LONG),
            "cache, 1 query": _plan(device, S=1, S_kv=LONG, cache=True),
            "cache, 2048 queries": _plan(device, S=2048, S_kv=LONG, cache=True),
        }
    # Packed rows (`nsa.sel_attn_fwd_*`) have neither threshold nor fallback.
    rows = "query-major", "no threshold, no fallback"
    why_not = routing.obstacle(torch.bfloat16, device, routing.why_not_triton(device))
    if why_not is not None or not triton_installed():
        rows = "refused", why_not or NO_TRITON
    backward = _serves(prompt)
    if prompt.route not in routing.PLAIN and backward[1] != NO_TRITON:
        backward = "backward kernels: dQ, then dK and dV by key blocks", "decided as forward"
    served = {"packed rows": rows, **{kind: _serves(plan) for kind, plan in plans.items()}, "backward": backward}
    return [(kind, server, reason) for kind, (server, reason) in served.items()]


class Shaped:
    """Shape, dtype, device and strides of a tensor without memory. Planning uses nothing else."""

    def __init__(self, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def is_contiguous(self) -> bool:
        return True


def _plan(
    device: torch.device, S: int, S_kv: int | None = None, spans: bool = False, cache: bool = False
) -> routing.Plan:
    """The plan of a call with one sequence."""
    q, kv = Shaped(device, 1, S, HQ, D), Shaped(device, 1, S if S_kv is None else S_kv, HKV, D)
    rows: tuple[int, ...] = (1, S, HKV, SLOTS)
    chosen: dict[str, Any] = {"block_indices": Shaped(device, *rows, dtype=torch.int32), "block_size": BLOCK}
    if spans:
        chosen = {"ranges": Shaped(device, *rows, 2, dtype=torch.int32), "max_selected": SLOTS * BLOCK}
    if cache:
        chosen |= {"cache_seqlens": Shaped(device, 1, dtype=torch.int32)}
    return routing.make_plan(Call(q, kv, kv, **chosen, settings=settings.get()))  # type: ignore[arg-type]


def _serves(plan: routing.Plan) -> tuple[str, str]:
    """The route of a plan, in words and by name, and the reason."""
    lost = plan.route not in routing.PLAIN and not triton_installed()
    route, reason = (plan.fallback, NO_TRITON) if lost else (plan.route, plan.reason)
    rows = plan.rows if route == plan.family.name else ""
    return f"{WORDS.get(route, route.replace('_', '-'))} ({rows or route})", reason


def triton_installed() -> bool:
    """Whether Triton is installed. It is not imported, which would take longer than the rest of the report."""
    return importlib.util.find_spec("triton") is not None


def _threshold(threshold: Threshold | None) -> list[str]:
    if threshold is None:
        return [f"threshold  sel_triton_min_L = {gpu.DEFAULT_MIN_L}: this GPU was not measured"]
    value = "off" if threshold.sel_triton_min_L == gpu.TRITON_OFF else str(threshold.sel_triton_min_L)
    first = f"measured   sel_triton_min_L = {value}, packed SDPA as {threshold.sdpa_layout}, {threshold.path}"
    return [first, *(f"  {key:18} {text}" for key, text in threshold.provenance.items())]


def _tiles(chip: device_facts.Chip, name: str) -> str:
    tiles = gpu.tiles_for(name, chip.capability, chip.processors)
    if tiles is None:
        return "by rules: this GPU was not swept"
    shapes = sum(len(points) for points in tiles.query_major.values())
    by = "" if gpu.measured(name).tiles else f" on {gpu.STAND_IN}, not on this GPU,"
    return f"of {shapes} shapes, swept{by} {max(sweep['date'] for sweep in tiles.provenance)}, {tiles.path}"


def _stale(measurements: Gpu) -> str | None:
    """Why `python -m nsa calibrate` should run: sections that are missing, or from other versions. None: no need."""
    sections = {"threshold": measurements.threshold, "costs": measurements.costs}
    missing = [name for name, section in sections.items() if section is None]
    if missing:
        return f"not measured on this GPU: {' and '.join(missing)}"
    running = {"torch": torch.__version__, "triton": _version("triton")}
    provenances = [section.provenance for section in sections.values() if section is not None]
    stale = [key for key, version in running.items() if any(measured[key] != version for measured in provenances)]
    return f"measured with another {' and '.join(stale)} than this one" if stale else None


def _compiled(device: torch.device) -> str:
    """Whether kernels are compiled in this process or first in a child process."""
    pair, mode = (sources.triton_version(), sources.architecture(device)), settings.get().probe
    listed = passed.passed(*pair)
    matrix = "passed the compile matrix" if listed else "not on the list of the matrix"
    said = f"Triton {pair[0]} for {pair[1]}: {matrix}"
    if mode == "never" or (mode == "auto" and listed):
        return f"{said}; kernels are compiled in this process{'' if mode == 'auto' else ', probe is never'}"
    return f"{said}; a child process compiles each kernel first, findings in {settings.user_probes()}"


def _refused(device: torch.device) -> list[str]:
    """The kernels that child processes of this user found broken with these sources and versions, and how."""
    if settings.get().probe == "never":  # then findings are not used
        return []
    refused = memory.refused(device)
    lines = [f"refused    {kernel}: {cause}" for kernel, cause in refused[:MOST_REFUSED]]
    return [*lines, f"           and {len(refused) - MOST_REFUSED} more"] if len(refused) > MOST_REFUSED else lines


def _checkout() -> bool:
    """Whether the current folder lies in a checkout of the package, which has tests."""
    root = Path(__file__).parents[1]
    return (root / "tests" / "perf").is_dir() and Path.cwd().is_relative_to(root)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
