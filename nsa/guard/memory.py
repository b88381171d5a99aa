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
from nsa.kernels.shared import sources
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
    about = [compared(), sources.versions(device), what]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@functools.cache
def compared() -> str:
    """A hash of what the kernels mean, and of the code that says whether they are right."""
    package = sources.FOLDER.parent
    judges = [package / name for name in ("guard/child.py", "guard/trials.py", "plain/oracle.py", "plain/spans.py")]
    return sources.hash_of([*sorted((package / "kernels").rglob("*.py")), *judges])


def read(key: str) -> Verdict | None:
    """What is remembered on disk; None if nothing is, or nothing that makes sense."""
    found = _file(key)
    return None if found is None else Verdict(found["cause"], True)


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
    """`(kernel, cause)` of what is remembered as broken, with the sources, versions and GPU of this process."""
    folder = settings.user_probes()
    paths = () if folder is None else folder.glob("*.json")
    files = [found for path in paths if (found := _file(path.stem)) is not None and found["cause"] is not None]
    return sorted({(x["what"]["kernel"], x["cause"]) for x in files if key_of(x["what"], device) == x["key"]})


def write(key: str, cause: str | None, what: dict[str, Any]) -> None:
    """Remember for other processes. A folder that takes no files costs them a child each, nothing else."""
    folder, why = settings.user_probes(), "no home directory"
    text = json.dumps({"key": key, "cause": cause, "date": time.strftime("%Y-%m-%d"), "what": what}, indent=1)
    try:
        if folder is not None:
            return write_whole(folder / f"{key}.json", text)
    except OSError as error:
        why = str(error)
    if str(folder) not in _told:
        _told.add(str(folder))
        logger.debug("what kernels were found to be is not kept for other processes: %s", why)
