"""The kernel families, as objects. This is the only place that names them."""

from __future__ import annotations

import importlib

from nsa.kernels.shared.family import Family

NAMES = ("small_blocks", "union", "key_major", "query_major")


def _of(name: str) -> Family:
    family: Family = importlib.import_module(f"nsa.kernels.{name}.family").FAMILY
    return family


FAMILIES = tuple(_of(name) for name in NAMES)
"""Families of forward kernels, in the order in which routing asks them. If one is broken, those behind it are tried.
The last one serves every call."""

BACKWARD = _of("backward")


SCHEDULES = (*reversed(NAMES), *(word for family in FAMILIES for word in family.schedules[1:]))
"""The words that a caller may name."""

OF_SCHEDULE = {word: family for family in FAMILIES for word in family.schedules}
"""The family that serves a schedule."""
