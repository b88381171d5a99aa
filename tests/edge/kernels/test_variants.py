"""How many variants of the forward kernel batches of changing shape compile: per tile entry a few, and then no more.

A variant costs a second at its first call; one per batch would cost all of training.
"""

import json
from pathlib import Path

import pytest
import torch

from . import launch_keys

PER_ENTRY = 4


@pytest.fixture(scope="module")
def report(compiling):
    """Keys under which the JIT would look up the launches of all batches, in a process without the interpreter."""
    pytest.importorskip("triton", minversion="3.3", reason="the binder's interface is that of Triton 3.3 and newer")
    return json.loads(compiling(Path(launch_keys.__file__)))


@pytest.mark.parametrize("source", ["ranges", "blocks", "blocks of all sizes"])
def test_variants_by_key(report, source):
    counted = report[source]
    assert counted["entries"] >= 4, "the batches meet too few tiles to show anything"
    assert counted["first"] + counted["more"] <= PER_ENTRY * counted["entries"]
    if source != "blocks of all sizes":  # whose combinations are too many to meet them all
        assert counted["more"] == 0
    # What Triton would do by itself; if this is not many more, the batches vary too little.
    assert counted["naive"] > PER_ENTRY * counted["entries"]


@pytest.mark.gpu
def test_variants_compiled(device):
    """The same count, in the cache of the kernel that ran."""
    from nsa.kernels.query_major.kernel import _fwd_kernel

    def compiled():
        if hasattr(_fwd_kernel, "device_caches"):
            return len(_fwd_kernel.device_caches[device.index][0])
        return len(_fwd_kernel.cache[device.index])

    entries = set()
    stop = launch_keys.watch_tiles(entries)
    try:
        before = compiled()
        for batch in launch_keys.batches(launch_keys.BATCHES, seed=1):
            launch_keys.launch(batch, "ranges", device, torch.float16)
        first = compiled() - before
        for batch in launch_keys.batches(launch_keys.BATCHES, seed=2):
            launch_keys.launch(batch, "ranges", device, torch.float16)
        torch.cuda.synchronize()
    finally:
        stop()
    assert 0 < first <= PER_ENTRY * len(entries)
    assert compiled() == before + first
