"""Triton kernels and their launchers. Importing this package does not import Triton; its modules do."""

from collections import Counter
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from nsa import settings

launches: Counter[str] = Counter()
"""Kernel launches of this process by route name, counted at the launch. ``split`` counts launches that divided each row
among several programs. ``steps`` counts launches of query-major for the steps of a ragged batch of another schedule."""


def pinned(**tiles: Any) -> AbstractContextManager[settings.Settings]:
    """In a `with` block, kernels use these tiles in place of tables and rules. For sweeps and tests.

        with nsa.kernels.pinned(query_major=Choice(2, 1, 64, 4, 2)):
            nsa.selection_attention(...)

    Pins are part of the settings of a call, and so of the key of its plan. Blocks nest, and hold for one thread.

    Args:
        tiles: by family, the ``Choice`` of its ``tiles`` module, or None for the rules. ``backward_unions`` takes the
            ``Unions`` of the backward tiles.

    Raises:
        TypeError: a name that is no family, or a value that is not as above.
    """
    from nsa.kernels.families import BACKWARD, BACKWARDS, NAMES  # which imports this package
    from nsa.kernels.shared.family import Exact

    names = (*NAMES, *(family.name for family in BACKWARDS), f"{BACKWARD.name}_unions")
    for name, pin in tiles.items():
        if name not in names:
            raise TypeError(f"unknown family {name!r}, expected one of: {', '.join(names)}")
        family, kind = name.removesuffix("_unions"), "Unions" if name.endswith("_unions") else "Choice"
        expected = getattr(import_module(f"nsa.kernels.{family}.tiles"), kind)
        if pin is not None and not isinstance(pin, (expected, Exact)):
            raise TypeError(f"{name}: expected a {kind} of nsa.kernels.{family}.tiles or None, got {pin!r}")
    return settings.pinned(tiles)
