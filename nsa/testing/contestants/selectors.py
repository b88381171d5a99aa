"""Contestants that choose blocks: their contract, and ours."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import nsa
from nsa.selecting.request import SCORES
from nsa.testing.contestants.contract import Contestant, Contract, Declared
from nsa.testing.contestants.fit import nearest
from nsa.testing.matrix.selecting import LAYOUTS, Selecting, drawn

CASES = 60  # of a selector; with fewer than `fit.ENOUGH` it is not proved
TRIED = 4000  # seeds
ABSENT = ("weights", "lse", "scale", "q_positions", "cu_seqlens", "cache_seqlens", "block_table", "k_scale")
ARGUMENTS = ("score", "n", "block_size", "lists", "window", "stride", "first", "newest", "tail", *ABSENT)
LARGE = 20  # index keys of a block, up to which drawn sequences have several blocks


@dataclass(frozen=True)
class Selects(Contract):
    """What a selector takes. An empty tuple of sizes means any.

    scores: "max", "relu", "softmax". layouts: "batch", "packed", "cache", "pages", "ragged". dtypes, groups: as of
    `Contract`. sizes: index keys of a block. strides: tokens from one index key to the next. tails: whether it takes
    `tail`. positions: whether it takes `q_positions`. e4m3: whether it takes caches in float8_e4m3fn. nan: whether NaN
    counts as -inf.
    """

    takes: tuple[str, ...] = ("blocks",)
    scores: tuple[str, ...] = SCORES
    layouts: tuple[str, ...] = LAYOUTS
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    tails: bool = True
    positions: bool = True
    e4m3: bool = True
    nan: bool = True

    def __post_init__(self) -> None:
        for name, known in (("scores", SCORES), ("layouts", LAYOUTS)):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not given or not set(given) <= set(known):
                raise ValueError(f"{name}: expected a tuple of {', '.join(map(repr, known))}, got {given!r}")

    def has(self, case: Selecting) -> bool:
        """Whether the contract takes a case."""
        sizes = ((case.groups, self.groups), (case.size, self.sizes), (case.stride, self.strides), (case.D, self.dims))
        flags = (
            (case.tail, self.tails), (case.positions, self.positions), (case.fp8, self.e4m3), (case.nan, self.nan)
        )  # fmt: skip
        listed = case.layout in self.layouts and case.dtype in self.dtypes
        return listed and all(not taken or x in taken for x, taken in sizes) and all(ok or not x for x, ok in flags)

    @property
    def needed(self) -> list[tuple[str, bool]]:
        caches = bool({"cache", "pages", "ragged"} & set(self.layouts))
        return [
            ("n", True), ("block_size", len(self.sizes) * len(self.strides) != 1), ("stride", len(self.strides) != 1),
            ("score", len(self.scores) > 1), ("weights", "relu" in self.scores),
            ("cu_seqlens", bool({"packed", "ragged"} & set(self.layouts))), ("cache_seqlens", caches),
            ("block_table", "pages" in self.layouts), ("k_scale", self.e4m3 and caches),
            ("q_positions", self.positions), ("tail", self.tails),
        ]  # fmt: skip

    def _sized(self, case: Selecting) -> Selecting:
        """The case with the nearest sizes that the contract takes, and some blocks of them."""
        D, G = nearest(case.D, self.dims), nearest(case.groups, self.groups)
        size, stride = nearest(case.size, self.sizes), nearest(case.stride, self.strides)
        rows = case.rows if size <= LARGE else max(case.rows, (2 + case.seed % 3) * size + case.seed % size)
        return dataclasses.replace(case, D=D, groups=G, size=size, stride=stride, rows=rows)

    def not_promised(self) -> list[str]:
        words = [f"score {x}" for x in SCORES if x not in self.scores]
        words += [x for x in LAYOUTS if x not in self.layouts]
        words += [x for x in ("bf16", "fp16", "fp32") if x not in self.dtypes]
        for name, taken in (("G", self.groups), ("block size", self.sizes), ("stride", self.strides), ("D", self.dims)):
            words += [f"{name} other than {', '.join(map(str, taken))}"] if taken else []
        flags = (("tail", self.tails), ("q_positions", self.positions), ("float8_e4m3fn", self.e4m3), ("NaN", self.nan))
        return words + [name for name, promised in flags if not promised]

    def cases(self, interpreted: bool) -> list[Selecting]:
        """The calls that a selector must get right."""
        dtypes = tuple(x for x in self.dtypes if not interpreted or x != "bf16") or self.dtypes
        every = (self._sized(drawn(seed, dtypes, self.scores)) for seed in range(TRIED))
        return list(itertools.islice(filter(self.has, every), CASES))


def selector(**contract: Any) -> Callable[[Callable[..., Any]], Declared]:
    """Declare a function that chooses blocks, for `--nsa-impl module:function`.

        @nsa.testing.selector(
            scores=("max",), layouts=("pages",), dtypes=("bf16",), strides=(1,), tails=False, positions=False,
            e4m3=False,
        )
        def choose(q, k, n, block_size, lists, window, first, newest, cache_seqlens, block_table):
            ...

    The suite passes q and k by position, and those arguments of `nsa.select_blocks` by name that the signature has.

    Args:
        contract: fields of `Selects`.

    Raises:
        TypeError: `Selects` has no such field.
        ValueError: a field does not take that value.
    """
    made = Selects(**contract)
    return lambda function: Declared(function, made)


def of_function(name: str, f: Callable[..., Any], contract: Selects) -> Contestant:
    """A contestant from a selector."""
    parameters = inspect.signature(f).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    absent = dict.fromkeys(word for word in ABSENT if word in parameters)

    def selects(q: Tensor, k: Tensor, **how: Any) -> Any:
        return f(q, k, **absent | {word: x for word, x in how.items() if every or word in parameters})

    def call(*_: Any) -> Any:
        raise NotImplementedError("a selector does not attend")

    return Contestant(name, call, contract=contract, declared=True, selects=selects)


@selector(repeatable=True)
def kernels(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    """Our kernels."""
    return nsa.select_blocks(q, k, **how, backend="triton")


@selector(repeatable=True)
def plain(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    """The same in plain PyTorch."""
    return nsa.select_blocks(q, k, **how, backend="torch")


OURS = tuple(f"{__name__}:{name}" for name in ("kernels", "plain"))
