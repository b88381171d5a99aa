"""Query-major as routing sees it: serves every call."""

from __future__ import annotations

from typing import Any

from nsa.call import Call
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.shape import Shape


class QueryMajor(Family):
    name = "query_major"
    schedules = ("query_major", "per_head")
    by_block_size = False

    def schedule(self, call: Call) -> str:
        return "query_major" if call.settings.sel_triton_group else "per_head"

    def plan(self, call: Call, shape: Shape, schedule: str) -> Any:
        return self.kernels.plan(call, shape, schedule == "per_head")


FAMILY = QueryMajor()
