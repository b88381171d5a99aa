"""The first compile of a kernel, in a child process: a compiler's abort ends the process that it happens in.

A Triton and GPU that the compile matrix has passed with these very kernels is trusted. With any other, before Triton
first compiles a variant of a kernel here, a child process compiles that same variant, runs it on small tensors and
compares the result with the reference (`parent` asks, `child` answers, `trials` says how each kernel is tried). A
variant that kills the child, hangs it or is wrong there is refused here. The answer is remembered (`memory`).
"""

from nsa.guard.memory import forget
from nsa.guard.parent import ProbeFailed, require

__all__ = ["ProbeFailed", "forget", "require"]
