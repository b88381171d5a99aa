"""Shapes by hand: what the syntax means, what the CSV holds, and the whole command on the CPU lane."""

import csv
import re
import types

import pytest
import torch

from nsa.testing import replay, shapes
from nsa.testing.clock.measure import Measurement
from nsa.testing.clock.timing import Timing
from nsa.testing.matrix.case import Case

from .small_project import ROOT, off_gpu, replayed

OLD = "mode,N,H,D,Dv,L,nspans,streams,tri_ms,ref_ms,speedup,mae,status"


@pytest.mark.parametrize(("text", "values"), [
    ("N=1024,H=8,Dv=128,L=64:1024", {"N": [1024], "H": [8], "Dv": [128], "L": [64, 128, 256, 512, 1024]}),
    ("N=64,256,H=8", {"N": [64, 256], "H": [8]}),
    ("L=100,64:256,7", {"L": [100, 64, 128, 256, 7]}),
    ("L=65:1000", {"L": [128, 256, 512]}),
    (" N=1 , dtype=fp16,fp32", {"N": [1], "dtype": ["fp16", "fp32"]}),
], ids=["as-documented", "list", "list-and-range", "range-between-powers", "dtypes"])  # fmt: skip
def test_shape_syntax(text, values):
    assert shapes.parse_shape(text) == values


@pytest.mark.parametrize(("text", "message"), [
    ("64,N=2", "cannot read '64'"),
    ("N=4,M=2", "cannot read 'M=2'"),
    ("N=4,N=2", "N is given twice"),
    ("N=0", "expected a positive number or a range, got '0'"),
    ("L=64-128", "expected a positive number or a range, got '64-128'"),
    ("L=65:100", "no power of two in 65:100"),
    ("dtype=int8", "expected one of fp16, bf16, fp32, fp64, got 'int8'"),
    ("", "cannot read ''"),
])  # fmt: skip
def test_shape_that_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match="--nsa-shape") as caught:
        shapes.parse_shape(text)
    assert message in str(caught.value)


def test_cases_are_the_product_in_every_distribution():
    cases = shapes.shape_cases("N=4,8,D=64,L=64,100", ["few", "many"], False, "bf16")
    assert {(c.N, c.H, c.D, c.Dv, c.L, c.dist, c.source, c.S_kv) for c in cases} == {
        (N, 8, 64, 64, L, dist, source, L if dist == "few" else 2048)
        for N in (4, 8) for L in (64, 100) for dist, source in (("few", "rows"), ("many", "ranges"))
    }  # fmt: skip
    [long] = shapes.shape_cases("N=1,L=4096", ["many"], False, "bf16")
    assert long.S_kv == 4096  # the cache holds what the row selects


def test_decode_adds_steps_over_blocks():
    cases = shapes.shape_cases("N=4,L=64:128", ["many"], True, "bf16")
    assert [(c.dist, c.L, c.n, c.S_kv) for c in cases if c.source == "blocks"] == [
        ("decode", 64, 1, 8192), ("decode", 128, 2, 8192),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="blocks of 64 keys, got 100"):
        shapes.shape_cases("L=100", ["many"], True, "bf16")


def test_rows_of_a_measured_kernel_and_of_one_that_failed():
    """Injected times: 10 us ours, 25 us the path it would replace."""
    problem = Case(4, 64, 64, 64, 2, "many", "fp32").make("cpu")
    times = {name: Timing([t] * 10, "host", False, 1, 1) for name, t in (("ranges", 1e-5), ("sdpa", 2.5e-5))}
    fact = Measurement(problem, "ranges", times, {}, 2e-4).info([], ["sdpa"])
    fact["share_of_ceiling"] = 0.5  # a GPU's
    row = shapes.row(problem.case, problem, fact, "ok", 1, problem.q.device)
    assert ",".join(row) == ",".join((OLD, *shapes.OUR_COLUMNS))
    assert [str(row[name]) for name in OLD.split(",")] == [
        "ranges", "2", "4", "64", "64", "64", "8", "1", "0.01", "0.025", "2.5", "0.0002", "ok",
    ]  # fmt: skip
    row = shapes.row(problem.case, problem, None, "failed: wrong", 2, problem.q.device)
    assert [row[name] for name in ("tri_ms", "ref_ms", "speedup", "mae", "status", "streams")] == [
        "", "", "", "", "failed: wrong", 2,
    ]  # fmt: skip


PERF = ("-p", "no:cacheprovider", "tests/perf", "-m", "perf")


@pytest.fixture
def run(run_pytest):
    """`run(*arguments)`: pytest in this repository, on the CPU lane."""

    def make(*arguments):
        return run_pytest(*arguments, cwd=ROOT, environment=off_gpu())

    return make


def test_command_on_the_cpu_lane(run, tmp_path, drawn):
    file, folder = tmp_path / "out.csv", tmp_path / "report"
    shape = ["--nsa-shape", "N=2,H=4,D=64,Dv=64,L=64:128", "--nsa-dist", "few,many", "--nsa-decode"]
    written = ("--nsa-csv", str(file), "--nsa-report", str(folder))
    done = run(*PERF, *shape, "--nsa-iters", "10", "--nsa-warmup", "1", *written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout  # two lengths, three kinds, and nothing else of the perf lane
    assert f"csv: {file}" in done.stdout
    assert f"report: {folder / 'report.html'}" in done.stdout
    assert file.read_text().startswith(OLD + ",dist,")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["mode"] for row in rows].count("decode") == 2
    for row in rows:
        assert (row["tri_ms"], row["speedup"], row["mae"], row["status"]) == ("", "", "", shapes.NO_TRITON)
        assert float(row["ref_ms"]) > 0
        assert row["torch"] == torch.__version__
    assert (folder / "report.md").read_text().startswith("# Selection attention on ")


FAILING = "H2-D8-Dv8-L16-N2-many-fp32"  # SDPA takes no head dimension of 8


def test_a_shape_that_fails_or_that_memory_does_not_hold_is_in_the_csv(run, tmp_path):
    file = tmp_path / "out.csv"
    shapes_by_hand = ("N=1,H=4,D=64,L=16", "N=2,H=2,D=8,L=16", "N=1000000000000000,H=4,D=64,L=16")
    chosen = [word for shape in shapes_by_hand for word in ("--nsa-shape", shape)]
    done = run(*PERF, *chosen, "--nsa-iters", "10", "--nsa-csv", str(file))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"csv: {file}" in done.stdout
    good, bad, large = csv.DictReader(file.read_text().splitlines())
    assert good["status"] == shapes.NO_TRITON
    assert (bad["D"], bad["ref_ms"], bad["status"]) == ("8", "", "failed: head dim D: expected 16 to 256, got 8")
    assert (large["N"], large["mode"], large["nspans"], large["ref_ms"]) == (f"{10**15}", "ranges", "", "")
    assert "allocate" in large["status"]
    assert bad["torch"] == large["torch"] == torch.__version__


def test_a_shape_that_fails_is_replayed_by_the_command_at_the_end(run):
    others = ["--nsa-dist", "few,many", "--nsa-decode", "--nsa-iters", "10", "--nsa-seed", "7"]
    done = run(*PERF, "--nsa-shape", "N=2,H=2,D=8,L=16", *others)
    arguments = replayed(done, FAILING)
    assert {"--nsa-shape", "--nsa-dist", "--nsa-decode", "--nsa-iters", "--nsa-seed"} <= set(arguments)
    again = run(*arguments)
    assert again.returncode == pytest.ExitCode.TESTS_FAILED, again.stdout + again.stderr
    assert re.search(r"= 1 failed.* in ", again.stdout), again.stdout
    assert replayed(again, FAILING) == arguments


@pytest.mark.parametrize(("given", "words"), [
    ({}, ""),
    ({"nsa_csv": "out.csv"}, " --nsa-shape L=64:1024"),
    ({"nsa_shape": ["N=2, H=4"]}, " --nsa-shape 'N=2, H=4'"),
], ids=["none", "default", "quoted"])  # fmt: skip
def test_shapes_by_hand_as_words(given, words):
    assert replay.by_hand(types.SimpleNamespace(getoption=given.get)) == words


REFUSED = [
    (["--nsa-shape", "N=4,M=2"], "ERROR: --nsa-shape 'N=4,M=2': cannot read 'M=2'"),
    (
        ["--nsa-shape", "N=4", "--nsa-dist", "some"],
        "ERROR: --nsa-dist 'some': expected a list of few, many, mixed, got 'some'",
    ),
    (["--nsa-update-thresholds"], "ERROR: --nsa-update-thresholds needs an NVIDIA GPU"),
    (["--nsa-csv", "/nowhere/out.csv"], "ERROR: --nsa-csv=/nowhere/out.csv: there is no folder /nowhere"),
    (["--nsa-report", "x", "-n", "2"], "ERROR: --nsa-report needs benchmarks, and under xdist there are none"),
    (["--nsa-report", "x", "--benchmark-disable"], "ERROR: --nsa-report needs benchmarks: leave out"),
]


def test_what_would_fail_at_the_end_is_refused_at_once(run_pytest):
    seen = run_pytest.each([[*PERF, *words] for words, _ in REFUSED], cwd=ROOT, environment=off_gpu())
    for done, (words, message) in zip(seen, REFUSED, strict=True):
        assert (done.returncode, words) == (pytest.ExitCode.USAGE_ERROR, words)
        assert message in done.stderr


def test_a_report_that_cannot_be_written_turns_a_green_run_red(run, tmp_path, drawn):
    (tmp_path / "report").write_text("a file where the folder should go")
    shape = ["--nsa-shape", "N=1,H=4,D=64,L=16", "--nsa-iters", "10"]
    done = run(*PERF, *shape, "--nsa-report", str(tmp_path / "report"))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in done.stdout
    assert "--nsa-report: [Errno 17]" in done.stdout
