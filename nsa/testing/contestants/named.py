"""A contestant by name: `--nsa-impl package.module:function` (docs/proving.md says how it is called)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.testing.contestants.contract import Contestant, Contract, Declared
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.problem import Problem

ARGUMENTS = {
    "ranges": ("ranges", "causal", "scale", "return_lse", "q_positions", "cu_seqlens"),
    "blocks": ("block_indices", "block_size", "causal", "scale", "return_lse", "q_positions", "cu_seqlens"),
    "rows": ("scale", "return_lse"),
    "varlen": ("cu_seqlens", "scale", "return_lse"),
}
"""What a call has beside q, k and v, by how keys are selected. Of a cache: also `cache_seqlens` and `block_table`."""
OF_CACHES = ("cache_seqlens", "block_table")
UNDECLARED = {"": "ranges", "blocks": "blocks", "dense": "rows"}


def load(spec: str) -> Contestant:
    """The contestant of `package.module:function`, `…@blocks` or `…@dense`.

    A function without a declared contract is taken to promise everything that its signature names.

    Raises:
        ValueError: the spec is not of that form, names something that is not there, or cannot be called; three lines.
    """
    path, _, kind = spec.partition("@")
    module, _, name = path.partition(":")
    if not module or not name or kind not in UNDECLARED:
        raise ValueError(f"--nsa-impl: expected package.module:function[@blocks|@dense], got {spec!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        where = "from here, from PYTHONPATH or from what is installed"
        raise ValueError(f"--nsa-impl {spec}: cannot be imported {where}:\n{e}") from e
    if isinstance(found, Declared):
        return of_function(spec, found.function, found.contract, declared=True)
    if not callable(found):
        raise ValueError(f"--nsa-impl {spec}: expected a function, got a {type(found).__name__}")
    takes = UNDECLARED[kind]
    promised = _named(spec, found, ARGUMENTS[takes])
    unscaled = takes == "rows" and "scale" not in promised
    contract = Contract(
        takes=(takes,), lse="e" if "return_lse" in promised else "", needs=("default scale",) if unscaled else ()
    )
    return of_function(spec, found, contract)


def of_function(name: str, f: Callable[..., Any], contract: Contract, declared: bool = False) -> Contestant:
    """A contestant from a function of the suite's arguments.

    declared: its contract says what it takes, so that a `NotImplementedError` within it is a failure.

    Raises:
        ValueError: the signature and the contract do not fit.
    """
    known = [word for source in contract.takes for word in ARGUMENTS[source]]
    passed = _named(name, f, [*known, *(OF_CACHES if contract.caches else ())])
    _check(name, f, contract, passed)
    pair = bool(contract.lse) and "return_lse" not in passed  # it always returns both

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        qkv, rest = _of(p, contract.takes)
        result = f(*qkv, **_chosen(passed, rest | {"return_lse": return_lse}))
        return answer(result, (*qkv[0].shape[:-1], p.case.Dv), return_lse)

    def cached(q: Tensor, cache: Any, return_lse: bool = False, **selection: Any) -> Any:
        rest = selection | cache.arguments | {"return_lse": return_lse, "q_positions": None, "cu_seqlens": None}
        result = f(q, cache.k, cache.v, **_chosen(passed, rest))
        return answer(result, (*q.shape[:-1], cache.v.shape[-1]), return_lse)

    def answer(result: Any, shape: tuple[int, ...], return_lse: bool) -> Any:
        result = _checked(name, result, shape, return_lse or pair)
        if not return_lse:
            return result[0] if pair else result
        return result if contract.lse == "e" else (result[0], result[1] * math.log(2))

    return Contestant(
        name, call, supports=contract.refuses, lse=bool(contract.lse), contract=contract, declared=declared,
        cached=cached if contract.caches else None,
    )  # fmt: skip


def _of(p: Problem, takes: tuple[str, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k and v, and the other arguments of a problem's call."""
    how: dict[str, Any] = {"scale": p.case.D**-0.5 if p.scale is None else p.scale}
    if takes[0] == "rows":
        return tuple(p.rows[:3]), how
    if takes[0] == "varlen":
        return tuple(p.varlen[:3]), how | {"cu_seqlens": p.varlen.cu_seqlens}
    blocks = {"block_indices": p.block_indices, "block_size": p.block_size}
    blocks = blocks if "blocks" in takes and p.block_indices is not None else {"ranges": p.ranges}
    return (p.q, p.k, p.v), p.common | how | blocks


def _chosen(passed: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in passed}


def _named(name: str, f: Callable[..., Any], words: Any) -> frozenset[str]:
    """Which of `words` the signature of `f` names, or all of them if it takes any keyword.

    Raises:
        ValueError: it cannot be called with q, k, v and no other arguments than these.
    """
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin that has none
        return frozenset(words)
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(words)
    by_name = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found = [word for word in words if word in by_name]
    try:
        signature.bind(None, None, None, **dict.fromkeys(found))
    except TypeError as e:
        raise ValueError(
            f"--nsa-impl {name}: its signature is {name.partition(':')[2].partition('@')[0]}{signature}\n"
            f"the suite passes q, k, v in order, and by name what it has of {', '.join(dict.fromkeys(words))}\n{e}"
        ) from e
    return frozenset(found)


def _check(name: str, f: Callable[..., Any], contract: Contract, passed: frozenset[str]) -> None:
    """Raises ValueError where a contract promises what the signature has no argument for."""
    needed = {"ranges": "ranges", "blocks": "block_indices", "varlen": "cu_seqlens"}
    missing = [needed[source] for source in contract.takes if source in needed and needed[source] not in passed]
    if not {"rows", "varlen"} & set(contract.takes):
        missing += ["causal"] * (len(contract.causal) > 1 and "causal" not in passed)
        missing += ["cu_seqlens"] * (contract.sequences and "cu_seqlens" not in passed)
        missing += ["q_positions"] * (contract.positions and "q_positions" not in passed)
    missing += ["cache_seqlens"] * (bool(contract.caches) and "cache_seqlens" not in passed)
    missing += ["block_table"] * ("pages" in contract.caches and "block_table" not in passed)
    if "scale" not in passed and "default scale" not in contract.needs:
        missing.append("scale")
    if missing:
        raise ValueError(
            f"--nsa-impl {name}: the contract promises what needs an argument {' and '.join(map(repr, missing))}\n"
            f"its signature is {inspect.signature(f)}: name the argument, or promise less (nsa.testing.contestant)"
        )


def _checked(spec: str, result: Any, shape: tuple[int, ...], return_lse: bool) -> Any:
    """What came back, if it is what was asked for: `O`, or the pair of `O` and an fp32 `LSE`, of their shapes.

    Raises:
        AssertionError: it is not.
    """
    if return_lse:
        pair = isinstance(result, tuple) and len(result) == 2
        assert pair, f"{spec}: expected (O, LSE) with return_lse=True, got {_said(result)}"
    wanted = (("O", shape), ("LSE", shape[:-1])) if return_lse else (("O", shape),)
    for (name, expected), x in zip(wanted, result if return_lse else (result,), strict=True):
        assert isinstance(x, Tensor), f"{spec}: expected a tensor {name}, got {_said(x)}"
        assert tuple(x.shape) == expected, f"{spec}: expected {name} of shape {expected}, got {tuple(x.shape)}"
        assert name == "O" or x.dtype == torch.float32, f"{spec}: expected an LSE in float32, got {x.dtype}"
    return result


def _said(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


@contextlib.contextmanager
def untouched(spec: str, p: Problem) -> Iterator[None]:
    """A kernel only reads what it is given.

    Raises:
        AssertionError: it has written to one of `p`'s tensors.
    """
    inputs = {
        name: x for name in ("q", "k", "v", "ranges", "block_indices") for x in [getattr(p, name)] if x is not None
    }
    before = {name: x.detach().clone() for name, x in inputs.items()}
    yield
    for name, x in inputs.items():
        same = torch.equal(*(y.detach().contiguous().view(torch.uint8) for y in (x, before[name])))  # NaN, too
        assert same, f"{spec}: wrote to its input {name}"


class Wrong(AssertionError):
    """A wrong result. `result` and `oracle` are None where nothing came back that could be compared."""

    def __init__(self, message: str, result: Any = None, oracle: Oracle | None = None) -> None:
        super().__init__(message)
        self.result, self.oracle = result, oracle


def returns(impl: Contestant) -> tuple[str, ...]:
    """What `prove` can ask for, each a test of its own: one may be proved without the other."""
    return ("O", "LSE") if impl.lse else ("O",)


def prove(impl: Contestant, p: Problem, oracle: Oracle, wanted: str) -> Any:
    """Run it for `O` alone, or with the `LSE`, and check what came back.

    A `NotImplementedError` is a skip that says so, or a failure where the contract was declared.

    Args:
        oracle: the answer, of `p` or of a problem with the same one.
        wanted: one of `returns(impl)`.

    Raises:
        Wrong: the result is, with what it may be instead.
        AssertionError: an input was written to, or what came back has the wrong shape or dtype.
    """
    try:
        with untouched(impl.name, p):
            result, launched = impl.run_counted(p, wanted == "LSE")
    except NotImplementedError as e:
        if impl.declared:
            raise Wrong(f"{impl.name}: promises {p.case.id}, and raised NotImplementedError: {e}") from e
        import pytest  # not at the top: `calibrate` imports this module where pytest is not installed

        pytest.skip(f"unsupported{' with LSE' if wanted == 'LSE' else ''}: {p.case.id}: {e}")
    try:
        assert_parity(result, oracle, impl.name)
    except AssertionError as error:
        raise Wrong(str(error), result, oracle) from None
    assert impl.route is None or set(launched) - {"split"} == {impl.route}, f"{impl.name} launched {launched}"
    return result
