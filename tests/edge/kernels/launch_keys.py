"""Which variants of the forward kernel a stream of batches would compile. Run as a script it prints them as JSON.

The script needs neither a GPU nor a compiler: for launches on tensors without data it takes the key under which the JIT
looks them up, from its own binder. It must not run in Triton's interpreter, hence a process of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import torch

import nsa
from nsa import routing, settings
from nsa.kernels.shared import device as device_facts

BATCHES = 400
HKV, G, D, DV = 3, 5, 40, 72  # strides that are multiples of 16 in some batches, and in others not


def batches(count: int, seed: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Random `(B, S, S_kv, n, L)`: batch sizes, lengths, spans and bounds as they vary from batch to batch.

    Few rows and many, short and long ones, few spans and many, so that a few hundred of them meet every tile there is
    for such shapes; and ones, odd numbers and multiples of 16, each of which Triton could specialize on.
    """
    draw = random.Random(seed)
    for _ in range(count):
        S_kv = draw.choice((1, draw.randint(2, 300), 16 * draw.randint(1, 40)))
        n = draw.choice((1, draw.randint(2, 4), draw.randint(5, 16), 16))
        B, S = draw.choice(((1, 1), (2, draw.randint(1, 3)), (16, 16), (16, draw.randint(17, 40))))
        yield B, S, S_kv, n, draw.choice((draw.randint(1, 16), 16, draw.randint(300, 600), 512))


def launch(batch: tuple[int, int, int, int, int], source: str, device: torch.device, dtype: torch.dtype) -> None:
    """One call; the tensors are fresh, so their addresses are aligned as the allocator aligns."""
    B, S, S_kv, n, L = batch
    q = torch.empty(B, S, HKV * G, D, dtype=dtype, device=device)
    k, v = (torch.empty(B, S_kv, HKV, d, dtype=dtype, device=device) for d in (D, DV))
    if source == "ranges":
        selection = {"ranges": torch.zeros(B, S, HKV, n, 2, dtype=torch.int32, device=device), "max_selected": L}
    else:
        blocks = torch.zeros(B, S, HKV, n, dtype=torch.int32, device=device)
        size = 16 if source == "blocks" else 16 * (1 + (S_kv + L) % 4)  # a model has one
        selection = {"block_indices": blocks, "block_size": size, "max_selected": L}
    nsa.selection_attention(q, k, v, **selection, backend="triton")


def watch_tiles(seen: set[object]) -> Callable[[], None]:
    """Collect the entries of the tile table that launches use, into `seen`; returns what ends it."""
    from nsa.kernels.query_major import tiles

    select = tiles.select

    def watched(*args: object) -> object:
        seen.add(select(*args))
        return select(*args)

    def stop() -> None:
        tiles.select = select
        settings.reload()

    settings.reload()
    tiles.select = watched
    return stop


def main() -> None:
    """Print, per source: tile entries used, keys after `BATCHES`, how many more after as many again, and naive ones."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from nsa.kernels.query_major import kernel as query_kernels
    from nsa.kernels.shared import combine

    class Driver:
        """A GPU that is not there: all the binder asks is which one."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Driver())
    kernel = query_kernels._fwd_kernel
    binder, naive = kernel.create_binder()[-1], triton.jit(kernel.fn).create_binder()[-1]
    keys: set[str] = set()
    naive_keys: set[str] = set()

    def run(*args: object, grid: object, warmup: bool, **keywords: object) -> None:
        keys.add(str(binder(*args, **keywords)[1:]))
        naive_keys.add(str(naive(*args, **keywords)[1:]))

    kernel.run = run
    combine._combine_kernel.run = lambda *args, **keywords: None
    device_facts.chip = lambda device: device_facts.Chip(90, 132, None, True)
    routing.why_not_triton = lambda device: None
    report = {}
    for source in ("ranges", "blocks", "blocks of all sizes"):
        keys.clear()
        naive_keys.clear()
        entries: set[object] = set()
        stop = watch_tiles(entries)
        for batch in batches(BATCHES, seed=1):
            launch(batch, source, torch.device("meta"), torch.bfloat16)
        report[source] = {"entries": len(entries), "first": len(keys), "naive": len(naive_keys)}
        for batch in batches(BATCHES, seed=2):
            launch(batch, source, torch.device("meta"), torch.bfloat16)
        stop()
        report[source]["more"] = len(keys) - report[source]["first"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
