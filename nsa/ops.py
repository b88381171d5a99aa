"""The operator ``torch.compile`` sees: one boundary around a whole call, no maths."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("nsa", "DEF")
_library.define(
    "selection_attention(Tensor q, Tensor k, Tensor v, Tensor? ranges, Tensor? block_indices, int? block_size, "
    "bool causal, Tensor? q_positions, float? scale, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_selected, "
    "str backend, str schedule) -> (Tensor, Tensor)"
)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    block_indices: Tensor | None,
    block_size: int | None,
    causal: bool,
    q_positions: Tensor | None,
    scale: float | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_selected: int | None,
    backend: str,
    schedule: str,
) -> tuple[Tensor, Tensor]:
    from nsa.attention import selection_attention

    cu_seqlens = None if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    o, lse = selection_attention(
        q,
        k,
        v,
        ranges=ranges,
        block_indices=block_indices,
        block_size=block_size,
        causal=causal,
        q_positions=q_positions,
        scale=scale,
        cu_seqlens=cu_seqlens,
        max_selected=max_selected,
        return_lse=True,
        backend=backend,
        schedule=schedule,
    )
    return o, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


for _key in ("CPU", "CUDA"):
    _library.impl("selection_attention", _eager, _key)
torch.library.register_fake("nsa::selection_attention", _fake, lib=_library)
