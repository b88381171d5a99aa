"""Tensors for which Triton compiles the same variant of a kernel as for the tensors of a described launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Likeness:
    """Makes tensors with the dtypes, alignments and strides of a described launch.

    Args:
        what: what :meth:`Variant.describe` returned; tensors are named as there. A tensor that the call needs and the
            described kernel does not take has the usual dtype.
    """

    def __init__(self, what: dict[str, Any], device: torch.device) -> None:
        self.device, self.misaligned, self.unit = device, what["misaligned"], what["constexprs"].get("STRIDE_UNIT", 16)
        given = {name: getattr(torch, x.removeprefix("torch.")) for name, x in what["tensors"].items() if x}
        float_dtype = next((given[x] for x in ("q_ptr", "o_ptr", "dq_ptr") if x in given), torch.float16)
        self.dtypes = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr"), float_dtype)
        self.dtypes |= dict.fromkeys(("sel_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr"), torch.int32)
        self.dtypes |= dict.fromkeys(("lse_ptr", "dlse_ptr"), torch.float32) | given
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Random integers from ``low`` to ``high - 1``, on the host."""
        return torch.randint(low, high, shape, generator=self.generator)

    def place(self, name: str, values: Tensor | list[int]) -> Tensor:
        """A contiguous tensor of these values on the device, for the argument of that name."""
        values, offset = torch.as_tensor(values), int(name in self.misaligned)
        memory = torch.empty(values.numel() + offset, dtype=self.dtypes[name], device=self.device)
        return memory[offset:].view(values.shape).copy_(values)

    def normal(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor drawn from N(0, 1)."""
        return self.place(name, torch.randn(shape, generator=self.generator))

    def floats(self, name: str, *shape: int) -> Tensor:
        """A tensor drawn from N(0, 1), whose strides have the STRIDE_UNIT of the described launch."""
        width = -(-shape[-1] // 16) * 16 + self.unit % 16
        return self.normal(name, *shape[:-1], width)[..., : shape[-1]]
