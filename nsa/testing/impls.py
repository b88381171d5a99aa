"""What can be tested: our kernels by route, SDPA in every layout, and third parties (`--nsa-impl`).

Each is an `Impl`: a name, a call on a `Problem` that returns the output in FlashAttention layout, the route whose
kernel it must launch (ours only), and which cases it cannot do, with the reason.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import nsa
import nsa.kernels
from nsa.testing.cases import Case
from nsa.testing.compare import Result
from nsa.testing.problem import Problem

Call = Callable[[Problem, bool, "Tensor | None"], Any]
Support = Callable[[Case], "str | None"]


def _always(case: Case) -> str | None:
    return None


@dataclass(frozen=True)
class Impl:
    """One implementation.

    `supports(case)` is None, or why it cannot run that case. `route` names the kernel that has to be launched.
    `poison`: the call takes `out=`.
    """

    name: str
    call: Call
    route: str | None = None
    supports: Support = _always
    poison: bool = False
    lse: bool = True

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
        result = self.run(p, return_lse and self.lse, out)
        if out is not None:
            got = result[0] if isinstance(result, tuple) else result
            assert got.data_ptr() == out.data_ptr(), f"{self.name}: expected the result in out=, got another tensor"
        return result, nsa.kernels.launches - before

    def __str__(self) -> str:
        return self.name


def _only(*sources: str) -> Support:
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


def _plain(case: Case) -> str | None:
    """What the original layout and the contract for third parties know."""
    return "has neither cu_seqlens nor q_positions" if case.seqlens or case.positions else None


OURS = {
    impl.name: impl
    for impl in (
        Impl("dense_group", _dense(nsa.sel_attn_fwd_dense_group), "dense_group", _only("rows"), poison=True),
        Impl("dense_per_head", _dense(nsa.sel_attn_fwd_dense), "per_head", _only("rows"), poison=True),
        Impl("varlen_group", _varlen(nsa.sel_attn_fwd_varlen_group), "varlen_group", _only("rows", "varlen"), True),
        Impl("varlen_per_head", _varlen(nsa.sel_attn_fwd_varlen), "per_head", _only("rows", "varlen"), True),
        Impl("ranges", front_door("triton"), "ranges", poison=True),
        Impl("ranges_unbounded", front_door("triton", bound=False), "ranges", poison=True),
        Impl("ranges_per_head", front_door("triton", "per_head"), "per_head", poison=True),
        Impl("blocks", front_door("triton", blocks=True), "blocks", _only("blocks"), poison=True),
        Impl("sdpa", front_door("sdpa"), poison=True),
        Impl("sdpa_unbounded", front_door("sdpa", bound=False), poison=True),
        Impl("reference", front_door("reference"), poison=True),
        Impl("original", _original(nsa.selection_attention_triton), None, _plain, lse=False),
        Impl("original_packed", _original(nsa.grouped_selection_attention_packed), None, _plain, lse=False),
    )
}


def load(spec: str) -> Impl:
    """A third party's kernel from `package.module:function`, `…@blocks` or `…@dense` (spec.md has the contract).

    Raises:
        ValueError: the spec is not of that form, or names something that is not there.
    """
    path, _, kind = spec.partition("@")
    module, _, name = path.partition(":")
    if not module or not name or kind not in ("", "blocks", "dense"):
        raise ValueError(f"--nsa-impl: expected package.module:function[@blocks|@dense], got {spec!r}")
    try:
        f = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--nsa-impl: cannot import {spec!r}: {e}") from e

    def dense(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        return f(*p.rows[:3])

    def blocks(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        args = {"block_indices": p.block_indices, "block_size": p.block_size}
        return f(p.q, p.k, p.v, **args, causal=p.causal, scale=scale, return_lse=return_lse)

    def ranges(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        return f(p.q, p.k, p.v, ranges=p.ranges, causal=p.causal, scale=scale, return_lse=return_lse)

    call = {"": ranges, "blocks": blocks, "dense": dense}[kind]
    wanted = {"": _always, "blocks": _only("blocks"), "dense": _only("rows")}[kind]

    def supports(case: Case) -> str | None:
        return _plain(case) or wanted(case)

    return Impl(spec, call, supports=supports, lse=kind != "dense")
