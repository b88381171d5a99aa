"""Marks, warnings and file names of the suite's tests, in any project.

The tests in `nsa.testing.suite` run in projects whose settings we do not know. So this plugin registers their marks,
finds their files in the installed package, and makes their warnings errors. It does not affect other tests.
"""

from __future__ import annotations

import contextlib
import re
import types
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.config import parse_warning_filter

from nsa.testing.owned import SUITE, inside

FOLDERS = ("parity", "edge", "perf")
MARKS = (
    "parity: numbers against the fp64 oracle (set by the folder of that name)",
    "edge: semantics and errors at the edges (set by the folder of that name)",
    "perf: benchmarks (set by the folder of that name)",
    "aot: compiles kernels for GPUs that are not here (`-m aot`: the whole matrix, otherwise a quick part of it)",
    "gpu(capability=None, memory_gib=None): needs an NVIDIA GPU with at least that compute capability and memory",
)
EXEMPT = (
    "default::pytest_benchmark.logger.PytestBenchmarkWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    "ignore:Module already imported so cannot be rewritten; nsa:pytest.PytestAssertRewriteWarning",
)
"""Warnings that are not errors. `pyproject.toml` lists them for `tests/`, and says why."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for line in MARKS:
        config.addinivalue_line("markers", line)
    config.addinivalue_line("python_files", f"{SUITE}/*/test_*.py")  # for projects with another `python_files`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First, so that `-m` sees the marks."""
    ours = [item for item in items if inside(item.path)]
    mark_by_folder(ours, SUITE)
    strict = pytest.mark.filterwarnings("error", *EXEMPT, *_command_line(config))
    for item in ours:
        # The last mark wins. This mark comes first, so that a test or its module can override it.
        item.add_marker(strict, append=False)


def mark_by_folder(items: Iterable[pytest.Item], root: Path, folders: Collection[str] = FOLDERS) -> None:
    """Mark each test below `root` with those names of `folders` whose folders contain it."""
    for item in items:
        path = item.path.resolve()
        if path.is_relative_to(root.resolve()):
            for folder in set(folders) & set(path.relative_to(root.resolve()).parts[:-1]):
                item.add_marker(folder)


def _command_line(config: pytest.Config) -> list[str]:
    """The filters of `-W` as marks, in which the message is a regular expression."""
    filters = [text.split(":") for text in config.getoption("pythonwarnings") or ()]
    return [":".join([*fields[:1], *map(re.escape, fields[1:2]), *fields[2:]]) for fields in filters]


@contextlib.contextmanager
def _exempt() -> Iterator[None]:
    """Apply `EXEMPT` outside of tests, where the project's settings could turn these warnings into errors."""
    with warnings.catch_warnings():
        for text in EXEMPT:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with _exempt() if inside(collector.path) else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-benchmark's wrapper, which warns
def pytest_sessionfinish() -> Iterator[None]:
    with _exempt():
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)  # within pytest's own wrapper, which applies the project's settings
def pytest_terminal_summary() -> Iterator[None]:
    with _exempt():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Collect functions called test_*, also in projects with another `python_functions`."""
    if name.startswith("test_") and isinstance(obj, types.FunctionType) and inside(collector.path):
        obj.__test__ = True  # type: ignore[attr-defined]
