"""What the gate's processes leave behind: in a git hook, when they are ended, and when the gate itself is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.testing import machine
from nsa.testing.gate import against, children

from .small_project import ROOT
from .small_repository import git, make

# `--nsa-against HEAD` without pytest's start around it.
GATE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
from pathlib import Path
from nsa.testing.gate import against, children
ADD = ["-c", "import subprocess; subprocess.run([\\"git\\", \\"add\\", \\"-A\\"], check=True)"]
def add(command, cwd, environment, output, run=children.run):  # no benchmark, but a process that uses git
    assert run(ADD, cwd, environment, output) == 0
    told = {"--junitxml": "<testsuites/>", "--benchmark-json": json.dumps({"machine_info": {}, "benchmarks": []})}
    for name, _, path in (word.partition("=") for word in command):
        if name in told:
            Path(path).write_text(told[name])
    return 0
if sys.argv[2:]:
    children.run = add
with children.ended_is_interrupted():
    sys.exit(against.compare("HEAD", ["-m", "perf"], [], Path(sys.argv[1]), False))
"""
SLOW = """
import os, pathlib, subprocess, sys, time
pathlib.Path(os.environ["TOLD"]).write_text(f"{os.getpid()} {os.getcwd()}")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return make(tmp_path / "repository")


def test_variables_of_a_repository_are_those_that_git_lists():
    listed = set(machine.git(ROOT, "rev-parse", "--local-env-vars").stdout.split())
    assert {"GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"} <= listed
    assert listed - {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"} <= machine.OF_A_REPOSITORY


def test_a_hook_of_a_linked_worktree_keeps_its_index(repository, tmp_path):
    """git names the index in GIT_INDEX_FILE, which `git worktree add` for the base, and a benchmark, would change."""
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "--quiet", str(linked))
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c \'{GATE}\' "$PWD" stub\n')
    hook.chmod(0o755)
    (linked / "added.txt").write_text("x")
    git(linked, "add", "added.txt")
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    done = machine.git(linked, *who, "commit", "-m", "through the hook")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "not gated: HEAD (" in done.stdout + done.stderr
    assert git(linked, "show", "--name-only", "--format=%s").split("\n") == ["through the hook", "", "added.txt"]
    assert git(linked, "ls-files").split() == ["added.txt", "pytest.ini", "tests/perf/test_a.py"]
    assert git(repository, "worktree", "list").count("\n") == 1


def test_the_commit_is_that_of_our_checkout_in_a_hook_of_another(repository, monkeypatch):
    ours = machine.git(ROOT, "rev-parse", "HEAD").stdout
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.delenv("NSA_COMMIT", raising=False)
    assert machine.commit.__wrapped__().startswith(ours.strip())


def alive(group):
    """Whether a process of the group runs; zombies, which nothing may reap in a container, do not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state not in "ZX":
                return True
    return False


def waited(condition, seconds=60):
    """Whether the condition came true. The limit is for a machine on which nothing runs any more."""
    stop = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > stop:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_a_comparison_that_is_ended_ends_its_benchmark_and_removes_its_tree(repository, tmp_path, number):
    """After SIGKILL only the benchmark ends. The next comparison removes the tree."""
    number = signal.Signals[number]
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    temporary.mkdir()
    (repository / "conftest.py").write_text(SLOW)
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "-m", "slow")
    gone = git(repository, "worktree", "list")
    given = os.environ | {"TOLD": str(told), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", GATE, str(repository)]
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert waited(lambda: told.exists() and told.read_text().count(" "))
        child, folder = told.read_text().split(" ", 1)
        assert Path(folder).is_relative_to(temporary)
        process.send_signal(number)
        process.wait()
        assert process.returncode != 0
    if number == signal.SIGKILL:
        assert waited(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)  # what the benchmark itself had started
        assert git(repository, "worktree", "list") != gone
        against._remove_abandoned(repository)
    else:
        assert not alive(int(child))
    assert git(repository, "worktree", "list") == gone
    assert not [path for path in temporary.iterdir() if path.name.startswith(against.PREFIX)]


def test_a_comparison_that_goes_on_keeps_its_tree(repository, tmp_path, monkeypatch):
    other = tmp_path / "mine"
    git(repository, "worktree", "add", "--quiet", str(other))
    (tmp_path / "moved").mkdir()
    work = tmp_path / f"{against.PREFIX}x"
    work.mkdir()
    with against._worktree(repository, "HEAD", work) as path:
        against._remove_abandoned(repository)
        assert (path / "pytest.ini").exists()
        other.rename(tmp_path / "moved" / "mine")  # of a user, whose folder is gone: a disk that is not mounted
        against._remove_abandoned(repository)
        assert git(repository, "worktree", "list").count("\n") == 2
    assert git(repository, "worktree", "list").count("\n") == 1


def test_only_the_first_signal_interrupts_and_an_ignored_one_does_not(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler, cleaned = signal.getsignal(signal.SIGTERM), []

    def work():
        with children.ended_is_interrupted():
            signal.raise_signal(signal.SIGHUP)
            cleaned.append("not yet")
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
                cleaned.append("now")

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cleaned == ["not yet", "now"]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_process_ends_with_all_that_it_started(tmp_path):
    """Also when it ends by itself, and git's variables do not reach it."""
    program = (
        "import os, subprocess, sys; print(os.getpgid(0), os.environ.get('GIT_DIR'), flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); sys.exit(7)"
    )
    with (tmp_path / "said").open("w") as stream:
        assert children.run(["-c", program], tmp_path, {**os.environ, "GIT_DIR": "/elsewhere"}, stream) == 7
    group, git_dir = (tmp_path / "said").read_text().split()
    assert git_dir == "None"
    assert waited(lambda: not alive(int(group)))
