"""Which keys a query may see: bottom-right causality, positions of its own, or everything.

Every row lists the whole cache, so that the limit alone decides.
"""

import math

import pytest
import torch

KEYS = 20
HUGE = 2**62


def expected_lse(q, k, limits):
    """`[B, S, HQ]` of one KV head: LSE over the first `limits[b][s]` keys."""
    scores = torch.einsum("bshd,bkd->bshk", q.double(), k[:, :, 0].double()) / math.sqrt(q.shape[-1])
    seen = torch.arange(k.shape[1], device=q.device) < torch.tensor(limits, device=q.device)[..., None, None]
    return torch.logsumexp(scores.masked_fill(~seen, -math.inf), -1)


@pytest.fixture(params=["ranges", "blocks"])
def everything(request, same):
    """A selection of all keys of every row: one span, or one block."""

    def make(*lead):
        if request.param == "ranges":
            return {"ranges": same([(0, 10**6)], *lead)}
        return {"block_indices": same([0], *lead), "block_size": 64}

    return make


def is_close(lse, want):
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("S", "S_kv", "limits"),
    [(4, KEYS, [17, 18, 19, 20]), (3, 3, [1, 2, 3]), (5, 2, [0, 0, 0, 1, 2]), (1, KEYS, [20]), (2, 0, [0, 0])],
    ids=["bottom-right", "square", "more-queries-than-keys", "decode", "no-keys"],
)
def test_last_query_sees_the_last_key(attend, agrees, draw, everything, dtype, S, S_kv, limits):
    q, k, v = draw(B=2, S=S, S_kv=S_kv, HKV=1, dtype=dtype)
    _, lse = agrees(attend, q, k, v, **everything(2, S, 1))
    is_close(lse, expected_lse(q, k, [limits] * 2))


def test_not_causal_sees_everything(attend, agrees, draw, everything, device):
    """Positions would say nothing then, and are refused."""
    q, k, v = draw(S=3, S_kv=KEYS, HKV=1)
    _, lse = agrees(attend, q, k, v, **everything(1, 3, 1), causal=False)
    is_close(lse, expected_lse(q, k, [[KEYS] * 3]))
    with pytest.raises(ValueError, match="causal: expected True with q_positions"):
        attend(q, k, v, **everything(1, 3, 1), causal=False, q_positions=torch.zeros(1, 3, dtype=torch.int64))


POSITIONS = {
    "inside": ([[4, 0], [19, 11]], [[5, 1], [20, 12]]),
    "before-the-first": ([[-1, 2], [-5, -(2**31)]], [[0, 3], [0, 0]]),
    "past-the-end": ([[20, 21], [500, 2**31 - 1]], [[20, 20], [20, 20]]),
    "int64-huge": ([[HUGE, -HUGE], [2**63 - 1, -(2**63)]], [[20, 0], [20, 0]]),
    "int64-wraps": ([[2**32 + 3, 2**31], [-(2**32) + 3, 2**33]], [[20, 20], [0, 20]]),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_q_positions(attend, agrees, draw, everything, device, kind):
    positions, limits = POSITIONS[kind]
    q, k, v = draw(B=2, S=2, S_kv=KEYS, HKV=1)
    for width in (torch.int64,) if kind.startswith("int64") else (torch.int32, torch.int64):
        given = torch.tensor(positions, dtype=width, device=device)
        o, lse = agrees(attend, q, k, v, **everything(2, 2, 1), q_positions=given)
        is_close(lse, expected_lse(q, k, limits))
        assert not o[lse == -math.inf].any()


def test_q_positions_of_any_strides(attend, draw, same, device):
    q, k, v = draw(B=2, S=3, S_kv=KEYS)
    positions = torch.tensor([[1, 9], [4, 0], [17, 30]], device=device)
    ranges = same([(2, 7), (9, 18)], 2, 3, 2)
    got = attend(q, k, v, ranges=ranges, q_positions=positions.T, return_lse=True)
    want = attend(q, k, v, ranges=ranges, q_positions=positions.T.contiguous(), return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_limit_falls_inside_each_kind_of_span(attend_all, agrees, draw, same, dtype):
    """Spans before, across and past the limit, in any order, and one listed twice."""
    q, k, v = draw(S=4, S_kv=KEYS, HKV=1, dtype=dtype)
    spans = [(18, 20), (2, 5), (15, 19), (19, 40), (15, 19), (17, 18)]
    agrees(attend_all, q, k, v, ranges=same(spans, 1, 4, 1))


@pytest.mark.parametrize("size", [1, 7, 16], ids=lambda size: f"size{size}")
def test_limit_falls_inside_a_block(attend_all, agrees, draw, same, size):
    q, k, v = draw(S=4, S_kv=KEYS, HKV=1)
    last = (KEYS - 1) // size
    agrees(attend_all, q, k, v, block_indices=same([last, 0, -1, last - 1, last + 1], 1, 4, 1), block_size=size)
