"""The rates of this GPU, measured once per session: of a copy, a read and a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nsa.testing.clock.cuda import time_gpu
from nsa.testing.clock.guard import Ceilings

STREAM_BYTES = 2 << 30  # far larger than any L2


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Sum one block: reads `4 * BLOCK` bytes, writes 4."""
    block = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))  # [BLOCK]
    tl.store(out_ptr + block, tl.sum(x))


@functools.lru_cache(maxsize=8)
def ceilings(device: torch.device) -> Ceilings:
    """Measure the rates. This takes about a second and 4 GiB of GPU memory, or half of the free memory."""
    free = torch.cuda.mem_get_info(device)[0]
    n = min(STREAM_BYTES, free // 4) // 4 // 65536 * 65536
    source = torch.ones(n, device=device, dtype=torch.float32)
    target = torch.empty_like(source)

    def read(block: int) -> Callable[[], object]:
        return lambda: _read_kernel[(n // block,)](source, target, BLOCK=block, num_warps=8)

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    times = time_gpu(
        {
            "copy": [lambda: target.copy_(source)],
            **{f"read{block}": [read(block)] for block in (4096, 8192, 16384)},
            "matmul": [lambda: torch.mm(a, b, out=c)],
        },
        iters=20,
        replay_s=2e-3,
    )
    reads = min(min(t.samples) for name, t in times.items() if name.startswith("read"))
    # The best sample, not the median, because the result is a limit.
    return Ceilings(
        copy=8 * n / min(times["copy"].samples), read=4 * n / reads, matmul=2 * 8192**3 / min(times["matmul"].samples)
    )
