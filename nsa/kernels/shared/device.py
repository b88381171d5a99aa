"""What kernels need to know of a GPU. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache

import torch

from nsa import settings

AMD = 942
"""Stands for the compute capability of every AMD GPU. No AMD GPU has less shared memory than a gfx942."""

SHARED_BYTES = {
    **{80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448},
    **{100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376},
    AMD: 65_536,
}
"""Shared memory that one program may use, by compute capability. An unknown capability gets the smallest."""


def shared_bytes(capability: int) -> int:
    """Shared memory that one program may use."""
    return SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))


@lru_cache(maxsize=64)
def limits(device: torch.device) -> tuple[int, int]:
    """Compute capability times ten, and number of multiprocessors. Interpreted kernels get those of an H100."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:  # ROCm says 9.0 of an MI250
        return AMD, properties.multi_processor_count
    return properties.major * 10 + properties.minor, properties.multi_processor_count


@lru_cache(maxsize=64)
def runs_ptx(device: torch.device) -> bool:
    """Whether kernels for ``device`` may contain NVIDIA's assembly."""
    return device.type != "cpu" and torch.version.hip is None and not settings.interpreter()


@lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str | None:
    """The name under which a GPU's measurements are stored; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
