"""Small calls over a cache, for several files of tests."""

import torch

import nsa

ROOM, PAGE = 64, 16  # keys of a sequence's room in the cache, and of a page
BACKENDS = ["triton", "key_major", "sdpa", "reference"]  # key_major: of Triton's kernels the ones for chunks


def call(q, cache, backend="triton", **keywords):
    how = {"backend": backend} if backend != "key_major" else {"backend": "triton", "schedule": backend}
    return nsa.selection_attention_with_kvcache(
        q, cache.k, cache.v, **(cache.arguments | {"return_lse": True} | how | keywords)
    )


def queries(B, S=1, seed=5, device="cpu", HQ=4, D=16):
    return torch.randn(B, S, HQ, D, generator=torch.Generator().manual_seed(seed)).to(device)


def everything(B, S, device, n=ROOM // PAGE):
    """Every block of every sequence, and one past the end."""
    return torch.arange(n + 1, dtype=torch.int32, device=device).expand(B, S, 2, n + 1).contiguous()
