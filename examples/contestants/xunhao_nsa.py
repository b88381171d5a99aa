"""XunhaoLai's NSA kernels (https://github.com/XunhaoLai/native-sparse-attention-triton) as a contestant of the suite.

    PYTHONPATH=examples/contestants:/path/to/native-sparse-attention-triton \\
        pytest --pyargs nsa.testing.suite -m parity --nsa-impl xunhao_nsa:attend
"""

from __future__ import annotations

import torch
from native_sparse_attention.ops import topk_sparse_attention
from torch import Tensor

from nsa.testing import contestant


@contestant(
    takes=("blocks",), dtypes=("bf16", "fp16"), dims=(64, 128), unequal_dims=False, groups=(1, 2, 4, 8, 16),
    block_sizes=(32, 64, 128), causal=(True,), chunks=False, sequences=True, int64=False,
    needs=("padding last", "visible", "nonempty", "some queries", "contiguous"), gradients=True,
)  # fmt: skip
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_size: int, scale: float,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Sequences end to end: a batch is laid out as one. Its list of blocks is `[HKV, T, n]`."""
    if isinstance(cu_seqlens, tuple):
        if not torch.equal(*cu_seqlens):
            raise NotImplementedError("sequences with more keys than queries")
        cu_seqlens = cu_seqlens[0]
    if cu_seqlens is None:
        B, S = q.shape[:2]
        cu_seqlens = torch.arange(B + 1, device=q.device, dtype=torch.int32) * S
        packed = attend.function(
            *(x.flatten(0, 1) for x in (q, k, v)), block_indices=block_indices.flatten(0, 1), block_size=block_size,
            scale=scale, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return packed.view(*q.shape[:-1], v.shape[-1])
    chosen = block_indices.transpose(0, 1).contiguous().int()
    return topk_sparse_attention(q, k, v, chosen, block_size, cu_seqlens, scale)
