"""Serving on an H100's hot shapes: a decode step over a cache, contiguous and in pages, beside the call without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.testing import caches, timing
from nsa.testing.cases import Case
from nsa.testing.compare import reference_at
from nsa.testing.fixtures import over
from nsa.testing.impls import OURS, Impl, OtherWork
from nsa.testing.measure import measure
from nsa.testing.peers import peers
from nsa.testing.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.03
DECODE = [Case(16, 128, 128, 1024, 4 * B, "decode", "bf16", HKV=4, S_kv=8192) for B in (1, 8, 64)]
PROMPT = Case(16, 128, 128, 1024, 4 * 65_536, "prefill", "bf16", HKV=4, S=65_536, S_kv=65_536)
CHUNK = Case(16, 128, 128, 1024, 4 * 512, "prefill", "bf16", HKV=4, S=512, S_kv=65_536)


@over(DECODE)
@pytest.mark.parametrize("page", [None, 16, 64, 128], ids=["contiguous", "page16", "page64", "page128"])
def test_decode(problem: Problem, page: int | None, publish, machine_sampling: dict[str, Any]) -> None:
    ours, without = caches.impl(page), OURS["auto"]
    for size in {None, page}:
        problem.derived(caches.maker(size))
    beside = [without, *([caches.impl(None)] if page else []), *peers().values()]

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        result = measure(problem, ours, beside, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info([], without.name)

    publish(f"decode, {'cache' if page is None else 'pages'}", *take(), again=take)


@over([CHUNK])
@pytest.mark.parametrize("page", [None, 64], ids=["contiguous", "page64"])
def test_chunk(problem: Problem, page: int | None, publish, machine_sampling: dict[str, Any]) -> None:
    """The last tokens of a long prompt, beside their share of the time that the whole prompt takes."""
    ours, without = caches.impl(page), OURS["auto"]
    problem.derived(caches.maker(page))

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        problem.extra["prompt"] = PROMPT.make(problem.q.device, problem.seed)
        result = measure(problem, ours, [without, WHOLE], budget_s=BUDGET_S, **machine_sampling)
        del problem.extra["prompt"]
        share = result.times[WHOLE.name].median * CHUNK.S / PROMPT.S
        times = result.ours.median / share
        note = f"a chunk of {CHUNK.S} takes {times:.2f} times its share of a prompt of {PROMPT.S}"
        return result.ours, result.info([], without.name) | {"times_its_share": times, "note": note}

    publish(f"chunk, {'cache' if page is None else 'pages'}", *take(), again=take)


def _whole(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """All of it; returns the last positions, which has the shape of a chunk's result."""
    return OURS["auto"].run(p.extra["prompt"])[:, -CHUNK.S :]


def _check(p: Problem, out: Tensor) -> None:
    prompt: Problem = p.extra["prompt"]
    at = torch.tensor([PROMPT.S - CHUNK.S, PROMPT.S - 100, PROMPT.S - 1], device=out.device)
    want, _ = reference_at(prompt.q, prompt.k, prompt.v, at, **prompt.selection)
    got = out.index_select(1, at - (PROMPT.S - CHUNK.S))
    limit = 16 * torch.finfo(out.dtype).eps * want.abs().amax()
    assert bool(((got.double() - want).abs() <= limit).all()), "the whole prompt is wrong"


WHOLE = Impl("whole_prompt", _whole, lse=False, other=OtherWork(lambda p: p.extra["prompt"].flops, _check))
