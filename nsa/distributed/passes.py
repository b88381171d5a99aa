"""Forward and backward pass of one rank: K and V of a few heads arrive while the heads before them are computed.

A gather, or the exchange of dK and dV, is issued before the kernels that it shall overlap with, because a collective
waits for all work that was queued before it. dK and dV of a shard are summed in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nsa import backward as gradients
from nsa import dispatch, failures, routing
from nsa.call import Call
from nsa.distributed.agreement import post
from nsa.distributed.shards import Layout, divided, joined
from nsa.kernels.shared.asking import Untried
from nsa.kernels.shared.errors import DoesNotFit

Heads = tuple[int, int]  # the first KV head of a group, and the first after it
KEEPS = ("none", "last", "all")
LISTS_BYTES = 128 << 20
"""Limit of the lists that the backward pass makes at once for one or several groups of heads. Longer lists gain less by
it."""
collectives = torch.ops._c10d_functional


class Sharded(NamedTuple):
    """What one rank knows of a call."""

    call: Call  # its queries and its shard of keys; positions and `cu_seqlens` fit its queries and the whole of keys
    group: ProcessGroup
    keys: Layout
    heads: tuple[Heads, ...]  # KV heads that travel together
    keep: str  # which gathered keys wait for the backward pass

    @property
    def axis(self) -> int:
        """The axis of tokens."""
        return self.call.q.dim() - 3

    def part(self, heads: Heads, kv: Tensor) -> Call:
        """The call of some KV heads over the gathered ``kv [.., S_kv, heads, D + Dv]``."""
        call, D = self.call, self.call.k.shape[-1]
        q = of_heads(call.q, heads, self.call.k.shape[-2])
        return self.selecting(heads)._replace(q=q, k=kv[..., :D], v=kv[..., D:])

    def selecting(self, heads: Heads) -> Call:
        """The call with the selection of some KV heads."""
        call = self.call
        ranges = None if call.ranges is None else call.ranges[..., slice(*heads), :, :]
        blocks = None if call.block_indices is None else call.block_indices[..., slice(*heads), :]
        return call._replace(ranges=ranges, block_indices=blocks)


def groups(HKV: int, at_once: int) -> tuple[Heads, ...]:
    """KV heads that travel together: ``at_once``, but one first and one last, because no kernels hide their travel."""
    if at_once >= HKV:
        return ((0, HKV),)
    inner = range(1, HKV - 1, at_once)
    return ((0, 1), *((head, min(head + at_once, HKV - 1)) for head in inner), (HKV - 1, HKV))


def of_heads(x: Tensor, heads: Heads, HKV: int, axis: int = -2) -> Tensor:
    """A view of the query heads of some KV heads."""
    G = x.shape[axis] // HKV
    return x.narrow(axis, heads[0] * G, (heads[1] - heads[0]) * G)


class Arrival:
    """K and V of a group of heads, on their way. An error in `take`, which the consumer calls, ends no later gather."""

    def __init__(self, s: Sharded, parts: Tensor, kept: bool) -> None:
        self.s, self.parts, self.kept = s, parts, kept

    def wait(self) -> Tensor:
        """Wait for the parts of all ranks, and give up this object's hold on them: the kernels need their memory."""
        parts = self.parts
        del self.parts
        if parts.numel() and not self.kept:
            parts = collectives.wait_tensor(parts)
        return parts

    def take(self) -> Tensor:
        """K and V ``[.., S_kv, heads, D + Dv]``."""
        parts = self.wait()
        return parts if self.kept else joined(parts, self.s.keys, self.s.axis)


def gathered(s: Sharded, order: Iterable[Heads], kept: dict[Heads, Tensor]) -> Iterator[tuple[Heads, Arrival]]:
    """Each group of heads, on its way: the first from now on, each other while the one before it is computed."""
    waiting = list(order)
    return _gathered(s, waiting, kept, _start(s, waiting[0], kept))


def _gathered(
    s: Sharded, waiting: list[Heads], kept: dict[Heads, Tensor], coming: Arrival | None
) -> Iterator[tuple[Heads, Arrival]]:
    for heads, following in zip(waiting, [*waiting[1:], None], strict=True):
        arriving, coming = coming, None if following is None else _start(s, following, kept)
        assert arriving is not None
        yield heads, arriving


def _start(s: Sharded, heads: Heads, kept: dict[Heads, Tensor]) -> Arrival:
    """Start to gather K and V of a group, if they were not kept."""
    if heads in kept:
        return Arrival(s, kept.pop(heads), True)
    shard = torch.cat([x[..., slice(*heads), :] for x in (s.call.k, s.call.v)], -1)
    missing = s.keys.longest - shard.shape[s.axis]
    if missing:
        shape = [*shard.shape]
        shape[s.axis] = missing
        shard = torch.cat((shard, shard.new_zeros(shape)), s.axis)
    if not shard.numel():
        return Arrival(s, shard.expand(s.group.size(), *shard.shape), False)
    return Arrival(s, collectives.all_gather_into_tensor(shard[None], s.group.size(), s.group.group_name), False)


def forward(s: Sharded) -> tuple[Tensor, Tensor, dict[Heads, Tensor]]:
    """``(O, LSE, kept)`` of a rank's queries.

    If a kernel fails on this rank, the gathers go on, so that no other rank waits for them.
    """
    call = s.call
    HKV, Dv = call.v.shape[-2:]
    o = call.q.new_empty((*call.q.shape[:-1], Dv))
    lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.promote_types(call.q.dtype, torch.float32))
    kept: dict[Heads, Tensor] = {}
    arrivals = gathered(s, s.heads, {})
    try:
        for heads, arrival in arrivals:
            kv = arrival.take()
            part = s.part(heads, kv)._replace(out=of_heads(o, heads, HKV), return_lse=True)
            part_lse = dispatch.run(routing.plan(part), part)[1]
            assert part_lse is not None
            of_heads(lse, heads, HKV, -1).copy_(part_lse)
            if s.keep == "all" or (s.keep == "last" and heads == s.heads[-1]):
                kept[heads] = kv
    except BaseException as error:
        post(s.group, error)
        for _, arrival in arrivals:
            arrival.wait()
        raise
    return o, lse, kept


def backward(
    s: Sharded,
    kept: dict[Heads, Tensor],
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of a rank's shards. Groups of heads come in reverse order, because the last may have been kept.

    If a kernel fails on this rank, it sends zeros, so that no other rank waits for it.
    """
    call, HKV = s.call, s.call.k.shape[-2]
    dq = call.q.new_empty(call.q.shape) if wanted[0] else None
    dk, dv = (x.new_empty(x.shape) if want else None for x, want in zip((call.k, call.v), wanted[1:], strict=True))
    returning = Returning(s, dk, dv)
    arrivals = gathered(s, s.heads[::-1], kept)
    heads = None
    try:
        kernels = Kernels(s, do, dlse, o, lse, dq) if wanted[1] and wanted[2] else None
        for heads, arrival in arrivals:
            part = s.part(heads, arrival.take())
            sums = None if kernels is None else kernels.serve(part, heads)
            if sums is not None:
                returning.send(heads, *sums)
                del sums, part  # the next group needs their memory
                continue
            part_do = None if do is None else of_heads(do, heads, HKV)
            part_dlse = None if dlse is None else of_heads(dlse, heads, HKV, -1)
            outputs = of_heads(o, heads, HKV), of_heads(lse, heads, HKV, -1)
            got = gradients.backward(routing.plan(part), part, part_do, part_dlse, *outputs, wanted)
            if dq is not None:
                of_heads(dq, heads, HKV).copy_(got[0])
            returning.send(heads, *got[1:])
    except BaseException as error:
        post(s.group, error)
        returning.send_nothing(heads)
        for heads, arrival in arrivals:
            arrival.wait()
            returning.send_nothing(heads)
        raise
    finally:
        returning.finish()
    return dq, dk, dv


class Kernels:
    """The kernels of the backward pass, on views of a few heads, each of which would otherwise be copied."""

    def __init__(
        self, s: Sharded, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, dq: Tensor | None
    ) -> None:
        self.s, self.outputs, self.dq = s, (do, dlse, o, lse), dq
        self.shared: tuple[Tensor, Tensor] | None = None  # dO and the statistics of rows
        self.listed: tuple[Any, Heads, Any] | None = None  # a launch, and the lists of some heads for it

    def serve(self, part: Call, heads: Heads) -> tuple[Tensor, Tensor] | None:
        """Write dQ of some heads, and return the sums of their dK and dV in fp32. None if the kernels cannot serve."""
        planned, HKV = routing.plan(part), self.s.call.k.shape[-2]
        shape = planned.shape
        if self.dq is None or planned.route in routing.PLAIN or 0 in (shape.tokens, shape.n, self.s.keys.total):
            return None
        try:
            kernel, launch, key, calls = gradients.attach(planned, part, HKV)
        except DoesNotFit:
            return None
        if failures.cause_of(key) is not None:
            return None
        try:
            do, stats = self.shared or self._share(kernel, launch)
            dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (part.k, part.v))
            do, dq = (of_heads(x, heads, HKV) for x in (do, self.dq))
            first, lists = self._lists(kernel, launch, heads)
            kernel.add(
                launch, part, do, stats[heads[0] * shape.G :], dq, (dk, dv), gradients.ROUTE, lists, heads[0] - first
            )
        except (DoesNotFit, Untried):  # untried kernels are admitted by the ordinary way, which comes instead
            return None
        except failures.caught() as error:
            failures.remember(key, gradients.ROUTE, error, planned.fallback)
            return None
        failures.works(key)
        calls[0] += 1
        return dk, dv

    def _lists(self, kernel: Any, launch: Any, heads: Heads) -> tuple[int, Any]:
        """The first head that lists of these heads have, and the lists; None if they need more than `LISTS_BYTES`.

        They are made for the groups of equal size that come next, too: a launch for each group would leave much of a
        GPU idle.
        """
        if self.listed is not None and self.listed[0] is launch and self.listed[1][0] <= heads[0] < self.listed[1][1]:
            return self.listed[1][0], self.listed[2]
        self.listed = None
        first, last = heads
        size = last - first
        if launch.list_bytes(size) > LISTS_BYTES:
            return first, None
        while (first - size, first) in self.s.heads and launch.list_bytes(last - first + size) <= LISTS_BYTES:
            first -= size
        lists = kernel.lists(launch, self.s.selecting((first, last)), last - first)
        self.listed = launch, (first, last), lists
        return first, lists

    def _share(self, kernel: Any, launch: Any) -> tuple[Tensor, Tensor]:
        """What the groups of heads have in common."""
        do, dlse, o, lse = self.outputs
        do = torch.zeros_like(o) if do is None else do.contiguous()
        stats = kernel.statistics(launch, do, None if dlse is None else dlse.contiguous(), o, lse)
        self.shared = do, stats
        return self.shared


class Returning:
    """Brings dK and dV to the ranks that own the keys, a group of heads at a time, while the next is computed."""

    def __init__(self, s: Sharded, dk: Tensor | None, dv: Tensor | None) -> None:
        self.s, self.sums = s, [x for x in (dk, dv) if x is not None]
        self.which = [x is not None for x in (dk, dv)]
        self.going: tuple[Heads, list[Tensor]] | None = None
        self.sent: set[Heads] = set()

    def send(self, heads: Heads, dk: Tensor, dv: Tensor) -> None:
        """Start to send partial sums ``[.., S_kv, heads, D | Dv]``; then take in those of the group before."""
        self._send(heads, [x for x, want in zip((dk, dv), self.which, strict=True) if want])

    def send_nothing(self, heads: Heads | None) -> None:
        """Send zeros for a group that was not sent."""
        if heads is None or heads in self.sent:
            return
        shapes = []
        for x in self.sums:
            shape = [*x.shape[:-2], heads[1] - heads[0], x.shape[-1]]
            shape[self.s.axis] = self.s.keys.total
            shapes.append(x.new_zeros(shape))
        self._send(heads, shapes)

    def _send(self, heads: Heads, whole: list[Tensor]) -> None:
        s, rank = self.s, self.s.group.rank()
        ready = []
        for x in whole:
            outgoing = x.new_empty(x.numel(), dtype=s.call.k.dtype)
            divided(x, s.keys, s.axis, outgoing)
            per_token = x.numel() // max(s.keys.total, 1)
            ins = [length * per_token for length in s.keys.lengths]
            outs = [ins[rank]] * len(ins)
            if x.numel():
                ready.append((outgoing, outs, ins))
        self.sent.add(heads)  # from here on: an error before has sent nothing, so that zeros can be sent instead
        going = [collectives.all_to_all_single(*each, s.group.group_name) for each in ready]
        before, self.going = self.going, (heads, going)
        self._take(before)

    def _take(self, arriving: tuple[Heads, list[Tensor]] | None) -> None:
        """Sum what all ranks sent, in the order of ranks."""
        if arriving is None:
            return
        heads, parcels = arriving
        for total, parcel in zip(self.sums, parcels, strict=False):
            parts = collectives.wait_tensor(parcel)
            mine = total[..., slice(*heads), :]
            *first, last = parts.view(self.s.group.size(), *mine.shape)
            added = first[0]
            for part in first[1:]:
                added = torch.add(added.to(torch.promote_types(part.dtype, torch.float32)), part)
            torch.add(added, last, out=mine)  # computed in fp32, too, and rounded once

    def finish(self) -> None:
        """Take in the last group."""
        self._take(self.going)
        self.going = None
