"""The suite's plugin and its lanes, on small projects of their own with this checkout's configuration."""

import contextlib
import re
import time
import types
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

from nsa import settings as nsa_settings
from nsa.testing import lane, plugin, profiles

from .small_project import lay_out, off_gpu, outcome, replayed


@pytest.fixture
def inner(run_pytest, tmp_path):
    """`inner(files, *arguments)`: pytest in a rootdir with these files and this repository's configuration."""

    def run(files, *arguments, **environment):
        lay_out(tmp_path, files)
        done = run_pytest(*arguments, cwd=tmp_path, environment=off_gpu(**environment))
        print(done.stdout, done.stderr, sep="\n")
        return done

    return run


MARKS = "def test_marks(request):\n    assert [mark.name for mark in request.node.iter_markers()] == [{!r}]\n"
FAILS = "import pytest\n@pytest.mark.parametrize('case', ['H8-D128'])\ndef test_fails(case):\n    assert False\n"
NEEDS_GPU = "import pytest\n@pytest.mark.gpu\ndef test_gpu():\n    pass\n"
LANE = (
    "import os, torch\ndef test_lane(lane, device):\n"
    "    assert (lane, device.type, os.environ['TRITON_INTERPRET']) == ('interpreter', 'cpu', '1')\n"
    "    assert not torch.cuda.is_available()\n"
)
PROFILE = "import hypothesis\ndef test_profile():\n    assert hypothesis.settings().max_examples == {}\n"
BENCHMARK = "def test_bench(benchmark):\n    benchmark(sum, range(100))\n"


def test_folders_mark_header_skips_and_replay(inner):
    files = {
        "tests/parity/test_a.py": MARKS.format("parity") + FAILS,
        "tests/parity/deep/test_b.py": MARKS.format("parity") + LANE,
        "tests/edge/test_a.py": MARKS.format("edge") + NEEDS_GPU + PROFILE.format(profiles.EXAMPLES[profiles.DEFAULT]),
        "tests/perf/test_a.py": "def test_deselected():\n    assert False\n",
        "tests/other/test_a.py": "def test_deselected():\n    assert False\n",
    }
    done = inner(files, "-m", "parity or edge", "--nsa-seed", "7")
    assert outcome(done) == {"passed": 5, "failed": 1, "skipped": 1, "deselected": 2}
    for line in (
        "nsa lane: CPU: Triton interpreter, fp32/fp16 on small shapes",
        f"nsa: torch {re.escape(torch.__version__)}, triton {plugin.triton_version()}, seed 7, commit ",
        "=+ replay one failure =+",
        r'NSA_TEST_TRITON_SEL=0 pytest "tests/parity/test_a.py::test_fails\[H8-D128\]" --nsa-seed 7',
        r"SKIPPED \[1\] tests/edge/test_a.py:\d+: needs an NVIDIA GPU: NSA_TEST_TRITON_SEL=0 keeps the suite off it",
    ):
        assert re.search(f"^{line}", done.stdout, re.M), line


LOST = """
import torch
from nsa.testing import plugin

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCompile with ...")

def test_fine():
    pass

def test_bad():
    plugin.current_lane, torch.cuda.synchronize = lambda: "gpu", lost
    assert False

def test_later():
    assert False
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_lost_context_stops_the_run_and_names_the_test(inner, workers):
    done = inner({"tests/edge/test_a.py": LOST}, "-n", workers, "--dist", "loadfile", "--benchmark-disable")
    assert outcome(done) == {"passed": 1, "failed": 1}
    assert re.search("test_a.py::test_bad lost the CUDA context: CUDA error: an illegal memory access", done.stdout)


def test_a_benchmark_is_replayed_as_it_was_sampled(inner):
    said = "--nsa-iters 20 --nsa-warmup 2 --nsa-seed 7 --nsa-streams 3 --nsa-full --nsa-hot --nsa-no-check"
    done = inner({"tests/perf/test_a.py": "def test_fails():\n    assert False\n"}, "-m", "perf", *said.split())
    assert f'NSA_TEST_TRITON_SEL=0 pytest "tests/perf/test_a.py::test_fails" {said}' in done.stdout.splitlines()


def test_lane_switch_must_be_0_or_1(inner):
    done = inner({"tests/edge/test_a.py": LANE}, NSA_TEST_TRITON_SEL="off")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = "ERROR: NSA_TEST_TRITON_SEL='off': expected 0 (keep the suite off the GPU) or 1"
    assert said in done.stderr.splitlines()


# --- what Hypothesis draws --------------------------------------------------------------------------------------------

DRAWN = """
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

@pytest.mark.parametrize("case", ["H8-D128", "H4"])
@settings(phases=[Phase.generate])  # not made smaller: each run draws numbers of its own
@given(st.integers(0, 2**60), st.booleans())
def test_fails(case, number, flag):
    assert case == "H4" or number < 1000, f"drew {number}"
"""
DRAWN_FAILS = "tests/parity/test_drawn.py::test_fails"


def drew(done):
    return set(re.findall(r"drew \d+", done.stdout))


def replays(inner, first, *chosen):
    """Whether the drawn call that failed fails again by the line as it is printed."""
    test, *how = replayed(first, DRAWN_FAILS)
    assert test == f"{DRAWN_FAILS}[H8-D128]"
    assert how[:2] == (list(chosen) or ["--nsa-reproduce", how[1]])
    again = inner({}, test, *how)
    assert outcome(again) == {"failed": 1}
    return drew(again) == drew(first) != set() and replayed(again, DRAWN_FAILS) == [test, *how]


def test_a_drawn_call_that_failed_is_replayed(inner):
    first = inner({"tests/parity/test_drawn.py": DRAWN}, "--benchmark-disable")
    assert outcome(first) == {"passed": 1, "failed": 1}
    assert replays(inner, first)


def test_xdist_runs_parity_and_replays(inner):
    """With the profile `deep`, which draws other calls in each run."""
    threads = "import torch\ndef test_threads():\n    assert torch.get_num_threads() == max(1, {} // 2)\n"
    files = {
        "tests/parity/test_a.py": MARKS.format("parity") + FAILS + LANE,
        "tests/parity/test_drawn.py": DRAWN,
        "tests/perf/test_a.py": BENCHMARK,
        "tests/edge/test_a.py": threads.format(len(plugin.os.sched_getaffinity(0))),
        "tests/edge/test_b.py": PROFILE.format(profiles.EXAMPLES["deep"]),
    }
    deep = "--hypothesis-profile", "deep"
    done = inner(files, "-m", "not perf", "-n", "2", "--benchmark-disable", *deep, OMP_NUM_THREADS="5")
    assert outcome(done) == {"passed": 5, "failed": 2}
    assert 'pytest "tests/parity/test_a.py::test_fails[H8-D128]"' in done.stdout
    assert replays(inner, done, *deep)


def test_an_example_is_replayed_by_its_test_alone(inner):
    text = DRAWN.replace("Phase.generate", "Phase.explicit").replace("import Phase", "import Phase, example")
    text = text.replace("def test_fails", "@example(5000, True)\ndef test_fails")
    done = inner({"tests/parity/test_drawn.py": text}, "--hypothesis-profile", "deep")
    assert replayed(done, DRAWN_FAILS)[1:] == ["--hypothesis-profile", "deep"]
    assert drew(done) == {"drew 5000"}


HYPOTHESIS = profiles.hypothesis.__version__
UNREPLAYED = [  # the call, which tests are selected, and what is said
    (f"{HYPOTHESIS}:AAAA", "H8 -n2", "leave out -n, because one test runs"),
    ("AXic", "H8", "expected VERSION:BLOB, got 'AXic'"),
    ("1.2.3:AXic", "H8", f"the call was drawn by Hypothesis 1.2.3, and this is {HYPOTHESIS}, which would draw"),
    (f"{HYPOTHESIS}:AXic", "H8", "Invalid "),
    (f"{HYPOTHESIS}:AAAA", "test_fails", "expected one Hypothesis test to be selected, got 2"),
    (f"{HYPOTHESIS}:AAAA", "test_plain", "expected one Hypothesis test to be selected, got 0"),
]


def test_a_call_that_cannot_be_replayed_is_refused(run_pytest, tmp_path):
    lay_out(tmp_path, {"tests/parity/test_drawn.py": DRAWN + "\ndef test_plain():\n    pass\n"})
    runs = [["-k", *selected.split(), "--nsa-reproduce", call] for call, selected, _ in UNREPLAYED]
    for done, (*how, said) in zip(run_pytest.each(runs, tmp_path, off_gpu()), UNREPLAYED, strict=True):
        assert (done.returncode, how) == (pytest.ExitCode.USAGE_ERROR, how), done.stdout
        assert done.stderr.startswith(f"ERROR: --nsa-reproduce: {said}"), how


def test_a_failing_call_is_made_smaller_for_so_long(monkeypatch):
    """No setting of Hypothesis bounds that time. Where it no longer reads the number, 30 calls fail here and more."""
    assert engine.MAX_SHRINKING_SECONDS == profiles.SHRINK_SECONDS
    assert Phase.shrink in settings().phases
    monkeypatch.setattr(engine, "MAX_SHRINKING_SECONDS", 0.4)
    failed = []

    @settings(max_examples=5)
    @given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
    def slow(numbers):
        time.sleep(0.08)
        failed.extend([sum(numbers)] * (max(numbers) >= 200_000))
        assert max(numbers) < 200_000

    with pytest.raises(AssertionError):
        slow()
    assert failed[-1] < failed[0]
    assert len(failed) < 20


# --- the lane ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def chooser(monkeypatch):
    """`nsa.testing.lane`, for one more choice. What it does to the environment is undone."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "NSA_TEST_TRITON_SEL", "PYTEST_XDIST_WORKER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    nsa_settings.interpreter.cache_clear()
    yield lane
    monkeypatch.undo()
    nsa_settings.interpreter.cache_clear()


@pytest.mark.parametrize(("visible", "worker", "pinned"), [
    (None, "gw0", "0"), (None, "gw4", "1"), ("5,7", "gw1", "7"), ("GPU-a,GPU-b", "gw2", "GPU-a"), ("5,7", "", "5,7"),
])  # fmt: skip
def test_worker_is_pinned_to_one_gpu(chooser, monkeypatch, visible, worker, pinned):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    chooser._pin_worker(worker)
    assert chooser.os.environ["CUDA_VISIBLE_DEVICES"] == pinned


@pytest.mark.parametrize(
    ("cuda", "cause"), [(None, "is built without CUDA"), ("13.0", "(CUDA 13.0) finds no usable driver")]
)
def test_gpu_that_torch_cannot_use_is_an_error(chooser, monkeypatch, cuda, cause):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(chooser.Path, "glob", lambda self, pattern: [Path(f"{self}/nvidia0")])
    assert chooser._choose() == (
        f"an NVIDIA GPU is visible (/dev/nvidia0), but torch {torch.__version__} {cause}: "
        "install a build of torch that fits the driver, or set NSA_TEST_TRITON_SEL=0 to test on the CPU"
    )


@pytest.mark.parametrize(
    "environment", [{"NSA_TEST_TRITON_SEL": "0"}, {"TRITON_INTERPRET": "1"}, {"CUDA_VISIBLE_DEVICES": "-1"}]
)
def test_gpu_kept_out_on_purpose_is_no_error(chooser, monkeypatch, environment):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(chooser.Path, "glob", lambda self, pattern: [Path(f"{self}/nvidia0")])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert chooser._choose() is None
    assert chooser.os.environ["TRITON_INTERPRET"] == "1"


class FakeGPU:
    name, major, minor, total_memory = "NVIDIA A100", 8, 0, 40 * 2**30


@pytest.mark.parametrize(("needs", "reason"), [
    ({}, None),
    ({"capability": (8, 0), "memory_gib": 40}, None),
    ({"capability": (9, 0)}, "needs compute capability 9.0: NVIDIA A100 has 8.0"),
    ({"memory_gib": 60}, "needs 60 GiB of GPU memory: NVIDIA A100 has 40"),
])  # fmt: skip
def test_gpu_requirement_says_what_is_missing(monkeypatch, needs, reason):
    monkeypatch.setattr(plugin, "current_lane", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeGPU)
    assert plugin.missing_gpu(**needs) == reason


@pytest.mark.parametrize(("large", "kept"), [(True, 1), (False, 1), (False, plugin.KEPT_BYTES + 1)])
def test_large_tests_take_turns(monkeypatch, pytestconfig, tmp_path, large, kept):
    """And only they: the lock is held while such a test runs. What is much is given back after any test."""
    emptied, held = [], []
    monkeypatch.setattr(plugin, "current_lane", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeGPU)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30 + kept)
    monkeypatch.setattr(plugin.tempfile, "gettempdir", lambda: str(tmp_path))
    mark = pytest.mark.gpu(memory_gib=24).mark if large else pytest.mark.gpu.mark
    item = types.SimpleNamespace(iter_markers=lambda name: [mark], config=pytestconfig, path=Path(__file__))
    run = plugin.pytest_runtest_protocol(item)
    next(run)
    with contextlib.suppress(Timeout), FileLock(plugin.large_tests_lock(), timeout=0):
        held.append("free")
    with pytest.raises(StopIteration):
        run.send(None)
    assert held == ([] if large else ["free"])
    assert emptied == ([True] if large or kept > plugin.KEPT_BYTES else [])


def test_auto_workers_share_gpus(monkeypatch):
    monkeypatch.setattr(plugin, "current_lane", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(plugin.os, "sched_getaffinity", lambda pid: range(128))
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    for gib, workers in ((80, 26), (24, 8), (4, 2), (180, 32)):
        gpu = types.SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, gpu=gpu: gpu)
        assert plugin.pytest_xdist_auto_num_workers(config=None) == workers
