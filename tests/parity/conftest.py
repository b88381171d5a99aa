import pytest

from nsa.testing.fixtures import case, lane_cases, oracle, over, problem
from nsa.testing.impls import Impl, load

__all__ = ["case", "oracle", "problem"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A third party's kernel runs over the cases it says it takes; without one there is a single skip that says so."""
    if "third_party" not in metafunc.fixturenames:
        return
    specs = metafunc.config.getoption("nsa_impl")
    pairs = [(spec, c) for spec in specs for impl in [load(spec)] for c in lane_cases() if impl.supports(c) is None]
    if not pairs:
        skip = pytest.mark.skip(reason="no --nsa-impl given" if not specs else "takes none of this lane's cases")
        metafunc.parametrize("third_party,case", [pytest.param("none", lane_cases()[0].id, marks=skip)], indirect=True)
        return
    over([c for _, c in pairs])  # makes the ids known
    metafunc.parametrize("third_party,case", [(spec, c.id) for spec, c in pairs], indirect=True, scope="module")


@pytest.fixture(scope="module")
def third_party(request: pytest.FixtureRequest) -> Impl:
    return load(request.param)
