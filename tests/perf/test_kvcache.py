"""Serving on an H100's hot shapes: a decode step over a cache, contiguous and in pages, beside the call without one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.testing.clock import timing
from nsa.testing.clock.measure import measure
from nsa.testing.contestants.contract import Contestant, OtherWork
from nsa.testing.contestants.ours import OURS, kvcache
from nsa.testing.contestants.peers import peers
from nsa.testing.contestants.sdpa import END_TO_END
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import reference_at
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
BUDGET_S = 0.03
DECODE = [Case(16, 128, 128, 1024, 4 * B, "decode", "bf16", HKV=4, S_kv=8192) for B in (1, 8, 64)]
PROMPT = Case(16, 128, 128, 1024, 4 * 65_536, "prefill", "bf16", HKV=4, S=65_536, S_kv=65_536)
CHUNK = Case(16, 128, 128, 1024, 4 * 512, "prefill", "bf16", HKV=4, S=512, S_kv=65_536)


@over(DECODE)
@pytest.mark.parametrize("page", [None, 16, 64, 128], ids=["contiguous", "page16", "page64", "page128"])
def test_decode(problem: Problem, page: int | None, publish, machine_sampling: dict[str, Any]) -> None:
    ours, without = kvcache(page), OURS["auto"]
    for size in {None, page}:
        problem.derived(caches.maker(size))
    beside = [without, *([kvcache(None)] if page else []), *END_TO_END.values(), *peers().values()]

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        result = measure(problem, ours, beside, budget_s=BUDGET_S, **machine_sampling)
        return result.ours, result.info([], END_TO_END)

    publish(f"decode, {'cache' if page is None else 'pages'}", *take(), again=take)


@over([CHUNK])
@pytest.mark.parametrize("page", [None, 64], ids=["contiguous", "page64"])
def test_chunk(problem: Problem, page: int | None, publish, machine_sampling: dict[str, Any]) -> None:
    """The last tokens of a long prompt, beside their share of the time that the whole prompt takes."""
    ours, without = kvcache(page), OURS["auto"]
    problem.derived(caches.maker(page))

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        torch.cuda.empty_cache()
        problem.extra["prompt"] = PROMPT.make(problem.q.device, problem.seed)
        result = measure(problem, ours, [without, WHOLE, DENSE], budget_s=BUDGET_S, **machine_sampling)
        del problem.extra["prompt"]
        share = result.times[WHOLE.name].median * CHUNK.S / PROMPT.S
        times = result.ours.median / share
        note = f"a chunk of {CHUNK.S} takes {times:.2f} times its share of a prompt of {PROMPT.S}"
        return result.ours, result.info([], [DENSE.name]) | {"times_its_share": times, "note": note}

    publish(f"chunk, {'cache' if page is None else 'pages'}", *take(), again=take)


def _whole(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """All of it; returns the last positions, which has the shape of a chunk's result."""
    return OURS["auto"].run(p.extra["prompt"])[:, -CHUNK.S :]


def _check_whole(p: Problem, out: Tensor) -> None:
    prompt: Problem = p.extra["prompt"]
    at = torch.tensor([PROMPT.S - CHUNK.S, PROMPT.S - 100, PROMPT.S - 1], device=out.device)
    want, _ = reference_at(prompt.q, prompt.k, prompt.v, at, **prompt.selection)
    got = out.index_select(1, at - (PROMPT.S - CHUNK.S))
    limit = 16 * torch.finfo(out.dtype).eps * want.abs().amax()
    assert bool(((got.double() - want).abs() <= limit).all()), "the whole prompt is wrong"


def _dense(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
    """Every query over every key, those after it, too: 0.4% of them, and no mask that some backend may not take."""
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, scale=p.scale, enable_gqa=True).transpose(1, 2)


def _dense_flops(p: Problem) -> int:
    return 2 * p.case.B * p.case.HQ * p.case.S * p.case.S_kv * (p.case.D + p.case.Dv)


def _check_dense(p: Problem, out: Tensor) -> None:
    at = torch.tensor([0, p.case.S - 1], device=out.device)
    everything = torch.tensor([0, p.case.S_kv], device=out.device).expand(p.case.B, p.case.S, p.case.HKV, 1, 2)
    want, _ = reference_at(p.q, p.k, p.v, at, ranges=everything, causal=False, scale=p.scale)
    limit = 16 * torch.finfo(out.dtype).eps * want.abs().amax()
    assert bool(((out.index_select(1, at).double() - want).abs() <= limit).all()), "dense attention is wrong"


WHOLE = Contestant("whole_prompt", _whole, lse=False, other=OtherWork(lambda p: p.extra["prompt"].flops, _check_whole))
DENSE = Contestant("dense_flash", _dense, lse=False, other=OtherWork(_dense_flops, _check_dense))
"""What would be done without a selection: dense attention of the chunk over all of the cache."""
