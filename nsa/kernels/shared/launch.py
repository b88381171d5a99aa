"""Launching a kernel again for a fraction of what Triton's own launch costs the host.

``kernel[grid](...)`` works out with every call which variant of the kernel its arguments need, looks that up by a key
made of text, asks the driver about every pointer and calls hooks that are hardly ever there. Here the caller says which
variant it means, and what Triton compiled for it the first time is launched directly from then on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from nsa import guard

TRITON = tuple(int(x) for x in triton.__version__.split(".")[:2])

# Launching what is compiled takes the same arguments since 3.5. Before, and on ROCm, launches stay Triton's.
DIRECT = TRITON >= (3, 5) and torch.version.hip is None
INT32_MAX = 2**31 - 1
UNASKED = 48 * 1024
"""Bytes of shared memory that CUDA gives a kernel for which nobody asked for more; Triton asks where its own are."""

# What Triton and torch ask for the same, without what they do around it; a build for the CPU has neither.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
knobs: Any = triton.knobs.runtime if DIRECT else None


class Variant:
    """A kernel with everything that decides how it is compiled, but for what `common` says of a launch.

    Args:
        kernel: the ``@triton.jit`` function; its compile-time arguments come last.
        constexprs: values of compile-time arguments.
        options: ``num_warps`` and what else Triton takes.
        cluster: so many programs in a row, along the first axis of the grid, run at the same time and can wait for
            each other; the grid counts clusters. Only on a GPU that has them. 0: without.
        static: bytes of shared memory that a cluster's program declares in assembly, where Triton does not see them.

    Whatever else of a launch makes Triton compile anew, as dtypes and absent tensors do, must be the same in all
    launches of one variant; nobody looks.
    """

    def __init__(
        self, kernel: Any, constexprs: dict[str, object], options: dict[str, Any], cluster: int = 0, static: int = 0
    ) -> None:
        self.kernel = kernel
        self.constexprs = constexprs
        self.options = options
        self.cluster = cluster
        self.static = static
        self._compiled: tuple[Any, ...] | None = None
        self._asked: dict[Any, Any] = {}  # functions of compiled kernels that need more than Triton asked for
        self._probed: set[tuple[bool, ...]] = set()  # by which tensors are misaligned

    def describe(self, tensors: tuple[torch.Tensor | None, ...]) -> dict[str, Any]:
        """Everything that decides what Triton compiles for a launch on ``tensors``, as JSON holds it.

        Except integers past 2^31 and keys that far apart (``FAR``), which make variants of their own: a trial of a
        kernel has no tensors that large.
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
        self,
        grid: tuple[int, int, int],
        device: torch.device,
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[int | float, ...],
        common: bool = True,
    ) -> None:
        """Launch on ``device``'s current stream.

        Args:
            tensors, numbers: the run-time arguments, in the kernel's order.
            common: the ints fit int32. A launch where they do not, or where an address is no multiple of 16, is
                another variant, and rare: Triton finds out by itself.

        Raises:
            nsa.guard.ProbeFailed: Triton would compile, and a child process found that it must not.
        """
        cuda = device.type == "cuda"
        if cuda and device.index != current_device():
            with torch.cuda.device(device):
                return self.launch(grid, device, tensors, numbers, common)
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        union = 0
        for address in addresses:
            union |= address
        common = common and union & 15 == 0
        compiled = self._compiled
        if compiled is not None and common:
            run, function, metadata, last = compiled
            if not (knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls):  # a profiler's
                stream = current_stream(device.index)
                run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *last)
                return None
        misaligned = () if union & 15 == 0 else tuple(address & 15 != 0 for address in addresses)
        if misaligned not in self._probed:
            guard.require(self, device, tensors)
            self._probed.add(misaligned)
        keywords = self.constexprs | self.options | {"enable_fp_fusion": True}
        last = tuple(self.constexprs[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :])
        if not self.cluster:
            kernel = self.kernel[grid](*tensors, *numbers, **keywords)
            if DIRECT and common and cuda and kernel is not None:
                self._compiled = kernel.run, kernel.function, kernel.packed_metadata, last
            return None
        kernel = self.kernel.warmup(*tensors, *numbers, **keywords, grid=grid)
        if not cuda or kernel is None:  # of a GPU that is not there, or somebody's hook has it compiled elsewhere
            return None
        # Compiled as if programs were on their own: Triton's clusters share tensors. The launch says how many are one.
        run, packed = kernel.run, kernel.packed_metadata
        if len(packed) != 3 or packed[1] != 1:
            raise RuntimeError(f"expected (warps, 1, shared memory) to say how a kernel is launched, got {packed}")
        metadata = (packed[0], self.cluster, packed[2])
        function = kernel.function
        if packed[2] <= UNASKED < packed[2] + self.static:
            function = self._asked.get(kernel)
            if function is None:  # loaded again, as if it had asked
                utils = triton.runtime.driver.active.utils
                function = utils.load_binary(kernel.name, kernel.kernel, UNASKED + 1, device.index)[1]
                self._asked[kernel] = function
        stream = current_stream(device.index)
        about = kernel.launch_metadata(grid, stream, *tensors, *numbers, *last)
        hooks = knobs.launch_enter_hook, knobs.launch_exit_hook
        run(*grid, stream, function, metadata, about, *hooks, *addresses, *numbers, *last)
        if common:
            self._compiled = run, function, metadata, last
        return None
