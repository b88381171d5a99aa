"""What `pip install` gives: the source distribution and the wheel made from it, and the wheel at work by itself.

They are built by the backend that `pyproject.toml` names, without pip: that would ask an index for setuptools.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import nsa
from nsa.kernels.shared import passed, sources

from ..conftest import bare

ROOT = Path(nsa.__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "nsa", "nsa_pytest.py")
ENTRY_POINTS = "[pytest11]\nnsa_pytest = nsa_pytest\n\n[vllm.general_plugins]\nnsa = nsa.integrations.vllm:plugin\n"
SETUPTOOLS = 77
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def is_data(name):
    return name.endswith((".yaml", ".j2", "/py.typed"))


def files():
    """What the package is in the tree: path -> bytes."""
    found = [path for path in (ROOT / "nsa").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in found}


def build(what, source, into):
    """Run a hook of the backend in the folder `source`; the path of what it wrote."""
    command = [sys.executable, "-c", BUILD.format(what), str(into)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=source, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What is in the sdist (path -> bytes), and the wheel made from it; of a copy: a build leaves folders behind."""
    try:
        release = int(metadata.version("setuptools").partition(".")[0])
    except metadata.PackageNotFoundError:
        release = 0
    if release < SETUPTOOLS and Path(sys.prefix) != ROOT / ".venv":  # where it is missing, `test` lost it
        pytest.skip(f"building needs setuptools {SETUPTOOLS} or newer, this interpreter has {release or 'none'}")
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, tree / part)
    with tarfile.open(build("build_sdist", tree, folder)) as archive:
        inside = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive if m.isfile()}
    for name, content in inside.items():
        path = folder / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return inside, build("build_wheel", folder / "unpacked", folder)


def test_sdist_and_wheel_carry_all_that_is_read_at_run_time(built):
    inside, wheel = built
    tree = files()
    read = {"nsa/configs/base.yaml", "nsa/configs/compiled.yaml", "nsa/testing/report/templates/report.md.j2"}
    assert read <= set(tree)
    assert any(name.startswith("nsa/testing/suite/parity/test_") for name in tree)
    with zipfile.ZipFile(wheel) as archive:
        installed = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    for found in (inside, installed):
        assert {name for name in found if name.startswith("nsa/") and is_data(name)} == set(filter(is_data, tree))
        assert {name: content for name, content in found.items() if name.startswith("nsa/")} == tree
    assert inside["nsa_pytest.py"] == installed["nsa_pytest.py"] == (ROOT / "nsa_pytest.py").read_bytes()
    assert installed[f"nsa-{nsa.__version__}.dist-info/entry_points.txt"].decode() == ENTRY_POINTS
    licenses = [content for name, content in installed.items() if name.endswith(".dist-info/licenses/LICENSE")]
    assert licenses == [inside["LICENSE"]] == [(ROOT / "LICENSE").read_bytes()]
    tops = {name.partition("/")[0] for name in installed}
    assert tops == {"nsa", "nsa_pytest.py", f"nsa-{nsa.__version__}.dist-info"}, "nothing else lands in site-packages"


def test_metadata(built):
    with zipfile.ZipFile(built[1]) as archive:
        said = email.message_from_bytes(archive.read(f"nsa-{nsa.__version__}.dist-info/METADATA"))
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("nsa", nsa.__version__, "Apache-2.0")
    assert said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()
    assert "Typing :: Typed" in said.get_all("Classifier")
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in needed} == {"torch", "triton", "PyYAML"}
    assert set(said.get_all("Provides-Extra")) == {"test", "report", "peers", "dev"}


# What is read lazily is read here; what pip made of the checkout itself (`-e`) is taken away first.
AT_WORK = """
import json, runpy, sys
checkout = sys.argv.pop(1)
sys.path[:] = [entry for entry in sys.path if entry != checkout]
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
import torch, nsa
from nsa import gpu
from nsa.kernels.shared import passed, sources
from nsa.testing.compile import budgets
found = {
    "measured": sorted({str(getattr(gpu.measured(gpu.STAND_IN), name).path) for name in gpu.SECTIONS}),
    "passed": sorted(map(list, passed.passed_pairs())), "sources": sources.kernel_sources(),
    "templates": str(budgets.PACKAGE / "testing" / "report" / "templates"),
}
q, k = torch.randn(1, 3, 4, 16), torch.randn(1, 9, 2, 16)
blocks = torch.zeros(1, 3, 2, 1, dtype=torch.int32)
found["shape"] = list(nsa.selection_attention(q, k, k, block_indices=blocks, block_size=4, causal=False).shape)
found["routes"] = [record.route for record in nsa.routes()]
print(json.dumps(found))
try:
    runpy.run_module("nsa", run_name="__main__", alter_sys=True)
finally:
    print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "nsa"]))
"""


def test_wheel_works_outside_the_checkout(run_pytest, built, tmp_path):
    """Files, a call, and `python -m nsa`."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    environment = bare(path=site, XDG_CONFIG_HOME=str(tmp_path / "config"))
    done = run_pytest.python("-c", AT_WORK, ROOT, cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    first, *doctor, last = done.stdout.splitlines()
    assert json.loads(first) == {
        "measured": [str(site / "nsa/configs/gpus/nvidia-h100-80gb-hbm3.yaml")],
        "passed": sorted(map(list, passed.passed_pairs())),
        "sources": sources.kernel_sources(),
        "templates": str(site / "nsa/testing/report/templates"),
        "shape": [1, 3, 4, 16],
        "routes": ["sdpa"],
    }
    assert doctor[0] == "GPU        none"
    assert f"nsa {nsa.__version__}, torch " in doctor[1]
    assert any(line.endswith(str(site / "nsa/configs/base.yaml")) for line in doctor)
    assert [path for path in json.loads(last) if not Path(path).is_relative_to(site)] == []
