"""A table of calls over odd caches: wrong pages, lengths and ends, nothing at all. On every backend each is what the
oracle says, in whatever memory cache, lengths and tables lie.
"""

import math

import pytest
import torch

from nsa.testing.matrix import caches
from nsa.testing.matrix.inputs import drowned

from ...parity.pairs import in_pairs
from .cached_calls import BACKENDS, PAGE, ROOM, agrees, call, everything, queries

FAR, BIG = 2**31 - 1, 2**62
NONE = {(0, 1): -1, (1, 0): 10**6, (1, 3): FAR, (2, 0): -(2**31), (2, 1): 15 + 7}  # there are 15 pages
SPANS = [[0, FAR], [-5, 40]]
BOTH = {"contiguous": {"page": None}, "paged": {}}
# Lengths of sequences; queries of each (S), or the ends of packed queries in T tokens; `told`, lengths that the call is
# told; `table`, what is changed in it; `common`, how many pages all sequences share;
# the selection, if it is not of all blocks, and other arguments of the call.
ODD = {
    # Pages that do not exist, in the middle of a sequence, too: their keys are as if nothing had selected them.
    **{f"no-such-pages-{size}": {"lengths": [50, 64, 33], "S": 2, "table": NONE, "size": size} for size in (8, 16, 32)},
    "no-such-pages-packed": {"lengths": [50, 64, 33], "T": 4, "ends": (0, 2, 3, 4), "table": NONE},
    "pages-beyond-32-bits": {"lengths": [50, 64], "table": {(0, 1): BIG, (1, 2): -BIG}},
    # Negative lengths are 0, those beyond the cache, or the table, as long as that.
    **{
        f"lengths-{name}-{far:.0e}": {"lengths": [ROOM] * 4, "S": 2, "told": (-1, -far, ROOM + 1, far), **page}
        for name, page in BOTH.items() for far in (FAR, BIG)
    },
    **{
        f"past-a-length-{name}-{causal}": {"lengths": [1, 17, 0, 63], "S": 2, "spans": SPANS, "causal": causal, **page}
        for name, page in BOTH.items() for causal in (True, False)
    },
    "pages-in-common": {"lengths": [40, 55, 64], "common": 2},
    # Ends that cannot be.
    **{
        f"ends-{name}": {"lengths": [33, 64, 20], "T": 6, "ends": values, "told": (33, ROOM + 9, 20)}
        for name, values in {
            "falling": (0, 4, 2, 3), "negative": (0, -7, 1, -BIG - 2**31), "past-the-last-token": (0, 1, 2**63 - 1, 9),
            "not-from-0": (3, 4, 5, 6), "lowest": (-(2**63), -1, 5, -(2**63)), "zeros": (0, 0, 0, 0),
        }.items()
    },
    **{
        f"longest-{longest}": {"lengths": [50, 64], "T": 4, "ends": (0, 3, 4), "max_seqlen_q": longest}
        for longest in (None, 1, 3, 2**40)
    },
}  # fmt: skip


def wider(table, more=12):
    """A table with `more` entries a row, each of page 0. The address of a row stays a multiple of 16 bytes."""
    return torch.cat((table, table.new_zeros(table.shape[0], more)), 1)


# How a table with these entries may lie in memory, and whether the entries of its rows are side by side.
TABLES = {
    "slice": (lambda table: wider(table)[:, : table.shape[1]], True),
    "rows": (lambda table: wider(table).repeat_interleave(2, 0)[::2, : table.shape[1]], True),
    "columns": (lambda table: table.t().contiguous().t(), False),
    "every-second-entry": (lambda table: table.repeat_interleave(2, 1)[:, ::2], False),
}
# How keys and values may lie: K and V in one tensor, as servers keep them; heads before keys.
LAYOUTS = {
    "one-tensor": lambda k, v: torch.stack((k, v), 1).unbind(1),
    "heads-first": lambda k, v: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)],
}


def narrowed(x):
    return x.int() if x is not None and torch.equal(x, x.clamp(-(2**31), FAR)) else x


def made(
    device, lengths, page=PAGE, S=1, T=None, ends=None, told=None, table=(), common=0, size=PAGE, spans=None,
    causal=True, **how,
):  # fmt: skip
    """Queries, a cache and ends in 64 bits, the selection, and arguments that the oracle does not take."""
    cache = caches.draw(lengths, ROOM, page, index=torch.int64, device=device)
    if told is not None:
        cache.cache_seqlens.copy_(torch.tensor(told))
    for place in table:
        cache.block_table[place] = table[place]
    if common:
        cache.block_table[1:, :common] = cache.block_table[0, :common]
    lead = (len(lengths), S) if T is None else (T,)
    selection = everything(*lead, device=device, n=ROOM // size, size=size)
    if spans is not None:
        spans = torch.tensor(spans, dtype=torch.int32, device=device)
        selection = {"ranges": spans.expand(*lead, 2, *spans.shape).contiguous()}
    cu = None if ends is None else torch.tensor(ends, device=device)
    return queries(*lead, device=device), cache, cu, selection | {"causal": causal}, how


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in the interpreter
@pytest.mark.parametrize(
    ("backend", "row", "table", "layout"),
    in_pairs(BACKENDS, ODD, {n: lies for n, (lies, _) in TABLES.items()}, LAYOUTS),
)
def test_odd_caches(device, backend, row, table, layout):
    """Into a tensor of NaN. With other strides, in 64 bits, without LSE: the same bits."""
    q, cache, cu, selection, how = made(device, **row)
    narrow = caches.Cache(cache.k, cache.v, narrowed(cache.cache_seqlens), narrowed(cache.block_table))
    out = drowned(torch.full_like(q, math.nan))
    got, _ = agrees(q, narrow, backend, narrowed(cu), {"out": out, **how}, **selection)
    assert got is out
    pages = None if cache.block_table is None else table(cache.block_table)
    wide = caches.Cache(*layout(cache.k, cache.v), cache.cache_seqlens, pages)
    assert torch.equal(call(q, wide, backend, cu, **selection, **how, return_lse=False), out)
