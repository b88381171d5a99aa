"""What child processes found out about kernels: remembered in this process, and on disk for others of this user.

On disk there is one small file a variant: its kernel works, crashes, hangs, is wrong or cannot be compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from typing import Any, NamedTuple

import torch

from nsa import settings
from nsa.kernels import sources
from nsa.tuning.files import write_whole

logger = logging.getLogger("nsa")


class Verdict(NamedTuple):
    """What a child found out."""

    cause: str | None  # None: the kernel works
    lasting: bool  # it is about the kernel, not about this moment or this environment


known: dict[str, Verdict] = {}  # by key
_told: set[str] = set()  # folders that were said to be of no use


def forget() -> None:
    """Forget what this process found out; files stay."""
    known.clear()


def key_of(what: dict[str, Any], device: torch.device) -> str:
    """Of a kernel as described, its source, versions and architecture: the name of the file that remembers it."""
    versions = {
        "torch": torch.__version__,
        "triton": sources.triton_version(),
        "driver": sources.driver_version() if device.type == "cuda" else None,
        "assemblers": settings.assemblers(),
        "arch": sources.architecture(device),
    }
    return hashlib.sha256(json.dumps([compared(), versions, what], sort_keys=True).encode()).hexdigest()


@functools.cache
def compared() -> str:
    """A hash of what the kernels mean, and of the code that says whether they are right."""
    package = sources.FOLDER.parent
    judges = [package / name for name in ("guard/child.py", "guard/trials.py", "reference.py", "spans.py")]
    return sources.hash_of([*sorted(package.glob("kernels/*.py")), *judges])


def read(key: str) -> Verdict | None:
    """What is remembered on disk; None if nothing is, or nothing that makes sense."""
    found = _file(key)
    cause = found.get("cause", 0)
    return Verdict(cause, True) if found.get("key") == key and isinstance(cause, str | None) else None


def _file(key: str) -> dict[str, Any]:
    folder = settings.user_probes()
    try:
        found = None if folder is None else json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def refused(device: torch.device) -> list[tuple[str, str]]:
    """`(kernel, cause)` of what is remembered as broken, with the sources, versions and GPU of this process."""
    folder, found = settings.user_probes(), set()
    for path in folder.glob("*.json") if folder is not None else ():
        verdict, what = read(path.stem), _file(path.stem).get("what")
        if verdict is not None and verdict.cause is not None and isinstance(what, dict):
            if key_of(what, device) == path.stem:
                found.add((str(what.get("kernel")), verdict.cause))
    return sorted(found)


def write(key: str, cause: str | None, what: dict[str, Any]) -> None:
    """Remember for other processes. A folder that takes no files costs them a child each, nothing else."""
    folder = settings.user_probes()
    if folder is None:
        return _say_once("", "no home directory")
    text = json.dumps({"key": key, "cause": cause, "date": time.strftime("%Y-%m-%d"), "what": what}, indent=1)
    try:
        write_whole(folder / f"{key}.json", text)
    except OSError as error:
        _say_once(str(folder), str(error))


def _say_once(folder: str, why: str) -> None:
    if folder not in _told:
        _told.add(folder)
        logger.debug("what kernels were found to be is not kept for other processes: %s", why)
