"""`nsa.compress`: one key for each window of keys, as NSA's scores need them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import validate


def compress(
    x: Tensor, *, window: int, stride: int, weight: Tensor | None = None, positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """One row for each window of tokens: their mean, or a learned sum (NSA, arXiv 2502.11089, eq. 7).

    Row ``i`` is made of the tokens ``i * stride`` to ``i * stride + window - 1``. Windows that a sequence does not fill
    have no row. :func:`nsa.select_blocks` takes the rows of keys as index keys with the same ``window`` and ``stride``.

    Args:
        x: ``[B, S, H, D]``, or ``[T, H, D]`` with ``cu_seqlens``: keys or values, of any floating dtype.
        window: tokens of a row. Windows overlap if it is larger than ``stride``.
        stride: tokens from the begin of one window to that of the next, ``window`` at most.
        weight: ``[window, D, Dout]``, or ``[H, window, D, Dout]`` with one for each head. A row is then the sum of its
            tokens, each times the matrix of its place in the window. None: the mean.
        positions: ``[window, D]``, added to the tokens of each window before ``weight``; only with ``weight``.
        cu_seqlens: ``[B + 1]`` int32 or int64, cumulative lengths of packed sequences. No window lies in two of them.

    Gradients flow to ``x``, ``weight`` and ``positions``.

    Returns:
        ``[B, rows, H, Dout]`` in ``x``'s dtype, with ``rows = max(0, (S - window) // stride + 1)``. With ``cu_seqlens``
        ``(out [T // stride, H, Dout], cu_seqlens_k [B + 1])``: the rows of each sequence after those of the one before
        it, in a tensor that has room for the most rows there can be, so that the host need not wait for the device.
        Rows after the last sequence are 0.

    Raises:
        ValueError, TypeError: an argument is not as above. The text says what was expected and what it got.
    """
    _check(x, window, stride, weight, positions, cu_seqlens)
    if cu_seqlens is None:
        if x.shape[1] < window:  # no rows; a view of x, whose gradient is then 0
            found = x[:, :0, :, None].expand(-1, -1, -1, window, -1)
        else:
            found = x.unfold(1, window, stride).transpose(-1, -2)  # [B, rows, H, window, D]
        return _reduced(found, weight, positions)
    rows = torch.arange(x.shape[0] // stride, device=x.device)
    begins = cu_seqlens.long().clamp(0, x.shape[0])
    begins = torch.cat((torch.zeros_like(begins[:1]), begins[1:]))
    lengths = begins.diff()
    counts = torch.where(lengths >= window, (lengths - window) // stride + 1, 0)
    ends = torch.cat((torch.zeros_like(begins[:1]), counts.cumsum(0)))
    seq = torch.searchsorted(ends[1:].contiguous(), rows, right=True)
    known = seq < len(counts)
    seq = seq.clamp(max=len(counts) - 1)  # without sequences -1: the one entry of `begins`
    first = begins[seq] + (rows - ends[seq]) * stride
    at = torch.where(known, first, 0)[:, None] + torch.arange(window, device=x.device)
    found = x[at.clamp(max=x.shape[0] - 1)].transpose(1, 2)  # [rows, H, window, D]
    found = found.masked_fill(~known[:, None, None, None], 0.0)  # a NaN times a gradient of 0 is NaN
    out = torch.where(known[:, None, None], _reduced(found, weight, positions), 0.0).to(x.dtype)
    return out, ends.to(cu_seqlens.dtype)


def _reduced(windows: Tensor, weight: Tensor | None, positions: Tensor | None) -> Tensor:
    """``[..., H, window, D]`` to ``[..., H, Dout]``."""
    if weight is None:
        mean: Tensor = windows.mean(-2)
        return mean
    if positions is not None:
        windows = windows + positions
    equation = "...hwd,wde->...he" if weight.dim() == 3 else "...hwd,hwde->...he"
    return torch.einsum(equation, windows, weight).to(windows.dtype)


def _check(x: Any, window: Any, stride: Any, weight: Any, positions: Any, cu_seqlens: Any) -> None:
    given = {"weight": weight, "positions": positions, "cu_seqlens": cu_seqlens}
    validate.check_tensors(x=x, **{name: m for name, m in given.items() if m is not None})
    validate.check_ndim("x", x, "[B, S, H, D]" if cu_seqlens is None else "[T, H, D]")
    validate.check_dtype("x", x.dtype, validate.FLOAT_DTYPES)
    for name, value in (("window", window), ("stride", stride)):
        validate.check_count(name, validate.integer(value), 1)
    if stride > window:
        raise ValueError(f"stride: expected at most window = {window}, got {stride}")
    H, D = x.shape[-2:]
    if weight is not None:
        layout = "[window, D, Dout]" if weight.dim() == 3 else "[H, window, D, Dout]"
        lead = (window, D) if weight.dim() == 3 else (H, window, D)
        validate.check_shape("weight", weight, layout, (*lead, weight.shape[-1] if weight.dim() else 0))
    if positions is not None:
        if weight is None:
            raise ValueError("positions: expected None without weight, got a tensor")
        validate.check_shape("positions", positions, "[window, D]", (window, D))
    if cu_seqlens is not None:
        validate.check_ends("cu_seqlens", cu_seqlens)
    for name, m in given.items():
        if m is not None:
            validate.check_device(name, m, x.device, "x")
            if name != "cu_seqlens":
                validate.check_dtype(name, m.dtype, (x.dtype,), " (that of x)")
