"""Packed SDPA in chunks: the same result whatever fits the workspace, and no chunk larger than it."""

import pytest
import torch

import nsa
from nsa import gpu
from nsa.call import Call
from nsa.plain import oracle, packed_sdpa, spans


@pytest.fixture
def problem(draw, device):
    """24 rows of 0 to about 60 keys."""
    q, k, v = draw(B=2, S=6, S_kv=40, Dv=24)
    g = torch.Generator().manual_seed(0)
    start = torch.randint(-4, 40, (2, 6, 2, 3), generator=g)
    ranges = torch.stack((start, start + torch.randint(-2, 25, start.shape, generator=g)), -1)
    ranges[0, 1] = 0
    return (q, k, v), {"ranges": ranges.to(device), "causal": False}


@pytest.fixture
def workspace(monkeypatch):
    """`chunks = workspace(size)` sets the budget in bytes; `chunks` lists what each packs, as `(rows, bytes)`."""

    def make(size):
        monkeypatch.setattr(packed_sdpa, "WORKSPACE_BYTES", {"cuda": size, "cpu": size})
        chunks, pack = [], spans.Gather.pack

        def watched(self, rows, L, masked, into=None):
            packed = pack(self, rows, L, masked, into)
            chunks.append((packed[0].shape[0], sum(x.numel() * x.element_size() for x in packed)))
            return packed

        monkeypatch.setattr(spans.Gather, "pack", watched)
        return chunks

    return make


@pytest.fixture
def exact(problem):
    (q, *kv), selection = problem
    return oracle.selection_reference(Call.of(q.double(), *kv, **selection, return_lse=True))


def close(got, want):
    torch.testing.assert_close(tuple(x.double() for x in got), want, rtol=0, atol=2e-5)


def run(problem, layout="heads_as_queries", **keywords):
    qkv, selection = problem
    return packed_sdpa.packed_sdpa(Call.of(*qkv, **selection, return_lse=True, **keywords), layout=layout)


@pytest.mark.parametrize("bound", [None, 75], ids=["unbounded", "bound"])
@pytest.mark.parametrize("size", [1, 100_000, 400_000, 2**30], ids=["row-by-row", "few-rows", "half", "all"])
def test_result_does_not_depend_on_the_workspace(problem, workspace, exact, bound, size):
    chunks = workspace(size)
    close(run(problem, max_selected=bound), exact)
    rows = [n for n, _ in chunks]
    assert sum(rows) == 24
    assert (max(rows) == 1) == (size == 1)
    assert (len(rows) == 1) == (size == 2**30)


@pytest.mark.parametrize("size", [100_000, 200_000, 400_000])
def test_chunks_fit_the_workspace_and_use_it(problem, workspace, size):
    """As many rows as fit: what is packed stays below the budget, and is not a small part of it."""
    chunks = workspace(size)
    run(problem)
    assert max(used for _, used in chunks) <= size
    if len(chunks) > 1:
        assert chunks[0][1] >= size / 8
        assert all(rows == chunks[0][0] for rows, _ in chunks[:-1])


def test_row_larger_than_the_workspace_is_packed_alone(problem, workspace):
    chunks = workspace(1000)
    run(problem)
    assert {rows for rows, _ in chunks} == {1}
    assert min(used for _, used in chunks) > 1000


def test_rows_per_call_are_limited(problem, workspace, exact, monkeypatch):
    """SDPA's batch is a grid dimension of a kernel."""
    monkeypatch.setattr(packed_sdpa, "MAX_ROWS_PER_CALL", 7)
    chunks = workspace(2**30)
    close(run(problem), exact)
    assert [rows for rows, _ in chunks] == [7, 7, 7, 3]


def test_gradients_do_not_depend_on_the_workspace(problem, workspace):
    qkv, selection = problem
    leaves = [x.requires_grad_() for x in qkv]

    def gradients():
        o, lse = packed_sdpa.packed_sdpa(Call.of(*leaves, **selection, return_lse=True))
        return torch.autograd.grad(o.square().sum() + lse.clamp(min=-5).sum(), leaves)

    want = gradients()
    chunks = workspace(100_000)
    torch.testing.assert_close(gradients(), want, rtol=0, atol=2e-5)
    assert len(chunks) > 1


@pytest.fixture
def several_threads():
    """As outside of pytest-xdist, whose workers have one each on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("several_threads")
def test_backward_of_rows_that_share_keys(attend_plain, draw, same, dtype):
    """All rows add to the gradient of the same few keys: any order of additions but a fixed one would show."""
    q, k, v = (x.requires_grad_() for x in draw(B=1, S=64, S_kv=70, HKV=1, G=4, D=32, Dv=32, dtype=dtype))
    ranges = same([(0, 6), (2, 5)], 1, 64, 1)
    g = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)

    def gradients():
        o = attend_plain(q, k, v, ranges=ranges, max_selected=9)
        return torch.autograd.grad(o, (q, k, v), g)

    first = gradients()
    for _ in range(3):
        torch.testing.assert_close(gradients(), first, rtol=0, atol=0)


@pytest.mark.parametrize("layout", gpu.SDPA_LAYOUTS)
@pytest.mark.parametrize("bound", [None, 75], ids=["unbounded", "bound"])
def test_layouts_agree(problem, exact, layout, bound):
    """However SDPA is told that the group shares a KV head."""
    close(run(problem, layout=layout, max_selected=bound), exact)


def test_oracle_in_chunks(problem, monkeypatch):
    call = Call.of(*problem[0], **problem[1], return_lse=True)
    want = oracle.selection_reference(call)
    monkeypatch.setattr(oracle, "ORACLE_BYTES", 1)
    torch.testing.assert_close(oracle.selection_reference(call), want, rtol=0, atol=1e-6)


@pytest.mark.gpu(memory_gib=8)
def test_memory_of_a_large_call(device):
    """64 Ki rows of 512 keys would take 16 GiB packed at once."""
    B, S, KEYS, D = 1, 65536, 1024, 64
    q = torch.randn(B, S, 2, D, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(B, KEYS, 1, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    start = torch.randint(0, KEYS - 512, (B, S, 1, 1), device=device)
    ranges = torch.stack((start, start + 512), -1)
    nsa.selection_attention(q[:, :8], k, v, ranges=ranges[:, :8], causal=False, max_selected=512, backend="sdpa")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = nsa.selection_attention(q, k, v, ranges=ranges, causal=False, max_selected=512, backend="sdpa")
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()
    assert used <= 1.25 * packed_sdpa.WORKSPACE_BYTES["cuda"]
