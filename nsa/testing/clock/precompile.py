"""Compile the kernels of a run before it begins, on all cores. One after the other would take half of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from nsa.failures import caught
from nsa.testing.clock import training
from nsa.testing.contestants import prefill
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.machine import GIB_PER_WORKER
from nsa.testing.matrix.case import Case

SHORT = 8192  # a prompt of this many tokens takes the same kernels as longer ones
WORTH = 16  # at or above this many cases it pays to start processes


def processes(device: torch.device) -> int:
    """The number of processes that compile at a time, as GPU memory and processors allow."""
    memory = torch.cuda.get_device_properties(device).total_memory // (GIB_PER_WORKER << 30)
    return max(1, min(memory, len(os.sched_getaffinity(0)) - 2))


Job = tuple[Callable[[Any, torch.device], None], Any]  # a function of a module, and its first argument


def compile_ahead(jobs: Iterable[Job], device: torch.device, count: int) -> None:
    """Run jobs in `count` child processes, so that Triton's cache holds their kernels.

    If a job fails in a child, or kills the child, the run itself shows why.
    """
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    pool = ProcessPoolExecutor(count, mp_context=context)
    with contextlib.suppress(BrokenProcessPool), pool as children:
        for done in [children.submit(job, what, device) for job, what in jobs]:
            done.result()


def jobs(cases: Iterable[Case], trained: Iterable[Case] = ()) -> list[Job]:
    """Run our implementation of each case once. Long prompts are shortened first: shorter ones with as many heads take
    the same kernels, and less memory in each child.

    Args:
        cases: cases whose forward pass is timed.
        trained: cases whose gradients are timed.
    """
    once: dict[Job, None] = {(_train, _shorter(case)): None for case in trained}
    return list(once | {(_run, _shorter(case)): None for case in cases})


def _shorter(case: Case) -> Case:
    if not case.large:
        return case
    S = min(case.S, SHORT)
    return dataclasses.replace(case, N=case.B * S * case.HKV, S=S, S_kv=S, shared=0.0)


def _train(case: Case, device: torch.device) -> None:
    with contextlib.suppress(*caught(), AssertionError):
        problem = case.make(device)
        for one in (training.ours(), *training.beside()):
            with contextlib.suppress(*caught(), AssertionError, NotImplementedError):
                if one.supports(case) is None:
                    training.gradients(one, problem, training.draw_do(problem))


def _run(case: Case, device: torch.device) -> None:
    beside = [impl for impl in prefill.beside() if impl.other is None] if case.dist == "prefill" else []
    with contextlib.suppress(*caught(), AssertionError):
        problem = case.make(device)
        for impl in (OURS[OF[case.source]], *beside):
            with contextlib.suppress(*caught(), AssertionError):
                if impl.supports(case) is None:
                    impl.run(problem)
