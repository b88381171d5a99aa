"""Routes of ours that the suite's own tests do not take, over the lane's matrix; each launches its own kernel."""

import pytest

from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import lane_cases, register
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import current_lane

GPU = current_lane() == "gpu"


def modes(case: Case) -> tuple[bool, ...]:
    """With and without LSE are two kernels, and a case compiles one of them if there are many cases."""
    if not GPU:
        return (lane_cases().index(case) // 2 % 2 == 0,)  # in pairs, because dtypes take turns
    return (case.N == 64,) if case.N in (64, 256, 1024) and case.HKV == 1 else (False, True)


def prompts(case: Case) -> bool:
    """Blocks, and prompts in spans: of the matrix, what has many queries, or each group size and head dim once."""
    return case.S > 1 or bool(case.seqlens) or (case.source == "blocks" and few(case))


def few(case: Case) -> bool:
    """All of `small`; of the full matrix a part that has each dim and tile once, and every group size and geometry."""
    if not GPU or case.HKV > 1 or case.L == 200:
        return True
    return case.N == 64 and case.H in (8, 16) and case.dtype == "bf16" and case.L in (64, 1024)


def as_spans(case: Case) -> bool:
    """Blocks as spans are spans of equal lengths. Of the interpreter's a third, with each dtype and block size."""
    return GPU or lane_cases().index(case) % 3 == 0


ROUTES = {  # a contestant's name, and its cases
    "key_major": lambda c: c.source == "blocks" and prompts(c),
    "key_major_ranges": lambda c: c.source != "varlen" and prompts(c) and (c.source != "blocks" or as_spans(c)),
    "dense_per_head": lambda c: c.source == "rows" and few(c),
    "varlen_per_head": lambda c: c.source == "varlen" and few(c),
    "ranges_per_head": lambda c: c.source == "ranges" and few(c),
    "ranges": lambda c: c.source != "ranges" and few(c),  # rows, varlen rows and blocks are spans too
    "ranges_unbounded": lambda c: c.source == "ranges" and few(c),  # without the host's bound every row counts as long
    "sdpa": few, "sdpa_unbounded": few, "reference": few,
    **dict.fromkeys(("original", "original_packed"), lambda c: few(c) and OURS["original"].supports(c) is None),
}  # fmt: skip


def rows():
    """Case by case, so that the routes of a case share its oracle."""
    pairs = [(case, name) for case in lane_cases() for name, takes in ROUTES.items() if takes(case)]
    return list(zip(register([case for case, _ in pairs]), [name for _, name in pairs], strict=True))


@pytest.mark.parametrize(("case", "name"), rows(), indirect=["case"], scope="module")
def test_triton_sel_parity_other_routes(oracle: Oracle, name: str) -> None:
    """Kernels that sort and merge may run beside key-major, none of another route."""
    impl, case, routes = OURS[name], oracle.problem.case, {impl.route for impl in OURS.values()}
    both = GPU and name.startswith("key_major")
    for return_lse in ((False, True) if both else modes(case)) if impl.lse else (False,):
        result, launched = impl.run_counted(oracle.problem, return_lse)
        assert_parity(result, oracle, name)
        assert impl.route is None or routes & set(launched) == {impl.route}, f"{name} launched {launched}"
