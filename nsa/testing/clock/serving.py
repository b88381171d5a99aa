"""Shapes of serving and training, checked and timed in a fraction of a second: for workloads and for regret.

The inputs are views of one pool of random numbers, so that a shape takes no time to fill and every buffer set of a
rotation lies elsewhere. Of a shape only its block indices are drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

import nsa
from nsa.failures import caught
from nsa.testing.clock.cuda import COLD, time_gpu
from nsa.testing.clock.honest import Kept
from nsa.testing.clock.measure import HOST_S, why_not
from nsa.testing.clock.timing import Fn, InvalidMeasurement, Timing
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.m3 import one_call
from nsa.testing.contestants.ours import BLOCKS, front_door
from nsa.testing.contestants.peers import peers, vllm, xunhao
from nsa.testing.matrix.caches import E4M3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.inputs import blocks_of
from nsa.testing.matrix.m3 import Combined, Shape, block_table, combined
from nsa.testing.matrix.problem import Problem, spans_of_blocks

MOST_SETS = 48  # of a rotation; enough for a call that reads 1 MiB
SCALE = 1 / 32  # of fp8 caches, whose entries are 32 times normal numbers
BUDGET_S, ITERS, SAMPLE_S = 0.015, 12, 5e-4  # of each contestant; a shape takes a quarter of a second
EXACT_BYTES = 1 << 28  # of the keys and values in fp64 with which outputs of some tokens are compared
OURS_EPS, PEERS_EPS = 4, 16  # roundings of the largest number of a head, by which outputs may differ
Timer = Callable[..., dict[str, Timing]]
Left = dict[str, str]  # why contestants have no time


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


def largest(shape: Shape) -> int:
    """Bytes of the largest tensor of a shape."""
    case = shape.case
    keys = sum(-(-S_kv // case.block_size) * case.block_size for _, S_kv in case.sequences) * case.HKV
    numbers = max(keys * (case.D + case.Dv if shape.paged else max(case.D, case.Dv)), case.N * case.H * case.D)
    return numbers * case.torch_dtype.itemsize


@cache
def pool(device: torch.device, nbytes: int = 8 << 30) -> Pool:
    """The pool of a process."""
    return Pool(device, nbytes)


def problems(shape: Shape, seed: int, numbers: Pool, sets: int) -> list[Problem]:
    """Buffer sets of a shape: other tensors each, but the same selection.

    If the shape has pages, `k` and `v` are not what the pages hold. Only comparators read them that need no selection.
    """
    case, device = shape.case, numbers.device
    g = torch.Generator(device).manual_seed(seed)
    blocks = blocks_of(case, g)
    spans = spans_of_blocks(blocks, case.block_size)
    queries, keys = zip(*case.sequences, strict=True)
    of_keys = (sum(keys),) if case.seqlens else (case.B, case.S_kv)
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], device=device).int() for x in (queries, keys))
    lengths = torch.tensor(keys, dtype=torch.int32)
    table, count = block_table(lengths, case.block_size, seed)
    lengths, table = lengths.to(device), table.to(device)
    scale = torch.full((case.HKV,), SCALE, device=device) if shape.fp8 else None
    scales = None if scale is None else (scale, scale)
    made = []
    for _ in range(sets):
        q = numbers.take(case.torch_dtype, *case.lead, case.HQ, case.D)
        k, v = (numbers.take(case.torch_dtype, *of_keys, case.HKV, d) for d in (case.D, case.Dv))
        p = Problem(case, seed, q, k, v, spans, blocks, case.block_size, scales=scales)
        if case.seqlens:
            p = dataclasses.replace(p, cu_seqlens=cu_q, cu_seqlens_k=cu_k)
        if shape.paged:
            dtype = E4M3 if shape.fp8 else case.torch_dtype
            pages = numbers.take(dtype, count, case.HKV, case.block_size, case.D + case.Dv)
            k, v = (x.transpose(1, 2) for x in (pages[..., : case.D], pages[..., case.D :]))
            p.__dict__["_derived"] = {combined: Combined(k, v, lengths, table, scale, scale, pages)}
        made.append(p)
    return made


# --- contestants ------------------------------------------------------------------------------------------------------


def ours(shape: Shape, name: str, backend: str, schedule: str = "auto", launches: str | None = None) -> Contestant:
    """Our front door for a shape. launches: the kernel that must be launched."""
    call = front_door(backend, schedule, blocks=True)
    if shape.paged:
        call = one_call(combined, backend=backend, schedule=schedule)
    return Contestant(name, call, launches, BLOCKS, lse=False)


def beside(shape: Shape) -> list[Contestant]:
    """The peers that can be imported here and take the shape: vLLM over pages, fla-core and XunhaoLai without."""
    installed = vllm() if shape.paged else peers() | xunhao()
    return [one for one in installed.values() if one.supports(shape.case) is None]


def run(one: Contestant, p: Problem) -> Tensor:
    """The output. Raises NotImplementedError if another kernel served the call than the contestant's."""
    try:
        result, launched = one.run_counted(p)
    except ValueError as error:  # `DoesNotFit`
        raise NotImplementedError(str(error)) from error
    if one.route is not None and not launched[one.route]:
        raise NotImplementedError(f"launched {dict(launched)}")
    return result[0] if isinstance(result, tuple) else result


def exact(p: Problem) -> tuple[Tensor, Tensor]:
    """Some tokens `[t]`, the first and the last among them, and their outputs `[t, HQ, Dv]` in fp64.

    Keys are looked up one by one, in the pages if there are some. None of our code for spans and pages is used.
    """
    case, device = p.case, p.q.device
    pairs = case.sequences
    row = case.HKV * case.L * (case.D + case.Dv) * 8
    tokens = torch.linspace(0, case.N // case.HKV - 1, max(3, min(64, EXACT_BYTES // row))).long().unique().to(device)
    first_q, first_k = (torch.tensor([0, *itertools.accumulate(x)], device=device) for x in zip(*pairs, strict=True))
    S, S_kv = (torch.tensor(x, device=device) for x in zip(*pairs, strict=True))
    seq = torch.searchsorted(first_q[1:].contiguous(), tokens, right=True)  # [t]
    at = (S_kv - S)[seq] + tokens - first_q[seq]  # [t], the position of each query
    assert p.block_indices is not None
    blocks = p.block_indices.flatten(0, -3)[tokens].long()  # [t, HKV, n]
    keys = (blocks[..., None] * case.block_size + torch.arange(case.block_size, device=device)).flatten(-2)
    seen = (blocks >= 0).repeat_interleave(case.block_size, -1) & (keys <= at[:, None, None])
    keys, head = keys.masked_fill(~seen, 0), torch.arange(case.HKV, device=device)[:, None]
    cache = p.__dict__.get("_derived", {}).get(combined)
    if cache is None:
        where = first_k[seq][:, None, None] + keys
        k, v = (x.flatten(0, -3)[where, head].double() for x in (p.k, p.v))
    else:
        page = cache.block_table[seq[:, None, None], keys // case.block_size].long()
        both = cache.pages.view(torch.uint8) if p.scales else cache.pages
        both = both[page, head, keys % case.block_size]
        both = both.view(cache.pages.dtype).double() * (SCALE if p.scales else 1.0)
        k, v = both.split((case.D, case.Dv), -1)
    q = p.q.flatten(0, -3)[tokens].view(len(tokens), case.HKV, case.H, case.D).double()
    scores = (q @ k.transpose(-1, -2) * case.D**-0.5).masked_fill(~seen[:, :, None], -math.inf)
    return tokens, (scores.softmax(-1) @ v).flatten(1, 2)


def agree(
    mine: Sequence[Contestant], others: Sequence[Contestant], p: Problem
) -> tuple[list[Contestant], Left, Tensor]:
    """The contestants that serve a problem and are right, why the others are left out, and the right output.

    The first of `mine` is compared with fp64 at some tokens, all others with the first.

    Raises:
        AssertionError: one of `mine` is wrong.
    """
    want = run(mine[0], p).clone()
    tokens, truth = exact(p)
    _near(mine[0], want.flatten(0, -3)[tokens], truth, OURS_EPS)
    served: list[Contestant] = [mine[0]]
    left_out: Left = {}

    def check(one: Contestant) -> None:
        out = run(one, p)
        if one.other is not None:
            one.other.check(p, out)
        else:
            _near(one, out, want, OURS_EPS if one in mine else PEERS_EPS)

    for one in (*mine[1:], *others):
        reason = why_not(one.supports(p.case), partial(check, one))
        if reason is None:
            served.append(one)
        elif one in mine and not reason.startswith("unsupported"):
            raise AssertionError(f"{one.name}: {reason}")
        else:
            left_out[one.name] = reason
    return served, left_out, want


def _near(one: Contestant, got: Tensor, want: Tensor, roundings: int) -> None:
    bound = roundings * torch.finfo(got.dtype).eps * want.abs().amax(-1, keepdim=True).float()
    error = (got.float() - want.float()).abs()
    worst = float(error.nan_to_num(math.inf).max())
    assert bool((error <= bound).all()), f"{one.name}: an output differs by {worst:.3g}"


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """Times of a shape by contestant. left_out: why others have none. route, reason: of the first contestant's call."""

    problem: Problem
    times: dict[str, Timing]
    left_out: Left
    route: str
    reason: str
    cold: bool


def serve(
    shape: Shape,
    seed: int,
    mine: Sequence[Contestant],
    others: Sequence[Contestant],
    numbers: Pool,
    timer: Timer = time_gpu,
) -> Served:
    """Check contestants on a shape, and time those that are right. timer: as `time_gpu`.

    Raises:
        AssertionError: as `agree`.
    """
    before = _routes()
    (p,) = problems(shape, seed, numbers, 1)
    size = torch.cuda.get_device_properties(numbers.device).L2_cache_size if numbers.device.type == "cuda" else 0
    sets = problems(shape, seed, numbers, min(MOST_SETS, max(2, math.ceil(COLD * size / p.unique_bytes))))
    cold = len(sets) * p.unique_bytes >= COLD * size * 0.99
    run(mine[0], sets[0])
    ((route, reason),) = _routes() - before
    served, left_out, want = agree(mine, others, sets[0])
    for each in sets[1:]:  # what comparators derive, so that no timed call does
        for make in sets[0].__dict__.get("_derived", {}):
            each.derived(make)
    rotations = {one.name: [Kept(partial(one.run, s)) for s in sets] for one in served}
    wrong: Left = {}

    def afterwards(name: str, replay: Fn) -> None:
        (one,) = (one for one in served if one.name == name)
        check = partial(_near, one, rotations[name][0].output, want, OURS_EPS if one in mine else PEERS_EPS)
        reason = None if one.other is not None else why_not(None, check)
        if reason is not None and one in mine:
            raise InvalidMeasurement(f"invalid measurement: when it was timed, {reason}")
        if reason is not None:
            wrong[name] = f"when it was timed, {reason}"

    times = timer(rotations, iters=ITERS, budget_s=BUDGET_S, replay_s=SAMPLE_S, cold=cold, afterwards=afterwards)
    left_out |= wrong
    times = {name: timing for name, timing in times.items() if name not in wrong}
    for name in [name for name, t in times.items() if t.how == "eager" and t.median < HOST_S]:
        left_out[name] = f"not captured: {times.pop(name).refused}"
    if mine[0].name not in times:
        raise InvalidMeasurement(f"{mine[0].name}: {left_out[mine[0].name]}")
    return Served(sets[0], times, left_out, route, reason, cold)


def _routes() -> Counter[tuple[str, str]]:
    return Counter({(x.route, x.reason): x.calls for x in nsa.routes()})


def warm(shape: Shape, contestants: Iterable[Contestant], device: torch.device) -> None:
    """Call contestants once, to compile their kernels: for child processes (`precompile.py`)."""
    with nsa.configure(probe="never"), contextlib.suppress(*caught()):
        (p,) = problems(shape, 0, Pool(device, largest(shape)), 1)
        for one in contestants:
            why_not(one.supports(shape.case), partial(run, one, p))


def kind(case: Case) -> str:
    """What a call is: a whole prompt, a chunk of a longer one, or a decode step of at most four queries."""
    pairs = case.sequences
    return "prompt" if pairs[0][0] == pairs[0][1] else "decode" if max(S for S, _ in pairs) <= 4 else "chunk"
