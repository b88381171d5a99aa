"""How each kernel is tried: a small call that launches the variant in question, and a comparison with the reference.

The kernels' own launchers are used. The trial fixes the tile; the launchers derive everything else from the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nsa import settings
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.families import OF_SCHEDULE
from nsa.kernels.shared.family import Family
from nsa.kernels.shared.likeness import Likeness
from nsa.kernels.shared.poison import POISON, poisoned_workspace
from nsa.kernels.shared.shape import shape_of
from nsa.plain.oracle import beyond_rounding, selection_reference

Say = Callable[[str, str], None]


class Trial(Likeness):
    """One small call whose tensors have the dtypes, alignments and strides of the parent's launch.

    Attributes:
        c: the variant's compile-time arguments.
        options: the options that Triton takes, such as ``num_warps``.
        given: dtype by name of argument; None for an absent tensor.
        about: sequence lengths, positions, page table and scales, by field of `Call`.
        ragged: whether the kernel is one of a ragged batch.
    """

    selection: Tensor | None = None
    size: int | None = None  # keys of a block; None for ranges
    longest: int | None = None  # `max_seqlen_q`; 1 in a batch of more than `STEPS` + 1 tokens: without steps

    def __init__(self, what: dict[str, Any], device: torch.device, say: Say) -> None:
        from nsa.kernels.shared import primitives

        super().__init__(what, device)
        self.kernel, self.c, self.options = what["kernel"], what["constexprs"], what["options"]
        self.given, self.say = what["tensors"], say
        self.about: dict[str, Tensor] = {}
        self.ragged = bool(self.c.get("STEPS")) or self.c.get("LAYOUT") == primitives.RAGGED.value

    def layout(self, HKV: int, S_kv: int, B: int = 2, S: int = 3) -> None:
        """Make ``q``, ``k``, ``v``, the output, and the tensors with sequence lengths, pages and positions."""
        from nsa.kernels.shared import primitives as p

        c, page = self.c, self.c.get("PAGE", 0)
        layout = p.RAGGED.value if self.ragged else c.get("LAYOUT", p.BATCH.value)
        batched, width = layout in (p.BATCH.value, p.CACHE.value), -(-S_kv // page) if page else 0
        lead, cache = ((B, S), (B, S_kv)) if batched else ((max(S, 3) + 2,), (S_kv,))
        if layout == p.RAGGED.value:
            cache = 2, S_kv
        if page:  # the cache has one page more than the table names
            cache, S_kv = (2 * width + 1, page), width * page
        heads, self.rows, self.S_kv = HKV * c.get("G", 2), (*lead, HKV), S_kv
        self.q = self.floats("q_ptr", *lead, heads, c.get("D", 64))
        self.k = self.floats("k_ptr", *cache, HKV, c.get("D", 64))
        self.v = self.floats("v_ptr", *cache, HKV, c.get("Dv", 64))
        self.out = self.floats("o_ptr", *lead, heads, c.get("Dv", 64)).fill_(POISON)
        if layout == p.RAGGED.value:  # the last token belongs to no sequence
            self.about["cu_seqlens_q"] = self.place("cu_q_ptr", [0, 1, lead[0] - 1])
        if layout in (p.CACHE.value, p.RAGGED.value):  # a length exceeds the cache, and two pages do not exist
            self.about["cache_seqlens"] = self.place("cu_k_ptr", [S_kv - 7, S_kv + 3])
            if page:  # the table is a slice of a wider one
                order = torch.randperm(2 * width, generator=self.generator).view(2, width)
                order[0, 0], order[1, -1] = -1, 2 * width + 1
                wider = torch.cat((order, torch.full((2, 3), -1)), 1)
                self.about["block_table"] = self.place("table_ptr", wider)[:, :width]
            for name in ("k_scale", "v_scale"):
                if self.given.get(f"{name}_ptr") is not None:
                    numbers = torch.rand(HKV if c[f"{name[0].upper()}_STEP"] else 1, generator=self.generator)
                    self.about[name] = self.place(f"{name}_ptr", numbers + 0.5)
        elif layout == p.PACKED.value:
            self.about["cu_seqlens_k"] = self.place("cu_k_ptr", [0, 7, 7, S_kv - 9, S_kv - 1, S_kv + 3])
        elif layout == p.VARLEN.value:
            self.about["cu_seqlens_q"] = self.place("cu_q_ptr", [0, 2, 2, *lead])
            self.about["cu_seqlens_k"] = self.place("cu_k_ptr", [0, S_kv // 3, S_kv // 2, S_kv])
        if self.given.get("pos_ptr") is not None:
            self.about["q_positions"] = self.place("pos_ptr", self.draw(lead, -1, S_kv))

    def select(self, n: int, size: int | None, crowded: bool = False) -> None:
        """Draw ``n`` spans, or ``n`` blocks of ``size`` keys, for each row. The last row selects nothing.

        Args:
            crowded: all spans or blocks of a row but the first two are the first keys of its sequence.
        """
        self.size = size
        if size is None:
            start = self.draw((*self.rows, n), -3, self.S_kv + 3)
            chosen = torch.stack((start, start + self.draw(start.shape, -2, 2 * self.S_kv // n + 2)), -1)
            chosen.view(-1, n, 2)[0, 0] = torch.tensor([-5, self.S_kv + 5])
            chosen.view(-1, n, 2)[-1] = 0
            end = torch.tensor([0, 3])
        else:
            chosen, end = self.draw((*self.rows, n), -1, -(-self.S_kv // size) + 1), torch.tensor(0)
            chosen[..., 8:-1] = -1  # padding: 64 blocks would take the interpreter seconds
            chosen.view(-1, n)[-1] = -1
        if crowded:
            chosen.view(-1, n, *end.shape)[:, 2:] = end
        self.selection = self.place("sel_ptr", chosen)

    def compute(self, launch: Callable[[], Any]) -> Any:
        """Call ``launch`` and wait for the GPU. Tells the parent the phases."""
        self.say("phase", "compiling")
        got = launch()
        self.say("phase", "running")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.say("phase", "comparing")
        return got

    def call(self, **more: Any) -> Call:
        """The call to try. It is one on packed rows if there is no selection."""
        q, k, v = self.q, self.k, self.v
        if self.selection is None:
            q, k, v = (q[:, 0], k[:, :, 0], v[:, :, 0]) if q.dim() == 4 else (q, k[:, 0], v[:, 0])
        kind = "ranges" if self.size is None else "block_indices"
        how = {kind: self.selection, "block_size": self.size, "causal": self.c.get("CAUSAL", True), **self.about}
        return Call(q, k, v, **how, max_seqlen_q=self.longest, settings=settings.get(), **more)

    def forward(self, family: Family, with_lse: bool, bound: int | None = None) -> str | None:
        """Run the forward pass of a family. Returns how O or LSE is wrong, or None."""
        out = self.out[:, 0] if self.selection is None and self.out.dim() == 4 else self.out
        call = self.call(out=out, return_lse=with_lse)
        launch = family.plan(call, shape_of(call, bound), family.name)
        _, lse = self.compute(lambda: family.kernels.forward(launch, call, "trial"))
        o_want, lse_want = self.reference(*(x.cpu().double() for x in (self.q, self.k, self.v)))
        wrong = beyond_rounding(out, o_want.view(out.shape), out.dtype)
        return wrong or (None if lse is None else beyond_rounding(lse, lse_want.view(lse.shape), torch.float32, "LSE "))

    def backward(self, module: Any) -> str | None:
        """Run the backward pass of a launcher ``module``. Returns how a gradient differs from the fp64 one, or None."""
        qkv, like = (self.q, self.k, self.v), self.out.shape
        do = self.normal("do_ptr", *like)
        dlse = self.normal("dlse_ptr", *like[:-1]) if self.given.get("dlse_ptr") is not None else None
        call = self.call()
        launch = module.plan(call)
        want: tuple[Tensor, ...] = ()
        o, lse = torch.empty_like(do), torch.empty(like[:-1], device=self.device)
        if self.device.type != "meta":  # tests use meta tensors to see what would be compiled, and compute nothing
            leaves = [x.cpu().double().requires_grad_() for x in qkv]
            exact = self.reference(*leaves)
            loss = (exact[0] * do.cpu().double()).sum()
            if dlse is not None:
                loss = loss + (exact[1].masked_fill(exact[1].isinf(), 0) * dlse.cpu().double()).sum()
            want = torch.autograd.grad(loss, leaves)
            o, lse = self.place("o_ptr", exact[0].detach()), self.place("lse_ptr", exact[1].detach())
        got = self.compute(lambda: module.backward(launch, call, do, dlse, o, lse, "trial"))
        wrong = (beyond_rounding(x, y, self.q.dtype, f"d{of} ") for of, x, y in zip("qkv", got, want, strict=True))
        return next(filter(None, wrong), None)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``O`` and LSE of the oracle on the CPU, for fp64 ``q``, ``k`` and ``v``."""
        about: dict[str, Any] = {name: x.cpu() for name, x in self.about.items()}
        if "cu_seqlens_k" in about:
            about.setdefault("cu_seqlens_q", torch.arange(q.shape[0] + 1))
        everything = torch.tensor([0, 2**31 - 1]).expand(*self.rows, 1, 2)
        selection = everything if self.selection is None else self.selection.cpu()
        about |= {"ranges": selection} if self.size is None else {"block_indices": selection, "block_size": self.size}
        o, lse = selection_reference(Call(q, k, v, **about, causal=self.c.get("CAUSAL", True), return_lse=True))
        assert lse is not None
        return o, lse

    @contextlib.contextmanager
    def told(self, module: Any, tiles: Any, **fields: Any) -> Iterator[None]:
        """In a `with` block, ``module`` uses the variant's tile, with these ``fields``, and poisoned workspaces."""
        select, spans = tiles.select, self.c.get("SPANS", 1)
        fields |= module.tile_fields(self.kernel, self.c, self.options)
        # The parent's cache may be so large that its kernel holds fewer spans at a time than this small call would.
        bucket = (lambda n, S_kv: spans) if spans > 1 else getattr(module, "span_bucket", None)
        with (
            patch.multiple(tiles, select=lambda *arguments: select(*arguments)._replace(**fields)),
            patch.object(module, "span_bucket", bucket, create=True),
            poisoned_workspace(),
        ):
            yield

    def prepare(self, size: int, walk: bool, share: int = 0) -> None:
        """Make the tensors of a call with blocks of ``size`` keys, or with spans if the variant reads spans.

        Args:
            walk: the kernel loops over a row's keys. The block size is then derived from its ``BLOCK_L``.
            share: list entries in one share of a block's work. If not 0, all rows read the first block, so that its
                work has several shares.
        """
        from nsa.kernels.key_major import tiles as key_tiles
        from nsa.kernels.shared import primitives
        from nsa.kernels.shared.sizes import STEPS

        source = self.c.get("SOURCE")
        spans = source == primitives.RANGES.value
        if walk:  # TILED kernels take blocks of whole tiles, the others take any size
            size = self.c["BLOCK_L"] - (source != primitives.TILED.value)
        HKV, B, S, n = (1, 1, 3 + share // 64, 64) if share else (2, 2, 3, 4)
        S = STEPS + 2 if self.ragged else S  # a step and a chunk
        S_kv = 3 * (key_tiles.GRID if spans else size) + 5 + (2 * S if share else 0)
        self.layout(HKV, S_kv, B, S)
        self.select(max(self.c.get("SPANS", 1), n), None if spans else size, share > 0)

    def unite(self, tokens: int, slots: int, size: int, S: int) -> None:
        """Make the tensors of a call of two sequences, of ``S`` queries or a ragged batch, whose tiles may have unions.

        One tile has tokens of both sequences and no union. No row lists a block twice; the last row selects nothing.
        """
        self.layout(2, 3 * size + 5 + tokens, S=S)
        self.select(slots, size)
        assert self.selection is not None
        order = self.selection.sort(-1).values
        order[..., 1:].masked_fill_(order[..., 1:] == order[..., :-1], -1)
        self.selection = self.place("sel_ptr", order)


def _forward(t: Trial) -> str | None:
    """Try query-major on a few rows: with many spans, without any, and with spans that end after the last key. A kernel
    of steps is tried beside key-major.
    """
    from nsa.kernels.query_major import tiles
    from nsa.kernels.shared import primitives

    c, L = t.c, t.c["BLOCK_L"]
    tile = tiles.Tile(**{field: (c | t.options)[field] for field in tiles.Tile._fields})
    splits = c["CLUSTER"] or (max(2, c["SINGLE"]) if c["SPLIT"] else 1)
    if c["SINGLE"] and c["CHUNKED"] and not c["CLUSTER"]:
        splits = c["SPANS"] + 1 if c["SPLIT"] else 1  # one tile per block
    whole, tiled = (c["SOURCE"] == source.value for source in (primitives.WHOLE, primitives.TILED))
    S_kv = L * (splits + tile.num_stages) + 5  # enough tiles per program to fill the pipeline; the last is partial
    t.layout(c["HKV"], L * splits - 3 if c["SINGLE"] and whole else S_kv, S=3 if c["S_MANY"] else 1)
    n = c["SPANS"] + int(c["CHUNKED"])  # SPANS fit a program at a time; one more needs a second chunk
    size = L if tiled else max(1, L // 2)
    if c["SINGLE"]:  # all keys of a row fit one tile per program
        size = L * c["SINGLE"] if tiled else size
        n = n if c["CHUNKED"] else min(n, splits * L // size)
        size = size if tiled else max(1, min(size, splits * L // n))
    elif tile.num_stages == 1:  # they must not fit one tile per program
        size += L * (splits // n + 1)
    if not whole:
        t.select(n, None if c["SOURCE"] == primitives.RANGES.value else size)
    apart = c["SPLIT"] and not c["CLUSTER"]  # the merge kernel needs the LSE of the parts
    with patch.multiple(tiles, choose=lambda *_, **__: (tile, splits, c["CLUSTER"] > 0)):
        family = OF_SCHEDULE["key_major" if c["STEPS"] else "query_major"]
        return t.forward(family, apart or t.given["lse_ptr"] is not None, bound=t.S_kv)


def _combine(t: Trial) -> str | None:
    """Try the merge kernel: a query-major call, or steps beside key-major, whose rows are split into ``SPLITS`` parts,
    some of them empty.
    """
    from nsa.kernels.query_major import tiles

    splits, choose = t.c["SPLITS"], tiles.choose
    t.layout(2, 7 * splits + 5)
    t.select(4, 7 if t.c["STEPS"] else None)
    with patch.multiple(tiles, choose=lambda *x, **about: (choose(*x, **about)[0], splits, False)):
        family = OF_SCHEDULE["key_major" if t.c["STEPS"] else "query_major"]
        return t.forward(family, t.given["lse_ptr"] is not None, bound=t.S_kv)


def _key_major(t: Trial) -> str | None:
    """Try a key-major kernel in a whole call. The call's other kernels may be any variants."""
    from nsa.kernels.key_major import plan as key_major
    from nsa.kernels.key_major import tiles as key_tiles

    size = t.c.get("BLOCK_N", 32) * (1 if t.c.get("ONE_TILE", True) else 2)
    t.prepare(size, walk=t.c.get("WALK", False))
    wide = -1 if t.c.get("WIDE", False) else key_major.WIDE_FROM
    skips = t.given.get("served_ptr") is not None or bool(t.c.get("STEPS"))
    # Union, or steps, mark rows that key-major skips.
    family = OF_SCHEDULE["union" if skips and not t.ragged else "key_major"]
    t.longest = 1 if t.ragged and not skips else None
    with t.told(key_major, key_tiles), patch.multiple(key_major, WIDE_FROM=wide):
        return t.forward(family, t.kernel != "_merge_kernel" or t.given["lse_ptr"] is not None)


def _union(t: Trial) -> str | None:
    """Try a union kernel in a whole call. Two sequences are a tile and a token long; the last row selects nothing. A
    ragged batch has a step, a chunk with a whole tile, and a token of no sequence.
    """
    from nsa.kernels.shared.sizes import STEPS
    from nsa.kernels.union import plan as union
    from nsa.kernels.union import tiles as union_tiles

    c, tokens = t.c, t.c["TOKENS"]
    size = c.get("BLOCK_N", 32)
    if not c.get("TILED", True):
        size = max(3, size // 2 - 1)
    elif not c.get("ONE_TILE", True):
        size *= 2
    t.longest = 1 if t.ragged and not c.get("STEPS", True) else None
    t.unite(tokens, c["SLOTS"], size, 2 * tokens + STEPS if t.ragged else tokens + 1)
    with (
        t.told(union, union_tiles, HEADS=c.get("HEADS", max(2, 16 // tokens))),
        patch.multiple(union_tiles, WORTH=union_tiles.ALWAYS, WORTH_LONG=union_tiles.ALWAYS),
    ):
        return t.forward(OF_SCHEDULE["union"], t.kernel != "_union_kernel" or t.given["lse_ptr"] is not None)


def _backward(t: Trial) -> str | None:
    """Try a backward kernel in a whole backward pass. The pass's other kernels may be any variants.

    There are unions only where the kernel needs them, so that a pass has one launch of every other kernel.
    """
    from nsa.kernels.backward import plan as backward
    from nsa.kernels.backward import tiles as backward_tiles
    from nsa.kernels.union.tiles import ALWAYS

    unions = t.given.get("served_ptr") is not None
    keep_dq = unions or t.kernel == "_gather_kernel" or t.given.get("dq_part_ptr") is not None
    crowded, size = t.kernel in ("_dkdv_kernel", "_sum_kernel"), 16
    if t.kernel == "_dkdv_kernel":
        size = t.c["BLOCK_N"] * (1 if keep_dq else 2)
    if unions:
        tokens = t.c.get("TOKENS", 16)
        t.unite(tokens, t.c.get("SLOTS", 4), t.c.get("BLOCK_N", size), tokens + 1)
    else:
        t.prepare(size, walk=t.kernel == "_dq_kernel", share=t.c["SHARE"] if crowded else 0)
    index_bytes = 2 << 30 if crowded else backward_tiles.INDEX_BYTES
    rows = 0 if unions else 2**62
    with (
        t.told(backward, backward_tiles, keep_dq=keep_dq),
        patch.multiple(backward_tiles, STRIP=1, INDEX_BYTES=index_bytes),
        pinned(backward_unions=backward_tiles.Unions(rows, 1, ALWAYS)),
    ):
        return t.backward(backward)


def _either(t: Trial) -> str | None:
    """Try a kernel that the key-major forward and the backward pass share."""
    return (_backward if t.given.get("part_ptr") or t.given.get("strip_ptr") else _key_major)(t)


TRIALS = {"_fwd_kernel": _forward, "_combine_kernel": _combine}
TRIALS |= {f"_{name}_kernel": _key_major for name in ("count", "partial", "merge")}
TRIALS |= {f"_{name}_kernel": _union for name in ("list", "union")}
TRIALS |= {f"_{name}_kernel": _backward for name in "order strip delta dq union_dq dkdv sum gather".split()}
TRIALS |= {f"_{name}_kernel": _either for name in ("scan", "scatter")}
"""Trials by kernel name. A trial returns how the variant's results are wrong, or None if they are right."""
