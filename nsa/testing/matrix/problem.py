"""The tensors of one `Case` (drawn in `inputs.py`), and index arithmetic that says which keys each row reads.

Nothing here calls the library's span code. Otherwise a wrong clamp would be wrong on both sides of a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nsa.testing.matrix.case import Case

T = TypeVar("T")


class Rows(NamedTuple):
    """Packed rows: `Q [N,H,D]`, `K [N,L,D]`, `V [N,L,Dv]`, zero past `lengths [N]` (int64)."""

    Q: Tensor
    K: Tensor
    V: Tensor
    lengths: Tensor


class VarlenRows(NamedTuple):
    """Rows of different lengths: `Q [N,H,D]`, `K_all [sumL,D]`, `V_all [sumL,Dv]`, `cu_seqlens [N+1]` (int32)."""

    Q: Tensor
    K_all: Tensor
    V_all: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs of one selection, in FlashAttention layout, and everything derived from them.

    `q [B,S,HQ,D]`, `k [B,S_kv,HKV,D]`, `v [B,S_kv,HKV,Dv]`, `ranges [B,S,HKV,n,2]`. With `cu_seqlens` the leading
    `[B,S]` is one token axis `[T]`; `cu_seqlens_k` says where the keys of sequences begin, if not where queries do.
    `block_indices [B,S,HKV,n]` if the selection is written as blocks; then `ranges` is the same selection as spans.

    Derived tensors are computed when they are first used. `key_index`, `rows` and `varlen` take memory for every
    selected key of every row, so they must not be used on a `case.large` problem.
    """

    case: Case
    seed: int
    q: Tensor
    k: Tensor
    v: Tensor
    ranges: Tensor
    block_indices: Tensor | None = None
    block_size: int | None = None
    causal: bool = True
    q_positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None  # None: as `cu_seqlens`
    scale: float | None = None
    scales: tuple[Tensor, Tensor] | None = None  # k_scale and v_scale of the fp8 cache that k and v stand for

    @property
    def selection(self) -> dict[str, Any]:
        """The keywords of `nsa.selection_attention` for this problem."""
        return self.picked | self.common

    @property
    def picked(self) -> dict[str, Any]:
        """Those that say which keys each row reads: blocks and their size, or ranges."""
        if self.block_indices is None:
            return {"ranges": self.ranges}
        return {"block_indices": self.block_indices, "block_size": self.block_size}

    @property
    def chosen(self) -> Tensor:
        """The selection as it is written: `block_indices`, or `ranges` if there are none."""
        return self.ranges if self.block_indices is None else self.block_indices

    @property
    def common(self) -> dict[str, Any]:
        """Keywords that do not depend on how the selection is written."""
        return {
            "causal": self.causal,
            "q_positions": self.q_positions,
            "cu_seqlens": self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_pair,
            "scale": self.scale,
        }

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores: `scale`, or its default."""
        return self.case.D**-0.5 if self.scale is None else self.scale

    @property
    def cu_seqlens_pair(self) -> tuple[Tensor, Tensor] | None:
        """`cu_seqlens` of the queries and of the keys, or None."""
        if self.cu_seqlens is None:
            return None
        return self.cu_seqlens, self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Tensors that callers compute outside of the timing. Clones share them; a changed problem has none."""
        return {}

    @cached_property
    def clamped(self) -> tuple[Tensor, Tensor, Tensor]:
        """`(base [N], start [N, n], end [N, n])`, int64: the first key of a row's sequence, and the row's spans.

        Spans are local to the sequence. `end` is clamped by causality and the number of keys, but is at least `start`.
        """
        HKV, n = self.ranges.shape[-3:-1]
        base, kv_len, limit = (x.repeat_interleave(HKV) for x in bounds(self))  # per row: b, s, hkv
        spans = self.ranges.reshape(-1, n, 2).to(torch.int64)
        spans = spans.clamp(min=0).minimum(kv_len[:, None, None])
        start, end = spans[..., 0], spans[..., 1].minimum(limit[:, None])
        return base, start, end.maximum(start)

    @cached_property
    def lengths(self) -> Tensor:
        """`[N]` int64: how many keys each row reads. A key that is listed twice counts twice."""
        _, start, end = self.clamped
        return (end - start).sum(1)

    @cached_property
    def key_index(self) -> tuple[Tensor, Tensor]:
        """`(index [N, Lmax], lengths [N])`: flat key rows of `k` (batch and position merged) in selection order."""
        base, start, end = self.clamped
        n, lens, lengths = start.shape[1], end - start, self.lengths
        before = lens.cumsum(1) - lens  # keys of the row that come before each span
        width = int(lengths.max()) if lengths.numel() else 0
        column = torch.arange(width, device=lens.device).expand(lens.shape[0], width)
        if not width or not n:
            return column, lengths
        # The span of a column is the first one whose keys end after it: empty spans end where they start.
        which = (torch.searchsorted((before + lens).contiguous(), column.contiguous(), right=True)).clamp(max=n - 1)
        index = base[:, None] + start.gather(1, which) + column - before.gather(1, which)
        first = base.clamp(max=max(self.k.flatten(0, -3).shape[0] - 1, 0))  # the last sequences may have no keys
        return torch.where(column < lengths[:, None], index, first[:, None]), lengths

    @cached_property
    def rows(self) -> Rows:
        """The packed rows: a view if `case.source` is "rows", otherwise a copy."""
        Q = self.q.reshape(-1, self.case.H, self.case.D)
        k, v = self.k.flatten(0, -3), self.v.flatten(0, -3)  # [keys, HKV, D]
        index, lengths = self.key_index
        if self.case.source == "rows":
            return Rows(Q, self.k[:, :, 0], self.v[:, :, 0], lengths)
        head = torch.arange(index.shape[0], device=index.device)[:, None] % k.shape[-2]
        if not k.shape[0]:
            return Rows(Q, k.new_zeros(*index.shape, k.shape[-1]), v.new_zeros(*index.shape, v.shape[-1]), lengths)
        K, V = k[index, head], v[index, head]
        past = torch.arange(index.shape[1], device=index.device) >= lengths[:, None]
        if bool(past.any()):
            K, V = K.masked_fill(past[..., None], 0), V.masked_fill(past[..., None], 0)
        return Rows(Q, K, V, lengths)

    @cached_property
    def varlen(self) -> VarlenRows:
        """The rows end to end, without padding: a view if `case.source` is "rows" or "varlen", otherwise a copy."""
        case = self.case
        Q = self.q.reshape(-1, case.H, case.D)
        lengths = self.key_index[1]
        cu = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
        cu[1:] = lengths.cumsum(0)
        if case.source == "varlen":
            k, v = (x.flatten(0, -3)[:, 0] for x in (self.k, self.v))
            return VarlenRows(Q, k, v, cu)
        K, V = self.rows.K, self.rows.V
        if case.source == "rows":
            return VarlenRows(Q, K.flatten(0, 1), V.flatten(0, 1), cu)
        keep = torch.arange(K.shape[1], device=K.device) < lengths[:, None]
        return VarlenRows(Q, K[keep], V[keep], cu)

    @cached_property
    def unique_bytes(self) -> int:
        """The least traffic in bytes: each selected key and value once (of one byte if `scales`), `q`, the output."""
        base, start, end = self.clamped
        keys, HKV = self.k.flatten(0, -3).shape[:2]
        # The number of spans over a key is a running sum over the keys: +1 where a span starts, -1 where it ends.
        head = torch.arange(base.numel(), device=base.device)[:, None] % HKV
        change = torch.zeros((keys + 1) * HKV, dtype=torch.int64, device=base.device)
        one = torch.ones(1, dtype=torch.int64, device=base.device)
        for at, step in ((start, one), (end, -one)):
            change.index_put_((((base[:, None] + at) * HKV + head).flatten(),), step, accumulate=True)
        seen = int((change.view(-1, HKV).cumsum(0) > 0).sum())
        size, case = self.q.element_size(), self.case
        cached = size if self.scales is None else 1
        return (seen * cached + self.q.numel() // case.D * size) * (case.D + case.Dv)

    @cached_property
    def flops(self) -> int:
        """FLOP of the two matrix products; a multiply-add counts as two."""
        return 2 * int(self.lengths.sum()) * self.case.H * (self.case.D + self.case.Dv)

    def clone(self) -> Problem:
        """A copy with its own memory, to rotate through. What was derived already is not computed again."""
        other = dataclasses.replace(self, q=self.q.clone(), k=self.k.clone(), v=self.v.clone())
        shared = ("clamped", "lengths", "key_index", "unique_bytes", "flops")
        known = {name: self.__dict__[name] for name in shared if name in self.__dict__} | {"extra": self.extra}
        if self.case.source != "rows" and "rows" in self.__dict__:
            rows = self.rows
            known["rows"] = Rows(other.q.view_as(rows.Q), rows.K.clone(), rows.V.clone(), rows.lengths)
        other.__dict__.update(known)  # cached_property keeps its values there
        for make in self.__dict__.get("_derived", {}):
            other.derived(make)
        return other

    def derived(self, make: Callable[[Problem], T]) -> T:
        """``make(self)``, computed once. A clone computes its own when it is made, so that no timed call does."""
        made = self.__dict__.setdefault("_derived", {})
        if make not in made:
            made[make] = make(self)
        return cast("T", made[make])

    def choosing(self, chosen: Tensor) -> Problem:
        """The same tensors with another selection: spans, or block indices if the problem has blocks."""
        if self.block_indices is None:
            return dataclasses.replace(self, ranges=chosen.to(self.ranges.dtype))
        assert self.block_size is not None
        spans = spans_of_blocks(chosen, self.block_size).to(self.ranges.dtype)
        return dataclasses.replace(self, block_indices=chosen.to(self.block_indices.dtype), ranges=spans)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """The same selection over other tensors."""
        return dataclasses.replace(self, q=q, k=k, v=v)

    def at(self, positions: Tensor) -> Problem:
        """The problem with only the queries at `positions [s]` of each batch entry, which keep their positions.

        Of packed sequences, `positions` are tokens in rising order.
        """
        at = (slice(None), positions) if self.cu_seqlens_pair is None else (positions,)
        blocks = None if self.block_indices is None else self.block_indices[at]
        where = self.positions().view(self.q.shape[:-2])[at]
        ranges = self.ranges[at]
        fewer = dataclasses.replace(self, q=self.q[at], ranges=ranges, block_indices=blocks, q_positions=where)
        if self.cu_seqlens_pair is None:
            return fewer
        cu_q, cu_k = self.cu_seqlens_pair
        left = torch.searchsorted(positions, cu_q.to(positions.dtype)).to(cu_q.dtype)
        return dataclasses.replace(fewer, cu_seqlens=left, cu_seqlens_k=cu_k)

    def positions(self) -> Tensor:
        """`[tokens]` int64: the position of each query among the keys of its sequence."""
        if self.q_positions is not None:
            return self.q_positions.reshape(-1).to(torch.int64)
        if self.cu_seqlens_pair is None:
            B, S, S_kv = self.q.shape[0], self.q.shape[1], self.k.shape[1]
            return (torch.arange(S, device=self.q.device) + S_kv - S).repeat(B)
        first, queries, keys = _sequences(*self.cu_seqlens_pair)
        return torch.arange(self.q.shape[0], device=self.q.device) - first[0] + keys - queries

    def unpack(self, rows: Tensor) -> Tensor:
        """`[N, H, …]` in row order (b, s, hkv) as `[B, S, HQ, …]`."""
        return rows.reshape(*self.q.shape[:-1], *rows.shape[2:])


def spans_of_blocks(blocks: Tensor, size: int) -> Tensor:
    """`[..., 2]` int64: the spans of block indices. Padding becomes an empty span."""
    start = blocks.to(torch.int64) * size
    return torch.stack((start, start + size), -1).masked_fill((blocks < 0)[..., None], 0)


def bounds(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`[tokens]`: the first key of a token's sequence, the number of its keys, and one past the last visible key."""
    if p.cu_seqlens_pair is not None:
        (_, base), _, kv_len = _sequences(*p.cu_seqlens_pair)
    else:
        B, S, S_kv = p.q.shape[0], p.q.shape[1], p.k.shape[1]
        base = (torch.arange(B, device=p.ranges.device) * S_kv).repeat_interleave(S)
        kv_len = torch.full_like(base, S_kv)
    return base, kv_len, (p.positions() + 1).clamp(min=0).minimum(kv_len) if p.causal else kv_len


def _sequences(cu_q: Tensor, cu_k: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """`[tokens]` int64, of a token's sequence: the first query and the first key, the number of queries and of keys."""
    cu_q, cu_k = cu_q.to(torch.int64), cu_k.to(torch.int64)
    lens = cu_q.diff()
    seq = torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens)
    return (cu_q[:-1][seq], cu_k[:-1][seq]), lens[seq], cu_k.diff()[seq]
