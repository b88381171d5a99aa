"""Importing nsa imports no Triton, and a process without Triton's interpreter or a GPU has packed SDPA.

Each script runs in a process of its own, with every GPU hidden and the interpreter off. The process is a
fork of one that has imported torch and YAML.
"""

import ast
from pathlib import Path

import pytest

import nsa
from nsa import validate
from nsa.kernels import families
from nsa.kernels.shared import sequences, shape, spans

ROOT = Path(nsa.__file__).parents[1]


NO_TRITON = """
import sys
import torch
def loaded():
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("triton", "yaml"))
hidden = {name: sys.modules.pop(name) for name in loaded()}
import nsa, nsa.kernels, nsa.kernels.query_major.tiles, nsa.plain.packed_sdpa, nsa.legacy, nsa.ops
assert loaded() == []
assert not {"nsa.kernels.query_major.plan", "nsa.integrations"} & sys.modules.keys()
import nsa.integrations.vllm
assert loaded() == []
assert "vllm" not in sys.modules
sys.modules.update(hidden)

q, k = torch.randn(1, 3, 4, 16), torch.randn(1, 9, 2, 16)
ranges = torch.tensor([0, 5], dtype=torch.int32).expand(1, 3, 2, 1, 2)
o = nsa.selection_attention(q, k, k, ranges=ranges)
assert torch.equal(o, nsa.selection_attention(q, k, k, ranges=ranges, backend="sdpa"))
nsa.merge_ranges(ranges), nsa.pack_rows(k, k, ranges)
assert "triton" not in "".join(loaded()), loaded()
for record in nsa.routes():
    print(*record[:3], sep="|")
for call in (
    lambda: nsa.selection_attention(q, k, k, ranges=ranges, backend="triton"),
    lambda: nsa.sel_attn_fwd_dense(q[0], k[0, :3], k[0, :3]),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
assert "triton" not in "".join(loaded()), loaded()
"""


def test_without_gpu_and_interpreter(compiling):
    assert compiling(NO_TRITON).splitlines() == [
        "sdpa|Triton route needs a CUDA device, got cpu|1",
        "sdpa|backend='sdpa' asked for|1",
        "backend='triton': Triton route needs a CUDA device, got cpu",
        "Triton route needs a CUDA device, got cpu",
    ]


TRITON_MISSING = """
import sys
sys.stderr = sys.stdout
sys.modules["triton"] = None  # importing it raises ImportError
import torch, nsa, nsa.dispatch
nsa.routing.why_not_triton = lambda device: None  # as on a GPU
q, k = torch.randn(1, 3, 4, 16), torch.randn(1, 9, 2, 16)
ranges = torch.tensor([0, 5], dtype=torch.int32).expand(1, 3, 2, 1, 2)
with nsa.configure(sel_triton_min_L=0):
    for _ in range(2):
        nsa.selection_attention(q, k, k, ranges=ranges)
    try:
        nsa.selection_attention(q, k, k, ranges=ranges, backend="triton")
    except ImportError as error:
        print(type(error).__name__)
for record in nsa.routes():
    print(*record[:3], sep="|")
"""


def test_without_triton_installed(compiling):
    """Where its wheels do not exist: said once, and packed SDPA."""
    said, named, record = compiling(TRITON_MISSING).splitlines()
    assert named == "ModuleNotFoundError"
    assert record.startswith("sdpa|query_major kernel failed: ModuleNotFoundError: import of triton")
    assert record.endswith("|2")
    assert said.endswith("sdpa serves this signature, and the kernel is tried again in 1 s")


@pytest.mark.parametrize("name", nsa.__all__)
def test_public_names_are_documented(name):
    assert getattr(nsa, name).__doc__


def imported(name, path, modules):
    """Modules of ours that a module imports when it is imported, those for annotations left out."""
    found = set()
    for node in ast.parse(path.read_text()).body:  # what stands under `if TYPE_CHECKING:` is deeper
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            whole = {f"{node.module}.{a.name}" for a in node.names}
            found |= whole & modules.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return (found & modules.keys()) - {name}


def test_no_module_imports_itself_through_others():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "nsa").rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    left = {name: imported(name, path, modules) for name, path in modules.items()}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, f"these import each other in a circle, or import one that does: {sorted(left)}"


def below(*parts):
    """Modules of a package, its own file left out."""
    return [path for path in (ROOT / "nsa" / Path(*parts)).rglob("*.py") if path.name != "__init__.py"]


def all_imports(path):
    """What a file imports, in functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def test_shared_is_the_ground():
    """What all families stand on knows none of them, nor the guard; and the guard knows neither tuning nor testing."""
    for path in below("kernels", "shared"):
        for name in all_imports(path):
            assert not name.startswith("nsa.kernels.") or name.startswith("nsa.kernels.shared"), f"{path}: {name}"
            assert not name.startswith(("nsa.guard", "nsa.routing", "nsa.dispatch")), f"{path}: {name}"
    for path in (path for path in below() if not {"testing", "tuning"} & set(path.parts)):
        for name in all_imports(path):
            assert not name.startswith(("nsa.testing", "nsa.tuning")) or path.name == "__main__.py", f"{path}: {name}"


def test_routing_and_dispatch_name_no_family():
    """Only `families.py` does."""
    for file in ("routing.py", "dispatch.py", "backward.py"):
        path = ROOT / "nsa" / file
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not words & set(families.NAMES)
        assert not [x for x in all_imports(path) for family in families.NAMES if x.startswith(f"nsa.kernels.{family}")]


def test_schedules_of_families_are_the_public_ones():
    assert set(families.OF_SCHEDULE) == set(validate.SCHEDULES) - {"auto"}


def test_layouts_and_sources_are_those_of_the_kernels():
    """Kernels read constants of Triton, the host plain ints."""
    for name in "WHOLE RANGES BLOCKS TILED BATCH VARLEN PACKED CACHE RAGGED".split():
        assert getattr(shape, name) == getattr(spans if hasattr(spans, name) else sequences, name).value
