"""Memory whose contents spoil the result of a kernel that reads it before writing. For trials and tests of kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

POISON = float("nan")
AROUND = 128  # elements, so that addresses stay multiples of 16


@contextlib.contextmanager
def poisoned_workspace() -> Iterator[None]:
    """Fill the workspace of all kernels, and the memory around it, with NaN or integers far out of bounds.

    Without this, memory may still hold the right values of an earlier call, which would hide the error.
    """
    from nsa.kernels.shared import launch  # imports Triton

    workspace, divided = launch.workspace, launch.divided

    def poison(x: Tensor) -> Tensor:
        return x.fill_(POISON if x.is_floating_point() else 0x3F3F3F3F & torch.iinfo(x.dtype).max)

    def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return poison(workspace(size + 2 * AROUND, dtype, device))[AROUND : AROUND + size]

    def pieces(device: torch.device, sizes: tuple[launch.Size, ...]) -> list[launch.Piece | None]:
        made = divided(device, sizes)
        for piece in made:
            if piece is not None:
                poison(piece.room())
        return made

    launch.workspace, launch.divided = poisoned, pieces
    try:
        yield
    finally:
        launch.workspace, launch.divided = workspace, divided
