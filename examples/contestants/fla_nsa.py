"""fla-core's NSA kernels (https://github.com/fla-org/flash-linear-attention) as a contestant of the suite.

    pip install fla-core
    PYTHONPATH=examples/contestants pytest --pyargs nsa.testing.suite -m parity --nsa-impl fla_nsa:attend
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nsa.testing import contestant

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla warns that flash-attn is not installed, and the suite makes warnings errors
    from fla.ops.nsa import parallel


@contestant(
    takes=("blocks",), dtypes=("bf16", "fp16"), dims=(64, 128), groups=(16, 32), block_sizes=(16, 32, 64, 128),
    causal=(True,), chunks=False, int64=False, needs=("nonempty", "contiguous", "small scores"), lse="e",
    gradients=True,
)  # fmt: skip
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_size: int, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """One program a row, key blocks one after the other. The autograd function returns O alone."""
    n = block_indices.shape[-1]
    if return_lse:
        return parallel.parallel_nsa_fwd(q, k, v, block_indices, n, block_size, scale)
    if torch.is_grad_enabled() and q.requires_grad:
        return parallel.ParallelNSAFunction.apply(q, k, v, block_indices, n, block_size, scale, None)
    return parallel.parallel_nsa_fwd(q, k, v, block_indices, n, block_size, scale)[0]
