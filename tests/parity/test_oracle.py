"""The oracle against the definition written out, one row, one head, one key at a time; and its bounds in fp32."""

import math
import random
import statistics
from typing import Any

import pytest
import torch

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.fixtures import over
from nsa.testing.judge.forward import Oracle, assert_parity, fp64, sdpa_same_keys, sum_variance
from nsa.testing.judge.gradients import GradientOracle, assert_gradients, multiplicity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem

from ..edge.calls.test_calls import CALLS, tensors

PLAIN = [
    Case(2, 16, 24, 20, 12, "mixed", "fp32", HKV=2, S=3, S_kv=40),
    Case(2, 16, 24, 20, 12, "mixed", "fp32", HKV=2, S=3, S_kv=40, positions=True),
    Case(3, 24, 16, 20, 6, "many", "fp32", HKV=3, S=1, S_kv=33, causal=False),
    Case(1, 16, 16, 32, 12, "prefill", "fp32", HKV=2, S=3, S_kv=30, block_size=8),
    Case(2, 16, 16, 16, 14, "prefill", "fp32", HKV=2, block_size=8, seqlens=(3, 0, 4)),
    Case(2, 16, 16, 16, 14, "prefill", "fp32", HKV=2, block_size=8, seqlens=(3, 0, 4), kv_seqlens=(9, 5, 2)),
    Case(4, 16, 16, 9, 3, "few", "fp32", source="varlen"),
]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, causal: bool = True,
    positions: torch.Tensor | None = None, ends: tuple[list[int], list[int]] | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention by its definition, in Python floats; `ends` are the two cu_seqlens of a packed batch."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
    scale, G = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-2] // k.shape[-2]
    sequence = {}  # token of a packed batch -> (where it stands, its sequence's first key and last)
    for a, b, first, last in zip(ends[0], ends[0][1:], *(ends[1], ends[1][1:]), strict=False) if ends else ():
        sequence |= {t: (last - first - (b - t), first, last) for t in range(a, b)}
    for token in map(tuple, torch.ones(q.shape[:-2]).nonzero().tolist()):
        if ends:
            t, first, last = sequence.get(token[0], (0, 0, 0))
            keys, values = k[first:last], v[first:last]
        else:
            keys, values = k[token[0]], v[token[0]]
            t = len(keys) - q.shape[1] + token[1]
        if positions is not None:
            t = int(positions[token])
        for head in range(q.shape[-2]):
            spans = ranges[token][head // G].tolist()
            picked = [j for a, b in spans for j in range(len(keys)) if a <= j < b and (not causal or j <= t)]
            if not picked:
                continue
            scores = [float(q[token][head] @ keys[j, head // G]) * scale for j in picked]
            total = sum(math.exp(s) for s in scores)
            for s, j in zip(scores, picked, strict=True):
                out[token][head] += math.exp(s) / total * values[j, head // G]
            lse[token][head] = math.log(total)
    return out, lse


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(tuple(x.cpu() for x in got), want, rtol=0, atol=1e-12)


@over(PLAIN)
def test_oracle_is_the_definition(problem: Problem) -> None:
    p, pair = problem, problem.cu_seqlens_pair
    ends = None if pair is None else tuple(x.tolist() for x in pair)
    got = fp64(p)
    check(got, plain(p.q, p.k, p.v, p.ranges, p.causal, p.q_positions, ends))
    assert (got[1] == -math.inf).any() == (p.key_index[1] == 0).any()


def spans_of(blocks: torch.Tensor, size: int, far: int = 10**6) -> torch.Tensor:
    """Spans of blocks of any index and size, in Python's numbers."""
    spans = [
        (b * size, min(b * size + size, far)) if 0 <= b * size < far else (0, 0) for b in blocks.flatten().tolist()
    ]
    return torch.tensor(spans, dtype=torch.int64).view(*blocks.shape, 2)


@pytest.mark.parametrize("call", CALLS)
def test_oracle_of_odd_calls(draw: Any, device: torch.device, call: str) -> None:
    (q, k, v), integers, how = tensors(draw, device, torch.float64, **CALLS[call])
    how.pop("max_selected", None)  # the oracle needs no bound
    ranges = spans_of(integers["block_indices"], how["block_size"]) if "block_size" in how else integers["ranges"]
    ends = tuple(x.tolist() for x in integers["cu_seqlens"]) if "cu_seqlens" in integers else None
    causal, scale = how.get("causal", True), how.get("scale")
    got = selection_reference(Call.of(q, k, v, **integers, **how, return_lse=True))
    check(got, plain(q, k, v, ranges, causal, integers.get("q_positions"), ends, scale))


def test_oracle_result_is_in_the_dtype_of_q(draw: Any, same: Any) -> None:
    """Half inputs are computed in fp64 and rounded once."""
    (q, k, v), ranges = draw(dtype=torch.float16), same([(0, 9), (3, 14)], 1, 3, 2)

    def reference(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return selection_reference(Call.of(*qkv, ranges=ranges, return_lse=True))

    exact, exact_lse = reference(q.double(), k.double(), v.double())
    o, lse = reference(q, k, v)
    assert torch.equal(o, exact.half())
    assert torch.equal(lse, exact_lse.float())
    assert torch.equal(reference(q.double(), k, v)[0], exact)


SELECTIONS = [
    ("few", "rows"), ("few", "varlen"),
    ("few", "ranges"), ("many", "ranges"), ("mixed", "ranges"), ("overlap", "ranges"),
    ("many", "blocks"), ("prefill", "blocks"), ("decode", "blocks"), ("overlap", "blocks"),
]  # fmt: skip
DIMS = (16, 32, 64, 96, 100, 128, 192, 256)


def random_case(seed: int) -> Case:
    r = random.Random(seed)
    L, (dist, source) = r.choice((1, 2, 5, 16, 17, 33, 64, 100, 200, 256, 512)), r.choice(SELECTIONS)
    packed = source in ("rows", "varlen")
    B, S, HKV = r.choice((1, 2)), 1 if packed else r.choice((1, 1, 2, 5)), 1 if packed else r.choice((1, 1, 2))
    keys = {} if packed else {"S_kv": r.choice((L + S, L + 50, 2 * L + 7, 600)), "causal": r.random() < 0.7}
    H, size, scores = r.choice((1, 2, 3, 4, 7, 8, 16)), r.choice((16, 32, 64)), r.choice((1, 1, 1, 8, 64))
    dims = r.choice(DIMS), r.choice(DIMS)
    L = max(L, 4) if dist == "overlap" else L
    return Case(H, *dims, L, B * S * HKV, dist, "fp32", source, HKV, S, block_size=size, scores=scores, **keys)


def in_order(a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`a @ b`, where one accumulator takes one product after the other."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for i in order.tolist():
        total = total + a[..., i, None] * b[..., i, None, :]
    return total


def one_product_after_the_other(p: Problem, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A right output and LSE in fp32, whose scores are summed in another order. Sums over keys would take minutes."""
    Q, K, V, lengths = p.rows
    used = torch.arange(K.shape[1], device=K.device) < lengths[:, None, None]
    scores = in_order(Q, K.mT, torch.randperm(Q.shape[-1], generator=g)) * Q.shape[-1] ** -0.5
    scores = torch.where(used, scores, -math.inf)
    m = scores.amax(-1, keepdim=True)
    weights = (scores - torch.where(m.isinf(), 0.0, m)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ V / torch.where(total == 0, 1.0, total)
    return p.unpack(out), p.unpack((total.log() + m)[..., 0])


def dense(p: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A right output in fp32 over all keys, in another order, those that a row does not list masked."""
    mask = multiplicity(p)[..., order].to(q.dtype).log()[:, :, :, None]  # [B, S, HKV, 1, keys]
    K, V = ((x if x.dim() == 4 else x[None])[:, order] for x in (k, v))
    Q = q.reshape(K.shape[0], -1, K.shape[2], p.case.H, q.shape[-1])
    scores = torch.einsum("bshgd,bkhd->bshgk", Q, K) * q.shape[-1] ** -0.5 + mask
    m = scores.detach().amax(-1, keepdim=True)
    weights = (scores - torch.where(m.isinf(), 0.0, m)).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bshgk,bkhd->bshgd", weights, V) / torch.where(total == 0, 1.0, total)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def judge(seed: int, device: torch.device) -> float:
    """How much wider the bound of a random case is than SDPA's error alone makes it; raises where what is right is red.

    1 where scores are large: the error of SDPA is then small by luck, or is not.
    """
    p = random_case(seed).make(device, seed)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(p.k.shape[-3], generator=g).to(device)
    oracle = Oracle.of(p)
    if 0 < p.lengths.max() * p.case.N * p.case.H < 2**14:  # larger ones take long, and SDPA is lucky less often
        assert_parity(one_product_after_the_other(p, g), oracle, "one product after the other")
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out, gradients = dense(p, *leaves, order), GradientOracle.of(p)
    assert_parity(out.detach(), oracle, "dense")
    assert_gradients(torch.autograd.grad(out, leaves, gradients.do), gradients, "dense")
    error = float((sdpa_same_keys(p).double() - oracle.out).abs().max())
    narrow = 2 * error + 4 * torch.finfo(torch.float32).eps * oracle.peak
    return oracle.bound / narrow if narrow and p.case.scores == 1 else 1.0


@pytest.mark.usefixtures("one_thread")
def test_right_implementations_in_fp32_are_never_red(device: torch.device) -> None:
    """Whatever the order of their sums; 60 of the 1,000 that were tried. Nor are bounds much wider for it."""
    wider = [judge(seed, device) for seed in range(60)]
    assert statistics.median(wider) < 2
    assert max(wider) < 5


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_variance_of_sums_in_fp32(device: torch.device, mean: float) -> None:
    g = torch.Generator().manual_seed(0)
    products = (torch.randn(200, 1, 128, generator=g) + mean).to(device)
    ones = torch.ones(1, 128, 1, device=device)
    sums = torch.stack([in_order(products, ones, torch.randperm(128, generator=g)) for _ in range(20)])
    seen = (sums.double() - products.double().sum(-1, keepdim=True)).square().mean()
    expected = sum_variance(128, products.sum(-1), products.square().sum(-1)).mean()
    assert 0.25 < float(seen / expected) < 1
