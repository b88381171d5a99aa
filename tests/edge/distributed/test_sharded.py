"""Sharded calls against one process: forward equal bit by bit, gradients within rounding and equal from run to run."""

import functools

import numpy as np
import pytest
import torch

from nsa.testing.clock import sharded as measured

CU = (0, 7, 7, 20, 22), (0, 9, 12, 20, 22)  # sequences of more and fewer keys than queries, one without queries
TRITON = {"backend": "triton", "schedule": "query_major"}
PLAIN = {"backend": "reference"}
CASES = {
    # world, options, queries and keys of each rank, order, more, shape
    "triton": (2, TRITON, (8, 8), (8, 8), "contiguous", {"heads_at_once": 1}, {"S": 16}),
    "triton zigzag, uneven": (2, TRITON, (4, 12), (10, 6), "zigzag", {"keep": "none"}, {"S": 16}),
    "sdpa, batch": (2, {"backend": "sdpa"}, (12, 12), (16, 16), "contiguous", {}, {"B": 2, "S_kv": 32}),
    "four ranks, zigzag": (4, PLAIN, (6, 6, 6, 6), (6, 6, 6, 6), "zigzag", {"keep": "all"}, {}),
    "four ranks, uneven": (4, PLAIN, (10, 0, 2, 12), (1, 20, 3, 0), "contiguous", {"heads_at_once": 3}, {"B": 2}),
    "a rank without queries": (2, PLAIN, (24, 0), (12, 12), "contiguous", {}, {"HKV": 4, "ranges": True}),
    "a rank without keys": (2, PLAIN, (12, 12), (0, 24), "zigzag", {"heads_at_once": 2}, {"HKV": 4}),
    "one list for all KV heads": (2, PLAIN, (12, 12), (12, 12), "contiguous", {"heads_at_once": 1}, {"lists": 1}),
    "packed": (2, PLAIN, (12, 13), (14, 9), "contiguous", {"keep": "none"}, {"S": 25, "S_kv": 23, "cu": CU}),
    "packed, zigzag": (4, PLAIN, (4, 6, 8, 8), (6, 6, 6, 6), "zigzag", {}, {"S": 26, "S_kv": 24, "cu": CU}),
    "not causal": (2, PLAIN | {"causal": False, "scale": 0.5}, (10, 14), (12, 12), "contiguous", {}, {}),
}


@pytest.fixture(scope="session")
def one_process(ranks):
    """The results of one process, each computed once."""
    found = {}

    def of(options, shape):
        key = repr((options, shape))
        if key not in found:
            (found[key],) = ranks.run("plain", 1, options=options, **shape)
        return found[key]

    return of


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks, one_process, name):
    world, options, queries, keys, order, more, shape = CASES[name]
    want = one_process(options, shape)
    axis = 0 if "cu" in shape else 1
    take = functools.partial(np.take, axis=axis)
    found = ranks.run("sharded", world, options=options, queries=queries, keys=keys, order=order, more=more, **shape)
    for rank, (o, lse, dq, dk, dv, at, at_k, equal) in enumerate(found):
        assert equal, f"rank {rank}: two runs differ"
        assert len(at) == queries[rank]
        # Packed SDPA is PyTorch's: on a CPU its rounding depends on the number of rows.
        rounding = 1e-6 if options["backend"] == "sdpa" else 0
        np.testing.assert_allclose(o, take(want[0], at), rtol=0, atol=rounding)
        np.testing.assert_allclose(lse, take(want[1], at), rtol=0, atol=rounding)
        for got, whole, where in ((dq, want[2], at), (dk, want[3], at_k), (dv, want[4], at_k)):
            np.testing.assert_allclose(got, take(whole, where), rtol=1e-5, atol=2e-5)


def test_hooks_may_save_copies_of_other_strides(ranks):
    for want, got in ranks.run("hooks", 2):
        assert all(map(np.array_equal, want, got))


def test_heads_over_a_second_dimension(ranks, one_process):
    want = one_process(PLAIN, {"HKV": 4})
    for o, lse, dq, dk, dv, at, at_k, tp in ranks.run("of_mesh", 4):
        for got, whole, where in zip((o, lse, dq, dk, dv), want, (at, at, at, at_k, at_k), strict=True):
            heads = np.split(whole, 2, 2)[tp]
            np.testing.assert_allclose(got, np.take(heads, where, 1), rtol=1e-5, atol=2e-5)


def test_one_graph_of_torch_compile(ranks):
    for eager, compiled in ranks.run("compiled", 2):
        for got, want in zip(compiled, eager, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_example_trains(ranks):
    """On a mesh of two dimensions, with FSDP2; the first loss is that of one process."""
    ranks.run("example", 4)


def test_the_clock_measures_what_is_right(ranks):
    """`python -m nsa.testing.clock.sharded`, in the processes that run already."""
    found, text = ranks.run("clock", 4)[0]
    for run in found["sharded"]:
        assert run["check"]["o"]
        assert max(run["check"][name] for name in ("dq", "dk", "dv")) < 1e-5
        assert all(run[what] for what in ("whole", "compute", "communication"))
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["zigzag", "contiguous"]


def test_the_clock_without_two_gpus_says_so_at_once(monkeypatch, capsys):
    """Its usual step, of 131,072 tokens, would take hours on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measured.main([]) == 1
    assert capsys.readouterr().err.startswith("sharded needs 2 NVIDIA GPUs, got 0; --device cpu")
