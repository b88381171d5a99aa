"""How much slower `auto` is than the best schedule, on shapes that are drawn: rules are tuned on it, never at points.

    python -m nsa.testing.regret 100 --seed 0 --out rows.jsonl

draws 100 shapes of serving and training from the seeds 0 to 99, checks that all schedules and installed peers agree on
each, and times them. `pytest -m perf --nsa-regret 100 --nsa-seed 0` does the same. A seed names its shape in both.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa.kernels.shared.device import chip
from nsa.testing.clock import serving
from nsa.testing.clock.cuda import time_gpu
from nsa.testing.clock.measure import run_facts
from nsa.testing.clock.precompile import compile_ahead, processes
from nsa.testing.clock.serving import Pool, Timer, beside, kind, ours, serve
from nsa.testing.clock.timing import Timing
from nsa.testing.contestants.contract import Contestant
from nsa.testing.matrix.case import batch
from nsa.testing.matrix.m3 import Shape
from nsa.testing.report.recording import within
from nsa.work import SCHEDULES

MODEL = 4  # successive seeds with the same heads, head dims and blocks: a model is called with many lengths
LARGEST = 1 << 30  # bytes of a tensor, at most
MOST_FLOPS = 2e12  # of a call, a few milliseconds
PACKED_BYTES = 1 << 30  # of the keys and values that packed SDPA copies; it is not timed on longer calls
NEAR = (0.05, 0.15, 0.5)  # the summary counts the shapes that are slower by more than these shares
WORST = 10  # shapes that the summary names
COMMAND = "pytest -m perf --nsa-regret 1 --nsa-seed {seed}"


# --- drawing ----------------------------------------------------------------------------------------------------------


def log_uniform(r: random.Random, low: float, high: float) -> int:
    """A whole number whose logarithm is uniform."""
    return round(math.exp(r.uniform(math.log(low), math.log(high))))


def drawn(seed: int) -> Shape:
    """The shape of a seed: a prompt, a chunk of a longer prompt, or a decode step.

    Prompts have 256 to 16,384 tokens; chunks 16 to 4,096 queries of 4,096 to 131,072 keys; decode steps 1 to 256
    sequences of 1,024 to 131,072 keys and 1 to 4 queries. Groups are 1 to 32 heads, head dims 64 to 256, blocks 16 to
    128 keys, rows 256 to 4,096 keys. Lengths are log-uniform. A shape that is too large is drawn again.
    """
    model = random.Random(f"model {seed // MODEL}")
    H = model.choice((1, 2, 4, 8, 16, 32, log_uniform(model, 1, 32), log_uniform(model, 1, 32)))
    HKV = model.choice([heads for heads in (1, 2, 4, 8, 16) if heads * H <= 128])
    D, Dv = model.choice(((64, 64), (128, 128), (128, 128), (128, 128), (256, 256), (192, 128), (96, 96)))
    size = model.choice((16, 32, 64, 64, 128))
    n = min(64, max(4, log_uniform(model, 256, 4096) // size))
    paged, fp8 = model.choice(((False, False), (False, False), (True, False), (True, False), (True, True)))
    r = random.Random(f"call {seed}")
    while True:
        kind = r.choice(("prompt", "chunk", "decode"))
        B, S, S_kv = log_uniform(r, 1, 4), log_uniform(r, 16, 4096), log_uniform(r, 4096, 131_072)
        if kind == "prompt":
            S = S_kv = log_uniform(r, 256, 16_384)
        elif kind == "decode":
            B, S, S_kv = log_uniform(r, 1, 256), r.choice((1, 1, 2, 4)), log_uniform(r, 1024, 131_072)
        shared = r.choice((0.0, 0.5, 0.9)) if S > 1 else 0.0
        if paged:  # a page holds one block
            S_kv = -(-S_kv // size) * size
            S = S_kv if kind == "prompt" else S
        case = batch(B, S, S_kv, H * HKV, HKV, D, n, size, Dv=Dv, shared=shared)
        flops = 2 * case.N * min(case.L, S_kv) * H * (D + Dv)
        if serving.largest(Shape(case, fp8, paged)) <= LARGEST and flops <= MOST_FLOPS:
            return Shape(case, fp8, paged)


# --- measuring --------------------------------------------------------------------------------------------------------


def contestants(shape: Shape) -> list[Contestant]:
    """Ours: `auto` first, then each schedule, and packed SDPA unless it copies too much."""
    case = shape.case
    schedules = [ours(shape, "auto", "auto"), *(ours(shape, name, "triton", name, name) for name in SCHEDULES)]
    if case.N * case.L * (case.D + case.Dv) * case.torch_dtype.itemsize <= PACKED_BYTES:
        schedules.append(ours(shape, "sdpa", "sdpa"))
    return schedules


def time_seed(seed: int, numbers: Pool, timer: Timer = time_gpu) -> tuple[Timing, dict[str, Any]]:
    """Time the shape of a seed. Returns the times of `auto`, and a row: the features of the shape, `us` by contestant.

    Raises:
        AssertionError: one of our schedules is wrong.
    """
    shape = drawn(seed)
    case, served = shape.case, serve(shape, seed, contestants(shape), beside(shape), numbers, timer)
    return served.times["auto"], judged({
        "seed": seed, "kind": kind(case), "case": case.id + "-pages" * shape.paged + "-fp8" * shape.fp8,
        "B": case.B, "S": case.S, "S_kv": case.S_kv, "HQ": case.HQ, "HKV": case.HKV, "G": case.H, "D": case.D,
        "Dv": case.Dv, "block_size": case.block_size, "n": case.n, "L": case.L, "shared": case.shared,
        "paged": shape.paged, "fp8": shape.fp8, "cold": served.cold, "bytes": served.problem.unique_bytes,
        "flops": served.problem.flops, "route": served.route, "reason": served.reason,
        "us": {name: round(t.median * 1e6, 3) for name, t in served.times.items()}, "left_out": served.left_out,
        "again": COMMAND.format(seed=seed),
    })  # fmt: skip


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `best` (our fastest schedule), `peer` (the fastest), and the time of `auto` over each."""
    us = row["us"]
    own = {name: us[name] for name in ("auto", *SCHEDULES, "sdpa") if name in us}
    others = {name: us[name] for name in us if name not in own}
    best, peer = min(own, key=own.__getitem__), min(others, key=others.__getitem__, default=None)
    against = None if peer is None else us["auto"] / us[peer]
    return row | {"best": best, "regret": us["auto"] / us[best], "peer": peer, "against_peer": against}


# --- reporting --------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The distribution of both ratios, and the worst shapes with the commands that repeat them."""
    lines = [*_distribution("our best schedule", [row["regret"] for row in rows])]
    lines += _distribution("the fastest peer", [row["against_peer"] for row in rows if row["peer"] is not None])
    for key, other in (("regret", "best"), ("against_peer", "peer")):
        slow = sorted((row for row in rows if (row[key] or 0) > 1 + NEAR[0]), key=lambda row: -row[key])
        for row in slow[:WORST]:
            us, name = row["us"], row[other]
            times = f"auto {us['auto']:.0f} us ({row['route']}), {name} {us[name]:.0f}"
            lines += [f"{row[key]:.2f}x  {times}: {row['case']}", f"       {row['again']}"]
    return lines


def _distribution(what: str, ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return [f"auto beside {what}: no shape"]
    return [f"auto beside {what}, {len(ratios)} shapes: {within(ratios, NEAR)}"]


def warm(seed: int, device: torch.device) -> None:
    """Compile the kernels of a seed's shape. For child processes (`clock/precompile.py`)."""
    shape = drawn(seed)
    serving.warm(shape, [*(one for one in contestants(shape) if one.name != "sdpa"), *beside(shape)], device)


def rows(seeds: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Compile the kernels of all seeds, then measure one shape after the other. Shapes that are wrong are printed."""
    compile_ahead([(warm, seed) for seed in seeds], device, processes(device))
    facts = run_facts(device) | {"capability": chip(device).capability}
    with nsa.configure(probe="never"):  # the children have compiled the kernels
        for seed in seeds:
            gc.collect()  # frees the CUDA graphs of earlier shapes and their outputs
            torch.cuda.empty_cache()
            try:
                yield facts | time_seed(seed, serving.pool(device))[1]
            except AssertionError as error:
                print(f"seed {seed}: {error}: {COMMAND.format(seed=seed)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the summary, and append a row of JSON for each shape to a file. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa.testing.regret", description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, help="shapes to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first shape; the next have the next seeds")
    parser.add_argument("--out", type=Path, help="append the rows to this file, one JSON object a line")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("regret needs an NVIDIA GPU: Triton is not timed on a CPU", file=sys.stderr)
        return 1
    found, began = [], time.perf_counter()
    for row in rows(range(given.seed, given.seed + given.count), torch.device("cuda", 0)):
        found.append(row)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(f"{time.perf_counter() - began:.0f} s", *summary(found), sep="\n")
    return 0 if len(found) == given.count else 1


if __name__ == "__main__":
    sys.exit(main())
