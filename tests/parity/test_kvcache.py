"""Caches of sequences of unequal length, contiguous and in pages, against the oracle that lays them side by side."""

import itertools
import math

import pytest
import torch

import nsa
from nsa.kernels import pinned
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.testing.judge.forward import cached_parity
from nsa.testing.matrix import caches
from nsa.testing.plugin import current_lane

GPU = current_lane() == "gpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16} if GPU else {"fp32": torch.float32}
PAGES = [None, 16, 64, 128]
ROOM = 256
# Queries of a few, and of a chunk, and blocks of a row: an interpreted program takes ten milliseconds and more.
FEW, CHUNK, SLOTS = (3, 5, 4) if GPU else (2, 3, 3)
LENGTHS = [203, 0, 1, ROOM]  # within a page, nothing, one key, no room left
# By the rules; keys shared among programs, with tiles that a page holds several of, or that hold several pages.
CHOICES = {"auto": None, "split": tiles.Choice(2, 1, 32, 4, 2), "wide": tiles.Choice(4, 1, 64, 4, 2, 0)}


def check(got, want, dtype):
    assert got[1].dtype == torch.float32
    cached_parity(got, want, dtype, "nsa")


def draw_blocks(B, S, HKV, n, size, seed):
    """Block 0, padding, one past the end, and others; a block may come twice."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-1, -(-ROOM // size) + 1, (B, S, HKV, n), generator=g)
    blocks[..., 0] = 0
    return blocks


def draw_ranges(B, S, HKV, n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(-9, ROOM + 9, (B, S, HKV, n), generator=g)
    return torch.stack((start, start + torch.randint(-3, 90, start.shape, generator=g)), -1)


def in_pairs(*axes):
    """All combinations of named values; interpreted half of them, in which each pair of two axes' values occurs."""
    numbered = itertools.product(*(list(enumerate(axis.items())) for axis in axes))
    chosen = [row for row in numbered if GPU or sum(i for i, _ in row) % 2 == 0]
    return [pytest.param(*(x for _, (_, x) in row), id="-".join(name for _, (name, _) in row)) for row in chosen]


BY_PAGE = {f"page{page}": page for page in PAGES}
BY_QUERIES = {
    f"{many}-{name}": (S, CHOICES[name])
    for S, many, names in ((1, "decode", CHOICES), (FEW, "few", CHOICES if GPU else ["wide"]))
    for name in names
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("page", "size", "queries"), in_pairs(BY_PAGE, {f"block{size}": size for size in (16, 32, 64, 128, 48)}, BY_QUERIES)
)
def test_triton_sel_parity_kvcache_blocks(device, page, size, queries, dtype):
    S, choice = queries
    cache = caches.draw(LENGTHS, ROOM, page, HKV=2, D=32, Dv=16, dtype=dtype, device=device, seed=size + S)
    g = torch.Generator().manual_seed(S)
    q = torch.randn(len(LENGTHS), S, 6, 32, generator=g).to(device, dtype)
    blocks = draw_blocks(len(LENGTHS), S, 2, SLOTS, size, seed=size).to(device, torch.int32)
    selection = {"block_indices": blocks, "block_size": size}
    out = torch.full((*q.shape[:-1], 16), math.nan, dtype=dtype, device=device)
    with pinned(query_major=choice):
        got = nsa.selection_attention_with_kvcache(
            q, cache.k, cache.v, **cache.arguments, **selection, backend="triton", return_lse=True, out=out
        )
    assert got[0] is out
    check(got, caches.oracle(q, cache, **selection), dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("page", "size", "walked"),
    in_pairs(
        BY_PAGE,
        {"block16": 16, "block64": 64, "block128": 128, "block48": 48, "ranges": None},
        {"parts": 0, "walk": 8},
    ),
)
def test_triton_sel_parity_kvcache_key_major(device, page, size, walked, dtype, pin, monkeypatch):
    """A chunk of a prompt: partial results of each block, or some of its keys read by the kernel that merges."""
    cache = caches.draw(LENGTHS, ROOM, page, HKV=2, D=32, Dv=16, dtype=dtype, device=device, seed=7)
    S = CHUNK
    q = torch.randn(len(LENGTHS), S, 6, 32, generator=torch.Generator().manual_seed(S)).to(device, dtype)
    if size is None:
        selection = {"ranges": draw_ranges(len(LENGTHS), S, 2, 5, seed=3).to(device, torch.int32)}
    else:
        blocks = draw_blocks(len(LENGTHS), S, 2, SLOTS, size, seed=9).to(device, torch.int32)
        selection = {"block_indices": blocks, "block_size": size}
    out = torch.full((*q.shape[:-1], 16), math.nan, dtype=dtype, device=device)
    pin(key_major=key_tiles.FP32._replace(walked=walked))
    nsa.settings.reload()  # what is planned, with other tiles, is not planned again
    merged = []
    forward = key_major.forward
    monkeypatch.setattr(
        key_major, "forward", lambda launch, *a, **how: merged.append(launch) or forward(launch, *a, **how)
    )
    before = nsa.kernels.launches.copy()
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, backend="triton", schedule="key_major", return_lse=True,
        out=out,
    )  # fmt: skip
    nsa.settings.reload()
    assert (nsa.kernels.launches - before)["key_major"] == 1
    assert merged[0].merge_lse.constexprs["WALK"] == (walked > 0 and size is not None)
    check(got, caches.oracle(q, cache, **selection), dtype)


E4M3_QUERIES = {"bf16": torch.bfloat16, "fp16": torch.float16} if GPU else {"fp16": torch.float16}


@pytest.mark.parametrize("dtype", E4M3_QUERIES.values(), ids=E4M3_QUERIES)
@pytest.mark.parametrize(
    ("source", "page", "choice", "Dv"),
    [
        ("block64", None, "auto", 48),
        ("block64", 16, "wide", 32),
        ("block64", 128, "split", 19),  # 19 values of a byte are no pairs
        ("block128", 64, "auto", 32),
        ("block48", 64, "split", 48),
        ("ranges", None, "wide", 32),
        ("ranges", 16, "auto", 19),
    ],
    ids=str,
)
def test_triton_sel_parity_kvcache_e4m3(device, page, source, Dv, choice, dtype):
    """Bytes outside the sequences are those of NaN."""
    cache = caches.draw(LENGTHS, ROOM, page, D=32, Dv=Dv, device=device, seed=Dv)
    cache = caches.quantized(cache, per_head=Dv != 48)
    assert bool(cache.k.isnan().any())
    q = torch.randn(len(LENGTHS), 1, 6, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if source == "ranges":
        selection = {"ranges": draw_ranges(len(LENGTHS), 1, 2, SLOTS, seed=3).to(device, torch.int32)}
    else:
        size = int(source.removeprefix("block"))
        blocks = draw_blocks(len(LENGTHS), 1, 2, SLOTS, size, seed=size).to(device, torch.int32)
        blocks[-1, ..., 1] = (ROOM - 1) // size  # the last key of all
        selection = {"block_indices": blocks, "block_size": size}
    with pinned(query_major=CHOICES[choice]):
        got = nsa.selection_attention_with_kvcache(
            q, cache.k, cache.v, **cache.arguments, **selection, backend="triton", return_lse=True
        )
    check(got, caches.oracle(q, cache, **selection), dtype)


@pytest.mark.parametrize("dtype", E4M3_QUERIES.values(), ids=E4M3_QUERIES)
@pytest.mark.parametrize(
    ("page", "size", "walked"), [(64, 64, 8), (16, 128, 0), (None, 48, 8), (128, None, 0)], ids=str
)
def test_triton_sel_parity_kvcache_e4m3_key_major(device, page, size, walked, dtype, pin, monkeypatch):
    cache = caches.quantized(caches.draw(LENGTHS, ROOM, page, D=32, Dv=32, device=device, seed=7))
    S = CHUNK
    q = torch.randn(len(LENGTHS), S, 6, 32, generator=torch.Generator().manual_seed(S)).to(device, dtype)
    if size is None:
        selection = {"ranges": draw_ranges(len(LENGTHS), S, 2, 5, seed=3).to(device, torch.int32)}
    else:
        blocks = draw_blocks(len(LENGTHS), S, 2, SLOTS, size, seed=9).to(device, torch.int32)
        selection = {"block_indices": blocks, "block_size": size}
    pin(key_major=key_tiles.FP32._replace(walked=walked))
    nsa.settings.reload()  # what is planned, with other tiles, is not planned again
    walks, forward = [], key_major.forward
    monkeypatch.setattr(
        key_major, "forward", lambda x, *rest: walks.append(x.merge_lse.constexprs["PAIRS"]) or forward(x, *rest)
    )
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, backend="triton", schedule="key_major", return_lse=True
    )
    nsa.settings.reload()
    assert walks == [walked > 0]
    check(got, caches.oracle(q, cache, **selection), dtype)


@pytest.mark.parametrize("backend", ["triton", "sdpa", "reference"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("source", ["ranges", "blocks"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"page{page}")
def test_triton_sel_parity_kvcache_backends(device, page, source, causal, index, backend):
    dtype = next(iter(DTYPES.values()))
    cache = caches.draw(LENGTHS, ROOM, page, HKV=2, dtype=dtype, index=index, device=device, seed=1)
    q = torch.randn(len(LENGTHS), 2, 4, 16, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    if source == "ranges":
        selection = {"ranges": draw_ranges(len(LENGTHS), 2, 2, 5, seed=3).to(device, index)}
    else:
        selection = {
            "block_indices": draw_blocks(len(LENGTHS), 2, 2, 5, 32, seed=3).to(device, index),
            "block_size": 32,
        }
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, causal=causal, scale=0.3, backend=backend, return_lse=True
    )
    check(got, caches.oracle(q, cache, **selection, causal=causal, scale=0.3), dtype)


@pytest.mark.parametrize("source", ["ranges", "blocks"])
@pytest.mark.parametrize("schedule", ["query_major", "key_major"])
@pytest.mark.parametrize("page", [1, 5, 8, 48], ids=lambda page: f"page{page}")
def test_triton_sel_parity_kvcache_odd_pages(device, page, schedule, source):
    """Many to a tile, and ones that no tile is made of."""
    dtype = next(iter(DTYPES.values()))
    room = -(-250 // page) * page  # no whole tiles: the last one reaches past the table
    cache = caches.draw([203, 0, 1, room], room, page, HKV=2, dtype=dtype, device=device, seed=4)
    q = torch.randn(len(LENGTHS), 3, 4, 16, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    if source == "ranges":
        selection = {"ranges": draw_ranges(len(LENGTHS), 3, 2, 5, seed=3).to(device, torch.int32)}
    else:
        blocks = draw_blocks(len(LENGTHS), 3, 2, 4, 64, seed=3).to(device, torch.int32)
        blocks[..., 1] = (room - 1) // 64
        selection = {"block_indices": blocks, "block_size": 64}
    got = nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **cache.arguments, **selection, backend="triton", schedule=schedule, return_lse=True
    )
    check(got, caches.oracle(q, cache, **selection), dtype)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"page{page}")
def test_triton_sel_parity_kvcache_is_the_call_without_one(device, page):
    """A cache that is full, and the same keys without lengths or pages: the same bits."""
    dtype = next(iter(DTYPES.values()))
    cache = caches.draw([ROOM, ROOM], ROOM, page, HKV=2, D=32, Dv=32, dtype=dtype, device=device)
    q = torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    blocks = draw_blocks(2, 3, 2, 4, 64, seed=3).to(device, torch.int32)
    selection = {"block_indices": blocks, "block_size": 64, "backend": "triton", "return_lse": True}
    got = nsa.selection_attention_with_kvcache(q, cache.k, cache.v, **cache.arguments, **selection)
    k, v = (torch.stack([cache.sequence(b)[i] for b in range(2)]) for i in range(2))
    want = nsa.selection_attention(q, k, v, **selection)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
