"""Somebody else's kernel by name, `--nsa-impl package.module:function` (spec.md has the contract)."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from nsa.testing.cases import Case
from nsa.testing.impls import Impl, always, only, plain
from nsa.testing.problem import Problem


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
        raise ValueError(f"--nsa-impl: cannot import {spec!r}: {e}") from e

    def dense(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        return f(*p.rows[:3])

    def blocks(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        args = {"block_indices": p.block_indices, "block_size": p.block_size}
        return f(p.q, p.k, p.v, **args, causal=p.causal, scale=scale, return_lse=return_lse)

    def ranges(p: Problem, return_lse: bool, out: Tensor | None) -> Any:
        scale = p.scale or p.case.D**-0.5
        return f(p.q, p.k, p.v, ranges=p.ranges, causal=p.causal, scale=scale, return_lse=return_lse)

    call = {"": ranges, "blocks": blocks, "dense": dense}[kind]
    wanted = {"": always, "blocks": only("blocks"), "dense": only("rows")}[kind]

    def supports(case: Case) -> str | None:
        return plain(case) or wanted(case)

    return Impl(spec, call, supports=supports, lse=kind != "dense")
