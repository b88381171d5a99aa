"""The backward kernels as the backward pass sees them."""

from __future__ import annotations

from typing import Any

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape


class Backward(Family):
    name = "backward"

    def plan(self, call: Call, shape: Shape, schedule: str) -> Any:
        return self.kernels.plan(call, shape)


FAMILY = Backward()
