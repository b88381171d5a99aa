"""The key-major schedule: windows and passes change nothing, the workspace is bounded, surplus units are loud."""

import functools
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

import nsa
import nsa.kernels
from nsa import settings
from nsa.call import Call
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.shape import BLOCKS, RANGES
from nsa.kernels.shared.spans import TILED
from nsa.testing.plugin import current_lane

from ...parity.pairs import in_pairs

GIB = 1 << 30
ROUTE = {"backend": "triton", "schedule": "key_major"}
KEY_MAJOR = ROUTE | {"return_lse": True}


@pytest.fixture
def planned(monkeypatch, fresh_plans):
    """Windows, and what they are made of, of the plans from now on."""
    made, windows = [], key_tiles.windows
    monkeypatch.setattr(key_tiles, "windows", lambda *args: made.append((windows(*args), args)) or made[-1][0])
    return made


@pytest.fixture
def small(monkeypatch, fresh_plans):
    """`small(parts, index, head)`: so few bytes for partial results, for lists, and for queries of one KV head."""

    def make(parts=key_tiles.PARTS_BYTES, index=key_tiles.INDEX_BYTES, head=key_tiles.HEAD_BYTES):
        monkeypatch.setattr(key_tiles, "HEAD_BYTES", head)
        monkeypatch.setattr(key_tiles, "PARTS_BYTES", parts)
        monkeypatch.setattr(key_tiles, "INDEX_BYTES", index)
        settings.reload()  # forgets plans

    return make


def assert_same_bits(got, want):
    """NumPy's products, the interpreter's, depend on where in a tile a row stands; tensor cores' do not."""
    torch.testing.assert_close(got, want, rtol=0, atol=0 if current_lane() == "gpu" else 1e-6)


@pytest.fixture
def call(draw, device):
    """24 queries of 2 sequences, each with 5 slots."""
    q, k, v = draw(B=2, S=12, S_kv=60, HKV=2, G=2)
    g = torch.Generator().manual_seed(1)
    blocks = torch.randint(-1, 5, (2, 12, 2, 5), generator=g, dtype=torch.int32).to(device)
    return lambda: nsa.selection_attention(q, k, v, block_indices=blocks, block_size=16, **KEY_MAJOR)


# A token has 2 KV heads, 5 slots, 2 heads a group, 16 fp32 and an LSE; a slot of the lists takes 12 bytes.
PART, LISTED = 2 * 5 * 2 * (16 * 4 + 4), 2 * 5 * 12


@pytest.mark.parametrize("alone", [False, True], ids=["heads together", "each head alone"])
def test_windows_and_passes_change_nothing(call, small, planned, monkeypatch, alone):
    want = call()
    monkeypatch.setattr(key_tiles, "REREAD", 1000)  # a window is never long enough
    for parts, index in ((24, 24), (7, 24), (24, 5), (1, 14)):
        small(parts * PART, index * LISTED, key_tiles.HEAD_BYTES if alone else 0)
        planned.clear()
        assert_same_bits(call(), want)
        ((w, _),) = planned
        assert w.heads == (1 if alone and min(parts, index) < 24 else 2)
        assert w.window <= min(parts, index) * 2 // w.heads
        assert w.window <= w.tokens <= max(index * 2 // w.heads, w.window)
        assert (w.window == 24) == (min(parts, index) * 2 // w.heads >= 24)


@pytest.mark.parametrize(
    ("heads", "ranges", "packed"),
    in_pairs(
        {"two heads": 2, "two of four heads at once": 4}, {"blocks": False, "ranges": True},
        {"batch": False, "varlen": True},
    ),
)  # fmt: skip
def test_windows_of_some_heads_change_nothing(draw, device, small, planned, monkeypatch, heads, ranges, packed):
    """Lists and parts are of one head of two, or two of four, all else of all; 7 + 9 tokens in windows of six,
    several a pass, and several passes.
    """
    q, k, v = draw(B=1, S=16, S_kv=150, HKV=heads, G=3, D=16, Dv=24, varlen=packed)
    lead, g = q.shape[:-2], torch.Generator().manual_seed(3)
    selection = {"block_indices": torch.randint(-1, 10, (*lead, heads, 6), generator=g, dtype=torch.int32).to(device)}
    selection["block_size"] = 16
    if ranges:
        spans = torch.randint(-9, 160, (*lead, heads, 2, 2), generator=g, dtype=torch.int32)
        selection = {"ranges": spans.to(device)}
    if packed:
        selection["cu_seqlens"] = tuple(
            torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 7, 16], [0, 70, 150])
        )
    want = nsa.selection_attention(q, k, v, **selection, **KEY_MAJOR)
    slots, at_once = planned.pop()[0].slots, heads // 2
    part, listed = slots * 3 * (24 * 4 + 4), slots * (16 if ranges else 12)
    small(2 * at_once * 3 * part, at_once * 13 * listed, 6 * 3 * 16 * 4 if heads == 4 else key_tiles.HEAD_BYTES)
    monkeypatch.setattr(key_tiles, "REREAD", 1000)
    assert_same_bits(nsa.selection_attention(q, k, v, **selection, **KEY_MAJOR), want)
    ((w, _),) = planned
    assert (w.heads, w.window, w.tokens) == (at_once, 6, 12)


@pytest.mark.parametrize("layout", ["batch", "positions", "all keys", "cache", "pages", "ragged"])
def test_one_program_lists_what_three_launches_list(draw, device, small, planned, monkeypatch, layout):
    """In passes of two windows, and in several steps of each loop: sequences of 12 queries, or of 13, 0 and 9."""
    q, k, v = draw(B=3, S=12, S_kv=60, HKV=2, G=2)
    g = torch.Generator().manual_seed(2)
    how = {"block_indices": torch.randint(-1, 17, (3, 12, 2, 5), generator=g, dtype=torch.int32).to(device)}
    if layout == "positions":
        how["q_positions"] = torch.randint(-2, 70, (3, 12), generator=g).to(device)
    how |= {"causal": layout != "all keys", "block_size": 4} | KEY_MAJOR
    attend = functools.partial(nsa.selection_attention, q, k, v)
    if layout in ("cache", "pages", "ragged"):
        how["cache_seqlens"] = torch.tensor([60, 0, 31], dtype=torch.int32, device=device)
        attend = functools.partial(nsa.selection_attention_with_kvcache, q, k, v)
    if layout == "pages":
        k, v = (x.reshape(15, 12, *x.shape[2:]) for x in (k, v))
        how["block_table"] = torch.arange(15, dtype=torch.int32, device=device).flip(0).view(3, 5)
        attend = functools.partial(nsa.selection_attention_with_kvcache, q, k, v)
    if layout == "ragged":
        how["cu_seqlens_q"] = torch.tensor([0, 13, 13, 22], dtype=torch.int32, device=device)
        q, how["block_indices"] = q.flatten(0, 1)[:24], how["block_indices"].flatten(0, 1)[:24]
        attend = functools.partial(nsa.selection_attention_with_kvcache, q, k, v)
    results = {}
    for few, chunk in ((0, key_major.ELEMENTS), (key_tiles.FEW_UNITS, key_major.ELEMENTS), (key_tiles.FEW_UNITS, 16)):
        monkeypatch.setattr(key_tiles, "FEW_UNITS", few)
        monkeypatch.setattr(key_major, "ELEMENTS", chunk)
        small(7 * PART, 14 * LISTED, 0)
        planned.clear()
        results[few, chunk] = attend(**how)
        ((w, _),) = planned
        assert w.window < w.tokens < q.shape[:-2].numel()
    want, *rest = results.values()
    assert all(torch.equal(a, b) for got in rest for a, b in zip(got, want, strict=True))
    assert want[0].any()


def test_a_call_of_many_units_takes_three_launches(monkeypatch):
    """Or one of many blocks, or of many sequences in a ragged batch, or any on an AMD GPU."""

    def lists(tokens, blocks, ends=None):
        q, k = (torch.empty(1, n, 4, 128, dtype=torch.bfloat16, device="meta") for n in (tokens, blocks * 64))
        selected = torch.empty(1, tokens, 4, 16, dtype=torch.int32, device="meta")
        if ends is None:
            return len(key_major.plan(Call(q, k, k, block_indices=selected, block_size=64)).lists)
        k = k.view(ends, -1, 4, 128)
        cu, lengths = (torch.empty(n, dtype=torch.int32, device="meta") for n in (ends + 1, ends))
        return len(key_major.plan(Call(
            q[0], k, k, block_indices=selected[0], block_size=64, cu_seqlens_q=cu, cache_seqlens=lengths
        )).lists)  # fmt: skip

    assert [lists(512, 64), lists(513, 64)] == [1, 3]
    assert [lists(64, 8192), lists(64, 8193)] == [1, 3]
    assert [lists(512, 64, 16), lists(512, 64, 32)] == [1, 3]
    monkeypatch.setattr(device_facts, "chip", lambda device: device_facts.Chip(device_facts.AMD, 304, None, False))
    assert lists(512, 64) == 3


SHAPES = [(64, 4), (32, 4), (32, 8), (16, 16), (128, 1), (8, 8), (3, 1)]


@pytest.mark.parametrize(("HQ", "HKV"), SHAPES, ids=lambda x: str(x))
@pytest.mark.parametrize("spans", [False, True], ids=["blocks", "ranges"])
def test_workspace_is_below_a_gib(HQ, HKV, spans):
    """Whatever the length, the number of slots and the size of blocks."""
    G = HQ // HKV
    for T, slots, size, Dv in itertools.product((64, 8192, 65_536, 1_048_576), (1, 16, 64), (16, 64), (64, 128, 256)):
        tile = key_tiles.select(90, 2, G, Dv, Dv, size)
        blocks = -(-T // size)
        w = key_tiles.windows(T, HKV, G, Dv, Dv, 2, slots, blocks, tile.share, spans)
        shape = SimpleNamespace(G=G, Dv=Dv, source=RANGES if spans else BLOCKS)
        used = key_major.workspace_bytes(shape, w, torch.float16)
        assert used <= GIB, (T, slots, size, Dv, w)
        assert 0 < w.window <= w.tokens <= T
        assert w.window << w.slot_bits < 2**31
        assert w.tokens * w.heads * w.slots < 2**31
        assert w.window * w.heads * w.slots * G * Dv < 2**31, "elements of partial results are int32"
        assert w.work >= -(-w.window * slots // tile.share)


@pytest.fixture
def memory(monkeypatch):
    """`memory(size)`: bytes that a workspace may take from now on; the list it returns says how much each took."""

    def leave(size):
        real, held, peaks = launching.workspace, [], []

        def workspace(elements, dtype, device):
            taken = sum(x.numel() * x.itemsize for x in (ref() for ref in held) if x is not None)
            if not taken:  # all that an attempt before got is gone
                held.clear()
                peaks.append(0)
            peaks[-1] = taken + elements * dtype.itemsize
            if peaks[-1] > size:
                raise torch.OutOfMemoryError("CUDA out of memory")
            made = real(elements, dtype, device)
            held.append(weakref.ref(made))
            return made

        monkeypatch.setattr(launching, "workspace", workspace)
        return peaks

    key_major._scarce.clear()
    yield leave
    key_major._scarce.clear()


def test_where_memory_is_scarce_windows_are_shorter(call, small, memory, caplog):
    """The same result, bit by bit; what an attempt got is given back before the next."""
    small(24 * PART, 24 * LISTED)
    peaks = memory(10**9)
    want = call()
    (whole,) = peaks
    for part in (0.6, 0.2):
        key_major._scarce.clear()
        caplog.clear()
        peaks = memory(int(whole * part))
        for _ in range(2):
            assert_same_bits(call(), want)
        tries = 2 if part > 0.25 else 3
        assert len(peaks) == tries + 1, "the second call asks for what there is"
        assert max(peaks[-2:]) <= whole * part
        said = [r.getMessage() for r in caplog.records if r.name == "nsa"]
        assert len(said) == tries - 1
        assert all(line.startswith("key_major: out of memory for a workspace of") for line in said)


@pytest.mark.parametrize(
    ("G", "HKV", "n", "T", "block", "within", "found"),
    [
        (1, 8, 4, 32_768, 128, 200, (4, 32_768)),  # heads at once, tokens of a window
        (1, 8, 4, 32_768, 128, 100, (1, 32_768)),
        (1, 16, 16, 65_536, 64, 400, (2, 21_888)),
        (16, 4, 16, 65_536, 64, 400, (2, 3_456)),
    ],
)
def test_less_may_be_fewer_heads_at_once(monkeypatch, G, HKV, n, T, block, within, found):
    """Of the shape of a long prompt in bf16 on an H100, which no machine here has the memory for."""
    monkeypatch.setattr(device_facts, "chip", lambda device: device_facts.Chip(90, 132, None, False))
    q, k = (torch.empty(1, T, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (G * HKV, HKV))
    blocks = torch.empty(1, T, HKV, n, dtype=torch.int32, device="meta")
    launch = key_major.plan(Call(q, k, k, block_indices=blocks, block_size=block))
    taken = []

    def workspace(elements, dtype, device):
        taken.append(elements * dtype.itemsize)
        if sum(taken) > within << 20:
            taken.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(elements, dtype=dtype, device=device)

    monkeypatch.setattr(launching, "workspace", workspace)
    w, _ = key_major.reserve(launch, q.dtype)
    assert (w.heads, w.window) == found
    assert sum(taken) <= within << 20


def test_no_memory_at_all_is_raised(call, small, memory):
    small(24 * PART, 24 * LISTED)
    memory(16)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            call()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S_kv": 2**31 - 1, "block_size": 64}, "expected at most 2147483391 keys"),
        ({"S_kv": 2**31 - 400, "block_size": 2**30 + 1}, "to end at 2147483519 or before, got 2147483650"),
        ({"HKV": 65_536}, "and 65535 KV heads, got 64 and 65536"),
        ({"HKV": 64, "S_kv": 2**22, "block_size": 1}, "expected counters of blocks to fit"),
    ],
    ids=["keys", "ends", "heads", "blocks"],
)
def test_what_is_not_counted_is_refused(sizes, message):
    """Tensors without data: shapes decide."""
    at = {"S_kv": 64, "HKV": 1, "block_size": 16} | sizes
    q, k = torch.empty(1, 1, 1, 16, device="meta"), torch.empty(1, 1, 1, 16, device="meta")
    q, k = q.expand(1, 1, at["HKV"], 16), k.expand(1, at["S_kv"], at["HKV"], 16)
    blocks = torch.empty(1, 1, at["HKV"], 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=message):
        key_major.plan(Call(q, k, k, block_indices=blocks, block_size=at["block_size"]))


def test_the_last_share_has_work(agrees, draw, device, planned):
    """Seven blocks of one unit each, of four KV heads at once: all shares that there may be, but one that is never."""
    q, k, v = draw(S=1, S_kv=112, HKV=4)
    blocks = torch.arange(7, dtype=torch.int32, device=device).expand(1, 1, 4, 7).contiguous()
    agrees(functools.partial(nsa.selection_attention, **ROUTE), q, k, v, block_indices=blocks, block_size=16)
    ((w, _),) = planned
    assert (w.heads, w.slots, w.work) == (4, 7, 8)


def test_nothing_bounds_the_ranges_of_a_row(draw, same, small):
    small(parts=1000)
    q, k, v = draw(S=1, S_kv=600, HKV=1)
    call = {"ranges": same([(0, 7), (9, 13)], 1, 1, 1)} | KEY_MAJOR
    with pytest.raises(ValueError, match=r"^key_major: expected the partial results of a row to fit .*max_selected"):
        nsa.selection_attention(q, k, v, **call)


def test_a_bound_that_was_broken_is_loud(draw, same, device):
    """A row with more units than slots is NaN as a whole; others are right."""
    q, k, v = draw(S=2, S_kv=300, HKV=1)
    ranges = torch.cat((same([(0, 300), (0, 300)], 1, 1, 1), same([(3, 9), (11, 12)], 1, 1, 1)), 1)
    how = {"ranges": ranges, "causal": False, "max_selected": 7}
    o, lse = nsa.selection_attention(q, k, v, **how, **KEY_MAJOR)
    assert o[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    want = nsa.selection_attention(q, k, v, **how, backend="reference", return_lse=True)
    torch.testing.assert_close(o[:, 1], want[0][:, 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[:, 1], want[1][:, 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "S_kv", "invariant", "walks"),
    [(512, 1024, False, True), (512, 1025, False, False), (512, 65_536, False, False), (1, 65_536, True, True)],
)
def test_a_chunk_of_a_long_prompt_walks_nothing(queries, S_kv, invariant, walks):
    """Its keys are not in L2; unless the rest of the call may not decide how a row is rounded."""
    q = torch.empty(1, queries, 16, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, S_kv, 1, 128, dtype=torch.bfloat16, device="meta")
    blocks = torch.empty(1, queries, 1, 16, dtype=torch.int32, device="meta")
    launch = key_major.plan(
        Call(q, k, k, block_indices=blocks, block_size=64, settings=nsa.Settings(batch_invariant=invariant))
    )
    assert (launch.tile.walked, launch.windows.slots) == ((8, 8) if walks else (0, 16))


@pytest.mark.parametrize("size", [16, 24])
def test_large_groups_read_some_blocks_where_parts_are_merged(draw, device, agrees, monkeypatch, size):
    """G = 16 walks half of the slots: padding among either, duplicates across both."""
    dtype = torch.float16 if current_lane() == "interpreter" else torch.bfloat16
    q, k, v = draw(B=1, S=3, S_kv=75, HKV=1, G=16, dtype=dtype)
    blocks = torch.tensor([[0, -1, 2, 1], [-1, -1, -1, 1], [1, 1, 1, -1]], dtype=torch.int32, device=device)
    blocks = blocks.view(1, 3, 1, 4)
    monkeypatch.setattr(key_tiles, "walks", lambda *_: True)  # three queries of 75 keys are few
    launch = key_major.plan(Call(q, k, v, block_indices=blocks, block_size=size))
    assert launch.tile.walked == 8
    assert launch.windows.slots == 2
    assert (launch.merge.constexprs["SOURCE"] == TILED.value) == (size == 16)
    agrees(functools.partial(nsa.selection_attention, **ROUTE), q, k, v, block_indices=blocks, block_size=size)


@pytest.mark.parametrize("G", [1, 4, 16, 64])
def test_larger_blocks_come_in_smaller_tiles_and_without_a_limit_of_registers(G):
    """As measured; what a sweep asks for it gets."""
    tiles = [key_tiles.select(90, 2, G, 128, 128, size) for size in (16, 64, 65, 128, 129, 256)]
    assert [tile.registers for tile in tiles] == [128, 128, None, None, None, None]
    assert [tile.BLOCK_N for tile in tiles] == [16, 64, 128, 128, 64, 64]
    assert key_tiles.select(90, 2, G, 128, 128, 256, key_tiles.SMALL).registers == 128
    assert key_tiles.select(80, 2, G, 128, 128, 256).registers is None


@pytest.mark.parametrize("size", [64, 128])
def test_how_many_rows_read_a_block_changes_no_result(size):
    """It decides how many of a block's tiles one program takes, in long blocks only. Their merge reads no keys."""
    many, few = (key_tiles.select(90, 2, 16, 128, 128, size, reads=reads) for reads in (1024, 16))
    assert few._replace(share=many.share) == many
    assert (many.walked > 0, few.share < many.share) == (size == 64, size == 128)
