"""The suite's own tests: which part of the compile matrix a run compiles, and fixtures of several files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nsa.testing.contestants import peers
from nsa.testing.matrix.case import Case

from .small_project import ROOT, off_gpu


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem counts as large."""
    monkeypatch.setattr(Case, "large", property(lambda _: True))


@pytest.fixture(scope="session")
def drawn() -> None:
    """Reports can be made: the libraries of the extra `report` are there."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """`importable(name, **members)`: a module of that name can be imported. Which peers can be is looked up again."""

    def make(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    peers.installed.cache_clear()
    yield make
    peers.installed.cache_clear()


@pytest.fixture
def contest(run_pytest: Callable[..., Any]) -> Callable[..., Any]:
    """`contest(folder, names, *arguments)`: the shipped suite, off the GPU, on contestants in modules of the folder."""

    def run(folder: Path, names: Iterable[str], *arguments: str) -> Any:
        impls = [word for name in names for word in ("--nsa-impl", name)]
        chosen = ("--pyargs", "nsa.testing.suite", *impls, *arguments, "-q", "-p", "no:cacheprovider")
        return run_pytest(*chosen, cwd=ROOT, environment=off_gpu(folder))

    return run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The compile matrix is `full` where `-m` asks for aot, `quick` elsewhere; a test named by its id is left alone."""
    if any("::" in argument for argument in config.args):
        return
    unwanted = "quick" if re.search(r"(?<!not )\baot\b", config.option.markexpr) else "full"
    left_out = [item for item in items if _extent(item) == unwanted]
    if left_out:
        items[:] = [item for item in items if _extent(item) != unwanted]
        config.hook.pytest_deselected(items=left_out)


def _extent(item: pytest.Item) -> str | None:
    return item.callspec.params.get("extent") if hasattr(item, "callspec") else None
