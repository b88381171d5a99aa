"""What wraps a call: inference mode, fake tensors, `torch.func`, forward-mode AD. `test_training.py` has the others."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa import ops
from nsa.call import Call

BACKENDS = ["auto", "triton", "sdpa", "reference"]
PLAIN = ["sdpa", "reference"]
TRANSFORMED = "torch.func or forward-mode AD transforms the call, which Triton's kernels do not support"


@pytest.fixture(autouse=True)
def long_rows(fresh_routes):
    with nsa.configure(sel_triton_min_L=0):
        yield


@pytest.fixture
def qkv(draw):
    return draw(S=2, S_kv=9, HKV=1, Dv=24)


@pytest.fixture
def attend(same):
    """`attend(*tensors, backend=…) -> O`; other spans where they are given."""
    spans = same([(0, 4), (2, 7)], 1, 2, 1)
    return lambda *qkv, ranges=spans, **how: nsa.selection_attention(*qkv, ranges=ranges, max_selected=9, **how)


def gradients(call, qkv):
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    o = call(*leaves)
    (o * torch.arange(o.shape[-1], device=o.device)).sum().backward()  # reentrant checkpoints know no `grad`
    return [x.grad for x in leaves]


def refused(text, call, *args):
    """Word for word."""
    with pytest.raises(RuntimeError) as raised:
        call(*args)
    assert str(raised.value) == text


def close(got, want, atol=1e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaf", [False, True], ids=["plain", "requires-grad"])
def test_inference_mode(qkv, attend, backend, leaf):
    want = attend(*qkv, backend=backend)
    inputs = [x.clone().requires_grad_(leaf) for x in qkv]
    with torch.inference_mode():
        got = attend(*inputs, backend=backend)
        again = attend(*(x.clone() for x in qkv), backend=backend)  # tensors born there
    assert got.is_inference()
    assert not got.requires_grad
    assert torch.equal(got, want)
    assert torch.equal(again, want)


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


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("leaf", [False, True], ids=["forward", "gradients"])
def test_fake_tensors(draw, same, attend, backend, leaf):
    """Their shapes go through, and no kernel is launched on memory that is not there, nor held to be broken."""
    mode = FakeTensorMode()
    ranges = mode.from_tensor(same([(0, 4), (2, 7)], 1, 2, 1))
    q, k, v = (mode.from_tensor(x).requires_grad_(leaf) for x in draw(S=2, S_kv=9, HKV=1, Dv=24))
    with mode:
        o, lse = attend(q, k, v, ranges=ranges, backend=backend, return_lse=True)
        assert (o.shape, o.dtype, o.requires_grad) == ((1, 2, 2, 24), torch.float32, leaf)
        assert (lse.shape, lse.dtype) == ((1, 2, 2), torch.float32)
        if leaf:
            assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]
    assert not any("failed" in record.reason for record in nsa.routes())


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
