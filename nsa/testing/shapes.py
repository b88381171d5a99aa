"""Shapes by hand: `--nsa-shape N=1024,H=8,D=128,Dv=128,L=64:1024`, and a CSV as the old benchmark script wrote it."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa.testing.clock.measure import Measurement, measure, run_facts
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.contestants.sdpa import END_TO_END, PACKED, packed_layouts
from nsa.testing.machine import current_lane
from nsa.testing.matrix.case import CACHE, DTYPES, Case
from nsa.testing.matrix.problem import Problem

SYNTAX = (
    "N=…,H=…,D=…,Dv=…,L=…,dtype=…, each a value, a list (N=64,256,H=8: a value without a name belongs to the name "
    "before it) or, for numbers, a range of powers of two (L=64:1024)"
)
DEFAULTS: dict[str, list[int]] = {"N": [1024], "H": [8], "D": [128], "L": [64, 128, 256, 512, 1024]}
KEYS = ("N", "H", "D", "Dv", "L")
DISTS = ("few", "many", "mixed")
DECODE_CACHE = 8192  # keys of each sequence of a decode step, unless L is larger
OLD_COLUMNS = ("mode", "N", "H", "D", "Dv", "L", "nspans", "streams", "tri_ms", "ref_ms", "speedup", "mae", "status")
OUR_COLUMNS = (
    "dist", "dtype", "seed", "ref", "tri_ci95_low_ms", "tri_ci95_high_ms", "best_sdpa", "best_sdpa_ms", "gbps",
    "share_of_ceiling", "streams_wall_ms", "device", "torch", "triton", "commit",
)  # fmt: skip
MODE = {"rows": "dense", "ranges": "ranges", "blocks": "decode"}
NO_TRITON = "no Triton time: CPU lane"


def parse_shape(text: str) -> dict[str, list[Any]]:
    """The values of each key that `text` names.

    Raises:
        ValueError: a part cannot be read. The error names the part and the syntax.
    """
    values: dict[str, list[Any]] = {}
    name = ""
    for part in text.split(","):
        head, equals, value = part.strip().rpartition("=")
        if equals:
            name = head.strip()
            if name in values:
                raise ValueError(f"--nsa-shape {text!r}: {name} is given twice; expected {SYNTAX}")
        if name not in (*KEYS, "dtype"):
            raise ValueError(f"--nsa-shape {text!r}: cannot read {part!r}; expected {SYNTAX}")
        values.setdefault(name, []).extend(_values(text, name, value.strip()))
    return values


def _values(text: str, name: str, value: str) -> list[Any]:
    if name == "dtype":
        if value not in DTYPES:
            raise ValueError(f"--nsa-shape {text!r}: dtype: expected one of {', '.join(DTYPES)}, got {value!r}")
        return [value]
    match = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", value)
    if match is None:
        raise ValueError(f"--nsa-shape {text!r}: {name}: expected a positive number or a range, got {value!r}")
    first, last = int(match[1]), match[2]
    if last is None:
        return [first]
    powers = [1 << i for i in range(int(last).bit_length()) if first <= 1 << i <= int(last)]
    if not powers:
        raise ValueError(f"--nsa-shape {text!r}: {name}: there is no power of two in {value}")
    return powers


def shape_cases(shape: str, dists: Iterable[str], decode: bool, dtype: str) -> list[Case]:
    """The cases of one `--nsa-shape`: the product of its lists, in each distribution, and as decode steps if `decode`.

    `Dv` is `D` unless given. `dtype` is used if the shape names none. Raises ValueError as `parse_shape` does.
    """
    given = parse_shape(shape)
    lists = {key: given.get(key, DEFAULTS.get(key, [])) for key in KEYS}
    kinds = given.get("dtype", [dtype])
    cases = []
    for kind, N, H, D, L in itertools.product(kinds, *(lists[key] for key in ("N", "H", "D", "L"))):
        for Dv in lists["Dv"] or [D]:
            for dist in dists:
                S_kv = 0 if dist == "few" else max(CACHE, L)
                cases.append(Case(H, D, Dv, L, N, dist, kind, S_kv=S_kv))
            if decode:
                if L % min(64, L):
                    raise ValueError(f"--nsa-shape {shape!r}: L: --nsa-decode reads blocks of 64 keys, got {L}")
                size = min(64, L)
                cases.append(Case(H, D, Dv, L, N, "decode", kind, block_size=size, S_kv=max(DECODE_CACHE, L)))
    return cases


def parse_dists(text: str) -> list[str]:
    """The distributions of `--nsa-dist`, a list such as `few,many`. Raises ValueError naming those that exist."""
    dists = [part.strip() for part in text.split(",")]
    for dist in dists:
        if dist not in DISTS:
            raise ValueError(f"--nsa-dist {text!r}: expected a list of {', '.join(DISTS)}, got {dist!r}")
    return dists


def reference_of(case: Case) -> Contestant:
    """The path that Triton replaces: packed SDPA, which packs first unless the rows are packed already."""
    return PACKED if case.source == "rows" else OURS["sdpa"]


def measure_shape(p: Problem, *, budget_s: float, **sampling: Any) -> tuple[Measurement, list[str]]:
    """Time our kernel, or on a CPU packed SDPA alone. Also returns the names of the packed layouts."""
    case, reference = p.case, reference_of(p.case)
    if current_lane() != "gpu":
        return measure(p, reference, (), budget_s=budget_s, **sampling), []
    layouts = packed_layouts(p.q.device)
    plain = [] if case.source == "rows" else list(END_TO_END.values())
    others = [reference, *layouts.values(), *plain]
    return measure(p, OURS[OF[case.source]], others, budget_s=budget_s, **sampling), list(layouts)


def row(
    case: Case, p: Problem | None, fact: dict[str, Any] | None, status: str, streams: int, device: torch.device
) -> dict[str, Any]:
    """A line of the CSV. `p` is None if it could not be made, `fact` if nothing was measured. `status` says why."""
    line: dict[str, Any] = dict.fromkeys((*OLD_COLUMNS, *OUR_COLUMNS), "")
    fields = {"mode": MODE[case.source], "streams": streams, "status": status, "ref": reference_of(case).name}
    line |= case.fields() | run_facts(device) | fields
    if p is not None:
        line |= {"nspans": p.ranges.shape[-2], "seed": p.seed}
    if fact is not None:
        ref = fact["medians"].get(line["ref"])
        line["ref_ms"] = _ms(ref)
        if fact["impl"] == OF[case.source]:
            ours, best = fact["medians"][fact["impl"]], fact.get("sdpa_best")
            low, high = fact["ci95"]
            mae = "" if fact["mae"] is None else f"{fact['mae']:.3g}"
            together = (fact.get("figures") or {}).get("concurrency") or {}
            line |= {
                "tri_ms": _ms(ours), "speedup": "" if ref is None else f"{ref / ours:.4g}", "mae": mae,
                "tri_ci95_low_ms": _ms(low), "tri_ci95_high_ms": _ms(high), "best_sdpa": best or "",
                "best_sdpa_ms": _ms(fact["medians"].get(best)), "gbps": f"{fact['gbps']:.1f}",
                "share_of_ceiling": f"{fact['share_of_ceiling']:.4f}",
                "streams_wall_ms": _ms(together.get("median_s")),  # one call on each stream, all at the same time
            }  # fmt: skip
    return {name: line[name] for name in (*OLD_COLUMNS, *OUR_COLUMNS)}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.6g}"


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The old script's columns first, then ours. Raises OSError if `path` cannot be written."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*OLD_COLUMNS, *OUR_COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
