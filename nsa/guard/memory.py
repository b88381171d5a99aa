"""Remembers what child processes found out about kernels: in this process, and on disk for other processes of the user.

There is one small file per kind of call. It says whether its kernels work, or how they fail.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nsa import settings
from nsa.files import write_whole
from nsa.kernels.shared import sources

logger = logging.getLogger("nsa")


class Verdict(NamedTuple):
    """What a child process found out about the kernels of a call."""

    cause: str | None  # how they fail; None if they work
    lasting: bool  # whether the verdict is about the kernels; else it is about this moment or environment
    variants: tuple[dict[str, Any], ...] = ()  # what was compiled, if they work


known: dict[str, Verdict] = {}  # by `key_of` the call
admitted: set[str] = set()  # `key_of` the variants that may be compiled in this process
_told: set[str] = set()  # folders whose failed writes were logged


def forget() -> None:
    """Forget the verdicts of this process. Files stay."""
    known.clear()
    admitted.clear()


def key_of(what: dict[str, Any], device: torch.device) -> str:
    """A hash of a described call or variant, all kernel sources, versions and architecture. It names a call's file."""
    about = [compared(), sources.versions(device), what]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@functools.cache
def compared() -> str:
    """A hash of the kernels and of the code that judges them, without comments and docstrings."""
    package = sources.FOLDER.parent
    names = "guard/child.py", "guard/small.py", "plain/oracle.py", "plain/packed_sdpa.py", "plain/spans.py"
    judges = [package / name for name in names]
    return sources.hash_of([*sorted((package / "kernels").rglob("*.py")), *judges])


def read(key: str) -> Verdict | None:
    """The verdict on disk, or None if there is no readable one."""
    found = _file(key)
    return None if found is None else Verdict(found["cause"], True, tuple(found.get("variants", ())))


def _file(key: str) -> dict[str, Any] | None:
    folder = settings.user_probes()
    try:
        found = None if folder is None else json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("what"), dict):
        return None
    return found if isinstance(found.get("cause", 0), str | None) else None


def refused(device: torch.device) -> list[tuple[str, str]]:
    """`(kernel, cause)` of the broken variants on disk that match the sources, versions and GPU of this process."""
    folder = settings.user_probes()
    paths = () if folder is None else folder.glob("*.json")
    files = [found for path in paths if (found := _file(path.stem)) is not None and found["cause"] is not None]
    return sorted({(x["what"]["kernel"], x["cause"]) for x in files if key_of(x["what"], device) == x["key"]})


def write(key: str, cause: str | None, what: dict[str, Any], variants: Sequence[dict[str, Any]] = ()) -> None:
    """Write a lasting verdict to disk. If that fails, other processes ask a child of their own."""
    folder, why = settings.user_probes(), "no home directory"
    about = {"key": key, "cause": cause, "date": time.strftime("%Y-%m-%d"), "what": what, "variants": variants}
    text = json.dumps(about, indent=1)
    try:
        if folder is not None:
            return write_whole(folder / f"{key}.json", text)
    except OSError as error:
        why = str(error)
    if str(folder) not in _told:
        _told.add(str(folder))
        logger.debug("the results of trying kernels are not kept for other processes: %s", why)
