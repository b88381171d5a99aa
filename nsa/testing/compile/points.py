"""Architectures, and the calls that are compiled for them (`points.yaml`). Imports no Triton."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from nsa import routing, settings
from nsa.kernels.query_major import tiles as query_tiles
from nsa.kernels.query_major.choice import Choice
from nsa.kernels.shared import device

MOST = 128
"""The most points of one architecture. Points from a GPU's table of tiles are added to `POINTS` up to this number."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The facts about a GPU that compiling for it needs."""

    name: str  # sm_90, gfx942
    backend: str  # Triton's: cuda or hip
    target: int | str
    capability: int  # as `device.chip` tells
    processors: int  # number of multiprocessors, which decides whether keys are split
    since: tuple[int, int]  # the first Triton that compiles for it on any machine
    gpu: str | None = None  # the GPU whose table of tiles is compiled too
    largest_cluster: int = 0
    warp: int = 32

    @property
    def chip(self) -> device.Chip:
        return device.Chip(self.capability, self.processors, self.gpu, self.backend == "cuda")

    @property
    def shared_bytes(self) -> int:
        return device.SHARED_BYTES[self.capability]

    @property
    def e4m3(self) -> bool:
        """Whether Triton serves caches of float8_e4m3fn on this GPU (`routing.why_not_e4m3`)."""
        return self.backend == "cuda" and self.capability >= routing.E4M3_CAPABILITY


def _nvidia(capability: int, processors: int, since: tuple[int, int], **rest: object) -> Architecture:
    return Architecture(f"sm_{capability}", "cuda", capability, capability, processors, since, **rest)  # type: ignore[arg-type]


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _nvidia(80, 108, (3, 1)),  # A100
        _nvidia(89, 128, (3, 1)),  # RTX 4090
        _nvidia(90, 132, (3, 1), gpu="NVIDIA H100 80GB HBM3", largest_cluster=16),
        _nvidia(100, 148, (3, 3), largest_cluster=16),  # B200
        _nvidia(120, 170, (3, 3), largest_cluster=8),  # RTX 5090
        # MI300X. Before 3.5 Triton links with the ld.lld of an installed ROCm.
        Architecture("gfx942", "hip", "gfx942", device.AMD, 304, (3, 5), warp=64),
    )
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One call of a launcher. The shapes decide which kernels it compiles.

    source: dense, varlen, ranges or blocks. rows: B * S. L: keys a row may read. n: spans. choice: forced tiles, as in
    a sweep; None: the tables and rules of `tiles`.

    options: any of cu_seqlens, q_positions, int64, per_head, unpipelined, key_major, union, small_blocks, backward; far
    (strides beyond int32); cache (contiguous), or page64 (pages of 64 keys); e4m3 (a cache of float8_e4m3fn). A cache
    holds 65,536 keys for each of `rows` sequences; with another schedule it has two sequences, with half of the rows
    each. ragged: its queries are packed; with key_major or union, query-major serves its steps. by_row: query-major
    serves the rows that have no union, otherwise key-major does.
    """

    id: str
    source: str
    dtype: str
    G: int
    D: int
    Dv: int
    rows: int
    L: int
    n: int
    HKV: int
    causal: bool
    options: tuple[str, ...]
    choice: Choice | None

    @classmethod
    def of(cls, id: str) -> Point:
        """The point of an id such as `blocks-bf16-G16-D128-Dv128-N8-L1024-n16-causal-HKV4-page64`.

        An id is source, dtype, sizes, options, and the fields of a forced choice as numbers.
        """
        source, dtype, *words = id.split("-")
        sizes = {m[1]: int(m[2]) for word in words if (m := re.fullmatch(r"(G|D|Dv|N|L|n|HKV)(\d+)", word))}
        numbers = [int(word) for word in words if word.isdigit()]
        options = [w for w in words if not (w.isdigit() or w == "causal" or w.rstrip("0123456789") in sizes)]
        G, D, Dv, rows, L, n = (sizes[name] for name in ("G", "D", "Dv", "N", "L", "n"))
        choice = Choice(*numbers) if numbers else None
        HKV, causal = sizes.get("HKV", 1), "causal" in words
        return cls(id, source, dtype, G, D, Dv, rows, L, n, HKV, causal, tuple(options), choice)


_LISTED: dict[Any, list[str]] = settings.read_yaml(Path(__file__).with_name("points.yaml"))  # type: ignore[assignment]
QUICK = tuple(map(Point.of, _LISTED["quick"]))
"""The points of which `make test` compiles some launches (`child.cover`)."""
POINTS = (*QUICK, *map(Point.of, _LISTED["full"]))
"""The points that `make aot` compiles for every architecture."""


def points(architecture: Architecture, extent: str) -> tuple[Point, ...]:
    """The points of an architecture. extent: "quick" or "full"."""
    chosen = QUICK if extent == "quick" else (*POINTS, *_of_table(architecture)[: MOST - len(POINTS)])
    return tuple(point for point in chosen if architecture.e4m3 or "e4m3" not in point.options)


def _of_table(architecture: Architecture) -> list[Point]:
    """A point for each choice of the GPU's table that is not in `POINTS`, first the choices that serve most shapes."""
    if architecture.gpu is None:
        return []
    known = set()
    swept = architecture.gpu, architecture.capability, architecture.processors
    for p in POINTS:
        spans = p.source in ("ranges", "blocks")
        rows, full = p.rows * p.HKV, query_tiles.FULL * architecture.processors
        itemsize = 4 if p.dtype == "fp32" else 2
        choice = query_tiles.measured(
            *swept, itemsize, p.G, p.D, p.Dv, p.L, not spans, rows if rows < full else None
        )
        if p.choice is None and choice is not None:
            known.add((not spans, p.D, p.Dv, choice[2:5]))
    shapes: dict[object, list[Point]] = {}
    for (one_span, D, Dv), measured in query_tiles.table(*swept).items():
        for shape, choice in measured.items():
            source, n = ("dense", 1) if one_span else ("ranges", 8)
            point = Point.of(f"{source}-bf16-G{shape.G}-D{D}-Dv{Dv}-N{shape.rows}-L{shape.L}-n{n}")
            shapes.setdefault((one_span, D, Dv, choice[2:5]), []).append(point)
    fresh = [same for key, same in shapes.items() if key not in known]
    return [same[0] for same in sorted(fresh, key=len, reverse=True)]
