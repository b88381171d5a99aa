"""The number of queries above which key-major is faster than query-major, by group size. `schedule="auto"` uses it.

Both schedules are forced on prefills of the usual shape, compared with each other, and then timed. A rule makes the
section `crossover` of a GPU's file from the times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nsa
import nsa.kernels
from nsa import gpu
from nsa.kernels.key_major import tiles as key_tiles
from nsa.testing.clock.cuda import COLD, MOST_SETS, time_gpu
from nsa.testing.clock.timing import InvalidMeasurement, Timing
from nsa.testing.matrix.case import Case
from nsa.testing.report.recording import Fact
from nsa.tuning.files import provenance, write_section

HEADS = {1: (16, 16), 2: (32, 16), 4: (32, 8), 8: (32, 4), 16: (64, 4), 64: (128, 2)}  # (HQ, HKV) by G
TOKENS = tuple(2**i for i in range(6, 15))
CONTEXTS = {4096: TOKENS[:4], 65536: TOKENS[:6]}
"""The measured chunk sizes in queries, by the number of keys, the chunk's own keys included."""

D, BLOCK, SLOTS = 128, 64, 16
MARGIN = 1.02
"""The least ratio of times at which key-major counts as faster. A smaller ratio may be due to the GPU's clock rate."""

LSE_ATOL = 2e-4  # one key more or less among a few hundred changes the LSE by more than this
SCHEDULES = ("key_major", "query_major")
COMMAND = "pytest -m perf tests/perf/test_crossover.py --nsa-update-schedules"
SHAPE = (
    f"B = 1, S = S_kv from {TOKENS[0]} to {TOKENS[-1]}, chunks of {TOKENS[0]} to {CONTEXTS[65536][-1]} at S_kv = "
    f"{' and '.join(map(str, CONTEXTS))}, their blocks in any order; D = Dv = {D}, bf16, causal, block {BLOCK}, "
    f"top-{SLOTS} with the first and the own block; "
    f"HQ over HKV {', '.join(f'{HQ}/{HKV}' for HQ, HKV in HEADS.values())}"
)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, block_indices
Key = tuple[int, int | None, int]  # G, context, tokens


@dataclass(frozen=True)
class Point:
    """Seconds per call of both kernels, for one group size and number of queries."""

    G: int
    tokens: int
    query_major: float
    key_major: float
    context: int | None = None  # keys that a chunk attends to; None: the queries are a whole prompt

    @property
    def key(self) -> Key:
        """Identifies a point."""
        return self.G, self.context, self.tokens

    @property
    def reuse(self) -> float:
        """How many rows read a block, on average."""
        return self.tokens * SLOTS * BLOCK / (self.context or self.tokens)

    @property
    def speedup(self) -> float:
        """How many times as fast key-major is."""
        return self.query_major / self.key_major


# --- measuring --------------------------------------------------------------------------------------------------------


def case(G: int, tokens: int, dtype: str = "bf16", context: int | None = None) -> Case:
    """The prefill of one point: the last `tokens` queries of a sequence of `context` keys."""
    HQ, HKV = HEADS[G]
    assert HQ == G * HKV
    n = tokens * HKV
    return Case(
        G, D, D, BLOCK * SLOTS, n, "prefill", dtype, HKV=HKV, S=tokens, S_kv=context or tokens, block_size=BLOCK
    )


def attend(schedule: str, inputs: Inputs, return_lse: bool = False) -> Any:
    """Call the front door with a forced schedule."""
    q, k, v, blocks = inputs
    how = {"backend": "triton", "schedule": schedule}
    return nsa.selection_attention(q, k, v, block_indices=blocks, block_size=BLOCK, return_lse=return_lse, **how)  # type: ignore[call-overload]


def check(inputs: Inputs) -> None:
    """Check that both kernels are launched and that their results agree. Raises AssertionError."""
    results = {}
    for schedule in SCHEDULES:
        before = nsa.kernels.launches.copy()
        results[schedule] = attend(schedule, inputs, return_lse=True)
        launched = nsa.kernels.launches - before
        assert launched[schedule] == 1, f"schedule {schedule}: expected a launch of {schedule}, got {dict(launched)}"
    (o, lse), (o_want, lse_want) = results["key_major"], results["query_major"]
    # Partial results are rounded to the input dtype, so the bound is a few roundings of the largest number of a head.
    bound = 4 * torch.finfo(o.dtype).eps * o_want.abs().amax(-1, keepdim=True).float()
    error = (o.float() - o_want.float()).abs()
    assert bool((error <= bound).all()), f"key-major and query-major differ by {float(error.max()):.3g}"
    off = float((lse - lse_want).abs().max())
    assert off <= LSE_ATOL, f"LSE of key-major and query-major differ by {off:.3g}"


def rotation(inputs: Inputs, cache: int) -> tuple[list[Inputs], bool]:
    """Copies to rotate through, and whether every call finds its inputs outside L2. cache: bytes of L2.

    `buffer_sets` is not used, because it packs rows, which takes many times the memory of the keys of a prefill.
    """
    size = sum(x.numel() * x.element_size() for x in inputs)
    copies = min(max(2, math.ceil(COLD * cache / size)), MOST_SETS)
    q, k, v, blocks = inputs
    others: list[Inputs] = [(q.clone(), k.clone(), v.clone(), blocks.clone()) for _ in range(copies - 1)]
    return [inputs, *others], copies * size >= COLD * cache * 0.99


def compare(
    G: int, tokens: int, device: torch.device, seed: int, context: int | None = None, **sampling: Any
) -> dict[str, Timing]:
    """Check both schedules, then time them in turn. sampling: keywords of `time_gpu`.

    Raises:
        AssertionError: the results differ, or a call was not captured, so that its time would include the host's.
    """
    p = case(G, tokens, context=context).make(device, seed)
    assert p.block_indices is not None
    blocks = p.block_indices
    if context is not None:  # shuffled, as after a top-k; with sorted blocks, more reads would hit L2
        order = torch.rand(blocks.shape, generator=torch.Generator(device).manual_seed(seed), device=device).argsort(-1)
        blocks = blocks.gather(-1, order)
    inputs = p.q, p.k, p.v, blocks
    del p  # frees its spans
    check(inputs)
    sets, cold = rotation(inputs, torch.cuda.get_device_properties(device).L2_cache_size)
    times = time_gpu({name: [partial(attend, name, s) for s in sets] for name in SCHEDULES}, cold=cold, **sampling)
    for name, timing in times.items():
        if timing.how != "graph":
            raise InvalidMeasurement(f"invalid measurement: {name} was not captured: {timing.refused}")
        timing.resolved(name)
    return times


# --- deciding ---------------------------------------------------------------------------------------------------------


def points(facts: Iterable[Fact]) -> list[Point]:
    """The points that a run measured, in order. If a point was measured twice, the last time counts."""
    made = (Point(**fact["crossover"]) for fact in facts if fact.get("crossover"))
    by_key = {(p.G, p.context or 0, p.tokens): p for p in made}
    return [by_key[key] for key in sorted(by_key)]


def decide(measured: Iterable[Point], margin: float = MARGIN, chunks: bool = False) -> dict[int, int | None]:
    """The smallest number of queries, by group size, at and above which key-major is faster at all measured points.

    chunks: for chunks of a longer prompt, not for whole prompts. Only chunks count whose blocks are read so often that
    routing considers key-major.
    """
    groups: dict[int, list[Point]] = {}
    for p in measured:
        if (p.context is not None) != chunks or (chunks and p.reuse < key_tiles.MIN_REUSE):
            continue
        groups.setdefault(p.G, []).append(p)
    return {G: _from(of_group, margin) for G, of_group in sorted(groups.items())}


def _from(of_group: list[Point], margin: float) -> int | None:
    slow = max((p.tokens for p in of_group if p.speedup < margin), default=0)
    return min((p.tokens for p in of_group if p.tokens > slow), default=None)


def table(measured: Iterable[Point]) -> list[str]:
    """A table for the terminal of how many times as fast key-major is, by group size and number of queries."""
    known = {(p.G, p.context, p.tokens): p for p in measured}
    if not known:
        return []
    starts = {chunks: decide(known.values(), chunks=chunks) for chunks in (False, True)}
    lines = [f"key-major over query-major, queries:{'':3}{''.join(f'{t:>6}' for t in TOKENS)}  from"]
    for context, G in sorted({(context or 0, G) for G, context, _ in known}):
        row = [known.get((G, context or None, t)) for t in TOKENS]
        cells = "".join(f"{'-':>6}" if p is None else f"{p.speedup:>6.2f}" for p in row)
        start = starts[context > 0].get(G)
        lines.append(f"{f'  G = {G}' + (f' of {context} keys' if context else ''):39}{cells}  {start or 'never'}")
    return lines


def needed(by_key: Mapping[Key, Point]) -> Iterator[Key]:
    """The points to measure, from most queries down, until key-major is no longer faster.

    by_key: the points measured so far. The caller adds each point before it asks for the next one.
    """
    for G in HEADS:
        for contexts in ((None,), tuple(CONTEXTS)):
            points = [Point(G, t, 1.0, 1.0, c) for c in contexts for t in (TOKENS if c is None else CONTEXTS[c])]
            for p in sorted(points, key=lambda p: -p.tokens):
                if p.context is not None and p.reuse < key_tiles.MIN_REUSE:
                    continue
                yield p.key
                if p.key in by_key and by_key[p.key].speedup < MARGIN:
                    break


def write(measured: Iterable[Point], facts: Fact, folder: Path, command: str = COMMAND) -> Path:
    """Write the section `crossover` of the GPU of `facts`, and reload the settings.

    Raises:
        ValueError: a point of `needed` was not measured; or as `files.write_section`.
        OSError: the folder cannot be written.
    """
    by_key = {p.key: p for p in measured}
    missing = [
        f"G{G}-T{t}{f'-K{context}' if context else ''}"
        for G, context, t in needed(by_key)
        if (G, context, t) not in by_key
    ]
    if missing:
        names = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise ValueError(f"schedules not written: {len(missing)} points were not measured ({names})")
    tables = zip(gpu.CROSSOVERS, (False, True), strict=True)
    content: dict[str, Any] = {name: decide(by_key.values(), chunks=chunks) for name, chunks in tables}
    content["provenance"] = provenance(facts, command=command, shape=SHAPE)
    comments = [
        f"Measured, not written by hand: `{command}`.",
        f"Queries from which on key-major is {MARGIN:g}x as fast as query-major, by G; null: never.",
        "Measured, by queries, us: query-major key-major",
    ]
    for context, tokens in ((None, TOKENS), *CONTEXTS.items()):
        for G in HEADS:
            points = (by_key[key] for key in ((G, context, t) for t in tokens) if key in by_key)
            times = [f"{p.tokens} {p.query_major * 1e6:.1f} {p.key_major * 1e6:.1f}" for p in points]
            of = f", of {context} keys" if context else ""
            comments += [f"  G = {G}{of}: {', '.join(times)}"] if times else []
    return write_section(folder, str(facts["gpu"]), "crossover", content, comments)


def update(facts: list[Fact], folder: Path | None = None) -> str:
    """Write what a run measured to the packaged file. Returns the line to print. Raises as `write` does."""
    measured = points(facts)
    run = next((fact for fact in facts if fact.get("crossover")), {})
    path = write(measured, run, gpu.PACKAGED if folder is None else folder)
    return f"schedules: {starts(measured)}, written to {path}"


def starts(measured: Collection[Point]) -> str:
    """The numbers of queries above which key-major is faster, in words."""
    whole, chunks = (
        ", ".join(f"G = {G} {start or 'never'}" for G, start in decide(measured, chunks=chunks).items())
        for chunks in (False, True)
    )
    return f"key-major from {whole} queries on, of chunks {chunks}"
