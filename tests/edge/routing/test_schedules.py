"""Which schedule serves: the measured file, the work of each schedule, and the routes that follow. No kernel runs."""

from types import SimpleNamespace

import pytest
import torch

import nsa
from nsa import routing, schedules, settings
from nsa.call import Call
from nsa.doctor import Shaped
from nsa.gpu import STAND_IN, Costs, device_slug
from nsa.kernels.families import OF_SCHEDULE
from nsa.kernels.key_major import family as key_family
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared.shape import shape_of
from nsa.work import Job, capability_of, work

pytestmark = pytest.mark.usefixtures("long_rows")
GPU = "NVIDIA Nobody 1"
PROVENANCE = "{gpu: NVIDIA Nobody 1, torch: '2', triton: '3', date: 2026-12-01, commit: abc, command: c, shapes: s}"
COSTS = "{narrow: {query_major: {numbers: 1}, key_major: {calls: 10}}, wide: {query_major: {numbers: 1}}}"
OF_THREE = "{query_major: {numbers: 1}, key_major: {calls: 10}, union: {calls: 4}}"
UNION = f"{{narrow: {OF_THREE}, wide: {OF_THREE}}}"
LONG, ASKED = "rows are long enough for Triton", "backend='triton' asked for"
FASTEST = "is expected to be the fastest, measured on NVIDIA Nobody 1"


@pytest.fixture
def folder(gpus):
    """`folder(costs, name=…, provenance=…) -> path`: an empty folder of measurements, and a file in it."""

    def write(costs=COSTS, name=GPU, provenance=PROVENANCE):
        path = gpus / f"{device_slug(name)}.yaml"
        path.write_text(f"costs: {costs[:-1]}, provenance: {provenance}}}\n")
        settings.reload()
        return path

    return write


# --- what is counted --------------------------------------------------------------------------------------------------

USUAL = Job(sequences=2, queries=64, keys=1000, HKV=4, G=8, D=128, Dv=64, n=4, block_size=16)


@pytest.mark.parametrize("queries", [1, 2, 63, 64, 65, 100])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_mean_keys_of_causal_rows(queries, n):
    read = [min(n * 16, position + 1, 100) for position in range(100 - queries, 100)]
    assert USUAL._replace(queries=queries, keys=100, n=n).mean_keys == pytest.approx(sum(read) / queries)


def test_work_of_query_major():
    rows, keys, width = 2 * 64 * 4, 64, 192
    found = work(USUAL, "query_major")
    assert found["numbers"] == pytest.approx(rows * keys * width / 1e6)
    assert found["products"] == pytest.approx(16 * found["numbers"]), "16 heads or fewer fill one tile"
    assert found["programs"] == pytest.approx(rows / 1e6), "many rows are not split"
    assert found["numbers_each"] == pytest.approx(keys * width / 1e6)
    assert work(USUAL._replace(G=17), "query_major")["products"] == pytest.approx(2 * found["products"])
    one = work(USUAL._replace(sequences=1, queries=1, HKV=1, n=64), "query_major")
    assert one["programs"] * 1e6 > 1, "few long rows are"
    assert one["numbers_each"] < 64 * 16 * width / 1e6


def test_the_longest_row_decides_how_long_a_program_takes():
    prompt = USUAL._replace(queries=64, keys=64)
    found = work(prompt, "query_major")
    assert found["numbers_each"] == work(USUAL, "query_major")["numbers_each"]
    assert found["numbers"] < 0.6 * work(USUAL, "query_major")["numbers"]


def test_work_by_blocks():
    found = work(USUAL, "key_major")
    assert found["entries"] == pytest.approx(2 * 64 * 4 * 4 / 1e6)
    assert found["blocks"] == pytest.approx(2 * 1000 / 16 / 1e6)
    assert found["numbers_of_blocks"] < 4 * found["blocks"] * 16 * 192, "some blocks have no reader"
    shared = work(USUAL._replace(shared=0.9), "key_major")
    assert shared["numbers_of_blocks"] < found["numbers_of_blocks"]
    assert shared["entries"] == found["entries"]
    assert work(USUAL._replace(G=16), "key_major")["numbers_walked"] == 0, "few queries of long sequences"
    assert work(USUAL._replace(G=16, keys=128), "key_major")["numbers_walked"] > 0


@pytest.mark.parametrize(("changed", "left"), [
    ({}, 1),  # eight neighbours list 32 different blocks
    ({"shared": 0.9}, 0),
    ({"keys": 128}, 0),  # there are only eight blocks
    ({"shared": 0.9, "queries": 4}, 1),  # a tile has tokens of two sequences
    ({"shared": 0.9, "queries": 4, "sequences": 1}, 0),
    ({"shared": 0.9, "queries": 20}, 7 / 20),  # some tiles have
], ids=str)  # fmt: skip
def test_rows_without_a_union(changed, left):
    found = work(USUAL._replace(**changed), "union")
    assert found["rest"] == pytest.approx(left)
    assert (found["products_wgmma"] > 0) is (left < 1)


@pytest.mark.parametrize(("changed", "kind"), [
    ({}, "narrow"), ({"Dv": 129}, "wide"), ({"e4m3": True}, "narrow_e4m3"), ({"D": 257}, "wide"),
    ({"D": 192}, "narrow"),  # the tiles are those of narrow head dims, see `sizes.narrow`
])  # fmt: skip
def test_kinds(changed, kind):
    assert USUAL._replace(**changed).kind == kind


def test_a_call_costs_the_mean_of_all_overlaps():
    """The host does not know how many blocks neighbours share. A decode step has no neighbours."""
    others = {"query_major": {"calls": 32.0}, "key_major": {"calls": 40.0}}
    costs = Costs({"narrow": others | {"union": {"calls": 2.0, "rest": 0.5}}}, {}, None)
    assert schedules.microseconds(costs, USUAL) == pytest.approx(
        {"query_major": 32.0, "key_major": 40.0, "union": (18 * 18 * 2) ** (1 / 3)}  # query-major serves all or none
    )
    assert schedules.microseconds(costs, USUAL._replace(queries=1))["union"] == 22.0, "key-major serves few rows"
    assert schedules.microseconds(costs, USUAL._replace(steps=True))["union"] == pytest.approx((22 * 22 * 2) ** (1 / 3))
    in_fp8 = schedules.microseconds(costs, USUAL._replace(e4m3=True))
    assert in_fp8 == schedules.microseconds(costs, USUAL), "too few calls over fp8 were drawn"
    measured = Costs(costs.kinds | {"narrow_e4m3": {"query_major": {"calls": 7.0}}}, {}, None)
    assert schedules.microseconds(measured, USUAL._replace(e4m3=True)) == pytest.approx({"query_major": 7.0})
    assert schedules.microseconds(costs, USUAL._replace(Dv=256)) == {}
    costs = Costs({"narrow": {"union": {"calls": 4.0}}}, {}, None)
    assert schedules.microseconds(costs, USUAL._replace(G=64)) == {}, "union has no tile"


@pytest.mark.parametrize(("query_major", "key_major", "rows", "expected"), [
    ("calls: 9", "calls: 10", 66, True), ("calls: 9", "calls: 10", 65, False),
    ("calls: 9.7", "calls: 10", 66, False), (None, "calls: 10", 66, False),
    ("calls: 9", "numbers_of_blocks: 19", 66, True),
], ids=["faster", "few rows", "within the margin", "not measured", "faster if rows share none"])  # fmt: skip
def test_what_serves_the_rows_that_unions_leave(folder, query_major, key_major, rows, expected):
    """Query-major, if it is expected to be clearly faster, as rows share no blocks, and fills half of the GPU."""
    of = {"query_major": query_major, "key_major": key_major}
    of = ", ".join(f"{name}: {{{costs}}}" for name, costs in of.items() if costs is not None)
    folder(f"{{narrow: {{{of}}}}}", name=STAND_IN)
    q = torch.zeros(1, rows, 16, 64, dtype=torch.float16)
    k = torch.zeros(1, 4096, 1, 64, dtype=torch.float16)
    blocks = torch.zeros(1, rows, 1, 16, dtype=torch.int32)
    call = Call(q, k, k, block_indices=blocks, block_size=64, settings=settings.get())
    assert OF_SCHEDULE["union"]._by_row(call, shape_of(call, 16 * 64)) is expected


def test_query_major_serves_unless_another_is_faster_by_a_margin():
    of = {"query_major": {"calls": 10.0}, "key_major": {"calls": 9.8}}
    assert schedules.fastest(Costs({"narrow": of}, {}, None), USUAL, ("key_major",)) == "query_major"
    of = of | {"key_major": {"calls": 9.6}}
    assert schedules.fastest(Costs({"narrow": of}, {}, None), USUAL, ("key_major",)) == "key_major"
    assert schedules.fastest(Costs({"narrow": of}, {}, None), USUAL, ()) == "query_major"


@pytest.mark.parametrize(("tokens", "sequences", "longest", "want"), [
    (325, 2, 163, (2, 163, False)), (16363, 3, 5455, (3, 5455, False)),
    (1063, 64, 1000, (1, 1000, True)), (1063, 64, 4096, (1, 1000, True)), (2048, 2, None, (2, 1024, True)),
], ids=["two alike", "three alike", "one prompt and steps", "a loose bound", "not told"])  # fmt: skip
def test_sequences_of_a_ragged_batch(tokens, sequences, longest, want):
    q, k = torch.zeros(tokens, 16, 64, dtype=torch.float16), torch.zeros(64, 128, 1, 64, dtype=torch.float16)
    call = Call(
        q, k, k, block_indices=torch.zeros(tokens, 1, 16, dtype=torch.int32), block_size=64, max_seqlen_q=longest,
        cu_seqlens_q=torch.zeros(sequences + 1, dtype=torch.int32), settings=settings.get(),
        cache_seqlens=torch.zeros(sequences, dtype=torch.int32),
        block_table=torch.zeros(sequences, 128, dtype=torch.int32),
    )  # fmt: skip
    job = schedules.job_of(call, shape_of(call, 16 * 64))
    assert (job.sequences, job.queries, job.steps) == want
    assert job.paged


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
    shape = SimpleNamespace(B=sequences, S_kv=keys, HKV=8, n=16, packed=packed)
    taken = key_family.can_number(SimpleNamespace(block_size=block_size), shape)
    assert not taken or fits
    assert taken or sequences * S_kv >= 2**28


# --- routes, from metadata alone --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of that name, which can run Triton, wherever tensors lie."""
    monkeypatch.setattr(routing, "_device_facts", lambda device: (GPU, "heads_as_queries", None))
    monkeypatch.setattr(device_facts, "chip", lambda device: device_facts.Chip(90, 132, GPU, True))


def planned(
    S=256, B=1, G=1, n=16, block_size=64, dtype=torch.bfloat16, blocks=True, varlen=False, keys=1024, HKV=2, D=128,
    Dv=None, cache=False, page=None, **how,
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
        fake(*lead, G * HKV, D), fake(*kv, HKV, D), fake(*kv, HKV, Dv or D), **chosen, cu_seqlens_q=cu,
        cu_seqlens_k=None if cache else cu, max_selected=options["bound"], max_seqlen_q=options["longest"],
        backend=options["backend"], schedule=options["schedule"], cache_seqlens=lengths, block_table=table,
        settings=settings.get(),
    )  # fmt: skip
    return routing.make_plan(call)


def route(plan):
    return plan.route, plan.reason, plan.family.name, plan.named, plan.instead and plan.instead.route


KEY_MAJOR = ("key_major", f"key_major {FASTEST}", "key_major", False, "query_major")
BLOCKS = ("query_major", LONG, "query_major", False, None)
MANY = "rows of more than 64 blocks of 16 keys or fewer"
SMALL_BLOCKS = ("small_blocks", MANY, "small_blocks", False, "union")
NAMED = ("key_major", LONG, "key_major", False, "query_major")
ROUTES = {  # a call of key-major costs 10 us, and a million numbers that query-major reads 1 us
    "prefill": ({}, KEY_MAJOR),
    "varlen": ({"varlen": True}, KEY_MAJOR),
    "fp16": ({"dtype": torch.float16}, KEY_MAJOR),
    "batch-of-prompts": ({"B": 3}, KEY_MAJOR),
    "batch-of-sequences": ({"varlen": True, "B": 3}, KEY_MAJOR),
    "batch-of-decode": ({"S": 1, "B": 4096}, KEY_MAJOR),
    "short-chunk": ({"S": 16}, BLOCKS),
    "chunk-of-a-cache": ({"keys": 8192, "cache": True}, KEY_MAJOR),
    "chunk-in-pages": ({"keys": 8192, "cache": True, "page": 64}, KEY_MAJOR),
    "ragged": ({"B": 4, "S": 128, "keys": 8192, "cache": True, "varlen": True}, KEY_MAJOR),
    "more-queries-than-keys": ({"S": 1025}, BLOCKS),
    "64-slots": ({"n": 64}, KEY_MAJOR),
    "65-slots": ({"n": 65}, BLOCKS),
    "more-keys-than-are-counted": ({"S": 2**30, "n": 64, "keys": 2**31 - 1}, BLOCKS),
    "more-heads-than-a-grid-has": ({"HKV": 65_536}, BLOCKS),
    "decode": ({"S": 1}, BLOCKS),
    "fp32": ({"dtype": torch.float32}, BLOCKS),
    "4-slots": ({"n": 4}, KEY_MAJOR),
    "3-slots": ({"n": 3}, BLOCKS),
    "promised-short": ({"bound": 255}, BLOCKS),
    "promised-long": ({"bound": 256}, KEY_MAJOR),
    "few-small-blocks": ({"block_size": 15}, BLOCKS),
    "65-small-blocks": ({"block_size": 16, "n": 65}, SMALL_BLOCKS),
    "65-small-blocks-fp32": ({"block_size": 16, "n": 65, "dtype": torch.float32}, BLOCKS),
    "large-blocks": ({"block_size": 129}, BLOCKS),
    "a-kind-without-costs": ({"D": 129}, BLOCKS),
    "largest-group": ({"G": 32}, KEY_MAJOR),
    "larger-group-than-measured": ({"G": 33}, BLOCKS),
    "ranges": ({"blocks": False}, BLOCKS),
    "query-major-named": ({"schedule": "query_major"}, BLOCKS),
    "per-head-named": ({"schedule": "per_head"}, ("per_head", LONG, "query_major", False, None)),
    "key-major-named": ({"schedule": "key_major", "S": 1, "n": 1, "block_size": 7}, NAMED),
    "key-major-named-for-ranges": ({"schedule": "key_major", "blocks": False}, (*NAMED[:-1], "query_major")),
    "key-major-named-in-fp32": ({"schedule": "key_major", "dtype": torch.float32}, NAMED),
    "triton-named": ({"backend": "triton"}, ("key_major", f"{ASKED}; {KEY_MAJOR[1]}", "key_major", True, None)),
    "both-named": (
        {"backend": "triton", "schedule": "key_major", "S": 1},
        ("key_major", ASKED, "key_major", True, None),
    ),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_routes(folder, gpu, kind):
    shape, want = ROUTES[kind]
    folder()
    assert route(planned(**shape)) == want


@pytest.mark.parametrize(("changed", "shape", "want"), [
    ({"batch_invariant": True}, {}, ("query_major", LONG)),
    ({"batch_invariant": True}, {"schedule": "key_major"}, ("key_major", LONG)),
    ({"sel_triton_group": False}, {}, ("per_head", LONG)),
    ({"sel_triton_group": False}, {"schedule": "key_major"}, ("key_major", LONG)),
    ({"use_triton_sel": False}, {}, ("sdpa", "use_triton_sel is off")),
    ({"force_parity": True}, {"schedule": "key_major"}, ("reference", "force_parity is set")),
    *(
        ({"sel_triton_min_L": 1025}, named, ("sdpa", "rows select at most 1024 keys, sel_triton_min_L is 1025"))
        for named in ({}, {"schedule": "key_major"})
    ),
], ids=str)  # fmt: skip
def test_settings_come_first(folder, gpu, changed, shape, want):
    folder()
    with nsa.configure(**changed):
        plan = planned(**shape)
    assert (plan.route, plan.reason) == want
    assert (plan.instead is not None) == (want[0] == "key_major")


@pytest.mark.parametrize(("shape", "want"), [
    ({"G": 8}, "union"),
    ({"G": 2}, "key_major"),  # union leaves most of a tile empty
    ({"G": 8, "dtype": torch.float16}, "union"),
    ({"G": 8, "S": 16}, "union"),
    ({"G": 1, "S": 16}, "query_major"),
    ({"G": 32}, "union"),
    ({"G": 32, "D": 256}, "key_major"),  # no tile holds two tokens
    ({"G": 32, "Dv": 256}, "key_major"),
], ids=str)  # fmt: skip
def test_union_where_it_serves(folder, gpu, shape, want):
    folder(UNION)
    found = planned(**shape)
    assert (found.route, found.reason) == (want, LONG if want == "query_major" else f"{want} {FASTEST}")


WIDE = f"{{narrow: {OF_THREE}, wide: {{query_major: {{calls: 1}}, union: {{calls: 4}}}}}}"


@pytest.mark.parametrize(("costs", "G", "elsewhere"), [
    (UNION, 32, "key_major"),  # only tiles of 64 rows hold two tokens of 32 heads, and only Hopper has room for them
    (WIDE, 16, "query_major"),  # the costs are those of narrow head dims on Hopper, and those of wide ones elsewhere
], ids=["tiles", "costs"])  # fmt: skip
@pytest.mark.parametrize("capability", [90, 80])
def test_long_keys_have_the_tiles_and_costs_of_narrow_head_dims_on_hopper(
    folder, gpu, monkeypatch, capability, costs, G, elsewhere
):
    """With D = 192 and Dv = 128."""
    monkeypatch.setattr(device_facts, "chip", lambda device: device_facts.Chip(capability, 108, None, True))
    folder(costs)
    assert planned(S=1024, G=G, D=192, Dv=128).route == ("union" if capability == 90 else elsewhere)
    assert planned(S=1024, G=16, D=128, Dv=128).route == "union"


def test_the_work_of_long_keys_is_that_of_their_tiles():
    job = USUAL._replace(D=192, Dv=128, G=16, shared=0.9)
    elsewhere = job._replace(capability=capability_of(80, 192, 128))
    assert (job.kind, elsewhere.kind) == ("narrow", "wide")
    assert work(job, "union")["products_wgmma"] > 0 == work(elsewhere, "union")["products_wgmma"]
    assert work(elsewhere, "key_major")["steps"] > work(job, "key_major")["steps"]
    assert capability_of(80, 128, 128) == capability_of(80, 256, 256) == 90


def test_no_file_means_query_major(folder, gpu):
    assert route(planned(S=1024)) == BLOCKS


def test_the_stand_in_is_said(folder, gpu):
    folder(name=STAND_IN, provenance=PROVENANCE.replace(GPU, STAND_IN))
    plan = planned()
    text = f"key_major is expected to be the fastest, measured on {STAND_IN} ({GPU} was not measured)"
    assert (plan.route, plan.reason) == ("key_major", text)


def test_doctor_line(folder):
    """Of the GPU's own costs, or else of the stand-in's; `test_main.py` has the line where there are none."""
    folder(name=STAND_IN)
    path = folder()
    assert schedules.describe(GPU) == f"by costs; measured 2026-12-01, s, {path}"
    path.unlink()
    settings.reload()
    assert schedules.describe(GPU).startswith("by costs; measured on NVIDIA Nobody 1, not on this GPU, 2026-12-01")


def test_where_there_is_no_gpu_it_runs_by_name_only(folder, monkeypatch):
    """As in Triton's interpreter."""
    folder()
    monkeypatch.setattr(routing, "_device_facts", lambda device: (None, "heads_as_queries", None))
    assert route(planned()) == BLOCKS
    assert route(planned(schedule="key_major")) == NAMED


def test_what_failures_are_remembered_by(folder, gpu):
    """A failure is remembered by kernel, and key-major's by block size, too. That of a backward pass is remembered by
    block size, but not by the schedule of the forward pass.
    """
    folder()
    key_major, blocks, longer = planned(), planned(schedule="query_major"), planned(S=512, n=8)
    ranges = planned(blocks=False, schedule="key_major")
    others = [planned(block_size=32, keys=512), ranges, planned(varlen=True), planned(G=2)]
    assert key_major.kernel == longer.kernel == planned(schedule="key_major").kernel
    assert key_major.instead.kernel == blocks.kernel
    assert key_major.backward == key_major.instead.backward == blocks.backward == longer.backward
    forward, backward = {p.kernel for p in (key_major, blocks, *others)}, {p.backward for p in (key_major, *others)}
    assert (len(forward), len(backward)) == (6, 5)
    assert not forward & backward


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA Somebody"])
def test_prompts_on_an_h100_and_on_what_nobody_measured(gpu, monkeypatch, name):
    """Routes that the packaged measurement makes. Its figures may move when it is recorded anew, these calls not."""
    monkeypatch.setattr(routing, "_device_facts", lambda device: (name, "heads_as_queries", None))
    for G in (1, 2, 3, 4, 8, 16):
        assert planned(G=G, S=4096, keys=4096, backend="triton").route in ("union", "key_major")
        assert planned(G=G, S=1, backend="triton").route == "query_major"
        assert planned(G=G, S=4096, keys=4096, blocks=False, backend="triton").route == "query_major"
    assert planned(G=64, S=4096, keys=4096, backend="triton").route == "query_major"
