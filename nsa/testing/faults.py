"""Faults planted on purpose, to show that a tool which looks for such faults in our kernels finds them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _planted_read(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The second half of the `BLOCK` elements lies past the end of x."""
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + n - BLOCK // 2 + at))


@triton.jit
def _planted_race(y_ptr, BLOCK: tl.constexpr):
    """Every thread stores to the first word of shared memory and reads it, without a barrier."""
    at = tl.arange(0, BLOCK)
    total = tl.sum(at, 0)  # a sum across warps allocates shared memory
    raced = tl.inline_asm_elementwise(
        "{ .reg .u32 %at; mov.u32 %at, global_smem; st.shared.b32 [%at], $1; ld.shared.b32 $0, [%at]; }",
        "=r,r", [at + total], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(y_ptr + at, raced)


def plant(what: str, device: torch.device) -> None:
    """Run the kernel with the fault that `what`, a tool of compute-sanitizer, looks for."""
    y = torch.empty(256, dtype=torch.int32, device=device)
    if what == "memcheck":
        x = torch.zeros(1024, dtype=torch.int32, device=device)
        _planted_read[(1,)](x, y, x.numel(), 256)
    else:
        _planted_race[(1,)](y, 256, num_warps=8)
