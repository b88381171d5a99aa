"""Packed queries over a cache: ends that cannot be, and rows that nothing may touch."""

import logging
import math

import pytest
import torch

import nsa
from nsa.kernels import pinned
from nsa.kernels.query_major import tiles
from nsa.testing.matrix import caches

from ...conftest import compare
from .cached_calls import PAGE, ROOM, agrees, call, ends, everything, queries

ROUTES = ["query_major", "key_major", "sdpa", "reference"]
FAR = 2**62
WILD = {
    "falling": (0, 4, 2, 3),
    "negative": (0, -7, 1, -FAR - 2**31),
    "past-the-last-token": (0, 1, 2**63 - 1, 9),
    "not-from-0": (3, 4, 5, 6),  # the first sequence begins at token 0 all the same
    "lowest": (-(2**63), -1, 5, -(2**63)),
    "zeros": (0, 0, 0, 0),
}


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("values", WILD.values(), ids=WILD)
def test_ends_that_cannot_be(device, route, values):
    """No read leaves the tensors (`nsa.testing.judge.addresses` looks), and all backends take them alike."""
    cache = caches.draw([33, 64, 20], ROOM, PAGE, device=device)
    cache.cache_seqlens[1] = ROOM + 9
    q, selection = queries(6, device=device), everything(6, device=device)
    for dtype in (torch.int32, torch.int64) if route == "query_major" else (torch.int64,):
        some = [min(max(x, torch.iinfo(dtype).min), torch.iinfo(dtype).max) for x in values]
        cu = ends(*some, device=device, dtype=dtype)
        want = caches.oracle(q, cache, cu, **selection)
        for served in (route, "sdpa"):
            compare(call(q, cache, served, cu, **selection), want, q.dtype)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_rows_of_nothing_do_not_touch_the_cache(device, route, page):
    """Every key is NaN, and so is its page; where nothing may be read, the result is zero without a NaN.

    Tokens 0 and 1 are padded rows of a captured graph, token 2 is a query too early for its one key, the others come
    after the last sequence.
    """
    cache = caches.draw([0, 0, 1], ROOM, page, device=device)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    o, lse = call(
        queries(6, device=device), cache, route, ends(0, 1, 2, 4, device=device), **everything(6, device=device)
    )
    assert o[3].isnan().all()  # it is not that no row reads anything
    quiet = [0, 1, 2, 4, 5]
    assert not o[quiet].any()
    assert (lse[quiet] == -math.inf).all()


@pytest.mark.parametrize("size", [PAGE, PAGE // 2], ids=["tiles", "no-tiles"])
def test_programs_of_one_tile_look_up_no_page_that_is_not_there(device, size):
    """They look up a page without asking whether there is a key; after the last sequence the table has no row."""
    cache = caches.draw([50, 64], ROOM, PAGE, device=device)
    cu, selection = ends(0, 1, 2, device=device), everything(3, device=device, n=1, size=size)
    with pinned(query_major=tiles.Choice(2, 1, PAGE, 4, 1)):
        agrees(queries(3, device=device), cache, "query_major", cu, **selection)


@pytest.mark.parametrize("B", [130, 131])
def test_more_sequences_than_a_program_looks_at_at_once(device, B):
    """128 are: every second one, then those in between. The last query belongs to none."""
    cache = caches.draw([PAGE] * B, PAGE, None, HKV=1, device=device)
    cu = torch.zeros(B + 1, dtype=torch.int32, device=device)
    for token, seq in enumerate((0, 127, B - 1)):
        cu[seq + 1 :] = token + 1
    blocks = torch.zeros(4, 1, 1, dtype=torch.int32, device=device)
    agrees(queries(4, device=device), cache, "query_major", cu, block_indices=blocks, block_size=PAGE)


@pytest.mark.parametrize("longest", [None, 1, 3, 2**40])
def test_max_seqlen_q_changes_no_result(device, longest):
    cache = caches.draw([50, 64], ROOM, PAGE, device=device)
    cu, how = ends(0, 3, 4, device=device), {"max_seqlen_q": longest}
    agrees(queries(4, device=device), cache, "query_major", cu, how, **everything(4, device=device))


def test_debug_cache_reports_ends_and_short_lengths(device, caplog):
    cache = caches.draw([40, 2, 20, 0], ROOM, PAGE, device=device)
    short = "cache_seqlens: expected the number of queries or more, or queries see nothing, got 2 of sequence 1"
    wild = "cu_seqlens_q: expected 0 first, then ends in rising order up to 8, got 1 at [0], 3 at [2], 9 at [4]"
    for values, said in (((0, 2, 5, 6, 7), [short]), ((1, 5, 3, 4, 9), [wild]), ((0, 2, 4, 6, 7), [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nsa"), nsa.configure(debug_cache=True):
            call(queries(8, device=device), cache, "sdpa", ends(*values, device=device), **everything(8, device=device))
        assert caplog.messages == said
