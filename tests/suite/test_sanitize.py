"""What the sanitizer's runner makes of what a tool says; the tool is a script here."""

import stat

import pytest
import torch

from nsa.testing import sanitize

CAUGHT = {
    "memcheck": "========= Invalid __global__ read of size 4 bytes\n=========     at _planted_read+0x90",
    "racecheck": "========= Error: Race reported: Write-after-write hazard in _planted_race",
}


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """`tool(planted=…, matrix=…)`: exit status of a run on the planted fault, and of one on our kernels."""

    def make(planted=sanitize.FOUND, matrix=0, said=None):
        path = tmp_path / "compute-sanitizer"
        words = CAUGHT if said is None else said
        path.write_text(
            '#!/bin/sh\ntest "$PYTORCH_NO_CUDA_MEMORY_CACHING$PYTHONFAULTHANDLER" = 11 || exit 9\n'
            'for last; do :; done\ncase "$last" in\n'
            + "".join(f"{name}) echo '{text}'; exit {planted};;\n" for name, text in words.items())
            + f"matrix) echo '========= Invalid __global__ write'; echo checked 70 calls; exit {matrix};;\nesac\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def test_pieces_of_a_workspace_are_allocations_of_their_own():
    """memcheck sees where an allocation ends."""
    first, none, second = sanitize.apart("cpu", ((5, torch.float16), None, (3, torch.int32)))
    assert none is None
    assert (first.tensor().shape, first.dtype, first.whole.nbytes) == ((5,), torch.float16, 12)
    assert (second.data_ptr(), second.whole.nbytes) == (second.whole.data_ptr(), 12)


def test_all_clean(tool, capsys):
    tool()
    assert sanitize.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"memcheck, memcheck: ok, exit {sanitize.FOUND}, planted fault caught",
        "memcheck, matrix: ok, exit 0, checked 70 calls",
        f"racecheck, racecheck: ok, exit {sanitize.FOUND}, planted fault caught",
        "racecheck, matrix: ok, exit 0, checked 70 calls",
    ]


@pytest.mark.parametrize(("how", "line"), [
    ({"planted": 0}, "memcheck, memcheck: FAILED, exit 0, planted fault NOT caught"),
    ({"said": dict.fromkeys(CAUGHT, "========= some other error")}, "racecheck: FAILED, exit 77, planted fault NOT"),
    ({"matrix": sanitize.FOUND},
     "memcheck, matrix: FAILED, exit 77, checked 70 calls\n========= Invalid __global__ write"),
    ({"matrix": 1}, "racecheck, matrix: FAILED, exit 1"),
], ids=["blind", "other fault", "reports", "crash"])  # fmt: skip
def test_what_is_wrong_is_shown(tool, capsys, how, line):
    tool(**how)
    assert sanitize.main([]) == 1
    assert line in capsys.readouterr().out


def test_without_the_tool(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is not installed"):
        sanitize.main([])


def test_a_run_that_does_not_end(tool, monkeypatch, capsys, tmp_path):
    tool()
    path = tmp_path / "compute-sanitizer"
    path.write_text(path.read_text().replace("matrix) echo", "matrix) exec sleep 60; echo"))
    monkeypatch.setattr(sanitize, "LIMIT", 1)
    assert sanitize.main([]) == 1
    assert "memcheck, matrix: FAILED, exit -1, \n\n\ndid not end in 1 s" in capsys.readouterr().out


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nsa.testing import faults

for kernel, signature in (
    (faults._planted_read, {"x_ptr": "*i32", "y_ptr": "*i32", "n": "i32", "BLOCK": "constexpr"}),
    (faults._planted_race, {"y_ptr": "*i32", "BLOCK": "constexpr"}),
):
    source = ASTSource(fn=kernel, signature=signature, constexprs={(len(signature) - 1,): 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "cubin" in compiled.asm, kernel
"""


def test_the_faults_compile(compiling):
    pytest.importorskip("triton", minversion="3.3", reason="sources are described as of Triton 3.3 on")
    compiling(COMPILE)


def test_other_words_are_refused():
    with pytest.raises(SystemExit, match="expected no argument, got --help"):
        sanitize.main(["--help"])
