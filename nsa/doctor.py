"""What `python -m nsa` reports: GPU, versions, settings, measurements, and what would serve the usual kinds of call.

The routing itself is asked what serves a call, without running any. The calls are those of the benchmarks: bf16, 64
query heads over 4 KV heads of D = 128, 16 blocks of 64 keys a row.
"""

from __future__ import annotations

import importlib.util
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import nsa
from nsa import gpu, routing, settings
from nsa.call import Call
from nsa.gpu import Gpu, Threshold, Tiles
from nsa.guard import memory
from nsa.kernels.shared import passed, sources

HQ, HKV, D, SLOTS, BLOCK = 64, 4, 128, 16, 64
LONG = 65_536  # keys
MOST_REFUSED = 3  # kernels, each with a line of its own
SHAPE = f"bf16, HQ/HKV {HQ}/{HKV}, D = {D}, {SLOTS} blocks of {BLOCK} keys a row, causal"
NO_TRITON = "no Triton is installed"
WORDS = {
    "ranges": "query-major",
    "blocks": "query-major",
    "key_major": "key-major",
    "per_head": "query-major, a head a program",
    "sdpa": "packed SDPA",
    "reference": "the gather reference",
}


class Line(NamedTuple):
    """What would serve one kind of call."""

    kind: str
    server: str
    reason: str


def report() -> list[str]:
    """GPU, versions, which kernels serve what and why, settings with their sources, the threshold with its provenance,
    and the next command.
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
        *([f"compiled   {_compiled(device)}"] if gpus and why_not is None else []),
        *(_refused(device) if gpus and why_not is None else []),
        f"kernels    {SHAPE}",
        *(
            f"  {kind:21} {server}: {reason}"
            for kind, server, reason in served(device)
        ),
        "settings",
    ]
    for name in settings.NAMES:
        value = getattr(current, name)
        shown = "measured per GPU" if value is None else str(value).lower()
        lines.append(f"  {name:18} {shown:18} {origins[name]}")
    if not gpus:
        here = "pytest -m parity -n auto" if _checkout() else "python -m nsa, on a machine with an NVIDIA GPU"
        return [*lines, "threshold  none applies: packed SDPA serves every call", f"next       {here}"]
    found, explicit = gpu.measured(names[0]), current.sel_triton_min_L
    lines.append(f"schedules  {routing.describe(names[0])}")
    lines.append(f"tiles      {_tiles(found.tiles)}")
    if explicit is not None:
        lines.append(f"threshold  sel_triton_min_L = {explicit}, set by {origins['sel_triton_min_L']}")
    lines += _threshold(found.threshold) if found.threshold or explicit is None else []
    stale = _stale(found)
    if stale:
        return [*lines, f"  {stale}", "next       python -m nsa calibrate"]
    after = "pytest -m perf --benchmark-compare" if _checkout() else "nsa.routes() after your calls: what ran, and why"
    return [*lines, f"next       {after}"]


def served(device: torch.device) -> list[Line]:
    """One line for each kind of call on ``device``; kernels that `nsa.guard` or a launch refuses are not known here.

    Raises:
        ValueError: a file of settings or measurements cannot be parsed; it is named.
    """
    # The threshold as an argument: routing would warn that nobody measured this GPU, which the caller says anyway.
    current, name = settings.get(), torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    measured = gpu.DEFAULT_MIN_L if threshold is None else threshold.sel_triton_min_L
    explicit = current.sel_triton_min_L
    with settings.configure(sel_triton_min_L=measured if explicit is None else explicit):
        prompt = _plan(device, S=8192)
        plans = {
            "spans": _plan(device, S=8192, spans=True),
            "blocks, 8192 queries": prompt,
            "blocks, 1 query": _plan(device, S=1, S_kv=LONG),
            "cache, 1 query": _plan(device, S=1, S_kv=LONG, cache=True),
            "cache, 2048 queries": _plan(device, S=2048, S_kv=LONG, cache=True),
        }
    lines = [_rows(device), *(_line(kind, plan) for kind, plan in plans.items())]
    server, reason = _serves(prompt)
    if prompt.route not in routing.PLAIN and reason != NO_TRITON:
        server, reason = "backward kernels: dQ, then dK and dV by key blocks", "decided as forward"
    return [*lines, Line("backward", server, reason)]


class Shaped:
    """Shape, dtype and device of a tensor, which is all that planning looks at, without its memory."""

    def __init__(self, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


def _plan(
    device: torch.device, S: int, S_kv: int | None = None, spans: bool = False, cache: bool = False
) -> routing.Plan:
    """What `nsa.dispatch` makes of such a call of one sequence."""
    q, kv = Shaped(device, 1, S, HQ, D), Shaped(device, 1, S if S_kv is None else S_kv, HKV, D)
    rows: tuple[int, ...] = (1, S, HKV, SLOTS)
    chosen: dict[str, Any] = {"block_indices": Shaped(device, *rows, dtype=torch.int32), "block_size": BLOCK}
    if spans:
        chosen = {"ranges": Shaped(device, *rows, 2, dtype=torch.int32), "max_selected": SLOTS * BLOCK}
    if cache:
        chosen |= {"cache_seqlens": Shaped(device, 1, dtype=torch.int32)}
    return routing.make_plan(Call(q, kv, kv, **chosen, settings=settings.get()))  # type: ignore[arg-type]


def _rows(device: torch.device) -> Line:
    """Of packed rows (`nsa.sel_attn_fwd_*`), which know neither threshold nor fallback."""
    why_not = routing.obstacle(torch.bfloat16, device, routing.why_not_triton(device))
    why_not = why_not or (None if triton_installed() else NO_TRITON)
    if why_not is not None:
        return Line("packed rows", "refused", why_not)
    return Line("packed rows", "query-major (dense_group, varlen_group)", "no threshold, no fallback")


def _line(kind: str, plan: routing.Plan) -> Line:
    return Line(kind, *_serves(plan))


def _serves(plan: routing.Plan) -> tuple[str, str]:
    """Who serves, in words and by its route's name, and why."""
    if plan.route in routing.PLAIN:
        return f"{WORDS[plan.route]} ({plan.route})", plan.reason
    if not triton_installed():
        return f"{WORDS[plan.fallback]} ({plan.fallback})", NO_TRITON
    return f"{WORDS[plan.route]} ({plan.route})", plan.reason


def triton_installed() -> bool:
    """Asked without importing it: a process that only reads the routes is not to pay for that."""
    return importlib.util.find_spec("triton") is not None


def _threshold(threshold: Threshold | None) -> list[str]:
    if threshold is None:
        return [f"threshold  sel_triton_min_L = {gpu.DEFAULT_MIN_L}: nobody measured this GPU"]
    value = "off" if threshold.sel_triton_min_L == gpu.TRITON_OFF else str(threshold.sel_triton_min_L)
    first = f"measured   sel_triton_min_L = {value}, packed SDPA as {threshold.sdpa_layout}, {threshold.path}"
    return [first, *(f"  {key:18} {text}" for key, text in threshold.provenance.items())]


def _tiles(tiles: Tiles | None) -> str:
    if tiles is None:
        return "by rules: nobody swept this GPU"
    shapes = sum(len(points) for points in tiles.query_major.values())
    return f"of {shapes} shapes, swept {max(sweep['date'] for sweep in tiles.provenance)}, {tiles.path}"


def _stale(found: Gpu) -> str | None:
    """What `python -m nsa calibrate` would measure that is missing, or of other versions; None: nothing."""
    sections = {"threshold": found.threshold, "crossover": found.crossover}
    missing = [name for name, section in sections.items() if section is None]
    if missing:
        return f"nobody measured this GPU's {' and '.join(missing)}"
    running = {"torch": torch.__version__, "triton": _version("triton")}
    known = [section.provenance for section in sections.values() if section is not None]
    stale = [key for key, version in running.items() if any(measured[key] != version for measured in known)]
    return f"measured with another {' and '.join(stale)} than this one" if stale else None


def _compiled(device: torch.device) -> str:
    """Whether kernels are compiled right here, or in a child process first."""
    pair, mode = (sources.triton_version(), sources.architecture(device)), settings.get().probe
    listed = passed.passed(*pair)
    said = (
        f"Triton {pair[0]} for {pair[1]}: {'passed the compile matrix' if listed else 'not on the list of the matrix'}"
    )
    if mode == "never" or (mode == "auto" and listed):
        return f"{said}; kernels are compiled in this process{'' if mode == 'auto' else ', probe is never'}"
    return f"{said}; a child process compiles each kernel first, findings in {settings.user_probes()}"


def _refused(device: torch.device) -> list[str]:
    """Kernels that child processes found broken here, in earlier processes of this user, and how."""
    if settings.get().probe == "never":  # nobody looks at them
        return []
    found = memory.refused(device)
    more = f" and {len(found) - MOST_REFUSED} more" if len(found) > MOST_REFUSED else ""
    return [f"refused    {kernel}: {cause}" for kernel, cause in found[:MOST_REFUSED]] + [f"          {more}"] * bool(
        more
    )


def _checkout() -> bool:
    """Whether the tests are here too, which an installed package has not."""
    return (Path(__file__).parents[1] / "tests" / "perf").is_dir()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
