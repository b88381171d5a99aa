"""Who is asked before Triton compiles a kernel in this process. `nsa.guard` sets it; kernels do not know the guard."""

from __future__ import annotations

from typing import Any


def ask(variant: Any, device: Any, tensors: Any) -> None:
    """Called with a ``Variant`` of `launch.py`, its device and its tensors. `nsa.guard` replaces this function."""
