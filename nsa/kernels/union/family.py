"""Union as routing sees it: whether it serves a call, and whether that pays."""

from __future__ import annotations

from typing import Any

from nsa import schedules
from nsa.call import Call
from nsa.kernels.key_major.family import FAMILY as KEY_MAJOR
from nsa.kernels.key_major.family import can_number
from nsa.kernels.query_major.family import FAMILY as QUERY_MAJOR
from nsa.kernels.shared import device as gpu
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.family import Exact, Family
from nsa.kernels.shared.shape import Shape, has_steps
from nsa.kernels.shared.sizes import MOST_HEADS
from nsa.kernels.union import tiles

LEAST_GROUP = 3  # smaller groups leave a tile's rows empty: union was never faster than key-major for one head


class Union(Family):
    name = "union"
    schedules = ("union",)

    def why_not(self, call: Call, shape: Shape) -> str | None:
        if call.block_size is None:
            return "union: expected block_indices, got ranges"
        if call.k.dtype != call.q.dtype:
            return f"union: expected a cache of dtype {call.q.dtype} (that of q), got {call.k.dtype}"
        if shape.HKV > MOST_HEADS:
            return f"union: expected at most {MOST_HEADS} KV heads, got {shape.HKV}"
        if call.settings.batch_invariant:
            return "union: a row's result depends on its neighbours, which batch_invariant forbids"
        return None

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        if shape.G < LEAST_GROUP or self.why_not(call, shape) is not None or not can_number(call, shape):
            return None
        g, size = shape, call.block_size
        assert size is not None
        tile = tiles.select(gpu.chip(call.q.device).capability, call.q.dtype.itemsize, g.G, g.D, g.Dv, g.n, size)
        fits = tile is not None and tiles.fits(g.S_kv, size)
        return schedules.reason_if_fastest(call, shape, device_name, self.name, KEY_MAJOR.name) if fits else None

    def plan(self, call: Call, shape: Shape, schedule: str) -> Any:
        why_not = self.why_not(call, shape)
        if why_not is not None:
            raise DoesNotFit(why_not)
        if self._by_row(call, shape):
            rest = QUERY_MAJOR.kernels.plan(call, shape, skips=True)
        else:
            rest = KEY_MAJOR.plan(call, shape, schedule, skips=True)
        return self.kernels.plan(call, shape, rest)

    def _by_row(self, call: Call, shape: Shape) -> bool:
        """Whether query-major serves the rows that share too few blocks for a union; otherwise key-major does."""
        pins = call.settings.pin
        pin = pins.get(self.name)
        if isinstance(pin, Exact):
            return KEY_MAJOR.name not in pins
        if pin is not None and pin.by_row is not None:
            return bool(pin.by_row) and not has_steps(call, shape)
        return schedules.rest_of(call, shape, gpu.chip(call.q.device).name or "") == QUERY_MAJOR.name


FAMILY = Union()
