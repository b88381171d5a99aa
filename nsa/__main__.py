"""`python -m nsa`: what this machine is, which settings are in force, what to do next; `python -m nsa calibrate`."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nsa.gpu import Gpu, Threshold, Tiles

MOST_REFUSED = 3  # kernels, each with a line of its own


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa", description="What nsa would do on this machine, and why.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="GPU, versions, settings, threshold (what `python -m nsa` alone does)")
    commands.add_parser("calibrate", help="measure what routing rests on here, for your user alone (a minute or two)")
    command = parser.parse_args(argv).command
    logging.basicConfig(format="%(message)s")
    if command == "calibrate":
        from nsa.tuning.calibrate import main as calibrate

        return calibrate()
    try:
        print("\n".join(doctor()), flush=True)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:  # a setting that cannot be parsed: it names file or variable
        print(f"nsa: {error}", file=sys.stderr)
        return 1
    return 0


def doctor() -> list[str]:
    """GPU, versions, which kernels serve what and why, settings with their sources, the threshold with its provenance,
    and the next command.
    """
    import torch

    import nsa
    from nsa import gpu, outlook, schedules, settings
    from nsa.dispatch import why_not_triton

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    why_not = why_not_triton(torch.device("cuda", 0)) if gpus else f"torch {torch.__version__} finds no NVIDIA GPU"
    if why_not is None and not outlook.triton_installed():
        why_not = outlook.NO_TRITON
    current, sources = settings.get(), settings.sources()
    lines = [
        f"GPU        {', '.join(dict.fromkeys(names)) or 'none'}{f' ({gpus} visible)' if gpus > 1 else ''}",
        f"versions   nsa {nsa.__version__}, torch {torch.__version__}, triton {_version('triton')}, "
        f"Python {platform.python_version()}",
        f"Triton     {'usable' if why_not is None else f'not used: {why_not}'}",
        *([f"compiled   {_compiled(torch.device('cuda', 0))}"] if gpus and why_not is None else []),
        *(_refused(torch.device("cuda", 0)) if gpus and why_not is None else []),
        f"kernels    {outlook.SHAPE}",
        *(
            f"  {kind:21} {server}: {reason}"
            for kind, server, reason in outlook.outlook(torch.device("cuda", 0) if gpus else torch.device("cpu"))
        ),
        "settings",
    ]
    for name in settings.NAMES:
        value = getattr(current, name)
        shown = "measured per GPU" if value is None else str(value).lower()
        lines.append(f"  {name:18} {shown:18} {sources[name]}")
    if not gpus:
        here = "pytest -m parity -n auto" if _checkout() else "python -m nsa, on a machine with an NVIDIA GPU"
        return [*lines, "threshold  none applies: packed SDPA serves every call", f"next       {here}"]
    found, explicit = gpu.measured(names[0]), current.sel_triton_min_L
    lines.append(f"schedules  {schedules.describe(names[0])}")
    lines.append(f"tiles      {_tiles(found.tiles)}")
    if explicit is not None:
        lines.append(f"threshold  sel_triton_min_L = {explicit}, set by {sources['sel_triton_min_L']}")
    lines += _threshold(found.threshold) if found.threshold or explicit is None else []
    stale = _stale(found)
    if stale:
        return [*lines, f"  {stale}", "next       python -m nsa calibrate"]
    after = "pytest -m perf --benchmark-compare" if _checkout() else "nsa.routes() after your calls: what ran, and why"
    return [*lines, f"next       {after}"]


def _threshold(threshold: Threshold | None) -> list[str]:
    from nsa import gpu

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
    import torch

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
    from nsa import settings
    from nsa.kernels.shared import passed, sources

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
    from nsa import settings
    from nsa.guard import memory

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


if __name__ == "__main__":
    sys.exit(main())
