"""Kernels of others by `--nsa-impl`: judged within their contracts, told what they compute, refused in three lines."""

import importlib.util
import re
import types

import pytest
import torch

from nsa.testing import machine
from nsa.testing import verdicts as verdicts_module
from nsa.testing.contestants import named, traces
from nsa.testing.contestants.contract import Contract
from nsa.testing.contestants.fit import ENOUGH
from nsa.testing.gate import hooks
from nsa.testing.judge.forward import Oracle, fp64
from nsa.testing.matrix.case import Case
from nsa.testing.report import pages
from nsa.testing.verdicts import KINDS, Tally, Verdicts

from .small_project import configuration, off_gpu, verdicts, write
from .small_repository import contestant, git

KERNELS = """
import torch

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing import contestant, selector

def right(q, k, v, *, ranges, causal, scale, return_lse=False):
    call = Call(q.double(), k, v, ranges=ranges, causal=causal, scale=scale, return_lse=True)
    o, lse = selection_reference(call)
    return (o.to(q.dtype), lse.float()) if return_lse else o.to(q.dtype)

def first_64(q, k, v, *, ranges, causal, scale, return_lse=False):
    S, S_kv = q.shape[1], k.shape[1]
    limit = (torch.arange(S) + S_kv - S + 1).clamp(max=S_kv).view(1, S, 1, 1) if causal else torch.tensor(S_kv)
    start, end = (x.long().clamp(min=0).minimum(limit) for x in ranges.unbind(-1))
    length = (end - start).clamp(min=0)
    left = (64 - (length.cumsum(-1) - length)).clamp(min=0)
    short = torch.stack((start, start + length.minimum(left)), -1)
    return right(q, k, v, ranges=short, causal=causal, scale=scale, return_lse=return_lse)

# As public kernels are: one head dim, one group, one block size, and lists that are sorted and padded at the end.
@contestant(
    takes=("blocks",), dtypes=("bf16", "fp16"), dims=(32,), groups=(4,), unequal_dims=False, block_sizes=(16,),
    causal=(True,), chunks=False, int64=False,
    needs=("sorted", "padding last", "distinct", "visible", "nonempty", "contiguous", "finite"),
)
def picky(q, k, v, block_indices, block_size, scale):
    listed = block_indices.masked_fill(block_indices < 0, 10**6)
    assert q.dtype == torch.float16 and q.shape[-1] == 32 and q.shape[2] == 4 * k.shape[2] and block_size == 16
    assert bool((listed.diff(dim=-1) >= 0).all()) and bool((listed[..., 0] < 10**6).all()) and q.is_contiguous()
    blocks = {"block_indices": block_indices, "block_size": block_size}
    return selection_reference(Call.of(q.double(), k, v, **blocks, scale=scale))[0].to(q.dtype)

@contestant(takes=("blocks",), lse="2", needs=("default scale",))
def base_2(q, k, v, block_indices, block_size, causal):
    blocks = {"block_indices": block_indices, "block_size": block_size}
    o, lse = selection_reference(Call(q.double(), k, v, **blocks, causal=causal, return_lse=True))
    return o.to(q.dtype), (lse / torch.log(torch.tensor(2.0))).float()

@contestant(takes=("ranges",), lse="e")
def gives_up(q, k, v, ranges, causal, scale, return_lse=False):
    raise NotImplementedError("a promised call")

def takes_nothing(q, k, v, *, ranges, causal, scale, return_lse=False):
    raise NotImplementedError("anything")

def no_selection(q, k, v, *, causal, scale):
    pass

def of_blocks(q, k, v, *, block_indices, block_size, causal, scale):
    pass

def other_words(q, k, v, *, spans, causal):
    pass

def any_words(q, k, v, spans, **more):
    pass

not_callable = 3

@selector(scores=("max",))
def chooses(q, k, n, block_size, topk):
    pass

@selector(scores=("max",), layouts=("pages",), e4m3=False)
def pages_alone(q, k, n, block_size, stride, tail, cache_seqlens, block_table):
    pass

@contestant(takes=("ranges",))
def one_causal(q, k, v, ranges, scale):
    pass
"""


RAISING = """
import torch
import triton

def _launch(q):
    raise ValueError(f"head dimension {q.shape[-1]} is not supported")

def raises(q, k, v, *, ranges, causal, scale):
    return _launch(q)

def asserts(q, k, v, *, ranges, causal, scale):
    assert q.shape[-1] == 7
    return q

@triton.jit
def _kernel():
    raise IndexError("in a program")

def interpreted(q, k, v, *, ranges, causal, scale):
    _kernel[(1,)]()

def through_torch(q, k, v, *, ranges, causal, scale):
    return torch.zeros(3).view(2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger")
    write(folder, {"mine.py": KERNELS, "raising.py": RAISING})
    return folder


def test_a_kernel_of_one_size_is_judged_on_it(contest, folder):
    """Cases are reshaped to its contract, not skipped; what it does not promise is said once."""
    done = contest(folder, ["mine:picky"], "-m", "parity or edge", "-k", "not any_selection")
    assert done.returncode == 0, done.stdout + done.stderr
    said = verdicts(done)
    count = re.search(r"mine:picky, parity: right on (\d+) cases; does not promise: (.*)", said)
    assert count, done.stdout
    assert int(count[1]) >= ENOUGH
    for words in ("padding in any slot", "G other than 4", "LSE", "block size other than 16"):
        assert count[2].count(words) == 1
    assert re.search(r"mine:picky, edge: right on \d+ cases", said)
    assert "SKIPPED" not in done.stdout.replace("streams need a GPU", "", 1).replace("SKIPPED [", "", 1)


def test_a_wrong_kernel_is_told_what_it_computes(contest, folder):
    done = contest(folder, ["mine:first_64"], "-m", "parity", "-k", "L67 or L99 or L130 or L131 or L17")
    assert done.returncode == 1
    said = verdicts(done)
    assert re.match(r"mine:first_64, parity: WRONG on (\d+) of \d+ cases\n", said), done.stdout
    assert re.findall(r"^  (.*) \(\d+ cases\)", said, re.M) == ["reads only the first 64 keys of a row"]
    assert "no known mistake" not in said


def test_a_kernel_that_raises_is_told_what_and_where_at_the_end_of_a_short_run(contest, folder):
    """Also from a worker. Equal failures are one: each contestant fails in four tests or more."""
    lines = RAISING.splitlines()
    names = {
        "raises": ("ValueError", "raise ValueError", "head dimension 64 is not supported"),
        "asserts": ("AssertionError", "assert q", "assert q.shape[-1] == 7"),
        "interpreted": ("IndexError", "raise IndexError", "in a program"),
        "through_torch": ("RuntimeError", "return torch", "shape '[2]' is invalid for input of size 3"),
    }
    chosen = ("-m", "parity", "-k", "test_triton_sel_parity and L33 and D64", "-n", "1")
    done = contest(folder, [f"raising:{name}" for name in names], *chosen)
    said = verdicts(done)
    for name, (error, line, message) in names.items():
        at = next(i for i, text in enumerate(lines, 1) if text.strip().startswith(line))
        pattern = rf"^raising:{name}, parity: WRONG on (\d+) of \1 cases\n  (.*) \(\1 cases\)$"
        [(_, why)] = re.findall(pattern, said, re.M)
        assert why == f"{error} at {folder / 'raising.py'}:{at}: {message}"
        assert done.stdout.count(f"\n{folder / 'raising.py'}:{at}: in ") == 1, "equal failures are shown once"
        assert len(re.findall(rf"^FAILED .*\[raising:{name}-", done.stdout, re.M)) == 1
    titles = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=")]
    assert titles[-3:] == ["short test summary info", "contestants", "replay one failure"]
    assert len(done.stdout.partition("replay one failure")[2].splitlines()) == 5, "three, a heading and pytest's counts"
    assert "in test_triton_sel_parity" not in done.stdout, "no traceback through the suite"


def test_what_is_not_proved_is_red(contest, folder):
    """Too few cases; a promised call that is refused; a call that is refused without a promise."""
    names = ("mine:right", "mine:base_2", "mine:gives_up", "mine:takes_nothing")
    done = contest(folder, names, "-m", "parity", "-k", "block16 or L33 and not any_selection")
    said = verdicts(done)
    assert done.returncode == 1
    assert re.search(rf"mine:right, parity: not proved: \d+ distinct cases, {ENOUGH} are needed", said), done.stdout
    assert re.search(r"mine:base_2, parity: right on \d+ cases", said), done.stdout
    assert re.search(r"mine:gives_up, parity: WRONG on (\d+) of \1 cases", said)
    assert "raised NotImplementedError: a promised call" in done.stdout
    assert re.search(r"mine:takes_nothing, parity: right on 0 cases.*\n  \d+ cases? not run: unsupported", said)
    assert "mine:takes_nothing, parity: not proved: outputs: promised, and no test of this run asked for it" in said


MISUSED = {
    "no-module": ("nowhere:attend", "cannot be imported"),
    "no-function": ("mine:rihgt", "has no attribute 'rihgt'"),
    "not-callable": ("mine:not_callable", "--nsa-impl mine:not_callable: expected a function, got a int"),
    "no-function-named": ("mine", "expected package.module:function"),
    "other-words": ("mine:other_words", r"missing a required .*argument: 'spans'"),
    "other-words-of-any": ("mine:any_words", r"missing a required argument: 'spans'"),
    "selector": ("mine:chooses", r"passes q, k in order, .*\n.*argument: 'topk'"),
    "blocks": ("mine:of_blocks", r"'block_indices': type --nsa-impl mine:of_blocks@blocks, or declare"),
    "no-selection": ("mine:no_selection", "the contract needs an argument 'ranges'"),
    "selector-and-signature": ("mine:pages_alone", "the contract needs an argument 'q_positions'\n"),
    "contract-and-signature": ("mine:one_causal", "the contract needs an argument 'causal'"),
}


@pytest.mark.parametrize("which", MISUSED)
def test_a_mistake_of_use_takes_three_lines(folder, monkeypatch, which):
    monkeypatch.syspath_prepend(folder)
    spec, message = MISUSED[which]
    with pytest.raises(ValueError, match=message) as error:
        named.load(spec)
    assert len(str(error.value).splitlines()) <= 3


# What a module does when it is imported, and how the error describes it. Line 3 is the user's.
BROKEN = {
    "name": ("tile = BLOCK", "NameError: name 'BLOCK' is not defined"),
    "of-torch": ("torch.no_such_thing(3)", "AttributeError: module 'torch' has no attribute 'no_such_thing'"),
    "module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "syntax": ("tile = = 3", "SyntaxError: invalid syntax"),
    "contract": ("__import__('nsa').testing.contestant(lse=2)", "ValueError: lse: expected 'e', '2' or '', got 2"),
    "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    "skips": ("pytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
}


@pytest.mark.parametrize("which", BROKEN)
def test_a_module_that_raises_is_named_in_one_line(tmp_path, monkeypatch, which):
    line, message = BROKEN[which]
    name = f"broken_{which.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(f"import pytest\nimport torch\n{line}\n")
    (tmp_path / f"uses_{name}.py").write_text(f"import {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = f"importing uses_{name} raised {message} ({tmp_path / name}.py:3)"
    with pytest.raises(ValueError, match=f"^--nsa-impl uses_{name}:attend: {re.escape(said)}$"):
        named.load(f"uses_{name}:attend")


@pytest.mark.parametrize(("spec", "said"), [
    ("./mine:f", "type --nsa-impl mine:f"),
    ("mine.py:f@dense", "type --nsa-impl mine:f@dense"),
    ("sub/../deep/mine.py:f", "type --nsa-impl deep.mine:f"),
    ("/a/b/mine.py:f@blocks", "type --nsa-impl mine:f@blocks in /a/b, or with that folder in PYTHONPATH"),
])  # fmt: skip
def test_a_path_is_told_what_to_type(tmp_path, monkeypatch, spec, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^--nsa-impl {re.escape(spec)}: expected a module, got a path: {said}$"):
        named.load(spec)


def test_a_mistake_of_use_ends_the_run_before_it_collects(contest, folder):
    done = contest(folder, [MISUSED["other-words"][0]], "-m", "parity")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: --nsa-impl mine:other_words: its signature is other_words(q, k, v, *, spans")
    assert len(done.stderr.strip().splitlines()) == 3
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of a contestant, whose modules this process can import. Commits are its own."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "_under_test", machine._under_test)
    yield tmp_path
    monkeypatch.undo()
    machine.commit.cache_clear()


def test_a_contestants_own_baseline_gates_it_and_is_reported(run_pytest, forked_children, repository, monkeypatch):
    """Plain torch, on a clock of the test: half as slow again is a FAIL. Ours keep the baselines that they have."""
    tmp_path = repository
    contestant(tmp_path)
    for words in (("init", "--quiet"), ("add", "-A"), ("commit", "--quiet", "-m", "theirs")):
        git(tmp_path, *words)
    for name in ("TRITON_INTERPRET", "NSA_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in off_gpu().items():
        monkeypatch.setenv(name, value)
    chosen = ("-p", "nsa_pytest", "--pyargs", "nsa.testing.suite", "-m", "perf", "--nsa-impl", "timed:attend")
    chosen = (*chosen, "-p", "clock", "-k", "many and D64-Dv64-L256", "-q", "-p", "no:cacheprovider")
    assert hooks._record(configuration(tmp_path, *chosen, "--nsa-save-baseline", nsa_impl=["timed:attend"])) == 0
    (folder,) = {path.parent for path in tmp_path.glob("nsa-baselines/*/timed-attend/*.json")}
    theirs = git(tmp_path, "rev-parse", "HEAD")
    assert [path.stem.partition("-")[2] for path in folder.glob("*.json")] == [theirs[:7]] * 3
    contestant(tmp_path, times=1.5)
    slow = run_pytest(*chosen, "--benchmark-compare", cwd=tmp_path, environment=off_gpu())
    assert slow.returncode == 1, slow.stdout
    assert re.search(r"gate: .*[1-9] FAIL", slow.stdout), slow.stdout
    if all(map(importlib.util.find_spec, ("matplotlib", "jinja2"))):
        assert pages.main(["-o", "report"]) == 0
        text = (tmp_path / "report" / "report.md").read_text()
        command = "pytest -m perf --pyargs nsa.testing.suite --nsa-impl timed:attend --benchmark-json=run.json"
        assert f"git checkout {theirs}\n" in text
        assert f"\n{command}\n" in text


# --- verdicts, without a run -----------------------------------------------------------------------------------------


def said_of(tally, whole=True, lane="parity", **contract):
    impl = named.of_function("a:kernel", lambda q, k, v, **how: None, Contract(**contract))
    one = Verdicts.__new__(Verdicts)
    one.whole = whole
    return one._of_lane(impl, lane, tally)


def test_a_promise_that_no_test_asked_for_is_named():
    cases = {f"case{i}-bf16" for i in range(ENOUGH)}
    how = {"lse": "e", "gradients": True, "sequences": True}
    lines = said_of(Tally(right=cases, exercised={"O", "LSE"}), **how)
    asked = "promised, and no test of this run asked for it"
    assert lines[1:] == [f"a:kernel, parity: not proved: {text}: {asked}" for text in ("gradients", "cu_seqlens")]
    everything = {"O", "LSE", "gradients", "cu_seqlens"}
    assert len(said_of(Tally(right=cases, exercised=everything), **how)) == 1
    assert len(said_of(Tally(right={"one"}, exercised=everything), whole=False, **how)) == 1, "a replay claims no more"


@pytest.mark.parametrize("caches", [(), ("contiguous",), ("pages",), ("contiguous", "pages")])
def test_caches_that_are_not_promised_are_named(caches):
    named_ones = {word for word in Contract(caches=caches).not_promised() if word.startswith("caches (")}
    assert named_ones == {f"caches ({kind})" for kind in ("contiguous", "pages") if kind not in caches}


def test_a_lane_in_which_nothing_ran_to_its_end_is_not_proved():
    assert said_of(Tally(right={"one"}), lane="edge", dtypes=("fp16",))[1:] == []
    lines = said_of(Tally(skipped={"one": "unsupported"}), lane="edge", dtypes=("fp16",))
    assert lines[-1] == "a:kernel, edge: not proved: no test ran to its end"


@pytest.mark.parametrize(("case", "asked"), [
    ("L24-seqs2.3", {"O", "cu_seqlens"}), ("L24-positions", {"O", "q_positions"}), ("L24", {"O"}),
])  # fmt: skip
def test_a_case_exercises_what_it_has_and_no_more(case, asked):
    one, item, call, report = Verdicts(None), *(types.SimpleNamespace() for _ in range(3))
    mark = types.SimpleNamespace(kwargs={"promise": ""})
    item.get_closest_marker = {"contested": mark, "parity": mark}.get
    item.callspec = types.SimpleNamespace(params={"contestant": "a:kernel", "case": case})
    one.config, item.nodeid, call.excinfo = types.SimpleNamespace(getoption=lambda name: []), "test_a", None
    vars(report).update(when="call", outcome="passed", longrepr=None, user_properties=[])
    hook = one.pytest_runtest_makereport(item, call)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)
    [(_, facts)] = report.user_properties
    assert set(facts[-1]) == asked


@pytest.mark.parametrize(("lane", "why"), [("interpreter", ": that takes a GPU"), ("gpu", "")])
def test_bf16_that_no_case_had_is_named(monkeypatch, lane, why):
    """As without a GPU, where cases are of the other dtypes of a contract, or with `-k fp16`."""
    monkeypatch.setattr(verdicts_module, "current_lane", lambda: lane)
    untested = "  bf16 is promised, and was not tested"
    cases = {f"H2-D16-Dv16-L24-fp16-{i}" for i in range(ENOUGH)}
    [_, line] = said_of(Tally(right=cases, exercised={"O"}))
    assert line == untested + why
    for seen, contract in ((cases, {"dtypes": ("fp16",)}), (cases | {"H2-D16-Dv16-L24-bf16"}, {})):
        [line] = said_of(Tally(right=seen, exercised={"O"}), **contract)
        assert untested not in line


def test_an_error_whose_own_text_fails_is_told():
    class Mute(Exception):
        def __str__(self):
            raise TypeError

    assert re.fullmatch("<.*>", traces.said(Mute()))


def test_cases_that_a_kernel_refuses_are_counted_by_reason():
    """Not by the case, which each reason names."""
    skipped = {f"case{i}": f"Skipped: unsupported: case{i}: D = {32 if i else 16}" for i in range(3)}
    assert said_of(Tally(skipped=skipped), whole=False)[1:] == ["  3 cases not run: unsupported: D = 32"]


def test_findings_of_one_contestant_are_not_tried_first_on_another():
    """The last key of 17 in a row is the last partial block of 16, too."""
    oracle = Oracle.of(Case(2, 16, 16, 17, 3, "few", "fp32", causal=False).make("cpu"))
    p = oracle.problem
    out, _ = fp64(p.choosing(p.ranges - torch.tensor([0, 1])))
    one = Verdicts.__new__(Verdicts)
    block = "drops the last partial block of 16 keys of a row"
    one.known = {"b:kernel": [block]}
    wrong = named.Wrong("a:kernel on case: error", out.float(), oracle)
    assert [*one._kinds(wrong, "b:kernel", "case")] == [block]
    assert "misses the last key of a row" in one._kinds(wrong, "a:kernel", "case")


def test_errors_that_differ_in_numbers_and_places_are_of_one_kind():
    """The error and the bound may have an exponent, and packed sequences have no batch."""
    said = (
        "dk: error 1.081 > bound 1.662e-06 = 2*5.74e-07 (SDPA) + 4*eps*max; the first at batch 0, key 0: got 1",
        "dk: error inf > bound 0.006683 = 2*0.0006 (SDPA) + 4*eps*max; the first at key 11: got 2",
    )
    one = Verdicts.__new__(Verdicts)
    lists = (f"no known mistake fits; a block is listed twice: got {x}, expected [0]" for x in ([0, 0], [0, 0, 0]))
    assert len({key for text in lists for key in one._kinds(AssertionError(text), "a:kernel", "case")}) == 1
    kinds = [one._kinds(AssertionError(f"a:kernel on case: {text}"), "a:kernel", "case") for text in said]
    assert kinds[0].keys() == kinds[1].keys()
    assert [*kinds[0].values(), *kinds[1].values()] == [*said]


def test_failures_are_counted_by_case_and_the_fewest_kinds_are_named():
    last, first = ({text: text} for text in ("misses the last key", "reads only the first 7 keys"))
    wrong = {f"case{i}": last | first for i in range(2)} | {f"more{i}": last for i in range(3)}
    wrong |= {f"raised{i}": {"ValueError at a.py:3": f"ValueError at a.py:3: D = {i}"} for i in (7, 8)}
    wrong |= {f"odd{i}": {f"kind {i}": f"kind {i}"} for i in range(KINDS)}
    lines = said_of(Tally(right={"fine"}, wrong=wrong))
    assert lines[:4] == [
        "a:kernel, parity: WRONG on 12 of 13 cases", "  misses the last key (5 cases)",
        "  ValueError at a.py:3: D = 7 (2 cases)", "  kind 0 (1 case)",
    ]  # fmt: skip
    assert lines[1 + KINDS :] == ["  2 cases failed in other ways"]
