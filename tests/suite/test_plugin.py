"""The suite's plugin and its lanes, on small projects of their own with this checkout's configuration."""

import contextlib
import re
import shlex
import shutil
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

pytest_plugins = ["pytester"]
ROOT = Path(plugin.__file__).parents[2]


@pytest.fixture
def project(forked_project, monkeypatch):
    """A rootdir with this repository's conftest.py and pyproject.toml, on the CPU lane, outside any xdist worker."""
    pytester = forked_project
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, pytester.path)
    for name in ("NSA_COMMIT", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NSA_TEST_TRITON_SEL", "0")
    return pytester


def write(project, path, text):
    file = project.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


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


def test_folders_mark_header_skips_and_replay(project):
    write(project, "tests/parity/test_a.py", MARKS.format("parity") + FAILS)
    write(project, "tests/parity/deep/test_b.py", MARKS.format("parity") + LANE)
    write(project, "tests/edge/test_a.py", MARKS.format("edge") + NEEDS_GPU + PROFILE.format(25))
    write(project, "tests/perf/test_a.py", "def test_deselected():\n    assert False\n")
    write(project, "tests/other/test_a.py", "def test_deselected():\n    assert False\n")
    result = project.runpytest_subprocess("-m", "parity or edge", "--nsa-seed", "7")
    result.assert_outcomes(passed=5, failed=1, skipped=1, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "nsa lane: CPU: Triton interpreter, fp32/fp16 on small shapes",
            f"nsa: torch {torch.__version__}, triton {plugin.triton_version()}, seed 7, commit *",
            "*= replay one failure =*",
            'NSA_TEST_TRITON_SEL=0 pytest "tests/parity/test_a.py::test_fails[[]H8-D128[]]" --nsa-seed 7',
            "SKIPPED [[]1[]] tests/edge/test_a.py:*: needs an NVIDIA GPU: NSA_TEST_TRITON_SEL=0 keeps the suite off it",
        ]
    )


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


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_lost_context_stops_the_run_and_names_the_test(project, workers):
    write(project, "tests/edge/test_a.py", LOST)
    result = project.runpytest_subprocess("-n", workers, "--dist", "loadfile", "--benchmark-disable")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_a.py::test_bad lost the CUDA context: CUDA error: an illegal memory access*"])


def test_a_benchmark_is_replayed_as_it_was_sampled(project):
    write(project, "tests/perf/test_a.py", "def test_fails():\n    assert False\n")
    said = "--nsa-iters 20 --nsa-warmup 2 --nsa-seed 7 --nsa-streams 3 --nsa-full --nsa-hot --nsa-no-check"
    result = project.runpytest_subprocess("-m", "perf", *said.split())
    result.stdout.fnmatch_lines([f'NSA_TEST_TRITON_SEL=0 pytest "tests/perf/test_a.py::test_fails" {said}'])


def test_xdist_runs_parity_and_replays(project):
    write(project, "tests/parity/test_a.py", MARKS.format("parity") + FAILS + LANE)
    write(project, "tests/perf/test_a.py", BENCHMARK)
    threads = "import torch\ndef test_threads():\n    assert torch.get_num_threads() == max(1, {} // 2)\n"
    write(project, "tests/edge/test_a.py", threads.format(len(plugin.os.sched_getaffinity(0))))
    result = pytest.Pytester.runpytest_subprocess(project, "-m", "not perf", "-n", "2", "--benchmark-disable")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(['*pytest "tests/parity/test_a.py::test_fails[[]H8-D128[]]"'])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "--benchmark-compare"], "compare needs benchmarks, and under xdist there are none: leave out -n"),
        (["--benchmark-disable", "--benchmark-save=x"], "save needs benchmarks: leave out --benchmark-disable"),
    ],
    ids=["xdist", "disabled"],
)
def test_benchmarks_that_would_not_run_are_refused(project, arguments, message):
    write(project, "tests/perf/test_a.py", BENCHMARK)
    result = project.runpytest_subprocess("-m", "perf", *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stderr.fnmatch_lines([f"*--benchmark-{message}"])


def test_lane_switch_must_be_0_or_1(project, monkeypatch):
    write(project, "tests/edge/test_a.py", LANE)
    monkeypatch.setenv("NSA_TEST_TRITON_SEL", "off")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: NSA_TEST_TRITON_SEL='off': expected 0 (keep the suite off the GPU) or 1"])


def test_without_a_baseline_it_says_how_to_record_one(project):
    write(project, "tests/perf/test_a.py", BENCHMARK)
    missing = project.runpytest_subprocess("-m", "perf", "--benchmark-compare")
    assert missing.ret == 0
    missing.stdout.fnmatch_lines(
        [
            "not gated: no baseline for *threads, *",
            "record one: the same command with --nsa-save-baseline instead of --benchmark-compare",
            "*= 1 passed in *",
        ]
    )
    assert not list(project.path.rglob("*.json"))  # nothing is saved unless asked for


def test_what_pytest_benchmark_saves_by_itself_is_no_baseline(project, monkeypatch):
    """`--benchmark-autosave` and `--benchmark-save` work as upstream's documentation says; the gate reads neither."""
    write(project, "tests/perf/test_a.py", BENCHMARK)
    assert project.runpytest_subprocess("-m", "perf", "--benchmark-autosave").ret == 0
    assert project.runpytest_subprocess("-m", "perf", "--benchmark-save=mine").ret == 0
    saved = sorted(path.relative_to(project.path).parts for path in project.path.rglob("*.json"))
    assert [(parts[0], parts[-1][:5]) for parts in saved] == [(".benchmarks", "0001_"), (".benchmarks", "0002_")]
    ungated = project.runpytest_subprocess("-m", "perf", "--benchmark-compare")
    ungated.stdout.fnmatch_lines(["not gated: no baseline for *"])
    named = project.runpytest_subprocess("-m", "perf", "--benchmark-compare=0002")
    for run in ("NOW", "0002"):
        named.stdout.fnmatch_lines([f"bench ({run})*"])


def test_hypothesis_profile_deep(project):
    write(project, "tests/edge/test_a.py", PROFILE.format(profiles.EXAMPLES["deep"]))
    project.runpytest_subprocess("--hypothesis-profile=deep").assert_outcomes(passed=1)


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


def replay_line(result):
    [line] = [line for line in result.outlines if "test_fails" in line and "pytest " in line]
    return shlex.split(line.removeprefix("NSA_TEST_TRITON_SEL=0 "))


def drew(result):
    return set(re.findall(r"drew \d+", result.stdout.str()))


@pytest.mark.parametrize(
    ("profile", "workers"),
    [([], []), (["--hypothesis-profile", "deep"], []), (["--hypothesis-profile", "deep"], ["-n", "2"])],
    ids=["ci", "deep", "xdist"],
)
def test_a_drawn_call_that_failed_is_replayed(project, profile, workers):
    """By the line as it is printed. `deep` draws others in each run."""
    write(project, "tests/parity/test_a.py", DRAWN)
    first = project.runpytest_subprocess(*profile, *workers)
    first.assert_outcomes(passed=1, failed=1)
    command = replay_line(first)
    assert command[:2] == ["pytest", "tests/parity/test_a.py::test_fails[H8-D128]"]
    assert command[2:4] == (profile or ["--nsa-reproduce", command[3]])
    again = project.runpytest_subprocess(*command[1:])
    again.assert_outcomes(failed=1)
    assert drew(again) == drew(first) != set()
    assert replay_line(again) == command


def test_an_example_is_replayed_by_its_test_alone(project):
    text = DRAWN.replace("Phase.generate", "Phase.explicit").replace("import Phase", "import Phase, example")
    write(project, "tests/parity/test_a.py", text.replace("def test_fails", "@example(5000, True)\ndef test_fails"))
    result = project.runpytest_subprocess("--hypothesis-profile", "deep")
    assert replay_line(result)[2:] == ["--hypothesis-profile", "deep"]
    assert drew(result) == {"drew 5000"}


HYPOTHESIS = profiles.hypothesis.__version__


@pytest.mark.parametrize(
    ("call", "selected", "message"),
    [
        (f"{HYPOTHESIS}:AAAA", "H8 -n2", "leave out -n, because one test runs"),
        ("AXic", "H8", "expected VERSION:BLOB, got 'AXic'"),
        ("1.2.3:AXic", "H8", f"the call was drawn by Hypothesis 1.2.3, and this is {HYPOTHESIS}, which would draw*"),
        (f"{HYPOTHESIS}:AXic", "H8", "Invalid *"),
        (f"{HYPOTHESIS}:AAAA", "test_fails", "expected one Hypothesis test to be selected, got 2"),
        (f"{HYPOTHESIS}:AAAA", "test_plain", "expected one Hypothesis test to be selected, got 0"),
    ],
    ids=["xdist", "no-version", "another-version", "no-blob", "two-tests", "no-drawn-test"],
)
def test_a_call_that_cannot_be_replayed_is_refused(project, call, selected, message):
    write(project, "tests/parity/test_a.py", DRAWN + "\ndef test_plain():\n    pass\n")
    result = project.runpytest_subprocess("-k", *selected.split(), "--nsa-reproduce", call)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --nsa-reproduce: {message}"])


def test_a_failing_call_is_made_smaller_for_so_long(monkeypatch):
    """No setting of Hypothesis bounds that time. Where it no longer reads the number, 30 calls fail here and more."""
    assert engine.MAX_SHRINKING_SECONDS == profiles.SHRINK_SECONDS
    assert Phase.shrink in settings().phases
    monkeypatch.setattr(engine, "MAX_SHRINKING_SECONDS", 1)
    failed = []

    @settings(max_examples=5)
    @given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
    def slow(numbers):
        time.sleep(0.2)
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


@pytest.mark.parametrize(
    ("visible", "worker", "pinned"),
    [(None, "gw0", "0"), (None, "gw4", "1"), ("5,7", "gw1", "7"), ("GPU-a,GPU-b", "gw2", "GPU-a"), ("5,7", "", "5,7")],
)
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


# --- requirements -----------------------------------------------------------------------------------------------------


class FakeGPU:
    name, major, minor, total_memory = "NVIDIA A100", 8, 0, 40 * 2**30


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({}, None),
        ({"capability": (8, 0), "memory_gib": 40}, None),
        ({"capability": (9, 0)}, "needs compute capability 9.0: NVIDIA A100 has 8.0"),
        ({"memory_gib": 60}, "needs 60 GiB of GPU memory: NVIDIA A100 has 40"),
    ],
)
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
