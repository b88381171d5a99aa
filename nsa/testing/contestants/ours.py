"""What can be tested: our kernels by route, and SDPA in every layout (third parties: `named.py`).

Each is an `Impl`: a name, a call on a `Problem` that returns the output in FlashAttention layout, the route whose
kernel it must launch (ours only), and which cases it cannot do, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
import nsa.kernels
from nsa.reference import sdpa_rows
from nsa.testing.judge.forward import Result
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem
from nsa.trial import poisoned_workspace

Call = Callable[[Problem, bool, "Tensor | None"], Any]
Support = Callable[[Case], "str | None"]


def always(case: Case) -> str | None:
    return None


class OtherWork(NamedTuple):
    """Work that something else than the selection is: `flops(p)` of its matrix products, and `check(p, out)`, which
    raises AssertionError where it is wrong.
    """

    flops: Callable[[Problem], int]
    check: Callable[[Problem, Tensor], None]


@dataclass(frozen=True)
class Impl:
    """One implementation.

    `supports(case)` is None, or why it cannot run that case. `route` names the kernel that has to be launched.
    `poison`: the call takes `out=`. `other`: what it computes, if not the selection.
    """

    name: str
    call: Call
    route: str | None = None
    supports: Support = always
    poison: bool = False
    lse: bool = True
    other: OtherWork | None = None

    def run(self, p: Problem, return_lse: bool = False, out: Tensor | None = None) -> Result:
        """`O [B,S,HQ,Dv]`, with `return_lse` also `LSE [B,S,HQ]`; `NotImplementedError` means unsupported."""
        result = self.call(p, return_lse, out)
        if isinstance(result, tuple):
            return result[0].view_as(p.q[..., :1].expand(*p.q.shape[:-1], p.case.Dv)), result[1].view(p.q.shape[:-1])
        assert isinstance(result, Tensor)
        return result.view(*p.q.shape[:-1], p.case.Dv)

    def run_counted(self, p: Problem, return_lse: bool = False) -> tuple[Result, Counter[str]]:
        """Run into an output full of NaN (where the call takes one), and count which kernels that launched."""
        before = nsa.kernels.launches.copy()
        out = p.poisoned() if self.poison else None
        with poisoned_workspace("key_major") if self.route == "key_major" else contextlib.nullcontext():
            result = self.run(p, return_lse and self.lse, out)
        if out is not None:
            got = result[0] if isinstance(result, tuple) else result
            assert got.data_ptr() == out.data_ptr(), f"{self.name}: expected the result in out=, got another tensor"
        return result, nsa.kernels.launches - before

    def __str__(self) -> str:
        return self.name


def only(*sources: str) -> Support:
    def supports(case: Case) -> str | None:
        return None if case.source in sources else f"takes {' or '.join(sources)}, not {case.source}"

    return supports


def _heads(out: Tensor | None, p: Problem) -> Tensor | None:
    return None if out is None else out.view(-1, p.case.H, p.case.Dv)


def _dense(entry: Callable[..., Any]) -> Call:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        Q, K, V, _ = p.rows
        return entry(Q, K, V, scale=p.scale, return_lse=return_lse, out=_heads(out, p))

    return call


def _varlen(entry: Callable[..., Any]) -> Call:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        Q, K, V, cu = p.varlen
        L = p.case.L
        return entry(Q, K, V, cu, max_selected=L, scale=p.scale, return_lse=return_lse, out=_heads(out, p))

    return call


def front_door(backend: str, schedule: str = "auto", blocks: bool = False, bound: bool = True) -> Call:
    """`nsa.selection_attention`, told `blocks` or spans, and with or without the host's bound on `L`."""

    entry: Callable[..., Any] = nsa.selection_attention

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        args = p.selection if blocks else {"ranges": p.ranges} | p.common
        if bound:
            args["max_selected"] = p.case.n * p.case.block_size if p.case.source == "blocks" else p.case.L
        return entry(p.q, p.k, p.v, **args, backend=backend, schedule=schedule, return_lse=return_lse, out=out)

    return call


def _original(entry: Callable[..., Any]) -> Call:
    """The original wrapper's layout: `Q [B,S,HKV,G,D]`, `K [B,HKV,S_kv,D]`."""

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        B, S, HKV = p.ranges.shape[:3]
        Q = p.q.view(B, S, HKV, -1, p.case.D)
        return entry(Q, p.k.transpose(1, 2), p.v.transpose(1, 2), p.ranges, causal=p.causal)

    return call


def plain(case: Case) -> str | None:
    """What the original layout and the contract for third parties know."""
    return "has neither cu_seqlens nor q_positions" if case.seqlens or case.positions else None


OF = {"rows": "dense_group", "varlen": "varlen_group", "ranges": "ranges", "blocks": "blocks"}
"""Our implementation that is timed, by where keys come from."""


OURS = {
    impl.name: impl
    for impl in (
        Impl("dense_group", _dense(nsa.sel_attn_fwd_dense_group), "dense_group", only("rows"), poison=True),
        Impl("dense_per_head", _dense(nsa.sel_attn_fwd_dense), "per_head", only("rows"), poison=True),
        Impl("varlen_group", _varlen(nsa.sel_attn_fwd_varlen_group), "varlen_group", only("rows", "varlen"), True),
        Impl("varlen_per_head", _varlen(nsa.sel_attn_fwd_varlen), "per_head", only("rows", "varlen"), True),
        Impl("ranges", front_door("triton"), "ranges", poison=True),
        Impl("ranges_unbounded", front_door("triton", bound=False), "ranges", poison=True),
        Impl("ranges_per_head", front_door("triton", "per_head"), "per_head", poison=True),
        Impl("blocks", front_door("triton", "query_major", blocks=True), "blocks", only("blocks"), poison=True),
        Impl("auto", front_door("triton", blocks=True), None, only("blocks"), poison=True),
        Impl("query_major", front_door("triton", "query_major", blocks=True), "blocks", only("blocks"), poison=True),
        Impl("query_major_ranges", front_door("triton", "query_major"), "ranges", poison=True),
        Impl("key_major", front_door("triton", "key_major", blocks=True), "key_major", only("blocks"), poison=True),
        Impl("key_major_ranges", front_door("triton", "key_major"), "key_major", poison=True),
        Impl("sdpa", front_door("sdpa"), poison=True),
        Impl("sdpa_unbounded", front_door("sdpa", bound=False), poison=True),
        Impl("reference", front_door("reference"), poison=True),
        Impl("original", _original(nsa.selection_attention_triton), None, plain, lse=False),
        Impl("original_packed", _original(nsa.grouped_selection_attention_packed), None, plain, lse=False),
    )
}


def _unequal(case: Case) -> str | None:
    """Plain SDPA over packed rows has no mask that its fast kernels take."""
    equal = case.source == "rows" or (case.S == 1 and not case.seqlens and case.source != "varlen")
    return None if equal else "rows of different lengths"


def _rows_sdpa(layout: str, backend: SDPBackend | None) -> Call:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        Q, K, V, _ = p.rows
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return sdpa_rows(Q, K, V, None, p.scale or p.case.D**-0.5, layout)

    return call


def _gather_gqa(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """From cache and spans: `gather` by an index made beforehand, then SDPA with `enable_gqa`. One query each."""
    B, S_kv, HKV = p.k.shape[:3]
    if "gather" not in p.extra:
        local = p.key_index[0].view(B, HKV, -1) - torch.arange(B, device=p.k.device)[:, None, None] * S_kv
        p.extra["gather"] = local.transpose(1, 2)[..., None].contiguous()  # [B, L, HKV, 1]
    index = p.extra["gather"]
    K, V = (x.gather(1, index.expand(-1, -1, -1, x.shape[-1])).transpose(1, 2) for x in (p.k, p.v))
    q = p.q.transpose(1, 2)  # [B, HQ, 1, D]
    return F.scaled_dot_product_attention(q, K, V, scale=p.scale, enable_gqa=True).transpose(1, 2).contiguous()


def _select_heads(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """From cache and spans: `index_select` of whole vectors by an index made beforehand, heads as queries."""
    HKV = p.k.shape[-2]
    if "select" not in p.extra:
        index = p.key_index[0]
        head = torch.arange(index.shape[0], device=index.device)[:, None] % HKV
        p.extra["select"] = (index * HKV + head).flatten(), index.shape
    index, shape = p.extra["select"]
    K, V = (x.reshape(-1, x.shape[-1]).index_select(0, index).view(*shape, -1) for x in (p.k, p.v))
    return sdpa_rows(p.q.reshape(-1, p.case.H, p.case.D), K, V, None, p.scale or p.case.D**-0.5, "heads_as_queries")


def _index_select_heads(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """From cache and spans, the index made in plain torch too: all the work of our fallback, small calls included."""
    HKV = p.k.shape[-2]
    index, lengths = dataclasses.replace(p).key_index  # anew, not the cached one
    mask = torch.arange(index.shape[1], device=index.device) < lengths[:, None] if _unequal(p.case) else None
    head = torch.arange(index.shape[0], device=index.device)[:, None] % HKV
    flat = (index * HKV + head).flatten()
    K, V = (x.reshape(-1, x.shape[-1]).index_select(0, flat).view(*index.shape, -1) for x in (p.k, p.v))
    return sdpa_rows(p.q.reshape(-1, p.case.H, p.case.D), K, V, mask, p.scale or p.case.D**-0.5, "heads_as_queries")


def _row_loop(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """What the original fallback was, at its best: one sync, then slices, `cat` and one SDPA per row."""
    result = p.q.new_zeros(*p.q.shape[:-1], p.case.Dv)
    G, S_kv = p.case.H, p.k.shape[1]
    for b, row in enumerate(p.ranges.tolist()):
        for s, heads in enumerate(row):
            t = S_kv - p.q.shape[1] + s if p.causal else S_kv - 1
            for h, spans in enumerate(heads):
                cut = [(start, min(end, t + 1)) for start, end in spans if start < min(end, t + 1)]
                K, V = (torch.cat([x[b, start:end, h] for start, end in cut]) for x in (p.k, p.v))
                q = p.q[b, s, h * G : (h + 1) * G]
                result[b, s, h * G : (h + 1) * G] = F.scaled_dot_product_attention(
                    q[None, None], K[None, None], V[None, None], scale=p.scale
                )[0, 0]
    return result


def packed_layouts(device: torch.device) -> dict[str, Impl]:
    """SDPA over rows already packed, in each layout and backend that this kind of device has (yardsticks.md)."""
    flash, cudnn, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    layouts: list[tuple[str, str, SDPBackend | None]] = [
        ("expanded_flash", "expanded", flash),
        ("heads_as_queries_flash", "heads_as_queries", flash),
        ("enable_gqa", "enable_gqa", None),
    ]
    if device.type == "cuda":
        layouts.insert(2, ("heads_as_queries_cudnn", "heads_as_queries", cudnn))
        layouts.insert(3, ("heads_as_queries_efficient", "heads_as_queries", efficient))
    return {
        name: Impl(name, _rows_sdpa(layout, backend), supports=_unequal, lse=False) for name, layout, backend in layouts
    }


PACKED = Impl("packed", _rows_sdpa("heads_as_queries", None), supports=_unequal, lse=False)
"""SDPA on packed rows as our own fallback calls it: torch picks the backend."""

END_TO_END = {
    "gather_gqa": Impl("gather_gqa", _gather_gqa, supports=_unequal, lse=False),
    "select_heads": Impl("select_heads", _select_heads, supports=_unequal, lse=False),
}
"""From cache and spans, packing included, in plain torch. `OURS["sdpa"]` is our fallback doing the same."""

FROM_SPANS = Impl("index_select_heads", _index_select_heads, lse=False)
"""The same with the index made anew: what a CPU, where small calls are most of the time, is compared with."""

ROW_LOOP = Impl("row_loop", _row_loop, supports=plain, lse=False)
