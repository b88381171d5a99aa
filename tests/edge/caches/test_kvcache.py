"""Caches of a live server: lengths and tables that are wrong, stale or change under a graph; what is refused."""

import logging
import math
import re
import threading

import pytest
import torch

import nsa
from nsa import ops
from nsa.call import Call
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...conftest import compare
from .cached_calls import BACKENDS, PAGE, ROOM, call, everything, queries

graphs = pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("size", [8, 16, 32])
def test_pages_that_do_not_exist_are_not_read(device, backend, size):
    """In the middle of a sequence, too: their keys are as if nobody had selected them."""
    cache = caches.draw([50, 64, 33], ROOM, PAGE, device=device)
    pages = cache.k.shape[0]
    for place, page in (((0, 1), -1), ((1, 0), pages), ((1, 3), 2**31 - 1), ((2, 0), -(2**31)), ((2, 1), pages + 7)):
        cache.block_table[place] = page
    q = queries(3, 2, device=device)
    blocks = everything(3, 2, device, n=ROOM // size)
    got = call(q, cache, backend, block_indices=blocks, block_size=size)
    compare(got, caches.oracle(q, cache, block_indices=blocks, block_size=size), q.dtype)


def test_pages_beyond_32_bits(device, backend):
    cache = caches.draw([50, 64], ROOM, PAGE, index=torch.int64, device=device)
    cache.block_table[0, 1], cache.block_table[1, 2] = 2**62, -(2**62)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    got = call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    compare(got, caches.oracle(q, cache, block_indices=blocks, block_size=PAGE), q.dtype)


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_lengths_that_cannot_be(device, backend, page, index):
    """Negative ones are 0, those beyond the cache, or the table, as long as that."""
    cache = caches.draw([ROOM] * 4, ROOM, page, index=index, device=device)
    far = torch.iinfo(index).max
    cache.cache_seqlens.copy_(torch.tensor([-1, -far, ROOM + 1, far]))
    q, blocks = queries(4, 3, device=device), everything(4, 3, device)
    o, lse = got = call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    compare(got, caches.oracle(q, cache, block_indices=blocks, block_size=PAGE), q.dtype)
    assert not o[:2].any()
    assert (lse[:2] == -math.inf).all()


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_what_lies_past_a_length_is_never_used(device, backend, page):
    """It is NaN in `caches.draw`; without causality, and by spans that reach for it, too."""
    cache = caches.draw([1, 17, 0, 63], ROOM, page, device=device)
    q = queries(4, 2, device=device)
    spans = (
        torch.tensor([[0, 2**31 - 1], [-5, 40]], dtype=torch.int32, device=device).expand(4, 2, 2, 2, 2).contiguous()
    )
    for causal in (True, False):
        got = call(q, cache, backend, ranges=spans, causal=causal)
        compare(got, caches.oracle(q, cache, ranges=spans, causal=causal), q.dtype)


def test_a_page_may_serve_several_sequences(device, backend):
    """A prompt in common is stored once."""
    cache = caches.draw([40, 55, 64], ROOM, PAGE, device=device)
    cache.block_table[1:, :2] = cache.block_table[0, :2]
    q, blocks = queries(3, device=device), everything(3, 1, device)
    got = call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    compare(got, caches.oracle(q, cache, block_indices=blocks, block_size=PAGE), q.dtype)


def test_caches_of_any_strides(device, backend):
    """Heads before keys, and one cache for K and V as servers keep them."""
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    both = torch.stack((cache.k, cache.v), 1)  # [pages, 2, page, HKV, D]
    q, blocks = queries(2, device=device), everything(2, 1, device)
    want = call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (both[:, 0], both[:, 1]))
    for keys, values in ((both[:, 0], both[:, 1]), (k, v)):
        other = caches.Cache(keys, values, cache.cache_seqlens, cache.block_table)
        got = call(q, other, backend, block_indices=blocks, block_size=PAGE)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_sequences_no_queries_no_room(device, backend):
    for B, S, page in ((0, 1, PAGE), (2, 0, None), (2, 1, PAGE)):
        cache = caches.draw([0] * B, ROOM, page, device=device)
        if page is not None:
            cache = caches.Cache(cache.k, cache.v, cache.cache_seqlens, cache.block_table[:, :0])
        for n, size in ((ROOM // PAGE, 8), (0, PAGE)):  # one block may be one tile
            blocks = everything(B, S, device, n)
            o, lse = call(queries(B, S, device=device), cache, backend, block_indices=blocks, block_size=size)
            assert (o.shape, lse.shape) == ((B, S, 4, 16), (B, S, 4))
            assert not o.any()
            assert (lse == -math.inf).all()


def test_a_pool_without_pages(device, backend):
    """Whatever lengths and table say."""
    q, blocks = queries(2, device=device), everything(2, 1, device)
    pool = torch.empty(0, PAGE, 2, 16, device=device)
    lengths = torch.tensor([40, 64], dtype=torch.int32, device=device)
    cache = caches.Cache(pool, pool, lengths, torch.zeros(2, ROOM // PAGE, dtype=torch.int32, device=device))
    o, lse = call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    assert not o.any()
    assert (lse == -math.inf).all()


def test_packing_copies_no_pool(device, monkeypatch):
    """Where K and V are halves of one tensor, packed SDPA gathers from it as it lies."""
    from nsa.plain import spans

    cache = caches.draw([40, 64], 4 * ROOM, PAGE, device=device)
    both = torch.stack((cache.k, cache.v), 1)  # [pages, 2, page, HKV, D]
    seen, take = [], spans.take_rows
    monkeypatch.setattr(spans, "take_rows", lambda x, *rest: seen.append(x) or take(x, *rest))
    q, blocks = queries(2, device=device), everything(2, 1, device, n=1)
    want = call(q, cache, "sdpa", block_indices=blocks, block_size=PAGE)
    seen.clear()
    halves = caches.Cache(both[:, 0], both[:, 1], cache.cache_seqlens, cache.block_table)
    got = call(q, halves, "sdpa", block_indices=blocks, block_size=PAGE)
    assert {x.untyped_storage().data_ptr() for x in seen} == {both.untyped_storage().data_ptr()}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_packing_copies_of_a_shared_pool_its_own_part(device, monkeypatch):
    """A row of zeros for padding is appended to a copy of the keys, not of all layers' that lie between them."""
    from nsa.plain import spans

    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    pool = torch.stack((cache.k, cache.v, cache.k, cache.v), 1)  # [pages, layers and K or V, page, HKV, D]
    seen, take = [], spans.take_rows
    monkeypatch.setattr(spans, "take_rows", lambda x, *rest: seen.append(x) or take(x, *rest))
    q, blocks = queries(2, 32, device=device), everything(2, 32, device)
    want = call(q, cache, "sdpa", block_indices=blocks, block_size=PAGE)
    seen.clear()
    layer = caches.Cache(pool[:, 2], pool[:, 3], cache.cache_seqlens, cache.block_table)
    got = call(q, layer, "sdpa", block_indices=blocks, block_size=PAGE)
    assert {x.untyped_storage().nbytes() for x in seen} == {(cache.k[..., 0].numel() + 1) * 16 * 4}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_casts_nothing(device, backend):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    q, selection = queries(2, device=device), {"block_indices": everything(2, 1, device), "block_size": PAGE}
    want = call(q, cache, backend, **selection)
    with torch.autocast(device.type, torch.bfloat16):
        got = call(q, cache, backend, **selection)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_auto_falls_back_and_says_so(device, fresh_routes):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    got = {}
    for min_L in (0, 10**6):
        with nsa.configure(sel_triton_min_L=min_L):
            got[min_L] = call(q, cache, "auto", block_indices=blocks, block_size=PAGE)
    assert {record.route for record in nsa.routes()} == {"query_major", "sdpa"}
    torch.testing.assert_close(got[0], got[10**6])


def test_a_broken_kernel_for_pages_does_not_speak_of_other_caches(device, fresh_routes, monkeypatch):
    from nsa.kernels.query_major import plan as query_major

    real = query_major.forward

    def forward(launch, call, route):
        if call.block_table is not None:
            raise RuntimeError("PassManager::run failed")
        return real(launch, call, route)

    monkeypatch.setattr(query_major, "forward", forward)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    with nsa.configure(sel_triton_min_L=0):
        for page in (PAGE, None, PAGE):
            cache = caches.draw([40, 64], ROOM, page, device=device)
            got = call(q, cache, "auto", block_indices=blocks, block_size=PAGE)
            compare(got, caches.oracle(q, cache, block_indices=blocks, block_size=PAGE), q.dtype)
    assert {(record.route, record.calls) for record in nsa.routes()} == {("sdpa", 2), ("query_major", 1)}


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_threads(device, page):
    """Eight at once, each its own lengths: the answers are those of one after the other."""
    cache = caches.draw([64] * 2, ROOM, page, device=device)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    lengths = [torch.tensor([8 * i + 1, 64 - 8 * i], dtype=torch.int32, device=device) for i in range(8)]

    # Triton's interpreter serves one thread only.
    backend = "triton" if device.type == "cuda" else "sdpa"

    def serve(i):
        return call(q, cache, backend, block_indices=blocks, block_size=PAGE, cache_seqlens=lengths[i])

    want, got = [serve(i) for i in range(8)], [None] * 8

    def work(i):
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            got[i] = serve(i)
            if stream is not None:
                stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))


@graphs
@pytest.mark.parametrize("backend", ["triton", "key_major"])
@pytest.mark.parametrize("page", [None, PAGE, 64], ids=["contiguous", "page16", "page64"])
def test_a_graph_is_replayed_with_what_changed_in_place(device, page, backend):
    """Selection, lengths, table, queries and cache; without allocation, sync or compiling."""
    first, second = (
        caches.draw(lengths, ROOM, page, device=device, seed=i) for i, lengths in enumerate(([40, 7], [64, 0]))
    )
    q = queries(2, device=device)
    blocks, out = everything(2, 1, device), torch.empty_like(q)
    selection = {"block_indices": blocks, "block_size": PAGE}
    call(q, first, backend, **selection, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(q, first, backend, **selection, out=out)
    graph.replay()
    compare((out, lse), caches.oracle(q, first, **selection), q.dtype)
    for x, y in zip(
        (first.k, first.v, *first.arguments.values()), (second.k, second.v, *second.arguments.values()), strict=True
    ):
        if x is not None:
            x.copy_(y)
    q.copy_(queries(2, seed=9, device=device))
    blocks.copy_(blocks.flip(-1))
    allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
    compare((out, lse), caches.oracle(q, second, **selection), q.dtype)


def test_debug_cache_reports_what_is_wrong_by_its_row(device, caplog):
    cache = caches.draw([40, 64, 20, 20], ROOM, PAGE, device=device)
    pages = cache.k.shape[0]
    cache.block_table[0, 2], cache.block_table[1, 0] = -3, pages
    cache.cache_seqlens[2:] = torch.tensor([65, 1])
    q, blocks = queries(4, 2, device=device), everything(4, 2, device)
    with caplog.at_level(logging.WARNING, "nsa"):
        call(q, cache, "sdpa", block_indices=blocks, block_size=PAGE)
        assert not caplog.messages
        with nsa.configure(debug_cache=True):
            call(q, cache, "sdpa", block_indices=blocks, block_size=PAGE)
    lengths, short, table = caplog.messages
    assert lengths == "cache_seqlens: expected 0 to 64, got 65 of sequence 2"
    assert short == "cache_seqlens: expected 2 or more, or queries see nothing, got 1 of sequence 3"
    assert table.startswith(f"block_table: expected pages 0 to {pages - 1}, got -3 at [0, 2], {pages} at [1, 0], ")
    caplog.clear()
    cache.cache_seqlens[2] = 20
    with nsa.configure(debug_cache=True):
        call(q, cache, "sdpa", block_indices=blocks, block_size=PAGE, causal=False)
    assert [text.split(":")[0] for text in caplog.messages] == ["block_table"]  # all queries see the one key there is
    caplog.clear()
    with nsa.configure(debug_cache=True):
        call(queries(1, device=device), caches.draw([64], ROOM, PAGE, device=device), "sdpa",
             block_indices=everything(1, 1, device), block_size=PAGE)  # fmt: skip
    assert not caplog.messages


# What differs from a call that is right, and what is said.
LENGTHS, TABLE = "cache_seqlens: expected", "block_table: expected"
WRONG = {
    "page-size": ({"page_size": 32}, ValueError, "page_size: expected shape[1] of k_cache ["),
    "page-size-of-none": (
        {"block_table": None, "page_size": 16, "contiguous": True}, ValueError, "None without block_table, got 16",
    ),
    "lengths-shape": ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, f"{LENGTHS} [B] = [2]"),
    "lengths-dtype": ({"cache_seqlens": torch.zeros(2)}, TypeError, "cache_seqlens: expected dtype int32, int64"),
    "lengths-forgotten": ({"cache_seqlens": None}, TypeError, f"{LENGTHS} a torch.Tensor or an int, got NoneType"),
    "scale": ({"scale": "x"}, TypeError, "scale: expected a number or None, got str"),
    "lengths-list": ({"cache_seqlens": [5, 5]}, TypeError, f"{LENGTHS} a torch.Tensor or an int, got list"),
    "length-bool": ({"cache_seqlens": True}, TypeError, f"{LENGTHS} a torch.Tensor or an int, got bool"),
    "length-float": ({"cache_seqlens": 5.0}, TypeError, f"{LENGTHS} a torch.Tensor or an int, got float"),
    "length-negative": ({"cache_seqlens": -1}, ValueError, f"{LENGTHS} an int from 0 to {ROOM}, got -1"),
    "length-beyond-pages": ({"cache_seqlens": ROOM + 1}, ValueError, f"{LENGTHS} an int from 0 to {ROOM}, got 65"),
    "length-beyond-narrow-table": (
        {"cache_seqlens": PAGE + 1, "block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError,
        f"{LENGTHS} an int from 0 to {PAGE}, got {PAGE + 1}",
    ),
    "length-beyond": (
        {"cache_seqlens": ROOM + 1, "contiguous": True}, ValueError,
        f"{LENGTHS} an int from 0 to {ROOM}, got {ROOM + 1}",
    ),
    "length-and-table-1d": (
        {"cache_seqlens": 5, "block_table": torch.zeros(2, dtype=torch.int32)}, ValueError,
        "block_table: expected [B, width], got shape [2]",
    ),
    "length-and-table-list": (
        {"cache_seqlens": 5, "block_table": [[0], [1]]}, TypeError, "block_table: expected a torch.Tensor, got list",
    ),
    "length-and-table-shape": (
        {"cache_seqlens": 5, "block_table": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, f"{TABLE} [B, width]",
    ),
    "table-shape": ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, f"{TABLE} [B, width]"),
    "table-dtype": ({"block_table": torch.zeros(2, 4)}, TypeError, "block_table: expected dtype"),
    "table-1d": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table: expected [B, width]"),
    "no-table": ({"block_table": None}, ValueError, "k_cache: expected [B, S_max, HKV, D]"),
    "neither": ({"block_indices": None, "block_size": None}, ValueError, "exactly one of ranges and block_indices"),
    "backend": ({"backend": "fast"}, ValueError, "backend: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_say_what_was_expected(device, wrong):
    change, kind, text = WRONG[wrong]
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    cache = caches.draw([40, 64], ROOM, None if change.pop("contiguous", False) else PAGE, device=device)
    right = {"block_indices": everything(2, 1, device), "block_size": PAGE, "backend": "sdpa"}
    with pytest.raises(kind, match=re.escape(text)):
        call(queries(2, device=device), cache, **(right | change))


def test_errors_call_caches_what_the_caller_does(device):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    selection = {"block_indices": everything(2, 1, device), "block_size": PAGE}
    for k, v, said in (
        (cache.k, cache.v.double(), "v_cache: expected dtype float32"),
        (cache.k[0], cache.v, "k_cache: expected [num_pages, page_size, HKV, D]"),
        (cache.k, cache.v[:, 1:], "v_cache: expected [num_pages, page_size, HKV, Dv]"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            call(queries(2, device=device), caches.Cache(k, v, cache.cache_seqlens, cache.block_table), **selection)


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
@pytest.mark.parametrize("length", [0, 1, 37, ROOM])
def test_an_int_is_the_length_of_all_sequences(device, backend, page, length):
    cache = caches.draw([length] * 3, ROOM, page, device=device)
    q, selection = queries(3, 2, device=device), {"block_indices": everything(3, 2, device), "block_size": PAGE}
    want = call(q, cache, backend, **selection)
    got = call(q, cache, backend, **selection, cache_seqlens=length)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_int_with_shapes_that_are_wrong(device):
    """The length is checked first, but the error is about what is wrong."""
    x, blocks = torch.zeros(2, 4, 2, 16, device=device), torch.zeros(2, 4, 2, 1, dtype=torch.int32, device=device)
    for q, k, text in (
        (x[0], x, "q: expected [B, S, HQ, D], got shape [4, 2, 16]"),
        (x, x[0], "k_cache: expected [B, S_max, HKV, D], got shape [4, 2, 16]"),
        (x[:1], x, "k_cache: expected [B, S_max, HKV, D] = [1, 4, 2, 16], got [2, 4, 2, 16]"),
        (1.0, x, "q: expected a torch.Tensor, got float"),
        (x, None, "k_cache: expected a torch.Tensor, got NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            nsa.selection_attention_with_kvcache(q, k, x, cache_seqlens=3, block_indices=blocks, block_size=4)


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_compiled_calls_take_an_int(device, page):
    """Other lengths compile once more, to a symbol, and an int out of range is refused in a compiled call, too."""
    cache = caches.draw([ROOM] * 2, ROOM, page, device=device)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    backend = "triton" if device.type == "cuda" else "sdpa"
    compiles = []

    def count(graph, _):
        compiles.append(graph)
        return graph

    def serve(q, length):
        return call(q, cache, backend, block_indices=blocks, block_size=PAGE, cache_seqlens=length)

    torch._dynamo.reset()
    compiled = torch.compile(serve, fullgraph=True, backend=count)
    for length in (40, 41, 42, 17, ROOM):
        assert all(torch.equal(a, b) for a, b in zip(compiled(q, length), serve(q, length), strict=True))
    assert len(compiles) == 2
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="cache_seqlens: expected an int from 0"):
        torch.compile(serve, backend="eager")(q, ROOM + 1)


@graphs
@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_a_graph_keeps_the_int_that_it_was_captured_with(device, page):
    """Neither the call nor its capture syncs."""
    cache = caches.draw([40, 40], ROOM, page, device=device)
    q, selection = queries(2, device=device), {"block_indices": everything(2, 1, device), "block_size": PAGE}
    want = call(q, cache, **selection)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call(q, cache, **selection, cache_seqlens=40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q, cache, **selection, cache_seqlens=40)
    for _ in range(2):
        graph.replay()
        for result in (got, captured):
            assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))


def test_gradients_and_transforms_are_refused(device, backend):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    blocks = everything(2, 1, device)
    q = queries(2, device=device).requires_grad_()
    selection = {"block_indices": blocks, "block_size": PAGE}
    o, lse = call(q, cache, backend, **selection)  # of a model whose weights require grad, say
    for result in (o, lse):
        with pytest.raises(RuntimeError, match="selection_attention_with_kvcache has no gradient"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert torch.equal(call(q, cache, backend, **selection)[0], o)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda q: call(q, cache, backend, **selection)[0])(queries(2, device=device)[None])
    with pytest.raises(RuntimeError, match="has no gradient|no rule for transforms"):
        torch.func.grad(lambda q: call(q, cache, backend, **selection)[0].sum())(q.detach())


@pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
def test_the_operator_is_one_and_compiles(device, page):
    cache = caches.draw([40, 64], ROOM, page, device=device)
    q, blocks = queries(2, device=device), everything(2, 1, device)
    backend = "triton" if device.type == "cuda" else "sdpa"
    selection = {"block_indices": blocks, "block_size": PAGE, "backend": backend}
    arguments = ops._arguments(Call(q, cache.k, cache.v, **cache.arguments, **selection))
    torch.library.opcheck(
        torch.ops.nsa.selection_attention.default, arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip
    compiled = torch.compile(lambda q: call(q, cache, backend, block_indices=blocks, block_size=PAGE), fullgraph=True)
    got, want = compiled(q), call(q, cache, backend, block_indices=blocks, block_size=PAGE)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compiled_calls_report_garbage_and_check_out(device, caplog):
    """`torch.compile` sees an operator, behind which lengths are at hand as ever."""
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    cache.cache_seqlens[1] = ROOM + 1
    q, blocks = queries(2, device=device), everything(2, 1, device)
    backend = "triton" if device.type == "cuda" else "sdpa"

    @torch.compile(fullgraph=True)
    def serve(q, out):
        return call(q, cache, backend, block_indices=blocks, block_size=PAGE, out=out)[0]

    with caplog.at_level(logging.WARNING, "nsa"), nsa.configure(debug_cache=True):
        got = serve(q, torch.empty_like(q))
    assert caplog.messages == [f"cache_seqlens: expected 0 to {ROOM}, got {ROOM + 1} of sequence 1"]
    assert torch.equal(got, call(q, cache, backend, block_indices=blocks, block_size=PAGE)[0])
    for wrong in (q.new_empty(2, 2, 4, 16), q.double()):
        with pytest.raises(Exception, match="out: expected "):
            serve(q, wrong)


def test_a_table_with_room_for_more_keys_than_are_counted(device):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    table = cache.block_table[:, :1].expand(2, 2**27)
    with pytest.raises(ValueError, match=re.escape("block_table: expected room for 1073741568 keys or fewer")):
        call(queries(2, device=device), cache, block_table=table, block_indices=everything(2, 1, device), block_size=8)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_no_cache_is_named_without_gradients_too(device, name):
    given = {"k_cache": torch.zeros(1, 4, 1, 16), "v_cache": torch.zeros(1, 4, 1, 16)} | {name: None}
    lengths, blocks = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with torch.no_grad(), pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor, got NoneType"):
        nsa.selection_attention_with_kvcache(
            torch.zeros(1, 1, 1, 16), **given, cache_seqlens=lengths, block_indices=blocks, block_size=4
        )


def test_page_size_of_what_is_no_cache():
    x = torch.zeros(4)
    with torch.no_grad(), pytest.raises(ValueError, match="page_size: expected shape.1. of k_cache .4., got 16"):
        nsa.selection_attention_with_kvcache(x, x, x, cache_seqlens=x, block_table=x, page_size=16)
