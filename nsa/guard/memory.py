"""Remembers what child processes say of kernels, in this process, and on disk for other processes of the user.

There is one small file per kind of call. It says whether its kernels work, or how they fail.
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
from nsa.files import write_whole
from nsa.kernels.shared import sources

logger = logging.getLogger("nsa")


class Verdict(NamedTuple):
    """What a child process says of the kernels of a call."""

    cause: str | None  # how they fail; None if they work
    lasting: bool  # whether the verdict is about the kernels; else it is about this moment or environment
    variants: tuple[dict[str, Any], ...] = ()  # what was compiled, if they work


verdicts: dict[str, Verdict] = {}  # by `key_of` the call
admitted: set[str] = set()  # `key_of` the variants that may be compiled in this process


def forget() -> None:
    """Forget the verdicts of this process. Files stay."""
    verdicts.clear()
    admitted.clear()


def key_of(described: dict[str, Any], device: torch.device) -> str:
    """A hash of a described call or variant, all kernel sources, versions and architecture. It names a call's file."""
    parts = [compared(), sources.versions(device), described]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def compared() -> str:
    """A hash of the kernels and of the code that judges them, without comments and docstrings."""
    package = sources.FOLDER.parent
    names = "guard/child.py", "guard/small.py", "plain/oracle.py", "plain/packed_sdpa.py", "plain/spans.py"
    return sources.hash_of([*sorted((package / "kernels").rglob("*.py")), *(package / name for name in names)])


def read(key: str) -> Verdict | None:
    """The verdict on disk, or None if there is no readable one."""
    stored = _file(key)
    return None if stored is None else Verdict(stored["cause"], True, tuple(stored.get("variants", ())))


def _file(key: str) -> dict[str, Any] | None:
    folder = settings.user_probes()
    try:
        stored: dict[str, Any] = json.loads((folder / f"{key}.json").read_text(encoding="utf-8")) if folder else {}
        good = stored["key"] == key and isinstance(stored["call"], dict) and isinstance(stored["cause"], str | None)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return stored if good else None


def refused(device: torch.device) -> list[tuple[str, str]]:
    """`(kernel, cause)` of the broken calls on disk that match the sources, versions and GPU of this process."""
    folder = settings.user_probes()
    files = map(_file, [path.stem for path in folder.glob("*.json")] if folder else [])
    failed = (x for x in files if x is not None and x["cause"] is not None and key_of(x["call"], device) == x["key"])
    return sorted({(x["call"]["kernel"], x["cause"]) for x in failed})


def write(key: str, verdict: Verdict, described: dict[str, Any]) -> None:
    """Write a lasting verdict to disk. If that fails, other processes ask a child of their own."""
    folder = settings.user_probes()
    stored = {"key": key, "date": time.strftime("%Y-%m-%d"), "call": described, **verdict._asdict()}
    try:
        if folder is None:
            raise OSError("no home directory")
        write_whole(folder / f"{key}.json", json.dumps(stored, indent=1))
    except OSError as error:
        log_once(str(error))


@functools.cache
def log_once(why: str) -> None:
    logger.debug("the results of trying kernels are not kept for other processes: %s", why)
