"""The commands that repeat failing tests, one for each test."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import Any

import pytest

from nsa.testing import options, profiles
from nsa.testing.gate.hooks import UPSTREAM_STORAGE, compare_key
from nsa.testing.options import spelled


def commands(config: pytest.Config, reports: Iterable[Any]) -> list[str]:
    """A command for each failing test of the suite, made from its first report."""
    ours: dict[str, Any] = {}
    for report in reports:
        if getattr(report, "nsa_ours", False):
            ours.setdefault(report.nodeid, report)
    words = "".join(f" --nsa-impl {impl}" for impl in config.getoption("nsa_impl"))
    words += _sampling(config) + by_hand(config) + _gated(config)
    lane = "NSA_TEST_TRITON_SEL=0 " if os.environ.get("NSA_TEST_TRITON_SEL") == "0" else ""
    return [f"{lane}pytest {_test(config, report)}{words}{_drawn(config, report)}" for report in ours.values()]


def _test(config: pytest.Config, report: Any) -> str:
    """The words that select a report's test on a command line. A test that ships is named by its module."""
    module = getattr(report, "nsa_module", None)
    path, _, name = str(report.nodeid).partition("::")
    if module is None:
        path = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
        return f'"{path}::{name}"' if name else f'"{path}"'
    return f'--pyargs "{module}::{name}"'


def _sampling(config: pytest.Config) -> str:
    """The options with which another run is sampled and checked as this one; empty by default."""
    words = [f" {spelled(name)} {number}" for name, number in options.sampled_otherwise(config).items()]
    words += [f" {spelled(name)}" for name in ("nsa_full", "nsa_hot", "nsa_no_check") if config.getoption(name)]
    return "".join(words)


def by_hand(config: pytest.Config) -> str:
    """The options with which another run has the same shapes by hand; empty without such shapes."""
    if not options.by_hand(config):
        return ""
    shapes = config.getoption("nsa_shape") or [options.DEFAULT_SHAPE]
    words = [word for shape in shapes for word in ("--nsa-shape", shape)]
    words += ["--nsa-dist", config.getoption("nsa_dist")] if config.getoption("nsa_dist") else []
    words += ["--nsa-decode"] if config.getoption("nsa_decode") else []
    return f" {shlex.join(words)}"


def _gated(config: pytest.Config) -> str:
    """The options that gate another run as this one; empty if this run is not gated."""
    compare, option = config.stash.get(compare_key, None), config.option
    if not compare:
        return ""
    typed = ["--benchmark-compare" if compare is True else f"--benchmark-compare={compare}"]
    typed += ["--nsa-strict"] if option.nsa_strict else []
    typed += [] if option.benchmark_storage == UPSTREAM_STORAGE else [f"{options.STORAGE}={option.benchmark_storage}"]
    return f" {shlex.join(typed)}"


def _drawn(config: pytest.Config, report: Any) -> str:
    """The options with which another run draws the call that failed; empty for tests that draw none.

    An `@example` needs no option, because it always runs.
    """
    if "hypothesis" not in getattr(report, "keywords", ()):
        return ""
    profile = config.getoption("hypothesis_profile", None)
    call = getattr(report, "nsa_call", "") or config.getoption("nsa_reproduce")
    words = ["--hypothesis-profile", profile] if profile not in (None, profiles.DEFAULT) else []
    words += ["--nsa-reproduce", call] if call else []
    return "".join(f" {shlex.quote(word)}" for word in words)
