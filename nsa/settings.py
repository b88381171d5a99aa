"""Run-time settings. `nsa.gpu` reads the measurements of a GPU.

Settings come in layers, of which the later one wins: defaults < YAML (`nsa/configs/base.yaml`, then the file named by
`NSA_CONFIG`) < environment (`NSA_<NAME>`) < argument (`nsa.configure`). The first three layers are read once, at the
first `get()`. Later calls of `get()` only read a few globals, because every attention call begins with `get()`.

A change by `nsa.configure` holds for one thread or asyncio task. Autograd runs a backward pass on its own threads.
There the settings are those of the thread that called `backward()`, until our backward pass applies those of its
forward pass.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("nsa")

ON_RELOAD: list[Callable[[], None]] = []  # called by `reload`: other modules forget what they derived from settings
PROBE = ("auto", "always", "never")
VARIABLES_OF_THE_SUITE = ("NSA_TEST_TRITON_SEL", "NSA_COMMIT")

_CONFIGS = Path(__file__).parent / "configs"
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One set of run-time settings. The environment variable of each is `NSA_` and the setting's name in capitals."""

    use_triton_sel: bool = True  # backend `auto` may choose Triton
    sel_triton_min_L: int | None = None  # keys; rows with a smaller bound use packed SDPA; None: measured per GPU
    sel_triton_group: bool = True  # a program computes a whole GQA group; False: one head, for comparison
    sel_triton_db: bool = True  # software pipelining (num_stages > 1)
    batch_invariant: bool = False  # in Triton, a row's result does not depend on the other rows of the call
    use_sel_pack: bool = True  # the fallback is packed SDPA; False: the gather reference
    force_parity: bool = False  # `auto` is always the reference
    probe: str = "auto"  # try kernels in a child process first; auto: unless the compile matrix has passed
    debug_timing: bool = False  # log route and time of each call, host and device
    debug_compare: bool = False  # log the error of each call against the reference
    debug_shapes: bool = False  # log shapes and strides
    debug_cache: bool = False  # log lengths and page numbers that are impossible for the KV cache
    vllm: bool = False  # our kernels serve MiniMax-M3 and QSA in vLLM (nsa.integrations.vllm)

    pins: tuple[tuple[str, Any], ...] = ()  # tiles by kernel family: see `nsa.kernels.pinned`, not a setting by name

    text: str = dataclasses.field(init=False, repr=False)
    """All values as one string. Calls look up their plan by this string, because a string caches its hash."""

    pin: dict[str, Any] = dataclasses.field(init=False, repr=False, compare=False)
    """The pinned tiles by family."""

    def __post_init__(self) -> None:
        values = [getattr(self, field.name) for field in dataclasses.fields(self) if field.init]
        object.__setattr__(self, "text", repr(values))
        object.__setattr__(self, "pin", dict(self.pins))


NAMES = tuple(field.name for field in dataclasses.fields(Settings) if field.init and field.name != "pins")
Value = bool | int | str | None  # the value of a setting

_lock = threading.RLock()
_unreadable: set[Path] = set()  # files of which a warning said that they cannot be read
_loaded: tuple[Settings, dict[str, str]] | None = None  # the first three layers, and the source of each value
_layers: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("blocks of `configure`, innermost last", default=())
_in_force: ContextVar[Settings | None] = ContextVar("settings within `configure` blocks", default=None)

_open: dict[int, Settings] = {}  # what `configure` blocks have in force, by thread
_backward_pass = torch._C._current_graph_task_id  # the backward pass that this thread works for; -1: none


def get() -> Settings:
    """The settings in force. Files and environment are read at the first call, and again after `reload`.

    Raises:
        ValueError: a value cannot be parsed. The text names the file or variable, the value and what is accepted.
    """
    current = _in_force.get()
    if current is None and _backward_pass() != -1:
        current = _of_caller()
    if current is None:
        loaded = _loaded
        return _first()[0] if loaded is None else loaded[0]
    return current


def sources() -> dict[str, str]:
    """The source of each setting's value: `default`, a file, a variable or `nsa.configure`."""
    argued = {name: "nsa.configure" for layer in _layers.get() for name in layer if name in NAMES}
    return {**_first()[1], **argued}


def configure(**values: Value) -> AbstractContextManager[Settings]:
    """Change settings inside a `with` block. Blocks nest, and the end of a block undoes its changes.

    The change holds only for this thread or asyncio task. A backward pass uses the settings of its forward pass. There
    are two exceptions: a checkpoint that is computed again, and the backward pass of a compiled graph, use the settings
    in force where `backward()` is called. Before PyTorch 2.13, if several threads have open blocks, these two use the
    settings outside all blocks.

    Args:
        values: names and values as in :class:`Settings`.

    Raises:
        TypeError: an unknown name, or a value of the wrong type. Raised by this call, before the block begins.
        ValueError: a negative ``sel_triton_min_L``, or an unknown value of ``probe``. Raised at the same point.
    """
    for name, value in values.items():
        if name not in NAMES:
            raise TypeError(f"unknown setting {name!r}, expected one of: {', '.join(NAMES)}")
        if not _valid_type(name, value):
            raise TypeError(f"{name}: expected {_expected(name)}, got {value!r}")
        if not _valid(name, value):
            raise ValueError(f"{name}: expected {_expected(name)}, got {value!r}")
    return _argument_layer(dict(values))


def pinned(tiles: Mapping[str, Any]) -> AbstractContextManager[Settings]:
    """In a `with` block, kernels use these tiles, by family. Scope and nesting are those of :func:`configure`."""
    return _argument_layer({"pins": tuple(sorted((get().pin | dict(tiles)).items()))})


def reload() -> None:
    """Have the next `get()` read files and environment again. Open `configure` blocks stay in force."""
    global _loaded
    with _lock:
        _loaded = None
    _apply(_layers.get())
    for forget in ON_RELOAD:
        forget()


def user_gpus() -> Path | None:
    """The folder of this user's measurements, which `python -m nsa calibrate` writes; None without a home directory."""
    return _of_user("XDG_CONFIG_HOME", "~/.config", "gpus")


def user_probes() -> Path | None:
    """The folder in which `nsa.guard` keeps its results for this user; None if the user has no home directory."""
    return _of_user("XDG_CACHE_HOME", "~/.cache", "probe")


def _of_user(variable: str, default: str, name: str) -> Path | None:
    try:
        return Path(os.environ.get(variable) or default).expanduser() / "nsa" / name
    except RuntimeError:  # HOME is unset and the user id has no entry in the system, as in some containers
        return None


def readable(path: Path) -> bool:
    """Whether a file is there and can be read. If it is there and cannot be read, one warning names it."""
    try:
        with path.open("rb"):
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if path not in _unreadable:
            _unreadable.add(path)
            logger.warning("%s is skipped: it cannot be read (%s)", path, error.strerror)
        return False


def child_environment(interpret: bool) -> dict[str, str]:
    """The environment for a child process whose kernels are interpreted or compiled as asked.

    `TRITON_INTERPRET` is set anew, because this process may have changed it after Triton read it. `NSA_PROBE=never`
    keeps the child from starting children of its own. It could start them without end if `sys.executable` is an
    application that calls `nsa` when it starts. The calls of a child are not recorded.
    """
    dropped = ("TRITON_INTERPRET", "NSA_RECORD_WORKLOAD")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"NSA_PROBE": "never"} | ({"TRITON_INTERPRET": "1"} if interpret else {})


def assemblers() -> dict[str, str]:
    """Paths of assemblers that the user has Triton use instead of its own, by variable."""
    names = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


class applied:  # noqa: N801  (used like a function; a `with` block over a class takes a third of the time)
    """In one `with` block, these settings are in force. A backward pass applies those of its forward pass."""

    __slots__ = ("before", "settings")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> None:
        self.before = _in_force.get()
        _in_force.set(self.settings)

    def __exit__(self, *_: object) -> None:
        _in_force.set(self.before)


def _of_caller() -> Settings | None:
    """On a thread of autograd, the settings of the `configure` blocks around the call of `backward()`.

    PyTorch 2.13 hands the context variables of that call to its threads. For older versions, the settings are those of
    the only thread with open blocks.
    """
    if torch._C._is_key_in_tls("context"):
        context = torch._C._get_obj_in_tls("context")
        return None if context is None else context.get(_in_force)
    blocks = list(_open.values())  # one look: other threads begin and end blocks meanwhile
    return blocks[0] if len(blocks) == 1 else None


@contextmanager
def _argument_layer(values: dict[str, Any]) -> Iterator[Settings]:
    _apply((*_layers.get(), values))
    try:
        yield get()
    finally:
        # Removes the layer by identity, because blocks may end in another order than they began.
        _apply(tuple(layer for layer in _layers.get() if layer is not values))


def _apply(layers: tuple[dict[str, Any], ...]) -> None:
    _layers.set(layers)
    settings = _first()[0] if layers else None
    for layer in layers:
        settings = dataclasses.replace(settings, **layer)  # type: ignore[type-var]
    _in_force.set(settings)
    if settings is None:
        _open.pop(threading.get_ident(), None)
    else:
        _open[threading.get_ident()] = settings


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
    if user_file is not None and not user_file.strip():
        raise ValueError(f"NSA_CONFIG={user_file!r}: expected the path of a YAML file, got nothing")
    if user_file is not None and readable(Path(user_file)):
        files.append(Path(user_file))
    elif user_file is not None and Path(user_file) not in _unreadable:
        logger.warning("NSA_CONFIG=%r is skipped: there is no such file", user_file)
    _name_misspelt()
    for path in files:
        for name, value in _parse_runtime(path).items():
            values[name], origin[name] = value, str(path)
    for name in NAMES:
        variable = f"NSA_{name.upper()}"
        text = os.environ.get(variable)
        if text is not None:
            values[name], origin[name] = _parse_variable(name, variable, text), variable
    return Settings(**values), origin  # type: ignore[arg-type]


def _name_misspelt() -> None:
    """Log a warning for each variable whose name is nearly that of a variable of ours."""
    ours = {"NSA_CONFIG", *(f"NSA_{name.upper()}" for name in NAMES), *VARIABLES_OF_THE_SUITE}
    for variable in os.environ:
        if variable.upper().startswith("NSA_") and variable not in ours:
            near = difflib.get_close_matches(variable.upper(), sorted(ours), 1, 0.85)
            if near:
                logger.warning("the variable %s is not read: did you mean %s?", variable, near[0])


def _parse_variable(name: str, variable: str, text: str) -> Value:
    word = text.strip().lower()
    value: Value
    if name == "sel_triton_min_L":
        value, expected = int(word) if re.fullmatch(r"[0-9]+", word) else None, "a non-negative integer"
    elif name == "probe":
        value, expected = word if word in PROBE else None, _expected(name)
    else:
        value, expected = _BOOLS.get(word), "one of 1, 0, true, false, yes, no, on, off"
    if value is None:
        raise ValueError(f"{variable}={text!r}: expected {expected}")
    return value


def _parse_runtime(path: Path) -> dict[str, Value]:
    document = read_yaml(path)
    reject_unknown(path, "", document, ("runtime",))
    runtime = document.get("runtime") or {}
    if not isinstance(runtime, dict):
        raise ValueError(f"{path}: runtime: expected a mapping, got {shown(runtime)}")
    reject_unknown(path, "runtime.", runtime, NAMES)
    for name, value in runtime.items():
        if not _valid(name, value):
            raise ValueError(f"{path}: runtime.{name}: expected {_expected(name, yaml=True)}, got {shown(value)}")
    return runtime


def read_yaml(path: Path, text: str | None = None) -> dict[object, object]:
    """Parse a file of settings or measurements, or ``text``, which is about to be written there.

    Raises:
        ValueError: it is not a YAML mapping. The text names the file.
    """
    import yaml  # imported here to keep `import nsa` fast

    loader = _loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml is six times as fast, but optional
    try:
        document = yaml.load(path.read_text(encoding="utf-8") if text is None else text, loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: expected YAML: nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {shown(document)}")
    return document


@functools.cache
def _loader(base: Any) -> Any:
    """A loader that names the line of an invalid value such as `2026-02-31`, of a number too large, or of a key that is
    given twice.
    """

    class Loader(base):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.checked: set[Any] = set()  # nodes of mappings, which `<<` has not changed yet when they are checked

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            line, kind = node.start_mark.line + 1, node.tag.rpartition(":")[2]
            try:
                value = super().construct_object(node, deep)
            except (KeyError, IndexError, AttributeError, ValueError) as error:
                if isinstance(node.value, list):  # of a part, whose line the text names
                    raise
                raise ValueError(f"line {line}: expected a valid {kind}, got {node.value[:80]!r}") from error
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(f"line {line}: expected an integer of at most 64 bits, got {node.value[:80]}")
            return value

        def flatten_mapping(self, node: Any) -> None:
            keys: set[tuple[str, str]] = set()
            for key, _ in node.value if node not in self.checked else ():
                if not isinstance(key.value, str) or key.tag.endswith(":merge"):
                    continue
                if (key.tag, key.value) in keys:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: {key.value}: expected each key once, got it again")
                keys.add((key.tag, key.value))
            self.checked.add(node)
            super().flatten_mapping(node)

    return Loader


_limits = reprlib.Repr()
_limits.maxstring = _limits.maxother = 100
shown = _limits.repr  # a value for the text of an error, however long it is, or deep, or part of itself


def reject_unknown(path: Path, prefix: str, keys: Mapping[object, object], accepted: tuple[str, ...]) -> None:
    """Raise ValueError for the first key that is not accepted. The text names the file and the key."""
    for key in keys:
        if key not in accepted:
            raise ValueError(f"{path}: unknown key {prefix}{key}, expected one of: {', '.join(accepted)}")


def _valid_type(name: str, value: object) -> bool:
    if name == "sel_triton_min_L":
        return value is None or (isinstance(value, int) and not isinstance(value, bool))
    return isinstance(value, str if name == "probe" else bool)


def _valid(name: str, value: object) -> bool:
    in_range = value in PROBE if name == "probe" else not isinstance(value, int) or value >= 0
    return _valid_type(name, value) and in_range


def _expected(name: str, *, yaml: bool = False) -> str:
    if name == "sel_triton_min_L":
        return f"a non-negative integer or {'null' if yaml else 'None'}"
    if name == "probe":
        return f"one of {', '.join(PROBE)}"
    return "true or false" if yaml else "True or False"


@functools.cache
def recording() -> str | None:
    """The folder for which this process counts its calls (`python -m nsa record-workload`), or None."""
    return os.environ.get("NSA_RECORD_WORKLOAD")


@functools.cache
def interpreter() -> bool:
    """Whether Triton interprets kernels in this process. The variable is read once, as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
