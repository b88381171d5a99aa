"""A kernel that reaches outside its tensors is noticed in the interpreter, whatever dispatch makes of the error."""

import pytest
import torch
import triton
import triton.language as tl

import nsa
from nsa.kernels.key_major import tiles as key_tiles
from nsa.testing.judge import addresses
from nsa.testing.plugin import current_lane

pytestmark = pytest.mark.skipif(current_lane() == "gpu", reason="nothing is interpreted on a GPU")


@triton.jit
def _copy_kernel(x_ptr, y_ptr, reads, writes, counter_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < reads, other=0.0)
    tl.store(y_ptr + i, x, mask=i < writes)
    if counter_ptr is not None:
        tl.atomic_add(counter_ptr + tl.arange(0, 2), 1)


@pytest.fixture
def caught():
    """What was noticed, taken away before the suite judges the test by it."""
    yield lambda: addresses.outside.pop() if addresses.outside else None
    assert not addresses.outside


def copy(reads, writes, counter=None):
    arena = torch.zeros(64)
    _copy_kernel[(1,)](arena[16:32], torch.empty(16), reads, writes, counter, BLOCK=32)


def test_inside_its_tensors(caught):
    copy(16, 16)
    copy(0, 0, torch.zeros(2, dtype=torch.int32))
    assert caught() is None


@pytest.mark.parametrize(("reads", "writes", "counters", "message"), [
    (17, 16, 2, "_copy_kernel reads 1 elements outside its tensors"),
    (16, 20, 2, "_copy_kernel writes 4 elements outside its tensors"),
    (16, 16, 1, "_copy_kernel adds to 1 elements outside its tensors"),
])  # fmt: skip
def test_outside_its_tensors(caught, reads, writes, counters, message):
    """The next element belongs to the same allocation, and to no argument."""
    with pytest.raises(Exception, match=message):
        copy(reads, writes, torch.zeros(2, dtype=torch.int32)[:counters])
    assert caught() == message


def test_strides_and_overlaps(caught):
    x = torch.arange(64.0)
    y = torch.empty(16)
    _copy_kernel[(1,)](x.as_strided((4, 3), (5, 2)), y, 20, 16, None, BLOCK=32)  # ends after 3 * 5 + 2 * 2 + 1 = 20
    assert caught() is None
    with pytest.raises(Exception, match="reads 1 elements"):
        _copy_kernel[(1,)](x.as_strided((4, 3), (5, 2)), y, 21, 16, None, BLOCK=32)
    assert caught() is not None


@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
@pytest.mark.parametrize("what", ["ranges", "block_indices"])
def test_selection_without_slots(draw, caught, schedule, what):
    """Nothing may be read of a selection that has no elements."""
    q, k, v = draw(S=3, S_kv=40)
    shape = (*q.shape[:2], k.shape[2], 0)
    selection = {"ranges": torch.zeros((*shape, 2), dtype=torch.int32)}
    if what == "block_indices":
        selection = {"block_indices": torch.zeros(shape, dtype=torch.int32), "block_size": 16}
    o, lse = nsa.selection_attention(q, k, v, **selection, backend="triton", schedule=schedule, return_lse=True)
    assert caught() is None
    assert not o.any()
    assert (lse == float("-inf")).all()
    w = key_tiles.windows(3, 2, 2, 16, 16, 4, 0, 3, 8, what == "ranges")
    assert (w.slots, w.window) == (0, 3)
