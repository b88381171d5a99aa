"""`--nsa-sweep`: tries tiles and splits on the most important shapes, and writes the GPU's table for `tiles.py`.

Candidates are compiled in child processes first, so that a crash of the compiler kills a child only. Those that compile
are checked against the fp64 oracle and timed like every benchmark. A candidate that fails is recorded with its cause,
and does not fail the run.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa import gpu, settings
from nsa.failures import caught
from nsa.kernels import pinned
from nsa.kernels.query_major.choice import Choice
from nsa.kernels.shared.sizes import next_power_of_2
from nsa.testing.clock.cuda import buffer_sets, time_gpu
from nsa.testing.clock.timing import Timing
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.ours import OF, OURS
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import m3
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import decode_steps
from nsa.testing.report.recording import Fact
from nsa.tuning.files import provenance, write_section

SHAPE = ("one_span", "D", "Dv", "G", "rows", "L")  # the key of an entry of the table
KEPT = 3  # best choices of a shape that the table keeps; the first is used
FINALISTS = 6  # choices that are timed a second time, with more samples
COARSE: dict[str, Any] = {"iters": 10, "warmup": 1, "budget_s": 0.004, "replay_s": 3e-4}
FINE: dict[str, Any] = {"iters": 50, "warmup": 3, "budget_s": 0.05}
WARPS = {16: (1, 2), 32: (1, 2, 4), 64: (2, 4), 128: (4, 8)}  # by BLOCK_L; others were best for none of 24 shapes
OF_A_CHILD = 24  # choices that a child process compiles, about 40 s
SAME = 1.01  # if the ratio of two choices' times is below this, the faster one changes from run to run
WAVES = 4  # with more programs per multiprocessor than this, more splits do not help
FAILURES: tuple[type[BaseException], ...] = (*caught(), AssertionError)


def cases() -> list[Case]:
    """The shapes of the sweep, in bf16: core's rows and spans at H = 8, its decode steps, and those of MiniMax-M3.

    The queries of a speculative step share blocks, which are then read from L2: only a kernel with many bytes in flight
    gains from that, so such a step is measured as models make it.
    """
    lengths = (16, 32, 64, 128, 256, 512, 1024)
    return [
        *(Case(8, D, D, L, N, "few", "bf16") for D in (64, 128) for N in (64, 256, 1024) for L in lengths),
        *(Case(8, D, D, L, N, "many", "bf16") for D in (64, 128) for N in (64, 256, 1024) for L in (64, 256, 1024)),
        *decode_steps(),
        *(m3.case(B, 1, S_kv) for B, S_kv in ((1, m3.LONG), (8, m3.LONG), (64, m3.LONG // 4))),
        m3.case(8, 4, m3.LONG, shared=0.9),
    ]


def candidates(case: Case, processors: int, largest: int = 16) -> list[Choice]:
    """The choices to try on a shape: all in which every program has a tile, and splits do not exceed `WAVES`.

    largest: the most programs of a cluster; 0 for a GPU without clusters.
    """
    survived = []
    for head_tiles in (1, 2) if case.H >= 16 else (1,):
        programs = case.N * head_tiles
        thirds = (3,) if 3 * programs <= processors < 5 * programs else ()  # clusters of 4 would not fill the GPU
        for splits in (1, 2, *thirds, 4, 8, 16, 32):
            part = -(-case.L // splits)
            if splits > 1 and (part < 16 or programs * splits > WAVES * processors):
                continue
            # Two head tiles read every key twice, so one size is enough.
            for block_l in (16, 32, 64, 128) if head_tiles == 1 else (64,):
                if block_l > max(16, next_power_of_2(part)):
                    continue
                tiled = -(-part // block_l)
                stages = (1,) if tiled == 1 else range(2, min(tiled + 1, 4 if block_l <= 32 else 3) + 1)
                clusters = (0,) if not 1 < splits <= largest else (1,) if splits < 4 else (0, 1)
                survived += [
                    Choice(splits, head_tiles, block_l, *rest)
                    for rest in itertools.product(WARPS[block_l], stages, clusters)
                ]
    return survived


def _compile(case: Case, choices: Sequence[Choice]) -> None:
    """Compile kernels into Triton's cache, in a child process. The parent repeats a failure and records its cause."""
    problem = case.make(torch.device("cuda", 0))
    for choice in choices:
        with pinned(query_major=choice), contextlib.suppress(*FAILURES):
            OURS[OF[case.source]].run(problem)


def survivors(case: Case, choices: Sequence[Choice]) -> dict[Choice, str]:
    """Compile in a child process. Returns the choices that kill the process, found by halving the list."""
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    try:
        with ProcessPoolExecutor(1, mp_context=context) as child:
            child.submit(_compile, case, choices).result()
    except BrokenProcessPool:
        if len(choices) == 1:
            return {choices[0]: "killed the process that compiled it"}
        half = len(choices) // 2
        return survivors(case, choices[:half]) | survivors(case, choices[half:])
    except FAILURES:
        pass  # an error of the child as a whole, such as out of memory, says nothing about a choice
    return {}


def compile_all(work: Sequence[tuple[Case, Sequence[Choice]]], processes: int) -> dict[Case, dict[Choice, str]]:
    """Compile the choices of a sweep in `processes` processes. Returns the choices that kill a process, by case."""
    jobs = []
    for i, (case, choices) in enumerate(work):
        # Shapes share kernels. In a random order, children seldom compile the same kernel at the same time.
        order = random.Random(i).sample(choices, len(choices))
        jobs += [(case, order[j : j + OF_A_CHILD]) for j in range(0, len(order), OF_A_CHILD)]
    deadly: dict[Case, dict[Choice, str]] = {case: {} for case, _ in work}
    with ThreadPoolExecutor(processes) as threads:
        for (case, _), killers in zip(jobs, threads.map(lambda job: survivors(*job), jobs), strict=True):
            deadly[case] |= killers
    return deadly


def sweep(
    case: Case, choices: Sequence[Choice], device: torch.device, deadly: Mapping[Choice, str] | None = None
) -> tuple[Timing, list[Fact]]:
    """Check and time every choice on one shape, except the `deadly` ones.

    Returns:
        The timing of the best choice, and one fact per choice, best first: its fields with `us` (and `us_now`, the time
        without a forced choice), or with `error`.
    """
    impl, problem = OURS[OF[case.source]], case.make(device)
    oracle, sets = Oracle.of(problem), buffer_sets(problem)
    errors = dict(deadly or {})
    for choice in (c for c in choices if c not in errors):
        try:
            with pinned(query_major=choice):
                result, launched = impl.run_counted(problem)
            assert_parity(result, oracle, str(choice))
            assert launched[str(impl.route)] == 1, f"{choice} launched {dict(launched)}"
        except FAILURES as error:  # the choice does not compile, does not fit, or is wrong
            errors[choice] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    right = [choice for choice in choices if choice not in errors]
    coarse = _time(impl, [None, *right], sets, COARSE)
    ranked = sorted(right, key=lambda c: coarse[c].median)[:FINALISTS]
    fine = _time(impl, [None, *ranked], sets, FINE)
    times = coarse | fine
    errors |= {c: f"not captured: {times[c].refused}" for c in right if times[c].how != "graph"}
    order = [*sorted(ranked, key=lambda c: fine[c].median), *(c for c in right if c not in ranked)]
    order = [c for c in order if c not in errors]
    now = times[None].median * 1e6
    facts = [c._asdict() | {"us": times[c].median * 1e6, "us_now": now} for c in order]
    facts += [c._asdict() | {"error": why} for c, why in errors.items()]
    return times[order[0]] if order else times[None], facts


def _time(
    impl: Contestant, choices: Sequence[Choice | None], sets: tuple[list[Any], bool], sampling: dict[str, Any]
) -> dict[Choice | None, Timing]:
    def call(choice: Choice | None, s: Any) -> None:
        with pinned(query_major=choice):
            impl.run(s)

    fns = {str(choice): [partial(call, choice, s) for s in sets[0]] for choice in choices}
    times = time_gpu(fns, cold=sets[1], **sampling)
    return {choice: times[str(choice)] for choice in choices}


def entry(case: Case, facts: Sequence[Fact]) -> Fact | None:
    """A shape's entry of the table; None if no choice was right."""
    best = [fact for fact in facts if "us" in fact][:KEPT]
    if not best:
        return None
    return {
        "one_span": case.source == "rows", "D": case.D, "Dv": case.Dv, "G": case.H, "rows": case.N, "L": case.L,
        "best": [fact | {"us": round(fact["us"], 3), "us_now": round(fact["us_now"], 3)} for fact in best],
    }  # fmt: skip


def _prefer(best: list[Fact], known: list[Fact]) -> list[Fact]:
    """`best`, beginning with the choice in use, the first of `known`, unless another is faster by more than `SAME`.

    So the committed kernels do not change without a gain.
    """
    used = [fact for fact in best if known and _choice(fact) == _choice(known[0])]
    if not used or used[0]["us"] > SAME * best[0]["us"]:
        return best
    return used + [fact for fact in best if fact is not used[0]]


def _choice(fact: Fact) -> Choice:
    return Choice(**{name: fact[name] for name in Choice._fields if name in fact})


def write(entries: Sequence[Fact], facts: Fact, folder: Path | None = None) -> Path:
    """Write the section `tiles` of the GPU of `facts`. Shapes that were not swept keep their entries.

    Args:
        folder: by default, the packaged one.

    Raises:
        ValueError: no shape was swept; or as `files.write_section`.
        OSError: the folder cannot be written.
    """
    if not entries:
        raise ValueError("tiles not written: no shape was swept")
    folder = gpu.PACKAGED if folder is None else folder
    swept, path = provenance(facts), folder / f"{gpu.device_slug(str(facts['gpu']))}.yaml"
    document: dict[Any, Any] = settings.read_yaml(path) if gpu.read(path).tiles else {"tiles": {"query_major": []}}
    known = document["tiles"]["query_major"]
    shapes = {tuple(e["shape"][name] for name in SHAPE): e for e in known}
    for row in entries:
        key, shape = tuple(row[name] for name in SHAPE), {name: row[name] for name in SHAPE}
        best = _prefer(row["best"], shapes[key]["best"] if key in shapes else [])
        shapes[key] = {"shape": shape, "provenance": swept, "best": best}
    comments = ["Measured, not written by hand: `pytest -m perf --nsa-sweep`. us: with it; us_now: before."]
    return write_section(folder, str(facts["gpu"]), "tiles", {"query_major": list(shapes.values())}, comments)
