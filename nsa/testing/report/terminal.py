"""The end of a perf run: pytest-benchmark's tables, made narrow, and our summary below them.

Only defaults of pytest-benchmark are replaced, through its options and its hook. Options that the user gives stay.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Generator
from typing import Any

import pytest

from nsa.testing import options
from nsa.testing.report import summary
from nsa.testing.report.recording import Fact

WIDTH = 120  # columns of pytest-benchmark's tables
COLUMNS = ["median", "iqr", "rounds"]
NAME = WIDTH - 65
"""Columns for a name. The other 65 hold figures up to 100,000, their ratios, rounds, and " (0091)" of a baseline."""
TITLE = WIDTH - 25  # columns for a table's title; pytest-benchmark needs the other 25

Table = tuple[str | None, list[dict[str, Any]]]  # a title, and benchmarks as pytest-benchmark shows them

published_key = pytest.StashKey[list[Fact]]()  # the facts that benchmarks of this run published
notes_key = pytest.StashKey[list[str]]()  # lines about the files that the run wrote
_short_key = pytest.StashKey[bool]()  # whether this module, and not the user, asked for short names


# --- pytest-benchmark's tables ---------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Prefer few columns and short names, and in a comparison an order in which new rows follow old ones.

    The options are set before `pytest_configure`, where pytest-benchmark reads them.
    """
    if not options.has_benchmarks(config):
        return
    option = config.option
    preferred: dict[str, tuple[Any, Any]] = {  # pytest-benchmark's default, and ours
        "benchmark_columns": (None, COLUMNS),
        "benchmark_name": ("normal", "short"),
    }
    if option.benchmark_compare:
        preferred["benchmark_sort"] = ("min", "name")
    replaced = []
    for name, (default, ours) in preferred.items():
        if getattr(option, name) == default and not given(config, options.spelled(name)):
            setattr(option, name, ours)
            replaced.append(name)
    config.stash[_short_key] = "benchmark_name" in replaced


def given(config: pytest.Config, option: str) -> bool:
    """Whether an option is on the command line, in `addopts` or in PYTEST_ADDOPTS, even with its default value."""
    addopts = [*config.getini("addopts"), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(word.partition("=")[0] == option for word in (*map(str, config.invocation_params.args), *addopts))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, list[Table], list[Table]]:
    tables = yield
    return [narrow(*table) for table in tables] if config.stash.get(_short_key, False) else tables


def narrow(title: str | None, benchmarks: list[dict[str, Any]]) -> Table:
    """Make a table narrow: if its names do not fit, words that all names share move to the table's title.

    `test_training[H1-D128-prefill-bf16-step]` and `test_training[H4-D128-prefill-bf16-step]` become `test_training[H1]`
    and `test_training[H4]` of `forward and backward: D128-prefill-bf16-step`. No word is lost.
    """
    names = {bench["name"]: _words(bench["name"]) for bench in benchmarks}
    if max(len(name.removeprefix("test_")) for name in names) <= NAME:
        return title, benchmarks
    shared = [word for word in next(iter(names.values())) if all(word in words for words in names.values())]
    said = [word for word in shared if word in re.findall(r"[^ ,:]+", title or "")]
    moved: list[str] = []
    for word in shared:
        if word not in said and len(_titled(title, [*moved, word])) <= TITLE:
            moved.append(word)
    short = {name: _named(name, [w for w in words if w not in (*moved, *said)]) for name, words in names.items()}
    return _titled(title, moved) or None, [bench | {"name": short[bench["name"]]} for bench in benchmarks]


def _words(name: str) -> list[str]:
    """The words of a test's parameters."""
    parameters = name.partition("[")[2].removesuffix("]")
    return parameters.split("-") if parameters else []


def _named(name: str, words: list[str]) -> str:
    """The test's name with only these words of its parameters."""
    return name.partition("[")[0] + (f"[{'-'.join(words)}]" if words else "")


def _titled(title: str | None, words: list[str]) -> str:
    return ": ".join(part for part in (title, "-".join(words)) if part)


# --- our summary -----------------------------------------------------------------------------------------------------


# `trylast`, so that the summary comes below pytest-benchmark's tables. Hooks with `trylast` run in the order in which
# their plugins were registered: `plugin` (replay commands, notes), then this one. The verdicts of the gate come last.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    published, notes = config.stash.get(published_key, []), config.stash.get(notes_key, [])
    if not published and not notes:
        return
    terminalreporter.section("selection attention: ratios of medians of this run")
    for line in [*summary.lines(published), *summary.fitted(notes)]:
        terminalreporter.write_line(line)
