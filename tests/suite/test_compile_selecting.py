"""The selecting kernels compile for GPUs that are not there, within what those have."""

import json

import pytest

from nsa.testing.compile import matrix
from nsa.testing.compile.budgets import Compiled, all_complaints
from nsa.testing.compile.points import ARCHITECTURES

from .test_compile import MATRIX

pytestmark = pytest.mark.aot

SCRIPT = """
import sys
import torch
from nsa.testing.compile import child
from nsa.testing.compile.points import ARCHITECTURES
from nsa.testing.matrix.selecting import as_request

architecture = ARCHITECTURES[sys.argv[1]]
launches = child._pretend(architecture)
launches.wanted = range(10**6)
from nsa.selecting import plan

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def cache(B, rows, page, dtype=torch.bfloat16, D=128):
    table = {"cache_seqlens": meta(B, dtype=torch.int32), "block_table": meta(B, rows // page, dtype=torch.int32)}
    return meta(B * rows // page, page, 1, D, dtype=dtype), table

M3 = {"n": 16, "block_size": 128, "first": 1, "newest": 1}
QSA = {"score": "relu", "n": 512, "block_size": 4, "window": 4, "stride": 4, "lists": 1, "tail": True}
NSA = {"score": "softmax", "n": 16, "block_size": 64, "window": 32, "stride": 16, "first": 1, "newest": 2}
CALLS = {
    "chunk": (meta(1, 4096, 4, 128), *cache(1, 65536, 128), M3),
    "decode": (meta(64, 1, 4, 128), *cache(64, 65536, 128), M3),
    "decode-e4m3": (meta(64, 1, 4, 128), *cache(64, 65536, 128, torch.float8_e4m3fn), M3),
    "relu-chunk": (meta(1, 2048, 4, 128), *cache(1, 8192, 16), QSA),
    "relu-long": (meta(1, 64, 4, 128), *cache(1, 262144, 16), QSA),
    "softmax": (meta(1, 65536, 64, 128), meta(1, 4095, 4, 128), {}, NSA),
    "weights": (meta(1, 2048, 4, 128), *cache(1, 8192, 16), QSA | {"weights": meta(1, 2048, 4)}),
    "lse": (meta(1, 512, 64, 128), meta(1, 31, 4, 128), {}, NSA | {"lse": meta(1, 512, 64, dtype=torch.float32)}),
    "wide": (meta(1, 512, 4, 256), *cache(1, 4096, 16, D=256), M3),
}
seen = set()
for name in sys.argv[2].split(","):
    q, k, more, how = CALLS[name]
    if k.dtype == torch.float8_e4m3fn and not architecture.e4m3:
        continue
    launches.kernels.clear(), launches.reports.clear()
    r = as_request(q, k, how | more)
    plan.select(r, meta(*r.shape, dtype=torch.int32))
    child.tell(architecture, f"select-{name}", launches, seen)
"""

CALLS = {"quick": "chunk,decode,weights,lse"}
CALLS["full"] = CALLS["quick"] + ",decode-e4m3,relu-chunk,relu-long,softmax,wide"


@pytest.mark.parametrize(("name", "extent"), MATRIX)
def test_selecting_kernels_compile(compiling, name, extent, tmp_path):
    architecture = ARCHITECTURES[name]
    reason = matrix.unsupported(architecture, matrix.minor())
    if reason is not None:
        pytest.skip(reason)
    said = compiling(SCRIPT, name, CALLS[extent], TRITON_CACHE_DIR=str(tmp_path))
    kernels = [Compiled(**json.loads(line)) for line in said.splitlines()]
    assert {kernel.kernel for kernel in kernels} >= {"_scores_kernel", "_choose_kernel"}
    assert all_complaints(architecture, kernels) == []
    assert all(x.mma for x in kernels if x.kernel in ("_scores_kernel", "_lse_kernel"))
