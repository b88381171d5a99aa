"""Cases within a contract: reshaped, not skipped; selections rearranged to what a kernel needs."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import nsa
from nsa.testing.contestants.contract import NEEDS, Contract, contestant
from nsa.testing.contestants.fit import ENOUGH, arranged, cases_of, fitted
from nsa.testing.contestants.named import OF_CACHES, of_function
from nsa.testing.contestants.ours import NSA
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import core, parity, small
from nsa.testing.matrix.problem import bounds
from nsa.testing.matrix.strategies import OF_CONTESTANTS, selections

CONTRACTS = {
    "anything": Contract(takes=("ranges", "blocks"), sequences=True, positions=True),
    "ranges": Contract(),
    "rows": Contract(takes=("rows",)),
    "varlen": Contract(takes=("varlen",), dims=(64,), unequal_dims=False),
    "one-size": Contract(
        takes=("blocks",), dtypes=("bf16", "fp16"), dims=(128,), groups=(16,), unequal_dims=False, block_sizes=(64,),
        causal=(True,), chunks=False, int64=False, needs=tuple(NEEDS),
    ),
    "sequences": Contract(takes=("blocks",), dims=(64, 128), groups=(1, 4), chunks=False, sequences=True),
    "small-scores": Contract(needs=("small scores", "sorted")),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_case_becomes_one_that_the_contract_takes(name):
    contract = CONTRACTS[name]
    for case in (*small(), *parity()[::101], *core()[::29], *OF_CONTESTANTS):
        for interpreted in (True, False):
            made = fitted(case, contract, interpreted)
            assert contract.refuses(made) is None, f"{case} became {made}: {contract.refuses(made)}"
            assert fitted(made, contract, interpreted) == made
            if contract.refuses(case) is None and case.scores == 1 and case.dist != "overlap":
                assert made == case or interpreted


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_leaves_enough_distinct_cases(name):
    cases = cases_of(CONTRACTS[name], small(), interpreted=True)
    assert len(set(cases)) == len(cases) >= ENOUGH
    assert all(CONTRACTS[name].refuses(case) is None for case in cases)


@pytest.mark.parametrize("name", CONTRACTS)
def test_hypothesis_draws_selections_of_the_shapes_that_a_contract_takes(name):
    """A contract without chunks has prompts of 500 queries. Hypothesis' health check fails where rows are too many."""
    for case in dict.fromkeys(fitted(case, CONTRACTS[name]) for case in OF_CONTESTANTS):
        if case.source in ("ranges", "blocks"):
            _draw(case)


def _draw(case):
    @settings(max_examples=10)
    @given(selections(case))
    def drawn(selection):
        assert selection.shape[: -1 if case.source == "blocks" else -2] == (*case.lead, case.HKV)

    drawn()


PROMPT = Case(2, 16, 16, 96, 80, "prefill", "fp32", HKV=2, S=20, S_kv=77, block_size=16)
PLAIN = of_function(  # in plain torch, as no kernel is tested here
    "plain",
    lambda q, k, v, **how: nsa.selection_attention(
        q, k, v, **{name: x for name, x in how.items() if name not in OF_CACHES}, backend="sdpa"
    ),
    NSA.contract,
    declared=True,
)
SPANS = dataclasses.replace(PROMPT, dist="mixed", source="ranges", L=40, n=0)


def noisy(p):
    """A selection that breaks every need: unsorted, padding in any slot, twice, ahead of the query, and nothing."""
    g = torch.Generator().manual_seed(1)
    if p.block_indices is not None:
        blocks = torch.randint(-2, 9, p.block_indices.shape, generator=g)
        blocks[:, ::5] = -1
        return dataclasses.replace(p, block_indices=blocks.int().to(p.q.device))
    start = torch.randint(-30, 90, p.ranges.shape[:-1], generator=g)
    spans = torch.stack((start, start + torch.randint(-5, 40, start.shape, generator=g)), -1)
    spans[:, ::5] = 3
    return dataclasses.replace(p, ranges=spans.to(p.q.device))


def listed(p):
    """Blocks `[rows, n]`, or starts and ends `[rows, n]` each; where the keys that a row may see end `[rows, 1]`."""
    limit = bounds(p)[2].repeat_interleave(p.case.HKV)[:, None]
    if p.block_indices is not None:
        return p.block_indices.flatten(0, -2).long(), limit
    return tuple(x.flatten(0, -2).long() for x in p.ranges.unbind(-1)), limit


HOLDS = {
    "sorted": lambda b, limit: all(row == sorted(row) for row in ([i for i in row if i >= 0] for row in b.tolist())),
    "padding last": lambda b, limit: bool(((b >= 0).int().diff(dim=-1) <= 0).all()),
    "distinct": lambda b, limit: all(len(x) == len(set(x)) for x in ([i for i in row if i >= 0] for row in b.tolist())),
    "visible": lambda b, limit: bool(((b >= -1) & (b * 16 < limit)).all()),
    "nonempty": lambda b, limit: bool(((b >= 0) & (b * 16 < limit)).any(-1).all()),
    "own block": lambda b, limit: bool((b == (limit - 1) // 16).any(-1).all()),
    "one list": lambda b, limit: torch.equal(b[::2], b[1::2]),  # of two KV heads
}  # fmt: skip


@pytest.mark.parametrize("needs", [*((need,) for need in HOLDS), tuple(HOLDS)], ids=lambda needs: "+".join(needs))
def test_blocks_are_rearranged_to_what_is_needed(device, needs):
    p = noisy(PROMPT.make(device))
    assert not any(HOLDS[need](*listed(p)) for need in needs), "the noise holds nothing"
    made = arranged(p, Contract(takes=("blocks",), needs=needs))
    assert all(HOLDS[need](*listed(made)) for need in needs)
    assert_parity(PLAIN.run(made), Oracle.of(made))  # its spans say the same as its blocks


SPAN_NEEDS = [("sorted",), ("padding last",), ("visible",), ("distinct", "visible"), ("nonempty",), ("one list",)]


@pytest.mark.parametrize("needs", SPAN_NEEDS, ids="+".join)
def test_spans_are_rearranged_to_what_is_needed(device, needs):
    p = noisy(SPANS.make(device))
    made = arranged(p, Contract(needs=needs))
    (start, end), limit = listed(made)
    some = end > start
    if "sorted" in needs:
        for starts, ends in zip(start.tolist(), end.tolist(), strict=True):
            used = [s for s, e in zip(starts, ends, strict=True) if e > s]
            assert used == sorted(used)
    if "padding last" in needs:
        assert bool((some.int().diff(dim=-1) <= 0).all())
    if "visible" in needs:
        assert bool(((start >= 0) & (end <= limit)).all())
    if "distinct" in needs:
        ends = torch.where(some, end, 0).cummax(-1).values
        assert bool((start[:, 1:] >= ends[:, :-1])[some[:, 1:]].all())
    if "one list" in needs:
        assert torch.equal(start[::2], start[1::2])
        assert torch.equal(end[::2], end[1::2])
    if "nonempty" in needs:
        assert bool((end.minimum(limit) > start.clamp(min=0)).any(-1).all())
    assert_parity(PLAIN.run(made), Oracle.of(made))


def test_a_contract_that_makes_no_sense_is_refused():
    for wrong, message in (
        ({"takes": ("rows", "ranges")}, "rows or varlen alone"),
        ({"needs": ("order",)}, "needs: expected"),
        ({"takes": "blocks"}, "takes: expected a tuple"),
        ({"lse": "10"}, "lse: expected"),
        ({"causal": ()}, "causal: expected at least one"),
        ({"dims": 64}, r"dims: expected a tuple of sizes, such as \(64, 128\), got 64"),
        ({"block_sizes": ("64",)}, "block_sizes: expected a tuple of sizes"),
        ({"ragged": True}, "ragged: expected False without caches, got True"),
        ({"fp8": True}, "fp8: expected False without caches, got True"),
        ({"fp8": True, "caches": ("pages",), "dtypes": ("fp32",)}, "fp8: expected bf16 or fp16 among dtypes"),
    ):
        with pytest.raises(ValueError, match=message):
            contestant(**wrong)
    with pytest.raises(TypeError, match="^blocksize: expected fields of a contract, which are takes, .*block_sizes"):
        contestant(blocksize=(64,))


def test_what_is_not_promised_is_said():
    said = CONTRACTS["one-size"].not_promised()
    for words in ("padding in any slot", "G other than 16", "LSE", "fp32", "S != S_kv", "causal=False"):
        assert words in said
    assert not {"LSE", "caches in fp8", "ragged queries"} & set(NSA.contract.not_promised())
    some = dataclasses.replace(NSA.contract, fp8=False, ragged=False)
    assert some.not_promised()[-2:] == ["caches in fp8", "ragged queries"]
