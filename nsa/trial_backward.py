"""Trials of the backward kernels, for the child of `nsa.probe`: one call, compared with gradients of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.reference import selection_reference
from nsa.trial import Maker, Say, beyond_rounding, finish, poisoned_workspace

FROM_TILE = {"HEADS": "HEADS", "BLOCK_M": "BLOCK_M", "BLOCK_N": "BLOCK_N", "SHARE": "share"}
OF_DQ = {"HEADS": "dq_heads", "BLOCK_G": "BLOCK_G", "BLOCK_L": "BLOCK_L"}


def try_backward(what: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """A whole call whose kernel of that name is the one asked about; all others are as they come."""
    from nsa.kernels import backward, backward_tiles, key_tiles, primitives

    name, c, options, given = what["kernel"], what["constexprs"], what["options"], what["tensors"]
    make = Maker(what, device)
    floats = next((given[x] for x in ("q_ptr", "o_ptr", "dq_ptr") if given.get(x)), "torch.float16")
    of_call = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr")
    make.dtypes |= dict.fromkeys(of_call, getattr(torch, floats.removeprefix("torch.")))
    make.dtypes |= dict.fromkeys(("lse_ptr", "dlse_ptr"), torch.float32)
    fields: dict[str, Any] = {"keep_dq": name == "_gather_kernel" or given.get("dq_part_ptr") is not None}
    if name == "_dq_kernel":
        fields |= {OF_DQ[x]: c[x] for x in OF_DQ}
        fields |= {"dq_warps": options["num_warps"], "dq_stages": options["num_stages"]}
    elif name == "_dkdv_kernel":
        fields |= {FROM_TILE[x]: c[x] for x in FROM_TILE}
        fields |= {"warps": options["num_warps"], "stages": options["num_stages"]}
    elif "SHARE" in c:
        fields["share"] = c["SHARE"]
    real = backward_tiles.select

    def select(*arguments: Any) -> backward_tiles.Tile:
        return real(*arguments)._replace(**fields)

    backward_tiles.select = select  # type: ignore[assignment]
    if c.get("SPANS", 1) > 1:  # over an enormous cache fewer are held than their number asks for
        backward.span_bucket = lambda n, S_kv: c["SPANS"]  # type: ignore[attr-defined]

    G, D, Dv = c.get("G", 2), c.get("D", 64), c.get("Dv", 64)
    source = c.get("SOURCE", primitives.BLOCKS.value)
    size = c["BLOCK_N"] * (1 if fields["keep_dq"] else 2) if name == "_dkdv_kernel" else 16
    if name == "_dq_kernel":
        size = c["BLOCK_L"] if source == primitives.TILED.value else c["BLOCK_L"] - 1
    n = max(c.get("SPANS", 1), 4)
    HKV, S, S_kv = 2, 3, 3 * (key_tiles.GRID if source == primitives.RANGES.value else size) + 5
    batched = given.get("cu_k_ptr") is None
    backward_tiles.STRIP = 1
    crowded = name in ("_dkdv_kernel", "_sum_kernel")  # then everybody reads the first block, in several shares
    if crowded:
        n, HKV, S = max(n, 64), 1, c["SHARE"] // 64 + 3
        S_kv += 2 * S
        backward_tiles.INDEX_BYTES = 2 << 30
    B = 1 if crowded else 2
    lead, cache = ((B, S), (B, S_kv)) if batched else ((S + 2,), (S_kv,))
    q = make.floats("q_ptr", *lead, HKV * G, D)
    k = make.floats("k_ptr", *cache, HKV, D)
    v = make.floats("v_ptr", *cache, HKV, Dv)
    do = make.ints("do_ptr", make.normal(*lead, HKV * G, Dv))
    dlse = make.ints("dlse_ptr", make.normal(*lead, HKV * G)) if given.get("dlse_ptr") is not None else None
    cu_q = cu_k = None
    if not batched:
        cu_q = make.ints("cu_q_ptr", torch.tensor([0, 2, 2, S + 2]))
        cu_k = make.ints("cu_k_ptr", torch.tensor([0, S_kv // 3, S_kv // 2, S_kv]))
    rows = (*lead, HKV)
    if source == primitives.RANGES.value:
        start = make.draw((*rows, n), -3, S_kv + 3)
        selection = make.ints("sel_ptr", torch.stack((start, start + make.draw(start.shape, -9, S_kv // 2)), -1))
    else:
        selection = make.ints("sel_ptr", make.draw((*rows, n), -1, -(-S_kv // size) + 1))
    if crowded:
        selection[..., 2:] = 0
        if source == primitives.RANGES.value:
            selection[..., 2:, 1] = 3
    positions = make.ints("pos_ptr", make.draw(lead, -1, S_kv)) if given.get("pos_ptr") is not None else None
    causal = c.get("CAUSAL", True)
    block_size = None if source == primitives.RANGES.value else size
    launch = backward.launch_for(
        q, k, v, selection=selection, block_size=block_size, causal=causal, q_positions=positions, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )  # fmt: skip

    keywords: dict[str, Any] = (
        {"ranges": selection} if block_size is None else {"block_indices": selection, "block_size": size}
    )
    keywords |= {"causal": causal, "q_positions": positions, "return_lse": True}
    keywords |= {"cu_seqlens": None if cu_k is None or cu_q is None else (cu_q, cu_k)}
    given_to_kernel = (q, k, v, do, dlse)
    want: tuple[Tensor, ...] = ()
    if device.type == "meta":  # nothing is computed: what would be compiled is looked at
        o, lse = torch.empty_like(do), torch.empty(do.shape[:-1], dtype=torch.float32, device=device)
    else:
        o, lse, want = _exact(*given_to_kernel, **_on_host(keywords))
        o, lse = make.ints("o_ptr", o), make.ints("lse_ptr", lse)
    say("phase", "compiling")
    how = (selection, positions, None, cu_q, cu_k)
    with poisoned_workspace("backward"):
        gradients = backward.backward(launch, do, dlse, q, k, v, o, lse, "probe", *how)
    finish(device, say)
    for letter, got, exact in zip("qkv", gradients, want, strict=True):
        said = beyond_rounding(got, exact, q.dtype, f"d{letter} ")
        if said is not None:
            return said
    return None


def _on_host(keywords: dict[str, Any]) -> dict[str, Any]:
    def host(x: Any) -> Any:
        return x.cpu() if isinstance(x, Tensor) else tuple(map(host, x)) if isinstance(x, tuple) else x

    return {name: host(x) for name, x in keywords.items()}


def _exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """``O``, LSE and the gradients of ``q, k, v``, in fp64 on the host."""
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    o, lse = selection_reference(*leaves, **keywords)
    loss = (o * do.cpu().double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0) * dlse.cpu().double()).sum()
    return o.detach(), lse.detach(), torch.autograd.grad(loss, leaves)
