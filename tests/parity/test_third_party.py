"""Somebody else's kernel, `--nsa-impl package.module:function`: same cases, same bounds."""

import pytest

from nsa.testing.compare import Oracle, assert_parity
from nsa.testing.impls import Impl
from nsa.testing.third_party import untouched


def test_third_party_parity(third_party: Impl, oracle: Oracle) -> None:
    p = oracle.problem
    for return_lse in (False, True) if third_party.lse else (False,):
        try:
            with untouched(third_party.name, p):
                result = third_party.run(p, return_lse)
        except NotImplementedError as e:
            pytest.skip(f"unsupported{' with LSE' if return_lse else ''}: {p.case.id}: {e}")
        assert_parity(result, oracle, third_party.name)
