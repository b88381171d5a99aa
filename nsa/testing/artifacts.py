"""The files that a perf run writes on request: a CSV, a threshold, tiles, a report."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from nsa import gpu
from nsa.testing import options
from nsa.testing.gate.hooks import compared_with
from nsa.testing.machine import commit, current_lane, device_name, triton_version
from nsa.testing.report.recording import Fact, Recording, newest_of


def this_run(facts: list[Fact]) -> Recording:
    """The facts of the running session as a recording."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    gpu = device_name() if current_lane() == "gpu" else None
    version = str(facts[0].get("torch"))
    return Recording(facts, device_name(), gpu, version, triton_version(), commit(), now, "this run")


def finish(session: pytest.Session, facts: list[Fact], rows: list[dict[str, Any]]) -> list[str]:
    """Write the files that options ask for. Returns a line for each, with its path or the reason why it is missing.

    If a file cannot be written, a green run ends red.
    """
    if session.config.getoption("collectonly", False):
        return []
    asked = {
        "nsa_csv": _write_csv,
        "nsa_update_thresholds": _update_thresholds,
        "nsa_sweep": _write_tiles,
        "nsa_report": _write_report,
    }
    notes = []
    for name in filter(session.config.getoption, asked):
        try:
            notes.append(asked[name](session, facts, rows))
        except (ValueError, OSError) as error:
            notes.append(f"{options.spelled(name)}: {error}")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return notes


def _write_csv(session: pytest.Session, facts: list[Fact], rows: list[dict[str, Any]]) -> str:
    from nsa.testing.shapes import write_csv

    if not rows:
        raise ValueError("nothing was measured")
    path = Path(session.config.getoption("nsa_csv"))
    write_csv(path, rows)
    return f"csv: {path}"


def _write_report(session: pytest.Session, facts: list[Fact], rows: list[dict[str, Any]]) -> str:
    from nsa.testing.report.pages import write

    if not facts:
        raise ValueError("nothing was measured")
    config = session.config
    before = newest_of(compared_with(config))[:1] if config.getoption("benchmark_compare", None) else []
    return f"report: {write([*before, this_run(facts)], Path(config.getoption('nsa_report')))}"


def _update_thresholds(session: pytest.Session, facts: list[Fact], rows: list[dict[str, Any]]) -> str:
    from nsa.tuning import thresholds

    if session.exitstatus != pytest.ExitCode.OK:
        raise ValueError("thresholds not written: only a green run may change them")
    decision = thresholds.decide(facts)
    run = next((fact for fact in facts if fact.get("gpu")), {})
    path = thresholds.write(decision, thresholds.best_layout(facts), run, gpu.PACKAGED)
    return f"thresholds: sel_triton_min_L = {thresholds.shown(decision.min_L)} written to {path}"


def _write_tiles(session: pytest.Session, facts: list[Fact], rows: list[dict[str, Any]]) -> str:
    from nsa.tuning import sweep

    if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED):  # finished shapes are complete
        raise ValueError("tiles not written: a red run may not change them")
    entries = [fact["tiles"] for fact in facts if fact.get("tiles")]
    return f"tiles: {len(entries)} shapes written to {sweep.write(entries, facts[0] if facts else {})}"
