"""What the error of a wrong call adds for callers who know FlashAttention, PyTorch's SDPA or fla's NSA.

A hint names our word for their argument, or our layout for their tensor. Hints are made after a check has
failed, so they cost a valid call nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from nsa.call import Call

Function = TypeVar("Function", bound=Callable[..., Any])

SCALE = "nsa calls it scale"
CU_SEQLENS = "selection_attention takes cu_seqlens=(cu_seqlens_q, cu_seqlens_k)"
LONGEST = "nsa needs no length of the longest sequence; max_selected bounds the keys that one row selects"
BRANCH = "nsa computes the selection branch only; compute the {} branch separately"
GATE = "nsa applies no gate; multiply the output by the gate"
RAGGED = "; packed queries [T, HQ, D] need cu_seqlens_q"
APPEND = "nsa appends nothing to a cache; write new keys and values into k_cache and v_cache before the call"

# An argument of another library, and what its caller should write here.
WORDS = {
    "softmax_scale": SCALE,
    "sm_scale": SCALE,
    "is_causal": "nsa calls it causal, which is True by default",
    "attn_mask": "nsa takes no mask; ranges or block_indices say which keys a row reads",
    "dropout_p": "nsa has no dropout; leave the argument out",
    "enable_gqa": "nsa takes the group size from the heads of q and k; leave the argument out",
    "deterministic": "nsa is always deterministic; leave the argument out",
    "k_descale": "nsa calls it k_scale; one number, or one per KV head",
    "v_descale": "nsa calls it v_scale; one number, or one per KV head",
    "return_softmax_lse": "nsa calls it return_lse",
    "return_attn_probs": "nsa returns no probabilities; return_lse=True also returns the LSE",
    "cu_seqlens_q": CU_SEQLENS,
    "cu_seqlens_k": f"{CU_SEQLENS}; with a cache, cache_seqlens has the number of keys of each sequence",
    "seqused_k": "selection_attention_with_kvcache calls it cache_seqlens",
    "max_seqlen_q": LONGEST,
    "max_seqlen_k": LONGEST,
    "block_counts": "nsa takes no counts; pad block_indices with -1 where a row selects fewer blocks",
    "window_size": BRANCH.format("sliding-window"),
    "g_cmp": BRANCH.format("compression"),
    "g_slc": GATE,
    "g_swa": BRANCH.format("sliding-window"),
    "k": APPEND,  # of the cache's function: `selection_attention` has both
    "v": APPEND,
}


def hide_wrong(function: Function) -> Function:
    """Leave ``**wrong`` out of the signature that ``inspect``, ``help`` and editors show. Returns ``function`` itself.

    ``**wrong`` collects unknown keywords. It takes 20 ns of a call without any; a wrapper would take 230 ns.
    """
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    del function.__annotations__["wrong"]
    return function


def refuse(function: Callable[..., Any], wrong: Mapping[str, object]) -> NoReturn:
    """Refuse unknown keywords as Python does, with our word for the first one that has an entry in :data:`WORDS`.

    Raises:
        TypeError: always.
    """
    word = next((word for word in wrong if word in WORDS), None)
    if word is not None:
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{word}': {WORDS[word]}")
    word = next(iter(wrong))
    close = get_close_matches(word, list(inspect.signature(function).parameters), n=1)
    text = f"{function.__name__}() got an unexpected keyword argument '{word}'"
    raise TypeError(f"{text}. Did you mean '{close[0]}'?" if close else text)  # as Python 3.13 suggests


def packed(shape: Sequence[int], layout: str) -> str:
    """A hint where ``shape`` is fla's ``[1, T, …]`` and ``layout`` is our ``[T, …]``; empty otherwise."""
    if layout.startswith("[T") and len(shape) == layout.count(",") + 2 and shape[0] == 1:
        return f"; nsa takes packed sequences as {layout}: call squeeze(0)"
    return ""


def transposed(call: Call, max_group: int) -> str:
    """A hint where the call fits once some of its tensors have dimensions 1 and 2 swapped; empty otherwise.

    A call fits if the group size is a whole number up to ``max_group``, and the selection has the batch, the queries
    and the KV heads of ``q`` and ``k``. No hint is made for a call that fits as it is. If it fits in two ways, the hint
    names both.
    """
    selection, (name, inner) = call.selection, ("block_indices", "n") if call.ranges is None else ("ranges", "n, 2")
    if selection is None or len(selection.shape) != 4 + inner.count(",") or len(call.q.shape) != 4:
        return ""
    B, a, b = call.q.shape[:3]
    _, c, d = call.k.shape[:3]
    first, second = selection.shape[1:3]

    def fits(HQ: int, HKV: int) -> bool:
        return selection.shape[0] == B and HKV > 0 and HQ % HKV == 0 and 1 <= HQ // HKV <= max_group

    if fits(b, d) and (first, second) == (a, d):
        return ""
    hints, q_k_v = [], "q, k and v" if call.cache_seqlens is None else "q, k_cache and v_cache"
    if fits(a, c) and (first, second) in ((b, c), (c, b)):
        names = q_k_v if (first, second) == (b, c) else f"{q_k_v.replace(' and', ',')} and {name}"
        hints.append(f"{names} look like [B, H, S, D]: nsa takes [B, S, H, D], call transpose(1, 2)")
    if fits(b, d) and (first, second) == (d, a):
        hints.append(f"{name} looks like [B, HKV, S, {inner}]: nsa takes [B, S, HKV, {inner}], call transpose(1, 2)")
    return "; " + ", or ".join(hints) if hints else ""
