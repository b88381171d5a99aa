"""Selectors as contestants: a right one is proved, wrong ones are WRONG and told why."""

import pytest

from nsa.testing.contestants import named
from nsa.testing.contestants.fit import ENOUGH
from nsa.testing.contestants.selectors import selector

from .small_project import ROOT
from .test_docs import fenced

MODULE = """
import torch
import nsa
from nsa.selecting import plain
from nsa.testing import selector
from nsa.testing.judge.selections import flawed
from nsa.testing.matrix.selecting import as_request

SMALL = dict(scores=("max",), layouts=("batch", "pages"), dtypes=("fp32",))

@selector(**SMALL)
def right(q, k, **how):
    return nsa.select_blocks(q, k, **how, backend="torch")

@selector(**SMALL)
def without_tails(q, k, **how):
    if how["tail"]:
        raise NotImplementedError("tails")
    return nsa.select_blocks(q, k, **how, backend="torch")

def with_a_flaw(flaw):
    @selector(**SMALL)
    def choose(q, k, **how):
        r = as_request(q, k, how)
        out = torch.full(r.shape, -1, dtype=torch.int32)
        for token in range(r.T):
            for number, blocks in enumerate(flawed(r, token, flaw)):
                out.view(r.T, r.lists, -1)[token, number, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return out

    return choose

upward, mean = with_a_flaw("upward"), with_a_flaw("mean")

def of(**contract):
    return selector(**dict(dtypes=("fp32",)) | contract)

def right_one(q, k, how, **other):
    return nsa.select_blocks(q, k, **how | other, backend="torch")

@of(layouts=("packed",))
def empties_its_input(q, k, **how):
    for ends in how["cu_seqlens"]:
        ends.zero_()
    return torch.full((q.shape[0], how["lists"], how["n"] + how["tail"]), -1, dtype=torch.int32)

@of(scores=("max",))
def ignores_windows(q, k, **how):
    return right_one(q, k, how, window=how["stride"])

@of(scores=("max",))
def reads_32_dims(q, k, **how):
    return right_one(q[..., :32].contiguous(), k[..., :32].contiguous(), how)

@of(scores=("relu",))
def forces_one_and_two(q, k, **how):
    return right_one(q, k, how, first=min(how["first"], 1), newest=min(how["newest"], 2))

@of(scores=("max",), layouts=("pages",), nan=False)
def wraps_pages(q, k, **how):
    return right_one(q, k, how, block_table=how["block_table"] % k.shape[0])

@of(scores=("softmax",), layouts=("batch", "cache"))
def prefers_nan(q, k, **how):
    return right_one(q, k.nan_to_num(nan=50.0), how)

@of(scores=("max",), layouts=("batch",))
def rounds_scores(q, k, **how):
    before = plain._products
    try:
        plain._products = lambda *a: (lambda s, seen: (s.half().float(), seen))(*before(*a))
        return right_one(q, k, how)
    finally:
        plain._products = before

REMEMBERED, RETURNED = {}, {}

@of(scores=("max",), layouts=("batch",))
def remembers_addresses(q, k, **how):
    key = (q.data_ptr(), k.data_ptr(), q.shape, k.shape, str({n: x for n, x in how.items() if x is not None}))
    if key not in REMEMBERED:
        REMEMBERED[key] = right_one(q, k, how), q, k
    return REMEMBERED[key][0].clone()

@of(scores=("max",), layouts=("batch",))
def reuses_its_result(q, k, **how):
    out = right_one(q, k, how)
    return RETURNED.setdefault(tuple(out.shape), torch.empty_like(out)).copy_(out)

@of(scores=("max",), dims=(128,), sizes=(128,))
def of_one_size(q, k, **how):
    return right_one(q, k, how) * 0
"""
WRONG = (
    "upward", "mean", "without_tails", "empties_its_input", "ignores_windows", "reads_32_dims", "forces_one_and_two",
    "wraps_pages", "prefers_nan", "rounds_scores", "remembers_addresses", "reuses_its_result", "of_one_size",
)  # fmt: skip


@pytest.fixture
def judged(contest, tmp_path):
    """`judged(*names, some=(…))`: pytest's run of the parity lane, or of other tests, on selectors of the module."""
    (example,) = (text for _, _, text in fenced(ROOT / "docs" / "selecting.md") if "def choose(" in text)
    (tmp_path / "my_selectors.py").write_text(MODULE + example, encoding="utf-8")

    def run(*names, some=("-m", "parity", "-k", "selecting")):
        return contest(tmp_path, [f"my_selectors:{name}" for name in names], *some, "--benchmark-disable")

    return run


def test_a_right_selector_and_that_of_the_page_are_proved(judged):
    done = judged("right", "choose")
    said = " ".join(done.stdout.split())
    assert "my_selectors:right, parity: right on 60 cases; does not promise: score relu; score softmax" in said, said
    assert "my_selectors:choose, parity: right on 60 cases" in said, said
    assert "not proved" not in said
    assert done.returncode == 0


def test_edge_has_no_test_of_a_selector_and_says_so(judged):
    done = judged("right", some=("-m", "edge"))
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "nothing ran: expected -m parity, which has tests of every kernel" in done.stdout


def test_benchmarks_whose_cases_the_contract_of_the_page_does_not_take(judged):
    done = judged("choose", some=("-m", "perf", "-k", "selecting"))
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    said = " ".join(done.stdout.split())
    assert "no test matches -k 'selecting'; a test has no cases if the contract takes none of them" in said


def test_wrong_selectors_are_red_and_told(judged):
    """Each by those of its cases that have 20 rows, a fifth. Ties are among integers; large blocks have neither."""
    done = judged(*WRONG, some=("-m", "parity", "-k", "rows20 or of_one_size or (upward and integers)"))
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    for name in WRONG:
        assert f"my_selectors:{name}, parity: WRONG on" in said, said
    assert "of equal scores the larger block is chosen" in said
    assert "a block has the mean of its keys instead of the largest" in said
    assert "tails" in said


def test_a_contract_is_checked():
    with pytest.raises(ValueError, match=r"scores: expected a tuple of 'max', 'relu', 'softmax', got 'max'"):
        selector(scores="max")
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        selector(speed=3)


def test_ours_have_enough_cases():
    impl = named.load("nsa.testing.contestants.selectors:kernels")
    assert len({case.id for case in impl.contract.cases(interpreted=False)}) >= ENOUGH
    assert impl.contract.not_promised() == []
