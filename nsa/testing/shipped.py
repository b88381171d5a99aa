"""Marks, warnings and file names of the suite's tests, in any project.

The tests in `nsa.testing.suite` run in projects whose settings we do not know. So this plugin registers their marks and
finds their files in the installed package. Within the functions of the suite's own tests and fixtures, those of a
checkout included, warnings are errors. It does not affect other tests, nor other plugins in their hooks, as the setting
`filterwarnings` would.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import parse_warning_filter

from nsa.testing.owned import SUITE, folders, inside, is_ours

FOLDERS = ("parity", "edge", "perf", "suite")  # `suite` is in a checkout only
MARKS = (
    "parity: numbers against the fp64 oracle (set by the folder of that name)",
    "edge: semantics and errors at the edges (set by the folder of that name)",
    "perf: benchmarks (set by the folder of that name)",
    "aot: compiles kernels for GPUs that are not here (`-m aot`: the whole matrix, otherwise a quick part of it)",
    "gpu(capability=None, memory_gib=None): needs an NVIDIA GPU with at least that compute capability and memory",
)
EXEMPT = (
    # A benchmark run says by warnings what it could not compare or save. As errors they end pytest from inside.
    "default::pytest_benchmark.logger.PytestBenchmarkWarning",
    "ignore:Benchmark fixture was not used at all",  # in a test that failed or was skipped before
    # torch 2.11 deprecates what its own compiler still imports.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",  # in a thread of autograd
)
"""Warnings that are not errors."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for line in MARKS:
        config.addinivalue_line("markers", line)
    config.addinivalue_line("python_files", f"{SUITE}/*/test_*.py")  # for projects with another `python_files`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test of ours with those of `FOLDERS` that contain it. First, so that `-m` sees the marks."""
    for root, item in itertools.product(folders(config), items):
        path = item.path.resolve()
        if path.is_relative_to(root):
            for folder in set(FOLDERS) & set(path.relative_to(root).parts[:-1]):
                item.add_marker(folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m perf`, import none of the tests that it leaves out, and so for the other folders."""
    wanted = config.option.markexpr.strip()
    if wanted not in FOLDERS or wanted == collection_path.name or collection_path.name not in FOLDERS:
        return None
    return True if collection_path.parent.resolve() in folders(config) else None


@contextlib.contextmanager
def _filtered(*filters: str) -> Iterator[None]:
    """Apply filters, whose messages are regular expressions."""
    with warnings.catch_warnings():
        for text in filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        yield


def _strict(node: pytest.Item | pytest.Collector) -> contextlib.AbstractContextManager[None]:
    """Makes warnings errors. Marks of a test or its module win over that, and `-W` wins over both."""
    marked = [text for mark in node.iter_markers("filterwarnings") for text in mark.args]
    given = [text.split(":") for text in node.config.getoption("pythonwarnings") or ()]
    escaped = [":".join([*fields[:1], *map(re.escape, fields[1:2]), *fields[2:]]) for fields in given]
    return _filtered("error", *EXEMPT, *marked, *escaped)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    ours = isinstance(collector, pytest.File) and is_ours(collector.config, collector.path)
    with _strict(collector) if ours else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)  # within the wrappers of other plugins
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    with _strict(pyfuncitem) if is_ours(pyfuncitem.config, pyfuncitem.path) else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    item, code = request._pyfuncitem, getattr(fixturedef.func, "__code__", None)
    file = Path(code.co_filename if code else "nowhere")
    ours = is_ours(item.config, item.path) and inside(file, (SUITE.parent, *folders(item.config)))
    with _strict(item) if ours else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-benchmark's wrapper, which warns
def pytest_sessionfinish() -> Iterator[None]:
    with _filtered(*EXEMPT):  # the project's settings may make these warnings errors
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)  # within pytest's own wrapper, which applies the project's settings
def pytest_terminal_summary() -> Iterator[None]:
    with _filtered(*EXEMPT):  # the project's settings may make these warnings errors
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Collect functions called test_*, also in projects with another `python_functions`."""
    if name.startswith("test_") and isinstance(obj, types.FunctionType) and inside(collector.path):
        obj.__test__ = True  # type: ignore[attr-defined]
