"""This tree against another commit of it: what a small repository is told, and what the rounds come to."""

import shutil
import textwrap
from pathlib import Path

import pytest

from nsa.testing.gate import against
from nsa.testing.gate.rule import Reading

from .small_repository import ROOT, git, make, write


@pytest.fixture
def repository(tmp_path, monkeypatch, forked_children):
    """A repository whose one commit has two benchmarks of its own; it imports this tree's `nsa`."""
    path = make(tmp_path / "repository")
    monkeypatch.setattr(against, "PAIRS", 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield path
    assert git(path, "worktree", "list").count("\n") == 0, "the worktree of the base is still there"


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


def test_a_test_that_is_red_here_alone_is_red(repository, capsys):
    (repository / "tests" / "perf" / "test_c.py").write_text(
        "import pytest\n\n@pytest.mark.perf\ndef test_c():\n    assert False\n"
    )
    assert compare(repository) == 1
    assert "red in this tree, 1 of 1 processes: test_c\n  assert False\n" in capsys.readouterr().out


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


KERNEL = """
    from nsa.call import Call
    from nsa.plain.packed_sdpa import packed_sdpa
    from nsa.testing.clock import timing

    def attend(q, k, v, *, ranges, causal, scale):
        attend.called = True
        return packed_sdpa(Call.of(q, k, v, ranges=ranges, causal=causal, scale=scale))[0] * RIGHT

    def sample(calls, repeats, sync):
        attend.called = False
        calls[0]()
        return 1e-2 * (TIMES if attend.called else 1.0)

    timing._host_sample = sample  # the clock of this test
"""


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"TIMES": 1.0}, 0, "gate: 1 pass, 0 FAIL"),
        ({"TIMES": 1.3}, 1, "30.0% slower beside its control"),
        ({"RIGHT": 1.5}, 1, "16384 of 16384 off, 0 NaN\ngate: 0 pass"),
    ],
    ids=["as-it-was", "slower", "wrong"],
)
def test_a_contestant_is_gated_in_its_own_repository(
    tmp_path, monkeypatch, forked_children, capsys, change, status, said
):
    """Its package lies below the root. The suite is the installed one; commits are those of the contestant."""
    package = tmp_path / "repository" / "src"
    package.mkdir(parents=True)
    top = package.parent

    def write(TIMES=1.0, RIGHT=1.0):
        (package / "timed.py").write_text(f"TIMES, RIGHT = {TIMES}, {RIGHT}\n{textwrap.dedent(KERNEL)}")

    write()
    for words in (("init", "--quiet"), ("add", "-A"), ("commit", "--quiet", "-m", "base")):
        git(top, *words)
    write(**change)
    monkeypatch.setattr(against, "PAIRS", 1)
    monkeypatch.syspath_prepend(package)  # as an installation in place does
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NSA_TEST_TRITON_SEL", "0")
    chosen = ["-p", "nsa_pytest", "-m", "perf", "--nsa-impl", "timed:attend", "-k", "many and D64-Dv64-L256"]
    suite = "nsa.testing.suite"
    assert against.compare("HEAD", [*chosen, "--pyargs", suite], [suite], top, True, "timed") == status
    assert said in capsys.readouterr().out
    assert git(top, "worktree", "list").count("\n") == 0


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


def test_processes_take_turns():
    base, head = tree("base", {}), tree("head", {})
    assert [t.name for t in against._turns(base, head)] == ["base", "head", "head", "base", "base", "head"]
