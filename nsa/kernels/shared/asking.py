"""Who is asked before Triton compiles a kernel in this process. `nsa.guard` sets it; kernels do not know the guard."""

from __future__ import annotations

from typing import Any


class Untried(RuntimeError):
    """Triton would have to compile a variant that no child process has tried. ``variant`` describes it."""

    def __init__(self, variant: dict[str, Any]) -> None:
        super().__init__(f"{variant['kernel']} was not tried")
        self.variant = variant


def ask(variant: Any, device: Any, tensors: Any) -> None:
    """Called with a ``Variant`` of `launch.py`, its device and its tensors. `nsa.guard` replaces this function."""
