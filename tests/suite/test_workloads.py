"""Shapes of serving and training: drawn ones and their regret; workloads, and what a program's calls make."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch

from nsa.__main__ import main
from nsa.testing import refusals, regret
from nsa.testing.clock.serving import Pool, kind, problems, serve
from nsa.testing.clock.timing import Timing, each
from nsa.testing.contestants.contract import Contestant
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.m3 import Shape
from nsa.testing.report import plots, summary, tables
from nsa.testing.workloads import file, mix

from .small_project import Session

CPU = torch.device("cpu")
DRAWN = Case(2, 16, 16, 64, 20, "prefill", "fp16", HKV=2, S=10, S_kv=96, block_size=16, shared=0.5)
OURS = {"auto": 30.0, "query_major": 30.0, "key_major": 20.0, "union": 25.0, "sdpa": 90.0}
US = OURS | {"other": 24.0, "dense_flash": 60.0}


def clock(fns, **sampling):
    """Call everything once, and tell the times of `US`."""
    for name, calls in fns.items():
        each(calls)
        sampling["afterwards"](name, partial(each, calls))
    return {name: Timing([US[name] * 1e-6] * 3, "graph", True, 2, 2) for name in fns}


@pytest.fixture
def drawn_small(monkeypatch, request):
    """Every seed draws a small case, which no GPU of this test has to run."""
    monkeypatch.setattr(regret, "drawn", lambda seed: Shape(DRAWN, False, request.param))
    return request.param


def test_shapes_are_those_of_training_and_serving():
    shapes = [regret.drawn(seed) for seed in range(400)]
    assert {kind(shape.case) for shape in shapes} == {"prompt", "chunk", "decode"}
    assert {shape.case.H for shape in shapes} >= {1, 2, 4, 8, 16, 32}
    assert {shape.case.block_size for shape in shapes} == {16, 32, 64, 128}
    assert {shape.case.shared for shape in shapes} == {0.0, 0.5, 0.9}
    assert {(shape.paged, shape.fp8) for shape in shapes} == {(False, False), (True, False), (True, True)}
    for shape in shapes:
        case = shape.case
        assert 1 <= case.H <= 32
        assert 64 <= case.D <= 256
        assert case.HQ <= 128
        assert case.S_kv <= 131_072 + case.block_size
        assert not shape.paged or case.S_kv % case.block_size == 0


def test_a_seed_names_its_shape_and_successive_ones_share_a_model():
    assert regret.drawn(17) == regret.drawn(17)
    models = {
        seed: (c.H, c.HKV, c.D, c.block_size) for seed in range(40) for c in [regret.drawn(seed).case]
    }  # fmt: skip
    assert all(models[seed] == models[seed - seed % regret.MODEL] for seed in models)
    assert len(set(models.values())) > 5


@pytest.mark.parametrize("drawn_small", [False, True], ids=["plain", "pages"], indirect=True)
def test_a_shape_is_checked_and_timed_with_every_schedule(drawn_small):
    times, row = regret.time_seed(7, Pool(CPU, 1 << 20), clock)
    assert times.median == US["auto"] * 1e-6
    assert row["us"] == OURS
    assert (row["best"], row["regret"], row["peer"]) == ("key_major", 1.5, None)
    assert (row["route"], row["seed"], row["paged"], row["G"], row["S"]) == ("sdpa", 7, drawn_small, 2, 10)  # few keys
    assert row["again"] == "pytest -m perf --nsa-regret 1 --nsa-seed 7"
    json.dumps(row)


@pytest.mark.parametrize("drawn_small", [False], indirect=True)
def test_buffer_sets_are_other_tensors_with_one_selection(drawn_small):
    first, second = problems(regret.drawn(0), 0, Pool(CPU, 1 << 20), 2)
    assert first.k.data_ptr() != second.k.data_ptr()
    assert torch.equal(first.block_indices, second.block_indices)
    assert not torch.equal(first.k, second.k)


@pytest.mark.parametrize("drawn_small", [True], indirect=True)
def test_what_a_peer_derives_is_made_before_it_is_timed(drawn_small, monkeypatch):
    """In a graph it could not be made."""
    made, timing = [], []
    auto = regret.contestants(regret.drawn(0))[0]

    def arguments(p):
        assert not timing
        made.append(p)
        return p

    peer = Contestant("other", lambda p, lse, out: auto.run(p.derived(arguments)), lse=False)
    monkeypatch.setattr(regret, "beside", lambda shape: [peer])
    regret.time_seed(0, Pool(CPU, 1 << 20), lambda fns, **how: timing.append(1) or clock(fns, **how))
    assert len(made) == 2


@pytest.mark.parametrize("drawn_small", [False, True], ids=["plain", "pages"], indirect=True)
def test_a_wrong_schedule_fails_and_a_wrong_peer_is_left_out(drawn_small, monkeypatch):
    auto, *others = regret.contestants(regret.drawn(0))
    wrong = [Contestant(name, lambda p, lse, out: auto.run(p) * 1.2, lse=False) for name in ("auto", "union", "other")]
    monkeypatch.setattr(regret, "beside", lambda shape: wrong[2:])
    row = regret.time_seed(0, Pool(CPU, 1 << 20), clock)[1]
    assert row["left_out"]["other"].startswith("wrong: other: an output differs by")
    assert "other" not in row["us"]
    for mine, said in (([auto, *others, wrong[1]], "union: wrong: union: an"), ([wrong[0]], "auto: an output differs")):
        monkeypatch.setattr(regret, "contestants", lambda shape, mine=mine: mine)
        with pytest.raises(AssertionError, match=said):
            regret.time_seed(0, Pool(CPU, 1 << 20), clock)


def made_up_row(seed, **us):
    return regret.judged({"seed": seed, "case": f"case{seed}", "route": "query_major", "us": us, "again": f"<{seed}>"})


def test_summary():
    rows = [made_up_row(seed, auto=100.0, query_major=100.0, other=200.0) for seed in range(8)]
    rows += [
        made_up_row(8, auto=112.0, query_major=112.0, union=100.0),
        made_up_row(9, auto=300.0, key_major=100.0, other=250),
    ]
    assert regret.summary(rows) == [
        "auto beside our best schedule, 10 shapes: 80% within 5%, 90% within 15%, 90% within 50%, worst 3.00x",
        "auto beside the fastest peer, 9 shapes: 89% within 5%, 89% within 15%, 100% within 50%, worst 1.20x",
        "3.00x  auto 300 us (query_major), key_major 100: case9",
        "       <9>",
        "1.12x  auto 112 us (query_major), union 100: case8",
        "       <8>",
        "1.20x  auto 300 us (query_major), other 250: case9",
        "       <9>",
    ]


# --- workloads --------------------------------------------------------------------------------------------------------

SMALL = """source: a test
common: {HQ: 4, HKV: 2, D: 16, block_size: 16, blocks: 3, dtype: fp16}
variants:
  plain: {}
  pages: {pages: true, shared: 0.9}
shapes:
- {queries: 2, keys: 50, weight: 3}
- {queries: [3, 1], keys: [40, 33], name: ragged}
- {batch: 2, queries: 1, keys: 70, weight: 0}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("name", "shapes", "weight"), [("m3-prefill", 66, 14_805), ("m3-decode", 42, 140), ("nsa-training", 6, 6)]
)
def test_files_that_ship(name, shapes, weight):
    found = file.read(file.find(name))
    variants = {entry.variant for entry in found}
    for variant in variants:
        mine = [entry for entry in found if entry.variant == variant]
        assert (len(mine), sum(entry.weight for entry in mine)) == (shapes, weight)
    assert len({entry.id for entry in found}) == len(found) == shapes * len(variants)
    if name == "nsa-training":
        lengths = [length for entry in found for length in entry.shape.case.seqlens]
        assert all(sum(entry.shape.case.seqlens) == 65_536 for entry in found)
        assert min(lengths) >= 200
        assert max(lengths) <= 60_000


def test_words_of_a_shape_precede_those_of_its_variant_and_those_of_all(small):
    first, ragged, steps, *_, last = file.read(small)
    assert [entry.id for entry in (first, ragged, last)] == ["plain-B1-T2-K50", "plain-ragged", "pages-B2-T2-K70"]
    assert (first.shape.case.shared, ragged.shape.case.seqlens, ragged.shape.case.kv_seqlens) == (0, (3, 1), (40, 33))
    assert (steps.shape.case.dist, steps.shape.case.B, steps.weight) == ("decode", 2, 0)
    assert [shape.paged for *_, shape in file.read(small)] == [False] * 3 + [True] * 3


WRONG = [  # what is replaced, by what, the line, and what is said
    ("weight: 3", "wieght: 3", 7, "wieght: expected a word of a shape: queries, keys, batch"),
    ("weight: 3", "weight: -1", 7, "weight: expected a number from 0 to 2^31, got -1"),
    ("weight: 0", "weight: .nan", 9, "weight: expected a number from 0 to 2^31, got nan"),
    ("queries: 2", "queries: 0", 7, "queries: expected a whole number from 1 to 2^31, or a list of them, got 0"),
    ("queries: 2, ", "", 7, "queries: expected a whole number from 1 to 2^31, or a list of them, got None"),
    ("keys: 50", "keys: 1", 7, "keys: expected at least as many as queries, got 1"),
    ("keys: [40, 33]", "keys: [40]", 8, "keys: expected as many numbers as queries, without batch, got [40]"),
    ("keys: 50", "keys: 2147483648, batch: 2147483648", 7, "shape: expected one that a kernel serves, got 'Storage s"),
    ("weight: 3", "? [3] : 4", 7, "[3]: expected a word of a shape: queries"),
    ("D: 16", "D: 512", 7, "shape: expected one that a kernel serves, got 'head dim D: exp"),
    ("HQ: 4", "HQ: 5", 7, "HQ: expected a multiple of HKV = 2, got 5"),
    ("pages: {pages: true", "pages: {fp8: true", 7, "fp8: expected false without pages, got True"),
    ("pages: true", "pages: maybe", 5, "pages: expected true or false, got 'maybe'"),
    ("source: a test", "sauce: a test", 1, "sauce: expected a key of a workload: source, common, variants, s"),
    ("source: a test\n", "", 1, "source: expected it, got none"),
    ("name: ragged", "name: B1-T2-K50", 8, "name: expected shapes of different names, got 'B1-T2-K50'"),
    ("source: a test", "source: [1]", 1, "source: expected text that says where the shapes come from, got [1]"),
    ("plain: {}", "a b: {}", 4, "variants: expected names of letters, digits, - and ., got 'a b'"),
    ("  plain: {}\n  pages: {pages: true, shared: 0.9}", "  {}", 4, "variants: expected names of letters, digits"),
    ("weight: 3", "weight: .inf", 7, "weight: expected a number from 0 to 2^31, got inf"),
    ("queries: 2", "queries: 99999999999999999999", 7, "queries: expected a whole number from 1 to 2^31"),
    ("blocks: 3", "blocks: 9999999999", 2, "blocks: expected a whole number from 2 to 2^31, got 9999999999"),
    ("queries: 2", "queries: 2026-02-31", 7, "expected a valid value: day is out of range"),
    ("queries: 2", "queries: &a [*a]", 7, "expected a valid value: found unconstructable recursive node"),
    ("queries: 2", "queries: !!python/object:x.y 2", 7, "expected a valid value: could not determine"),
    ("queries: 2", "queries: !!int ''", 7, "expected a valid value: string index out of range"),
    ("pages: true", "pages: !!bool x", 5, "expected a valid value: 'x'"),
    ("source: a test", "source: !!timestamp x", 1, "expected a valid value: "),
    ("shapes:", "shapes: []\nmore:", 7, "more: expected a key of a workload"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "said"), WRONG)
def test_what_is_wrong_is_said_with_its_line(small, old, new, line, said):
    small.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ValueError, match="expected") as raised:
        file.read(small)
    assert str(raised.value).startswith(f"{small}, line {line}: {said}")


def test_a_wrong_file_ends_the_run_at_once(small):
    small.write_text(SMALL.replace("weight: 3", "weight: -3"))
    names = "expected m3-decode, m3-prefill, nsa-training, or the path of a file"
    for given, said in ((str(small), "line 7: weight: expected"), ("m4", names)):
        with pytest.raises(pytest.UsageError, match=said):
            refusals.check(Session("nsa_workload", nsa_workload=given))


@pytest.mark.parametrize("other", ["nsa_regret", "nsa_shape"])
def test_one_special_run_at_a_time(small, other):
    given = {"nsa_workload": str(small), other: ["L=64"] if other == "nsa_shape" else 3}
    with pytest.raises(pytest.UsageError, match="times its own cases alone: leave out --nsa-"):
        refusals.check(Session(**given))


def test_every_shape_is_checked_in_fp64_and_timed(small):
    """In pages and without, ragged and not, with a last page that is not full."""
    found = [mix.time_entry("small", entry, Pool(CPU, 1 << 20), clock) for entry in file.read(small)]
    assert [times.median for times, _ in found] == [US["auto"] * 1e-6] * 6
    facts = [fact for _, fact in found]
    assert {fact["control"] for fact in facts} == {"dense_flash"}
    assert Counter(fact["group"] for fact in facts) == {"small: decode": 6}
    assert summary.lines([fact | {"name": str(i), "median": 1e-5} for i, fact in enumerate(facts)])[-4:] == [
        "small, plain: 3 shapes, mean call 0.03 ms",
        "  dense_flash 0.06 ms: ours is 2.00x as fast",
        "small, pages: 3 shapes, mean call 0.03 ms",
        "  dense_flash 0.06 ms: ours is 2.00x as fast",
    ]


def test_a_wrong_row_of_any_sequence_is_found(small):
    """The output of each query is compared, because there are few; a wrong last row of the first sequence, too."""
    (entry,) = (entry for entry in file.read(small) if entry.id == "pages-ragged")
    right = mix.contestants(entry)[0][0]

    def call(p, return_lse, out):
        o = right.run(p).clone()
        o[2, 3] = o[1, 3]
        return o

    with pytest.raises(AssertionError, match="mine: an output differs by"):
        serve(entry.shape, 0, [Contestant("mine", call, lse=False)], [], Pool(CPU, 1 << 20), clock)
    assert problems(entry.shape, 0, Pool(CPU, 1 << 20), 1)[0].q.shape == (4, 4, 16)


def made_up(shape, weight, mine, **others):
    workload = {"name": "mix", "variant": "", "shape": shape, "weight": weight}
    return {"workload": workload, "impl": "auto", "route": "union", "medians": {"auto": mine, **others}}


def test_summary_picture_and_table():
    facts = [made_up("a", 3, 1e-3, vllm=2e-3, dense_flash=8e-3), made_up("b", 1, 5e-3, vllm=2e-3, dense_flash=8e-3)]
    facts += [made_up("c", 4, 2e-3, dense_flash=8e-3)]
    assert mix.summary(facts) == [
        "mix: 3 shapes, mean call 2 ms",
        "  vllm 2 ms on 2 of them, where ours is 2 ms: ours is 1.00x as fast",
        "    0.40x  b: 5000 us (union) beside 2000",
        "    2.00x  a: 1000 us (union) beside 2000",
        "  dense_flash 8 ms: ours is 4.00x as fast",
    ]
    [row] = tables.workloads(mix.by_mix(facts)).cells()
    beside = {"vLLM": "2.00 (1.00×)", "dense flash": "8.00 (4.00×)", "worst shape": "0.40×, b, vLLM"}
    assert {name: str(cell) for name, cell in row.items()} == {
        "workload": "mix", "shapes": "3", "ours": "2.00", **beside
    }  # fmt: skip
    pytest.importorskip("matplotlib")
    picture = plots.workloads(mix.by_mix(facts), "vllm")
    assert picture.startswith("<svg")
    assert plots.workloads(mix.by_mix(facts), "fla") is None


PROGRAM = """
import nsa, torch
q, k = torch.randn(1, 3, 4, 16), torch.randn(1, 40, 2, 16)
blocks = torch.zeros(1, 3, 2, 2, dtype=torch.int32)
for i in range(5):
    nsa.selection_attention(q[:, : 1 + i % 2], k, k, block_indices=blocks[:, : 1 + i % 2], block_size=16)
    nsa.selection_attention(q.half(), k.half(), k.half(), block_indices=blocks, block_size=16, backend="sdpa")
raise SystemExit(3)
"""


def test_a_workload_is_recorded_from_a_program(tmp_path, capfd):
    """Its calls in fp32 are left out, and its exit status is passed on."""
    out = tmp_path / "mine.yaml"
    assert main(["record-workload", "-o", str(out), "--", sys.executable, "-c", PROGRAM]) == 3
    said = capfd.readouterr()
    assert "5 calls left out" in said.err
    assert f"5 calls of 1 shapes written to {out}" in said.out
    (entry,) = file.read(out)
    case = entry.shape.case
    assert (entry.weight, case.S, case.S_kv, case.H, case.HKV, case.n, case.dtype) == (5, 3, 40, 2, 2, 2, "fp16")
    assert main(["record-workload", "-o", str(out), "--", sys.executable, "-c", "pass"]) == 1
    assert "made no call" in capfd.readouterr().err


CHILDREN = """
import multiprocessing, os, sys
import nsa, torch

def call():
    q, blocks = torch.ones(1, 2, 2, 16).half(), torch.zeros(1, 2, 1, 2, dtype=torch.int32)
    nsa.selection_attention(q, q[:, :, :1], q[:, :, :1], block_indices=blocks, block_size=1, backend="sdpa")

torch.set_num_threads(1)
call()
child = multiprocessing.get_context("fork").Process(target=call)
child.start(), child.join()
"""


def test_children_are_counted_and_lost_calls_are_named(tmp_path, capfd):
    """A child counts its own calls alone. A process that was killed leaves none, and the status is as in a shell."""
    out = tmp_path / "mine.yaml"
    command = ["record-workload", "-o", str(out), "--", sys.executable, "-c"]
    assert main([*command, CHILDREN]) == 0
    assert f"2 calls of 1 shapes written to {out}" in capfd.readouterr().out
    assert main([*command, CHILDREN + "os.kill(os.getpid(), 9)"]) == 128 + 9
    assert "of 2 processes that made calls, 1 ended by a signal" in capfd.readouterr().err
    assert "# Shapes and counts of 1 calls" in out.read_text()


def test_ctrl_c_ends_the_program_and_its_calls_are_written(tmp_path):
    """As of a server: the terminal sends the signal to both."""
    out = tmp_path / "mine.yaml"
    server = CHILDREN + "import signal, time\ntry:\n os.killpg(0, signal.SIGINT)\n time.sleep(9)\n"
    server += "except KeyboardInterrupt:\n time.sleep(0.5)\n"
    command = [sys.executable, "-m", "nsa", "record-workload", "-o", str(out), "--", sys.executable, "-c", server]
    ran = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert out.is_file()


@pytest.mark.parametrize(
    ("out", "program", "said"),
    [
        ("mine.yaml", "no-such-program", "no-such-program: cannot be started: No such file or directory"),
        (".", sys.executable, "expected a file, or none yet"),
        ("pipe", sys.executable, "-o pipe: expected a file, or none yet"),  # /dev/null was replaced by a file
    ],
)
def test_what_cannot_be_recorded_is_said_in_a_line(tmp_path, monkeypatch, capfd, out, program, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert main(["record-workload", "-o", out, "--", program, "-c", PROGRAM]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


def test_a_workload_that_cannot_be_written_is_printed(tmp_path, capfd):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "mine.yaml"
    assert main(["record-workload", "-o", str(out), "--", sys.executable, "-c", PROGRAM]) == 3
    said = capfd.readouterr()
    assert "the workload is printed instead" in said.err
    assert "queries: 3, keys: 40" in said.out
