"""Calls of selectors: small random ones of every score and layout, and their tensors."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.selecting.request import Request, request

LAYOUTS = ("batch", "packed", "cache", "pages", "ragged")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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

    @property
    def id(self) -> str:
        words = [self.score, self.layout, self.dtype, f"size{self.size}", f"n{self.n}", f"G{self.groups}"]
        words += [f"stride{self.stride}"] * (self.stride > 1) + ["tail"] * self.tail + ["fp8"] * self.fp8
        words += ["positions"] * self.positions + ["nan"] * self.nan + ["integers"] * self.integers
        return "-".join([*words, str(self.seed)])

    def make(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """``q``, ``k`` and the keywords of :func:`nsa.select_blocks`."""
        rng, g = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        dtype = DTYPES[self.dtype]

        def draw(*shape: int) -> Tensor:
            x = torch.randint(-2, 3, shape, generator=g) if self.integers else torch.randn(shape, generator=g)
            return x.to(dtype)

        lists = self.key_heads * self.lists
        HI, window = lists * self.groups, self.overlap * self.stride
        how: dict[str, Any] = {
            "score": self.score, "n": self.n, "block_size": self.size * self.stride, "lists": lists,
            "window": window, "stride": self.stride, "first": self.first, "newest": self.newest, "tail": self.tail,
        }  # fmt: skip
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
            if self.fp8:
                k = k.to(torch.float8_e4m3fn)
                how["k_scale"] = torch.tensor([0.5, 2.0])[: self.key_heads]
        if self.score == "relu":
            how["weights"] = torch.randint(-1, 3, (*lead, HI), generator=g).to(dtype)
        if self.positions:
            how["q_positions"] = torch.randint(-3, self.rows * self.stride + 4, lead, generator=g)
        if self.nan and not self.fp8:
            k.view(-1, self.D)[rng.randrange(k.numel() // self.D)] = float("nan")

        def there(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(there, x))
            return x.to(device) if isinstance(x, Tensor) else x

        return q.to(device), k.to(device), {name: there(x) for name, x in how.items()}


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
    first = rng.randint(0, 1)
    dtype = rng.choice(dtypes)
    return Selecting(
        score, layout, dtype, seed, stride=rng.choice([1, 1, 2, 4]),
        overlap=rng.choice([1, 2]) if score == "softmax" else 1, size=rng.choice(sizes), key_heads=rng.choice([1, 2]),
        lists=rng.choice([1, 2, 3]), groups=rng.choice([1, 2, 3, 5]), D=rng.choice([16, 32, 24]), n=n, first=first,
        newest=rng.randint(0, min(2, n - first)), tail=rng.random() < 0.3, rows=rng.choice([6, 20, 50]),
        queries=rng.choice([1, 2, 5]), integers=rng.random() < 0.6,
        fp8=layout in ("cache", "pages", "ragged") and dtype != "fp32" and rng.random() < 0.3,
        positions=rng.random() < 0.3, nan=rng.random() < 0.2,
    )  # fmt: skip
