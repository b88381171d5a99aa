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


def sliced(S, page, index, device):
    """Queries, and a cache whose page 0 is NaN and belongs to no sequence."""
    cache = caches.draw([17, ROOM, 50], ROOM, page, index=index, device=device)
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


def test_tables_of_any_strides_where_the_merge_reads_keys(device, tables_read, pin, fresh_plans):
    """Key-major's merge kernel looks pages up, too, where it reads some of a row's blocks itself."""
    pin(key_major=key_tiles.SMALL._replace(walked=8))
    (q, cache), selection = sliced(2, PAGE, torch.int32, device), everything(3, 2, device=device)
    want = call(q, cache, "key_major", **selection)
    for cut, _ in TABLES.values():
        tables_read.clear()
        assert bitwise(call(q, cache, "key_major", **selection, block_table=cut(cache.block_table)), want)
        assert len(tables_read) == 2  # kernels of a call


@pytest.mark.parametrize("schedule", ["query_major", "key_major", "union"])
def test_a_slice_of_a_table_is_not_copied(device, schedule, tables_read, pin, fresh_plans):
    pin(union=union_tiles.Choice(worth=ALWAYS))
    S = 8 if schedule == "union" else 2  # enough queries for tiles of the union kernel
    (q, cache), selection = sliced(S, PAGE, torch.int32, device), everything(3, S, device=device)
    want = call(q, cache, schedule, **selection)
    for cut, side_by_side in TABLES.values():
        tables_read.clear()
        other = cut(cache.block_table)
        assert bitwise(call(q, cache, schedule, **selection, block_table=other), want)
        assert tables_read
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
