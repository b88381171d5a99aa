"""Kernels that are right when they are checked and cheat when they are timed: each is red, with a word on how."""

import threading
import time

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.clock import honest
from nsa.testing.clock.measure import measure
from nsa.testing.clock.timing import InvalidMeasurement
from nsa.testing.contestants.contract import Contestant, Contract
from nsa.testing.contestants.named import of_function
from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.sdpa import FROM_SPANS
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case

from .test_conduct import ROWS, SEQUENCES, SPANS

BLOCKS = Case(2, 16, 16, 48, 12, "prefill", "fp32", HKV=2, S=3, S_kv=90, block_size=16)
CHECKED = 3  # calls that a kernel may well have seen when its first result was right


def right(q, k, v, *, ranges, causal, scale, cu_seqlens=None):
    return selection_reference(Call.of(q, k, v, ranges=ranges, causal=causal, scale=scale, cu_seqlens=cu_seqlens))[0]


def timed(kernel, case=SPANS, others=()):
    contract = Contract(takes=("ranges",), sequences=kernel is right)
    impl = of_function("mine:kernel", kernel, contract, declared=True)
    return measure(case.make("cpu"), impl, others, iters=10, warmup=0, budget_s=0.005)


def remembering(key, give=lambda result: result):
    """The first result of each key, as `give` gives it."""
    known = {}

    def kernel(q, k, v, *, ranges, causal, scale):
        return give(known.setdefault(key(q, ranges), right(q, k, v, ranges=ranges, causal=causal, scale=scale)))

    return kernel


def changing(cheat):
    """`right` for the first calls, then `cheat(result, inputs)`."""
    calls = []

    def kernel(q, k, v, *, ranges, causal, scale):
        result = right(q, k, v, ranges=ranges, causal=causal, scale=scale)
        calls.append(1)
        return result if len(calls) <= CHECKED else cheat(result, (q, k, v))

    return kernel


def halves():
    """Computes every other row of an input that it has seen before, into the memory of its result."""
    known = {}

    def kernel(q, k, v, *, ranges, causal, scale):
        result = right(q, k, v, ranges=ranges, causal=causal, scale=scale)
        kept = known.setdefault(q.data_ptr(), result)
        kept[:, ::2] = result[:, ::2]
        return kept

    return kernel


def late():
    """A thread fills the result after the call has returned."""

    def fill(out, result):
        time.sleep(0.02)
        out.copy_(result)

    def cheat(result, inputs):
        out = torch.full_like(result, torch.nan)
        threading.Thread(target=fill, args=(out, result), daemon=True).start()
        return out

    return changing(cheat)


def spoil(result, inputs):
    inputs[1][0, 0, 0, 0] += 1
    return result


def by_address(q, ranges):
    return q.data_ptr()


CHEATS = {
    "address": (lambda: remembering(by_address), "called again, it did nothing"),
    "shape": (lambda: remembering(lambda q, ranges: q.shape), "called again, it did nothing"),
    "first element": (lambda: remembering(lambda q, ranges: float(q.flatten()[0])), "called again, it did nothing"),
    "copies by address": (lambda: remembering(by_address, torch.clone), "returned its earlier result"),
    "first calls": (lambda: changing(lambda result, inputs: result * 1.01), "it is wrong by"),
    "every other row": (halves, r"left out \d+ of \d+ rows"),
    "later": (late, "filled its result after the clock had stopped"),
    "spoils": (lambda: changing(spoil), "wrote to its input k|it is wrong by"),
}  # fmt: skip


@pytest.mark.parametrize("which", CHEATS)
def test_a_kernel_that_cheats(which):
    make, said = CHEATS[which]
    with pytest.raises(AssertionError, match=said):
        timed(make())


def test_a_row_that_fp64_does_not_check_must_be_there_too(monkeypatch):
    monkeypatch.setattr(honest, "EXACT_TOKENS", 2)  # of three queries, the first and the last
    case = Case(2, 16, 16, 24, 6, "overlap", "fp32", HKV=2, S=3, S_kv=40)
    with pytest.raises(InvalidMeasurement, match=r"called again, it left out \d+ of \d+ rows"):
        timed(halves(), case)  # every other row


@pytest.mark.parametrize(("case", "times"), [(SPANS, 20), (SEQUENCES, 2), (ROWS, 2)], ids=["spans", "packed", "rows"])
def test_an_honest_kernel_is_green_every_time(case, times):
    for _ in range(times):
        if case is ROWS:
            measure(case.make("cpu"), OURS["sdpa"], [], iters=10, warmup=0, budget_s=0.005)
        else:
            timed(right, case, [FROM_SPANS])


@pytest.mark.parametrize("one_list", [False, True])
@pytest.mark.parametrize("page", [None, 15])
def test_lengths_of_caches_change_in_place(page, one_list):
    """And the inputs are as before afterwards, bit by bit, also where all KV heads share the memory of one list."""
    problem = BLOCKS.make("cpu")
    if one_list:
        problem = problem.choosing(problem.block_indices[..., :1, :].expand_as(problem.block_indices))
    cache = problem.derived(caches.maker(page))
    before, known = problem.clone(), cache.cache_seqlens.clone()

    def of(lengths):
        def call(p, return_lse, out):
            made = p.derived(caches.maker(page))
            how = {"block_indices": p.block_indices, "block_size": 16, "backend": "sdpa", "max_selected": 48}
            how |= made.arguments | ({} if lengths is None else {"cache_seqlens": lengths})
            return nsa.selection_attention_with_kvcache(p.q, made.k, made.v, **how)

        return Contestant("mine", call, lse=False)

    for _ in range(2):
        measure(problem, of(None), [], iters=10, warmup=0, budget_s=0.005)
    assert cache.cache_seqlens.tolist() == [90, 90]
    assert all(torch.equal(getattr(problem, name), getattr(before, name)) for name in ("q", "k", "v", "block_indices"))
    with pytest.raises(InvalidMeasurement, match="mine was right before its inputs changed in place; called again, it"):
        measure(problem, of(known), [], iters=10, warmup=0, budget_s=0.005)


def test_a_comparator_that_is_wrong_when_it_is_timed():
    calls = []

    def call(p, return_lse, out):
        calls.append(1)
        return FROM_SPANS.run(p) * (1 if len(calls) == 1 else 2)

    control = Contestant("control", call, lse=False)
    with pytest.raises(InvalidMeasurement, match="control was right before the clock started; called again, it is wr"):
        timed(right, others=[control])


def test_some_rows_of_packed_sequences():
    """As many as fp64 has memory for, at their positions."""
    problem = SEQUENCES.make("cpu")
    whole = Oracle.of(problem).out
    at = torch.tensor([0, 1, 4])
    torch.testing.assert_close(honest.fp64(problem.at(at))[0], whole[at])


def test_what_surrounds_a_kernel(monkeypatch):
    honest.seal()
    import torch._dynamo  # replaces torch.manual_seed

    honest.unchanged("mine")
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a: None)
        with pytest.raises(InvalidMeasurement, match=r"mine patched torch.nn.functional.scaled_dot_product_attention"):
            honest.unchanged("mine")
    with monkeypatch.context() as patch:
        patch.setattr(nsa.testing.clock.timing, "in_turn", lambda counts: counts)
        with pytest.raises(InvalidMeasurement, match=r"mine patched nsa.testing.clock.timing.in_turn"):
            honest.unchanged("mine")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(InvalidMeasurement, match="changed how fast its control is: flash_sdp_enabled was True"):
            honest.unchanged("mine")
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        with pytest.raises(InvalidMeasurement, match="mine slows its control down: its threads never rest"):
            honest.unchanged("mine")
    finally:
        stop.set()
        thread.join()
    honest.unchanged("mine")


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["idle", "another stream", "later"])
def test_a_kernel_that_cheats_on_a_gpu(which, device):
    """Idle while a graph is captured; at work on a stream that the clock does not see, so that a graph lacks it."""
    side, problem = torch.cuda.Stream(device), BLOCKS.make(device)
    known = {}

    def call(p, return_lse, out):
        if which == "idle" and torch.cuda.is_current_stream_capturing():
            return known.get(p.q.data_ptr(), next(iter(known.values())))
        if which == "idle":
            return known.setdefault(p.q.data_ptr(), OURS["sdpa"].run(p))
        result = torch.full_like(p.q, torch.nan)
        if which == "another stream" and not torch.cuda.is_current_stream_capturing():
            result.copy_(OURS["blocks"].run(p))
            return result
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000 * (which == "later"))
            result.copy_(OURS["blocks"].run(p))
        if not known:  # the check waits
            torch.cuda.synchronize()
        known[0] = True
        return result

    with pytest.raises(AssertionError, match="invalid measurement|error"):
        measure(problem, Contestant("mine", call, lse=False), [], iters=10, warmup=0, budget_s=0.005)
