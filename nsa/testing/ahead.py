"""Compile what a run will launch before it begins, on all cores: one after the other takes half of the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from nsa.dispatch import failures
from nsa.testing.cases import Case
from nsa.testing.impls import OF, OURS
from nsa.testing.plugin import GIB_PER_WORKER

WORTH = 16  # cases from which on it pays to start processes


def processes(device: torch.device) -> int:
    """How many processes may compile at a time: as memory on the GPU and processors allow."""
    memory = torch.cuda.get_device_properties(device).total_memory // (GIB_PER_WORKER << 30)
    return max(1, min(memory, len(os.sched_getaffinity(0)) - 2))


def compile_ahead(cases: Sequence[Case], device: torch.device, count: int) -> None:
    """Run our implementation of each case once in ``count`` child processes, for what that leaves in Triton's cache.

    A case that fails in a child, or kills it, fails in the run itself, which says why.
    """
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(count, mp_context=context) as children:
        for _ in children.map(_run, cases, [str(device)] * len(cases)):
            pass


def _run(case: Case, device: str) -> None:
    with contextlib.suppress(*failures(), AssertionError):
        OURS[OF[case.source]].run(case.make(torch.device(device)))
