"""Launches a compiled kernel again in a fraction of the host time of Triton's own launch.

At every call, ``kernel[grid](...)`` works out which variant of the kernel its arguments need, looks up the variant by a
key made of text, asks the driver about every pointer, and calls hooks that are rarely set. Here the caller names the
variant. Triton compiles the variant at its first launch, and later launches start the compiled kernel directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton

from nsa.kernels.shared import asking
from nsa.kernels.shared.errors import NO_MEMORY, DoesNotFit

TRITON = tuple(int(x) for x in triton.__version__.split(".")[:2])
TMA = TRITON >= (3, 4)
"""Whether this Triton takes tensor descriptors that the host makes."""

if TMA:
    from triton.tools.tensor_descriptor import TensorDescriptor

    class _Unchecked(TensorDescriptor):  # type: ignore[misc]
        """A descriptor that Triton does not check, because that takes as long as the rest of the launch. Triton has
        checked the first launch.

        They compare sizes, strides and the block, which a plan has in common with its first launch; whether strides are
        multiples of 16 bytes, as plans with descriptors assure; and the address, which :meth:`Variant.launch` checks.
        The other fields keep the defaults of the class.
        """

        def __init__(self, base: Any, shape: Any, strides: Any, block_shape: list[int]) -> None:
            self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


# All versions since 3.5 start a compiled kernel with the same arguments. Older ones, and ROCm, use Triton's launch.
DIRECT = TRITON >= (3, 5) and torch.version.hip is None
BETWEEN = 256  # bytes, at least, between the tensors of a workspace
UNASKED = 48 * 1024
"""Bytes of shared memory that CUDA gives any kernel. Triton asks for more where its own tiles need more."""

# Triton and torch use these functions too; calling them directly is faster. A CPU build of torch does not have them.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
knobs: Any = triton.knobs.runtime if DIRECT else None

_remembered: list[Any] = []  # functions that make variants


def remembered(make: Any) -> Any:
    """`lru_cache` for a function that makes variants: plans that differ only in sizes share them."""
    cached = lru_cache(maxsize=1024)(make)
    _remembered.append(cached)
    return cached


def forget() -> None:
    """Forget all variants, so that the next plans make them anew, and their launches compile."""
    for cached in _remembered:
        cached.cache_clear()


def workspace(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that no kernel may read before it was written; tests fill it with NaN."""
    return torch.empty(size, dtype=dtype, device=device)


Size = tuple[int, torch.dtype] | None  # elements of a tensor, and their dtype
Cut = tuple[int, int, int, torch.dtype]  # elements of a tensor, where it begins in int32, its room in int32, and dtype


class Piece:
    """A part of a workspace, as an address. A view would take three times as long to make."""

    __slots__ = ("address", "cut", "whole")

    def __init__(self, whole: torch.Tensor, address: int, cut: Cut) -> None:
        self.whole, self.address, self.cut = whole, address, cut

    def data_ptr(self) -> int:
        return self.address

    @property
    def dtype(self) -> torch.dtype:
        return self.cut[3]

    def room(self) -> torch.Tensor:
        """The tensor and the gap behind it."""
        _, begin, length, dtype = self.cut
        return self.whole.narrow(0, begin, length).view(dtype)

    def tensor(self) -> torch.Tensor:
        return self.room()[: self.cut[0]]

    def zero_(self) -> None:
        """Set a piece of int32 to zero."""
        assert self.dtype == torch.int32
        self.whole.narrow(0, self.cut[1], self.cut[0]).zero_()

    def behind(self, size: int) -> Piece:
        """The part of a piece of int32 after ``size`` elements, a multiple of 4: addresses must be of 16 bytes."""
        assert self.dtype == torch.int32
        elements, begin, length, dtype = self.cut
        return Piece(self.whole, self.address + 4 * size, (elements - size, begin + size, length - size, dtype))


def workspaces(device: torch.device, **sizes: Size) -> list[Any]:
    """A :class:`Piece` of one :func:`workspace` for each name, in order; None for None. If only one is asked for, it
    is a tensor.
    """
    if len(sizes) > 1:
        return divided(device, tuple(sizes.values()))
    return [None if size is None else workspace(*size, device) for size in sizes.values()]


def divided(device: torch.device, sizes: tuple[Size, ...]) -> list[Any]:
    """:func:`workspaces` without names. One allocation, because each takes the host as long as half of a launch."""
    total, cuts = _cuts(sizes)
    whole = workspace(total, torch.int32, device)
    begin = whole.data_ptr()
    return [cut and Piece(whole, begin + 4 * cut[1], cut) for cut in cuts]


@lru_cache(maxsize=1024)
def _cuts(sizes: tuple[Size, ...]) -> tuple[int, list[Cut | None]]:
    """The length of a workspace of int32, and where its pieces lie.

    Addresses are multiples of 512 bytes, as those of allocations are. Between pieces are gaps, which tests fill with
    NaN.
    """
    total, cuts = 0, list[Cut | None]()
    for size in sizes:
        if size is None:
            cuts.append(None)
            continue
        length = -(-(size[0] * size[1].itemsize + BETWEEN) // 512) * 128
        cuts.append((size[0], total, length, size[1]))
        total += length
    return total, cuts


def _check_memory(tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse tensors that have elements, but no memory. The compile matrix launches on meta tensors."""
    if any(x is not None and x.data_ptr() == 0 and x.numel() > 0 and not x.is_meta for x in tensors):
        raise DoesNotFit(NO_MEMORY)


def _descriptor(make: Any, x: Any, block: list[int]) -> Any:
    """``make``'s tensor descriptor ``[sequences or pages, heads, keys, D]`` of ``x``, ``[..., keys, heads, D]``.

    Packed sequences, which lack the first axis, count as one. The address and all strides but the last must be
    multiples of 16 bytes. There is no view for the descriptor, because it would take longer to make.
    """
    shape, strides = x.shape, x.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
    (B, keys, heads, D), (batch, key, head, last) = shape, strides
    return make(x, (B, heads, keys, D), (batch, head, key, last), block)


@dataclass(eq=False, repr=False)
class Variant:
    """A kernel with everything that decides how Triton compiles it, except ``common`` of :meth:`launch`.

    All launches of one variant must have tensors of the same dtypes, with the same ones absent. This is not checked.

    Args:
        kernel: the ``@triton.jit`` function; its compile-time arguments come last.
        constexprs: values of compile-time arguments.
        options: ``num_warps`` and other options of Triton.
        cluster: number of neighbouring programs, along the first axis of the grid, that run at the same time and can
            wait for each other. The grid counts clusters. 0: no clusters, as on GPUs without them.
        static: bytes of shared memory that a program of a cluster declares in assembly, which Triton does not know of.
        tried_first: whether `asking` is asked before Triton compiles the kernel.
        blocks: by position of a tensor that the kernel takes as a tensor descriptor, the shape of the blocks that TMA
            loads. See :func:`_descriptor`.
    """

    kernel: Any
    constexprs: dict[str, object]
    options: dict[str, Any]
    cluster: int = 0
    static: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    tried_first: bool = True
    _compiled: tuple[Any, ...] | None = None
    _asked: dict[Any, Any] = field(default_factory=dict)  # by compiled kernel, its function with more shared memory
    _probed: set[tuple[bool, ...]] = field(default_factory=set)  # which tensors were aligned when it was asked about

    def describe(self, tensors: tuple[torch.Tensor | None, ...]) -> dict[str, Any]:
        """Everything that decides what Triton compiles for a launch on ``tensors``; values that JSON can hold.

        Integers past 2^31 and keys that far apart (``FAR``) also make variants of their own, but are left out, because
        a trial of a kernel has no tensors that large.
        """
        given = dict(zip(self.kernel.arg_names, tensors, strict=False))
        return {
            "kernel": self.kernel.fn.__name__,
            "interpreted": not hasattr(self.kernel, "cache_key"),
            "constexprs": self.constexprs | {name: False for name in ("FAR",) if name in self.constexprs},
            "options": self.options,
            "cluster": self.cluster,
            "tensors": {name: x if x is None else str(x.dtype) for name, x in given.items()},
            "misaligned": [name for name, x in given.items() if x is not None and x.data_ptr() % 16 != 0],
        }

    def launch(
        self, grid: tuple[int, int, int], device: torch.device, tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[int | float, ...], common: bool = True,
    ) -> None:  # fmt: skip
        """Launch on ``device``'s current stream.

        Args:
            tensors, numbers: the run-time arguments, in the kernel's order.
            common: the ints fit int32. If they do not, or if an address is not a multiple of 16, the launch needs
                another compiled kernel. This is rare, so Triton's own launch finds that kernel.

        Raises:
            DoesNotFit: a tensor has elements, but no memory.
            nsa.guard.ProbeFailed: Triton would have to compile, and the kernel failed in a child process.
        """
        index = device.index  # None: not a GPU
        if index is not None and index != current_device():
            with torch.cuda.device(device):
                return self.launch(grid, device, tensors, numbers, common)
        compiled = self._compiled
        # Hooks are set by a profiler. Triton's own launch calls them.
        if compiled and common and not (knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls):
            run, function, metadata, last, present, absent = compiled
            addresses, union = absent.copy(), 0
            for at in present:  # in one loop, because every call pays for it
                address = tensors[at].data_ptr()  # type: ignore[union-attr]
                addresses[at] = address
                union |= address
                if not address:
                    _check_memory(tensors)
            if union & 15 == 0:
                stream = current_stream(index)
                if self.blocks:
                    for at, block in self.blocks.items():
                        addresses[at] = _descriptor(_Unchecked, tensors[at], block)
                run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *last)
                return None
        tensors = tuple(x.tensor() if x.__class__ is Piece else x for x in tensors)
        _check_memory(tensors)
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = [address & 15 == 0 for address in addresses]
        common = common and all(aligned)
        if self.tried_first and tuple(aligned) not in self._probed:
            asking.ask(self, device, tensors)
            self._probed.add(tuple(aligned))
        keywords = self.constexprs | self.options | {"enable_fp_fusion": True}
        last = tuple(self.constexprs[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :])
        present = [at for at, x in enumerate(tensors) if x is not None]
        if not self.cluster:
            given: list[Any] = list(tensors)
            for at, block in self.blocks.items():
                given[at] = _descriptor(TensorDescriptor, tensors[at], block)
            kernel = self.kernel[grid](*given, *numbers, **keywords)
            if DIRECT and common and index is not None and kernel is not None:
                self._compiled = kernel.run, kernel.function, kernel.packed_metadata, last, present, [0] * len(tensors)
            return None
        kernel = self.kernel.warmup(*tensors, *numbers, **keywords, grid=grid)
        if index is None or kernel is None:  # None: the GPU is not there, or a hook compiles the kernel elsewhere
            return None
        # Triton's own clusters share tensors. So Triton compiles without a cluster, and the launch sets its size.
        run, packed = kernel.run, kernel.packed_metadata
        if len(packed) != 3 or packed[1] != 1:
            raise RuntimeError(f"expected (warps, 1, shared memory) as the metadata of a launch, got {packed}")
        metadata = (packed[0], self.cluster, packed[2])
        function = kernel.function
        if packed[2] <= UNASKED < packed[2] + self.static:
            function = self._asked.get(kernel)
            if function is None:  # load the kernel again, with more shared memory
                utils = triton.runtime.driver.active.utils
                function = utils.load_binary(kernel.name, kernel.kernel, UNASKED + 1, index)[1]
                self._asked[kernel] = function
        stream = current_stream(index)
        about = kernel.launch_metadata(grid, stream, *tensors, *numbers, *last)
        hooks = knobs.launch_enter_hook, knobs.launch_exit_hook
        run(*grid, stream, function, metadata, about, *hooks, *addresses, *numbers, *last)
        if common:
            self._compiled = run, function, metadata, last, present, [0] * len(tensors)
        return None
