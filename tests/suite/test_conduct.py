"""Kernels that misbehave are not green: they spoil inputs, remember results, skip tests, or end their process."""

import re
import subprocess
import sys
import types

import pytest
import torch

import nsa
from nsa.call import Call
from nsa.kernels.families import FAMILIES, SERVES_ALL
from nsa.kernels.shared import launch
from nsa.plain.oracle import selection_reference
from nsa.testing.contestants import named
from nsa.testing.contestants.contract import Contestant, Contract
from nsa.testing.judge.conduct import tensors
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case
from nsa.testing.suite.edge.test_inputs import far, strided, twisted
from nsa.testing.suite.edge.test_inputs import test_inputs_that_change_in_place as in_place
from nsa.testing.suite.parity.test_promises import over_a_cache
from nsa.testing.suite.parity.test_promises import test_triton_sel_parity_gradients as gradients
from nsa.testing.suite.parity.test_promises import test_triton_sel_parity_twice as twice
from nsa.testing.verdicts import Verdicts

from .small_project import ROOT, off_gpu, verdicts, write

for borrowed in (in_place, gradients, twice):
    borrowed.__test__ = False  # called below

SPANS = Case(2, 16, 16, 24, 6, "mixed", "fp32", HKV=2, S=3, S_kv=40)
POSITIONS = Case(2, 16, 16, 24, 6, "mixed", "fp32", HKV=2, S=3, S_kv=40, positions=True)
ROWS = Case(2, 16, 16, 24, 3, "few", "fp32")
VARLEN = Case(2, 16, 16, 24, 3, "few", "fp32", source="varlen")
SEQUENCES = Case(2, 16, 16, 24, 10, "mixed", "fp32", HKV=2, S=5, S_kv=30, seqlens=(2, 3), kv_seqlens=(10, 20))
STEPS = Case(2, 16, 16, 64, 12, "prefill", "fp16", HKV=1, S=3, S_kv=256, block_size=16)
PROMISES = {"lse": "e", "sequences": True, "positions": True, "gradients": True, "repeatable": True}
PROMISES |= {"caches": ("contiguous", "pages"), "fp8": True, "ragged": True}


def right(q, k, v, *, cache_seqlens=None, return_lse=False, **how):
    """Every call of the suite, in plain torch."""
    if cache_seqlens is not None:
        how = {name: x for name, x in how.items() if name not in ("q_positions", "cu_seqlens")}
        how |= {"cache_seqlens": cache_seqlens, "return_lse": return_lse, "backend": "sdpa"}
        return nsa.selection_attention_with_kvcache(q, k, v, **how)
    if q.dim() == 3 and "causal" not in how:
        return nsa.sel_attn_fwd_varlen(q, k, v, how["cu_seqlens"], scale=how["scale"], return_lse=return_lse)
    how = {name: x for name, x in how.items() if name not in named.OF_CACHES}
    how["cu_seqlens"] = (how["cu_seqlens"],) * 2 if isinstance(how["cu_seqlens"], torch.Tensor) else how["cu_seqlens"]
    o, lse = selection_reference(Call.of(q, k, v, **how, return_lse=True))
    return (o, lse.float()) if return_lse else o


def contestant(kernel, **promises):
    contract = Contract(**{"takes": ("ranges", "blocks")} | PROMISES | promises)
    return named.of_function("mine:kernel", kernel, contract, declared=True)


def of_packed(kernel, source="varlen"):
    return contestant(kernel, takes=(source,), sequences=False, caches=(), fp8=False, ragged=False)


def spoiling(name):
    """`right`, which also changes one bit of an input."""

    def kernel(q, k, v, **how):
        result = right(q, k, v, **how)
        given = tensors({"q": q, "k": k, "v": v} | how)
        with torch.no_grad():
            given[name].detach().view(-1)[:1].view(torch.uint8)[0] ^= 1
        return result

    return kernel


OF_A_CACHE = {"q": {}, "k": {}, "v": {}, "block_indices": {}, "cache_seqlens": {}, "block_table": {"page": 64}}
OF_A_CACHE |= {"k_scale": {"fp8": True}, "v_scale": {"fp8": True}, "cu_seqlens_q": {"counts": (3, 0, 1, 5)}}


@pytest.mark.parametrize("name", OF_A_CACHE)
def test_a_kernel_that_spoils_an_input_over_a_cache(name):
    how = {"page": ""} | OF_A_CACHE[name]
    over_a_cache(contestant(right), STEPS, torch.device("cpu"), **how)
    with pytest.raises(AssertionError, match=f"^mine:kernel: wrote to its input {name}$"):
        over_a_cache(contestant(spoiling(name)), STEPS, torch.device("cpu"), **how)


SPOILED = [(SPANS, "ranges"), (SPANS, "k"), (POSITIONS, "q_positions")]
SPOILED += [(SEQUENCES, "cu_seqlens[0]"), (SEQUENCES, "cu_seqlens[1]")]


@pytest.mark.parametrize(("test", "case", "name"), [
    *((test, case, name) for test in (twice, gradients) for case, name in SPOILED),
    (twice, VARLEN, "cu_seqlens"),  # packed rows have no gradients in the suite
])  # fmt: skip
def test_a_kernel_that_spoils_an_input(test, case, name, device):
    made, device = (of_packed, device) if case is VARLEN else (contestant, "cpu")  # packed rows need Triton
    test(made(right), case.make(device))
    stored = {"cu_seqlens[0]": "cu_seqlens", "cu_seqlens[1]": "cu_seqlens_k"}.get(name, name)
    with pytest.raises(AssertionError, match=f"^mine:kernel: wrote to its input {stored}$"):
        test(made(spoiling(name)), case.make(device))


@pytest.mark.parametrize("head", [False, True])
def test_a_kernel_that_reads_values_with_strides_of_keys(head):
    """`head`: it takes only the stride from head to head of the keys."""

    def kernel(q, k, v, **how):
        steps = (*v.stride()[:2], k.stride(2), 1) if head else k.stride()
        return right(q, k, v.as_strided(v.shape, steps), **how)

    problem = SPANS.make("cpu")
    oracle = Oracle.of(problem)
    named.prove(contestant(kernel), problem, oracle, "LSE")  # contiguous tensors of one shape do not tell
    named.prove(contestant(right), strided(problem), oracle, "LSE")
    with pytest.raises(named.Wrong):
        named.prove(contestant(kernel), strided(problem), oracle, "LSE")


@pytest.mark.parametrize("route", [family.name for family in FAMILIES if family is not SERVES_ALL])
def test_the_workspaces_of_our_kernels_are_poisoned(route):
    """In every family that has some: an earlier call may have left the right values there."""
    seen = []

    def call(p, return_lse, out):
        (piece,) = launch.divided(p.q.device, ((8, torch.float32),))
        seen.append(bool(piece.tensor().isnan().all()))
        return p.q

    Contestant("ours", call, route=route).run_counted(SPANS.make("cpu"))
    assert seen == [True]


def test_what_our_kernels_must_write_is_nan_before():
    """A kernel that leaves out a row would otherwise be right where that row is 0."""
    given = []
    impl = Contestant("ours", lambda p, return_lse, out: given.append(out.clone()) or out, poison=True)
    impl.run_counted(SPANS.make("cpu"))
    assert given[0].isnan().all()


def test_a_kernel_that_cuts_spans_to_32_bits():
    def kernel(q, k, v, *, ranges, **how):
        return right(q, k, v, ranges=ranges.int(), **how)

    p = far(SPANS.make("cpu"))
    named.prove(contestant(right), p, Oracle.of(p), "LSE")
    with pytest.raises(named.Wrong):
        named.prove(contestant(kernel), p, Oracle.of(p), "LSE")
    whole, narrow = ({twist for _, twist, _ in twisted(contestant(right, int64=x))} for x in (True, False))
    assert whole - narrow == {"far"}


def one_buffer(change=False):
    """Each result is written to the memory of the one before. `change`: and every other one is off by a bit."""
    kept, calls = [], []

    def kernel(q, k, v, **how):
        result = right(q, k, v, **how)
        o = result[0] if isinstance(result, tuple) else result
        kept.extend([o] * (not kept))
        kept[0].resize_(o.shape).copy_(o)
        calls.append(1)
        if change and len(calls) % 2:
            kept[0].view(torch.int32).view(-1)[0] ^= 1
        return (kept[0], result[1]) if isinstance(result, tuple) else kept[0]

    return kernel


def remembering():
    """A result by the address of the keys."""
    known = {}

    def kernel(q, k, v, *, return_lse=False, **how):
        key = k.data_ptr(), return_lse and how.get("cache_seqlens") is None
        known.setdefault(key, right(q, k, v, **how, return_lse=True))
        return known[key] if return_lse else known[key][0]

    return kernel


def ring():
    """Results lie in two buffers by turns."""
    kept = {}

    def kernel(q, k, v, **how):
        result = right(q, k, v, **how)
        both = result if isinstance(result, tuple) else (result,)
        buffers, turn = kept.setdefault(tuple(x.shape for x in both), ([[x.clone() for x in both] for _ in "ab"], []))
        turn.append(1)
        made = tuple(to.copy_(x) for to, x in zip(buffers[len(turn) % 2], both, strict=True))
        return made if isinstance(result, tuple) else made[0]

    return kernel


CHANGED = "a later call changed a result that was returned$"
REMEMBERED = "gave the last call's result, though inputs changed in place$"
MEMORY = {
    "other bits in one buffer": (lambda: one_buffer(change=True), twice, "two calls with equal inputs gave different"),
    "one buffer, other inputs": (one_buffer, in_place, CHANGED),
    "two buffers, other inputs": (ring, in_place, CHANGED),
    "remembered": (remembering, in_place, REMEMBERED),
    "one buffer, over a cache": (one_buffer, over_a_cache, CHANGED),
    "remembered, over a cache": (remembering, over_a_cache, "error .* > bound"),
}


@pytest.mark.parametrize("which", MEMORY)
def test_a_kernel_whose_results_are_in_memory_of_its_own(which):
    make, test, message = MEMORY[which]
    arguments = {"case": STEPS, "device": torch.device("cpu"), "page": ""} if test is over_a_cache else {}
    arguments = arguments or {"problem": SPANS.make("cpu")} | ({"wanted": "LSE"} if test is in_place else {})
    test(contestant(right), **arguments)
    with pytest.raises(AssertionError, match=message):
        test(contestant(make()), **arguments)


class ContiguousGradient(torch.autograd.Function):
    """Passes `O` on. Reads its gradient from memory as if it were contiguous."""

    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        return do.as_strided(do.shape, torch.empty(do.shape).stride())


def test_a_kernel_that_takes_the_gradient_of_o_for_contiguous():
    def kernel(q, k, v, **how):
        return ContiguousGradient.apply(right(q, k, v, **how))

    gradients(contestant(kernel, needs=("contiguous",)), SPANS.make("cpu"))
    with pytest.raises(AssertionError, match="^mine:kernel: .* right for a contiguous dO, not for a strided one"):
        gradients(contestant(kernel), SPANS.make("cpu"))


MISSING = {"qkv": "its O has no grad_fn", "v": "autograd gives none for dv$"}


@pytest.mark.parametrize("detached", MISSING)
def test_a_gradient_that_is_promised_and_missing(detached):
    def kernel(q, k, v, **how):
        given = {"q": q, "k": k, "v": v}
        return right(**given | {name: given[name].detach() for name in detached}, **how)

    with pytest.raises(AssertionError, match=f"^mine:kernel: promises gradients, and {MISSING[detached]}"):
        gradients(contestant(kernel), SPANS.make("cpu"))


def test_packed_rows_change_in_place(device):
    def rows(Q, K, V, scale, return_lse=False, **how):
        return nsa.sel_attn_fwd_dense(Q, K, V, scale=scale, return_lse=return_lse)

    in_place(of_packed(rows, "rows"), ROWS.make(device), "O")
    first = []
    with pytest.raises(AssertionError, match=REMEMBERED):
        in_place(of_packed(lambda *a, **b: first.append(rows(*a, **b)) or first[0], "rows"), ROWS.make(device), "O")


# --- skips, retries and crashes --------------------------------------------------------------------------------------

KERNELS = """
import atexit, os, signal
import pytest
import torch
from pathlib import Path
from nsa.call import Call
from nsa.plain.oracle import selection_reference

def right(q, k, v, *, ranges, causal, scale, return_lse=False, **absent):
    call = Call(q.double(), k, v, ranges=ranges, causal=causal, scale=scale, return_lse=True)
    o, lse = selection_reference(call)
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)

def first(what):
    try:
        (Path(__file__).parent / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def dies(*args, **how):
    if first("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return right(*args, **how)

def ending(end):
    def kernel(*args, **how):
        if args[0].shape[2] == 4:
            end("too large")
        return right(*args, **how)
    return kernel

skips, xfails, fails = ending(pytest.skip), ending(pytest.xfail), ending(pytest.fail)

def exits(*args, **how):
    os._exit(0)

def exits_at_the_end(*args, **how):
    if first("exits"):
        atexit.register(os._exit, 0)
    return args[0] * 3

def patches_torch(*args, **how):
    torch.equal = lambda *a: True
    return right(*args, **how)

def moody(*args, **how):
    return right(*args, **how) if not first("moody") else args[0] * 3
"""
RETRY = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    "As pytest-rerunfailures: a test that fails runs again, and the last run counts."
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for last in (False, True):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        again = not last and any(report.failed for report in reports)
        for report in reports if not again else ():
            item.ihook.pytest_runtest_logreport(report=report)
        if not again:
            break
        item._initrequest()
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


def test_skips_retries_and_crashes_are_not_green(contest, tmp_path):
    """Each of these kernels is right in all other calls, and the lane `edge` asks for no number of cases."""
    write(tmp_path, {"mine.py": KERNELS, "retry.py": RETRY})
    names = ("mine:right", "mine:dies", "mine:skips", "mine:xfails", "mine:fails", "mine:moody")
    chosen = ("-m", "edge", "-k", "model_may and one-key and fp32", "-p", "retry", "-n", "1")
    done = contest(tmp_path, names, *chosen)
    said = verdicts(done)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    told = dict(re.findall(r"^mine:(\w+)(?:, edge)?: (right on|WRONG|not proved)", said, re.M))
    wrong = dict.fromkeys(("skips", "xfails", "fails", "moody"), "WRONG")
    assert told == {"right": "right on", "dies": "not proved"} | wrong, said
    assert re.search(r"^mine:dies: not proved: 1 test ended without a result, the first is .*mine:dies-", said, re.M)
    assert "expected a result, got Skipped: too large" in done.stdout
    assert "expected a result, got XFailed: too large" in done.stdout
    assert "failed before this run of the test" in done.stdout


@pytest.mark.parametrize("name", ["exits", "exits_at_the_end", "patches_torch"])
def test_ends_and_patches_are_not_green(contest, tmp_path, name):
    """In the only process, whose end would be status 0 without a word."""
    write(tmp_path, {"mine.py": KERNELS})
    done = contest(tmp_path, [f"mine:{name}"], "-m", "edge", "-k", "model_may and one-key")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert f"mine:{name}, edge: WRONG on" in done.stdout
    why = {"exits": "os._exit(0) was called", "patches_torch": "mine:patches_torch patched torch.equal"}.get(name, "")
    assert why in done.stdout


def test_a_benchmark_that_its_contestant_leaves_out_is_not_green(contest, tmp_path):
    write(tmp_path, {"mine.py": KERNELS.replace("args[0].shape[2] == 4", "True")})
    done = contest(tmp_path, ["mine:skips", "mine:xfails"], "-m", "perf", "-k", "many and D64-Dv64-L256")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.findall(r"^mine:(\w+), perf: WRONG on", done.stdout, re.M) == ["skips", "xfails"]


def test_without_asserts_nothing_is_judged(tmp_path):
    write(tmp_path, {"mine.py": KERNELS})
    chosen = ["--nsa-impl", "mine:right", "--pyargs", "nsa.testing.suite.edge", "-k", "one-key"]
    command = [sys.executable, "-O", "-m", "pytest", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=off_gpu(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "the suite judges by assert, which -O and PYTHONOPTIMIZE remove" in done.stderr


@pytest.mark.parametrize(("outcome", "wrong", "red"), [
    ("failed", {}, True), ("rerun", {}, True), ("passed", {"case": {}}, True), ("passed", {}, False),
])  # fmt: skip
def test_what_was_wrong_once_ends_red(monkeypatch, outcome, wrong, red):
    """pytest-rerunfailures runs a test again, also one whose worker died, and ends green."""
    impl = contestant(right)
    monkeypatch.setattr(named, "load", lambda spec: impl)
    options = types.SimpleNamespace(collectonly=False, nsa_impl=["mine:kernel"])
    config = types.SimpleNamespace(getoption=vars(options).get, args=["nsa::a"], option=options)
    one, name = Verdicts(config), "test_a[mine:kernel-case]"
    session = types.SimpleNamespace(exitstatus=pytest.ExitCode.OK, items=[types.SimpleNamespace(nodeid=name)])
    one.pytest_collection_finish(session)
    facts = [("nsa_contest", ["mine:kernel", "edge", "case", "passed", None, "", ["O"]])]
    for report in ((outcome, []), ("passed", facts)):
        one.pytest_runtest_logreport(types.SimpleNamespace(nodeid=name, outcome=report[0], user_properties=report[1]))
    one.tallies["mine:kernel", "edge"].wrong = wrong
    one.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if red else pytest.ExitCode.OK)
