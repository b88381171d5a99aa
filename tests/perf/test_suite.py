"""The benchmarks that ship in the package, on our kernels."""

from nsa.testing.suite.perf.test_choosing import test_selecting
from nsa.testing.suite.perf.test_kernels import test_selection
from nsa.testing.suite.perf.test_prefill import test_prefill

__all__ = ["test_prefill", "test_selecting", "test_selection"]
