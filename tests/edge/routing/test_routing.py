"""Which implementation `auto` takes, and what `nsa.routes()` says of it. Kernels are counted at their launch."""

import pytest
import torch

import nsa
import nsa.kernels
from nsa.testing.plugin import current_lane

pytestmark = pytest.mark.usefixtures("fresh_routes")
BOUND = 11  # keys of a row


@pytest.fixture
def ranges(same):
    return {"ranges": same([(0, 7), (9, 13)], 1, 3, 2)}


@pytest.fixture
def blocks(same):
    return {"block_indices": same([1, -1, 0], 1, 3, 2), "block_size": 5}


def ran(call):
    """Run it: `(route, reason)`, after checking that just that kernel, or none, was launched."""
    nsa.dispatch.reset()
    before = nsa.kernels.launches.copy()
    call()
    (record,) = nsa.routes()
    assert record.calls == 1
    launched = nsa.kernels.launches - before
    launched.pop("split", None)
    assert launched == ({} if record.route in ("sdpa", "reference") else {record.route: 1})
    return record.route, record.reason


def front_door(tensors, selection, **keywords):
    return lambda: nsa.selection_attention(*tensors, **selection, **keywords)


# --- the threshold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "min_L", "route", "reason"),
    [
        (BOUND, BOUND + 1, "sdpa", "rows select at most 11 keys, sel_triton_min_L is 12"),
        (BOUND, BOUND, "query_major", "rows are long enough for Triton"),
        (BOUND, 0, "query_major", "rows are long enough for Triton"),
        (None, 10**9, "query_major", "rows are long enough for Triton"),
        (0, 1, "sdpa", "rows select at most 0 keys, sel_triton_min_L is 1"),
    ],
    ids=["below", "at", "threshold-0", "no-bound-counts-as-long", "bound-0"],
)
def test_threshold(draw, ranges, bound, min_L, route, reason):
    if bound == 0:
        ranges["ranges"].zero_()
    with nsa.configure(sel_triton_min_L=min_L):
        assert ran(front_door(draw(), ranges, max_selected=bound)) == (route, reason)


@pytest.mark.parametrize(
    ("bound", "min_L", "route", "reason"),
    [
        (None, 15, "query_major", "rows are long enough for Triton"),
        (None, 16, "sdpa", "rows select at most 15 keys, sel_triton_min_L is 16"),
        (10, 15, "sdpa", "rows select at most 10 keys, sel_triton_min_L is 15"),
        (99, 16, "sdpa", "rows select at most 15 keys, sel_triton_min_L is 16"),
    ],
    ids=["at", "below", "smaller-bound", "larger-bound"],
)
def test_blocks_bound_themselves(draw, blocks, bound, min_L, route, reason):
    """Three blocks of five keys: at most 15, padding or not."""
    with nsa.configure(sel_triton_min_L=min_L):
        assert ran(front_door(draw(), blocks, max_selected=bound)) == (route, reason)


def test_default_threshold_where_nobody_measured(draw, ranges, monkeypatch, fresh_plans):
    """2048 keys. (The GPU lane may have a measured one: it is asked for that of a GPU that does not exist.)"""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nobody 1")
    with nsa.configure(sel_triton_min_L=None):
        want = "rows select at most 2047 keys, sel_triton_min_L is 2048"
        assert ran(front_door(draw(), ranges, max_selected=2047)) == ("sdpa", want)
        assert ran(front_door(draw(), ranges, max_selected=2048)) == ("query_major", "rows are long enough for Triton")


# --- switches ---------------------------------------------------------------------------------------------------------

LONG = {"sel_triton_min_L": 0}
SWITCHES = {
    "force-parity": ({"force_parity": True}, "reference", "force_parity is set"),
    "triton-off": ({"use_triton_sel": False}, "sdpa", "use_triton_sel is off"),
    "triton-and-packing-off": ({"use_triton_sel": False, "use_sel_pack": False}, "reference", "use_triton_sel is off"),
    "per-head": ({"sel_triton_group": False}, "per_head", "rows are long enough for Triton"),
    "no-pipelining": ({"sel_triton_db": False}, "query_major", "rows are long enough for Triton"),
    "parity-before-triton-off": (
        {"force_parity": True, "use_triton_sel": False},
        "reference",
        "force_parity is set",
    ),
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches(draw, ranges, kind):
    changed, route, reason = SWITCHES[kind]
    with nsa.configure(**LONG, **changed):
        assert ran(front_door(draw(), ranges)) == (route, reason)


def test_fallback_of_short_rows_without_packing(draw, ranges):
    with nsa.configure(sel_triton_min_L=100, use_sel_pack=False):
        want = "rows select at most 11 keys, sel_triton_min_L is 100"
        assert ran(front_door(draw(), ranges, max_selected=BOUND)) == ("reference", want)


def test_pipelining_off_means_one_stage(draw, ranges, monkeypatch, fresh_plans):
    from nsa.kernels.query_major import plan as query_major

    seen = []
    plan = query_major.plan
    monkeypatch.setattr(query_major, "plan", lambda *args: seen.append(plan(*args)) or seen[-1])
    for on in (True, False):
        with nsa.configure(**LONG, sel_triton_db=on):
            ran(front_door(draw(), ranges, max_selected=1000))  # several tiles: of one there is nothing to load ahead
    assert seen[0].variant.options["num_stages"] > 1
    assert seen[1].variant.options["num_stages"] == 1


def test_settings_hold_for_their_block_only(draw, ranges):
    """And a call remembered under other settings is not reused."""
    call = front_door(draw(), ranges, max_selected=BOUND)
    with nsa.configure(sel_triton_min_L=0):
        assert ran(call)[0] == "query_major"
        with nsa.configure(sel_triton_min_L=100):
            assert ran(call)[0] == "sdpa"
        assert ran(call)[0] == "query_major"


# --- what Triton cannot do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["q", "k", "v"])
def test_gradients_change_no_route(draw, ranges, leaf):
    tensors = draw()
    tensors[leaf].requires_grad_()
    for min_L, route in ((0, "query_major"), (BOUND + 1, "sdpa")):
        with nsa.configure(sel_triton_min_L=min_L):
            assert ran(front_door(tensors, ranges, max_selected=BOUND))[0] == route
            with torch.no_grad():
                assert ran(front_door(tensors, ranges, max_selected=BOUND))[0] == route


def test_fp64_is_packed(draw, ranges):
    reason = "Triton route takes float16, bfloat16 and float32, got float64"
    with nsa.configure(**LONG):
        assert ran(front_door(draw(dtype=torch.float64), ranges)) == ("sdpa", reason)


@pytest.mark.skipif(current_lane() == "gpu", reason="on the GPU bf16 is computed right")
def test_interpreted_bf16_is_packed(draw, ranges):
    with nsa.configure(**LONG):
        want = "sdpa", "Triton's interpreter computes bfloat16 wrong"
        assert ran(front_door(draw(dtype=torch.bfloat16), ranges)) == want


def test_old_gpu_is_packed(draw, ranges, monkeypatch, fresh_plans):
    text = "Triton route needs compute capability 8.0 or newer, cuda:0 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    nsa.routing.why_not_triton.cache_clear()
    assert nsa.routing.why_not_triton(torch.device("cuda", 0)) == text
    nsa.routing.why_not_triton.cache_clear()

    monkeypatch.setattr(nsa.routing, "why_not_triton", lambda device: text)
    with nsa.configure(**LONG):
        assert ran(front_door(draw(), ranges)) == ("sdpa", text)
        with pytest.raises(RuntimeError) as raised:
            nsa.selection_attention(*draw(), **ranges, backend="triton")
    assert str(raised.value) == f"backend='triton': {text}"


# --- by name ----------------------------------------------------------------------------------------------------------


def test_named_backends_run_whatever_the_settings_say(draw, ranges, blocks):
    against = {"use_triton_sel": False, "force_parity": True, "use_sel_pack": False, "sel_triton_min_L": 10**9}
    with nsa.configure(**against):
        for backend, route in (("triton", "query_major"), ("sdpa", "sdpa"), ("reference", "reference")):
            call = front_door(draw(), ranges, max_selected=BOUND, backend=backend)
            assert ran(call) == (route, f"backend={backend!r} asked for")
        assert ran(front_door(draw(), blocks, backend="triton"))[0] == "query_major"
        schedule = {"backend": "triton", "schedule": "per_head"}
        assert ran(front_door(draw(), ranges, **schedule))[0] == "per_head"


def test_named_schedule_wins_over_the_setting(draw, ranges):
    with nsa.configure(**LONG, sel_triton_group=False):
        assert ran(front_door(draw(), ranges, schedule="query_major"))[0] == "query_major"
    with nsa.configure(**LONG):
        assert ran(front_door(draw(), ranges, schedule="per_head"))[0] == "per_head"


@pytest.mark.parametrize("leaf", [None, 0], ids=["forward", "gradients"])
def test_named_triton_raises_what_auto_would_avoid(draw, ranges, leaf):
    tensors = draw(dtype=torch.float64)
    if leaf is not None:
        tensors[leaf].requires_grad_()
    with pytest.raises(RuntimeError) as raised:
        nsa.selection_attention(*tensors, **ranges, backend="triton")
    assert str(raised.value) == "backend='triton': Triton route takes float16, bfloat16 and float32, got float64"
    assert nsa.routes() == []


def test_original_entry_points(draw, ranges):
    """The wrapper routes as `auto` does; its packed twin is packed SDPA."""
    q, k, v = draw()
    original = q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), ranges["ranges"]
    for min_L, route in ((0, "query_major"), (100, "sdpa")):
        with nsa.configure(sel_triton_min_L=min_L):
            assert ran(lambda: nsa.selection_attention_triton(*original, max_selected=BOUND))[0] == route
            assert ran(lambda: nsa.grouped_selection_attention_packed(*original, max_selected=BOUND))[0] == "sdpa"


# --- the log ----------------------------------------------------------------------------------------------------------


def test_routes_counts_calls_most_frequent_first(draw, ranges):
    with nsa.configure(sel_triton_min_L=BOUND):
        for bound in (BOUND, BOUND - 1, BOUND - 1, None, None):
            nsa.selection_attention(*draw(), **ranges, max_selected=bound)
    assert nsa.routes() == [
        nsa.RouteRecord("query_major", "rows are long enough for Triton", 3, "ranges"),
        nsa.RouteRecord("sdpa", "rows select at most 10 keys, sel_triton_min_L is 11", 2),
    ]


def test_wrong_calls_are_not_counted(draw, ranges):
    with pytest.raises(ValueError, match="^block_size: "):
        nsa.selection_attention(*draw(), **ranges, block_size=3)
    assert nsa.routes() == []
