"""Cases: how they are drawn, prompts above all; and within a contract: reshaped, not skipped."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import nsa
from nsa.testing.contestants.contract import NEEDS, Contract, contestant
from nsa.testing.contestants.fit import ENOUGH, arranged, cases_of, fitted
from nsa.testing.contestants.named import OF_CACHES, of_function
from nsa.testing.contestants.ours import NSA
from nsa.testing.judge.forward import SAMPLED, Oracle, assert_parity, fp64, some_queries
from nsa.testing.matrix import overlap
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import PREFILL_HEADS, core, full, long_context, parity, prefill, prefills, small
from nsa.testing.matrix.problem import bounds
from nsa.testing.matrix.strategies import OF_CONTESTANTS, selections
from nsa.testing.suite.edge.test_inputs import no_sequences

SMALL = Case(2, 16, 16, 64, 400, "prefill", "fp32", HKV=2, S=100, S_kv=130, block_size=16)


def test_core_holds_prompts_by_overlap():
    found = [c for c in core() if c.dist == "prefill"]
    wanted = [(*h, T, s) for T in (8192, 65_536) for h in PREFILL_HEADS for s in (0, 0.5, 0.9)]
    assert [(c.HQ, c.HKV, c.S, c.shared) for c in found] == wanted
    assert all(c.large and (c.D, c.Dv, c.block_size, c.n, c.B) == (128, 128, 64, 16, 1) for c in found)
    assert len(core()) == 84 + 36 + 6 + 24


@pytest.mark.parametrize("matrix", [core, full, long_context, parity, small])
def test_ids_tell_cases_apart(matrix):
    found = matrix()
    assert len({c.id for c in found}) == len(found)
    assert all(c.large == (c.dist == "prefill" and c.S >= 8192) for c in found)


def test_parity_leaves_out_what_the_oracle_cannot_hold():
    assert not any(c.large for c in parity())


def test_packed_sequences_are_read_to_their_ends_and_not_further():
    """Without causality only its own length keeps a query from the keys of the next sequence."""

    def reach(case):
        return case.seqlens and not case.causal and case.kv_seqlens[0] % case.block_size > 0

    assert any(reach(c) and c.source == "blocks" for c in small())
    assert any(reach(c) and c.source == "blocks" for c in prefills())
    assert any(c.seqlens and not c.causal for c in OF_CONTESTANTS)


def test_drawn_blocks_have_a_query_at_the_end_of_a_block_that_is_not_the_last():
    """A kernel may end the causal window one key late there, and be right elsewhere."""
    causal = [c for c in OF_CONTESTANTS if c.source == "blocks" and c.causal]
    ends = [c.S_kv - c.S + s + 1 for c in causal for s in range(c.S) if (c.S_kv - c.S + s + 1) % c.block_size == 0]
    assert any(end < c.S_kv for c in causal for end in ends)


@pytest.mark.parametrize("matrix", [small, parity])
def test_there_are_more_blocks_and_larger_ones_than_a_kernel_reads_at_a_time(matrix):
    """It may read only the first 16 or 32 blocks of a row, or only the first 64 keys of a block."""
    assert any(c.n > 32 for c in matrix())
    assert any(c.source == "blocks" and c.block_size > 64 for c in matrix())


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_blocks_of_a_long_prompt(device, shared):
    """The first and the own block always; causal, none twice, as many as there are; the same again by the same seed."""
    case = prefill(8192, 4, 2, shared=shared)
    blocks = case.make(device).block_indices
    assert torch.equal(blocks, case.make(device).block_indices)
    assert not torch.equal(blocks, case.make(device, case.seed + 1).block_indices)
    own = torch.arange(case.S, device=device)[:, None] // 64
    used = blocks >= 0
    assert torch.equal(used.sum(-1)[0], (own + 1).clamp(max=16).expand(-1, 2))
    assert bool((blocks <= own[..., None]).all())
    assert bool(((blocks == 0).any(-1) & (blocks == own[..., None]).any(-1)).all())
    assert bool((blocks.diff(dim=-1) > 0)[used[..., :-1]].all()), "sorted, none twice"
    seen = torch.zeros(128, device=device).index_add_(0, blocks[used].long(), torch.ones_like(blocks[used].float()))
    random = seen[1:64] / seen[1:64].mean()  # of blocks that all queries of the second half may draw
    assert bool((random > 0.2).all())


@pytest.mark.parametrize("shared", [0.5, 0.9])
def test_neighbours_share_as_many_blocks_as_asked_for(device, shared):
    blocks = prefill(8192, 4, 2, shared=shared).make(device).block_indices[0, 4096:]
    assert overlap.in_common(blocks) == pytest.approx(shared, abs=0.02)


def test_unions_of_neighbours():
    """Two tiles of two queries and two KV heads, and a query that fills no tile."""
    rows = [[[0, 1, -1], [4, 5, 6]], [[1, 2, -1], [4, 5, 6]], [[3, -1, -1], [7, 8, 9]], [[4, -1, -1], [7, 8, 1]]]
    blocks = torch.tensor([*rows, [[0, 1, 2], [7, 8, 1]]])
    assert overlap.in_common(blocks) == (1 + 3 + 0 + 0 + 0 + 2 + 0 + 3) / (2 + 3 + 1 + 3 + 1 + 3 + 3 + 3)
    assert overlap.in_unions(blocks, 2) == (3 + 3 + 2 + 4) / (4 + 6 + 2 + 6)


def test_smooth_states_select_what_their_neighbours_select():
    rough, smooth = (overlap.by_scores(2048, window)[1024:] for window in (1, 256))
    own = torch.arange(1024, 2048)[:, None] // 64
    for blocks in (rough, smooth):
        assert blocks.shape == (1024, 1, 16)
        assert bool(((blocks == own[..., None]).any(-1) & (blocks == 0).any(-1)).all())
        assert bool((blocks <= own[..., None]).all())
    assert overlap.in_common(smooth) > overlap.in_common(rough) + 0.2
    assert overlap.in_unions(smooth) < overlap.in_unions(rough)


@pytest.mark.parametrize("wrong", [{"dist": "decode"}, {"positions": True}, {"n": 1, "L": 16}])
def test_who_cannot_share_says_so(wrong):
    with pytest.raises(ValueError, match="expected shared = 0"):
        dataclasses.replace(SMALL, shared=0.5, **wrong)
    with pytest.raises(ValueError, match="expected kv_seqlens for 0 sequences, got 1"):
        dataclasses.replace(SMALL, kv_seqlens=(9,))


OVERLAP = Case(2, 16, 16, 32, 60, "overlap", "fp32", HKV=2, S=30, S_kv=90)


@pytest.mark.parametrize("source", ["ranges", "blocks"])
def test_overlapping_selections(device, source):
    """Keys listed twice in every row that lists any, some keys past the query, and every third row empty."""
    case = dataclasses.replace(OVERLAP, source=source, L=64 if source == "blocks" else 32, block_size=16)
    p = case.make(device)
    empty = torch.arange(60, device=device) % 3 == 1
    assert torch.equal(p.lengths == 0, empty)
    index, lengths = p.key_index
    for row in (~empty).nonzero().flatten().tolist():
        keys = index[row, : lengths[row]]
        assert len(keys.unique()) < len(keys) <= (case.L if source == "ranges" else 64)
        assert int(keys.max()) == 60 + row // 2, "the last key is the query's own"
    past = (p.ranges[..., 1].amax(-1) > torch.arange(61, 91, device=device)[:, None]).flatten()
    assert bool(past[~empty].any())
    assert not bool(past[empty].any())
    assert source == "blocks" or torch.equal(past, ~empty & (torch.arange(60, device=device) % 2 == 0))


@pytest.mark.parametrize("source", ["rows", "varlen"])
def test_a_call_without_sequences_has_packed_rows(device, source):
    """An adapter of packed rows is called with them."""
    rows = no_sequences(Case(2, 16, 16, 24, 3, "few", "fp32", source=source).make(device)).varlen
    assert [len(x) for x in rows] == [0, 0, 0, 1]


def test_scores_scale_the_queries_alone(device):
    """By as much as `exp` in fp32 does not take; the id says so, and a default says nothing."""
    case = dataclasses.replace(OVERLAP, scores=64)
    assert case.id == OVERLAP.id + "-scores64"
    p, plain = case.make(device), OVERLAP.make(device, case.seed)
    assert torch.equal(p.q, plain.q * 64)
    assert torch.equal(p.k, plain.k)
    assert torch.equal(p.v, plain.v)
    lse = fp64(p)[1]
    assert bool(lse[lse.isfinite()].exp().float().isinf().any())


@pytest.mark.parametrize("case", small()[::3], ids=str)
def test_unique_bytes_count_each_key_once(device, case):
    """Against one entry per key selected."""
    p = case.make(device)
    index, lengths = p.key_index
    HKV, each = case.HKV, (case.D + case.Dv) * p.q.element_size()
    pairs = {(k, row % HKV) for row, n in enumerate(lengths.tolist()) for k in index[row, :n].tolist()}
    assert p.unique_bytes == (len(pairs) + p.q.numel() // case.D) * each
    assert p.flops == 2 * int(lengths.sum()) * case.H * (case.D + case.Dv)


def test_a_large_problem_is_compared_at_some_queries(device, large):
    """Block edges and both ends among them, and never packed whole."""
    p = SMALL.make(device)
    oracle = Oracle.of(p)
    at = oracle.at.tolist()
    assert {0, 1, 15, 16, 98, 99} <= set(at)
    assert at == sorted(set(at))
    assert len(at) < 100
    assert torch.equal(oracle.at, some_queries(p))
    assert not {"rows", "varlen", "key_index"} & set(p.__dict__)
    out, lse = (x.to(p.q.dtype) for x in fp64(p))
    assert torch.equal(oracle.out, fp64(p)[0][:, oracle.at])
    assert_parity((out, lse), oracle)
    longest = dataclasses.replace(p, case=prefill(65_536, 16, 16), q=p.q.new_empty(1).expand(1, 65_536, 16, 128))
    assert SAMPLED // 2 <= len(some_queries(longest)) * 16 <= 2 * SAMPLED


# --- cases within a contract ------------------------------------------------------------------------------------------

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
