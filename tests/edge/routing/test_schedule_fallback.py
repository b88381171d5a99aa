"""What serves where a call is given to key-major: key-major, query-major where that is broken, then packed SDPA.

The key-major kernel is a stand-in here, so that it can fail at will; parity is about the real one.
"""

import logging
import sys
import types

import pytest
import torch

import nsa
import nsa.kernels
from nsa import routing
from nsa.call import Call
from nsa.gpu import PROVENANCE
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.shared.errors import DoesNotFit
from nsa.plain.oracle import selection_reference
from nsa.tuning import files

GPU = "NVIDIA Nobody 1"
LONG = "rows are long enough for Triton"
MEASURED = f"2 queries or more with G = 1: key-major is faster, measured on {GPU}"


@pytest.fixture
def kernels(monkeypatch, gpus, fresh_routes):
    """`kernels[name]`: an error that its launch raises, or None; `kernels["tried"]`: names, as they were tried.

    On a GPU of which is known that key-major is faster from two queries on, wherever tensors lie.
    """
    monkeypatch.setattr(routing, "_device_facts", lambda device: (GPU, "heads_as_queries", None))
    content = {"key_major_from": {1: 2}, "chunk_key_major_from": {1: 2}}
    content["provenance"] = dict.fromkeys(PROVENANCE["crossover"], GPU)
    files.write_section(gpus, GPU, "crossover", content, [])
    state = {"key_major": None, "query_major": None, "misfit": None, "tried": []}
    stub = types.ModuleType("nsa.kernels.key_major.plan")
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    right = query_major.forward

    def plan(call, shape, skips, steps):
        state["planned"] = shape.bound, skips, steps
        if state["misfit"] is not None:
            raise DoesNotFit(state["misfit"])
        return "launch"

    def key_major(launch, call, route):
        state["tried"].append("key_major")
        if state["key_major"] is not None:
            raise state["key_major"]
        nsa.kernels.launches[route] += 1
        o, _ = selection_reference(call._replace(out=None, return_lse=False))
        return (o if call.out is None else call.out.copy_(o)), None

    def forward(*args):
        state["tried"].append("query_major")
        if state["query_major"] is not None:
            raise state["query_major"]
        return right(*args)

    stub.plan, stub.forward = plan, key_major
    monkeypatch.setattr(query_major, "forward", forward)
    monkeypatch.setattr(key_tiles, "MIN_REUSE", 1)
    with nsa.configure(sel_triton_min_L=0):
        yield state


@pytest.fixture
def attend(draw, same):
    """A call that `auto` gives to key-major: 3 queries, 4 slots of 128. Checked against the reference."""
    q, k, v = draw(G=1, dtype=torch.float16)
    selection = {"block_indices": same([0, -1, -1, -1], 1, 3, 2), "block_size": 128}

    def call(**how):
        o = nsa.selection_attention(q, k, v, **selection, **how)
        want = selection_reference(Call.of(q.double(), k, v, **selection))[0]
        torch.testing.assert_close(o.double(), want, rtol=0, atol=1e-2)

    return call


BROKEN = RuntimeError("it does not compile")
SAID = "{} kernel failed: RuntimeError: it does not compile"


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "nsa" and r.levelno >= logging.WARNING]


def test_key_major_serves(kernels, attend):
    before = nsa.kernels.launches.copy()
    attend()
    assert nsa.routes() == [nsa.RouteRecord("key_major", MEASURED, 1)]
    assert nsa.kernels.launches - before == {"key_major": 1}
    assert kernels["planned"] == (512, False, None)


def test_query_major_serves_where_key_major_is_broken(kernels, attend, caplog):
    kernels["key_major"] = BROKEN
    for _ in range(3):
        attend()
    assert kernels["tried"] == ["key_major", *["query_major"] * 3]
    assert warnings_of(caplog) == [f"{SAID.format('key_major')}; query_major serves this signature from now on"]
    assert nsa.routes() == [nsa.RouteRecord("query_major", SAID.format("key_major"), 3, "blocks")]
    attend(schedule="query_major")  # which is not broken
    assert nsa.routes()[1] == nsa.RouteRecord("query_major", LONG, 1, "blocks")


def test_packed_sdpa_serves_where_both_are_broken(kernels, attend, caplog):
    kernels["key_major"] = kernels["query_major"] = BROKEN
    for _ in range(3):
        attend()
    assert kernels["tried"] == ["key_major", "query_major"]
    assert warnings_of(caplog) == [
        f"{SAID.format('key_major')}; query_major serves this signature from now on",
        f"{SAID.format('query_major')}; sdpa serves this signature from now on",
    ]
    assert nsa.routes() == [nsa.RouteRecord("sdpa", SAID.format("query_major"), 3)]


def test_what_query_major_already_failed_at_is_not_tried_again(kernels, attend):
    kernels["query_major"] = BROKEN
    attend(schedule="query_major")
    kernels["key_major"] = BROKEN
    attend()
    assert kernels["tried"] == ["query_major", "key_major"]
    assert [r.route for r in nsa.routes()] == ["sdpa"]


def test_broken_query_major_says_nothing_of_key_major(kernels, attend):
    kernels["query_major"] = BROKEN
    attend(schedule="query_major")
    attend()
    assert [r.route for r in nsa.routes()] == ["sdpa", "key_major"]


def test_reset_tries_it_again(kernels, attend):
    kernels["key_major"] = BROKEN
    attend()
    kernels["key_major"] = None
    attend()
    nsa.dispatch.reset()
    attend()
    assert kernels["tried"] == ["key_major", "query_major", "query_major", "key_major"]


def test_what_is_no_kernel_failure_is_passed_on(kernels, attend):
    kernels["key_major"] = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            attend()
    assert kernels["tried"] == ["key_major"] * 2


def test_key_major_missing_is_a_broken_kernel(kernels, attend, monkeypatch):
    monkeypatch.setitem(sys.modules, "nsa.kernels.key_major.plan", None)  # importing it raises
    attend()
    attend()
    ((name, reason, calls, _),) = nsa.routes()
    assert (name, calls) == ("query_major", 2)
    assert reason.startswith("key_major kernel failed: ModuleNotFoundError: ")


def test_a_named_backend_raises(kernels, attend):
    """Every time, whoever chose the schedule."""
    kernels["key_major"] = BROKEN
    for how in ({}, {"schedule": "key_major"}) * 2:
        with pytest.raises(RuntimeError) as raised:
            attend(backend="triton", **how)
        assert raised.value is BROKEN
    assert kernels["tried"] == ["key_major"] * 4
    assert nsa.routes() == []


def test_a_named_schedule_falls_back_like_any_other(kernels, attend, caplog):
    kernels["key_major"] = BROKEN
    attend(schedule="key_major")
    attend(schedule="key_major")
    assert kernels["tried"] == ["key_major", "query_major", "query_major"]
    assert warnings_of(caplog) == [f"{SAID.format('key_major')}; query_major serves this signature from now on"]
    assert nsa.routes() == [nsa.RouteRecord("query_major", SAID.format("key_major"), 2, "blocks")]


@pytest.mark.parametrize("schedule", ["auto", "key_major"])
def test_a_call_that_does_not_fit_the_workspace_is_served_by_another_schedule(kernels, attend, caplog, schedule):
    kernels["misfit"] = "key_major: one token's partial results do not fit"
    attend(schedule=schedule)
    attend(schedule=schedule)
    assert kernels["tried"] == ["query_major", "query_major"]
    assert nsa.routes() == [nsa.RouteRecord("query_major", kernels["misfit"], 2, "blocks")]
    assert not warnings_of(caplog)
    with pytest.raises(ValueError, match="do not fit"):
        attend(schedule=schedule, backend="triton")


def test_named_for_ranges(kernels, draw, same):
    q, k, v = draw(dtype=torch.float16)
    ranges = same([(0, 7), (9, 13)], 1, 3, 2)
    o = nsa.selection_attention(q, k, v, ranges=ranges, schedule="key_major")
    torch.testing.assert_close(o, selection_reference(Call.of(q, k, v, ranges=ranges))[0])
    assert nsa.routes() == [nsa.RouteRecord("key_major", LONG, 1)]


def test_debug_timing_logs_what_served(kernels, attend, caplog):
    kernels["key_major"] = BROKEN
    with nsa.configure(debug_timing=True), caplog.at_level(logging.INFO, logger="nsa"):
        attend()
        attend()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("route query_major (key_major kernel")]
    assert len(lines) == 2
