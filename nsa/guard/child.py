"""The child process of `nsa.guard.parent`. It answers questions, each about the kernels of one call.

A question is a line of JSON on stdin. Answers are lines of JSON in a file that the parent reads: ``["phase", ...]``
during the work, ``["variants", ...]`` and ``["result", ...]`` at its end. The process ends after an error, because the
CUDA context may be lost. Its last line is then ``["broken", ...]`` if Triton cannot compile a kernel, or
``["error", ...]``.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa import backward, dispatch, routing, settings
from nsa.call import Call
from nsa.guard.small import Small
from nsa.kernels.shared import asking, errors, sources
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.kernels.shared.shape import WHOLE
from nsa.plain.oracle import beyond_rounding
from nsa.plain.packed_sdpa import packed_sdpa

Say = Callable[[str, str], None]


def serve(question: dict[str, Any], handle: int) -> None:
    """Answer the first question and all later ones. Ends the process if no question comes for ``idle_s`` seconds.

    Args:
        question: the description ``what`` of a call, ``device``, ``arch``, ``limit_s`` and ``idle_s`` (seconds).
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
    """Make the small call ``what``. Returns how its result is wrong, or None if the result is right."""
    if sources.architecture(device) != arch:
        raise RuntimeError(f"expected {device} to be {arch}, found {sources.architecture(device)}")
    torch.zeros(1, device=device)  # starts CUDA here, so that a failed start is not taken for the kernel's failure
    from nsa.kernels.shared import launch  # imports Triton

    settings.reload()
    launch.forget()  # variants of an earlier question have asked already
    compiled: list[dict[str, Any]] = []

    def note(variant: Any, device: Any, tensors: Any) -> None:
        compiled.append(variant.describe(tensors))

    asking.ask = note
    small = Small(what, device)
    call = small.call()
    with poisoned_workspace(), settings.applied(call.settings):
        say("phase", "compiling")
        wrong = forward(small, call, say) if what["wanted"] is None else gradients(small, call, say)
    say("variants", json.dumps(compiled))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # leaves the memory to the parent
    return wrong


def forward(small: Small, call: Call, say: Say) -> str | None:
    """How ``O`` or LSE of a call is wrong, or None."""
    if small.source == WHOLE:
        o, lse = dispatch.launch(routing.make_rows_plan(call), call)
    else:
        o, lse = dispatch.run(routing.make_plan(call), call)
    wait(call, say)
    want, want_lse = exact(call)
    wrong = beyond_rounding(o, want.detach().view(o.shape), o.dtype)
    return wrong or (None if lse is None else beyond_rounding(lse, want_lse.view(lse.shape), torch.float32, "LSE "))


def gradients(small: Small, call: Call, say: Say) -> str | None:
    """How a gradient of a call is wrong, or None."""
    dtypes, wanted = small.what["dtypes"], small.what["wanted"]
    leaves = [x.cpu().double().requires_grad_() for x in call[:3]]
    o_want, lse_want = exact(call._replace(return_lse=True), *leaves)
    do = small.floats("do", o_want.shape, unit=False)
    dlse = small.floats("dlse", lse_want.shape, unit=False) if "dlse" in dtypes else None
    loss = (o_want * do.cpu().double()).sum()
    if dlse is not None:
        loss = loss + (lse_want.masked_fill(lse_want.isinf(), 0) * dlse.cpu().double()).sum()
    want = torch.autograd.grad(loss, leaves)
    o, lse = small.place("o", o_want.detach()), small.place("lse", lse_want.detach())
    got = backward.backward(routing.make_plan(call), call, do, dlse, o, lse, tuple(wanted))
    wait(call, say)
    pairs = [pair for pair in zip("qkv", got, want, wanted, strict=True) if pair[3]]
    wrong = (beyond_rounding(x, y, call.q.dtype, f"d{of} ") for of, x, y, _ in pairs)
    return next(filter(None, wrong), None)


def wait(call: Call, say: Say) -> None:
    """Wait for the GPU, and tell the parent the phases."""
    say("phase", "running")
    if call.q.is_cuda:
        torch.cuda.synchronize(call.q.device)
    say("phase", "comparing")


def exact(call: Call, *leaves: Tensor) -> Any:
    """``O`` and LSE of packed SDPA in fp64 on the CPU."""
    q, k, v = leaves or (x.cpu().double() if x.dtype == call.q.dtype else x.cpu() for x in call[:3])
    moved: dict[str, Any] = {name: x.cpu() for name, x in call.named_tensors().items()}
    host = call._replace(**moved | {"q": q, "k": k, "v": v, "out": None})
    if call.selection is None:  # packed rows: every row reads its sequence
        everything = torch.tensor([0, 2**31 - 1], dtype=torch.int32).expand(len(q), 1, 1, 2)
        if call.cu_seqlens_k is None:
            host = host._replace(q=q[:, None], k=k[:, :, None], v=v[:, :, None], ranges=everything[:, None])
        else:
            rows = torch.arange(len(q) + 1)
            host = host._replace(k=k[:, None], v=v[:, None], ranges=everything, cu_seqlens_q=rows)
        host = host._replace(causal=False)
    return packed_sdpa(host)
