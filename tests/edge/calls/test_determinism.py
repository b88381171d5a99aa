"""Forward and backward are bitwise equal from run to run: no float atomics."""

import pytest
import torch

RUNS = 3


def results_are_equal(call):
    first = call()
    for _ in range(RUNS):
        torch.testing.assert_close(first, call(), rtol=0, atol=0)


@pytest.mark.parametrize("source", ["ranges", "blocks"])
def test_forward(attend, draw, same, dtype, source):
    q, k, v = draw(B=2, S=2, S_kv=40, HKV=1, dtype=dtype)
    if source == "ranges":
        selection = {"ranges": same([(3, 20), (11, 39)], 2, 2, 1)}
    else:
        selection = {"block_indices": same([0, 2, 1, 1], 2, 2, 1), "block_size": 13}
    results_are_equal(lambda: attend(q, k, v, **selection, return_lse=True))


@pytest.mark.usefixtures("split")
def test_forward_split_among_programs(attend, draw, same):
    q, k, v = draw(S=1, S_kv=60, HKV=1)
    ranges = same([(3, 25), (30, 60)], 1, 1, 1)
    results_are_equal(lambda: attend(q, k, v, ranges=ranges, return_lse=True))


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

    results_are_equal(gradients)
