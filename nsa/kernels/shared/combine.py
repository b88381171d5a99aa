"""Merges the partial results of a row's splits in a kernel of its own."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from nsa.kernels.query_major.tiles import next_power_of_2
from nsa.kernels.shared.launch import INT32_MAX, Variant
from nsa.kernels.shared.primitives import gdc_wait, merge_parts


@triton.jit(do_not_specialize=["S", "HQ", "heads", "stride_ob", "stride_os", "stride_oh"])
def _combine_kernel(
    part_ptr, o_ptr, lse_ptr,
    S, HQ, heads,
    stride_ob, stride_os, stride_oh,
    Dv: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Each program merges the parts of one (token, head)."""
    row = tl.program_id(0) + tl.arange(0, 1)  # token * HQ + head
    token = row // HQ
    dv = tl.arange(0, BLOCK_DV)
    if OVERLAP:
        gdc_wait()  # this kernel starts before the end of the kernel that writes the parts
    o, lse = merge_parts(part_ptr, row, row < heads, heads, dv, Dv, SPLITS)
    o_row = (token // S).to(tl.int64) * stride_ob + (token % S).to(tl.int64) * stride_os
    o_row += (row % HQ).to(tl.int64) * stride_oh
    tl.store(o_ptr + o_row[:, None] + dv, o.to(o_ptr.dtype.element_ty), mask=dv[None, :] < Dv)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)


def combine(
    parts: torch.Tensor, splits: int, out: torch.Tensor, lse: torch.Tensor | None, overlap: bool = False
) -> None:
    """Merge partial results into ``out`` (and ``lse``).

    Args:
        parts: fp32, of ``tokens * HQ`` heads, laid out as :func:`nsa.kernels.shared.primitives.merge_parts` says.
        out: ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]``, last dim contiguous.
        lse: contiguous fp32 like ``out`` without its last dim, or None.
        overlap: the kernel before this one on the stream allows an early launch.
    """
    HQ, Dv = out.shape[-2:]
    tokens = out.numel() // (HQ * Dv)
    stride_ob, S = (out.stride(0), out.shape[1]) if out.dim() == 4 else (0, tokens)
    sizes = (S, HQ, tokens * HQ, stride_ob, out.stride(-3), out.stride(-2))
    _variant(out.device, out.dtype, Dv, splits, overlap, lse is None).launch(
        (tokens * HQ, 1, 1), out.device, (parts, out, lse), sizes, max(sizes) <= INT32_MAX
    )


@lru_cache(maxsize=64)
def _variant(device: torch.device, dtype: torch.dtype, Dv: int, splits: int, overlap: bool, no_lse: bool) -> Variant:
    constexprs = {"Dv": Dv, "BLOCK_DV": next_power_of_2(Dv), "SPLITS": splits, "OVERLAP": overlap}
    options = {"num_warps": 1} | ({"launch_pdl": True} if overlap else {})
    return Variant(_combine_kernel, constexprs, options)
