"""One call of `nsa.select_blocks` as an object, and its checks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import validate
from nsa.kernels.shared.shape import BATCH, CACHE, E4M3, MAX_GROUP, RAGGED, VARLEN
from nsa.kernels.shared.sizes import next_power_of_2

SCORES = ("max", "relu", "softmax")
BACKENDS = ("auto", "triton", "torch", "reference")


class Request(NamedTuple):
    """The tensors and options of a call, as :func:`nsa.select_blocks` documents them; ``lists`` is filled in."""

    q: Tensor
    k: Tensor
    score: str
    n: int
    block_size: int
    lists: int
    window: int
    stride: int
    first: int
    newest: int
    tail: bool
    weights: Tensor | None
    lse: Tensor | None
    scale: float
    q_positions: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    cache_seqlens: Tensor | None
    block_table: Tensor | None
    k_scale: Tensor | None
    max_seqlen_q: int | None

    @property
    def layout(self) -> int:
        if self.cache_seqlens is not None:
            return CACHE if self.cu_q is None else RAGGED
        return BATCH if self.cu_q is None else VARLEN

    @property
    def B(self) -> int:
        return int(self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1)

    @property
    def S(self) -> int:
        """Queries of a sequence; of a packed batch, all tokens."""
        return int(self.q.shape[-3])

    @property
    def T(self) -> int:
        """Tokens of the call."""
        return math.prod(self.q.shape[:-2])

    @property
    def HK(self) -> int:
        return int(self.k.shape[-2])

    @property
    def G(self) -> int:
        """Index heads of a list."""
        return int(self.q.shape[-2]) // self.lists

    @property
    def page(self) -> int:
        """Index keys of a page; 0 without pages."""
        return 0 if self.block_table is None else int(self.k.shape[1])

    @property
    def rows(self) -> int:
        """Index keys for which a sequence has room; of a packed batch without a cache, all of them."""
        return int(self.k.shape[-3]) if self.block_table is None else self.page * int(self.block_table.shape[1])

    @property
    def size(self) -> int:
        """Index keys of a block."""
        return self.block_size // self.stride

    @property
    def blocks(self) -> int:
        """No row has more blocks to choose from."""
        tokens = self.rows * self.stride + self.window - 1
        if self.layout == BATCH and self.window > 1 and self.q_positions is None:
            tokens = min(tokens, self.S)
        return max(1, tokens // self.block_size if self.tail else -(-tokens // self.block_size))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return (*self.q.shape[:-2], self.lists, self.n + self.tail)


def request(q: Any, k: Any, cu_seqlens: Any, cache_seqlens: Any, lists: Any, scale: Any, **given: Any) -> Request:
    """Check a call, by shapes, dtypes and devices, and return it.

    Raises:
        ValueError, TypeError: an argument is wrong. The text says what was expected and what it got.
    """
    validate.check_choice("score", given["score"], SCORES)
    for name, least in (("n", 1), ("block_size", 1), ("window", 1), ("stride", 1), ("first", 0), ("newest", 0)):
        given[name] = validate.integer(given[name])
        validate.check_count(name, given[name], least)
    given["max_seqlen_q"] = validate.integer(given["max_seqlen_q"])
    if not isinstance(given["tail"], bool):
        raise TypeError(f"tail: expected a bool, got {type(given['tail']).__name__}")
    tensors = {name: given[name] for name in ("weights", "lse", "q_positions", "block_table", "k_scale")}
    pair = cu_seqlens
    if not isinstance(pair, tuple):
        pair = (cu_seqlens, None if cache_seqlens is not None else cu_seqlens)
    if len(pair) != 2:
        raise TypeError(f"cu_seqlens: expected a tensor or a pair of tensors, got a tuple of {len(pair)}")
    tensors |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pair, strict=True))
    validate.check_tensors(q=q, k=k, **{name: x for name, x in tensors.items() if x is not None})
    _check_dims(q, k, pair, cache_seqlens is not None, given["block_table"])
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _lengths(cache_seqlens, q, k, pair[0], given)
    _check_tensors(q, k, pair, cache_seqlens, given)
    HI, HK, D = q.shape[-2], k.shape[-2], q.shape[-1]
    lists = validate.integer(lists)
    if lists is None:
        lists = HI if given["score"] == "max" else HK
    validate.check_count("lists", lists, 1)
    if HK == 0 or HI % lists or lists % HK or HI == 0 or HI // lists > MAX_GROUP:
        raise ValueError(
            f"heads: expected HI = G * lists with G from 1 to {MAX_GROUP}, and lists = a multiple of HK, "
            f"got HI={HI}, lists={lists}, HK={HK}"
        )
    if scale is not None and given["score"] != "softmax":
        raise ValueError(f"scale: expected None with score={given['score']!r}, whose order has no scale, got {scale}")
    scale = D**-0.5 if scale is None else validate.number(scale)
    made = Request(
        q, k, lists=lists, scale=scale, cu_q=pair[0], cu_k=pair[1], cache_seqlens=cache_seqlens, **given
    )
    # One block holds every sequence. A larger one would be work for nothing.
    whole = next_power_of_2(made.rows + made.window // made.stride) * made.stride
    return made if made.block_size <= whole else made._replace(block_size=whole)


def _lengths(cache_seqlens: Any, q: Tensor, k: Tensor, cu_q: Tensor | None, given: dict[str, Any]) -> Tensor:
    """An int as the length of all sequences."""
    value = validate.integer(cache_seqlens)
    validate.check_count("cache_seqlens", value, 0)
    table = given["block_table"]
    rows = k.shape[1] * (1 if table is None else table.shape[1])
    room = rows * given["stride"] + given["window"] - 1
    if value > room:
        raise ValueError(f"cache_seqlens: expected an int from 0 to {room}, got {value}")
    return q.new_full((q.shape[0] if cu_q is None else cu_q.shape[0] - 1,), value, dtype=torch.int32)


def _check_dims(
    q: Tensor, k: Tensor, pair: tuple[Tensor | None, Tensor | None], cached: bool, table: Tensor | None
) -> None:
    cu_q, cu_k = pair
    k_name = "num_pages, page_size" if table is not None else "B, rows" if cached or cu_q is None else "T_k"
    validate.check_ndim("q", q, f"[{'B, S' if cu_q is None else 'T'}, HI, D]")
    validate.check_ndim("k", k, f"[{k_name}, HK, D]")
    if table is not None:
        validate.check_ndim("block_table", table, "[B, width]")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x is not None:
            validate.check_ends(name, x)


def _check_tensors(
    q: Tensor, k: Tensor, pair: tuple[Tensor | None, Tensor | None], cache_seqlens: Tensor | None, given: dict[str, Any]
) -> None:
    cu_q, cu_k = pair
    k_scale = given["k_scale"]
    stride, window, size = given["stride"], given["window"], given["block_size"]
    lead_name = "B, S" if cu_q is None else "T"
    cached = cache_seqlens is not None
    if k.dtype == E4M3:
        validate.check_dtype("q", q.dtype, validate.E4M3_QUERIES, " with k of float8_e4m3fn")
        if not cached:
            raise ValueError("k: expected float8_e4m3fn only with cache_seqlens, got it without")
    else:
        validate.check_dtype("q", q.dtype, validate.FLOAT_DTYPES)
        validate.check_dtype("k", k.dtype, (q.dtype,), " (that of q)")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected head dim {q.shape[-1]} (that of q), got {k.shape[-1]}")
    low, high = validate.HEAD_DIMS
    if not low <= q.shape[-1] <= high:
        raise ValueError(f"head dim D: expected {low} to {high}, got {q.shape[-1]}")
    validate.check_contiguous(("q", q), ("k", k))
    if size % stride or window % stride:
        raise ValueError(
            f"stride: expected a divisor of block_size and of window, got stride={stride}, block_size={size}, "
            f"window={window}"
        )
    if given["first"] + given["newest"] > given["n"]:
        got = f"first={given['first']}, newest={given['newest']}"
        raise ValueError(f"n: expected at least first + newest, got n={given['n']}, {got}")
    _check_sequences(q, k, cu_q, cu_k, cache_seqlens, given)
    lead = tuple(q.shape[:-2])
    HI, HK = q.shape[-2], k.shape[-2]
    for name, only, layout, shape in (
        ("weights", "relu", f"[{lead_name}, HI]", (*lead, HI)), ("lse", "softmax", f"[{lead_name}, HI]", (*lead, HI)),
        ("q_positions", "", f"[{lead_name}]", lead),
    ):  # fmt: skip
        x = given[name]
        if x is None:
            continue
        if only and given["score"] != only:
            raise ValueError(f"{name}: expected None with score={given['score']!r}, got a tensor")
        validate.check_shape(name, x, layout, shape)
        validate.check_dtype(name, x.dtype, validate.FLOAT_DTYPES if only else validate.INDEX_DTYPES)
    if k_scale is not None:
        if k.dtype != E4M3:
            raise ValueError("k_scale: expected None unless k is float8_e4m3fn, got a tensor")
        validate.check_dtype("k_scale", k_scale.dtype, (torch.float32,))
        if tuple(k_scale.shape) not in ((), (1,), (HK,)):
            raise ValueError(f"k_scale: expected [], [1] or [HK] = [{HK}], got {list(k_scale.shape)}")
    others = {"k": k, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "cache_seqlens": cache_seqlens}
    others |= {name: given[name] for name in ("weights", "lse", "q_positions", "block_table", "k_scale")}
    for name, x in others.items():
        if x is not None:
            validate.check_device(name, x, q.device)


def _check_sequences(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, cache_seqlens: Tensor | None, given: dict[str, Any]
) -> None:
    table, stride, window = given["block_table"], given["stride"], given["window"]
    if given["max_seqlen_q"] is not None:
        if cu_q is None:
            raise ValueError(f"max_seqlen_q: expected None without cu_seqlens, got {given['max_seqlen_q']}")
        validate.check_count("max_seqlen_q", given["max_seqlen_q"], 0)
    B = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if cache_seqlens is None:
        if table is not None:
            raise ValueError("block_table: expected None without cache_seqlens, got a tensor")
        if (cu_q is None) != (cu_k is None):
            raise TypeError("cu_seqlens: expected a tensor or a pair of tensors, got a pair with None")
        if cu_q is not None and cu_k is not None:
            if cu_q.shape != cu_k.shape:
                expected = f"{list(cu_q.shape)} (that of cu_seqlens_q)"
                raise ValueError(f"cu_seqlens_k: expected {expected}, got {list(cu_k.shape)}")
            if cu_k is cu_q and window > 1:
                raise TypeError("cu_seqlens: expected a pair (of queries, of index keys) with window > 1, got a tensor")
        rows = k.shape[-3]
    else:
        if cu_k is not None:
            raise TypeError("cu_seqlens: expected a tensor with cache_seqlens, got a pair")
        if B > validate.MAX_RAGGED and cu_q is not None:
            raise ValueError(f"cu_seqlens_q: expected {validate.MAX_RAGGED} sequences or fewer with a cache, got {B}")
        validate.check_shape("cache_seqlens", cache_seqlens, "[B]", (B,))
        validate.check_dtype("cache_seqlens", cache_seqlens.dtype, validate.INDEX_DTYPES)
        rows = k.shape[1]
        if table is not None:
            validate.check_shape("block_table", table, "[B, width]", (B, table.shape[1]))
            validate.check_dtype("block_table", table.dtype, validate.INDEX_DTYPES)
            if rows < 1:
                raise ValueError(f"k: expected pages of one key or more, got {list(k.shape)}")
            rows *= table.shape[1]
    batched = cu_q is None if cache_seqlens is None else table is None
    if batched and k.shape[0] != B:
        raise ValueError(f"k: expected [B, rows, HK, D] with B={B}, got {list(k.shape)}")
    if rows * stride + window > validate.MAX_ROOM:
        raise ValueError(f"k: expected index keys of {validate.MAX_ROOM} tokens or fewer, got {rows} of {stride} each")
