"""Launching a kernel again for a fraction of what Triton's own launch costs the host.

``kernel[grid](...)`` works out with every call which variant of the kernel its arguments need, and looks that up by a
key made of text. Here the caller says what the variant depends on, in a short key; the compiled kernel that Triton
returned the first time is launched directly from then on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

# From 3.3 on a compiled kernel takes all arguments, compile-time ones too. Before, launches stay Triton's.
DIRECT = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 3)
INT32_MAX = 2**31 - 1


class Variant:
    """Compile-time choices of a kernel, and the kernels compiled for them by what else they depend on.

    Args:
        kernel: the ``@triton.jit`` function; its compile-time arguments come last.
        constexprs: values of compile-time arguments.
        options: ``num_warps`` and what else Triton takes.
    """

    def __init__(self, kernel: Any, constexprs: dict[str, object], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constexprs = constexprs
        self.options = options
        self._ready: dict[Hashable, tuple[Any, tuple[object, ...]]] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        device: torch.device,
        key: Hashable,
        args: tuple[Any, ...],
        **constexprs: object,
    ) -> None:
        """Launch on ``device``'s current stream.

        Args:
            key: everything but ``self`` that Triton would compile anew for: dtypes, which arguments are None, and
                ``constexprs``. None: what this call needs is rare, and Triton finds out by itself.
            args: the run-time arguments, in the kernel's order. Where ``key`` is given, addresses are multiples of 16
                and ints fit int32.
            constexprs: more compile-time values, which vary between calls.
        """
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.launch(grid, device, key, args, **constexprs)
        known = self._ready.get(key)
        if known is not None:
            kernel, last = known
            kernel[grid](*args, *last)
            return None
        values = self.constexprs | constexprs
        kernel = self.kernel[grid](*args, **values, **self.options, enable_fp_fusion=True)
        if DIRECT and key is not None and device.type == "cuda" and kernel is not None:
            self._ready[key] = kernel, tuple(values[name] for name in self.kernel.arg_names[len(args) :])
        return None


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether every address is a multiple of 16, as Triton's vector loads want to know."""
    addresses = 0
    for x in tensors:
        if x is not None:
            addresses |= x.data_ptr()
    return addresses & 15 == 0
