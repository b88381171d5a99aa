"""What the host spends on an eager call while the GPU works behind it: most of a decode step that is not captured."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

import nsa
from nsa.kernels.shared.launch import DIRECT, Variant
from nsa.testing.clock import timing
from nsa.testing.clock.measure import gate_figures, run_facts
from nsa.testing.contestants.sdpa import FROM_SPANS, PACKED
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
MAX_OVER_LAUNCHES = 1.3  # what a call may take the host, in times of what its bare Triton launches take
CASES = {
    "dense_group": Case(4, 64, 64, 64, 16, "few", "bf16"),
    "varlen_group": Case(4, 64, 64, 64, 16, "few", "bf16", source="varlen"),
    "ranges": Case(4, 64, 64, 64, 16, "many", "bf16"),
    "blocks": Case(4, 64, 64, 512, 16, "decode", "bf16"),
    "sdpa": Case(4, 64, 64, 64, 16, "many", "bf16"),
}


CONTROLS = dict.fromkeys(CASES, "direct_sdpa") | {"sdpa": FROM_SPANS.name}  # the same kind of work in plain torch
ROUNDS = 8  # a host's speed wanders over seconds: of one take of a call, ratios spread by 11%, of eight by 2 to 5%
BUDGET_S = 0.06  # of samples for each, in a round
Calls = dict[str, Callable[[], object]]


@pytest.fixture(scope="module")
def calls(device: torch.device) -> dict[str, Calls]:
    """What is timed for each case: our call, its control, and its bare Triton launches."""
    rows = Case(4, 64, 64, 64, 16, "few", "bf16").make(device)
    found: dict[str, Calls] = {}
    for name, case in CASES.items():
        problem = case.make(device)
        control = partial(PACKED.run, rows) if CONTROLS[name] == "direct_sdpa" else partial(FROM_SPANS.run, problem)
        ours = public_call(name, problem)
        bare = bare_launches(ours)
        assert bool(bare) == (name != "sdpa"), f"{name}: {len(bare)} launches seen"
        found[name] = {"ours": ours, CONTROLS[name]: control}
        if bare:
            found[name]["bare_launches"] = lambda bare=bare: [launch() for launch in bare]
    return found


def public_call(name: str, p: Problem) -> Callable[[], object]:
    """A call of `CASES` as a user writes it. The suite's adapters take the host another 2 to 3 us."""
    if name == "dense_group":
        return partial(nsa.sel_attn_fwd_dense_group, *p.rows[:3])
    if name == "varlen_group":
        return partial(nsa.sel_attn_fwd_varlen_group, *p.varlen, max_selected=p.case.L)
    if name == "blocks":
        most = {"max_selected": p.case.n * p.case.block_size, "schedule": "query_major", "backend": "triton"}
        return partial(nsa.selection_attention, p.q, p.k, p.v, **p.selection, **most)
    how = {"max_selected": p.case.L, "backend": "sdpa" if name == "sdpa" else "triton"}
    return partial(nsa.selection_attention, p.q, p.k, p.v, ranges=p.ranges, **p.common, **how)


def measured(calls: dict[str, Calls], sampling: dict[str, int]) -> dict[str, dict[str, timing.Timing]]:
    """Times of all cases, each in `ROUNDS` takes with those of the others between them."""
    how: dict[str, Any] = sampling | {"sync": torch.cuda.synchronize, "budget_s": BUDGET_S}
    takes = [{name: timing.time_host(fns, **how) for name, fns in calls.items()} for _ in range(ROUNDS)]
    return {name: timing.together([take[name] for take in takes]) for name in calls}


@pytest.fixture(scope="module")
def times(
    calls: dict[str, Calls], request: pytest.FixtureRequest
) -> Callable[[], dict[str, dict[str, timing.Timing]]]:
    """A function: one measurement for all tests of this file, made within the first, as `timing.unmeasured` needs."""
    option = request.config.option
    return cache(lambda: measured(calls, {"iters": option.nsa_iters, "warmup": option.nsa_warmup}))


@pytest.mark.parametrize("name", CASES)
def test_eager_call(name: str, device: torch.device, calls, times, publish, sampling: dict[str, int]) -> None:
    bare = "bare_launches" in calls[name]

    def told(found: dict[str, timing.Timing]) -> tuple[timing.Timing, dict[str, Any]]:
        facts: dict[str, Any] = {"impl": name} | gate_figures(found, [CONTROLS[name]])
        if bare:
            ours, launches = (found[side].median * 1e6 for side in ("ours", "bare_launches"))
            facts |= {"us": ours, "over_bare_launches": ours / launches}
            facts["note"] = f"{name}: {ours:.1f} us a call, its launches written as kernel[grid](...) {launches:.1f} us"
        return found["ours"], run_facts(device) | CASES[name].fields() | facts

    def again() -> tuple[timing.Timing, dict[str, Any]]:
        return told(measured(calls, sampling)[name])

    samples, info = told(times()[name])
    if bare and DIRECT and info["over_bare_launches"] > MAX_OVER_LAUNCHES:
        samples, info = again()  # as the gate does: another process may have slowed it once
    publish("eager call, host", samples, info, again=again)
    if bare and DIRECT:  # with older versions a call is Triton's own launch, and our Python on top
        assert info["over_bare_launches"] <= MAX_OVER_LAUNCHES, info["note"]


def bare_launches(call: Callable[[], object]) -> list[Callable[[], object]]:
    """The launches of a call as anybody would write them, `kernel[grid](...)`, on its own arguments.

    That launches no clusters, and a program that is alone must not wait for others: it reads what is its own.
    """
    found: list[Callable[[], object]] = []
    launch = Variant.launch

    def spy(self: Variant, grid: Any, device: Any, tensors: Any, numbers: Any, common: bool = True) -> None:
        keywords = self.constexprs | self.options | {"enable_fp_fusion": True}
        if self.cluster:
            keywords |= {"CLUSTER": 0, "SPLIT": False, "SENDING": None}
        found.append(lambda: self.kernel[grid](*tensors, *numbers, **keywords))
        launch(self, grid, device, tensors, numbers, common)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Variant, "launch", spy)
        call()
    return found
