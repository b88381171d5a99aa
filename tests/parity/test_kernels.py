"""Routes of ours that the suite's own tests do not take, over the lane's matrix; each launches its own kernel."""

import pytest

from nsa.testing.contestants.ours import OURS
from nsa.testing.fixtures import lane_cases, over
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import current_lane

GPU = current_lane() == "gpu"


def modes(case: Case) -> tuple[bool, ...]:
    """With and without LSE are two kernels, and a case compiles one of them if there are many cases."""
    if not GPU:
        return (lane_cases().index(case) // 2 % 2 == 0,)  # in pairs, because dtypes take turns
    return (case.N == 64,) if case.N in (64, 256, 1024) and case.HKV == 1 else (False, True)


def check(name: str, oracle: Oracle) -> None:
    impl, case = OURS[name], oracle.problem.case
    for return_lse in modes(case) if impl.lse else (False,):
        result, launched = impl.run_counted(oracle.problem, return_lse)
        assert_parity(result, oracle, name)
        assert impl.route is None or set(launched) - {"split"} == {impl.route}, f"{name} launched {launched}"


def check_key_major(name: str, oracle: Oracle) -> None:
    """As `check`, with and without LSE; kernels that sort and merge may run beside it, none of query-major."""
    impl, others = OURS[name], {impl.route for impl in OURS.values()} - {"key_major"}
    for return_lse in (False, True) if GPU else modes(oracle.problem.case):
        result, launched = impl.run_counted(oracle.problem, return_lse)
        assert_parity(result, oracle, name)
        assert launched["key_major"], f"{name} launched {launched}"
        assert not others & set(launched), f"{name} launched {launched}"


def prompts(case: Case) -> bool:
    """Blocks, and prompts in spans: of the matrix, what has many queries, or each group size and head dim once."""
    return case.S > 1 or bool(case.seqlens) or (case.source == "blocks" and few(case))


def few(case: Case) -> bool:
    """All of `small`; of the full matrix a part that has each dim and tile once, and every group size and geometry."""
    if not GPU or case.HKV > 1 or case.L == 200:
        return True
    return case.N == 64 and case.H in (8, 16) and case.dtype == "bf16" and case.L in (64, 1024)


@over(lambda c: c.source == "blocks" and prompts(c))
def test_triton_sel_parity_key_major(oracle: Oracle) -> None:
    check_key_major("key_major", oracle)


@over(lambda c: c.source != "varlen" and prompts(c))
def test_triton_sel_parity_key_major_ranges(oracle: Oracle) -> None:
    """Told spans, of blocks or of any other lengths."""
    check_key_major("key_major_ranges", oracle)


@over(lambda c: c.source == "rows" and few(c))
def test_triton_sel_parity_dense_per_head(oracle: Oracle) -> None:
    check("dense_per_head", oracle)


@over(lambda c: c.source == "varlen" and few(c))
def test_triton_sel_parity_varlen_per_head(oracle: Oracle) -> None:
    check("varlen_per_head", oracle)


@over(lambda c: c.source == "ranges" and few(c))
def test_triton_sel_parity_ranges_per_head(oracle: Oracle) -> None:
    check("ranges_per_head", oracle)


@over(lambda c: c.source != "ranges" and few(c))
def test_triton_sel_parity_ranges_any_source(oracle: Oracle) -> None:
    """Rows, varlen rows and blocks are spans too."""
    check("ranges", oracle)


@over(lambda c: c.source == "ranges" and few(c))
def test_triton_sel_parity_ranges_unbounded(oracle: Oracle) -> None:
    """Without the host's bound on L every row counts as long."""
    check("ranges_unbounded", oracle)


@over(few)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_unbounded", "reference"])
def test_fallback_parity(oracle: Oracle, name: str) -> None:
    check(name, oracle)


@over(lambda c: few(c) and OURS["original"].supports(c) is None)
@pytest.mark.parametrize("name", ["original", "original_packed"])
def test_original_layout_parity(oracle: Oracle, name: str) -> None:
    check(name, oracle)
