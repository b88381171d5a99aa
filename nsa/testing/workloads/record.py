"""Writes a workload of a program: `python -m nsa record-workload -o FILE -- COMMAND`.

The program's processes count the shapes of their calls, and write a part each when they end. Values of tensors are
never read. So every sequence counts as long as its cache allows, the queries of packed sequences are divided equally,
and what selections share is not known. Calls of a captured CUDA graph are counted once, at the capture.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.call import Call
from nsa.files import write_whole
from nsa.testing.matrix.caches import E4M3
from nsa.testing.matrix.case import DTYPES

FOLDER = "NSA_RECORD_WORKLOAD"  # the variable that tells processes where their parts go
LEFT_OUT = "left out"  # calls that no workload describes: of ranges, or in fp32
NAMES = {dtype: name for name, dtype in DTYPES.items() if name in ("bf16", "fp16")}
_counts: Counter[str] = Counter()


def count(call: Call, folder: str) -> None:
    """Count a call of this process. The first one arranges that the counts are written when the process ends."""
    if not _counts:
        atexit.register(lambda: Path(folder, f"{os.getpid()}.json").write_text(json.dumps(_counts), encoding="utf-8"))
    words = _words(call)
    _counts[LEFT_OUT if words is None else json.dumps(words)] += 1


def _words(call: Call) -> dict[str, Any] | None:
    """The words of a call's shape, as `file.WORDS`."""
    q, k, v, blocks, cu, table = call.q, call.k, call.v, call.block_indices, call.cu_seqlens_q, call.block_table
    if blocks is None or q.dtype not in NAMES or blocks.shape[-1] < 2:
        return None
    B = q.shape[0] if cu is None else cu.numel() - 1
    queries = q.shape[1] if cu is None else max(1, -(-q.shape[0] // max(1, B)))
    keys = k.shape[1] if k.ndim == 4 else k.shape[0] // max(1, B)
    keys = keys if table is None else keys * table.shape[1]
    return {
        "batch": B, "queries": queries, "keys": max(keys, queries), "HQ": q.shape[-2], "HKV": k.shape[-2],
        "D": q.shape[-1], "Dv": v.shape[-1], "block_size": call.block_size, "blocks": blocks.shape[-1],
        "dtype": NAMES[q.dtype], "pages": table is not None, "fp8": k.dtype == E4M3 and table is not None,
    }  # fmt: skip


def main(command: Sequence[str], out: Path) -> int:
    """Run a command, and write the workload of its calls. Returns the command's exit status, or 1 without calls."""
    with tempfile.TemporaryDirectory(prefix="nsa-workload-") as folder:
        status = subprocess.run(list(command), env=os.environ | {FOLDER: folder}, check=False).returncode
        counts: Counter[str] = Counter()
        for part in sorted(Path(folder).glob("*.json")):
            counts.update(json.loads(part.read_text(encoding="utf-8")))
    left_out = counts.pop(LEFT_OUT, 0)
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
