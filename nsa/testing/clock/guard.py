"""Refuses times that this hardware cannot reach.

Such a time is wrong: the kernel left work out, its data was in the cache, or the clock was misread. The time must not
become a result. For an example see docs/rtx4090-report.md, where a table reads at 8.3 TB/s from a 1.0 TB/s card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsa.testing.clock.timing import InvalidMeasurement, Timing

SLACK = 1.05


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one GPU.

    copy: bytes per second read and written by a copy. read: bytes per second of a read. matmul: bf16 FLOP per second.
    """

    copy: float
    read: float
    matmul: float

    @property
    def memory(self) -> float:
        """The larger of both memory rates, in bytes per second."""
        return max(self.copy, self.read)


def guard(name: str, timing: Timing, nbytes: int, flops: int, limits: Ceilings) -> None:
    """Refuse a time that beats the memory rate or the matrix rate by more than the factor `SLACK`.

    The memory rate is compared only if buffers are cold, because L2 is faster.

    Args:
        nbytes: unique bytes of a call, each read or written once.
        flops: FLOP of a call's matrix products.

    Raises:
        InvalidMeasurement: the error names the rate of the call and the measured rate.
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
    """The rate of a call as a share of the rate that `guard` refuses. Near 0, `guard` cannot detect missing work."""
    memory = nbytes / limits.memory if timing.cold else 0.0
    return max(memory, flops / limits.matmul) / timing.median / SLACK


def undetectable(benchmarks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines about the benchmarks that ran unchecked and were not refused, each with its share of the guard's limit."""
    shares = {name: x.get("share_of_guard") for name, x in benchmarks.items() if not x.get("checked", True)}
    if not shares:
        return []
    first = f"undetectable by speed: {len(shares)} of {len(benchmarks)}; what they computed is not known"
    return [first, *(f"  {'no limit known' if x is None else f'{x:6.1%}'}  {name}" for name, x in shares.items())]
