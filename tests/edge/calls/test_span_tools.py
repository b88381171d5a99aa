"""`merge_ranges`, `ranges_from_blocks` and `pack_rows` against sets and loops, over every kind of span."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa
from nsa.plain import packed_sdpa, spans
from nsa.testing.matrix import strategies

from .test_strides import LAYOUTS

KEYS, N = 24, 5
HUGE = 2**62
INT32 = torch.iinfo(torch.int32)


def spans_of(ranges):
    """`[rows][n]` pairs of a `[..., n, 2]` tensor."""
    return [[tuple(span) for span in row] for row in ranges.reshape(-1, *ranges.shape[-2:]).tolist()]


def merged_by_hand(row):
    """Sorted, disjoint, non-adjacent spans with the same keys."""
    result = []
    for start, end in sorted(span for span in row if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result + [(0, 0)] * (len(row) - len(result))


def keys_of(row):
    return {key for start, end in row for key in range(max(start, -99), min(end, 99))}


@given(strategies.ranges((2, 3), N, KEYS))
def test_merge_is_the_set_of_keys(device, ranges):
    merged = nsa.merge_ranges(ranges.to(device))
    assert merged.dtype == torch.int64
    assert merged.shape == ranges.shape
    rows = spans_of(merged)
    assert rows == [merged_by_hand(row) for row in spans_of(ranges)]
    for row, given_row in zip(rows, spans_of(ranges), strict=True):
        assert keys_of(row) == keys_of(given_row)
        used = [span for span in row if span != (0, 0)]
        assert all(a[1] < b[0] for a, b in zip(used, used[1:], strict=False))


@given(strategies.ranges((2,), N, KEYS))
def test_merge_is_idempotent_and_takes_int32(device, ranges):
    small = ranges.clamp(INT32.min, INT32.max)
    once = nsa.merge_ranges(small.to(device))
    assert torch.equal(nsa.merge_ranges(once), once)
    narrow = nsa.merge_ranges(small.to(device, torch.int32))
    assert narrow.dtype == torch.int32
    assert torch.equal(narrow.long(), once)


MERGES = {
    "int32-ends": ([(INT32.min, 0), (0, INT32.max), (INT32.max, INT32.max)], [(INT32.min, INT32.max), *[(0, 0)] * 2]),
    "last-of-int32": ([(INT32.max - 1, INT32.max), (INT32.min, INT32.min + 1)], None),
    "int64-ends": ([(-(2**63), -5), (HUGE, 2**63 - 1)], [(-(2**63), -5), (HUGE, 2**63 - 1)]),
}


@pytest.mark.parametrize("kind", MERGES)
def test_merge_at_the_edges(device, kind):
    given_row, want = MERGES[kind]
    want = want or merged_by_hand(given_row)
    for width in (torch.int64,) if kind == "int64-ends" else (torch.int32, torch.int64):
        got = nsa.merge_ranges(torch.tensor(given_row, dtype=width, device=device))
        assert [tuple(span) for span in got.tolist()] == want


@pytest.mark.parametrize("shape", [(0, 2), (3, 0, 2), (0, 4, 2), (2, 0, 3, 4, 2)], ids=str)
def test_merge_of_nothing(device, shape):
    for width in (torch.int32, torch.int64):
        got = nsa.merge_ranges(torch.zeros(shape, dtype=width, device=device))
        assert (got.shape, got.dtype) == (shape, width)


def test_merge_of_any_strides(device):
    ranges = torch.randint(0, KEYS, (3, 2, 4, 2), generator=torch.Generator().manual_seed(0)).to(device)
    for view in (ranges.transpose(0, 1), ranges[:, :, ::2], ranges.flip(-2), ranges[:1].expand(5, -1, -1, -1)):
        assert torch.equal(nsa.merge_ranges(view), nsa.merge_ranges(view.contiguous()))


def test_merged_spans_count_each_key_once(attend, agrees, draw, same):
    """What it is for: with overlap counted twice, attention over a set needs merged spans."""
    q, k, v = draw(S=2)
    ranges = same([(2, 9), (4, 12), (11, 12), (20, 22)], 1, 2, 2)
    got = agrees(attend, q, k, v, ranges=nsa.merge_ranges(ranges))
    want = attend(q, k, v, ranges=same([(2, 12), (20, 22)], 1, 2, 2), return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


# --- blocks -----------------------------------------------------------------------------------------------------------


def blocks_by_hand(row, size, seqlen_k, width):
    """Spans of a row's blocks; those whose end no tensor of that dtype can hold are empty."""
    spans = []
    for block in row:
        start, end = block * size, (block + 1) * size
        end = end if seqlen_k is None else min(end, seqlen_k)
        sound = block >= 0 and start < end <= torch.iinfo(width).max
        spans.append((start, end) if sound else None)
    return spans


@given(
    st.lists(
        st.one_of(st.integers(-3, 40), st.sampled_from([HUGE, -HUGE, 2**63 - 1, -(2**63)])), min_size=N, max_size=N
    ),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([None, 0, 1, 47, 48, 49]),
)
def test_blocks_are_spans(device, row, size, seqlen_k):
    for width in (torch.int64, torch.int32):
        fits = [b if abs(b) < 2**31 else (INT32.max if b > 0 else INT32.min) for b in row]
        blocks = torch.tensor(row if width == torch.int64 else fits, dtype=width)
        got = nsa.ranges_from_blocks(blocks.to(device), size, seqlen_k)
        assert (got.shape, got.dtype) == ((N, 2), width)
        for span, want in zip(spans_of(got)[0], blocks_by_hand(blocks.tolist(), size, seqlen_k, width), strict=True):
            assert span == (want or (0, 0))


@pytest.mark.parametrize(("block", "block_size", "seqlen_k", "span"), [
    (-1, 10, None, [0, 0]),
    (-(2**31), 10, 25, [0, 0]),
    (2, 10, None, [20, 30]),
    (2, 10, 25, [20, 25]),
    (2**25 - 1, 64, 2**31 - 1, [2**31 - 64, 2**31 - 1]),
    (1, 2**30 + 5, 2**31 - 1, [2**30 + 5, 2**31 - 1]),
    (2**25 - 1, 64, 2**40, [2**31 - 64, 2**31 - 1]),
    (2**25, 64, 2**31 - 1, [0, 0]),
    (3, 10, 30, [0, 0]),
    (1, 100, 30, [0, 0]),
    (0, 10, 0, [0, 0]),
])  # fmt: skip
def test_padding_and_ends_of_blocks_stay_within_int32(device, block, block_size, seqlen_k, span):
    blocks = torch.tensor([block, 0], dtype=torch.int32, device=device)
    assert nsa.ranges_from_blocks(blocks, block_size, seqlen_k)[0].tolist() == span


def test_blocks_of_as_many_keys_as_a_program_is_given(device):
    """`seqlen_k` may be a symbol of `torch.export`, which is no int."""

    class Spans(torch.nn.Module):
        def forward(self, k, blocks):
            return nsa.ranges_from_blocks(blocks, 16, k.shape[1])

    k, blocks = torch.zeros(1, 40, 1, 16, device=device), torch.tensor([[2, 0, -1]], device=device)
    lengths = {"k": {1: torch.export.Dim("keys", min=17, max=4096)}, "blocks": None}
    program = torch.export.export(Spans(), (k, blocks), dynamic_shapes=lengths, strict=False).module()
    assert program(k, blocks).tolist() == [[[32, 40], [0, 16], [0, 0]]]
    assert program(k[:, :35], blocks).tolist() == [[[32, 35], [0, 16], [0, 0]]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)], ids=str)
def test_blocks_of_nothing(device, shape):
    assert nsa.ranges_from_blocks(torch.zeros(shape, dtype=torch.int32, device=device), 16).shape == (*shape, 2)


# --- packing ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([HUGE, INT32.max]).flatmap(lambda far: strategies.ranges((2, 2, 2), N, KEYS, far)),  # int64, int32
    st.sampled_from([None, 130, 3]),
    strategies.seeds(),
)
def test_pack_rows_copies_what_the_spans_name(device, ranges, bound, seed):
    """Row by row in order batch, position, head; in the order of the spans, as often as they name a key, seen or not.

    A row that selects more than the bound is cut, and its length says so.
    """
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, KEYS, 2, d, generator=g).to(device) for d in (16, 24))
    packed = nsa.pack_rows(k, v, ranges.to(device), max_selected=bound)
    rows = [[key for span in row for key in range(KEYS) if span[0] <= key < span[1]] for row in spans_of(ranges)]
    L = max(map(len, rows)) if bound is None else bound
    assert packed.K.shape == (8, L, 16)
    assert packed.V.shape == (8, L, 24)
    assert (packed.lengths.tolist(), packed.lengths.dtype) == ([min(len(row), L) for row in rows], torch.int64)
    for i, row in enumerate(rows):
        batch, head = i // 4, i % 2
        for got, source in ((packed.K[i], k), (packed.V[i], v)):
            kept = row[:L]
            assert torch.equal(got[: len(kept)], source[batch, kept, head])
            assert not got[len(kept) :].any()


def test_pack_rows_reads_no_nan_it_was_not_told_to(device, draw, same):
    _, k, v = draw()
    for x in (k, v):
        x[:, :3], x[:, 5:] = float("nan"), float("nan")
    ranges = same([(3, 5)], 1, 3, 2)
    ranges[0, 1] = 0
    for bound in (None, 2, 9):
        packed = nsa.pack_rows(k, v, ranges, max_selected=bound)
        assert not packed.K.isnan().any()
        assert not packed.V.isnan().any()


@pytest.mark.parametrize("shape", [{"B": 0}, {"S": 0}, {"S_kv": 0}], ids=["B0", "S0", "no-keys"])
def test_pack_rows_of_nothing(draw, same, shape):
    shape = {"B": 1, "S": 2} | shape
    _, k, v = draw(**shape)
    N = shape["B"] * shape["S"] * 2
    for bound, L in ((None, 0), (4, 4)):
        packed = nsa.pack_rows(k, v, same([(5, 5), (30, 90)], shape["B"], shape["S"], 2), max_selected=bound)
        assert packed.K.shape == (N, L, 16)
        assert packed.lengths.tolist() == [0] * N
        assert not packed.K.any()
    no_spans = same([(0, 0)], shape["B"], shape["S"], 2)[..., :0, :]
    assert nsa.pack_rows(k, v, no_spans).K.shape == (N, 0, 16)


@pytest.mark.parametrize("view", [*LAYOUTS.values(), lambda x: x[..., ::2]], ids=[*LAYOUTS, "last-dim"])
def test_pack_rows_of_any_strides(draw, same, view):
    """The last dimension's, too; gaps between rows; and enough rows that padding points at a row of zeros."""
    k, v = (view(x) for x in draw(B=2)[1:])
    for ranges in (same([(1, 4), (9, 30)], 2, 2, 2), same([(1, 9), (0, 3)], 2, 40, 2)):
        got, want = nsa.pack_rows(k, v, ranges), nsa.pack_rows(k.contiguous(), v.contiguous(), ranges)
        torch.testing.assert_close(tuple(got), tuple(want), rtol=0, atol=0)


def foreign(x):
    """A copy of ``x`` as another library passes a slice by DLPack: at an odd address, and with an offset of 0."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    copy = torch.from_dlpack(memory[1:].view(x.shape).copy_(x))
    assert (copy.storage_offset(), copy.data_ptr() % 16) == (0, x.element_size())
    return copy


def test_tensors_of_another_library_at_any_address(device, draw, same):
    """A GPU must not read them 16 bytes at a time."""
    q, k, v = (x.half() for x in draw(B=2))
    ranges = same([(1, 4), (9, 30)], 2, 3, 2)
    got, want = nsa.pack_rows(foreign(k), foreign(v), ranges), nsa.pack_rows(k, v, ranges)
    assert all(map(torch.equal, got, want))
    for backend in ("sdpa", "triton"):
        got, want = (
            nsa.selection_attention(*qkv, ranges=ranges, max_selected=30, backend=backend)
            for qkv in (map(foreign, (q, k, v)), (q, k, v))
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_rows_that_a_gpu_copies_in_elements_of_16_bytes(dtype):
    """Their address counts, not only their offset: such a view of others raises, or a GPU faults."""
    memory = torch.arange(4 * 64, dtype=torch.float32).to(dtype)
    begin = -memory.data_ptr() % 16 // dtype.itemsize
    rows = memory[begin : begin + 3 * 64].view(3, 64)
    assert spans.sixteens(rows)
    assert rows.view(torch.complex128).shape == (3, 4 * dtype.itemsize)
    apart = memory[: 3 * 65].as_strided((3, 64), (65, 1), begin)
    for other in (rows[:, 1:], rows[:, ::2], rows[:, :63], apart, foreign(rows)):
        assert not spans.sixteens(other)
    assert spans.sixteens(rows[:, : 16 // dtype.itemsize])
    assert not spans.aligned(foreign(rows))
    assert spans.aligned(packed_sdpa._aligned(foreign(rows)))
    assert packed_sdpa._aligned(rows) is rows
