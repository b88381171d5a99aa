"""The two front doors: selection attention over spans or blocks, and the same over a KV cache.

Shape glossary. ``B`` batch, ``S`` query positions, ``T`` tokens of a varlen batch, ``S_kv`` keys, ``HQ`` query heads,
``HKV`` KV heads, ``G = HQ // HKV``, ``D`` query and key head dim, ``Dv`` value head dim, ``n`` spans or blocks per row,
``L`` keys selected in a row. A *row* is one (batch, query position, KV head): ``G`` query heads and one list of spans.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torch.compiler import is_compiling

from nsa import ops, settings
from nsa.call import UNREAD, Call
from nsa.hints import hide_wrong, refuse
from nsa.validate import lengths, number

CuSeqlens = Tensor | tuple[Tensor, Tensor]


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    causal: bool = ...,
    q_positions: Tensor | None = ...,
    scale: float | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = ...,
    block_indices: Tensor | None = ...,
    block_size: int | None = ...,
    causal: bool = ...,
    q_positions: Tensor | None = ...,
    scale: float | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    max_selected: int | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
    schedule: str = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@hide_wrong
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: int | None = None,
    causal: bool = True,
    q_positions: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: CuSeqlens | None = None,
    max_selected: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    schedule: str = "auto",
    out: Tensor | None = None,
    **wrong: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over the keys its row selected: NSA's selection branch (arXiv 2502.11089, section 3.3.2).

    Args:
        q: ``[B, S, HQ, D]``, or ``[T, HQ, D]`` with ``cu_seqlens``; fp16, bf16, fp32 or (reference, sdpa) fp64. Any
            strides, last dim contiguous. ``HQ = G * HKV`` with ``G`` from 1 to 128; ``D`` and ``Dv`` from 16 to 256.
        k: ``[B, S_kv, HKV, D]`` or ``[T_kv, HKV, D]``.
        v: ``[B, S_kv, HKV, Dv]`` or ``[T_kv, HKV, Dv]``.
        ranges: ``[B, S, HKV, n, 2]`` (varlen ``[T, HKV, n, 2]``) int32 or int64, half-open key spans, local to the
            row's sequence. Any values: spans are clamped to the sequence; a key listed twice counts twice.
        block_indices: ``[B, S, HKV, n]`` (varlen ``[T, HKV, n]``) int32 or int64, instead of ``ranges``; block ``b`` is
            ``[b * block_size, (b + 1) * block_size)``, negative is padding, in any slot.
        block_size: keys per block; with ``block_indices`` only.
        causal: clamp each span's end to ``t + 1``, where query ``s`` sits at ``t = S_kv - S + s`` (bottom-right).
        q_positions: ``[B, S]`` (varlen ``[T]``) int, ``t`` of each query instead. With ``causal=True`` only.
        scale: of the scores; ``1 / sqrt(D)`` if None.
        cu_seqlens: ``[B + 1]`` int cumulative lengths of varlen sequences, or a pair ``(cu_seqlens_q, cu_seqlens_k)``.
            The first sequence begins at token 0, whatever they say; tokens after the last one select nothing. Neither
            is looked up, which would sync.
        max_selected: host bound on ``L``, the keys of a row; decides route, tiles and splits, and saves packed SDPA its
            device sync. More keys than promised: undefined result, but no read outside the tensors.
        return_lse: also return the natural log-sum-exp of the scaled scores.
        backend: ``auto`` routes and falls back; ``triton``, ``sdpa`` (packed) and ``reference`` never fall back.
        schedule: of the Triton kernels: ``query_major`` holds the group of a row in a program, ``per_head`` one head,
            ``key_major`` a block of keys and all queries that selected it. ``auto`` takes the last for prefills with
            block indices where it was measured to be faster (:mod:`nsa.schedules`); a NaN or inf in a block that a row
            selected may reach it there, even if that key is clamped away for it.
        out: ``[..., HQ, Dv]`` to write to; each element has memory of its own.

    Gradients: of ``q``, ``k`` and ``v`` through both ``O`` and ``LSE``, in the dtype of each; the selection has none.
    Only ``reference`` (and ``sdpa`` under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``) is differentiable
    twice. They are the same bit by bit from run to run. A NaN or inf of a query or of ``dO`` may reach dK and dV of
    keys that are clamped away for that query, in a block that it selected. Long prompts with ``ranges`` want
    ``max_selected``, or the backward pass takes them in many small windows. ``torch.vmap`` is refused; other transforms
    of ``torch.func`` are served by ``sdpa`` or ``reference``, forward-mode AD by ``reference`` and not compiled.

    Under ``torch.autocast`` ``q``, ``k`` and ``v`` (not fp64) are cast to its dtype, as for SDPA.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]`` in ``q``'s dtype; with ``return_lse`` also ``LSE`` fp32
        ``[B, S, HQ]`` or ``[T, HQ]`` (fp64 for fp64). A row that selects nothing gives ``O = 0``, ``LSE = -inf``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above; says expected and got.
        RuntimeError: ``backend="triton"`` cannot serve the call; a kernel's gradient is differentiated again; a tensor
            is mapped by ``torch.vmap``; or packing without ``max_selected`` under
            ``torch.compile`` or CUDA graph capture.
    """
    if wrong:
        refuse(selection_attention, wrong)
    if cu_seqlens is None:
        cu_q = cu_k = None
    else:
        pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        if len(pair) != 2:
            raise TypeError(f"cu_seqlens: expected a tensor or a pair of tensors, got a tuple of {len(pair)}")
        cu_q, cu_k = pair
    if scale is not None and type(scale) is not float:
        scale = number(scale)
    tracing = is_compiling()
    call: Call = tuple.__new__(
        Call,
        (
            q, k, v, ranges, block_indices, q_positions, cu_q, cu_k, None, None, out, block_size, causal, scale,
            max_selected, backend, schedule, return_lse, UNREAD if tracing else settings.get(),
        ),
    )  # fmt: skip
    o, lse = ops.serve(call, tracing)
    if return_lse:
        assert lse is not None
        return o, lse
    return o


@overload
def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
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
    cache_seqlens: Tensor | int,
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


@hide_wrong
def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
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
    **wrong: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`nsa.selection_attention` over the keys a cache holds so far: decode, speculative decode, chunked prefill.

    It reads the caches and writes nothing to them: the caller appends the new keys and values before.

    Args:
        q: ``[B, S, HQ, D]``, the newest ``S`` positions of each sequence.
        k_cache: ``[B, S_max, HKV, D]``; with ``block_table`` ``[num_pages, page_size, HKV, D]``.
        v_cache: ``[B, S_max, HKV, Dv]`` or ``[num_pages, page_size, HKV, Dv]``.
        cache_seqlens: ``[B]`` int32 or int64, keys of each sequence, those of ``q`` included; may differ, and be 0.
            Query ``s`` sits at ``t = cache_seqlens[b] - S + s``; ``causal``, it sees nothing where that is negative.
            An int is the length of all sequences, from 0 to ``S_max`` (``width * page_size``). Each call fills a tensor
            with the int on the device, without a sync; a captured CUDA graph keeps the int that it was captured with.
        ranges: ``[B, S, HKV, n, 2]`` half-open key spans, by position in the sequence, whatever page that lies in.
        block_indices: ``[B, S, HKV, n]`` with ``block_size``, instead.
        block_table: ``[B, width]`` int32 or int64, the pages of each sequence in order. Pages need not be in order, nor
            belong to one sequence. A slice ``table[:, :width]`` of a wider table is read where it lies, without a copy.
        page_size: of the pages, to have it checked; it is ``k_cache.shape[1]``.
        causal, scale, max_selected, return_lse, backend, schedule, out: as for :func:`nsa.selection_attention`.

    Nothing outside the cache is read, whatever lengths and table say: lengths in a tensor are clamped to ``[0, S_max]``
    (``width * page_size``), and keys of a page outside ``[0, num_pages)`` are left out as if they were not selected.
    The setting ``debug_cache`` logs such lengths and pages, with their sequence. Lengths, table and selection may
    change in place between replays of a captured CUDA graph.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` in ``q``'s dtype; with ``return_lse`` also ``LSE`` ``[B, S, HQ]``, fp32 (fp64 of fp64).
        It has no gradient, and says so when one is asked for. ``torch.autocast`` casts nothing here: a cache has the
        dtype that it was filled in.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above; says expected and got.
        RuntimeError: a tensor has a tangent; ``torch.func`` transforms a tensor; or as
            :func:`nsa.selection_attention`.
    """
    if wrong:
        refuse(selection_attention_with_kvcache, wrong)
    if page_size is not None and (block_table is None or k_cache.shape[1:2] != (page_size,)):
        found = "no block_table" if block_table is None else f"k_cache of shape {list(k_cache.shape)}"
        raise ValueError(f"page_size: expected that of a paged k_cache, got {page_size} with {found}")
    if type(cache_seqlens) is not Tensor:
        cache_seqlens = lengths(cache_seqlens, q, k_cache, block_table)
    if scale is not None and type(scale) is not float:
        scale = number(scale)
    tracing = is_compiling()
    call: Call = tuple.__new__(
        Call,
        (
            q, k_cache, v_cache, ranges, block_indices, None, None, None, cache_seqlens, block_table, out, block_size,
            causal, scale, max_selected, backend, schedule, return_lse, UNREAD if tracing else settings.get(),
        ),
    )  # fmt: skip
    o, lse = ops.serve(call, tracing)
    if return_lse:
        assert lse is not None
        return o, lse
    return o
