"""Merges the partial results of a row's splits in a kernel of its own."""

import torch
import triton
import triton.language as tl

from nsa.kernels.shared.compiler import gdc_wait
from nsa.kernels.shared.launch import Variant, remembered
from nsa.kernels.shared.sequences import find_step
from nsa.kernels.shared.sizes import INT32_MAX, next_power_of_2
from nsa.kernels.shared.softmax import merge_parts


@triton.jit(do_not_specialize=["S", "HQ", "heads", "stride_ob", "stride_os", "stride_oh"])
def _combine_kernel(
    part_ptr, o_ptr, lse_ptr, cu_q_ptr,
    S, HQ, heads,
    stride_ob, stride_os, stride_oh,
    Dv: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each program merges the parts of one (token, head). STEPS: parts are ordered by place, as in query-major."""
    row = tl.program_id(0) + tl.arange(0, 1)  # token * HQ + head
    token = row // HQ
    dv = tl.arange(0, BLOCK_DV)
    if OVERLAP:
        gdc_wait()  # this kernel starts before the end of the kernel that writes the parts
    if STEPS:
        first = find_step(cu_q_ptr, heads // (HQ * STEPS), S, tl.program_id(0) // HQ, STEPS)
        if first < 0:
            return
        token = first + tl.zeros_like(row)
    o, lse = merge_parts(part_ptr, row, row < heads, heads, dv, Dv, SPLITS)
    row = token * HQ + row % HQ if STEPS else row
    o_row = (token // S).to(tl.int64) * stride_ob + (token % S).to(tl.int64) * stride_os
    o_row += (row % HQ).to(tl.int64) * stride_oh
    tl.store(o_ptr + o_row[:, None] + dv, o.to(o_ptr.dtype.element_ty), mask=dv[None, :] < Dv)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)


def combine(
    parts: torch.Tensor, splits: int, out: torch.Tensor, lse: torch.Tensor | None, overlap: bool = False,
    ends: torch.Tensor | None = None, steps: int = 0,
) -> None:  # fmt: skip
    """Merge partial results into ``out`` (and ``lse``).

    Args:
        parts: fp32, of ``tokens * HQ`` heads, laid out as :func:`nsa.kernels.shared.softmax.merge_parts` says.
        out: ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]``, last dim contiguous.
        lse: contiguous fp32 like ``out`` without its last dim, or None.
        overlap: the kernel before this one on the stream allows an early launch.
        ends, steps: ``cu_seqlens_q``, and the queries of each sequence that have parts. None, 0: all tokens do.
    """
    HQ, Dv = out.shape[-2:]
    tokens = out.numel() // (HQ * Dv)
    stride_ob, S = (out.stride(0), out.shape[1]) if out.dim() == 4 else (0, tokens)
    heads = HQ * (tokens if ends is None else steps * (ends.shape[0] - 1))
    sizes = (S, HQ, heads, stride_ob, out.stride(-3), out.stride(-2))
    kinds = (lse is None, None if ends is None else ends.dtype)
    _variant(out.device, out.dtype, Dv, splits, steps, overlap, kinds).launch(
        (heads, 1, 1), out.device, (parts, out, lse, ends), sizes, max(sizes) <= INT32_MAX
    )


@remembered
def _variant(
    device: torch.device, dtype: torch.dtype, Dv: int, splits: int, steps: int, overlap: bool, kinds: tuple[object, ...]
) -> Variant:
    """``kinds``: whether there is no LSE, and the dtype of ``ends``, for which kernels are compiled, too."""
    constexprs = {"Dv": Dv, "BLOCK_DV": next_power_of_2(Dv), "SPLITS": splits, "STEPS": steps, "OVERLAP": overlap}
    options = {"num_warps": 1} | ({"launch_pdl": True} if overlap else {})
    return Variant(_combine_kernel, constexprs, options)
