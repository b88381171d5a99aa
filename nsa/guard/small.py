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
        launch: of the call. It has ``pins``, and ``queries``: how many of a sequence launch all that it may.
        gradients: of a backward pass, the tensors ``do``, ``dlse``, ``o`` and ``lse``, and ``wanted``.
    """
    g, leads = shape, _leads(call, shape, launch.queries)
    given = {name: x for name, x in zip(Call._fields, call.tensors, strict=False) if x is not None}
    given |= {name: x for name, x in (gradients or {}).items() if isinstance(x, Tensor)}
    own = {name: list(leads.get(name, leads["q"])) for name in given if name in (*Call._fields, "do")}
    ends: dict[str, tuple[int, ...]] = {"q": call.q.shape[-2:], "k": call.k.shape[-1:], "v": call.v.shape[-1:]}
    if g.source != WHOLE:
        ends |= {"k": call.k.shape[-2:], "v": call.v.shape[-2:]}
        ends |= {"ranges": (g.HKV, g.n, 2), "block_indices": (g.HKV, g.n)}
    for name in ("k_scale", "v_scale"):
        if name in own:
            own[name] = list(given[name].shape)
    read = (*Call._fields[:3], "out", *["block_table"] * (not g.copies_table))  # where they lie; of others a copy
    memory = [name for name, x in given.items() if name in read or x.is_contiguous()]
    steps = g.layout != RAGGED or getattr(getattr(launch, "rest", launch), "steps", None) is not None
    return {
        "kernel": route,
        "schedule": call.schedule if route == "backward" or g.source == WHOLE else route,
        "interpreted": settings.interpreter(),
        "sizes": [g.n, g.Dv, g.unit, g.layout, g.source],
        "shapes": {name: [*lead, *ends.get(name, ())] for name, lead in own.items() if name not in ("out", "do")},
        "dtypes": {name: str(x.dtype).removeprefix("torch.") for name, x in given.items()},
        "misaligned": [name for name in memory if given[name].data_ptr() % 16 and given[name].numel()],
        "options": {
            "block_size": call.block_size,
            "causal": call.causal,
            "scale": None if call.scale is None or call.scale > 0 else float(call.scale),
            "return_lse": call.return_lse,
            "max_seqlen_q": None if steps else 1,
        },
        "wanted": None if gradients is None else list(gradients["wanted"]),
        "unions": launch.unites,
        "settings": {name: getattr(call.settings, name) for name in ("sel_triton_db", "batch_invariant")},
        "pins": launch.pins,
    }


def _leads(call: Call, g: Shape, queries: int) -> dict[str, tuple[int, ...]]:
    """The leading dimensions of the tensors."""
    keys = min(g.S_kv, max(MOST_KEYS, 2 * (call.block_size or 0) + 5))
    if g.source == WHOLE:
        rows = min(g.tokens, 5)
        cache = (rows, keys) if call.cu_seqlens_k is None else (keys,)
        return {"q": (rows,), "k": cache, "v": cache, "cu_seqlens_k": (rows + 1,)}
    S, B = min(g.S, queries) if g.S > 1 and not g.varlen else 1, 2
    if g.varlen:
        B, S = (2, 2 * queries + sizes.STEPS + 2) if g.layout == RAGGED else (3, 2 * queries + 2)
    lead = (S,) if g.varlen else (B, S)
    cache = (keys,) if g.layout == VARLEN else (B, keys)
    width = -(-keys // g.page) if g.page else 0
    if g.page:  # the cache has one page more than the table names
        cache = (2 * width + 1, g.page)
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (B + 1,))
    return {"q": lead, "k": cache, "v": cache, "cache_seqlens": (B,), "block_table": (B, width), **ends}


class Small:
    """The tensors of a described call, in memory of their own."""

    def __init__(self, what: dict[str, Any], device: torch.device) -> None:
        self.what, self.device, self.generator = what, device, torch.Generator().manual_seed(0)
        self.n, self.Dv, self.unit, self.layout, self.source = what["sizes"]

    def call(self) -> Call:
        """The call, with the settings and the pins of the caller's."""
        what, shapes = self.what, self.what["shapes"]
        pins = tuple(sorted((name, Exact(*map(_tuples, pin))) for name, pin in what["pins"].items()))
        current = Settings(**what["settings"], probe="always", sel_triton_min_L=0, pins=pins)
        found: dict[str, Any] = {name: self.floats(name, shapes[name]) for name in "qkv"}
        keys = found["k"].shape[:-2] if self.source != WHOLE else found["k"].shape[:-1]
        self.keys = keys[-1] * (1 if "block_table" not in shapes else shapes["block_table"][1])
        for name in shapes:
            if name not in found:
                found[name] = self.place(name, getattr(self, f"_{name}")(shapes[name]))
        if "block_table" in found:  # the table is a slice of a wider one
            found["block_table"] = found["block_table"][:, :-3]
        if what["wanted"] is None:
            found["out"] = self.floats("out", (*found["q"].shape[:-1], self.Dv)).fill_(math.nan)
        options = what["options"] | {"backend": "triton", "schedule": what["schedule"]}
        return Call(**found, **options, settings=current)

    def place(self, name: str, values: Tensor) -> Tensor:
        """A contiguous tensor of these values on the device, with the dtype and the alignment of the caller's."""
        offset, kinds = int(name in self.what["misaligned"]), self.what["dtypes"]
        dtype = getattr(torch, kinds.get(name, kinds["q"]))
        memory = torch.empty(values.numel() + offset, dtype=dtype, device=self.device)
        return memory[offset:].view(values.shape).copy_(values)

    def floats(self, name: str, shape: Any, unit: bool = True) -> Tensor:
        """A tensor drawn from N(0, 1). Its strides have the same common factor as the caller's."""
        width = -(-shape[-1] // 16) * 16 + self.unit % 16 if unit else shape[-1]
        return self.place(name, torch.randn((*shape[:-1], width), generator=self.generator))[..., : shape[-1]]

    def draw(self, shape: Any, low: int, high: int) -> Tensor:
        """Random integers from ``low`` to ``high - 1``, on the host."""
        return torch.randint(low, max(high, low + 1), tuple(shape), generator=self.generator)

    def _q_positions(self, shape: Any) -> Tensor:
        return self.draw(shape, -1, self.keys)

    def _cu_seqlens_q(self, shape: Any) -> Tensor:
        tokens = self.what["shapes"]["q"][0]
        return torch.tensor([0, 1, tokens - 1] if self.layout == RAGGED else [0, 2, 2, tokens])  # RAGGED: one is unused

    def _cu_seqlens_k(self, shape: Any) -> Tensor:
        if self.layout == VARLEN:
            return torch.tensor([0, self.keys // 3, self.keys // 2, self.keys])
        ends = [0, 7, 7, self.keys - 9, self.keys - 1, self.keys + 3]  # past the last key
        return torch.tensor(ends[: shape[0] - 1] + ends[-1:])

    def _cache_seqlens(self, shape: Any) -> Tensor:
        return torch.tensor([self.keys - 7, self.keys + 3])  # one exceeds the cache

    def _block_table(self, shape: Any) -> Tensor:
        width = shape[1]
        order = torch.randperm(2 * width, generator=self.generator).view(2, width)
        if width:
            order[0, 0], order[1, -1] = -1, 2 * width + 1  # pages that do not exist
        return torch.cat((order, torch.full((2, 3), -1)), 1)

    def _k_scale(self, shape: Any) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator) + 0.5

    _v_scale = _k_scale

    def _ranges(self, shape: Any) -> Tensor:
        """Spans of any place; the first row reads all keys, the last one none."""
        start = self.draw(shape[:-1], -3, self.keys + 3)
        length = self.draw(start.shape, -2, 2 * self.keys // max(self.n, 1) + 2)
        chosen = torch.stack((start, start + length), -1)
        chosen.view(-1, self.n, 2)[0, :1] = torch.tensor([-5, self.keys + 5])
        chosen.view(-1, self.n, 2)[-1] = 0
        return self._crowd(chosen, torch.tensor([0, 3]))

    def _block_indices(self, shape: Any) -> Tensor:
        """Blocks of any place, past the last one too; the last row selects none. For unions no row lists one twice."""
        size = self.what["options"]["block_size"]
        chosen = self.draw(shape, -1, -(-self.keys // size) + 1)
        chosen.view(-1, self.n)[-1] = -1
        if not self.what["unions"]:
            return self._crowd(chosen, torch.tensor(0))
        chosen = chosen.sort(-1).values
        chosen[..., 1:].masked_fill_(chosen[..., 1:] == chosen[..., :-1], -1)
        return chosen

    def _crowd(self, chosen: Tensor, first: Tensor) -> Tensor:
        """In a backward pass all rows read the first block, whose work then has several shares."""
        if self.what["wanted"] is not None:
            chosen.view(-1, self.n, *first.shape)[:, 2:] = first
        elif self.source != RANGES:
            chosen[..., 8:-1] = -1  # padding: many blocks would take long
        return chosen


def _tuples(x: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
