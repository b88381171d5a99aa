"""The comparators of prefill, among them dense causal SDPA of the same shape, and the facts to store.

Dense attention is what a model without selection would compute. It does more work and gives other results, so it has
its own check: a few queries are compared with fp64 attention over all their keys.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.testing.clock.measure import Measurement
from nsa.testing.contestants.contract import Contestant, OtherWork, Support
from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.peers import peers
from nsa.testing.judge.forward import describe, reference_at
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

BACKENDS = {"dense_cudnn": SDPBackend.CUDNN_ATTENTION, "dense_flash": SDPBackend.FLASH_ATTENTION}
SCHEDULES = ("query_major", "key_major")
NAMES = {"cudnn": "dense_cudnn", "flash": "dense_flash"} | {name: name for name in ("fla", *SCHEDULES)}
"""The comparators of a prefill, by the word in the name of their fact, `speedup_vs_<word>`."""
Geometry = tuple[str, int, int, int, int, str]  # backend, heads, head dims, dtype

_chosen: dict[Geometry, bool] = {}  # whether `enable_gqa` is as fast as heads expanded beforehand
LEVEL = 1.02  # up to this ratio of times `enable_gqa` is preferred, because it takes less memory


def beside() -> list[Contestant]:
    """The comparators of our front door: dense SDPA, our schedules by name, and peers.

    Dense flash attention and query-major take as long for any selection. They are timed beside random prompts only.
    """
    dense = [
        Contestant(name, _call(backend), supports=plain, lse=False, other=DENSE) for name, backend in BACKENDS.items()
    ]
    found = [*dense, *(OURS[name] for name in SCHEDULES), *peers().values()]
    once = {"dense_flash", "query_major"}
    return [dataclasses.replace(x, supports=_at_random(x.supports)) if x.name in once else x for x in found]


def _at_random(supports: Support) -> Support:
    def only(case: Case) -> str | None:
        return supports(case) or ("is timed beside random prompts only" if case.shared else None)

    return only


def facts(result: Measurement) -> dict[str, Any]:
    """The facts of a prefill, in addition to those of every selection.

    `speedup_vs_<word>` is None if that comparator did not run. `tflops` are TFLOP/s of the products with selected keys,
    `share_of_matmul` their share of the matrix rate.
    """
    p, seconds, limits = result.problem, result.ours.median, result.ceilings
    ratios = {f"speedup_vs_{word}": result.speedup(name) for word, name in NAMES.items()}
    return ratios | {
        "ms": seconds * 1e3,
        "ns_per_token": seconds * 1e9 / (p.case.B * p.case.S),
        "tflops": p.flops / seconds * 1e-12,
        "share_of_matmul": p.flops / seconds / limits.matmul if limits else None,
    }


def plain(case: Case) -> str | None:
    """Why SDPA's own causal mask does not fit a case; None if it does. That mask is for as many queries as keys."""
    whole = case.causal and case.S == case.S_kv and not case.positions and not case.seqlens
    return None if whole else "is dense causal attention over a batch of whole prompts"


def _flops(p: Problem) -> int:
    """FLOP of the two matrix products below the diagonal; a multiply-add counts as two."""
    case = p.case
    return case.B * case.HQ * (case.D + case.Dv) * case.S * (case.S + 1)


def _check(p: Problem, out: Tensor) -> None:
    """Compare a few positions with fp64, each to within rounding of the largest number at that position.

    Late queries average over many keys, so their outputs are small, and a common bound would be too loose for them.
    """
    S, HKV = p.case.S, p.case.HKV
    at = torch.tensor(sorted({0, S // 7, S // 3, S // 2, S - 2, S - 1}), device=p.q.device).clamp(0)
    everything = torch.tensor([0, S], device=p.q.device).expand(p.case.B, S, HKV, 1, 2)
    want, _ = reference_at(p.q, p.k, p.v, at, ranges=everything, scale=p.scale)
    err = (out.index_select(1, at).double() - want).abs().amax((0, 2, 3))
    limit = 16 * torch.finfo(p.q.dtype).eps * want.abs().amax((0, 2, 3))
    off = ~(err <= limit)
    assert not bool(off.any()), (
        f"dense attention on {describe(p)}: at positions {at[off].tolist()} off by {err[off].tolist()}, "
        f"rounding explains {limit[off].tolist()}"
    )


DENSE = OtherWork(_flops, _check)


def _call(backend: SDPBackend) -> Any:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
        return _attend(p, backend, _with_gqa(p, backend))

    return call


def attend(backend: SDPBackend, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention, differentiable. If `_with_gqa` says so, heads are expanded within the call."""
    gqa = _with_gqa(p, backend)
    if not gqa and p.case.H > 1:
        k, v = (x.repeat_interleave(p.case.H, 2) for x in (k, v))
    return _dense(p, backend, q, k, v, gqa)


def _attend(p: Problem, backend: SDPBackend, gqa: bool) -> Tensor:
    """`O [B,S,HQ,Dv]`. Without `gqa`, heads are expanded in memory once, outside of the timing."""
    k, v = p.k, p.v
    if not gqa and p.case.H > 1:
        if "expanded" not in p.extra:
            p.extra["expanded"] = tuple(x.repeat_interleave(p.case.H, 2) for x in (k, v))
        k, v = p.extra["expanded"]
    return _dense(p, backend, p.q, k, v, gqa)


def _dense(p: Problem, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=p.scale, enable_gqa=gqa).transpose(1, 2)


def _with_gqa(p: Problem, backend: SDPBackend) -> bool:
    """Whether a backend is as fast with `enable_gqa`. The first prompt of each geometry, a short one, decides.

    Raises:
        RuntimeError: the backend takes neither grouped nor expanded heads.
    """
    case = p.case
    key = (backend.name, case.HQ, case.HKV, case.D, case.Dv, case.dtype)
    if case.H == 1:
        return False
    if key not in _chosen:
        grouped, expanded = (_seconds(p, backend, gqa) for gqa in (True, False))
        if grouped is None and expanded is None:
            raise RuntimeError(f"{backend.name} takes heads neither grouped nor expanded")
        _chosen[key] = grouped is not None and (expanded is None or grouped <= LEVEL * expanded)
    return _chosen[key]


def _seconds(p: Problem, backend: SDPBackend, gqa: bool) -> float | None:
    """The shorter time of two calls after a first one, by the host's clock; None if the backend refuses the call."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        try:
            _attend(p, backend, gqa)
        except RuntimeError:
            return None
        if p.q.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
