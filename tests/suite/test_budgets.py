"""What the compile matrix complains of, and the file it writes."""

import dataclasses

import pytest
import yaml

from nsa.kernels.shared import sources
from nsa.testing.compile import budgets, matrix
from nsa.testing.compile.budgets import Compiled
from nsa.testing.compile.points import ARCHITECTURES

ADA, AMD = ARCHITECTURES["sm_89"], ARCHITECTURES["gfx942"]
FINE = Compiled("dense-bf16-G8", "_fwd_kernel", 101_376, 255, 1280, 640, 256, True, False, early=True, hasty=False)


def complaints(change, architecture=ADA):
    return list(budgets.complaints(architecture, dataclasses.replace(FINE, **change)))


@pytest.mark.parametrize(("change", "complaint"), [
    ({"shared": 101_377}, "101377 bytes of shared memory, sm_89 has 101376"),
    ({"threads": 512}, "130560 registers a program, a multiprocessor has 65536"),
    ({"local": 1281}, "1281 bytes of local memory a thread, 1280 are allowed"),
    ({"looped": 641}, "spills in a loop: 641 bytes a turn, 640 are allowed"),
    ({"hasty": True}, "is launched early, and accesses memory before it waits for the previous kernel"),
    ({"mixed": True}, "matrices with different swizzles share an address, which ptxas 12.8 may lose (`child.mixed`)"),
    ({"askew": True}, "tiles that `wgmma` reads are not aligned to their swizzle's pattern (`child.askew`)"),
    ({"mma": False}, "no matrix instruction in its assembly: the dot products do not reach the tensor cores"),
])  # fmt: skip
def test_what_is_complained_of(change, complaint):
    assert complaints({}) == []
    assert complaints(change) == [complaint]
    wrong = dataclasses.replace(FINE, **change)
    assert budgets.all_complaints(ADA, [FINE, wrong]) == [f"dense-bf16-G8 _fwd_kernel: {complaint}"]


def test_few_bytes_may_be_in_a_loop_and_amd_has_more_registers():
    assert complaints({"local": 64, "looped": 700}) == []
    assert complaints({"threads": 512, "shared": 0}, AMD) == []


def test_products_that_no_matrix_core_takes():
    for point, architecture, count in (("dense-fp32-G8", ADA, 0), ("dense-fp32-G8", AMD, 1), ("dense-bf16-G8", ADA, 1)):
        without = {"point": point, "mma": False, "shared": 0}
        assert len(complaints(without, architecture)) == count
    assert complaints({"kernel": "_combine_kernel", "mma": False}) == []


def test_kernel_without_a_report_is_held_to_the_rest():
    silent = {"registers": None, "local": None, "looped": None}
    assert complaints(silent) == []
    assert len(complaints(silent | {"shared": 101_377})) == 1


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


def test_what_has_passed_are_architectures_and_releases_that_are_supported():
    passed = yaml.safe_load(budgets.PASSED.read_text())["passed"]
    for entry in passed:
        assert set(entry) == {"triton", "arch", "kernels", "date", "commit", "sources"}
        assert matrix.unsupported(ARCHITECTURES[entry["arch"]], matrix.minor(entry["triton"])) is None
        assert entry["kernels"] > 0
    pairs = [(entry["triton"], entry["arch"]) for entry in passed]
    assert len(set(pairs)) == len(pairs)


def test_what_has_passed_are_the_kernels_at_hand():
    """Else every GPU pays for a child process; CONTRIBUTING, "The compile matrix", says how all Tritons are had."""
    passed = yaml.safe_load(budgets.PASSED.read_text())["passed"]
    stale = {entry["triton"] for entry in passed if entry["sources"] != sources.kernel_sources()}
    command = "commit, then python -m nsa.testing.compile --record with each Triton of"
    assert not stale, f"passed by other kernels than {sources.kernel_sources()}: {command} {', '.join(sorted(stale))}"
