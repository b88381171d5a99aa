"""Sparse attention of MiniMax-M3, and of Qwen's QSA, in vLLM, on our kernels (docs/vllm.md).

:func:`minimax_m3_sparse_attn`, :func:`minimax_m3_sparse_attn_decode` and :func:`qsa_sparse_paged_attention` have the
names, arguments and layouts of functions of vLLM. :func:`install` replaces vLLM's functions by ours. :func:`plugin`
calls it in every process that vLLM starts, if the setting ``vllm`` is on. vLLM's own functions are kept, and serve the
calls that our kernels cannot serve.

vLLM is imported when :func:`install` or a call needs it, and not before.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nsa import failures, routing, settings
from nsa.api import selection_attention_with_kvcache
from nsa.call import Call
from nsa.failures import broken
from nsa.kernels.shared.shape import E4M3

VERSIONS = ("0.33.0",)  # of vLLM, whose functions have the signatures and layouts below
OPS = "vllm.models.minimax_m3.common.ops.sparse_attn"  # the module that defines the functions of MiniMax-M3
QSA_OPS = "vllm.models.qwen4_exp.nvidia.ops.qsa"  # and that of QSA
NEWER = ["query_start_loc", "token_to_req_indices"]  # arguments that versions after 0.33.0 have
PAGE = 128  # keys of a page and of a block: vLLM's kernels take no other number

# vLLM shows records below WARNING only of loggers under its own.
logger = logging.getLogger("vllm.nsa")

_kept: dict[str, Callable[..., Any]] = {}  # vLLM's own functions, by name, while ours are in their place
_said: set[tuple[str, str]] = set()  # what was logged


# --- the two functions ------------------------------------------------------------------------------------------------


def minimax_m3_sparse_attn(
    q: Tensor, kv_cache: Tensor, topk_idx: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    prefix_lens: Tensor, max_query_len: int, num_kv_heads: int, sm_scale: float, output: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of prompts and chunks of prompts over the selected blocks, as vLLM 0.33.0's function of this name.

    Args:
        q: ``[T, HQ, D]``, fp16 or bf16, packed queries.
        kv_cache: ``[pages, HKV, 128, 2 D]``, keys in the first half of the last dim and values in the second. In
            ``q``'s dtype or ``float8_e4m3fn``.
        topk_idx: ``[HKV, T, n]`` int32, indices of blocks of 128 keys. A negative index is padding.
        block_table: ``[B, width]`` int32, the pages of each sequence.
        cu_seqlens_q: ``[B + 1]`` int32, cumulative numbers of queries. Tokens after the last sequence get zeros.
        seq_lens: ``[B]`` int32, keys of each sequence, those of its queries included.
        prefix_lens: ``[B]``, keys before the queries. Not read, because it is ``seq_lens`` less the number of queries.
        max_query_len: upper bound, known to the host, of the queries of a sequence.
        num_kv_heads: ``HKV``.
        sm_scale: factor of the scores.
        output: ``[T, HQ, D]`` in ``q``'s dtype; the result is written there.
        k_scale, v_scale: fp32 tensors of one element, or ``[HKV]``, on ``q``'s device. Ignored if the cache is not fp8.

    A call that our kernels cannot serve goes to vLLM's own function, and one line of the log says why.

    Raises:
        ValueError: a tensor of other axes.
        ImportError: our kernels cannot serve the call, and vLLM is not installed.
    """
    _check_axes(q, topk_idx, block_table, seq_lens)
    given = (
        q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len, num_kv_heads, sm_scale,
        output, k_scale, v_scale,
    )  # fmt: skip
    _serve(
        "minimax_m3_sparse_attn", given, q, kv_cache, num_kv_heads, k_scale, v_scale,
        block_indices=topk_idx.transpose(0, 1), block_table=block_table, cache_seqlens=seq_lens, scale=sm_scale,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_query_len, out=output,
    )  # fmt: skip


def minimax_m3_sparse_attn_decode(
    q: Tensor, kv_cache: Tensor, topk_idx: Tensor, block_table: Tensor, seq_lens: Tensor, num_kv_heads: int,
    sm_scale: float, output: Tensor, decode_query_len: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, query_start_loc: Tensor | None = None, token_to_req_indices: Tensor | None = None,
) -> None:  # fmt: skip
    """:func:`minimax_m3_sparse_attn` for decode steps, where ``T = B * decode_query_len``.

    Every sequence has ``decode_query_len`` queries. A sequence of length 0 (padding in a captured graph) gets zeros.
    Versions of vLLM after 0.33.0 pass two more arguments: with ``query_start_loc [B + 1]``, cumulative numbers of
    queries, sequences have up to ``decode_query_len``. ``token_to_req_indices`` is not read, because it says the same.

    Raises:
        ValueError: a tensor of other axes, or ``q``, ``topk_idx`` or ``output`` of another number of tokens than ``T``.
        ImportError: as :func:`minimax_m3_sparse_attn`.
    """
    _check_axes(q, topk_idx, block_table, seq_lens)
    given = (
        q, kv_cache, topk_idx, block_table, seq_lens, num_kv_heads, sm_scale, output, decode_query_len, k_scale,
        v_scale, *(() if query_start_loc is None else (query_start_loc, token_to_req_indices)),
    )  # fmt: skip
    blocks, longest, B = topk_idx.transpose(0, 1), None, seq_lens.shape[0]
    if query_start_loc is not None:
        longest = decode_query_len
    elif q.shape[0] != B * decode_query_len:
        raise ValueError(f"q: expected {B} sequences of {decode_query_len} queries, got {q.shape[0]} tokens")
    elif blocks.shape[:1] != q.shape[:1] or output.shape[:1] != q.shape[:1]:
        of = f"topk_idx has {blocks.shape[0]}, output has {output.shape[0]}"
        raise ValueError(f"topk_idx, output: expected {q.shape[0]} tokens (those of q), {of}")
    else:
        q, output = q.view(B, decode_query_len, *q.shape[1:]), output.view(B, decode_query_len, *output.shape[1:])
        blocks = blocks.view(B, decode_query_len, *blocks.shape[1:])
    _serve(
        "minimax_m3_sparse_attn_decode", given, q, kv_cache, num_kv_heads, k_scale, v_scale, block_indices=blocks,
        block_table=block_table, cache_seqlens=seq_lens, scale=sm_scale, cu_seqlens_q=query_start_loc,
        max_seqlen_q=longest, out=output,
    )  # fmt: skip


def qsa_sparse_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, logical_indices: Tensor, block_table: Tensor, token_to_req: Tensor,
    use_prefill_config: bool, out: Tensor | None = None, k_scale: float | None = None, v_scale: float | None = None, *,
    output_gate: Tensor,
) -> Tensor:  # fmt: skip
    """QSA's attention over the selected keys, as vLLM 0.33.0's function of this name.

    Args:
        q: ``[T, HQ, D]`` bf16, queries in the order of their sequences.
        k_cache, v_cache: ``[pages, page_size, HKV, D]``, in ``q``'s dtype or ``float8_e4m3fn``.
        logical_indices: ``[T, 4 n]`` int32: keys in whole blocks of 4, then up to 3 keys of the query's own block. The
            last column is their number. This is what vLLM's indexer writes; other orders are not checked.
        block_table: ``[B, width]`` int32, the pages of each sequence.
        token_to_req: ``[T]`` int32, the sequence of each token. A token of no sequence gets zeros.
        use_prefill_config: not read.
        out: where the result is written; None: a new tensor.
        k_scale, v_scale: numbers, for fp8 caches.
        output_gate: as many elements as ``q``. The rounded output is multiplied by its sigmoid.

    A call that our kernels cannot serve goes to vLLM's own function, and one line of the log says why.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor of other axes, fewer rows of ``logical_indices`` or ``token_to_req`` than tokens, or a gate
            of another size.
    """
    if (q.dim(), k_cache.dim(), logical_indices.dim(), block_table.dim(), token_to_req.dim()) != (3, 4, 2, 2, 1):
        _refuse_axes(
            q=(q, "[T, HQ, D]"), k_cache=(k_cache, "[pages, page_size, HKV, D]"),
            logical_indices=(logical_indices, "[T, 4 n]"), block_table=(block_table, "[B, width]"),
            token_to_req=(token_to_req, "[T]"),
        )  # fmt: skip
    name = "qsa_sparse_paged_attention"
    given = q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out, k_scale, v_scale
    kind = name, q.dtype, q.device, q.shape[-2:], k_cache.dtype, k_cache.shape[1:], logical_indices.shape[-1]
    why_not = routing.obstacle(q.dtype, q.device, routing.why_not_triton(q.device), k_cache.dtype)
    width = logical_indices.shape[-1]
    if width % 4 or width < 8:
        why_not = f"logical_indices: expected 4 n columns, the last of them a count, got {width}"
    if k_cache.shape[1] % 4:
        why_not = f"k_cache: expected pages of whole blocks of 4 keys, got {k_cache.shape[1]} keys"
    if v_cache.shape != k_cache.shape:  # the gate has the head dim of q
        why_not = f"v_cache: expected {list(k_cache.shape)} (that of k_cache), got {list(v_cache.shape)}"
    for what, tensor in (("logical_indices", logical_indices), ("token_to_req", token_to_req)):
        if tensor.shape[0] < q.shape[0]:
            raise ValueError(f"{what}: expected a row for each of {q.shape[0]} tokens, got {tensor.shape[0]}")
    if output_gate.numel() != q.numel():
        raise ValueError(f"output_gate: expected {q.numel()} elements, as many as q, got {output_gate.numel()}")
    result = torch.empty_like(q) if out is None else out

    def run() -> None:
        from nsa.integrations import qsa  # imports Triton

        of_k, of_v = (1.0 if x is None or k_cache.dtype is not E4M3 else x for x in (k_scale, v_scale))
        call = Call(q, k_cache, v_cache, block_table=block_table, out=result, scale=of_k * q.shape[-1] ** -0.5)
        qsa.attend(call, logical_indices, token_to_req, of_v, output_gate)

    if q.shape[0] and _attempt(name, kind, why_not, run):
        return result
    theirs: Tensor = _own(name)(*given, output_gate=output_gate)
    return theirs


NAMES: dict[str, Callable[..., None]] = {f.__name__: f for f in (minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode)}
MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    OPS: dict(NAMES),
    QSA_OPS: {"qsa_sparse_paged_attention": qsa_sparse_paged_attention},
}
"""Our functions by the module of vLLM that defines theirs, and by name."""
EVERY = {name: ours for names in MODULES.values() for name, ours in names.items()}


def _check_axes(q: Tensor, topk_idx: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError if a tensor of a call of MiniMax-M3 has other axes than its function's documentation says."""
    if (q.dim(), topk_idx.dim(), block_table.dim(), seq_lens.dim()) != (3, 3, 2, 1):
        _refuse_axes(
            q=(q, "[T, HQ, D]"), topk_idx=(topk_idx, "[HKV, T, n]"), block_table=(block_table, "[B, width]"),
            seq_lens=(seq_lens, "[B]"),
        )  # fmt: skip


def _refuse_axes(**given: tuple[Tensor, str]) -> None:
    """Raise ValueError for the first tensor that has not as many axes as the text beside it."""
    for name, (tensor, axes) in given.items():
        if tensor.dim() != axes.count(",") + 1:
            raise ValueError(f"{name}: expected {axes}, got {list(tensor.shape)}")


def _serve(
    name: str, given: tuple[Any, ...], q: Tensor, kv_cache: Tensor, num_kv_heads: int, k_scale: Tensor | None,
    v_scale: Tensor | None, **call: Any,
) -> None:  # fmt: skip
    """Run a call on our kernels, or on vLLM's own function with the arguments ``given``.

    Args:
        call: keywords of :func:`nsa.selection_attention_with_kvcache`.
    """
    kind = name, q.dtype, q.device, q.shape[-2:], kv_cache.dtype, kv_cache.shape[1:], num_kv_heads
    why_not = _why_not(*kind)
    if why_not is None and (k_scale is None) != (v_scale is None):
        why_not = "scales: expected both k_scale and v_scale, or neither, got one of them"
    if kv_cache.dtype is not E4M3:
        k_scale = v_scale = None
    elif k_scale is not None and v_scale is not None and k_scale.dim() > 1:
        # Scales for each token stay as they are; validation refuses them.
        k_scale, v_scale = (x.view(1) if x.numel() == 1 else x for x in (k_scale, v_scale))

    def run() -> None:
        keys, values = kv_cache.transpose(1, 2).chunk(2, -1)  # [pages, PAGE, HKV, D] each
        selection_attention_with_kvcache(
            q, keys, values, block_size=PAGE, k_scale=k_scale, v_scale=v_scale, backend="triton", **call
        )

    if not _attempt(name, kind, why_not, run):
        _own(name)(*given)


def _attempt(name: str, kind: tuple[Any, ...], why_not: str | None, run: Callable[[], None]) -> bool:
    """Whether ``run`` served a call on our kernels. If not, a line of the log says why vLLM's own kernel does.

    Args:
        kind: of the call; calls of a kind fail alike.
        why_not: why our kernels cannot serve such calls, or None if they can.
    """
    if torch.is_grad_enabled():  # vLLM disables gradients; entering `no_grad` at every call would take 5 us
        with torch.no_grad():
            return _attempt(name, kind, why_not, run)
    if why_not is None and not (broken and failures.cause_of(kind)):
        try:
            run()
        except (ValueError, TypeError) as error:  # from validation: nothing was launched
            why_not = str(error)
        except torch.OutOfMemoryError:
            why_not = "memory: our kernel's workspace did not fit"
        except failures.caught() as error:
            failures.remember(kind, name, error, "vLLM's own kernel")
        else:
            if broken:
                failures.works(kind)
            if (name, "") not in _said:
                _say(logging.INFO, name, "", "nsa's kernels serve it")
            return True
    if why_not is not None:
        _say(logging.WARNING, name, why_not.partition(":")[0], f"vLLM's own kernel serves such calls: {why_not}")
    return False


@lru_cache(maxsize=256)
def _why_not(
    name: str, dtype: torch.dtype, device: torch.device, heads: Sequence[int], keys: torch.dtype, page: Sequence[int],
    num_kv_heads: int,
) -> str | None:  # fmt: skip
    """Why our kernels cannot serve calls of a kind, or None if they can.

    Args:
        heads: ``[HQ, D]``.
        keys, page: dtype of the cache, and its shape without the number of pages.
    """
    expected = [num_kv_heads, PAGE, 2 * heads[1]]
    if list(page) != expected:
        wanted, got = (f"[pages, {str(shape)[1:]}" for shape in (expected, list(page)))
        return f"kv_cache: expected [pages, HKV, {PAGE}, 2 D] = {wanted}, got {got}"
    return routing.obstacle(dtype, device, routing.why_not_triton(device), keys)


def _own(name: str) -> Callable[..., Any]:
    """vLLM's own function."""
    if name not in _kept:
        module = next(module for module, names in MODULES.items() if name in names)
        theirs: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return _kept.get(name, theirs)  # the import may have put ours in its place
    return _kept[name]


def _say(level: int, name: str, subject: str, text: str) -> None:
    """Log a line, once for each function and subject."""
    if (name, subject) not in _said:
        _said.add((name, subject))
        logger.log(level, "%s: %s", name, text)


# --- in vLLM's place --------------------------------------------------------------------------------------------------


def plugin() -> None:
    """The entry point of ``vllm.general_plugins``. It calls :func:`install` if the setting ``vllm`` is on.

    An error of :func:`install` is logged as a warning, because the server must start without our kernels, too.
    """
    try:
        if settings.get().vllm:
            install()
    except (ValueError, ImportError, RuntimeError) as error:
        logger.warning("nsa: %s; vLLM keeps its own kernels", error)


def install() -> None:
    """Replace vLLM's functions by ours in this process, also in modules that have imported them already.

    If a module that defines some is not loaded yet, they are replaced when it is. A second call changes nothing.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its version is none of ``VERSIONS``, or the GPUs are AMD's, for which vLLM has other functions.
    """
    version = str(importlib.import_module("vllm").__version__)
    if version.partition("+")[0] not in VERSIONS:
        raise RuntimeError(f"vLLM {version} is unknown, expected one of: {', '.join(VERSIONS)}")
    if torch.version.hip is not None:
        raise RuntimeError("expected NVIDIA GPUs, got a PyTorch for AMD")
    if _hook in sys.meta_path:
        return
    sys.meta_path.insert(0, _hook)
    logger.info("nsa replaces %s in vLLM %s", ", ".join(EVERY), version)
    for name in MODULES:
        if name in sys.modules:
            _put(sys.modules[name])


def restore() -> None:
    """Undo :func:`install`. Captured CUDA graphs keep the kernels that they were captured with."""
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)
    for name, theirs in _kept.items():
        _replace(EVERY[name], theirs)
    for kind in [key for key in broken if isinstance(key, tuple) and key[0] in EVERY]:
        del broken[kind]
    for memory in (_kept, _said):
        memory.clear()


def installed() -> list[str]:
    """The loaded modules of vLLM that have our functions, in order of their names."""
    ours = list(EVERY.values())
    return sorted({module for module, _, value in _names() if any(value is f for f in ours)})


def _put(module: ModuleType) -> None:
    """Replace vLLM's functions in the module that defines them, and in all modules that imported them."""
    names = MODULES[module.__name__]
    for name, ours in names.items():
        wanted = list(inspect.signature(ours).parameters)
        theirs = getattr(module, name, None)
        taken = list(inspect.signature(theirs).parameters) if callable(theirs) else None
        if taken not in (wanted, [x for x in wanted if x not in NEWER]):
            logger.warning("nsa: %s: expected arguments %s, got %s; vLLM keeps its own kernels", name, wanted, taken)
            return
    for name, ours in names.items():
        _kept[name] = getattr(module, name)
        _replace(_kept[name], ours)
    logger.info("nsa's functions are in place in %s", ", ".join(installed()))


def _replace(old: object, new: object) -> None:
    for module, name, value in _names():
        if value is old:
            setattr(sys.modules[module], name, new)


def _names() -> Iterator[tuple[str, str, object]]:
    """``(module, name, value)`` of all names in the loaded modules of vLLM."""
    for module, loaded in list(sys.modules.items()):
        if module.partition(".")[0] == "vllm":
            for name, value in list(getattr(loaded, "__dict__", {}).items()):
                yield module, name, value


class _Loader(SourceFileLoader):
    """Loads vLLM's module and replaces its functions before another module can import them."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _put(module)


class _Hook:
    """Finds vLLM's module for :class:`_Loader`. A member of ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in MODULES else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(name, spec.loader.path)
        return spec


_hook = _Hook()
