"""The child process of `nsa.guard.parent`. It makes one small call, and says whether its result is right.

Answers are lines of JSON in a file that the parent reads: ``["phase", ...]`` during the work, ``["variants", ...]`` and
``["result", ...]`` at its end. After an error the last line is ``["broken", ...]`` if Triton cannot compile a kernel,
or ``["error", ...]``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nsa import backward, dispatch, routing
from nsa.call import Call
from nsa.guard.small import Small
from nsa.kernels.shared import asking, errors, sources
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.kernels.shared.shape import WHOLE
from nsa.plain.oracle import beyond_rounding
from nsa.plain.packed_sdpa import packed_sdpa

Say = Callable[[str, str], None]
Compared = tuple[tuple[str, ...], Iterable[Any], Callable[[], Iterable[Tensor]]]  # names, results, exact results


def serve(question: dict[str, Any]) -> None:
    """Answer a question: a described ``call``, ``device``, ``arch`` and ``limit_s`` (seconds)."""
    answers = os.fdopen(os.dup(0), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes started from here cannot write answers

    def say(kind: str, text: str) -> None:
        print(json.dumps([kind, text]), file=answers, flush=True)

    def last_words(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        say("broken" if errors.broken(error) else "error", f"{kind.__name__}: {str(error).strip() or 'no message'}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = last_words
    device, arch = torch.device(question["device"]), question["arch"]
    if sources.architecture(device) != arch:
        raise RuntimeError(f"expected {device} to be {arch}, found {sources.architecture(device)}")
    torch.zeros(1, device=device)  # starts CUDA here, so that a failed start is not taken for the kernel's failure
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(question["limit_s"]))
    say("result", answer(question["call"], device, say) or "right")
    os.killpg(0, signal.SIGKILL)  # also ends the processes that this one started


def answer(described: dict[str, Any], device: torch.device, say: Say) -> str | None:
    """Make the small call ``described``. Returns how its result is wrong, or None if the result is right."""
    compiled: list[dict[str, Any]] = []
    asking.ask = lambda variant, device, tensors: compiled.append(variant.describe(tensors))
    small = Small(described, device)
    call = small.call()
    with poisoned_workspace():
        say("phase", "compiling")
        names, results, exact_results = (forward if described["wanted"] is None else gradients)(small, call)
        say("phase", "running")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    say("phase", "comparing")
    say("variants", json.dumps(compiled))
    pairs = [x for x in zip(names, results, exact_results(), strict=True) if x[1] is not None and x[1].numel()]
    wrong = (beyond_rounding(got, want.detach().view(got.shape), got.dtype, name) for name, got, want in pairs)
    return next(filter(None, wrong), None)


def forward(small: Small, call: Call) -> Compared:
    """``O`` and LSE of a call."""
    plan = (routing.make_rows_plan if small.source == WHOLE else routing.make_plan)(call)
    return ("", "LSE "), dispatch.launch(plan, call), lambda: exact(call._replace(return_lse=True))


def gradients(small: Small, call: Call) -> Compared:
    """The gradients of a call that are wanted."""
    leaves = [x.cpu().double().requires_grad_() for x in call[:3]]
    outputs = dict(zip(("do", "dlse"), exact(call._replace(return_lse=True), *leaves), strict=True))
    o, lse = (small.place(name[1:], x.detach()) for name, x in outputs.items())
    given = {name: small.floats(name, x.shape, 0) for name, x in outputs.items() if name in small.described["dtypes"]}
    wanted = tuple(small.described["wanted"])
    got = backward.backward(routing.make_plan(call), call, given["do"], given.get("dlse"), o, lse, wanted)
    of, by = [outputs[name] for name in given], [x.cpu().double() for x in given.values()]
    return ("dq ", "dk ", "dv "), got, lambda: torch.autograd.grad(of, leaves, by)


def exact(call: Call, *leaves: Tensor) -> Any:
    """``O`` and LSE of packed SDPA in fp64 on the CPU."""
    q, k, v = leaves or (x.cpu().double() if x.dtype == call.q.dtype else x.cpu() for x in call[:3])
    moved: dict[str, Any] = {name: x.cpu() for name, x in call.named_tensors().items()}
    host = call._replace(**moved | {"q": q, "k": k, "v": v, "out": None})
    if call.selection is None:  # packed rows: each row is a sequence of one query, which reads all its keys
        rows = torch.arange(len(q) + 1)
        ends = rows * k.shape[-2] if host.cu_seqlens_k is None else host.cu_seqlens_k
        everything = torch.tensor([0, 2**31 - 1], dtype=torch.int32).expand(len(q), 1, 1, 2)
        k, v = (x.flatten(0, -2)[:, None] for x in (k, v))
        host = host._replace(k=k, v=v, ranges=everything, cu_seqlens_q=rows, cu_seqlens_k=ends, causal=False)
    return packed_sdpa(host)
