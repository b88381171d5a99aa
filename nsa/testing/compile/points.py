"""The points of the compile matrix: architectures, and calls that a user of each would make. Imports no Triton."""

from __future__ import annotations

import dataclasses

from nsa import routing
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
    capability: int  # as `device.limits` returns it
    processors: int  # number of multiprocessors, which decides whether keys are split
    since: tuple[int, int]  # the first Triton that compiles for it on any machine
    gpu: str | None = None  # the GPU whose table of tiles is compiled too
    largest_cluster: int = 0
    warp: int = 32

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
    """One call of a launcher. The shapes decide which kernels it compiles."""

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
    # Any of cu_seqlens, q_positions, int64, per_head, unpipelined, key_major, union, small_blocks, backward; far
    # (strides beyond int32); cache (contiguous), or page64 (pages of 64 keys); e4m3 (a cache of float8_e4m3fn). A cache
    # holds 65,536 keys for each of `rows` sequences; with another schedule it has two sequences, with half of the rows
    # each. ragged: its queries are packed; with key_major or union, query-major serves its steps.
    options: tuple[str, ...] = ()
    choice: Choice | None = None  # forced tiles, as in a sweep; None: the tables and rules of `tiles`
    rare: bool = False  # compiled by `make aot` only

    @property
    def id(self) -> str:
        words = ["causal"] * self.causal + [f"HKV{self.HKV}"] * (self.HKV > 1)
        words += [*self.options, *(str(x) for x in self.choice or ())]
        shape = [f"G{self.G}", f"D{self.D}", f"Dv{self.Dv}", f"N{self.rows}", f"L{self.L}", f"n{self.n}"]
        return "-".join([self.source, self.dtype, *shape, *words])


_FIRST = (
    Point("dense", "bf16", 8, 128, 128, 1024, 512),
    Point("dense", "bf16", 4, 64, 64, 1024, 16, rare=True),
    Point("dense", "fp16", 8, 128, 64, 64, 1024),  # few rows: split, and combined
    Point("dense", "bf16", 128, 256, 256, 1024, 1024, rare=True),  # the largest tiles there are
    Point("varlen", "bf16", 8, 128, 128, 1024, 512),
    Point("ranges", "bf16", 8, 128, 128, 1024, 1024, n=8),
    Point("ranges", "fp16", 3, 96, 100, 1024, 256, n=8, causal=True, options=("int64", "unpipelined"), rare=True),
    Point("ranges", "bf16", 4, 64, 128, 4096, 1024, n=16, causal=True, HKV=2, options=("cu_seqlens",)),
    Point("ranges", "fp32", 16, 256, 256, 1024, 1024, n=64, causal=True, options=("q_positions",), rare=True),
    Point("blocks", "bf16", 16, 128, 128, 65536, 1024, n=16, causal=True, HKV=4),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True),  # decode: split
    Point("blocks", "bf16", 8, 128, 128, 1024, 1024, n=16, causal=True, options=("per_head",), rare=True),
    Point("dense", "bf16", 8, 128, 128, 64, 128, choice=Choice(1, 1, 128, 4, 1)),  # a single tile
    Point("ranges", "bf16", 8, 128, 128, 64, 256, n=8, choice=Choice(2, 1, 64, 4, 3)),  # a cluster
    Point("ranges", "bf16", 64, 128, 32, 8, 256, n=8, choice=Choice(4, 1, 64, 4, 1)),  # a cluster, `wgmma`
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, choice=Choice(16, 1, 64, 4, 2)),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, choice=Choice(8, 1, 128, 8, 1, 0)),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, HKV=4, options=("page64",)),
    Point("blocks", "bf16", 16, 128, 128, 64, 1024, n=16, causal=True, HKV=4, options=("page16",), rare=True),
    Point("blocks", "bf16", 16, 128, 128, 8, 2048, n=16, causal=True, HKV=4, options=("page128", "e4m3")),
    Point("blocks", "bf16", 16, 128, 128, 8192, 1024, n=16, causal=True, HKV=4, options=("key_major",)),
    Point("blocks", "bf16", 4, 128, 128, 8192, 1024, n=16, causal=True, HKV=8, options=("key_major",), rare=True),
    Point(
        "ranges",
        "fp16",
        1,
        64,
        64,
        4096,
        1024,
        n=16,
        causal=True,
        HKV=16,
        options=("key_major", "cu_seqlens"),
        rare=True,
    ),
    Point(
        "blocks",
        "bf16",
        16,
        128,
        128,
        1024,
        1024,
        n=16,
        causal=True,
        HKV=4,
        options=("key_major", "page64"),
        rare=True,
    ),
    Point("blocks", "bf16", 16, 128, 128, 8192, 1024, n=16, causal=True, HKV=4, options=("union",)),
    Point("blocks", "bf16", 16, 128, 128, 64, 2048, n=16, causal=True, HKV=4, options=("page128", "ragged")),
    Point("blocks", "bf16", 16, 128, 128, 2048, 2048, n=16, causal=True, options=("key_major", "page128", "ragged")),
    Point("blocks", "bf16", 12, 256, 256, 64, 2052, n=513, causal=True, HKV=2, options=("small_blocks", "page64")),
    Point("blocks", "bf16", 12, 256, 256, 2, 2052, n=513, HKV=2, options=("small_blocks", "page64", "e4m3")),
    Point("blocks", "bf16", 16, 128, 128, 8192, 1024, n=16, causal=True, HKV=4, options=("backward",)),
    Point("blocks", "bf16", 12, 256, 256, 4096, 2052, n=513, causal=True, HKV=2, options=("backward",)),
    Point("ranges", "fp16", 1, 64, 64, 4096, 1024, n=16, causal=True, HKV=16, options=("backward", "cu_seqlens")),
)

QUICK = tuple(point for point in _FIRST if not point.rare)
"""The points of which `make test` compiles some launches (`child.cover`)."""

POINTS = (
    *_FIRST,
    Point("dense", "fp16", 4, 100, 64, 1024, 128),
    Point("dense", "bf16", 16, 192, 128, 256, 512),
    Point("dense", "bf16", 64, 128, 128, 1024, 1024),
    Point("dense", "fp32", 4, 64, 64, 64, 1024),
    Point("varlen", "fp16", 4, 64, 64, 64, 1024),
    Point("varlen", "fp32", 3, 100, 96, 256, 256),
    Point("ranges", "bf16", 8, 128, 128, 256, 64, n=4),
    Point("ranges", "fp16", 16, 128, 128, 8, 1024, n=16, causal=True),
    Point("ranges", "bf16", 1, 128, 128, 8192, 1024, n=16, causal=True, HKV=16),
    Point("ranges", "bf16", 128, 192, 128, 4096, 1024, n=16, causal=True),
    Point("ranges", "bf16", 8, 128, 128, 256, 1024, n=150, causal=True),  # more spans than fit a program
    Point("blocks", "bf16", 16, 128, 128, 64, 4096, n=128, causal=True),
    Point("dense", "bf16", 8, 128, 128, 64, 1024, options=("far",)),  # strides beyond int32
    Point("ranges", "bf16", 8, 64, 64, 256, 256, n=8, options=("far",)),
    Point("ranges", "fp16", 8, 256, 256, 1024, 4096, n=64, causal=True, options=("int64", "cu_seqlens")),
    Point("blocks", "bf16", 4, 64, 64, 32768, 1024, n=16, causal=True, HKV=8),
    Point("blocks", "fp16", 8, 128, 128, 32768, 1024, n=16, causal=True, HKV=8, options=("int64", "cu_seqlens")),
    Point("blocks", "bf16", 16, 192, 192, 16384, 1024, n=16, causal=True),
    Point("blocks", "bf16", 64, 128, 128, 64, 1024, n=16, causal=True),
    Point("blocks", "fp32", 16, 128, 128, 1024, 1024, n=16, causal=True),
    Point("blocks", "bf16", 16, 128, 128, 8, 1024, n=16, causal=True, HKV=4, options=("cache",)),
    Point("blocks", "fp16", 4, 64, 128, 1024, 1024, n=16, causal=True, HKV=8, options=("page128",)),
    Point("blocks", "bf16", 8, 128, 128, 64, 1024, n=16, causal=True, HKV=4, options=("page48",)),  # across pages
    Point("ranges", "bf16", 16, 128, 128, 64, 1024, n=16, causal=True, HKV=4, options=("page64",)),
    Point("blocks", "bf16", 16, 128, 128, 256, 2048, n=16, causal=True, HKV=4, options=("page128", "e4m3")),
    Point(
        "blocks",
        "bf16",
        16,
        128,
        128,
        8,
        2048,
        n=16,
        causal=True,
        HKV=4,
        options=("page128", "e4m3"),
        choice=Choice(16, 1, 128, 8, 1),
    ),  # a single tile, in a cluster
    Point("ranges", "fp16", 8, 64, 128, 64, 1024, n=16, causal=True, HKV=4, options=("page64", "e4m3")),
    Point("ranges", "fp16", 3, 100, 33, 8, 1024, n=8, causal=True, options=("cache", "e4m3")),  # values byte by byte
    Point("blocks", "bf16", 64, 128, 64, 64, 1024, n=16, causal=True, options=("cache", "e4m3")),  # `wgmma`
    Point("blocks", "bf16", 16, 128, 128, 64, 768, n=16, causal=True, options=("q_positions",)),  # blocks of 48
    Point("blocks", "fp16", 8, 128, 64, 4096, 1024, n=16, causal=True, HKV=4, options=("key_major", "cu_seqlens")),
    Point("blocks", "bf16", 1, 128, 128, 8192, 1024, n=16, causal=True, HKV=16, options=("key_major",)),
    Point("blocks", "bf16", 4, 128, 128, 1024, 1024, n=16, causal=True, HKV=8, options=("key_major", "cache")),
    Point("blocks", "fp16", 16, 64, 128, 65536, 1024, n=16, causal=True, HKV=4, options=("key_major", "page16")),
    Point("ranges", "bf16", 8, 128, 128, 4096, 1024, n=16, causal=True, HKV=4, options=("key_major", "page128")),
    Point("blocks", "fp16", 16, 64, 64, 8, 1024, n=16, options=("cache", "ragged")),
    Point("ranges", "bf16", 8, 128, 128, 64, 1024, n=16, causal=True, HKV=4, options=("page64", "ragged", "int64")),
    Point("ranges", "bf16", 4, 128, 128, 4096, 1024, n=16, causal=True, options=("key_major", "cache", "ragged")),
    Point(
        "blocks", "bf16", 16, 128, 128, 65536, 2048, n=16, causal=True, HKV=4, options=("key_major", "page128", "e4m3")
    ),
    Point(
        "blocks", "bf16", 16, 128, 128, 65536, 1024, n=16, causal=True, HKV=4, options=("key_major", "page64", "e4m3")
    ),  # a merge that reads keys
    Point(
        "blocks",
        "bf16",
        16,
        128,
        128,
        2048,
        2048,
        n=16,
        causal=True,
        HKV=4,
        options=("key_major", "page128", "ragged"),
        choice=Choice(1, 1, 32, 2, 3),
    ),  # the tile of many steps
    Point(
        "blocks",
        "bf16",
        16,
        128,
        128,
        2048,
        2048,
        n=16,
        causal=True,
        HKV=4,
        options=("key_major", "page128", "ragged", "e4m3"),
        choice=Choice(1, 1, 64, 2, 3),
    ),
    Point("ranges", "fp16", 8, 128, 64, 4096, 1024, n=16, causal=True, HKV=4, options=("key_major", "cache", "e4m3")),
    Point("blocks", "bf16", 4, 128, 128, 4096, 4096, n=16, causal=True, HKV=8, options=("key_major", "page64", "e4m3")),
    Point("blocks", "bf16", 3, 100, 96, 1000, 512, n=16, options=("key_major", "q_positions")),
    Point("blocks", "fp16", 16, 64, 16, 4096, 192, n=8, causal=True, options=("key_major", "int64")),  # blocks of 24
    Point("blocks", "bf16", 64, 256, 256, 4096, 2048, n=16, causal=True, options=("key_major",)),  # blocks of 128
    Point("blocks", "bf16", 64, 128, 128, 4096, 1024, n=16, causal=True, options=("key_major",)),
    Point("blocks", "bf16", 64, 128, 128, 4096, 4096, n=16, causal=True, options=("key_major",)),  # blocks of 256
    Point("blocks", "bf16", 4, 128, 128, 8192, 4096, n=16, causal=True, HKV=8, options=("key_major", "page64")),
    Point("blocks", "fp32", 4, 128, 128, 4096, 1024, n=16, causal=True, HKV=2, options=("key_major",)),
    Point("blocks", "bf16", 8, 128, 128, 8192, 1024, n=16, causal=True, HKV=4, options=("union", "cu_seqlens")),
    Point("blocks", "bf16", 4, 128, 128, 8192, 1024, n=16, causal=True, HKV=8, options=("union", "cache")),
    Point("blocks", "bf16", 16, 128, 128, 1024, 2048, n=16, causal=True, HKV=4, options=("union", "page128")),
    Point("blocks", "bf16", 16, 128, 128, 4096, 2048, n=16, causal=True, options=("union", "page128", "ragged")),
    Point("blocks", "fp16", 3, 100, 96, 1000, 384, n=16, options=("union", "q_positions", "int64")),  # blocks of 24
    Point("blocks", "fp16", 16, 64, 128, 1024, 1024, n=16, causal=True, HKV=4, options=("union", "page16")),
    Point("blocks", "bf16", 16, 256, 256, 4096, 2048, n=16, causal=True, options=("union",)),
    Point("blocks", "fp32", 4, 128, 128, 4096, 1024, n=16, causal=True, HKV=2, options=("union",)),
    Point("blocks", "bf16", 12, 256, 256, 2, 2052, n=513, causal=True, HKV=2, options=("small_blocks", "page64")),
    Point("blocks", "bf16", 12, 256, 256, 4096, 2052, n=513, causal=True, HKV=2, options=("small_blocks",)),
    Point("blocks", "bf16", 12, 256, 256, 512, 2052, n=513, options=("small_blocks", "page64", "e4m3", "ragged")),
    Point("blocks", "fp16", 40, 128, 64, 512, 1600, n=100, causal=True, options=("small_blocks", "cu_seqlens")),
    Point("blocks", "fp16", 3, 100, 96, 512, 500, n=100, causal=True, options=("small_blocks", "int64", "q_positions")),
    Point("blocks", "fp32", 4, 64, 64, 512, 700, n=100, causal=True, HKV=2, options=("small_blocks", "cache")),
    Point("blocks", "bf16", 4, 128, 128, 8192, 1024, n=16, causal=True, HKV=8, options=("backward",)),
    Point("blocks", "fp16", 40, 128, 64, 512, 1600, n=100, options=("backward", "cu_seqlens", "int64")),
    Point("blocks", "bf16", 1, 128, 128, 8192, 1024, n=16, causal=True, HKV=16, options=("backward",)),
    Point("blocks", "fp16", 8, 128, 64, 8192, 1024, n=16, causal=True, HKV=4, options=("backward", "cu_seqlens")),
    Point("blocks", "bf16", 3, 100, 96, 1000, 512, n=16, options=("backward", "q_positions", "int64")),
    Point(
        "blocks", "bf16", 12, 100, 96, 4096, 768, n=16, causal=True, HKV=4, options=("backward", "q_positions", "int64")
    ),  # unions of blocks of 48
    Point("blocks", "bf16", 64, 128, 128, 4096, 1024, n=16, causal=True, options=("backward",)),
    Point("blocks", "bf16", 128, 256, 256, 4096, 2048, n=16, causal=True, options=("backward",)),  # blocks of 128
    Point("ranges", "bf16", 16, 192, 128, 4096, 1024, n=16, causal=True, options=("backward",)),
    Point("blocks", "fp32", 4, 128, 128, 4096, 1024, n=16, causal=True, HKV=2, options=("backward",)),
    # Corners of the rules in fp32, where tiles of more heads or of fewer warps took kilobytes of local memory a thread.
    Point("dense", "fp32", 48, 160, 160, 8, 1024),
    Point("dense", "fp32", 16, 128, 128, 8, 1024),
    Point("ranges", "fp32", 48, 128, 128, 4096, 1024, n=16, causal=True, options=("backward",)),
    Point("ranges", "fp32", 48, 160, 160, 4096, 1024, n=16, causal=True, options=("backward",)),
    Point("ranges", "bf16", 64, 256, 256, 4096, 1024, n=64, causal=True, options=("q_positions",)),  # most in 16 bits
)
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
    for p in POINTS:
        spans = p.source in ("ranges", "blocks")
        rows, full = p.rows * p.HKV, query_tiles.FULL * architecture.processors
        itemsize = 4 if p.dtype == "fp32" else 2
        choice = query_tiles.measured(
            architecture.gpu, itemsize, p.G, p.D, p.Dv, p.L, not spans, rows if rows < full else None, full
        )
        if p.choice is None and choice is not None:
            known.add((not spans, p.D, p.Dv, choice[2:5]))
    shapes: dict[object, list[Point]] = {}
    for (one_span, D, Dv), measured in query_tiles.table(architecture.gpu).items():
        for shape, choice in measured.items():
            source, n = ("dense", 1) if one_span else ("ranges", 8)
            point = Point(source, "bf16", shape.G, D, Dv, shape.rows, shape.L, n=n)
            shapes.setdefault((one_span, D, Dv, choice[2:5]), []).append(point)
    fresh = [same for key, same in shapes.items() if key not in known]
    return [same[0] for same in sorted(fresh, key=len, reverse=True)]
