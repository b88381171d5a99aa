"""A contestant by name: `--nsa-impl package.module:function` (docs/proving.md says how it is called)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os.path
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

import nsa
from nsa.testing.clock import honest
from nsa.testing.contestants import selectors, traces
from nsa.testing.contestants.contract import Contestant, Contract, Declared
from nsa.testing.judge.conduct import untouched
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

ARGUMENTS = {
    "ranges": ("ranges", "causal", "scale", "return_lse", "q_positions", "cu_seqlens"),
    "blocks": ("block_indices", "block_size", "causal", "scale", "return_lse", "q_positions", "cu_seqlens"),
    "rows": ("scale", "return_lse"),
    "varlen": ("cu_seqlens", "scale", "return_lse"),
}
"""Arguments of a call beside q, k and v, by source. If a contract has caches, a call also has those in `OF_CACHES`."""
OF_CACHES = ("cache_seqlens", "block_table", "cu_seqlens_q", "max_seqlen_q", "k_scale", "v_scale")
UNDECLARED = {"": "ranges", "blocks": "blocks", "dense": "rows"}


def load(spec: str) -> Contestant:
    """The contestant of `package.module:function`, `…@blocks` or `…@dense`.

    A function without a declared contract counts as promising everything that its signature names.

    Raises:
        ValueError: the spec has another form, cannot be imported, or names something that cannot be called.
    """
    path, _, kind = spec.partition("@")
    module, _, name = path.partition(":")
    if not module or not name or kind not in UNDECLARED:
        raise ValueError(f"--nsa-impl: expected package.module:function[@blocks|@dense], got {spec!r}")
    if "/" in module or module.endswith(".py"):
        raise ValueError(f"--nsa-impl {spec}: expected a module, got a path: {_of_path(module, spec)}")
    honest.seal()
    imported = _imported(spec, module)
    if not hasattr(imported, name):
        file = getattr(imported, "__file__", "a folder")
        raise ValueError(f"--nsa-impl {spec}: the module {module} ({file}) has no attribute {name!r}")
    found = getattr(imported, name)
    if isinstance(found, Declared) and isinstance(found.contract, selectors.Selects):
        passed = _named(spec, found.function, selectors.ARGUMENTS, "q, k")
        _check(spec, found.function, found.contract, passed)
        return selectors.of_function(spec, found.function, found.contract)
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


def _of_path(file: str, spec: str) -> str:
    """What to type for `folder/file.py:function`."""
    stem, called = Path(os.path.abspath(file.removesuffix(".py"))), spec.removeprefix(file)
    if stem.is_relative_to(Path.cwd()):
        return f"type --nsa-impl {'.'.join(stem.relative_to(Path.cwd()).parts)}{called}"
    return f"type --nsa-impl {stem.name}{called} in {stem.parent}, or with that folder in PYTHONPATH"


def _imported(spec: str, module: str) -> ModuleType:
    """The module, or a ValueError in one line that names what it raised, and where."""
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a module may raise anything, also SystemExit and pytest.skip
        said = e.msg if isinstance(e, SyntaxError) else (str(e).splitlines() or [""])[0]
        if isinstance(e, ModuleNotFoundError) and e.name and f"{module}.".startswith(f"{e.name}."):
            ours = f" (nsa is {nsa.__file__})" if module.startswith("nsa.") else ""
            where = "from here, from PYTHONPATH or from what is installed"
            raise ValueError(f"--nsa-impl {spec}: cannot be imported {where}: {said}{ours}") from e
        place = traces.place(e) or traces.line_of_a_user(e)
        text = f"importing {module} raised {type(e).__name__}: {said} ({place})"
        raise ValueError(f"--nsa-impl {spec}: {text}") from e


def of_function(name: str, f: Callable[..., Any], contract: Contract, declared: bool = False) -> Contestant:
    """A contestant from a function that takes the suite's arguments.

    declared: whether the author wrote the contract. If so, a `NotImplementedError` is a failure.

    Raises:
        ValueError: the signature does not fit the contract.
    """
    known = [word for source in contract.takes for word in ARGUMENTS[source]]
    passed = _named(name, f, [*known, *(OF_CACHES if contract.caches else ())])
    _check(name, f, contract, passed)
    pair = bool(contract.lse) and "return_lse" not in passed  # the function always returns (O, LSE)

    def call(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        qkv, rest = _of(p, contract.takes)
        result = f(*qkv, **_chosen(passed, dict.fromkeys(OF_CACHES) | rest | {"return_lse": return_lse}))
        return answer(result, (*qkv[0].shape[:-1], p.case.Dv), qkv[0].dtype, return_lse)

    def cached(q: Tensor, cache: Any, return_lse: bool = False, **selection: Any) -> Any:
        absent = dict.fromkeys(("q_positions", "cu_seqlens", *OF_CACHES))
        rest = absent | selection | cache.arguments | {"return_lse": return_lse}
        result = f(q, cache.k, cache.v, **_chosen(passed, rest))
        return answer(result, (*q.shape[:-1], cache.v.shape[-1]), q.dtype, return_lse)

    def answer(result: Any, shape: tuple[int, ...], dtype: torch.dtype, return_lse: bool) -> Any:
        result = _checked(name, result, shape, dtype, return_lse or pair)
        if not return_lse:
            return result[0] if pair else result
        return result if contract.lse == "e" else (result[0], result[1] * math.log(2))

    return Contestant(
        name, call, supports=contract.refuses, lse=bool(contract.lse), contract=contract, declared=declared,
        cached=cached if contract.caches else None,
    )  # fmt: skip


def _of(p: Problem, takes: tuple[str, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k and v, and the other arguments of a problem's call."""
    how: dict[str, Any] = {"scale": p.softmax_scale}
    if takes[0] == "rows":
        return tuple(p.rows[:3]), how
    if takes[0] == "varlen":
        return tuple(p.varlen[:3]), how | {"cu_seqlens": p.varlen.cu_seqlens}
    return (p.q, p.k, p.v), p.common | how | (p.picked if "blocks" in takes else {"ranges": p.ranges})


def _chosen(passed: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in passed}


def _named(name: str, f: Callable[..., Any], words: Any, tensors: str = "q, k, v") -> frozenset[str]:
    """The arguments among `words` that the signature of `f` names; all of them if `f` takes any keyword.

    Raises:
        ValueError: `f` cannot be called with `tensors` and these arguments alone.
    """
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset(words)
    parameters = list(signature.parameters.values())
    by_name = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    found = [word for word in words if every or word in by_name]
    try:
        signature.bind(*tensors.split(", "), **dict.fromkeys(found))
    except TypeError as e:
        more = f": type --nsa-impl {name}@blocks, or declare a contract (nsa.testing.contestant)"
        said = f"{e}{more if 'block_indices' in by_name and '@' not in name else ''}"
        known = ", ".join(dict.fromkeys(words))
        raise ValueError(
            f"--nsa-impl {name}: its signature is {name.partition(':')[2].partition('@')[0]}{signature}\n"
            f"the suite passes {tensors} in order, and by name those it has of {known}\n{said}"
        ) from e
    return frozenset(found)


def _check(name: str, f: Callable[..., Any], contract: Contract, passed: frozenset[str]) -> None:
    """Raises ValueError if a contract promises something for which the signature has no argument."""
    if missing := [word for word, promised in contract.needed if promised and word not in passed]:
        declared = "selector" if isinstance(contract, selectors.Selects) else "contestant"
        raise ValueError(
            f"--nsa-impl {name}: the contract needs an argument {' and '.join(map(repr, missing))}\n"
            f"its signature is {inspect.signature(f)}: name the argument, or promise less (nsa.testing.{declared})"
        )


def _checked(spec: str, result: Any, shape: tuple[int, ...], dtype: torch.dtype, return_lse: bool) -> Any:
    """`result`, if it is a tensor `O` of this dtype or, with `return_lse`, a pair of `O` and an fp32 `LSE`.

    Raises:
        AssertionError: the result is something else.
    """
    if return_lse:
        pair = isinstance(result, tuple) and len(result) == 2
        assert pair, f"{spec}: expected (O, LSE) with return_lse=True, got {_said(result)}"
    wanted = (("O", shape), ("LSE", shape[:-1])) if return_lse else (("O", shape),)
    for (name, expected), x in zip(wanted, result if return_lse else (result,), strict=True):
        assert isinstance(x, Tensor), f"{spec}: expected a tensor {name}, got {_said(x)}"
        assert tuple(x.shape) == expected, f"{spec}: expected {name} of shape {expected}, got {tuple(x.shape)}"
        assert name == "O" or x.dtype == torch.float32, f"{spec}: expected an LSE in float32, got {x.dtype}"
        assert name == "LSE" or x.dtype == dtype, f"{spec}: expected O in {dtype}, as q, got {x.dtype}"
    return result


def _said(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


class Wrong(AssertionError):
    """A wrong result. `result` and `oracle` are None if there is no result to compare."""

    def __init__(self, message: str, result: Any = None, oracle: Oracle | None = None) -> None:
        super().__init__(message)
        self.result, self.oracle = result, oracle


def returns(impl: Contestant) -> tuple[str, ...]:
    """The values of `wanted` for `prove`. Each is a test of its own, because only one of them may be right."""
    return ("O", "LSE") if impl.lse else ("O",)


def unsupported(what: str, error: NotImplementedError) -> NoReturn:
    """Skip a test because a kernel refused a call. `verdicts` fails a test that a kernel skips in another way."""
    import pytest  # here, because `calibrate` imports this module without pytest

    raise pytest.skip.Exception(f"unsupported: {what}: {traces.said(error) or 'NotImplementedError'}") from error


@contextlib.contextmanager
def skipping(impl: Contestant, case: Case) -> Iterator[None]:
    """Skips the test of a case that a kernel without a declared contract does not take."""
    try:
        yield
    except NotImplementedError as error:
        if impl.declared:
            raise
        unsupported(case.id, error)


def prove(impl: Contestant, p: Problem, oracle: Oracle, wanted: str) -> Any:
    """Run a contestant for `O` alone, or with the `LSE`, and check the result.

    A `NotImplementedError` skips the test, or fails it if the contract was declared.

    Args:
        oracle: the right answer of `p`, or of a problem with the same answer.
        wanted: one of `returns(impl)`.

    Raises:
        Wrong: the result is wrong.
        AssertionError: an input was changed, or a result has the wrong type, shape or dtype.
    """
    try:
        with untouched(impl.name, p):
            result, launched = impl.run_counted(p, wanted == "LSE")
    except NotImplementedError as e:
        if impl.declared:
            raise Wrong(f"{impl.name}: promises {p.case.id}, and raised NotImplementedError: {e}") from e
        unsupported(f"{'with LSE: ' * (wanted == 'LSE')}{p.case.id}", e)
    try:
        assert_parity(result, oracle, impl.name)
    except AssertionError as error:
        raise Wrong(str(error), result, oracle) from None
    assert impl.route is None or set(launched) - {"split"} == {impl.route}, f"{impl.name} launched {launched}"
    return result
