"""The kernel families, as objects. Routing and dispatch loop over them, and know no names."""

from __future__ import annotations

import importlib

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape

NAMES = ("small_blocks", "union", "key_major", "query_major")


def _of(name: str) -> Family:
    family: Family = importlib.import_module(f"nsa.kernels.{name}.family").FAMILY
    return family


FAMILIES = tuple(_of(name) for name in NAMES)
"""Families of forward kernels, in the order in which routing asks them. If one is broken, those behind it are tried."""

SERVES_ALL = FAMILIES[-1]
"""The family that serves every call."""

BACKWARD = _of("backward")
BACKWARDS = (_of("small_backward"), BACKWARD)
"""Families of backward kernels, in the order in which they are asked. The last one serves every call."""


def backward_of(call: Call, shape: Shape) -> Family:
    """The family that computes the gradients of a call."""
    return next((family for family in BACKWARDS if family.pays(call, shape, "") is not None), BACKWARD)


SCHEDULES = (*reversed(NAMES), *(word for family in FAMILIES for word in family.schedules[1:]))
"""The words that a caller may name."""

OF_SCHEDULE = {word: family for family in FAMILIES for word in family.schedules}
"""The family that serves a schedule."""
