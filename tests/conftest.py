"""What all tests of this checkout share: an environment of which no outcome depends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

# Of make, git, a pytest that started this run, Python, locale and terminal. PYTHONPATH stays: torch may lie there.
# PYTEST_CURRENT_TEST and PYTEST_VERSION stay too: pytest itself sets and removes them.
FOREIGN = re.compile(
    r"MAKE.*|MFLAGS|GNUMAKEFLAGS|WORKERS|BASE|GIT_.*|PYTEST_(?!CURRENT_TEST$|VERSION$).*|PYTHON(?!PATH$).*|PY_COLORS|NO_COLOR"
    r"|FORCE_COLOR|CLICOLOR.*|LANG|LANGUAGE|LC_.*|COLUMNS|LINES|CI|BUILD_NUMBER"
)
# The size that a pipe has; the one locale that is everywhere; git without the user's settings, on a folder of any
# owner, as a container may have mounted it.
OURS = {
    "COLUMNS": "80", "LINES": "24", "LC_ALL": "C.UTF-8", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
}  # fmt: skip


def cleaned(environment: Mapping[str, str], home: Callable[[], Path]) -> dict[str, str]:
    """An environment without what is other programs'. `home` makes a folder for HOME if there is no usable one."""
    kept = {name: value for name, value in environment.items() if not FOREIGN.fullmatch(name)} | OURS
    if not os.access(kept.get("HOME", ""), os.W_OK):
        kept["HOME"] = str(home())
    return kept


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clean the environment of this process, which its children inherit."""
    before = dict(os.environ)
    clean = cleaned(before, lambda: tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for name in before.keys() - clean.keys():
            patch.delenv(name)
        for name in clean.items() - before.items():
            patch.setenv(*name)
        yield
