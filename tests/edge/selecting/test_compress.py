"""`nsa.compress` against a loop over windows, with gradients."""

import pytest
import torch

import nsa


def by_hand(x, window, stride, weight=None, positions=None):
    """Rows of one sequence `[S, H, D]`."""
    rows = []
    for begin in range(0, x.shape[0] - window + 1, stride):
        tokens = x[begin : begin + window]  # [window, H, D]
        if weight is None:
            rows.append(tokens.mean(0))
            continue
        tokens = tokens if positions is None else tokens + positions[:, None]
        by_head = weight.expand(x.shape[1], *weight.shape[-3:])
        rows.append(torch.stack([sum(tokens[w, h] @ by_head[h, w] for w in range(window)) for h in range(x.shape[1])]))
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1], x.shape[2] if weight is None else weight.shape[-1])


def drawn(device, *shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(device).requires_grad_()


LEARNED = {"mean": None, "learned": (4, 6, 5), "each head": (2, 4, 6, 5)}


@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_batches(device, learned, stride):
    x = drawn(device, 2, 11, 2, 6)
    weight = None if LEARNED[learned] is None else drawn(device, *LEARNED[learned], seed=1)
    positions = drawn(device, 4, 6, seed=2) if learned == "learned" else None
    leaves = [m for m in (x, weight, positions) if m is not None]
    got = nsa.compress(x, window=4, stride=stride, weight=weight, positions=positions)
    want = torch.stack([by_hand(m, 4, stride, weight, positions) for m in x])
    torch.testing.assert_close(got, want)
    by = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(m, leaves, by) for m in (got, want)))


@pytest.mark.parametrize("learned", LEARNED)
def test_packed_sequences(device, learned):
    """Sequences shorter than a window, empty ones, and tokens after the last."""
    lengths = [7, 3, 0, 4, 9]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    x = drawn(device, sum(lengths) + 2, 2, 6)
    weight = None if LEARNED[learned] is None else drawn(device, *LEARNED[learned], seed=1)
    got, rows = nsa.compress(x, window=4, stride=2, weight=weight, cu_seqlens=ends)
    want = torch.cat([by_hand(m, 4, 2, weight) for m in x[: sum(lengths)].split(lengths)])
    assert rows.dtype == ends.dtype
    assert rows.tolist() == [0, 2, 2, 2, 3, 6]
    assert got.shape[0] == x.shape[0] // 2
    torch.testing.assert_close(got[: len(want)], want)
    assert not got[len(want) :].any()
    leaves = [x] if weight is None else [x, weight]
    by = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(m, leaves, by) for m in (got[: len(want)], want)))


def test_tokens_of_no_window_reach_no_gradient(device):
    """NaN in a sequence shorter than a window, and behind the last sequence."""
    x, weight = drawn(device, 12, 2, 6), drawn(device, 4, 6, 5, seed=1)
    with torch.no_grad():
        x[:3], x[8:] = torch.nan, torch.nan
    rows, _ = nsa.compress(x, window=4, stride=4, weight=weight, cu_seqlens=torch.tensor([0, 3, 8], device=device))
    (got,) = torch.autograd.grad(rows.sum(), weight)
    (want,) = torch.autograd.grad(by_hand(x[3:8], 4, 4, weight).sum(), weight)
    torch.testing.assert_close(got, want)


def test_a_sequence_shorter_than_a_window_has_no_row(device):
    """Its gradient is 0, as where it is one of several."""
    x, weight = drawn(device, 1, 3, 2, 6).requires_grad_(), drawn(device, 4, 6, 5).requires_grad_()
    rows = nsa.compress(x, window=4, stride=2)
    assert rows.shape == (1, 0, 2, 6)
    (got,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(got, torch.zeros_like(x))
    for ends in ([0], [0, 3]):
        packed, counts = nsa.compress(
            x[0], window=4, stride=2, weight=weight, cu_seqlens=torch.tensor(ends, device=device)
        )
        assert packed.shape == (1, 2, 5)
        assert not packed.any()
        assert counts.tolist() == [0] * len(ends)
        assert not any(g.any() for g in torch.autograd.grad(packed.sum(), (x, weight)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 8, 6)}, "x: expected [B, S, H, D], got shape [2, 8, 6]"),
        ({"stride": 5}, "stride: expected at most window = 4, got 5"),
        ({"window": 0}, "window: expected an int >= 1, got 0"),
        ({"positions": torch.zeros(4, 6)}, "positions: expected None without weight, got a tensor"),
        ({"weight": torch.zeros(3, 6, 5)}, "weight: expected [window, D, Dout] = [4, 6, 5], got [3, 6, 5]"),
        ({"weight": torch.zeros(4, 6, 5).double()}, "weight: expected dtype float32 (that of x), got float64"),
    ],
)
def test_errors(change, said):
    call = {"x": torch.zeros(2, 8, 2, 6), "window": 4, "stride": 2} | change
    with pytest.raises((ValueError, TypeError)) as error:
        nsa.compress(call.pop("x"), **call)
    assert str(error.value) == said
