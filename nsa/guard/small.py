"""The small call that a child makes in place of a caller's: the same dtypes, layout, strides and tiles, few tokens.

The parent describes it (:func:`describe`) in values that JSON can hold. The child makes its tensors (:class:`Small`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nsa import settings
from nsa.call import Call
from nsa.kernels.shared import sizes
from nsa.kernels.shared.family import Exact
from nsa.kernels.shared.shape import RAGGED, RANGES, VARLEN, WHOLE, Shape
from nsa.settings import Settings

MOST_KEYS = 4096 + 37  # of a sequence: more than a program of query-major reads at once, and no multiple of a tile


def describe(
    call: Call, shape: Shape, route: str, launch: Any, gradients: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The small call for a caller's.

    Args:
        route: of the call; ``backward`` for its backward pass.
        launch: of the call. It has ``pins``, ``queries``: how many of a sequence launch all that it may, and
            ``unites`` if no row of the small call may list a block twice.
        gradients: of a backward pass, the tensors ``do``, ``dlse``, ``o`` and ``lse``, and ``wanted``.
    """
    given = call.named_tensors() | {name: x for name, x in (gradients or {}).items() if isinstance(x, Tensor)}
    shapes = _shapes(call, shape, launch.queries)
    read = (*Call._fields[:3], "out", *["block_table"] * (not shape.copies_table))  # where they lie; of others a copy
    memory = [name for name, x in given.items() if name in read or x.is_contiguous()]
    steps = shape.layout != RAGGED or getattr(getattr(launch, "rest", launch), "steps", None) is not None
    return {
        "kernel": route,
        "schedule": call.schedule if route == "backward" or shape.source == WHOLE else route,
        "interpreted": settings.interpreter(),
        "sizes": [shape.n, shape.Dv, shape.unit, shape.layout, shape.source],
        "shapes": {name: list(shapes[name]) for name in given if name in shapes},
        "dtypes": {name: str(x.dtype).removeprefix("torch.") for name, x in given.items()},
        "misaligned": [name for name in memory if given[name].data_ptr() % 16 and given[name].numel()],
        "options": {name: getattr(call, name) for name in ("block_size", "causal", "return_lse")},
        "scale": None if call.scale is None or call.scale > 0 else float(call.scale),
        "max_seqlen_q": None if steps else 1,
        "wanted": None if gradients is None else list(gradients["wanted"]),
        "unions": getattr(launch, "unites", False),
        "settings": {name: getattr(call.settings, name) for name in ("sel_triton_db", "batch_invariant")},
        "pins": launch.pins,
    }


def _shapes(call: Call, g: Shape, queries: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors."""
    keys = min(g.S_kv, max(MOST_KEYS, 2 * (call.block_size or 0) + 5))
    if g.source == WHOLE:
        rows = min(g.tokens, 5)
        cache = (rows, keys) if call.cu_seqlens_k is None else (keys,)
        return {"q": (rows, g.G, g.D), "k": (*cache, g.D), "v": (*cache, g.Dv), "cu_seqlens_k": (rows + 1,)}
    S, B = min(g.S, queries) if g.S > 1 and not g.varlen else 1, 2
    if g.varlen:
        B, S = (2, 2 * queries + sizes.STEPS + 2) if g.layout == RAGGED else (3, 2 * queries + 2)
    lead = (S,) if g.varlen else (B, S)
    width = -(-keys // g.page) if g.page else 0
    cache = (2 * width + 1, g.page) if g.page else (keys,) if g.layout == VARLEN else (B, keys)  # one page more
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    return {
        "q": (*lead, g.HKV * g.G, g.D), "k": (*cache, g.HKV, g.D), "v": (*cache, g.HKV, g.Dv),
        "ranges": (*lead, g.HKV, g.n, 2), "block_indices": (*lead, g.HKV, g.n), "q_positions": lead,
        "cu_seqlens_q": (B + 1,), "cu_seqlens_k": (B + 1,), "cache_seqlens": (B,), "block_table": (B, width),
        **{name: tuple(x.shape) for name, x in scales.items() if x is not None},
    }  # fmt: skip


class Small:
    """The tensors of a described call, in memory of their own."""

    def __init__(self, described: dict[str, Any], device: torch.device) -> None:
        self.described, self.device, self.generator = described, device, torch.Generator().manual_seed(0)
        self.n, self.Dv, self.unit, self.layout, self.source = described["sizes"]
        shape = described["shapes"]["k"]
        self.keys = shape[-2 if self.source == WHOLE else -3] * described["shapes"].get("block_table", (0, 1))[1]

    def call(self) -> Call:
        """The call, with the settings and the pins of the caller's."""
        described, shapes = self.described, self.described["shapes"]
        pins = tuple(sorted((name, Exact(*map(_tuples, pin))) for name, pin in described["pins"].items()))
        current = Settings(**described["settings"], probe="always", sel_triton_min_L=0, pins=pins)
        tensors: dict[str, Any] = {name: self.floats(name, shapes[name], self.unit) for name in "qkv"}
        for name in [*shapes][3:]:
            tensors[name] = self.place(name, self._values(name, shapes[name]))
        if "block_table" in tensors:
            tensors["block_table"] = tensors["block_table"][:, :-3]
        if described["wanted"] is None:
            tensors["out"] = self.floats("out", (*shapes["q"][:-1], self.Dv), self.unit).fill_(math.nan)
        given = {name: described[name] for name in ("schedule", "scale", "max_seqlen_q")} | described["options"]
        return Call(**tensors, **given, backend="triton", settings=current)

    def place(self, name: str, values: Tensor) -> Tensor:
        """A contiguous tensor of these values on the device, with the dtype and the alignment of the caller's."""
        offset, kinds = int(name in self.described["misaligned"]), self.described["dtypes"]
        dtype = getattr(torch, kinds.get(name, kinds["q"]))
        memory = torch.empty(values.numel() + offset, dtype=dtype, device=self.device)
        return memory[offset:].view(values.shape).copy_(values)

    def floats(self, name: str, shape: Any, unit: int) -> Tensor:
        """A tensor drawn from N(0, 1). ``unit`` is the common factor of its strides; 0 for a contiguous tensor."""
        width = -(-shape[-1] // 16) * 16 + unit % 16 if unit else shape[-1]
        return self.place(name, torch.randn((*shape[:-1], width), generator=self.generator))[..., : shape[-1]]

    def _draw(self, shape: Any, low: int, high: int) -> Tensor:
        """Random integers from ``low`` to ``high - 1``, on the host."""
        return torch.randint(low, max(high, low + 1), tuple(shape), generator=self.generator)

    def _values(self, name: str, shape: Any) -> Tensor:
        """Of a tensor other than q, k and v. Some name keys or pages that do not exist."""
        keys = self.keys
        if name in ("ranges", "block_indices"):
            return self._selection(shape)
        if name == "q_positions":
            return self._draw(shape, -1, keys)
        if name == "cu_seqlens_q":  # of RAGGED tokens one is unused
            tokens = self.described["shapes"]["q"][0]
            return torch.tensor([0, 1, tokens - 1] if self.layout == RAGGED else [0, 2, 2, tokens])
        if name == "cu_seqlens_k":
            ends = [0, keys // 3, keys // 2] if self.layout == VARLEN else [0, 7, 7, keys - 9, keys - 1]
            return torch.tensor([*ends[: shape[0] - 1], keys if self.layout == VARLEN else keys + 3])
        if name == "cache_seqlens":
            return torch.tensor([keys - 7, keys + 3])
        if name == "block_table":  # the table is a slice of a wider one
            order = torch.randperm(2 * shape[1], generator=self.generator).view(shape)
            if order.numel():
                order[0, 0], order[1, -1] = -1, order.numel() + 1
            return torch.cat((order, torch.full((2, 3), -1)), 1)
        return torch.rand(tuple(shape), generator=self.generator) + 0.5  # k_scale and v_scale

    def _selection(self, shape: Any) -> Tensor:
        """Spans or blocks of any place. The first row of spans reads all keys, the last row none.

        In a backward pass all rows read the first block, whose work then has several shares. For unions no row lists a
        block twice.
        """
        first = torch.tensor([0, 3] if self.source == RANGES else 0)
        if self.source == RANGES:
            start = self._draw(shape[:-1], -3, self.keys + 3)
            end = start + self._draw(start.shape, -2, 2 * self.keys // max(self.n, 1) + 2)
            chosen = torch.stack((start, end), -1)
            chosen.view(-1, self.n, 2)[0, :1] = torch.tensor([-5, self.keys + 5])
            chosen.view(-1, self.n, 2)[-1] = 0
        else:
            chosen = self._draw(shape, -1, -(-self.keys // self.described["options"]["block_size"]) + 1)
            chosen.view(-1, self.n)[-1] = -1
        if self.described["unions"]:
            chosen = chosen.sort(-1).values
            chosen[..., 1:].masked_fill_(chosen[..., 1:] == chosen[..., :-1], -1)
        elif self.described["wanted"] is not None:
            chosen.view(-1, self.n, *first.shape)[:, 2:] = first
        elif self.source != RANGES:
            chosen[..., 8:-1] = -1  # padding: many blocks would take long
        return chosen


def _tuples(x: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
