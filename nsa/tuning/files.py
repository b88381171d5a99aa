"""Writes files of measurements, completely or not at all. A GPU's file is written section by section."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa import gpu, settings
from nsa.files import write_whole

HEAD = "# What was measured on this GPU, section by section (nsa/gpu.py). Written by commands, not by hand.\n"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time is in this context for a folder, which must exist. Raises OSError.

    The lock's file is removed at the end. A process that waited for a removed file takes a new one.
    """
    path = folder / ".lock"
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is(file.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is(file: int, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def write_section(
    folder: Path, gpu_name: str, section: str, content: Mapping[str, Any], comments: Sequence[str]
) -> Path:
    """Write one section of a GPU's file and reload the settings. Other sections stay byte for byte.

    Args:
        section: one of `gpu.SECTIONS`. comments: lines above its content.

    Raises:
        ValueError: another section of that file cannot be read. The error names the section.
        OSError: the folder cannot be written.
    """
    path = folder / f"{gpu.device_slug(gpu_name)}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        whole = _with_section(before, section, content, comments)
        gpu.read(path, whole)
        write_whole(path, whole)
    settings.reload()
    return path


def _with_section(before: str, section: str, content: Mapping[str, Any], comments: Sequence[str]) -> str:
    """The text of a GPU's file with one section written anew."""
    import yaml

    head, *parts = re.split(r"(?m)^(?=\w+:)", before)
    text = yaml.safe_dump({section: content}, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    first, _, rest = text.partition("\n")
    sections = {part.partition(":")[0]: part.rstrip("\n") + "\n" for part in parts}
    sections[section] = "\n".join([first, *(f"  # {line}" for line in comments), rest])
    order = sorted(sections, key=lambda name: gpu.SECTIONS.index(name) if name in gpu.SECTIONS else len(gpu.SECTIONS))
    return (head or HEAD) + "".join(sections[name] for name in order)


def provenance(facts: dict[str, Any], **more: str) -> dict[str, str]:
    """The source of a section: a run's GPU, versions and commit, today's date, and other fields."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {name: str((facts | {"date": date})[name]) for name in gpu.SWEPT} | more
