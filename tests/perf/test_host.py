"""What the host spends on an eager call while the GPU works behind it: most of a decode step that is not captured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa.kernels.launch import DIRECT, Variant
from nsa.testing import timing
from nsa.testing.cases import Case
from nsa.testing.impls import OURS, PACKED
from nsa.testing.measure import gate_figures, run_facts

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]
MAX_OVER_LAUNCHES = 1.3  # what a call may take the host, in times of what its bare Triton launches take
CASES = {
    "dense_group": Case(4, 64, 64, 64, 16, "few", "bf16"),
    "varlen_group": Case(4, 64, 64, 64, 16, "few", "bf16", source="varlen"),
    "ranges": Case(4, 64, 64, 64, 16, "many", "bf16"),
    "blocks": Case(4, 64, 64, 512, 16, "decode", "bf16"),
    "sdpa": Case(4, 64, 64, 64, 16, "many", "bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_eager_call(name: str, device: torch.device, publish, sampling: dict[str, int]) -> None:
    case = CASES[name]
    problem, rows = case.make(device), Case(4, 64, 64, 64, 16, "few", "bf16").make(device)
    problem.rows, problem.varlen  # noqa: B018  (packing is not what is timed)
    bare = bare_launches(lambda: OURS[name].run(problem))
    assert bool(bare) == (name != "sdpa"), f"{name}: {len(bare)} launches seen"
    fns = {
        "ours": lambda: OURS[name].run(problem),
        "direct_sdpa": lambda: PACKED.run(rows),
        "bare_launches": lambda: [launch() for launch in bare],
    }

    def take() -> tuple[timing.Timing, dict[str, Any]]:
        times = timing.time_host(fns, sync=torch.cuda.synchronize, budget_s=0.3, **sampling)
        facts: dict[str, Any] = {"impl": name} | gate_figures(times, ["direct_sdpa"])
        if bare:
            ours, launches = (times[side].median * 1e6 for side in ("ours", "bare_launches"))
            facts |= {"us": ours, "over_bare_launches": ours / launches}
            facts["note"] = f"{name}: {ours:.1f} us a call, its Triton launches alone {launches:.1f} us"
        return times["ours"], run_facts(device) | case.fields() | facts

    samples, info = take()
    if bare and DIRECT and info["over_bare_launches"] > MAX_OVER_LAUNCHES:
        samples, info = take()  # as the gate does: what is slow once may be a neighbour's doing
    publish("eager call, host", samples, info, again=take)
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
