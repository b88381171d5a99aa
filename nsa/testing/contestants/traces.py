"""Where in a contestant's own code an error was raised."""

from __future__ import annotations

import importlib
import os.path
import sysconfig
import traceback
from pathlib import Path

SUITE = str(Path(__file__).parents[1]) + os.sep
NSA = str(Path(__file__).parents[2]) + os.sep
CALLER = str(Path(__file__).with_name("named.py"))  # the file of the suite that imports and calls contestants
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
SHOWN = 8  # frames of a trace

Frames = list[traceback.FrameSummary]


def of(error: BaseException) -> Frames:
    """The frames of a contestant in an error's traceback, outermost first; none if the suite raised the error.

    They begin and end with lines that are neither Python's nor of an installed package. If the contestant itself is
    installed, the only frame is the line that the suite called.
    """
    frames = [x for x in traceback.extract_tb(error.__traceback__) if _is_shown(x)]
    below = max((i for i, x in enumerate(frames) if x.filename.startswith(SUITE)), default=-1)
    called = frames[below].filename == CALLER if below >= 0 else False
    frames = frames[below + 1 :]
    own = [i for i, x in enumerate(frames) if not x.filename.startswith((*INSTALLED, NSA))]
    return frames[own[0] : own[-1] + 1] if own else frames[:1] if called else []


def _is_shown(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith("<frozen") and frame.filename != importlib.__file__


def place(error: BaseException) -> str | None:
    """`file:line` of an error, relative to the current folder if it lies there; None if the suite raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(error.filename)}:{error.lineno}"
    frames = of(error)
    return f"{_relative(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def line_of_a_user(error: BaseException) -> str | None:
    """As `place`, also if the suite raised the error: the last line that is neither Python's, ours nor a package's."""
    shown = [x for x in traceback.extract_tb(error.__traceback__) if _is_shown(x)]
    own = [x for x in shown if not x.filename.startswith((*INSTALLED, NSA, "<"))]
    return f"{_relative(own[-1].filename)}:{own[-1].lineno}" if own else None


def said(error: BaseException) -> str:
    """What an error says in one line: its message, or the source of an `assert` without a message."""
    message = str(traceback.TracebackException(type(error), error, None))  # also if the error's own __str__ raises
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    frames = of(error)
    if not lines and frames:
        return frames[-1].line or ""
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))  # a compiler's last line says why


def text(error: BaseException) -> str:
    """The frames of a contestant, as pytest's `--tb=short` prints them, and what was raised."""
    lines = [f"{_relative(x.filename)}:{x.lineno}: in {x.name}\n    {x.line}" for x in of(error)[-SHOWN:]]
    return "\n".join([*lines, "".join(traceback.format_exception_only(error)).rstrip()])


def _relative(file: str) -> str:
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
