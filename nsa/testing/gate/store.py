"""Baselines in files: how the baseline of a device and its versions is found, and how a new one is recorded.

A baseline is three files of pytest-benchmark from three processes, `<storage>/<device>/NNNN_*.json` for our kernels and
`<storage>/<device>/<contestant>/NNNN_*.json` for others. Either all three files are written, or none. They hold what
`kept` keeps of a run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nsa.testing.gate import children
from nsa.testing.gate.rule import Best, Reading, Side, pooled, quartile
from nsa.testing.report.document import checksum, read
from nsa.tuning.files import locked

FILES = 3  # processes of a recording, and files that the gate reads
LONGEST = 100  # bytes of a name; file systems allow 255


class Key(NamedTuple):
    """Figures of equal keys are comparable. torch, triton: minor versions, such as "2.11"."""

    device: str
    torch: str
    triton: str

    @classmethod
    def of(cls, machine: Mapping[str, Any]) -> Key:
        """From pytest-benchmark's `machine_info`, to which our plugin adds these fields."""
        return cls(str(machine.get("device")), _minor(machine.get("torch")), _minor(machine.get("triton")))

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, triton {self.triton}"


@dataclass(frozen=True)
class Baseline:
    """The files of one key, oldest first, and the readings of each benchmark in the last `FILES` files that hold it.

    best: the best recording of each benchmark, of which each file holds what was known when it was recorded.

    If a recording holds only some benchmarks (`-k`, a file), earlier recordings stay in force for the others.
    """

    key: Key
    paths: list[Path]
    benchmarks: dict[str, Side]
    best: dict[str, Best] = field(default_factory=dict)


def _minor(version: object) -> str:
    match = re.match(r"\d+\.\d+", str(version))
    return match.group() if match else str(version)


def find(folder: Path, key: Key) -> Baseline | None:
    """The baseline of `key` in its device's folder; otherwise the newest baseline of other versions; otherwise None.

    Raises:
        ValueError: a file cannot be read. The error names the file.
    """
    groups: dict[Key, list[tuple[Path, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.json"), reverse=True):
        document = read(path)
        owner = Key.of(document["machine_info"])
        if owner.device != key.device:
            raise ValueError(f"{path}: machine_info.device: expected {key.device}, got {owner.device}")
        groups.setdefault(owner, []).append((path, document))
    chosen = key if key in groups else next(iter(groups), None)  # that of the newest file
    if chosen is None:
        return None
    paths: list[Path] = []
    runs: dict[str, list[Reading]] = {}
    newest_of: dict[str, tuple[str, Any]] = {}  # the commit of a benchmark's newest file, and what it says of the best
    for path, document in groups[chosen]:
        wanted = [b for b in document["benchmarks"] if len(runs.get(b["name"], ())) < FILES]
        for b in wanted:
            runs.setdefault(b["name"], []).append(Reading.of(b["stats"]["data"], b["extra_info"]))
            commit = str((document.get("commit_info") or {}).get("id") or "an unknown commit")
            newest_of.setdefault(b["name"], (commit, b["extra_info"].get("best")))
        if wanted or not document["benchmarks"]:
            paths.append(path)
    sides = {name: Side.of(them[::-1]) for name, them in runs.items()}
    best = {name: known for name, side in sides.items() if (known := Best.of(side, *newest_of[name])) is not None}
    return Baseline(chosen, paths[::-1], pooled(sides), best)


class NotSaved(RuntimeError):
    """Why a recording was not kept. `status` is the exit status of pytest."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


def folder_of(storage: Path, device: str, contestant: str = "") -> Path:
    """The folder of a baseline. contestant: as `--nsa-impl` names it; empty for our own kernels."""
    return storage / file_name(device) / (file_name(contestant) if contestant else "")


def file_name(text: str) -> str:
    """Any text as (a part of) the name of a file. Names that are fine stay as they are."""
    name = re.sub(r"[^\w.@-]+", "-", text).strip("-.") or "unnamed"
    short = name.encode()[:LONGEST].decode(errors="ignore")
    return name if short == name else f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def record(storage: Path, arguments: Sequence[str], cwd: Path, label: str, contestant: str = "") -> list[Path]:
    """Run pytest in `FILES` processes, one after the other, and keep their files if all runs were green.

    Args:
        arguments: arguments of pytest, to which `--benchmark-json` is added.
        label: the last part of the file names. contestant: see `folder_of`.

    Raises:
        NotSaved: a run was red, or its file cannot be read, so no file was kept; or all runs were green and the files
            cannot be moved. The error then names the folder where they are.
        OSError: the storage cannot be written. Nothing was run.
        KeyboardInterrupt: the recording was interrupted or terminated. No file was kept.
    """
    storage.mkdir(parents=True, exist_ok=True)
    # The temporary folder is on the storage's file system, so that a finished file can be moved by a rename.
    work = Path(tempfile.mkdtemp(prefix=".recording-", dir=storage))
    lost = True
    try:
        files = [work / f"{i}.json" for i in range(1, FILES + 1)]
        documents = [_run(file, arguments, cwd, i) for i, file in enumerate(files, 1)]
        keys = {Key.of(document["machine_info"]) for document in documents}
        names = [{b["name"] for b in document["benchmarks"]} for document in documents]
        if len(keys) != 1 or not names[0] or any(n != names[0] for n in names):
            raise NotSaved("the runs do not hold the same benchmarks of the same machine")
        for file, document in zip(files, documents, strict=True):
            file.write_text(kept(document), encoding="utf-8")
        try:
            return _move(files, folder_of(storage, keys.pop().device, contestant), label)
        except OSError as error:
            lost = False
            raise NotSaved(f"{error}; the recordings stay in {work}") from error
    finally:
        if lost:
            shutil.rmtree(work, ignore_errors=True)


def kept(document: Mapping[str, Any]) -> str:
    """What a baseline keeps of a run, as JSON with a checksum.

    In place of samples it keeps their lower quartile, to the last bit, as the measured memory rate. Those are what the
    gate reads. Other numbers are rounded to five digits. Options of pytest-benchmark and verdicts are left out.
    """
    benchmarks = []
    for b in document["benchmarks"]:
        stats, info = _rounded(b["stats"]), _rounded({name: x for name, x in b["extra_info"].items() if name != "gate"})
        stats["data"] = [quartile(b["stats"]["data"])]
        for name, samples in (b["extra_info"].get("control_samples") or {}).items():
            info["control_samples"][name] = [quartile(samples)]
        info |= {name: b["extra_info"][name] for name in ("ceiling_gbps",) if name in info}
        others = {name: x for name, x in b.items() if name != "options"}
        benchmarks.append(others | {"stats": stats, "extra_info": info})
    small = {**document, "benchmarks": benchmarks}
    return json.dumps(small | {"checksum": checksum(small)}, separators=(",", ":"))


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _rounded(part) for name, part in x.items()}
    if isinstance(x, list):
        return [_rounded(part) for part in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def _run(file: Path, arguments: Sequence[str], cwd: Path, number: int) -> dict[str, Any]:
    print(f"recording {number} of {FILES}", flush=True)
    status = children.run(["-m", "pytest", f"--benchmark-json={file}", *arguments], cwd)
    if status:
        raise NotSaved(f"run {number} of {FILES} was red (exit status {status})", status if status > 0 else 1)
    if not file.exists():  # all tests were skipped, as those that need a GPU
        raise NotSaved(f"run {number} of {FILES} measured no benchmark")
    try:
        return read(file)
    except ValueError as e:
        raise NotSaved(f"run {number} of {FILES}: {e}") from e


def _move(files: Sequence[Path], folder: Path, label: str) -> list[Path]:
    """Move all files to consecutive numbers that no other recording has, or none of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # the contents must be on disk before the file has its name
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")
    with locked(folder):
        taken = [int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9]_*.json")]
        first = max(taken, default=0) + 1
        targets = [folder / f"{first + i:04}_{day}-{file_name(label)}.json" for i in range(len(files))]
        moved: list[tuple[Path, Path]] = []
        try:
            for file, target in zip(files, targets, strict=True):
                moved.append((file, target))
                file.rename(target)
        except BaseException:
            for file, target in moved:
                with contextlib.suppress(FileNotFoundError):
                    target.rename(file)
            raise
    return targets
