"""The JSON of a pytest-benchmark run, checked value by value before the gate, a report or pytest-benchmark reads it."""

from __future__ import annotations

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
_Check = Callable[[str, Any], None]


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
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(document)


def check_timing(samples: Any, info: Mapping[str, Any]) -> None:
    """Check the numbers by which the gate decides: samples (seconds) and what `extra_info` says of the controls.

    Raises:
        ValueError: one of them cannot be a measurement. The text names it.
    """
    _samples("stats.data", samples)
    _named("extra_info", info, "control", _text_or_none)
    controls = info.get("control_samples")
    if controls is not None:
        for name, theirs in _mapping("extra_info.control_samples", controls).items():
            _samples(f"extra_info.control_samples.{name}", theirs)
    if info.get("ceiling_gbps") is not None:
        _number("extra_info.ceiling_gbps", info["ceiling_gbps"], "a rate in GB/s", *RATE)


def wrong(key: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError. A long value is cut."""
    raise ValueError(f"{key}: expected {expected}, got {_short.repr(got)}")


_short = reprlib.Repr()
_short.maxlong = _short.maxother = _short.maxstring = 40


def _check_run(document: Any, needs: Needs) -> None:
    machine = _mapping("machine_info", _mapping("the file", document).get("machine_info"))
    for field in ("device", "node", "gpu", "torch", "triton"):
        _named("machine_info", machine, field, _text_or_none)
    _named("the file", document, "datetime", _text_or_none)
    commit = _mapping("commit_info", document.get("commit_info") or {})
    _named("commit_info", commit, "id", _text_or_none)
    benchmarks = document.get("benchmarks")
    if not isinstance(benchmarks, list):
        wrong("benchmarks", "a list", benchmarks)
    for i, benchmark in enumerate(benchmarks):
        name: Any = _mapping(f"benchmarks[{i}]", benchmark).get("name")
        _text(f"benchmarks[{i}].name", name)
        try:
            _check_benchmark(benchmark, needs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _check_benchmark(benchmark: Mapping[str, Any], needs: Needs) -> None:
    _text("fullname", benchmark.get("fullname"))
    _text_or_none("group", benchmark.get("group"))
    stats = _mapping("stats", benchmark.get("stats"))
    for name, check in _STATS.items():
        if name == "median" or name in stats or (needs != "median" and name != "ops"):  # `ops` is worked out if missing
            _named("stats", stats, name, check)
    info = _mapping("extra_info", benchmark.get("extra_info"))
    for name, value in info.items():
        _FACTS.get(name, _numeric if name.startswith("speedup_vs_") else _fact)(f"extra_info.{name}", value)
    if needs == "data" or "data" in stats:
        check_timing(stats.get("data"), info)


def _samples(key: str, samples: Any) -> None:
    if not isinstance(samples, list) or not samples:
        wrong(key, "a list of seconds", samples)
    for i, sample in enumerate(samples):
        _duration(f"{key}[{i}]", sample)


def _named(key: str, content: Mapping[str, Any], name: str, check: _Check) -> None:
    check(f"{key}.{name}", content.get(name))


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        wrong(key, "a mapping", value)
    return value


def _text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        wrong(key, "a string", value)


def _text_or_none(key: str, value: Any) -> None:
    if value is not None:
        _text(key, value)


def _count(key: str, value: Any) -> None:
    if not isinstance(value, int):
        wrong(key, "a whole number", value)
    _number(key, value, "a count", 1, 1e12)


def _number(key: str, value: Any, what: str, low: float, high: float) -> None:
    """NaN and integers beyond any float are outside of every range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        wrong(key, f"{what} from {low:g} to {high:g}", value)


# --- facts of a benchmark ---------------------------------------------------------------------------------------------


def _fact(key: str, value: Any) -> None:
    """A fact that the tables print, or one that they do not know: a finite number if it is a number."""
    if isinstance(value, (int, float)) and not abs(value) <= 1e300:
        wrong(key, "a finite number", value)


def _numeric(key: str, value: Any) -> None:
    if value is not None and not isinstance(value, (int, float)):
        wrong(key, "a number or null", value)
    _fact(key, value)


def _each(check: _Check) -> _Check:
    def every(key: str, value: Any) -> None:
        for name, part in _mapping(key, value or {}).items():
            check(f"{key}.{name}", part)

    return every


def _interval(key: str, value: Any) -> None:
    if value is not None:
        if not isinstance(value, list) or len(value) != 2:
            wrong(key, "two ends", value)
        for i, end in enumerate(value):
            _duration(f"{key}[{i}]", end)


def _duration(key: str, value: Any) -> None:
    _number(key, value, "seconds", *SECONDS)


def _not_negative(key: str, value: Any) -> None:
    _number(key, value, "a number", 0.0, 1 / SECONDS[0])


_STATS: dict[str, _Check] = {
    **dict.fromkeys(("min", "max", "mean", "median"), _duration),
    **dict.fromkeys(("stddev", "iqr", "ops"), _not_negative),
    **dict.fromkeys(("rounds", "iterations"), _count),
    "outliers": _text,
}
"""The statistics that pytest-benchmark shows of a stored run."""
_TEXTS = "case commit control device dist dtype gpu impl sdpa_best source torch triton"
_NUMBERS = """
    B D Dv H HKV HQ L N S S_kv bytes ceiling_gbps ceiling_tflops flops gbps mae memory_vs_flash ms ns_per_query
    ns_per_token overhead_us ratio_to_control scores share_of_ceiling share_of_matmul share_of_read shared tflops
    times_its_share us
"""
_FACTS: dict[str, _Check] = {
    **dict.fromkeys(_TEXTS.split(), _text_or_none),
    **dict.fromkeys(_NUMBERS.split(), _numeric),
    "ci95": _interval,
    "intervals": _each(_interval),
    "medians": _each(_duration),
    "left_out": _each(_text_or_none),
    "launched": _each(_numeric),
}
