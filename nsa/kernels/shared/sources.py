"""What a compiled kernel depends on: the meaning of its source, Triton, the architecture and the driver."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nsa import settings

FOLDER = Path(__file__).parents[1]
UNSEEN: frozenset[str] = frozenset()
"""Families with which the GPU lane has not passed yet. `nsa.guard` tries their kernels first on every GPU. So the list
of what has passed the compile matrix does not cover them, and stays valid while they change."""


def kernel_files() -> list[Path]:
    """All files with a ``@triton.jit`` function, which kernels are compiled from, but those of `UNSEEN` families."""
    paths = [path for path in sorted(FOLDER.rglob("*.py")) if path.parent.name not in UNSEEN]
    return [path for path in paths if "\n@triton.jit" in path.read_text(encoding="utf-8")]


@functools.cache
def kernel_sources() -> str:
    """A short hash of the meaning of all kernels, which does not change when code moves between files.

    It covers jit functions and module constants, which kernels read, but neither imports nor functions of the host. The
    compile matrix records this hash.
    """
    statements = [x for path in kernel_files() for x in ast.parse(path.read_bytes()).body if _is_compiled(x)]
    return hashlib.sha256("\n".join(sorted(map(_dump, statements))).encode()).hexdigest()[:12]


def _is_compiled(x: ast.stmt) -> bool:
    """Whether a kernel may be compiled from this statement of a module."""
    if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
        return any("jit" in ast.dump(decorator) for decorator in x.decorator_list)
    return not isinstance(x, (ast.Import, ast.ImportFrom)) and not _is_prose(x)


@functools.cache
def functions(family: str) -> frozenset[str]:
    """Names of the Triton functions that the folder of a family defines."""
    paths = sorted((FOLDER / family).glob("*.py"))
    defined = (x for path in paths for x in ast.parse(path.read_bytes()).body if isinstance(x, ast.FunctionDef))
    return frozenset(x.name for x in defined if _is_compiled(x))


def hash_of(paths: Iterable[Path]) -> str:
    """A hash of the meaning of the files, in this order."""
    return hashlib.sha256("\n".join(meaning(path.read_bytes()) for path in paths).encode()).hexdigest()


def meaning(source: bytes) -> str:
    """The syntax tree of a Python file as text, without comments, docstrings and layout."""
    return _dump(ast.parse(source))


def _dump(x: object) -> str:
    # The results of `ast.dump` and `ast.unparse` differ between Python 3.10 and 3.14. Fields that are None or an empty
    # list are left out, because newer versions add such fields (`type_params`) to the same code.
    if isinstance(x, list):
        return f"[{','.join(_dump(item) for item in x if not _is_prose(item))}]"
    if not isinstance(x, ast.AST):
        return ascii(x)
    if isinstance(x, ast.Constant):
        return f"Constant({x.value!a})"  # a value of None counts
    if isinstance(x, ast.JoinedStr):  # Python 3.12 ends some with an empty string
        x = ast.JoinedStr([y for y in x.values if not (isinstance(y, ast.Constant) and y.value == "")])
    fields = ((name, value) for name, value in ast.iter_fields(x) if value is not None and value != [])
    return f"{type(x).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields)})"


def _is_prose(x: object) -> bool:
    """Whether a node is a docstring, of a function or below a constant: a statement that is only a string."""
    return isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str)


def versions(device: torch.device) -> dict[str, Any]:
    """All that decides what a kernel is compiled to, except its source; values that JSON can hold."""
    return {
        "torch": torch.__version__,
        "triton": triton_version(),
        "driver": driver_version() if device.type == "cuda" else None,
        "assemblers": settings.assemblers(),
        "arch": architecture(device),
    }


@functools.cache
def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942`, or `interpreter` on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def triton_version() -> str:
    """Version of the Triton that is imported, for packages of any name."""
    import triton

    return str(triton.__version__)


@functools.cache
def driver_version() -> int | None:
    """CUDA version of the driver, 12040 for 12.4; None where torch does not know it."""
    ask_driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask_driver is None else int(ask_driver())
