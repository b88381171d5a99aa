"""lucidrains' NSA kernels (https://github.com/lucidrains/native-sparse-attention-pytorch) as a contestant of the suite.

    pip install native-sparse-attention-pytorch
    PYTHONPATH=examples/contestants pytest --pyargs nsa.testing.suite -m parity --nsa-impl lucidrains_nsa:attend
"""

from __future__ import annotations

import torch
from native_sparse_attention_pytorch.triton_native_sparse_attention import native_sparse_attend
from torch import Tensor

from nsa.testing import contestant


@contestant(
    takes=("blocks",), dtypes=("fp16",), dims=(64, 128), unequal_dims=False, groups=(1, 2, 4), block_sizes=(16, 32, 64),
    causal=(True,), chunks=False,
    needs=("own block", "distinct", "visible", "nonempty", "contiguous", "default scale"), lse="e", gradients=True,
)  # fmt: skip
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_size: int, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Reads the query's own block by itself, and computes in fp16; the other blocks are listed with a mask."""
    own = torch.arange(q.shape[1], device=q.device)[:, None, None] // block_size
    chosen = block_indices.transpose(1, 2).long()  # [B, HKV, S, n]
    used = ((block_indices >= 0) & (block_indices != own)).transpose(1, 2).contiguous()
    heads = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    chosen = chosen.clamp(min=0).contiguous()
    out = native_sparse_attend(*heads, block_size, chosen, used, return_lse=return_lse)
    if return_lse:
        return out[0].transpose(1, 2).contiguous(), out[1].transpose(1, 2).contiguous()
    return out.transpose(1, 2).contiguous()
