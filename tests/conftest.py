"""What all tests of this checkout share: an environment of which no outcome depends, small tensors, runs of pytest.

The tensors are small because an interpreted Triton program costs about ten milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import dispatch, gpu, settings
from nsa.call import Call
from nsa.kernels import pinned
from nsa.plain.oracle import selection_reference
from nsa.testing import machine
from nsa.testing.gate import children
from nsa.testing.judge.forward import cached_parity
from nsa.testing.plugin import current_lane

ROOT = Path(__file__).parents[1]
# Of make, git, a pytest that started this run, Python, locale and terminal. PYTHONPATH stays: torch may lie there.
# PYTEST_CURRENT_TEST and PYTEST_VERSION stay too: pytest itself sets and removes them.
FOREIGN = re.compile(
    r"MAKE.*|MFLAGS|GNUMAKEFLAGS|WORKERS|BASE|GIT_.*|PYTEST_(?!CURRENT_TEST$|VERSION$).*|PYTHON(?!PATH$).*|PY_COLORS|NO_COLOR"
    r"|FORCE_COLOR|CLICOLOR.*|LANG|LANGUAGE|LC_.*|COLUMNS|LINES|CI|BUILD_NUMBER"
)
# The size that a pipe has; the one locale that is everywhere; one thread for a child's tensors, which are small; git
# without the user's settings, on a folder of any owner, as a container may have mounted it.
OURS = {
    "COLUMNS": "80", "LINES": "24", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
}  # fmt: skip


def cleaned(environment: Mapping[str, str], home: Callable[[], Path]) -> dict[str, str]:
    """An environment without what is other programs'. `home` makes a folder for HOME if there is no usable one."""
    kept = {name: value for name, value in environment.items() if not FOREIGN.fullmatch(name)} | OURS
    if not os.access(kept.get("HOME", ""), os.W_OK):
        kept["HOME"] = str(home())
    return kept


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clean the environment of this process, which its children inherit."""
    before = dict(os.environ)
    clean = cleaned(before, lambda: tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for name in before.keys() - clean.keys():
            patch.delenv(name)
        for name in clean.items() - before.items():
            patch.setenv(*name)
        yield


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


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Outputs within rounding, LSE within fp32's, infinities and zero rows exactly."""
    (o, lse), (o_want, lse_want) = got, want
    assert (o.shape, lse.shape) == (o_want.shape, lse_want.shape)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    cached_parity((o, lse.float()), want, dtype, "nsa")


def bitwise(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.fixture
def agrees():
    """`agrees(attend, q, k, v, **selection) -> (O, LSE)`, after comparing both with the fp64 oracle."""

    def check(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **selection: Any):
        got = attend(q, k, v, **selection, out=out, return_lse=True)
        selection.pop("max_selected", None)  # the oracle needs no bound
        want = selection_reference(Call.of(q.double(), k, v, **selection, return_lse=True))
        compare(got, want, q.dtype)
        return got

    return check


@pytest.fixture
def one_thread():
    """For small tensors: with two threads on a busy machine most of the time is spent waiting for the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_plans():
    """Whatever is remembered about calls by their metadata is worked out anew, in the test and after it."""
    for forget in settings.ON_RELOAD:
        forget()
    yield
    for forget in settings.ON_RELOAD:
        forget()


@pytest.fixture
def pin():
    """`pin(query_major=…)`: from now on the test's calls use these tiles, as in `nsa.kernels.pinned`."""
    with contextlib.ExitStack() as stack:
        yield lambda **tiles: stack.enter_context(pinned(**tiles))


@pytest.fixture
def user_folder(monkeypatch, tmp_path):
    """Where this user's own measurements of GPUs would lie: there are none, nor a variable."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("NSA_SEL_TRITON_MIN_L", raising=False)
    settings.reload()
    yield tmp_path / "config" / "nsa" / "gpus"
    monkeypatch.undo()
    settings.reload()


@pytest.fixture
def gpus(user_folder, monkeypatch, tmp_path):
    """An empty folder in place of the packaged measurements of GPUs; this user has none either."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setattr(gpu, "PACKAGED", folder)
    settings.reload()
    return folder


@pytest.fixture(params=["kernel", "cluster"] if current_lane() == "gpu" else ["kernel"])
def split(request, monkeypatch, fresh_plans):
    """Three programs share every row's keys, and their parts are merged. Otherwise measurements decide how many do."""
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


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, pytestconfig):
    """A folder of this run, the same for all of its xdist workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(pytestconfig, "workerinput") else base


class ForkedPytest:
    """`run(*arguments, cwd=…, environment=…)`: `python -m pytest` as a process of its own, without the seconds in which
    it imports torch; `run.python("-c", …)`: another program. Both return what `subprocess.run` does; unless given, the
    environment is this process's.
    """

    def __init__(self, process: subprocess.Popen[str], folders: pytest.TempPathFactory) -> None:
        self.process, self.folders = process, folders

    def __call__(self, *arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.each([arguments], **how)[0]

    def python(self, *arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
        return self._each([arguments], **how)[0]

    def each(self, runs: Sequence[Sequence[Any]], *where: Any, **how: Any) -> list[subprocess.CompletedProcess[str]]:
        """Several runs of pytest in one process, for runs that execute no test."""
        return self._each([("-m", "pytest", *run) for run in runs], *where, **how)

    def _each(
        self, runs: Sequence[Sequence[Any]], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        folder = self.folders.mktemp("pytest", numbered=True)
        request = {"runs": [list(map(str, run)) for run in runs], "cwd": str(cwd), "folder": str(folder)}
        request["environment"] = dict(os.environ if environment is None else environment)
        print(json.dumps(request), file=self.process.stdin, flush=True)
        (folder / f"status{len(runs) - 1}").write_text(self.process.stdout.readline())

        def read(number: int) -> list[str]:
            return [(folder / f"{name}{number}").read_text() for name in ("status", "out", "err")]

        done = zip(runs, map(read, range(len(runs))), strict=True)
        return [subprocess.CompletedProcess(["python", *run], int(status), *said) for run, (status, *said) in done]


@pytest.fixture(scope="session")
def run_pytest(tmp_path_factory):
    """Of a process that forks itself for each run (`forked_pytest.py`). It is started when first needed."""
    command = [sys.executable, Path(__file__).with_name("forked_pytest.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield ForkedPytest(process, tmp_path_factory)
        process.stdin.close()


def fork_children(run_pytest: ForkedPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that the gate starts in this one are forks. `test_gate_children.py` has how they are started."""

    def run(arguments, cwd, environment=None, output=None):
        done = run_pytest.python(*arguments, cwd=cwd, environment=machine.without_git(environment))
        print(done.stdout + done.stderr, file=output)
        return done.returncode

    monkeypatch.setattr(children, "run", run)


@pytest.fixture
def forked_children(run_pytest, monkeypatch):
    fork_children(run_pytest, monkeypatch)


def bare(*, path: Path = ROOT, **more: str) -> dict[str, str]:
    """This process's environment without GPUs, settings and Triton's interpreter. `path` is importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TRITON_"))}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(path), **more}


@pytest.fixture(scope="session")
def compiling(run_pytest):
    """`compiling(script, …)`: what a text or file prints that runs without GPUs, settings and Triton's interpreter."""

    def make(script, *arguments, **more):
        text = script.read_text() if isinstance(script, Path) else script
        done = run_pytest.python("-c", text, *arguments, cwd=ROOT, environment=bare(**more))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return make
