"""Launching compiled kernels directly: when, with which arguments, and that no call gets another call's variant."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import nsa
from nsa.kernels import launch
from nsa.kernels.launch import Variant, aligned

triton = partial(nsa.selection_attention, backend="triton")
CUDA = torch.device("cuda", 0)


class Kernel:
    """A `@triton.jit` function and its compiled kernels, as far as launching goes."""

    arg_names = ("x", "n", "FIRST", "SECOND")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def run(*args, **keywords):
            self.log.append(("triton", grid, args, keywords))
            return Compiled(self.log)

        return run


class Compiled:
    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args: self.log.append(("direct", grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "DIRECT", True)
    return Kernel()


def test_the_second_launch_is_direct(kernel):
    variant = Variant(kernel, {"SECOND": 2}, {"num_warps": 4})
    for n in (5, 6):
        variant.launch((n, 1, 1), CUDA, "key", ("x", n), FIRST=1)
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.log == [("triton", (5, 1, 1), ("x", 5), options), ("direct", (6, 1, 1), ("x", 6, 1, 2))]


@pytest.mark.parametrize(
    ("keys", "device", "direct"),
    [
        (("a", "b"), CUDA, True),
        ((None, None), CUDA, True),
        (("a", "a"), torch.device("cpu"), True),  # the interpreter compiles nothing
        (("a", "a"), CUDA, False),
    ],
    ids=["other key", "rare", "interpreter", "old Triton"],
)
def test_else_triton_launches(kernel, monkeypatch, keys, device, direct):
    monkeypatch.setattr(launch, "DIRECT", direct)
    variant = Variant(kernel, {}, {})
    for key in keys:
        variant.launch((1, 1, 1), device, key, ("x", 1), FIRST=1, SECOND=2)
    assert [entry[0] for entry in kernel.log] == ["triton", "triton"]


def test_a_kernel_runs_on_the_device_of_its_tensors(kernel, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device.index)

        def __exit__(self, *_):
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    variant = Variant(kernel, {}, {})
    for index in (0, 1, 0):
        variant.launch((1, 1, 1), torch.device("cuda", index), index, ("x", 1), FIRST=1, SECOND=2)
    assert entered == [torch.device("cuda", 1)]
    assert [entry[0] for entry in kernel.log] == ["triton", "triton", "direct"]


def test_aligned():
    pointer = lambda address: SimpleNamespace(data_ptr=lambda: address)  # noqa: E731
    assert aligned(pointer(32), None, pointer(4096))
    assert not aligned(pointer(32), pointer(40))


def test_calls_that_differ_in_what_triton_compiles_do_not_mix(draw, agrees):
    """Misaligned queries, int64 spans, positions, LSE: every combination twice, each against the oracle."""
    q, k, v = draw(B=2, S=3, S_kv=40)
    padded = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)
    misaligned = padded[1:].view(q.shape).copy_(q)
    assert misaligned.data_ptr() % 16
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, 40, (2, 3, k.shape[2], 3), generator=g)
    ranges = torch.stack((start, start + 7), -1).to(q.device)
    positions = torch.tensor([[39, 5, 20], [0, 39, 12]], device=q.device)
    kinds = list(itertools.product((q, misaligned), (torch.int32, torch.int64), (None, positions)))
    for query, dtype, at in kinds + kinds[::-1]:
        spans = {"ranges": ranges.to(dtype), "q_positions": at}
        o, _ = agrees(triton, query, k, v, **spans)
        assert torch.equal(triton(query, k, v, **spans), o)
