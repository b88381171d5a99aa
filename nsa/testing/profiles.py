"""Hypothesis' settings: how many calls it draws, how long it shrinks a failing one, and which one it draws again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

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


_chosen = DEFAULT


def choose(config: pytest.Config) -> None:
    """Remember which profile --hypothesis-profile names for the suite's own tests.

    Tests of a project keep the profiles of that project. Hypothesis loads the named one after this function, and does
    not know ours. So if the project has none of that name, it becomes another name of the profile in use.
    """
    global _chosen
    name = config.getoption("hypothesis_profile", None)
    _chosen = name if name in EXAMPLES else DEFAULT
    if name in EXAMPLES:
        try:
            hypothesis.settings.get_profile(name)
        except InvalidArgument:
            hypothesis.settings.register_profile(name, hypothesis.settings())


def load() -> None:
    """Make our profiles those of the whole run, in a checkout, where all tests are ours."""
    for name in EXAMPLES:
        hypothesis.settings.register_profile(name, _settings(name))
    hypothesis.settings.load_profile(DEFAULT)


def drawing(share: float = 1.0) -> hypothesis.settings:
    """A decorator for a test of the suite: our settings, with a share of the calls that other tests draw."""
    return hypothesis.settings(_settings(_chosen), max_examples=max(1, int(EXAMPLES[_chosen] * share)))


def _settings(name: str) -> hypothesis.settings:
    """The settings of a profile. There is no database, because the printed command contains the call that failed.

    The phase `explain` is left out. After a failure it traces every line of Python, which makes the interpreter slow.
    """
    slow = [hypothesis.HealthCheck.too_slow]  # an interpreted kernel takes seconds
    phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
    return hypothesis.settings(
        deadline=None, print_blob=True, suppress_health_check=slow, phases=phases, database=None,
        max_examples=EXAMPLES[name], derandomize=name == DEFAULT,
    )  # fmt: skip


@contextlib.contextmanager
def shrinking() -> Iterator[None]:
    """Within it, Hypothesis shrinks a failing call for at most `SHRINK_SECONDS`. It has no setting for that."""
    before, engine.MAX_SHRINKING_SECONDS = engine.MAX_SHRINKING_SECONDS, SHRINK_SECONDS
    try:
        yield
    finally:
        engine.MAX_SHRINKING_SECONDS = before


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


def drawn(error: BaseException) -> str:
    """`VERSION:BLOB` of the call that a test drew when it failed, as Hypothesis notes it; empty without such a note."""
    errors = [error, *getattr(error, "exceptions", ())]  # of a test that failed in several ways
    notes = "\n".join(str(note) for one in errors for note in getattr(one, "__notes__", ()))
    found = re.search(r"@reproduce_failure\('([^']+)', b'([^']+)'\)", notes)
    return ":".join(found.groups()) if found else ""
