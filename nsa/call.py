"""One call of selection attention as one object: its tensors, its options and the settings in force.

Validation, planning, launch and backward pass take this object. The arguments are listed here, in the public signatures
and in the operators' schema (:mod:`nsa.ops`), and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import settings
from nsa.settings import Settings

TENSORS = 13  # the first fields of a `Call` are tensors
UNREAD = Settings()  # the settings of a call that a compiler traces, because a compiler cannot look up the real ones


class Call(NamedTuple):
    """The arguments of :func:`nsa.selection_attention` and of the other public functions, tensors first.

    A call over a cache has ``cache_seqlens``; ``k`` and ``v`` are then the cache, which has scales only in fp8. With
    ``cu_seqlens_q`` its queries are packed. A call on packed rows has neither ``ranges`` nor ``block_indices``.
    ``settings`` are those in force where the call began. The backward pass needs them because it may run on a thread of
    autograd.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ranges: Tensor | None = None
    block_indices: Tensor | None = None
    q_positions: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    cache_seqlens: Tensor | None = None
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    out: Tensor | None = None
    block_size: int | None = None
    causal: bool = True
    scale: float | None = None
    max_selected: int | None = None
    max_seqlen_q: int | None = None
    backend: str = "auto"
    schedule: str = "auto"
    return_lse: bool = False
    settings: Settings = UNREAD

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Any = None, **given: Any) -> Call:
        """A call with the settings in force, from keywords as :func:`nsa.selection_attention` takes them."""
        pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        call = cls(q, k, v, cu_seqlens_q=pair[0], cu_seqlens_k=pair[1], **{"settings": settings.get()} | given)
        return call.with_lists()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of their fields; None for an absent one."""
        return self[:TENSORS]  # type: ignore[return-value]

    @property
    def selection(self) -> Tensor | None:
        """Ranges or block indices; None for packed rows."""
        return self.block_indices if self.ranges is None else self.ranges

    @property
    def about_keys(self) -> tuple[Tensor | None, ...]:
        """The tensors that say which keys a row reads: the selection, query positions, ends of sequences of queries,
        and ends or lengths of sequences of keys.
        """
        lengths = self.cu_seqlens_k if self.cache_seqlens is None else self.cache_seqlens
        return self.selection, self.q_positions, self.cu_seqlens_q, lengths

    def with_lists(self) -> Call:
        """The call with a list for each KV head, where one list serves all: a view, whose stride over heads is 0."""
        x, k, axis = self.selection, self.k, -2 if self.ranges is None else -3
        if not (isinstance(x, Tensor) and isinstance(k, Tensor)) or x.dim() < 1 - axis or k.dim() < 2:
            return self
        if x.shape[axis] != 1 or k.shape[-2] == 1:
            return self
        shape = list(x.shape)
        shape[axis] = k.shape[-2]
        x = x.expand(shape)
        return self._replace(block_indices=x) if self.ranges is None else self._replace(ranges=x)

    def into(self, out: Tensor) -> Call:
        """The call with this ``out``. It takes a third of the time of :meth:`_replace`."""
        return tuple.__new__(Call, (*self[: TENSORS - 1], out, *self[TENSORS:]))

    @property
    def page_size(self) -> int | None:
        """Keys of a page; None if the cache has no pages."""
        return None if self.block_table is None else self.k.shape[1]

    def named_tensors(self, q: str = "q", k: str = "k", v: str = "v") -> dict[str, Tensor]:
        """``q``, ``k`` and ``v`` by the given names, and the other tensors that are not None by field name."""
        names = (q, k, v, *self._fields[3:TENSORS])
        return {name: x for i, (name, x) in enumerate(zip(names, self.tensors, strict=True)) if i < 3 or x is not None}  # type: ignore[misc]

    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Dtypes of keys and scales, and of the tensors that define which keys a row reads; None for an absent one.
        Kernels are compiled for these dtypes.
        """
        index = self.selection, self.q_positions, self.cu_seqlens_q, self.cu_seqlens_k, self.cache_seqlens
        keys = self.block_table, self.k, self.k_scale, self.v_scale
        return tuple(None if x is None else x.dtype for x in (*index, *keys))

    def key(self) -> tuple[Any, ...]:
        """All that the plan depends on: calls with equal keys share a plan.

        The key is one flat tuple, because it is built at every call; for the same reason the metadata of a selection is
        written out. The key contains the types of numbers because True == 1 == 1.0.

        Raises:
            AttributeError: an argument that must be a tensor is not.
        """
        (
            q, k, v, ranges, blocks, positions, cu_q, cu_k, lengths, table, k_scale, v_scale, out, size, causal, _,
            most, longest, backend, schedule, _, settings,
        ) = self  # fmt: skip
        return (
            settings.text, q.shape, q.dtype, q.device, q.stride(), k.shape, k.dtype, k.device, k.stride(),
            v.shape, v.dtype, v.device, v.stride(),
            None if ranges is None else (type(ranges), ranges.shape, ranges.dtype, ranges.device, ranges.stride()),
            None if blocks is None else (type(blocks), blocks.shape, blocks.dtype, blocks.device, blocks.stride()),
            size, size.__class__, causal, causal.__class__,
            None if positions is None else metadata(positions),
            longest if cu_q is None else (metadata(cu_q), longest, longest.__class__),
            None if cu_k is None else metadata(cu_k), most, most.__class__,
            None if out is None else (type(out), out.shape, out.dtype, out.device, out.stride()), backend, schedule,
            None if lengths is None
            else (type(lengths), lengths.shape, lengths.dtype, lengths.device, lengths.stride()),
            None if table is None else (type(table), table.shape, table.dtype, table.device, table.stride()),
            None if k_scale is None and v_scale is None
            else tuple(None if x is None else metadata(x) for x in (k_scale, v_scale)),
        )  # fmt: skip

    @staticmethod
    def rows_key(q: Any, k: Any, v: Any, cu: Any, out: Any, most: Any, schedule: str, settings: Settings) -> Any:
        """:meth:`key` of a call on packed rows, which has fewer arguments.

        They are passed one by one, because unpacking a `Call` would add 3% to the host time of a call.
        """
        return (
            settings.text, schedule, most, most.__class__, q.shape, q.dtype, q.device, q.stride(), k.shape, k.dtype,
            k.device, k.stride(), v.shape, v.dtype, v.device, v.stride(), None if cu is None else metadata(cu),
            None if out is None else metadata(out),
        )  # fmt: skip


def metadata(x: Any) -> tuple[Any, ...]:
    """Class, shape, dtype, device and strides of a tensor. The class says whether a kernel may read its memory."""
    return type(x), x.shape, x.dtype, x.device, x.stride()
