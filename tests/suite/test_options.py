"""Options that would do nothing: an empty value, as of a variable that is unset, or a missing other option."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.testing import options, refusals


def check(**given):
    refusals.check_values(SimpleNamespace(option=SimpleNamespace(**given)))


VALUES = (
    "nsa_against", "nsa_csv", "nsa_report", "nsa_dist", "nsa_workload", "nsa_reproduce", "benchmark_compare",
    "benchmark_storage",
)  # fmt: skip
LISTS = ("nsa_impl", "nsa_shape", "nsa_accept_drift")


def test_every_option_of_the_suite_with_a_value_is_known(pytestconfig):
    """So that this test names a new one."""
    ours = {name for name in vars(pytestconfig.option) if name.startswith("nsa_")}
    flags = {name for name in ours if isinstance(pytestconfig.getoption(name), bool)}
    numbers = {*options.SAMPLING, "nsa_regret"}
    assert ours - flags - numbers == {name for name in VALUES if name.startswith("nsa_")} | set(LISTS)
    refusals.check_values(pytestconfig)  # the defaults


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("name", [*VALUES, *LISTS, "benchmark_json"])
def test_an_empty_value_is_refused(name, empty):
    value = [empty] if name in LISTS else Path(empty.strip()) if name == "benchmark_json" else empty
    with pytest.raises(pytest.UsageError, match=f"^{options.spelled(name)}: its value is empty: type --") as raised:
        check(**{name: value, "benchmark_netrc": ""})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", refusals.NEEDS)
def test_an_option_that_needs_another_is_refused_alone(name):
    first, *others = refusals.NEEDS[name]
    unset = {"nsa_against": None, "benchmark_compare": [], "nsa_save_baseline": False, "nsa_recording": False}
    with pytest.raises(pytest.UsageError, match=f"^{options.spelled(name)} needs {options.spelled(first)}"):
        check(**unset | {name: True})
    for other in (first, *others):
        check(**unset | {name: True, other: "HEAD"})
    check(**unset | {name: False})
