"""Somebody else's kernel by name, `--nsa-impl package.module:function` (docs/proving.md has the contract)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.testing.contestants.ours import Impl, always, only, plain
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem


def load(spec: str) -> Impl:
    """A third party's kernel from `package.module:function`, `…@blocks` or `…@dense`.

    Raises:
        ValueError: the spec is not of that form, or names something that is not there.
    """
    path, _, kind = spec.partition("@")
    module, _, name = path.partition(":")
    if not module or not name or kind not in ("", "blocks", "dense"):
        raise ValueError(f"--nsa-impl: expected package.module:function[@blocks|@dense], got {spec!r}")
    try:
        f = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--nsa-impl: cannot import {spec!r} (from here, PYTHONPATH or what is installed): {e}") from e
    if not callable(f):
        raise ValueError(f"--nsa-impl: expected a function, got {spec!r}, a {type(f).__name__}")

    def dense(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        return _checked(spec, f(*p.rows[:3]), (*p.rows.Q.shape[:2], p.case.Dv), False)

    def blocks(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        args = {"block_indices": p.block_indices, "block_size": p.block_size}
        result = f(p.q, p.k, p.v, **args, causal=p.causal, scale=scale, return_lse=return_lse)
        return _checked(spec, result, (*p.q.shape[:-1], p.case.Dv), return_lse)

    def ranges(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        result = f(p.q, p.k, p.v, ranges=p.ranges, causal=p.causal, scale=scale, return_lse=return_lse)
        return _checked(spec, result, (*p.q.shape[:-1], p.case.Dv), return_lse)

    call = {"": ranges, "blocks": blocks, "dense": dense}[kind]
    wanted = {"": always, "blocks": only("blocks"), "dense": only("rows")}[kind]

    def supports(case: Case) -> str | None:
        return plain(case) or wanted(case)

    return Impl(spec, call, supports=supports, lse=kind != "dense")


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
    before = {name: x.clone() for name, x in inputs.items()}
    yield
    for name, x in inputs.items():
        same = torch.equal(*(y.contiguous().view(torch.uint8) for y in (x, before[name])))  # NaN, too
        assert same, f"{spec}: wrote to its input {name}"


def returns(impl: Impl) -> tuple[str, ...]:
    """What `prove` can ask it for: tests of their own, whose ids end in it. One may be proved without the other."""
    return ("O", "LSE") if impl.lse else ("O",)


def prove(impl: Impl, p: Problem, oracle: Oracle, wanted: str) -> None:
    """Run it for `O` alone, or with the `LSE`; what it does not take is a skip that says so.

    Args:
        oracle: the answer, of `p` or of a problem with the same one.
        wanted: one of `returns(impl)`.

    Raises:
        AssertionError: it is wrong, or wrote to an input.
    """
    try:
        with untouched(impl.name, p):
            result = impl.run(p, wanted == "LSE")
    except NotImplementedError as e:
        pytest.skip(f"unsupported{' with LSE' if wanted == 'LSE' else ''}: {p.case.id}: {e}")
    assert_parity(result, oracle, impl.name)
