"""pytest's entry point of the suite that ships with `nsa`: registers `nsa.testing.plugin` in runs that use the suite.

pytest imports this module in every run of an environment that has `nsa`. So the module imports the standard library
alone, and does nothing unless an argument begins with `--nsa-` or names `nsa.testing.suite`.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ASKS = re.compile(r"--nsa-|.*\bnsa[./\\]testing[./\\]suite\b")
NEEDS = {"filelock": "filelock", "hypothesis": "hypothesis", "numpy": "numpy", "pytest_benchmark": "pytest-benchmark"}
"""Modules that the suite needs and the library does not, and the packages that contain them."""


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Runs before the project's own conftest.py, and after pytest has applied the setting `pythonpath`."""
    # pytest would rewrite the assertions of all packages of this distribution. The library's must stay as they are.
    getattr(early_config.pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("nsa")
    if not _asked(early_config, parser, args):
        return
    here = str(early_config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)  # `--nsa-impl mine:attend` imports `mine` from this folder, in xdist's workers too
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the project may make warnings errors, and importing torch warns
        _register(early_config)


def _asked(config: pytest.Config, parser: pytest.Parser, args: list[str]) -> bool:
    """Whether this run uses the suite. `args` also holds addopts and PYTEST_ADDOPTS.

    In xdist's workers `args` does not hold them. Some releases of xdist set the parent's options as attributes of a
    worker's `config.option`.
    """
    if any(name.startswith("nsa_") for name in vars(config.option)):
        return True
    words = args
    if any(word.startswith("@") for word in args):  # `@file` stands for the arguments in a file
        known, unknown = parser.parse_known_and_unknown_args(args, copy.copy(config.option))
        words = [*args, *unknown, *map(str, known.file_or_dir)]
    return any(ASKS.match(word) for word in words)


def _register(config: pytest.Config) -> None:
    """Register the plugin, which chooses the lane. Registering it a second time does nothing."""
    import pytest

    missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise pytest.UsageError(f"nsa.testing.suite needs {', '.join(missing)}: pip install 'nsa[test]'")
    _refuse_another_nsa(config)
    if importlib.util.find_spec("nsa.testing.lane") is None:
        return  # an older checkout's `nsa` comes first on sys.path, and its conftest.py registers the plugin
    config.pluginmanager.import_plugin("nsa.testing.plugin")


def _refuse_another_nsa(config: pytest.Config) -> None:
    """Raise pytest.UsageError if the project has a package `nsa` of its own, because only one of both is imported."""
    import pytest

    spec = importlib.util.find_spec("nsa")
    found = Path((spec and spec.origin) or "nowhere")
    folders = (config.rootpath, config.rootpath / "src")
    beside = [file for folder in folders for file in (folder / "nsa" / "__init__.py", folder / "nsa.py")]
    theirs = next((file for file in (found, *beside) if file.is_file() and not _is_ours(file)), None)
    if theirs is not None:
        raise pytest.UsageError(
            f"two packages are called nsa: the suite needs its own, this project has {theirs}, and `import nsa` finds "
            f"{found}: rename the project's, or run the suite in a folder outside of that project"
        )


def _is_ours(file: Path) -> bool:
    return (file.parent / "testing" / "plugin.py").is_file()
