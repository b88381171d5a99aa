"""Makes Triton's interpreter more than four times as fast, by leaving out work whose result is not used.

Kernels compute the same results bit by bit (`tests/edge/test_interpreting.py`). Without this module:

- integer sums, differences and products are computed a second time in 64 bits, for an overflow assertion that is always
  off in the interpreter;
- each call from one jitted function to another replaces the functions of `triton.language` again;
- the table from Triton's types to NumPy's is built again for each load and each cast;
- each value wraps the numbers of its shape one by one, twice, and its type checks them and makes its name;
- operands of one type and shape are compared number by number, to find out that neither is converted or broadcast, and
  an integer in the source becomes a tile each time;
- each argument of a function is asked three times whether it is a constant of compile time.

A step is left out if this release of Triton does not have the functions that it replaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

MOST_TILES = 1000  # of integers, that are kept at a time

_changes: list[tuple[Any, str, Any, Any]] = []  # object, attribute, Triton's value, our value


@functools.cache
def quicken() -> tuple[str, ...]:
    """Make the interpreter of this process faster. Returns the names of the steps that apply; none without Triton."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return ()

    steps = {
        "overflow": _overflow, "calls": _calls, "types": _types, "shapes": _shapes, "operands": _operands,
        "constants": _constants,
    }  # fmt: skip
    return tuple(name for name, step in steps.items() if step(interpreter))


@contextlib.contextmanager
def as_released() -> Iterator[None]:
    """Triton's own interpreter within the context, for comparison."""
    for owner, name, released, _ in _changes:
        setattr(owner, name, released)
    try:
        yield
    finally:
        for owner, name, _, quick in _changes:
            setattr(owner, name, quick)


def _change(owner: Any, name: str, quick: Any) -> None:
    _changes.append((owner, name, getattr(owner, name), quick))
    setattr(owner, name, quick)


def _overflow(interpreter: Any) -> bool:
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "debug", True) or not getattr(options, "sanitize_overflow", False):
        return False
    assert dataclasses.is_dataclass(options)
    assert not isinstance(options, type)
    _change(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
    return True


def _calls(interpreter: Any) -> bool:
    """Replace the functions of `triton.language` once per launch for each module whose functions run."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return False
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__
    patch: Callable[[Any], Any] = interpreter._patch_lang
    seen: set[int] = set()  # the modules, by their globals
    launches: list[Any] = []  # launches that have not ended

    @functools.wraps(launch)
    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(self)
        seen.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            launches.pop()

    def patching(fn: Any) -> Any:
        module = id(fn.__globals__)
        if launches and module in seen:
            return interpreter._LangPatchScope()  # nothing to restore
        seen.add(module)
        return patch(fn)

    _change(interpreter.GridExecutor, "__call__", launching)
    _change(interpreter, "_patch_lang", patching)
    return True


def _types(interpreter: Any) -> bool:
    """Keep NumPy's type of each scalar type. Pointer types have no hash and are not kept."""
    find = getattr(interpreter, "_get_np_dtype", None)
    if find is None:
        return False
    from triton.language import dtype

    known: dict[Any, Any] = {}

    def finding(kind: Any) -> Any:
        scalar = kind.scalar
        if type(scalar) is not dtype:
            return find(kind)
        if scalar not in known:
            known[scalar] = find(kind)
        return known[scalar]

    _change(interpreter, "_get_np_dtype", finding)
    return True


def _shapes(interpreter: Any) -> bool:
    """Let types and values of equal shapes share the attributes that follow from the shape. Nothing changes those."""
    from triton.language import core

    Shape: Any = getattr(core, "tuple", None)
    if Shape is None or not hasattr(interpreter, "_LangPatchScope"):
        return False
    block_type: Any = core.block_type.__init__
    tensor: Any = core.tensor.__init__
    types: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}  # keeps element types, so that ids are not reused
    shapes: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def typing(self: Any, element_ty: Any, shape: Any) -> None:
        if type(shape) is Shape:
            key = id(element_ty), *shape.values
        elif type(shape) is list:
            key = id(element_ty), *shape
        else:
            block_type(self, element_ty, shape)
            return
        if key not in types:
            block_type(self, element_ty, shape)
            types[key] = element_ty, dict(self.__dict__)
        else:
            self.__dict__.update(types[key][1])

    def holding(self: Any, handle: Any, type: Any) -> None:
        key = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]

    _change(core.block_type, "__init__", typing)
    _change(core.tensor, "__init__", holding)
    return True


def _operands(interpreter: Any) -> bool:
    """Take operands of one type and shape as they are. Keep the tiles that integers become, which nothing changes."""
    from triton.language import core, semantic

    Shape, owner = getattr(core, "tuple", None), getattr(semantic, "TritonSemantic", None)
    if Shape is None or owner is None:
        return False
    convert: Any = owner.binary_op_type_checking_impl
    broadcast: Any = owner.broadcast_impl_value
    tiles: dict[tuple[Any, ...], Any] = {}  # of integers

    def converting(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is type(rhs) is core.tensor:
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is core.dtype and not (div_or_mod and kind.is_floating()):
                return broadcasting(self, lhs, rhs)
        elif type(lhs) is core.tensor and type(rhs) is int and type(lhs.dtype) is core.dtype:
            shape = tuple(lhs.shape.values) if type(lhs.shape) is Shape else tuple(lhs.shape)
            key = rhs, lhs.dtype, shape, arithmetic_check, div_or_mod
            if key in tiles:
                return lhs, tiles[key]
            same, number = convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            if len(tiles) == MOST_TILES:
                tiles.clear()
            if same is lhs:
                tiles[key] = number
            return same, number
        return convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcasting(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        blocks = left.is_block(), right.is_block()
        if blocks == (False, False):
            return lhs, rhs
        if blocks == (True, True) and type(left.shape) is type(right.shape) is Shape:
            if left.shape is right.shape or left.shape.values == right.shape.values:
                return lhs, rhs
        return broadcast(self, lhs, rhs)

    _change(owner, "binary_op_type_checking_impl", converting)
    _change(owner, "broadcast_impl_value", broadcasting)
    return True


def _constants(interpreter: Any) -> bool:
    """Return a value that is neither a constant of compile time nor a sequence of them, without three questions."""
    from triton.language import core

    unwrap = getattr(core, "_unwrap_if_constexpr", None)
    if unwrap is None:
        return False
    plain = {core.tensor, core.dtype, bool, int, float, str, type(None)}

    def unwrapping(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    _change(core, "_unwrap_if_constexpr", unwrapping)
    return True
