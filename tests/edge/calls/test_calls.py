"""Tables of odd calls. On every route each is what the oracle says, in whatever memory its tensors lie."""

import math
import random

import pytest
import torch

from nsa.call import Call
from nsa.plain import spans
from nsa.testing.matrix.inputs import drowned
from nsa.testing.plugin import current_lane

from ...parity.pairs import in_pairs
from ..conftest import BACKENDS, LANE_DTYPES, ROUTES

KEYS, FAR, BIG = 24, 2**31 - 1, 2**62
# Rows of spans over 24 keys.
SPANS = [
    [(20, 99), (3, 5)],  # past the last key
    [(4, 6), (24, 30), (FAR - 1, FAR)],
    [(-6, 4), (-FAR, 2)],  # from before the first key
    [(-6, -2), (3, 9)],
    [(9, 3), (5, 8), (23, 0)],  # reversed
    [(17, 23), (0, 2), (8, 13)],  # unsorted
    [(3, 8), (8, 9), (9, 14)],  # adjacent
    [(0, 0), (2, 7), (9, 9), (11, 12), (24, 24)],  # empty slots
    [(3, 9)] * 3,  # each key counts three times
    [(-FAR, FAR)],
]
WIDE = [
    [(-BIG, BIG)],
    [(20, BIG), (2, 2**32 + 3)],
    [(-BIG, 3), (-(2**32) + 1, 2)],
    [(BIG, BIG + 5), (-BIG, -BIG + 5), (BIG, -BIG), (5, 9), (2**32, 2**32 + 9)],
]
NOTHING = [[(5, 5)], [(9, 2), (24, 0)], [(24, 40), (2**30, 2**30 + 9)], [(-9, -1), (-4, 0)]]
# Rows of blocks: padding in any slot, unsorted, one twice, past the last key.
BLOCKS = [[-1, 0, 1], [1, -1, -5], [0, -(2**31)], [1, 0], [0, 0, 1], [0, FAR, 9], [2**30, 0]]
WIDE_BLOCKS = [[BIG, 0, -BIG], [2**63 - 1, -(2**63), 0], [2**58, 2**32, 0]]  # index * block_size is no int64
LIMITED = [[(18, 20), (2, 5), (15, 19), (19, 40), (15, 19), (17, 18)]]  # before, across and past what a query sees
AT = [4, 0, 19, 11, -1, 2, -5, -(2**31), 20, 21, 500, FAR]
WIDE_AT = [BIG, -BIG, 2**63 - 1, -(2**63), 2**32 + 3, 2**31, -(2**32) + 3, 2**33]


def noise(rows, n, low=-3, high=14):
    draw = random.Random(0)
    return [[(draw.randrange(low, high), draw.randrange(low, high)) for _ in range(n)] for _ in range(rows)]


MANY = [0, *(sum(at <= i for at in (3, 127, 128, 129, 299)) for i in range(300))]
# Sizes of a batch, or of a packed batch if there are `cu` (the ends of queries and of keys); `spans`, or `blocks` of
# `size` keys, which the rows take in turn; `at`, the positions of queries; other arguments of the call.
CALLS = {
    "spans": {"S": 10, "spans": SPANS, "causal": False},
    "spans-causal": {"S": 10, "spans": SPANS},
    "wide-spans": {"S": 4, "spans": WIDE, "causal": False},
    "many-spans": {"S_kv": 40, "spans": noise(1, 150, -2, 41), "causal": False},
    "bound": {"S": 3, "spans": [[(0, 7), (9, 13)], [(0, 0)]], "max_selected": 11},
    "loose-bound": {"S": 3, "spans": [[(0, 7), (9, 13)], [(0, 0)]], "max_selected": 1000},
    **{f"blocks-of-{size}": {"S": 7, "blocks": BLOCKS, "size": size, "causal": False} for size in (1, 16, 24, 64)},
    **{f"wide-blocks-of-{size}": {"S": 3, "blocks": WIDE_BLOCKS, "size": size} for size in (1, 16, 64)},
    **{f"blocks-of-2^{math.log2(size):.0f}": {"blocks": [[0, 1, -1]], "size": size} for size in (FAR, 2**32, 2**62)},
    # Nothing is selected, or there is nothing to select.
    "nothing": {"S": 4, "spans": NOTHING, "causal": False},
    "nothing-with-a-bound": {"S": 4, "spans": NOTHING, "max_selected": 40},
    "bound-0": {"spans": [[(5, 5)]], "max_selected": 0},
    "padding": {"S": 2, "blocks": [[-1, -7], [2, FAR]], "size": 16, "causal": False},
    "padding-with-a-bound": {"S": 2, "blocks": [[-1, -7], [2, FAR]], "size": 16, "max_selected": 40},
    "no-spans": {"spans": [[]]},
    "no-blocks": {"blocks": [[]], "size": 16},
    "nothing-among-others": {"B": 2, "S": 2, "HKV": 2, "spans": [[(0, 9), (12, 20)], [(0, 9)], [(3, 3)]]},
    "no-keys": {"S": 3, "S_kv": 0, "spans": [[(0, 9)]]},
    "no-keys-with-a-bound": {"S": 3, "S_kv": 0, "spans": [[(0, 9)]], "max_selected": 9},
    "no-keys-of-blocks": {"S": 3, "S_kv": 0, "blocks": [[0, -1, 3]], "size": 16, "causal": False},
    "no-batch": {"B": 0, "spans": [[(0, 9)]]},
    "no-batch-of-blocks": {"B": 0, "S_kv": 0, "blocks": [[0]], "size": 16},
    "no-queries": {"S": 0, "spans": [[(0, 9)]]},
    "no-queries-of-blocks": {"S": 0, "blocks": [[0]], "size": 16},
    "one-key": {"S": 3, "S_kv": 1, "spans": [[(0, 1)]], "causal": False},
    "one-of-the-keys": {"S": 3, "spans": [[(23, 24)]], "causal": False},
    # What a query may see: every row lists all keys, so that the limit alone decides.
    "square": {"S": 3, "S_kv": 3, "spans": [[(0, 10**6)]]},
    "more-queries-than-keys": {"S": 5, "S_kv": 2, "spans": [[(0, 10**6)]]},
    "more-queries-than-keys-of-blocks": {"S": 5, "S_kv": 2, "blocks": [[0]], "size": 64},
    "limit-in-spans": {"S": 4, "S_kv": 20, "spans": LIMITED},
    **{
        f"limit-in-a-block-of-{size}": {"S": 4, "S_kv": 20, "blocks": [[last, 0, -1, last - 1, last + 1]], "size": size}
        for size, last in ((1, 19), (7, 2), (16, 1))
    },
    "positions": {"S": 12, "S_kv": 20, "spans": [[(0, 10**6)]], "at": AT},
    "positions-of-blocks": {"B": 2, "S": 6, "S_kv": 20, "blocks": [[0]], "size": 64, "at": AT},
    "wide-positions": {"S": 8, "S_kv": 20, "spans": [[(0, 10**6)]], "at": WIDE_AT},
    # Packed sequences, some of them empty; tokens after the last one; more of them than a program looks at at a time.
    **{
        f"sequences-{'-'.join(map(str, ends))}": {"cu": (ends, ends), "spans": noise(5, 3, high=6)}
        for ends in ((0, 5), (0, 0, 2, 5), (0, 2, 2, 2, 5), (0, 4, 4), (0, 0, 0), (0, 0), (0,))
    },
    "sequences-not-causal": {"cu": ((0, 0, 2, 5), (0, 0, 2, 5)), "spans": noise(5, 3, high=6), "causal": False},
    **{
        f"queries-and-keys-{name}": {
            "cu": ((0, 2, 6, 8, 8, 9), (0, 11, 13, 13, 20, 24)), "spans": noise(9, 3), "causal": name == "causal",
        }
        for name in ("causal", "all")
    },
    "sequences-of-blocks": {"cu": ((0, 2, 5), (0, 13, 30)), "blocks": [[0, 3, 1], [-1, 2, 4], [1, 1, 0]], "size": 4},
    "sequences-with-positions": {"cu": ((0, 2, 5), (0, 11, 24)), "spans": noise(5, 3), "at": [7, -1, 400, 0, BIG]},
    "tokens-of-no-sequence": {"S": 6, "S_kv": 20, "cu": ((0, 2, 4), (0, 9, 13)), "spans": [[(0, 20)]]},
    "no-sequences": {"S": 2, "S_kv": 24, "cu": ((0,), (0,)), "spans": [[(0, 9)]], "causal": False},
    "many-sequences": {"cu": (MANY, MANY), "spans": [[(0, 1)]]},
    "last-sequences-without-keys": {"cu": ((0, 2, 4, 5), (0, 9, 9, 9)), "spans": [[(0, 20)]]},
    # Scores above 88, too: exp of them is no fp32 number.
    **{
        f"scale-{scale}": {"S": 2, "D": 24, "spans": [[(2, 9), (11, 15)]], "causal": False, "scale": scale}
        for scale in (1.0, 0.03, -0.5, 0.0, 8.0, -8.0)
    },
}  # fmt: skip
# The kernel of "triton", with one head a program: interpreted, every third call.
PER_HEAD = CALLS if current_lane() == "gpu" else dict(list(CALLS.items())[::3])
GROUPS = (1, 2, 3, 7, 16, 33, 64, 100, 128)
HEADS = ((16, 256), (256, 16), (17, 33), (24, 40), (64, 64), (64, 100), (96, 64), (100, 192), (128, 128), (192, 24))
LIST = [[(3, 9), (12, 17), (13, 14)], [(0, 2), (20, 99)]]
DIMS = {
    **{f"G{G}": {"G": G, "spans": LIST, "max_selected": 12, "HKV": 1 + i % 2} for i, G in enumerate(GROUPS)},
    **{f"G{G}-blocks": {"G": G, "blocks": [[1, -1, 0]], "size": 7, "HKV": 2 - i % 2} for i, G in enumerate(GROUPS)},
    **{f"D{D}-Dv{Dv}": {"S": 2, "D": D, "Dv": Dv, "spans": LIST} for D, Dv in HEADS},
    # Where shared memory is short.
    **{f"largest-G{G}": {"S_kv": 90, "G": G, "D": 256, "Dv": 256, "spans": [[(0, 90)]]} for G in (3, 128)},
}
SPLIT = {
    **{
        f"G{G}-D{D}-Dv{Dv}": {"S_kv": 60, "G": G, "D": D, "Dv": Dv, "spans": [[(0, 25), (30, 57)]]}
        for G, D, Dv in ((100, 24, 16), (3, 24, 100), (64, 64, 32), (33, 128, 16))
    },
    "no-part-has-a-key": {"S": 2, "spans": [[(7, 7)]]},
    "one-part-has-keys": {"S": 2, "spans": [[(7, 7)], [(7, 9)]]},
    "many": {"B": 2, "S": 2, "S_kv": 40, "Dv": 24, "spans": [[(10, 38)], [(0, 40)]]},
}


def scattered(name, x):
    """An equal tensor, in 32 bits if they suffice: every second entry of a larger tensor, whose others are huge."""
    if isinstance(x, tuple):
        return tuple(scattered(name, each) for each in x)
    x = x.int() if torch.equal(x, x.clamp(-(2**31), FAR)) else x
    steps = [slice(None, None, 1 if name == "ranges" and axis == x.dim() - 1 else 2) for axis in range(x.dim())]
    arena = x.new_full([n * step.step for n, step in zip(x.shape, steps, strict=True)], 2**30)
    return arena[tuple(steps)].copy_(x)


def tensors(draw, device, dtype, *, cu=None, at=None, blocks=None, size=None, **row):
    """`(q, k, v)`, the tensors of integers, and the other arguments of a call."""
    ends = cu or ((1,), (KEYS,))
    sizes = {"B": 1, "S": ends[0][-1], "S_kv": ends[1][-1], "HKV": 1}
    sizes |= {name: row.pop(name) for name in (*sizes, "G", "D", "Dv") if name in row}
    qkv = draw(**sizes, dtype=dtype, varlen=cu is not None)
    name, rows, empty = ("ranges", row.pop("spans"), (0, 0)) if blocks is None else ("block_indices", blocks, -1)
    lead, n = (*qkv[0].shape[:-2], sizes["HKV"]), max(map(len, rows))
    filled = [[*row, *[empty] * (n - len(row))] for row in rows]
    taken = torch.tensor([filled[i % len(rows)] for i in range(math.prod(lead))], dtype=torch.int64, device=device)
    integers = {name: taken.view(*lead, n, *[2] * (blocks is None))}
    integers |= {} if at is None else {"q_positions": torch.tensor(at, device=device).view(lead[:-1])}
    integers |= {} if cu is None else {"cu_seqlens": tuple(torch.tensor(x, device=device) for x in cu)}
    return qkv, integers, row | ({} if blocks is None else {"block_size": size})


def selected(call):
    """`[B or 1, S_kv, HKV]`: the keys that some row reads."""
    rows, of_batch = spans.of_call(call), call.k if call.k.dim() == 4 else call.k[None]
    seen = torch.zeros(of_batch.shape[:-1], dtype=torch.bool, device=call.k.device)
    listed = torch.stack((rows.starts, rows.ends), -1).tolist()
    for batch, first, heads in zip(rows.batch.tolist(), rows.offset.tolist(), listed, strict=True):
        for head, some in enumerate(heads):
            for start, end in some:
                seen[batch, first + start : first + end, head] = True
    return seen.view(call.k.shape[:-1])


def check(attend, agrees, draw, device, dtype, row):
    """First on views amid NaN and huge numbers, where keys that no row reads are NaN, into a tensor of NaN: what the
    oracle says, and nothing beside it is written. Then on clean tensors, in 64 bits, without LSE: the same bits.
    """
    (q, k, v), integers, more = tensors(draw, device, dtype, **row)
    seen = selected(Call.of(q, k, v, **integers, **more))[..., None]
    bad_k, bad_v = k.masked_fill(~seen, math.nan), v.masked_fill(~seen, math.inf)
    if attend.name == "key_major":  # to which a block is whole: values of its other keys may leak, see test_nan.py
        bad_v = v
    out = drowned(q.new_full((*q.shape[:-1], v.shape[-1]), math.nan), 2)
    apart = {name: scattered(name, x) for name, x in integers.items()}
    amid = [drowned(x, room) for room, x in enumerate((q, bad_k, bad_v), 3)]  # no two have the same strides
    got, _ = agrees(attend, *amid, out=out, **apart, **more)
    assert got is out
    assert out._base.isnan().sum() == out._base.numel() - out.numel()
    assert torch.equal(attend(q, k, v, **integers, **more), out)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in the interpreter
@pytest.mark.parametrize(("attend_all", "call", "dtype"), [
    *in_pairs([name for name in ROUTES if name != "per_head"], CALLS, LANE_DTYPES),
    *in_pairs(["per_head"], PER_HEAD, LANE_DTYPES),
], indirect=["attend_all", "dtype"])  # fmt: skip
def test_odd_calls(attend_all, agrees, draw, device, call, dtype):
    check(attend_all, agrees, draw, device, dtype, call)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("attend", "call", "dtype"), in_pairs(BACKENDS, DIMS, LANE_DTYPES, full=False), indirect=["attend", "dtype"]
)
def test_group_sizes_and_head_dims(attend, agrees, draw, device, call, dtype):
    check(attend, agrees, draw, device, dtype, call)


@pytest.mark.usefixtures("split")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("attend", "call", "dtype"), in_pairs(BACKENDS, SPLIT, LANE_DTYPES), indirect=["attend", "dtype"]
)
def test_rows_split_among_programs(attend, agrees, draw, device, call, dtype):
    check(attend, agrees, draw, device, dtype, call)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_dtypes_of_plain_backends(attend_plain, agrees, draw, device, kind):
    """On every lane; Triton's bf16 needs a GPU."""
    check(attend_plain, agrees, draw, device, kind, CALLS["nothing-among-others"])


@pytest.mark.parametrize("bound", [2**24, 2**31])
def test_a_loose_bound_costs_nothing(attend_plain, agrees, draw, device, bound):
    """No more keys are laid out than there are."""
    check(attend_plain, agrees, draw, device, torch.float32, CALLS["loose-bound"] | {"max_selected": bound})
