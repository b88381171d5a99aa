"""What the edge lane shares: every way to run a call, small tensors, and the comparison with the fp64 oracle.

The tensors are small because an interpreted Triton program costs about ten milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import dispatch, gpu, settings
from nsa.call import Call
from nsa.guard import memory, parent
from nsa.kernels.shared.errors import DoesNotFit
from nsa.plain.oracle import selection_reference
from nsa.testing.plugin import current_lane

ROUTES: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton"},
    "per_head": {"backend": "triton", "schedule": "per_head"},
    "key_major": {"backend": "triton", "schedule": "key_major"},
    "sdpa": {"backend": "sdpa"},
    "reference": {"backend": "reference"},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The interpreter computes bf16 wrong; on the GPU bf16 is the type that matters.
LANE_DTYPES = ("fp32", "fp16") if current_lane() == "interpreter" else ("fp32", "bf16")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The compile matrix is `full` where `-m` asks for aot, `quick` elsewhere; a test named by its id is left alone."""
    if any("::" in argument for argument in config.args):
        return
    unwanted = "quick" if re.search(r"(?<!not )\baot\b", config.option.markexpr) else "full"
    left_out = [item for item in items if _extent(item) == unwanted]
    if left_out:
        items[:] = [item for item in items if _extent(item) != unwanted]
        config.hook.pytest_deselected(items=left_out)


def _extent(item: pytest.Item) -> str | None:
    return item.callspec.params.get("extent") if hasattr(item, "callspec") else None


@dataclass(frozen=True)
class Attend:
    """`nsa.selection_attention` on one backend, never falling back."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return nsa.selection_attention(*args, **self.keywords, **keywords)

    @property
    def triton(self) -> bool:
        return self.keywords["backend"] == "triton"


# Key-major is five kernels, minutes of interpreting more: there `attend_all` and `test_key_major.py` have it.
BACKENDS = ["triton", *["key_major"] * (current_lane() == "gpu"), "sdpa", "reference"]


@pytest.fixture(params=BACKENDS)
def attend(request) -> Attend:
    """Every backend in turn; on a GPU both of Triton's kernels."""
    return Attend(request.param, ROUTES[request.param])


@pytest.fixture(params=list(ROUTES))
def attend_all(request) -> Attend:
    """Every backend and every schedule of Triton's."""
    return Attend(request.param, ROUTES[request.param])


@pytest.fixture(params=[name for name in ROUTES if name != "key_major"])
def attend_exact(request) -> Attend:
    """Every one that takes keys one by one: to key-major a block is whole, see `test_nan.py`."""
    return Attend(request.param, ROUTES[request.param])


@pytest.fixture(params=["sdpa", "reference"])
def attend_plain(request) -> Attend:
    """The backends that are differentiable and take fp64."""
    return Attend(request.param, ROUTES[request.param])


@pytest.fixture(params=LANE_DTYPES)
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def draw(device):
    """`draw(B, S, S_kv, …) -> (q, k, v)` in FlashAttention layout; drawn on the CPU, so equal on every device."""

    def make(B=1, S=3, S_kv=24, HKV=2, G=2, D=16, Dv=16, dtype=torch.float32, seed=0, varlen=False):
        g = torch.Generator().manual_seed(seed)
        shapes = (B, S, HKV * G, D), (B, S_kv, HKV, D), (B, S_kv, HKV, Dv)
        tensors = [torch.randn(s[1:] if varlen else s, generator=g).to(device, dtype) for s in shapes]
        return tuple(tensors)

    return make


@pytest.fixture
def same(device):
    """`same(spans, *lead)`: the same spans (or block indices) for every row, `[*lead, n, 2]` (or `[*lead, n]`)."""

    def make(spans, *lead, dtype=torch.int32):
        one = torch.tensor(spans, dtype=dtype, device=device)
        return one.expand(*lead, *one.shape).contiguous()

    return make


def tolerance(dtype: torch.dtype, peak: float) -> float:
    """Rounding of the output and of the weights in the input dtype; a wrong key moves the LSE by far more."""
    return max(6 * torch.finfo(dtype).eps, 1e-5) * max(1.0, peak)


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Outputs within rounding, LSE within fp32's, infinities and zero rows exactly."""
    (o, lse), (o_want, lse_want) = got, want
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    peak = float(o_want.abs().max()) if o_want.numel() else 0.0
    torch.testing.assert_close(o.double(), o_want, rtol=0, atol=tolerance(dtype, peak))
    torch.testing.assert_close(lse.double(), lse_want, rtol=1e-5, atol=2e-5)
    empty = lse_want == -math.inf
    assert not o[empty].any(), "rows that select nothing must be exactly 0"


@pytest.fixture
def agrees():
    """`agrees(attend, q, k, v, **selection) -> (O, LSE)`, after comparing both with the fp64 oracle."""

    def check(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **selection: Any):
        got = attend(q, k, v, **selection, out=out, return_lse=True)
        selection.pop("max_selected", None)  # the oracle needs no bound
        cu = selection.pop("cu_seqlens", None)
        cu = (cu, cu) if isinstance(cu, Tensor) else cu
        want = selection_reference(Call.of(q.double(), k, v, **selection, cu_seqlens=cu, return_lse=True))
        compare(got, want, q.dtype)
        return got

    return check


@pytest.fixture
def fresh_plans():
    """Whatever is remembered about calls by their metadata is worked out anew, in the test and after it."""
    for forget in settings.ON_RELOAD:
        forget()
    yield
    for forget in settings.ON_RELOAD:
        forget()


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """An empty folder in place of the packaged measurements of GPUs; this user has none either."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setattr(gpu, "PACKAGED", folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("NSA_SEL_TRITON_MIN_L", raising=False)
    settings.reload()
    yield folder
    monkeypatch.undo()
    settings.reload()


@pytest.fixture
def variants(monkeypatch, fresh_plans) -> list[dict[str, Any]]:
    """The constants of every forward kernel of query-major that the test makes, none of which was made before."""
    from nsa.kernels.query_major import plan as query_major

    made: list[dict[str, Any]] = []
    make = query_major.Variant
    monkeypatch.setattr(query_major, "Variant", lambda *args: made.append(args[1]) or make(*args))
    query_major._variant.cache_clear()
    return made


@pytest.fixture(params=["kernel", "cluster"] if current_lane() == "gpu" else ["kernel"])
def split(request, monkeypatch, fresh_plans):
    """Every row's keys are shared among 3 programs and merged, whatever the shape: that is decided by measurements."""
    from nsa.kernels.query_major import tiles

    together = request.param == "cluster"
    monkeypatch.setattr(tiles, "fits_clusters", lambda programs, splits, _, largest: together and splits <= largest)
    monkeypatch.setattr(tiles, "split_count", lambda *_: 3)
    monkeypatch.setattr(tiles, "measured", lambda *_: None)


@pytest.fixture
def fresh_routes():
    """An empty route log and no remembered failures, before and after."""
    dispatch.reset()
    yield
    dispatch.reset()


@dataclass
class BackwardKernel:
    """Stands in for `nsa.kernels.backward.plan`: its gradients are `MARK` throughout, and it fails at will."""

    MARK = 7.0
    error: BaseException | None = None  # of a launch
    misfit: str | None = None  # why no call fits its workspace
    calls: list[tuple[Tensor, Tensor | None, str]] = field(default_factory=list)  # (dO, dLSE, route) of each launch
    call: Call | None = None  # of the last plan
    planned: int = 0

    def plan(self, call: Call, bound: int | None) -> str:
        self.call, self.planned = call, self.planned + 1
        if self.misfit is not None:
            raise DoesNotFit(self.misfit)
        return "launch"

    def backward(
        self, launch: str, call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, route: str, *_: Any
    ) -> tuple[Tensor, ...]:
        q, k, v = call.q, call.k, call.v
        assert launch == "launch"
        assert (do.shape, do.dtype, lse.shape, lse.dtype) == (o.shape, o.dtype, q.shape[:-1], torch.float32)
        self.calls.append((do, dlse, route))
        if self.error is not None:
            raise self.error
        return tuple(torch.full_like(x, self.MARK, memory_format=torch.contiguous_format) for x in (q, k, v))


@pytest.fixture
def backward_kernel(monkeypatch, fresh_plans, fresh_routes):
    """A :class:`BackwardKernel` in the place of the real one, and long rows. The forward's kernels stay."""
    kernel, module = BackwardKernel(), types.ModuleType("nsa.kernels.backward.plan")
    module.plan, module.backward = kernel.plan, kernel.backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with nsa.configure(sel_triton_min_L=0):
        yield kernel


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """No kernel was launched or tried; trials are forced, as the interpreter needs none; rows are long."""
    from nsa.kernels.backward import plan as backward
    from nsa.kernels.key_major import plan as key_major
    from nsa.kernels.query_major import plan as query_major
    from nsa.kernels.shared import combine

    makers = query_major._variant, combine._variant, key_major._variants, *backward.VARIANTS
    forget = [maker.cache_clear for maker in makers]
    for clear in forget:
        clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "_told", set())
    with nsa.configure(probe="always", sel_triton_min_L=0):
        yield
    parent.end_child()
    for clear in forget:
        clear()


@pytest.fixture
def answer(monkeypatch):
    """`answer(verdict) -> whats`: what `nsa.guard` would ask a child, which always finds this."""

    def make(verdict):
        whats = []
        monkeypatch.setattr(parent, "ask", lambda what, device: whats.append(what) or verdict)
        return whats

    return make


@pytest.fixture
def kept(tmp_path):
    """`kept()`: the files in which `nsa.guard` keeps what children found, for other processes."""

    def make():
        folder = tmp_path / "cache" / "nsa" / "probe"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    return make


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, pytestconfig):
    """A folder of this run, the same for all of its xdist workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(pytestconfig, "workerinput") else base


@pytest.fixture(scope="session")
def forking(shared_folder):
    """A process that forks itself for each run of pytest, see `forked_pytest.py`; started for whoever asks first."""
    script = Path(__file__).with_name("forked_pytest.py")
    command = [sys.executable, str(script), str(shared_folder / "bytecode")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.fixture
def run_pytest(forking, tmp_path_factory):
    """`run_pytest(*arguments, cwd=…, environment=…)`: `python -m pytest` as a process of its own, without the seconds
    in which it imports torch. Returns what `subprocess.run` does; unless given, the environment is this process's.
    """

    def run(*arguments, cwd, environment=None):
        folder = tmp_path_factory.mktemp("pytest", numbered=True)
        out, err = folder / "out", folder / "err"
        request = {"arguments": [str(x) for x in arguments], "cwd": str(cwd), "out": str(out), "err": str(err)}
        request["environment"] = dict(os.environ if environment is None else environment)
        print(json.dumps(request), file=forking.stdin, flush=True)
        status = int(forking.stdout.readline())
        return subprocess.CompletedProcess(["pytest", *arguments], status, out.read_text(), err.read_text())

    return run


@pytest.fixture
def forked_project(run_pytest, pytester, monkeypatch, tmp_path_factory):
    """`pytester`, whose `runpytest_subprocess` forks; `Pytester.runpytest_subprocess` still starts a process anew."""

    def run(*arguments):
        began = time.monotonic()
        base = tmp_path_factory.mktemp("inner", numbered=True)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        done = run_pytest(f"--basetemp={base}", *arguments, cwd=Path.cwd(), environment=environment)
        print(done.stdout, done.stderr, sep="\n")
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, *lines, time.monotonic() - began)

    monkeypatch.setattr(pytester, "runpytest_subprocess", run)
    return pytester
