"""The child process of `nsa.guard.parent`: answers one question after another, each about one variant of a kernel.

A question is a line of JSON on stdin, the answers are lines of JSON in a file of their own: ``["phase", ...]`` while it
is at work, at last ``["result", ...]``. After an error, which may have lost the CUDA context, the process ends. It then
says ``["broken", ...]`` if Triton cannot compile the variant, else ``["error", ...]``.
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

from nsa import guard, settings
from nsa.guard.trials import TRIALS, Say, Trial
from nsa.kernels.shared import errors, sources


def serve(question: dict[str, Any], handle: int) -> None:
    """Answer the first question and those that follow, until none has come for some seconds or the parent is gone."""
    os.set_inheritable(handle, False)
    answers, questions = os.fdopen(handle, "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that this one starts do not hold or read its questions

    def say(kind: str, text: str) -> None:
        print(json.dumps([kind, text]), file=answers, flush=True)

    def last_words(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        say("broken" if errors.broken(error) else "error", f"{kind.__name__}: {str(error).strip() or 'no message'}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = last_words
    while True:
        signal.alarm(math.ceil(question["limit_s"]) + 5)  # should the parent be gone
        result = answer(question["what"], torch.device(question["device"]), question["arch"], say)
        signal.alarm(0)
        say("result", result or "right")
        asked = select.select([questions], [], [], question["idle_s"])[0]
        line = questions.readline() if asked else ""
        if not line:
            os.killpg(0, signal.SIGKILL)  # this process and all that it left behind
        question = json.loads(line)


def answer(what: dict[str, Any], device: torch.device, arch: str, say: Say) -> str | None:
    """What is wrong with the variant; None if it is right."""
    if sources.architecture(device) != arch:
        raise RuntimeError(f"expected {device} to be {arch}, found {sources.architecture(device)}")
    torch.zeros(1, device=device)  # CUDA begins: what fails until here is not the kernel
    seen = watch(what)
    found = TRIALS[what["kernel"]](Trial(what, device, say))
    if what not in seen:
        raise RuntimeError(f"expected {what['kernel']} to be launched, saw {len(seen)} other launches")
    torch.cuda.empty_cache()  # the parent may need it
    return found


def watch(what: dict[str, Any]) -> list[dict[str, Any]]:
    """Every launch from now on that has Triton compile, as the parent describes its own. No child is asked any more."""
    from nsa.kernels.backward import plan as backward
    from nsa.kernels.key_major import plan as key_major
    from nsa.kernels.query_major import plan as query_major
    from nsa.kernels.shared import combine

    settings.reload()  # plans and variants are made anew: an earlier trial chose their tiles
    for variants in (query_major._variant, combine._variant, key_major._variants, backward._variants):
        variants.cache_clear()
    seen: list[dict[str, Any]] = []

    def require(variant: Any, device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> None:
        found = json.loads(json.dumps(variant.describe(tensors)))
        if found["kernel"] == what["kernel"] and found != what:
            other = {key: (what[key], found[key]) for key in what if what[key] != found[key]}
            raise RuntimeError(f"the child would compile another variant, (expected, got): {other}")
        seen.append(found)

    guard.require = require
    return seen
