"""Benchmarks of real work without a GPU: packed SDPA, packing, span utilities, routing. No Triton is timed here."""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.plain.packed_sdpa import packed_sdpa
from nsa.testing.clock import timing
from nsa.testing.clock.cuda import HOST_SETS, buffer_sets
from nsa.testing.clock.measure import gate_figures, measure, run_facts
from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.sdpa import FROM_SPANS
from nsa.testing.fixtures import over
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem
from nsa.testing.plugin import current_lane

pytestmark = [
    pytest.mark.benchmark(timer=timing.clock),
    pytest.mark.skipif(current_lane() == "gpu", reason="CPU benchmarks belong to the CPU lane"),
]
BUDGET_S = 0.1  # of samples for each, ten at least: more samples do not help, noise lies between processes
MAX_ROUTING = 12  # functions of Python that routing a call enters: a count, where a busy machine doubles any time
PACKED_SDPA = [
    *(Case(8, D, D, L, 16, "few", "fp32", source="ranges") for D in (64, 128) for L in (64, 256, 1024)),
    *(Case(8, 128, 128, L, 16, dist, "fp32") for dist in ("many", "mixed") for L in (64, 256, 1024)),
    *(Case(16, 128, 128, 1024, 4 * B, "decode", "fp32", HKV=4, S_kv=2048) for B in (1, 4)),
    Case(8, 128, 64, 256, 16, "mixed", "bf16"),
    Case(8, 64, 128, 256, 16, "many", "fp16"),
]
PACKING = [Case(8, 128, 128, L, 32, d, t) for d in ("many", "mixed") for L in (64, 256, 1024) for t in ("fp32", "bf16")]


@over(PACKED_SDPA)
@pytest.mark.parametrize("bound", ["bounded", "unbounded"])
def test_packed_sdpa(problem: Problem, bound: str, publish, sampling: dict[str, int]) -> None:
    """The fallback from spans to output, told the longest row or not."""
    impl = OURS["sdpa" if bound == "bounded" else "sdpa_unbounded"]

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        result = measure(problem, impl, [FROM_SPANS], budget_s=BUDGET_S, **sampling)
        return result.ours, result.info([], [FROM_SPANS.name])

    publish(f"packed SDPA, {bound}", *take(), again=take)


@over(PACKING)
def test_pack_rows(problem: Problem, publish, sampling: dict[str, int]) -> None:
    p = problem
    packed = nsa.pack_rows(p.k, p.v, p.ranges, max_selected=p.case.L)
    assert torch.equal(packed.K, p.rows.K)
    assert torch.equal(packed.V, p.rows.V)

    def index_select(s: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        """The index made in plain torch, then the same bytes."""
        index = dataclasses.replace(s).key_index[0].flatten()
        return s.k.flatten(0, 2).index_select(0, index), s.v.flatten(0, 2).index_select(0, index)

    sets, _ = buffer_sets(p)
    fns = {
        "ours": [partial(nsa.pack_rows, s.k, s.v, s.ranges, max_selected=p.case.L) for s in sets],
        "index_select": [partial(index_select, s) for s in sets],
    }
    publish_against("packing", "index_select", fns, p.case.fields() | {"seed": p.seed}, publish, sampling)


@pytest.mark.parametrize("spans", ["8", "16", "64"])
def test_merge_ranges(spans: str, publish, sampling: dict[str, int]) -> None:
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, 8192, (4096, int(spans)), generator=g)
    ranges = torch.stack((start, start + torch.randint(1, 256, start.shape, generator=g)), -1)
    covered = nsa.merge_ranges(ranges).diff(dim=-1).sum()
    expected = sum(len({j for a, b in row for j in range(a, b)}) for row in ranges[:64].tolist())
    assert nsa.merge_ranges(ranges[:64]).diff(dim=-1).sum() == expected
    assert covered > 0

    def sort(ranges: torch.Tensor) -> None:
        """The least that merging takes: sort by start, carry ends along, run a maximum."""
        order = ranges[..., 0].sort(-1)[1]
        ranges[..., 1].gather(-1, order).cummax(-1)

    sets = [ranges.clone() for _ in range(HOST_SETS)]
    fns = {"ours": [partial(nsa.merge_ranges, s) for s in sets], "sort": [partial(sort, s) for s in sets]}
    publish_against("merge_ranges", "sort", fns, {"rows": 4096, "n": int(spans)}, publish, sampling)


@over([Case(4, 64, 64, 16, 1, "many", "fp32", S_kv=64), Case(4, 64, 64, 64, 1, "decode", "fp32", S_kv=256)])
def test_routing(problem: Problem, publish, sampling: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A routed call over a direct call of the packed SDPA it ends in.

    Both end in a stand-in that returns an output at once: as a difference of two whole calls, a few microseconds drown
    in the noise of hundreds.
    """
    p = problem
    args = p.selection | {"max_selected": p.case.L}
    direct = Call.of(p.q, p.k, p.v, **args)
    result = packed_sdpa(direct)[0]
    assert torch.equal(nsa.selection_attention(p.q, p.k, p.v, **args), result)

    def stand_in(*_: Any) -> tuple[torch.Tensor, None]:
        return result, None

    monkeypatch.setattr(nsa.plain.packed_sdpa, "packed_sdpa", stand_in)
    assert nsa.selection_attention(p.q, p.k, p.v, **args) is result, "the call was not routed to packed SDPA"
    whole = timing.time_host({"sdpa": lambda: packed_sdpa(direct)}, budget_s=BUDGET_S, **sampling)
    fns = {
        "ours": lambda: nsa.selection_attention(p.q, p.k, p.v, **args),
        "direct_sdpa": lambda: nsa.plain.packed_sdpa.packed_sdpa(direct),
        "python": lambda: [x * x for x in range(100)],  # what the gate divides by: nothing of ours
    }

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host(fns, budget_s=BUDGET_S, sample_s=5e-3, **sampling)
        cost = (times["ours"].median - times["direct_sdpa"].median) * 1e6
        direct = whole["sdpa"].median * 1e6
        info = run_facts(p.q.device) | p.case.fields() | gate_figures(times, ["python"]) | {
            "overhead_us": cost,
            "note": f"routing costs {cost:.1f} us a call; the SDPA behind it {direct:.0f} us ({p.case.source})",
        }  # fmt: skip
        return times["ours"], info

    publish("routing", *take(), again=take)
    assert entered(fns["ours"]) - entered(fns["direct_sdpa"]) <= MAX_ROUTING


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Kernels that do not compile, of long rows; how often that was tried."""
    from nsa.kernels.query_major import plan as query_major

    tries: list[str] = []

    def forward(launch: Any, call: Call, route: str) -> None:
        tries.append(route)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(query_major, "forward", forward)
    nsa.dispatch.reset()
    with nsa.configure(sel_triton_min_L=0):
        yield tries
    nsa.dispatch.reset()


@over([Case(4, 64, 64, 16, 1, "many", "fp32", S_kv=64), Case(4, 64, 64, 64, 1, "decode", "fp32", S_kv=256)])
def test_after_a_failure(problem: Problem, publish, sampling: dict[str, int], monkeypatch, failing: list[str]) -> None:
    """A thousand calls after a kernel failed: it is not tried again, and they cost packed SDPA and a few microseconds.

    What they cost more is timed over a stand-in for packed SDPA, as routing is.
    """
    p = problem
    args = p.selection | {"max_selected": p.case.L}
    direct = partial(packed_sdpa, Call.of(p.q, p.k, p.v, **args))
    call = partial(nsa.selection_attention, p.q, p.k, p.v, **args)
    want = direct()[0]
    assert all(torch.equal(call(), want) for _ in range(1001))
    assert len(failing) == 1
    (record,) = nsa.routes()
    assert (record.route, record.calls) == ("sdpa", 1001)
    assert record.reason.endswith(" kernel failed: RuntimeError: PassManager::run failed")
    whole = timing.time_host({"ours": call, "sdpa": direct}, budget_s=BUDGET_S, **sampling)

    def stand_in(call: Call, bound: int | None = None, layout: str = "") -> tuple[torch.Tensor, None]:
        return want, None

    monkeypatch.setattr(nsa.plain.packed_sdpa, "packed_sdpa", stand_in)
    fns = {
        "ours": call,
        "direct_sdpa": lambda: nsa.plain.packed_sdpa.packed_sdpa(direct.args[0]),
        "python": lambda: [x * x for x in range(100)],
    }

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host(fns, budget_s=BUDGET_S, sample_s=5e-3, **sampling)
        cost = (times["ours"].median - times["direct_sdpa"].median) * 1e6
        both = ", ".join(f"{name} {t.median * 1e6:.1f} us" for name, t in whole.items())
        info = run_facts(p.q.device) | p.case.fields() | gate_figures(times, ["python"]) | {
            "overhead_us": cost,
            "note": f"after a failure a call costs {cost:.1f} us more than the SDPA behind it ({both})",
        }  # fmt: skip
        return times["ours"], info

    publish("after a failure", *take(), again=take)
    assert len(failing) == 1
    assert entered(fns["ours"]) - entered(fns["direct_sdpa"]) <= MAX_ROUTING


def entered(fn: Callable[[], object]) -> int:
    """How many functions of Python a call enters."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return len(names)


def publish_against(group: str, control: str, fns, facts, publish, sampling: dict[str, int]) -> None:
    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host(fns, budget_s=BUDGET_S, **sampling)
        return times["ours"], run_facts(torch.device("cpu")) | facts | gate_figures(times, [control])

    publish(group, *take(), again=take)
