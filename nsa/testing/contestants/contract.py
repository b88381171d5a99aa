"""A contestant: an implementation that is tested or timed, and the contract that says what it takes and promises.

Our kernels, kernels of others and SDPA are all `Contestant`s. The suite draws inputs within a contract (`fit.py`). A
kernel is judged on what it promises, and the verdict lists what it does not promise.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

import nsa.kernels
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.testing.judge.forward import Result
from nsa.testing.matrix.case import DTYPES, Case
from nsa.testing.matrix.problem import Problem

Call = Callable[[Problem, bool, "Tensor | None"], Any]
Support = Callable[[Case], "str | None"]
SOURCES = ("ranges", "blocks", "rows", "varlen")
CACHES = ("contiguous", "pages")
NEEDS = {
    "sorted": "selections in any order",
    "padding last": "padding in any slot",
    "distinct": "a key listed twice",
    "visible": "blocks or spans ahead of the query or outside of the keys",
    "nonempty": "rows that select nothing",
    "one list": "a list of its own for each KV head",
    "own block": "rows that do not list the query's own block",
    "some queries": "calls without a query",
    "contiguous": "strided tensors",
    "finite": "NaN in keys that no row selects",
    "small scores": "scores that overflow exp",
    "default scale": "a scale other than D**-0.5",
}
"""What a kernel may need of its inputs, and the inputs that a kernel with this need does not take."""


@dataclass(frozen=True)
class Contract:
    """What a contestant takes and promises. An empty tuple of sizes means any size.

    takes: forms of the selection: "ranges", "blocks", packed "rows" or packed "varlen". dtypes: "bf16", "fp16", "fp32".
    dims: head dimensions D. unequal_dims: whether Dv may differ from D; value_dims lists Dv. groups: query heads per KV
    head. block_sizes: keys of a block. causal: values of `causal`. chunks: whether S may differ from S_kv. sequences:
    whether it takes `cu_seqlens`. positions: whether it takes `q_positions`. int64: whether it takes int64 selections.
    caches: "contiguous", "pages". pages: keys of a page. fp8: whether it takes caches in float8_e4m3fn with a scale for
    each KV head (`k_scale`, `v_scale`). ragged: whether it takes packed queries of sequences over caches, with
    `cu_seqlens_q`. needs: preconditions, keys of `NEEDS`. lse: base of the LSE, "e" or "2"; empty if it returns none.
    gradients: autograd through O. repeatable: calls give equal bits.
    """

    takes: tuple[str, ...] = ("ranges",)
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    dims: tuple[int, ...] = ()
    value_dims: tuple[int, ...] = ()
    unequal_dims: bool = True
    groups: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    causal: tuple[bool, ...] = (True, False)
    chunks: bool = True
    sequences: bool = False
    positions: bool = False
    int64: bool = True
    caches: tuple[str, ...] = ()
    pages: tuple[int, ...] = ()
    fp8: bool = False
    ragged: bool = False
    needs: tuple[str, ...] = ()
    lse: str = ""
    gradients: bool = False
    repeatable: bool = False

    def __post_init__(self) -> None:
        known: dict[str, tuple[Any, ...]] = {
            "takes": SOURCES, "dtypes": tuple(DTYPES), "caches": CACHES, "needs": tuple(NEEDS), "causal": (True, False)
        }  # fmt: skip
        for name, values in known.items():
            given = getattr(self, name)
            if not isinstance(given, tuple) or not set(given) <= set(values):
                raise ValueError(f"{name}: expected a tuple of {', '.join(map(repr, values))}, got {given!r}")
        for name in ("dims", "value_dims", "groups", "block_sizes", "pages"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(x, int) and x > 0 for x in given):
                raise ValueError(f"{name}: expected a tuple of sizes, such as (64, 128), got {given!r}")
        for name in ("takes", "dtypes", "causal"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got an empty tuple")
        if self.lse not in ("", "e", "2"):
            raise ValueError(f"lse: expected 'e', '2' or '', got {self.lse!r}")
        for name in ("fp8", "ragged"):
            if getattr(self, name) and not self.caches:
                raise ValueError(f"{name}: expected False without caches, got True: name them in caches=")
        if self.fp8 and self.dtypes == ("fp32",):
            raise ValueError("fp8: expected bf16 or fp16 among dtypes, those of the queries, got only 'fp32'")
        packed = {"rows", "varlen"} & set(self.takes)
        if packed and len(self.takes) > 1:
            raise ValueError(f"takes: expected rows or varlen alone, got {self.takes!r}: write an adapter for each")

    @property
    def needed(self) -> list[tuple[str, bool]]:
        """Arguments of a call, each with whether the contract promises something that takes it."""
        packed = bool({"rows", "varlen"} & set(self.takes))
        of_source = {"ranges": "ranges", "blocks": "block_indices", "varlen": "cu_seqlens"}
        return [(of_source[source], True) for source in self.takes if source in of_source] + [
            ("causal", len(self.causal) > 1 and not packed), ("cu_seqlens", self.sequences and not packed),
            ("q_positions", self.positions and not packed), ("cache_seqlens", bool(self.caches)),
            ("block_table", "pages" in self.caches), ("cu_seqlens_q", self.ragged),
            ("k_scale", self.fp8), ("v_scale", self.fp8), ("scale", "default scale" not in self.needs),
        ]  # fmt: skip

    def refuses(self, case: Case) -> str | None:
        """Why the contract excludes a case; None if it does not."""
        sizes = (
            ("D", case.D, self.dims), ("G", case.H, self.groups), ("Dv", case.Dv, self.value_dims),
            ("block_size", case.block_size, self.block_sizes if case.source == "blocks" else ()),
            ("dtype", case.dtype, self.dtypes), ("causal", case.causal, self.causal),
        )  # fmt: skip
        if case.source not in self.takes:
            return f"takes {' or '.join(self.takes)}, not {case.source}"
        for name, value, taken in sizes:
            packed = name == "causal" and case.source in ("rows", "varlen")
            if taken and value not in taken and not packed:
                return f"takes {name} {', '.join(map(str, taken))}, not {value}"
        uneven = case.kv_seqlens not in ((), case.seqlens) if case.seqlens else case.S != case.S_kv
        if not self.chunks and case.source not in ("rows", "varlen") and uneven:
            return "takes only calls with as many keys as queries"
        flags = (
            ("cu_seqlens", bool(case.seqlens), self.sequences), ("q_positions", case.positions, self.positions),
            ("Dv != D", case.D != case.Dv, self.unequal_dims), ("int64", case.int64, self.int64),
        )  # fmt: skip
        return next((f"does not take {name}" for name, asked, taken in flags if asked and not taken), None)

    def not_promised(self) -> list[str]:
        """What the contract does not promise, in words."""
        packed = self.takes[0] in ("rows", "varlen")
        words = [NEEDS[need] for need in self.needs]
        sizes = (("D", self.dims), ("G", self.groups), ("block size", () if packed else self.block_sizes))
        words += [f"{name} other than {', '.join(map(str, taken))}" for name, taken in sizes if taken]
        words += [name for name in ("bf16", "fp16", "fp32") if name not in self.dtypes]
        words += ["Dv != D"] * (not self.unequal_dims)
        if not packed:
            words += ["causal=False"] * (False not in self.causal) + ["causal=True"] * (True not in self.causal)
            words += ["S != S_kv"] * (not self.chunks) + ["cu_seqlens"] * (not self.sequences)
            words += ["q_positions"] * (not self.positions) + ["int64 selections"] * (not self.int64)
            words += [f"caches ({kind})" for kind in CACHES if kind not in self.caches]
            if self.caches:
                words += ["caches in fp8"] * (not self.fp8) + ["ragged queries"] * (not self.ragged)
        words += ["LSE"] * (not self.lse) + ["gradients"] * (not self.gradients)
        return words + ["equal bits each time"] * (not self.repeatable)


class OtherWork(NamedTuple):
    """What a comparator computes instead of the selection.

    flops: FLOP of a problem; a multiply-add counts as two. check: raises AssertionError if the output is wrong.
    """

    flops: Callable[[Problem], int]
    check: Callable[[Problem, Tensor], None]


def always(case: Case) -> str | None:
    """None, for implementations that take every case."""
    return None


@dataclass(frozen=True)
class Contestant:
    """An implementation that is tested or timed.

    call: runs a `Problem`, `call(p, return_lse, out)`. route: for our kernels, the route that a call must launch.
    supports: None for a case that it takes, otherwise the reason why not. poison: whether the call takes `out`.
    lse: whether it returns an LSE. other: what it computes instead of the selection. contract: None for comparators.
    declared: whether the author wrote the contract. cached: runs a call over a cache, `cached(q, cache, **selection)`.
    selects: chooses blocks, `selects(q, k, **how)`. Such a contestant has a contract of `selectors.Selects`, and does
    not attend.
    """

    name: str
    call: Call
    route: str | None = None
    supports: Support = always
    poison: bool = False
    lse: bool = True
    other: OtherWork | None = None
    contract: Contract | None = None
    declared: bool = False
    cached: Callable[..., Any] | None = field(default=None, compare=False)
    selects: Callable[..., Any] | None = field(default=None, compare=False)

    def run(self, p: Problem, return_lse: bool = False, out: Tensor | None = None) -> Result:
        """`O [B,S,HQ,Dv]`, with `return_lse` also `LSE [B,S,HQ]`. A `NotImplementedError` means unsupported."""
        result = self.call(p, return_lse, out)
        if isinstance(result, tuple):
            return result[0].view_as(p.q[..., :1].expand(*p.q.shape[:-1], p.case.Dv)), result[1].view(p.q.shape[:-1])
        assert isinstance(result, Tensor)
        return result.view(*p.q.shape[:-1], p.case.Dv)

    def run_counted(self, p: Problem, return_lse: bool = False) -> tuple[Result, Counter[str]]:
        """Run, with an output full of NaN if the call takes `out`, and count launches of our kernels."""
        before = nsa.kernels.launches.copy()
        out = p.q.new_full((*p.q.shape[:-1], p.case.Dv), math.nan) if self.poison else None
        with poisoned_workspace() if self.route in ("key_major", "union", "small_blocks") else contextlib.nullcontext():
            result = self.run(p, return_lse and self.lse, out)
        if out is not None:
            got = result[0] if isinstance(result, tuple) else result
            assert got.data_ptr() == out.data_ptr(), f"{self.name}: expected the result in out=, got another tensor"
        return result, nsa.kernels.launches - before

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Declared:
    """A function and its contract, made by the decorator `contestant`. Calling it calls the function."""

    function: Callable[..., Any]
    contract: Contract

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def contestant(**contract: Any) -> Callable[[Callable[..., Any]], Declared]:
    """Declare what an adapter takes and promises, for `--nsa-impl module:adapter`.

        @nsa.testing.contestant(takes=("blocks",), dims=(128,), needs=("sorted", "padding last"))
        def attend(q, k, v, block_indices, block_size, scale):
            return my_kernel(q, k, v, block_indices, block_size, scale)

    The suite passes q, k and v by position. It passes other arguments (`named.ARGUMENTS`) by name, if the adapter's
    signature has them.

    Args:
        contract: fields of `Contract`.

    Raises:
        TypeError: `Contract` has no such field.
        ValueError: a field does not take that value.
    """
    known = [x.name for x in fields(Contract)]
    if unknown := [name for name in contract if name not in known]:
        raise TypeError(f"{', '.join(unknown)}: expected fields of a contract, which are {', '.join(known)}")
    made = Contract(**contract)
    return lambda function: Declared(function, made)
