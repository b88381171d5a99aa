"""The options of a perf run (those of the gate are in `gate/hooks.py`), and why runs with some of them are refused."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path
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


def add_flags(group: Any, texts: dict[str, str]) -> None:
    """Add options without a value, each with its help text."""
    for name, text in texts.items():
        group.addoption(name, action="store_true", help=text)


def add_options(group: Any) -> None:
    """Add the options of this module."""
    group.addoption(
        "--nsa-shape",
        action="append",
        metavar="SHAPE",
        help="benchmark only these shapes: N=1024,H=8,D=128,Dv=128,L=64:1024 (powers of two), N=64,256,H=8 (a list), "
        "dtype=fp16; names that are left out have defaults (repeatable)",
    )
    regret = "benchmark only auto, on N drawn shapes, beside all schedules and peers; --nsa-seed: of the first"
    group.addoption("--nsa-regret", type=int, default=0, metavar="N", help=regret)
    workload = "benchmark only this workload: a file, or one of nsa/testing/workloads by name"
    group.addoption("--nsa-workload", metavar="NAME|PATH", help=workload)
    dists = "distributions of spans for --nsa-shape: few, many, mixed or a list (default: many)"
    group.addoption("--nsa-dist", metavar="DIST,…", help=dists)
    csv = "write the results of --nsa-shape as CSV, the original script's columns first"
    group.addoption("--nsa-csv", metavar="FILE", help=csv)
    group.addoption("--nsa-report", metavar="DIR", help="write report.md, report.csv and report.html to this folder")
    file = "nsa/configs/gpus/<gpu>.yaml (GPU only)"
    flags = {
        "--nsa-decode": "time the shapes of --nsa-shape also as decode steps",
        "--nsa-update-thresholds": f"also measure the threshold, and write it to {file}",
        "--nsa-sweep": f"instead of the benchmarks, try tiles and write them to {file}",
    }
    add_flags(group, flags)


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


def sampling_again(config: pytest.Config) -> str:
    """The command-line options with which another run is sampled and checked as this one; empty by default."""
    options = [f" {spelled(name)} {number}" for name, number in sampled_otherwise(config).items()]
    options += [f" {spelled(name)}" for name in ("nsa_full", "nsa_hot", "nsa_no_check") if config.getoption(name)]
    return "".join(options)


def by_hand_again(config: pytest.Config) -> str:
    """The command-line options with which another run has the same shapes by hand; empty without such shapes."""
    if not by_hand(config):
        return ""
    words = [word for shape in config.getoption("nsa_shape") or [DEFAULT_SHAPE] for word in ("--nsa-shape", shape)]
    words += ["--nsa-dist", config.getoption("nsa_dist")] if config.getoption("nsa_dist") else []
    words += ["--nsa-decode"] if config.getoption("nsa_decode") else []
    return f" {shlex.join(words)}"


def without_benchmarks(config: pytest.Config, option: str) -> str | None:
    """Why this run has no benchmarks, which `option` needs; None if it has."""
    given = config.getoption
    if given("dist", "no") != "no" or given("numprocesses", None) or hasattr(config, "workerinput"):
        return f"{option} needs benchmarks, and under xdist there are none: leave out -n"
    if given("benchmark_disable", False) and not given("benchmark_enable", False):
        return f"{option} needs benchmarks: leave out --benchmark-disable"
    return None


NEEDS = {
    "nsa_strict": ("benchmark_compare", "nsa_against", "nsa_save_baseline", "nsa_recording"),
    "nsa_accept_drift": ("nsa_save_baseline", "nsa_recording", "benchmark_compare"),
    "nsa_accept_regression": ("nsa_save_baseline", "nsa_recording", "benchmark_compare"),
    "benchmark_compare_fail": ("benchmark_compare",),
}
"""Options that do nothing without one of others. An error tells the user to add the first of those."""
TYPED = {"nsa_against": "--nsa-against=HEAD", "benchmark_compare": "--benchmark-compare"}
"""Options as a user types them, where that is not `--option=VALUE`."""


def check_values(config: pytest.Config) -> None:
    """Raise pytest.UsageError for an option that would do nothing: its value is empty, or it needs another option.

    An unset variable in a script, as in `--nsa-against="$BASE"`, makes an empty value.
    """
    given = {name: value for name, value in vars(config.option).items() if name.startswith(("nsa_", "benchmark_"))}
    given.pop("benchmark_netrc", None)  # its default is empty
    for name, value in given.items():
        if any(map(_empty, value if isinstance(value, list) else [value])):
            typed = TYPED.get(name, f"{spelled(name)}=VALUE")
            raise pytest.UsageError(f"{spelled(name)}: its value is empty: type {typed}, or leave the option out")
    for name, others in NEEDS.items():
        if given.get(name) and not any(map(given.get, others)):
            needed = " or ".join(spelled(other) for other in others if other in given and other != "nsa_recording")
            raise pytest.UsageError(f"{spelled(name)} needs {needed}: add it, or leave out {spelled(name)}")


def _empty(value: object) -> bool:
    return (isinstance(value, str) and not value.strip()) or value == Path("")


def check(config: pytest.Config) -> None:
    """Raise pytest.UsageError at once for options with which the run could only fail at its end."""
    try:
        shapes(config)
        if config.getoption("nsa_workload", None):
            from nsa.testing.workloads.file import find, read

            read(find(config.getoption("nsa_workload")))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    alone = [name for name in (*ALONE, "nsa_shape") if config.getoption(name, None)]
    if len(alone) > 1:
        raise pytest.UsageError(f"{spelled(alone[0])} times its own cases alone: leave out {spelled(alone[1])}")
    asked = [spelled(name) for name in WRITES if config.getoption(name)]
    if not asked:
        return
    if (reason := without_benchmarks(config, asked[0])) is not None:
        raise pytest.UsageError(reason)
    for option in asked:
        if option not in ("--nsa-csv", "--nsa-report"):
            _check_own_cases(config, option)
    if {"--nsa-update-thresholds", "--nsa-sweep"} <= set(asked):
        raise pytest.UsageError(
            "--nsa-sweep changes tiles, on which thresholds depend: leave out --nsa-update-thresholds"
        )
    if "--nsa-sweep" in asked and config.getoption("benchmark_compare", None):
        raise pytest.UsageError("--nsa-sweep runs no benchmark of a baseline: leave out --benchmark-compare")
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if "--nsa-report" in asked and missing:
        raise pytest.UsageError(f"--nsa-report needs {' and '.join(missing)}: pip install 'nsa[report]'")
    for name in ("csv", "report"):
        value = config.getoption(f"nsa_{name}")
        if value and not Path(value).absolute().parent.is_dir():
            raise pytest.UsageError(f"--nsa-{name}={value}: there is no folder {Path(value).absolute().parent}")


def _check_own_cases(config: pytest.Config, option: str) -> None:
    """Raise pytest.UsageError unless this run is on a GPU, with cold buffers, checked results and its own cases."""
    if current_lane() != "gpu" and not config.option.collectonly:
        raise pytest.UsageError(f"{option} needs an NVIDIA GPU: Triton is not timed on a CPU")
    wrong = [name for name in ("nsa_hot", "nsa_no_check") if config.getoption(name, False)]
    if wrong:
        raise pytest.UsageError(f"{option} needs cold, checked measurements: leave out {spelled(wrong[0])}")
    if by_hand(config):
        raise pytest.UsageError(f"{option} needs its own cases: leave out --nsa-shape")


# --- runs that are compared or recorded ------------------------------------------------------------------------------


def refused(config: pytest.Config) -> str | None:
    """Why a run with these options would pass without comparing or recording anything; None if it would not.

    For instance, pytest-benchmark disables itself under xdist, and only warns.
    """
    option = config.option
    names = ("benchmark_compare", "benchmark_compare_fail", "benchmark_save", "benchmark_autosave")
    asked = [name for name in (*names, "nsa_save_baseline", "nsa_recording", "nsa_against") if getattr(option, name)]
    if not asked:
        return None
    first, folder = spelled(asked[0]), option.benchmark_storage
    if (reason := without_benchmarks(config, first)) is not None:
        return reason
    if option.benchmark_skip and not option.benchmark_only:
        return f"{first} needs benchmarks: leave out --benchmark-skip"
    baseline = option.nsa_save_baseline or option.nsa_recording
    if not option.benchmark_compare and not baseline and not option.nsa_against:
        return None
    if not baseline and config.inipath is None and STORAGE in map(str, config.invocation_params.args):
        return f"{STORAGE} {folder}: pytest takes the folder for a path of tests: write {STORAGE}={folder}"
    if (swallowed := _swallowed(config, option.benchmark_compare)) is not None:
        return swallowed
    rules = (
        (option.nsa_hot, "gated and recorded times are of cold buffers: leave out --nsa-hot"),
        (option.nsa_no_check, "gated and recorded benchmarks are checked first: leave out --nsa-no-check"),
        (baseline and option.nsa_sweep, "a sweep is no baseline: leave out --nsa-sweep"),
        (len(set(option.nsa_impl)) > 1, "a baseline is of one contestant: leave out all but one --nsa-impl"),
        *_not_of_core(config, baseline),
    )
    return next((f"{first}: {text}" for wrong, text in rules if wrong), None)


def _not_of_core(config: pytest.Config, baseline: bool) -> Iterator[tuple[bool, str]]:
    """A rule for each option with which a run has other benchmarks than core, or samples them otherwise."""
    names = ("nsa_full", *BY_HAND, "nsa_update_thresholds", "nsa_regret")
    others = {name: "" for name in names if config.getoption(name)}
    for name, how in (others | dict.fromkeys(sampled_otherwise(config), ", sampled by default")).items():
        text = f"a baseline is of core{how}: leave out {spelled(name)} (--benchmark-json keeps everything)"
        yield baseline, text


def _swallowed(config: pytest.Config, value: object) -> str | None:
    """An error text if the value of `--benchmark-compare` is a path of tests; None if it is a stored run.

    pytest-benchmark takes the word after the option for the stored run to compare with. If that word is a path of
    tests, pytest does not run those tests, and nothing is compared.
    """
    if not isinstance(value, str):
        return None
    path = Path(config.invocation_params.dir, value.partition("::")[0])
    if not ("::" in value or path.is_dir() or path.suffix == ".py"):
        return None
    return (
        f"--benchmark-compare takes {value} for the stored run to compare with: write the path before the option, "
        f"pytest -m perf {value} --benchmark-compare"
    )


def refused_of_several(config: pytest.Config) -> str | None:
    """Why a run that starts several processes cannot have these options; None if it can."""
    option = config.option
    if not has_benchmarks(config):
        return "pytest-benchmark is switched off"
    first = "--nsa-against" if option.nsa_against else "--nsa-save-baseline"
    each = {"--benchmark-json": option.benchmark_json}
    if option.nsa_against:
        each |= {"--junitxml": option.xmlpath} | {spelled(name): getattr(option, name) for name in WRITES}
        each |= {"--benchmark-compare": option.benchmark_compare, "--nsa-save-baseline": option.nsa_save_baseline}
    given = next((name for name, value in each.items() if value), None)
    if given is not None:
        return f"{first} starts several processes, and {given} is for one process: leave out {given}"
    return refused(config)
