"""The public functions: selection attention over spans or blocks, and the same over a KV cache.

Shape glossary: ``B`` batch, ``S`` query positions, ``T`` tokens of a varlen batch, ``S_kv`` keys, ``HQ`` query heads,
``HKV`` KV heads, ``G = HQ // HKV``, ``D`` query and key head dim, ``Dv`` value head dim, ``n`` spans or blocks per row,
``L`` keys selected in a row. A *row* is one (batch, query position, KV head): ``G`` query heads and one list of spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling  # other tracers are dispatch modes, see `nsa.ops`

from nsa import ops, settings
from nsa.call import UNREAD, Call
from nsa.hints import hide_wrong, refuse
from nsa.validate import check_tensors, lengths, number

if TYPE_CHECKING:
    from typing_extensions import Unpack

CuSeqlens = Tensor | tuple[Tensor, Tensor]


class Options(TypedDict, total=False):
    """Keyword arguments that both functions take, for type checkers."""

    ranges: Tensor | None
    block_indices: Tensor | None
    block_size: int | None
    causal: bool
    scale: float | None
    max_selected: int | None
    backend: str
    schedule: str
    out: Tensor | None


def _pair(cu_seqlens: CuSeqlens) -> tuple[Tensor, Tensor]:
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2:
        raise TypeError(f"cu_seqlens: expected a tensor or a pair of tensors, got a tuple of {len(pair)}")
    return pair


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_positions: Tensor | None = ..., cu_seqlens: CuSeqlens | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_positions: Tensor | None = ..., cu_seqlens: CuSeqlens | None = ...,
    return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@hide_wrong
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    ranges: Tensor | None = None, block_indices: Tensor | None = None, block_size: int | None = None,
    causal: bool = True, q_positions: Tensor | None = None, scale: float | None = None,
    cu_seqlens: CuSeqlens | None = None, max_selected: int | None = None, return_lse: bool = False,
    backend: str = "auto", schedule: str = "auto", out: Tensor | None = None,
    **wrong: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of each query over the keys that its row selects: NSA's selection branch (arXiv 2502.11089, 3.3.2).

    A row is one (batch, query, KV head). Its ``G = HQ / HKV`` query heads share one selection.

    Args:
        q: ``[B, S, HQ, D]``, or ``[T, HQ, D]`` with ``cu_seqlens``. Its last dim must be contiguous, as in ``k`` and
            ``v``; other strides are free. fp16, bf16 or fp32; backends ``reference`` and ``sdpa`` also take fp64.
            ``G`` is 1 to 128, ``D`` and ``Dv`` are 16 to 256.
        k: ``[B, S_kv, HKV, D]`` or ``[T_kv, HKV, D]``.
        v: ``[B, S_kv, HKV, Dv]`` or ``[T_kv, HKV, Dv]``.
        ranges: ``[B, S, HKV, n, 2]`` (varlen ``[T, HKV, n, 2]``) int32 or int64: half-open key spans, counted from the
            start of the sequence and clamped to it. A key in two spans of a row counts twice. An axis ``HKV`` of 1,
            here and in ``block_indices``, means one list for all KV heads.
        block_indices: ``[B, S, HKV, n]`` (varlen ``[T, HKV, n]``) int32 or int64, instead of ``ranges``. Block ``b`` is
            the span ``[b * block_size, (b + 1) * block_size)``. A negative index, in any slot, is padding.
        block_size: keys per block; required with ``block_indices``, refused with ``ranges``.
        causal: clamp each span's end to ``t + 1``, where ``t = S_kv - S + s`` is the position of query ``s``
            (varlen: ``S_kv``, ``S`` and ``s`` are those of its sequence).
        q_positions: ``[B, S]`` (varlen ``[T]``) int32 or int64: replaces ``t`` of each query; only if ``causal``.
        scale: factor of the scores; ``1 / sqrt(D)`` if None.
        cu_seqlens: ``[B + 1]`` int32 or int64, cumulative lengths of varlen sequences, or a pair ``(cu_seqlens_q,
            cu_seqlens_k)``. The values are not checked, because that would sync. The first sequence always begins at
            token 0, and tokens after the last sequence select nothing.
        max_selected: upper bound, known to the host, of the number of keys that a row selects, duplicates included. It
            decides route, tiles and splits, and saves packed SDPA a device sync. If a row selects more keys, its
            result is undefined, but no read leaves the tensors.
        return_lse: also return the natural log-sum-exp of the scaled scores.
        backend: ``auto`` chooses by thresholds measured on the GPU, and falls back to packed SDPA where a kernel
            cannot run or fails. ``triton``, ``sdpa`` (packed SDPA) and ``reference`` never fall back.
        schedule: what a program of a Triton kernel computes. ``query_major``: one row with all heads of its group;
            ``per_head``: one head of a row; ``key_major``: one block of keys, for all queries that selected it;
            ``union`` (block indices, up to 32 heads a group, 8 in fp32, no fp8): a few neighbouring queries, for which
            the program reads the union of their blocks, each block once. Queries that share too few blocks are left to
            key_major or query_major. ``small_blocks`` (blocks of at most 16 keys): one row, or a few neighbouring
            queries, with many blocks gathered at a time. ``auto`` uses small_blocks, in fp16 and bf16, for rows of more
            than 64 such blocks, and union or key-major for prefills with block indices where measurements show that
            they are faster (`nsa.routing`).
            In key-major, a NaN or inf of a key may also reach rows that selected the key's block but must not see it.
        out: ``[..., HQ, Dv]``, memory for the result; its elements must not overlap, nor share memory with an input.

    Gradients flow from ``O`` and from ``LSE`` to ``q``, ``k`` and ``v``, in the dtype of each. The selection has no
    gradient. Gradients are bitwise equal from run to run. A NaN or inf of a query or of its ``dO`` may also reach dK
    and dV of keys that the query must not see, if they are in a block that it selected. For long prompts with
    ``ranges``, pass ``max_selected``; otherwise the backward pass works in many small windows, which is slow. Only
    ``reference``, and ``sdpa`` under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``, can be differentiated twice.

    ``torch.vmap`` is refused. Under other transforms of ``torch.func`` calls run on ``sdpa`` or ``reference``. In
    forward-mode AD they run on ``reference``, and must not be compiled. ``torch.autocast`` casts ``q``, ``k`` and ``v``
    as it casts those of SDPA; fp64 stays fp64.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]`` in ``q``'s dtype. With ``return_lse`` also ``LSE``, fp32 (fp64 for
        fp64), ``[B, S, HQ]`` or ``[T, HQ]``. A row that selects nothing gives ``O = 0`` and ``LSE = -inf``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above. The text says what was expected.
        RuntimeError: ``backend="triton"`` cannot serve the call; a kernel's gradient is differentiated again;
            ``torch.vmap`` maps a tensor; or packed SDPA gets ``ranges`` without ``max_selected`` under
            ``torch.compile`` or CUDA graph capture.
    """
    if wrong:
        refuse(selection_attention, wrong)
    cu_q, cu_k = (None, None) if cu_seqlens is None else _pair(cu_seqlens)
    if scale is not None and type(scale) is not float:
        scale = number(scale)
    tracing = is_dynamo_compiling()
    call: Call = tuple.__new__(
        Call,
        (
            q, k, v, ranges, block_indices, q_positions, cu_q, cu_k, None, None, None, None, out, block_size, causal,
            scale, max_selected, None, backend, schedule, return_lse, UNREAD if tracing else settings.get(),
        ),
    )  # fmt: skip
    o, lse = ops.serve(call, tracing)
    return o if lse is None else (o, lse)


@overload
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor | int, block_table: Tensor | None = ..., page_size: int | None = ...,
    cu_seqlens_q: Tensor | None = ..., max_seqlen_q: int | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip


@overload
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor | int, block_table: Tensor | None = ..., page_size: int | None = ...,
    cu_seqlens_q: Tensor | None = ..., max_seqlen_q: int | None = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ...,
    return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@hide_wrong
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    cache_seqlens: Tensor | int,
    ranges: Tensor | None = None, block_indices: Tensor | None = None, block_size: int | None = None,
    block_table: Tensor | None = None, page_size: int | None = None,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    causal: bool = True, scale: float | None = None, max_selected: int | None = None, return_lse: bool = False,
    backend: str = "auto", schedule: str = "auto", out: Tensor | None = None,
    **wrong: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`nsa.selection_attention` over a KV cache: decode, speculative decode, chunked prefill.

    The function only reads the caches. The caller appends the new keys and values before the call.

    Args:
        q: ``[B, S, HQ, D]``, the newest ``S`` positions of each sequence. Or, with ``cu_seqlens_q``, ``[T, HQ, D]`` of
            a ragged batch, whose sequences have different numbers of queries.
        k_cache: ``[B, S_max, HKV, D]``; with ``block_table`` ``[num_pages, page_size, HKV, D]``. In ``q``'s dtype, or
            ``float8_e4m3fn`` with fp16 or bf16 ``q``.
        v_cache: ``[B, S_max, HKV, Dv]`` or ``[num_pages, page_size, HKV, Dv]``, in ``k_cache``'s dtype.
        cache_seqlens: ``[B]`` int32 or int64, keys of each sequence, those of its queries included; 0 is allowed. Query
            ``s`` is at position ``t = cache_seqlens[b] - S + s``; in a ragged batch ``S`` is the sequence's number of
            queries. If ``causal``, a query with a negative ``t`` sees no key.
            An int, 0 to ``S_max`` (with pages ``width * page_size``), is the length of all sequences; a captured graph
            keeps the int of its capture.
        ranges: ``[B, S, HKV, n, 2]`` (ragged ``[T, HKV, n, 2]``), half-open key spans. Positions count in the sequence,
            not in a page.
        block_indices: ``[B, S, HKV, n]`` (ragged ``[T, HKV, n]``) with ``block_size``, instead of ``ranges``.
        block_table: ``[B, width]`` int32 or int64, the page numbers of each sequence, in the order of its positions.
            Pages may lie in any order in the cache, and sequences may share pages. A slice ``wider[:, :width]`` is read
            without a copy.
        page_size: optional, only compared with ``k_cache.shape[1]``.
        cu_seqlens_q: ``[B + 1]`` int32 or int64, ``B`` up to 16,384: cumulative numbers of queries. Sequence ``b`` has
            the tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``q``, in order. The values are not checked,
            because that would sync. The first sequence always begins at token 0. A sequence may have no queries. Tokens
            after the last sequence select nothing, so a captured graph may have more tokens than a batch uses.
        max_seqlen_q: upper bound, known to the host, of the queries of a sequence. It decides only which kernels run.
            Without it, a call is planned as if each sequence had ``T / B`` queries. A wrong bound changes no result
            beyond rounding. In calls of key-major and union, query-major serves sequences of at most 8 queries.
        k_scale, v_scale: fp32 on ``q``'s device, ``[]`` or ``[1]`` (one number for all heads) or ``[HKV]``; only with
            a ``float8_e4m3fn`` cache. A key is its entry of the cache times ``k_scale``, a value its entry times
            ``v_scale``. None means 1.
        causal, scale, max_selected, return_lse, backend, schedule, out: as for :func:`nsa.selection_attention`.

    No read leaves the cache. Lengths are clamped to ``[0, S_max]`` (with pages ``width * page_size``). Keys in a page
    outside ``[0, num_pages)`` count as not selected. The setting ``debug_cache`` logs such lengths and pages. Lengths,
    table, ``cu_seqlens_q``, selection and scales may change in place between replays of a captured CUDA graph.

    Returns:
        ``O`` ``[B, S, HQ, Dv]`` or ``[T, HQ, Dv]`` in ``q``'s dtype. With ``return_lse`` also ``LSE`` ``[B, S, HQ]`` or
        ``[T, HQ]``, fp32 (fp64 for fp64). A row that sees no key gives ``O = 0`` and ``LSE = -inf``.
        Calling ``backward()`` on a result raises ``RuntimeError``. ``torch.autocast`` casts nothing, because the dtype
        of a cache is fixed.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is not as above. The text says what was expected.
        RuntimeError: a tensor is a dual tensor of forward-mode AD; ``torch.func`` transforms a tensor; or as for
            :func:`nsa.selection_attention`.
    """
    if wrong:
        refuse(selection_attention_with_kvcache, wrong)
    if page_size is not None and type(k_cache) is not Tensor:
        check_tensors(k_cache=k_cache)
    if page_size is not None and (block_table is None or k_cache.shape[1:2] != (page_size,)):
        expected = "None without block_table" if block_table is None else f"shape[1] of k_cache {list(k_cache.shape)}"
        raise ValueError(f"page_size: expected {expected}, got {page_size}")
    if type(cache_seqlens) is not Tensor:
        cache_seqlens = lengths(cache_seqlens, q, k_cache, block_table, cu_seqlens_q)
    if scale is not None and type(scale) is not float:
        scale = number(scale)
    if isinstance(k_scale, Tensor):
        k_scale = k_scale.resolve_neg()  # kernels would read a negative view as it lies in memory
    if isinstance(v_scale, Tensor):
        v_scale = v_scale.resolve_neg()
    tracing = is_dynamo_compiling()
    call: Call = tuple.__new__(
        Call,
        (
            q, k_cache, v_cache, ranges, block_indices, None, cu_seqlens_q, None, cache_seqlens, block_table, k_scale,
            v_scale, out, block_size, causal, scale, max_selected, max_seqlen_q, backend, schedule, return_lse,
            UNREAD if tracing else settings.get(),
        ),
    )  # fmt: skip
    o, lse = ops.serve(call, tracing)
    return o if lse is None else (o, lse)
