"""What the compile matrix complains of, and the two files it writes."""

import collections
import dataclasses
import re

import pytest
import yaml

from nsa.kernels.shared import sources
from nsa.testing.compile import budgets, matrix
from nsa.testing.compile.matrix import Compiled
from nsa.testing.compile.points import ARCHITECTURES, MOST

ADA, AMD = ARCHITECTURES["sm_89"], ARCHITECTURES["gfx942"]
FINE = Compiled("dense-bf16-G8", "_fwd_kernel", 101_376, 255, 64, mma=True, cluster=False, early=True, hasty=False)
MERGE = dataclasses.replace(FINE, kernel="_combine_kernel", registers=40, spills=0, mma=False)
LIMITS = {FINE.name: (200, 8)}
UPDATE = "python -m nsa.testing.compile sm_89 --update-budgets"


def complaints(change, limits=None, architecture=ADA):
    return list(budgets.complaints(architecture, dataclasses.replace(FINE, **change), limits or {}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shared": 101_377}, "101377 bytes of shared memory, sm_89 has 101376"),
        ({"spills": 65}, "spills 65 bytes a thread, 64 are allowed without a budget of its own"),
        ({"hasty": True}, "is launched early, and accesses memory before it waits for the previous kernel"),
        (
            {"mixed": True},
            "matrices with different swizzles share an address, which ptxas 12.8 may lose (`child.mixed`)",
        ),
        (
            {"askew": True},
            "tiles that `wgmma` reads are not aligned to their swizzle's pattern (`child.askew`)",
        ),
        ({"mma": False}, "no matrix instruction in its assembly: the dot products do not reach the tensor cores"),
    ],
)
def test_what_is_complained_of_without_budgets(change, complaint):
    assert complaints({}) == []
    assert complaints(change) == [complaint]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 201}, f"201 registers, the budget is 200; if that is worth it: {UPDATE}"),
        ({"spills": 9}, f"9 spilled bytes, the budget is 8; if that is worth it: {UPDATE}"),
        ({"shared": 101_377}, "101377 bytes of shared memory, sm_89 has 101376"),
        ({"point": "another"}, f"has no budget: {UPDATE}"),
    ],
)
def test_what_is_complained_of_with_budgets(change, complaint):
    equal = {"registers": 200, "spills": 8}
    assert complaints(equal, LIMITS) == complaints({"registers": 100, "spills": 0}, LIMITS) == []
    assert complaints(equal | change, LIMITS) == [complaint]


def test_products_that_no_matrix_core_takes():
    for point, architecture, count in (("dense-fp32-G8", ADA, 0), ("dense-fp32-G8", AMD, 1), ("dense-bf16-G8", ADA, 1)):
        without = {"point": point, "mma": False, "shared": 0}
        assert len(complaints(without, architecture=architecture)) == count
    assert complaints({"kernel": "_combine_kernel", "mma": False}) == []


def test_kernel_without_a_report_is_held_to_the_rest():
    silent = {"registers": None, "spills": None}
    assert complaints(silent) == complaints(silent, LIMITS) == []
    assert len(complaints(silent | {"shared": 101_377}, LIMITS)) == 1


def test_budget_of_a_kernel_that_is_gone_is_complained_of():
    known = dataclasses.replace(FINE, registers=200, spills=8)
    assert budgets.all_complaints(ADA, [known], LIMITS) == []
    gone = f"{MERGE.name}: has a budget, but is no longer compiled: {UPDATE}"
    assert budgets.all_complaints(ADA, [known], LIMITS | {MERGE.name: (40, 0)}) == [gone]


def test_notes_say_what_a_green_run_does_not_show():
    known = dataclasses.replace(FINE, registers=200, spills=8)

    def notes(kernel, limits):
        return budgets.notes(ADA, [kernel], limits, "3.6")

    assert notes(known, LIMITS) == notes(dataclasses.replace(known, registers=201), LIMITS) == []
    assert notes(dataclasses.replace(known, registers=199), LIMITS) == [
        f"sm_89, Triton 3.6: 1 kernels need less than budgeted: {UPDATE}"
    ]
    assert "no budgets of this release: only absolute limits hold" in notes(known, {})[0]
    assert "compiled only" in notes(dataclasses.replace(known, registers=None, spills=None), LIMITS)[0]


def test_budgets_are_a_line_a_kernel_and_other_releases_are_kept(tmp_path):
    path = tmp_path / "budgets.yaml"
    budgets.update("3.10", "sm_89", [FINE, MERGE], path)
    budgets.update("3.6", "sm_89", [dataclasses.replace(FINE, registers=7)], path)
    budgets.update("3.10", "sm_80", [MERGE], path)
    assert [line for line in path.read_text().splitlines() if not line.startswith("#")] == [
        "sm_80:",
        '  dense-bf16-G8 _combine_kernel: {"3.10": [40, 0]}',
        "sm_89:",
        '  dense-bf16-G8 _combine_kernel: {"3.10": [40, 0]}',
        '  dense-bf16-G8 _fwd_kernel: {"3.6": [7, 64], "3.10": [255, 64]}',
    ]
    budgets.update("3.10", "sm_89", [FINE], path)  # the other kernel is gone
    assert budgets.load(path).of("3.10", "sm_89") == {FINE.name: (255, 64)}
    assert budgets.load(path).of("3.9", "sm_89") == {}
    variants = [dataclasses.replace(FINE, registers=9, spills=80), FINE]
    for kernels in (variants, variants[::-1]):
        budgets.update("3.10", "sm_89", kernels, path)
        assert budgets.load(path).of("3.10", "sm_89") == {FINE.name: (255, 80)}
        assert budgets.notes(ADA, kernels, {FINE.name: (255, 80)}, "3.10") == []
    with pytest.raises(ValueError, match="expected a report of registers, Triton 3.1 gives none"):
        budgets.update("3.1", "sm_89", [dataclasses.replace(FINE, registers=None)], path)
    path.write_text("sm_89:\n  x: {3.6: [1, 2]}\n")  # a float: 3.10 would be 3.1
    with pytest.raises(ValueError, match=re.escape(str(path))):
        budgets.load(path)


def test_record_replaces_what_it_said_and_forgets_what_no_longer_passes(tmp_path):
    path = tmp_path / "compiled.yaml"
    budgets.record("3.6", "sm_90", 41, "2026-11-22", "123456789012", path)
    budgets.record("3.10", "sm_90", 40, "2026-11-22", "abc", path)
    budgets.record("3.6", "sm_90", 42, "2026-11-23", "abd", path)
    passed = yaml.safe_load(path.read_text())["passed"]
    assert [(e["triton"], e["arch"], e["kernels"], str(e["date"]), e["commit"]) for e in passed] == [
        ("3.6", "sm_90", 42, "2026-11-23", "abd"),
        ("3.10", "sm_90", 40, "2026-11-22", "abc"),
    ]
    assert {e["sources"] for e in passed} == {sources.kernel_sources()}
    for release in ("3.6", "3.10"):
        budgets.record(release, "sm_90", 0, "2026-11-24", "abe", path)
    assert yaml.safe_load(path.read_text()) == {"passed": []}


def test_committed_files_are_of_architectures_and_releases_that_are_supported():
    entries = budgets.load().entries
    assert set(entries) == set(ARCHITECTURES)
    passed = yaml.safe_load(budgets.PASSED.read_text())["passed"]
    for entry in passed:
        assert set(entry) == {"triton", "arch", "kernels", "date", "commit", "sources"}
        assert matrix.unsupported(ARCHITECTURES[entry["arch"]], matrix.minor(entry["triton"])) is None
        assert entry["kernels"] > 0
    pairs = [(entry["triton"], entry["arch"]) for entry in passed]
    assert len(set(pairs)) == len(pairs)
    compiled = collections.defaultdict(set)  # the points, of which one may launch several kernels
    for arch, kernels in entries.items():
        for name, seen in kernels.items():
            for release in seen:
                compiled[release, arch].add(name.partition(" ")[0])
    assert set(compiled) <= set(pairs)
    assert {pair: len(ids) for pair, ids in compiled.items() if len(ids) > MOST} == {}


def test_what_has_passed_are_the_kernels_at_hand():
    """Else every GPU pays for a child process; CONTRIBUTING, "The compile matrix", says how all Tritons are had."""
    passed = yaml.safe_load(budgets.PASSED.read_text())["passed"]
    stale = {entry["triton"] for entry in passed if entry["sources"] != sources.kernel_sources()}
    command = "commit, then python -m nsa.testing.compile --record with each Triton of"
    assert not stale, f"passed by other kernels than {sources.kernel_sources()}: {command} {', '.join(sorted(stale))}"
