"""The commands that repeat failing tests, one for each test."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from nsa.testing import options, profiles
from nsa.testing.gate.hooks import gated_again


def commands(config: pytest.Config, reports: Iterable[Any]) -> list[str]:
    """A command for each failing test of the suite, made from its first report."""
    ours: dict[str, Any] = {}
    for report in reports:
        if getattr(report, "nsa_ours", False):
            ours.setdefault(report.nodeid, report)
    words = "".join(f" --nsa-impl {impl}" for impl in config.getoption("nsa_impl"))
    words += options.sampling_again(config) + options.by_hand_again(config) + gated_again(config)
    lane = "NSA_TEST_TRITON_SEL=0 " if os.environ.get("NSA_TEST_TRITON_SEL") == "0" else ""
    return [f"{lane}pytest {_test(config, report)}{words}{profiles.again(config, report)}" for report in ours.values()]


def _test(config: pytest.Config, report: Any) -> str:
    """The words that select a report's test on a command line. A test that ships is named by its module."""
    module = getattr(report, "nsa_module", None)
    path, _, name = str(report.nodeid).partition("::")
    if module is None:
        path = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
        return f'"{path}::{name}"' if name else f'"{path}"'
    return f'--pyargs "{module}::{name}"'
