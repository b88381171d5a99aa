"""The shapes of Qwen's sparse attention (QSA), by names that a person can type.

24 query heads, 2 KV heads, D = Dv = 256; a query selects 512 blocks of 4 keys and its own block, the same for both KV
heads. Neighbouring queries of the real model share 87% to 94% of their blocks, so shapes with overlap stand beside
shapes without. Caches are those of `m3.py`, in pages of 64 keys.
"""

from __future__ import annotations

import torch

from nsa.testing.matrix import m3
from nsa.testing.matrix.case import Case, batch
from nsa.testing.matrix.m3 import LONG, K, Shape
from nsa.testing.matrix.problem import Problem

SHARED = 0.9


def case(B: int, S: int, S_kv: int, shared: float = 0.0) -> Case:
    """`S` queries of each of `B` sequences of `S_kv` keys."""
    return batch(B, S, S_kv, HQ=24, HKV=2, D=256, n=513, size=4, shared=shared)


def _named() -> dict[str, Shape]:
    steps = {f"decode-B{B}": case(B, 1, S_kv) for B, S_kv in ((1, LONG), (16, 32 * K), (64, 16 * K))}
    found = {f"qsa-{name}": Shape(step) for name, step in steps.items()}
    for name, B, S, S_kv in (("speculative", 8, 4, 32 * K), ("chunk512", 1, 512, 32 * K), ("prompt", 1, 8 * K, 8 * K)):
        found[f"qsa-{name}"] = Shape(case(B, S, S_kv))
        found[f"qsa-{name}-shared{SHARED}"] = Shape(case(B, S, S_kv, SHARED))
    steps = {name: step for name, step in steps.items() if name != "decode-B1"}
    steps[f"chunk512-shared{SHARED}"] = case(1, 512, 32 * K, SHARED)
    return found | {f"qsa-fp8-{name}": Shape(step, fp8=True) for name, step in steps.items()}


NAMED = _named()
"""The shapes whose forward pass is timed, by id."""
TRAINED = {f"qsa-training-shared{shared}": case(1, 8 * K, 8 * K, shared) for shared in (SHARED, 0.0)}
"""The prompts whose gradients are timed, by id."""


def make(shape: Shape, device: torch.device | str, seed: int | None = None) -> Problem:
    """Draw a shape's tensors, as `m3.make` does. All KV heads share one list: its stride over heads is 0."""
    p = m3.make(shape, device, seed)
    blocks = p.block_indices
    assert blocks is not None
    return p.choosing(blocks[..., :1, :].expand_as(blocks))
