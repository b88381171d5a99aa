"""The edge tests that ship in the package, on our front doors."""

from nsa.testing.suite.edge.test_inputs import *  # noqa: F403
