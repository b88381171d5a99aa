"""Reading a cache of ``float8_e4m3fn``: conversion to fp16, products of pairs, scales."""

import triton
import triton.language as tl

from nsa.kernels.shared.compiler import INTERPRETED


@triton.jit
def half_of(x):
    """fp16 of e4m3 ``x``. fp16 holds every value of e4m3."""
    half = x.to(tl.float16)
    if INTERPRETED:  # Triton's interpreter reads NaN as 480
        half = tl.where((x.to(tl.uint8, bitcast=True) & 127) == 127, float("nan"), half).to(tl.float16)
    return half


# Takes two pairs at a time, and puts their first bytes in a, their second bytes in b. Two assemblies convert one each,
# because Triton 3.1 fails if assembly has two results. ptxas computes their common part once.
SPLIT_PAIRS = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, "
)


@triton.jit
def halves_of(pairs):
    """The first and the second of each pair of e4m3 values in int16 ``pairs [BLOCK_L, N]``, as fp16."""
    if INTERPRETED:
        first = half_of((pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True))
        second = half_of(((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True))
    else:
        first = tl.inline_asm_elementwise(SPLIT_PAIRS + "a; }", "=r,r", [pairs], tl.float16, True, 2)
        second = tl.inline_asm_elementwise(SPLIT_PAIRS + "b; }", "=r,r", [pairs], tl.float16, True, 2)
    return first, second


@triton.jit
def add_pairs(p, pairs, acc, acc_odd, m_old, m):
    """Add the weighted values of a tile to the accumulators of even and odd columns, ``[BLOCK_G, BLOCK_DV // 2]``.

    ``p`` and ``acc`` are from :func:`softmax_step`; ``acc_odd`` is rescaled here, from maximum ``m_old`` to ``m``.
    """
    even, odd = halves_of(pairs)
    alpha = tl.exp2(m_old - tl.where(m == float("-inf"), 0.0, m))
    p = p.to(tl.float16)
    return tl.dot(p, even, acc), tl.dot(p, odd, acc_odd * alpha[:, None])


@triton.jit
def fit_half(q):
    """fp16 of ``q [R, BLOCK_D]``, each row times a power of two, and the inverse powers ``[R]``, fp32.

    The largest magnitude of a row becomes 2^14 to 2^15. So nothing overflows, and fp16 holds all bits of a bf16 element
    unless the element is 2^31 times smaller than that. Rows whose largest magnitude is below 2^-112 become smaller.
    """
    q = q.to(tl.float32)
    exponent = tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
    exponent = tl.maximum(exponent, 15)
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q * power[:, None]).to(tl.float16), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_values(o, lse, scale):
    """``o [R, BLOCK_DV]`` times ``scale``. Rows that selected nothing, whose ``lse [R]`` is -inf, stay 0."""
    return tl.where((lse == float("-inf"))[:, None], o, o * scale)
