"""`torch.autocast`: q, k and v are cast as SDPA's are, on every backend, and gradients come back in their own dtype."""

import functools

import pytest
import torch
import torch.nn.functional as F

import nsa

from .test_training_tools import BACKENDS

LOW = torch.float16  # which the interpreter computes right


@pytest.fixture
def autocast(device):
    return lambda dtype=LOW, **how: torch.autocast(device.type, dtype, **how)


@pytest.fixture
def attend(attend):
    """`attend(*tensors, backend=…) -> (O, LSE)`."""
    return functools.partial(attend, return_lse=True)


def trained(call, leaves):
    """`(O, LSE, dq, dk, dv)`."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    o, lse = call(*leaves)
    loss = (o.float() * torch.arange(o.shape[-1], device=o.device)).sum() + lse.sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_a_cast_of_the_inputs(qkv, attend, autocast, backend):
    """Bitwise, LSE and gradients as well: nothing else inside is computed in a lower precision."""
    cast = trained(lambda *qkv: attend(*(x.to(LOW) for x in qkv), backend=backend), qkv)

    def call(*qkv):
        with autocast():
            return attend(*qkv, backend=backend)

    got = trained(call, qkv)
    assert [x.dtype for x in got] == [LOW, torch.float32, *[torch.float32] * 3]
    equal(got, cast)
    with torch.no_grad():
        equal(call(*qkv), cast[:2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_inside_autocast(qkv, attend, autocast, backend):
    """Which PyTorch advises against: the gradients are those of a backward outside."""
    want = trained(lambda *qkv: attend(*(x.to(LOW) for x in qkv), backend=backend), qkv)
    with autocast():
        got = trained(lambda *qkv: attend(*qkv, backend=backend), qkv)
    if backend in ("auto", "triton"):
        return equal(got, want)
    for a, b in zip(got, want, strict=True):  # torch's own formulas are under autocast, too
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_recomputation_inside_autocast(qkv, attend, autocast, backward_kernel):
    """The fallback of the backward keeps the precision of its own."""
    backward_kernel.error = RuntimeError("broken")
    want = trained(lambda *qkv: attend(*(x.to(LOW) for x in qkv)), qkv)
    with autocast():
        equal(trained(attend, qkv), want)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16, torch.bfloat16), (torch.bfloat16,) * 3, (torch.float64,) * 3],
    ids=["mixed", "bf16", "fp64"],
)  # fmt: skip
def test_result_has_the_dtype_that_sdpa_gives(draw, attend, autocast, dtypes):
    qkv = [x.to(dtype) for x, dtype in zip(draw(S=2, S_kv=9), dtypes, strict=True)]
    with autocast():
        o, lse = attend(*qkv)
        want = F.scaled_dot_product_attention(*(x.repeat(1, 1, 4 // x.shape[2], 1).transpose(1, 2) for x in qkv)).dtype
    assert o.dtype == want
    assert lse.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)


def test_state_is_restored(draw, attend, autocast, device):
    """Also by calls that are refused, and where autocast is switched off inside."""
    q, k, v = draw(S=2, S_kv=9)
    with autocast():
        attend(q, k, v)
        with pytest.raises(TypeError, match=r"^k: expected dtype float64 \(that of q\), got float16$"):
            attend(q.double(), k, v)
        with pytest.raises(ValueError, match="^backend: "):
            attend(q, k, v, backend="trition")
        assert torch.is_autocast_enabled(device.type)
        with autocast(enabled=False):
            assert attend(q, k, v)[0].dtype == torch.float32
    assert not torch.is_autocast_enabled(device.type)


def test_varlen_and_blocks(draw, same, autocast, device):
    """What is no q, k or v is handed on as it is."""
    q, k, v = draw(S=3, S_kv=12, varlen=True)
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    how = {"block_indices": same([1, 0, -1], 3, 2), "block_size": 3, "cu_seqlens": (cu, cu * 4), "scale": 0.5}
    how |= {"q_positions": torch.tensor([2, 0, 5], device=device), "causal": True}
    for cu_seqlens in ((cu, cu * 4), cu):
        how["cu_seqlens"] = cu_seqlens
        with autocast():
            got = nsa.selection_attention(q, k, v, **how, return_lse=True)
        equal(got, nsa.selection_attention(*(x.to(LOW) for x in (q, k, v)), **how, return_lse=True))


def test_out_has_the_dtype_of_the_result(draw, attend, autocast):
    qkv = draw(S=2, S_kv=9)
    with autocast():
        out = torch.empty_like(qkv[0], dtype=LOW)
        assert attend(*qkv, out=out)[0] is out
        with pytest.raises(TypeError, match=r"^out: expected dtype float16 \(that of q\), got float32$"):
            attend(*qkv, out=torch.empty_like(qkv[0]))


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled(qkv, attend, autocast, backend, where):
    want = trained(lambda *qkv: attend(*(x.to(LOW) for x in qkv), backend=backend), qkv)

    def inner(*qkv):
        return attend(*qkv, backend=backend)

    def under(call):
        def wrapped(*qkv):
            with autocast():
                return call(*qkv)

        return wrapped

    nsa.settings.get()
    torch._dynamo.reset()
    traced = inner if where == "around" else under(inner)
    graph = torch.compile(traced, backend="aot_eager", fullgraph=True)
    graph = under(graph) if where == "around" else graph
    for a, b in zip(trained(graph, qkv), want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * max(1.0, float(b.abs().max())))
    torch._dynamo.reset()
