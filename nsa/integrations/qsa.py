"""Qwen's sparse attention (QSA) on our kernels: from vLLM's lists of keys to blocks, and the gate of the output.

vLLM lists the keys of a token one by one: those of whole blocks, block by block, then the tail, which are the keys of
the token's own block up to the token. :func:`attend` makes blocks of them, in which the causal clamp cuts the tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import ops, settings
from nsa.call import Call
from nsa.kernels.shared.launch import current_device
from nsa.kernels.shared.sizes import next_power_of_2
from nsa.torch_modes import capturing

SIZE = 4  # keys of a block
ROWS = 16  # heads that a program of the gate takes

_numbers: dict[tuple[torch.device, float], Tensor] = {}  # scales that a caller passed as numbers, on their devices


@triton.jit(do_not_specialize=["T", "B", "n", "room", "stride_ids"])
def _prepare(
    ids_ptr, req_ptr, blocks_ptr, pos_ptr, ends_ptr, lengths_ptr, T, B, n, room, stride_ids,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs up to ``T`` write a token's blocks and position, the others a sequence's end and its length, ``room``.

    A sequence ends before the first token of a later one. So tokens must be in the order of their sequences. A token of
    no sequence gets no blocks.
    """
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if token < T:
        seq = tl.load(req_ptr + token)
        row = ids_ptr + token.to(tl.int64) * stride_ids
        count = tl.load(row + n * SIZE - 1)
        count = tl.where((seq >= 0) & (seq < B), tl.maximum(tl.minimum(count, n * SIZE - 1), 0), 0)
        first = tl.load(row + i * SIZE, mask=i * SIZE < count, other=-1)
        tl.store(blocks_ptr + token.to(tl.int64) * n + i, tl.where(first >= 0, first // SIZE, -1), mask=i < n)
        last = tl.load(row + tl.maximum(count - 1, 0))
        tl.store(pos_ptr + token, tl.where(count % SIZE == 0, room - 1, last))
    else:
        seq = token - T
        end = T
        for begin in range(0, T, BLOCK):
            others = tl.load(req_ptr + begin + i, mask=begin + i < T, other=-1)
            end = tl.minimum(end, tl.min(tl.where((others > seq) & (others < B), begin + i, T), 0))
        tl.store(ends_ptr + seq + 1, end)
        tl.store(lengths_ptr + seq, room)
        if seq == 0:
            tl.store(ends_ptr, 0)


@triton.jit(do_not_specialize=["rows", "HQ", "stride_t", "stride_h"])
def _gate(out_ptr, gate_ptr, rows, HQ, stride_t, stride_h, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Multiply the rounded output ``[T, HQ, D]`` by the sigmoid of the contiguous gate."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (d < D)[None, :]
    at = (row // HQ).to(tl.int64) * stride_t + (row % HQ).to(tl.int64) * stride_h
    out = out_ptr + at[:, None] + d[None, :]
    gate = tl.load(gate_ptr + row.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, (x / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=mask)


def attend(call: Call, ids: Tensor, token_to_req: Tensor, v_scale: float, gate: Tensor) -> None:
    """Attention over the keys ``ids [T, 4 n]``, whose last column is their number; into ``call.out``.

    Args:
        call: ``q [T, HQ, D]``, the cache with its block table, ``out`` and ``scale``; the rest is added here.
        token_to_req: ``[T]``, the sequence of each token.
        v_scale: factor of the cached values.
        gate: as many elements as ``q``.

    Raises:
        ValueError, TypeError: as :func:`nsa.selection_attention_with_kvcache`. ``out`` was not written.
    """
    q, table, out, device = call.q, call.block_table, call.out, call.q.device
    if device.index is not None and device.index != current_device():  # Triton launches on the current GPU
        with torch.cuda.device(device):
            return attend(call, ids, token_to_req, v_scale, gate)
    assert table is not None and out is not None
    (T, HQ, D), B, n = q.shape, table.shape[0], ids.shape[1] // SIZE
    room = call.k.shape[1] * table.shape[1]
    ids, token_to_req = ids if ids.stride(1) == 1 else ids.contiguous(), token_to_req.contiguous()
    blocks, positions, ends, lengths = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((T, 1, n), (T,), (B + 1,), (B,))
    )
    call = call._replace(
        block_indices=blocks, q_positions=positions, cu_seqlens_q=ends, cache_seqlens=lengths,
        v_scale=None if v_scale == 1.0 else _tensor_of(v_scale, q), block_size=SIZE,
        max_seqlen_q=1 if T <= B else None, backend="triton", schedule="small_blocks", settings=settings.get(),
    )  # fmt: skip
    _prepare[(T + B,)](
        ids, token_to_req, blocks, positions, ends, lengths, T, B, n, room, ids.stride(0), SIZE=SIZE,
        BLOCK=next_power_of_2(n),
    )  # fmt: skip
    ops.serve(call)
    _gate[(-(-T * HQ // ROWS),)](
        out, gate.contiguous(), T * HQ, HQ, *out.stride()[:2], D=D, BLOCK_D=next_power_of_2(D), ROWS=ROWS, num_warps=4
    )


def _tensor_of(number: float, q: Tensor) -> Tensor:
    """``[1]`` fp32 on the device of ``q``. It is remembered, so that later calls do not fill it again.

    A graph that is being captured fills one of its own: what is written now is there only after a replay. A tensor that
    is remembered is waited for, because the next call may read it on another stream.
    """
    made = _numbers.get((q.device, number))
    if made is None:
        made = torch.full((1,), number, dtype=torch.float32, device=q.device)
        if not capturing(q):
            if q.is_cuda:
                torch.cuda.current_stream(q.device).synchronize()
            _numbers[q.device, number] = made
    return made
