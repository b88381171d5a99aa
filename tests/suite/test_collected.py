"""Which benchmarks a command selects, as pytest collects them: those that take minutes run where they are named."""

from collections import Counter

import pytest

from nsa.testing.matrix.cases import core
from nsa.testing.plugin import current_lane
from nsa.tuning import thresholds

from .small_project import ROOT, off_gpu, outcome, write

LENGTHY = ("test_regret", "test_threshold", "test_training")  # files, and the tests in them that take minutes
# What is typed, and how many benchmarks of each it selects; True: some; 0: nothing of that file.
SELECTED = [
    (["tests/perf"], (0, 0, False)),
    (["tests/perf", "--nsa-full"], (0, 0, True)),
    (["tests/perf/test_training.py"], (0, 0, True)),
    (["tests/perf", "--nsa-regret=3"], (3, 0, False)),
    (["tests/perf", "--nsa-update-thresholds"], (0, len(thresholds.cases()), False)),
]


def test_lengthy_benchmarks_are_collected_on_request_only(run_pytest):
    """A GPU is needed to time them, not to list them: a folder that cannot be collected shows here, without one."""
    runs = [[*words, "--collect-only", "-q", "-p", "no:cacheprovider"] for words, _ in SELECTED]
    for done, (words, counts) in zip(run_pytest.each(runs, cwd=ROOT), SELECTED, strict=True):
        assert done.returncode == 0, done.stdout + done.stderr
        for name, count in zip(LENGTHY, counts, strict=True):
            listed = done.stdout.count(f"tests/perf/{name}.py::{name}[" if count else f"{name}.py")
            assert type(count)(listed) == count, (words, name, listed)


# A plugin that takes the benchmarks' setup for one of the GPU lane and ends the run where kernels would be compiled.
ON_A_GPU = """\
import pytest, torch
from nsa.testing import benchmarks
benchmarks.current_lane = lambda: "gpu"

def pytest_collection_finish():
    from nsa.testing.clock import precompile
    torch.cuda.get_device_properties = lambda device: type("Properties", (), {"total_memory": 2**36})
    precompile.WORTH = 1
    precompile.compile_ahead = lambda jobs, *_: pytest.exit(f"to compile: {sorted({case.id for _, case in jobs})}", 7)
"""


def test_all_benchmarks_of_a_run_can_be_compiled_ahead(run_pytest, tmp_path):
    """Calls of selectors are among them, which are no cases of attention."""
    write(tmp_path, {"on_a_gpu.py": ON_A_GPU})
    typed = ("-m", "perf", "-p", "no:cacheprovider", "-p", "on_a_gpu", "tests/perf/test_suite.py")
    done = run_pytest(*typed, cwd=ROOT, environment=off_gpu(tmp_path))
    assert done.returncode == 7, done.stdout + done.stderr
    assert core()[0].id in done.stdout.partition("to compile: ")[2]


@pytest.mark.skipif(current_lane() == "gpu", reason="there it is timed")
def test_named_by_path_it_skips_without_a_gpu(run_pytest):
    done = run_pytest("-q", "-p", "no:cacheprovider", "tests/perf/test_threshold.py", cwd=ROOT)
    assert (done.returncode, list(outcome(done))) == (0, ["skipped"]), done.stdout


def test_names_of_test_files_are_unique():
    """In a checkout and in the suite that ships, so that a name alone says which file is meant."""
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "nsa" / "testing" / "suite").rglob("test_*.py")]
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
