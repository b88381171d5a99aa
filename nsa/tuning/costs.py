"""Fits what a unit of work costs on a GPU to the times of drawn calls. `nsa/schedules.py` chooses schedules by costs.

    python -m nsa.testing.regret 400 --out rows.jsonl    # measures, about four minutes of an H100
    python -m nsa.tuning.costs rows.jsonl                # fits, and writes the section `costs` of the GPU's file

Costs are at least zero. They minimize the relative errors of the predicted times. A time that is off by more than
`NEAR` counts less, so that a few odd calls do not decide.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa import gpu, schedules
from nsa.kernels.union.family import LEAST_GROUP
from nsa.testing.report.recording import within
from nsa.tuning.files import provenance, write_section
from nsa.work import CAPABILITY, SCHEDULES, UNION, Job, capability_of, work

NEAR = 0.3
LEAST = 16  # times, to fit the costs of a schedule and a kind of calls
COMMAND = "python -m nsa.testing.regret, then python -m nsa.tuning.costs"
Row = dict[str, Any]  # of `nsa.testing.regret`
Kinds = dict[str, dict[str, dict[str, float]]]  # costs by kind of calls, schedule and term


def job(row: Row) -> Job:
    """The sizes of a measured call."""
    sizes = (row[name] for name in ("B", "S", "S_kv", "HKV", "G", "D", "Dv", "n", "block_size", "paged", "fp8"))
    capability = capability_of(row.get("capability", CAPABILITY), row["D"], row["Dv"])  # older rows lack it
    return Job(*sizes)._replace(shared=row["shared"], capability=capability)


def fit(rows: Sequence[Row]) -> Kinds:
    """Costs by kind of calls and schedule, as far as enough calls of the kind were measured."""
    found: Kinds = {}
    for kind in sorted({job(row).kind for row in rows}):
        some = [row for row in rows if job(row).kind == kind]
        of: dict[str, dict[str, float]] = {}
        for name in SCHEDULES:  # union last, because the others serve some of its rows
            timed = [(row["us"][name], _counts(of, job(row), name)) for row in some if name in row["us"]]
            timed = [(us, counts) for us, counts in timed if counts]
            if len(timed) >= LEAST:
                of[name] = _costs(*zip(*timed, strict=True))
        if of:
            found[kind] = of
    return found


def _counts(of: dict[str, dict[str, float]], of_row: Job, name: str) -> dict[str, float]:
    if name != UNION:
        return work(of_row, name)
    return schedules.of_union(of_row, schedules.times(of, of_row), schedules.rest(of, of_row))


def _costs(times: Sequence[float], counts: Sequence[dict[str, float]]) -> dict[str, float]:
    relative = np.array([list(of.values()) for of in counts]) / np.array(times)[:, None]
    weights = np.ones(len(times))
    for _ in range(10):
        costs = _least_squares(relative * weights[:, None], weights)
        error = np.log(np.maximum(relative @ costs, 1e-9))
        weights = 1 / np.sqrt(1 + (error / NEAR) ** 2)
    shares = (relative * costs).max(0)  # a term that is never a thousandth of a call is left out
    of = zip(counts[0], costs, shares, strict=True)
    return {name: float(f"{cost:.4g}") for name, cost, share in of if share > 1e-3}


def _least_squares(a: Any, b: Any) -> Any:
    """The ``x >= 0`` that minimizes ``|a x - b|``, by coordinate descent."""
    scale = a.max(0) + 1e-30
    a = a / scale
    squares, target, x = a.T @ a, a.T @ b, np.zeros(a.shape[1])
    for _ in range(2000):
        before = x.copy()
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (target[j] - squares[j] @ x) / (squares[j, j] + 1e-12))
        if np.abs(x - before).max() < 1e-6 * x.max():
            break
    return x / scale


def ratios(rows: Sequence[Row], kinds: Kinds) -> list[float]:
    """How many times as long as the fastest schedule the chosen one takes, of each row."""
    costs = gpu.Costs(kinds, {}, Path())
    found = []
    for row in rows:
        own = {name: row["us"][name] for name in SCHEDULES if name in row["us"]}
        considered = tuple(name for name in own if name != UNION or row["G"] >= LEAST_GROUP)
        chosen = schedules.fastest(costs, job(row), considered)
        found.append(own[chosen] / min(own.values()))
    return found


def held_out(rows: Sequence[Row], parts: int = 5) -> list[float]:
    """:func:`ratios` of each fifth of the models, by costs that were fitted to the others."""
    models = sorted({(row["HQ"], row["HKV"], row["D"], row["Dv"], row["n"], row["block_size"]) for row in rows})
    random.Random(0).shuffle(models)
    part = {model: i % parts for i, model in enumerate(models)}
    of = [part[row["HQ"], row["HKV"], row["D"], row["Dv"], row["n"], row["block_size"]] for row in rows]
    found = []
    for i in range(parts):
        costs = fit([row for row, mine in zip(rows, of, strict=True) if mine != i])
        found += ratios([row for row, mine in zip(rows, of, strict=True) if mine == i], costs)
    return found


def write(rows: Sequence[Row], folder: Path, command: str = COMMAND) -> str:
    """Write the section `costs` of the rows' GPU. Returns the line to print.

    Raises:
        ValueError: too few rows, or rows of several GPUs; or as `files.write_section`.
        OSError: the folder cannot be written.
    """
    gpus = {row["gpu"] for row in rows}
    kinds = fit(rows)
    if len(gpus) != 1 or not kinds:
        names = ", ".join(sorted(gpus)) or "no GPU"
        raise ValueError(f"costs not written: expected {LEAST} calls or more of one GPU, got {len(rows)} of {names}")
    shapes = f"{len(rows)} drawn shapes"
    of = provenance(rows[-1], command=command, shapes=shapes)
    of_all, of_others = (within(found, (0.05, 0.15)) for found in (ratios(rows, kinds), held_out(rows)))
    said = f"{shapes}, {of_all}; of models that were held out: {of_others}"
    comments = [
        f"Measured, not written by hand: {command}.",
        "Microseconds a unit of work, by kind of calls, schedule and term (nsa/work.py).",
        f"The chosen schedule beside the fastest, {said}",
    ]
    path = write_section(folder, rows[-1]["gpu"], "costs", kinds | {"provenance": of}, comments)
    return f"schedules: {said}; written to {path}"


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ValueError, which names the line, if one is no row of `nsa.testing.regret`."""
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            row["us"], row["gpu"], job(row)  # fields that the fit reads
        except (ValueError, KeyError, TypeError) as error:
            shown = line if len(line) <= 60 else f"{line[:60]}..."
            raise ValueError(f"{path}:{number}: expected a row of nsa.testing.regret, got {shown}") from error
        yield row


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa.tuning.costs", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="rows that `python -m nsa.testing.regret --out` wrote")
    given = parser.parse_args(arguments)
    try:
        print(write([row for path in given.files for row in _rows(path)], gpu.PACKAGED))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
