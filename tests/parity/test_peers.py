"""Our kernels against somebody else's idea of the selection: fla-core's own naive reference, one query at a time."""

import dataclasses
from typing import Any

import pytest

from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.peers import installed
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import current_lane

NAIVE = "fla.ops.nsa.naive"
DTYPES = ("fp32", "fp16") if current_lane() == "interpreter" else ("fp16", "bf16")
# Whole prompts, of no whole number of blocks: fla-core knows no other. Several batch entries, heads and group sizes.
CASES = [
    Case(G, 32, 32, 48, 21 * HKV * B, "prefill", DTYPES[i % 2], HKV=HKV, S=21, S_kv=21, block_size=16)
    for i, (G, HKV, B) in enumerate(((1, 2, 1), (4, 1, 2), (16, 1, 1)))
]
NAMES = ("blocks", "ranges", "key_major", "key_major_ranges")
KERNELS = [name for name in NAMES if all(OURS[name].supports(c) is None for c in CASES)]


@pytest.fixture(scope="module")
def naive() -> Any:
    """Its function of the selection alone; the package's wrapper of all three branches also pools keys on a GPU."""
    module = installed(NAIVE)
    if module is None:
        pytest.skip(f"{NAIVE} cannot be imported here: pip install 'nsa[peers]'")
    if not hasattr(module, "naive_nsa_selection"):
        pytest.skip("this version of fla-core has no naive_nsa_selection")
    return module.naive_nsa_selection


@over(CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_triton_sel_parity_fla_naive(oracle: Oracle, naive: Any, name: str) -> None:
    p = oracle.problem
    q, k, v = (x.float() for x in (p.q, p.k, p.v))  # it computes in fp32, and rounds to what it was given
    theirs = naive(q, k, v, p.block_indices.long(), p.block_size)
    result, launched = OURS[name].run_counted(p)
    assert launched[OURS[name].route] > 0, f"{name} launched {launched}"
    assert_parity(result, dataclasses.replace(oracle, out=theirs.double()), f"{name} against fla-core's reference")
