"""Somebody else's kernel, `--nsa-impl package.module:function`: same cases, same bounds."""

from nsa.testing.compare import Oracle
from nsa.testing.impls import Impl
from nsa.testing.third_party import prove


def test_third_party_parity(third_party: Impl, oracle: Oracle, wanted: str) -> None:
    prove(third_party, oracle.problem, oracle, wanted)
