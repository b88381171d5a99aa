"""`python -m nsa.testing.sanitize`: compute-sanitizer over a small matrix of our kernels, on a GPU.

memcheck looks for accesses outside of allocations, where every tensor is an allocation of its own. racecheck looks for
races in shared memory. A clean report counts only if the tool also finds a planted fault. All runs go in parallel.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa import settings
from nsa.kernels import pinned
from nsa.kernels.backward.tiles import Unions
from nsa.kernels.query_major.choice import Choice
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.small_blocks.tiles import Choice as SmallBlocks
from nsa.kernels.union.tiles import Choice as Union
from nsa.routing import why_not_e4m3
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.judge.gradients import GradientOracle, assert_gradients
from nsa.testing.matrix import caches
from nsa.testing.matrix.case import Case

TOOLS = {"memcheck": "Invalid __global__ read", "racecheck": "hazard"}  # and words of the report of its planted fault
FOUND = 77  # exit status of a tool that reports something
LIMIT = 600  # seconds that a run may take
LONG = 6000  # characters shown of each output stream of a failed run


def main(arguments: Sequence[str]) -> int:
    """Run each tool on the matrix and on its planted fault. Returns the exit status; exits if no tool is installed."""
    if arguments and arguments[0] not in (*TOOLS, "matrix"):
        raise SystemExit(f"expected no argument, got {arguments[0]}")
    if arguments:
        return _child(arguments[0])
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise SystemExit("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    runs = [(name, what) for name in TOOLS for what in (name, "matrix")]
    good = True
    with ThreadPoolExecutor(len(runs)) as pool:
        for (name, what), done in zip(runs, pool.map(partial(_sanitized, tool), *zip(*runs, strict=True)), strict=True):
            fine, verdict = _judge(name, what, done)
            print(f"{name}, {what}: {'ok' if fine else 'FAILED'}, exit {done.returncode}, {verdict}", flush=True)
            if not fine:
                print(f"{done.stdout[:LONG]}\n{done.stderr[-LONG:]}", flush=True)
            good = good and fine
    return 0 if good else 1


def _judge(name: str, what: str, done: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    text = done.stdout + done.stderr
    if what == "matrix":
        return done.returncode == 0, next((x for x in done.stdout.splitlines() if x.startswith("checked")), "")
    caught = done.returncode == FOUND and TOOLS[name] in text and "_planted" in text
    return caught, "planted fault " + ("caught" if caught else "NOT caught")


def _sanitized(tool: str, name: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [tool, "--tool", name, "--error-exitcode", str(FOUND), "--target-processes", "all", "--print-limit", "20"]
    # PYTHONFAULTHANDLER: a run that crashes prints its stack.
    environment = settings.child_environment(interpret=False)
    environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONFAULTHANDLER": "1"}
    command += [sys.executable, "-m", "nsa.testing.sanitize", what]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as slow:
        said = [x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (slow.stdout, slow.stderr)]
        return subprocess.CompletedProcess(command, -1, said[0], f"{said[1]}\ndid not end in {LIMIT} s")


def apart(device: torch.device, sizes: Sequence[tuple[int, torch.dtype] | None]) -> list[Any]:
    """As `launch.divided`, but each piece is an allocation of its own, without a gap behind it."""
    from nsa.kernels.shared.launch import Piece, workspace

    def piece(elements: int, dtype: torch.dtype) -> Piece:
        length = -(-elements * dtype.itemsize // 4)
        whole = workspace(length, torch.int32, device)
        return Piece(whole, whole.data_ptr(), (elements, 0, length, dtype))

    return [size and piece(*size) for size in sizes]


def _child(what: str) -> int:
    device = torch.device("cuda", 0)
    if what == "matrix":
        from nsa.kernels.shared import launch

        launch.divided = apart
        # racecheck reports PyTorch's own fused kernel of fp32 attention, so SDPA uses plain operators here. Unions
        # serve every tile that they may serve.
        unions = pinned(union=Union(worth=ALWAYS), backward_unions=Unions(rows=0, worth=ALWAYS))
        with sdpa_kernel(SDPBackend.MATH), unions:
            print(f"checked {_matrix(device)} calls")
        return 0
    from nsa.testing.faults import plant

    plant(what, device)
    torch.cuda.synchronize()
    return 0


def _matrix(device: torch.device) -> int:
    """Call each source and dtype, with the usual and with forced splits and tiles, and check the results.

    Returns the number of calls.
    """
    cases = [
        Case(8, 128, 128, 256, 3, "few", "bf16"),
        Case(3, 96, 100, 70, 5, "few", "fp32"),
        Case(8, 64, 64, 256, 3, "few", "fp16", source="varlen"),
        Case(8, 128, 128, 256, 3, "mixed", "bf16"),
        Case(5, 64, 128, 200, 4, "many", "fp32"),
        Case(16, 128, 128, 1024, 4, "decode", "bf16", HKV=4, S_kv=2048),
        Case(2, 64, 64, 96, 24, "prefill", "fp16", HKV=2, S=12, S_kv=333, block_size=16),
    ]
    choices = [
        None,
        Choice(1, 1, 64, 4, 1),
        Choice(1, 1, 32, 2, 3),
        Choice(2, 1, 64, 4, 2, 1),
        Choice(4, 1, 32, 4, 2, 0),
    ]
    calls = 0
    for case in cases:
        problem = case.make(device)
        oracle = Oracle.of(problem)
        for choice in choices:
            for return_lse in (False, True):
                with pinned(query_major=choice):
                    result, _ = OURS[OF[case.source]].run_counted(problem, return_lse)
                assert_parity(result, oracle, f"{case.id} {choice}")
                calls += 1
    for case in (cases[3], cases[6], dataclasses.replace(cases[6], H=16), dataclasses.replace(cases[6], S_kv=1000)):
        oracle = Oracle.of(case.make(device))
        for name in ("key_major", "key_major_ranges", "union"):
            if OURS[name].supports(case) is None:
                assert_parity(OURS[name].run_counted(oracle.problem, True)[0], oracle, f"{case.id} {name}")
                calls += 1
        calls += _gradients(case, device)
    return calls + _small_blocks(device) + _caches(device)


def _small_blocks(device: torch.device) -> int:
    """Check rows of many small blocks: single rows, splits, unions, and gradients. Returns the number of calls."""
    case = Case(3, 64, 64, 264, 60, "prefill", "bf16", HKV=2, S=30, S_kv=333, block_size=4, n=66, shared=0.75)
    oracle = Oracle.of(case.make(device))
    unions = SmallBlocks(worth=ALWAYS, least=0)
    choices = (None, SmallBlocks(rows=0), SmallBlocks(splits=3, rows=0), unions, unions._replace(union_splits=2))
    for choice in choices:
        with pinned(small_blocks=choice):
            result, _ = OURS["small_blocks"].run_counted(oracle.problem, True)
        assert_parity(result, oracle, f"{case.id} {choice}")
    return len(choices) + _gradients(case, device)


def _caches(device: torch.device) -> int:
    """Check calls over caches with lengths beyond their size and missing pages, also in e4m3, where the GPU has it.

    Each call is made twice, the second time with packed queries: 7 of the first sequence, none of the second, 6 of the
    third, and 2 of no sequence. Returns the number of calls.
    """
    calls = 0
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 5, 8, 64, generator=g).to(device, torch.bfloat16)
    blocks = torch.randint(-2, 12, (3, 5, 2, 6), generator=g).to(device, torch.int32)
    ends = torch.tensor([0, 7, 7, 13], dtype=torch.int32, device=device)
    e4m3 = (False, True) if why_not_e4m3(device) is None else (False,)
    for page, quantize in itertools.product((None, 16, 64), e4m3):
        cache = caches.draw([203, 0, 999], 256, page, D=64, Dv=64, dtype=torch.bfloat16, device=device)
        if cache.block_table is not None:
            cache.block_table[0, 1], cache.block_table[2, 0] = -1, 10**6
        cache = caches.quantized(cache) if quantize else cache
        for cu in (None, ends):
            queries, chosen = (q, blocks) if cu is None else (q.flatten(0, 1), blocks.flatten(0, 1))
            schedules = ("query_major", "key_major") if quantize else ("query_major", "key_major", "union")
            for schedule, size in (*((schedule, 32) for schedule in schedules), ("small_blocks", 16)):
                want, lse_want = caches.oracle(queries, cache, cu, block_indices=chosen, block_size=size)
                got, lse = nsa.selection_attention_with_kvcache(
                    queries, cache.k, cache.v, **cache.arguments, block_indices=chosen, block_size=size,
                    cu_seqlens_q=cu, backend="triton", schedule=schedule, return_lse=True,
                )  # fmt: skip
                torch.testing.assert_close(got.double(), want, rtol=0, atol=0.03)
                torch.testing.assert_close(lse.double(), lse_want, rtol=1e-4, atol=1e-3)
                calls += 1
    return calls


def _gradients(case: Case, device: torch.device) -> int:
    """Compute the gradients of one case and check them. Returns the number of calls."""
    from nsa.testing.clock.training import gradients, ours

    exact = GradientOracle.of(case.make(device))
    assert_gradients(gradients(ours(), exact.problem, exact.do), exact, f"{case.id} backward")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
