"""What a compiled kernel comes from: the meaning of its source, Triton, the architecture and the driver."""

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


def kernel_files() -> list[Path]:
    """All files with a ``@triton.jit``: what kernels are compiled from."""
    return [path for path in sorted(FOLDER.rglob("*.py")) if "\n@triton.jit" in path.read_text(encoding="utf-8")]


@functools.cache
def kernel_sources() -> str:
    """A short hash of what our kernels mean, whatever file they are in. The compile matrix records it with what passed.

    Everything but imports and functions of the host counts: kernels read constants of their modules.
    """
    statements = [x for path in kernel_files() for x in ast.parse(path.read_bytes()).body if _is_compiled(x)]
    return hashlib.sha256("\n".join(sorted(map(_dump, statements))).encode()).hexdigest()[:12]


def _is_compiled(x: ast.stmt) -> bool:
    """Of a module's statements: whether a kernel may be compiled from it."""
    if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
        return any("jit" in ast.dump(decorator) for decorator in x.decorator_list)
    return not isinstance(x, (ast.Import, ast.ImportFrom)) and not _is_prose(x)


def hash_of(paths: Iterable[Path]) -> str:
    """Of what the files mean, in this order."""
    return hashlib.sha256("\n".join(meaning(path.read_bytes()) for path in paths).encode()).hexdigest()


def meaning(source: bytes) -> str:
    """The syntax tree of a file of Python as text, without comments, docstrings and layout."""
    return _dump(ast.parse(source))


def _dump(x: object) -> str:
    # Neither `ast.dump` nor `ast.unparse`: what they write differs between Python 3.10 and 3.14. A field that is None
    # or an empty list is left out, as newer versions add such fields (`type_params`) to the same code.
    if isinstance(x, list):
        return f"[{','.join(_dump(item) for item in x if not _is_prose(item))}]"
    if not isinstance(x, ast.AST):
        return ascii(x)
    if isinstance(x, ast.Constant):
        return f"Constant({x.value!a})"  # whose value may be None
    if isinstance(x, ast.JoinedStr):  # 3.12 has an empty string at the end of some
        x = ast.JoinedStr([y for y in x.values if not (isinstance(y, ast.Constant) and y.value == "")])
    fields = ((name, value) for name, value in ast.iter_fields(x) if value is not None and value != [])
    return f"{type(x).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields)})"


def _is_prose(x: object) -> bool:
    """Whether it is a statement that is nothing but a string: a docstring, of a function or below a constant."""
    return isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str)


def versions(device: torch.device) -> dict[str, Any]:
    """All but the source that decides what a kernel is compiled to, as JSON holds it."""
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
    """Of the Triton that is imported, whatever its package is called."""
    import triton

    return str(triton.__version__)


@functools.cache
def driver_version() -> int | None:
    """As CUDA counts, 12040 for 12.4; None where torch does not tell."""
    ask_driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask_driver is None else int(ask_driver())
