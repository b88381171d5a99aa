import pytest

from nsa.testing.contestants.named import returns
from nsa.testing.fixtures import case, lane_cases, oracle, over_third_parties, problem, third_party
from nsa.testing.matrix.strategies import OF_THIRD_PARTIES

__all__ = ["case", "oracle", "problem", "third_party"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for an oracle runs on the lane's matrix, one that draws its own selections on a few shapes."""
    if "third_party" in metafunc.fixturenames:
        cases = lane_cases() if "oracle" in metafunc.fixturenames else OF_THIRD_PARTIES
        over_third_parties(metafunc, cases, ["wanted"], lambda impl, case: zip(returns(impl), strict=True))
