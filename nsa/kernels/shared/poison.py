"""Memory that does harm where a kernel reads what it has not written. For trials and tests of kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

POISON = float("nan")
AROUND = 64  # elements: addresses stay multiples of 16


@contextlib.contextmanager
def poisoned_workspace(name: str) -> Iterator[None]:
    """What the kernels of `nsa.kernels.<name>` allocate is full of NaN, and of integers far out of bounds.

    So is what lies around it, which no kernel may read either. Memory as it comes may hold what an earlier call rightly
    left there.
    """
    kernels: Any = importlib.import_module(f"nsa.kernels.{name}.plan")  # which imports Triton
    real = kernels.workspace

    def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        x: Tensor = real(size + 2 * AROUND, dtype, device)
        return x.fill_(POISON if dtype.is_floating_point else 0x3F3F3F3F)[AROUND : AROUND + size]

    with patch.multiple(kernels, workspace=poisoned):
        yield
