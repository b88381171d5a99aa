"""The forward kernel compiles for GPUs that are not there, as `tiles.py` configures it, within what they have."""

import dataclasses
import re

import pytest

from nsa.kernels.launch import TRITON
from nsa.kernels.tiles import SHARED_BYTES
from nsa.testing import aot

pytestmark = pytest.mark.aot

# Bytes a thread may spill. ptxas parks a few loop invariants even where registers are left, and which ones differs from
# version to version; what is worth a budget of its own is named here with the number seen (Triton 3.9.0).
SPILLS = 64
SPILL_BUDGET = {
    (89, "ranges-fp32-G16-D256-Dv256-N1024-L1024-causal-q_positions"): 8192,  # 7832
}


def complaints(capability, compiled):
    if compiled.shared > SHARED_BYTES[capability]:
        yield f"{compiled.shared} bytes of shared memory, sm_{capability} has {SHARED_BYTES[capability]}"
    budget = SPILL_BUDGET.get((capability, compiled.point), SPILLS)
    if compiled.spills > budget:
        yield f"spills {compiled.spills} bytes a thread, the budget is {budget}"
    if compiled.kernel == "_fwd_kernel" and "fp32" not in compiled.point and not compiled.mma:
        yield "no mma instruction in its PTX: the dot products do not reach the tensor cores"
    if compiled.hasty:
        yield "is launched early, and touches memory before it has waited for the kernel before it"


def waits_for_its_cluster(capability, compiled):
    """Of the points that force a choice: whether it has parts that are merged where they were made."""
    choice = next(point.choice for point in aot.POINTS if point.id == compiled.point)
    split = choice is not None and choice.splits > 1 and bool(choice.cluster)
    return split and capability >= 90 and TRITON >= (3, 6) and compiled.kernel == "_fwd_kernel"


@pytest.mark.parametrize("capability", [80, 89, 90], ids=lambda capability: f"sm_{capability}")
def test_forward_compiles(capability):
    kernels = aot.compile_for(capability)
    for compiled in kernels:
        print(compiled)
    assert {compiled.point for compiled in kernels} == {point.id for point in aot.POINTS}
    assert {compiled.kernel for compiled in kernels} == {"_fwd_kernel", "_combine_kernel"}
    assert [(k.point, k.kernel, why) for k in kernels for why in complaints(capability, k)] == []
    assert {k.early for k in kernels} == {capability >= 90 and TRITON >= (3, 5)}
    forced = {point.id for point in aot.POINTS if point.choice is not None}
    for kernel in (k for k in kernels if k.point in forced):
        assert kernel.cluster == waits_for_its_cluster(capability, kernel), kernel


def test_child_that_dies_names_its_point():
    unknown = re.escape(f"-m nsa.testing.aot 12 exited with 1:\ncompiling {aot.POINTS[0].id} for sm_12")
    with pytest.raises(RuntimeError, match=f"^{unknown}"):
        aot.compile_for(12)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shared": 101_377}, "101377 bytes of shared memory, sm_89 has 101376"),
        ({"spills": 65}, "spills 65 bytes a thread, the budget is 64"),
        ({"hasty": True}, "is launched early, and touches memory before it has waited for the kernel before it"),
        ({"mma": False}, "no mma instruction in its PTX: the dot products do not reach the tensor cores"),
    ],
)
def test_what_is_complained_of(change, complaint):
    fine = aot.Compiled("dense-bf16", "_fwd_kernel", 101_376, 255, 64, mma=True, cluster=False, early=True, hasty=False)
    assert not list(complaints(89, fine))
    assert list(complaints(89, dataclasses.replace(fine, **change))) == [complaint]
