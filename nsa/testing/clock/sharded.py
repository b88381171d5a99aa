"""How fast and how large a step of sharded selection attention is: `python -m nsa.testing.clock.sharded`.

A step is the forward and backward pass of a prompt in bf16 with 16 blocks of 64 keys a row. The command starts a
process for each GPU. It times the step on one GPU, then sharded; *compute* is the sharded step with recorded results in
place of each collective, *communication* its collectives alone. The hidden share of communication is what the whole
takes less than both together. Memory is the peak of a step, inputs and gradients included.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import nsa
from nsa.distributed import passes, selection_attention
from nsa.distributed.shards import Layout
from nsa.testing.clock.timing import once_if_unmeasured
from nsa.testing.clock.training import event_s, host_s, peak_bytes
from nsa.testing.matrix.cases import prefill
from nsa.testing.matrix.inputs import shared_blocks

Step = Callable[[], tuple[Tensor, ...]]
MUST = {"speedup": 1.85, "hidden": 0.70, "memory": 1.15, "world_of_1": 1.02, "long": 1.34}
LEAD_CYCLES = 8_000_000  # 4 ms of an H100, in which the host queues a step, so that launches are not timed
SHORT = 16_384  # a prompt of this many tokens takes the same kernels as longer ones


class Ask(NamedTuple):
    """What to measure."""

    world: int
    tokens: int = 131_072
    long: int = 1_048_576  # 0: not measured
    HQ: int = 64
    HKV: int = 4
    D: int = 128
    shared: float = 0.0
    heads_at_once: tuple[int, ...] = (1, 2, 4)  # the first is compared with the targets
    orders: tuple[str, ...] = ("zigzag", "contiguous")
    keep: str = "last"
    samples: int = 12
    device: str = "cuda"
    backend: str = "triton"  # `auto` gives short rows to packed SDPA on a GPU that is not calibrated


class Inputs(NamedTuple):
    """One rank's tensors of a prompt."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    blocks: Tensor

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(x.numel() * x.element_size() for x in self)


def draw(ask: Ask, tokens: Tensor, seed: int) -> Inputs:
    """Tensors of the queries and keys at these positions, for a prompt whose other tokens are drawn elsewhere."""
    device = tokens.device
    g = torch.Generator(device).manual_seed(seed)
    S = tokens.numel()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, do = (
        torch.randn(1, S, heads, ask.D, generator=g, device=device, dtype=dtype)
        for heads in (ask.HQ, ask.HKV, ask.HKV, ask.HQ)
    )
    case = prefill(S, ask.HQ, ask.HKV, ask.shared)
    visible = (tokens + 1).repeat_interleave(ask.HKV)
    return Inputs(q, k, v, do, shared_blocks(case, visible, visible, g).view(1, S, ask.HKV, -1))


def step(x: Inputs, attend: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
    """``(o, dq, dk, dv)``."""
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    o = attend(*leaves, block_indices=x.blocks, block_size=64, **options)
    return o.detach(), *torch.autograd.grad(o, leaves, x.do)


class Recorded:
    """Stands in for `passes.collectives`: records what the collectives of a step take and give, then replays it."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, tuple[Any, ...]]] = []
        self.given: list[Tensor] = []
        self.at: int | None = None  # of the replay

    def all_gather_into_tensor(self, *arguments: Any) -> Tensor:
        """As the functional collective."""
        return self._call("all_gather_into_tensor", arguments)

    def all_to_all_single(self, *arguments: Any) -> Tensor:
        """As the functional collective."""
        return self._call("all_to_all_single", arguments)

    def wait_tensor(self, x: Tensor) -> Tensor:
        """As the functional collective."""
        return x

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Tensor:
        if self.at is None:
            result: Tensor = getattr(_real, name)(*arguments)
            self.taken.append((name, (arguments[0].clone(), *arguments[1:])))
            self.given.append(_real.wait_tensor(result))
            return self.given[-1]
        self.at += 1
        return self.given[(self.at - 1) % len(self.given)]

    def communicate(self) -> tuple[Tensor, ...]:
        """The recorded collectives, one after the other."""
        going = [getattr(_real, name)(*arguments) for name, arguments in self.taken]
        return tuple(_real.wait_tensor(x) for x in going)


_real = passes.collectives


@contextmanager
def collectives(stand_in: Any) -> Iterator[None]:
    """In a `with` block the passes use these collectives."""
    passes.collectives = stand_in
    try:
        yield
    finally:
        passes.collectives = _real


class Clock:
    """Times and memory of steps that all ranks make."""

    def __init__(self, device: torch.device, samples: int) -> None:
        self.device, self.samples = device, samples

    def one(self, call: Step) -> float:
        """Milliseconds of one call on this rank, which begins when all ranks are ready."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return 1e3 * (host_s(call) if self.device.type == "cpu" else event_s(call, LEAD_CYCLES))

    def times(self, *calls: Step, samples: int | None = None, slowest: bool = True) -> list[list[float]]:
        """Samples of each call, in turn, after one that is not counted; of the slowest rank, or of this one."""
        taken = [[self.one(call) for call in calls] for _ in range(1 + (samples or self.samples))][1:]
        samples_of = torch.tensor(taken, device=self.device)
        if slowest:
            dist.all_reduce(samples_of, dist.ReduceOp.MAX)
        return [list(map(float, column)) for column in samples_of.T]

    def peak(self, call: Step, inputs: int) -> int:
        """Peak bytes of a call and its inputs, of the rank that needs the most."""
        if self.device.type == "cpu":
            return 0
        taken = torch.tensor(peak_bytes(call) + inputs, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return int(taken)


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], at: Tensor) -> dict[str, Any]:
    """Whether O is equal bit by bit, and the largest difference of each gradient over the largest gradient."""
    result: dict[str, Any] = {"o": torch.equal(got[0], want[0][:, at])}
    for name, x, y in zip(("dq", "dk", "dv"), got[1:], want[1:], strict=True):
        result[name] = float((x.float() - y[:, at].float()).abs().max() / y.float().abs().max())
    return result


def _rank(rank: int, ask: Ask, port: int, path: str) -> None:
    """What one process measures. Rank 0 writes the figures to ``path`` as JSON."""
    gpu = ask.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=where, rank=rank, world_size=ask.world)
    alone = [dist.new_group([other]) for other in range(ask.world)][rank]
    eager = _priority_group(gpu)
    began = time.perf_counter()

    def say(text: str) -> None:
        if rank == 0:
            print(f"{time.perf_counter() - began:5.1f} s  {text}", file=sys.stderr, flush=True)

    clock = Clock(device, ask.samples)
    some = draw(ask, torch.arange(min(SHORT, ask.tokens), device=device), 0)
    positions = torch.arange(some.q.shape[1], device=device, dtype=torch.int32)[None] if rank else None
    step(some, nsa.selection_attention, q_positions=positions, backend=ask.backend)  # ranks compile different kernels
    dist.barrier()
    step(some, nsa.selection_attention, backend=ask.backend)
    del some
    say("compiled")

    result = _prompt(ask, clock, alone, eager, say)
    if ask.long:
        options = _options(ask, dist.group.WORLD, ask.orders[0], ask.heads_at_once[0])
        mine = draw(ask, _positions(ask, ask.long, ask.orders[0], device), 2 + rank)
        (result["long"],) = clock.times(partial(step, mine, selection_attention, **options), samples=3)
        say(f"{ask.long} tokens: {statistics.median(result['long']):.1f} ms")
    if rank == 0:
        Path(path).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _positions(ask: Ask, tokens: int, order: str, device: torch.device) -> Tensor:
    """The positions of this rank's tokens."""
    return Layout(order, (tokens // ask.world,) * ask.world).positions(dist.get_rank(), device).long()


def _prompt(ask: Ask, clock: Clock, alone: Any, eager: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures of a prompt on one GPU, and sharded in each way."""
    whole = draw(ask, torch.arange(ask.tokens, device=clock.device), 1)
    plain = partial(step, whole, nsa.selection_attention, backend=ask.backend)
    in_group = partial(step, whole, selection_attention, mesh=alone, backend=ask.backend)
    one, one_of_1 = clock.times(plain, in_group, slowest=False)
    result: dict[str, Any] = {"one_gpu": one, "one_gpu_bytes": clock.peak(plain, whole.bytes), "world_of_1": one_of_1}
    want = plain()
    say(f"one GPU: {statistics.median(one):.1f} ms")
    runs = [(order, heads, dist.group.WORLD) for order in ask.orders[:1] for heads in ask.heads_at_once]
    runs += [(order, ask.heads_at_once[0], dist.group.WORLD) for order in ask.orders[1:]]
    runs += [(ask.orders[0], ask.heads_at_once[0], eager)] if eager is not None else []
    result["sharded"] = []
    for order, heads, mesh in runs:
        at = _positions(ask, ask.tokens, order, clock.device)
        mine = Inputs(*(x[:, at].contiguous() for x in whole))
        figures = _sharded(ask, clock, mine, mesh, order, heads, partial(check, want=want, at=at))
        result["sharded"].append(figures | {"priority": mesh is eager})
        say(f"{order}, {heads} heads: {statistics.median(figures['whole']):.1f} ms")
    return result


def _priority_group(gpu: bool) -> Any:
    """A group whose collectives run on a stream of high priority, where there is such a thing."""
    if not gpu:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return dist.new_group(pg_options=options)


def _options(ask: Ask, mesh: Any, order: str, heads: int) -> dict[str, Any]:
    return {"mesh": mesh, "order": order, "heads_at_once": heads, "keep": ask.keep, "backend": ask.backend}


def _sharded(
    ask: Ask, clock: Clock, mine: Inputs, mesh: Any, order: str, heads: int, judge: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Figures of one way to shard."""
    whole: Step = partial(step, mine, selection_attention, **_options(ask, mesh, order, heads))
    right = judge(whole())
    peak = clock.peak(whole, mine.bytes)
    record = Recorded()
    with collectives(record):
        whole()
    record.at = 0

    def compute() -> tuple[Tensor, ...]:
        with collectives(record):
            return whole()

    times = clock.times(whole, compute, record.communicate)
    figures = dict(zip(("whole", "compute", "communication"), times, strict=True))
    return {"order": order, "heads_at_once": heads, "check": right, "bytes": peak, **figures}


def measure(ask: Ask) -> dict[str, Any]:
    """Start a process for each rank. Returns samples in milliseconds, bytes, and what :func:`check` found."""
    least = ask._replace(tokens=SHORT, long=0, samples=1, heads_at_once=ask.heads_at_once[:1], orders=ask.orders[:1])
    once_if_unmeasured([partial(_started, least)])
    return _started(ask)


def _started(ask: Ask) -> dict[str, Any]:
    with TemporaryDirectory() as folder, socket.socket() as free:
        path = os.path.join(folder, "figures.json")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_rank, (ask, port, path), ask.world)  # type: ignore[attr-defined,no-untyped-call]
        figures: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return figures


def ratios(ask: Ask, result: dict[str, Any], figures: dict[str, Any]) -> dict[str, float]:
    """The figures that `MUST` names, of one way to shard, and the goal's efficiency."""
    whole, compute, communication = (statistics.median(figures[x]) for x in ("whole", "compute", "communication"))
    one = statistics.median(result["one_gpu"])
    ratio = {
        "speedup": one / whole,
        "hidden": min(max((compute + communication - whole) / communication, 0.0), 1.0),  # 0 or 1 also within the noise
        "memory": figures["bytes"] * ask.world / result["one_gpu_bytes"] if result["one_gpu_bytes"] else 0.0,
        "world_of_1": statistics.median(result["world_of_1"]) / one,
    }
    if "long" in result:
        ratio["long"] = statistics.median(result["long"]) / ask.long / (whole / ask.tokens)
    return ratio


def table(ask: Ask, result: dict[str, Any]) -> str:
    """The figures as text, milliseconds and GiB."""
    alone = "one GPU" if ask.device == "cuda" else "one process"
    lines = [
        f"{ask.world} ranks, {ask.tokens} tokens, {ask.HQ}/{ask.HKV} heads, D {ask.D}, 16 blocks of 64, "
        f"shared {ask.shared:g}, keep {ask.keep}",
        f"{alone} {statistics.median(result['one_gpu']):.2f} ms (least {min(result['one_gpu']):.2f}), "
        f"{result['one_gpu_bytes'] / 2**30:.2f} GiB; world of 1 {statistics.median(result['world_of_1']):.2f} ms",
        f"{'order':>10} {'heads':>5} {'prio':>4} {'whole':>7} {'compute':>7} {'comm':>6} {'GiB':>6} "
        f"{'speedup':>7} {'hidden':>6} {'memory':>6}  O equal; dq, dk, dv off by",
    ]
    for x in result["sharded"]:
        whole, compute, communication = (statistics.median(x[y]) for y in ("whole", "compute", "communication"))
        r = ratios(ask, result, x)
        off = ", ".join(f"{x['check'][name]:.1e}" for name in ("dq", "dk", "dv"))
        lines.append(
            f"{x['order']:>10} {x['heads_at_once']:>5} {'high' if x['priority'] else '-':>4} {whole:7.2f} "
            f"{compute:7.2f} {communication:6.2f} {x['bytes'] / 2**30:6.2f} {r['speedup']:6.2f}x {r['hidden']:6.0%} "
            f"{r['memory']:5.2f}x  {x['check']['o']}; {off}"
        )
    must = {name: f" (must {least:g})" if ask.device == "cuda" else "" for name, least in MUST.items()}
    r = ratios(ask, result, result["sharded"][0])
    lines.append("; ".join(f"{name} {value:.3f}{must[name]}" for name, value in r.items()))
    if "long" in result:
        lines.append(f"{ask.long} tokens {statistics.median(result['long']):.1f} ms")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa.testing.clock.sharded", description=__doc__)
    usual, gpus = Ask(1), torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--world", type=int, help="default: all GPUs; on a CPU 2 processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ("tokens", "long", "HQ", "HKV", "D", "samples"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--shared", type=float, default=0.0)
    parser.add_argument("--heads-at-once", type=int, nargs="+", default=usual.heads_at_once)
    parser.add_argument("--orders", nargs="+", default=usual.orders)
    parser.add_argument("--keep", choices=passes.KEEPS, default=usual.keep)
    parser.add_argument("--backend")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    cpu = given["device"] == "cpu"
    if not cpu and gpus < (given["world"] or 2):
        text = f"sharded needs {given['world'] or 2} NVIDIA GPUs, got {gpus}; --device cpu is for a few tokens"
        print(f"{text}: --device cpu --tokens 1024 --long 1024", file=sys.stderr)
        return 1
    given["world"] = given["world"] or (2 if cpu else gpus)
    given["backend"] = given["backend"] or ("auto" if cpu else usual.backend)
    ask = Ask(**given | {name: tuple(given[name]) for name in ("heads_at_once", "orders")})
    print(table(ask, measure(ask)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
