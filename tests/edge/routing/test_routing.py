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


LONG, ASKED = "rows are long enough for Triton", "backend='triton' asked for"
OFF, PARITY = "use_triton_sel is off", "force_parity is set"


def short(bound, min_L):
    return f"rows select at most {bound} keys, sel_triton_min_L is {min_L}"


AGAINST = {"use_triton_sel": False, "force_parity": True, "use_sel_pack": False, "sel_triton_min_L": 10**9}
# Settings, what is changed in the call, and the route with its reason. Without a threshold rows are long.
ROUTES = {
    "below": ({"sel_triton_min_L": 12}, {"max_selected": 11}, "sdpa", short(11, 12)),
    "at": ({"sel_triton_min_L": 11}, {"max_selected": 11}, "query_major", LONG),
    "threshold-0": ({}, {"max_selected": 11}, "query_major", LONG),
    "no-bound-counts-as-long": ({"sel_triton_min_L": 10**9}, {}, "query_major", LONG),
    "bound-0": ({"sel_triton_min_L": 1}, {"spans": [(0, 0)], "max_selected": 0}, "sdpa", short(0, 1)),
    # Three blocks of five keys: at most 15, padding or not.
    "blocks-at": ({"sel_triton_min_L": 15}, {"blocks": True}, "query_major", LONG),
    "blocks-below": ({"sel_triton_min_L": 16}, {"blocks": True}, "sdpa", short(15, 16)),
    "blocks-smaller-bound": ({"sel_triton_min_L": 15}, {"blocks": True, "max_selected": 10}, "sdpa", short(10, 15)),
    "blocks-larger-bound": ({"sel_triton_min_L": 16}, {"blocks": True, "max_selected": 99}, "sdpa", short(15, 16)),
    "force-parity": ({"force_parity": True}, {}, "reference", PARITY),
    "triton-off": ({"use_triton_sel": False}, {}, "sdpa", OFF),
    "triton-and-packing-off": ({"use_triton_sel": False, "use_sel_pack": False}, {}, "reference", OFF),
    "short-without-packing": (
        {"sel_triton_min_L": 100, "use_sel_pack": False}, {"max_selected": 11}, "reference", short(11, 100),
    ),
    "per-head": ({"sel_triton_group": False}, {}, "per_head", LONG),
    "no-pipelining": ({"sel_triton_db": False}, {}, "query_major", LONG),
    "parity-before-triton-off": ({"force_parity": True, "use_triton_sel": False}, {}, "reference", PARITY),
    "fp64": ({}, {"dtype": torch.float64}, "sdpa", "Triton route takes float16, bfloat16 and float32, got float64"),
    # By name, whatever the settings say.
    **{
        f"{backend}-named": (AGAINST, {"backend": backend, "max_selected": 11}, route, f"backend={backend!r} asked for")
        for backend, route in (("triton", "query_major"), ("sdpa", "sdpa"), ("reference", "reference"))
    },
    "blocks-named": (AGAINST, {"backend": "triton", "blocks": True}, "query_major", ASKED),
    "per-head-named": (AGAINST, {"backend": "triton", "schedule": "per_head"}, "per_head", ASKED),
    "schedule-before-the-setting": ({"sel_triton_group": False}, {"schedule": "query_major"}, "query_major", LONG),
    "schedule-named": ({}, {"schedule": "per_head"}, "per_head", LONG),
}  # fmt: skip
if current_lane() == "interpreter":  # on a GPU bf16 is computed right
    ROUTES["bf16"] = ({}, {"dtype": torch.bfloat16}, "sdpa", "Triton's interpreter computes bfloat16 wrong")


@pytest.mark.parametrize("kind", ROUTES)
def test_routes(draw, same, ranges, blocks, kind):
    changed, call, route, reason = ROUTES[kind]
    call = dict(call)
    selection = blocks if call.pop("blocks", False) else ranges
    if "spans" in call:
        selection = {"ranges": same(call.pop("spans"), 1, 3, 2)}
    tensors = draw(dtype=call.pop("dtype", torch.float32))
    with nsa.configure(**{"sel_triton_min_L": 0} | changed):
        assert ran(front_door(tensors, selection, **call)) == (route, reason)


def test_default_threshold_where_nobody_measured(draw, ranges, monkeypatch, fresh_plans):
    """2048 keys. (The GPU lane may have a measured one: it is asked for that of a GPU that does not exist.)"""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nobody 1")
    with nsa.configure(sel_triton_min_L=None):
        want = "rows select at most 2047 keys, sel_triton_min_L is 2048"
        assert ran(front_door(draw(), ranges, max_selected=2047)) == ("sdpa", want)
        assert ran(front_door(draw(), ranges, max_selected=2048)) == ("query_major", LONG)


def test_pipelining_off_means_one_stage(draw, ranges, monkeypatch, fresh_plans):
    from nsa.kernels.query_major import plan as query_major

    seen = []
    plan = query_major.plan
    monkeypatch.setattr(query_major, "plan", lambda *args: seen.append(plan(*args)) or seen[-1])
    for on in (True, False):
        with nsa.configure(sel_triton_min_L=0, sel_triton_db=on):
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


@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["q", "k", "v"])
def test_gradients_change_no_route(draw, ranges, leaf):
    tensors = draw()
    tensors[leaf].requires_grad_()
    for min_L, route in ((0, "query_major"), (BOUND + 1, "sdpa")):
        with nsa.configure(sel_triton_min_L=min_L):
            assert ran(front_door(tensors, ranges, max_selected=BOUND))[0] == route
            with torch.no_grad():
                assert ran(front_door(tensors, ranges, max_selected=BOUND))[0] == route


def test_old_gpu_is_packed(draw, ranges, monkeypatch, fresh_plans):
    text = "Triton route needs compute capability 8.0 or newer, cuda:0 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    nsa.routing.why_not_triton.cache_clear()
    assert nsa.routing.why_not_triton(torch.device("cuda", 0)) == text
    nsa.routing.why_not_triton.cache_clear()

    monkeypatch.setattr(nsa.routing, "why_not_triton", lambda device: text)
    with nsa.configure(sel_triton_min_L=0):
        assert ran(front_door(draw(), ranges)) == ("sdpa", text)
        with pytest.raises(RuntimeError) as raised:
            nsa.selection_attention(*draw(), **ranges, backend="triton")
    assert str(raised.value) == f"backend='triton': {text}"


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


def test_routes_counts_calls_most_frequent_first(draw, ranges):
    with nsa.configure(sel_triton_min_L=BOUND):
        for bound in (BOUND, BOUND - 1, BOUND - 1, None, None):
            nsa.selection_attention(*draw(), **ranges, max_selected=bound)
    assert nsa.routes() == [
        nsa.RouteRecord("query_major", LONG, 3, "ranges"),
        nsa.RouteRecord("sdpa", "rows select at most 10 keys, sel_triton_min_L is 11", 2),
    ]


def test_wrong_calls_are_not_counted(draw, ranges):
    with pytest.raises(ValueError, match="^block_size: "):
        nsa.selection_attention(*draw(), **ranges, block_size=3)
    assert nsa.routes() == []
