"""`python -m nsa`: what this machine is, which settings are in force, what to do next; `python -m nsa calibrate`."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa", description="What nsa would do on this machine, and why.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="GPU, versions, settings, threshold (what `python -m nsa` alone does)")
    commands.add_parser("calibrate", help="measure when Triton pays on this GPU, for your user alone (under a minute)")
    command = parser.parse_args(argv).command
    logging.basicConfig(format="%(message)s")
    if command == "calibrate":
        from nsa.testing.calibrate import main as calibrate

        return calibrate()
    try:
        print("\n".join(doctor()))
    except ValueError as error:  # a setting that cannot be parsed: it names file or variable
        print(f"nsa: {error}", file=sys.stderr)
        return 1
    return 0


def doctor() -> list[str]:
    """GPU, versions, settings with their sources, the threshold with its provenance, and the next command."""
    import torch

    import nsa
    from nsa import schedules, settings
    from nsa.dispatch import why_not_triton

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    why_not = why_not_triton(torch.device("cuda", 0)) if gpus else f"torch {torch.__version__} finds no NVIDIA GPU"
    current, sources = settings.get(), settings.sources()
    lines = [
        f"GPU        {', '.join(dict.fromkeys(names)) or 'none'}{f' ({gpus} visible)' if gpus > 1 else ''}",
        f"versions   nsa {nsa.__version__}, torch {torch.__version__}, triton {_version('triton')}, "
        f"Python {platform.python_version()}",
        f"Triton     {'usable' if why_not is None else f'not used: {why_not}'}",
        *([f"compiled   {_compiled(torch.device('cuda', 0))}"] if gpus and why_not is None else []),
        "settings",
    ]
    for name in settings.NAMES:
        value = getattr(current, name)
        shown = "measured per GPU" if value is None else str(value).lower()
        lines.append(f"  {name:18} {shown:18} {sources[name]}")
    if not gpus:
        return [*lines, "threshold  none applies: packed SDPA serves every call", "next       pytest -m parity -n auto"]
    lines.append(f"schedules  {schedules.describe(names[0])}")
    config = settings.device_config(names[0])
    explicit = current.sel_triton_min_L
    if explicit is not None:
        lines.append(f"threshold  sel_triton_min_L = {explicit}, set by {sources['sel_triton_min_L']}")
    if config is None:
        if explicit is None:
            lines.append(f"threshold  sel_triton_min_L = {settings.DEFAULT_MIN_L}: nobody measured this GPU")
        return [*lines, "next       python -m nsa calibrate"]
    off = config.sel_triton_min_L == settings.TRITON_OFF
    value = "off" if off else str(config.sel_triton_min_L)
    lines.append(f"measured   sel_triton_min_L = {value}, packed SDPA as {config.sdpa_layout}, {config.path}")
    lines += [f"  {key:18} {text}" for key, text in config.provenance.items()]
    running = {"torch": torch.__version__, "triton": _version("triton")}
    stale = [key for key, version in running.items() if config.provenance[key] != version]
    if stale:
        lines.append(f"  measured with another {' and '.join(stale)} than this one")
    return [*lines, f"next       {'python -m nsa calibrate' if stale else 'pytest -m perf --benchmark-compare'}"]


def _compiled(device: torch.device) -> str:
    """Whether kernels are compiled right here, or in a child process first."""
    from nsa import probe, settings

    pair, mode = (probe.triton_version(), probe.architecture(device)), settings.get().probe
    listed = probe.passed(*pair)
    said = (
        f"Triton {pair[0]} for {pair[1]}: {'passed the compile matrix' if listed else 'not on the list of the matrix'}"
    )
    if mode == "never" or (mode == "auto" and listed):
        return f"{said}; kernels are compiled in this process{'' if mode == 'auto' else ', probe is never'}"
    return f"{said}; a child process compiles each kernel first, findings in {settings.user_probes()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
