"""Our kernels as contestants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import nsa
from nsa.kernels.small_blocks import tiles as small_tiles
from nsa.kernels.union import tiles as union_tiles
from nsa.testing.contestants.contract import CACHES, Call, Contestant, Contract, Support
from nsa.testing.contestants.named import OF_CACHES, of_function
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem


def only(*sources: str) -> Support:
    def supports(case: Case) -> str | None:
        return None if case.source in sources else f"takes {' or '.join(sources)}, not {case.source}"

    return supports


def _packed(entry: Callable[..., Any], varlen: bool = False) -> Call:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        Q, K, V, ends = p.varlen if varlen else p.rows
        more = {"cu_seqlens": ends, "max_selected": p.case.L} if varlen else {}
        heads = None if out is None else out.view(-1, p.case.H, p.case.Dv)
        return entry(Q, K, V, **more, scale=p.scale, return_lse=return_lse, out=heads)

    return call


def front_door(backend: str, schedule: str = "auto", blocks: bool = False, bound: bool = True) -> Call:
    """`nsa.selection_attention` with blocks or spans, and with or without `max_selected`."""

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
    """The original layout has neither packed sequences nor positions."""
    return "has neither cu_seqlens nor q_positions" if case.seqlens or case.positions else None


OF = {"rows": "dense_group", "varlen": "varlen_group", "ranges": "ranges", "blocks": "blocks"}
"""The implementation that is timed, by source."""
OF_SOURCE = OF | {"blocks": "query_major"}
"""The implementation that parity runs over the whole matrix, by source."""


SMALL = "small_blocks"
BLOCKS, PACKED = only("blocks"), only("rows", "varlen")


def _in_unions(case: Case) -> str | None:
    """A tile of 16 to 64 rows holds the heads of two tokens or more."""
    found = union_tiles.select(90, case.torch_dtype.itemsize, case.H, case.D, case.Dv, case.n, case.block_size)
    return BLOCKS(case) or (None if found else "takes groups of which a tile holds two")


def _small(case: Case) -> str | None:
    return BLOCKS(case) or (None if case.block_size <= small_tiles.LARGEST else "takes small blocks")


OURS = {
    impl.name: impl
    for impl in (
        Contestant("dense_group", _packed(nsa.sel_attn_fwd_dense_group), "query_major", only("rows"), poison=True),
        Contestant("dense_per_head", _packed(nsa.sel_attn_fwd_dense), "per_head", only("rows"), poison=True),
        Contestant("varlen_group", _packed(nsa.sel_attn_fwd_varlen_group, True), "query_major", PACKED, poison=True),
        Contestant("varlen_per_head", _packed(nsa.sel_attn_fwd_varlen, True), "per_head", PACKED, poison=True),
        Contestant("ranges", front_door("triton"), "query_major", poison=True),
        Contestant("ranges_unbounded", front_door("triton", bound=False), "query_major", poison=True),
        Contestant("ranges_per_head", front_door("triton", "per_head"), "per_head", poison=True),
        Contestant("blocks", front_door("triton", "query_major", blocks=True), "query_major", BLOCKS, poison=True),
        Contestant("auto", front_door("triton", blocks=True), None, BLOCKS, poison=True),
        Contestant("query_major", front_door("triton", "query_major", blocks=True), "query_major", BLOCKS, poison=True),
        Contestant("query_major_ranges", front_door("triton", "query_major"), "query_major", poison=True),
        Contestant("key_major", front_door("triton", "key_major", blocks=True), "key_major", BLOCKS, poison=True),
        Contestant("union", front_door("triton", "union", blocks=True), "union", _in_unions, poison=True),
        Contestant("small_blocks", front_door("triton", SMALL, blocks=True), SMALL, _small, poison=True),
        Contestant("key_major_ranges", front_door("triton", "key_major"), "key_major", poison=True),
        Contestant("sdpa", front_door("sdpa"), poison=True),
        Contestant("sdpa_unbounded", front_door("sdpa", bound=False), poison=True),
        Contestant("reference", front_door("reference"), poison=True),
        Contestant("original", _original(nsa.selection_attention_triton), None, plain, lse=False),
        Contestant("original_packed", _original(nsa.grouped_selection_attention_packed), None, plain, lse=False),
    )
}


def kvcache(page_size: int | None) -> Contestant:
    """:func:`nsa.selection_attention_with_kvcache` over a full cache that holds a problem's keys."""

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        cache = p.derived(caches.maker(page_size))
        how = p.picked | cache.arguments
        how |= {"causal": p.causal, "scale": p.scale, "max_selected": p.case.L, "return_lse": return_lse, "out": out}
        return nsa.selection_attention_with_kvcache(p.q, cache.k, cache.v, **how, backend="triton")

    def supports(case: Case) -> str | None:
        if case.seqlens or case.positions or case.source not in ("blocks", "ranges"):
            return "takes batches of caches of one length only"
        return None if page_size is None or case.S_kv % page_size == 0 else f"takes whole pages of {page_size}"

    return Contestant("kvcache" if page_size is None else f"paged{page_size}", call, supports=supports, poison=True)


def _nsa(
    q: Tensor, k: Tensor, v: Tensor, *,
    cache_seqlens: Tensor | None = None, block_table: Tensor | None = None, **how: Any,
) -> Any:  # fmt: skip
    apart = OF_CACHES if cache_seqlens is None else ("q_positions", "cu_seqlens")
    how = {name: x for name, x in how.items() if name not in apart}
    if cache_seqlens is None:
        return nsa.selection_attention(q, k, v, **how, backend="triton")
    return nsa.selection_attention_with_kvcache(
        q, k, v, cache_seqlens=cache_seqlens, block_table=block_table, **how, backend="triton"
    )


CONTRACT = Contract(
    takes=("ranges", "blocks"), sequences=True, positions=True, caches=CACHES, fp8=True, ragged=True, lse="e",
    gradients=True, repeatable=True,
)  # fmt: skip
NSA = of_function("nsa", _nsa, CONTRACT, declared=True)
"""Our front doors, with a contract as other kernels declare it."""
