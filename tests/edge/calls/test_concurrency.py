"""Several threads, streams, processes and GPUs at once; and 200 times the same under load."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nsa
from nsa.kernels import pinned
from nsa.kernels.query_major.tiles import Choice
from nsa.testing.plugin import current_lane

from ...conftest import ROOT, bitwise
from . import pooled_calls
from .pooled_calls import attend, problem

REPEATS = 200
# Triton's interpreter patches the language while a kernel runs, for the whole process: one thread only.
BACKENDS = ("triton", "sdpa") if current_lane() == "gpu" else ("sdpa", "reference")


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_and_four_streams(device, backend):
    """Each thread its own problem, shape and stream; the first calls, which compile, at the same time as well."""
    rows, times = (20, 10) if device.type == "cuda" else (2, 4)  # a row takes a CPU as long as all of them take a GPU
    work = [problem(device, seed, N=rows + seed) for seed in range(8)]
    streams = [torch.cuda.Stream() for _ in range(4)] if device.type == "cuda" else [None] * 4
    if device.type == "cuda":
        torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(streams[i % 4]):
            return [attend(*work[i], backend) for _ in range(times)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(run, range(8)))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for results, one in zip(found, work, strict=True):
        want = attend(*one, backend)
        assert all(bitwise(want, got) for got in results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "choice", [None, Choice(1, 1, 64, 4, 3), Choice(4, 1, 64, 4, 2, 1), Choice(4, 1, 64, 4, 2, 0)], ids=str
)
@pytest.mark.parametrize("source", ["ranges", "blocks", "rows"])
def test_repeats_under_load(device, source, choice):
    """Bitwise the same, however busy the GPU is with something else."""
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(1, 40, 16, 128, generator=g, device=device).bfloat16()
    k, v = (torch.randn(1, 4096, 2, 128, generator=g, device=device).bfloat16() for _ in range(2))
    if source == "rows":
        Q, K, V = q.view(80, 8, 128), k.view(2, 4096, 128)[:, :1000], v.view(2, 4096, 128)[:, :1000]
        K, V = K.repeat(40, 1, 1), V.repeat(40, 1, 1)
        call = lambda: nsa.sel_attn_fwd_dense_group(Q, K, V, return_lse=True)  # noqa: E731
    else:
        start = torch.randint(0, 64, (1, 40, 2, 16), generator=g, device=device)
        ranges = torch.stack((start * 64, start * 64 + 64), -1)
        selection = {"ranges": ranges} if source == "ranges" else {"block_indices": start, "block_size": 64}
        how = {"max_selected": 1024, "causal": False, "backend": "triton", "return_lse": True}
        call = lambda: nsa.selection_attention(q, k, v, **selection, **how)  # noqa: E731
    load = torch.randn(4096, 4096, device=device).bfloat16()
    other = torch.cuda.Stream()
    with pinned(query_major=choice):
        want = call()
        torch.cuda.synchronize()
        different = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(REPEATS):
            with torch.cuda.stream(other):
                load @ load
            for a, b in zip(call(), want, strict=True):
                different += (a != b).sum()
        torch.cuda.synchronize()
    assert different.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs (without -n: a worker sees one)")
@pytest.mark.parametrize("choice", [None, Choice(4, 1, 64, 4, 2, 1), Choice(4, 1, 64, 4, 2, 0)], ids=str)
def test_tensors_of_another_gpu(choice):
    """`cuda:1` while `cuda:0` is current."""
    with pinned(query_major=choice):
        want = attend(*problem(torch.device("cuda", 0), 3), "triton")
        qkv, ranges = problem(torch.device("cuda", 1), 3)
        assert torch.cuda.current_device() == 0
        got = attend(qkv, ranges, "triton")
    assert torch.cuda.current_device() == 0
    assert {x.device.index for x in got} == {1}
    assert bitwise([x.cpu() for x in want], [x.cpu() for x in got])


@pytest.fixture(scope="module")
def processes(tmp_path_factory, device):
    """What the children of `pooled_calls.py` found. It is a fresh process: one that has used CUDA cannot be forked."""
    out = tmp_path_factory.mktemp("processes") / "results.pt"
    # TRITON_INTERPRET set to 0 or not at all: which it is decides whether kernels are interpreted.
    environment = {
        name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET" and not name.startswith("NSA_")
    }
    environment |= {"PYTHONPATH": str(ROOT), "NSA_SEL_TRITON_MIN_L": "0"}
    command = [sys.executable, pooled_calls.__file__, device.type, BACKENDS[0], out]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return torch.load(out)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_after_import(processes, how, device):
    """`nsa` is imported, and children call it."""
    found = processes[how]
    assert len(found) == 2
    for seed, got in enumerate(found):
        assert bitwise(pooled_calls.call(device.type, BACKENDS[0], seed), got)


@pytest.mark.parametrize("visible", ["", "0"], ids=["no GPU", "one GPU"])
def test_visible_devices(processes, visible):
    """A process that sees no GPU, or one of them, routes by what it sees."""
    gpus = 1 if visible and current_lane() == "gpu" else 0
    assert processes[f"visible {visible}"] == (gpus, "query_major" if gpus else "sdpa")
