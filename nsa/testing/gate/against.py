"""Is this tree slower than another commit? Each tree runs its own benchmarks here, in processes that take turns.

This needs no stored baseline, so any machine can gate a change. Both trees run on the same machine on the same day. The
tree may be a checkout of `nsa`, or that of a contestant: then both trees are measured by the suite that is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nsa.settings import child_environment
from nsa.testing.gate import children, words
from nsa.testing.gate.rule import Reading, Side, Verdict, judge, pooled
from nsa.testing.machine import git
from nsa.testing.report.document import read

PERF = "tests/perf"
PAIRS = 3  # processes of each tree in a round; the first round runs all benchmarks, the second the slower ones
PREFIX, OWNER = "nsa-against-", "owner"  # of the temporary folder; of the file in it that this process locks
EXPECTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class NotCompared(RuntimeError):
    """Why the two trees could not be compared."""


@dataclass
class Tree:
    """One of the two trees.

    readings: by benchmark, one for each process. ids: pytest's id of each benchmark in this tree. red: by test, what
    each process in which it failed said of it. wrong: the verdicts on a contestant whose results are wrong, and the
    lines below each. status: the exit status of the last process.
    """

    name: str
    path: Path  # the folder in which its processes run
    imports: Sequence[str] = ()  # the first entries of their `sys.path`
    commit: str | None = None  # of the code under test that its processes must import; None: not checked
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    red: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    processes: int = 0
    status: int = 0

    def sides(self) -> dict[str, Side]:
        return pooled({name: Side.of(readings) for name, readings in self.readings.items()})


def compare(
    ref: str, arguments: Sequence[str], paths: Sequence[str], root: Path, strict: bool, module: str = "nsa"
) -> int:
    """Gate the tree at `root` against commit `ref`, and print the verdicts. Returns the exit status.

    Args:
        arguments: arguments of pytest, for both trees. Those of the comparison itself are left out.
        paths: the arguments that are paths of tests; without any, pytest runs `PERF` of a checkout of `nsa`.
        root: a folder of a git checkout, in which pytest runs. Uncommitted changes are measured too.
        strict: an AMBIGUOUS verdict also gives status 1, and so does a run that compared nothing.
        module: the package under test, `nsa` or a contestant's, which each tree imports from its own checkout.

    Raises:
        NotCompared: there is no such commit, or pytest ended with an exit status other than those in `EXPECTED`.
    """
    others = [word for word in _of_one_tree(arguments) if word not in paths]
    arguments = [*others, *(paths or [PERF] * (module == "nsa"))]
    top = Path(_git(root, "rev-parse", "--show-toplevel"))
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    _remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as work, _worktree(root, commit, Path(work)) as base_top:
        path = base_top / root.resolve().relative_to(top.resolve())
        places = (path, _imports(path, base_top, top)), (root, _imports(root, top, top))
        base, head = Tree(f"base {ref}", *places[0], commit), Tree("this tree", *places[1])
        if module != "nsa" and (wrong := _not_right(head, arguments, Path(work))):
            print(f"nothing is timed, because this tree is wrong\n{wrong}", flush=True)
            return 1
        if not path.is_dir() or not _run(base, arguments, Path(work), module):
            print(f"not gated: {ref} ({commit[:12]}) has no benchmarks that these arguments select", flush=True)
            if strict:
                return 1
            _run(head, arguments, Path(work), module)
            for line in _red_lines(head):
                print(line, flush=True)
            if head.red.keys() - base.red.keys():
                return 1
            none = pytest.ExitCode.NO_TESTS_COLLECTED  # as after a mistyped -k
            return none if head.status == none else 0
        for tree in _turns(base, head)[1:]:
            if not _run(tree, arguments, Path(work), module) and tree.red:
                break  # nothing of this tree can be compared
        verdicts = _verdicts(base, head)
        slower = [v.name for v in verdicts if v.kind in ("FAIL", "AMBIGUOUS")]
        if slower:
            print(f"{len(slower)} slower: timed again, {PAIRS} processes of each tree", flush=True)
            again = Tree(base.name, *places[0], commit), Tree(head.name, *places[1])
            for tree in _turns(*again):
                ids = (base if tree is again[0] else head).ids
                _run(tree, [*others, *(_argument(ids[name], paths) for name in slower)], Path(work), module)
            verdicts = _verdicts(base, head, again)
    return _report(ref, base, head, verdicts, strict)


def _of_one_tree(arguments: Sequence[str]) -> list[str]:
    """The arguments without those of the comparison, which a process of one tree must not have."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--nsa-against":
            next(rest, None)
        elif word != "--nsa-strict" and not word.startswith("--nsa-against="):
            kept.append(word)
    return kept


def _turns(base: Tree, head: Tree) -> list[Tree]:
    """The order of processes: base, head, head, base, base, head."""
    return [tree for i in range(PAIRS) for tree in ((base, head), (head, base))[i % 2]]


def _verdicts(base: Tree, head: Tree, again: tuple[Tree, Tree] | None = None) -> list[Verdict]:
    """A verdict for each benchmark that both trees have. `again`: the trees with the readings of the second round."""
    old, new = base.sides(), head.sides()
    second = tuple(tree.sides() for tree in again) if again else ({}, {})

    def judged(name: str) -> Verdict:
        once_more = (lambda: (second[0][name], second[1][name])) if all(name in side for side in second) else None
        return judge(name, old[name], new[name], once_more, paired=True)

    return [judged(name) for name in old if name in new]


def _report(ref: str, base: Tree, head: Tree, verdicts: list[Verdict], strict: bool) -> int:
    """Print the verdicts, with their counts last. Returns the exit status."""
    print(f"{' gate: this tree against ' + ref + ' ':=^80}")
    lines = words.table(verdicts)
    sides = ((base, head, f"in {ref}, not in this tree"), (head, base, f"in this tree, not in {ref}"))
    for one, other, where in sides:
        lines += [f"{where}: {name}" for name in one.readings if name not in other.readings]
    broken = [name for name, said in head.red.items() if len(said) == head.processes and name not in base.red]
    for tree in (base, head):
        lines += "\n".join(f"{tree.name}: {verdict}" for verdict in dict.fromkeys(tree.wrong)).splitlines()
        lines += _red_lines(tree)
    print(*words.narrowed(lines), words.counts(verdicts), sep="\n", flush=True)
    kinds = {v.kind for v in verdicts}
    gated = bool(kinds - {"cannot gate"})
    return int(bool(broken) or "FAIL" in kinds or (strict and ("AMBIGUOUS" in kinds or not gated)))


def _red_lines(tree: Tree) -> list[str]:
    lines = []
    for name, said in tree.red.items():
        lines += [f"red in {tree.name}, {len(said)} of {tree.processes} processes: {name}", f"  {said[-1]}"]
    return lines


def _argument(test: str, paths: Sequence[str]) -> str:
    """What selects a test on a command line: its id, or with `--pyargs` its module.

    The id of a test in a package of `paths` begins at that package.
    """
    path, _, name = test.partition("::")
    for package in paths:
        found = importlib.util.find_spec(package) if package.replace(".", "").isidentifier() else None
        for folder in (found and found.submodule_search_locations) or ():
            if Path(folder, path).is_file():
                return f"{package}.{path.removesuffix('.py').replace('/', '.')}::{name}"
    return test


def _imports(path: Path, base_top: Path, top: Path) -> list[str]:
    """Where processes of the tree at `base_top` look for modules first: where this process looks in the tree at `top`.

    A project that is installed in place may have its package in a folder below the root.
    """
    top, installed = top.resolve(), Path(sys.prefix).resolve()  # an environment may lie in the tree
    entries = [Path(entry).resolve() for entry in sys.path if entry]
    inside = [x for x in entries if x.is_relative_to(top) and not x.is_relative_to(installed)]
    return [str(x) for x in dict.fromkeys([path, *(base_top / x.relative_to(top) for x in inside)])]


def _not_right(tree: Tree, arguments: Sequence[str], work: Path) -> str:
    """Run the parity tests of a contestant that these arguments select. Returns what pytest says of a wrong one.

    Cases of benchmarks do not show every mistake: their keys may lie far below the causal limit. Raises as `_pytest`.
    """
    began = time.monotonic()
    said, xml = _pytest(tree, [*arguments, "-m", "parity"], work / "parity")
    print(f"{tree.name}: parity in {time.monotonic() - began:.0f} s", flush=True)
    concluded = re.search(r"(?ms)^=+ contestants =+$.*?(?:: WRONG on |ended without a result).*", said)
    if concluded:
        return concluded.group().strip()
    return "".join(f"{name}: {why}\n" for name, why in _red(xml).items())


def _pytest(tree: Tree, arguments: Sequence[str], stem: Path) -> tuple[str, Path]:
    """Run `pytest` once in the tree. Returns what it printed, and its JUnit file, which files named `stem` keep.

    A base may lack the tests that are named, and then has no JUnit file.

    Raises:
        NotCompared: pytest ended with an unexpected exit status, or before it wrote its JUnit file.
    """
    xml, text = stem.with_suffix(".xml"), stem.with_suffix(".txt")
    environment = child_environment(interpret=False)
    environment.pop("NSA_COMMIT", None)  # so that `extra_info` names the commit of what was imported
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*tree.imports, environment.get("PYTHONPATH")]))
    environment["PYTEST_ADDOPTS"] = shlex.join(_of_one_tree(shlex.split(environment.get("PYTEST_ADDOPTS", ""))))
    with text.open("w") as stream:
        status = children.run(["-m", "pytest", f"--junitxml={xml}", *arguments], tree.path, environment, stream)
    tree.status = status
    said = re.sub(r"\n {4}(?=\S)", " ", text.read_text())  # verdicts are wrapped
    lacking = tree.commit and status == pytest.ExitCode.USAGE_ERROR
    if not lacking and (status not in EXPECTED or not xml.exists()):
        raise NotCompared(f"{tree.name}: pytest exited with {status}:\n{said[-2000:]}")
    return said, xml


def _run(tree: Tree, arguments: Sequence[str], work: Path, module: str) -> bool:
    """Run `pytest` once in the tree, on the tree's own `module`. Returns False if no benchmark ran.

    Raises:
        NotCompared: as `_pytest`, or its process imported the `module` of another commit.
    """
    stem = work / f"{'base' if tree.commit else 'this'}-{tree.processes}-{time.monotonic_ns()}"  # without a dot
    file, began = stem.with_suffix(".json"), time.monotonic()
    said, xml = _pytest(tree, [f"--benchmark-json={file}", *arguments], stem)
    tree.processes += 1
    try:
        document = read(file) if file.exists() else {"benchmarks": []}
    except ValueError as e:
        raise NotCompared(f"{tree.name}: {e}") from e
    for benchmark in document["benchmarks"]:
        name, imported = benchmark["name"], benchmark["extra_info"].get("commit")
        if tree.commit and imported not in (None, tree.commit):
            raise NotCompared(f"{tree.name}: its process imported {module} of {imported}, expected {tree.commit}")
        tree.readings.setdefault(name, []).append(Reading.of(benchmark["stats"]["data"], benchmark["extra_info"]))
        tree.ids[name] = benchmark["fullname"]
    tree.wrong += re.findall(r"^\S+, \w+: WRONG on .*(?:\n  .*)*", said, re.MULTILINE)
    for name, why in _red(xml).items():
        tree.red.setdefault(name, []).append(why)
    seconds = time.monotonic() - began
    print(f"{tree.name}: {len(document['benchmarks'])} benchmarks in {seconds:.0f} s", flush=True)
    return bool(document["benchmarks"])


def _red(xml: Path) -> dict[str, str]:
    """The tests that failed, from a JUnit file, with the first line of what each said."""
    if not xml.exists():
        return {}
    failed = {}
    for case in ET.parse(xml).getroot().iter("testcase"):
        for part in case:
            if part.tag in ("failure", "error"):
                failed[str(case.get("name"))] = (part.get("message") or "").partition("\n")[0]
    return failed


@contextlib.contextmanager
def _worktree(root: Path, commit: str, work: Path) -> Iterator[Path]:
    """A git worktree of `commit`, removed at the end of the context. This process holds a lock in `work` meanwhile."""
    path = work / "base"
    with (work / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            _git(root, "worktree", "add", "--detach", "--quiet", str(path), commit)
            yield path
        finally:
            _remove(root, path)


def _remove(root: Path, path: Path) -> None:
    """Remove a worktree and its registration, also if `git worktree add` was interrupted, which leaves it locked."""
    shutil.rmtree(path, ignore_errors=True)
    git(root, "worktree", "remove", "--force", "--force", str(path))


def _remove_abandoned(root: Path) -> None:
    """Remove the worktrees of comparisons that were killed. Other worktrees stay, also if their folder is gone."""
    for line in _git(root, "worktree", "list", "--porcelain").splitlines():
        path = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and path.parent.name.startswith(PREFIX) and _abandoned(path.parent):
            _remove(root, path)
            shutil.rmtree(path.parent, ignore_errors=True)


def _abandoned(work: Path) -> bool:
    """Whether no process compares in this folder any more."""
    try:
        with (work / OWNER).open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return not work.exists()
    return True


def _git(root: Path, *arguments: str) -> str:
    """Run git and return its output. Raises NotCompared if git fails."""
    try:
        done = git(root, *arguments)
    except FileNotFoundError as e:
        raise NotCompared("--nsa-against needs git") from e
    if done.returncode:
        said = done.stderr.strip() or "no such commit here"
        raise NotCompared(f"git {' '.join(arguments)}: {said}")
    return done.stdout.strip()
