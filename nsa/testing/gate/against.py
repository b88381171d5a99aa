"""Is this tree slower than another commit of it? Each runs its own benchmarks here, in processes that take turns.

That needs no stored baseline, so any machine can gate a change: both sides meet the same machine on the same day.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nsa.settings import child_environment
from nsa.testing.gate import words
from nsa.testing.gate.rule import Reading, Side, Verdict, judge, pooled
from nsa.testing.gate.store import read, reading

PERF = "tests/perf"
PAIRS = 3  # processes of each tree in a round: one round of all, one more of what was slower
EXPECTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class NotCompared(RuntimeError):
    """Why the two trees could not be compared."""


@dataclass
class Tree:
    """One side. readings: of each benchmark, a process each. red: failed tests. ids: how pytest here names them."""

    name: str
    path: Path
    commit: str | None = None  # what its processes have to import
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    red: dict[str, int] = field(default_factory=dict)
    processes: int = 0

    def sides(self) -> dict[str, Side]:
        return pooled({name: Side.of(readings) for name, readings in self.readings.items()})


def compare(ref: str, arguments: Sequence[str], paths: Sequence[str], root: Path, strict: bool) -> int:
    """Gate the tree at `root` against commit `ref` of it; prints what was found. Returns the exit status.

    Args:
        arguments: of pytest, for both. paths: those of them that are paths of tests; without any, `PERF`.
        root: of a git checkout; with its changes that are not committed.
        strict: an AMBIGUOUS verdict, or that nothing was compared, is status 1.

    Raises:
        NotCompared: no such commit, or a process that ended otherwise than tests do.
    """
    others = [word for word in arguments if word not in paths]
    arguments = [*others, *(paths or [PERF])]
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="nsa-against-") as work, _worktree(root, commit, Path(work)) as path:
        base, head = Tree(f"base {ref}", path, commit), Tree("this tree", root)
        if not _run(base, arguments, Path(work)):
            print(f"not gated: {ref} ({commit[:12]}) has no benchmarks that these arguments select", flush=True)
            return int(strict)
        for tree in _turns(base, head)[1:]:
            _run(tree, arguments, Path(work))
        verdicts = _verdicts(base, head)
        slower = [v.name for v in verdicts if v.kind in ("FAIL", "AMBIGUOUS")]
        if slower:
            print(f"{len(slower)} slower: timed again, {PAIRS} processes of each tree", flush=True)
            again = Tree(base.name, path, commit), Tree(head.name, root)
            for tree in _turns(*again):
                ids = (base if tree is again[0] else head).ids
                _run(tree, [*others, *(ids[name] for name in slower)], Path(work))
            verdicts = _verdicts(base, head, again)
    return _report(ref, base, head, verdicts, strict)


def _turns(base: Tree, head: Tree) -> list[Tree]:
    """Who runs when: base first, and each as often first as it can be."""
    return [tree for i in range(PAIRS) for tree in ((base, head), (head, base))[i % 2]]


def _verdicts(base: Tree, head: Tree, again: tuple[Tree, Tree] | None = None) -> list[Verdict]:
    """Of each benchmark that both trees have; without `again`, of what was measured so far."""
    old, new = base.sides(), head.sides()
    second = tuple(tree.sides() for tree in again) if again else ({}, {})

    def judged(name: str) -> Verdict:
        once_more = (lambda: (second[0][name], second[1][name])) if all(name in side for side in second) else None
        return judge(name, old[name], new[name], once_more, paired=True)

    return [judged(name) for name in old if name in new]


def _report(ref: str, base: Tree, head: Tree, verdicts: list[Verdict], strict: bool) -> int:
    """Print what was found, the counts last; the exit status."""
    print(f"{' gate: this tree against ' + ref + ' ':=^80}")
    lines = words.table(verdicts)
    sides = ((base, head, f"in {ref}, not in this tree"), (head, base, f"in this tree, not in {ref}"))
    for one, other, where in sides:
        lines += [f"{where}: {name}" for name in one.readings if name not in other.readings]
    broken = {name: count for name, count in head.red.items() if count == head.processes and name not in base.red}
    for tree in (base, head):
        lines += [f"red in {tree.name}, {n} of {tree.processes} processes: {name}" for name, n in tree.red.items()]
    print(*words.narrowed(lines), words.counts(verdicts), sep="\n", flush=True)
    kinds = {v.kind for v in verdicts}
    gated = bool(kinds - {"cannot gate"})
    return int(bool(broken) or "FAIL" in kinds or (strict and ("AMBIGUOUS" in kinds or not gated)))


def _run(tree: Tree, arguments: Sequence[str], work: Path) -> bool:
    """One process: `pytest` in the tree, on the tree's own `nsa`. False if it found no benchmark.

    Raises:
        NotCompared: it ended otherwise than tests do, or imported another `nsa`.
    """
    stem = work / f"{tree.path.name}-{tree.processes}-{time.monotonic_ns()}"
    file, xml, said = (stem.with_suffix(end) for end in (".json", ".xml", ".txt"))
    command = [sys.executable, "-m", "pytest", f"--benchmark-json={file}", f"--junitxml={xml}", *arguments]
    environment = child_environment(interpret=False)
    environment.pop("NSA_COMMIT", None)  # each tree's own says what was imported
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree.path), environment.get("PYTHONPATH")]))
    began = time.monotonic()
    with said.open("w") as stream:
        done = subprocess.run(
            command, cwd=tree.path, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    tree.processes += 1
    if done.returncode not in EXPECTED and not (tree.commit and done.returncode == pytest.ExitCode.USAGE_ERROR):
        raise NotCompared(f"{tree.name}: pytest exited with {done.returncode}:\n{said.read_text()[-2000:]}")
    document = read(file) if file.exists() else {"benchmarks": []}
    for benchmark in document["benchmarks"]:
        name, imported = benchmark["name"], benchmark["extra_info"].get("commit")
        if tree.commit and imported not in (None, tree.commit):
            raise NotCompared(f"{tree.name}: its process imported nsa of {imported}, expected {tree.commit}")
        tree.readings.setdefault(name, []).append(reading(file, benchmark))
        tree.ids[name] = benchmark["fullname"]
    for name in _red(xml):
        tree.red[name] = tree.red.get(name, 0) + 1
    seconds = time.monotonic() - began
    print(f"{tree.name}: {len(document['benchmarks'])} benchmarks in {seconds:.0f} s", flush=True)
    return bool(document["benchmarks"])


def _red(xml: Path) -> list[str]:
    """The tests that failed, from a JUnit file."""
    if not xml.exists():
        return []
    cases = ET.parse(xml).getroot().iter("testcase")
    return [str(case.get("name")) for case in cases if {part.tag for part in case} & {"failure", "error"}]


@contextlib.contextmanager
def _worktree(root: Path, commit: str, work: Path) -> Iterator[Path]:
    """The tree of `commit`, for as long as it is needed."""
    path = work / "base"
    _git(root, "worktree", "add", "--detach", "--quiet", str(path), commit)
    try:
        yield path
    finally:
        _git(root, "worktree", "remove", "--force", str(path))


def _git(root: Path, *arguments: str) -> str:
    """What git says. Raises NotCompared if it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        raise NotCompared("--nsa-against needs git") from e
    if done.returncode:
        said = done.stderr.strip() or "no such commit here"
        raise NotCompared(f"git {' '.join(arguments)}: {said}")
    return done.stdout.strip()
