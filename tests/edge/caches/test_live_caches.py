"""Caches of a live server: lengths and tables that are wrong, stale or change under a graph."""

import logging
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nsa
from nsa import ops
from nsa.call import Call
from nsa.kernels import pinned
from nsa.kernels.query_major import tiles
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

from ...conftest import bitwise, compare
from .cached_calls import BACKENDS, PAGE, ROOM, agrees, call, ends, everything, queries

graphs = pytest.mark.skipif(current_lane() != "gpu", reason="graphs need a GPU")
LAYOUTS = pytest.mark.parametrize("page", [None, PAGE], ids=["contiguous", "paged"])
SERVED_ANYWHERE = "triton" if current_lane() == "gpu" else "sdpa"


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@LAYOUTS
def test_no_sequences_no_queries_no_room(device, backend, page, packed):
    """Without sequences a page table has no row to look a key up in. One block may be one tile."""
    for B, S, width in ((0, 1, 4), (0, 2, 4), (2, 0, 4), (2, 1, 0)):
        cache = caches.draw([0] * B, ROOM, page, device=device)
        if page is not None:
            cache = caches.Cache(cache.k, cache.v, cache.cache_seqlens, cache.block_table[:, :width])
        lead = (S,) if packed else (B, S)
        cu = ends(*(min(i, S) for i in range(B + 1)), device=device) if packed else None
        for n, size in ((3, 8), (0, PAGE), (0, 1)):
            selection = everything(*lead, device=device, n=n, size=size)
            o, lse = call(queries(*lead, device=device), cache, backend, cu, **selection)
            assert (o.shape, lse.shape) == ((*lead, 4, 16), (*lead, 4))
            assert not o.any()
            assert (lse == -math.inf).all()


def test_a_pool_without_pages(device, backend):
    """Whatever lengths and table say."""
    pool = torch.empty(0, PAGE, 2, 16, device=device)
    lengths = torch.tensor([40, 64], dtype=torch.int32, device=device)
    cache = caches.Cache(pool, pool, lengths, torch.zeros(2, ROOM // PAGE, dtype=torch.int32, device=device))
    o, lse = call(queries(2, 1, device=device), cache, backend, **everything(2, 1, device=device))
    assert not o.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("layers", [1, 2])
def test_packing_copies_no_more_than_its_own_keys(device, monkeypatch, layers):
    """Packed SDPA gathers a few keys from a pool as it lies.

    With many queries it copies the keys, to append a row of zeros for padding: its own, not all layers' that lie
    between them.
    """
    from nsa.plain import spans

    cache = caches.draw([40, 64], ROOM if layers > 1 else 4 * ROOM, PAGE, device=device)
    pool = torch.stack((cache.k, cache.v) * layers, 1)  # [pages, layers and K or V, page, HKV, D]
    seen, take = [], spans.take_rows
    monkeypatch.setattr(spans, "take_rows", lambda x, *rest: seen.append(x) or take(x, *rest))
    S, n = (1, 1) if layers == 1 else (32, ROOM // PAGE)
    q, selection = queries(2, S, device=device), everything(2, S, device=device, n=n)
    want = call(q, cache, "sdpa", **selection)
    seen.clear()
    layer = caches.Cache(pool[:, -2], pool[:, -1], cache.cache_seqlens, cache.block_table)
    assert bitwise(call(q, layer, "sdpa", **selection), want)
    if layers == 1:
        assert {x.untyped_storage().data_ptr() for x in seen} == {pool.untyped_storage().data_ptr()}
    else:
        assert {x.untyped_storage().nbytes() for x in seen} == {(cache.k[..., 0].numel() + 1) * 16 * 4}


def test_autocast_casts_nothing(device, backend):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)
    want = call(q, cache, backend, **selection)
    with torch.autocast(device.type, torch.bfloat16):
        assert bitwise(call(q, cache, backend, **selection), want)


def test_a_broken_kernel_for_pages_does_not_speak_of_other_caches(device, fresh_routes, monkeypatch):
    from nsa.kernels.query_major import plan as query_major

    real = query_major.forward

    def forward(launch, call, route):
        if call.block_table is not None:
            raise RuntimeError("PassManager::run failed")
        return real(launch, call, route)

    monkeypatch.setattr(query_major, "forward", forward)
    with nsa.configure(sel_triton_min_L=0):
        for page in (PAGE, None, PAGE):
            cache = caches.draw([40, 64], ROOM, page, device=device)
            agrees(queries(2, 1, device=device), cache, "auto", **everything(2, 1, device=device))
    assert {(record.route, record.calls) for record in nsa.routes()} == {("sdpa", 2), ("query_major", 1)}


@LAYOUTS
def test_threads(device, page):
    """Eight at once, each its own lengths: the answers are those of one after the other."""
    cache = caches.draw([64] * 2, ROOM, page, device=device)
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)
    lengths = [torch.tensor([8 * i + 1, 64 - 8 * i], dtype=torch.int32, device=device) for i in range(8)]

    def serve(i):  # Triton's interpreter serves one thread only
        return call(q, cache, SERVED_ANYWHERE, **selection, cache_seqlens=lengths[i])

    want = [serve(i) for i in range(8)]

    def on_a_stream(i):
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            got = serve(i)
            if stream is not None:
                stream.synchronize()
        return got

    with ThreadPoolExecutor(8) as threads:
        assert all(map(bitwise, threads.map(on_a_stream, range(8)), want))


@graphs
@pytest.mark.parametrize("backend", ["query_major", "key_major"])
@pytest.mark.parametrize("page", [None, PAGE, 64], ids=["contiguous", "page16", "page64"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_graph_is_replayed_with_what_changed_in_place(device, page, backend, packed):
    """Selection, lengths, table, queries, their ends and cache, all overwritten: no allocation, sync or compiling. Of
    packed queries a chunk comes first, then last.
    """
    lengths = ([40, 7, 0, 0], [64, 33, 0, 20]) if packed else ([40, 7], [64, 0])
    first, second = (caches.draw(some, ROOM, page, device=device, seed=i) for i, some in enumerate(lengths))
    lead = (12,) if packed else (2, 1)
    q, other_q = (queries(*lead, seed=seed, device=device) for seed in (5, 9))
    selection = everything(*lead, device=device)
    values = ((0, 9, 10, 11, 11), (0, 1, 3, 3, 12)) if packed else ()
    cu, other_cu = (ends(*some, device=device) for some in values) if packed else (None, None)
    out = torch.empty_like(q)
    call(q, first, backend, cu, **selection, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(q, first, backend, cu, **selection, out=out)
    graph.replay()
    compare((out, lse), caches.oracle(q, first, cu, **selection), q.dtype)
    for x, y in zip(
        (first.k, first.v, *first.arguments.values()), (second.k, second.v, *second.arguments.values()), strict=True
    ):
        if x is not None:
            x.copy_(y)
    q.copy_(other_q)
    if cu is not None:
        cu.copy_(other_cu)
    selection["block_indices"].copy_(selection["block_indices"].flip(-1))
    allocated = torch.cuda.memory_stats(q.device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(q.device)["allocation.all.allocated"] == allocated
    compare((out, lse), caches.oracle(q, second, cu, **selection), q.dtype)


def test_debug_cache_reports_what_is_wrong_by_its_row(device, caplog):
    cache = caches.draw([40, 64, 20, 20], ROOM, PAGE, device=device)
    pages = cache.k.shape[0]
    cache.block_table[0, 2], cache.block_table[1, 0] = -3, pages
    cache.cache_seqlens[2:] = torch.tensor([65, 1])
    q, selection = queries(4, 2, device=device), everything(4, 2, device=device)
    with caplog.at_level(logging.WARNING, "nsa"):
        call(q, cache, "sdpa", **selection)
        assert not caplog.messages
        with nsa.configure(debug_cache=True):
            call(q, cache, "sdpa", **selection)
    lengths, short, table = caplog.messages
    assert lengths == "cache_seqlens: expected 0 to 64, got 65 of sequence 2"
    assert short == "cache_seqlens: expected 2 or more, or queries see nothing, got 1 of sequence 3"
    assert table.startswith(f"block_table: expected pages 0 to {pages - 1}, got -3 at [0, 2], {pages} at [1, 0], ")
    caplog.clear()
    cache.cache_seqlens[2] = 20
    with nsa.configure(debug_cache=True):
        call(q, cache, "sdpa", **selection, causal=False)
    assert [text.split(":")[0] for text in caplog.messages] == ["block_table"]  # all queries see the one key there is
    caplog.clear()
    cache = caches.draw([64], ROOM, PAGE, device=device)
    with nsa.configure(debug_cache=True):
        call(queries(1, 1, device=device), cache, "sdpa", **everything(1, 1, device=device))
    assert not caplog.messages


@LAYOUTS
@pytest.mark.parametrize("length", [0, 1, 37, ROOM])
def test_an_int_is_the_length_of_all_sequences(device, backend, page, length):
    cache = caches.draw([length] * 3, ROOM, page, device=device)
    q, selection = queries(3, 1, device=device), everything(3, 1, device=device)
    want = call(q, cache, backend, **selection)
    assert bitwise(call(q, cache, backend, **selection, cache_seqlens=length), want)
    if backend == "sdpa":
        packed = q[:, 0], cache, backend, ends(0, 2, 2, 3, device=device)
        selection = everything(3, device=device)
        assert bitwise(call(*packed, **selection, cache_seqlens=length), call(*packed, **selection))


@LAYOUTS
def test_compiled_calls_take_an_int(device, page):
    """Other lengths compile once more, to a symbol, and an int out of range is refused in a compiled call, too."""
    cache = caches.draw([ROOM] * 2, ROOM, page, device=device)
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)
    compiles = []

    def count(graph, _):
        compiles.append(graph)
        return graph

    def serve(q, length):
        return call(q, cache, SERVED_ANYWHERE, **selection, cache_seqlens=length)

    torch._dynamo.reset()
    compiled = torch.compile(serve, fullgraph=True, backend=count)
    for length in (40, 41, 42, 17, ROOM):
        assert bitwise(compiled(q, length), serve(q, length))
    assert len(compiles) == 2
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="cache_seqlens: expected an int from 0"):
        torch.compile(serve, backend="eager")(q, ROOM + 1)


@graphs
@LAYOUTS
def test_a_graph_keeps_the_int_that_it_was_captured_with(device, page):
    """Neither the call nor its capture syncs."""
    cache = caches.draw([40, 40], ROOM, page, device=device)
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)
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
        assert all(bitwise(result, want) for result in (got, captured))


def test_gradients_and_transforms_are_refused(device, backend):
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    q, selection = queries(2, 1, device=device).requires_grad_(), everything(2, 1, device=device)
    o, lse = call(q, cache, backend, **selection)  # of a model whose weights require grad, say
    for result in (o, lse):
        with pytest.raises(RuntimeError, match="selection_attention_with_kvcache has no gradient"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert torch.equal(call(q, cache, backend, **selection)[0], o)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda q: call(q, cache, backend, **selection)[0])(q.detach()[None])
    with pytest.raises(RuntimeError, match="has no gradient|no rule for transforms"):
        torch.func.grad(lambda q: call(q, cache, backend, **selection)[0].sum())(q.detach())


@pytest.mark.parametrize("kind", ["contiguous", "paged", "packed"])
def test_the_operator_is_one_and_compiles(device, kind):
    cache = caches.draw([40, 64], ROOM, None if kind == "contiguous" else PAGE, device=device)
    lead, more = ((2, 1), {}) if kind != "packed" else ((4,), {"cu_seqlens_q": ends(0, 3, 4, device=device)})
    more |= {"max_seqlen_q": 3} if more else {}
    q, selection = queries(*lead, device=device), everything(*lead, device=device) | more
    arguments = ops._arguments(Call(q, cache.k, cache.v, **cache.arguments, **selection, backend=SERVED_ANYWHERE))
    torch.library.opcheck(
        torch.ops.nsa.selection_attention.default, arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip

    def serve(q):
        return call(q, cache, SERVED_ANYWHERE, **selection)

    compiler = "inductor" if device.type == "cuda" else "aot_eager"  # it generates code, in seconds of a CPU
    assert bitwise(torch.compile(serve, fullgraph=True, backend=compiler)(q), serve(q))


def test_compiled_calls_report_garbage_and_check_out(device, caplog):
    """`torch.compile` sees an operator, behind which lengths are at hand as ever."""
    cache = caches.draw([40, 64], ROOM, PAGE, device=device)
    cache.cache_seqlens[1] = ROOM + 1
    q, selection = queries(2, 1, device=device), everything(2, 1, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def serve(q, out):
        return call(q, cache, SERVED_ANYWHERE, **selection, out=out)[0]

    with caplog.at_level(logging.WARNING, "nsa"), nsa.configure(debug_cache=True):
        got = serve(q, torch.empty_like(q))
    assert caplog.messages == [f"cache_seqlens: expected 0 to {ROOM}, got {ROOM + 1} of sequence 1"]
    assert torch.equal(got, call(q, cache, SERVED_ANYWHERE, **selection)[0])
    for wrong in (q.new_empty(2, 2, 4, 16), q.double()):
        with pytest.raises(Exception, match="out: expected "):
            serve(q, wrong)


# --- packed queries ---------------------------------------------------------------------------------------------------


@LAYOUTS
def test_rows_of_nothing_do_not_touch_the_cache(device, backend, page):
    """Every key is NaN, and so is its page; where nothing may be read, the result is zero without a NaN.

    Tokens 0 and 1 are padded rows of a captured graph, token 2 is a query too early for its one key, the others come
    after the last sequence.
    """
    cache = caches.draw([0, 0, 1], ROOM, page, device=device)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    o, lse = call(
        queries(6, device=device), cache, backend, ends(0, 1, 2, 4, device=device), **everything(6, device=device)
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


def test_debug_cache_reports_ends_and_short_lengths(device, caplog):
    cache = caches.draw([40, 2, 20, 0], ROOM, PAGE, device=device)
    short = "cache_seqlens: expected the number of queries or more, or queries see nothing, got 2 of sequence 1"
    wild = "cu_seqlens_q: expected 0 first, then ends in rising order up to 8, got 1 at [0], 3 at [2], 9 at [4]"
    for values, said in (((0, 2, 5, 6, 7), [short]), ((1, 5, 3, 4, 9), [wild]), ((0, 2, 4, 6, 7), [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nsa"), nsa.configure(debug_cache=True):
            call(queries(8, device=device), cache, "sdpa", ends(*values, device=device), **everything(8, device=device))
        assert caplog.messages == said
