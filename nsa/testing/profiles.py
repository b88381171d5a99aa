"""Hypothesis' settings: how many calls it draws, how long it shrinks a failing one, and which one it draws again."""

from __future__ import annotations

import re
import shlex
from typing import Any

import hypothesis
import pytest
from hypothesis.core import decode_failure
from hypothesis.errors import InvalidArgument
from hypothesis.internal.conjecture import engine

DEFAULT = "ci"
EXAMPLES = {DEFAULT: 25, "deep": 1000}
"""Calls that a test draws, by profile. `deep` takes less than the hour that nightly.yml gives it on two cores."""
SHRINK_SECONDS = 30
"""How long Hypothesis shrinks a failing call, by default five minutes. An interpreted call takes a tenth of a second,
so that Hypothesis tries some hundred calls.
"""


def set_profiles() -> None:
    """Register the profiles. Hypothesis' own `pytest_configure` then loads the one that --hypothesis-profile names.

    The phase `explain` is left out. After a failure it traces every line of Python, which makes the interpreter slow.
    """
    settings, slow = hypothesis.settings, [hypothesis.HealthCheck.too_slow]  # an interpreted kernel takes seconds
    phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
    common = settings(deadline=None, print_blob=True, suppress_health_check=slow, phases=phases)
    settings.register_profile(DEFAULT, common, max_examples=EXAMPLES[DEFAULT], derandomize=True, database=None)
    settings.register_profile("deep", common, max_examples=EXAMPLES["deep"], derandomize=False)
    settings.load_profile(DEFAULT)
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS  # Hypothesis has no setting for it


def add_option(group: Any) -> None:
    """Add the option of this module."""
    group.addoption(
        "--nsa-reproduce",
        metavar="VERSION:BLOB",
        help="run the one selected Hypothesis test on the call that failed; the printed replay command contains it",
    )


def check(config: pytest.Config) -> None:
    """Raise pytest.UsageError if this Hypothesis cannot draw the call of --nsa-reproduce."""
    given = config.getoption("nsa_reproduce")
    if given is None:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--nsa-reproduce: leave out -n, because one test runs")
    version, colon, blob = given.partition(":")
    if not version or not colon or not blob:
        raise pytest.UsageError(f"--nsa-reproduce: expected VERSION:BLOB, got {given!r}")
    if version != hypothesis.__version__:
        raise pytest.UsageError(
            f"--nsa-reproduce: the call was drawn by Hypothesis {version}, and this is {hypothesis.__version__}, which "
            "would draw another call"
        )
    try:
        decode_failure(blob.encode())
    except InvalidArgument as error:
        raise pytest.UsageError(f"--nsa-reproduce: {error}") from error


def reproduce(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the one selected Hypothesis test run the call of --nsa-reproduce. Raises pytest.UsageError."""
    given = config.getoption("nsa_reproduce")
    if given is None:
        return
    drawn = [item for item in items if item.get_closest_marker("hypothesis")]
    if len(drawn) != 1:
        raise pytest.UsageError(f"--nsa-reproduce: expected one Hypothesis test to be selected, got {len(drawn)}")
    version, _, blob = given.partition(":")
    test = drawn[0].obj  # type: ignore[attr-defined]
    hypothesis.reproduce_failure(version, blob.encode())(getattr(test, "__func__", test))


def again(config: pytest.Config, report: Any) -> str:
    """The command-line options with which another run draws the call that failed; empty for tests that draw none.

    An `@example` needs no option, because it always runs.
    """
    if "hypothesis" not in getattr(report, "keywords", ()):
        return ""
    profile, call = config.getoption("hypothesis_profile", None), config.getoption("nsa_reproduce")
    found = re.search(r"@reproduce_failure\('([^']+)', b'([^']+)'\)", getattr(report, "longreprtext", ""))
    call = ":".join(found.groups()) if found else call
    words = ["--hypothesis-profile", profile] if profile not in (None, DEFAULT) else []
    words += ["--nsa-reproduce", call] if call else []
    return "".join(f" {shlex.quote(word)}" for word in words)
