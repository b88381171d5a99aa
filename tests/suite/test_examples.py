"""The examples: a third party's kernel that parity proves, and a wrong copy that it refuses; serving from pages."""

import importlib.util
import os
import re

import pytest
import torch

import nsa
from nsa.testing.plugin import current_lane

from .small_project import ROOT

KERNEL = ROOT / "examples" / "your_kernel.py"
RIGHT = "end = tl.minimum(tl.load(ranges_ptr + (row * n + span) * 2 + 1), limit)"
START = "tl.load(ranges_ptr + (row * n + span) * 2)"
CLAMPED = f"tl.maximum({START}, 0)"
ONE_MORE = "end = tl.minimum(tl.load(ranges_ptr + (row * n + span) * 2 + 1) + 1, limit)"


def write_copy(path, right, wrong):
    """Of the example, with one thing wrong."""
    text = KERNEL.read_text(encoding="utf-8")
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong), encoding="utf-8")


LANES = {"parity": 4, "edge": 10}  # how many tests at least
FEW = {"parity": "fp32 and D64", "edge": "fp32 and H2"}  # for -k
ID = r"nsa\.testing\.suite\.{}\.\w+::\S+"


@pytest.fixture
def prove(run_pytest, tmp_path):
    """`prove(lane, impl)`: pytest's run of a subset of the third parties' lane, modules in `tmp_path` included."""

    def run(lane, impl, *more):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        gpu = lane == "parity" and current_lane() == "gpu"  # which has no fp32, and more cases
        some = "bf16 and N256" if gpu else FEW[lane]
        some = f"mixed and not any_selection and {some}"
        chosen = ("--pyargs", "nsa.testing.suite", "-m", lane, "-k", some, "--nsa-impl", impl, *more)
        return run_pytest(*chosen, "--benchmark-disable", "-p", "no:cacheprovider", cwd=ROOT, environment=environment)

    return run


@pytest.mark.parametrize("lane", LANES)
def test_the_example_is_proved(prove, lane):
    done = prove(lane, "examples.your_kernel:attend")
    passed = re.search(r"= (\d+) passed, (?:\d+ skipped, )?\d+ deselected in", done.stdout)
    assert passed, done.stdout + done.stderr
    assert int(passed[1]) >= LANES[lane]
    assert re.search(rf"attend, {lane}: right on \d+ cases?; does not promise: ", " ".join(done.stdout.split()))
    few = lane == "parity"  # chosen by -k: not enough to prove it, which is said, and red
    assert ("not proved" in done.stdout, done.returncode) == (few, int(few)), done.stdout


@pytest.mark.skipif(current_lane() == "gpu", reason="there it reads what lies before the tensor, or ends the process")
def test_spans_before_the_first_key_are_red_at_the_edge(prove, tmp_path):
    """The matrix's spans begin at 0 or later: a kernel that reads before the tensor is found by the edge lane."""
    write_copy(tmp_path / "unclamped.py", CLAMPED, START)
    done = prove("edge", "unclamped:attend", "-x")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(rf'pytest --pyargs "{ID.format("edge")}noise\S*" --nsa-impl unclamped:attend', done.stdout)


def test_one_key_too_many_is_red_and_named(prove, tmp_path):
    """Past a span's end, never past the tensor: what is wrong is the result, not the address."""
    write_copy(tmp_path / "one_key_more.py", RIGHT, ONE_MORE)
    done = prove("parity", "one_key_more:attend", "--maxfail=4")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"one_key_more:attend on H\d+-\S+ \[.*\]: (LSE )?error \S+ > bound ", done.stdout)
    assert re.search(rf'pytest --pyargs "{ID.format("parity")}" --nsa-impl one_key_more:attend', done.stdout)


def example(name):
    """A module of the examples."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_serving_from_pages_gives_the_tokens_of_a_run_without_a_cache(lane, fresh_routes, one_thread, capsys):
    """On a GPU by kernels, whatever its threshold; the interpreter would take minutes."""
    decode = example("paged_decode")
    with torch.random.fork_rng(), nsa.configure(**({"sel_triton_min_L": 0} if lane == "gpu" else {})):
        decode.main()  # asserts that they are
    assert ("sdpa" in {record.route for record in nsa.routes()}) == (lane != "gpu")
    assert capsys.readouterr().out.startswith(f"{2 * decode.STEPS} of {2 * decode.STEPS} tokens are those of a run")


def test_three_models_select_and_attend_as_plain_pytorch(one_thread, capsys):
    """In the interpreter lane without Triton, which would take minutes."""
    with torch.random.fork_rng():
        example("selecting").main()  # asserts that they do
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["M3", "QSA", "NSA"]
