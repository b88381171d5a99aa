"""Memory whose contents spoil the result of a kernel that reads it before writing. For trials and tests of kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

POISON = float("nan")
AROUND = 64  # elements, so that addresses stay multiples of 16


@contextlib.contextmanager
def poisoned_workspace() -> Iterator[None]:
    """Fill the workspace of all kernels, and the memory around it, with NaN or integers far out of bounds.

    Without this, memory may still hold the right values of an earlier call, which would hide the error.
    """
    from nsa.kernels.shared import launch  # imports Triton

    real = launch.workspace

    def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = real(size + 2 * AROUND, dtype, device)
        poison = POISON if dtype.is_floating_point else 0x3F3F3F3F & torch.iinfo(dtype).max
        return x.fill_(poison)[AROUND : AROUND + size]

    launch.workspace = poisoned
    try:
        yield
    finally:
        launch.workspace = real
