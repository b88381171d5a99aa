"""Makes Triton's interpreter faster, five times from Triton 3.6 on, by leaving out work whose result is not used.

Kernels compute the same results bit by bit (`tests/suite/test_interpreting.py`). Without this module:

- integer sums, differences and products are computed a second time in 64 bits, for an overflow assertion that is always
  off in the interpreter;
- each call from one jitted function to another replaces the functions of `triton.language` again;
- the table from Triton's types to NumPy's is built again for each load and each cast;
- each value wraps the numbers of its shape one by one, twice, and its type checks them and makes its name;
- operands of one type and shape are compared number by number, to find out that neither is converted or broadcast, and
  an integer in the source becomes a tile each time;
- each argument of a function is asked three times whether it is a constant of compile time;
- the functions of `triton.language` are searched for in its modules in each launch;
- each function of `triton.language` is called through two others, one of which copies the keyword arguments;
- operators on int32, int64, fp16, fp32 and addresses pass through ten functions before NumPy is called;
- a value beside a larger tile is made as large as the tile in several steps, which make types and check shapes;
- a cast to the type that a value already has compares the names of types;
- each result is checked twice, in functions of their own, for NumPy numbers that are wider than Triton's type.

One step is a repair: before Triton 3.7, a loop whose bound the kernel computes raises TypeError with NumPy 2.4.

A step is left out if this release of Triton does not have the functions that it replaces: the step looks them up first,
and so ends with AttributeError before it changes anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

MOST_TILES = 1000  # of integers, that are kept at a time

_steps: list[Callable[[Any, Any, Any], None]] = []
_changes: list[tuple[Any, str, Any, Any]] = []  # object, attribute, Triton's value, our value
_operators: dict[str, Callable[[Any, Any], Any]] = {}  # of tensors; they return None where Triton has to compute


@functools.cache
def quicken() -> tuple[str, ...]:
    """Make the interpreter of this process faster. Returns the names of the steps that apply; none without Triton."""
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return ()
    applied = []
    for step in _steps:
        with contextlib.suppress(AttributeError):
            step(interpreter, core, getattr(semantic, "TritonSemantic", None))
            applied.append(step.__name__.strip("_"))
    return tuple(applied)


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


def _step(step: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Register a step, which gets Triton's interpreter, `triton.language.core`, and the class `TritonSemantic`."""
    _steps.append(step)
    return step


def _change(owner: Any, name: str, quick: Any) -> None:
    _changes.append((owner, name, getattr(owner, name), quick))
    setattr(owner, name, quick)


@_step
def _index(interpreter: Any, core: Any, semantic: Any) -> None:
    """Convert a tensor to an int by its one element. Before 3.7 Triton converts the array, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patching(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patching  # not undone by `as_released`


@_step
def _overflow(interpreter: Any, core: Any, semantic: Any) -> None:
    options = interpreter.interpreter_builder.options
    if options.debug or not options.sanitize_overflow:
        raise AttributeError("nothing to switch off")
    _change(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))


@_step
def _calls(interpreter: Any, core: Any, semantic: Any) -> None:
    """Replace the functions of `triton.language` once per launch for each module whose functions run."""
    launch, patch, scope = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._LangPatchScope
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
            return scope()  # nothing to restore
        seen.add(module)
        return patch(fn)

    _change(interpreter.GridExecutor, "__call__", launching)
    _change(interpreter, "_patch_lang", patching)


@_step
def _members(interpreter: Any, core: Any, semantic: Any) -> None:
    """Call the functions of `triton.language` without their wrapper, which only checks that `_semantic` was given."""
    of_interpreter, _ = interpreter.interpreter_semantic, interpreter._LangPatchScope

    def patching(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def calling(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = of_interpreter
            return function(*args, **kwargs)

        scope.set_attr(obj, name, calling)
        if obj is core.tensor and name in _operators:
            operator = _operators[name]

            def operating(self: Any, other: Any, **kwargs: Any) -> Any:
                result = operator(self, other)
                return calling(self, other, **kwargs) if result is None else result

            scope.set_attr(obj, name, operating)

    _change(interpreter, "_patch_attr", patching)


@_step
def _search(interpreter: Any, core: Any, semantic: Any) -> None:
    """Keep which members of a module, or of the class of tensors, are functions of `triton.language`."""
    _, _ = interpreter._patch_builtin, interpreter._patch_attr
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patching(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            members = inspect.getmembers(package)
            found[package] = [(name, member) for name, member in members if core.is_builtin(member)]
        for name, member in found[package]:
            if getattr(package, name) is member:  # otherwise it has been replaced in this launch
                interpreter._patch_attr(package, name, member, builder, scope)

    _change(interpreter, "_patch_builtin", patching)


@_step
def _types(interpreter: Any, core: Any, semantic: Any) -> None:
    """Keep NumPy's type of each scalar type. Pointer types have no hash and are not kept."""
    find = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def finding(kind: Any) -> Any:
        scalar = kind.scalar
        if type(scalar) is not core.dtype:
            return find(kind)
        if scalar not in known:
            known[scalar] = find(kind)
        return known[scalar]

    _change(interpreter, "_get_np_dtype", finding)


@_step
def _shapes(interpreter: Any, core: Any, semantic: Any) -> None:
    """Let types and values of equal shapes share the attributes that follow from the shape. Nothing changes those."""
    Shape, _ = core.tuple, interpreter._LangPatchScope
    block_type, tensor = core.block_type.__init__, core.tensor.__init__
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


@_step
def _widths(interpreter: Any, core: Any, semantic: Any) -> None:
    """Check in place whether NumPy's numbers are wider than Triton's type; only then call Triton's functions."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    operate, _ = builder.binary_op, handle.__post_init__

    def making(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is core.dtype and 8 * data.itemsize > max(dtype.primitive_bitwidth, 8):
            self.__post_init__()  # raises

    def operating(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        kind = lhs.dtype
        if type(kind) is core.dtype and lhs.data.dtype.kind != "b":
            data = op(lhs.data, rhs.data)
            if 8 * data.itemsize <= kind.primitive_bitwidth:
                return handle(data, kind)
        return operate(self, lhs, rhs, op)

    _change(handle, "__init__", making)
    _change(builder, "binary_op", operating)


def _shape_of_keys(core: Any) -> Any:
    """Triton's type of shapes, if shapes can be keys of a table. Raises AttributeError if they cannot."""
    if core.constexpr.__hash__ is None:
        raise AttributeError("constants of compile time have no hash")
    return core.tuple


def _meeting(left: list[int], right: list[int]) -> list[int] | None:
    """The shape of two tiles of equal rank that are broadcast; None if they cannot be."""
    fits = len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True))
    return [max(a, b) for a, b in zip(left, right, strict=True)] if fits else None


@_step
def _tiles(interpreter: Any, core: Any, semantic: Any) -> None:
    """Take tiles of one shape as they are. In one step make a number, or a tile with axes of length 1, as large as the
    tile beside it, of equal rank.
    """
    import numpy as np

    Shape = _shape_of_keys(core)
    broadcast, handle_of = semantic.broadcast_impl_value, interpreter.TensorHandle
    splats: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # keeps element types, so that ids are not reused
    common: dict[tuple[Any, ...], list[int] | None] = {}  # shapes of results; None: Triton says what is wrong

    def splatting(number: Any, tile: Any) -> Any:
        kind = number.type
        key = id(kind), *tile.shape.values
        if key not in splats:
            splats[key] = tile.with_element_ty(kind), kind, tuple(tile.shape.values), interpreter._get_np_dtype(kind)
        block, _, sizes, np_dtype = splats[key]
        data = np.empty(sizes, np_dtype)
        data[...] = number.handle.data
        return core.tensor(handle_of(data, kind), block)

    def widening(tile: Any, shape: list[int]) -> Any:
        if tile.type.shape.values == shape:
            return tile
        handle, kind = tile.handle, core.block_type(tile.type.scalar, shape)
        return core.tensor(handle_of(np.broadcast_to(handle.data, shape), handle.dtype.scalar), kind)

    def broadcasting(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block() and not right.is_block():
            return lhs, rhs
        if type(left) is core.block_type and type(left.shape) is Shape:
            if type(right) is core.dtype:
                return lhs, splatting(rhs, left)
            if type(right) is core.block_type and type(right.shape) is Shape:
                if left.shape is right.shape or left.shape.values == right.shape.values:
                    return lhs, rhs
                key = *left.shape.values, 0, *right.shape.values
                if key not in common:
                    common[key] = _meeting(left.shape.values, right.shape.values)
                shape = common[key]
                if shape is not None:
                    return widening(lhs, shape), widening(rhs, shape)
        elif type(left) is core.dtype and type(right) is core.block_type and type(right.shape) is Shape:
            return splatting(lhs, right), rhs
        return broadcast(self, lhs, rhs)

    _change(semantic, "broadcast_impl_value", broadcasting)


@_step
def _operands(interpreter: Any, core: Any, semantic: Any) -> None:
    """Take operands of one type as they are. Keep the tiles that integers become, which nothing changes."""
    Shape = _shape_of_keys(core)
    convert = semantic.binary_op_type_checking_impl
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
                return self.broadcast_impl_value(lhs, rhs)
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

    _change(semantic, "binary_op_type_checking_impl", converting)


@_step
def _arithmetic(interpreter: Any, core: Any, semantic: Any) -> None:
    """Compute sums, differences, products and comparisons of usual types in one call of NumPy, which broadcasts; and
    add axes in one.
    """
    import numpy as np

    Shape, _ = _shape_of_keys(core), semantic._cast_to_computation_type  # a number takes the type of the tile beside it
    handle_of, builder = interpreter.TensorHandle, interpreter.interpreter_builder
    if builder.options.sanitize_overflow:
        raise AttributeError("integers are added twice")
    integers = {"int32": (np.int32, core.int32), "int64": (np.int64, core.int64)}
    numbers = integers | {"fp16": (np.float16, core.float16), "fp32": (np.float32, core.float32)}
    common = {(name, name): kind for name, (_, kind) in numbers.items()}  # of two tiles
    common |= {("int32", "int64"): core.int64, ("int64", "int32"): core.int64}
    bounds = {name: np.iinfo(number) for name, (number, _) in integers.items()}
    types: dict[tuple[Any, ...], Any] = {}  # of results; None: Triton has to compute, or says what is wrong

    def sizes(x: Any) -> list[int] | None:
        """The shape of a tile, [] of a single number, or None if the shape is of a type that is not known."""
        if not x.type.is_block():
            return []
        return x.type.shape.values if type(x.type.shape) is Shape else None

    def meeting(kind: Any, left: Any, right: Any) -> Any:
        a, b = sizes(left), sizes(right)
        if a is None or b is None:
            return None
        if not a or not b:
            return core.block_type(kind, list(a or b)) if a or b else kind
        shape = _meeting(a, b)
        return None if shape is None else core.block_type(kind, shape)

    def typed(kind: Any, left: Any, right: Any) -> Any:
        key = kind.name, id(left.shape), id(right.shape)  # equal shapes are one object, which is kept (`_shapes`)
        if key not in types:
            types[key] = meeting(kind, left, right)
        return types[key]

    def operator(compute: Any, compares: bool = False) -> Callable[[Any, Any], Any]:
        def operating(self: Any, other: Any) -> Any:
            if type(other) is core.constexpr:
                other = other.value
            if type(other) is core.tensor:
                kind, beside = common.get((self.dtype.name, other.dtype.name)), other.handle.data
            else:
                number, kind = numbers.get(self.dtype.name, (None, None))
                if type(other) is int:
                    limits = bounds.get(self.dtype.name)
                    fits = limits is None or limits.min <= other <= limits.max
                else:
                    fits = type(other) is float and self.dtype.name not in integers
                if number is None or not fits:
                    return None
                beside, other = number(other), self
            if kind is None:
                return None
            result = typed(core.int1 if compares else kind, self, other)
            return None if result is None else core.tensor(handle_of(compute(self.handle.data, beside), kind), result)

        return operating

    def adding(self: Any, other: Any) -> Any:
        if type(self.dtype) is not core.pointer_type:
            return adding_numbers(self, other)
        if type(other) is not core.tensor or other.dtype.name not in integers:
            return None
        result = typed(self.dtype, self, other)
        return None if result is None else core.tensor(builder.create_addptr(self.handle, other.handle), result)

    def logical(compute: Any) -> Callable[[Any, Any], Any]:
        def operating(self: Any, other: Any) -> Any:
            if type(other) is not core.tensor or not self.dtype.name == other.dtype.name == "int1":
                return None
            a, b, result = self.handle.data, other.handle.data, typed(core.int1, self, other)
            if result is None or not a.dtype == b.dtype == np.bool_:
                return None
            return core.tensor(handle_of(compute(a, b), self.handle.dtype.scalar), result)

        return operating

    def with_axes(self: Any, places: Any) -> Any:
        """`x[:, None]` and its like."""
        if type(places) is not tuple or not all(
            place is None or type(place) is slice and place == slice(None) for place in places
        ):
            return None
        shape, kind = sizes(self), self.dtype
        if not shape or len(places) - places.count(None) != len(shape):
            return None
        key = kind.name, id(self.shape), *(place is None for place in places)
        if key not in types:
            rest = iter(shape)
            types[key] = core.block_type(kind, [1 if place is None else next(rest) for place in places])
        return core.tensor(handle_of(self.handle.data[places], self.handle.dtype.scalar), types[key])

    adding_numbers = operator(np.add)
    _operators.update(__getitem__=with_axes, __rmul__=operator(np.multiply))
    _operators.update(__and__=logical(np.logical_and), __or__=logical(np.logical_or), __radd__=adding)
    _operators.update(__add__=adding, __sub__=operator(np.subtract), __mul__=operator(np.multiply))
    _operators.update(__lt__=operator(np.less, True), __le__=operator(np.less_equal, True))
    _operators.update(__gt__=operator(np.greater, True), __ge__=operator(np.greater_equal, True))
    _operators.update(__eq__=operator(np.equal, True), __ne__=operator(np.not_equal, True))


@_step
def _casts(interpreter: Any, core: Any, semantic: Any) -> None:
    """Return a value that already has the type as it is."""
    cast = semantic.cast

    def casting(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    _change(semantic, "cast", casting)


@_step
def _constants(interpreter: Any, core: Any, semantic: Any) -> None:
    """Return a value that is neither a constant of compile time nor a sequence of them, without three questions."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, bool, int, float, str, type(None)}

    def unwrapping(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    _change(core, "_unwrap_if_constexpr", unwrapping)
