"""Checks a call and returns its dimensions, or raises an error that says what was expected.

Checks use shapes, dtypes, devices and strides, never values, so that nothing is read from the device. Calls with the
same :meth:`Call.key` are checked once, because `nsa.routing` remembers their plan.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from nsa import hints
from nsa.call import Call
from nsa.kernels import families
from nsa.kernels.shared.shape import E4M3, MAX_GROUP, Shape, shape_of

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
E4M3_QUERIES = (torch.float16, torch.bfloat16)  # dtypes of queries over such a cache
BACKENDS = ("auto", "triton", "sdpa", "reference")
SCHEDULES = ("auto", *families.SCHEDULES)
HEAD_DIMS = (16, 256)
MAX_RAGGED = 128**2  # sequences of a ragged batch: kernels find a token's sequence in two steps of 128
MAX_ROOM = 2**30 - 256  # keys of a sequence in a page table: the ends of their blocks and tiles must fit int32


def check_tensors(**named: Any) -> None:
    """Raise ``TypeError`` for the first argument that is not a tensor."""
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def number(scale: Any) -> Any:
    """``scale`` as a float, or as the symbol of a compiler.

    Raises:
        TypeError: ``scale`` is not a number. A tensor is refused, too, because reading it would sync.
    """
    if isinstance(scale, (torch.SymFloat, torch.SymInt)):
        return scale
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    return float(scale)


def integer(size: Any) -> Any:
    """``size`` as an int if it is an integer of NumPy. Other values stay as they are, to be checked."""
    return size if isinstance(size, int) or not isinstance(size, numbers.Integral) else int(size)


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(int(s)) for s in shape) + "]"


def check_ndim(name: str, m: Tensor, layout: str, hint: str = "") -> None:
    if len(m.shape) != layout.count(",") + 1:
        hint = hint or hints.packed(m.shape, layout)
        raise ValueError(f"{name}: expected {layout}, got shape {_shape(m.shape)}{hint}")


def check_shape(name: str, m: Tensor, layout: str, expected: tuple[int, ...], of: Call | None = None) -> None:
    if tuple(m.shape) != expected:
        hint = "" if of is None else hints.transposed(of, MAX_GROUP)
        raise ValueError(f"{name}: expected {layout} = {_shape(expected)}, got {_shape(m.shape)}{hint}")


def check_device(name: str, m: Tensor, device: torch.device, of: str = "q") -> None:
    if m.device != device:
        raise ValueError(f"{name}: expected device {device} (that of {of}), got {m.device}")


def check_dtype(name: str, dtype: torch.dtype, accepted: tuple[torch.dtype, ...], why: str = "") -> None:
    if dtype not in accepted:
        raise TypeError(f"{name}: expected dtype {_dtypes(accepted)}{why}, got {_dtypes((dtype,))}")


def _check_index(name: str, m: Tensor, device: torch.device, of: str = "q") -> None:
    check_dtype(name, m.dtype, INDEX_DTYPES)
    check_device(name, m, device, of)


def check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name}: expected one of {', '.join(accepted)}, got {value!r}")


def check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {value}")


def _check_out(out: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    """Check the shape of ``out``, and that its elements do not overlap in memory, as PyTorch does for ``out=``."""
    check_shape("out", out, layout, shape)
    if torch.compiler.is_compiling():  # a compiler cannot sort symbolic strides, and copies the result to `out`
        return
    reach, axes = 0, sorted(zip(out.stride(), out.shape, strict=True))  # reach: offset of the last element so far
    for stride, size in axes:
        if size > 1 and stride <= reach:
            raise ValueError(f"out: expected no elements that share memory, got strides {out.stride()}")
        reach += stride * (size - 1)


def _check_alike(q_name: str, q: Tensor, *named: tuple[str, Tensor | None]) -> None:
    """Check that all tensors have the floating dtype and the device of the first one."""
    check_dtype(q_name, q.dtype, FLOAT_DTYPES)
    for name, m in named:
        if m is not None:
            check_dtype(name, m.dtype, (q.dtype,), f" (that of {q_name})")
            check_device(name, m, q.device, q_name)


def _check_floats(q_name: str, q: Tensor, *named: tuple[str, Tensor | None]) -> None:
    """Check what :func:`_check_alike` checks, and that the last dimensions are contiguous."""
    _check_alike(q_name, q, *named)
    check_contiguous((q_name, q), *named)


def check_contiguous(*named: tuple[str, Tensor | None]) -> None:
    for name, m in named:
        if m is not None and m.stride()[-1:] not in ((), (1,)):
            raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got a strided one")


def check_ends(name: str, m: Tensor) -> None:
    if len(m.shape) != 1 or m.shape[0] < 1:
        raise ValueError(f"{name}: expected [B + 1] with B >= 0, got shape {_shape(m.shape)}")
    check_dtype(name, m.dtype, INDEX_DTYPES)


def _check_sequences(call: Call) -> int:
    """Check ``cu_seqlens``, or ``cu_seqlens_q`` of a call over a cache. Returns the number of sequences."""
    assert call.cu_seqlens_q is not None
    for name, m in (("cu_seqlens_q", call.cu_seqlens_q), ("cu_seqlens_k", call.cu_seqlens_k)):
        if m is not None:
            check_ends(name, m)
            check_device(name, m, call.q.device)
    if call.cu_seqlens_k is not None and call.cu_seqlens_q.shape != call.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {_shape(call.cu_seqlens_q.shape)} (that of cu_seqlens_q), "
            f"got {_shape(call.cu_seqlens_k.shape)}"
        )
    B = call.cu_seqlens_q.shape[0] - 1
    if call.cache_seqlens is not None and B > MAX_RAGGED:
        raise ValueError(f"cu_seqlens_q: expected {MAX_RAGGED} sequences or fewer with a cache, got {B}")
    return B


def _check_selection(call: Call, lead: tuple[int, ...], lead_name: str, HKV: int) -> int | None:
    """Check ``ranges`` or ``block_indices``, and ``max_selected``. Returns the host's bound of a row's keys."""
    if (call.ranges is None) == (call.block_indices is None):
        got = "neither" if call.ranges is None else "both"
        raise ValueError(f"selection: expected exactly one of ranges and block_indices, got {got}")
    bound = call.max_selected
    if bound is not None:
        check_count("max_selected", bound, 0)
    if call.ranges is not None:
        if call.block_size is not None:
            raise ValueError(f"block_size: expected None with ranges, got {call.block_size}")
        layout = f"[{lead_name}, HKV, n, 2]"
        check_ndim("ranges", call.ranges, layout)
        check_shape("ranges", call.ranges, layout, (*lead, HKV, call.ranges.shape[-2], 2), call)
        _check_index("ranges", call.ranges, call.q.device)
        return bound
    assert call.block_indices is not None
    if call.block_size is None:
        raise ValueError("block_size: expected an int >= 1 with block_indices, got None")
    check_count("block_size", call.block_size, 1)
    layout = f"[{lead_name}, HKV, n]"
    check_ndim("block_indices", call.block_indices, layout)
    n = call.block_indices.shape[-1]
    check_shape("block_indices", call.block_indices, layout, (*lead, HKV, n), call)
    _check_index("block_indices", call.block_indices, call.q.device)
    return n * call.block_size if bound is None else min(bound, n * call.block_size)


def _check_cache(call: Call, B: int, S_kv: int) -> None:
    """Check the arguments that only a call with a cache has."""
    lengths, table = call.cache_seqlens, call.block_table
    assert lengths is not None
    check_shape("cache_seqlens", lengths, "[B]", (B,))
    _check_index("cache_seqlens", lengths, call.q.device)
    if table is None:
        return
    check_ndim("block_table", table, "[B, width]")
    check_shape("block_table", table, "[B, width]", (B, table.shape[1]))
    _check_index("block_table", table, call.q.device)
    if S_kv < 1:
        raise ValueError(f"k_cache: expected pages of one key or more, got {_shape(call.k.shape)}")
    room = S_kv * table.shape[1]
    if room > MAX_ROOM:
        raise ValueError(
            f"block_table: expected room for {MAX_ROOM} keys or fewer, got {_shape(table.shape)} with pages of {S_kv} "
            "keys"
        )


def _check_cache_floats(call: Call) -> None:
    """Check dtypes and devices of a call with a cache, and its scales, which only a cache of ``E4M3`` has."""
    q, k, v, HKV = call.q, call.k, call.v, call.k.shape[-2]
    scales = ("k_scale", call.k_scale), ("v_scale", call.v_scale)
    if k.dtype != E4M3:
        if q.dtype in E4M3_QUERIES and k.dtype not in FLOAT_DTYPES:
            check_dtype("k_cache", k.dtype, (q.dtype, E4M3))
        _check_floats("q", q, ("k_cache", k), ("v_cache", v), ("out", call.out))
        for name, scale in scales:
            if scale is not None:
                raise ValueError(f"{name}: expected None with a cache of {_dtypes((k.dtype,))}, got a tensor")
        return
    check_dtype("q", q.dtype, E4M3_QUERIES, f" with a cache of {_dtypes((E4M3,))}")
    check_dtype("v_cache", v.dtype, (E4M3,), " (that of k_cache)")
    _check_alike("q", q, ("out", call.out))
    check_contiguous(("q", q), ("k_cache", k), ("v_cache", v), ("out", call.out))
    for name, m in (("k_cache", k), ("v_cache", v), *scales):
        if m is not None:
            check_device(name, m, q.device)
    for name, scale in scales:
        if scale is not None:
            check_dtype(name, scale.dtype, (torch.float32,))
        if scale is not None and tuple(scale.shape) not in ((), (1,), (HKV,)):
            raise ValueError(f"{name}: expected [], [1] or [HKV] = [{HKV}], got {_shape(scale.shape)}")


def lengths(cache_seqlens: Any, q: Any, k_cache: Any, block_table: Any, cu_seqlens_q: Any) -> Tensor:
    """``cache_seqlens`` as a tensor. An int is the length of all sequences: it becomes ``[B]`` int32 on ``q``'s device.

    Only an int is checked here, because the host knows it; kernels clamp the lengths in a tensor. Raises TypeError for
    another type, and ValueError for an int that is negative or larger than the room of a sequence.
    """
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    cache_seqlens = integer(cache_seqlens)
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (int, torch.SymInt)):
        raise TypeError(f"cache_seqlens: expected a torch.Tensor or an int, got {type(cache_seqlens).__name__}")
    check_tensors(q=q, k_cache=k_cache)
    sequences = q.shape[:1]
    if cu_seqlens_q is None:
        check_ndim("q", q, "[B, S, HQ, D]", hints.RAGGED)
    else:
        check_tensors(cu_seqlens_q=cu_seqlens_q)
        check_ends("cu_seqlens_q", cu_seqlens_q)
        sequences = (cu_seqlens_q.shape[0] - 1,)
    if block_table is None:
        check_ndim("k_cache", k_cache, "[B, S_max, HKV, D]")
        room = k_cache.shape[1]
    else:
        check_tensors(block_table=block_table)
        check_ndim("k_cache", k_cache, "[num_pages, page_size, HKV, D]")
        check_ndim("block_table", block_table, "[B, width]")
        room = k_cache.shape[1] * block_table.shape[1]
    if not 0 <= cache_seqlens <= room:
        raise ValueError(f"cache_seqlens: expected an int from 0 to {room}, got {cache_seqlens}")
    filled: Tensor = q.new_full(sequences, cache_seqlens, dtype=torch.int32)
    return filled


def check(call: Call) -> Shape:
    """Check a call and return its shape. Raises as :func:`check_bound`."""
    return shape_of(call, check_bound(call))


def check_bound(call: Call) -> int | None:
    """Check a call. Returns an upper bound of the keys of a row, if the host knows one.

    Raises:
        ValueError, TypeError: an argument is wrong. The text says what was expected and what it got.
    """
    check_choice("backend", call.backend, BACKENDS)
    check_choice("schedule", call.schedule, SCHEDULES)
    if call.schedule != "auto" and call.backend in ("sdpa", "reference"):
        raise ValueError(f"schedule: expected auto with backend={call.backend!r}, got {call.schedule!r}")
    if not isinstance(call.causal, bool):
        raise TypeError(f"causal: expected a bool, got {type(call.causal).__name__}")
    varlen, cached = call.cu_seqlens_q is not None, call.cache_seqlens is not None
    if not cached and varlen != (call.cu_seqlens_k is not None):
        raise TypeError("cu_seqlens: expected a tensor or a pair of tensors, got a pair with None")
    if call.max_seqlen_q is not None:
        if not varlen:
            raise ValueError(f"max_seqlen_q: expected None without cu_seqlens_q, got {call.max_seqlen_q}")
        check_count("max_seqlen_q", call.max_seqlen_q, 0)
    lead_name = "T" if varlen else "B, S"
    kv_name = "B, S_max" if cached else "T_kv" if varlen else "B, S_kv"
    if call.block_table is not None:
        kv_name = "num_pages, page_size"
    check_ndim("q", call.q, f"[{lead_name}, HQ, D]", hints.RAGGED if cached and not varlen else "")
    k_name, v_name = ("k_cache", "v_cache") if cached else ("k", "v")
    check_ndim(k_name, call.k, f"[{kv_name}, HKV, D]")
    check_ndim(v_name, call.v, f"[{kv_name}, HKV, Dv]")
    if call.cache_seqlens is None:
        _check_floats("q", call.q, ("k", call.k), ("v", call.v), ("out", call.out))
    else:
        _check_cache_floats(call)

    lead = tuple(call.q.shape[:-2])
    HQ, D = call.q.shape[-2:]
    S_kv, HKV = call.k.shape[-3:-1]
    Dv = call.v.shape[-1]
    B = _check_sequences(call) if varlen else lead[0]
    k_lead: tuple[int, ...] = (B, S_kv) if cached or not varlen else (S_kv,)
    if call.block_table is not None:
        k_lead = tuple(call.k.shape[:2])
    check_shape(k_name, call.k, f"[{kv_name}, HKV, D]", (*k_lead, HKV, D))
    check_shape(v_name, call.v, f"[{kv_name}, HKV, Dv]", (*k_lead, HKV, Dv))
    for name, dim in (("D", D), ("Dv", Dv)):
        if not HEAD_DIMS[0] <= dim <= HEAD_DIMS[1]:
            raise ValueError(f"head dim {name}: expected {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, got {dim}")
    if HKV == 0 or HQ % HKV or not 1 <= HQ // HKV <= MAX_GROUP:
        hint = hints.transposed(call, MAX_GROUP)
        raise ValueError(f"heads: expected HQ = G * HKV with G from 1 to {MAX_GROUP}, got HQ={HQ}, HKV={HKV}{hint}")

    if cached:
        _check_cache(call, B, S_kv)
    bound = _check_selection(call, lead, lead_name, HKV)
    if call.q_positions is not None:
        if not call.causal:
            raise ValueError("causal: expected True with q_positions, which causal=False does not read, got False")
        check_shape("q_positions", call.q_positions, f"[{lead_name}]", lead)
        _check_index("q_positions", call.q_positions, call.q.device)
    if call.out is not None:
        _check_out(call.out, f"[{lead_name}, HQ, Dv]", (*lead, HQ, Dv))
    return bound


def check_rows(call: Call) -> Shape:
    """Check packed rows: ``Q [N, H, D]`` with ``K [N, L, D]``, or ``K_all [sum L, D]`` and ``cu_seqlens [N + 1]``.

    Shapes, dtypes and devices are checked here, so that errors contain the caller's names. Everything else is checked
    by :func:`check`, on views with one query position per row.
    """
    q, k, v, cu, out = call.q, call.k, call.v, call.cu_seqlens_k, call.out
    check_ndim("Q", q, "[N, H, D]")
    layout, k_name, v_name = ("[N, L, D]", "K", "V") if cu is None else ("[sum L, D]", "K_all", "V_all")
    v_layout = layout.replace("D", "Dv")
    check_ndim(k_name, k, layout)
    check_ndim(v_name, v, v_layout)
    N, H, D = q.shape
    keys = k.shape[:-1] if cu is not None else (N, *k.shape[1:-1])
    check_shape(k_name, k, layout, (*keys, D))
    check_shape(v_name, v, v_layout, (*keys, v.shape[-1]))
    if q.dtype == torch.float64:
        raise TypeError("Q: expected dtype float16, bfloat16, float32, got float64")
    _check_floats("Q", q, (k_name, k), (v_name, v), ("out", out))
    if out is not None:
        _check_out(out, "[N, H, Dv]", (N, H, v.shape[-1]))
    nothing = torch.empty((N, 1, 0, 2), dtype=torch.int32, device=q.device)
    if cu is None:
        view = Call(q[:, None], k[:, :, None], v[:, :, None], ranges=nothing[:, None], max_selected=call.max_selected)
        return shape_of(call, check_bound(view))
    _check_index("cu_seqlens", cu, q.device, "Q")
    if cu.shape != (N + 1,):
        raise ValueError(f"cu_seqlens: expected [N + 1] = [{N + 1}], got {_shape(cu.shape)}")
    view = Call(q, k[:, None], v[:, None], ranges=nothing, max_selected=call.max_selected)
    return shape_of(call, check_bound(view._replace(cu_seqlens_q=cu, cu_seqlens_k=cu)))


def check_packing(k: Tensor, v: Tensor, ranges: Tensor, max_selected: int | None) -> None:
    """Check the arguments of ``pack_rows``."""
    layout = "[B, S, HKV, n, 2]"
    check_ndim("k", k, "[B, S_kv, HKV, D]")
    check_ndim("v", v, "[B, S_kv, HKV, Dv]")
    check_ndim("ranges", ranges, layout)
    _check_alike("k", k, ("v", v))
    for name, m in (("k", k), ("v", v)):
        if m.shape[3] < 1:
            raise ValueError(f"{name}: expected a head dim of 1 or more, got shape {_shape(m.shape)}")
    B, S_kv, HKV, _ = k.shape
    check_shape("v", v, "[B, S_kv, HKV, Dv]", (B, S_kv, HKV, v.shape[3]))
    check_shape("ranges", ranges, layout, (B, ranges.shape[1], HKV, ranges.shape[3], 2))
    _check_index("ranges", ranges, k.device, "k")
    if max_selected is not None:
        check_count("max_selected", integer(max_selected), 0)


def check_blocks(block_indices: Any, block_size: Any, seqlen_k: Any) -> None:
    """Check the arguments of ``ranges_from_blocks``. This must be cheap, because packed SDPA calls it, too."""
    check_tensors(block_indices=block_indices)
    check_dtype("block_indices", block_indices.dtype, INDEX_DTYPES)
    check_count("block_size", integer(block_size), 1)
    if seqlen_k is not None:
        check_count("seqlen_k", integer(seqlen_k), 0)
