"""Compiles a kernel for the first time in a child process, because a compiler that aborts ends its own process.

If the compile matrix has passed these kernels with this Triton and GPU, they are compiled in this process. Otherwise a
child process first makes a small call like the caller's, through the ordinary route and with the caller's tiles, and
compares the result with packed SDPA. This process then refuses the kernels of a call that killed the child, hung it or
gave a wrong result.

`parent` asks, `child` answers, `small` defines the small call, and `memory` keeps the answers.
"""

from nsa.guard.memory import forget
from nsa.guard.parent import ProbeFailed, admit, require
from nsa.guard.small import describe
from nsa.kernels.shared import asking

__all__ = ["ProbeFailed", "admit", "describe", "forget", "require"]

asking.ask = require
