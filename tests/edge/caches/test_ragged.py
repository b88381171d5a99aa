"""Packed queries over a cache: what is refused, ends that cannot be, rows that nothing may touch, graphs."""

import logging
import math
import re

import pytest
import torch

import nsa
from nsa import ops
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.query_major import tiles
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...conftest import compare

ROOM, PAGE = 64, 16
ROUTES = {
    "query_major": {"backend": "triton", "schedule": "query_major"},
    "key_major": {"backend": "triton", "schedule": "key_major"},
    "sdpa": {"backend": "sdpa"},
    "reference": {"backend": "reference"},
}
TRITON = list(ROUTES)[:2]
graphs = pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")


def call(q, cache, cu, route="query_major", **keywords):
    how = cache.arguments | {"cu_seqlens_q": cu, "return_lse": True} | ROUTES[route]
    return nsa.selection_attention_with_kvcache(q, cache.k, cache.v, **(how | keywords))


def queries(T, device, seed=5):
    return torch.randn(T, 4, 16, generator=torch.Generator().manual_seed(seed)).to(device)


def everything(T, device, n=ROOM // PAGE):
    """Every block, and one past the end."""
    return torch.arange(n + 1, dtype=torch.int32, device=device).expand(T, 2, n + 1).contiguous()


def ends(*values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


# --- ends and rows ----------------------------------------------------------------------------------------------------

FAR = 2**62
WILD = {
    "falling": (0, 4, 2, 3),
    "negative": (0, -7, 1, -FAR - 2**31),
    "past-the-last-token": (0, 1, 2**63 - 1, 9),
    "not-from-0": (3, 4, 5, 6),  # the first sequence begins at token 0 all the same
    "lowest": (-(2**63), -1, 5, -(2**63)),
    "zeros": (0, 0, 0, 0),
}


@pytest.mark.parametrize("route", TRITON)
@pytest.mark.parametrize("values", WILD.values(), ids=WILD)
def test_ends_that_cannot_be(device, route, values):
    """No read leaves the tensors (`nsa.testing.judge.addresses` looks), and all backends take them alike."""
    cache = caches.draw([33, 64, 20], ROOM, PAGE, device=device)
    cache.cache_seqlens[1] = ROOM + 9
    q, blocks = queries(6, device), everything(6, device)
    for dtype in (torch.int32, torch.int64) if route == "query_major" else (torch.int64,):
        some = [min(max(x, torch.iinfo(dtype).min), torch.iinfo(dtype).max) for x in values]
        cu = ends(*some, device=device, dtype=dtype)
        want = caches.oracle(q, cache, cu, block_indices=blocks, block_size=PAGE)
        for served in (route, "sdpa"):
            compare(call(q, cache, cu, served, block_indices=blocks, block_size=PAGE), want, q.dtype)


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
    q, blocks, cu = queries(6, device), everything(6, device), ends(0, 1, 2, 4, device=device)
    o, lse = call(q, cache, cu, route, block_indices=blocks, block_size=PAGE)
    assert o[3].isnan().all()  # it is not that no row reads anything
    quiet = [0, 1, 2, 4, 5]
    assert not o[quiet].any()
    assert (lse[quiet] == -math.inf).all()


@pytest.mark.parametrize("route", ROUTES)
def test_pages_that_do_not_exist_are_not_read(device, route):
    cache = caches.draw([50, 64, 33], ROOM, PAGE, device=device)
    for place, page in (((0, 1), -1), ((1, 0), cache.k.shape[0]), ((1, 3), 2**31 - 1), ((2, 0), -(2**31))):
        cache.block_table[place] = page
    q, blocks, cu = queries(4, device), everything(4, device), ends(0, 0, 2, 0, 3, 0, 4, device=device)[::2]
    got = call(q, cache, cu, route, block_indices=blocks, block_size=PAGE)
    compare(got, caches.oracle(q, cache, cu, block_indices=blocks, block_size=PAGE), q.dtype)


@pytest.mark.parametrize("size", [PAGE, PAGE // 2], ids=["tiles", "no-tiles"])
def test_programs_of_one_tile_look_up_no_page_that_is_not_there(device, size):
    """They look up a page without asking whether there is a key; after the last sequence the table has no row."""
    cache = caches.draw([50, 64], ROOM, PAGE, device=device)
    q, cu = queries(3, device), ends(0, 1, 2, device=device)
    selection = {"block_indices": everything(3, device, 1), "block_size": size}
    with pinned(query_major=tiles.Choice(2, 1, PAGE, 4, 1)):
        got = call(q, cache, cu, **selection)
    compare(got, caches.oracle(q, cache, cu, **selection), q.dtype)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_no_sequences_no_tokens_no_room(device, route, page):
    """Without sequences a page table has no row to look a key up in."""
    for B, T, n in ((0, 2, 4), (2, 0, 4), (2, 2, 0)):
        cache = caches.draw([0] * B, ROOM, page, device=device)
        if page is not None:
            cache = caches.Cache(cache.k, cache.v, cache.cache_seqlens, cache.block_table[:, :n])
        for size in (1, PAGE):  # one block may be one tile
            o, lse = call(
                queries(T, device), cache, ends(*range(B + 1), device=device), route,
                block_indices=everything(T, device, 0), block_size=size,
            )  # fmt: skip
            assert (o.shape, lse.shape) == ((T, 4, 16), (T, 4))
            assert not o.any()
            assert (lse == -math.inf).all()


@pytest.mark.parametrize("B", [130, 131])
def test_more_sequences_than_a_program_looks_at_at_once(device, B):
    """128 are: every second one, then those in between. The last query belongs to none."""
    cache = caches.draw([PAGE] * B, PAGE, None, HKV=1, device=device)
    q, cu = queries(4, device), torch.zeros(B + 1, dtype=torch.int32, device=device)
    for token, seq in enumerate((0, 127, B - 1)):
        cu[seq + 1 :] = token + 1
    blocks = torch.zeros(4, 1, 1, dtype=torch.int32, device=device)
    got = call(q, cache, cu, block_indices=blocks, block_size=PAGE)
    compare(got, caches.oracle(q, cache, cu, block_indices=blocks, block_size=PAGE), q.dtype)


@pytest.mark.parametrize("longest", [None, 1, 3, 2**40])
def test_max_seqlen_q_changes_no_result(device, longest):
    cache = caches.draw([50, 64], ROOM, PAGE, device=device)
    q, cu = queries(4, device), ends(0, 3, 4, device=device)
    selection = {"block_indices": everything(4, device), "block_size": PAGE}
    got = call(q, cache, cu, **selection, max_seqlen_q=longest)
    compare(got, caches.oracle(q, cache, cu, **selection), q.dtype)


# --- graphs and compiled calls ----------------------------------------------------------------------------------------


@graphs
@pytest.mark.parametrize("route", TRITON)
@pytest.mark.parametrize("page", [None, PAGE, 64], ids=["contiguous", "page16", "page64"])
def test_a_graph_is_replayed_with_what_changed_in_place(device, page, route):
    """Ends, lengths, table, selection, queries and cache; without allocation or sync."""
    first, second = (
        caches.draw(lengths, ROOM, page, device=device, seed=i)
        for i, lengths in enumerate(([40, 7, 0, 0], [64, 33, 0, 20]))
    )
    q, cu = queries(12, device), ends(0, 9, 10, 11, 11, device=device)  # a chunk first, then last
    blocks, out = everything(12, device), torch.empty_like(q)
    selection = {"block_indices": blocks, "block_size": PAGE}
    call(q, first, cu, route, **selection, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(q, first, cu, route, **selection, out=out)
    graph.replay()
    compare((out, lse), caches.oracle(q, first, cu, **selection), q.dtype)
    for x, y in zip(
        (first.k, first.v, *first.arguments.values()), (second.k, second.v, *second.arguments.values()), strict=True
    ):
        if x is not None:
            x.copy_(y)
    q.copy_(queries(12, device, seed=9))
    cu.copy_(ends(0, 1, 3, 3, 12, device=device))
    blocks.copy_(blocks.flip(-1))
    allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
    compare((out, lse), caches.oracle(q, second, cu, **selection), q.dtype)


def test_the_operator_is_one_and_compiles(device):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    q, cu = queries(4, device), ends(0, 3, 4, device=device)
    backend = "triton" if device.type == "cuda" else "sdpa"
    selection = {"block_indices": everything(4, device), "block_size": PAGE, "backend": backend}
    arguments = ops._arguments(
        Call(q, cache.k, cache.v, **cache.arguments, **selection, cu_seqlens_q=cu, max_seqlen_q=3)
    )
    torch.library.opcheck(
        torch.ops.nsa.selection_attention.default, arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip

    def serve(q, cu):
        return call(q, cache, cu, "sdpa", **selection, max_seqlen_q=3)

    got = torch.compile(serve, fullgraph=True, backend="eager")(q, cu)
    assert all(torch.equal(a, b) for a, b in zip(got, serve(q, cu), strict=True))


# --- what is said -----------------------------------------------------------------------------------------------------

CU, MAX = "cu_seqlens_q: expected", "max_seqlen_q: expected"
WRONG = {
    "not-packed": ({"q": torch.zeros(2, 2, 4, 16)}, ValueError, "q: expected [T, HQ, D], got shape [2, 2, 4, 16]"),
    "no-ends": (
        {"cu_seqlens_q": None}, ValueError,
        "q: expected [B, S, HQ, D], got shape [4, 4, 16]; packed queries [T, HQ, D] need cu_seqlens_q",
    ),
    "no-ends-and-a-length": (
        {"cu_seqlens_q": None, "cache_seqlens": 5}, ValueError, "got shape [4, 4, 16]; packed queries [T, HQ, D] need",
    ),
    "ends-list": ({"cu_seqlens_q": [0, 3, 4]}, TypeError, f"{CU} a torch.Tensor, got list"),
    "ends-list-and-a-length": (
        {"cu_seqlens_q": [0, 3, 4], "cache_seqlens": 5}, TypeError, f"{CU} a torch.Tensor, got list",
    ),
    "ends-dtype": ({"cu_seqlens_q": torch.zeros(3)}, TypeError, f"{CU} dtype int32, int64, got float32"),
    "ends-2d": ({"cu_seqlens_q": torch.zeros(1, 3).int()}, ValueError, f"{CU} [B + 1] with B >= 0, got shape [1, 3]"),
    "ends-empty": ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, f"{CU} [B + 1] with B >= 0, got shape [0]"),
    "ends-empty-and-a-length": (
        {"cu_seqlens_q": torch.zeros(0).int(), "cache_seqlens": 5}, ValueError, f"{CU} [B + 1] with B >= 0",
    ),
    "too-many-sequences": (
        {"cu_seqlens_q": torch.zeros(16_386).int()}, ValueError,
        "cu_seqlens_q: expected 16384 sequences or fewer with a cache, got 16385",
    ),
    "ends-device": (
        {"cu_seqlens_q": torch.zeros(3, device="meta").int()}, ValueError, f"{CU} device",  # that of q
    ),
    "lengths-of-other-sequences": (
        {"cu_seqlens_q": torch.zeros(4).int()}, ValueError, "cache_seqlens: expected [B] = [3], got [2]",
    ),
    "cache-of-other-sequences": (
        {"cu_seqlens_q": torch.zeros(4).int(), "contiguous": True}, ValueError,
        "k_cache: expected [B, S_max, HKV, D] = [3, 64, 2, 16], got [2, 64, 2, 16]",
    ),
    "table-of-other-sequences": (
        {"block_table": torch.zeros(3, 4).int()}, ValueError, "block_table: expected [B, width] = [2, 4], got [3, 4]",
    ),
    "blocks-of-a-batch": (
        {"block_indices": torch.zeros(2, 2, 2, 1).int()}, ValueError,
        "block_indices: expected [T, HKV, n], got shape [2, 2, 2, 1]",
    ),
    "blocks-of-other-tokens": (
        {"block_indices": torch.zeros(5, 2, 1).int()}, ValueError,
        "block_indices: expected [T, HKV, n] = [4, 2, 1], got [5, 2, 1]",
    ),
    "out": ({"out": torch.zeros(5, 4, 16)}, ValueError, "out: expected [T, HQ, Dv] = [4, 4, 16], got [5, 4, 16]"),
    "longest-float": ({"max_seqlen_q": 3.0}, TypeError, f"{MAX} an int, got float"),
    "longest-bool": ({"max_seqlen_q": True}, TypeError, f"{MAX} an int, got bool"),
    "longest-tensor": ({"max_seqlen_q": torch.tensor(3)}, TypeError, f"{MAX} an int, got Tensor"),
    "longest-negative": ({"max_seqlen_q": -1}, ValueError, f"{MAX} an int >= 0, got -1"),
    "longest-of-a-batch": (
        {"cu_seqlens_q": None, "q": torch.zeros(2, 2, 4, 16), "max_seqlen_q": 2}, ValueError,
        f"{MAX} None without cu_seqlens_q, got 2",
    ),
    "cu_seqlens": ({"cu_seqlens": torch.zeros(3).int()}, TypeError, "Did you mean 'cu_seqlens_q'?"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_say_what_was_expected(device, wrong):
    change, kind, text = WRONG[wrong]
    change = {name: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x for name, x in change.items()}
    cache = caches.draw([40, 64], ROOM, None if change.pop("contiguous", False) else PAGE, device=device)
    q, cu = change.pop("q", queries(4, device)), ends(0, 3, 4, device=device)
    right = {"block_indices": everything(4, device), "block_size": PAGE}
    for _ in range(2):  # a wrong call is not remembered as a right one
        with pytest.raises(kind, match=re.escape(text)):
            call(q, cache, cu, "sdpa", **(right | change))


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_an_int_is_the_length_of_all_sequences(device, page):
    cache = caches.draw([37] * 3, ROOM, page, device=device)
    q, cu = queries(4, device), ends(0, 2, 2, 4, device=device)
    selection = {"block_indices": everything(4, device), "block_size": PAGE}
    want = call(q, cache, cu, "sdpa", **selection)
    got = call(q, cache, cu, "sdpa", **selection, cache_seqlens=37)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_debug_cache_reports_ends_and_short_lengths(device, caplog):
    cache = caches.draw([40, 2, 20, 0], ROOM, PAGE, device=device)
    q, blocks = queries(8, device), everything(8, device)
    with caplog.at_level(logging.WARNING, "nsa"), nsa.configure(debug_cache=True):
        call(q, cache, ends(0, 2, 5, 6, 7, device=device), "sdpa", block_indices=blocks, block_size=PAGE)
        assert caplog.messages == [
            "cache_seqlens: expected the number of queries or more, or queries see nothing, got 2 of sequence 1"
        ]
        caplog.clear()
        call(q, cache, ends(1, 5, 3, 4, 9, device=device), "sdpa", block_indices=blocks, block_size=PAGE)
        assert caplog.messages == [
            "cu_seqlens_q: expected 0 first, then ends in rising order up to 8, got 1 at [0], 3 at [2], 9 at [4]"
        ]
        caplog.clear()
        call(q, cache, ends(0, 2, 4, 6, 7, device=device), "sdpa", block_indices=blocks, block_size=PAGE)
        assert not caplog.messages
