"""What a kernel family tells of itself. Routing and dispatch ask the objects in `nsa.kernels.families`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from nsa.call import Call
from nsa.kernels.shared import sources
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.shape import Shape


class Exact(NamedTuple):
    """A pin that repeats all that tile rules decided about another launch, as its ``pins`` tells. JSON can hold it."""

    tile: tuple[Any, ...]  # the fields of the family's `Tile`
    more: tuple[Any, ...] = ()  # what else the family's plan decided


class Family:
    """A kernel family. Its folder has `plan.py`, which imports Triton and is imported at the first launch.

    Attributes:
        name: of the folder below `nsa.kernels`, and the word of the schedule that names this family.
        schedules: all schedules that this family serves.
        by_block_size: tiles depend on the block size, so a failure says nothing about other block sizes.
    """

    name: str
    schedules: tuple[str, ...] = ()
    by_block_size = True

    @property
    def unseen(self) -> bool:
        """Whether the GPU lane has not passed with these kernels yet (`sources.UNSEEN`)."""
        return self.name in sources.UNSEEN

    def why_not(self, call: Call, shape: Shape) -> str | None:
        """Why this family cannot serve a call, or None. :meth:`plan` may find other reasons (`DoesNotFit`)."""
        return None

    def pays(self, call: Call, shape: Shape, device_name: str) -> str | None:
        """The reason to take this family for a call that names no schedule; None if it would not pay.

        Args:
            device_name: of the GPU, as CUDA spells it.
        """
        return None

    @property
    def kernels(self) -> Any:
        """The module `plan` of this family, with its ``forward`` (``backward``) and its Triton functions."""
        return import_module(f"nsa.kernels.{self.name}.plan")

    def schedule(self, call: Call) -> str:
        """The schedule with which this family serves a call that names none of its own."""
        return self.name

    def functions(self) -> frozenset[str]:
        """Names of this family's Triton functions."""
        return sources.functions(self.name)

    def plan(self, call: Call, shape: Shape, schedule: str) -> Any:
        """The launch of a call: tiles, grids and run-time sizes. ``launch.variants`` is all that it may launch.

        Raises:
            DoesNotFit: the family cannot serve the call, as :meth:`why_not` says, or for another reason.
        """
        why_not = self.why_not(call, shape)
        if why_not is not None:
            raise DoesNotFit(why_not)
        return self.kernels.plan(call, shape)
