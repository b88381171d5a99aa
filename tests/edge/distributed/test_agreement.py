"""Calls that do not fit together, or fail on one rank: an error on every rank, and no hang."""

from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest

from tests.edge.distributed.ranks import Ranks

HANG_S = 30
OTHERS = {
    "double": "ValueError: dtype: expected torch.float32 on every rank (that of rank 0), got torch.float64 on rank 1",
    "keys without gradient": "ValueError: gradient of k: expected True on every rank (that of rank 0), got False on",
    "local positions": "ValueError: selection: expected positions in the whole sequence of 24 keys, got on every rank "
    "positions in its own shard",
    "block size": "ValueError: block_size: expected 4 on every rank (that of rank 0), got 8 on rank 1",
    "order": "ValueError: order: expected contiguous on every rank (that of rank 0), got zigzag on rank 1",
    "causal": "ValueError: causal: expected True on every rank (that of rank 0), got False on rank 1",
}
CHANGES = {"block size": {"block_size": 8}, "order": {"order": "zigzag"}, "causal": {"causal": False}}


@pytest.mark.parametrize("name", OTHERS)
def test_every_rank_says_what_differs(ranks, name):
    for text, seconds in ranks.run("call", 2, change=CHANGES.get(name, name)):
        assert text is not None
        assert text.startswith(OTHERS[name])
        assert seconds < HANG_S


RAISES = {
    "block size": ({"block_size": 0}, "ValueError: block_size: expected an int >= 1, got 0"),
    "a list": ({"max_selected": [7]}, "TypeError: max_selected: expected an int, got list"),
    "keyword": (
        {"softmax_scale": 1.0},
        "TypeError: selection_attention() got an unexpected keyword argument 'softmax_scale'",
    ),
    "keep": ({"keep": "some"}, "ValueError: keep: expected one of none, last, all, got 'some'"),
}


@pytest.mark.parametrize(("change", "text"), RAISES.values(), ids=RAISES)
def test_a_rank_that_raises_is_named(ranks, change, text):
    (other, seconds), (own, _) = ranks.run("call", 2, change=change)
    assert own is not None
    assert own.startswith(text)
    assert other == f"RuntimeError: selection_attention: rank 1 raised {own}"
    assert seconds < HANG_S


def test_sizes_may_be_integers_of_numpy(ranks):
    change = {"block_size": np.int64(4), "max_selected": np.int32(12), "heads_at_once": np.int64(1)}
    assert [text for text, _ in ranks.run("call", 2, change=change)] == [None] * 2


def test_all_keys_before_a_query_are_not_positions_of_the_shard(ranks):
    assert [text for text, _ in ranks.run("call", 2, change="all keys before")] == [None] * 2


@pytest.mark.parametrize("where", ["forward", "backward", "gathered", "gathered again", "half sent"])
def test_a_rank_that_fails_in_a_pass(ranks, where):
    """The other rank ends its pass, and its next call says what happened."""
    (text, seconds), (own, _) = ranks.run("fails", 2, where=where)
    assert own == "RuntimeError: planted"
    assert text == "RuntimeError: selection_attention: rank 1 raised RuntimeError: planted"
    assert seconds < HANG_S


def test_a_rank_that_makes_no_call(ranks):
    (text, seconds), *nothing = ranks.run("silent", 4)
    assert nothing == [None] * 3
    assert text.startswith("RuntimeError: selection_attention: expected all ranks to make the call within 2 s")
    assert text.endswith("got nothing from rank 1")
    assert seconds < HANG_S


def test_a_rank_that_ends_as_a_job_is_sent_is_named():
    """Whether its process is alive is no question to ask first: it may end just after the answer."""
    ours, theirs = Pipe()
    theirs.close()
    known = SimpleNamespace(name="rank-0", exitcode=7, is_alive=lambda: True, join=lambda: None, kill=lambda: None)
    started = Ranks()
    started.pipes, started.processes = [ours], [known]
    with pytest.raises(AssertionError, match="^rank-0 ended with exit code 7$"):
        started.run("any", 1)
    assert started.processes is None, "the next test starts them anew"


def test_a_mesh_must_have_one_dimension(ranks):
    for texts in ranks.run("meshes", 4):
        assert texts["two"] == "ValueError: mesh: expected one dimension, as mesh['cp'], got 2 dimensions (dp, cp)"
        assert texts["rank"] == "TypeError: mesh: expected a dimension of a DeviceMesh or a ProcessGroup, got int"
