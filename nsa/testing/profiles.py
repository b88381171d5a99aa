"""What Hypothesis is told: how many calls it draws, how long it shrinks one that fails, and which one to draw again."""

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
"""Calls that a test draws, by profile. `deep` ends within the hour that nightly.yml gives it on two cores."""
SHRINK_SECONDS = 30
"""How long a failing call is made smaller. Hypothesis gives up after five minutes, and says so after these seconds too:
an interpreted call takes a tenth of a second, so that some hundred are tried.
"""


def set_profiles() -> None:
    """Profiles before Hypothesis' own `pytest_configure`, which loads the one named by --hypothesis-profile.

    Phase `explain` is left out: from the first failure on it traces every line of Python, and so of the interpreter.
    """
    settings, slow = hypothesis.settings, [hypothesis.HealthCheck.too_slow]  # an interpreted kernel takes seconds
    phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
    common = settings(deadline=None, print_blob=True, suppress_health_check=slow, phases=phases)
    settings.register_profile(DEFAULT, common, max_examples=EXAMPLES[DEFAULT], derandomize=True, database=None)
    settings.register_profile("deep", common, max_examples=EXAMPLES["deep"], derandomize=False)
    settings.load_profile(DEFAULT)
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS  # no setting has it; Hypothesis keeps it open to being set


def add_option(group: Any) -> None:
    """The option of this module, for the plugin's `pytest_addoption`."""
    group.addoption(
        "--nsa-reproduce",
        metavar="VERSION:BLOB",
        help="run the one Hypothesis test that is selected on the call that failed; a replay line has it",
    )


def check(config: pytest.Config) -> None:
    """Refuse a --nsa-reproduce that this Hypothesis cannot draw. Raises pytest.UsageError."""
    given = config.getoption("nsa_reproduce")
    if given is None:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--nsa-reproduce: expected no -n, as it runs one test")
    version, colon, blob = given.partition(":")
    if not version or not colon or not blob:
        raise pytest.UsageError(f"--nsa-reproduce: expected VERSION:BLOB, got {given!r}")
    if version != hypothesis.__version__:
        raise pytest.UsageError(
            f"--nsa-reproduce: the call was drawn by Hypothesis {version}, and this is {hypothesis.__version__}, which "
            "would draw another"
        )
    try:
        decode_failure(blob.encode())
    except InvalidArgument as error:
        raise pytest.UsageError(f"--nsa-reproduce: {error}") from error


def reproduce(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the one Hypothesis test that is selected run the call of --nsa-reproduce. Raises pytest.UsageError."""
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
    """The options by which another run draws what failed in this report, for a command line; empty if it drew nothing.

    An `@example` needs none: it always runs.
    """
    if "hypothesis" not in getattr(report, "keywords", ()):
        return ""
    profile, call = config.getoption("hypothesis_profile", None), config.getoption("nsa_reproduce")
    found = re.search(r"@reproduce_failure\('([^']+)', b'([^']+)'\)", getattr(report, "longreprtext", ""))
    call = ":".join(found.groups()) if found else call
    words = ["--hypothesis-profile", profile] if profile not in (None, DEFAULT) else []
    words += ["--nsa-reproduce", call] if call else []
    return "".join(f" {shlex.quote(word)}" for word in words)
