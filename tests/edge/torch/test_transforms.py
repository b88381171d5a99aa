"""What wraps a call: `torch.func`, forward-mode AD, `out`. `test_training_tools.py` has the others."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa import ops
from nsa.call import Call

from .test_training_tools import BACKENDS, TRANSFORMED, close, gradients, refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_with_gradients(qkv, attend, backend):
    want = gradients(lambda *qkv: attend(*qkv, backend=backend), qkv)
    outs = []

    def call(q, k, v):
        outs.append(q.new_full((*q.shape[:-1], v.shape[-1]), float("nan")))
        o = attend(q, k, v, backend=backend, out=outs[0])
        assert o is outs[0]
        return o

    close(gradients(call, qkv), want, atol=0)
    assert torch.equal(outs[0].detach(), attend(*qkv, backend=backend))


# --- torch.func -------------------------------------------------------------------------------------------------------

NO_VMAP = (
    "selection_attention has no vmap rule: fold the mapped axis into the batch, as in q.flatten(0, 1), and unfold the "
    "result"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_is_refused(qkv, attend, same, backend):
    """At any level, and before anything ran: no kernel is held to be broken."""
    tensors = dict(zip("qkv", qkv, strict=True)) | {"ranges": same([(0, 4), (2, 7)], 1, 2, 1)}

    def call(x, mapped="q"):
        given = tensors | {mapped: x}
        return attend(given["q"], given["k"], given["v"], ranges=given["ranges"], backend=backend)

    def loss(q):
        return call(q).sum()

    for mapped, x in tensors.items():
        refused(NO_VMAP, torch.vmap(lambda x, mapped=mapped: call(x, mapped)), torch.stack([x] * 3))
    qs = torch.stack([tensors["q"]] * 3)
    refused(NO_VMAP, torch.vmap(torch.func.grad(loss)), qs)
    refused(NO_VMAP, torch.func.grad(lambda qs: torch.vmap(loss)(qs).sum()), qs)
    assert nsa.routes() == []


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_gradient_of_ranges_without_a_bound(qkv, same, backend):
    """Packed SDPA reads the length of the longest row, although `torch.func` wraps the lengths."""
    ranges = same([(0, 2), (3, 9)], 1, qkv[0].shape[1], qkv[1].shape[2])

    def gradient(backend):
        def loss(*qkv):
            return nsa.selection_attention(*qkv, ranges=ranges, backend=backend).square().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(*qkv)

    close(gradient(backend), gradient("reference"))


def test_vmap_of_something_else(qkv, attend):
    """What is not mapped is a call as any other."""
    want = attend(*qkv)
    got = torch.vmap(lambda x: attend(*qkv) + x)(torch.zeros(3, device=want.device))
    assert torch.equal(got, want.expand(3, *want.shape))
    assert [record.route for record in nsa.routes()] == ["query_major"]


@pytest.mark.parametrize("operator", ["selection_attention", "selection_attention_backward"])
def test_vmap_of_an_operators_inputs_is_refused(qkv, same, operator):
    """The gradient's operator has a rule for its first two arguments, gradients of outputs (`test_doors.py`)."""
    arguments = ops._arguments(Call(*qkv, ranges=same([(0, 4)], 1, 2, 1), max_selected=9))
    outputs = torch.ops.nsa.selection_attention(*arguments)
    before = () if operator == "selection_attention" else (outputs[0], None, *outputs, [True] * 3)
    first, *rest = arguments
    mapped = torch.vmap(lambda x: getattr(torch.ops.nsa, operator)(*before, x, *rest))
    refused(NO_VMAP, mapped, torch.stack([first] * 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward AD
@pytest.mark.parametrize("how", ["func", "dual"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_is_right_or_refused(qkv, attend, backend, how):
    """Forward-mode AD: some of torch's own SDPA kernels raise; nothing comes out without its tangent."""
    tangents = [torch.randn_like(x) for x in qkv]

    def tangent(backend):
        if how == "func":
            return torch.func.jvp(lambda *qkv: attend(*qkv, backend=backend), tuple(qkv), tuple(tangents))[1]
        with forward_ad.dual_level():
            dual = attend(*map(forward_ad.make_dual, qkv, tangents), backend=backend)
            return forward_ad.unpack_dual(dual).tangent

    want = tangent("reference")
    step = [
        attend(*(x + h * t for x, t in zip(qkv, tangents, strict=True)), backend="reference") for h in (1e-3, -1e-3)
    ]
    close([want], [(step[0] - step[1]) / 2e-3], 1e-2)
    if backend == "triton":
        refused(f"backend='triton': {TRANSFORMED}", tangent, backend)
    elif backend == "sdpa":
        with sdpa_kernel(SDPBackend.MATH):
            close([tangent(backend)], [want])
        with contextlib.suppress(NotImplementedError):  # as torch's own kernels say
            close([tangent(backend)], [want])
    else:
        close([tangent(backend)], [want])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_tangent_where_packed_sdpa_serves_is_of_the_reference(qkv, attend):
    """Most of torch's SDPA kernels would raise, and the caller named no backend."""
    tangents = [torch.randn_like(x) for x in qkv]

    def tangent(backend):
        return torch.func.jvp(lambda *qkv: attend(*qkv, backend=backend), tuple(qkv), tuple(tangents))[1]

    want = tangent("reference")
    with nsa.configure(use_triton_sel=False):
        close([tangent("auto")], [want])
    assert [record.route for record in nsa.routes() if record.reason == TRANSFORMED] == ["reference"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True], ids=["dual-given", "jvp-inside"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_compiled_call_loses_no_tangent(qkv, attend, backend, inside):
    t = torch.ones_like(qkv[0])

    def call(q):
        return attend(q, *qkv[1:], backend=backend)

    if inside:
        compiled = torch.compile(lambda q: torch.func.jvp(call, (q,), (t,))[1], backend="aot_eager")
        with pytest.raises(RuntimeError, match="forward-mode AD"):
            compiled(qkv[0])
    else:
        compiled = torch.compile(call, backend="aot_eager")
        compiled(qkv[0])
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
            compiled(forward_ad.make_dual(qkv[0], t))


def test_operators_and_packed_rows_refuse_tangents(qkv, same):
    """Nothing else knows what to do with them, and they would be lost without a word."""
    q, k, v = qkv
    of = ops._arguments(Call(q, k, v, ranges=same([(0, 4)], 1, 2, 1), max_selected=9, backend="reference"))
    o, lse = torch.ops.nsa.selection_attention(*of)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode AD"):
            torch.ops.nsa.selection_attention(dual, *of[1:])
        do = forward_ad.make_dual(o, torch.ones_like(o))
        with pytest.raises(RuntimeError, match="forward-mode AD"):
            torch.ops.nsa.selection_attention_backward(do, None, o, lse, [True] * 3, *of)
        rows = forward_ad.make_dual(q[0].clone(), torch.ones_like(q[0]))
        keys = k[:, :, 0].expand(q.shape[1], -1, -1).contiguous()
        with pytest.raises(RuntimeError, match="forward-mode AD"):
            nsa.sel_attn_fwd_dense_group(rows, keys, keys)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_tangent_is_a_call_as_any_other(qkv, attend, backend):
    want = attend(*qkv, backend=backend)
    with forward_ad.dual_level():
        assert torch.equal(attend(*qkv, backend=backend), want)
    assert len(nsa.routes()) == 1
