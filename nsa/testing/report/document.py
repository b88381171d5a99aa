"""The JSON of a pytest-benchmark run, checked value by value before the gate, a report or pytest-benchmark reads it."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

SECONDS = (1e-12, 1e6)
"""What a duration may be. A sample outside is no measurement; NaN is never inside."""

Needs = Literal["data", "stats", "median"]


def read(path: Path, needs: Needs = "data") -> dict[str, Any]:
    """The contents of a file that pytest-benchmark wrote.

    Args:
        needs: what each benchmark must hold: its samples ("data"), which the gate compares; all statistics ("stats"),
            which pytest-benchmark shows; or the "median" alone, which a report needs. The rest is checked too.

    Raises:
        ValueError: the file cannot be read, or a value in it is not what it should be. One line names the file, the
            benchmark and the key.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8, and digits without end
        raise ValueError(f"{path}: expected the JSON of a pytest-benchmark run: {error}") from error
    try:
        _check_run(document, needs)
        if document.get("checksum") not in (None, checksum(document)):
            raise ValueError("expected the contents that were written with this checksum, got others")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(document)


def checksum(document: Mapping[str, Any]) -> str:
    """Of a stored run without its own ``checksum``. It shows that a file was edited."""
    content = {name: value for name, value in document.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_timing(samples: Any, info: Mapping[str, Any]) -> None:
    """Check the numbers by which the gate decides: samples (seconds) and what `extra_info` says of the controls.

    Raises:
        ValueError: one of them cannot be a measurement. The text names it.
    """
    _check("stats.data", samples, _SAMPLES)
    _check("extra_info", info, _TIMING)


def _check_run(document: Any, needs: Needs) -> None:
    _check("the file", document, _MAPPING)
    _check("machine_info", document.get("machine_info"), _MACHINE)
    _check("the file.datetime", document.get("datetime"), _Or(_TEXT))
    _check("commit_info", document.get("commit_info") or {}, {"id": _Or(_TEXT)})
    benchmarks = document.get("benchmarks")
    _check("benchmarks", benchmarks, _LIST)
    for i, benchmark in enumerate(benchmarks):
        _check(f"benchmarks[{i}]", benchmark, _MAPPING)
        _check(f"benchmarks[{i}].name", name := benchmark.get("name"), _TEXT)
        try:
            _check_benchmark(benchmark, needs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _check_benchmark(benchmark: Mapping[str, Any], needs: Needs) -> None:
    stats: Any = benchmark.get("stats")
    info: Any = benchmark.get("extra_info")
    _check("fullname", benchmark.get("fullname"), _TEXT)
    _check("group", benchmark.get("group"), _Or(_TEXT))
    _check("stats", stats, _MAPPING)
    for name, schema in _STATS.items():
        if name == "median" or name in stats or (needs != "median" and name != "ops"):  # `ops` is worked out if missing
            _check(f"stats.{name}", stats.get(name), schema)
    _check("extra_info", info, _MAPPING)
    for name, value in info.items():
        _check(f"extra_info.{name}", value, _FACTS.get(name, _NUMERIC if name.startswith("speedup_vs_") else _FACT))
    if needs == "data" or "data" in stats:
        check_timing(stats.get("data"), info)


# --- what is expected ------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """What a value has to be, in words, and whether it is."""

    expected: str
    holds: Callable[[Any], bool]


class _Or(NamedTuple):
    """A value of this schema, or null."""

    schema: Any


_short = reprlib.Repr()
_short.maxlong = _short.maxother = _short.maxstring = 40


def _check(key: str, value: Any, schema: Any) -> None:
    """Raise ValueError if a value does not fit a schema. A long value is cut in the text.

    schema: a rule; a tuple of several; a list of one, for each item of a list; or a mapping of schemas by key, where
    "*" stands for every key that the value has.
    """
    match schema:
        case _Rule(expected, holds):
            if not holds(value):
                raise ValueError(f"{key}: expected {expected}, got {_short.repr(value)}")
        case _Or(other):
            if value is not None:
                _check(key, value, other)
        case dict():
            _check(key, value, _MAPPING)
            for name in value if "*" in schema else schema:
                _check(f"{key}.{name}", value.get(name), schema.get("*") or schema[name])
        case tuple():
            for one in schema:
                _check(key, value, one)
        case _:
            for i, item in enumerate(value):
                _check(f"{key}[{i}]", item, schema[0])


def _number(what: str, low: float, high: float) -> _Rule:
    """NaN and integers beyond any float are outside of every range."""
    expected = f"{what} from {low:g} to {high:g}"
    return _Rule(expected, lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and low <= x <= high)


_TEXT = _Rule("a string", lambda value: isinstance(value, str))
_LIST = _Rule("a list", lambda value: isinstance(value, list))
_MAPPING = _Rule("a mapping", lambda value: isinstance(value, Mapping))
_DURATION = _number("seconds", *SECONDS)
_COUNT = (_Rule("a whole number", lambda value: isinstance(value, int)), _number("a count", 1, 1e12))
_FACT = _Rule("a finite number", lambda value: not isinstance(value, (int, float)) or abs(value) <= 1e300)
"""A fact that the tables print, or one that they do not know: a finite number if it is a number."""
_NUMERIC = (_Rule("a number or null", lambda value: value is None or isinstance(value, (int, float))), _FACT)
_SAMPLES = (_Rule("a list of seconds", lambda value: isinstance(value, list) and value != []), [_DURATION])
_ENDS = (_Rule("two ends", lambda value: isinstance(value, list) and len(value) == 2), [_DURATION])
_MACHINE = dict.fromkeys(("device", "node", "gpu", "torch", "triton"), _Or(_TEXT))
_TIMING = {
    "control": _Or(_TEXT),
    "control_samples": _Or({"*": _SAMPLES}),
    "ceiling_gbps": _Or(_number("a rate in GB/s", 1e-6, 1e9)),
}
_STATS: dict[str, Any] = {
    **dict.fromkeys(("min", "max", "mean", "median"), _DURATION),
    **dict.fromkeys(("stddev", "iqr", "ops"), _number("a number", 0.0, 1 / SECONDS[0])),
    **dict.fromkeys(("rounds", "iterations"), _COUNT),
    "outliers": _TEXT,
}
"""The statistics that pytest-benchmark shows of a stored run."""
_TEXTS = "case commit control device dist dtype gpu impl sdpa_best source torch triton"
_NUMBERS = """
    B D Dv H HKV HQ L N S S_kv bytes ceiling_gbps ceiling_tflops flops gbps mae memory_vs_flash ms ns_per_query
    ns_per_token overhead_us ratio_to_control scores share_of_ceiling share_of_matmul share_of_read shared tflops
    times_its_share us
"""
_FACTS: dict[str, Any] = {
    **dict.fromkeys(_TEXTS.split(), _Or(_TEXT)),
    **dict.fromkeys(_NUMBERS.split(), _NUMERIC),
    "ci95": _Or(_ENDS),
    "intervals": _Or({"*": _Or(_ENDS)}),
    "medians": _Or({"*": _DURATION}),
    "left_out": _Or({"*": _Or(_TEXT)}),
    "launched": _Or({"*": _NUMERIC}),
    "best": _Or({"ratio": _number("a ratio", 1e-9, 1e9), "by": _TEXT, "commit": _TEXT}),
}
