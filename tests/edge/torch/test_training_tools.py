"""A call in a training loop: what the table in docs/using.md promises.

Each tool's gradients are compared with those of the same call without it.
"""

import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nsa
from nsa import backward
from nsa.torch_modes import NO_SECOND_GRADIENTS

from ..kernels.gradients import exact

BACKENDS = ["auto", "triton", "sdpa", "reference"]
TRANSFORMED = "torch.func or forward-mode AD transforms the call, which Triton's kernels do not support"
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def gradients(call, qkv):
    """Through `backward()`, because reentrant checkpoints know no `torch.autograd.grad`."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    o = call(*leaves)
    (o * torch.arange(o.shape[-1], device=o.device)).sum().backward()
    return [x.grad for x in leaves]


def close(got, want, atol=1e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol * max(1.0, float(b.abs().max())))


def refused(text, call, *args):
    """Word for word."""
    with pytest.raises(RuntimeError) as raised:
        call(*args)
    assert str(raised.value) == text


class Layer(nn.Module):
    """Attention behind a projection of its queries."""

    def __init__(self, attend, **how):
        super().__init__()
        self.project, self.attend, self.how = nn.Linear(16, 16), attend, how

    def forward(self, q, k, v):
        return self.attend(self.project(q), k, v, **self.how)


@pytest.fixture
def layer(attend, device):
    """`layer(backend)`: equal weights in every call."""

    def make(backend="auto"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Layer(attend, backend=backend).to(device)

    return make


def weight_gradients(layer, output):
    layer.zero_grad()
    output.square().sum().backward()
    return [x.grad.clone() for x in layer.parameters()]


# --- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@every_backend
def test_checkpoint(qkv, attend, backend, reentrant):
    """The forward runs again in the backward, and the same bits come out."""
    forwards = []

    def call(q, k, v):
        forwards.append(torch.is_grad_enabled())
        return attend(q * 2, k, v, backend=backend)

    got = gradients(lambda *qkv: checkpoint(call, *qkv, use_reentrant=reentrant), qkv)
    assert forwards == [not reentrant, True]
    torch.testing.assert_close(got, gradients(call, qkv), rtol=0, atol=0)


@pytest.mark.parametrize("saved", [True, False], ids=["must-save", "must-recompute"])
def test_selective_checkpoint(qkv, attend, saved):
    op, seen = torch.ops.nsa.selection_attention.default, []

    def policy(context, function, *_, **__):
        if function is op:
            seen.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def call(q, k, v):
        return attend(q * 2, k, v).sin()

    want = gradients(call, qkv)
    nsa.dispatch.reset()
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    got = gradients(lambda *qkv: checkpoint(call, *qkv, use_reentrant=False, context_fn=contexts), qkv)
    close(got, want, atol=0)
    assert seen[:1] == [False]
    assert sum(record.calls for record in nsa.routes() if record.route != "backward") == (1 if saved else 2)


# --- data parallel, mixed precision -----------------------------------------------------------------------------------


@every_backend
def test_ddp_hooks(qkv, layer, backend):
    """One process: DDP's hooks on gradients run, and a communication hook gets every weight's gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, counts = layer(backend), []

        def halved(state, bucket):
            counts.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer() / 2)
            return done

        wrapped = DistributedDataParallel(layer(backend))
        wrapped.register_comm_hook(None, halved)
        got = weight_gradients(wrapped, wrapped(*qkv))
    finally:
        dist.destroy_process_group()
    assert sum(counts) == sum(x.numel() for x in plain.parameters())
    close(got, [x / 2 for x in weight_gradients(plain, plain(*qkv))])


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, where an interpreted kernel overflows
@every_backend
def test_grad_scaler(qkv, layer, device, backend):
    """Scaled fp16 gradients are unscaled to those without a scaler; where they overflow, the step is skipped."""
    model = layer(backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [x.detach().clone() for x in model.parameters()]

    def loss():
        with torch.autocast(device.type, torch.float16):
            return model(*qkv).float().square().mean()

    loss().backward()
    want = [x.grad.clone() for x in model.parameters()]
    for scale, stepped in ((2.0**40, False), (256.0, True)):
        scaler = torch.amp.GradScaler(device.type, init_scale=scale)
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        if stepped:
            close([x.grad for x in model.parameters()], want, atol=2e-3)
        scaler.step(optimizer)
        assert all(map(torch.equal, model.parameters(), before)) != stepped
        scaler.update()
        assert scaler.get_scale() == (scale if stepped else scale / 2)


# --- parts of a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["q", "k", "v", "kv"])
@every_backend
def test_frozen_inputs(qkv, attend, backend, trained, monkeypatch):
    """A prefix of frozen K and V, or any other choice: the others get no gradient, and kernels compute none."""
    wanted, run = [], backward.backward
    want = gradients(lambda *qkv: attend(*qkv, backend=backend), qkv)
    leaves = [x.clone().requires_grad_(name in trained) for name, x in zip("qkv", qkv, strict=True)]
    o = attend(*leaves, backend=backend)
    monkeypatch.setattr(backward, "backward", lambda *given: wanted.append(given[-1]) or run(*given))
    (o * torch.arange(o.shape[-1], device=o.device)).sum().backward()
    needed = tuple(name in trained for name in "qkv")
    assert tuple(x.grad is not None for x in leaves) == needed
    assert wanted == [needed] * (backend in ("auto", "triton"))
    pairs = [(x.grad, exact) for x, exact in zip(leaves, want, strict=True) if x.requires_grad]
    close(*zip(*pairs, strict=True))


@every_backend
def test_packed_lengths(draw, same, device, backend):
    """Gradients of packed sequences, one of them empty, are those of each sequence alone."""
    q, k, v = draw(S=5, S_kv=18, HKV=1, Dv=24, varlen=True)
    spans, queries, keys = same([(0, 4), (2, 7)], 5, 1), (2, 0, 3), (7, 2, 9)
    cu = [torch.tensor([0, *x], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32) for x in (queries, keys)]
    how = {"max_selected": 9, "backend": backend}
    got = gradients(lambda *qkv: nsa.selection_attention(*qkv, ranges=spans, cu_seqlens=tuple(cu), **how), (q, k, v))

    def alone(q, k, v):
        given = ((q, queries), (k, keys), (v, keys), (spans, queries))
        parts = zip(*(x[None].split(lengths, 1) for x, lengths in given), strict=True)
        return torch.cat([nsa.selection_attention(*qkv, ranges=own, **how)[0] for *qkv, own in parts])

    close(got, gradients(alone, (q, k, v)))


# --- programs as data -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 loads weights from such a buffer
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export(draw, device, strict):
    """One operator, any batch size, saved and loaded again; gradients flow through what was loaded."""

    class Blocks(Layer):
        def forward(self, q, k, v, blocks):
            return self.attend(self.project(q), k, v, block_indices=blocks, block_size=4)

    torch.manual_seed(0)
    model = Blocks(nsa.selection_attention).to(device)
    blocks = torch.tensor([2, 0], device=device)
    small, large = ((*draw(B=B, S=2, S_kv=9, HKV=1), blocks.expand(B, 2, 1, 2)) for B in (2, 3))
    any_batch = ({0: torch.export.Dim("B", min=2, max=64)},) * 4
    program = torch.export.export(model, small, dynamic_shapes=any_batch, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    program = torch.export.load(file)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in targets if "nsa" in name] == ["nsa.selection_attention.default"]
    loaded = program.module()
    for given in (small, large):
        close(weight_gradients(loaded, loaded(*given)), weight_gradients(model, model(*given)), atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_functional_gradient(qkv, attend, backend):
    """Served by plain torch, which `torch.func` can take apart."""
    want = gradients(lambda *qkv: attend(*qkv, backend="reference"), qkv)
    weights = torch.arange(24, device=qkv[0].device)
    got = torch.func.grad(lambda *qkv: (attend(*qkv, backend=backend) * weights).sum(), argnums=(0, 1, 2))(*qkv)
    close(got, want)
    if backend == "auto":
        assert nsa.RouteRecord("sdpa", TRANSFORMED, 1) in nsa.routes()


def test_functional_gradient_of_named_triton_is_refused(qkv, attend):
    q, k, v = qkv
    gradient = torch.func.grad(lambda q: attend(q, k, v, backend="triton").sum())
    refused(f"backend='triton': {TRANSFORMED}", gradient, q)
    assert nsa.routes() == []


# --- gradients of gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["q", "do"])
@pytest.mark.parametrize(
    ("backend", "triton"), [("auto", True), ("auto", False), ("triton", True), ("sdpa", True)],
    ids=["auto-kernels", "auto-fallback", "triton", "sdpa"],
)  # fmt: skip
def test_second_gradients_are_refused(draw, attend, backend, through, triton):
    """When they are taken, not when `create_graph=True` allows for them; also where packed SDPA serves `auto`.

    SDPA's fast kernels are differentiable once. They take D = Dv and, on a GPU, a KV head for each query head.
    """
    leaves = [x.requires_grad_() for x in draw(S=2, S_kv=9, G=1)]
    with nsa.configure(use_triton_sel=triton):
        o = attend(*leaves, backend=backend)
        do = torch.ones_like(o).requires_grad_(through == "do")
        first = torch.autograd.grad(o, leaves, do, create_graph=True)
    spans = torch.tensor([(0, 4), (2, 7)], dtype=torch.int32, device=o.device).expand(1, 2, 2, 2, 2)
    close([x.double() for x in first], exact(*leaves, do.detach(), ranges=spans))
    refused(NO_SECOND_GRADIENTS, torch.autograd.grad, first[0].square().sum(), leaves[0] if through == "q" else do)


def test_second_gradients_of_torch_func_are_refused(draw, attend):
    q, k, v = draw(S=2, S_kv=9, G=1)
    first = torch.func.grad(lambda q: attend(q, k, v).square().sum())
    refused(NO_SECOND_GRADIENTS, torch.func.grad(lambda q: first(q).square().sum()), q)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_second_gradients_of_plain_torch(draw, attend, backend):
    """As the error above says."""
    leaves = [x.requires_grad_() for x in draw(S=2, S_kv=9, HKV=1, dtype=torch.float64)]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda *qkv: attend(*qkv, backend=backend), leaves, fast_mode=True)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_every_line_of_the_table_names_its_tests():
    page = (Path(__file__).parents[3] / "docs/using.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (`test_.*) \|$", page, re.MULTILINE)
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert len(rows) >= 10
    assert [name for name in named if f"def {name}(" not in sources] == []
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE))
    assert here - named - {test_every_line_of_the_table_names_its_tests.__name__} == set()
