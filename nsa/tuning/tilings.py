"""A kernel that cuts head dimensions into pieces (BLOCK_D, BLOCK_DV), as the original plan did. Not used for calls.

Our kernels hold D and Dv whole. This kernel over packed rows adds up scores over pieces of D, and gives pieces of Dv to
different programs, which all compute the same scores. With one piece of each it does the same as our kernels.
`--nsa-sweep` checks and times it, so that anyone can verify that pieces are slower.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from nsa.kernels.shared.primitives import finish, softmax_step
from nsa.testing.clock.cuda import buffer_sets, time_gpu
from nsa.testing.clock.timing import Timing
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.problem import Problem
from nsa.testing.report.recording import Fact
from nsa.tuning.sweep import FINE

BLOCK_L, NUM_WARPS, NUM_STAGES = 64, 4, 3


@triton.jit
def _tiled_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    L,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    Dv: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    q_ptrs = q_ptr + (row * G + g)[:, None] * D + d[None, :]
    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G, BLOCK_L], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for begin in range(0, L, BLOCK_L):
        slot = begin + tl.arange(0, BLOCK_L)
        valid = slot < L
        key = row * L + slot
        v = tl.load(v_ptr + key[:, None] * Dv + dv[None, :], mask=valid[:, None], other=0.0)
        scores = tl.zeros([BLOCK_G, BLOCK_L], tl.float32)
        for first in tl.static_range(0, D, BLOCK_D):
            q = tl.load(q_ptrs + first, mask=g[:, None] < G, other=0.0)
            k = tl.load(k_ptr + key[:, None] * D + (first + d)[None, :], mask=valid[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        m, l, acc, p = softmax_step(scores, m, l, acc)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    o, _ = finish(m, tl.sum(l, 1), acc)
    tl.store(o_ptr + (row * G + g)[:, None] * Dv + dv[None, :], o.to(o_ptr.dtype.element_ty), mask=g[:, None] < G)


def run(p: Problem, block_d: int, block_dv: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``O [N, G, Dv]`` of packed rows; D and Dv are multiples of the pieces, powers of 2 of at least 16."""
    Q, K, V, _ = p.rows
    G, D, Dv = p.case.H, p.case.D, p.case.Dv
    out = torch.empty(*Q.shape[:-1], Dv, dtype=Q.dtype, device=Q.device) if out is None else out
    block_g = max(16, triton.next_power_of_2(G))
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "enable_fp_fusion": True}
    _tiled_kernel[len(Q), Dv // block_dv](
        Q, K, V, out, K.shape[1], p.scale or D**-0.5, G, D, Dv, block_g, block_d, block_dv, BLOCK_L, **options
    )
    return out


def pieces(case: Case) -> list[tuple[int, int]]:
    """The pairs of pieces to try, the whole dimensions first."""
    found = [(case.D, case.Dv), (case.D // 2, case.Dv), (case.D, case.Dv // 2), (case.D // 2, case.Dv // 2), (16, 16)]
    return [pair for pair in found if min(pair) >= 16]


def compare(case: Case, device: torch.device) -> tuple[Timing, list[Fact]]:
    """Check and time all pairs of pieces on packed rows. Returns the timing of whole dimensions and all facts."""
    problem = case.make(device)
    oracle, (sets, cold) = Oracle.of(problem), buffer_sets(problem)
    tried = pieces(case)
    for pair in tried:
        poisoned = torch.full_like(problem.rows[0][..., :1].expand(-1, -1, case.Dv), float("nan")).contiguous()
        result = run(problem, *pair, out=poisoned).view(*problem.q.shape[:-1], case.Dv)
        assert_parity(result, oracle, f"pieces of {pair}")
    fns = {str(pair): [partial(run, s, *pair) for s in sets] for pair in tried}
    times = time_gpu(fns, cold=cold, **FINE)
    whole = times[str(tried[0])]
    facts = [
        {"BLOCK_D": d, "BLOCK_DV": dv, "us": t.median * 1e6, "slower": t.median / whole.median}
        for (d, dv), t in zip(tried, times.values(), strict=True)
    ]
    return whole, facts
