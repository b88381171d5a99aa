"""Key-major as routing sees it: whether it serves a call, and whether that pays."""

from __future__ import annotations

from typing import Any

from nsa import schedules
from nsa.call import Call
from nsa.kernels.key_major import tiles
from nsa.kernels.query_major.family import FAMILY as QUERY_MAJOR
from nsa.kernels.shared import sizes
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import RAGGED, Shape


class KeyMajor(Family):
    name = "key_major"
    schedules = ("key_major",)

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        return schedules.why(call, shape, device_name, self.name) if counts(call, shape) else None

    def plan(self, call: Call, shape: Shape, schedule: str, skips: bool = False) -> Any:
        steps = QUERY_MAJOR.plan_steps(call, shape) if has_steps(call, shape) else None
        return self.kernels.plan(call, shape, skips, steps)


FAMILY = KeyMajor()


def has_steps(call: Call, shape: Shape) -> bool:
    """Whether query-major serves the sequences of at most `STEPS` queries, which seldom share blocks: in a ragged batch
    with blocks.

    Not if the call must be ``batch_invariant``, because the number of sequences decides tiles; nor if ``max_seqlen_q``
    is so small that every sequence must have more than `STEPS` queries.
    """
    if shape.layout != RAGGED or call.block_size is None or call.settings.batch_invariant:
        return False
    return call.max_seqlen_q is None or shape.tokens <= (shape.B - 1) * call.max_seqlen_q + sizes.STEPS


def counts(call: Call, shape: Shape) -> bool:
    """Whether key-major's kernels can number the blocks of a call, so that `auto` may choose them."""
    if call.block_size is None:
        return False
    keys = shape.S_kv // max(shape.B, 1) if shape.packed else shape.S_kv
    return tiles.counts(max(shape.B, 1), keys, shape.S_kv, shape.HKV, shape.n, call.block_size)
