"""The public function, and its autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from nsa import api, ops, routing, settings, torch_modes
from nsa.call import TENSORS, Call
from nsa.distributed import agreement, passes, shards, traced
from nsa.distributed.passes import KEEPS, Sharded
from nsa.distributed.shards import ORDERS, Layout
from nsa.hints import hide_wrong, refuse
from nsa.plain.spans import ranges_from_blocks
from nsa.validate import check_bound, check_choice, check_count, check_tensors, integer, number


@hide_wrong
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Any,
    ranges: Tensor | None = None, block_indices: Tensor | None = None, block_size: int | None = None,
    causal: bool = True, scale: float | None = None, cu_seqlens: api.CuSeqlens | None = None,
    max_selected: int | None = None, return_lse: bool = False, backend: str = "auto", schedule: str = "auto",
    order: str = "contiguous", heads_at_once: int = 1, keep: str = "last",
    **wrong: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`nsa.selection_attention` over a sequence whose tokens are sharded among ranks.

    Every rank of ``mesh`` makes the call, with its own queries, keys, values and selection. K and V travel a few KV
    heads at a time, the next while the last are computed. The result is that of one process; each rank gets its shard.

    Args:
        q: ``[B, S, HQ, D]``, or ``[T, HQ, D]`` with ``cu_seqlens``: the rank's queries. Ranks may have different
            numbers of queries and keys, also none.
        k: ``[B, S_kv, HKV, D]`` or ``[T_kv, HKV, D]``: the rank's keys.
        v: ``[B, S_kv, HKV, Dv]`` or ``[T_kv, HKV, Dv]``.
        mesh: one dimension of a ``DeviceMesh`` (``mesh["cp"]``), or a process group.
        ranges, block_indices, block_size: the selection of the rank's queries, as for the plain function. Its positions
            count in the whole sequence, not in the shard.
        causal: as for the plain function. Query ``s`` of all queries is at position ``S_kv - S + s`` of all keys.
        cu_seqlens: of the whole batch, the same on every rank. A sequence may lie on several ranks.
        order: ``contiguous``: the ranks' shards follow one another. ``zigzag``: the sequence is cut into twice as many
            pieces as there are ranks; rank ``r`` has the ``r``-th from the start, then the ``r``-th from the end, as
            PyTorch's context parallel. Each rank's pieces have equal lengths.
        heads_at_once: KV heads that travel together. One head goes first and one last.
        keep: which gathered K and V are kept for the backward pass: ``none``, those of the ``last`` heads, or ``all``.
            The backward pass gathers the others again.
        scale, max_selected, return_lse, backend, schedule: as for the plain function.

    Gradients of ``q``, ``k`` and ``v`` go to the shards. dK and dV of the ranks are added in the order of ranks, so
    gradients are equal bit by bit from run to run. All ranks must run the backward pass. Under ``torch.compile`` shards
    must be equal, which is not checked, and K and V of all heads are gathered at once.

    Returns:
        ``O``, and ``LSE`` with ``return_lse``, of the rank's queries, as the plain function.

    Raises:
        ValueError, TypeError, RuntimeError: as the plain function; or shards do not fit together, which every rank
            raises; or, as a RuntimeError that names the rank, another rank raised.
    """
    group = agreement.group_of(mesh)
    if is_dynamo_compiling():
        options: dict[str, Any] = {
            "ranges": ranges, "block_indices": block_indices, "block_size": block_size, "scale": scale,
            "max_selected": max_selected, "return_lse": return_lse, "backend": backend, "schedule": schedule,
        }  # fmt: skip
        return traced.attend(q, k, v, group, order, cu_seqlens, causal, options)
    try:
        if wrong:
            refuse(selection_attention, wrong)
        cu_q, cu_k = (None, None) if cu_seqlens is None else api._pair(cu_seqlens)
        block_size, max_selected, heads_at_once = map(integer, (block_size, max_selected, heads_at_once))
        call = Call(
            q, k, v, ranges, block_indices, None, cu_q, cu_k, block_size=block_size, causal=causal,
            scale=None if scale is None else number(scale), max_selected=max_selected, backend=backend,
            schedule=schedule, return_lse=return_lse, settings=settings.get(),
        )  # fmt: skip
        check_choice("order", order, ORDERS)
        check_choice("keep", keep, KEEPS)
        check_count("heads_at_once", heads_at_once, 1)
        if group.size() == 1:
            o, lse = ops.serve(call)
            return o if lse is None else (o, lse)
        call, message = _checked(call, order, heads_at_once, keep)
    except BaseException as error:
        agreement.post(group, error)
        raise
    messages = agreement.exchange(group, message)
    agreement.compare(messages)
    if all(m["in shard"] for m in messages):
        raise ValueError(
            f"selection: expected positions in the whole sequence of {sum(m['keys'] for m in messages)} keys, got on "
            "every rank positions in its own shard; add the position of the shard's first key"
        )
    s = _sharded(call, group, messages, order, heads_at_once, keep)
    o, lse = _Attention.apply(s, *call[:3])  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


def _checked(call: Call, order: str, heads_at_once: int, keep: str) -> tuple[Call, dict[str, Any]]:
    """Check what a rank can check alone. Returns the call, cast as autocast asks, and its message to the others."""
    check_tensors(**call.named_tensors())
    call = call.with_lists()
    dtype = torch_modes.autocast_dtype(call.q.device)
    if dtype is not None:
        call = torch_modes.cast(call, dtype)
    check_bound(call)  # names an option that has no hash, before plans are looked up
    shape = routing.plan(call).shape
    axis = call.q.dim() - 3
    lengths = {"queries": call.q.shape[axis], "keys": call.k.shape[axis]}
    if order == "zigzag":
        for name, length in lengths.items():
            if length % 2:
                raise ValueError(f"order: expected an even number of {name} on each rank in zigzag order, got {length}")
    same: dict[str, Any] = {
        "dtype": str(call.q.dtype), "device": call.q.device.type, "B": shape.B, "HQ": shape.HKV * shape.G,
        "HKV": shape.HKV, "D": shape.D, "Dv": shape.Dv, "packed": shape.varlen,
        "selection": "block_indices" if call.ranges is None else "ranges", "block_size": call.block_size,
        "causal": call.causal, "scale": call.scale, "order": order, "heads_at_once": heads_at_once, "keep": keep,
    }  # fmt: skip
    recording = torch.is_grad_enabled()
    same |= {f"gradient of {name}": recording and x.requires_grad for name, x in (("k", call.k), ("v", call.v))}
    same["gradients"] = recording and any(x.requires_grad for x in call[:3])
    for name, cu in (("cu_seqlens_q", call.cu_seqlens_q), ("cu_seqlens_k", call.cu_seqlens_k)):
        if cu is not None and cu.device.type == "cpu":  # values on a GPU are not read
            same[name] = cu.tolist()
    return call, {"same": same, "in shard": _in_shard(call), **lengths}


def _in_shard(call: Call) -> bool:
    """Whether a selection looks as if its positions counted in the shard: each query selects itself and nothing beyond.

    Only a selection on the CPU is looked at, and only shards longer than a block: the values on a GPU are not read.
    """
    S, S_kv = call.q.shape[-3], call.k.shape[-3]
    if call.q.device.type != "cpu" or not call.causal or call.cu_seqlens_q is not None or min(S, S_kv) == 0:
        return False
    spans, blocks = call.ranges, call.ranges is None
    if spans is None:
        assert call.block_indices is not None and call.block_size is not None
        spans = ranges_from_blocks(call.block_indices, call.block_size)
    if S <= (call.block_size or 1) or not spans.numel():
        return False
    begin, end = spans.unbind(-1)
    used = end > begin
    position = (torch.arange(S) + (S_kv - S))[:, None, None]
    itself = (used & (begin <= position) & (position < end)).any(-1).all()
    last = begin if blocks else end - 1  # a block may end beyond the shard's last key
    return bool(itself) and bool((last[used] < S_kv).all())


def _sharded(
    call: Call, group: Any, messages: list[dict[str, Any]], order: str, heads_at_once: int, keep: str
) -> Sharded:
    """The call as one rank serves it."""
    queries, keys = (Layout(order, tuple(m[name] for m in messages)) for name in ("queries", "keys"))
    rank, HKV = group.rank(), call.k.shape[-2]
    if call.cu_seqlens_q is not None:
        assert call.cu_seqlens_k is not None
        positions, own = shards.packed_positions(queries, rank, call.cu_seqlens_q, call.cu_seqlens_k)
        call = call._replace(cu_seqlens_q=own)
    else:
        positions = shards.query_positions(queries, keys.total, rank, call.q.shape[0], call.q.device)
    ranges, blocks = (x if x is None else x.contiguous() for x in (call.ranges, call.block_indices))
    call = call._replace(q_positions=positions if call.causal else None, ranges=ranges, block_indices=blocks)
    return Sharded(call, group, keys, passes.groups(HKV, heads_at_once), keep)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Sharded, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse, kept = passes.forward(s)
        if not any(ctx.needs_input_grad):
            return o, lse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*s.call[:TENSORS], o, lse, *kept.values())
        without_tensors = Call._make((*[None] * TENSORS, *s.call[TENSORS:]))
        ctx.sharded, ctx.kept = s._replace(call=without_tensors), tuple(kept)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved, at = ctx.saved_tensors, TENSORS + 2
        o, lse = (x.contiguous() for x in saved[TENSORS:at])  # a hook may have saved copies with other strides
        kept = dict(zip(ctx.kept, saved[at:], strict=True))
        call = Call._make((*saved[:TENSORS], *ctx.sharded.call[TENSORS:]))
        ranges, blocks = (x if x is None else x.contiguous() for x in (call.ranges, call.block_indices))
        s: Sharded = ctx.sharded._replace(call=call._replace(ranges=ranges, block_indices=blocks))
        agreement.exchange(s.group, {"pass": "backward"})
        with settings.applied(s.call.settings):  # this may be a thread of autograd
            gradients = passes.backward(s, kept, do, dlse, o, lse, ctx.needs_input_grad[1:])
        return None, *gradients
