"""Small blocks as routing sees it: whether it serves a call, and whether that pays."""

from __future__ import annotations

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape
from nsa.kernels.shared.sizes import MOST_HEADS
from nsa.kernels.small_blocks import tiles


class SmallBlocks(Family):
    name = "small_blocks"
    schedules = ("small_blocks",)

    def why_not(self, call: Call, shape: Shape) -> str | None:
        if call.block_size is None:
            return "small_blocks: expected block_indices, got ranges"
        if call.block_size > tiles.LARGEST:
            return f"small_blocks: expected blocks of {tiles.LARGEST} keys or fewer, got {call.block_size}"
        if shape.S_kv > tiles.MOST_KEYS or shape.n > tiles.MOST_BLOCKS:
            most = f"{tiles.MOST_KEYS} keys and {tiles.MOST_BLOCKS} blocks a row"
            return f"small_blocks: expected at most {most}, got {shape.S_kv} and {shape.n}"
        if shape.HKV > MOST_HEADS:
            return f"small_blocks: expected at most {MOST_HEADS} KV heads, got {shape.HKV}"
        return None

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        if self.why_not(call, shape) is not None or shape.n <= tiles.FEW or call.q.dtype.itemsize > 2:
            return None
        return f"rows of more than {tiles.FEW} blocks of {tiles.LARGEST} keys or fewer"


FAMILY = SmallBlocks()
