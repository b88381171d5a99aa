"""`nsa.select_blocks` against the fp64 oracle: every score and layout, in plain PyTorch and in our kernels."""

import pytest
import torch
import triton
import triton.language as tl

import nsa
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.selecting import api, plan
from nsa.selecting.choose import _ordered
from nsa.testing.judge.selections import assert_selection
from nsa.testing.machine import current_lane
from nsa.testing.matrix.selecting import as_request, drawn

from ..calls.refusals import move

DTYPES = ("fp32", "fp16") if current_lane() == "interpreter" else ("fp32", "bf16", "fp16")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and infinities in the interpreter


def exact(case):
    return case.integers and case.score != "softmax"


@pytest.mark.parametrize("seed", range(90))
def test_plain_pytorch(device, seed):
    case = drawn(seed, (*DTYPES, "bf16"))
    q, k, how = case.make(device)
    out = nsa.select_blocks(q, k, **how, backend="torch")
    assert_selection(out, as_request(q, k, how), f"torch on {case.id}", exact(case))


@triton.jit
def _order_kernel(score_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, _ordered(tl.load(score_ptr + i)))


def test_numbers_in_the_order_of_scores(device):
    """Scores that are equal stay equal, so that ties go to the smaller block: -0 is 0, and NaN is -inf."""
    inf, least = float("inf"), 1e-45
    scores = [-inf, -3e38, -1.0, -least, 0.0, least, 1.0, inf, float("nan"), -0.0, 2.0, 2.0]
    scores = torch.tensor(scores, device=device)
    found = torch.empty(16, dtype=torch.int32, device=device)
    _order_kernel[(1,)](torch.cat((scores, scores[:4])), found, 16)
    *rising, nan, minus_zero, two, other = found[:12].tolist()
    assert rising == sorted({*rising})
    assert (nan, minus_zero, two) == (rising[0], rising[4], other)
    assert -(2**31) < rising[0] < rising[-1] < 2**31 - 1  # neither `NEVER` nor `ALWAYS`


def launch(case, device, **tile):
    """Run the kernels with a small tile, outputs and workspace poisoned."""
    q, k, how = case.make(device)
    r = as_request(q, k, how)
    assert plan.obstacle(r) is None
    made = plan.tile_of(r, 132)
    if case.score != "softmax":
        made = made._replace(N=max(16, min(made.N, 32)))
    out = torch.full(r.shape, 12345, dtype=torch.int32, device=device)
    with poisoned_workspace():
        plan.select(r, out, made._replace(**tile))
    return out, r


@pytest.mark.parametrize("seed", range(30))
def test_kernels(device, seed):
    """Splits, and rows that are read in chunks, go in turn."""
    case = drawn(seed + 1000, DTYPES)
    out, r = launch(case, device, programs=(1, 40)[seed % 2], BLOCK=(16, 8192, 4)[seed // 3 % 3])
    assert_selection(out, r, f"kernels on {case.id}", exact(case))


def test_the_public_function_takes_the_kernels(device):
    case = drawn(1003, DTYPES)
    q, k, how = case.make(device)
    before = nsa.kernels.launches["select"]
    out = nsa.select_blocks(q, k, **how, backend="triton")
    assert nsa.kernels.launches["select"] == before + 1
    assert_selection(out, as_request(q, k, how), "nsa.select_blocks", exact(case))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_edges_of_one_call(device, backend):
    """Equal scores, -inf and NaN, forced blocks, and rows with fewer blocks than n."""
    q = torch.ones(1, 12, 1, 16, device=device)
    k = torch.zeros(1, 12, 1, 16, device=device)
    k[0, 4:6] = float("nan")  # block 2
    k[0, 6:8, :, 0] = -torch.inf  # block 3
    k[0, 9] = 1.0  # block 4, by its second key
    out = nsa.select_blocks(q, k, n=3, block_size=2, newest=1, backend=backend)[0, :, 0].tolist()
    assert out[0] == [0, -1, -1]
    assert out[3] == [0, 1, -1]
    assert out[5] == [0, 1, 2]  # forced, though NaN
    assert out[7] == [0, 1, 3]  # forced; equal scores: the smaller ones
    assert out[8] == [0, 1, 4]
    assert out[11] == [0, 4, 5]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_lengths_are_read_when_the_kernel_runs(device, backend):
    """Lengths beyond the cache are clamped, and sequences without keys have no block."""
    q, k = torch.ones(3, 2, 2, 16, device=device), torch.ones(3, 10, 1, 16, device=device)
    lengths = torch.tensor([99, 0, 1], dtype=torch.int32, device=device)
    out = nsa.select_blocks(q, k, n=2, block_size=4, newest=1, cache_seqlens=lengths, backend=backend)
    assert out[0].tolist() == [[[0, 2]] * 2] * 2
    assert out[1].tolist() == [[[-1, -1]] * 2] * 2
    assert out[2].tolist() == [[[-1, -1]] * 2, [[0, -1]] * 2]  # the first of its two queries is before the sequence


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_keys_of_others_are_not_read(device, backend):
    """NaN around the cache, in its other rows and in pages of no sequence changes nothing."""
    g = torch.Generator().manual_seed(3)
    q = torch.randint(-2, 3, (2, 1, 2, 16), generator=g).float().to(device)
    arena = torch.full((9, 6, 3, 20), float("nan"), device=device)
    k = arena[1:8, 1:5, 1:2, 2:18]  # [7, 4, 1, 16], gaps of NaN
    table = torch.tensor([[3, 0, 5], [6, 1, 4]], dtype=torch.int64, device=device)
    k[table.flatten()] = torch.randint(-2, 3, (6, 4, 1, 16), generator=g).float().to(device)
    how = {"n": 2, "block_size": 2, "first": 1, "cache_seqlens": torch.tensor([11, 7], device=device)}
    k[5, 3], k[1, 3], k[4] = float("nan"), float("nan"), float("nan")  # behind the lengths
    out = nsa.select_blocks(q, k, block_table=table, **how, backend=backend)
    assert_selection(out, as_request(q, k, how | {"block_table": table}), backend, integers=True)
    clean = nsa.select_blocks(q, k.nan_to_num(), block_table=table, **how, backend=backend)
    assert torch.equal(out, clean)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pages_that_do_not_exist(device, backend):
    q, k = torch.ones(1, 1, 1, 16, device=device), torch.ones(2, 4, 1, 16, device=device)
    table = torch.tensor([[7, 1, -3, 0]], dtype=torch.int32, device=device)
    out = nsa.select_blocks(q, k, n=2, block_size=4, cache_seqlens=16, block_table=table, backend=backend)
    assert out.flatten().tolist() == [1, 3]


@pytest.mark.parametrize("given", [False, True], ids=["lse-computed", "lse-given"])
def test_one_scale_of_all_key_heads(device, given):
    """The number behind it in memory is not read."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=g).to(device, torch.float16) for shape in ((1, 5, 4, 16), (1, 24, 2, 16)))
    scale, _ = torch.tensor([0.25, 8.0], device=device)
    how = {"score": "softmax", "n": 3, "block_size": 4, "cache_seqlens": 24, "k_scale": scale, "lists": 2}
    how |= {"lse": torch.randn(1, 5, 4, generator=g).to(device)} if given else {}
    k = k.to(torch.float8_e4m3fn)
    wanted = nsa.select_blocks(q, k, **how, backend="reference")
    assert torch.equal(nsa.select_blocks(q, k, **how, backend="triton"), wanted)


@pytest.mark.parametrize("cached", [False, True], ids=["packed", "ragged"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_first_sequence_begins_at_token_0(device, backend, window, cached):
    """Even if cu_seqlens of queries begin later. Its keys begin where cu_seqlens of keys say, as in attention."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-2, 3, (size, 1, 16), generator=g).float().to(device) for size in (7, 30))
    ends, of_keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 4, 7], [5, 14, 30]))
    how = {"n": 2, "block_size": 2, "window": window, "cu_seqlens": (ends, of_keys)}
    if cached:
        k = k.unflatten(0, (2, 15))
        how |= {"cu_seqlens": ends, "cache_seqlens": torch.tensor([14, 15], device=device)}
    wanted = nsa.select_blocks(q, k, **how, backend="reference")
    assert torch.equal(nsa.select_blocks(q, k, **how, backend=backend), wanted)


def test_the_result_needs_no_gradient(device):
    q, k = (torch.ones(1, 4, 1, 16, device=device, requires_grad=True) for _ in range(2))
    assert not nsa.select_blocks(q, k, n=1, block_size=2).requires_grad


def test_scores_stay_within_the_workspace(device, monkeypatch):
    """With room for one tile at a time, a call of several tiles makes several passes."""
    monkeypatch.setattr(plan, "WORKSPACE", 1)
    case = drawn(1003, DTYPES)
    out, r = launch(case, device)
    assert_selection(out, r, case.id, exact(case))


@pytest.mark.parametrize(("best", "chosen"), [([], [0, 1, 2]), ([9], [0, 1, 9]), ([1, 5, 6, 9], [1, 5, 6])])
def test_of_equal_blocks_those_of_earlier_chunks_are_chosen(device, best, chosen):
    """Rows are read in chunks of four blocks."""
    q, k = torch.ones(1, 1, 1, 16, device=device), torch.zeros(1, 10, 1, 16, device=device)
    k[0, best] = 1.0
    r = as_request(q, k, {"n": 3, "block_size": 1})
    out = torch.full(r.shape, 12345, dtype=torch.int32, device=device)
    plan.select(r, out, plan.tile_of(r, 132)._replace(BLOCK=4))
    assert out.flatten().tolist() == chosen


def test_debug_cache_counts_what_is_odd(device, caplog):
    q, k = torch.ones(2, 1, 1, 16, device=device), torch.ones(3, 4, 1, 16, device=device)
    k[1, 2] = float("nan")
    how = {"n": 1, "block_size": 4, "cache_seqlens": torch.tensor([6, 30], device=device)}
    table = torch.tensor([[1, 0], [2, 5]], device=device)
    with nsa.configure(debug_cache=True), caplog.at_level("WARNING", "nsa"):
        nsa.select_blocks(q, k, **how, block_table=table, backend="torch")
    assert [record.getMessage() for record in caplog.records] == [
        "cache_seqlens: expected 0 to 8, got 30 of sequence 1",
        "block_table: expected pages 0 to 2, got 5 at [1, 1]",
        "scores: expected none that is NaN, got 1 of 1 tokens",
    ]


@pytest.mark.gpu
def test_a_captured_graph_takes_other_lengths(device):
    """Lengths, tables and queries change between replays."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (4, 2, 4, 64), generator=g).to(device, torch.bfloat16)
    k = torch.randint(-3, 4, (40, 128, 1, 64), generator=g).to(device, torch.bfloat16)
    table = torch.randperm(40, generator=g).view(4, 10).to(device, torch.int32)
    lengths = torch.tensor([1280, 700, 3, 0], dtype=torch.int32, device=device)
    how = {"n": 3, "block_size": 128, "first": 1, "newest": 1, "block_table": table, "cache_seqlens": lengths}
    nsa.select_blocks(q, k, **how, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa.select_blocks(q, k, **how, backend="triton")
    for change in ([1, 2, 3, 1280], [1280, 1280, 129, 128], [0, 0, 0, 0]):
        lengths.copy_(torch.tensor(change))
        table.copy_(table.flip(0))
        out.fill_(77)
        graph.replay()
        assert_selection(out, as_request(q, k, how), str(change), integers=True)


@pytest.mark.gpu(memory_gib=12)
def test_addresses_past_int32(device):
    """Keys past 2^31 elements of a cache."""
    k = torch.zeros(2**31 // (128 * 128) + 20, 128, 1, 128, dtype=torch.bfloat16, device=device)
    far = len(k) - 1
    k[far], k[0] = 2.0, 1.0
    q = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[5, 0, 7, far, 9]], dtype=torch.int32, device=device)
    out = nsa.select_blocks(q, k, n=2, block_size=128, cache_seqlens=640, block_table=table, backend="triton")
    assert out.flatten().tolist() == [1, 3]


EMPTY = {
    "no rows of compressed keys": lambda: (
        (1, 20, 2, 16), (1, 0, 1, 16), {"score": "softmax", "window": 32, "stride": 16, "block_size": 64, "n": 4}
    ),
    "no sequence": lambda: ((0, 3, 2, 16), (0, 5, 1, 16), {}),
    "no query": lambda: ((2, 0, 2, 16), (2, 5, 1, 16), {}),
    "a cache without rows": lambda: ((1, 3, 2, 16), (1, 0, 1, 16), {"cache_seqlens": torch.tensor([9])}),
    "a table without pages": lambda: (
        (1, 3, 2, 16), (4, 4, 1, 16), {"cache_seqlens": torch.tensor([9]), "block_table": torch.zeros(1, 0).int()}
    ),
    "no pages": lambda: (
        (1, 3, 2, 16), (0, 4, 1, 16), {"cache_seqlens": torch.tensor([9]), "block_table": torch.zeros(1, 3).int()}
    ),
    "no packed key": lambda: (
        (3, 2, 16), (0, 1, 16), {"cu_seqlens": (torch.tensor([0, 3]), torch.tensor([0, 0]))}
    ),
    "tokens of no sequence": lambda: (
        (3, 2, 16), (4, 4, 1, 16), {
            "cu_seqlens": torch.zeros(1).int(), "cache_seqlens": torch.zeros(0).int(),
            "block_table": torch.zeros(0, 3).int(),
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_keys_only_forced_blocks_are_listed(device, backend, what):
    q, k, how = EMPTY[what]()
    how = {"n": 3, "block_size": 4, "first": 1} | {name: move(x, device) for name, x in how.items()}
    q, k = torch.randn(q, device=device), torch.randn(k, device=device)
    wanted = nsa.select_blocks(q, k, **how, backend="reference")
    assert torch.equal(nsa.select_blocks(q, k, **how, backend=backend), wanted)


@pytest.mark.parametrize("score", ["softmax", "relu", "max"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_infinite_or_nan_key_changes_its_own_block_alone(device, backend, value, score):
    """G = 1 has padded heads, and blocks of 4 keys share a tile."""
    q, k = torch.ones(1, 3, 1, 16, device=device), torch.zeros(1, 32, 1, 16, device=device)
    k[0, :, 0, 0] = torch.arange(32, device=device) % 7 * 0.1
    k[0, 9, 0, 3] = value
    for window, lse in ((1, None), (1, torch.full((1, 3, 1), 3.0, device=device)), (2, None)):
        how = {"score": score, "n": 3, "block_size": 4, "window": window}
        how |= {"lse": lse} if score == "softmax" else {}
        how |= {"q_positions": torch.tensor([[29, 30, 31]], device=device)} if window > 1 else {}
        wanted = nsa.select_blocks(q, k, **how, backend="reference")
        assert torch.equal(nsa.select_blocks(q, k, **how, backend=backend), wanted), (window, lse is None)


def test_autocast_does_not_round_scores(device):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1, 40, heads, 16, generator=g).to(device) for heads in (2, 1))
        wanted = nsa.select_blocks(q, k, n=2, block_size=4)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert torch.equal(nsa.select_blocks(q, k, n=2, block_size=4), wanted)


def test_tensors_without_memory_of_their_own_are_served_by_plain_pytorch(device, monkeypatch):
    """Nothing is remembered as broken, and kernels do not read a view that is negated in place."""
    why_not = api._why_not_triton  # `auto` is asked about as on a GPU
    monkeypatch.setattr(api, "_why_not_triton", lambda r, backend: why_not(r, backend.replace("auto", "triton")))
    q, k = torch.randn(1, 6, 2, 16, device=device), torch.randn(1, 20, 1, 16, device=device)
    how = {"n": 2, "block_size": 4}
    before = nsa.kernels.launches["select"]
    many = torch.func.vmap(lambda q: nsa.select_blocks(q, k, **how))(q[None])
    assert torch.equal(many[0], nsa.select_blocks(q, k, **how, backend="torch"))
    assert torch.equal(
        nsa.select_blocks(torch._neg_view(q), k, **how), nsa.select_blocks(-q, k, **how, backend="torch")
    )
    assert nsa.kernels.launches["select"] == before
    nsa.select_blocks(q, k, **how)
    assert nsa.kernels.launches["select"] == before + 1
    with pytest.raises(RuntimeError, match="cannot select: a tensor has no memory of its own, or is a negative view"):
        nsa.select_blocks(torch._neg_view(q), k, **how, backend="triton")


def test_a_block_larger_than_the_sequence_costs_no_more(device):
    q, k = torch.randn(1, 8, 2, 16, device=device), torch.randn(1, 8, 1, 16, device=device)
    for tail in (False, True):
        assert as_request(q, k, {"n": 1, "block_size": 2**24, "tail": tail}).size <= 16
        for backend in ("torch", "triton", "reference"):
            out = nsa.select_blocks(q, k, n=1, block_size=2**24, tail=tail, backend=backend)
            assert out.tolist() == [[[[0, -1] if tail else [0]] * 2] * 8]


def test_a_key_that_is_nan_changes_no_weight_of_its_heads(device):
    """Its block is chosen last; the other blocks as if it were not there."""
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(shape, generator=g).to(device) for shape in ((1, 3, 2, 16), (1, 40, 1, 16)))
        k[0, 2] = torch.nan
        how = {"score": "softmax", "n": 2, "block_size": 4, "lists": 1}
        got, want = (nsa.select_blocks(2 * q, k, **how, backend=backend) for backend in ("triton", "reference"))
        assert torch.equal(got, want), seed
