"""What the edge lane shares: every way to run a call, and stand-ins for what may fail."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import guard
from nsa.call import Call
from nsa.guard import memory, parent
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.shape import Shape
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


def attends(names):
    """A fixture: each of these `ROUTES` in turn."""

    @pytest.fixture(params=list(names))
    def attend(request) -> Attend:
        return Attend(request.param, ROUTES[request.param])

    return attend


# Key-major is five kernels, minutes of interpreting more: there `attend_all` and `test_key_major.py` have it.
BACKENDS = ["triton", *["key_major"] * (current_lane() == "gpu"), "sdpa", "reference"]
attend = attends(BACKENDS)
attend_all = attends(ROUTES)
attend_exact = attends(name for name in ROUTES if name != "key_major")
"""Those that take keys one by one: to key-major a block is whole, see `test_nan.py`."""
attend_plain = attends(["sdpa", "reference"])
"""The backends that are differentiable and take fp64."""


@pytest.fixture(params=LANE_DTYPES)
def dtype(request) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(params=["ranges", "blocks", "positions", "varlen"])
def problem(request, draw, same, device):
    """`(q, k, v), selection`: overlapping spans or a block twice, keys that all rows list, and keys that none does."""
    kind, shape = request.param, {"S": 3, "S_kv": 12, "HKV": 2, "G": 2, "Dv": 24}
    spans = same([(0, 2), (1, 5)], 1, 3, 2)
    if kind == "varlen":
        cu = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        return draw(varlen=True, **shape), {"ranges": spans[0], "cu_seqlens": (cu, cu * 4), "max_selected": 6}
    if kind == "blocks":
        return draw(**shape), {"block_indices": same([1, -1, 0, 1], 1, 3, 2), "block_size": 3, "scale": 0.3}
    where = {"q_positions": torch.tensor([[0, -1, 3]], device=device)} if kind == "positions" else {}
    return draw(**shape), {"ranges": spans, "max_selected": 6} | where


@pytest.fixture
def variants(monkeypatch, fresh_plans) -> list[dict[str, Any]]:
    """The constants of every forward kernel of query-major that the test makes, none of which was made before."""
    from nsa.kernels.query_major import plan as query_major

    made: list[dict[str, Any]] = []
    make = query_major.Variant
    monkeypatch.setattr(query_major, "Variant", lambda *args: made.append(args[1]) or make(*args))
    query_major._variants.cache_clear()
    return made


@pytest.fixture
def long_rows():
    """The test's rows are long enough for Triton, unless it says otherwise."""
    with nsa.configure(sel_triton_min_L=0):
        yield


@dataclass
class BackwardKernel:
    """Stands in for `nsa.kernels.backward.plan`: its gradients are `MARK` throughout, and it fails at will."""

    MARK = 7.0
    error: BaseException | None = None  # of a launch
    misfit: str | None = None  # why no call fits its workspace
    calls: list[tuple[Tensor, Tensor | None, str]] = field(default_factory=list)  # (dO, dLSE, route) of each launch
    call: Call | None = None  # of the last plan
    planned: int = 0

    def plan(self, call: Call, shape: Shape, within: int | None = None) -> str:
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
def backward_kernel(monkeypatch, fresh_plans, fresh_routes, long_rows):
    """A :class:`BackwardKernel` in the place of the real one, and long rows. The forward's kernels stay."""
    kernel, module = BackwardKernel(), types.ModuleType("nsa.kernels.backward.plan")
    module.plan, module.backward = kernel.plan, kernel.backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernel


@pytest.fixture
def untried(monkeypatch, tmp_path, long_rows):
    """No kernel was launched or tried; trials are forced, as the interpreter needs none; rows are long."""
    from nsa.kernels.shared import launch

    launch.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory.log_once.cache_clear()
    with nsa.configure(probe="always"):
        yield
    launch.forget()


@pytest.fixture
def answer(monkeypatch):
    """`answer(verdict) -> whats`: what `nsa.guard` would ask a child, which always finds this.

    If it finds that kernels work, those that were about to be compiled are among them.
    """
    find_out = parent.find_out

    def make(verdict):
        whats = []
        monkeypatch.setattr(parent, "ask", lambda what, device: whats.append(what) or verdict)
        return whats

    def admit(untried, what, device):
        verdict = find_out(what, device)
        if verdict.cause is None:
            memory.admitted.add(memory.key_of(untried.variant, device))
        else:
            raise parent.ProbeFailed(verdict.cause, verdict.lasting)

    monkeypatch.setattr(guard, "admit", admit)

    return make


@pytest.fixture
def kept(tmp_path):
    """`kept()`: the files in which `nsa.guard` keeps what children found, for other processes."""

    def make():
        folder = tmp_path / "cache" / "nsa" / "probe"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    return make
