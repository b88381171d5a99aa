"""What a kernel must leave alone: its inputs, and the results that it returned.

All bytes of a tensor's storage count, so that a write between the rows of a strided view is seen, and NaN equals NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nsa.testing.judge.forward import Result
from nsa.testing.matrix.problem import Problem


def tensors(given: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of a problem, a cache, a mapping or a tuple, by the names of their fields or keys."""
    if isinstance(given, Tensor):
        return {name: given}
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if isinstance(given, tuple):
        parts = {f"{name}[{i}]": part for i, part in enumerate(given)}
    elif dataclasses.is_dataclass(given):
        parts = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    found = {word: x for part_name, part in parts.items() for word, x in tensors(part, part_name).items()}
    if isinstance(given, Problem) and given.case.source == "varlen":
        found["cu_seqlens"] = given.varlen.cu_seqlens
    return found


@contextlib.contextmanager
def untouched(spec: str, *given: Any) -> Iterator[None]:
    """Checks that a kernel does not write to its inputs, which are the `tensors` of what is given.

    Raises:
        AssertionError: an input has changed.
    """
    inputs = {name: x for part in given for name, x in tensors(part).items()}
    before = {name: _bytes(x).clone() for name, x in inputs.items()}
    yield
    for name, x in inputs.items():
        assert torch.equal(_bytes(x), before[name]), f"{spec}: wrote to its input {name}"


def copied(result: Result) -> Result:
    """A copy of `O` or `(O, LSE)`, which later calls cannot change."""
    return (result[0].clone(), result[1].clone()) if isinstance(result, tuple) else result.clone()


def same_bits(x: Result, y: Result) -> bool:
    """Whether two results are equal, bit by bit."""
    pairs = zip(tensors((x,)).values(), tensors((y,)).values(), strict=True)
    return all(torch.equal(*(z.detach().contiguous().view(-1).view(torch.uint8) for z in pair)) for pair in pairs)


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())
