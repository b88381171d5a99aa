"""Key-major as routing sees it: whether it serves a call, and whether that pays."""

from __future__ import annotations

from typing import Any

from nsa import schedules
from nsa.call import Call
from nsa.kernels.key_major import tiles
from nsa.kernels.query_major.family import FAMILY as QUERY_MAJOR
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape, has_steps
from nsa.kernels.shared.sizes import MOST_HEADS, MOST_KEYS


class KeyMajor(Family):
    name = "key_major"
    schedules = ("key_major",)

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        return schedules.reason_if_fastest(call, shape, device_name, self.name) if can_number(call, shape) else None

    def plan(self, call: Call, shape: Shape, schedule: str, skips: bool = False) -> Any:
        steps = QUERY_MAJOR.kernels.plan(call, shape, steps=True) if has_steps(call, shape) else None
        return self.kernels.plan(call, shape, skips, steps)


FAMILY = KeyMajor()


def can_number(call: Call, shape: Shape) -> bool:
    """Whether key-major's kernels can number the blocks of a call, and list those of a row, so that `auto` may choose
    them.
    """
    if call.block_size is None or shape.S_kv > MOST_KEYS or shape.HKV > MOST_HEADS:
        return False
    sequences = max(shape.B, 1)
    keys = shape.S_kv // sequences if shape.packed else shape.S_kv  # of a sequence; of a packed one the mean
    blocks = sequences * (-(-keys // call.block_size) + 1)
    return tiles.count_bytes(shape.HKV, blocks) <= tiles.MOST_COUNT_BYTES and shape.n <= tiles.MAX_SLOTS
