"""Checks addresses in Triton's interpreter: each must lie in a tensor that the kernel was given.

On a GPU an access out of bounds is an illegal address, or goes unnoticed if other data lies there. The interpreter
reads any memory. With this check the interpreter raises an error. The error is also kept in `outside`, because
dispatch may take the error for that of a broken kernel, and fall back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

outside: list[str] = []
"""Accesses out of bounds by kernels of this process. The plugin clears the list before each test."""

checking = True
"""Whether addresses are checked. The plugin switches it off while a test runs that is not the suite's."""

_launched = 0


def launched() -> int:
    """The number of kernels that this process has interpreted since `watch` was called."""
    return _launched


class OutOfBounds(RuntimeError):
    """A kernel accessed memory outside the tensors that it was given."""


@functools.cache
def watch() -> bool:
    """Check the addresses of interpreted kernels from now on. Returns False if this Triton's interpreter is unknown."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return False
    memory: Any = getattr(interpreter, "_interpreter", None)
    executor: Any = getattr(interpreter, "GridExecutor", None)
    if memory is None or not hasattr(executor, "_init_args_hst"):
        return False
    watched = _Watched(memory)
    to_host = executor._init_args_hst

    @functools.wraps(to_host)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _launched
        _launched += 1
        positional, named = to_host(self, *args, **kwargs)
        given = (getattr(x, "base", x) for x in (*positional, *named.values()))  # a tensor descriptor has a base
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        watched.kernel, watched.tensors = self.fn.__name__, [_extent(x) for x in tensors if x.numel()]
        return positional, named

    executor._init_args_hst = noting
    interpreter._interpreter = watched
    return True


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and of the byte after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class _Watched:
    """Replaces the object by which the interpreter accesses memory, and checks addresses before each access."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.kernel = "a kernel"
        self.tensors: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def load(self, pointers: Any, mask: Any, other: Any, kind: Any) -> Any:
        self._check(pointers, mask, other.dtype.itemsize, "reads")
        return self.memory.load(pointers, mask, other, kind)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize, "writes")
        return self.memory.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize, "adds to")
        return self.memory.atomic_rmw(operation, pointers, value, mask, *rest)

    def atomic_cas(self, pointers: Any, compare: Any, value: Any, *rest: Any) -> Any:
        self._check(pointers, None, value.dtype.itemsize, "swaps")
        return self.memory.atomic_cas(pointers, compare, value, *rest)

    def _check(self, pointers: Any, mask: Any, itemsize: int, does: str) -> None:
        used = pointers if mask is None or mask.all() else pointers[mask]
        if used.size == 0 or not checking:
            return
        first, last = int(used.min()), int(used.max()) + itemsize
        if any(begin <= first and last <= end for begin, end in self.tensors):
            return
        for begin, end in self.tensors:
            inside = (used >= begin) & (used + itemsize <= end)
            used = used[~inside]
        if used.size:
            outside.append(f"{self.kernel} {does} {used.size} elements outside its tensors")
            raise OutOfBounds(outside[-1])
