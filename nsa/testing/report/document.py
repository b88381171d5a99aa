"""The JSON of a pytest-benchmark run, checked value by value before the gate, a report or pytest-benchmark reads it."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

SECONDS = (1e-12, 1e6)
"""What a duration may be. A sample outside is no measurement; NaN is never inside."""
RATE = (1e-6, 1e9)
"""What a measured memory rate may be, GB/s."""

Needs = Literal["data", "stats", "median"]
_Check = Callable[[str, Any], object]  # raises ValueError


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
        raise ValueError(f"{path}: expected the JSON of a pytest-benchmark run, got {error!r}") from error
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
    _SAMPLES("stats.data", samples)
    _TIMING("extra_info", info)


def wrong(key: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError. A long value is cut."""
    raise ValueError(f"{key}: expected {expected}, got {_short.repr(got)}")


_short = reprlib.Repr()
_short.maxlong = _short.maxother = _short.maxstring = 40


def _check_run(document: Any, needs: Needs) -> None:
    _MAPPING("the file", document)
    _MACHINE("machine_info", document.get("machine_info"))
    _optional(_TEXT)("the file.datetime", document.get("datetime"))
    _fields({"id": _optional(_TEXT)})("commit_info", document.get("commit_info") or {})
    benchmarks = document.get("benchmarks")
    _LIST("benchmarks", benchmarks)
    for i, benchmark in enumerate(benchmarks):
        _MAPPING(f"benchmarks[{i}]", benchmark)
        _TEXT(f"benchmarks[{i}].name", name := benchmark.get("name"))
        try:
            _check_benchmark(benchmark, needs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _check_benchmark(benchmark: Mapping[str, Any], needs: Needs) -> None:
    _TEXT("fullname", benchmark.get("fullname"))
    _optional(_TEXT)("group", benchmark.get("group"))
    stats: Any = benchmark.get("stats")
    info: Any = benchmark.get("extra_info")
    _MAPPING("stats", stats)
    for name, check in _STATS.items():
        if name == "median" or name in stats or (needs != "median" and name != "ops"):  # `ops` is worked out if missing
            check(f"stats.{name}", stats.get(name))
    _MAPPING("extra_info", info)
    for name, value in info.items():
        _FACTS.get(name, _NUMERIC if name.startswith("speedup_vs_") else _FACT)(f"extra_info.{name}", value)
    if needs == "data" or "data" in stats:
        check_timing(stats.get("data"), info)


# --- checks ----------------------------------------------------------------------------------------------------------


def _rule(expected: str, holds: Callable[[Any], bool]) -> _Check:
    def check(key: str, value: Any) -> None:
        if not holds(value):
            wrong(key, expected, value)

    return check


def _all(*checks: _Check) -> _Check:
    def check(key: str, value: Any) -> None:
        for one in checks:
            one(key, value)

    return check


def _optional(check: _Check) -> _Check:
    return lambda key, value: None if value is None else check(key, value)


def _number(what: str, low: float, high: float) -> _Check:
    """NaN and integers beyond any float are outside of every range."""
    expected = f"{what} from {low:g} to {high:g}"
    return _rule(expected, lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and low <= x <= high)


def _fields(checks: Mapping[str, _Check]) -> _Check:
    """A mapping with these keys, or without them."""
    return _all(_MAPPING, lambda key, value: [check(f"{key}.{x}", value.get(x)) for x, check in checks.items()])


def _values(check: _Check) -> _Check:
    """A mapping whose values pass a check."""
    return _all(_MAPPING, lambda key, value: [check(f"{key}.{x}", part) for x, part in value.items()])


def _each(check: _Check) -> _Check:
    """A mapping, or nothing, whose values pass a check."""
    return lambda key, value: _values(check)(key, value or {})


def _items(check: _Check) -> _Check:
    return lambda key, value: [check(f"{key}[{i}]", item) for i, item in enumerate(value)]


_TEXT = _rule("a string", lambda value: isinstance(value, str))
_LIST = _rule("a list", lambda value: isinstance(value, list))
_MAPPING = _rule("a mapping", lambda value: isinstance(value, Mapping))
_DURATION = _number("seconds", *SECONDS)
_COUNT = _all(_rule("a whole number", lambda value: isinstance(value, int)), _number("a count", 1, 1e12))
_FACT = _rule("a finite number", lambda value: not isinstance(value, (int, float)) or abs(value) <= 1e300)
"""A fact that the tables print, or one that they do not know: a finite number if it is a number."""
_NUMERIC = _all(_rule("a number or null", lambda value: value is None or isinstance(value, (int, float))), _FACT)
_SAMPLES = _all(_rule("a list of seconds", lambda value: isinstance(value, list) and value != []), _items(_DURATION))
_ENDS = _all(_rule("two ends", lambda value: isinstance(value, list) and len(value) == 2), _items(_DURATION))
_MACHINE = _fields(dict.fromkeys(("device", "node", "gpu", "torch", "triton"), _optional(_TEXT)))
_TIMING = _fields(
    {
        "control": _optional(_TEXT),
        "control_samples": _optional(_values(_SAMPLES)),
        "ceiling_gbps": _optional(_number("a rate in GB/s", *RATE)),
    }
)
_STATS: dict[str, _Check] = {
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
_FACTS: dict[str, _Check] = {
    **dict.fromkeys(_TEXTS.split(), _optional(_TEXT)),
    **dict.fromkeys(_NUMBERS.split(), _NUMERIC),
    "ci95": _optional(_ENDS),
    "intervals": _each(_optional(_ENDS)),
    "medians": _each(_DURATION),
    "left_out": _each(_optional(_TEXT)),
    "launched": _each(_NUMERIC),
    "best": _optional(_fields({"ratio": _number("a ratio", 1e-9, 1e9), "by": _TEXT, "commit": _TEXT})),
}
