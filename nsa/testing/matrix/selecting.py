"""Calls of selectors: small random ones of every score and layout, those that models make, and their tensors."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.selecting.request import Request, request
from nsa.testing.matrix.case import DTYPES

LAYOUTS = ("batch", "packed", "cache", "pages", "ragged")


@dataclass(frozen=True)
class Selecting:
    """A call. size: index keys of a block; overlap: strides of an index key; groups: heads of a list; integers: entries
    are small integers, so that no score of ``max`` and ``relu`` is rounded.
    """

    score: str
    layout: str
    dtype: str
    seed: int
    stride: int = 1
    overlap: int = 1
    size: int = 4
    key_heads: int = 1
    lists: int = 1  # of a key head
    groups: int = 1
    D: int = 16
    n: int = 3
    first: int = 0
    newest: int = 0
    tail: bool = False
    rows: int = 20
    queries: int = 3
    integers: bool = True
    fp8: bool = False
    positions: bool = False
    nan: bool = False
    close: bool = False  # keys are nearly equal, so that only exact scores tell them apart
    astray: bool = False  # some pages of the table do not exist
    int64: bool = False  # tables and lengths

    @property
    def id(self) -> str:
        words = [self.score, self.layout, self.dtype, f"size{self.size}", f"n{self.n}", f"G{self.groups}"]
        words += [f"stride{self.stride}"] * (self.stride > 1) + ["tail"] * self.tail + ["fp8"] * self.fp8
        words += [f"D{self.D}", f"rows{self.rows}"]
        flags = ("positions", "nan", "integers", "close", "astray", "int64")
        words += [name for name in flags if getattr(self, name)]
        return "-".join([*words, str(self.seed)])

    @property
    def heads(self) -> int:
        """Index heads of a query."""
        return self.key_heads * self.lists * self.groups

    def options(self) -> dict[str, Any]:
        """The keywords of :func:`nsa.select_blocks` that are not tensors."""
        return {
            "score": self.score, "n": self.n, "block_size": self.size * self.stride, "first": self.first,
            "lists": self.key_heads * self.lists, "window": self.overlap * self.stride, "stride": self.stride,
            "newest": self.newest, "tail": self.tail,
        }  # fmt: skip

    def make(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """``q``, ``k`` and the keywords of :func:`nsa.select_blocks`."""
        rng, g = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        dtype = DTYPES[self.dtype]

        def draw(*shape: int) -> Tensor:
            x = torch.randint(-2, 3, shape, generator=g) if self.integers else torch.randn(shape, generator=g)
            return x.to(dtype)

        HI, how = self.heads, self.options()
        window = self.overlap * self.stride
        B, packed = 3, self.layout in ("packed", "ragged")
        counts = [self.queries, 0, self.queries + 1]
        ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lead = (sum(counts) + 1,) if packed else (B, self.queries)
        q = draw(*lead, HI, self.D)
        if self.layout == "packed":
            keys = [self.rows, 2, max(self.rows // 2, self.queries + 1)]
            k = draw(sum(keys) + 2, self.key_heads, self.D)
            how["cu_seqlens"] = (ends, torch.tensor([0, *itertools.accumulate(keys)], dtype=torch.int32))
        elif self.layout == "batch":
            k = draw(B, self.rows, self.key_heads, self.D)
        else:
            room = self.rows * self.stride + window - 1
            lengths = [room, rng.choice([0, 1, window]), rng.randint(room // 2, room)]
            how["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
            if self.layout == "ragged":
                how["cu_seqlens"] = ends
            if self.layout == "cache":
                k = draw(B, self.rows, self.key_heads, self.D)
            else:  # pages in any order; those of no sequence are NaN
                page = rng.choice([4, 16, 5])
                width = -(-self.rows // page)
                k = draw(B * width + 2, page, self.key_heads, self.D)
                table = torch.randperm(B * width + 2, generator=g)[: B * width].view(B, width)
                spare = torch.ones(len(k), dtype=torch.bool).index_fill(0, table.flatten(), False)
                k[spare] = float("nan")
                how["block_table"] = table.to(torch.int32)
        if self.close:
            steps = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
            near = torch.randint(0, 8, k.shape, generator=g) * steps
            k = torch.where(k.isnan(), k, (torch.rand(self.D, generator=g) + near).to(dtype))
        if self.astray and "block_table" in how:
            shape = how["block_table"].shape
            wrong = torch.tensor([-1, -(2**31), 2**31 - 1, len(k)])[torch.randint(0, 4, shape, generator=g)]
            lost = torch.rand(shape, generator=g) < 0.3
            how["block_table"] = torch.where(lost, wrong, how["block_table"]).to(torch.int32)
        if self.int64:
            for name in ("block_table", "cache_seqlens"):
                how |= {name: how[name].long()} if name in how else {}
        if self.score == "relu":
            how["weights"] = torch.randint(-1, 3, (*lead, HI), generator=g).to(dtype)
        if self.positions:
            how["q_positions"] = torch.randint(-3, self.rows * self.stride + 4, lead, generator=g)
        if self.fp8:
            k = k.to(torch.float8_e4m3fn)
            how["k_scale"] = torch.tensor([0.5, 2.0])[: self.key_heads]
        if self.nan and not self.fp8:
            k.view(-1, self.D)[rng.randrange(k.numel() // self.D)] = float("nan")

        def there(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(there, x))
            return x.to(device) if isinstance(x, Tensor) else x

        return q.to(device), k.to(device), {name: there(x) for name, x in how.items()}


@dataclass(frozen=True)
class Served(Selecting):
    """A call of a model in production. batch: sequences of equal length, of which the queries are the newest tokens.

    In the layout ``pages`` index keys lie in pages of ``page`` keys, in random order. In ``batch`` the LSE is given.
    """

    name: str = ""
    batch: int = 1
    page: int = 128
    integers: bool = False

    @property
    def id(self) -> str:
        return self.name

    def make(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        g = torch.Generator(device).manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device=device, dtype=DTYPES[self.dtype])

        q, how = draw(self.batch, self.queries, self.heads, self.D), self.options()
        if self.layout == "batch":
            k = draw(self.batch, self.rows, self.key_heads, self.D)
            return q, k, how | {"lse": lse(as_request(q, k, how))}
        width = -(-self.rows // self.page)
        table = torch.randperm(self.batch * width, generator=g, device=device)
        how["block_table"] = table.to(torch.int32).view(self.batch, width)
        # With blocks of several tokens to an index key, the last block has begun and not ended.
        tokens = self.rows * self.stride - (self.stride > 1)
        how["cache_seqlens"] = torch.full((self.batch,), tokens, dtype=torch.int32, device=device)
        return q, draw(self.batch * width, self.page, self.key_heads, self.D), how


_M3: dict[str, Any] = {"size": 128, "lists": 4, "D": 128, "n": 16, "first": 1, "newest": 1}
_QSA: dict[str, Any] = {"size": 1, "stride": 4, "groups": 4, "D": 128, "n": 512, "tail": True, "rows": 8192, "page": 16}
SERVED = (
    Served("max", "pages", "bf16", 1, name="m3-chunk4096", rows=65_536, queries=4096, **_M3),
    Served("max", "pages", "bf16", 2, name="m3-decode64", rows=65_536, queries=1, batch=64, **_M3),
    Served("relu", "pages", "bf16", 3, name="qsa-chunk2048", queries=2048, **_QSA),
    Served("relu", "pages", "bf16", 4, name="qsa-decode16", queries=1, batch=16, **_QSA),
    Served(
        "softmax", "batch", "bf16", 5, name="nsa-prompt65536", rows=4095, queries=65_536, stride=16, overlap=2, size=4,
        key_heads=4, groups=16, D=128, n=16, first=1, newest=2,
    ),
)  # fmt: skip
"""MiniMax-M3's and QSA's calls over 65,536 and 32,768 tokens, and NSA's over its compressed keys."""


def positions(r: Request) -> Tensor:
    """Of the queries of a batch or cache, int64 ``[B, S]``, without ``q_positions``."""
    s = torch.arange(r.S, device=r.q.device)
    if r.cache_seqlens is not None:
        return r.cache_seqlens[:, None] - r.S + s
    return (s + (r.rows - r.S if r.window == 1 else 0)).expand(r.B, -1)


def seen(r: Request) -> Tensor:
    """How many index keys each of these queries sees, int64 ``[B, S]``."""
    keys = torch.div(positions(r) + 1 - r.window, r.stride, rounding_mode="floor") + 1
    return keys.clamp(0, r.rows)


def lse(r: Request, step: int = 1024) -> Tensor:
    """The natural LSE of the scaled scores of a batch, fp32 ``[B, S, HI]``; -inf where a query sees no key."""
    out, keys = r.q.new_empty(r.q.shape[:-1], dtype=torch.float32), torch.arange(r.rows, device=r.q.device)
    visible = keys < seen(r)[..., None]  # [B, S, rows]
    for begin in range(0, r.S, step):
        here = slice(begin, begin + step)
        q = r.q[:, here].unflatten(2, (r.HK, -1))
        s = torch.einsum("bshgd,bkhd->bshgk", q, r.k).float() * r.scale
        s.masked_fill_(~visible[:, here, None, None], -torch.inf)
        out[:, here] = torch.logsumexp(s, -1).flatten(2)
    return out


def as_request(q: Tensor, k: Tensor, how: dict[str, Any]) -> Request:
    """The call as the judge reads it."""
    absent = dict.fromkeys(("weights", "lse", "q_positions", "block_table", "k_scale", "max_seqlen_q"))
    rest = absent | {"score": "max", "window": 1, "stride": 1, "first": 0, "newest": 0, "tail": False} | how
    apart = [rest.pop(name, None) for name in ("cu_seqlens", "cache_seqlens", "lists", "scale")]
    return request(q, k, *apart, **rest)


def drawn(seed: int, dtypes: tuple[str, ...], scores: tuple[str, ...] = ("max", "relu", "softmax")) -> Selecting:
    """A random call. Layouts and scores go in turn."""
    rng = random.Random(seed)
    score, layout = scores[seed % len(scores)], LAYOUTS[seed // len(scores) % len(LAYOUTS)]
    sizes = [2, 4, 8] if score == "softmax" else [1, 2, 4, 8, 16, 3, 20]
    n = rng.randint(1, 6)
    first = rng.randint(0, min(2, n))
    dtype = rng.choice(dtypes)
    exact = rng.random() < 0.6
    return Selecting(
        score, layout, dtype, seed, stride=rng.choice([1, 1, 2, 4]), overlap=rng.choice([1, 2]),
        size=rng.choice(sizes), key_heads=rng.choice([1, 2]), lists=rng.choice([1, 2, 3]),
        groups=rng.choice([1, 2, 3, 5]), D=rng.choice([16, 32, 24, 128]), n=n, first=first,
        newest=rng.randint(0, min(3, n - first)), tail=rng.random() < 0.3, rows=rng.choice([6, 20, 50, 150]),
        queries=rng.choice([1, 2, 5]), integers=exact, close=not exact and rng.random() < 0.5,
        fp8=layout in ("cache", "pages", "ragged") and dtype != "fp32" and exact and rng.random() < 0.5,
        positions=rng.random() < 0.3, nan=rng.random() < 0.2, astray=rng.random() < 0.3, int64=rng.random() < 0.3,
    )  # fmt: skip
