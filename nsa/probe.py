"""The first compile of a kernel, in a child process: a compiler's abort is no exception, it ends the process it is in.

Triton with an architecture that the compile matrix has passed with these very kernels (`nsa/configs/compiled.yaml`) is
trusted. With any other, before Triton first compiles a variant of a kernel here, a child (`nsa.trial`) compiles that
same variant, runs it on small tensors and compares the result with the reference. What kills the child, hangs it or is
wrong there refuses the kernel here. What was found out is remembered by this process, and in one small file per variant
by this user's others: that a kernel works, crashes, hangs, is wrong or cannot be compiled. A child that could not say,
as without memory or a C compiler, refuses the kernel for this call alone; `nsa.dispatch` does not try it again unless
it is named.

Launches of what is compiled never come here. Under CUDA graph capture nothing changes: the child captures nothing, and
this process asks CUDA for its version, no more. The operator of `torch.compile` runs, and probes, when the compiled
call does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from nsa import settings

logger = logging.getLogger("nsa")

START_S = 300.0  # seconds a child may take to import torch, from a cold file system, and to find its GPU
LIMIT_S = 120.0  # seconds from then on until it is taken to hang; it needs a few
POLL_S = 0.02  # seconds between two looks at a child
REAP_S = 5.0  # seconds for a killed child to be gone
# Only from a compiler or a kernel; SIGKILL and SIGTERM are somebody else's doing, as when memory is short.
CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit statuses, of a process and of a shell that started one
AT_WORK = ("compiling", "running")  # phases in which a death or a hang speaks of the kernel

KERNEL_SOURCES = tuple(
    f"{name}.py"
    for name in ("backward_kernels", "clusters", "combine", "inversion", "key_kernels", "primitives", "query_kernels")
)
"""Of `nsa/kernels`: what kernels are compiled from, all files with a `@triton.jit`."""

UNSEEN: frozenset[str] = frozenset()
"""Kernels, by name, with which the GPU lane has not passed yet: whatever the compile matrix says, a child tries them
first, on every GPU. A new kernel begins here."""

_CONFIGS = Path(__file__).parent / "configs"
# The child imports what this process would, wherever it was started. stdin is read before anything can be shadowed.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; request = json.load(sys.stdin); "
    "sys.path[:] = request['path']; from nsa.trial import main; main(request)"
)


class ProbeFailed(RuntimeError):
    """A kernel was refused before it was compiled in this process; the text says why."""


class Verdict(NamedTuple):
    """What a child found out."""

    cause: str | None  # None: the kernel works
    lasting: bool  # it is about the kernel, not about this moment or this environment


_known: dict[str, Verdict] = {}  # by key
_asking = threading.RLock()  # held while a child is asked
_told: set[str] = set()  # folders that were said to be of no use


def require(variant: Any, device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Called before Triton compiles ``variant`` (:class:`nsa.kernels.launch.Variant`) for a launch on ``tensors``.

    Raises:
        ProbeFailed: the variant must not be compiled in this process.
    """
    mode = settings.get().probe
    if mode == "never" or device.type not in ("cuda", "cpu"):
        return
    if mode == "auto" and (device.type == "cpu" or _trusted(variant, device)):
        return
    cause = find_out(describe(variant, tensors), device)
    if cause is not None:
        raise ProbeFailed(cause)


def _trusted(variant: Any, device: torch.device) -> bool:
    return variant.kernel.fn.__name__ not in UNSEEN and passed(triton_version(), architecture(device))


def describe(variant: Any, tensors: tuple[torch.Tensor | None, ...]) -> dict[str, Any]:
    """Everything that decides what Triton compiles, as JSON holds it.

    But for integers past 2^31 and keys that far apart (``FAR``), which make variants of their own: a child has no
    tensors that large, and such a launch goes by what was found out about its like.
    """
    names = variant.kernel.arg_names
    return {
        "kernel": variant.kernel.fn.__name__,
        "interpreted": not hasattr(variant.kernel, "cache_key"),
        "constexprs": variant.constexprs | {name: False for name in ("FAR",) if name in variant.constexprs},
        "options": variant.options,
        "cluster": variant.cluster,
        "tensors": {name: x if x is None else str(x.dtype) for name, x in zip(names, tensors, strict=False)},
        "misaligned": [
            name for name, x in zip(names, tensors, strict=False) if x is not None and x.data_ptr() % 16 != 0
        ],
    }


def find_out(what: dict[str, Any], device: torch.device) -> str | None:
    """Why the kernel described by ``what`` must not be compiled here; None if it may.

    Asks a child once, whichever threads want to know. Again only where the last one could not say.
    """
    key = key_of(what, device)
    verdict = before = _known.get(key)
    if verdict is None or not verdict.lasting:
        with _asking:
            verdict = _known.get(key)
            if verdict is None or verdict is before:  # nobody has asked while this thread waited
                verdict = _known[key] = _read(key) or _find_out(key, what, device)
    return verdict.cause


def _find_out(key: str, what: dict[str, Any], device: torch.device) -> Verdict:
    logger.info("%s: its first compile runs in a child process (NSA_PROBE=never: not)", what["kernel"])
    verdict = ask(what, device)
    if verdict.lasting:
        _write(key, verdict.cause, what)
    return verdict


def forget() -> None:
    """Forget what this process found out; files stay."""
    _known.clear()


def passed(triton: str, arch: str) -> bool:
    """Whether the compile matrix has passed this Triton (any patch level of it) for this architecture."""
    return (".".join(triton.split(".")[:2]), arch) in passed_pairs()


@functools.cache
def passed_pairs() -> frozenset[tuple[str, str]]:
    """(Triton minor version, architecture), as `nsa/configs/compiled.yaml` lists them; none where there is no file.

    What other sources of our kernels have passed counts for nothing. Raises ValueError naming the file if it is not as
    expected.
    """
    path = _CONFIGS / "compiled.yaml"
    if not path.is_file():
        return frozenset()
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))["passed"] or []
        listed = [(entry["triton"], entry["arch"], entry["sources"]) for entry in entries]
        if not all(isinstance(word, str) for words in listed for word in words):
            raise TypeError("3.10 without quotes is 3.1")
    except (yaml.YAMLError, KeyError, TypeError) as error:
        expected = "expected a list `passed` of mappings with triton, arch and sources"
        raise ValueError(f"{path}: {expected}, got {error!r}") from error
    ours = kernel_sources()
    return frozenset((triton, arch) for triton, arch, sources in listed if sources == ours)


@functools.cache
def kernel_sources() -> str:
    """What the compile matrix has passed is known by this: a short hash of the files our kernels are compiled from."""
    folder = Path(__file__).parent / "kernels"
    return _hash_of([folder / name for name in KERNEL_SOURCES])[:12]


def _hash_of(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def compile_errors() -> tuple[type[BaseException], ...]:
    """Triton's own: CompilationError, OutOfResources, since 3.3 PTXASError; none where there is no Triton."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def broken(error: BaseException) -> bool:
    """Whether an error says that Triton cannot compile a kernel, here and at any other time."""
    of_triton = isinstance(error, compile_errors()) or "PassManager::run failed" in str(error)
    return of_triton and not starved(error)


def starved(error: BaseException) -> bool:
    """Whether a compiler's process was killed (SIGKILL), as where memory is short: that is no broken kernel."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode in KILLED
    found = re.search(r"`?ptxas`? failed with error code (-?\d+)", str(error))
    return found is not None and int(found[1]) in KILLED


@functools.cache
def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942`, or `interpreter` on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def driver_version() -> int | None:
    """As CUDA counts, 12040 for 12.4; None where torch does not tell."""
    ask_driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask_driver is None else int(ask_driver())


def triton_version() -> str:
    """Of the Triton that is imported, whatever its package is called."""
    import triton

    return str(triton.__version__)


# --- what is remembered on disk ---------------------------------------------------------------------------------------


def key_of(what: dict[str, Any], device: torch.device) -> str:
    """Of a kernel as described, its source, versions and architecture: the name of the file that remembers it."""
    versions = {
        "torch": torch.__version__,
        "triton": triton_version(),
        "driver": driver_version() if device.type == "cuda" else None,
        "assemblers": settings.assemblers(),
        "arch": architecture(device),
    }
    return hashlib.sha256(json.dumps([_sources(), versions, what], sort_keys=True).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Of the kernels, and of what says whether they are right."""
    package = Path(__file__).parent
    judges = [package / name for name in ("trial.py", "trial_backward.py", "reference.py", "spans.py")]
    return _hash_of([*sorted(package.glob("kernels/*.py")), *judges])


def _read(key: str) -> Verdict | None:
    """What is remembered; None if nothing is, or nothing that makes sense."""
    folder = settings.user_probes()
    if folder is None:
        return None
    try:
        found = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("cause", 0), str | None):
        return None
    return Verdict(found["cause"], True)


def refused(device: torch.device) -> list[tuple[str, str]]:
    """`(kernel, cause)` of what is remembered as broken, with the sources, versions and GPU of this process."""
    folder = settings.user_probes()
    found = set()
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        verdict = _read(path.stem)
        if verdict is None or verdict.cause is None:
            continue
        try:
            what = json.loads(path.read_text(encoding="utf-8"))["what"]
            if key_of(what, device) == path.stem:
                found.add((str(what["kernel"]), verdict.cause))
        except (OSError, ValueError, KeyError, TypeError):  # no file of this package's
            continue
    return sorted(found)


def _write(key: str, cause: str | None, what: dict[str, Any]) -> None:
    """Remember for other processes. A folder that takes no files costs them a child each, nothing else."""
    folder = settings.user_probes()
    if folder is None:
        return _say_once("", "no home directory")
    text = json.dumps({"key": key, "cause": cause, "date": time.strftime("%Y-%m-%d"), "what": what}, indent=1)
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix="unfinished-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, folder / f"{key}.json")
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _say_once(str(folder), str(error))
    return None


def _say_once(folder: str, why: str) -> None:
    if folder not in _told:
        _told.add(folder)
        logger.debug("what kernels were found to be is not kept for other processes: %s", why)


# --- the child --------------------------------------------------------------------------------------------------------


def ask(what: dict[str, Any], device: torch.device) -> Verdict:
    """Have a child compile and run the kernel, for at most ``LIMIT_S`` seconds once it has started."""
    request = {
        "what": what,
        "device": str(device),
        "arch": architecture(device),
        "limit_s": START_S + LIMIT_S,
        "path": [entry for entry in sys.path if isinstance(entry, str)],
    }
    with contextlib.ExitStack() as stack:
        try:
            # Files, no pipes: whatever a child leaves behind can hold them open, and nothing waits for that.
            asked, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            # A process group of its own, to be killed with the compilers it started. Popen starts a new program and
            # does not fork this one, which CUDA would not survive.
            child = subprocess.Popen(
                [sys.executable or "python", "-c", _BOOT], stdin=asked, stdout=out, stderr=err,
                env=settings.child_environment(what["interpreted"]), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return _unsure(f"no child process could be started: {error}")
        try:
            in_time = _wait(child, out)
        finally:  # also where the caller was interrupted
            _end(child)
        return judge(child.returncode if in_time else None, _text(out), _text(err))


def _wait(child: subprocess.Popen[bytes], out: IO[bytes]) -> bool:
    """Whether a child ended in time. What it does before it compiles, as importing torch, has a time of its own."""
    began, limit = time.monotonic(), START_S
    while not _ended(child):
        if limit == START_S and _phase(_text(out)) != "starting":
            began, limit = time.monotonic(), LIMIT_S
        if time.monotonic() - began > limit:
            return False
        time.sleep(POLL_S)
    return True


def _ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended. It is not buried yet: nobody else gets its number, which is that of its group."""
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # this process has others bury its children
        return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and what it started, or what it left behind; then bury it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(REAP_S)


def _text(file: IO[bytes]) -> str:
    """All of a file, whose position stays where the child writes next."""
    handle = file.fileno()
    return os.pread(handle, os.fstat(handle).st_size, 0).decode("utf-8", "replace")


def judge(status: int | None, out: str, err: str) -> Verdict:
    """What a child's end means.

    Args:
        status: as ``Popen.returncode``; None: it did not end in time.
        out, err: what it wrote; ``out`` holds its answers, JSON lines of ``{"nsa": ..., "says": ...}``.
    """
    phase, says = _phase(out), dict(_answers(out))
    if status is None:
        cause = f"no answer in {START_S if phase == 'starting' else LIMIT_S:g} s while {phase}"
        return Verdict(cause, True) if phase in AT_WORK else _unsure(cause)
    error = says.get("broken", says.get("error"))
    if error is not None and status > 0:
        cause = f"{error} while {phase}"
        return Verdict(cause, True) if "broken" in says and phase == "compiling" else _unsure(cause)
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        cause = f"killed by {name} while {phase}{_last(err)}"
        return Verdict(cause, True) if name in CRASHES and phase in AT_WORK else _unsure(cause)
    if status == 0 and "result" in says:
        return Verdict(None if says["result"] == "right" else f"wrong result: {says['result']}", True)
    return _unsure(f"exit status {status} without an answer while {phase}{_last(err)}")


def _unsure(cause: str) -> Verdict:
    return Verdict(f"{cause} (NSA_PROBE=never launches it all the same)", False)


def _phase(out: str) -> str:
    """The last that a child said it is in."""
    return dict(_answers(out)).get("phase", "starting")


def _answers(out: str) -> Iterator[tuple[str, str]]:
    """(Kind, text) of each line that is an answer: whatever is imported may print."""
    for line in out.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(found, dict)
            and set(found) == {"nsa", "says"}
            and all(isinstance(x, str) for x in found.values())
        ):
            yield found["nsa"], found["says"]


def _last(text: str) -> str:
    """The last line that says something, for a cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
