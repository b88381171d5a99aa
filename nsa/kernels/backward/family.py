"""The backward kernels as the backward pass sees them."""

from __future__ import annotations

from nsa.kernels.shared.family import Family


class Backward(Family):
    name = "backward"


FAMILY = Backward()
