"""Small calls over a cache, for several files of tests."""

import torch

import nsa
from nsa.testing.matrix import caches

from ...conftest import compare

ROOM, PAGE = 64, 16  # keys of a sequence's room in the cache, and of a page
BACKENDS = ["triton", "key_major", "sdpa", "reference"]  # key_major: of Triton's kernels the ones for chunks


def call(q, cache, backend="triton", cu=None, **keywords):
    """`(O, LSE)` of a backend or of a schedule of Triton's; `cu` are the ends of packed queries."""
    named = backend in ("auto", "triton", "sdpa", "reference")
    how = {"backend": backend} if named else {"backend": "triton", "schedule": backend}
    how |= {"return_lse": True} | cache.arguments | ({} if cu is None else {"cu_seqlens_q": cu})
    return nsa.selection_attention_with_kvcache(q, cache.k, cache.v, **(how | keywords))


def agrees(q, cache, backend="triton", cu=None, how=None, **selection):
    """The same, compared with the oracle; `how` are arguments that the oracle does not take."""
    got = call(q, cache, backend, cu, **selection, **(how or {}))
    compare(got, caches.oracle(q, cache, *(() if cu is None else (cu,)), **selection), q.dtype)
    return got


def queries(*lead, device, seed=5, D=16):
    """`[B, S, 4, D]`, or of packed queries `[T, 4, D]`."""
    return torch.randn(*lead, 4, D, generator=torch.Generator().manual_seed(seed)).to(device)


def everything(*lead, device, n=ROOM // PAGE, size=PAGE):
    """A selection of every block of every sequence, and of one past the end."""
    blocks = torch.arange(n + 1, dtype=torch.int32, device=device).expand(*lead, 2, n + 1).contiguous()
    return {"block_indices": blocks, "block_size": size}


def ends(*values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)
