"""Which tests are the suite's own: those that ship in the package and, in a checkout, those in `tests/`.

Marks, skips, checks and settings of the suite apply to these tests alone.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

SUITE = Path(__file__).parent.resolve() / "suite"
_folders = pytest.StashKey[tuple[Path, ...]]()


def own(config: pytest.Config, folder: Path) -> None:
    """Count the tests in a folder as the suite's own, in this run."""
    config.stash[_folders] = (*folders(config), folder.resolve())


def folders(config: pytest.Config) -> tuple[Path, ...]:
    """The folders of the suite's own tests."""
    return config.stash.get(_folders, (SUITE,))


def is_ours(config: pytest.Config, path: Path) -> bool:
    """Whether a test file is one of the suite's own."""
    return inside(path, folders(config))


@functools.cache
def inside(path: Path, roots: tuple[Path, ...] = (SUITE,)) -> bool:
    """Whether a file is below one of the folders; by default, whether it ships in the package."""
    return any(path.resolve().is_relative_to(root) for root in roots)


@functools.cache
def module_of(path: Path) -> str | None:
    """The name of the module of a test that ships in the package; None for other tests."""
    if not inside(path):
        return None
    return ".".join(("nsa.testing.suite", *path.resolve().relative_to(SUITE).with_suffix("").parts))
