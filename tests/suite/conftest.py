"""The suite's own tests: which part of the compile matrix a run compiles, and problems that count as large."""

from __future__ import annotations

import re

import pytest

from nsa.testing.matrix.case import Case


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem counts as large."""
    monkeypatch.setattr(Case, "large", property(lambda _: True))


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
