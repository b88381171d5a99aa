"""`Case`: one shape of the selection problem, with an id that a person can type. `inputs.py` draws its inputs."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from nsa.testing.matrix.inputs import draw
from nsa.testing.matrix.problem import Problem

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
CACHE = 2048  # keys that each row owns if its spans are read from a cache
LARGE = 16_384  # from this many rows on a problem is not packed, and the oracle answers only some queries
SOURCES = {
    "few": "rows", "many": "ranges", "mixed": "ranges", "decode": "blocks", "prefill": "blocks", "overlap": "ranges",
}  # fmt: skip
"""Distributions in core's order, and the usual source of each."""


@dataclass(frozen=True)
class Case:
    """One shape. `N` rows of `H` query heads select `L` keys each; `N = B·S·HKV`.

    dist: "few" (one span), "many" (8 equal spans), "mixed" (2, 4 or 8 spans of random lengths summing to `L`),
    "decode" and "prefill" (blocks: the first, the query's own, the rest random), "overlap" (4 spans or blocks that have
    keys in common and reach past the query; every third row lists nothing).
    source: how the selection is written: "rows" (packed, dense), "varlen" (packed, lengths 0..L), "ranges", "blocks".
    An empty source and `S_kv = 0` stand for the usual ones of the distribution: packed rows for few, ranges over 2,048
    keys of the row's own for many and mixed.
    """

    H: int
    D: int
    Dv: int
    L: int
    N: int
    dist: str
    dtype: str
    source: str = ""
    HKV: int = 1
    S: int = 1
    S_kv: int = 0
    block_size: int = 64
    n: int = 0  # block slots of a row; 0 = as many as L needs
    causal: bool = True
    positions: bool = False  # explicit q_positions
    int64: bool = False  # spans in int64
    seqlens: tuple[int, ...] = ()  # queries of each packed sequence (cu_seqlens); N = sum * HKV
    kv_seqlens: tuple[int, ...] = ()  # keys of each packed sequence; empty: as many as queries
    shared: float = 0.0  # prefill: the share of its blocks that a query has in common with the query before it
    scores: float = 1.0  # standard deviation of the scores; at 64, exp overflows unless the maximum is subtracted

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "source", self.source or SOURCES[self.dist])
        usual = {"rows": self.L, "varlen": self.N * self.L}.get(self.source, CACHE)
        fill(self, "S_kv", self.S_kv or max(self.kv_seqlens or self.seqlens, default=usual))
        fill(self, "n", self.n or -(-self.L // self.block_size))
        if self.source == "varlen":
            fill(self, "S", self.N)
            fill(self, "causal", False)  # one long sequence would clamp the early rows
        if self.source == "rows" and self.S_kv != self.L:
            raise ValueError(f"expected S_kv = L = {self.L} for packed rows, got {self.S_kv}")
        if self.N % (self.S * self.HKV) or self.seqlens and self.N != sum(self.seqlens) * self.HKV:
            raise ValueError(
                f"expected N = B*S*HKV with S = {self.S}, HKV = {self.HKV}, seqlens {self.seqlens}, got {self.N}"
            )
        if self.kv_seqlens and len(self.kv_seqlens) != len(self.seqlens):
            raise ValueError(f"expected kv_seqlens for {len(self.seqlens)} sequences, got {len(self.kv_seqlens)}")
        if self.shared and (self.dist != "prefill" or self.positions or self.n < 2):
            raise ValueError(f"expected shared = 0 except for a prefill of two blocks a row, got {self.shared:g}")

    @functools.cached_property
    def B(self) -> int:
        """Batch size, or sequences of a packed batch."""
        return len(self.seqlens) or self.N // (self.S * self.HKV)

    @functools.cached_property
    def HQ(self) -> int:
        """Query heads, `H * HKV`."""
        return self.H * self.HKV

    @functools.cached_property
    def lead(self) -> tuple[int, ...]:
        """The first dimensions of the queries: `(B, S)`, or `(T,)` where sequences are packed."""
        return (sum(self.seqlens),) if self.seqlens else (self.B, self.S)

    @functools.cached_property
    def sequences(self) -> list[tuple[int, int]]:
        """The queries and the keys of each sequence."""
        if not self.seqlens:
            return [(self.S, self.S_kv)] * self.B
        return list(zip(self.seqlens, self.kv_seqlens or self.seqlens, strict=True))

    @property
    def large(self) -> bool:
        """Whether a packed copy, or the oracle's answer for all rows, would take too much memory."""
        return self.N >= LARGE

    @functools.cached_property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return DTYPES[self.dtype]

    @functools.cached_property
    def id(self) -> str:
        """`H8-D128-Dv128-L512-N1024-many-bf16`, then a word for each field that differs from its usual value."""
        words = [f"H{self.H}", f"D{self.D}", f"Dv{self.Dv}", f"L{self.L}", f"N{self.N}", self.dist, self.dtype]
        usual = Case(self.H, self.D, self.Dv, self.L, self.N, self.dist, self.dtype, source=self.source)
        if self.source != SOURCES[self.dist]:
            words.append(self.source)
        words += [f"HKV{self.HKV}"] * (self.HKV != 1) + [f"S{self.S}"] * (self.S != usual.S)
        words += [f"Skv{self.S_kv}"] * (self.S_kv != usual.S_kv and not self.seqlens)
        if self.source == "blocks":
            words += [f"block{self.block_size}"] * (self.block_size != 64)
            words += [f"n{self.n}"] * (self.n != -(-self.L // self.block_size))
        words += ["noncausal"] * (self.causal != usual.causal)
        words += ["positions"] * self.positions + ["int64"] * self.int64
        words += ["seqs" + "+".join(map(str, self.seqlens))] * bool(self.seqlens)
        words += ["kvs" + "+".join(map(str, self.kv_seqlens))] * bool(self.kv_seqlens)
        words += [f"shared{self.shared:g}"] * bool(self.shared) + [f"scores{self.scores:g}"] * (self.scores != 1)
        return "-".join(words)

    def __str__(self) -> str:
        return self.id

    @functools.cached_property
    def seed(self) -> int:
        """The seed of the inputs, a hash of the id."""
        return zlib.crc32(self.id.encode())

    def fields(self) -> dict[str, object]:
        """Every field, `B`, `HQ` and the id, as JSON can hold them."""
        lists = {"seqlens": list(self.seqlens), "kv_seqlens": list(self.kv_seqlens)}
        return dataclasses.asdict(self) | lists | {"B": self.B, "HQ": self.HQ, "case": self.id}

    def make(self, device: torch.device | str, seed: int | None = None) -> Problem:
        """Draw the inputs. They are the same in every run on the same kind of device."""
        return draw(self, torch.device(device), self.seed if seed is None else seed)


def batch(
    B: int, S: int, S_kv: int, HQ: int = 64, HKV: int = 4, D: int = 128, n: int = 16, size: int = 64, **more: Any
) -> Case:
    """`S` queries of each of `B` sequences of `S_kv` keys; a query selects `n` blocks of `size` keys. In bf16.

    A decode step if `S` is 1, otherwise a prefill. more: other fields of `Case`.
    """
    how: dict[str, Any] = {"Dv": D, "dtype": "bf16", "dist": "decode" if S == 1 else "prefill"} | more
    return Case(HQ // HKV, D, L=n * size, N=B * S * HKV, HKV=HKV, S=S, S_kv=S_kv, block_size=size, n=n, **how)
