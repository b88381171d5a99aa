"""Beside other plugins of pytest: what they do is done here by small ones. `.ci/plugins` runs beside the real ones."""

import re

import pytest

from .small_project import ROOT, lay_out, off_gpu, outcome, write

LOUD = """
import random, warnings
import numpy, pytest, torch

def loud(*args, **how):
    warnings.warn("the option is deprecated", DeprecationWarning)

def pytest_configure(config):  # as pytest-asyncio
    loud()

pytest_sessionstart = pytest_collection_finish = pytest_runtest_logstart = pytest_sessionfinish = loud
pytest_terminal_summary = pytest_unconfigure = loud

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):  # as pytest-randomly
    items.reverse()

def seed():
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)

def pytest_runtest_setup(item):
    seed()

def pytest_runtest_call(item):
    seed()
"""
TESTS = """
import warnings
import pytest

@pytest.fixture
def loud():
    warnings.warn("of a fixture", DeprecationWarning)

def test_quiet():
    pass

def test_of_a_fixture(loud):
    pass

@pytest.mark.filterwarnings("ignore:of a")
def test_allowed(loud):
    warnings.warn("of a test", DeprecationWarning)

def test_warns():
    warnings.warn("of a test", DeprecationWarning)
"""
KERNEL = """
from nsa.call import Call
from nsa.plain.packed_sdpa import packed_sdpa

def attend(q, k, v, *, ranges, causal, scale, return_lse=False):
    o, lse = packed_sdpa(Call.of(q, k, v, ranges=ranges, causal=causal, scale=scale, return_lse=True))
    return (o, lse) if return_lse else o
"""
CODSPEED = """
import pytest

class CodSpeed:
    is_codspeed_enabled = True

def pytest_configure(config):
    config.option.benchmark_disable = True
    config.pluginmanager.set_blocked("pytest_benchmark")
    config.pluginmanager.register(CodSpeed(), "codspeed_plugin")

@pytest.fixture
def benchmark():
    raise ValueError("Unknown kwargs passed to benchmark marker: timer")
"""


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, {"loud.py": LOUD, "mine.py": KERNEL, "speed.py": CODSPEED})
    return tmp_path


def test_only_warnings_of_our_tests_are_errors_in_a_checkout(run_pytest, folder):
    one, two = "tests/edge/test_a.py", "tests/edge/test_b.py"
    lay_out(folder, {one: TESTS, two: "import warnings\nwarnings.warn('imported')\n"})
    done = run_pytest("-p", "loud", one, cwd=folder, environment=off_gpu(folder))
    assert (done.returncode, outcome(done)) == (1, {"passed": 2, "failed": 1, "error": 1}), done.stdout + done.stderr
    assert "ERROR tests/edge/test_a.py::test_of_a_fixture - DeprecationWarning: of a fixture" in done.stdout
    assert "FAILED tests/edge/test_a.py::test_warns - DeprecationWarning: of a test" in done.stdout
    done = run_pytest("-p", "loud", two, cwd=folder, environment=off_gpu(folder))
    assert re.search("^E +UserWarning: imported", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("lane", ["parity", "edge", "perf"])
def test_a_contestant_is_judged_in_any_order_and_beside_warnings(run_pytest, folder, lane):
    chosen = {"parity": "L33 and D64", "edge": "one-key", "perf": "D64-Dv64-L256"}[lane]
    suite = ("--pyargs", "nsa.testing.suite", "--nsa-impl", "mine:attend", "-m", lane, "-k", chosen, "-p", "loud")
    done = run_pytest(*suite, cwd=folder, environment=off_gpu(folder))
    assert "failed" not in outcome(done), done.stdout
    assert outcome(done)["passed"] > 1, done.stdout
    assert ("mine:attend, edge: right on" in done.stdout) == (lane == "edge")
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_codspeed_is_refused_in_one_line(run_pytest, folder):
    """It replaces the fixture `benchmark`, and knows no timer."""
    suite = ("--pyargs", "nsa.testing.suite", "--nsa-impl", "mine:attend", "-p", "speed")
    perf, parity = run_pytest.each(
        [(*suite, "-m", "perf"), (*suite, "-m", "parity", "-k", "L33", "--collect-only", "-q")],
        cwd=folder, environment=off_gpu(folder),
    )  # fmt: skip
    assert perf.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"^ERROR: --codspeed switches off pytest-benchmark, .*: leave out", perf.stderr, re.M)
    assert "Unknown kwargs" not in perf.stdout + perf.stderr
    assert parity.returncode == 0, parity.stdout + parity.stderr


def test_a_mark_that_names_a_folder_imports_no_other(run_pytest, tmp_path):
    """So `-k` that matches nothing costs little, and the run says why it ran nothing."""
    broken = "raise RuntimeError('imported')\n"
    files = {"tests/perf/test_a.py": "def test_a():\n    pass\n", "tests/edge/deep/test_b.py": broken}
    lay_out(tmp_path, files | {"tests/suite/test_c.py": broken, "tests/parity/test_d.py": broken})
    nothing, one, both = run_pytest.each(
        [("-m", "perf", "-k", "no_such"), ("-m", "perf"), ("-m", "perf or edge")], cwd=tmp_path, environment=off_gpu()
    )
    assert nothing.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "nothing ran: no test matches -k 'no_such'" in nothing.stdout
    assert "collected 1 item / 1 deselected / 0 selected" in nothing.stdout
    assert (one.returncode, outcome(one)) == (0, {"passed": 1})
    assert both.returncode == pytest.ExitCode.INTERRUPTED, both.stdout


def test_a_kernel_that_no_test_of_a_promise_asks_for_is_not_counted_as_selected(run_pytest, folder):
    suite = ("--pyargs", "nsa.testing.suite", "--nsa-impl", "mine:attend", "-k", "no_such")
    done = run_pytest(*suite, cwd=ROOT, environment=off_gpu(folder))
    assert re.search(r"collected (\d+) items / \1 deselected / 0 selected", done.stdout), done.stdout
