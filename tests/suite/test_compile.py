"""The kernels compile for GPUs that are not there, as `tiles.py` configures them, within what those have.

`pytest -m aot` compiles everything; any other run the quick part of it for sm_90 (`conftest.py`).
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa.kernels.families import BACKWARDS, FAMILIES
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared import sources
from nsa.testing.compile import budgets, matrix
from nsa.testing.compile.budgets import Compiled
from nsa.testing.compile.child import askew, cover, looped, mixed
from nsa.testing.compile.points import ARCHITECTURES, MOST, POINTS, QUICK, points

pytestmark = pytest.mark.aot

RELEASE = matrix.minor()
MATRIX = [
    pytest.param("sm_90", "quick", id="sm_90-quick"),
    *(pytest.param(name, "full", id=name) for name in ARCHITECTURES),
]


def waits_for_its_cluster(architecture, compiled):
    """Of the points that force a choice: whether it has parts that are merged where they were made."""
    choice = next(point.choice for point in QUICK if point.id == compiled.point)
    split = bool(choice.cluster) and 1 < choice.splits <= architecture.largest_cluster
    return split and RELEASE >= (3, 6) and compiled.kernel == "_fwd_kernel"


@pytest.mark.parametrize(("name", "extent"), MATRIX)
def test_kernels_compile(name, extent):
    architecture = ARCHITECTURES[name]
    reason = matrix.unsupported(architecture, RELEASE)
    if reason is not None:
        pytest.skip(reason)
    kernels = matrix.compile_for(name, extent)
    for compiled in kernels:
        print(compiled)
    complaints = budgets.all_complaints(architecture, kernels)
    assert not complaints, "\n".join(complaints)
    compiled, asked = {k.point for k in kernels}, {point.id for point in points(architecture, extent)}
    assert len(compiled) <= MOST
    # A shape of a table may need what another one needed; that each was launched, the child sees to.
    quick = {point.id for point in points(architecture, "quick")} if extent == "full" else set()
    assert quick <= compiled <= asked
    folders = [*(family.name for family in (*FAMILIES, *BACKWARDS)), "shared"]
    functions = {name for folder in folders for name in sources.functions(folder) if name.endswith("_kernel")}
    assert {k.kernel for k in kernels} == functions - ({"_lists_kernel"} if name == "gfx942" else set())
    assert {k.registers is None for k in kernels} == {RELEASE < matrix.OVERHEARD}
    early = [k for k in kernels if k.kernel in ("_fwd_kernel", "_rows_kernel", "_combine_kernel")]
    assert {k.early for k in kernels if k not in early} == {False}
    assert {k.early for k in early} == {architecture.capability >= 90 and name != "gfx942" and RELEASE >= (3, 5)}
    forced = {point.id for point in QUICK if point.choice is not None}
    for kernel in (k for k in kernels if k.point in forced):
        assert kernel.cluster == waits_for_its_cluster(architecture, kernel), kernel


def test_quick_part_has_each_kernel_and_each_switch_on_and_off():
    both = frozenset({("a",), ("a", "CAUSAL", "True"), ("a", "SPLIT", "False")})
    split = frozenset({("a",), ("a", "CAUSAL", "True"), ("a", "SPLIT", "True")})
    other = frozenset({("b",)})
    assert cover([both, both, split, other, both | split]) == {3, 4}
    assert cover([both, split, other, split]) == {0, 1, 2}
    assert cover([]) == set()


def test_child_that_dies_names_its_point(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "nowhere:nothing")  # the first kernel finds no place to go
    said = rf"-m nsa\.testing\.compile\.child sm_89 full exited with 1, compiling {QUICK[0].id} for sm_89:\n"
    with pytest.raises(RuntimeError, match=f"^{said}"):
        matrix.compile_for("sm_89", "full")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_matrix_is_bounded_and_its_ids_are_unique(name):
    architecture = ARCHITECTURES[name]
    ids = [point.id for point in points(architecture, "full")]
    assert len(set(ids)) == len(ids) <= MOST
    assert len(points(architecture, "full")) > len(POINTS) or architecture.gpu is None  # its table adds some
    assert set(points(architecture, "quick")) < set(points(architecture, "full"))
    for extent in ("quick", "full"):  # A100 and MI300X do not convert e4m3
        e4m3 = any("e4m3" in point.options for point in points(architecture, extent))
        assert e4m3 == (name not in ("sm_80", "gfx942"))


def test_architecture_is_refused_by_releases_before_the_first_that_knows_it():
    assert matrix.unsupported(ARCHITECTURES["sm_100"], (3, 3)) is None
    refused = matrix.unsupported(ARCHITECTURES["sm_100"], (3, 2))
    assert refused == "sm_100 is not supported by Triton 3.2: first by 3.3"
    assert matrix.minor("3.10.1+git") == (3, 10)


def test_amd_gets_its_own_shared_memory_and_nothing_of_nvidia(monkeypatch):
    mi250 = SimpleNamespace(major=9, minor=0, multi_processor_count=104)  # the compute capability of an H100
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mi250)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "MI250")
    chip = device_facts.chip.__wrapped__
    assert chip(device)[:3] == (90, 104, "MI250")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chip(device) == (device_facts.AMD, 104, "MI250", False)
    assert query_major.largest_cluster(chip(device)) == 0
    assert device_facts.SHARED_BYTES[device_facts.AMD] == 65_536
    assert device_facts.SHARED_BYTES[999] == 101_376, "that of an NVIDIA GPU which is not in the table"


def test_only_a_run_for_aot_compiles_everything(run_pytest):
    runs = [["--collect-only", "-q", *words, __file__] for words in (["-m", "aot"], [])]
    listed = run_pytest.each(runs, cwd=Path(__file__).parents[2])
    for done, ids in zip(listed, (ARCHITECTURES, ["sm_90-quick"]), strict=True):
        assert [line for line in done.stdout.splitlines() if "::test_kernels_compile" in line] == [
            f"tests/suite/test_compile.py::test_kernels_compile[{name}]" for name in ids
        ], done.stdout


SHARED = [  # of `_dkdv_kernel` for sm_90 without a pipeline, by Triton 3.6: dO and then dS lie there
    "or.b64 \t%rd129, %rd96, 4611686293305294848;",
    "add.s64 \t%rd131, %rd96, 4611686293305294850;",
    "or.b64 \t%rd140, %rd96, -9223371899415822336;",
]
OTHERS = ["or.b64 \t%rd140, %rd97, -9223371899415822336;", "add.s64 \t%rd98, %rd96, 16;", "wgmma.fence.sync.aligned;"]


def test_descriptors_of_one_address_that_are_swizzled_differently_are_found():
    assert mixed("\n".join(SHARED + OTHERS))
    assert not mixed("\n".join(SHARED[:2] + OTHERS))
    assert not mixed("\n".join(SHARED)), "without wgmma no descriptors"


def test_tiles_behind_memory_of_another_are_found_askew():
    inbox = ".shared .align 16 .b8 inbox[{}];\n.extern .shared .align 16 .b8 global_smem[];\n"
    wgmma = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {...};"
    assert askew(inbox.format(30736) + wgmma)
    assert not askew(inbox.format(31744) + wgmma)
    assert not askew(inbox.format(30736) + "mma.sync.aligned.m16n8k16"), "read through addresses, not patterns"
    assert not askew(".extern .shared .align 16 .b8 global_smem[];\n" + wgmma)


SASS = """
        /*0100*/                   LDL.64 R2, [R1+0x8] ;                         /* 0x0000080001027983 */
                                                                                 /* 0x001fea0000100a00 */
        /*0110*/                   STL [R1], R4 ;                                /* 0x0000000401007387 */
        /*0120*/                   LDL.128 R8, [R1+0x10] ;                       /* 0x0000100001087983 */
        /*0130*/                   STL [R1+0x4], R5 ;                            /* 0x0000040501007387 */
        /*0140*/               @P0 BRA 0x120 ;                                   /* 0xfffffffc00000947 */
        /*0150*/                   LDL R6, [R1] ;                                /* 0x0000000001067983 */
        /*0160*/              @!P1 BRA P2, 0x110 ;                               /* 0xfffffff800009947 */
        /*0170*/                   BRA 0x170;                                    /* 0xfffffffc00fc7947 */
"""


def test_local_memory_in_the_innermost_loop_is_counted():
    assert looped(SASS) == 16 + 4
    assert looped(SASS.replace("@P0 BRA 0x120", "@P0 BRA 0x170")) == 4 + 16 + 4 + 4, "the outer loop is innermost now"
    forward = SASS.replace("BRA 0x1", "BRA 0x2").replace("BRA P2, 0x1", "BRA P2, 0x2")
    assert looped(forward) == 0, "no branch back"
    amd = ".LBB0_2:\n\tscratch_load_dwordx2 v[2:3], off, off\n\tscratch_store_dword off, v1, off\n"
    assert looped(f"{amd}\ts_cbranch_scc1 .LBB0_2\n") == 12
    assert looped(f"{amd}\ts_cbranch_scc1 .LBB0_3\n") == 0


SELECTING = """
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

SELECTED = {"quick": "chunk,decode,weights,lse"}
SELECTED["full"] = SELECTED["quick"] + ",decode-e4m3,relu-chunk,relu-long,softmax,wide"


@pytest.mark.parametrize(("name", "extent"), MATRIX)
def test_selecting_kernels_compile(compiling, name, extent, tmp_path):
    architecture = ARCHITECTURES[name]
    reason = matrix.unsupported(architecture, matrix.minor())
    if reason is not None:
        pytest.skip(reason)
    said = compiling(SELECTING, name, SELECTED[extent], TRITON_CACHE_DIR=str(tmp_path))
    kernels = [Compiled(**json.loads(line)) for line in said.splitlines()]
    assert {kernel.kernel for kernel in kernels} >= {"_scores_kernel", "_choose_kernel"}
    assert budgets.all_complaints(architecture, kernels) == []
    assert all(x.mma for x in kernels if x.kernel in ("_scores_kernel", "_lse_kernel"))
