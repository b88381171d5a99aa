"""A sharded call that `torch.compile` traces: K and V are gathered whole, and the plain call is one operator.

A compiler cannot read the messages of other ranks, so all ranks must have equally many queries, and equally many keys.
The compiler decides what overlaps with the collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import api
from nsa.distributed import shards
from nsa.distributed.shards import Layout

collectives = torch.ops._c10d_functional


class _Gather(torch.autograd.Function):
    """A tensor of all ranks ``[ranks, …]``. Its gradients are added in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.group = group
        whole: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(x[None].contiguous(), ranks, group))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ones = [1] * grad.shape[0]
        sent = collectives.all_to_all_single(grad.contiguous(), ones, ones, ctx.group)
        parts = collectives.wait_tensor(sent)
        total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(parts.dtype), None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, group: Any, order: str, cu_seqlens: Any, causal: bool, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`nsa.distributed.selection_attention`, of ranks with equal shards."""
    rank, ranks, axis = group.rank(), group.size(), q.dim() - 3
    queries, keys = (Layout(order, (x.shape[axis],) * ranks) for x in (q, k))
    gathered = [_Gather.apply(x, ranks, group.group_name) for x in (k, v)]  # type: ignore[no-untyped-call]
    k, v = (shards.joined(x, keys, axis) for x in gathered)
    positions: Tensor | None
    if cu_seqlens is not None:
        cu_q, cu_k = api._pair(cu_seqlens)
        positions, own = shards.packed_positions(queries, rank, cu_q, cu_k)
        cu_seqlens = own, cu_k
    else:
        positions = shards.query_positions(queries, keys.total, rank, q.shape[0], q.device)
    if not causal:
        positions = None
    result: Tensor | tuple[Tensor, Tensor] = api.selection_attention(
        q, k, v, q_positions=positions, cu_seqlens=cu_seqlens, causal=causal, **options
    )
    return result
