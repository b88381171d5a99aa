"""Gradients of the backward kernels over the lane's matrix, against fp64, bounded by dense SDPA's in the same dtype."""

from types import ModuleType

import pytest
import torch

import nsa.kernels
from nsa.call import Call
from nsa.kernels.backward import plan as backward
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.shared.poison import poisoned_workspace
from nsa.kernels.shared.shape import shape_of
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.small_backward import plan as small_backward
from nsa.kernels.small_backward import tiles as small_tiles
from nsa.kernels.small_blocks.tiles import LARGEST
from nsa.kernels.union.tiles import MOST_ENTRIES
from nsa.testing.fixtures import over
from nsa.testing.judge.gradients import GradientOracle, assert_gradients
from nsa.testing.matrix.case import Case
from nsa.testing.plugin import current_lane


def trained(case: Case) -> bool:
    """Prompts: many queries, blocks or spans. Of the interpreter's each group size and geometry once."""
    if case.source not in ("ranges", "blocks") or case.large:
        return False
    if current_lane() == "gpu":
        return case.S > 1 or bool(case.seqlens)
    return (case.S > 2 or bool(case.seqlens)) and case.H * case.D <= 1024 and not case.shared


@pytest.fixture(scope="module")
def gradients(problem) -> GradientOracle:
    return GradientOracle.of(problem)


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_workspace():
        yield


def run(oracle: GradientOracle, kernels: ModuleType = backward) -> tuple[torch.Tensor, ...]:
    p = oracle.problem
    call = Call.of(p.q, p.k, p.v, **p.selection | {"cu_seqlens": p.cu_seqlens_pair})
    launch = kernels.plan(call, shape_of(call, p.case.L if p.block_indices is None else None))
    before = nsa.kernels.launches["backward"]
    got = kernels.backward(launch, call, oracle.do, None, oracle.o, oracle.lse, "backward")
    assert nsa.kernels.launches["backward"] == before + 1
    return got


@over(trained)
def test_triton_sel_parity_backward(gradients: GradientOracle) -> None:
    assert_gradients(run(gradients), gradients, "backward")


@over(lambda c: trained(c) and c.source == "blocks" and c.H in (1, 4, 16) and c.dtype != "fp32")
def test_triton_sel_parity_backward_other_dq(gradients: GradientOracle, pin) -> None:
    """dQ query-major where it comes from key blocks, and the other way round; in small shares, merged in order."""
    case = gradients.problem.case
    usual = backward_tiles.select(90, 2, case.H, case.D, case.Dv, case.block_size, False)
    choice = backward_tiles.Choice(32, 4, 2, 1, not usual.keep_dq, 16, 1, 1)
    pin(backward=choice)
    assert_gradients(run(gradients), gradients, str(choice))


@over(lambda c: trained(c) and c.H in (2, 8) and c.dtype != "fp32")
@pytest.mark.parametrize("keep_dq", [True, False])
def test_gradients_are_bitwise_equal(gradients: GradientOracle, pin, keep_dq: bool) -> None:
    """Twice, in many shares, whichever way dQ is taken: sums have an order. And right, which twice wrong is not."""
    pin(backward=backward_tiles.Choice(32, 4, 2, 1, keep_dq, 16, 1, 1))
    first, second = run(gradients), run(gradients)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_gradients(first, gradients, f"keep_dq={keep_dq}")


@over(lambda c: trained(c) and c.source == "blocks" and c.H in (4, 8, 16) and c.dtype != "fp32")
def test_triton_sel_parity_backward_unions(gradients: GradientOracle, pin, monkeypatch) -> None:
    """dQ of every tile that may have a union is taken from it. Twice, and bitwise equal."""
    pin(backward_unions=backward_tiles.Unions(0, 4, ALWAYS))
    seen = []
    real = backward._by_unions
    monkeypatch.setattr(backward, "_by_unions", lambda *given: real(*given) or seen.append(given[1].served))
    first, second = run(gradients), run(gradients)
    case = gradients.problem.case
    # Lists of two tokens have to fit into a program, and a block into a tile of keys.
    assert len(seen) == (2 if case.block_size <= 64 and 2 * case.n <= MOST_ENTRIES else 0)
    # Fewer queries may all be in tiles of two sequences, and rows of "overlap" list a block twice.
    if gradients.problem.q.shape[:-2].numel() >= 32 and case.dist != "overlap":
        assert all(served.any() for served in seen)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_gradients(first, gradients, "unions")


SMALL = {
    "rule": small_tiles.RULES,
    "tiles": small_tiles.Choice(window=7, rows=16, keys=16, dq_rows=32, dq_keys=16),  # several of everything
    "tokens": small_tiles.Choice(window=1, rows=16, keys=32, dq_rows=1),
}


@over(lambda c: trained(c) and c.source == "blocks" and c.block_size <= LARGEST)
@pytest.mark.parametrize("choice", SMALL)
def test_triton_sel_parity_small_backward(gradients: GradientOracle, pin, choice: str) -> None:
    """And twice, and bitwise equal: where kernels are interpreted, one program after the other, with one choice."""
    pin(small_backward=SMALL[choice])
    first = run(gradients, small_backward)
    assert_gradients(first, gradients, choice)
    if choice == "tiles" or current_lane() == "gpu":
        assert all(torch.equal(a, b) for a, b in zip(first, run(gradients, small_backward), strict=True))
