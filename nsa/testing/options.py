"""Every option of the suite, and what they say together. `refusals.py` checks them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from nsa.testing.machine import current_lane

WRITES = ("nsa_csv", "nsa_report", "nsa_update_thresholds", "nsa_sweep", "nsa_regret")
"""Options with which a run writes files, or times cases of its own on a GPU."""
ALONE = {"nsa_sweep": "test_sweep.py", "nsa_regret": "test_regret.py", "nsa_workload": "test_workload.py"}
"""Options with which a run times one file of benchmarks and no other."""
DEFAULT_SHAPE = "L=64:1024"
BY_HAND = ("nsa_shape", "nsa_dist", "nsa_decode", "nsa_csv")
STORAGE = "--benchmark-storage"
SAMPLING = {"nsa_iters": 50, "nsa_warmup": 5, "nsa_seed": 0, "nsa_streams": 1}
"""The default sampling. Baselines always have it."""
SMALLEST = {"nsa_iters": 1, "nsa_warmup": 0, "nsa_streams": 1, "nsa_regret": 0}
"""The smallest number that an option takes. A seed may be any."""


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _number(name: str, text: str) -> dict[str, Any]:
    default = SAMPLING[name]
    return {"type": int, "default": default, "metavar": "N", "help": f"{text} (default: {default})"}


_GPU_FILE = "nsa/configs/gpus/<gpu>.yaml (GPU only)"
OPTIONS: dict[str, dict[str, Any]] = {
    "--nsa-impl": {
        "action": "append", "default": [], "metavar": "MODULE:FUNCTION[@blocks|@dense]",
        "help": "test this kernel instead of ours: an adapter declared by nsa.testing.contestant, or a function called "
        "as f(q, k, v, *, ranges, causal, scale, return_lse=False); @blocks: with block_indices and block_size instead "
        "of ranges; @dense: f(Q, K, V) on packed rows (repeatable)",
    },
    "--nsa-iters": _number("nsa_iters", "samples per benchmark; at least 10 are taken"),
    "--nsa-warmup": _number("nsa_warmup", "warm-ups per benchmark"),
    "--nsa-seed": _number("nsa_seed", "number that is added to the seed of each case"),
    "--nsa-streams": _number("nsa_streams", "also time N calls at once, each on its own CUDA stream"),
    "--nsa-full": _flag("benchmark all cases of the matrix, not only the core ones that the gate compares"),
    "--nsa-hot": _flag("time on buffers in L2, not on cold, rotated ones"),
    "--nsa-no-check": _flag("time without checking results first; only impossible times are refused"),
    "--nsa-reproduce": {
        "metavar": "VERSION:BLOB",
        "help": "run the one selected Hypothesis test on the call that failed; the printed replay command contains it",
    },
    # Benchmarks that run alone, and files that a run writes.
    "--nsa-shape": {
        "action": "append", "metavar": "SHAPE",
        "help": "benchmark only these shapes: N=1024,H=8,D=128,Dv=128,L=64:1024 (powers of two), N=64,256,H=8 (a "
        "list), dtype=fp16; names that are left out have defaults (repeatable)",
    },
    "--nsa-regret": {
        "type": int, "default": 0, "metavar": "N",
        "help": "benchmark only auto, on N drawn shapes, beside all schedules and peers; --nsa-seed: of the first",
    },
    "--nsa-workload": {
        "metavar": "NAME|PATH",
        "help": "benchmark only this workload: a file, or one of nsa/testing/workloads by name",
    },
    "--nsa-dist": {
        "metavar": "DIST,…",
        "help": "distributions of spans for --nsa-shape: few, many, mixed or a list (default: many)",
    },
    "--nsa-csv": {
        "metavar": "FILE", "help": "write the results of --nsa-shape as CSV, the original script's columns first"
    },
    "--nsa-report": {"metavar": "DIR", "help": "write report.md, report.csv and report.html to this folder"},
    "--nsa-decode": _flag("time the shapes of --nsa-shape also as decode steps"),
    "--nsa-update-thresholds": _flag(f"also measure the threshold, and write it to {_GPU_FILE}"),
    "--nsa-sweep": _flag(f"instead of the benchmarks, try tiles and write them to {_GPU_FILE}"),
    # The gate.
    "--nsa-save-baseline": _flag(
        "run the perf session in three processes, and keep the results as the baseline of this device if all three pass"
    ),
    "--nsa-accept-regression": _flag("save a baseline even if a benchmark became slower"),
    "--nsa-strict": _flag("exit with status 1 also if a verdict is ambiguous or if nothing was gated"),
    "--nsa-against": {
        "metavar": "REF",
        "help": "run the perf session in this tree and in a git worktree of REF, in processes that take turns, and "
        "gate this tree against REF; needs no baseline",
    },
    "--nsa-accept-drift": {
        "action": "append", "default": [], "metavar": "BENCHMARK",
        "help": "let this benchmark be slower than its best recording, which it became in small steps (repeatable)",
    },
    "--nsa-recording": {"action": "store_true", "help": argparse.SUPPRESS},  # a process of --nsa-save-baseline
}  # fmt: skip


def add(parser: pytest.Parser) -> None:
    """Add every option of the suite."""
    group = parser.getgroup("nsa", "selection attention")
    for name, how in OPTIONS.items():
        group.addoption(name, **how)


def spelled(name: str) -> str:
    """An option as a user types it: `--nsa-iters` for `nsa_iters`."""
    return f"--{name.replace('_', '-')}"


def has_benchmarks(config: pytest.Config) -> bool:
    """Whether the plugin pytest-benchmark is active."""
    return hasattr(config.option, "benchmark_compare")


def by_hand(config: pytest.Config) -> bool:
    """Whether this run has shapes by hand, and so nothing else."""
    return any(config.getoption(name) for name in BY_HAND)


def shapes(config: pytest.Config) -> list[Any]:
    """The cases of the shapes by hand. Raises ValueError naming option and value."""
    from nsa.testing.shapes import parse_dists, shape_cases

    if not by_hand(config):
        return []
    dists = parse_dists(config.getoption("nsa_dist") or "many")
    dtype = "bf16" if current_lane() == "gpu" else "fp32"
    given = config.getoption("nsa_shape") or [DEFAULT_SHAPE]
    cases = [c for shape in given for c in shape_cases(shape, dists, config.getoption("nsa_decode"), dtype)]
    return list(dict.fromkeys(cases))


def sampled_otherwise(config: pytest.Config) -> dict[str, int]:
    """The options of this run that differ from `SAMPLING`."""
    return {name: config.getoption(name) for name, usual in SAMPLING.items() if config.getoption(name) != usual}
