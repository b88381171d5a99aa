"""Whether ``out`` shares memory with an input. A kernel writes ``out`` while other programs still read the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nsa.call import Call
from nsa.torch_modes import odd

_OUT = Call._fields.index("out")
Extents = tuple[int, tuple[tuple[int, int], ...]]
"""Bytes from the first to the last element of ``out``, and ``(field, bytes)`` of each input of a call."""


def extents(call: Call) -> Extents | None:
    """What :func:`check` needs to know of all calls of a plan; None without ``out``.

    Raises:
        ValueError: ``out`` is of a class whose tensors may have no memory.
    """
    if call.out is None:
        return None
    if odd(call.out):
        raise ValueError("out: expected a tensor with memory of its own, got a negative view, a zero or a fake tensor")
    return _extent(call.out), tuple((i, _extent(x)) for i, x in enumerate(call.tensors[:_OUT]) if x is not None)


def check(call: Call, known: Extents | None, named: Callable[[Call], dict[str, Tensor]]) -> None:
    """Check the memory of ``call.out``, which must not be None.

    Args:
        known: :func:`extents` of the plan.
        named: gives the tensors of a call by the caller's names.

    Raises:
        ValueError: ``out`` shares memory with an input, or is a negative view.
    """
    out: Any = call.out
    assert known is not None
    reach, inputs = known
    begin = out.data_ptr()
    for i, size in inputs:
        x: Any = call[i]
        offset = x.data_ptr() - begin
        if -size < offset < reach and _shared(out, x, offset):
            name = next(name for name, tensor in named(call).items() if tensor is x)
            raise ValueError(f"out: expected a tensor with memory of its own, got one that shares memory with {name}")
    if out.is_neg():
        raise ValueError("out: expected a tensor with memory of its own, got a negative view")


def _extent(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    return x.element_size() + sum(stride * (size - 1) for stride, size in _dims(x))


def _shared(a: Tensor, b: Tensor, offset: int) -> bool:
    """Whether two tensors share a byte; ``offset``: bytes from the start of ``a`` to that of ``b``.

    Exact if strides are equal or nested, as in slices of one buffer. Else tensors count as sharing memory if their
    extents overlap.
    """
    return _meet(_dims(a), _dims(b), a.element_size(), b.element_size(), offset)


def _dims(x: Tensor) -> list[tuple[int, int]]:
    """``(stride in bytes, size)`` of the dimensions with more than one element."""
    return [(stride * x.element_size(), size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _meet(a: list[tuple[int, int]], b: list[tuple[int, int]], wide_a: int, wide_b: int, offset: int) -> bool:
    """:func:`_shared` for the dimensions ``a`` and ``b`` of elements that are ``wide_a`` and ``wide_b`` bytes wide."""
    reach_a = wide_a + sum(stride * (size - 1) for stride, size in a)
    reach_b = wide_b + sum(stride * (size - 1) for stride, size in b)
    if offset >= reach_a or -offset >= reach_b:
        return False
    period = max([stride for stride, _ in (*a, *b)], default=0)
    inner_a, inner_b = ([(stride, size) for stride, size in dims if stride < period] for dims in (a, b))
    in_both = len(inner_a) < len(a) and len(inner_b) < len(b)
    inner = (wide_a, inner_a), (wide_b, inner_b)
    if not in_both or any(wide + sum(stride * (size - 1) for stride, size in dims) > period for wide, dims in inner):
        return True
    # In each period both tensors have the same pattern, so two neighbouring offsets between the patterns suffice.
    near = offset % period
    return any(_meet(inner_a, inner_b, wide_a, wide_b, shift) for shift in (near, near - period))
