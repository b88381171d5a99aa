"""The PyTorch modes that change a call: autocast, forward-mode AD, ``torch.func``, dispatch modes, graph capture.

Autocast casts a call as it casts SDPA. ``vmap`` is refused. Under other transforms a call runs in plain PyTorch. Where
a ``TorchDispatchMode`` looks at the dispatcher (checkpoint policies, fake tensors, tracing), a call is an operator.
"""

from __future__ import annotations

import functools
import operator
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from nsa.call import Call

# Every call asks these three, so PyTorch's cheapest functions are used. For the same reason `ops.serve` inlines
# `forward_mode` and parts of `odd`.
any_autocast_enabled = torch._C._is_any_autocast_enabled
transforms_active = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack
_WRAPPERS = "FuncTorchBatched", "FuncTorchGradWrapper", "Functionalize", "Python"
_VIEWS = "Negative", "Conjugate", "ZeroTensor"
_ODD = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr() for key in _WRAPPERS + _VIEWS)
)
DEVICES = ("cpu", "cuda")  # device types whose autocast state is asked for; autocast may not know other types


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts floating tensors on ``device``; None if autocast is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind in DEVICES and torch.is_autocast_enabled(kind) else None


def cast(call: Call, dtype: torch.dtype) -> Call:
    """Cast ``q``, ``k`` and ``v`` as autocast does for SDPA: fp64 stays fp64. Gradients have the dtypes from before."""
    q, k, v = [x if x.dtype == torch.float64 else x.to(dtype) for x in (call.q, call.k, call.v)]
    return call._replace(q=q, k=k, v=v)


def odd(x: Tensor | None) -> bool:
    """Whether a kernel must not read the memory of ``x``: ``x`` may have none, or memory that means something else.

    True for subclasses (fake tensors), tensors that ``torch.func`` or ``is_grads_batched`` wraps, zero tensors and
    negative views. PyTorch's dispatcher has a rule for each of them.

    A call asks only for the classes of ``q``, ``k`` and ``v``. Launches find zero tensors by their address. A negative
    view, the imaginary part of a conjugate, is refused because the stride of its last dimension is even.
    """
    if x is None:
        return False
    if x.__class__ not in (Tensor, Parameter) or torch._C._functorch.is_legacy_batchedtensor(x):
        return True
    return bool(torch._C._dispatch_keys(x).raw_repr() & _ODD)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor has a tangent, or is wrapped by ``torch.func``. A wrapped tensor has no memory of its own.

    Raises:
        RuntimeError: ``vmap`` maps a tensor, at any level of nested transforms.
    """
    functorch, wrapped = torch._C._functorch, False
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                vmap_refused()
            x, wrapped = functorch.get_unwrapped(x), True
    return wrapped or has_tangent(*tensors)


def without_grad(x: Tensor) -> Tensor:
    """``x`` without the wrappers that ``torch.func.grad`` puts around all that is computed within it."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def capturing(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU, and a CUDA graph is being captured: nothing is computed now, and nothing may wait."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors has a tangent of forward-mode AD."""
    floats = (x for x in tensors if x is not None and x.is_floating_point())
    return forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in floats)


def forward_mode() -> bool:
    """Whether tensors may have tangents: true within ``torch.autograd.forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def no_tangents(name: str, *tensors: Tensor | None) -> None:
    """Refuse tensors with tangents, because ``name`` would drop the tangents silently.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    if has_tangent(*tensors):
        tangents_refused(name)


def tangents_refused(name: str) -> NoReturn:
    """Raise the error of a call that cannot be differentiated in forward mode."""
    raise RuntimeError(f"{name} has no rule for forward-mode AD: call selection_attention, and not compiled")


NO_SECOND_GRADIENTS = (
    "the gradient of selection_attention cannot be differentiated: differentiate twice with "
    'backend="reference", or with backend="sdpa" under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)'
)


def differentiable_once(*_: object) -> NoReturn:
    """Raise the error of a second gradient."""
    raise RuntimeError(NO_SECOND_GRADIENTS)


def vmap_refused(*_: object) -> NoReturn:
    """Raise the error of ``vmap``. A kernel has one batch axis; a hidden loop over the mapped one would be slow."""
    raise RuntimeError(
        "selection_attention has no vmap rule: fold the mapped axis into the batch, as in q.flatten(0, 1), and unfold "
        "the result"
    )
