"""Caches of sequences of unequal length, contiguous and in pages, against the oracle that lays them side by side."""

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

from .pairs import in_pairs

GPU = current_lane() == "gpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16} if GPU else {"fp32": torch.float32}
PAGES = [None, 16, 64, 128]
ROOM = 256
# Queries of a few, and of a chunk, and blocks of a row: an interpreted program takes ten milliseconds and more.
FEW, CHUNK, SLOTS = (3, 5, 4) if GPU else (2, 3, 3)
LENGTHS = [203, 0, 1, ROOM]  # within a page, nothing, one key, no room left
# By the rules; keys shared among programs, with tiles that a page holds several of, or that hold several pages.
CHOICES = {"auto": None, "split": tiles.Choice(2, 1, 32, 4, 2), "wide": tiles.Choice(4, 1, 64, 4, 2, 0)}


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


def drawn(device, dtype, page, S, size, n=SLOTS, lengths=LENGTHS, room=ROOM, HQ=6, D=32, Dv=16, index=torch.int32):
    """Queries, a cache of two KV heads, and blocks of a size, or spans if it is None."""
    seed, B = (size or 3) + S, len(lengths)
    cache = caches.draw(lengths, room, page, D=D, Dv=Dv, dtype=dtype, index=index, device=device, seed=seed)
    q = torch.randn(B, S, HQ, D, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    if size is None:
        return q, cache, {"ranges": draw_ranges(B, S, 2, 5, seed).to(device, index)}
    blocks = draw_blocks(B, S, 2, n, size, seed)
    blocks[-1, ..., 1] = (room - 1) // size  # the last key of all
    return q, cache, {"block_indices": blocks.to(device, index), "block_size": size}


def serve(q, cache, selection, cu=None, Dv=None, **how):
    """`(O, LSE)` of Triton's kernels, compared with the oracle; into a tensor of NaN, if it is given its width.

    `cu`: ends of packed queries.
    """
    out = None if Dv is None else torch.full((*q.shape[:-1], Dv), math.nan, dtype=q.dtype, device=q.device)
    how = {"backend": "triton", "return_lse": True, "out": out} | cache.arguments | how
    how |= {"cu_seqlens_q": cu} if cu is not None else {}
    got = nsa.selection_attention_with_kvcache(q, cache.k, cache.v, **selection, **how)
    assert out is None or got[0] is out
    oracles = {name: how[name] for name in ("causal", "scale") if name in how}
    cached_parity(got, caches.oracle(q, cache, cu, **selection, **oracles), q.dtype, "nsa")
    return got


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
    with pinned(query_major=choice):
        serve(*drawn(device, dtype, page, S, size), Dv=16)


@pytest.fixture
def walks(monkeypatch, pin):
    """`walks(keys)` lets key-major's merge read so many keys of a row itself; the list tells whether merges do."""
    seen, forward = [], key_major.forward
    monkeypatch.setattr(
        key_major, "forward", lambda x, *a, **how: seen.append(x.merge_lse.constexprs) or forward(x, *a, **how)
    )

    def with_walk(keys):
        pin(key_major=key_tiles.FP32._replace(walked=keys))
        return seen

    return with_walk


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("page", "size", "walked"),
    in_pairs(
        BY_PAGE,
        {"block16": 16, "block64": 64, "block128": 128, "block48": 48, "ranges": None},
        {"parts": 0, "walk": 8},
    ),
)
def test_triton_sel_parity_kvcache_key_major(device, page, size, walked, dtype, walks):
    """A chunk of a prompt: partial results of each block, or some of its keys read by the kernel that merges."""
    seen, before = walks(walked), nsa.kernels.launches.copy()
    serve(*drawn(device, dtype, page, CHUNK, size), Dv=16, schedule="key_major")
    assert (nsa.kernels.launches - before)["key_major"] == 1
    assert seen[0]["WALK"] == (walked > 0 and size is not None)


E4M3_QUERIES = {"bf16": torch.bfloat16, "fp16": torch.float16} if GPU else {"fp16": torch.float16}


@pytest.mark.parametrize("dtype", E4M3_QUERIES.values(), ids=E4M3_QUERIES)
@pytest.mark.parametrize(
    ("size", "page", "choice", "Dv"),
    [
        (64, None, "auto", 48),
        (64, 16, "wide", 32),
        (64, 128, "split", 19),  # 19 values of a byte are no pairs
        (128, 64, "auto", 32),
        (48, 64, "split", 48),
        (None, None, "wide", 32),
        (None, 16, "auto", 19),
    ],
    ids=str,
)
def test_triton_sel_parity_kvcache_e4m3(device, page, size, Dv, choice, dtype):
    """Bytes outside the sequences are those of NaN."""
    _, cache, selection = drawn(device, torch.float32, page, 1, size, Dv=Dv)
    cache = caches.quantized(cache, per_head=Dv != 48)
    assert bool(cache.k.isnan().any())
    q = torch.randn(len(LENGTHS), 1, 6, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with pinned(query_major=CHOICES[choice]):
        serve(q, cache, selection)


@pytest.mark.parametrize("dtype", E4M3_QUERIES.values(), ids=E4M3_QUERIES)
@pytest.mark.parametrize(
    ("page", "size", "walked"), [(64, 64, 8), (16, 128, 0), (None, 48, 8), (128, None, 0)], ids=str
)
def test_triton_sel_parity_kvcache_e4m3_key_major(device, page, size, walked, dtype, walks):
    q, cache, selection = drawn(device, torch.float32, page, CHUNK, size, Dv=32)
    seen = walks(walked)
    serve(q.to(dtype), caches.quantized(cache), selection, schedule="key_major")
    assert [x["PAIRS"] for x in seen] == [walked > 0]


@pytest.mark.parametrize("backend", ["triton", "sdpa", "reference"])
@pytest.mark.parametrize(
    ("page", "size", "causal", "index"),
    in_pairs(
        BY_PAGE, {"ranges": None, "blocks": 32}, {"causal": True, "all": False},
        {"int32": torch.int32, "int64": torch.int64},
    ),
)  # fmt: skip
def test_triton_sel_parity_kvcache_backends(device, page, size, causal, index, backend):
    dtype = next(iter(DTYPES.values()))
    call = drawn(device, dtype, page, 2, size, n=5, HQ=4, D=16, index=index)
    serve(*call, causal=causal, scale=0.3, backend=backend)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"page{page}")
def test_triton_sel_parity_kvcache_is_the_call_without_one(device, page):
    """A cache that is full, and the same keys without lengths or pages: the same bits."""
    dtype = next(iter(DTYPES.values()))
    q, cache, selection = drawn(device, dtype, page, 3, 64, n=4, lengths=[ROOM, ROOM], HQ=8, Dv=32)
    k, v = (torch.stack([cache.sequence(b)[i] for b in range(2)]) for i in range(2))
    want = nsa.selection_attention(q, k, v, **selection, backend="triton", return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(serve(q, cache, selection), want, strict=True))
