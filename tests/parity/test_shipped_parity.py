"""The suite that ships in the package, on our kernels."""

from nsa.testing.suite.parity.test_promises import *  # noqa: F403
from nsa.testing.suite.parity.test_selection import *  # noqa: F403
from nsa.testing.suite.parity.test_selectors import *  # noqa: F403
