"""Contestants that choose blocks, against the fp64 oracle. Judged by scores, see `judge/selections.py`."""

import torch
from torch import Tensor

from nsa.testing.contestants import named, selectors
from nsa.testing.contestants.named import Wrong
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested
from nsa.testing.judge.conduct import untouched
from nsa.testing.judge.selections import diagnose, findings
from nsa.testing.machine import current_lane
from nsa.testing.matrix.selecting import as_request

INTERPRETED = current_lane() == "interpreter"
OURS_INTERPRETED = 12  # cases of ours there; tests/edge/selecting has more, with small tiles


def cases(impl):
    return [(case,) for case in impl.contract.cases(INTERPRETED)]


def ours():
    """Our selectors. Interpreted kernels take seconds a case."""
    for spec in selectors.OURS:
        impl = named.load(spec)
        yield from ((impl, row) for row in cases(impl)[: OURS_INTERPRETED if INTERPRETED else None])


@contested(cases, ours=ours, promise="O", selects=True)
def test_triton_sel_parity_selecting(contestant, case, device):
    """The right blocks, from inputs that stay as they are; and the same ones from a second call."""
    r = as_request(*case.make(device))  # of tensors that the contestant does not see
    q, k, how = case.make(device)
    head = f"{contestant.name} on {case.id}"
    with untouched(contestant.name, {"q": q, "k": k} | how):
        out = contestant.selects(q, k, **how)
    if not isinstance(out, Tensor):
        raise Wrong(f"{head}: expected a tensor, got {type(out).__name__}")
    found = findings(out, r, case.integers and case.score != "softmax")
    if found:
        raise Wrong(f"{head}: {diagnose(out, r, found)}")
    kept, flipped = out.clone(), q.flip(-1)
    q.copy_(flipped)  # a selector may not know a call again by its tensors' addresses
    r = r._replace(q=flipped)
    again = contestant.selects(q, k, **how)
    found = findings(again, r, case.integers and case.score != "softmax")
    if found:
        raise Wrong(f"{head}, whose queries have changed in place: {diagnose(again, r, found)}")
    if not torch.equal(out, kept):
        raise Wrong(f"{head}: a later call changed a result that was returned")
    q.copy_(flipped.flip(-1))
    if contestant.contract.repeatable and not torch.equal(out, contestant.selects(q, k, **how)):
        raise Wrong(f"{head}: two calls with equal inputs chose different blocks")
