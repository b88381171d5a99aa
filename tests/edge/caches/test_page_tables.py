"""Page tables of any strides: a slice of a wider table is read where it lies, as servers pass it at every step."""

import math

import pytest
import torch

from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared.launch import Variant
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.union import tiles as union_tiles
from nsa.testing.matrix import caches

from ...conftest import bitwise
from .cached_calls import BACKENDS, PAGE, ROOM, call, everything, queries
from .test_odd_caches import TABLES


def sliced(S, device):
    """Queries, and a cache whose page 0 is NaN and belongs to no sequence."""
    cache = caches.draw([17, ROOM, 50], ROOM, PAGE, device=device)
    k, v = (torch.cat((torch.full_like(x[:1], math.nan), x)) for x in (cache.k, cache.v))
    table = torch.where(cache.block_table >= 0, cache.block_table + 1, cache.block_table)
    return queries(3, S, device=device), caches.Cache(k, v, cache.cache_seqlens, table)


@pytest.fixture
def tables_read(monkeypatch):
    """The page tables, and strides of their rows, with which kernels are launched."""
    seen, launch = [], Variant.launch

    def spy(self, grid, device, tensors, numbers, common=True):
        given = dict(zip(self.kernel.arg_names, (*tensors, *numbers), strict=False))
        if given.get("table_ptr") is not None:
            seen.append((given["table_ptr"], given["stride_tb"]))
        return launch(self, grid, device, tensors, numbers, common)

    monkeypatch.setattr(Variant, "launch", spy)
    return seen


@pytest.mark.parametrize(
    ("schedule", "S", "tiles"),
    [
        ("query_major", 2, {}),
        ("key_major", 2, {}),
        ("key_major", 2, {"key_major": key_tiles.SMALL._replace(walked=8)}),  # the merge reads some blocks itself
        ("union", 8, {"union": union_tiles.Choice(worth=ALWAYS)}),
    ],
    ids=["query_major", "key_major", "key_major-walk", "union"],
)
def test_a_slice_of_a_table_is_not_copied(device, schedule, S, tiles, tables_read, pin):
    pin(**tiles)
    (q, cache), selection = sliced(S, device), everything(3, S, device=device)
    want = call(q, cache, schedule, **selection)
    for cut, side_by_side in TABLES.values():
        tables_read.clear()
        other = cut(cache.block_table)
        assert bitwise(call(q, cache, schedule, **selection, block_table=other), want)
        assert len(tables_read) >= (1 if schedule == "query_major" else 2)  # kernels of a call
        for read, stride in tables_read:
            assert (read.data_ptr() == other.data_ptr()) == side_by_side
            assert stride == read.stride(0)
            assert read.stride(1) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_that_repeats_one_row(device, backend):
    """`expand` gives it a stride of 0."""
    cache = caches.draw([40, 40], ROOM, PAGE, device=device)
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)
    shared = cache.block_table[:1].expand(2, -1)
    want = call(q, cache, backend, **selection, block_table=shared.contiguous())
    assert bitwise(call(q, cache, backend, **selection, block_table=shared), want)
