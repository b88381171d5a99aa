import pytest

from nsa.testing import bounds
from nsa.testing.fixtures import case, lane_cases, oracle, over_third_parties, problem, third_party
from nsa.testing.interpreting import quicken
from nsa.testing.plugin import current_lane
from nsa.testing.third_party import returns

if current_lane() == "interpreter":
    quicken()
    bounds.watch()

__all__ = ["case", "oracle", "problem", "third_party"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "third_party" in metafunc.fixturenames:
        over_third_parties(metafunc, lane_cases(), ["wanted"], lambda impl, case: zip(returns(impl), strict=True))
