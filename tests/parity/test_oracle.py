"""The oracle itself, against the definition written out: one row, one head, one key at a time."""

import math

import torch

from nsa.testing.cases import Case
from nsa.testing.compare import fp64
from nsa.testing.fixtures import over
from nsa.testing.problem import Problem

PLAIN = [
    Case(2, 16, 24, 20, 12, "mixed", "fp32", HKV=2, S=3, S_kv=40),
    Case(2, 16, 24, 20, 12, "mixed", "fp32", HKV=2, S=3, S_kv=40, positions=True),
    Case(3, 24, 16, 20, 6, "many", "fp32", HKV=3, S=1, S_kv=33, causal=False),
    Case(1, 16, 16, 32, 12, "prefill", "fp32", HKV=2, S=3, S_kv=30, block_size=8),
    Case(2, 16, 16, 16, 14, "prefill", "fp32", HKV=2, block_size=8, seqlens=(3, 0, 4)),
    Case(2, 16, 16, 16, 14, "prefill", "fp32", HKV=2, block_size=8, seqlens=(3, 0, 4), kv_seqlens=(9, 5, 2)),
    Case(4, 16, 16, 9, 3, "few", "fp32", source="varlen"),
]


def plain(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, in Python floats."""
    q, k, v = (x.double().cpu() for x in (p.q, p.k, p.v))
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
    HKV, G = k.shape[-2], q.shape[-2] // k.shape[-2]
    sequence = {}  # token of a packed batch -> (where it stands, its sequence's first key and last)
    if p.cu_seqlens is not None:
        cu_q, cu_k = p.cu_seqlens.tolist(), (p.cu_seqlens if p.cu_seqlens_k is None else p.cu_seqlens_k).tolist()
        for a, b, first, last in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            sequence |= {t: (last - first - (b - t), first, last) for t in range(a, b)}
    for token in map(tuple, torch.ones(q.shape[:-2]).nonzero().tolist()):
        if sequence:
            t, first, last = sequence[token[0]]
            keys, values, S_kv = k[first:last], v[first:last], last - first
        else:
            keys, values, S_kv = k[token[0]], v[token[0]], k.shape[1]
            t = S_kv - q.shape[1] + token[1]
        if p.q_positions is not None:
            t = int(p.q_positions[token])
        for head in range(q.shape[-2]):
            spans = p.ranges[token][head // G].tolist()
            picked = [j for a, b in spans for j in range(a, b) if j < S_kv and (not p.causal or j <= t)]
            if not picked:
                continue
            scores = [float(q[token][head] @ keys[j, head // G]) / math.sqrt(q.shape[-1]) for j in picked]
            total = sum(math.exp(s) for s in scores)
            for s, j in zip(scores, picked, strict=True):
                out[token][head] += math.exp(s) / total * values[j, head // G]
            lse[token][head] = math.log(total)
    assert HKV * G == q.shape[-2]
    return out, lse


@over(PLAIN)
def test_oracle_is_the_definition(problem: Problem) -> None:
    out, lse = (x.cpu() for x in fp64(problem))
    expected, expected_lse = plain(problem)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    assert (lse == -math.inf).any() == (problem.key_index[1] == 0).any().cpu()
