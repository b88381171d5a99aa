"""A repository with a few benchmarks of its own, which imports this tree's `nsa`."""

from nsa.testing import machine

from . import small_project

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
CONTESTANT = """
from nsa.call import Call
from nsa.plain.packed_sdpa import packed_sdpa

def attend(q, k, v, *, ranges, causal, scale):
    attend.called = True
    return packed_sdpa(Call.of(q, k, v, ranges=ranges, causal=causal and {causal}, scale=scale))[0] * {right}

def sample(calls, repeats, sync):
    attend.called = False
    calls[0]()
    return 1e-2 * ({times} if attend.called else 1.0)
"""
CLOCK = """
import timed
from nsa.testing.clock import timing

timing._host_sample = timed.sample  # before the suite loads a contestant, which must not patch the suite
"""
INI = "[pytest]\nmarkers =\n    perf: benchmarks\naddopts = --import-mode=importlib\n"


def git(path, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    done = machine.git(path, *who, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(path, times):
    small_project.write(path, {"tests/perf/test_a.py": BENCHMARKS.replace("{TIMES}", repr(times))})


def contestant(folder, times=1.0, right=1.0, causal=True):
    """Plain torch as a contestant `timed:attend`, and a plugin `clock` by which it takes `times` as long as others."""
    kernel = CONTESTANT.format(times=times, right=right, causal=causal)
    small_project.write(folder, {"timed.py": kernel, "clock.py": CLOCK})


def make(path):
    """A repository whose one commit has two benchmarks."""
    small_project.write(path, {"pytest.ini": INI})
    write(path, {"alpha": 2.0, "beta": 2.0})
    git(path, "init", "--quiet")
    git(path, "add", "-A")
    git(path, "commit", "--quiet", "-m", "base")
    return path
