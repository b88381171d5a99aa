"""Caches of float8_e4m3fn: every value of the format, scales of any value, and who serves a call."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl

import nsa
from nsa import routing
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared.e4m3 import fit_half
from nsa.kernels.shared.errors import DoesNotFit
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...conftest import compare
from .cached_calls import PAGE, ROOM, agrees, call, everything, queries

GPU = current_lane() == "gpu"
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float16]


@pytest.fixture(params=["triton", "per_head", "key_major", "sdpa", "reference"])
def backend(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def draw(device, dtype=torch.float16, page=PAGE, lengths=(40, 0)):
    """Queries, a quantised cache of two sequences, the second without keys, and a selection of all blocks."""
    cache = caches.quantized(caches.draw(list(lengths), ROOM, page, device=device, D=32, Dv=32))
    return queries(2, 1, device=device, D=32).to(dtype), cache, everything(2, 1, device=device, n=3)


def test_every_value_of_the_format(device, dtype, backend):
    """A row that selects one key has its values as O and, for a query of one element, an element as LSE."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).view(1, 8, 1, 32)
    q = torch.eye(32, dtype=dtype, device=device).expand(1, 8, 32, 32).contiguous()  # query s: head h is element h
    each = torch.arange(8, dtype=torch.int32, device=device).view(1, 8, 1, 1)
    cache = caches.Cache(codes, codes, torch.tensor([8], device=device), None)
    o, lse = call(q, cache, backend, block_indices=each, block_size=1, causal=False, scale=1.0)
    want = codes[0, :, 0].float()  # [key, dim]
    keyed = want.clone()
    keyed[want.isnan().any(1)] = math.nan  # the product with a NaN is one, also if its factor is 0
    torch.testing.assert_close(lse[0].float(), keyed, rtol=1e-6, atol=1e-6, equal_nan=True)
    told = want.expand(32, 8, 32).transpose(0, 1).clone()  # [key, head, dim]
    told[want.isnan().any(1)] = math.nan
    assert torch.equal(o[0].float().nan_to_num(9e9), told.nan_to_num(9e9))


@pytest.mark.parametrize(
    ("shape", "page"),
    [("number", None), ("one", PAGE), ("heads", PAGE), ("strided", None), ("negative", None)],
    ids=str,
)
def test_scales(device, dtype, backend, page, shape):
    q, cache, selection = draw(device, dtype, page)
    if page is not None:
        cache.block_table[0, 1] = -1 if shape == "one" else cache.k.shape[0]  # pages that do not exist
    made = {
        "number": lambda x: x[0],
        "one": lambda x: x[:1],
        "heads": lambda x: x,
        "strided": lambda x: torch.stack((x, x), 1)[:, 0],
        "negative": lambda x: torch._neg_view(-x),
    }[shape]
    scales = torch.tensor([[0.7, 0.01], [1.3, 2.5]], device=device)
    cache = dataclasses.replace(cache, k_scale=made(scales[0] / 100), v_scale=made(scales[1] / 100))
    agrees(q, cache, backend, **selection)
    for one in ("k_scale", "v_scale") if shape == "heads" else ():
        single = dataclasses.replace(cache, **{one: None})
        q_small = q / 64 if one == "k_scale" else q  # keys up to 448
        agrees(q_small, single, backend, **selection)


@pytest.mark.parametrize("value", [0.0, math.nan], ids=["zero", "nan"])
@pytest.mark.parametrize("of", ["k_scale", "v_scale"])
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of NumPy, in the interpreter
def test_a_scale_of_zero_or_nan(device, dtype, backend, of, value):
    """As of the dequantised keys: weights are equal, values 0, or both NaN. A row without keys stays 0 and -inf."""
    q, cache, selection = draw(device, dtype)
    getattr(cache, of)[1] = value  # of the second KV head
    o, lse = call(q, cache, backend, **selection)
    assert not o[1].any()
    assert (lse[1] == -math.inf).all()
    (o_want, lse_want) = caches.oracle(q, cache, **selection)
    assert bool(o_want[0, :, 2:].isnan().all()) == math.isnan(value)
    assert torch.equal(o.isnan(), o_want.isnan())
    assert torch.equal(lse.isnan(), lse_want.isnan())
    compare((o.nan_to_num(), lse.nan_to_num(neginf=-9)), (o_want.nan_to_num(), lse_want.nan_to_num(neginf=-9)), dtype)


def test_scales_of_split_rows(device, dtype):
    """The programs that share a row apply the scale to their parts; a part may hold no key."""
    from nsa.kernels.query_major import tiles

    q, cache, selection = draw(device, dtype, lengths=(20, 0))
    cache.v_scale[1] = math.nan
    with pinned(query_major=tiles.Choice(4, 1, 16, 4, 2, 0)):
        o, lse = call(q, cache, **selection)
    o_want, lse_want = caches.oracle(q, cache, **selection)
    assert torch.equal(o.isnan(), o_want.isnan())
    compare((o.nan_to_num(), lse), (o_want.nan_to_num(), lse_want), dtype)


def test_scales_are_read_at_each_call(device, backend, dtype):
    """New numbers in them, or one number after one for each head."""
    q, cache, selection = draw(device, dtype)
    call(q, cache, backend, **selection)
    cache.k_scale.mul_(0.5)
    cache.v_scale.mul_(3.0)
    for of in ((), ("k_scale",), ("v_scale",)):
        cache = dataclasses.replace(cache, **{name: getattr(cache, name)[1:] for name in of})
        agrees(q, cache, backend, **selection)


def test_plans_of_an_e4m3_cache_are_its_own(device):
    """Kernels, what is remembered of their failures, and plans."""
    q, cache, selection = draw(device, page=None)
    about = {"cache_seqlens": cache.cache_seqlens, "backend": "triton"}
    e4m3 = Call(q, cache.k, cache.v, k_scale=cache.k_scale, **about, **selection)
    others = [e4m3._replace(k=cache.k.half(), v=cache.v.half(), k_scale=None), e4m3._replace(k_scale=None)]
    assert all(x.dtypes() != e4m3.dtypes() for x in others)
    assert routing.make_plan(e4m3).kernel != routing.make_plan(others[0]).kernel


@triton.jit
def _fit(q_ptr, half_ptr, inverse_ptr, R: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :]
    half, inverse = fit_half(tl.load(q_ptr + at))
    tl.store(half_ptr + at, half)
    tl.store(inverse_ptr + tl.arange(0, R), inverse)


@pytest.mark.parametrize("negative", [False, True], ids=["both-signs", "negative"])
def test_queries_of_any_size_fit_fp16(device, negative):
    """Times a power of two. The interpreter has no bf16, so here fp32 holds the numbers."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([1.0, 3e38 / 4, 1e-30, 1e-37, 2.0**-133, 0.0, 1.0, 1.0])[:, None]
    rows[0, 3] = 2.0**-14
    rows[6, 2], rows[7, 2] = math.inf, math.nan
    rows = -rows.abs() if negative else rows
    q = rows.bfloat16().float()
    half, inverse = torch.empty(8, 16, dtype=torch.float16), torch.empty(8)
    q, half, inverse = (x.to(device) for x in (q, half, inverse))
    _fit[(1,)](q, half, inverse, 8, 16)
    back = half.double() * inverse.double()[:, None]
    assert torch.equal(back[:6], q[:6].double())
    assert half[:5].isfinite().all()
    assert (half[:3].abs().amax(1) >= 2**14).all()
    assert half[6, 2] == rows[6, 2]
    assert half[7, 2].isnan()
    assert (inverse > 0).all()
    assert inverse.isfinite().all()


@pytest.mark.skipif(not GPU, reason="bf16 needs a GPU")
@pytest.mark.parametrize("size", [2.0**100, 2.0**-120, 0.0, math.inf, math.nan], ids=str)
def test_bf16_queries_of_any_size(device, backend, size):
    """Only the first head's."""
    q, cache, selection = draw(device, torch.bfloat16, lengths=(40, 64))
    q[:, :, 0] *= size
    cache = dataclasses.replace(cache, k_scale=cache.k_scale / max(1.0, size if math.isfinite(size) else 1.0))
    o, lse = call(q, cache, backend, **selection)
    o_want, lse_want = caches.oracle(q, cache, **selection)
    assert torch.equal(o.isnan(), o_want.isnan())
    if math.isfinite(size):
        compare((o, lse), (o_want, lse_want), torch.bfloat16)


# --- who serves a call ------------------------------------------------------------------------------------------------


def test_a_gpu_without_the_conversion_is_served_by_packed_sdpa(device, fresh_routes, fresh_plans, monkeypatch):
    asked = torch.device("cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        why = routing.why_not_e4m3.__wrapped__(asked)
        patch.setattr(torch.version, "hip", "6.4")
        amd = routing.why_not_e4m3.__wrapped__(asked)
    assert why == "Triton route reads float8_e4m3fn on NVIDIA GPUs of compute capability 8.9 or newer, cuda:0 has 8.0"
    assert amd.endswith("newer, cuda:0 is an AMD GPU")
    monkeypatch.setattr(routing, "why_not_e4m3", lambda _: why)
    q, cache, selection = draw(device)
    with nsa.configure(sel_triton_min_L=0):
        agrees(q, cache, "auto", **selection)
        assert [(x.route, x.reason) for x in nsa.routes()] == [("sdpa", why)]
        with pytest.raises(RuntimeError, match="backend='triton': Triton route reads float8_e4m3fn on NVIDIA GPUs"):
            call(q, cache, **selection)


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
def test_values_at_an_odd_address(device, fresh_routes, fresh_plans, pin, schedule):
    """Kernels read pairs of values, which must begin at an even address. Those of key-major do so in their merge."""
    pin(key_major=key_tiles.FP32._replace(walked=8))
    q, cache, selection = draw(device, page=None)
    memory = torch.empty(cache.v.numel() + 1, dtype=torch.uint8, device=device)[1:].view(torch.float8_e4m3fn)
    odd = dataclasses.replace(cache, v=memory.view(cache.v.shape).copy_(cache.v))
    many = q.expand(2, 32, 4, 32).contiguous()
    blocks = selection["block_indices"].expand(2, 32, 2, 4).contiguous()
    with pytest.raises(DoesNotFit, match="expected v_cache at an even address"):
        call(many, odd, schedule, block_indices=blocks, block_size=16)
    with nsa.configure(sel_triton_min_L=0):
        got = call(q, odd, "auto", **selection)
    assert [x.route for x in nsa.routes()] == ["sdpa"]
    compare(got, caches.oracle(q, cache, **selection), q.dtype)


def test_compiled_calls_have_the_scales(device):
    q, cache, selection = draw(device)
    compiled = torch.compile(lambda q, cache: call(q, cache, "sdpa", **selection), backend="eager")
    compare(compiled(q, cache), caches.oracle(q, cache, **selection), q.dtype)


@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
def test_a_graph_reads_the_scales_anew(device, dtype):
    q, cache, selection = draw(device, dtype)
    out = torch.empty_like(q)
    call(q, cache, **selection, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(q, cache, **selection, out=out)
    cache.k_scale.mul_(0.5)
    cache.v_scale.mul_(3.0)
    graph.replay()
    compare((out, lse), caches.oracle(q, cache, **selection), dtype)
