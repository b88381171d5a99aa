"""The child process of `nsa.guard.parent`. It answers questions, each about one variant of one kernel.

A question is a line of JSON on stdin. Answers are lines of JSON in a file that the parent reads: ``["phase", ...]``
during the work and ``["result", ...]`` at its end. The process ends after an error, because the CUDA context may be
lost. Its last line is then ``["broken", ...]`` if Triton cannot compile the variant, or ``["error", ...]``.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from typing import Any

import torch

from nsa import settings
from nsa.guard.trials import TRIALS, Say, Trial
from nsa.kernels.shared import asking, errors, sources


def serve(question: dict[str, Any], handle: int) -> None:
    """Answer the first question and all later ones. Ends the process if no question comes for ``idle_s`` seconds.

    Args:
        question: the description ``what`` of a variant, ``device``, ``arch``, ``limit_s`` and ``idle_s`` (seconds).
        handle: file descriptor of the file of answers.
    """
    os.set_inheritable(handle, False)
    answers, questions = os.fdopen(handle, "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes started from here cannot hold or read the questions

    def say(kind: str, text: str) -> None:
        print(json.dumps([kind, text]), file=answers, flush=True)

    def last_words(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        say("broken" if errors.broken(error) else "error", f"{kind.__name__}: {str(error).strip() or 'no message'}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = last_words
    while True:
        signal.alarm(math.ceil(question["limit_s"]) + 5)  # ends this process if the parent is gone
        result = answer(question["what"], torch.device(question["device"]), question["arch"], say)
        signal.alarm(0)
        say("result", result or "right")
        asked = select.select([questions], [], [], question["idle_s"])[0]
        line = questions.readline() if asked else ""
        if not line:
            os.killpg(0, signal.SIGKILL)  # also ends the processes that this one started
        question = json.loads(line)


def answer(what: dict[str, Any], device: torch.device, arch: str, say: Say) -> str | None:
    """Try the variant ``what``. Returns how its result is wrong, or None if the result is right."""
    if sources.architecture(device) != arch:
        raise RuntimeError(f"expected {device} to be {arch}, found {sources.architecture(device)}")
    torch.zeros(1, device=device)  # starts CUDA here, so that a failed start is not taken for the kernel's failure
    seen = watch(what)
    found = TRIALS[what["kernel"]](Trial(what, device, say))
    if what not in seen:
        raise RuntimeError(f"expected {what['kernel']} to be launched, saw {len(seen)} other launches")
    torch.cuda.empty_cache()  # leaves the memory to the parent
    return found


def watch(what: dict[str, Any]) -> list[dict[str, Any]]:
    """Record the variants that Triton compiles from now on, described as the parent describes them.

    From now on this process compiles without asking a child of its own.

    Returns:
        A list to which each variant is added before it is compiled.

    Raises:
        RuntimeError: a later launch compiles the kernel of ``what`` as another variant.
    """
    from nsa.kernels.shared import launch

    settings.reload()  # forgets plans and variants, whose tiles an earlier trial chose
    launch.forget()
    seen: list[dict[str, Any]] = []

    def require(variant: Any, device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> None:
        found = json.loads(json.dumps(variant.describe(tensors)))
        if found["kernel"] == what["kernel"] and found != what:
            other = {key: (what[key], found[key]) for key in what if what[key] != found[key]}
            raise RuntimeError(f"the child would compile another variant, (expected, got): {other}")
        seen.append(found)

    asking.ask = require
    return seen
