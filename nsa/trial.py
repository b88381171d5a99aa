"""The child of `nsa.probe`: compiles one variant of a kernel, runs it on small tensors, compares with the reference.

The variant is launched by the real launchers, which are told the tile and find everything else out by the arguments; a
launch that would compile something else than the parent is about to is an error. Whatever ends this process ends this
process only. Answers are JSON lines: the phase it is in, an error (`broken` if Triton cannot compile that), the result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nsa import probe
from nsa.reference import selection_reference

Say = Callable[[str, str], None]
POISON = float("nan")
AROUND = 64  # elements: addresses stay multiples of 16


def main(request: dict[str, Any]) -> None:
    """Try what :func:`nsa.probe.ask` asks."""
    signal.alarm(math.ceil(request["limit_s"]) + 5)  # should the parent be gone
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints is no answer

    def say(kind: str, text: str) -> None:
        print(json.dumps({"nsa": kind, "says": text}), file=answers, flush=True)

    def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        say("broken" if probe.broken(error) else "error", f"{kind.__name__}: {str(error).strip() or 'no message'}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = last_words
    device, what = torch.device(request["device"]), request["what"]
    if probe.architecture(device) != request["arch"]:
        raise RuntimeError(f"expected {device} to be {request['arch']}, found {probe.architecture(device)}")
    torch.zeros(1, device=device)  # CUDA begins: what fails until here is not the kernel
    seen = _watch(what)
    found = TRIALS[what["kernel"]](what, device, say)
    if what not in seen:
        raise RuntimeError(f"expected {what['kernel']} to be launched, saw {len(seen)} other launches")
    say("result", found or "right")


def _watch(what: dict[str, Any]) -> list[dict[str, Any]]:
    """Every launch from now on that has Triton compile, as the parent describes its own. Nothing is probed any more."""
    seen: list[dict[str, Any]] = []

    def require(variant: Any, device: torch.device, tensors: tuple[Tensor | None, ...]) -> None:
        found = json.loads(json.dumps(probe.describe(variant, tensors)))
        if found["kernel"] == what["kernel"] and found != what:
            other = {key: (what[key], found[key]) for key in what if what[key] != found[key]}
            raise RuntimeError(f"the child would compile another variant, (expected, got): {other}")
        seen.append(found)

    probe.require = require
    return seen


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """A few rows of every kind: many spans, none, reaching past the end."""
    from nsa.kernels import primitives, query_major, tiles

    c, given = what["constexprs"], what["tensors"]
    tile = tiles.Tile(**{field: (c | what["options"])[field] for field in tiles.Tile._fields})
    splits = c["CLUSTER"] or (max(2, c["SINGLE"]) if c["SPLIT"] else 1)
    if c["SINGLE"] and c["CHUNKED"] and not c["CLUSTER"]:
        splits = c["SPANS"] + 1 if c["SPLIT"] else 1  # a tile for each of so many blocks
    tiles.choose = lambda *_, **__: (tile, splits, c["CLUSTER"] > 0)
    make = Maker(what, device)

    HKV, S, L = c["HKV"], (3 if c["S_MANY"] else 1), c["BLOCK_L"]
    S_kv = L * (splits + tile.num_stages) + 5  # every program meets tiles enough to pipeline, and an end within one
    if c["SINGLE"] and c["SOURCE"] == primitives.WHOLE.value:
        S_kv = L * splits - 3
    cached, page = c["LAYOUT"] == primitives.CACHE.value, c["PAGE"]
    batched = cached or c["LAYOUT"] == primitives.BATCH.value
    packed = c["LAYOUT"] == primitives.PACKED.value
    lead, cache = ((2, S), (2, S_kv)) if batched else ((5,), (S_kv,))
    width = -(-S_kv // page) if page else 0
    if page:  # of more pages than are needed, some of which the table does not name
        cache, S_kv = (2 * width + 1, page), width * page
    q = make.floats("q_ptr", *lead, HKV * c["G"], c["D"])
    k = make.floats("k_ptr", *cache, HKV, c["D"])
    v = make.floats("v_ptr", *cache, HKV, c["Dv"])
    out = make.floats("o_ptr", *lead, HKV * c["G"], c["Dv"]).fill_(POISON)

    cu_q = cu_k = lengths = table = None
    if cached:
        lengths, table = make.cache(S_kv, page, width)
    elif packed:
        cu_k = make.ints("cu_k_ptr", torch.tensor([0, 7, 7, S_kv - 9, S_kv - 1, S_kv + 3]))
    elif not batched:
        cu_q = make.ints("cu_q_ptr", torch.tensor([0, 2, 2, 5]))
        cu_k = make.ints("cu_k_ptr", torch.tensor([0, S_kv // 3, S_kv // 2, S_kv]))
    selection, size = None, None
    if c["SOURCE"] != primitives.WHOLE.value:
        selection, size = _selection(c, lead, HKV, S_kv, make, tile.num_stages, splits)
    positions = None
    if given["pos_ptr"] is not None:
        positions = make.ints("pos_ptr", make.draw(lead, -1, S_kv))

    launch = query_major.launch_for(
        q, k, v, selection=selection, block_size=size, causal=c["CAUSAL"], q_positions=positions, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, cache_seqlens=lengths, block_table=table, bound=S_kv, out=out,
    )  # fmt: skip
    apart = c["SPLIT"] and not c["CLUSTER"]  # then the parts are merged by a kernel that knows the LSE anyway
    say("phase", "compiling")
    _, lse = query_major.forward(
        launch,
        q,
        k,
        v,
        "probe",
        selection,
        positions,
        None,
        cu_q,
        cu_k,
        apart or given["lse_ptr"] is not None,
        out,
        lengths,
        table,
    )
    finish(device, say)

    q, k, v = q.cpu(), k.cpu(), v.cpu()
    selection, positions, cu_q, cu_k, lengths, table = (
        x if x is None else x.cpu() for x in (selection, positions, cu_q, cu_k, lengths, table)
    )
    if packed:
        cu_q = torch.arange(lead[0] + 1)
    if selection is None:
        selection = torch.tensor([0, 2**31 - 1]).expand(*lead, HKV, 1, 2)
    keywords = {"ranges": selection} if size is None else {"block_indices": selection, "block_size": size}
    o_want, lse_want = selection_reference(
        q.double(), k, v, **keywords, causal=c["CAUSAL"], q_positions=positions,
        cu_seqlens=None if cu_k is None or cu_q is None else (cu_q, cu_k), cache_seqlens=lengths, block_table=table,
        return_lse=True,
    )  # fmt: skip
    return beyond_rounding(out, o_want, q.dtype) or (
        None if lse is None else beyond_rounding(lse, lse_want, torch.float32, "LSE ")
    )


def _selection(
    c: dict[str, Any], lead: tuple[int, ...], HKV: int, S_kv: int, make: Maker, stages: int, splits: int
) -> tuple[Tensor, int | None]:
    """Spans or blocks, and the size of the latter. As many as a program holds at a time, or one more."""
    from nsa.kernels import primitives

    n, L = c["SPANS"] + int(c["CHUNKED"]), c["BLOCK_L"]
    rows = (*lead, HKV)
    if c["SOURCE"] == primitives.RANGES.value:
        start = make.draw((*rows, n), -3, S_kv + 3)
        spans = torch.stack((start, start + make.draw((*rows, n), -2, 2 * S_kv // n + 2)), -1)
        spans.view(-1, n, 2)[0, 0] = torch.tensor([-5, S_kv + 5])
        spans.view(-1, n, 2)[-1] = 0
        return make.ints("sel_ptr", spans), None
    tiled = c["SOURCE"] == primitives.TILED.value
    size = L if tiled else max(1, L // 2)
    if c["SINGLE"]:  # all of them are a tile a program
        size = L * c["SINGLE"] if tiled else size
        n = n if c["CHUNKED"] else min(n, splits * L // size)
        size = size if tiled else max(1, min(size, splits * L // n))
    elif stages == 1:  # and here are not
        size += L * (splits // n + 1)
    blocks = make.draw((*rows, n), -1, -(-S_kv // size) + 1)
    blocks[..., 8:-1] = -1  # all of 64 would take the interpreter seconds
    blocks.view(-1, n)[-1] = -1
    return make.ints("sel_ptr", blocks), size


class Maker:
    """Tensors of the dtypes, alignments and strides that the parent's have."""

    def __init__(self, what: dict[str, Any], device: torch.device) -> None:
        indices = ("sel_ptr", "cu_q_ptr", "cu_k_ptr", "table_ptr")
        usual = dict.fromkeys(indices, torch.int32)  # of what a kernel does not take
        usual |= {name: torch.float16 for name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr")}
        told = {name: x and getattr(torch, x.removeprefix("torch.")) for name, x in what["tensors"].items()}
        if told.get("q_ptr") is not None:
            usual["o_ptr"] = told["q_ptr"]
        self.dtypes = usual | told
        self.misaligned, self.device = what["misaligned"], device
        self.unit = what["constexprs"].get("STRIDE_UNIT", 16)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Integers from ``low`` to ``high``, which is left out."""
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """N(0, 1) on the host."""
        return torch.randn(*shape, generator=self.generator)

    def floats(self, name: str, *shape: int) -> Tensor:
        """N(0, 1); the greatest common divisor of 16 and all strides but the last is that of the parent's."""
        width = -(-shape[-1] // 16) * 16 + self.unit % 16
        return self._place(name, self.normal(*shape[:-1], width))[..., : shape[-1]]

    def ints(self, name: str, values: Tensor) -> Tensor:
        return self._place(name, values)

    def cache(self, room: int, page: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Lengths of two sequences, one beyond the ``room``, and their page table, two of whose pages do not exist."""
        lengths = self.ints("cu_k_ptr", torch.tensor([room - 7, room + 3]))
        if not page:
            return lengths, None
        order = torch.randperm(2 * width, generator=self.generator).view(2, width)
        order[0, 0], order[1, -1] = -1, 2 * width + 1
        return lengths, self.ints("table_ptr", order)

    def _place(self, name: str, values: Tensor) -> Tensor:
        offset = int(name in self.misaligned)
        memory = torch.empty(values.numel() + offset, dtype=self.dtypes[name], device=self.device)
        return memory[offset:].view(values.shape).copy_(values)


# --- merging ----------------------------------------------------------------------------------------------------------


def _combine(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """Parts as the forward kernel leaves them, some of them empty."""
    from nsa.kernels.combine import combine

    c, make = what["constexprs"], Maker(what, device)
    splits, Dv = c["SPLITS"], c["Dv"]
    tokens, HQ = 3, 2
    heads = tokens * HQ
    acc, m = make.normal(splits, heads, Dv), make.normal(splits, heads)
    total = make.normal(splits, heads).abs() + 1
    m[0, 0], m[:, -1] = -math.inf, -math.inf
    empty = m == -math.inf
    acc[empty], total[empty] = 0.0, 0.0
    out = make.floats("o_ptr", tokens, HQ, Dv).fill_(POISON)
    lse = None if what["tensors"]["lse_ptr"] is None else torch.full((tokens, HQ), POISON, device=device)
    parts = torch.cat([x.flatten() for x in (acc, m, total)]).to(device)
    say("phase", "compiling")
    combine(parts, splits, out, lse, c["OVERLAP"])
    finish(device, say)

    weights = torch.exp2(m.double() - m.double().max(0).values.clamp(min=-1e30))
    sums = (weights * total).sum(0)
    o_want = (weights[..., None] * acc).sum(0) / sums.clamp(min=1e-30)[:, None]
    lse_want = (torch.log2(sums) + m.double().max(0).values) * math.log(2)
    return _off(out, o_want.view(tokens, HQ, Dv), lse, lse_want.view(tokens, HQ))


# --- key-major --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_workspace(name: str) -> Iterator[None]:
    """What the kernels of `nsa.kernels.<name>` allocate is full of NaN, and of integers far out of bounds.

    So is what lies around it, which no kernel may read either. Memory as it comes may hold what an earlier call rightly
    left there.
    """
    kernels: Any = importlib.import_module(f"nsa.kernels.{name}")  # which imports Triton
    real = kernels.workspace

    def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        x: Tensor = real(size + 2 * AROUND, dtype, device)
        return x.fill_(POISON if dtype.is_floating_point else 0x3F3F3F3F)[AROUND : AROUND + size]

    kernels.workspace = poisoned
    try:
        yield
    finally:
        kernels.workspace = real


def _key_major(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """A whole call whose kernel of that name is the one asked about; all others are as they come."""
    from nsa.kernels import key_major, key_tiles, primitives

    c, options, given = what["constexprs"], what["options"], what["tensors"]
    make = Maker(what, device)
    G, D, Dv = c.get("G", 2), c.get("D", 64), c.get("Dv", 64)
    source, merging = c.get("SOURCE", primitives.BLOCKS.value), what["kernel"] == "_merge_kernel"
    walk = c.get("WALK", False)
    named = {"SHARE": "share", "AT_ONCE": "at_once"} | ({"HEADS": "merge_heads"} if merging else {})
    fields = {named.get(name, name): value for name, value in c.items()}
    if merging:
        fields |= {"walked": 8 * walk, "walk_registers": options.get("maxnreg")}
        fields |= {"walk_stages": options["num_stages"]} if walk else {}
    elif what["kernel"] == "_partial_kernel":
        fields |= {"warps": options["num_warps"], "registers": options.get("maxnreg")}
    if c.get("SPANS", 1) > 1:  # over an enormous cache fewer are held than their number asks for
        key_major.span_bucket = lambda n, S_kv: c["SPANS"]  # type: ignore[attr-defined]
    real = key_tiles.select

    def select(*arguments: Any) -> key_tiles.Tile:
        tile = real(*arguments)
        return tile._replace(**{name: value for name, value in fields.items() if name in key_tiles.Tile._fields})

    key_tiles.select = select  # type: ignore[assignment]
    key_major.WIDE = -1 if c.get("WIDE", False) else key_major.WIDE
    n = max(c.get("SPANS", 1), 4)
    block_l, block_n = c.get("BLOCK_L", 16), c.get("BLOCK_N", 32)
    size = block_n if c.get("ONE_TILE", True) else 2 * block_n
    if walk:
        size = block_l if source == primitives.TILED.value else block_l - 1
    HKV, S, S_kv = 2, 3, 3 * (key_tiles.GRID if source == primitives.RANGES.value else size) + 5
    layout, page = c.get("LAYOUT", primitives.BATCH.value), c.get("PAGE", 0)
    cached = layout == primitives.CACHE.value
    batched = cached or layout == primitives.BATCH.value
    lead, cache = ((2, S), (2, S_kv)) if batched else ((5,), (S_kv,))
    width = -(-S_kv // page) if page else 0
    if page:
        cache, S_kv = (2 * width + 1, page), width * page
    q = make.floats("q_ptr", *lead, HKV * G, D)
    k = make.floats("k_ptr", *cache, HKV, D)
    v = make.floats("v_ptr", *cache, HKV, Dv)
    out = make.floats("o_ptr", *lead, HKV * G, Dv).fill_(POISON)
    cu_q = cu_k = None
    lengths, table = make.cache(S_kv, page, width) if cached else (None, None)
    if not batched:
        cu_q = make.ints("cu_q_ptr", torch.tensor([0, 2, 2, 5]))
        cu_k = make.ints("cu_k_ptr", torch.tensor([0, S_kv // 3, S_kv // 2, S_kv]))
    rows = (*lead, HKV)
    if source == primitives.RANGES.value:
        start = make.draw((*rows, n), -3, S_kv + 3)
        selection = make.ints("sel_ptr", torch.stack((start, start + make.draw(start.shape, -9, S_kv // 2)), -1))
    else:
        selection = make.ints("sel_ptr", make.draw((*rows, n), -1, -(-S_kv // size) + 1))
    positions = make.ints("pos_ptr", make.draw(lead, -1, S_kv)) if given.get("pos_ptr") is not None else None
    causal = c.get("CAUSAL", True)
    block_size = None if source == primitives.RANGES.value else size
    launch = key_major.launch_for(
        q, k, v, selection=selection, block_size=block_size, causal=causal, q_positions=positions, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, cache_seqlens=lengths, block_table=table, out=out,
    )  # fmt: skip
    say("phase", "compiling")
    with_lse = not merging or given["lse_ptr"] is not None
    with poisoned_workspace("key_major"):
        _, lse = key_major.forward(
            launch, q, k, v, "probe", selection, positions, None, cu_q, cu_k, with_lse, out, lengths, table
        )
    finish(device, say)
    positions, cu_q, cu_k, lengths, table = (
        x if x is None else x.cpu() for x in (positions, cu_q, cu_k, lengths, table)
    )
    selection = selection.cpu()
    keywords = {"ranges": selection} if block_size is None else {"block_indices": selection, "block_size": size}
    o_want, lse_want = selection_reference(
        q.cpu().double(), k.cpu(), v.cpu(), **keywords, causal=causal, q_positions=positions,
        cu_seqlens=None if cu_k is None or cu_q is None else (cu_q, cu_k), cache_seqlens=lengths, block_table=table,
        return_lse=True,
    )  # fmt: skip
    return beyond_rounding(out, o_want, q.dtype) or (
        None if lse is None else beyond_rounding(lse, lse_want, torch.float32, "LSE ")
    )


TRIALS = {"_fwd_kernel": _forward, "_combine_kernel": _combine}
TRIALS |= {f"_{name}_kernel": _key_major for name in ("count", "partial", "merge")}


def _backward(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    from nsa.trial_backward import try_backward

    return try_backward(what, device, say)


def _either(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """Of a kernel of both directions."""
    backward = any(what["tensors"].get(name) is not None for name in ("part_ptr", "strip_ptr"))
    return (_backward if backward else _key_major)(what, device, say)


TRIALS |= {f"_{name}_kernel": _backward for name in ("order", "strip", "delta", "dq", "dkdv", "sum", "gather")}
TRIALS |= {f"_{name}_kernel": _either for name in ("scan", "scatter")}


def _off(out: Tensor, o_want: Tensor, lse: Tensor | None, lse_want: Tensor) -> str | None:
    wrong = beyond_rounding(out, o_want, out.dtype)
    return wrong or (None if lse is None else beyond_rounding(lse, lse_want, torch.float32, "LSE "))


def finish(device: torch.device, say: Say) -> None:
    say("phase", "running")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    say("phase", "comparing")


def beyond_rounding(got: Tensor, want: Tensor, dtype: torch.dtype, of: str = "") -> str | None:
    """What is wrong beyond rounding, which is within two units in the last place of the largest value there is.

    One key of a few hundred lost, one element of a head dimension or a scale 3% off is further off than that.
    """
    got = got.cpu().double()
    same = (got == want) & want.isinf()
    error = torch.where(same, 0.0, (got - want).abs())
    worst = float(torch.where(error.isnan(), math.inf, error).max())
    peak = float(want[want.isfinite()].abs().amax()) if want.isfinite().any() else 0.0
    bound = max(2 * torch.finfo(dtype).eps, 1e-4 if dtype == torch.float32 else 0.0) * (peak or 1.0)
    return None if worst <= bound else f"max {of}error {worst:.3g}, rounding explains {bound:.3g}"
