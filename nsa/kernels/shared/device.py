"""What kernels need to know of a GPU. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from nsa import settings

AMD = 942
"""Stands for the compute capability of every AMD GPU. No AMD GPU has less shared memory than a gfx942."""


class _Known(dict[int, int]):
    """An unknown NVIDIA GPU has the smallest value of those known."""

    def __missing__(self, capability: int) -> int:
        return min(self[known] for known in self if known != AMD)


SHARED_BYTES = _Known({
    **{80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448},
    **{100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376},
    AMD: 65_536,
})  # fmt: skip
"""Shared memory that one program may use, by compute capability."""


class Chip(NamedTuple):
    """What tiles and launches depend on."""

    capability: int  # compute capability times ten, or `AMD`
    processors: int  # multiprocessors
    name: str | None  # under which the measurements of a GPU are stored; None for a CPU
    ptx: bool  # kernels may contain NVIDIA's assembly


@lru_cache(maxsize=64)
def chip(device: torch.device) -> Chip:
    """The facts of a device. A CPU, where kernels are interpreted, has the sizes of an H100."""
    if device.type != "cuda":
        return Chip(90, 132, None, False)
    properties, amd = torch.cuda.get_device_properties(device), torch.version.hip is not None
    capability = AMD if amd else properties.major * 10 + properties.minor  # ROCm says 9.0 of an MI250
    ptx = not amd and not settings.interpreter()
    return Chip(capability, properties.multi_processor_count, torch.cuda.get_device_name(device), ptx)
