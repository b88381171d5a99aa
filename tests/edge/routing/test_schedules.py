"""When key-major serves: the measured file, the conditions, and the routes that follow. No kernel runs here."""

import pytest
import torch

import nsa
from nsa import routing, settings
from nsa.call import Call
from nsa.doctor import Shaped
from nsa.gpu import device_slug
from nsa.kernels.key_major import family as crossover
from nsa.kernels.key_major import tiles as key_tiles

GPU = "NVIDIA Nobody 1"
PROVENANCE = "{gpu: NVIDIA Nobody 1, torch: '2', triton: '3', date: 2026-12-01, commit: abc, command: c, shape: s}"
TABLE = "{1: 2, 4: 1024, 16: null}"
CHUNKS = "{1: 64, 4: 256, 16: null}"
LONG = "rows are long enough for Triton"
MEASURED = "key-major is faster, measured on NVIDIA Nobody 1"


@pytest.fixture
def folder(gpus):
    """`folder(table, name=…, provenance=…, chunks=…) -> path`: an empty folder of measurements, and a file in it."""

    def write(table=TABLE, name=GPU, provenance=PROVENANCE, chunks=CHUNKS):
        path = gpus / f"{device_slug(name)}.yaml"
        path.write_text(
            f"crossover: {{key_major_from: {table}, chunk_key_major_from: {chunks}, provenance: {provenance}}}\n"
        )
        settings.reload()
        return path

    return write


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("G", "start"), [(1, 2), (2, 1024), (3, 1024), (4, 1024), (5, None), (16, None), (17, None), (128, None)]
)
def test_the_nearest_group_that_is_not_smaller_decides(folder, G, start):
    folder()
    assert crossover.key_major_from(GPU, G) == start


def test_chunks_have_a_table_of_their_own(folder):
    folder()
    assert [crossover.key_major_from(GPU, G, chunk=True) for G in (1, 2, 4, 5)] == [64, 256, 256, None]


def test_order_of_the_file_does_not_matter(folder):
    folder("{16: null, 4: 1024, 1: 2}")
    assert [crossover.key_major_from(GPU, G) for G in (1, 2, 8)] == [2, 1024, None]


def test_nobody_measured_anything(folder):
    assert crossover.key_major_from(GPU, 1) is None
    assert crossover.describe(GPU) == "query-major everywhere: key-major was not measured"


def test_a_gpu_nobody_measured_uses_the_stand_in(folder):
    folder("{8: 512}", name=crossover.STAND_IN)
    assert crossover.key_major_from(GPU, 8) == 512
    folder("{8: 64}")
    assert crossover.key_major_from(GPU, 8) == 64


def test_doctor_line(folder):
    path = folder()
    text = "key-major from 2 queries at G = 1, 1024 queries at G = 4, never at G = 16; chunks of longer prompts: "
    text += "key-major from 64 queries at G = 1, 256 queries at G = 4, never at G = 16; measured"
    assert crossover.describe(GPU) == f"{text} 2026-12-01, {path}"
    folder("{1: null}", name=crossover.STAND_IN, chunks="{1: null}")
    path.unlink()
    assert crossover.describe(GPU).startswith(
        "query-major everywhere; chunks of longer prompts: query-major everywhere; measured on NVIDIA Nobody 1, not on "
    )


# --- the conditions ---------------------------------------------------------------------------------------------------

USUAL = {"start": 64, "tokens": 64, "dtype": torch.bfloat16, "n": 16, "block_size": 64, "bound": 1024}
USUAL |= {"head_dim": 128}


TAKEN = [
    {},
    {"tokens": 10**6},
    {"dtype": torch.float16},
    {"n": 4},
    {"block_size": 16},
    {"block_size": 128},
    {"bound": 512},
]
NOT_TAKEN = [
    *({"start": None}, {"tokens": 63}, {"dtype": torch.float32}, {"dtype": torch.float64}, {"n": 3}),
    *({"block_size": 15}, {"block_size": 129}, {"bound": 511}, {"bound": None}, {"head_dim": 129}),
]


@pytest.mark.parametrize("changed", TAKEN + NOT_TAKEN, ids=str)
def test_conditions(changed):
    assert crossover.takes_key_major(**(USUAL | changed)) is (changed in TAKEN)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch"])
@pytest.mark.parametrize("sequences", [1, 8, 1024])
@pytest.mark.parametrize("S_kv", [2**16, 2**24, 2**28, 2**31 - 256, 2**31])
def test_what_pays_fits(sequences, S_kv, packed, block_size):
    """`auto` must not choose what then raises because keys, or the counters of blocks, are too many."""
    keys, fits = S_kv * sequences if packed else S_kv, True
    try:
        blocks = key_tiles.grid("key_major", sequences, keys, 8, 16, block_size, packed, None).blocks
        key_tiles.windows(sequences * S_kv, 8, 8, 128, 128, 2, 16, blocks, 8, False)
    except ValueError:
        fits = False
    taken = key_tiles.pays(sequences, S_kv, S_kv, keys, 8, 16, block_size)
    assert not taken or fits
    assert taken or sequences * S_kv >= 2**28


# --- routes, from metadata alone --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of that name, which can run Triton, wherever tensors lie."""
    monkeypatch.setattr(routing, "_device_facts", lambda device: (GPU, "heads_as_queries", None))


def planned(
    S=256, B=1, G=1, n=16, block_size=64, dtype=torch.bfloat16, blocks=True, varlen=False, keys=1024, HKV=2,
    cache=False, page=None, **how,
):  # fmt: skip
    """The plan of a call of these shapes on a GPU that need not be there: no tensor is made."""
    device = torch.device("cuda", 0)

    def fake(*shape, kind=dtype):
        return Shaped(device, *shape, dtype=kind)

    lead, cu = ((how.pop("T", B * S),), fake(B + 1, kind=torch.int32)) if varlen else ((B, S), None)
    kv = (B * keys,) if varlen and not cache else (B, keys) if page is None else (B * keys // page, page)
    lengths = fake(B, kind=torch.int32) if cache else None
    table = fake(B, keys // page, kind=torch.int32) if page else None
    options = {"bound": None, "longest": None, "backend": "auto", "schedule": "auto"} | how
    chosen = {"ranges": fake(*lead, HKV, n, 2, kind=torch.int32)}
    if blocks:
        chosen = {"block_indices": fake(*lead, HKV, n, kind=torch.int32), "block_size": block_size}
    call = Call(
        fake(*lead, G * HKV, 128), fake(*kv, HKV, 128), fake(*kv, HKV, 128), **chosen, cu_seqlens_q=cu,
        cu_seqlens_k=None if cache else cu, max_selected=options["bound"], max_seqlen_q=options["longest"],
        backend=options["backend"], schedule=options["schedule"], cache_seqlens=lengths, block_table=table,
        settings=settings.get(),
    )  # fmt: skip
    return routing.make_plan(call)


def route(plan):
    return plan.route, plan.reason, plan.family.name, plan.named, plan.instead and plan.instead.route


KEY_MAJOR = ("key_major", f"2 queries or more with G = 1: {MEASURED}", "key_major", False, "query_major")
CHUNK = ("key_major", f"64 queries or more with G = 1: {MEASURED}", "key_major", False, "query_major")
BLOCKS = ("query_major", LONG, "query_major", False, None)
MANY = "rows of more than 64 blocks of 16 keys or fewer"
SMALL_BLOCKS = ("small_blocks", MANY, "small_blocks", False, "union")
NAMED = ("key_major", LONG, "key_major", False, "query_major")
ROUTES = {
    "prefill": ({}, KEY_MAJOR),
    "varlen": ({"varlen": True}, KEY_MAJOR),
    "fp16": ({"dtype": torch.float16}, KEY_MAJOR),
    "batch-of-prompts": ({"B": 3}, KEY_MAJOR),
    "batch-of-sequences": ({"varlen": True, "B": 3}, KEY_MAJOR),
    "batch-of-decode": ({"S": 1, "B": 4096}, BLOCKS),
    "part-of-a-prompt": ({"S": 129}, KEY_MAJOR),  # fewer keys than eight times the queries
    "chunk": ({"S": 128}, CHUNK),
    "short-chunk": ({"S": 63}, BLOCKS),
    "chunk-of-a-group-measured-never": ({"G": 16, "keys": 8192}, BLOCKS),
    "chunk-of-a-cache": ({"keys": 8192, "cache": True}, CHUNK),
    "chunk-in-pages": ({"keys": 8192, "cache": True, "page": 64}, CHUNK),
    "ragged": ({"B": 4, "S": 128, "keys": 8192, "cache": True, "varlen": True}, CHUNK),
    "ragged-chunks-and-steps": ({"B": 64, "S": 2, "keys": 8192, "cache": True, "varlen": True, "longest": 65}, CHUNK),
    "ragged-chunks-that-are-not-told": ({"B": 64, "S": 2, "keys": 8192, "cache": True, "varlen": True}, BLOCKS),
    "ragged-a-chunk-among-many-steps": (
        {"B": 96, "T": 160, "keys": 8192, "cache": True, "varlen": True, "longest": 65},
        BLOCKS,
    ),
    "ragged-steps": ({"B": 64, "S": 1, "keys": 8192, "cache": True, "varlen": True, "longest": 512}, BLOCKS),
    "decode-from-a-cache": ({"S": 1, "keys": 8192, "cache": True, "page": 64}, BLOCKS),
    "four-rows-a-block": ({"keys": 2**16}, CHUNK),
    "rows-that-share-little": ({"keys": 2**16 + 1}, BLOCKS),
    "few-queries-of-a-long-cache": ({"S": 512, "keys": 2**20}, BLOCKS),
    "64-slots": ({"n": 64}, KEY_MAJOR),
    "65-slots": ({"n": 65}, BLOCKS),
    "more-keys-than-are-counted": ({"S": 2**30, "n": 64, "keys": 2**31 - 1}, BLOCKS),
    "more-heads-than-a-grid-has": ({"HKV": 65_536}, BLOCKS),
    "decode": ({"S": 1}, BLOCKS),
    "fp32": ({"dtype": torch.float32}, BLOCKS),
    "few-slots": ({"n": 3}, BLOCKS),
    "promised-short": ({"bound": 511}, BLOCKS),
    "64-small-blocks": ({"block_size": 8, "n": 64}, BLOCKS),
    "65-small-blocks": ({"block_size": 16, "n": 65}, SMALL_BLOCKS),
    "small-blocks-fp32": ({"block_size": 16, "n": 65, "dtype": torch.float32}, BLOCKS),
    "below-its-group": ({"G": 2, "S": 1023}, BLOCKS),
    "two-sequences-below-it": ({"G": 2, "S": 512, "B": 2}, BLOCKS),
    "at-its-group": (
        {"G": 2, "S": 1024},
        ("key_major", f"1024 queries or more with G = 2: {MEASURED}", "key_major", False, "query_major"),
    ),
    "never": ({"G": 16, "S": 10**6}, BLOCKS),
    "larger-than-measured": ({"G": 17, "S": 10**6}, BLOCKS),
    "ranges": ({"blocks": False}, ("query_major", LONG, "query_major", False, None)),
    "query-major-named": ({"schedule": "query_major"}, BLOCKS),
    "per-head-named": ({"schedule": "per_head"}, ("per_head", LONG, "query_major", False, None)),
    "key-major-named": ({"schedule": "key_major", "S": 1, "n": 1, "block_size": 7}, NAMED),
    "key-major-named-for-ranges": ({"schedule": "key_major", "blocks": False}, (*NAMED[:-1], "query_major")),
    "key-major-named-in-fp32": ({"schedule": "key_major", "dtype": torch.float32}, NAMED),
    "triton-named": (
        {"backend": "triton"},
        ("key_major", f"backend='triton' asked for; {KEY_MAJOR[1]}", "key_major", True, None),
    ),
    "both-named": (
        {"backend": "triton", "schedule": "key_major", "S": 1},
        ("key_major", "backend='triton' asked for", "key_major", True, None),
    ),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_routes(folder, gpu, kind):
    shape, want = ROUTES[kind]
    folder()
    with nsa.configure(sel_triton_min_L=0):
        assert route(planned(**shape)) == want


@pytest.mark.parametrize(
    ("changed", "shape", "want"),
    [
        ({"batch_invariant": True}, {}, ("query_major", LONG)),
        ({"batch_invariant": True}, {"schedule": "key_major"}, ("key_major", LONG)),
        ({"sel_triton_group": False}, {}, ("per_head", LONG)),
        ({"sel_triton_group": False}, {"schedule": "key_major"}, ("key_major", LONG)),
        ({"use_triton_sel": False}, {}, ("sdpa", "use_triton_sel is off")),
        ({"force_parity": True}, {"schedule": "key_major"}, ("reference", "force_parity is set")),
        ({"sel_triton_min_L": 1025}, {}, ("sdpa", "rows select at most 1024 keys, sel_triton_min_L is 1025")),
        (
            {"sel_triton_min_L": 1025},
            {"schedule": "key_major"},
            ("sdpa", "rows select at most 1024 keys, sel_triton_min_L is 1025"),
        ),
    ],
    ids=str,
)
def test_settings_come_first(folder, gpu, changed, shape, want):
    folder()
    with nsa.configure(**({"sel_triton_min_L": 0} | changed)):
        plan = planned(**shape)
    assert (plan.route, plan.reason) == want
    assert (plan.instead is not None) == (want[0] == "key_major")


def test_no_file_means_query_major(folder, gpu):
    with nsa.configure(sel_triton_min_L=0):
        assert route(planned(S=10**6)) == BLOCKS


def test_the_stand_in_is_said(folder, gpu):
    provenance = PROVENANCE.replace(GPU, crossover.STAND_IN)
    folder(name=crossover.STAND_IN, provenance=provenance)
    with nsa.configure(sel_triton_min_L=0):
        plan = planned()
    text = f"2 queries or more with G = 1: key-major is faster, measured on {crossover.STAND_IN}"
    assert (plan.route, plan.reason) == ("key_major", f"{text} ({GPU} was not measured)")


def test_where_there_is_no_gpu_it_runs_by_name_only(folder, monkeypatch):
    """As in Triton's interpreter."""
    folder()
    monkeypatch.setattr(routing, "_device_facts", lambda device: (None, "heads_as_queries", None))
    with nsa.configure(sel_triton_min_L=0):
        assert route(planned()) == BLOCKS
        assert route(planned(schedule="key_major")) == NAMED


def test_what_a_failure_is_remembered_by(folder, gpu):
    """One kernel is one signature: key-major's block size makes another, and none is query-major's."""
    folder()
    with nsa.configure(sel_triton_min_L=0):
        key_major, blocks = planned(), planned(schedule="query_major")
        assert key_major.instead.kernel == blocks.kernel != key_major.kernel
        assert key_major.kernel == planned(S=4096, n=8).kernel == planned(schedule="key_major").kernel
        others = [planned(block_size=32, keys=512), planned(blocks=False, schedule="key_major"), planned(varlen=True)]
        assert len({p.kernel for p in (key_major, blocks, *others)}) == 5


def test_what_a_backward_failure_is_remembered_by(folder, gpu):
    """Whatever the forward's schedule; by block size, as its kernels work by blocks of keys."""
    folder()
    with nsa.configure(sel_triton_min_L=0):
        key_major, blocks = planned(), planned(schedule="query_major")
        assert key_major.backward == key_major.instead.backward == blocks.backward == planned(S=4096, n=8).backward
        others = [planned(block_size=32, keys=512), planned(blocks=False), planned(varlen=True), planned(G=2)]
        assert len({p.backward for p in (key_major, *others)}) == 5
        assert not {p.kernel for p in (key_major, blocks, *others)} & {p.backward for p in (key_major, *others)}


# --- what is committed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA Somebody"])
def test_prompts_on_an_h100_and_on_what_nobody_measured(monkeypatch, name):
    """Routes that the packaged measurement makes. Its figures may move when it is recorded anew, these calls not."""
    monkeypatch.setattr(routing, "_device_facts", lambda device: (name, "heads_as_queries", None))
    for G in (1, 2, 3, 4, 8, 16):
        prompt = "union" if G >= 4 else "key_major"
        assert planned(G=G, S=4096, backend="triton").route == prompt
        assert planned(G=G, S=1, backend="triton").route == "query_major"
        assert planned(G=G, S=4096, blocks=False, backend="triton").route == "query_major"
    assert planned(G=64, S=4096, backend="triton").route == "query_major"
