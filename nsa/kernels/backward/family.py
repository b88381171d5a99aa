"""The backward kernels as the backward pass sees them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape


class Backward(Family):
    name = "backward"

    def plan(self, call: Call, shape: Shape, schedule: str) -> Any:
        return import_module("nsa.kernels.backward.plan").plan(call, shape)


FAMILY = Backward()
