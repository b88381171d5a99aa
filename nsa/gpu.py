"""What was measured on a GPU model: one file, one parser.

`nsa/configs/gpus/<slug>.yaml` has up to three sections, each with its own provenance:

- `threshold`: from how many keys on Triton is faster than packed SDPA, and the fastest packed SDPA layout;
- `crossover`: from how many queries on key-major is faster than query-major;
- `tiles`: tile sizes and splits, by family of kernels.

A user's own file, `$XDG_CONFIG_HOME/nsa/gpus/<slug>.yaml`, comes before the packaged one, section by section. A section
that neither file has is None, and rules serve instead. Files are read at the first call on a GPU of that model.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nsa import settings
from nsa.validate import MAX_GROUP

if TYPE_CHECKING:
    from nsa.kernels.query_major.tiles import Choice, Point

logger = logging.getLogger("nsa")

DEFAULT_MIN_L = 2048  # keys; a safe guess where nobody measured: packed SDPA is never far off for shorter rows
TRITON_OFF = sys.maxsize  # keys; the threshold of a GPU on which Triton never won: no row is that long
SDPA_LAYOUTS = ("heads_as_queries", "expanded", "enable_gqa")

PACKAGED = Path(__file__).parent / "configs" / "gpus"
"""The folder of measurements that ship with the package; `--nsa-update-thresholds` and its like write there."""

SECTIONS = ("threshold", "crossover", "tiles")
FAMILIES = ("query_major",)
"""Kernels that have tiles of their own for a GPU. Key-major and the backward pass have rules (`key_major/tiles.py`,
`backward/tiles.py`)."""

CROSSOVERS = ("key_major_from", "chunk_key_major_from")
SWEPT = ("gpu", "torch", "triton", "commit", "date")
PROVENANCE = {"threshold": (*SWEPT, "margin"), "crossover": (*SWEPT, "command", "shape"), "tiles": SWEPT}
"""The keys of each section's provenance."""

Bucket = tuple[bool, int, int]  # one span, BLOCK_D, BLOCK_DV


@dataclass(frozen=True)
class Threshold:
    """From how many keys of a row on Triton is faster than packed SDPA."""

    sel_triton_min_L: int  # keys; TRITON_OFF where Triton never reached the margin
    sdpa_layout: str | None  # fastest packed SDPA layout, one of SDPA_LAYOUTS; None: not measured
    provenance: Mapping[str, str]
    path: Path


@dataclass(frozen=True)
class Crossover:
    """From how many queries on key-major is faster than query-major."""

    tokens: Mapping[int, int | None]  # by G: queries from which on key-major is faster; None: never
    chunk: Mapping[int, int | None]  # of a chunk, likewise
    provenance: Mapping[str, str]
    path: Path

    def start(self, G: int, chunk: bool = False) -> int | None:
        """Queries from which on key-major is faster for `G` heads a KV head; None: never, or nobody knows.

        The nearest measured group that is not smaller decides: the larger a group, the less there is to gain.
        """
        table = self.chunk if chunk else self.tokens
        return table[min(g for g in table if g >= G)] if G <= max(table) else None


@dataclass(frozen=True)
class Tiles:
    """The best tiles and splits of the shapes that were swept, by family of kernels."""

    query_major: Mapping[Bucket, Mapping[Point, Choice]]
    provenance: tuple[Mapping[str, str], ...]  # of each sweep, in the order of the file
    path: Path


@dataclass(frozen=True)
class Gpu:
    """What was measured on one GPU model; None: that section was not."""

    threshold: Threshold | None = None
    crossover: Crossover | None = None
    tiles: Tiles | None = None


def device_slug(name: str) -> str:
    """The one file and folder name of a device: `NVIDIA H100 80GB HBM3` is `nvidia-h100-80gb-hbm3`."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def min_L_for(device_name: str) -> int:
    """Keys a row must have for Triton on this GPU: an explicit setting, else the measured value, else 2048.

    An unmeasured GPU is named once in a warning, with the command that measures it.
    """
    explicit = settings.get().sel_triton_min_L
    return _measured_min_L(device_name) if explicit is None else explicit


@functools.lru_cache(maxsize=64)
def measured(device_name: str) -> Gpu:
    """What was measured on this GPU model, as CUDA names it: of each section the user's, else the packaged one.

    Raises:
        ValueError: naming the file, the key, the value and what is accepted.
    """
    name = f"{device_slug(device_name)}.yaml"
    folder = settings.user_gpus()
    mine = read(folder / name)
    old = folder.parent / "devices" / name
    if mine.threshold is None and old.is_file():
        logger.warning("%s is no longer read: `python -m nsa calibrate` measures that GPU anew", old)
    if mine.threshold and mine.crossover and mine.tiles:
        return mine
    packaged = read(PACKAGED / name)
    return Gpu(mine.threshold or packaged.threshold, mine.crossover or packaged.crossover, mine.tiles or packaged.tiles)


@functools.cache
def _measured_min_L(device_name: str) -> int:
    """`min_L_for` without an explicit setting. Cached, so that the warning comes once per device."""
    threshold = measured(device_name).threshold
    if threshold is not None:
        return threshold.sel_triton_min_L
    logger.warning(
        "%s: nobody measured when Triton pays here, so rows of fewer than %d keys use packed SDPA; Triton is probably "
        "faster: `python -m nsa calibrate` measures it (a minute or two)",
        device_name,
        DEFAULT_MIN_L,
    )
    return DEFAULT_MIN_L


settings.ON_RELOAD += [measured.cache_clear, _measured_min_L.cache_clear]


# --- the parser -------------------------------------------------------------------------------------------------------


def read(path: Path, text: str | None = None) -> Gpu:
    """What one file says; nothing if there is none. ``text``: what the file is about to hold.

    Raises:
        ValueError: naming the file, the key, the value and what is accepted.
    """
    if text is None and not path.is_file():
        return Gpu()
    document = settings.read_yaml(path, text)
    settings.reject_unknown(path, "", document, SECTIONS)
    parts = {name: _mapping(path, str(name), section) for name, section in document.items()}
    return Gpu(
        _threshold(path, parts["threshold"]) if "threshold" in parts else None,
        _crossover(path, parts["crossover"]) if "crossover" in parts else None,
        _tiles(path, parts["tiles"]) if "tiles" in parts else None,
    )


def _threshold(path: Path, section: Mapping[object, object]) -> Threshold:
    _only(path, "threshold", section, ("sel_triton_min_L", "sdpa_layout", "provenance"))
    expected = "a non-negative integer, null or off"
    if "sel_triton_min_L" not in section:
        raise ValueError(f"{path}: threshold.sel_triton_min_L: expected {expected}, found no such key")
    min_L, layout = section["sel_triton_min_L"], section.get("sdpa_layout")
    if min_L is None or min_L is False:  # YAML reads a bare `off` as false
        min_L = TRITON_OFF
    if not isinstance(min_L, int) or isinstance(min_L, bool) or min_L < 0:
        _wrong(path, "threshold.sel_triton_min_L", expected, min_L)
    if layout is not None and (not isinstance(layout, str) or layout not in SDPA_LAYOUTS):
        _wrong(path, "threshold.sdpa_layout", f"one of {', '.join(SDPA_LAYOUTS)}", layout)
    return Threshold(min_L, layout, _provenance(path, "threshold", section), path)


def _crossover(path: Path, section: Mapping[object, object]) -> Crossover:
    _only(path, "crossover", section, (*CROSSOVERS, "provenance"))
    starts, chunks = (_starts(path, f"crossover.{name}", section.get(name)) for name in CROSSOVERS)
    return Crossover(starts, chunks, _provenance(path, "crossover", section), path)


def _starts(path: Path, key: str, table: object) -> Mapping[int, int | None]:
    if not isinstance(table, dict) or not table:
        _wrong(path, key, "queries by group size", table)
    for G, start in table.items():
        if not _positive(G) or G > MAX_GROUP:
            _wrong(path, key, f"group sizes from 1 to {MAX_GROUP}", G)
        if start is not None and not _positive(start):
            _wrong(path, f"{key}.{G}", "a positive integer or null", start)
    return dict(sorted(table.items()))


def _tiles(path: Path, section: Mapping[object, object]) -> Tiles:
    _only(path, "tiles", section, FAMILIES)
    entries = section.get("query_major")
    if not isinstance(entries, list) or not entries:
        _wrong(path, "tiles.query_major", "a list of shapes", entries)
    found: dict[Bucket, dict[Point, Choice]] = {}
    sweeps: dict[tuple[str, ...], Mapping[str, str]] = {}
    for i, entry in enumerate(entries):
        key = f"tiles.query_major[{i}]"
        entry = _mapping(path, key, entry)
        bucket, point, choice = _shape(path, key, entry)
        found.setdefault(bucket, {})[point] = choice
        sweep = _provenance(path, "tiles", entry, key)
        sweeps[tuple(sweep.values())] = sweep
    return Tiles(found, tuple(sweeps.values()), path)


def _shape(path: Path, key: str, entry: Mapping[object, object]) -> tuple[Bucket, Point, Choice]:
    """A shape that was swept, and its best choice."""
    from nsa.kernels.query_major.tiles import Choice, Point  # which import this module

    _only(path, key, entry, ("shape", "provenance", "best"))
    shape = _mapping(path, f"{key}.shape", entry.get("shape"))
    one_span, best = shape.get("one_span"), entry.get("best")
    if not isinstance(one_span, bool):
        _wrong(path, f"{key}.shape.one_span", "true or false", one_span)
    D, Dv, *point = (_count(path, f"{key}.shape", shape, name) for name in ("D", "Dv", *Point._fields))
    if not isinstance(best, list) or not best:
        _wrong(path, f"{key}.best", "a list of choices, the best first", best)
    first = _mapping(path, f"{key}.best[0]", best[0])
    choice = Choice(*(_count(path, f"{key}.best[0]", first, name, name != "cluster") for name in Choice._fields))
    return (one_span, D, Dv), Point(*point), choice


def _provenance(path: Path, section: str, content: Mapping[object, object], key: str | None = None) -> dict[str, str]:
    """Of a section, or of the part of it that ``key`` names."""
    given, keys = content.get("provenance"), PROVENANCE[section]
    if not isinstance(given, dict) or set(given) != set(keys):
        _wrong(path, f"{key or section}.provenance", f"the keys {', '.join(keys)}", given)
    return {name: str(given[name]) for name in keys}


def _mapping(path: Path, key: str, value: object) -> Mapping[object, object]:
    if not isinstance(value, dict):
        _wrong(path, key, "a mapping", value)
    return value


def _only(path: Path, key: str, section: Mapping[object, object], accepted: tuple[str, ...]) -> None:
    settings.reject_unknown(path, f"{key}.", section, accepted)


def _count(path: Path, key: str, content: Mapping[object, object], name: str, positive: bool = True) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < positive:
        _wrong(path, f"{key}.{name}", f"a {'positive' if positive else 'non-negative'} integer", value)
    return value


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _wrong(path: Path, key: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{path}: {key}: expected {expected}, got {got!r}")
