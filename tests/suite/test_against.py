"""This tree against another commit of it: what a small repository is told, and what the rounds come to."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from nsa.testing.gate import against, hooks
from nsa.testing.gate.rule import Reading

from .small_project import ROOT, configuration
from .small_repository import contestant, git, make, write


@pytest.fixture
def repository(tmp_path, monkeypatch, forked_children):
    """A repository whose one commit has two benchmarks of its own; it imports this tree's `nsa`."""
    path = make(tmp_path / "repository")
    monkeypatch.setattr(against, "PAIRS", 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield path
    assert git(path, "worktree", "list").count("\n") == 0, "the worktree of the base is still there"


def third(repository, *lines):
    """One more file of benchmarks, with a test of these lines."""
    text = "import os, pathlib, pytest\n\n@pytest.mark.perf\ndef test_c():\n"
    (repository / "tests" / "perf" / "test_c.py").write_text(text + "".join(f"    {line}\n" for line in lines))


def compare(repository, *paths, strict=False):
    return against.compare("HEAD", ["-m", "perf", *paths], paths, repository, strict)


def test_a_slower_tree_fails_by_name_and_what_only_one_side_has_is_listed(repository, capsys):
    """With changes that are not committed: what is gated is what lies there."""
    write(repository, {"alpha": 2.0, "beta": 2.5, "gamma": 1.0})
    assert compare(repository) == 1
    said = capsys.readouterr().out
    assert "FAIL       test_bench[beta]\n           25.0% slower beside its control plain (2 -> 2.5" in said
    assert "in this tree, not in HEAD: test_bench[gamma]" in said
    assert said.splitlines()[-1] == "gate: 1 pass, 1 FAIL, 0 AMBIGUOUS, 0 cannot gate"
    assert "1 slower: timed again" in said


def test_the_same_tree_passes_though_other_files_are_broken(repository, capsys):
    (repository / "tests" / "perf" / "test_b.py").write_text("import nowhere_to_be_found\n")
    assert compare(repository, "tests/perf/test_a.py", strict=True) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "gate: 2 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_a_base_without_benchmarks_says_so(repository, capsys, strict):
    shutil.rmtree(repository / "tests")
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "-m", "without")
    write(repository, {"alpha": 2.0})
    assert compare(repository, strict=strict) == int(strict)
    assert "not gated: HEAD (" in capsys.readouterr().out


def test_where_no_test_is_selected_the_exit_status_is_that_of_pytest(repository, capsys):
    """As after a name that is mistyped behind -k: a gate that compared nothing is not green. A test may skip itself."""
    assert compare(repository, "-k", "typo") == pytest.ExitCode.NO_TESTS_COLLECTED
    third(repository, "pytest.skip('no GPU')")
    assert compare(repository, "-k", "test_c") == 0
    third(repository, "assert False")
    assert compare(repository, "-k", "test_c") == pytest.ExitCode.TESTS_FAILED
    assert "red in this tree, 1 of 1 processes: test_c\n  assert False\n" in capsys.readouterr().out


def test_a_test_that_is_red_here_alone_is_red(repository, capsys):
    third(repository, "assert False")
    assert compare(repository) == 1
    assert "red in this tree, 1 of 1 processes: test_c\n  assert False\n" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_a_process_that_ends_itself_is_refused(repository, status):
    """Its exit status may be one of pytest's, but it has told no result."""
    third(repository, f"os._exit({status})")
    with pytest.raises(against.NotCompared, match=f"^this tree: pytest exited with {status}:"):
        compare(repository)


def test_a_later_process_that_ends_itself_is_refused(repository, monkeypatch):
    """Also in a folder with a dot in its name: each process has files of its own."""
    monkeypatch.setattr(against, "PAIRS", 2)
    path = repository.rename(repository.with_name("repository-0.3"))
    third(path, "ran = pathlib.Path(__file__).with_name('ran')", "if ran.exists(): os._exit(0)", "ran.touch()")
    try:
        with pytest.raises(against.NotCompared, match="^this tree: pytest exited with 0:"):
            compare(path)
    finally:
        path.rename(repository)


def test_an_unknown_commit_is_refused(repository):
    with pytest.raises(against.NotCompared, match="no-such-branch"):
        against.compare("no-such-branch", [], [], repository, False)


def test_a_base_that_imports_another_copy_is_refused(repository, monkeypatch):
    """An installed copy before the tree's own: both sides would be the same code."""
    text = (repository / "tests" / "perf" / "test_a.py").read_text()
    stamped = text.replace("    feed(", '    benchmark.extra_info["commit"] = "0" * 40\n    feed(')
    (repository / "tests" / "perf" / "test_a.py").write_text(stamped)
    git(repository, "commit", "--quiet", "-am", "stamped")
    with pytest.raises(against.NotCompared, match="its process imported nsa of 0000"):
        compare(repository)


SHIM = """#!/bin/sh
printf '%s\\n' "$@" > "$(mktemp commands/XXXXXX)"
"""
FEWER = {  # than a user runs. By name, because then a run does not have to prove the kernel
    "parity": ("nsa.testing.suite.parity.test_selection::test_triton_sel_parity", "L33"),
    "edge": ("nsa.testing.suite.edge.test_inputs::test_what_a_model_may_hand_over", "one-key"),
    "perf": ("nsa.testing.suite", "many and D64-Dv64-L256"),
}
REQUEST = "github.event_name == 'pull_request'"


def commands(workflow, tmp_path):
    """The arguments of `python` in the `run` lines of a workflow for users, at a pull request to main."""
    [job] = yaml.safe_load((ROOT / "examples" / "workflows" / workflow).read_text())["jobs"].values()
    shim, folder = tmp_path / "python", tmp_path / "commands"
    folder.mkdir(parents=True)
    shim.write_text(SHIM)
    shim.chmod(0o755)
    given = {name: text.replace("${{ github.base_ref }}", "main") for name, text in job["env"].items()}
    environment = os.environ | given | {"IMPL": "timed:attend", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for step in job["steps"]:
        if "run" in step and step.get("if", REQUEST) == REQUEST:
            subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
            [file] = folder.iterdir()
            yield file.read_text().splitlines()
            file.unlink()


def gated(runner, words, few=FEWER["perf"][1]):
    """What pytest does with these words, in this process, whose children are forks."""
    options = {"nsa_against": words[-1], "nsa_impl": ["timed:attend"], "nsa_strict": True, "pyargs": True}
    config = configuration(runner, "-p", "nsa_pytest", "-p", "clock", *words, "-k", few, **options)
    config.args = [FEWER["perf"][0]]
    return hooks._against(config)


@pytest.fixture
def merged(tmp_path, monkeypatch, forked_children):
    """`merged(**change)`: a clone as a runner has it, of a fork's request. The contestant lies below the root.

    The suite is installed. Commits are those of the contestant.
    """
    upstream, runner = tmp_path / "upstream", tmp_path / "runner"

    def make(**change):
        contestant(runner / "src", **change)
        git(runner, "commit", "--quiet", "--allow-empty", "-am", "the request, merged into main")
        return runner

    contestant(upstream / "src")
    for words in (("init", "--quiet", "--initial-branch=main"), ("add", "-A"), ("commit", "--quiet", "-m", "base")):
        git(upstream, *words)
    git(tmp_path, "clone", "--quiet", str(upstream), str(runner))
    monkeypatch.setattr(against, "PAIRS", 1)
    monkeypatch.syspath_prepend(runner / "src")  # as an installation in place does
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (runner / "src", ROOT))))
    monkeypatch.setenv("NSA_TEST_TRITON_SEL", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield make
    assert git(runner, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize(("change", "first", "passed", "said"), [
    ({}, "parity", ["install", "parity", "edge", "perf"], "gate: 1 pass, 0 FAIL"),
    ({"times": 1.3}, "perf", ["install"], "30.0% slower beside its control"),
    ({"right": 1.5}, "parity", ["install"], "timed:attend, parity: WRONG on"),
], ids=["as-it-was", "slower", "wrong"])  # fmt: skip
def test_a_request_of_a_fork_is_gated_by_the_workflow_that_users_copy(
    merged, run_pytest, tmp_path, capsys, change, first, passed, said
):
    """From the step of a lane until one fails: a kernel that is only slower is green before."""
    runner, green, lanes = merged(**change), [], []
    for module, name, *words in commands("kernel.yml", tmp_path):
        if name == "pip":
            green += words[:1]
            continue
        assert (module, name) == ("-m", "pytest")
        lane = words[words.index("-m") + 1]
        lanes.append(lane)
        if first not in lanes:
            continue
        if lane == "perf":
            status, told = gated(runner, words), capsys.readouterr().out
        else:
            tests, few = FEWER[lane]
            words = [tests if word == "nsa.testing.suite" else word for word in words]
            done = run_pytest("-p", "nsa_pytest", *words, "-k", few, "-n", "0", cwd=runner)
            status, told = done.returncode, done.stdout
        if status:
            break
        green.append(lane)
    assert green == passed, told
    assert said in told


def test_a_contestant_that_is_wrong_here_is_not_timed(merged, monkeypatch, capsys):
    """The base is, once: it runs first. The mistake is named, though `-k` leaves no test of parity."""
    monkeypatch.setattr(against, "PAIRS", 3)
    words = "-m perf --pyargs nsa.testing.suite --nsa-impl timed:attend --nsa-against origin/main"
    assert gated(merged(right=1.5), words.split()) == 1
    told = capsys.readouterr().out
    ran = re.findall(r"^(.* benchmarks) in ", told, re.M)
    assert ran == ["base origin/main: 1 benchmarks", "this tree: 0 benchmarks"]
    assert re.search(r"^this tree: timed:attend, perf: WRONG on 1 of 1 case\n  \w", told, re.M), told
    assert told.splitlines()[-1] == "gate: 0 pass, 0 FAIL, 0 AMBIGUOUS, 0 cannot gate"


def test_workflows_that_users_copy_type_the_same(tmp_path):
    """On a machine of their own nothing is installed."""
    _, *cpu = commands("kernel.yml", tmp_path / "cpu")
    assert list(commands("kernel-gpu.yml", tmp_path / "gpu")) == cpu


def tree(name, times):
    readings = {key: [Reading(time, {"plain": 1.0}, "plain") for time in each] for key, each in times.items()}
    return against.Tree(name, Path(name), readings=readings)


def test_what_is_slower_in_both_rounds_and_in_every_process_fails():
    base, head = tree("base", {"a": [1.0, 1.0, 1.02]}), tree("head", {"a": [1.2, 1.25, 1.3]})
    again = tree("base", {"a": [1.0, 1.0, 1.0]}), tree("head", {"a": [1.25, 1.25, 1.2]})
    assert [v.kind for v in against._verdicts(base, head)] == ["FAIL"]
    assert [v.kind for v in against._verdicts(base, head, again)] == ["FAIL"]
    once = tree("base", {"a": [1.0, 1.0, 1.0]}), tree("head", {"a": [1.0, 1.25, 1.0]})
    assert [v.kind for v in against._verdicts(base, head, once)] == ["pass"]
    mixed = tree("base", {"a": [1.0, 1.3, 1.0]}), tree("head", {"a": [1.25, 1.25, 1.2]})
    assert [v.kind for v in against._verdicts(base, head, mixed)] == ["AMBIGUOUS"]


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize(("old", "new", "kind"), [
    ([1.0, 1.3, 1.0], [1.25, 1.25, 1.2], "AMBIGUOUS"), ([0.9, 1.0, 1.1], [1.0, 1.0, 1.0], "cannot gate"),
])  # fmt: skip
def test_what_is_ambiguous_or_gates_nothing_is_red_under_strict_alone(capsys, old, new, kind, strict):
    base, head = tree("base", {"a": old}), tree("head", {"a": new})
    verdicts = against._verdicts(base, head, (base, head))
    assert [v.kind for v in verdicts] == [kind]
    assert against._report("HEAD", base, head, verdicts, strict) == int(strict)
    assert f"1 {kind}" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("times", "before", "status"), [(3, False, 1), (2, False, 0), (3, True, 0)])
def test_a_test_is_red_if_it_is_in_every_process_and_in_this_tree_alone(capsys, times, before, status):
    same = {"a": [1.0, 1.0, 1.0]}
    base, head = tree("base", same), tree("this tree", same)
    base.processes = head.processes = 3
    head.red = {"test_c": ["assert False"] * times}
    base.red = {"test_c": ["assert 0"]} if before else {}
    assert against._report("HEAD", base, head, against._verdicts(base, head), True) == status
    assert f"red in this tree, {times} of 3 processes: test_c\n  assert False\n" in capsys.readouterr().out


def test_benchmarks_that_only_one_tree_has_are_listed(capsys):
    base, head = tree("base", {"a": [1.0] * 3, "old": [1.0] * 3}), tree("head", {"a": [1.0] * 3, "new": [1.0] * 3})
    assert against._report("HEAD", base, head, against._verdicts(base, head), True) == 0
    said = capsys.readouterr().out.splitlines()
    assert "in HEAD, not in this tree: old" in said
    assert "in this tree, not in HEAD: new" in said


def test_processes_take_turns():
    base, head = tree("base", {}), tree("head", {})
    assert [t.name for t in against._turns(base, head)] == ["base", "head", "head", "base", "base", "head"]


def test_a_mistake_that_no_benchmark_shows_is_named_before_anything_is_timed(merged, capsys):
    """The keys of the benchmarks lie below the causal limit."""
    runner = merged(causal=False)
    few = f"({FEWER['perf'][1]}) or (triton_sel_parity and Skv40)"
    words = ["--pyargs", "nsa.testing.suite", "-m", "perf", "--nsa-impl", "timed:attend", "--nsa-against", "HEAD^"]
    status, told = gated(runner, words, few), capsys.readouterr().out
    assert status == 1
    assert "this tree: parity in" in told
    assert "nothing is timed, because this tree is wrong\n" in told
    assert "timed:attend, parity: WRONG on" in told
    assert "  reads keys beyond the causal limit (" in told
    assert "benchmarks in" not in told
