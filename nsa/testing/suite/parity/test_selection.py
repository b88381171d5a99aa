"""Outputs and LSE over the lane's matrix, and over selections that Hypothesis draws, against the fp64 oracle."""

from hypothesis import given
from hypothesis import strategies as st

from nsa.testing.contestants.fit import arranged, cases_of, fitted
from nsa.testing.contestants.named import prove, returns
from nsa.testing.contestants.ours import OF_SOURCE, OURS
from nsa.testing.fixtures import *  # noqa: F403  (a fixture of a module precedes one of a project's conftest.py)
from nsa.testing.fixtures import contested, lane_cases
from nsa.testing.judge.forward import Oracle
from nsa.testing.machine import current_lane
from nsa.testing.matrix.strategies import INT32, OF_CONTESTANTS, Drawn, seeds, selections
from nsa.testing.profiles import drawing

INTERPRETED = current_lane() == "interpreter"
FAR = 2**27 - 2  # the last block of 16 keys that ends within int32


def matrix(impl):
    return [(case, wanted) for case in cases_of(impl.contract, lane_cases(), INTERPRETED) for wanted in returns(impl)]


def ours():
    """The rows of our contestants. Cases of the full matrix are tested either with LSE or without, to compile less."""
    for case in lane_cases():
        once = case.N in (64, 256, 1024) and case.HKV == 1
        for wanted in (("LSE",) if case.N == 64 else ("O",)) if once else ("O", "LSE"):
            yield OURS[OF_SOURCE[case.source]], (case, wanted)


@contested(matrix, "wanted", ours=ours)
def test_triton_sel_parity(contestant, oracle, wanted):
    prove(contestant, oracle.problem, oracle, wanted)


def shapes(impl):
    """Few small cases, because a kernel may be compiled for each of them."""
    taken = [case for case in OF_CONTESTANTS if impl.contract.sequences or not case.seqlens]
    cases = dict.fromkeys(fitted(case, impl.contract, INTERPRETED) for case in taken)
    return [(case, wanted) for case in cases for wanted in returns(impl)]


@contested(shapes, "wanted", ours=tuple)  # tests/parity/test_spans.py draws for ours, with past bugs as examples
@drawing(2 / 5)  # for each shape, for O and for the LSE
@given(st.data(), seeds())
def test_triton_sel_parity_any_selection(device, contestant, case, wanted, data, seed):
    far = FAR if case.source == "blocks" else INT32 - 1
    packed = case.source in ("rows", "varlen")
    drawn = Drawn(case, case.make(device).ranges if packed else data.draw(selections(case, far)), seed)
    p = case.make(device, seed) if packed else arranged(drawn.problem(device), contestant.contract)
    prove(contestant, p, Oracle.of(p), wanted)
