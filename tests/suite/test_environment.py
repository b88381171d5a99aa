"""No outcome depends on the environment in which pytest was started: children see a clean one."""

import json
import os
import subprocess
import sys

import pytest

from ..conftest import FOREIGN, OURS, cleaned

HOSTILE = {
    "MAKEFLAGS": "w -- PYTHON=python", "MAKELEVEL": "1", "MFLAGS": "-w", "PYTHON": "python", "BASE": "x", "LC_ALL": "C",
    "LANG": "de_DE", "COLUMNS": "40", "PYTHONOPTIMIZE": "1", "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error",
    "PYTEST_ADDOPTS": "-x", "PYTEST_PLUGINS": "none", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FORCE_COLOR": "1",
    "PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "2", "GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "index",
    "CI": "true", "HOME": "/nowhere", "OMP_NUM_THREADS": "64",
}  # fmt: skip


def test_a_hostile_environment_is_cleaned(tmp_path):
    kept = {"PATH": "/bin", "PYTHONPATH": "/torch", "NSA_CONFIG": "x", "TRITON_CACHE_DIR": "y"}
    assert cleaned(kept | HOSTILE, lambda: tmp_path) == kept | OURS | {"HOME": str(tmp_path)}
    assert cleaned(kept, lambda: tmp_path)["HOME"] == str(tmp_path)
    assert cleaned({"HOME": str(tmp_path)}, None)["HOME"] == str(tmp_path)


@pytest.mark.parametrize("how", ["started", "forked"])
def test_children_have_it(how, run_pytest, tmp_path):
    """Under make, in xdist's workers and inside another pytest, too."""
    program = "import json, os; print('|' + json.dumps(dict(os.environ)))"
    if how == "forked":
        (tmp_path / "test_a.py").write_text(f"{program.replace('; ', chr(10))}\ndef test_a():\n    pass\n")
        done = run_pytest("-s", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    else:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("|"))
    seen = json.loads(line[1:])
    assert {name: x for name, x in seen.items() if FOREIGN.fullmatch(name)} == {
        name: x for name, x in OURS.items() if FOREIGN.fullmatch(name)
    }
    assert OURS.items() <= seen.items()
    assert os.access(seen["HOME"], os.W_OK)
