"""Run by test_concurrency.py: imports `nsa`, asks nothing of CUDA, and has the children of a pool call it."""

import multiprocessing
import sys

import torch

import nsa


def problem(device, seed, N=24, S_kv=700, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, 64, generator=g) for shape in ((1, N, 8), (1, S_kv, 2), (1, S_kv, 2)))
    ranges = torch.randint(-9, S_kv + 9, (1, N, 2, 6, 2), generator=g)
    return [x.to(device, dtype) for x in (q, k, v)], ranges.to(device)


def attend(qkv, ranges, backend):
    return nsa.selection_attention(*qkv, ranges=ranges, backend=backend, max_selected=4200, return_lse=True)


def call(device, backend, seed):
    """On the host, as pipes take it."""
    return [x.cpu() for x in attend(*problem(device, seed), backend)]


if __name__ == "__main__":
    how, device, backend, out = sys.argv[1:]
    # A fork has lost the threads of its parent's pool.
    with multiprocessing.get_context(how).Pool(2, torch.set_num_threads, (1,)) as pool:
        torch.save(pool.starmap(call, [(device, backend, seed) for seed in range(2)]), out)
