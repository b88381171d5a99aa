"""What this Triton offers, and assembly that keeps the compiler from moving or merging code. NVIDIA only."""

import triton
import triton.language as tl

from nsa import settings
from nsa.kernels.shared.launch import TRITON

# Programmatic dependent launch (PDL): a kernel starts while the one before it on the stream still runs. Triton 3.4 has
# these functions, too, but they do not compile.
if TRITON >= (3, 5):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    gdc_launch_dependents = gdc_wait = None

INTERPRETED = tl.constexpr(settings.interpreter())


@triton.jit
def not_before(x):
    """16-bit or 8-bit ``x``, which the compiler may not use before this point. NVIDIA only.

    Otherwise the kernel waits for a load that is not pipelined before it issues the next load.
    """
    if x.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 4)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@triton.jit
def apart(x):
    """int32 ``x``. A branch that uses the result stays a branch: LLVM cannot turn it into selects. NVIDIA only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def nothing_of(x):
    """An opaque zero made of int32 ``x >= 0``: LLVM cannot hoist a sum with this zero out of a loop. NVIDIA only."""
    return tl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def nothing_of_lanes(x):
    """As :func:`nothing_of`, but the compiler cannot see that all lanes have the same value. NVIDIA only.

    Values that all lanes share are computed by the uniform datapath, where a step takes several times as long.
    """
    lanes = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %lanemask_lt; shr.u32 $0, t, 31; }", "=r", [], tl.int32, True, 1
    )
    return lanes + nothing_of(x)
