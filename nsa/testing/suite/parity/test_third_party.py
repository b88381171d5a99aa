"""Somebody else's kernel, `--nsa-impl package.module:function`: same cases, same bounds, and drawn selections."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.testing.contestants.named import prove
from nsa.testing.contestants.ours import Impl
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.strategies import INT32, Drawn, seeds, selections

FAR = 2**27 - 2  # blocks of 16 keys that far off end within int32


def test_third_party_parity(third_party: Impl, oracle: Oracle, wanted: str) -> None:
    prove(third_party, oracle.problem, oracle, wanted)


@settings(max_examples=settings().max_examples * 2 // 5)  # for each shape, O and LSE
@given(st.data(), seeds())
def test_third_party_parity_any_selection(
    device: torch.device, third_party: Impl, case: Case, wanted: str, data: st.DataObject, seed: int
) -> None:
    """Of fixed shapes: a kernel that does not take one says so at the first call, and the test is skipped."""
    far = FAR if case.source == "blocks" else INT32 - 1
    selection = case.make(device).ranges if case.source == "rows" else data.draw(selections(case, far))
    p = Drawn(case, selection, seed).problem(device)
    prove(third_party, p, Oracle.of(p), wanted)
