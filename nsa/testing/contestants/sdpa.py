"""SDPA in every layout, with and without packing: the controls of the gate, and comparators."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.plain.packed_sdpa import sdpa_rows
from nsa.testing.contestants.contract import Call, Contestant
from nsa.testing.contestants.ours import plain
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem


def _unequal(case: Case) -> str | None:
    """SDPA without a mask takes packed rows of equal lengths only."""
    equal = case.source == "rows" or (case.S == 1 and not case.seqlens and case.source != "varlen")
    return None if equal else "rows of different lengths"


def _rows_sdpa(layout: str, backend: SDPBackend | None) -> Call:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        Q, K, V, _ = p.rows
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return sdpa_rows(Q, K, V, None, p.softmax_scale, layout)

    return call


def _gather_gqa(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """From cache and spans: `gather` by an index made beforehand, then SDPA with `enable_gqa`. Only for S = 1."""
    B, S_kv, HKV = p.k.shape[:3]
    if "gather" not in p.extra:
        local = p.key_index[0].view(B, HKV, -1) - torch.arange(B, device=p.k.device)[:, None, None] * S_kv
        p.extra["gather"] = local.transpose(1, 2)[..., None].contiguous()  # [B, L, HKV, 1]
    index = p.extra["gather"]
    K, V = (x.gather(1, index.expand(-1, -1, -1, x.shape[-1])).transpose(1, 2) for x in (p.k, p.v))
    q = p.q.transpose(1, 2)  # [B, HQ, 1, D]
    return F.scaled_dot_product_attention(q, K, V, scale=p.scale, enable_gqa=True).transpose(1, 2).contiguous()


def _select_heads(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """From cache and spans: `index_select` of keys by an index made beforehand, then SDPA with heads as queries."""
    HKV = p.k.shape[-2]
    if "select" not in p.extra:
        index = p.key_index[0]
        head = torch.arange(index.shape[0], device=index.device)[:, None] % HKV
        p.extra["select"] = (index * HKV + head).flatten(), index.shape
    index, shape = p.extra["select"]
    K, V = (x.reshape(-1, x.shape[-1]).index_select(0, index).view(*shape, -1) for x in (p.k, p.v))
    return sdpa_rows(p.q.reshape(-1, p.case.H, p.case.D), K, V, None, p.softmax_scale, "heads_as_queries")


def _index_select_heads(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """As `_select_heads`, but the index is made within the call, as in our fallback."""
    HKV = p.k.shape[-2]
    index, lengths = dataclasses.replace(p).key_index  # a new problem, so that the index is computed again
    mask = torch.arange(index.shape[1], device=index.device) < lengths[:, None] if _unequal(p.case) else None
    head = torch.arange(index.shape[0], device=index.device)[:, None] % HKV
    flat = (index * HKV + head).flatten()
    K, V = (x.reshape(-1, x.shape[-1]).index_select(0, flat).view(*index.shape, -1) for x in (p.k, p.v))
    return sdpa_rows(p.q.reshape(-1, p.case.H, p.case.D), K, V, mask, p.softmax_scale, "heads_as_queries")


def _row_loop(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
    """The original project's fallback, improved: one sync, then slices, `cat` and one SDPA per row."""
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


LAYOUTS: dict[str, tuple[str, SDPBackend | None]] = {
    "expanded_flash": ("expanded", SDPBackend.FLASH_ATTENTION),
    "heads_as_queries_flash": ("heads_as_queries", SDPBackend.FLASH_ATTENTION),
    "heads_as_queries_cudnn": ("heads_as_queries", SDPBackend.CUDNN_ATTENTION),
    "heads_as_queries_efficient": ("heads_as_queries", SDPBackend.EFFICIENT_ATTENTION),
    "enable_gqa": ("enable_gqa", None),
}
OF_GPUS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def packed_layouts(device: torch.device) -> dict[str, Contestant]:
    """SDPA over rows already packed, in each layout and backend of this kind of device."""
    here = {name: how for name, how in LAYOUTS.items() if device.type == "cuda" or how[1] not in OF_GPUS}
    return {name: Contestant(name, _rows_sdpa(*how), supports=_unequal, lse=False) for name, how in here.items()}


PACKED = Contestant("packed", _rows_sdpa("heads_as_queries", None), supports=_unequal, lse=False)
"""SDPA on packed rows as our fallback calls it. torch picks the backend."""

END_TO_END = {
    "gather_gqa": Contestant("gather_gqa", _gather_gqa, supports=_unequal, lse=False),
    "select_heads": Contestant("select_heads", _select_heads, supports=_unequal, lse=False),
}
"""From cache and spans, packing included, in plain torch. Our fallback, `OURS["sdpa"]`, does the same work."""

FROM_SPANS = Contestant("index_select_heads", _index_select_heads, lse=False)
"""The same with the index made within the call: the control on a CPU, where that is a large part of the time."""

ROW_LOOP = Contestant("row_loop", _row_loop, supports=plain, lse=False)
