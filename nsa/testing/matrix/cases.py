"""The lists of cases: what is timed (`core`, `full`), and what parity compares with the oracle (`parity`, `small`).

Parity, edge and perf share cases, inputs and seeds.
"""

from __future__ import annotations

import dataclasses

from nsa.testing.matrix.case import Case, batch

PREFILL_HEADS = ((64, 4), (32, 4), (32, 8), (16, 16))  # HQ, HKV: groups of 16, 8, 4 and 1
OVERLAPS = (0.0, 0.5, 0.9)  # share of its blocks that a query has in common with the query before it


def core() -> list[Case]:
    """The cases of baselines, in bf16: 84 `few`, 36 `many` and `mixed` from the cache, 6 decode, 24 prefill."""
    few = [
        Case(H, D, D, L, N, "few", "bf16")
        for N in (64, 256, 1024) for H in (4, 8) for D in (64, 128) for L in (16, 32, 64, 128, 256, 512, 1024)
    ]  # fmt: skip
    cache = [
        Case(8, D, D, L, N, dist, "bf16")
        for dist in ("many", "mixed") for N in (64, 256, 1024) for D in (64, 128) for L in (64, 256, 1024)
    ]  # fmt: skip
    prompts = [prefill(T, *heads, s) for T in (8192, 65_536) for heads in PREFILL_HEADS for s in OVERLAPS]
    return few + cache + decode_steps() + prompts


def decode_steps() -> list[Case]:
    """Steps of 1, 8 and 64 sequences of 8,192 keys, of a large and of a small model."""
    large = [batch(B, 1, 8192) for B in (1, 8, 64)]
    return large + [batch(B, 1, 8192, 4, 1, 64, n=8) for B in (1, 8, 64)]


def prefill(T: int, HQ: int, HKV: int, shared: float = 0.0) -> Case:
    """A whole prompt of `T` tokens in bf16: D = 128, 16 blocks of 64 a row."""
    return batch(1, T, T, HQ, HKV, shared=shared)


def long_context() -> list[Case]:
    """The cases that `--nsa-full` adds: decode with 128k keys, and prompts of 16k, 32k and 128k tokens.

    A decode step reads as many keys as with 8k (2 GiB of cache at B = 8).
    """
    decode = [batch(B, 1, 131_072) for B in (1, 8)]
    lengths = [prefill(T, *heads) for T in (16_384, 32_768, 131_072) for heads in PREFILL_HEADS]
    return decode + lengths


def full() -> list[Case]:
    """The whole matrix, fp16 and bf16."""
    dims = [(64, 64), (64, 128), (128, 64), (128, 128)]
    rows = [
        Case(H, D, Dv, L, N, dist, dtype)
        for dist in ("few", "many", "mixed") for dtype in ("fp16", "bf16") for N in (64, 256, 1024) for H in (4, 8)
        for D, Dv in dims for L in (16, 32, 64, 128, 256, 512, 1024)
    ]  # fmt: skip
    # `(n, L)` of decode steps: n blocks of 64, of which S_kv keys exist if S_kv < n * 64.
    seen = [(8, 128), (8, 256), (8, 512), (16, 128), (16, 256), (16, 512), (16, 1024)]
    decode = [
        Case(h, D, D, L, B, "decode", dtype, S_kv=8192 if L == 64 * n else L, n=n)
        for dtype in ("fp16", "bf16") for h in (2, 4, 16) for D in (64, 128) for n, L in seen for B in (1, 8, 64)
    ]  # fmt: skip
    return list(dict.fromkeys(rows + decode + core()))


def parity() -> list[Case]:
    """The parity lane on a GPU: the full matrix, and group sizes, dims and geometries that perf does not time."""
    base = [c for c in full() if not c.large]
    varlen = [dataclasses.replace(c, source="varlen", S_kv=0) for c in base if c.source == "rows"]
    blocks = [
        Case(c.H, c.D, c.Dv, c.L, c.N, "many", c.dtype, source="blocks", block_size=min(64, c.L))
        for c in base if c.source == "rows"
    ]  # fmt: skip
    blocks += small_blocks(33, 3000, ("bf16", "fp16"))
    return list(dict.fromkeys(base + varlen + blocks + _shapes(N=64, L=200) + _sequences() + prefills() + _hard()))


def _shapes(N: int, L: int) -> list[Case]:
    """Group sizes and head dims, unequal and not powers of two, for every source of spans."""
    dims = [(64, 96), (100, 64), (128, 192), (256, 100), (192, 128), (96, 256), (100, 100)]
    picks = list(zip((1, 2, 3, 7, 16, 64, 128), dims, strict=True))
    picks += list(zip((128, 16, 7, 3, 2, 1, 64), dims, strict=True))
    return [
        Case(H, D, Dv, L, N, dist, dtype, source=source)
        for i, (H, (D, Dv)) in enumerate(picks) for dtype in [("bf16", "fp16", "fp32")[i % 3]]
        for dist, source in [("few", "rows"), ("few", "varlen"), ("mixed", "ranges"), ("many", "blocks")]
    ]  # fmt: skip


def _sequences() -> list[Case]:
    """Many queries, several KV heads, causal or not, positions given, sequences packed end to end."""
    wide: list[Case] = []
    for dtype in ("fp16", "bf16"):
        for H, HKV, D in ((16, 4, 128), (4, 8, 64), (1, 16, 128)):
            N = 2 * 128 * HKV
            blocks = Case(H, D, D, 512, N, "prefill", dtype, HKV=HKV, S=128, S_kv=1024)
            mixed = Case(H, D, D, 300, N, "mixed", dtype, HKV=HKV, S=128, S_kv=1000, int64=True)
            packed = Case(H, D, D, 256, 300 * HKV, "prefill", dtype, HKV=HKV, seqlens=(1, 200, 0, 99))
            for c in (blocks, mixed):
                wide += [c, dataclasses.replace(c, causal=False), dataclasses.replace(c, positions=True)]
            wide += [packed, dataclasses.replace(packed, dist="mixed", source="ranges", L=70)]
    return wide


def prefills() -> list[Case]:
    """Prompts by group size, block size and geometry: whole prompts, chunks at the end, packed sequences, spans.

    No length is a whole number of blocks. Sequences have more keys than queries, as many, fewer, or none.
    """
    found: list[Case] = []
    for i, H in enumerate((1, 2, 3, 4, 8, 16, 64)):
        for dtype in ("fp16", "bf16"):
            D, Dv = ((128, 128), (64, 64), (96, 128), (128, 100))[i % 4]
            whole = Case(H, D, Dv, 384, 333 * 2, "prefill", dtype, HKV=2, S=333, S_kv=333)
            found += [whole, dataclasses.replace(whole, dist="mixed", source="ranges", L=150, n=0)]
            for size in (16, 32, 128):
                found.append(dataclasses.replace(whole, block_size=size, L=5 * size, n=5, S_kv=1000))
            lengths = (1, 200, 0, 65, 67, 30), (70, 200, 40, 300, 20, 0)
            packed = Case(H, D, Dv, 256, 363 * 2, "prefill", dtype, HKV=2, seqlens=lengths[0], kv_seqlens=lengths[1])
            found += [packed, dataclasses.replace(packed, dist="mixed", source="ranges", L=70, n=0)]
            found += [dataclasses.replace(packed, causal=False)] * (H in (1, 4, 16))
    some = [c for c in found if c.H in (1, 4, 16) and c.dtype == "bf16" and not c.seqlens]
    found += [dataclasses.replace(c, causal=False) for c in some] + [
        dataclasses.replace(c, positions=True) for c in some
    ]
    return found + [prefill(1000, 8, 2, shared=0.5), prefill(1000, 8, 2, shared=0.9)]


def small_blocks(S: int, S_kv: int, dtypes: tuple[str, ...]) -> list[Case]:
    """Many blocks of 1 to 16 keys: prompts, decode steps and packed sequences of each size."""
    found: list[Case] = []
    most = 40 if S_kv < 1000 else 513
    shapes = [
        (4, 12, 2, 64, 64), (1, 4, 1, 32, 16), (2, 3, 2, 32, 32), (3, 8, 1, 16, 48), (7, 1, 2, 32, 32),
        (16, 24, 1, 32, 32), (5, 40, 1, 16, 16),
    ]  # fmt: skip
    for i, (size, H, HKV, D, Dv) in enumerate(shapes):
        n, dtype = min(most, -(-S_kv // size)), dtypes[i % 2]
        chunk = Case(H, D, Dv, size * n, S * HKV, "prefill", dtype, HKV=HKV, S=S, S_kv=S_kv, block_size=size, n=n)
        found += [chunk, dataclasses.replace(chunk, dist="decode", S=1, N=2 * HKV)]
    lengths = (2, 0, S), (S_kv, 3, S)
    packed = dataclasses.replace(found[0], N=2 * (S + 2), S=1, seqlens=lengths[0], kv_seqlens=lengths[1])
    return [*found, dataclasses.replace(found[0], shared=0.75), packed]


def _hard() -> list[Case]:
    """Keys listed twice, spans past the query, rows without keys; and scores whose exp overflows."""
    found: list[Case] = []
    for dtype in ("bf16", "fp16", "fp32"):
        spans = Case(16, 128, 128, 256, 512, "overlap", dtype, HKV=4, S=64, S_kv=1000)
        listed = [spans, dataclasses.replace(spans, positions=True), dataclasses.replace(spans, source="blocks")]
        rows = [Case(8, 128, 128, 512, 64, "few", dtype, source=source) for source in ("rows", "varlen")]
        found += listed + [dataclasses.replace(c, scores=64) for c in (*listed, *rows)]
    return found


def small() -> list[Case]:
    """The parity lane in the interpreter, small because a program takes 10 to 25 ms: every source, fp16 and fp32."""
    rows = [
        (1, 16, 16, 17, "fp32"), (2, 64, 64, 33, "fp16"), (3, 96, 64, 48, "fp32"), (4, 64, 128, 100, "fp16"),
        (7, 100, 96, 65, "fp32"), (8, 128, 128, 130, "fp16"), (16, 128, 100, 64, "fp16"), (8, 64, 16, 1, "fp32"),
    ]  # fmt: skip
    out = _small_hard() + [Case(H, D, Dv, L, 2, "few", dtype) for H, D, Dv, L, dtype in rows]
    out += [Case(4, 64, 64, 1024, 1, "few", "fp16"), Case(2, 64, 64, 1024, 1, "few", "fp32")]
    out += [Case(H, D, Dv, L, 3, "few", dtype, source="varlen") for H, D, Dv, L, dtype in rows]
    out += [
        Case(H, D, Dv, max(L, 16), 2, ("many", "mixed", "few")[i % 3], dtype, source="ranges", S_kv=257)
        for i, (H, D, Dv, L, dtype) in enumerate(rows)
    ]
    out += [
        Case(H, D, Dv, 2 * size + 3, 2, "many", dtype, source="blocks", S_kv=211, block_size=size)
        for (H, D, Dv, _, dtype), size in zip(rows, (16, 32, 64, 16, 32, 64, 16, 48), strict=True)
    ]
    out += [Case(2, 64, 64, 256, 2, "many", "fp32", source="blocks", S_kv=500, block_size=128)]
    long = Case(2, 64, 64, 24, 12, "mixed", "fp32", HKV=2, S=3, S_kv=40)
    block = Case(4, 64, 32, 48, 12, "prefill", "fp16", HKV=2, S=3, S_kv=77, block_size=16)
    for c in (long, block):
        out += [c, dataclasses.replace(c, causal=False), dataclasses.replace(c, positions=True)]
    out += [dataclasses.replace(long, int64=True), dataclasses.replace(long, S=1, N=2, S_kv=2048, L=1024, dist="many")]
    out += [Case(3, 64, 64, 10, 12, "mixed", "fp32", source="ranges", HKV=2, seqlens=(1, 4, 0, 1))]
    out += [Case(3, 64, 64, 32, 12, "prefill", "fp32", HKV=2, block_size=16, seqlens=(1, 4, 0, 1))]
    out += _small_prefills() + small_blocks(5, 61, ("fp16", "fp32"))
    out += [
        Case(16, 128, 128, 192, 2, "decode", "fp16", HKV=2, S_kv=500),
        Case(4, 64, 64, 128, 1, "decode", "fp32", S_kv=100, n=3),
    ]
    return out


def _small_hard() -> list[Case]:
    """A small version of `_hard`. These cases come first in the matrix, because most wrong kernels fail on them."""
    spans = Case(2, 32, 32, 24, 6, "overlap", "fp32", HKV=2, S=3, S_kv=40)
    blocks = Case(2, 32, 16, 64, 6, "overlap", "fp16", source="blocks", HKV=2, S=3, S_kv=77, block_size=16)
    return [
        *(spans, blocks),
        dataclasses.replace(spans, dtype="fp16", positions=True, scores=64),
        dataclasses.replace(blocks, dtype="fp32", scores=64),
        *(Case(4, 32, 32, 40, 2, "few", "fp16", scores=64), Case(2, 32, 16, 33, 2, "few", "fp32", scores=64)),
        Case(3, 32, 32, 40, 3, "few", "fp16", source="varlen", scores=64),
    ]


def _small_prefills() -> list[Case]:
    """A small version of `prefills`: a few queries, and each group size, block size and geometry once."""
    heads = [(1, 2, 16), (2, 1, 32), (3, 2, 16), (4, 1, 64), (8, 1, 16), (16, 1, 16), (64, 1, 32)]  # H, HKV, block
    out = [
        Case(H, 32, 16 if H % 2 else 32, 3 * size, 9 * HKV, "prefill", ("fp32", "fp16")[i % 2], HKV=HKV, S=9,
             S_kv=9 if i % 3 else 70, block_size=size)
        for i, (H, HKV, size) in enumerate(heads)
    ]  # fmt: skip
    lengths = (1, 5, 0, 2, 3), (20, 5, 4, 70, 0)
    packed = Case(2, 32, 32, 32, 22, "prefill", "fp32", HKV=2, block_size=16, seqlens=lengths[0], kv_seqlens=lengths[1])
    out += [packed, dataclasses.replace(packed, dist="mixed", source="ranges", L=6, n=0)]
    out += [dataclasses.replace(packed, causal=False)]  # the last block of a sequence reaches into the next one
    return out + [Case(2, 32, 32, 64, 40, "prefill", "fp16", HKV=2, S=20, S_kv=100, block_size=16, shared=0.75)]
