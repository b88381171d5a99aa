"""The backward kernels for small blocks, as the backward pass sees them."""

from __future__ import annotations

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import BATCH, VARLEN, Shape
from nsa.kernels.shared.sizes import MOST_HEADS
from nsa.kernels.small_backward import tiles
from nsa.kernels.small_blocks.tiles import FEW, LARGEST, MOST_SLOTS


class SmallBackward(Family):
    name = "small_backward"

    def why_not(self, call: Call, shape: Shape) -> str | None:
        if call.block_size is None or call.block_size > LARGEST:
            got = call.block_size or "ranges"
            return f"small_backward: expected blocks of {LARGEST} keys or fewer, got {got}"
        if shape.layout not in (BATCH, VARLEN):
            return "small_backward: expected keys without a cache"
        keys = tiles.keys_of(call, shape)
        if keys > tiles.MOST_KEYS or shape.n > MOST_SLOTS:
            most = f"{tiles.MOST_KEYS} keys and {MOST_SLOTS} blocks a row"
            return f"small_backward: expected at most {most}, got {keys} and {shape.n}"
        if shape.HKV > MOST_HEADS:
            return f"small_backward: expected at most {MOST_HEADS} KV heads, got {shape.HKV}"
        return None

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        if self.why_not(call, shape) is not None:
            return None
        if self.name in call.settings.pin:
            return "pinned"
        if shape.n <= FEW or call.q.dtype.itemsize > 2 or call.settings.batch_invariant:
            return None
        return f"rows of more than {FEW} blocks of {LARGEST} keys or fewer"


FAMILY = SmallBackward()
