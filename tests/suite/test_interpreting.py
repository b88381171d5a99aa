"""The quickened interpreter computes what Triton's own does, bit by bit, in every kernel."""

import itertools

import pytest
import torch

import nsa
from nsa.testing import interpreter
from nsa.testing.plugin import current_lane, triton_version

pytestmark = pytest.mark.skipif(current_lane() == "gpu", reason="nothing is interpreted on a GPU")

CALLS = {
    "ranges": {},
    "per_head": {"schedule": "per_head"},
    "key_major": {"schedule": "key_major"},
    "blocks": {"block_size": 16},
    "key_major-blocks": {"schedule": "key_major", "block_size": 16},
}


@pytest.fixture(params=["fp32", "fp16"])
def call(request, draw, device):
    """`call(**keywords) -> (O, LSE)`: rows of random spans, or of blocks of keys if there is a block size."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[request.param]
    q, k, v = draw(B=1, S=2, S_kv=50, D=24, Dv=16, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    spans = torch.randint(-3, 60, (1, 2, 2, 3, 2), generator=g, dtype=torch.int32)
    blocks = torch.randint(-1, 4, (1, 2, 2, 3), generator=g, dtype=torch.int32)

    def make(**keywords):
        selection = {"block_indices": blocks} if "block_size" in keywords else {"ranges": spans}
        return nsa.selection_attention(q, k, v, **selection, backend="triton", return_lse=True, **keywords)

    return make


def in_both(run):
    """What `run()` returns where the interpreter is quickened, and where it is Triton's own."""
    quick = run()
    with interpreter.as_released():
        return quick, run()


def assert_same(call, **keywords):
    for a, b in zip(*in_both(lambda: call(**keywords)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", CALLS)
def test_same_bits(call, kind):
    assert_same(call, **CALLS[kind])


@pytest.mark.parametrize("block_size", [None, 16], ids=["ranges", "blocks"])
def test_same_bits_of_gradients(draw, same, block_size):
    q, k, v = (x.half().requires_grad_() for x in draw(B=1, S=2, S_kv=50, D=24, Dv=16))
    selection = {"ranges": same([(0, 9), (3, 40)], 1, 2, 2)}
    if block_size is not None:
        selection = {"block_indices": same([1, 0], 1, 2, 2), "block_size": block_size}

    def gradients():
        o, lse = nsa.selection_attention(q, k, v, **selection, backend="triton", return_lse=True)
        return torch.autograd.grad(o.float().sum() + lse.sum(), (q, k, v))

    assert_same(gradients)


@pytest.mark.usefixtures("split")
def test_same_bits_of_merged_parts(call):
    assert_same(call)


@pytest.mark.skipif(not triton_version().startswith("3.9."), reason="other releases work otherwise")
def test_everything_is_quickened():
    """A release that renames what is quickened would have the suite take twice as long, and nothing else say so."""
    assert interpreter.quicken() == (
        "index", "overflow", "calls", "members", "search", "types", "shapes", "widths", "tiles", "operands",
        "arithmetic", "casts", "constants",
    )  # fmt: skip


NUMBERS = [torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.float32]


def test_operators_of_all_types():
    """Of two tiles that are broadcast, of a tile and a number, of a tile and a constant, and of single numbers.

    Two halves are divided in fp32. A number takes the integer type of the tile beside it, in which the sum wraps: the
    assertion of an overflow, which is dropped, never fired.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def computed(a_ptr, b_ptr, out_ptr, number, CONSTANT: tl.constexpr, FRACTION: tl.constexpr):
        i = tl.arange(0, 4)
        a, b = tl.load(a_ptr + i)[:, None], tl.load((b_ptr + i) + 1)[None, :]
        one, other = tl.load(a_ptr + 2), tl.load(b_ptr + 1)
        at = out_ptr + 4 * i[:, None] + i[None, :]
        tl.store(at, a + b)
        tl.store(at + 16, a - b)
        tl.store(at + 32, a * b)
        tl.store(at + 48, ((a < b) & (a != other)) | (one >= b))
        tl.store(at + 64, ((a <= CONSTANT) | (a == one)) & (a > b))
        tl.store(at + 80, (3 + a) * CONSTANT - b + (a - 1))
        tl.store(at + 96, (number * a + number) + (one * other + (one - CONSTANT)))
        if FRACTION:
            tl.store(at + 112, a / b)
            tl.store(at + 128, (a * 0.3 - b) + (0.7 + a) * (one * 1.7 + b * 3))

    for left, right in itertools.product(NUMBERS, repeat=2):
        large = 2**30 + 5 if {left, right} <= {torch.int32, torch.int64} else 90
        a, b = torch.tensor([100, 3, 7, large]).to(left), torch.tensor([9, 9, 100, 2, 7]).to(right)
        floating = left.is_floating_point and right.is_floating_point

        def run(a=a, b=b, floating=floating):
            out = torch.zeros(144, dtype=torch.float64)
            computed[(1,)](a, b, out, 5, 11, floating)
            return out

        quick, released = in_both(run)
        assert torch.equal(quick, released), (left, right, quick, released)


@pytest.mark.parametrize(("size", "number", "match"), [
    (8, 0, "incompatible dimensions at index 0: 4 and 8"),
    (4, 2**31, "is out of range"),
    (4, -(2**31) - 1, "is out of range"),
])  # fmt: skip
def test_what_does_not_fit_is_told_by_triton(size, number, match):
    import triton
    import triton.language as tl

    @triton.jit
    def added(ptr, SIZE: tl.constexpr, NUMBER: tl.constexpr):
        tl.store(ptr + tl.arange(0, 4), tl.load(ptr + tl.arange(0, 4)) + tl.load(ptr + tl.arange(0, SIZE)) + NUMBER)

    def run():
        with pytest.raises(Exception, match=match) as raised:
            added[(1,)](torch.zeros(8, dtype=torch.int32), size, number)
        return str(raised.value)

    quick, released = in_both(run)
    assert quick == released
