"""The ranks that all tests of this folder share."""

import pytest

from tests.edge.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(job, world, **keywords)`: the results of a job of `jobs.py`, by rank."""
    found = Ranks()
    yield found
    found.stop()
