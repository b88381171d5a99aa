"""What a wrong call over a cache is told: a batch of queries, packed queries, and caches of float8_e4m3fn."""

import re

import pytest
import torch

import nsa
from nsa.testing.matrix import caches

from ..calls.refusals import META, ints
from .cached_calls import PAGE, ROOM, ends, everything, queries

E4M3 = torch.float8_e4m3fn
LENGTHS, TABLE, TENSOR = "cache_seqlens: expected", "block_table: expected", "expected a torch.Tensor, got"
NUMBER, RANGE = f"{LENGTHS} a torch.Tensor or an int, got", f"{LENGTHS} an int from 0 to"
# What differs from a call that is right, and what is said.
BATCH = {
    "page-size": ({"page_size": 32}, ValueError, "page_size: expected shape[1] of k_cache ["),
    "page-size-of-none": (
        {"block_table": None, "page_size": 16, "contiguous": True}, ValueError, "None without block_table, got 16",
    ),
    "lengths-shape": ({"cache_seqlens": ints(3)}, ValueError, f"{LENGTHS} [B] = [2]"),
    "lengths-dtype": ({"cache_seqlens": torch.zeros(2)}, TypeError, f"{LENGTHS} dtype int32, int64"),
    "lengths-forgotten": ({"cache_seqlens": None}, TypeError, f"{NUMBER} NoneType"),
    "scale": ({"scale": "x"}, TypeError, "scale: expected a number or None, got str"),
    "lengths-list": ({"cache_seqlens": [5, 5]}, TypeError, f"{NUMBER} list"),
    "length-bool": ({"cache_seqlens": True}, TypeError, f"{NUMBER} bool"),
    "length-float": ({"cache_seqlens": 5.0}, TypeError, f"{NUMBER} float"),
    "length-negative": ({"cache_seqlens": -1}, ValueError, f"{RANGE} {ROOM}, got -1"),
    "length-beyond-pages": ({"cache_seqlens": ROOM + 1}, ValueError, f"{RANGE} {ROOM}, got 65"),
    "length-beyond-narrow-table": (
        {"cache_seqlens": PAGE + 1, "block_table": ints(2, 1)}, ValueError, f"{RANGE} {PAGE}, got {PAGE + 1}",
    ),
    "length-beyond": ({"cache_seqlens": 65, "contiguous": True}, ValueError, f"{RANGE} {ROOM}, got 65"),
    "length-and-table-1d": (
        {"cache_seqlens": 5, "block_table": ints(2)}, ValueError, f"{TABLE} [B, width], got shape [2]",
    ),
    "length-and-table-list": (
        {"cache_seqlens": 5, "block_table": [[0], [1]]}, TypeError, f"block_table: {TENSOR} list",
    ),
    "length-and-table-shape": ({"cache_seqlens": 5, "block_table": ints(3, 4)}, ValueError, f"{TABLE} [B, width]"),
    "table-shape": ({"block_table": ints(3, 4)}, ValueError, f"{TABLE} [B, width]"),
    "table-dtype": ({"block_table": torch.zeros(2, 4)}, TypeError, f"{TABLE} dtype"),
    "table-1d": ({"block_table": ints(2)}, ValueError, f"{TABLE} [B, width]"),
    "no-table": ({"block_table": None}, ValueError, "k_cache: expected [B, S_max, HKV, D]"),
    "neither": ({"block_indices": None, "block_size": None}, ValueError, "exactly one of ranges and block_indices"),
    "backend": ({"backend": "fast"}, ValueError, "backend: expected one of"),
    # Errors call caches what the caller does.
    "value-dtype": ({"v_cache": lambda x: x.double()}, TypeError, "v_cache: expected dtype float32"),
    "key-shape": ({"k_cache": lambda x: x[0]}, ValueError, "k_cache: expected [num_pages, page_size, HKV, D]"),
    "value-shape": ({"v_cache": lambda x: x[:, 1:]}, ValueError, "v_cache: expected [num_pages, page_size, HKV, Dv]"),
    "no-keys": ({"k_cache": None}, TypeError, f"k_cache: {TENSOR} NoneType"),
    "no-values": ({"v_cache": None}, TypeError, f"v_cache: {TENSOR} NoneType"),
    "page-size-of-no-cache": (
        {"k_cache": lambda x: torch.zeros(4), "page_size": 16}, ValueError,
        "page_size: expected shape[1] of k_cache [4], got 16",
    ),
    "room": (
        {"block_table": lambda x: x[:, :1].expand(2, 2**27), "block_size": 8}, ValueError,
        "block_table: expected room for 1073741568 keys or fewer",
    ),
    # An int is checked first, but the error is about what is wrong.
    "length-and-q-3d": (
        {"q": torch.zeros(4, 4, 16), "cache_seqlens": 3}, ValueError, "q: expected [B, S, HQ, D], got shape [4, 4, 16]",
    ),
    "length-and-key-shape": (
        {"k_cache": lambda x: x[0], "cache_seqlens": 3, "contiguous": True}, ValueError,
        "k_cache: expected [B, S_max, HKV, D], got shape [64, 2, 16]",
    ),
    "length-and-batch": (
        {"q": torch.zeros(1, 1, 4, 16), "cache_seqlens": 3, "contiguous": True}, ValueError,
        "k_cache: expected [B, S_max, HKV, D] = [1, 64, 2, 16], got [2, 64, 2, 16]",
    ),
    "page-size-and-no-keys": ({"k_cache": None, "page_size": 16}, TypeError, f"k_cache: {TENSOR} NoneType"),
    "length-and-q-float": ({"q": 1.0, "cache_seqlens": 3}, TypeError, f"q: {TENSOR} float"),
    "length-and-no-keys": (
        {"k_cache": None, "cache_seqlens": 3, "contiguous": True}, TypeError, f"k_cache: {TENSOR} NoneType",
    ),
}  # fmt: skip
CU, MAX, NEED = "cu_seqlens_q: expected", "max_seqlen_q: expected", "packed queries [T, HQ, D] need cu_seqlens_q"
PACKED = {
    "not-packed": ({"q": torch.zeros(2, 2, 4, 16)}, ValueError, "q: expected [T, HQ, D], got shape [2, 2, 4, 16]"),
    "no-ends": (
        {"cu_seqlens_q": None}, ValueError, f"q: expected [B, S, HQ, D], got shape [4, 4, 16]; {NEED}",
    ),
    "no-ends-and-a-length": (
        {"cu_seqlens_q": None, "cache_seqlens": 5}, ValueError, f"got shape [4, 4, 16]; {NEED}",
    ),
    "ends-list": ({"cu_seqlens_q": [0, 3, 4]}, TypeError, f"cu_seqlens_q: {TENSOR} list"),
    "ends-list-and-a-length": (
        {"cu_seqlens_q": [0, 3, 4], "cache_seqlens": 5}, TypeError, f"cu_seqlens_q: {TENSOR} list",
    ),
    "ends-dtype": ({"cu_seqlens_q": torch.zeros(3)}, TypeError, f"{CU} dtype int32, int64, got float32"),
    "ends-2d": ({"cu_seqlens_q": ints(1, 3)}, ValueError, f"{CU} [B + 1] with B >= 0, got shape [1, 3]"),
    "ends-empty": ({"cu_seqlens_q": ints(0)}, ValueError, f"{CU} [B + 1] with B >= 0, got shape [0]"),
    "ends-empty-and-a-length": (
        {"cu_seqlens_q": ints(0), "cache_seqlens": 5}, ValueError, f"{CU} [B + 1] with B >= 0",
    ),
    "too-many-sequences": (
        {"cu_seqlens_q": ints(16_386)}, ValueError, f"{CU} 16384 sequences or fewer with a cache, got 16385",
    ),
    "ends-device": ({"cu_seqlens_q": ints(3).to(META)}, ValueError, f"{CU} device"),  # that of q
    "lengths-of-other-sequences": ({"cu_seqlens_q": ints(4)}, ValueError, f"{LENGTHS} [B] = [3], got [2]"),
    "cache-of-other-sequences": (
        {"cu_seqlens_q": ints(4), "contiguous": True}, ValueError,
        "k_cache: expected [B, S_max, HKV, D] = [3, 64, 2, 16], got [2, 64, 2, 16]",
    ),
    "table-of-other-sequences": ({"block_table": ints(3, 4)}, ValueError, f"{TABLE} [B, width] = [2, 4], got [3, 4]"),
    "blocks-of-a-batch": (
        {"block_indices": ints(2, 2, 2, 1)}, ValueError, "block_indices: expected [T, HKV, n], got shape [2, 2, 2, 1]",
    ),
    "blocks-of-other-tokens": (
        {"block_indices": ints(5, 2, 1)}, ValueError, "block_indices: expected [T, HKV, n] = [4, 2, 1], got [5, 2, 1]",
    ),
    "out": ({"out": torch.zeros(5, 4, 16)}, ValueError, "out: expected [T, HQ, Dv] = [4, 4, 16], got [5, 4, 16]"),
    "longest-float": ({"max_seqlen_q": 3.0}, TypeError, f"{MAX} an int, got float"),
    "longest-bool": ({"max_seqlen_q": True}, TypeError, f"{MAX} an int, got bool"),
    "longest-list": ({"max_seqlen_q": [3]}, TypeError, f"{MAX} an int, got list"),
    "longest-tensor": ({"max_seqlen_q": torch.tensor(3)}, TypeError, f"{MAX} an int, got Tensor"),
    "longest-negative": ({"max_seqlen_q": -1}, ValueError, f"{MAX} an int >= 0, got -1"),
    "longest-of-a-batch": (
        {"cu_seqlens_q": None, "q": torch.zeros(2, 2, 4, 16), "max_seqlen_q": 2}, ValueError,
        f"{MAX} None without cu_seqlens_q, got 2",
    ),
    "cu_seqlens": ({"cu_seqlens": ints(3)}, TypeError, "Did you mean 'cu_seqlens_q'?"),
}  # fmt: skip
CACHE_DTYPE, QUERY_DTYPE = "expected dtype float16, float8_e4m3fn, got", "q: expected dtype float16, bfloat16 with"
FP8 = {
    "shape": ({"k_scale": torch.ones(3)}, ValueError, "k_scale: expected [], [1] or [HKV] = [2], got [3]"),
    "shape-2d": (
        {"v_scale": torch.ones(1, 2)}, ValueError, "v_scale: expected [], [1] or [HKV] = [2], got [1, 2]",
    ),
    "dtype": ({"v_scale": torch.ones(2).half()}, TypeError, "v_scale: expected dtype float32, got float16"),
    "device": ({"k_scale": torch.ones(2, device="meta")}, ValueError, "k_scale: expected device {device} (that of q)"),
    "number": ({"k_scale": 0.5}, TypeError, f"k_scale: {TENSOR} float"),
    "fp8-query": ({"q": lambda q: q.to(E4M3)}, TypeError, f"{QUERY_DTYPE} a cache of float8_e4m3fn, got flo"),
    "fp32-query": ({"q": lambda q: q.float()}, TypeError, f"{QUERY_DTYPE} a cache of float8_e4m3fn, got float32"),
    "values": (
        {"v_cache": lambda x: x.half()}, TypeError, "v_cache: expected dtype float8_e4m3fn (that of k_cache), got",
    ),
    "keys": (
        {"k_cache": lambda x: x.half()}, TypeError, "v_cache: expected dtype float16 (that of q), got float8_e4m3fn",
    ),
    "other-fp8": (
        {"k_cache": lambda x: x.float().to(torch.float8_e4m3fnuz)}, TypeError,
        f"k_cache: {CACHE_DTYPE} float8_e4m3fnuz",
    ),
    "e5m2": (
        {"k_cache": lambda x: x.float().to(torch.float8_e5m2)}, TypeError, f"k_cache: {CACHE_DTYPE} float8_e5m2",
    ),
    "no-fp8": (
        {"k_cache": lambda x: x.half(), "v_cache": lambda x: x.half()}, ValueError,
        "k_scale: expected None with a cache of float16, got a tensor",
    ),
    "out": ({"out": torch.empty(2, 1, 4, 16)}, TypeError, "out: expected dtype float16 (that of q), got float32"),
    "k_descale": ({"k_descale": torch.ones(2)}, TypeError, "'k_descale': nsa calls it k_scale"),
}  # fmt: skip
TABLES = {"batch": BATCH, "packed": PACKED, "fp8": FP8}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, name) for kind, rows in TABLES.items() for name in rows])
def test_refusals_over_a_cache(device, kind, wrong):
    change, error, text = TABLES[kind][wrong]
    change = dict(change)
    cache = caches.draw([40, 64], ROOM, None if change.pop("contiguous", False) else PAGE, device=device)
    cache = caches.quantized(cache) if kind == "fp8" else cache
    lead = (4,) if kind == "packed" else (2, 1)
    q = queries(*lead, device=device)
    right = {"q": q.half() if kind == "fp8" else q, "k_cache": cache.k, "v_cache": cache.v} | cache.arguments
    right |= everything(*lead, device=device) | {"backend": "sdpa"}
    right |= {"cu_seqlens_q": ends(0, 3, 4, device=device)} if kind == "packed" else {}
    for name, x in change.items():
        right[name] = x(right[name]) if callable(x) and not isinstance(x, torch.Tensor) else x
        if isinstance(right[name], torch.Tensor) and not right[name].is_meta:
            right[name] = right[name].to(device)
    for grad in (True, False):  # and a wrong call is not remembered as a right one
        with torch.set_grad_enabled(grad), pytest.raises(error, match=re.escape(text.format(device=device))):
            nsa.selection_attention_with_kvcache(**right)


def test_only_a_cache_may_be_fp8(device):
    cache = caches.quantized(caches.draw([40, 0], ROOM, None, device=device))
    q, selection = queries(2, 1, device=device).half(), everything(2, 1, device=device)
    with pytest.raises(TypeError, match=r"k: expected dtype float16 \(that of q\), got float8_e4m3fn"):
        nsa.selection_attention(q, cache.k, cache.v, **selection)
