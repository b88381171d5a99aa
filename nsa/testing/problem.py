"""The tensors of one `Case`, and the plain index arithmetic that says which keys each row reads.

Nothing here calls the library's span code: the suite's idea of "the keys of a row" has to be its own, or a wrong
clamp would be wrong on both sides of a comparison.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nsa.testing.cases import Case


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

    `q [B,S,HQ,D]`, `k [B,S_kv,HKV,D]`, `v [B,S_kv,HKV,Dv]`, `ranges [B,S,HKV,n,2]`; with `cu_seqlens` the leading
    `[B,S]` is one token axis `[T]`. `block_indices [B,S,HKV,n]` where the selection is one of blocks, and then `ranges`
    says the same in token spans.
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
    scale: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # precomputed and untimed; shared with clones

    @property
    def selection(self) -> dict[str, Any]:
        """The selection keywords of `nsa.selection_attention` for this problem's own source."""
        if self.block_indices is not None:
            picked: dict[str, Any] = {"block_indices": self.block_indices, "block_size": self.block_size}
        else:
            picked = {"ranges": self.ranges}
        return picked | self.common

    @property
    def common(self) -> dict[str, Any]:
        """Keywords that do not depend on how the selection is written."""
        return {
            "causal": self.causal,
            "q_positions": self.q_positions,
            "cu_seqlens": self.cu_seqlens,
            "scale": self.scale,
        }

    @cached_property
    def key_index(self) -> tuple[Tensor, Tensor]:
        """`(index [N, Lmax], lengths [N])`: flat key rows of `k` (batch and position merged) in selection order."""
        HKV, n = self.ranges.shape[-3:-1]
        base, kv_len, limit = (x.repeat_interleave(HKV) for x in _bounds(self))  # per row: b, s, hkv
        spans = self.ranges.reshape(-1, n, 2).to(torch.int64)
        spans = spans.clamp(min=0).minimum(kv_len[:, None, None])
        start, end = spans[..., 0], spans[..., 1].minimum(limit[:, None])
        lens = (end - start).clamp(min=0)  # [N, n]
        lengths = lens.sum(1)
        before = lens.cumsum(1) - lens  # keys of the row that come before each span
        width = int(lengths.max()) if lengths.numel() else 0
        column = torch.arange(width, device=spans.device).expand(lens.shape[0], width)
        if not width or not n:
            return column, lengths
        # The span of a column is the first one whose keys end after it: empty spans end where they start.
        which = (torch.searchsorted((before + lens).contiguous(), column.contiguous(), right=True)).clamp(max=n - 1)
        index = base[:, None] + start.gather(1, which) + column - before.gather(1, which)
        return torch.where(column < lengths[:, None], index, base[:, None]), lengths

    @cached_property
    def rows(self) -> Rows:
        """This problem's rows packed (or a view, where the rows lie packed already)."""
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
        """The same rows end to end, without padding. A view where `case.source` is "rows" or "varlen"."""
        case = self.case
        Q = self.q.reshape(-1, case.H, case.D)
        lengths = self.key_index[1]
        cu = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
        cu[1:] = lengths.cumsum(0)
        if case.source == "varlen":
            return VarlenRows(Q, self.k[0, :, 0], self.v[0, :, 0], cu)
        K, V = self.rows.K, self.rows.V
        if case.source == "rows":
            return VarlenRows(Q, K.flatten(0, 1), V.flatten(0, 1), cu)
        keep = torch.arange(K.shape[1], device=K.device) < lengths[:, None]
        return VarlenRows(Q, K[keep], V[keep], cu)

    @cached_property
    def unique_bytes(self) -> int:
        """Least traffic in bytes: each selected key and value once, `q` once, the output once."""
        index, lengths = self.key_index
        keys, HKV = self.k.flatten(0, -3).shape[:2]
        seen = torch.zeros(max(keys, 1), HKV, dtype=torch.bool, device=index.device)
        head = torch.arange(index.shape[0], device=index.device)[:, None].expand_as(index) % HKV
        keep = torch.arange(index.shape[1], device=index.device) < lengths[:, None]
        seen[index[keep], head[keep]] = True
        size, case = self.q.element_size(), self.case
        return int(seen.sum()) * (case.D + case.Dv) * size + self.q.numel() // case.D * (case.D + case.Dv) * size

    @cached_property
    def flops(self) -> int:
        """Multiply-adds counted as two, of the two matrix products."""
        return 2 * int(self.key_index[1].sum()) * self.case.H * (self.case.D + self.case.Dv)

    def clone(self) -> Problem:
        """The same values in memory of their own: another buffer to rotate through."""
        other = dataclasses.replace(self, q=self.q.clone(), k=self.k.clone(), v=self.v.clone())
        known: dict[str, Any] = {"key_index": self.key_index, "unique_bytes": self.unique_bytes, "flops": self.flops}
        if self.case.source != "rows":
            rows = self.rows
            known["rows"] = Rows(other.q.view_as(rows.Q), rows.K.clone(), rows.V.clone(), rows.lengths)
        other.__dict__.update(known)  # where cached_property keeps them
        return other

    def unpack(self, rows: Tensor) -> Tensor:
        """`[N, H, …]` in row order (b, s, hkv) as `[B, S, HQ, …]`."""
        return rows.reshape(*self.q.shape[:-1], *rows.shape[2:])

    def poisoned(self) -> Tensor:
        """An output full of NaN: what a kernel forgets to write is seen."""
        return self.q.new_full((*self.q.shape[:-1], self.case.Dv), float("nan"))


def _bounds(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Per token, flat: offset of its sequence's first key, that sequence's key count, and where its own keys end."""
    device = p.ranges.device
    if p.cu_seqlens is not None:
        cu = p.cu_seqlens.to(torch.int64)
        lens = cu.diff()
        seq = torch.repeat_interleave(torch.arange(lens.numel(), device=device), lens)
        base, kv_len = cu[:-1][seq], lens[seq]
        t = torch.arange(p.q.shape[0], device=device) - base
    else:
        B, S, S_kv = p.q.shape[0], p.q.shape[1], p.k.shape[1]
        base = (torch.arange(B, device=device) * S_kv).repeat_interleave(S)
        kv_len = torch.full_like(base, S_kv)
        t = (torch.arange(S, device=device) + S_kv - S).repeat(B)
    if p.q_positions is not None:
        t = p.q_positions.reshape(-1).to(torch.int64)
    return base, kv_len, (t + 1).clamp(min=0).minimum(kv_len) if p.causal else kv_len


def draw(case: Case, device: torch.device, seed: int) -> Problem:
    """Inputs N(0,1) and the selection of `case` from one generator, so that a seed is all there is to replay."""
    g = torch.Generator(device).manual_seed(seed)
    ranges, blocks = _select(case, g)
    keys = sum(case.seqlens) or (int(ranges[..., 1].max()) if case.source == "varlen" else case.S_kv)
    lead = (sum(case.seqlens),) if case.seqlens else (case.B, case.S)
    cu = None
    if case.seqlens:
        cu = torch.tensor([0, *case.seqlens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=case.torch_dtype)

    return Problem(
        case=case,
        seed=seed,
        q=normal(*lead, case.HQ, case.D),
        k=normal(*lead[:-1], keys, case.HKV, case.D),
        v=normal(*lead[:-1], keys, case.HKV, case.Dv),
        ranges=ranges.to(torch.int64 if case.int64 else torch.int32),
        block_indices=blocks,
        block_size=None if blocks is None else case.block_size,
        causal=case.causal,
        q_positions=_positions(case, device) if case.positions else None,
        cu_seqlens=cu,
    )


def _positions(case: Case, device: torch.device) -> Tensor:
    """Query positions `[B, S]`, spread over the keys: neither bottom-right nor in order."""
    steps = torch.arange(case.B * case.S, device=device).view(case.B, case.S)
    return (steps * 7919 + case.S_kv // 2) % case.S_kv


def _visible(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per token `[tokens]`: the keys it may see, and the keys of its sequence."""
    if case.seqlens:
        t = torch.cat([torch.arange(n, device=device) for n in case.seqlens])
        total = torch.cat([torch.full((n,), n, device=device) for n in case.seqlens])
    else:
        t = (torch.arange(case.S, device=device) + case.S_kv - case.S).repeat(case.B)
        total = torch.full_like(t, case.S_kv)
    if case.positions:
        t = _positions(case, device).flatten()
    return (t + 1 if case.causal else total), total


def _select(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """`ranges [B,S,HKV,n,2]` (int64), and `block_indices [B,S,HKV,n]` (int32) where the source is blocks."""
    # Spans lie anywhere in the row's sequence: exact L for S = 1, which sees it all; else causality clamps some away.
    visible, extent = (x.repeat_interleave(case.HKV) for x in _visible(case, g.device))
    lead = (sum(case.seqlens), case.HKV) if case.seqlens else (case.B, case.S, case.HKV)
    if case.source == "blocks":
        blocks = _blocks(case, visible, extent, g).view(*lead, -1)
        start = blocks.to(torch.int64) * case.block_size
        return torch.stack((start, start + case.block_size), -1).masked_fill(blocks[..., None] < 0, 0), blocks
    if case.source == "rows":
        full = torch.tensor([0, case.L], device=g.device)
        return full.expand(*lead, 1, 2).contiguous(), None
    if case.source == "varlen":
        lens = torch.randint(0, case.L + 1, (case.N,), generator=g, device=g.device)
        lens[:1], lens[-1:] = case.L, 0 if case.N > 1 else case.L  # the longest and an empty row are always there
        ends = lens.cumsum(0)
        return torch.stack((ends - lens, ends), -1).view(*lead, 1, 2), None
    return _spans(case, extent, g).view(*lead, -1, 2), None


def _spans(case: Case, extent: Tensor, g: torch.Generator) -> Tensor:
    """Disjoint spans `[N, n, 2]` of `L` keys in all, with random gaps that fill `extent [N]`."""
    N, device = case.N, g.device
    n = {"few": 1, "many": 8, "mixed": 8}[case.dist]
    if case.dist == "mixed":
        used = torch.tensor([2, 4, 8], device=device)[torch.randint(0, 3, (N,), generator=g, device=device)]
        weight = torch.rand(N, n, generator=g, device=device) + 0.05
        weight = torch.where(torch.arange(n, device=device) < used[:, None], weight, 0.0)
        # Slots in random order, so that the unused (empty) ones lie anywhere.
        weight = weight.gather(1, torch.rand(N, n, generator=g, device=device).argsort(1))
        ends = (weight.cumsum(1) / weight.sum(1, keepdim=True) * case.L).round().long().clamp(max=case.L)
        ends[:, -1] = case.L
    else:
        ends = torch.arange(1, n + 1, device=device).mul(case.L).div(n, rounding_mode="floor").expand(N, n)
    lens = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    free = (extent - case.L).clamp(min=0)
    cuts = torch.rand(N, n, generator=g, device=device).sort(1).values
    gaps = (cuts * (free[:, None] + 1)).long().minimum(free[:, None])
    start = gaps + ends - lens
    return torch.stack((start, start + lens), -1)


def _blocks(case: Case, visible: Tensor, extent: Tensor, g: torch.Generator) -> Tensor:
    """Block indices `[N, n]` (int32): the first and the own one always if `ordered`; -1 where none is left."""
    N, size = case.N, case.block_size
    n, ordered = case.n, case.dist in ("decode", "prefill")
    last = ((visible if ordered else extent) - 1).clamp(min=0) // size  # the highest block worth reading
    count = -(-case.S_kv // size)
    score = torch.rand(N, count, generator=g, device=g.device)
    index = torch.arange(count, device=g.device)
    if ordered:
        own = (visible - 1).clamp(min=0) // size
        score[:, 0] = 2.0
        score.scatter_(1, own[:, None], 3.0)
    score = score.masked_fill(index > last[:, None], -1.0)
    top, picked = score.topk(min(n, count), dim=1)
    picked = picked.masked_fill(top < 0, -1)
    if picked.shape[1] < n:
        picked = torch.cat((picked, picked.new_full((N, n - picked.shape[1]), -1)), 1)
    return picked.sort(1).values.to(torch.int32)
