"""`--nsa-sweep`: tiles and splits on the hot shapes. The best of each goes to the GPU's table at the end of the run."""

import pytest
import torch

from nsa.kernels.query_major import plan as query_major
from nsa.kernels.query_major.tiles import Choice
from nsa.kernels.shared import device as device_facts
from nsa.testing.clock import precompile, timing
from nsa.testing.clock.measure import run_facts
from nsa.testing.fixtures import over
from nsa.testing.matrix.case import Case
from nsa.tuning import sweep

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=timing.clock)]


@pytest.fixture(scope="module")
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@pytest.fixture(scope="module")
def largest(device: torch.device) -> int:
    return query_major.largest_cluster(device_facts.chip(device))


@pytest.fixture(scope="module")
def deadly(
    processors: int, largest: int, device: torch.device, request: pytest.FixtureRequest
) -> dict[Case, dict[Choice, str]]:
    """Everything this run will try, compiled on all cores: one after the other it would take most of an hour."""
    chosen = {item.callspec.params["case"] for item in request.session.items if hasattr(item, "callspec")}
    work = [(case, sweep.candidates(case, processors, largest)) for case in sweep.cases() if case.id in chosen]
    return sweep.compile_all(work, precompile.processes(device))


@over(sweep.cases())
def test_sweep(case: Case, deadly, processors: int, largest: int, device: torch.device, publish) -> None:
    torch.cuda.empty_cache()
    best, facts = sweep.sweep(case, sweep.candidates(case, processors, largest), device, deadly[case])
    failed = sum("error" in fact for fact in facts)
    assert failed < len(facts), f"none of {len(facts)} candidates is right: {facts[0]['error']}"
    us, now = facts[0]["us"], facts[0]["us_now"]
    note = f"{case.id}: {now:.2f} -> {us:.2f} us, {len(facts)} tried, {failed} failed"
    info = run_facts(device) | case.fields() | {"impl": "sweep", "note": note, "sweep": facts}
    publish(f"sweep: {case.dist}", best, info | {"tiles": sweep.entry(case, facts)})
