"""Launching compiled kernels directly: when, with which arguments, and that no call gets another call's variant."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton as triton_language

import nsa
from nsa.kernels.shared import launch
from nsa.kernels.shared.launch import TRITON, Variant

triton = partial(nsa.selection_attention, backend="triton")
CUDA = torch.device("cuda", 0)
STREAM = 77


class Kernel:
    """A `@triton.jit` function and its compiled kernels, as far as launching goes."""

    arg_names = ("x", "y", "n", "FIRST", "SECOND")
    constexprs = {"SECOND": 2, "FIRST": 1}  # noqa: RUF012
    function, packed_metadata = 55, (4, 1, 0)

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def by_triton(*args, **keywords):
            self.log.append(("triton", grid, args, keywords))
            return self

        return by_triton

    def warmup(self, *args, grid, **keywords):
        self.log.append(("compiled", grid, args, keywords))
        return self

    def launch_metadata(self, grid, stream, *args):
        return ("about", grid, stream, *args)

    def run(self, *args):
        self.log.append(("direct", *args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_stream", lambda index: STREAM + index)
    monkeypatch.setattr(launch, "knobs", knobs())
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch.asking, "ask", lambda *_: None)
    return Kernel()


def knobs(enter=(), leave=()):
    """Triton's, as far as launches are concerned."""
    return SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=enter), launch_exit_hook=SimpleNamespace(calls=leave)
    )


def pointer(address):
    return SimpleNamespace(data_ptr=lambda: address)


def test_the_second_launch_is_direct(kernel):
    variant = Variant(kernel, kernel.constexprs, {"num_warps": 4})
    x = pointer(4096)
    for n in (5, 6):
        variant.launch((n, 1, 1), CUDA, (x, None), (n,))
    options = {"FIRST": 1, "SECOND": 2, "num_warps": 4, "enable_fp_fusion": True}
    by_triton = ("triton", (5, 1, 1), (x, None, 5), options)
    direct = ("direct", 6, 1, 1, STREAM, 55, (4, 1, 0), None, None, None, 4096, 0, 6, 1, 2)
    assert kernel.log == [by_triton, direct]


def test_pieces_of_a_workspace(kernel):
    """A compiled kernel gets their addresses, multiples of 16, and Triton tensors that lie there and do not overlap."""
    cpu, i32 = torch.device("cpu"), torch.int32
    sizes = {"a": (5, torch.float16), "b": (3, torch.int64), "c": None, "d": (7, i32), "e": (300, torch.int16)}
    *made, none, d, e = launch.workspaces(cpu, **sizes, f=(0, i32))[:5]
    assert none is None
    pieces = [*made, d, e, d.behind(4)]
    assert [(x.tensor().numel(), x.tensor().dtype) for x in pieces] == [*filter(None, sizes.values()), (3, i32)]
    assert all(x.data_ptr() == x.tensor().data_ptr() and x.data_ptr() % 16 == 0 for x in pieces)
    for value, x in enumerate(pieces[:4]):
        x.room().fill_(value)
    assert [x.tensor().unique().tolist() for x in pieces] == [[0], [1], [2], [3], [2]]
    d.zero_()
    assert [x.tensor().unique().tolist() for x in pieces] == [[0], [1], [0], [3], [0]]
    assert d.room().tolist()[7:] == [2] * (d.room().numel() - 7)
    variant = Variant(kernel, kernel.constexprs, {})
    for _ in range(2):
        variant.launch((1, 1, 1), CUDA, (d, None), (1,))
    (_, _, (given, *_), _), direct = kernel.log
    assert (given.data_ptr(), given.numel(), direct[10]) == (d.data_ptr(), 7, d.data_ptr())


@pytest.mark.skipif(not launch.TMA, reason="host descriptors need Triton 3.4")
@pytest.mark.parametrize("shape", [(2, 40, 3, 16), (80, 3, 16)], ids=["batch", "varlen"])
def test_later_launches_describe_tensors_as_the_first(kernel, shape):
    """Which Triton checks. Packed sequences count as one, and heads come before keys."""
    variant = Variant(kernel, kernel.constexprs, {}, blocks={0: [1, 1, 8, 16]})
    x = torch.zeros(shape, dtype=torch.float16)
    for _ in range(2):
        variant.launch((1, 1, 1), CUDA, (x, None), (1,))
    (_, _, (first, *_), _), direct = kernel.log
    later, (keys, heads, D) = direct[10], shape[-3:]
    assert isinstance(later, type(first))
    assert first.base is later.base is x
    facts = [{name: getattr(y, name) for name in first.__dataclass_fields__ if name != "base"} for y in (first, later)]
    assert facts[0] == facts[1]
    batch = shape[0] if len(shape) == 4 else 1
    assert (first.shape, first.strides) == ((batch, heads, keys, D), (keys * heads * D, D, heads * D, 1))


@pytest.mark.parametrize("first", [True, False], ids=["common first", "rare first"])
@pytest.mark.parametrize(
    "rare",
    [{"address": 4104}, {"common": False}, {"watched": {"enter": [print]}}, {"watched": {"leave": [print]}}],
    ids=["misaligned", "int64", "profiler", "profiler at the end"],
)
def test_a_rare_launch_is_tritons_and_changes_nothing(kernel, monkeypatch, rare, first):
    variant = Variant(kernel, kernel.constexprs, {})

    def go(address=4096, common=True, watched=None):
        monkeypatch.setattr(launch, "knobs", knobs(**watched or {}))
        variant.launch((1, 1, 1), CUDA, (pointer(address), None), (1,), common)
        return kernel.log[-1][0]

    if first:
        assert [go(), go(**rare), go()] == ["triton", "triton", "direct"]
    else:  # what a profiler sees the first time is the common kernel all the same
        assert [go(**rare), go(), go()] == ["triton", "direct" if "watched" in rare else "triton", "direct"]


@pytest.mark.parametrize(
    ("device", "direct"), [(torch.device("cpu"), True), (CUDA, False)], ids=["interpreter", "old Triton"]
)
def test_else_triton_launches(kernel, monkeypatch, device, direct):
    monkeypatch.setattr(launch, "DIRECT", direct)
    variant = Variant(kernel, kernel.constexprs, {})
    for _ in range(2):
        variant.launch((1, 1, 1), device, (pointer(4096), None), (1,))
    assert [entry[0] for entry in kernel.log] == ["triton", "triton"]


def test_a_kernel_runs_on_the_device_of_its_tensors(kernel, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)
            monkeypatch.setattr(launch, "current_device", lambda: self.device.index)

        def __exit__(self, *_):
            monkeypatch.setattr(launch, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    variant = Variant(kernel, kernel.constexprs, {})
    for _ in range(2):
        variant.launch((1, 1, 1), torch.device("cuda", 1), (pointer(4096), None), (1,))
    assert entered == [torch.device("cuda", 1)] * 2
    assert [entry[0] for entry in kernel.log] == ["triton", "direct"]
    assert kernel.log[1][4] == STREAM + 1


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_noticed(kernel, monkeypatch, hook):
    """By the hooks that Triton's own launch would call, those of this Triton."""
    real = triton_language.knobs.runtime if TRITON >= (3, 5) else pytest.skip("this Triton launches everything itself")
    monkeypatch.setattr(launch, "knobs", real)
    variant = Variant(kernel, kernel.constexprs, {})

    def go():
        variant.launch((1, 1, 1), CUDA, (pointer(4096), None), (1,))
        return kernel.log[-1][0]

    assert [go(), go()] == ["triton", "direct"]
    getattr(real, hook).add(print)
    try:
        assert go() == "triton"
    finally:
        getattr(real, hook).remove(print)
    assert go() == "direct"


def test_a_cluster_is_not_launched_on_a_guess(kernel, monkeypatch):
    """Where Triton says otherwise how kernels are launched, or a hook has them compiled elsewhere."""
    variant = Variant(kernel, kernel.constexprs, {}, cluster=8)
    for unknown in ((4, 0), (4, 2, 0), (4, 1, 0, 1, 1, 1)):
        monkeypatch.setattr(kernel, "packed_metadata", unknown, raising=False)
        with pytest.raises(RuntimeError, match=r"expected \(warps, 1, shared memory\)"):
            variant.launch((1, 1, 1), CUDA, (pointer(4096), None), (1,))
    monkeypatch.setattr(kernel, "warmup", lambda *args, **keywords: None)
    variant.launch((1, 1, 1), CUDA, (pointer(4096), None), (1,))
    assert not [entry for entry in kernel.log if entry[0] == "direct"]


def test_clusters_are_said_by_the_launch(kernel, monkeypatch):
    """The kernel is compiled without; what is launched is a grid of clusters, also where a launch is rare."""
    variant = Variant(kernel, kernel.constexprs, {"num_warps": 4}, cluster=8)
    for n in (5, 6):
        variant.launch((n, 1, 1), CUDA, (pointer(4096), None), (n,))
    monkeypatch.setattr(launch, "knobs", watching := knobs(enter=[print]))
    variant.launch((7, 1, 1), CUDA, (pointer(4096), None), (7,))
    monkeypatch.setattr(launch, "knobs", knobs())
    variant.launch((8, 1, 1), CUDA, (pointer(4104), None), (8,))
    assert [entry[0] for entry in kernel.log] == ["compiled", "direct", "direct", *["compiled", "direct"] * 2]
    launched = [entry for entry in kernel.log if entry[0] == "direct"]
    assert [entry[1:4] for entry in launched] == [(n, 1, 1) for n in (5, 6, 7, 8)]
    assert {entry[4:7] for entry in launched} == {(STREAM, 55, (4, 8, 0))}
    assert launched[1][7:] == (None, None, None, 4096, 0, 6, 1, 2)
    about, *hooks = launched[2][7:10]
    assert about[:3] == ("about", (7, 1, 1), STREAM)
    assert hooks == [watching.launch_enter_hook, watching.launch_exit_hook]
    assert launched[3][10:] == (4104, 0, 8, 1, 2)


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


@pytest.mark.parametrize(
    ("shared", "static", "asked"),
    [(0, 48 * 1024, False), (32 * 1024, 16 * 1024 + 16, True), (48 * 1024, 16, True), (48 * 1024 + 16, 16, False)],
)
def test_shared_memory_that_triton_does_not_see_is_asked_for_once(kernel, monkeypatch, shared, static, asked):
    """CUDA gives 48 KiB unasked; Triton asks for more where what it sees needs more, for all that there is."""
    loaded = []

    def load_binary(name, binary, shared, device):
        loaded.append((name, binary, shared > 48 * 1024, device))
        return "module", 56, 0, 0, 1024

    utils = SimpleNamespace(load_binary=load_binary)
    monkeypatch.setattr(
        launch.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)), raising=False
    )
    kernel.name, kernel.kernel, kernel.packed_metadata = "k", b"cubin", (4, 1, shared)
    variant = Variant(kernel, kernel.constexprs, {}, cluster=8, static=static)
    for address in (4096, 4096, 4104, 4104):  # what is misaligned is compiled, or looked up, by every launch
        variant.launch((1, 1, 1), CUDA, (pointer(address), None), (1,))
    assert loaded == [("k", b"cubin", True, 0)] * asked
    launched = [entry for entry in kernel.log if entry[0] == "direct"]
    assert {entry[5:7] for entry in launched} == {(56 if asked else 55, (4, 8, shared))}
    assert len(launched) == 4
