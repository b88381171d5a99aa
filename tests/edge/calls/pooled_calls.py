"""Run by test_concurrency.py: imports `nsa`, asks nothing of CUDA, and has the children of a pool call it."""

import multiprocessing
import os
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


def seen(visible):
    """How many GPUs a process sees that may see these, and the route that it takes."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    qkv, ranges = problem("cuda" if torch.cuda.is_available() else "cpu", 0)
    attend(qkv, ranges, "auto")
    return torch.cuda.device_count(), nsa.routes()[0].route


def pool(how, processes):
    # A fork has lost the threads of its parent's pool.
    return multiprocessing.get_context(how).Pool(processes, torch.set_num_threads, (1,))


if __name__ == "__main__":
    device, backend, out = sys.argv[1:]
    found = {}
    for how, processes in (("fork", 2), ("spawn", 1)):  # a spawned child imports torch anew
        with pool(how, processes) as children:
            found[how] = children.starmap(call, [(device, backend, seed) for seed in range(2)])
    for visible in ("", "0"):
        with pool("fork", 1) as children:
            found[f"visible {visible}"] = children.apply(seen, (visible,))
    torch.save(found, out)
