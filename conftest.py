"""The entry point of the suite in a checkout: loads its plugin, which chooses the lane, and names `tests/` as ours.

Where the package is installed, `nsa_pytest` does the same for the tests that ship in it.
"""

from pathlib import Path

import pytest

from nsa.testing import owned

pytest_plugins = ["nsa.testing.plugin"]
TESTS = Path(__file__).parent / "tests"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from nsa.testing import profiles  # here, so that pytest can rewrite the plugin before its import

    config.addinivalue_line("markers", "suite: tests of the suite itself (set by the folder of that name)")
    owned.own(config, TESTS)
    profiles.load()
