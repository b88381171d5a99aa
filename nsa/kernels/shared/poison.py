"""Memory whose contents spoil the result of a kernel that reads it before writing. For trials and tests of kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

POISON = float("nan")
AROUND = 64  # elements, so that addresses stay multiples of 16


@contextlib.contextmanager
def poisoned_workspace(name: str) -> Iterator[None]:
    """Fill the workspace of `nsa.kernels.<name>`, and the memory around it, with NaN or integers far out of bounds.

    Without this, memory may still hold the right values of an earlier call, which would hide the error.
    """
    kernels: Any = importlib.import_module(f"nsa.kernels.{name}.plan")  # which imports Triton
    real = kernels.workspace

    def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        x: Tensor = real(size + 2 * AROUND, dtype, device)
        return x.fill_(POISON if dtype.is_floating_point else 0x3F3F3F3F)[AROUND : AROUND + size]

    with patch.multiple(kernels, workspace=poisoned):
        yield
