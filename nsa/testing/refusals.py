"""Why a run with some options is refused: it would do nothing, fail at its end, or pass without comparing anything."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.testing import options
from nsa.testing.machine import current_lane
from nsa.testing.options import STORAGE, spelled

NEEDS = {
    "nsa_strict": ("benchmark_compare", "nsa_against", "nsa_save_baseline", "nsa_recording"),
    "nsa_accept_drift": ("nsa_save_baseline", "nsa_recording", "benchmark_compare"),
    "nsa_accept_regression": ("nsa_save_baseline", "nsa_recording", "benchmark_compare"),
    "benchmark_compare_fail": ("benchmark_compare",),
}
"""Options that do nothing without one of others. An error tells the user to add the first of those."""
TYPED = {"nsa_against": "--nsa-against=HEAD", "benchmark_compare": "--benchmark-compare"}
"""Options as a user types them, where that is not `--option=VALUE`."""
SETTINGS = ("conftest.py", "pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""Files from which pytest takes options and plugins, if they lie in its rootdir."""


def check_values(config: pytest.Config) -> None:
    """Raise pytest.UsageError for an option whose value is empty or too small, or that does nothing without another.

    An unset variable in a script, as in `--nsa-against="$BASE"`, makes an empty value.
    """
    given = {name: value for name, value in vars(config.option).items() if name.startswith(("nsa_", "benchmark_"))}
    given.pop("benchmark_netrc", None)  # its default is empty
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if any(x == Path("") or (isinstance(x, str) and not x.strip()) for x in values):
            typed = TYPED.get(name, f"{spelled(name)}=VALUE")
            raise pytest.UsageError(f"{spelled(name)}: its value is empty: type {typed}, or leave the option out")
    for name, least in options.SMALLEST.items():
        if given.get(name, least) < least:
            raise pytest.UsageError(f"{spelled(name)}: expected a number of at least {least}, got {given[name]}")
    for name, others in NEEDS.items():
        if given.get(name) and not any(map(given.get, others)):
            needed = " or ".join(spelled(other) for other in others if other in given and other != "nsa_recording")
            raise pytest.UsageError(f"{spelled(name)} needs {needed}: add it, or leave out {spelled(name)}")


def check_paths(config: pytest.Config) -> None:
    """Raise pytest.UsageError if pytest took the value of an option for a path of tests, and so another rootdir.

    pytest chooses its rootdir before it knows the options of plugins. A word after such an option, if it is a file
    that exists, counts as one of the paths whose common folder is the rootdir.
    """
    here, words = config.invocation_params.dir, list(map(str, config.invocation_params.args))
    if config.rootpath == here or (config.inipath is not None and config.rootpath in here.parents):
        return
    if config.option.rootdir:  # chosen by the user
        return
    ignored = next((name for name in SETTINGS if (here / name).is_file()), None)
    for option, value in zip(words, words[1:], strict=False):
        ours = option.startswith(("--nsa-", "--benchmark-")) and option != STORAGE and "=" not in option
        path = Path(os.path.abspath(here / value))
        chosen = config.rootpath in (path, *path.parents)  # else another path of tests, or -c, chose the rootdir
        if ignored and ours and chosen and value not in config.args and path.exists():
            raise pytest.UsageError(
                f"{option} {value}: pytest takes {value} for a path of tests, and so does not read {here / ignored}: "
                f"write {option}={value}"
            )


def check(config: pytest.Config) -> None:
    """Raise pytest.UsageError at once for options with which the run could only fail at its end."""
    try:
        options.shapes(config)
        if config.getoption("nsa_workload", None):
            from nsa.testing.workloads.file import find, read

            read(find(config.getoption("nsa_workload")))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    alone = [name for name in (*options.ALONE, "nsa_shape") if config.getoption(name, None)]
    if len(alone) > 1:
        raise pytest.UsageError(f"{spelled(alone[0])} times its own cases alone: leave out {spelled(alone[1])}")
    asked = [spelled(name) for name in options.WRITES if config.getoption(name)]
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
    if options.by_hand(config):
        raise pytest.UsageError(f"{option} needs its own cases: leave out --nsa-shape")


def without_benchmarks(config: pytest.Config, option: str) -> str | None:
    """Why this run has no benchmarks, which `option` needs; None if it has."""
    given = config.getoption
    if given("dist", "no") != "no" or given("numprocesses", None) or hasattr(config, "workerinput"):
        return f"{option} needs benchmarks, and under xdist there are none: leave out -n"
    if given("benchmark_disable", False) and not given("benchmark_enable", False):
        return f"{option} needs benchmarks: leave out --benchmark-disable"
    return None


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
    names = ("nsa_full", *options.BY_HAND, "nsa_update_thresholds", "nsa_regret")
    others = {name: "" for name in names if config.getoption(name)}
    for name, how in (others | dict.fromkeys(options.sampled_otherwise(config), ", sampled by default")).items():
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
    if not options.has_benchmarks(config):
        return "pytest-benchmark is switched off"
    first = "--nsa-against" if option.nsa_against else "--nsa-save-baseline"
    typed = [*map(str, config.invocation_params.args), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    if option.nsa_against and not any(word.partition("=")[0] == first for word in typed):
        return f"{first}: type it on the command line, not in addopts or in an @file, which the processes read, too"
    each = {"--benchmark-json": option.benchmark_json}
    if option.nsa_against:
        each |= {"--junitxml": option.xmlpath} | {spelled(name): getattr(option, name) for name in options.WRITES}
        each |= {"--benchmark-compare": option.benchmark_compare, "--nsa-save-baseline": option.nsa_save_baseline}
    given = next((name for name, value in each.items() if value), None)
    if given is not None:
        return f"{first} starts several processes, and {given} is for one process: leave out {given}"
    return refused(config)
