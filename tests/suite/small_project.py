"""Small projects in which a test runs pytest with the suite's plugin, and what such a run says."""

import os
import re
import shlex
import shutil
import types
from pathlib import Path

import pytest

from nsa.testing import plugin
from nsa.testing.gate import hooks

ROOT = Path(plugin.__file__).parents[2]


def off_gpu(*folders, **more):
    """The environment of a run in the interpreter's lane, with `folders` and then this checkout on the import path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "NSA_COMMIT")}
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    return kept | {"PYTHONPATH": path, "NSA_TEST_TRITON_SEL": "0"} | more


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def lay_out(folder, files):
    """A rootdir with this repository's conftest.py and pyproject.toml, and these files."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    write(folder, files)


def configuration(folder, *arguments, **options):
    """What the gate's hooks read of a configuration: pytest with these arguments, in the rootdir `folder`."""
    params = types.SimpleNamespace(args=arguments, dir=folder)
    option = {"benchmark_storage": hooks.UPSTREAM_STORAGE, "nsa_impl": []} | options
    return types.SimpleNamespace(option=types.SimpleNamespace(**option), rootpath=folder, invocation_params=params)


class Session:
    """As much of a pytest session as the end of a run asks for. flags: options that are on."""

    def __init__(self, *flags, exitstatus=pytest.ExitCode.OK, **options):
        self.exitstatus, self.config = exitstatus, self
        self.options = dict.fromkeys(flags, True) | options

    def getoption(self, name, default=None):
        return self.options.get(name, default)


def outcome(done):
    """`{"passed": 4, …}`, as pytest counts at the end."""
    last = next((line for line in reversed(done.stdout.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|deselected|skipped)", last)}


def replayed(done, test):
    """pytest's arguments in the one line that says how to repeat a test."""
    start = "NSA_TEST_TRITON_SEL=0 pytest "
    [line] = [line for line in done.stdout.splitlines() if line.startswith(start) and test in line]
    return shlex.split(line.removeprefix(start))


def section(lines, title):
    """The lines under the heading `title`."""
    start = next(i for i, line in enumerate(lines) if f" {title} " in line and line.startswith("="))
    stop = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("=")), len(lines))
    return lines[start + 1 : stop]


def verdicts(done):
    """The section on contestants, its lines joined as they were before they were wrapped."""
    return "\n".join(section(done.stdout.splitlines(), "contestants")).replace("\n    ", " ")


def joined(lines):
    """Text as it was before it was wrapped."""
    return " ".join(line.strip() for line in lines)
