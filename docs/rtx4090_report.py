"""The tables of docs/rtx4090-report.md, which `python docs/rtx4090_report.py` rewrites.

The document audits a published report. What is written by hand here are that report's figures and the card's; the rest
is recomputed on the CPU (seconds), or read from baselines, `compiled.yaml` and `budgets.yaml`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from nsa.testing.compile import budgets, points
from nsa.testing.report import recording
from nsa.tuning.files import write_whole

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "rtx4090-report.md"
BASELINES = ROOT / "tests" / "perf" / "baselines"

LENGTHS = (64, 128, 256, 512, 1024)  # keys of a row, as published
SEEN = 64  # keys that one side of the published comparison read, as its errors say
ITEM = 2  # bytes of an fp16 number, which the report timed, and of a bf16 one
BANDWIDTH = 384 // 8 * 21 * 10**9  # bytes per second of an RTX 4090: a bus of 384 bits, 21 Gbit/s each
CACHE = 72 << 20  # bytes of its L2
ROWS = 256  # whose errors are recomputed at a time


class Shape(NamedTuple):
    """Packed rows: `Q [N, H, D]`, `K [N, L, D]` and `V [N, L, D]`."""

    N: int
    H: int
    D: int

    def nbytes(self, L: int) -> int:
        """Of K and V, each row having its own."""
        return 2 * self.N * L * self.D * ITEM

    def __str__(self) -> str:
        return f"N={self.N}, H={self.H}, D={self.D}"


class Published(NamedTuple):
    """A line of the report: milliseconds of either side, and the mean absolute difference of their outputs."""

    triton: float
    sdpa: float
    error: float


PUBLISHED: Mapping[Shape, Mapping[int, Published]] = {
    Shape(1024, 4, 64): {
        64: Published(0.071, 0.018, 1.13e-4),
        128: Published(0.071, 0.018, 0.110),
        256: Published(0.086, 0.019, 0.136),
        512: Published(0.193, 0.018, 0.147),
        1024: Published(0.381, 0.018, 0.151),
    },
    Shape(1024, 8, 128): {
        64: Published(0.107, 0.064, 1.02e-4),
        128: Published(0.199, 0.064, 0.110),
        256: Published(0.415, 0.064, 0.136),
        512: Published(0.819, 0.064, 0.146),
        1024: Published(1.608, 0.065, 0.151),
    },
}
"""By number of keys. The report's other lines have N = 256 and end at 512 keys."""


def truncation(shape: Shape, rows: int, keys: int = SEEN, seed: int = 0) -> dict[int, float]:
    """Mean absolute difference between attention over L keys and over the first `keys` of them, by L.

    Inputs are N(0, 1) in fp32, every row with keys and values of its own, the scale is 1/sqrt(D); the mean is over all
    outputs, `[rows, H, D]`. The first L keys of one draw serve every L.
    """
    generator = torch.Generator().manual_seed(seed)
    total = dict.fromkeys(LENGTHS, 0.0)
    chunk = min(rows, 32)  # K and V of a chunk: 32 MiB
    for _ in range(rows // chunk):
        q, k, v = (torch.randn(chunk, n, shape.D, generator=generator) for n in (shape.H, LENGTHS[-1], LENGTHS[-1]))
        weights = (q @ k.mT * shape.D**-0.5).exp()  # [chunk, H, L]; scores are near N(0, 1), nothing overflows
        few, *outputs = (
            (weights[..., :L] @ v[:, :L]) / weights[..., :L].sum(-1, keepdim=True) for L in (keys, *LENGTHS)
        )
        for L, output in zip(LENGTHS, outputs, strict=True):
            total[L] += (output - few).abs().mean().item() * chunk / rows
    return total


def bandwidth_block() -> str:
    """What the published SDPA times say of memory."""
    rows = []
    for shape, lines in PUBLISHED.items():
        for L, line in lines.items():
            rate = shape.nbytes(L) / (line.sdpa * 1e-3)
            times = (f"{line.triton:.3f}", f"{line.sdpa:.3f}")
            share = f"{rate / BANDWIDTH:.2f}×"
            rows.append((str(shape), L, *times, f"{shape.nbytes(L) >> 20} MiB", f"{rate / 1e9:,.0f}", share))
    header = ("shape", "L", "Triton, ms", "SDPA, ms", "K and V", "GB/s read by SDPA", "of the card's")
    return _table(header, rows)


def error_block() -> str:
    """The published errors beside those recomputed; takes seconds."""
    found = [(lines, truncation(shape, ROWS)) for shape, lines in PUBLISHED.items()]
    header = ["L", *(f"{shape.H}×{shape.D} {what}" for shape in PUBLISHED for what in ("published", "recomputed"))]
    rows = [
        (L, *(figure for lines, errors in found for figure in (_error(lines[L].error), _error(errors[L]))))
        for L in LENGTHS
    ]
    return _table(header, rows)


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value > 1e-3 else f"{value:.2e}"


def measured_block(recordings: Iterable[recording.Recording]) -> str:
    """What ours do at N=1024, H=8, D=128, on each GPU with a baseline of it."""
    text = []
    for one in recordings:
        facts = {
            fact["L"]: fact for fact in one.facts if fact["group"] == "few, rows" and fact["L"] in LENGTHS
            and (fact["N"], fact["H"], fact["D"], fact["Dv"]) == (1024, 8, 128, 128) and fact.get("share_of_ceiling")
        }  # fmt: skip
        if not facts:
            continue
        commits = replace(one, facts=list(facts.values())).commits
        text += [f"**{one.gpu or one.device}**, torch {one.torch}, Triton {one.triton}, commit {commits}, bf16:", ""]
        rows = []
        for L, fact in sorted(facts.items()):
            best = fact["sdpa_best"]
            times = (f"{fact['median'] * 1e6:.1f}", f"{fact['medians'][best] * 1e6:.1f}", f"`{best}`")
            ratio = f"{fact['medians'][best] / fact['median']:.2f}×"
            rows.append((L, *times, ratio, f"{fact['share_of_ceiling']:.1%}", f"{fact['mae']:.1e}"))
        header = ("L", "ours, µs", "best SDPA, µs", "which", "times as fast", "of memory ceiling", "mean abs. error")
        text += [_table(header, rows), ""]
    return "\n".join(text[:-1])


class Evidence(NamedTuple):
    """What one Triton release compiles for the card; registers and spilled bytes are None where it does not tell."""

    release: str
    kernels: int
    registers: int | None
    spills: int | None


def evidence(architecture: str = "sm_89") -> Iterator[Evidence]:
    """By Triton release, oldest first: kernels that pass, and the forward kernel of 8 heads of 128 over 1,024 rows."""
    dense = next(p for p in points.POINTS if (p.source, p.G, p.D, p.Dv, p.rows) == ("dense", 8, 128, 128, 1024))
    known = budgets.load()
    for entry in yaml.safe_load(budgets.PASSED.read_text(encoding="utf-8"))["passed"]:
        if entry["arch"] == architecture:
            limits = known.of(entry["triton"], architecture)
            yield Evidence(entry["triton"], entry["kernels"], *limits.get(f"{dense.id} _fwd_kernel", (None, None)))


def compiled_block() -> str:
    """What is known of the card without one."""
    rows = [["-" if cell is None else cell for cell in found] for found in evidence()]
    return _table(("Triton", "kernels, at least", "registers, at most", "spilled bytes, at most"), rows)


def table(document: str, name: str) -> list[dict[str, str]]:
    """The rows of a block's table, by column. Raises ValueError if the document has no such block."""
    lines = [line.strip("| ").split(" | ") for line in _found(document, name)[2].splitlines() if line.startswith("| ")]
    header, _, *rows = lines
    return [dict(zip(header, row, strict=True)) for row in rows]


def with_block(document: str, name: str, block: str) -> str:
    """`document` with what stands between the markers of `name` replaced. Raises ValueError as `table` does."""
    start, end, _ = _found(document, name)
    return document[:start] + f"\n{block}\n" + document[end:]


def _found(document: str, name: str) -> tuple[int, int, str]:
    found = list(re.finditer(rf"(?s)<!-- {name}: begin -->(.*?)<!-- {name}: end -->", document))
    if len(found) != 1:
        raise ValueError(f"{DOCUMENT.name}: expected one <!-- {name}: begin --> … <!-- {name}: end -->")
    return *found[0].span(1), found[0].group(1)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def main() -> int:
    """Rewrite the document's tables; returns the exit status."""
    document = DOCUMENT.read_text(encoding="utf-8")
    blocks = {
        "bandwidth": bandwidth_block(),
        "errors": error_block(),
        "measured": measured_block(recording.newest(BASELINES)),
        "compiled": compiled_block(),
    }
    for name, block in blocks.items():
        document = with_block(document, name, block)
    write_whole(DOCUMENT, document)
    print(f"written: {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
