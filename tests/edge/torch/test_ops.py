"""The operators `torch.ops.nsa.selection_attention` and `…_backward`, as PyTorch wants them and as people call them."""

import pytest
import torch

import nsa
import nsa.kernels
from nsa import ops
from nsa.call import Call

from ...parity.pairs import in_pairs
from ..kernels.gradients import exact
from .test_training_tools import BACKENDS, close

FORWARD = torch.ops.nsa.selection_attention
BACKWARD = torch.ops.nsa.selection_attention_backward
ALL_CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
PROBLEMS = ["positions", "blocks", "varlen"]


def arguments(qkv, selection, backend="auto"):
    """Of the operator, in the order of its schema."""
    return ops._arguments(Call.of(*qkv, **selection, backend=backend))


@pytest.mark.parametrize(
    ("problem", "backend", "leaves"), in_pairs(PROBLEMS, BACKENDS, {"gradients": True, "forward": False}),
    indirect=["problem"],
)  # fmt: skip
def test_forward_is_as_torch_wants_it(problem, backend, leaves):
    qkv, selection = problem
    args = arguments([x.requires_grad_(leaves) for x in qkv], selection, backend)
    assert dict.fromkeys(ALL_CHECKS, "SUCCESS") == torch.library.opcheck(FORWARD.default, args)


@pytest.mark.parametrize(
    ("problem", "backend", "lse"), in_pairs(PROBLEMS, BACKENDS, {"no-lse": False, "lse": True}), indirect=["problem"]
)
def test_backward_is_as_torch_wants_it(problem, backend, lse):
    """An expanded dO, as `sum()` makes it."""
    qkv, selection = problem
    inputs = arguments(qkv, selection, backend)
    outputs = FORWARD(*inputs)
    gradients = outputs[0].new_ones(()).expand_as(outputs[0]), torch.ones_like(outputs[1]) if lse else None
    args = *gradients, *outputs, [True, lse, False], *inputs
    assert dict.fromkeys(ALL_CHECKS, "SUCCESS") == torch.library.opcheck(BACKWARD.default, args)


@pytest.mark.parametrize(
    ("problem", "backend", "used"), in_pairs(PROBLEMS, BACKENDS, ("o", "lse", "both")), indirect=["problem"]
)
def test_gradients(problem, backend, used):
    """Through either output or both, by every backend that somebody may ask the operator for."""
    qkv, selection = problem
    leaves = [x.requires_grad_() for x in qkv]
    o, lse = FORWARD(*arguments(leaves, selection, backend))
    do = torch.arange(o.numel(), device=o.device).view(o.shape).cos() * (used != "lse")
    dlse = torch.arange(lse.numel(), device=o.device).view(lse.shape).sin() * (used != "o")
    loss = (o * do).sum() if used != "lse" else 0
    got = torch.autograd.grad(loss + (lse * dlse).sum() if used != "o" else loss, leaves)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in got)
    close([x.double() for x in got], exact(*qkv, do, dlse, **selection), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_strided_inputs(draw, same, backend):
    """Fakes promise contiguous gradients."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in draw(S=2, S_kv=9))
    selection = {"ranges": same([(0, 4)], 1, 2, 2), "max_selected": 4}
    o, lse = FORWARD(*arguments((q, k, v), selection, backend))
    do = torch.ones_like(o).transpose(1, 2).contiguous().transpose(1, 2)
    inputs = arguments([x.detach() for x in (q, k, v)], selection, backend)
    got = BACKWARD(do, None, o, lse, [True] * 3, *inputs)
    assert all(x.is_contiguous() for x in got)
    close([x.double() for x in got], exact(q, k, v, do, **selection), 2e-5)


def test_kernel_is_launched_once_and_counted(problem):
    """The kernel that the package has. (Another one stands in for it below.)"""
    qkv, selection = problem
    leaves = [x.requires_grad_() for x in qkv]
    o, _ = FORWARD(*arguments(leaves, selection))
    before = nsa.kernels.launches.copy()
    torch.autograd.grad(o.sum(), leaves)
    assert nsa.kernels.launches - before == {"backward": 1}
    reason = "rows are long enough for Triton"
    assert nsa.routes()[1:] == [nsa.RouteRecord("backward", reason, 1)]


# --- what reaches a kernel: see `BackwardKernel` ----------------------------------------------------------------------


@pytest.mark.parametrize("used", ["o", "lse", "both"])
def test_unused_outputs_have_no_gradient(problem, backward_kernel, used):
    """No zeros are made for an unused LSE; an unused O has zeros."""
    qkv, selection = problem
    leaves = [x.requires_grad_() for x in qkv]
    o, lse = FORWARD(*arguments(leaves, selection))
    used_outputs = {"o": (o,), "lse": (lse,), "both": (o, lse)}[used]
    got = torch.autograd.grad(sum(2 * x.sum() for x in used_outputs), leaves)
    assert all(x.eq(backward_kernel.MARK).all() for x in got)
    ((do, dlse, route),) = backward_kernel.calls
    assert route == "backward"
    assert do.eq(0 if used == "lse" else 2).all()
    assert (dlse is None) == (used == "o")
    assert dlse is None or dlse.eq(2).all()


def test_what_the_plan_is_made_from(problem, backward_kernel):
    """Once for a signature: a second call of it plans nothing."""
    qkv, selection = problem
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in qkv]
        FORWARD(*arguments(leaves, selection))[0].sum().backward()
    assert backward_kernel.planned == 1
    for name, x in Call.of(*leaves, **selection)._asdict().items():
        got = getattr(backward_kernel.call, name)
        if name not in ("settings", "return_lse"):
            assert torch.equal(got, x) if isinstance(x, torch.Tensor) else got == x


def test_no_gradient_runs_no_backward(problem, backward_kernel):
    qkv, selection = problem
    o, lse = FORWARD(*arguments(qkv, selection))
    assert not o.requires_grad
    assert not lse.requires_grad
    qkv[0].requires_grad_()
    with torch.no_grad():
        assert not FORWARD(*arguments(qkv, selection))[0].requires_grad
    assert FORWARD(*arguments(qkv, selection))[0].requires_grad
    assert backward_kernel.calls == []


def test_changed_inputs_are_noticed(problem, backward_kernel):
    """A selection written to between forward and backward would give the gradient of another call."""
    qkv, selection = problem
    leaves = [x.requires_grad_() for x in qkv]
    o, _ = FORWARD(*arguments(leaves, selection))
    selection.get("ranges", selection.get("block_indices")).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
