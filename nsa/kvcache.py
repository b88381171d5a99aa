"""Serving: selection attention over a KV cache, contiguous or in pages. Letters of shapes as in `attention.py`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from nsa import dispatch, garbage, ops, settings
from nsa.transforms import any_autocast_enabled, autocast_dtype, transformed, transforms_active
from nsa.validate import check_scale, check_tensors


@overload
def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    block_table: Tensor | None = ...,
    page_size: int | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    block_table: Tensor | None = ...,
    page_size: int | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    ranges: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    block_table: Tensor | None = None,
    page_size: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    max_selected: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    schedule: str = "auto",
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`nsa.selection_attention` over the keys a cache holds so far: decode, speculative decode, chunked prefill.

    It reads the caches and writes nothing to them: the caller appends the new keys and values before.

    Args:
        q: ``[B, S, HQ, D]``, the newest ``S`` positions of each sequence.
        k_cache: ``[B, S_max, HKV, D]``; with ``block_table`` ``[num_pages, page_size, HKV, D]``.
        v_cache: ``[B, S_max, HKV, Dv]`` or ``[num_pages, page_size, HKV, Dv]``.
        cache_seqlens: ``[B]`` int32 or int64, keys of each sequence, those of ``q`` included; may differ, and be 0.
            Query ``s`` sits at ``t = cache_seqlens[b] - S + s``; ``causal``, it sees nothing where that is negative.
        ranges: ``[B, S, HKV, n, 2]`` half-open key spans, by position in the sequence, whatever page that lies in.
        block_indices: ``[B, S, HKV, n]`` with ``block_size``, instead.
        block_table: ``[B, width]`` int32 or int64, the pages of each sequence in order. Pages need not be in order, nor
            belong to one sequence.
        page_size: of the pages, to have it checked; it is ``k_cache.shape[1]``.
        causal, scale, max_selected, return_lse, backend, schedule, out: as for :func:`nsa.selection_attention`.

    Nothing outside the cache is read, whatever lengths and table say: lengths are clamped to ``[0, S_max]`` (``width *
    page_size``), and keys of a page outside ``[0, num_pages)`` are left out as if they were not selected. The setting
    ``debug_cache`` logs such lengths and pages, with their sequence. Lengths, table and selection may change in place
    between replays of a captured CUDA graph.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` in ``q``'s dtype; with ``return_lse`` also ``LSE`` ``[B, S, HQ]``, fp32 (fp64 of fp64).
        No gradient. ``torch.autocast`` casts nothing here: a cache has the dtype that it was filled in.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above; says expected and got.
        RuntimeError: a gradient is wanted, in reverse or forward mode; ``torch.func`` transforms a tensor; or as
            :func:`nsa.selection_attention`.
    """
    try:
        if page_size is not None and (block_table is None or k_cache.shape[1:2] != (page_size,)):
            found = "no block_table" if block_table is None else f"k_cache of shape {list(k_cache.shape)}"
            raise ValueError(f"page_size: expected that of a paged k_cache, got {page_size} with {found}")
        if cache_seqlens is None:  # to the plan that would be a call without a cache
            check_tensors(cache_seqlens=cache_seqlens)  # type: ignore[unreachable]
        if scale is not None and type(scale) is not float:
            check_scale(scale)
        wants_grad = is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad)
    except AttributeError:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
        raise
    if wants_grad:
        raise RuntimeError(
            "selection_attention_with_kvcache has no gradient: call it under torch.no_grad(), or train with "
            "selection_attention"
        )
    optional = {"ranges": ranges, "block_indices": block_indices, "block_table": block_table, "out": out}
    unusual = is_compiling() or any_autocast_enabled() or transforms_active() or forward_ad._current_level >= 0
    if unusual or q.__class__ is not Tensor:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
        if not is_compiling() and autocast_dtype(q.device) is not None:
            with torch.autocast(q.device.type, enabled=False):
                return selection_attention_with_kvcache(  # type: ignore[call-overload, misc, no-any-return]
                    q, k_cache, v_cache, cache_seqlens=cache_seqlens, ranges=ranges, block_indices=block_indices,
                    block_size=block_size, block_table=block_table, page_size=page_size, causal=causal, scale=scale,
                    max_selected=max_selected, return_lse=return_lse, backend=backend, schedule=schedule, out=out,
                )  # fmt: skip
        if not is_compiling() and transformed(q, k_cache, v_cache, cache_seqlens, *optional.values()):
            raise RuntimeError(
                "selection_attention_with_kvcache has no rule for transforms of torch.func, nor for forward-mode AD"
            )
        o, lse = torch.ops.nsa.selection_attention_with_kvcache(
            q, k_cache, v_cache, cache_seqlens, ranges, block_indices, block_size, block_table, causal, scale,
            max_selected, backend, schedule,
        )  # fmt: skip
        o = ops.into(out, o)
        return (o, lse) if return_lse else o
    try:
        planned = dispatch.plan(
            q, k_cache, v_cache, ranges, block_indices, block_size, causal, None, None, None, max_selected, out,
            backend, schedule, cache_seqlens, block_table,
        )  # fmt: skip
    except AttributeError:
        given_too = {name: x for name, x in optional.items() if x is not None}
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, **given_too)
        raise
    if settings.get().debug_cache:
        garbage.report(cache_seqlens, block_table, q.shape[1], k_cache.shape[0], k_cache.shape[1], causal)
    given = (
        q, k_cache, v_cache, ranges, block_indices, block_size, causal, None, scale, None, None, return_lse, out,
        cache_seqlens, block_table,
    )  # fmt: skip
    o, lse = dispatch.run(planned, given)
    if return_lse:
        assert lse is not None
        return o, lse
    return o


assert ops  # registers torch.ops.nsa
