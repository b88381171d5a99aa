"""A repository with a few benchmarks of its own, which imports this tree's `nsa`."""

from pathlib import Path

from nsa.testing import machine, plugin

ROOT = Path(plugin.__file__).parents[2]
BENCHMARKS = """
import pytest
from nsa.testing.clock.measure import gate_figures
from nsa.testing.clock.timing import Timing, clock, feed

pytestmark = [pytest.mark.perf, pytest.mark.benchmark(timer=clock)]
TIMES = {TIMES}

@pytest.mark.parametrize("name", TIMES)
def test_bench(name, benchmark):
    ours, plain = (Timing([ms * 1e-3] * 10, "host", False, 1, 1) for ms in (TIMES[name], 1.0))
    benchmark.extra_info.update(gate_figures({"ours": ours, "plain": plain}, ["plain"]))
    feed(benchmark, ours)
"""
INI = "[pytest]\nmarkers =\n    perf: benchmarks\naddopts = --import-mode=importlib\n"


def git(path, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    done = machine.git(path, *who, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(path, times):
    (path / "tests" / "perf").mkdir(parents=True, exist_ok=True)
    (path / "tests" / "perf" / "test_a.py").write_text(BENCHMARKS.replace("{TIMES}", repr(times)))


def make(path):
    """A repository whose one commit has two benchmarks."""
    path.mkdir()
    (path / "pytest.ini").write_text(INI)
    write(path, {"alpha": 2.0, "beta": 2.0})
    git(path, "init", "--quiet")
    git(path, "add", "-A")
    git(path, "commit", "--quiet", "-m", "base")
    return path
