"""Public kernels for the same work, timed beside ours if they are installed (fla-core by `pip install 'nsa[peers]'`).

They are checked against the oracle like our own. The results say why a peer does not take a case.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.failures import caught
from nsa.kernels.shared.sizes import next_power_of_2
from nsa.testing.contestants.contract import Contestant, Contract
from nsa.testing.contestants.fit import arranged
from nsa.testing.matrix import m3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

FLA = "fla.ops.nsa.parallel"
XUNHAO = "native_sparse_attention.ops"
VLLM = "vllm.models.minimax_m3.common.ops.sparse_attn"
ORDERED = Contract(takes=("blocks",), needs=("sorted", "padding last"))
QSA = "vllm.models.qwen4_exp.nvidia.ops.qsa"
VLLM_BLOCK = 128  # keys of a block and of a page: its kernels for MiniMax-M3 take no other sizes
VLLM_STEP = 16  # queries of a sequence, up to which a call counts as a decode or speculative step
# Errors of importing a peer that does not fit this torch or Triton. Such a peer counts as not installed.
UNUSABLE: tuple[type[BaseException], ...] = (*caught(), AttributeError, TypeError)


@functools.cache
def installed(module: str) -> Any:
    """The module, or None if it cannot be imported. Its warnings about missing optional parts are not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except UNUSABLE:
        return None


def functions(module: str, *names: str) -> list[Any]:
    """The functions of these names; none if the module cannot be imported here, or lacks one of them."""
    found = [getattr(installed(module), name, None) for name in names]
    return [] if None in found else found


@contextlib.contextmanager
def this_version() -> Iterator[None]:
    """Raises NotImplementedError where a peer of another version has other arguments or names."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise NotImplementedError(f"another version: {type(error).__name__}: {error}") from error


def peers() -> dict[str, Contestant]:
    """The peers that can be imported here, by name."""
    found = functions(FLA, "parallel_nsa_fwd")
    return {"fla": Contestant("fla", _fla(*found), supports=fla_supports)} if found else {}


_tuned: dict[str, tuple[torch.Size, ...]] = {}


def tune_for(module: str, *tensors: Tensor) -> None:
    """Let a peer's autotuners choose again if shapes differ from those of the last call, so that its best is timed.

    The keys of fla-core's autotuners hold neither batch nor length. So the first call would decide for all later ones,
    and for other processes too, because Triton keeps the choice on disk. Tuned for a prompt, a decode step took 56 us
    instead of 28 us.
    """
    shapes = tuple(x.shape for x in tensors)
    if _tuned.get(module) == shapes:
        return
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(installed(module)).values():
        while kernel is not None and not isinstance(kernel, Autotuner):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            kernel.cache.clear()
            kernel.cache_results = False
    _tuned[module] = shapes


def call_fla(function: Callable[..., Any], p: Problem, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Call a function of fla-core, tuned for these shapes. rest: arguments after the scale."""
    tune_for(FLA, q, k)
    with this_version():
        return function(q, k, v, p.block_indices, p.case.n, p.block_size, p.softmax_scale, *rest)


def _fla(forward: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """fla-core's selection kernel, always causal. A program computes one row, one key block after the other."""

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        result = call_fla(forward, p, p.q, p.k, p.v)
        return result if return_lse else result[0]

    return call


def fla_supports(case: Case) -> str | None:
    """Why fla-core's kernels do not take a case; None if they do."""
    if case.source != "blocks" or case.seqlens or case.positions or not case.causal:
        return f"takes causal blocks of a batch, not {case.source}"
    powers = all(x == next_power_of_2(x) for x in (case.H, case.block_size))
    if min(case.H, case.block_size) < 16 or not powers:
        return f"needs a group and blocks of 16, 32, 64, …, got {case.H} and {case.block_size}"
    return None


def xunhao() -> dict[str, Contestant]:
    """XunhaoLai's kernel, if it can be imported here. It is timed beside the prompt of MiniMax-M3 alone."""
    found = functions(XUNHAO, "topk_sparse_attention")
    return {"xunhao": Contestant("xunhao", _xunhao(*found), supports=xunhao_supports, lse=False)} if found else {}


def xunhao_supports(case: Case) -> str | None:
    """Why XunhaoLai's kernel does not take a case; None if it does."""
    if case.source != "blocks" or case.seqlens or case.positions or not case.causal or case.S != case.S_kv:
        return "takes causal blocks of whole prompts"
    return None if case.D == case.Dv else f"takes Dv = D, got {case.D} and {case.Dv}"


def _xunhao(function: Callable[..., Tensor]) -> Any:
    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
        blocks, ends = p.derived(_sequences)
        q, k, v = (x.flatten(0, 1) for x in (p.q, p.k, p.v))
        with this_version():
            return function(q, k, v, blocks, p.block_size, ends, p.scale).view(*p.q.shape[:-1], p.case.Dv)

    return call


def _sequences(p: Problem) -> tuple[Tensor, Tensor]:
    """A batch as sequences end to end: its blocks, and where each sequence begins and the last ends."""
    ends = torch.arange(p.case.B + 1, dtype=torch.int32, device=p.q.device) * p.case.S
    return padding_last(p).int(), ends


def padding_last(p: Problem) -> Tensor:
    """A problem's blocks as `[HKV, T, n]`, each row in order, with padding last."""
    blocks = arranged(p, ORDERED).block_indices
    assert blocks is not None
    return blocks.flatten(0, -3).transpose(0, 1).contiguous()


def vllm() -> dict[str, Contestant]:
    """vLLM's kernels for MiniMax-M3 over the caches of `matrix/m3.py`, if they can be imported here."""
    found = functions(VLLM, "minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode")
    return {"vllm": Contestant("vllm", _vllm(*found), supports=vllm_supports, lse=False)} if found else {}


def vllm_supports(case: Case) -> str | None:
    """Why vLLM's kernels do not take a case; None if they do. They read as many blocks as lie before the query."""
    if case.source != "blocks" or case.dist not in ("decode", "prefill") or case.positions or not case.causal:
        return "takes causal blocks, the own block among them"
    if case.block_size != VLLM_BLOCK:
        return f"takes blocks of {VLLM_BLOCK} keys, got {case.block_size}"
    return None if case.D == case.Dv else f"takes Dv = D, got {case.D} and {case.Dv}"


def _vllm(chunks: Callable[..., None], steps: Callable[..., None]) -> Any:
    """A call for the chunks of a batch and one for its steps, into one output, as vLLM serves a ragged batch."""

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
        o = torch.empty_like(p.q) if out is None else out
        for tokens, arguments in p.derived(vllm_arguments):
            function = steps if "decode_query_len" in arguments else chunks
            with this_version():
                function(**arguments, output=o.flatten(0, -3)[tokens])
        return o

    return call


def vllm_arguments(p: Problem) -> list[tuple[slice, dict[str, Any]]]:
    """vLLM's arguments, without the output, for the tokens of all successive chunks, or of steps of equal length.

    vLLM's own server makes the arguments before the call. Scales are one number each, vLLM's faster way: ours are equal
    for all heads.
    """
    cache, blocks = p.derived(m3.combined), padding_last(p)
    assert cache.block_table is not None
    scales = {} if p.scales is None else {"k_scale": p.scales[0][:1].clone(), "v_scale": p.scales[1][:1].clone()}
    calls: list[tuple[slice, dict[str, Any]]] = []
    first = token = 0
    for step, some in itertools.groupby((S for S, _ in p.case.sequences), lambda S: S if S <= VLLM_STEP else None):
        queries = list(some)
        mine, tokens = slice(first, first + len(queries)), slice(token, token + sum(queries))
        first, token = mine.stop, tokens.stop
        lengths = cache.cache_seqlens[mine].clone()
        ends = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=p.q.device)
        chunk = {"cu_seqlens_q": ends, "prefix_lens": lengths - ends.diff(), "max_query_len": max(queries)}
        calls.append((tokens, {
            "q": p.q.flatten(0, -3)[tokens],
            "kv_cache": cache.pages,
            "topk_idx": blocks[:, tokens],
            "block_table": cache.block_table[mine],
            "seq_lens": lengths,
            "num_kv_heads": p.case.HKV,
            "sm_scale": p.softmax_scale,
            **(chunk if step is None else {"decode_query_len": step}),
            **scales,
        }))  # fmt: skip
    return calls


def vllm_qsa() -> dict[str, Contestant]:
    """vLLM's kernel for QSA over the caches of `matrix/m3.py`, if it can be imported here."""
    found = functions(QSA, "qsa_sparse_paged_attention")
    return {"vllm": Contestant("vllm", call_qsa(*found), lse=False)} if found else {}


def call_qsa(function: Callable[..., Tensor]) -> Any:
    """A call of vLLM's function for QSA."""

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Tensor:
        o = torch.empty_like(p.q) if out is None else out
        with this_version():
            function(**p.derived(qsa_arguments), out=o.flatten(0, -3))
        return o

    return call


def qsa_arguments(p: Problem) -> dict[str, Any]:
    """vLLM's arguments for QSA, without the output: all keys that a query sees, one by one, and their number at the end
    of the row. Its server makes them before the call. The gate is one after rounding.
    """
    cache, case, device = p.derived(m3.combined), p.case, p.q.device
    assert p.block_indices is not None
    blocks = p.block_indices[..., 0, :].flatten(0, -2).long()  # [T, n]
    at = torch.arange(case.S_kv - case.S, case.S_kv, device=device).repeat(case.B)
    keys = (blocks[..., None] * case.block_size + torch.arange(case.block_size, device=device)).flatten(1)
    seen = (blocks >= 0).repeat_interleave(case.block_size, 1) & (keys <= at[:, None])
    first = (~seen).byte().sort(dim=-1, stable=True).indices
    listed = torch.cat((keys.masked_fill(~seen, -1).gather(1, first), seen.sum(-1, keepdim=True)), 1).int()
    scales = {} if p.scales is None else {"k_scale": m3.K_SCALE, "v_scale": m3.V_SCALE}
    return {
        "q": p.q.flatten(0, -3), "k_cache": cache.k, "v_cache": cache.v, "logical_indices": listed,
        "block_table": cache.block_table, "token_to_req": (torch.arange(len(at), device=device) // case.S).int(),
        "use_prefill_config": case.S > VLLM_STEP, "output_gate": torch.full_like(p.q, 30.0), **scales,
    }  # fmt: skip
