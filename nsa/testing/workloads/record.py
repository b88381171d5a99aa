"""Writes a workload of a program: `python -m nsa record-workload -o FILE -- COMMAND`.

The program's processes count the shapes of their calls, and write a part each when they end. Values of tensors are
never read. So every sequence counts as long as its cache allows, the queries of packed sequences are divided equally,
and what selections share is not known. Calls of a captured CUDA graph are counted once, at the capture.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsa import debug
from nsa.files import write_whole

FOLDER = "NSA_RECORD_WORKLOAD"  # the variable that tells processes where their parts go


def main(command: Sequence[str], out: Path) -> int:
    """Run a command, and write the workload of its calls. Returns the command's exit status, or 1 without calls."""
    if out.exists() and not out.is_file():  # a folder, or a device, which a new file would replace
        print(f"-o {out}: expected a file, or none yet", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="nsa-workload-") as folder:
        try:
            status = _run(command, os.environ | {FOLDER: folder})
        except OSError as error:
            print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
            return 1
        counts: Counter[str] = Counter()
        parts = [part.read_text(encoding="utf-8") for part in sorted(Path(folder).glob("*.json"))]
        for part in filter(None, parts):
            counts.update(json.loads(part))
    if killed := parts.count(""):
        lost = f"calls lost: of {len(parts)} processes that made calls, {killed} ended by a signal or os._exit"
        print(f"{lost}, and so did not write their counts", file=sys.stderr)
    left_out = counts.pop(debug.LEFT_OUT, 0)
    if left_out:
        print(f"{left_out} calls left out: a workload has blocks, two or more a row, in bf16 or fp16", file=sys.stderr)
    if not counts:
        why = "the counts are lost" if killed else "the command made no call of nsa that a workload describes"
        print(f"no workload written: {why}", file=sys.stderr)
        return status or 1
    lines = [
        f"# Shapes and counts of {sum(counts.values())} calls. Every sequence counts as long as its cache allows, and",
        "# packed sequences count as equally long, because values of tensors were not read. Add what selections share.",
        f"source: {json.dumps('recorded from: ' + ' '.join(command))}",
        "common: {shared: 0}",
        "shapes:",
    ]
    for i, (words, weight) in enumerate(counts.most_common()):
        shape = json.loads(words) | {"weight": weight, "name": f"shape{i}"}
        lines.append(f"- {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in shape.items())}}}")
    try:
        write_whole(out, "\n".join(lines) + "\n")
    except OSError as error:
        print(*lines, sep="\n")
        print(f"-o {out}: cannot be written: {error.strerror}; the workload is printed instead", file=sys.stderr)
        return status or 1
    print(f"{sum(counts.values())} calls of {len(counts)} shapes written to {out}")
    return status


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command to its end, also if Ctrl-C ends it. Returns its exit status, or 128 and the signal as shells do."""
    with subprocess.Popen(list(command), env=env) as process:
        while process.returncode is None:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal sends it to the command, too
                process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
