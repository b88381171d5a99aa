"""Writes a workload of a program: `python -m nsa record-workload -o FILE -- COMMAND`.

The program's processes count the shapes of their calls, and write a part each when they end. Values of tensors are
never read. So every sequence counts as long as its cache allows, the queries of packed sequences are divided equally,
and what selections share is not known. Calls of a captured CUDA graph are counted once, at the capture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nsa import debug
from nsa.files import write_whole

FOLDER = "NSA_RECORD_WORKLOAD"  # the variable that tells processes where their parts go


def main(command: Sequence[str], out: Path) -> int:
    """Run a command, and write the workload of its calls. Returns the command's exit status, or 1 without calls."""
    with tempfile.TemporaryDirectory(prefix="nsa-workload-") as folder:
        status = subprocess.run(list(command), env=os.environ | {FOLDER: folder}, check=False).returncode
        counts: Counter[str] = Counter()
        for part in sorted(Path(folder).glob("*.json")):
            counts.update(json.loads(part.read_text(encoding="utf-8")))
    left_out = counts.pop(debug.LEFT_OUT, 0)
    if left_out:
        print(f"{left_out} calls left out: a workload has blocks, two or more a row, in bf16 or fp16", file=sys.stderr)
    if not counts:
        print("no workload written: the command made no call of nsa that a workload describes", file=sys.stderr)
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
    write_whole(out, "\n".join(lines) + "\n")
    print(f"{sum(counts.values())} calls of {len(counts)} shapes written to {out}")
    return status
