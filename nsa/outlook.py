"""What would serve the usual kinds of call on this machine, and why: asked of the routing itself, without running any.

The calls are those of the benchmarks: bf16, 64 query heads over 4 KV heads of D = 128, 16 blocks of 64 keys a row.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import torch

from nsa import dispatch, gpu, settings
from nsa.call import Call

HQ, HKV, D, SLOTS, BLOCK = 64, 4, 128, 16, 64
LONG = 65_536  # keys
SHAPE = f"bf16, HQ/HKV {HQ}/{HKV}, D = {D}, {SLOTS} blocks of {BLOCK} keys a row, causal"
NO_TRITON = "no Triton is installed"
WORDS = {
    "ranges": "query-major",
    "blocks": "query-major",
    "key_major": "key-major",
    "per_head": "query-major, a head a program",
    "sdpa": "packed SDPA",
    "reference": "the gather reference",
}


class Line(NamedTuple):
    """What would serve one kind of call."""

    kind: str
    server: str
    reason: str


def outlook(device: torch.device) -> list[Line]:
    """One line for each kind of call on ``device``; kernels that `nsa.guard` or a launch refuses are not known here.

    Raises:
        ValueError: a file of settings or measurements cannot be parsed; it is named.
    """
    # The threshold as an argument: routing would warn that nobody measured this GPU, which the caller says anyway.
    current, name = settings.get(), torch.cuda.get_device_name(device) if device.type == "cuda" else None
    threshold = gpu.measured(name).threshold if name is not None else None
    measured = gpu.DEFAULT_MIN_L if threshold is None else threshold.sel_triton_min_L
    explicit = current.sel_triton_min_L
    with settings.configure(sel_triton_min_L=measured if explicit is None else explicit):
        prompt = _plan(device, S=8192)
        plans = {
            "spans": _plan(device, S=8192, spans=True),
            "blocks, 8192 queries": prompt,
            "blocks, 1 query": _plan(device, S=1, S_kv=LONG),
            "cache, 1 query": _plan(device, S=1, S_kv=LONG, cache=True),
            "cache, 2048 queries": _plan(device, S=2048, S_kv=LONG, cache=True),
        }
    lines = [_rows(device), *(_line(kind, plan) for kind, plan in plans.items())]
    server, reason = _serves(prompt)
    if prompt.route not in dispatch.PLAIN and reason != NO_TRITON:
        server, reason = "backward kernels: dQ, then dK and dV by key blocks", "decided as forward"
    return [*lines, Line("backward", server, reason)]


class Shaped:
    """Shape, dtype and device of a tensor, which is all that planning looks at, without its memory."""

    def __init__(self, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


def _plan(
    device: torch.device, S: int, S_kv: int | None = None, spans: bool = False, cache: bool = False
) -> dispatch.Plan:
    """What `nsa.dispatch` makes of such a call of one sequence."""
    q, kv = Shaped(device, 1, S, HQ, D), Shaped(device, 1, S if S_kv is None else S_kv, HKV, D)
    rows: tuple[int, ...] = (1, S, HKV, SLOTS)
    chosen: dict[str, Any] = {"block_indices": Shaped(device, *rows, dtype=torch.int32), "block_size": BLOCK}
    if spans:
        chosen = {"ranges": Shaped(device, *rows, 2, dtype=torch.int32), "max_selected": SLOTS * BLOCK}
    if cache:
        chosen |= {"cache_seqlens": Shaped(device, 1, dtype=torch.int32)}
    return dispatch.make_plan(Call(q, kv, kv, **chosen, settings=settings.get()))  # type: ignore[arg-type]


def _rows(device: torch.device) -> Line:
    """Of packed rows (`nsa.sel_attn_fwd_*`), which know neither threshold nor fallback."""
    why_not = dispatch.obstacle(torch.bfloat16, device, dispatch.why_not_triton(device))
    why_not = why_not or (None if triton_installed() else NO_TRITON)
    if why_not is not None:
        return Line("packed rows", "refused", why_not)
    return Line("packed rows", "query-major (dense_group, varlen_group)", "no threshold, no fallback")


def _line(kind: str, plan: dispatch.Plan) -> Line:
    return Line(kind, *_serves(plan))


def _serves(plan: dispatch.Plan) -> tuple[str, str]:
    """Who serves, in words and by its route's name, and why."""
    if plan.route in dispatch.PLAIN:
        return f"{WORDS[plan.route]} ({plan.route})", plan.reason
    if not triton_installed():
        return f"{WORDS[plan.fallback]} ({plan.fallback})", NO_TRITON
    return f"{WORDS[plan.route]} ({plan.route})", plan.reason


def triton_installed() -> bool:
    """Asked without importing it: a process that only reads the routes is not to pay for that."""
    return importlib.util.find_spec("triton") is not None
