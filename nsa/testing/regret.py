"""How much slower `auto` is than the best schedule, on shapes that are drawn: rules are tuned on it, never at points.

    python -m nsa.testing.regret 100 --seed 0 --out rows.jsonl

draws 100 shapes of serving and training from the seeds 0 to 99, checks that all schedules and installed peers agree on
each, and times them. `pytest -m perf --nsa-regret 100 --nsa-seed 0` does the same. A seed names its shape in both.

The inputs are views of one pool of random numbers, so that a shape takes no time to fill and every buffer set of a
rotation lies elsewhere. Of a shape only its block indices are drawn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.testing.clock.cuda import COLD, time_gpu
from nsa.testing.clock.measure import HOST_S, run_facts, why_not
from nsa.testing.clock.precompile import compile_ahead, processes
from nsa.testing.clock.timing import Timing
from nsa.testing.contestants import peers
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.m3 import one_call
from nsa.testing.contestants.ours import BLOCKS, front_door
from nsa.testing.matrix.caches import E4M3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.inputs import blocks_of
from nsa.testing.matrix.m3 import Combined, Shape, combined
from nsa.testing.matrix.problem import Problem, spans_of_blocks

SCHEDULES = ("query_major", "key_major", "union")
MODEL = 4  # successive seeds with the same heads, head dims and blocks: a model is called with many lengths
LARGEST = 1 << 30  # bytes of a tensor, at most
MOST_FLOPS = 2e12  # of a call, a few milliseconds
PACKED_BYTES = 1 << 30  # of the keys and values that packed SDPA copies; it is not timed on longer calls
MOST_SETS = 48  # of a rotation; enough for a call that reads 1 MiB
SCALE = 1 / 32  # of fp8 caches, whose entries are 32 times normal numbers
BUDGET_S, ITERS, SAMPLE_S = 0.015, 12, 5e-4  # of each contestant; a shape takes a quarter of a second
NEAR = (0.05, 0.15, 0.5)  # the summary counts the shapes that are slower by more than these shares
WORST = 10  # shapes that the summary names
COMMAND = "pytest -m perf --nsa-regret 1 --nsa-seed {seed}"
Timer = Callable[..., dict[str, Timing]]


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
        case = Case(
            H, D, Dv, n * size, B * S * HKV, "decode" if S == 1 else "prefill", "bf16", HKV=HKV, S=S, S_kv=S_kv,
            block_size=size, n=n, shared=shared,
        )  # fmt: skip
        tensors = max(B * S_kv * HKV * (D + Dv if paged else D), B * S * case.HQ * D) * case.torch_dtype.itemsize
        flops = 2 * case.N * min(case.L, S_kv) * H * (D + Dv)
        if tensors <= LARGEST and flops <= MOST_FLOPS:
            return Shape(case, fp8, paged)


# --- inputs -----------------------------------------------------------------------------------------------------------


class Pool:
    """Random numbers, of which tensors are views. Numbers in e4m3 are `1 / SCALE` times normal ones."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.at = 0  # the next number
        self.numbers: dict[torch.dtype, Tensor] = {}

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next numbers, from the beginning again when too few are left."""
        source, count = self.numbers.get(dtype), math.prod(shape)
        if source is None:
            source = self.numbers[dtype] = self._fill(dtype)
        begin = self.at if self.at + count <= len(source) else 0
        self.at = begin + -(-count // 1024) * 1024  # aligned, as tensors of their own are
        return source[begin : begin + count].view(shape)

    def _fill(self, dtype: torch.dtype) -> Tensor:
        """Equal numbers are 2**28 numbers apart, because drawing is slower than copying."""
        count = self.nbytes // dtype.itemsize
        some = torch.randn(min(count, 1 << 28), device=self.device, dtype=torch.bfloat16 if dtype == E4M3 else dtype)
        if dtype == E4M3:  # torch does not move fp8 everywhere, but it moves bytes
            some = (some / SCALE).to(E4M3).view(torch.uint8)
        return some.repeat(-(-count // len(some)))[:count].view(dtype)


@cache
def pool(device: torch.device, nbytes: int) -> Pool:
    """The pool of a process."""
    return Pool(device, nbytes)


def problems(shape: Shape, seed: int, numbers: Pool, sets: int) -> list[Problem]:
    """Buffer sets of a shape: other tensors each, but the same selection."""
    case, device = shape.case, numbers.device
    g = torch.Generator(device).manual_seed(seed)
    blocks = blocks_of(case, g)
    spans = spans_of_blocks(blocks, case.block_size)
    count = case.B * case.S_kv // case.block_size
    table = torch.randperm(count, generator=g, device=device).to(torch.int32).view(case.B, -1) if shape.paged else None
    scale = torch.full((case.HKV,), SCALE, device=device) if shape.fp8 else None
    lengths = torch.full((case.B,), case.S_kv, dtype=torch.int32, device=device)
    found = []
    for _ in range(sets):
        q = numbers.take(case.torch_dtype, case.B, case.S, case.HQ, case.D)
        if table is None:
            k, v = (numbers.take(case.torch_dtype, case.B, case.S_kv, case.HKV, d) for d in (case.D, case.Dv))
        else:
            dtype, both = E4M3 if shape.fp8 else case.torch_dtype, case.D + case.Dv
            pages = numbers.take(dtype, count, case.HKV, case.block_size, both)
            k, v = (x.transpose(1, 2) for x in (pages[..., : case.D], pages[..., case.D :]))
        p = Problem(case, seed, q, k, v, spans, blocks, case.block_size)
        if table is not None:
            p = dataclasses.replace(p, scales=None if scale is None else (scale, scale))
            p.__dict__["_derived"] = {combined: Combined(k, v, lengths, table, scale, scale, pages)}
        found.append(p)
    return found


# --- contestants ------------------------------------------------------------------------------------------------------


def contestants(shape: Shape) -> list[Contestant]:
    """`auto` first, then our schedules, packed SDPA and the peers that can be imported here."""
    case = shape.case

    def ours(name: str, backend: str, schedule: str, launches: str | None = None) -> Contestant:
        how = {"backend": backend, "schedule": schedule}
        call = one_call(combined, **how) if shape.paged else front_door(backend, schedule, blocks=True)
        return Contestant(name, call, launches, BLOCKS, lse=False)

    found = [ours("auto", "auto", "auto"), *(ours(name, "triton", name, name) for name in SCHEDULES)]
    if case.N * case.L * (case.D + case.Dv) * case.torch_dtype.itemsize <= PACKED_BYTES:
        found.append(ours("sdpa", "sdpa", "auto"))
    beside = peers.vllm() if shape.paged else peers.peers() | peers.xunhao()
    return found + [one for one in beside.values() if one.supports(case) is None]


def _run(one: Contestant, p: Problem) -> Tensor:
    """The output. Raises NotImplementedError if another schedule served the call than the contestant's."""
    try:
        result, launched = one.run_counted(p)
    except ValueError as error:  # `DoesNotFit`
        raise NotImplementedError(str(error)) from error
    if one.route is not None and not launched[one.route]:
        raise NotImplementedError(f"launched {dict(launched)}")
    return result[0] if isinstance(result, tuple) else result


def _check(one: Contestant, p: Problem, want: list[Tensor]) -> None:
    """Compare with the output of the first contestant. Raises AssertionError."""
    out = _run(one, p).float()
    if not want:
        want.append(out)
    bound = 16 * torch.finfo(p.q.dtype).eps * want[0].abs().amax(-1, keepdim=True)
    error = (out - want[0]).abs()
    assert bool((error <= bound).all()), f"differs from auto by {float(error.nan_to_num(math.inf).max()):.3g}"


def agree(found: Iterable[Contestant], p: Problem) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that serve the problem and agree with `auto`, and why the others are left out.

    Raises:
        AssertionError: one of our schedules is wrong.
    """
    served: list[Contestant] = []
    left_out: dict[str, str] = {}
    want: list[Tensor] = []
    for one in found:
        reason = why_not(one.supports(p.case), partial(_check, one, p, want))
        if reason is None:
            served.append(one)
        elif reason.startswith("unsupported") or one.name not in ("auto", *SCHEDULES, "sdpa"):
            left_out[one.name] = reason
        else:
            raise AssertionError(f"{one.name}: {reason}")
    return served, left_out


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(
    seed: int, device: torch.device, timer: Timer = time_gpu, nbytes: int = 8 * LARGEST
) -> tuple[Timing, dict[str, Any]]:
    """Time the shape of a seed. Returns the times of `auto`, and a row: the features of the shape, `us` by contestant.

    Args:
        timer: as `time_gpu`.
        nbytes: size of the pool.

    Raises:
        AssertionError: one of our schedules is wrong.
    """
    shape = drawn(seed)
    case, numbers = shape.case, pool(device, nbytes)
    size = case.torch_dtype.itemsize
    keys = min(case.B * case.S_kv * case.HKV, case.N * case.L) * (case.D + case.Dv) * (1 if shape.fp8 else size)
    unique = keys + case.N * case.H * (case.D + case.Dv) * size
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = problems(shape, seed, numbers, min(MOST_SETS, max(2, math.ceil(COLD * cache / unique))))
    found = contestants(shape)
    before = _routes()
    _run(found[0], sets[0])
    ((route, reason),) = _routes() - before
    served, left_out = agree(found, sets[0])
    cold = len(sets) * unique >= COLD * cache * 0.99
    fns = {one.name: [partial(one.run, s) for s in sets] for one in served}
    times = timer(fns, iters=ITERS, budget_s=BUDGET_S, replay_s=SAMPLE_S, cold=cold)
    for name in [name for name, t in times.items() if t.how == "eager" and t.median < HOST_S]:
        left_out[name] = f"not captured: {times.pop(name).refused}"
    us = {name: round(t.median * 1e6, 3) for name, t in times.items()}
    return times["auto"], judged({
        "seed": seed, "kind": kind(case), "case": case.id + "-pages" * shape.paged + "-fp8" * shape.fp8,
        "B": case.B, "S": case.S, "S_kv": case.S_kv, "HQ": case.HQ, "HKV": case.HKV, "G": case.H, "D": case.D,
        "Dv": case.Dv, "block_size": case.block_size, "n": case.n, "L": case.L, "shared": case.shared,
        "paged": shape.paged, "fp8": shape.fp8, "cold": cold, "sets": len(sets), "unique_bytes": unique,
        "route": route, "reason": reason, "us": us, "left_out": left_out, "again": COMMAND.format(seed=seed),
    })  # fmt: skip


def _routes() -> Counter[tuple[str, str]]:
    return Counter({(x.route, x.reason): x.calls for x in nsa.routes()})


def kind(case: Case) -> str:
    """The kind of a drawn case."""
    return "prompt" if case.S == case.S_kv else "decode" if case.S <= 4 else "chunk"


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
    for key, beside in (("regret", "best"), ("against_peer", "peer")):
        found = sorted((row for row in rows if (row[key] or 0) > 1 + NEAR[0]), key=lambda row: -row[key])
        for row in found[:WORST]:
            us, name = row["us"], row[beside]
            times = f"auto {us['auto']:.0f} us ({row['route']}), {name} {us[name]:.0f}"
            lines += [f"{row[key]:.2f}x  {times}: {row['case']}", f"       {row['again']}"]
    return lines


def _distribution(what: str, ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return [f"auto beside {what}: no shape"]
    shares = ", ".join(f"{sum(x <= 1 + near for x in ratios) / len(ratios):.0%} within {near:.0%}" for near in NEAR)
    return [f"auto beside {what}, {len(ratios)} shapes: {shares}, worst {max(ratios):.2f}x"]


def warm(seed: int, device: torch.device) -> None:
    """Compile all kernels of a seed's shape by calling them once. For child processes (`clock/precompile.py`)."""
    shape = drawn(seed)
    numbers = pool(device, LARGEST + LARGEST // 4)
    (p,) = problems(shape, seed, numbers, 1)
    with nsa.configure(probe="never"):
        for one in contestants(shape):
            if one.name != "sdpa":
                why_not(one.supports(shape.case), partial(_run, one, p))


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
    device, rows, wrong = torch.device("cuda", 0), [], 0
    seeds, began = range(given.seed, given.seed + given.count), time.perf_counter()
    compile_ahead([(warm, seed) for seed in seeds], device, processes(device))
    compiled, facts = time.perf_counter(), run_facts(device)
    with nsa.configure(probe="never"):  # the children have compiled the kernels
        for seed in seeds:
            try:
                rows.append(measured(seed, device)[1])
            except AssertionError as error:
                wrong += 1
                print(f"seed {seed}: {error}: {COMMAND.format(seed=seed)}", flush=True)
                continue
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts | rows[-1]) + "\n")
    each = (time.perf_counter() - compiled) / max(1, given.count)
    print(f"compiled in {compiled - began:.0f} s, then {each:.2f} s a shape", *summary(rows), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
