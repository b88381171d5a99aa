"""Selections and selectors: right ones are green, each kind of wrong one is red and told by name."""

import copy
import dataclasses

import pytest
import torch

from nsa.selecting import oracle
from nsa.testing.clock import selecting
from nsa.testing.clock.timing import InvalidMeasurement
from nsa.testing.contestants import choosing, named
from nsa.testing.contestants.fit import ENOUGH
from nsa.testing.contestants.selectors import selector
from nsa.testing.judge import selections
from nsa.testing.judge.selections import FLAWS, assert_selection, diagnose, findings, flawed
from nsa.testing.matrix.selecting import SERVED, Selecting, as_request, seen

from .small_project import ROOT
from .test_docs import fenced

CASES = {
    "max": Selecting("max", "pages", "fp32", 11, size=4, lists=2, D=16, n=3, first=1, newest=1, rows=50, queries=3),
    "relu": Selecting("relu", "pages", "fp32", 12, size=4, groups=3, D=16, n=3, newest=1, rows=50, queries=3),
    "open": Selecting("max", "pages", "fp32", 16, size=4, D=16, n=2, rows=50, queries=5),
    "ties": Selecting("max", "batch", "fp32", 13, size=4, D=16, n=2, rows=50, queries=3),
    "nan": Selecting("max", "batch", "fp32", 14, size=4, D=16, n=2, rows=50, queries=3, nan=True),
    "mixed": Selecting("relu", "cache", "fp32", 15, size=4, groups=2, D=16, n=3, rows=50, queries=9, integers=False),
    "positions": Selecting("max", "cache", "fp32", 18, size=4, D=16, n=2, rows=50, queries=5, positions=True),
    "weights": Selecting("softmax", "cache", "fp32", 17, 2, 2, groups=2, rows=50, queries=9, integers=False),
}
SHOWN_BY = {"tail": "open", "upward": "ties", "nan": "nan", "unplaced": "positions"}
SHOWN_BY |= dict.fromkeys(("one head", "signed", "unweighted"), "relu")


def made(name):
    r = as_request(*CASES[name].make("cpu"))
    if name == "ties":  # few different scores
        r = r._replace(q=torch.ones_like(r.q), k=(r.k > 1).to(r.k.dtype))
    return r


def wrong(r, flaw):
    """What a selector with a flaw returns."""
    out = torch.full(r.shape, -1, dtype=torch.int32)
    for token in range(r.T):
        for number, blocks in enumerate(flawed(r, token, flaw)):
            out.view(r.T, r.lists, -1)[token, number, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_right(name):
    r = made(name)
    assert findings(oracle.select_reference(r), r, CASES[name].integers) == []


def test_a_call_without_queries_is_right():
    r = as_request(*dataclasses.replace(CASES["max"], queries=0, layout="cache").make("cpu"))
    assert r.T == 0
    assert findings(oracle.select_reference(r), r) == []


@pytest.mark.parametrize("flaw", FLAWS)
def test_each_flaw_is_red_and_told(flaw):
    r = made(SHOWN_BY.get(flaw, "max"))
    out = wrong(r, flaw)
    found = findings(out, r, integers=True)
    assert found
    assert diagnose(out, r, found) == FLAWS[flaw]
    with pytest.raises(AssertionError, match=r"lists are wrong"):
        assert_selection(out, r, "a selector", integers=True)


def test_equal_scores_in_the_wrong_order_are_of_a_kind_of_their_own():
    r = made("ties")
    assert {x.kind for x in findings(wrong(r, "upward"), r, integers=True)} == {"ties"}
    assert findings(wrong(r, "upward"), r, integers=False) == []  # there the order of equal scores may be rounding


def test_padding_in_front_is_not_taken_for_other_blocks():
    """The blocks alone are the right ones, as a flaw that changes nothing gives them."""
    r = made("max")._replace(n=20)
    out = oracle.select_reference(r).sort(-1).values
    found = findings(out, r, integers=True)
    assert {x.kind for x in found} == {"padding"}
    assert diagnose(out, r, found).startswith("no known mistake fits; padding is not last")


@pytest.mark.parametrize(("change", "kind"), [
    (lambda x: x[..., :2], "shape"),
    (lambda x: x.long(), "shape"),
    (lambda x: x.flip(-1), "order"),
    (lambda x: x.index_fill(-1, torch.tensor([0]), -1), "padding"),
    (lambda x: torch.cat((x[..., :1], x[..., :1], x[..., 2:]), -1), "duplicates"),
    (lambda x: x.where(torch.arange(3) < 2, -1), "forced"),
    (lambda x: x.where(torch.arange(3) < 2, 99), "unreachable"),
])  # fmt: skip
def test_what_is_checked_exactly(change, kind):
    r = made("max")
    out = oracle.select_reference(r)
    assert int((out >= 0).sum(-1).max()) == 3
    assert kind in {x.kind for x in findings(change(out), r, integers=True)}


def test_a_block_too_few_or_one_that_the_query_does_not_see():
    r = made("ties")
    row = oracle.row_of(r, r.T - 1)
    ((first, second),) = row.choose(2).tolist()
    assert row.tail is None
    assert selections._problem([first, second], row, 0, r, True) is None
    assert selections._problem([first, -1], row, 0, r, True)[0] == "count"
    hidden = row._replace(scored=row.scored.index_fill(0, torch.tensor([second]), False))
    assert selections._problem([first, second], hidden, 0, r, True)[0] == "unseen"


@pytest.mark.parametrize("name", ["mixed", "weights"])
def test_rounding_is_allowed_for_and_no_more(name):
    """Two blocks whose scores differ by an fp32 rounding may be exchanged; blocks whose scores differ more may not."""
    r = made(name)
    token = max(range(r.T), key=lambda t: oracle.row_of(r, t).scores.shape[1])
    row = oracle.row_of(r, token)
    best = row.scores[0].sort(descending=True)
    out = oracle.select_reference(r)
    worse = sorted([*best.indices[: r.n - 1].tolist(), int(best.indices[r.n])])
    out.view(r.T, r.lists, -1)[token, 0] = torch.tensor(worse, dtype=torch.int32)
    found = findings(out, r)
    assert [x.kind for x in found] == ["scores"]
    assert "recall 67%" in found[0].text
    worst, last = best.indices[r.n], float(best.values[r.n - 1])
    for less, kind in ((1e-7, None), (1e-3, "scores")):
        near = row._replace(scores=row.scores.index_fill(1, worst, last * (1 - less)))
        problem = selections._problem(worse, near, 0, r, False)
        assert (problem and problem[0]) == kind


@pytest.mark.parametrize("name", ["mixed", "weights", "max"])
def test_rounding_that_is_allowed_for_is_of_so_many_eps(name):
    """The bound is worked out anew here: a judge that allowed three times as much would be green."""
    r = made(name)._replace(first=0, newest=0)
    row = max((oracle.row_of(r, token) for token in range(r.T)), key=lambda row: row.scores.shape[1])
    best, eps, D = row.scores[0].sort(descending=True), 2.0**-23, r.q.shape[-1]
    worst, last = best.indices[r.n], float(best.values[r.n - 1])
    peak = float(best.values[best.values.isfinite()].abs().max())
    worse = sorted([*best.indices[: r.n - 1].tolist(), int(worst)]) + ([] if row.tail is None else [row.tail])
    bound = 64 * eps * D * abs(last) if r.score == "softmax" else 4 * eps * D**0.5 * max(peak, 1.0) * r.G
    for times, kind in ((0.5, None), (1.5, "scores")):
        near = row._replace(scores=row.scores.index_fill(1, worst, last - times * bound))
        problem = selections._problem(worse, near, 0, r, False)
        assert (problem and problem[0]) == kind


SMALL = {
    "m3-chunk4096": {"rows": 700, "queries": 9, "batch": 2},
    "m3-decode64": {"rows": 700, "batch": 3},
    "qsa-chunk2048": {"rows": 300, "queries": 5, "n": 40},
    "qsa-decode16": {"rows": 300, "batch": 2, "n": 400},
    "nsa-prompt65536": {"rows": 39, "queries": 640, "n": 5},
}


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_what_selectors_are_timed_beside_is_right(case):
    """The calls of production, smaller: chosen in plain PyTorch as one would write it."""
    call = dataclasses.replace(case, dtype="fp32", D=16, **SMALL[case.name]).make("cpu")
    r = as_request(*call)
    tokens = range(0, r.T, 7)
    found = findings(choosing.dense(*call), r, tokens=tokens)
    assert not found, found[0]
    keys = [oracle.sequence_of(r, token) for token in tokens]
    assert [max(0, min(rows, (at + 1 - r.window) // r.stride + 1)) for _, rows, _, at in keys] == [
        int(seen(r).view(-1)[token]) for token in tokens
    ]


@pytest.mark.parametrize("does", [
    "chooses", "remembers", "leaves out", "differs", "keeps pages", "keeps lengths", "right where it is judged",
])  # fmt: skip
def test_what_is_chosen_after_inputs_changed_in_place_is_judged(does):
    case = dataclasses.replace(SERVED[2], dtype="fp32", D=16, **SMALL["qsa-chunk2048"])
    sets = [case.make("cpu") for _ in range(2)]
    outputs = [choosing.dense(*call) for call in sets]
    before, inputs = [out.clone() for out in outputs], [{**how, "q": q} for q, _, how in copy.deepcopy(sets)]

    def replay():
        if does == "remembers":
            outputs[0].copy_(before[0]), outputs[1].copy_(before[1])
        elif does != "leaves out":
            q, k, how = sets[0]
            kept = {"keeps pages": "block_table", "keeps lengths": "cache_seqlens"}.get(does)
            outputs[0].copy_(choosing.dense(q, k, how | ({kept: inputs[0][kept]} if kept else {})))
            if does == "right where it is judged":
                outputs[0][0, 0] = outputs[0][0, 1]
            outputs[1].copy_(before[1] if does == "differs" else outputs[0])

    if does == "chooses":
        selecting._again("mine", outputs, sets, replay)
    else:
        with pytest.raises(InvalidMeasurement, match="mine was right before its inputs changed in place"):
            selecting._again("mine", outputs, sets, replay)
    for (q, _, how), was in zip(sets, inputs, strict=True):
        assert all(torch.equal(x, was[name]) for name, x in (how | {"q": q}).items() if torch.is_tensor(x))


# --- selectors as contestants -----------------------------------------------------------------------------------------

MODULE = """
import torch
import nsa
from nsa.selecting import plain
from nsa.testing import selector
from nsa.testing.judge.selections import flawed
from nsa.testing.matrix.selecting import as_request

SMALL = dict(scores=("max",), layouts=("batch", "pages"), dtypes=("fp32",))

@selector(**SMALL)
def right(q, k, cache_seqlens, block_table, **how):
    return nsa.select_blocks(q, k, cache_seqlens=cache_seqlens, block_table=block_table, **how, backend="torch")

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
    """One names arguments that only calls over a cache have, and takes any others."""
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
