"""What a perf run shares: its cases, how a measurement reaches pytest-benchmark, and the summary at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from nsa.testing import gating, timing
from nsa.testing.cases import core, full
from nsa.testing.fixtures import case, over_third_parties, problem, register, third_party
from nsa.testing.plugin import current_lane

__all__ = ["case", "problem", "third_party"]
published_key = pytest.StashKey[list[dict[str, Any]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[published_key] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kernel benchmarks run over core, or over everything; a machine without a GPU shows one skip, not a hundred."""
    cases = full() if metafunc.config.getoption("nsa_full") else core()
    cases = cases if current_lane() == "gpu" else cases[:1]
    if "third_party" in metafunc.fixturenames:
        over_third_parties(metafunc, cases)
    elif metafunc.definition.get_closest_marker("gpu") and "case" in metafunc.fixturenames:
        metafunc.parametrize("case", register(cases), indirect=True, scope="module")


@pytest.fixture
def sampling(request: pytest.FixtureRequest) -> dict[str, int]:
    """`--nsa-iters` and `--nsa-warmup` as the timing functions take them."""
    return {"iters": request.config.getoption("nsa_iters"), "warmup": request.config.getoption("nsa_warmup")}


@pytest.fixture
def machine_sampling(request: pytest.FixtureRequest, sampling: dict[str, int]) -> dict[str, Any]:
    """`sampling`, and how `measure` is to use the GPU: `--nsa-hot`, `--nsa-streams`, `--nsa-no-check`."""
    option = request.config.option
    return sampling | {"hot": option.nsa_hot, "streams": option.nsa_streams, "check": not option.nsa_no_check}


@pytest.fixture
def publish(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., None]:
    """Hand samples and what they mean to pytest-benchmark and to the summary, under a group's name.

    `again()` measures once more: a gated run calls it before it calls a benchmark a regression.
    """
    config, name = request.config, request.node.nodeid

    def publish(group: str, samples: timing.Timing, info: dict[str, Any], again: gating.Again | None = None) -> None:
        samples, info = gating.gated(config, name, samples, info, again)
        benchmark.group = group
        benchmark.extra_info.update(info)
        timing.feed(benchmark, samples)
        config.stash[published_key].append(info | {"group": group, "median": samples.median})
        gating.enforce(config, name)

    return publish


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    published = config.stash.get(published_key, [])
    if not published:
        return
    terminalreporter.section("selection attention: ratios of medians, this run")
    groups = {info["group"]: [] for info in published}
    for info in published:
        groups[info["group"]].append(info)
    kernels = {name: infos for name, infos in groups.items() if infos[0].get("share_of_ceiling")}
    others = {name: infos for name, infos in groups.items() if name not in kernels}
    lines = [*_kernel_table(kernels), *_control_table(others), *_left_out(published)]
    for line in lines:
        terminalreporter.write_line(line)


def _kernel_table(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Speedups as geomean and worst, over each distribution."""
    if not groups:
        return []
    lines = [
        f"{'':24}{'':>5} {'vs expanded':>13} {'vs best SDPA':>13} {'vs gather+SDPA':>14} {'best':>7} {'of':>6}",
        f"{'distribution':24}{'cases':>5} {'geomean worst':>13} {'geomean worst':>13} {'geomean worst':>14}"
        f" {'GB/s':>7} {'ceiling':>8}",
    ]
    keys = ("speedup_vs_sdpa_expanded", "speedup_vs_sdpa_best", "speedup_vs_sdpa_end_to_end")
    for name, infos in groups.items():
        cells = [_geomean_worst(info.get(key) for info in infos) for key in keys]
        top = max(infos, key=lambda info: info["gbps"])
        lines.append(
            f"{name:24}{len(infos):>5} {cells[0]:>13} {cells[1]:>13} {cells[2]:>14}"
            f" {top['gbps']:>7.0f} {top['share_of_ceiling']:>8.1%}"
        )
    infos = [info for group in groups.values() for info in group]
    slow = [i for i in infos if (i.get("speedup_vs_sdpa_best") or math.inf) < 1]
    lines.append(f"slower than the best SDPA call: {len(slow)} of {len(infos)}")
    for info in sorted(slow, key=lambda i: i["speedup_vs_sdpa_best"])[:5]:
        lines.append(f"  {info['speedup_vs_sdpa_best']:.2f}x {info['case']} ({info['sdpa_best']})")
    beaten = [i for i in infos if (i.get("speedup_vs_sdpa_expanded") or 0) >= 1.8]
    lines.append(f"at least 1.8x SDPA over expanded heads: {len(beaten)} of {len(infos)}")
    return lines


def _control_table(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Benchmarks without a byte count: how they compare with the plain-torch call that does the same."""
    if not groups:
        return []
    lines = [f"{'benchmarks':24}{'cases':>5} {'control / ours':>16} {'fastest':>10} {'slowest':>10}  control"]
    for name, infos in groups.items():
        ratios = [1 / info["ratio_to_control"] if info.get("ratio_to_control") else None for info in infos]
        times = [info["median"] for info in infos]
        controls = ", ".join(dict.fromkeys(str(info.get("control")) for info in infos))
        lines.append(
            f"{name:24}{len(infos):>5} {_geomean_worst(ratios):>16} {_time(min(times)):>10} {_time(max(times)):>10}"
            f"  {controls}"
        )
    for info in (info for infos in groups.values() for info in infos if "note" in info):
        lines.append(f"  {info['note']}")
    return lines


def _left_out(published: list[dict[str, Any]]) -> list[str]:
    """Comparators without a time, by verdict."""
    counts = Counter(
        (name, reason.partition(":")[0], "" if reason.startswith("wrong") else reason.partition(": ")[2][:50])
        for info in published for name, reason in (info.get("left_out") or {}).items()
    )  # fmt: skip
    return [f"not timed in {n}: {name}, {kind} {why}".rstrip() for (name, kind, why), n in counts.most_common(12)]


def _geomean_worst(ratios: Iterable[float | None]) -> str:
    known = [r for r in ratios if r]
    if not known:
        return "-"
    return f"{math.exp(math.fsum(map(math.log, known)) / len(known)):.2f} {min(known):.2f}"


def _time(seconds: float) -> str:
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= s or u == "us")
    return f"{seconds / scale:.3g} {unit}"
