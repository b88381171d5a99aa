"""What `nsa` may do at run time. What was measured on a GPU is read by `nsa.gpu`.

Settings come in layers, the later one wins: defaults < YAML (`nsa/configs/base.yaml`, then the file named by
`NSA_CONFIG`) < environment (`NSA_<NAME>`) < argument (`nsa.configure`). The first three are read once, at the first
`get()`; after that `get()` reads a few globals, because every call begins with it.

What `nsa.configure` changes belongs to a thread or task. Autograd runs a backward pass on threads of its own: there
the settings are those of the thread that called `backward()`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

ON_RELOAD: list[Callable[[], None]] = []  # what others remember of files that were read
PROBE = ("auto", "always", "never")

_CONFIGS = Path(__file__).parent / "configs"
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One consistent set of run-time settings; the environment name of each is `NSA_` and the name in capitals."""

    use_triton_sel: bool = True  # Triton may be used at all
    sel_triton_min_L: int | None = None  # rows whose bound is shorter use packed SDPA; None: measured per GPU
    sel_triton_group: bool = True  # a whole GQA group per program, or one head (for comparison)
    sel_triton_db: bool = True  # software pipelining (num_stages > 1)
    batch_invariant: bool = False  # in Triton, what else shares a call changes no row's result: few are as many
    use_sel_pack: bool = True  # the fallback is packed SDPA, else the gather reference
    force_parity: bool = False  # always the reference
    probe: str = "auto"  # a kernel's first compile in a child process: where nobody has compiled it, always, never
    debug_timing: bool = False  # log route and time of each call, host and device
    debug_compare: bool = False  # log the error against the reference
    debug_shapes: bool = False  # log shapes and strides
    debug_cache: bool = False  # log lengths and pages that a KV cache cannot have

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(dataclasses.astuple(self)))

    def __hash__(self) -> int:
        """Computed once: every call looks up its route by the settings in force."""
        return self._hash  # type: ignore[attr-defined, no-any-return]


NAMES = tuple(field.name for field in dataclasses.fields(Settings))
Value = bool | int | str | None  # of one setting

_lock = threading.RLock()
_loaded: tuple[Settings, dict[str, str]] | None = None  # the first three layers and where each value came from
_layers: ContextVar[tuple[dict[str, Value], ...]] = ContextVar("blocks of `configure`, innermost last", default=())
_in_force: ContextVar[Settings | None] = ContextVar("settings within `configure` blocks", default=None)

# Autograd's threads have no context of ours. PyTorch hands them what the thread that called `backward()` had stashed.
_STASH = "nsa.settings"
_backward_pass = torch._C._current_graph_task_id  # which one this thread works for; -1: none
_unstash = getattr(torch._C, "_remove_obj_from_tls", None)


def get() -> Settings:
    """The settings in force. Reads files and environment at the first call only (see `reload`).

    Raises ValueError naming file or variable, value and what is accepted, if one of them cannot be parsed.
    """
    current = _in_force.get()
    if current is None and _backward_pass() != -1:
        current = _of_caller()
    if current is None:
        loaded = _loaded
        return _first()[0] if loaded is None else loaded[0]
    return current


def sources() -> dict[str, str]:
    """For each setting, where its present value came from: `default`, a file, a variable or `nsa.configure`."""
    argued = {name: "nsa.configure" for layer in _layers.get() for name in layer}
    return {**_first()[1], **argued}


def configure(**values: Value) -> AbstractContextManager[Settings]:
    """Change settings inside a `with` block; blocks nest, and leaving one restores what it covered.

    The change holds for this thread, or this asyncio task, alone. A backward pass has the settings of its
    forward. What a checkpoint computes again, and the backward of a compiled graph, has those in force where
    `backward()` is called; before PyTorch 2.13 if that is the main thread, else those of the process.

    Raises TypeError for an unknown name or a value of the wrong type and ValueError for a negative length or an unknown
    word, at once.
    """
    for name, value in values.items():
        if name not in NAMES:
            raise TypeError(f"unknown setting {name!r}, expected one of: {', '.join(NAMES)}")
        if not _valid_type(name, value):
            raise TypeError(f"{name}: expected {_expected(name)}, got {value!r}")
        if not _valid(name, value):
            raise ValueError(f"{name}: expected {_expected(name)}, got {value!r}")
    return _argument_layer(dict(values))


def reload() -> None:
    """Forget what was read, so that the next `get()` reads files and environment again. Open blocks stay in force."""
    global _loaded
    with _lock:
        _loaded = None
    _apply(_layers.get())
    for forget in ON_RELOAD:
        forget()


def user_gpus() -> Path:
    """The folder of this user's own measurements, which `python -m nsa calibrate` writes."""
    config_home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config_home).expanduser() / "nsa" / "gpus"


def user_probes() -> Path | None:
    """The folder of what `nsa.guard` found out on this user's machines; None where the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nsa" / "probe"
    except RuntimeError:  # no HOME, and a user id that the system does not know, as in some containers
        return None


def child_environment(interpret: bool) -> dict[str, str]:
    """This process's environment for a child whose kernels run in Triton's interpreter, or are compiled.

    Whatever became of the variable since Triton read it here. No child probes in its turn: where `sys.executable` is an
    application, its child is the application again, which would have a child of its own.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"NSA_PROBE": "never"} | ({"TRITON_INTERPRET": "1"} if interpret else {})


def assemblers() -> dict[str, str]:
    """Assemblers that Triton was told to use instead of its own, by variable."""
    names = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


@contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Have these in force in a `with` block: on another thread those of a call that began elsewhere."""
    before = _in_force.get()
    _in_force.set(settings)
    try:
        yield
    finally:
        _in_force.set(before)


def _of_caller() -> Settings | None:
    """On a thread of autograd's, what `configure` blocks have in force where `backward()` was called."""
    stashed = torch._C._get_obj_in_tls(_STASH) if torch._C._is_key_in_tls(_STASH) else None
    if stashed is None or stashed[0] == threading.get_ident():  # on its own thread the context variable knows better
        return None
    settings: Settings = stashed[1]
    return settings


@contextmanager
def _argument_layer(values: dict[str, Value]) -> Iterator[Settings]:
    _apply((*_layers.get(), values))
    try:
        yield get()
    finally:
        # By identity, not the last: two blocks need not end in the order in which they began.
        _apply(tuple(layer for layer in _layers.get() if layer is not values))


def _apply(layers: tuple[dict[str, Value], ...]) -> None:
    _layers.set(layers)
    settings = _first()[0] if layers else None
    for layer in layers:
        settings = dataclasses.replace(settings, **layer)  # type: ignore[type-var]
    _in_force.set(settings)
    _stash(settings)


def _stash(settings: Settings | None) -> None:
    """Have autograd's threads see these settings while they work for this thread.

    A thread that ends with something stashed aborts the process. Before PyTorch 2.13, which can remove it, only the
    main thread stashes.
    """
    if settings is None and _unstash is not None:
        if torch._C._is_key_in_tls(_STASH):
            _unstash(_STASH)
    elif _unstash is not None or threading.current_thread() is threading.main_thread():
        torch._C._stash_obj_in_tls(_STASH, (threading.get_ident(), settings))


def _first() -> tuple[Settings, dict[str, str]]:
    """The first three layers, read once."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> tuple[Settings, dict[str, str]]:
    values: dict[str, Value] = {}
    origin = dict.fromkeys(NAMES, "default")
    files = [_CONFIGS / "base.yaml"]
    user_file = os.environ.get("NSA_CONFIG")
    if user_file:
        files.append(Path(user_file))
        if not files[-1].is_file():
            raise ValueError(f"NSA_CONFIG={user_file!r}: expected the path of a YAML file, found none there")
    for path in files:
        for name, value in _parse_runtime(path).items():
            values[name], origin[name] = value, str(path)
    for name in NAMES:
        variable = f"NSA_{name.upper()}"
        text = os.environ.get(variable)
        if text is not None:
            values[name], origin[name] = _parse_variable(name, variable, text), variable
    return Settings(**values), origin  # type: ignore[arg-type]


def _parse_variable(name: str, variable: str, text: str) -> Value:
    if name == "sel_triton_min_L":
        if not re.fullmatch(r"[0-9]+", text.strip()):
            raise ValueError(f"{variable}={text!r}: expected a non-negative integer")
        return int(text)
    if name == "probe":
        if text.strip().lower() not in PROBE:
            raise ValueError(f"{variable}={text!r}: expected {_expected(name)}")
        return text.strip().lower()
    if text.strip().lower() not in _BOOLS:
        raise ValueError(f"{variable}={text!r}: expected one of 1, 0, true, false, yes, no, on, off")
    return _BOOLS[text.strip().lower()]


def _parse_runtime(path: Path) -> dict[str, Value]:
    document = read_yaml(path)
    reject_unknown(path, "", document, ("runtime",))
    runtime = document.get("runtime") or {}
    if not isinstance(runtime, dict):
        raise ValueError(f"{path}: runtime: expected a mapping, got {runtime!r}")
    reject_unknown(path, "runtime.", runtime, NAMES)
    for name, value in runtime.items():
        if not _valid(name, value):
            raise ValueError(f"{path}: runtime.{name}: expected {_expected(name, yaml=True)}, got {value!r}")
    return runtime


def read_yaml(path: Path, text: str | None = None) -> dict[object, object]:
    """A file of settings or measurements. ``text``: what the file is about to hold.

    Raises ValueError naming the file, if that is no YAML mapping.
    """
    import yaml  # only where a file is read: `import nsa` stays light

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml: six times as fast, but not in every build
    try:
        document = yaml.load(path.read_text(encoding="utf-8") if text is None else text, loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {document!r}")
    return document


def reject_unknown(path: Path, prefix: str, keys: Mapping[object, object], accepted: tuple[str, ...]) -> None:
    """Raises ValueError naming the file and the first key that nothing reads."""
    for key in keys:
        if key not in accepted:
            raise ValueError(f"{path}: unknown key {prefix}{key}, expected one of: {', '.join(accepted)}")


def _valid_type(name: str, value: object) -> bool:
    if name == "sel_triton_min_L":
        return value is None or (isinstance(value, int) and not isinstance(value, bool))
    return isinstance(value, str if name == "probe" else bool)


def _valid(name: str, value: object) -> bool:
    if not _valid_type(name, value):
        return False
    return value in PROBE if name == "probe" else not isinstance(value, int) or value >= 0


def _expected(name: str, *, yaml: bool = False) -> str:
    if name == "sel_triton_min_L":
        return f"a non-negative integer or {'null' if yaml else 'None'}"
    if name == "probe":
        return f"one of {', '.join(PROBE)}"
    return "true or false" if yaml else "True or False"


@functools.cache
def interpreter() -> bool:
    """Whether Triton runs kernels in its interpreter in this process (Triton's own switch, read once)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
