"""The backward kernels by themselves, and the gradients that the oracle has."""

import contextlib

import torch

from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.backward import plan as backward
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.plain.oracle import selection_reference


def gradients(q, k, v, do, dlse=None, wanted=(True, True, True), choice=None, **selection):
    """`(dq, dk, dv)` of a call whose outputs are the oracle's, of NaN where no kernel wrote; `choice` pins tiles."""
    o, lse = selection_reference(Call.of(q.double(), k, v, **selection, return_lse=True))
    call = Call.of(q, k, v, **selection)
    with contextlib.nullcontext() if choice is None else pinned(backward=choice), poisoned_workspace():
        return backward.backward(backward.plan(call), call, do, dlse, o.to(q.dtype), lse.float(), "backward", wanted)


def exact(q, k, v, do, dlse=None, **selection):
    """The oracle's, in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = selection_reference(Call.of(*leaves, **selection, return_lse=True))
    loss = (o * do.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0) * dlse.double()).sum()
    return torch.autograd.grad(loss, leaves)


def close(got, want):
    for x, y in zip(got, want, strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x.double(), y, rtol=0, atol=max(16 * eps, 1e-5) * float(y.abs().max().clamp(min=1)))


def like(x, seed=7):
    """N(0, 1) of its shape and dtype."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
