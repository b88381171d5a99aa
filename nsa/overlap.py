"""Whether ``out`` shares memory with an input. A kernel writes ``out`` while other programs still read the inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa.call import Call
from nsa.torch_modes import odd

_OUT = Call._fields.index("out")
_SHARED = "out: expected a tensor with memory of its own, got one that shares memory with {}"
Extents = tuple[int, int, int, int]
"""Bytes from the first to the last element of ``out``, ``q``, ``k`` and ``v``."""


def extents(call: Call) -> Extents | None:
    """What :func:`near` needs to know of all calls of a plan; None without ``out``.

    Also checks ``out`` against the selection and the other small inputs. Once a plan, because each look at a tensor
    takes the host 1% of a call, and integers share memory with ``out`` only by `view(dtype)`.

    Raises:
        ValueError: ``out`` has no memory of its own, or shares it with one of those inputs.
    """
    out = call.out
    if out is None:
        return None
    if odd(out):
        raise ValueError("out: expected a tensor with memory of its own, got a negative view, a zero or a fake tensor")
    for name, x in zip(Call._fields[3:_OUT], call.tensors[3:_OUT], strict=True):
        if x is not None and not odd(x) and _shared(out, x, x.data_ptr() - out.data_ptr()):
            raise ValueError(_SHARED.format(name))
    return _extent(out), _extent(call.q), _extent(call.k), _extent(call.v)


def near(out: Tensor, q: Tensor, k: Tensor, v: Tensor, reaches: Extents | None) -> bool:
    """Whether ``out`` begins within the extent of ``q``, ``k`` or ``v``, or one of these within its extent.

    Every call with ``out`` asks this. If true, :func:`refuse_shared` looks closer. ``reaches``: :func:`extents`.
    """
    reach, of_q, of_k, of_v = reaches  # type: ignore[misc]  # the plan of a call with `out` has them
    begin = out.data_ptr()
    end = begin + reach
    return begin - of_q < q.data_ptr() < end or begin - of_k < k.data_ptr() < end or begin - of_v < v.data_ptr() < end


def refuse_shared(call: Call, named: Callable[[Call], dict[str, Tensor]]) -> None:
    """Raise ValueError if ``out``, which is not None, shares memory with ``q``, ``k`` or ``v``.

    ``named`` gives the tensors of a call by the caller's names.
    """
    out = call.out
    assert out is not None
    for name, x in zip(named(call), (call.q, call.k, call.v), strict=False):
        if _shared(out, x, x.data_ptr() - out.data_ptr()):
            raise ValueError(_SHARED.format(name))


def _extent(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    return x.element_size() + sum(stride * (size - 1) for stride, size in _dims(x))


def _shared(a: Tensor, b: Tensor, offset: int) -> bool:
    """Whether two tensors share a byte; ``offset``: bytes from the start of ``a`` to that of ``b``.

    Exact if strides are equal or nested, as in slices of one buffer. Else tensors count as sharing memory if their
    extents overlap.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
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
