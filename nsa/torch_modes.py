"""What PyTorch does to a call from outside: autocast, forward-mode AD and the transforms of ``torch.func``.

Autocast is obeyed as SDPA obeys it. ``vmap`` is refused; other transforms see plain torch, which they can take apart.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Asked on every call, hence what costs least: either is true in few. The front doors spell `forward_mode` out, too.
any_autocast_enabled = torch._C._is_any_autocast_enabled
transforms_active = torch._C._are_functorch_transforms_active
DEVICES = ("cpu", "cuda")  # of which autocast may be asked: others may not know it


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of floats on ``device``; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind in DEVICES and torch.is_autocast_enabled(kind) else None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as autocast hands it to SDPA: fp64 stays. Its gradient comes back in its own dtype."""
    return x if x.dtype == torch.float64 else x.to(dtype)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether ``torch.func`` transforms one of them, so that it has no memory of its own, or one has a tangent.

    Raises:
        RuntimeError: one is mapped by ``vmap``, at any level of nested transforms.
    """
    functorch, found = torch._C._functorch, False
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                vmap_refused()
            x, found = functorch.get_unwrapped(x), True
    return found or forward_mode() and any(map(_has_tangent, tensors))


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None


def forward_mode() -> bool:
    """Whether tensors may have tangents: within ``torch.autograd.forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def no_tangents(what: str, *tensors: Tensor | None) -> None:
    """Refuse forward-mode AD where it would lose a tangent without a word.

    Raises:
        RuntimeError: one has a tangent.
    """
    if forward_mode() and any(map(_has_tangent, tensors)):
        tangents_refused(what)


def tangents_refused(what: str) -> NoReturn:
    """Say what to do instead."""
    raise RuntimeError(f"{what} has no rule for forward-mode AD: call selection_attention, and not compiled")


def vmap_refused(*_: object) -> NoReturn:
    """A kernel has one batch axis, and a loop over the mapped one would hide what it costs."""
    raise RuntimeError(
        "selection_attention has no vmap rule: fold the mapped axis into the batch, as in q.flatten(0, 1), and unfold "
        "the result"
    )
