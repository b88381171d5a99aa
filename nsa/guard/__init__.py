"""Compiles a kernel for the first time in a child process, because a compiler that aborts ends its own process.

If the compile matrix has passed these kernels with this Triton and GPU, they are compiled in this process. Otherwise a
child process first compiles the variant that is about to be launched, runs it on small tensors and compares the result
with the reference. This process then refuses a variant that killed the child, hung it or gave a wrong result.

`parent` asks, `child` answers, `trials` defines how each kernel is tried, and `memory` keeps the answers.
"""

from nsa.guard.memory import forget
from nsa.guard.parent import ProbeFailed, require
from nsa.kernels.shared import asking

__all__ = ["ProbeFailed", "forget", "require"]

asking.ask = require
