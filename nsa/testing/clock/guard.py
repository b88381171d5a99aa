"""The check that no measurement claims more than the hardware can do. A pure function of numbers.

A time that beats the hardware is a wrong time: work left out, data found in cache, a clock misread. It must not become
a result (docs/rtx4090-report.md: a published table reads at 8.3 TB/s from a 1.0 TB/s card).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsa.testing.clock.timing import InvalidMeasurement, Timing

SLACK = 1.05


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one GPU: bytes per second of a copy (read + written) and of a read, bf16 FLOP per second."""

    copy: float
    read: float
    matmul: float

    @property
    def memory(self) -> float:
        """The most bytes per second that any stream reached."""
        return max(self.copy, self.read)


def guard(name: str, timing: Timing, nbytes: int, flops: int, limits: Ceilings) -> None:
    """Reject a time that beats memory (cold buffers only: L2 is faster) or the matrix units by more than `SLACK`.

    Args:
        nbytes: unique bytes of a call, each read or written once.
        flops: of its matrix products.

    Raises:
        InvalidMeasurement: naming the claim and the limit.
    """
    bandwidth, rate = nbytes / timing.median, flops / timing.median
    if timing.cold and bandwidth > SLACK * limits.memory:
        raise InvalidMeasurement(
            f"invalid measurement: {name} took {timing.median * 1e6:.2f} us for {nbytes} unique bytes, "
            f"{bandwidth / 1e9:.0f} GB/s; this GPU's memory was measured at {limits.memory / 1e9:.0f} GB/s"
        )
    if rate > SLACK * limits.matmul:
        raise InvalidMeasurement(
            f"invalid measurement: {name} took {timing.median * 1e6:.2f} us for {flops} FLOP, {rate / 1e12:.0f} "
            f"TFLOP/s; this GPU's matrix units were measured at {limits.matmul / 1e12:.0f} TFLOP/s"
        )


def detectable(timing: Timing, nbytes: int, flops: int, limits: Ceilings) -> float:
    """How close a time is to what `guard` refuses, as a share of it: near 0, work left out does not show in speed."""
    memory = nbytes / limits.memory if timing.cold else 0.0
    return max(memory, flops / limits.matmul) / timing.median / SLACK


def undetectable(benchmarks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What ran unchecked and was not refused, by name with its share of the guard's limit."""
    shares = {
        name: info.get("share_of_guard") for name, info in benchmarks.items() if not info.get("checked", True)
    }  # fmt: skip
    lines = [f"undetectable by speed: {len(shares)} of {len(benchmarks)}; what they computed is not known"] * bool(
        shares
    )
    for name, share in shares.items():
        lines.append(f"  {'no limit known' if share is None else f'{share:6.1%}'}  {name}")
    return lines
