"""`nsa.select_blocks`: scores the blocks of keys for each query, and chooses the best."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nsa import debug, failures, routing, settings, torch_modes
from nsa.hints import hide_wrong, refuse
from nsa.selecting import oracle, plain
from nsa.selecting.request import BACKENDS, Request, request
from nsa.validate import check_choice


@hide_wrong
def select_blocks(
    q: Tensor, k: Tensor, *,
    score: str = "max", n: int, block_size: int, lists: int | None = None,
    window: int = 1, stride: int = 1, first: int = 0, newest: int = 0, tail: bool = False,
    weights: Tensor | None = None, lse: Tensor | None = None, scale: float | None = None,
    q_positions: Tensor | None = None, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    max_seqlen_q: int | None = None, cache_seqlens: Tensor | int | None = None, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, backend: str = "auto",
    **wrong: object,
) -> Tensor:  # fmt: skip
    """The blocks of keys that each query should read: the ``n`` of the highest score, as `selection_attention` takes
    them.

    Scores come from small *index* queries and keys. Index key ``i`` stands for the tokens ``i * stride`` to ``i *
    stride + window - 1`` of its sequence. A query at position ``t`` sees it if none of them is ahead of ``t``.

    Args:
        q: ``[B, S, HI, D]``, or ``[T, HI, D]`` with ``cu_seqlens``: index queries, fp16, bf16 or fp32. fp64 runs in
            plain PyTorch. The last dim must be contiguous, as in ``k``. ``D`` is 16 to 256.
        k: index keys, in ``q``'s dtype. ``[B, rows, HK, D]``; ``[T_k, HK, D]`` with ``cu_seqlens``; with
            ``block_table`` ``[num_pages, page_size, HK, D]``. With ``cache_seqlens`` also ``float8_e4m3fn``.
        score: what ranks a block. ``G = HI / lists`` neighbouring heads make one list.
            ``max``: the highest product of the list's queries and the keys that begin in the block (MiniMax-M3, arXiv
            2606.13392). ``relu``: the highest sum over the list's heads of ``weights * relu(product)`` (QSA).
            ``softmax``: the list's attention weights over all index keys that the query sees, summed over the heads;
            a key counts in a block once for each stride that it has there (NSA, arXiv 2502.11089, eq. 8 to 10).
        n: blocks to choose, those of ``first`` and ``newest`` included.
        block_size: tokens of a block, a multiple of ``stride``.
        lists: lists of blocks for each query, a multiple of ``HK`` that divides ``HI``. By default ``HI`` for ``max``,
            else ``HK``. ``selection_attention`` takes 1 list for all of its KV heads, or one for each.
        window, stride: tokens of an index key, and from the begin of one to that of the next; ``window`` is a multiple
            of ``stride``.
        first, newest: the ``first`` blocks of the sequence and the ``newest`` up to the query's own are always chosen.
        tail: also list the block that the query's position has begun and not ended, beside the ``n``. It is then none
            of them, and ``newest`` counts from the block before it.
        weights: ``[B, S, HI]`` or ``[T, HI]``, of the heads, only with ``relu``; 1 if None.
        lse: ``[B, S, HI]`` or ``[T, HI]``, only with ``softmax``: the natural LSE of the scaled scores of all index
            keys that a query sees, as attention over them returns it. Computed if None, which costs as much again.
        scale: factor of the scores, only with ``softmax``; ``1 / sqrt(D)`` if None.
        q_positions: ``[B, S]`` or ``[T]`` int32 or int64: position of each query. By default the queries are the newest
            of their sequence; without ``cache_seqlens`` and with ``window > 1``, where keys do not tell the length of
            the sequence, they are its first. A position past the last token of its sequence counts as the last.
        cu_seqlens: ``[B + 1]`` int32 or int64, or a pair ``(cu_seqlens_q, cu_seqlens_k)``: cumulative numbers of
            queries and of index keys. A pair is needed if ``window > 1``. With ``cache_seqlens``: of the queries alone.
        max_seqlen_q: upper bound of a packed sequence's queries. It decides the tile only.
        cache_seqlens: ``[B]`` int32 or int64, or an int: *tokens* of each sequence, those of its queries included. Then
            ``k`` is a cache.
        block_table: ``[B, width]`` int32 or int64: the pages of each sequence's index keys.
        k_scale: fp32 ``[]``, ``[1]`` or ``[HK]``, positive, only with ``float8_e4m3fn``: factor of the keys.
        backend: ``auto``, ``triton`` (raises where the kernels cannot serve the call), ``torch`` (plain PyTorch) or
            ``reference`` (fp64, one query at a time, for tests).

    The choice is exact: of two blocks with equal scores the smaller one is chosen, and scores are rounded only as
    products in fp32 are, under autocast, too. Weights of a softmax that fp32 cannot hold (below 1e-45) are 0. A NaN
    of a key or of a sum over heads counts as -inf; the setting ``debug_cache`` logs how many there are. Results are
    equal from run to run. The result has no gradient. Values of tensors are not read by the host, no read leaves the
    tensors, and keys in pages outside of ``[0, num_pages)`` count as -inf. Lengths, tables and positions may change
    between replays of a captured graph. Beside its tensors a call needs 256 MiB at most for scores, or what one tile
    of queries needs.

    Returns:
        int32 ``[B, S, lists, n + tail]`` or ``[T, lists, n + tail]``: block indices in rising order, then -1. A block
        is listed if the query sees a key of it, or if it is forced; none is ahead of the query.

    Raises:
        ValueError, TypeError: an argument is not as above. The text says what was expected and what it got.
        RuntimeError: ``backend="triton"`` cannot serve the call.
    """
    if wrong:
        refuse(select_blocks, wrong)
    check_choice("backend", backend, BACKENDS)
    r = request(
        q, k, cu_seqlens, cache_seqlens, lists, scale, score=score, n=n, block_size=block_size, window=window,
        stride=stride, first=first, newest=newest, tail=tail, weights=weights, lse=lse, q_positions=q_positions,
        block_table=block_table, k_scale=k_scale, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _cast_free(r, backend)
    return _cast_free(r, backend)


def _cast_free(r: Request, backend: str) -> Tensor:
    """:func:`_serve` without autocast, under which products would be rounded."""
    if torch_modes.any_autocast_enabled():
        with torch.autocast(r.q.device.type, enabled=False):
            return _serve(r, backend)
    return _serve(r, backend)


def _serve(r: Request, backend: str) -> Tensor:
    """Run a checked call on a backend."""
    if backend == "reference":
        return oracle.select_reference(r)
    if settings.get().debug_cache:
        debug.report_selection(r)
    out = r.q.new_empty(r.shape, dtype=torch.int32)
    why_not = _why_not_triton(r, backend)
    if backend == "triton":
        if why_not is not None:
            raise RuntimeError(f"backend='triton' cannot select: {why_not}")
        _kernels().select(r, out)
        return out
    kind = ("select", r.q.dtype, r.k.dtype, r.q.device, r.score, r.size, r.G, r.q.shape[-1])
    if backend == "auto" and why_not is None and failures.cause_of(kind) is None:
        try:
            _kernels().select(r, out)
            return out
        except failures.caught() as error:
            failures.remember(kind, "select", error, "plain PyTorch")
    return plain.select(r, out)


def _kernels() -> ModuleType:
    """The module that launches the kernels. It imports Triton."""
    from nsa.selecting import plan

    return plan


def _why_not_triton(r: Request, backend: str) -> str | None:
    """Why the kernels do not serve a call, or None if they do."""
    if backend == "torch":
        return "plain PyTorch was asked for"
    current = settings.get()
    if backend == "auto" and (r.q.device.type != "cuda" or not current.use_triton_sel or current.force_parity):
        return "auto takes the kernels on GPUs, unless a setting forbids Triton"
    if any(torch_modes.odd(x) for x in r if isinstance(x, Tensor)):
        return "a tensor has no memory of its own, or is a negative view"
    no_triton = routing.why_not_triton(r.q.device)
    why_not = routing.obstacle(r.q.dtype, r.q.device, no_triton, r.k.dtype)
    if why_not is None:
        why_not = _kernels().obstacle(r)
    return why_not
