"""When a child process is asked about a kernel, and what is remembered of its answer."""

import contextlib
import errno
import functools
import json
import logging
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nsa
from nsa import settings
from nsa.guard import memory, parent
from nsa.guard.memory import Verdict
from nsa.kernels.families import BACKWARD
from nsa.kernels.shared import passed, sources
from nsa.kernels.shared.asking import Untried
from nsa.testing.compile.points import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans", "untried")
ROOT = Path(nsa.__file__).parents[1]


# --- when a child is asked --------------------------------------------------------------------------------------------


def variant_of(name):
    """As much of a :class:`nsa.kernels.shared.launch.Variant` as the guard looks at."""
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__=name))
    return SimpleNamespace(kernel=kernel, describe=lambda tensors: {"kernel": name})


@pytest.mark.parametrize(("mode", "device", "pair", "asks"), [
    ("auto", "cuda", ("3.6", "sm_90"), False),
    ("auto", "cuda", ("3.6", "sm_89"), True),
    ("auto", "cuda", ("3.7", "sm_90"), True),
    ("always", "cuda", ("3.6", "sm_90"), True),
    ("never", "cuda", ("3.7", "sm_89"), False),
    ("auto", "cpu", ("3.7", "interpreter"), False),
    ("always", "cpu", ("3.7", "interpreter"), True),
    ("always", "meta", ("3.7", "interpreter"), False),
])  # fmt: skip
def test_who_is_asked_about(monkeypatch, mode, device, pair, asks):
    monkeypatch.setattr(passed, "passed_pairs", lambda: {("3.6", "sm_90")})
    monkeypatch.setattr(sources, "triton_version", lambda: f"{pair[0]}.1")
    monkeypatch.setattr(sources, "architecture", lambda device: pair[1])
    untried = pytest.raises(Untried, match="^_fwd_kernel was not tried$") if asks else contextlib.nullcontext()
    with nsa.configure(probe=mode), untried:
        parent.require(variant_of("_fwd_kernel"), torch.device(device), ())


def test_each_variant_is_tried_once(draw, same, answer):
    """Whoever launches it. What compiles something else is another one: dtypes, LSE, misaligned tensors."""
    whats = answer(Verdict(None, True))
    q, k, v = draw()
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    padded = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)
    misaligned = padded[1:].view(q.shape).copy_(q)
    calls = [
        lambda: nsa.selection_attention(q, k, v, ranges=ranges),
        lambda: nsa.selection_attention(q, k, v, ranges=ranges, return_lse=True),
        lambda: nsa.selection_attention(misaligned, k, v, ranges=ranges),
        lambda: nsa.selection_attention(q, k, v, ranges=ranges.long()),
        lambda: nsa.selection_attention(q.half(), k.half(), v.half(), ranges=ranges),
        lambda: nsa.selection_attention(q, k, v, ranges=ranges, causal=False),
    ]
    for count, one in enumerate(calls, 1):
        one()
        one()
        assert len(whats) == count
    nsa.selection_attention(*draw(B=2, S=2, S_kv=17), ranges=same([(0, 7)], 2, 2, 2))  # what varies from batch to batch
    assert len(whats) == len(calls)


def test_the_packaged_list():
    """The kernels as they are have passed for all architectures, with two Tritons; `make test` compiles for sm_90."""
    assert passed.passed_pairs() >= {(triton, name) for triton in ("3.6", "3.9") for name in ARCHITECTURES}
    assert passed.passed("3.6.0", "sm_90")
    assert passed.passed("3.6.1+git123", "sm_90")
    assert not passed.passed("3.60.0", "sm_90")


@pytest.mark.parametrize("name", ["_fwd_kernel", "_dkdv_kernel"])
def test_what_compiles_but_no_gpu_has_run_is_tried(monkeypatch, name):
    """With a Triton and a GPU that the compile matrix has passed."""
    monkeypatch.setattr(sources, "UNSEEN", {BACKWARD.name})
    monkeypatch.setattr(sources, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(passed, "passed", lambda triton, arch: True)
    unseen = pytest.raises(Untried) if name == "_dkdv_kernel" else contextlib.nullcontext()
    with nsa.configure(probe="auto"), unseen:
        parent.require(variant_of(name), torch.device("cuda", 0), ())


@pytest.mark.parametrize("entries", [
    "3", "[3.6]", "[{triton: '3.6'}]", "[{triton: '3.10', arch: sm_90}]", "{", "[{triton: 3.1, arch: x, sources: x}]",
])  # fmt: skip
def test_a_list_that_is_none(monkeypatch, tmp_path, entries):
    monkeypatch.setattr(passed, "LIST", tmp_path / "compiled.yaml")
    (tmp_path / "compiled.yaml").write_text(f"passed: {entries}")
    with pytest.raises(ValueError, match="compiled.yaml: expected a list `passed`"):
        passed.passed_pairs.__wrapped__()


def test_what_other_kernels_have_passed_counts_for_nothing(monkeypatch, tmp_path):
    path = tmp_path / "compiled.yaml"
    monkeypatch.setattr(passed, "LIST", path)
    assert passed.passed_pairs.__wrapped__() == frozenset()
    monkeypatch.setattr(sources, "kernel_sources", lambda: "ours")
    entries = (f"{{triton: '3.{i}', arch: sm_90, sources: '{of}'}}" for i, of in enumerate(("ours", "others", "")))
    path.write_text(f"passed: [{', '.join(entries)}]")
    assert passed.passed_pairs.__wrapped__() == {("3.0", "sm_90")}


# --- what is remembered -----------------------------------------------------------------------------------------------

WHAT = {"kernel": "_fwd_kernel", "constexprs": {"G": 4}}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BAD = Verdict("killed by SIGABRT while compiling", True)


@pytest.mark.parametrize("cause", [None, BAD.cause], ids=["works", "aborts"])
def test_another_process_does_not_ask_again(answer, cause):
    whats = answer(Verdict(cause, True))
    assert parent.find_out(WHAT, CPU).cause == cause
    memory.forget()
    assert parent.find_out(WHAT, CPU).cause == cause
    assert len(whats) == 1


def test_what_is_not_about_the_kernel_is_not_kept(answer, kept):
    """Who asks again, which `auto` does not, has a child look again."""
    whats = answer(Verdict("out of memory", False))
    for count in (1, 2):
        assert parent.find_out(WHAT, CPU).cause == "out of memory"
        assert len(whats) == count
    assert kept() == []
    whats = answer(Verdict(None, True))
    for _ in range(2):
        assert parent.find_out(WHAT, CPU).cause is None
    assert len(whats) == 1


def test_forgotten_while_waiting(answer):
    """`nsa.dispatch.reset` in another thread, while this one waits to ask again."""
    whats = answer(Verdict("out of memory", False))
    parent.find_out(WHAT, CPU)
    with ThreadPoolExecutor(1) as thread:
        with parent._asking:
            waits = thread.submit(parent.find_out, WHAT, CPU)
            time.sleep(0.2)
            memory.forget()
        assert waits.result().cause == "out of memory"
    assert len(whats) == 2


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "unsure"])
def test_threads_ask_one_child(monkeypatch, lasting):
    children, ready = [], threading.Barrier(8)

    def ask(what, device):
        children.append(what)
        time.sleep(0.3)
        return Verdict("it aborts", lasting)

    def find_out(_):
        ready.wait()
        return parent.find_out(WHAT, CPU).cause

    monkeypatch.setattr(parent, "ask", ask)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(find_out, range(8))) == {"it aborts"}
    assert len(children) == 1


def test_the_key_holds_all_that_matters(monkeypatch):
    key = memory.key_of(WHAT, CPU)
    assert memory.key_of({"kernel": "_fwd_kernel", "constexprs": {"G": 5}}, CPU) != key
    for where, name, value in (
        (sources, "driver_version", lambda: 12080),
        (memory, "compared", lambda: "edited"),
        (sources, "triton_version", lambda: "9.9.9"),
        (torch, "__version__", "9.9.9"),
        (settings, "assemblers", lambda: {"TRITON_PTXAS_PATH": "/opt/ptxas"}),
        (sources, "architecture", lambda device: "sm_999"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sources, "architecture", lambda device: "sm_90")
            before = {device: memory.key_of(WHAT, device) for device in (CPU, GPU)}
            patch.setattr(where, name, value)
            assert memory.key_of(WHAT, GPU) != before[GPU]
            assert (memory.key_of(WHAT, CPU) == before[CPU]) == (name == "driver_version")
    assert memory.key_of(dict(reversed(WHAT.items())), CPU) == key


meaning = functools.cache(sources.meaning)  # most files are the same in most of these comparisons
PROSE = [  # edits of a file that mean nothing; `test_what_a_source_means` has those of code
    lambda text: "# the first line\n" + text.replace("\n\n", "\n\n    # a comment\n\n\n"),
    lambda text: text.replace('"""', '"""Prose: ', 1),
    lambda text: text + '\n\n"""Prose below a constant."""\n',
]


def test_edited_prose_is_the_same_kernel_and_edited_code_another(monkeypatch, tmp_path):
    """Any file of `nsa/kernels`, or of what judges them."""
    package = tmp_path / "nsa"
    judges = ("guard/child.py", "guard/small.py", "plain/oracle.py", "plain/packed_sdpa.py", "plain/spans.py")
    judges = [ROOT / "nsa" / name for name in judges]
    for source in [*(ROOT / "nsa" / "kernels").rglob("*.py"), *judges]:
        (package / source.relative_to(ROOT / "nsa")).parent.mkdir(parents=True, exist_ok=True)
        (package / source.relative_to(ROOT / "nsa")).write_bytes(source.read_bytes())
    monkeypatch.setattr(sources, "meaning", meaning)
    compared, kernels = memory.compared.__wrapped__, sources.kernel_sources.__wrapped__
    kernel_files = {package / "kernels" / path.relative_to(sources.FOLDER) for path in sources.kernel_files()}
    real = compared(), kernels()
    monkeypatch.setattr(sources, "FOLDER", package / "kernels")
    assert (compared(), kernels()) == real
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    for path, text in texts.items():  # all edits of all files at once
        path.write_text(functools.reduce(lambda text, edit: edit(text), PROSE, text))
    assert (compared(), kernels()) == real
    for path, text in texts.items():
        path.write_text(text)
    edited = {path: text + "\n\nONE_MORE = 1\n" for path, text in texts.items()}
    for path, text in edited.items():
        path.write_text(text)
        assert compared() != real[0], path
        assert path not in kernel_files or kernels() != real[1], path
        path.write_text(texts[path])
    for path in edited.keys() - kernel_files:  # all at once, because this parses every file of kernels
        path.write_text(edited[path])
    assert kernels() == real[1]


CODE = """
def f(x, y: int = 1):
    return f"{x:>{y}}" if x else None
"""


def test_what_a_source_means():
    """Every change of code is one. Python 3.10 to 3.14 write this text."""
    assert sources.meaning(CODE.encode()) == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='x'),"
        "arg(arg='y',annotation=Name(id='int',ctx=Load()))],defaults=[Constant(1)]),"
        "body=[Return(value=IfExp(test=Name(id='x',ctx=Load()),"
        "body=JoinedStr(values=[FormattedValue(value=Name(id='x',ctx=Load()),conversion=-1,"
        "format_spec=JoinedStr(values=[Constant('>'),FormattedValue(value=Name(id='y',ctx=Load()),conversion=-1)]))]),"
        "orelse=Constant(None)))])])"
    )
    others = [
        CODE.replace(old, new)
        for old, new in [
            ("def f", "def g"), ("x, y", "x, *, y"), ("= 1", "= 2"), ("= 1", "= 1.0"), ("= 1", "= True"), (":>", ":<"),
            ("{x:", "{x!r:"), ("else None", "else 0"), ("else None", "else ''"), ("return ", ""), (": int", ""),
        ]
    ]  # fmt: skip
    assert len({sources.meaning(text.encode()) for text in (CODE, *others)}) == 1 + len(others)
    prose = CODE.replace("return", '"""Prose."""\n    # prose\n    return')
    assert sources.meaning(prose.encode()) == sources.meaning(CODE.encode())


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:40]),
    lambda path: path.write_bytes(b"\xff\xfe\x00"),
    lambda path: path.write_text("[]"),
    lambda path: path.write_text("[" * 200_000),
    lambda path: path.write_text(json.dumps({"key": path.stem})),
    lambda path: path.write_text(json.dumps({"key": path.stem, "call": {}, "cause": 3})),
    lambda path: path.write_text(json.dumps({"key": "another", "cause": None})),
    lambda path: path.unlink() or path.mkdir(),
], ids=["empty", "truncated", "binary", "list", "deep", "no-cause", "cause-3", "another's", "folder"])  # fmt: skip
def test_a_damaged_file_is_no_file(answer, damage, kept):
    whats = answer(BAD)
    parent.find_out(WHAT, CPU)
    (path,) = kept()
    damage(path)
    memory.forget()
    assert parent.find_out(WHAT, CPU).cause == BAD.cause
    assert len(whats) == 2
    memory.forget()
    assert parent.find_out(WHAT, CPU).cause == BAD.cause
    assert len(whats) == 2 + path.is_dir(), "mended, but where a folder lies no file can be put"


def no_space(handle, *_, **__):
    os.close(handle)
    return open("/dev/full", "w")  # noqa: SIM115  (what is written to it is refused for want of space)


def read_only(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


UNWRITABLE = {
    "full": lambda patch, tmp_path: patch.setattr(os, "fdopen", no_space),
    "read-only": lambda patch, tmp_path: patch.setattr(os, "mkdir", read_only),
    "read-only-below": lambda patch, tmp_path: patch.setattr(tempfile, "mkstemp", read_only),
    "refused": lambda patch, tmp_path: patch.setenv("XDG_CACHE_HOME", "/proc"),
    "a-file-in-its-place": lambda patch, tmp_path: (tmp_path / "cache").write_text(""),
    "no-home": lambda patch, tmp_path: patch.setattr(settings, "user_probes", lambda: None),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_folder_that_takes_no_files_only_costs_time(answer, monkeypatch, tmp_path, caplog, kind, kept):
    whats = answer(BAD)
    UNWRITABLE[kind](monkeypatch, tmp_path)
    with caplog.at_level(logging.DEBUG, logger="nsa"):
        for processes in (1, 2):
            for _ in range(2):
                assert parent.find_out(WHAT, CPU).cause == BAD.cause
            assert len(whats) == processes
            memory.forget()
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert "not kept for other processes" in said
    assert kept() == []


MANY = """
import os
from nsa.guard import memory
children, what = [], {"kernel": "_fwd_kernel"}
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        for i in range(100):
            memory.write("shared", memory.Verdict(f"cause {i} " + "x" * 20_000, True), what)
            found = memory.read("shared")
            if found is None or not found.cause.endswith("x" * 20_000):
                os._exit(1)
        os._exit(0)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_many_processes_at_once(run_pytest, kept):
    """All write and read one file: none ever sees a part of it, and nothing is left over."""
    done = run_pytest.python("-c", MANY, cwd=ROOT, environment=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, f"{[0] * 8}\n"), done.stderr
    (path,) = kept()
    assert json.loads(path.read_text())["cause"].endswith("x" * 20_000)


@pytest.mark.parametrize("closed", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_a_daemon_without_streams_can_ask(monkeypatch, tmp_path, closed):
    """New files get the numbers of closed streams. The stand-in for a child answers in the file that is its stdin."""
    child = tmp_path / "child"
    child.write_text("""#!/bin/sh\necho noise; echo '["variants", "[]"]\n["result", "right"]' >&0\n""")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    kept = [os.dup(stream) for stream in (0, 1, 2)]
    try:
        for stream in closed:
            os.close(stream)
        verdict = parent.ask(WHAT | {"interpreted": True}, CPU)
    finally:
        for stream, copy in enumerate(kept):
            os.dup2(copy, stream)
            os.close(copy)
    assert verdict == Verdict(None, True)
