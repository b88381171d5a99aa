"""The measurements of a GPU model: one file, one parser.

`nsa/configs/gpus/<slug>.yaml` has up to three sections, each with its own provenance:

- `threshold`: from how many keys on Triton is faster than packed SDPA, and the fastest layout of packed SDPA;
- `costs`: what a unit of a schedule's work costs (`nsa/schedules.py`);
- `tiles`: tile sizes and splits, by kernel family.

A section of the user's own file, `$XDG_CONFIG_HOME/nsa/gpus/<slug>.yaml`, replaces the packaged section. A section that
is in neither file is None, and the stand-in's or defaults apply instead. The files are read at the first call on a GPU
of that model.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nsa import settings
from nsa.kernels.query_major.choice import Choice, Point

logger = logging.getLogger("nsa")

DEFAULT_MIN_L = 2048  # keys; used on unmeasured GPUs. Cautious, because the threshold of an H100 is 16 keys
TRITON_OFF = sys.maxsize  # keys; the threshold of a GPU on which Triton was never faster, because no row is that long
SDPA_LAYOUTS = ("heads_as_queries", "expanded", "enable_gqa")

STAND_IN = "NVIDIA H100 80GB HBM3"
"""The GPU whose costs and tiles are used on GPUs without their own. They change the speed of a call, and its result
only by rounding. Its tiles are used on GPUs with as many multiprocessors of the same architecture, such as an H200."""

STAND_IN_CHIP = 90, 132
"""The stand-in's compute capability, times ten, and multiprocessors."""

PACKAGED = Path(__file__).parent / "configs" / "gpus"
"""The folder of the measurements in the package. `--nsa-update-thresholds` and similar options write there."""

SECTIONS = ("threshold", "costs", "tiles")
SWEPT = ("gpu", "torch", "triton", "commit", "date")
PROVENANCE = {"threshold": (*SWEPT, "margin"), "costs": (*SWEPT, "command", "shapes"), "tiles": SWEPT}
"""The keys of each section's provenance."""

KINDS = ("narrow", "wide", "narrow_e4m3", "wide_e4m3")
"""The kinds of calls that have costs."""

Bucket = tuple[bool, int, int]  # whether rows have one span, BLOCK_D, BLOCK_DV


@dataclass(frozen=True)
class Threshold:
    """From how many keys of a row on Triton is faster than packed SDPA."""

    sel_triton_min_L: int  # keys; TRITON_OFF if Triton never reached the margin
    sdpa_layout: str | None  # the fastest of SDPA_LAYOUTS; None: not measured
    provenance: Mapping[str, str]
    path: Path


@dataclass(frozen=True)
class Costs:
    """What a unit of a schedule's work costs."""

    kinds: Mapping[str, Mapping[str, Mapping[str, float]]]  # microseconds by kind of calls, schedule and term
    provenance: Mapping[str, str]
    path: Path

    __hash__ = object.__hash__  # mappings have none


@dataclass(frozen=True)
class Tiles:
    """The fastest tiles and splits of the shapes that were swept, by kernel family."""

    query_major: Mapping[Bucket, Mapping[Point, Choice]]
    provenance: tuple[Mapping[str, str], ...]  # one per sweep, in the order of the file
    path: Path


@dataclass(frozen=True)
class Gpu:
    """The measurements of one GPU model. A section that was not measured is None."""

    threshold: Threshold | None = None
    costs: Costs | None = None
    tiles: Tiles | None = None


def device_slug(name: str) -> str:
    """The name of a device's files and folders: `nvidia-h100-80gb-hbm3` for `NVIDIA H100 80GB HBM3`."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


@functools.lru_cache(maxsize=64)
def measured(device_name: str) -> Gpu:
    """The measurements of a GPU model, as CUDA names it: each section from the user's file, else from the packaged one.

    Raises ValueError as :func:`read`.
    """
    name = f"{device_slug(device_name)}.yaml"
    folder = settings.user_gpus()
    mine = Gpu() if folder is None else read(folder / name)
    if mine.threshold and mine.costs and mine.tiles:
        return mine
    packaged = read(PACKAGED / name)
    return Gpu(mine.threshold or packaged.threshold, mine.costs or packaged.costs, mine.tiles or packaged.tiles)


def tiles_for(device_name: str, capability: int, processors: int) -> Tiles | None:
    """The tiles of a GPU model, else the stand-in's if the chip is like it, else None. Raises ValueError as `read`."""
    swept = measured(device_name).tiles
    if swept is None and (capability, processors) == STAND_IN_CHIP:
        return measured(STAND_IN).tiles
    return swept


@functools.cache
def min_L_for(device_name: str) -> int:
    """Keys from which on a row uses Triton on this GPU, where no setting says so: the measured value, else 2048.

    For a GPU that was not measured, one warning per process names the command that measures it.
    """
    threshold = measured(device_name).threshold
    if threshold is not None:
        return threshold.sel_triton_min_L
    logger.warning(
        "%s: not measured, so rows of fewer than %d keys use packed SDPA, though Triton is probably faster; `python -m "
        "nsa calibrate` measures this GPU (a few minutes)",
        device_name,
        DEFAULT_MIN_L,
    )
    return DEFAULT_MIN_L


settings.ON_RELOAD += [measured.cache_clear, min_L_for.cache_clear]


# --- the parser -------------------------------------------------------------------------------------------------------


def read(path: Path, text: str | None = None) -> Gpu:
    """Parse one file, or ``text``, which is about to be written there. A file that is missing or cannot be read has no
    sections.

    Raises:
        ValueError: it cannot be parsed. The text names the file, the key, the value and what is accepted.
    """
    if text is None and not settings.readable(path):
        return Gpu()
    document = settings.read_yaml(path, text)
    if document.pop("crossover", None) is not None:
        logger.warning("%s: its section crossover is no longer read: `python -m nsa calibrate` measures costs", path)
    settings.reject_unknown(path, "", document, SECTIONS)
    parsers: dict[object, Any] = dict(zip(SECTIONS, (_threshold, _costs, _tiles), strict=True))
    return Gpu(**{str(name): parsers[name](path, section) for name, section in document.items()})


def _threshold(path: Path, section: object) -> Threshold:
    content = _mapping(path, "threshold", section, "sel_triton_min_L", "sdpa_layout", "provenance")
    expected = "a non-negative integer, null or off"
    if "sel_triton_min_L" not in content:
        raise ValueError(f"{path}: threshold.sel_triton_min_L: expected {expected}, found no such key")
    min_L, layout = content["sel_triton_min_L"], content.get("sdpa_layout")
    if min_L is None or min_L is False:  # YAML reads a bare `off` as false
        min_L = TRITON_OFF
    if not _is_int(min_L, 0):
        _wrong(path, "threshold.sel_triton_min_L", expected, min_L)
    if layout is not None and layout not in SDPA_LAYOUTS:
        _wrong(path, "threshold.sdpa_layout", f"one of {', '.join(SDPA_LAYOUTS)}", layout)
    return Threshold(min_L, layout, _provenance(path, "threshold", "threshold", content), path)


def _costs(path: Path, section: object) -> Costs | None:
    """None for costs of another version, which counted other work."""
    from nsa.work import TERMS  # which imports this module

    content = _mapping(path, "costs", section, *KINDS, "provenance")
    for kind in content.keys() - {"provenance"}:
        for schedule, costs in _mapping(path, f"costs.{kind}", content[kind]).items():
            key = f"costs.{kind}.{schedule}"
            if schedule not in TERMS or not _mapping(path, key, costs).keys() <= {*TERMS[schedule]}:
                text = "%s: %s is of another version, and no costs are read: `python -m nsa calibrate` measures them"
                logger.warning(text, path, key)
                return None
            for term, cost in costs.items():
                if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost < math.inf:
                    _wrong(path, f"{key}.{term}", "microseconds, 0 or more", cost)
    kinds = {kind: content[kind] for kind in KINDS if kind in content}
    return Costs(kinds, _provenance(path, "costs", "costs", content), path)


def _tiles(path: Path, section: object) -> Tiles:
    entries = _mapping(path, "tiles", section, "query_major").get("query_major")
    if not isinstance(entries, list) or not entries:
        _wrong(path, "tiles.query_major", "a list of shapes", entries)
    choices: dict[Bucket, dict[Point, Choice]] = {}
    sweeps: dict[tuple[str, ...], Mapping[str, str]] = {}
    for i, entry in enumerate(entries):
        key = f"tiles.query_major[{i}]"
        content = _mapping(path, key, entry, "shape", "provenance", "best")
        shape, best = _mapping(path, f"{key}.shape", content.get("shape")), content.get("best")
        one_span = shape.get("one_span")
        if not isinstance(one_span, bool):
            _wrong(path, f"{key}.shape.one_span", "true or false", one_span)
        D, Dv, *point = _integers(path, f"{key}.shape", shape, ("D", "Dv", *Point._fields))
        if not isinstance(best, list) or not best:
            _wrong(path, f"{key}.best", "a list of choices, the best first", best)
        choice = _integers(path, f"{key}.best[0]", _mapping(path, f"{key}.best[0]", best[0]), Choice._fields)
        choices.setdefault((one_span, D, Dv), {})[Point(*point)] = Choice(*choice)
        sweep = _provenance(path, "tiles", key, content)
        sweeps[tuple(sweep.values())] = sweep
    return Tiles(choices, tuple(sweeps.values()), path)


def _provenance(path: Path, section: str, key: str, content: Mapping[Any, Any]) -> dict[str, str]:
    given, keys = content.get("provenance"), PROVENANCE[section]
    if not isinstance(given, dict) or set(given) != set(keys):
        _wrong(path, f"{key}.provenance", f"the keys {', '.join(keys)}", given)
    return {name: str(given[name]) for name in keys}


def _mapping(path: Path, key: str, value: object, *accepted: str) -> Mapping[Any, Any]:
    """``value``, which must be a mapping; if ``accepted`` is given, with no other keys."""
    if not isinstance(value, dict):
        _wrong(path, key, "a mapping", value)
    if accepted:
        settings.reject_unknown(path, f"{key}.", value, accepted)
    return value


def _integers(path: Path, key: str, content: Mapping[Any, Any], names: tuple[str, ...]) -> list[int]:
    """The values of ``names``. They must be positive integers; ``cluster`` may be 0."""
    for name in names:
        if not _is_int(content.get(name), int(name != "cluster")):
            kind = "non-negative" if name == "cluster" else "positive"
            _wrong(path, f"{key}.{name}", f"a {kind} integer", content.get(name))
    return [content[name] for name in names]


def _is_int(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(path: Path, key: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{path}: {key}: expected {expected}, got {settings.shown(got)}")
