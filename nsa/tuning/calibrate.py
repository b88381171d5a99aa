"""`python -m nsa calibrate`: a short run that measures threshold and costs of a new GPU.

It checks parity on a few cases, and times each combination of the threshold once, the layouts of packed SDPA, and all
schedules on drawn shapes. It needs torch and Triton, but not pytest. It writes the user's own
file of this GPU, whose sections replace the package's measurements. It does not measure tiles (`--nsa-sweep`).
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa import gpu, settings
from nsa.plain.packed_sdpa import sdpa_rows
from nsa.routing import why_not_triton
from nsa.testing.clock.cuda import time_gpu
from nsa.testing.clock.measure import measure, run_facts
from nsa.testing.clock.timing import Timing
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.ours import OURS
from nsa.testing.contestants.sdpa import packed_layouts
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.report.recording import Fact
from nsa.tuning import costs, thresholds

# Only the larger N, where Triton's lead is smaller (H100, 2026-11-21: 13.6x at N = 1024, 18x at N = 64).
ROWS = (1024,)
PARITY = {
    "dense_group": Case(8, 128, 128, 200, 64, "few", "bf16"),
    "varlen_group": Case(4, 64, 64, 130, 64, "few", "fp16", source="varlen"),
    "ranges": Case(8, 128, 64, 300, 64, "mixed", "bf16"),
    "blocks": Case(16, 128, 128, 1024, 32, "decode", "bf16", HKV=4, S_kv=8192),
}
LAYOUT_SHAPES = [f"H8-D{D}-L{L}-N256" for D in (64, 128) for L in (256, 1024)]
BUDGET_S = 0.01  # seconds of samples for each implementation, which has at least ten samples
SHAPES = 160  # drawn shapes on which schedules are timed: about two minutes
COMMAND = "python -m nsa calibrate"


def layout_times(shape: str, masked: bool, device: torch.device, **sampling: Any) -> dict[str, Timing]:
    """Time packed SDPA's layouts as the fallback calls them; `shape` is one of `LAYOUT_SHAPES`.

    A layout that torch cannot run here is left out.
    """
    H, D, L, N = (int(word[1:]) for word in shape.split("-"))
    g = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(N, n, D, generator=g, device=device, dtype=torch.bfloat16) for n in (H, L, L)
    )  # [N, H, D], [N, L, D] twice
    mask = torch.arange(L, device=device).expand(N, L) < L - 1 if masked else None
    calls = {}
    for layout in gpu.SDPA_LAYOUTS:
        call = partial(sdpa_rows, q, k, v, mask, D**-0.5, layout)
        try:
            call()
        except RuntimeError:  # torch has no kernel for it
            continue
        calls[layout] = [call]
    return time_gpu(calls, **sampling)


def fast_layouts(device: torch.device) -> dict[str, Contestant]:
    """Two of the five SDPA layouts: the fastest on packed rows in all of core (H100), and one for older torch."""
    return {n: i for n, i in packed_layouts(device).items() if n in ("enable_gqa", "heads_as_queries_flash")}


def check_parity(device: torch.device) -> None:
    """Check one case per source. Raises AssertionError naming the kernel that is wrong, and where."""
    for name, case in PARITY.items():
        problem = case.make(device)
        assert_parity(OURS[name].run(problem, return_lse=True), Oracle.of(problem), name)


def time_thresholds(device: torch.device) -> list[Fact]:
    """The facts for a threshold over square dims. On packed rows two SDPA layouts are timed, not five."""
    layouts = fast_layouts(device)
    facts = []
    for case in thresholds.cases(thresholds.SQUARE, ROWS):
        others = [OURS[thresholds.REPLACED], *layouts.values()]
        result = measure(case.make(device), OURS["ranges"], others, iters=50, warmup=3, budget_s=BUDGET_S)
        facts.append(result.info(layouts, [thresholds.REPLACED]) | {"group": case.dist, "median": result.ours.median})
        _progress(f"{case.id}: {result.speedup(thresholds.REPLACED):.1f}x")
    for shape in LAYOUT_SHAPES:
        for masked in (False, True):
            times = layout_times(shape, masked, device, budget_s=BUDGET_S)
            facts.append({"layouts": {name: t.median for name, t in times.items()}, "masked": masked})
    return facts


def time_schedules(device: torch.device) -> list[costs.Row]:
    """The times of all schedules on drawn shapes.

    Raises:
        AssertionError: the results of two schedules differ, or `auto` cannot be timed.
        RuntimeError: a kernel does not run here.
    """
    from nsa.testing import regret

    rows = []
    for row in regret.rows(range(SHAPES), device):
        rows.append(row)
        _progress(f"{row['case']}: {row['best']}")
    return rows


def obstacle() -> str | None:
    """Why this machine cannot be calibrated, in one line; None if it can."""
    if settings.interpreter():
        return "TRITON_INTERPRET is set: Triton interprets kernels on the CPU, there is nothing to time"
    if not torch.cuda.is_available():
        return f"no usable NVIDIA GPU: torch {torch.__version__} finds none"
    return why_not_triton(torch.device("cuda", 0))


def main() -> int:
    """Calibrate the first visible GPU; returns the exit status."""
    reason = obstacle()
    try:
        _folder()  # before minutes of measuring
    except OSError as error:
        reason = reason or str(error)
    if reason is not None:
        print(f"nsa calibrate: {reason}", file=sys.stderr)
        return 1
    began, device = time.monotonic(), torch.device("cuda", 0)
    run = run_facts(device)
    for section, failed in ((_threshold, "nothing written"), (_schedules, "costs not written")):
        try:
            said = section(device, run)
        except (AssertionError, RuntimeError, ValueError, OSError) as error:
            _progress("")
            print(f"nsa calibrate: {failed}: {error}", file=sys.stderr)
            return 1
        _progress("")
        print(f"{said} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _threshold(device: torch.device, run: Fact) -> str:
    """Measure and write the section `threshold`. Returns the lines to print."""
    check_parity(device)
    facts, needed = time_thresholds(device), thresholds.required(thresholds.SQUARE)
    decision = thresholds.decide(facts, needed=needed)
    on_packed = thresholds.decide(facts, needed=needed, against="best")
    path = thresholds.write(decision, thresholds.best_layout(facts), run, _folder())
    lines = [f"parity: {len(PARITY)} kernels agree with the fp64 oracle", *thresholds.rationale(decision, on_packed)]
    return "\n".join([*lines, f"sel_triton_min_L = {thresholds.shown(decision.min_L)}, written to {path}"])


def _schedules(device: torch.device, run: Fact) -> str:
    """Measure and write the section `costs`. Returns the line to print."""
    return costs.write(time_schedules(device), _folder(), COMMAND)


def _folder() -> Path:
    folder = settings.user_gpus()
    if folder is None:
        raise OSError("expected a home directory, or the variable XDG_CONFIG_HOME, got neither")
    return folder


def _progress(text: str) -> None:
    """Show progress in one line that overwrites itself, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text[:78]:78}", end="" if text else "\r", file=sys.stderr, flush=True)
