"""Checks outputs and LSE. The bound follows from the error of SDPA in the same dtype over the same keys.

`err ≤ 2·err_SDPA + 4·eps(dtype)·max|ref|`, both errors against an fp64 oracle (docs/proving.md). If the oracle were
wrong, `err_SDPA` and the bound would be large. So SDPA must also agree with the oracle to within rounding.

In fp32 the order of additions decides the error. SDPA adds in blocks, a kernel may add one product after the other, and
either may be exact by chance. So in fp32 `err_SDPA` is at least two standard deviations of the latter (`one_by_one`),
whose weights are ``exp(score - LSE)`` with an LSE in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.matrix.problem import Problem

Result = Tensor | tuple[Tensor, Tensor]
MAE = 1e-3  # for N(0,1) inputs and rows of at least 16 keys
MAE_MIN_L = 16
OUTPUT = ("query", "head", "dimension")  # the dimensions of an output after the batch
SAMPLED = 2048  # rows of a large problem that are compared, 1 GiB of keys and values at D = 128 and L = 1024


@dataclass(frozen=True, eq=False)
class Oracle:
    """The right answer, and the error of SDPA.

    out, lse: `[B,S,HQ,Dv]` and `[B,S,HQ]` in fp64. sdpa: like `out`, in the problem's dtype. err_sdpa: the largest
    absolute error of `sdpa`, in fp32 at least `2 * one_by_one`. peak: the largest absolute output. lse_atol: the
    allowed error of an fp32 LSE.

    Of a large problem (`Case.large`) only the answers of some queries are known. `at [s]` are their positions, `seen`
    is the problem with only these queries, and `S` above is `s`.
    """

    problem: Problem
    out: Tensor
    lse: Tensor
    sdpa: Tensor
    err_sdpa: float
    peak: float
    lse_atol: float
    seen: Problem
    at: Tensor | None = None

    def pick(self, x: Tensor) -> Tensor:
        """The queries of `x [B,S,…]` whose answer is known."""
        return x if self.at is None else x[:, self.at]

    @property
    def bound(self) -> float:
        """The largest absolute error allowed."""
        return 2 * self.err_sdpa + 4 * torch.finfo(self.problem.q.dtype).eps * self.peak

    @classmethod
    def of(cls, p: Problem) -> Oracle:
        """Compute the answer and SDPA, of a large problem for `some_queries`.

        Raises:
            AssertionError: SDPA in the problem's dtype is farther from the oracle than rounding explains.
        """
        at = some_queries(p) if p.case.large and p.cu_seqlens is None else None
        seen = p if at is None else p.at(at)
        out, lse = fp64(seen)
        sdpa = sdpa_same_keys(seen)
        peak, err = largest(out), largest(errors(sdpa, out))
        one = one_by_one(seen) if p.q.dtype == torch.float32 else 0.0
        rounding = max(16 * torch.finfo(p.q.dtype).eps, 1e-4 if p.q.dtype == torch.float32 else 0.0) * max(1.0, peak)
        rounding = max(rounding, 8 * one)  # larger than the line above only if scores are large
        if not err <= rounding:
            raise AssertionError(
                f"{describe(p)}: the fp64 oracle and SDPA over the same keys differ by {err:.3g}, rounding explains "
                f"{rounding:.3g}: one of the two is wrong"
            )
        return cls(p, out, lse, sdpa, max(err, 2 * one), peak, lse_atol(p), seen, at)


def fp64(p: Problem) -> tuple[Tensor, Tensor]:
    """`selection_reference` in full fp64: `(out [B,S,HQ,Dv], lse [B,S,HQ])`."""
    out, lse = selection_reference(Call.of(p.q.double(), p.k, p.v, **p.selection, return_lse=True))
    assert lse is not None
    return out, lse


def reference_at(q: Tensor, k: Tensor, v: Tensor, at: slice | Tensor, **selection: Any) -> tuple[Tensor, Tensor]:
    """The oracle's `(out [B,s,HQ,Dv], lse [B,s,HQ])` of the queries `at`, which keep their positions.

    Args:
        selection: the selection of the whole batch, as keywords of `nsa.selection_attention` without `cu_seqlens`.
    """
    selection = {name: x[:, at] if isinstance(x, Tensor) else x for name, x in selection.items()}
    if selection.get("q_positions") is None:
        where = torch.arange(q.shape[1], device=q.device)[at] + k.shape[1] - q.shape[1]
        selection["q_positions"] = where.expand(q.shape[0], -1)
    out, lse = selection_reference(Call.of(q[:, at].double(), k, v, **selection, return_lse=True))
    assert lse is not None
    return out, lse


def some_queries(p: Problem) -> Tensor:
    """Positions `[s]`, sorted, of the queries of a large problem that are compared. The seed of the problem fixes them.

    They are the first and the last queries, the queries beside some block boundaries, and random ones: enough for about
    `SAMPLED` rows, and at least 64.
    """
    S, size = p.q.shape[1], p.block_size or 64
    count = min(S, max(64, SAMPLED // (p.case.B * p.case.HKV)))
    g = torch.Generator().manual_seed(p.seed)
    edges = torch.randint(1, max(2, S // size), (8,), generator=g) * size
    fixed = torch.cat((torch.tensor([0, 1, size - 1, size, S - 2, S - 1]), edges - 1, edges))
    rest = torch.randint(0, S, (count,), generator=g)[: max(0, count - fixed.numel())]
    found: Tensor = torch.cat((fixed, rest)).clamp(0, S - 1).unique()
    return found.to(p.q.device)


def sdpa_same_keys(p: Problem) -> Tensor:
    """SDPA in the problem's dtype over each row's keys, packed by the suite's own index. Empty rows are zero."""
    Q, K, V, lengths = p.rows
    if not Q.shape[0] or not K.shape[1]:
        return p.q.new_zeros(*p.q.shape[:-1], p.case.Dv)
    ragged = bool((lengths != K.shape[1]).any())
    mask = None
    if ragged:
        valid = torch.arange(K.shape[1], device=K.device) < lengths[:, None]
        mask = (valid | (lengths == 0)[:, None])[:, None, None, :]  # empty rows would be NaN; they are zeroed below
    out = F.scaled_dot_product_attention(Q[:, None], K[:, None], V[:, None], mask, scale=p.scale)[:, 0]
    return p.unpack(out.masked_fill((lengths == 0)[:, None, None], 0) if ragged else out)


def one_by_one(p: Problem) -> float:
    """The largest standard deviation of an output element in fp32, if every sum adds one product after the other.

    Weights are ``exp(score - LSE)``, as in a kernel that computes the LSE first. Rounding the LSE to fp32 changes all
    weights of a row by the same factor, by up to 4e-6 where the LSE is 90.
    """
    Q, K, V, lengths = p.rows
    if not Q.shape[0] or not K.shape[1]:
        return 0.0
    scale = p.softmax_scale
    count = lengths[:, None, None]
    dot = Q @ K.mT  # [N, H, L]
    unused = torch.arange(K.shape[1], device=K.device) >= count
    scores = (dot * scale).masked_fill(unused, -math.inf)
    P = scores.softmax(-1).masked_fill(count == 0, 0.0)
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(count == 0, 0.0)
    out = P @ V  # [N, H, Dv]
    # An error e of a score changes the output by P·e·(V - O). Errors of different scores are independent.
    wrong = P.square() * scale**2 * sum_variance(Q.shape[-1], dot, Q.square() @ K.square().mT)
    variance = wrong @ V.square() - 2 * out * (wrong @ V) + out.square() * wrong.sum(-1, keepdim=True)
    variance += sum_variance(count, out, P.square() @ V.square())
    variance += (out * lse * torch.finfo(torch.float32).eps).square() / 12
    return math.sqrt(max(float(variance.max()), 0.0))


def sum_variance(count: Tensor | int, total: Tensor, squares: Tensor) -> Tensor:
    """The variance of an fp32 sum of `count` products, added one after the other in a random order.

    Args:
        total: the sum of the products. squares: the sum of their squares.

    Each addition rounds a partial sum by at most `u = 2⁻²⁴` times its size. If errors are uniformly distributed, their
    variance is `u²/3` times the square of the partial sum. Averaged over all orders, the squares of the partial sums
    add up to `count·(total²/3 + squares/6)`.
    """
    variance: Tensor = 2.0**-48 / 9 * count * (total.square() + squares / 2)
    return variance


def lse_atol(p: Problem) -> float:
    """The allowed absolute error of an fp32 LSE.

    The LSE is 1-Lipschitz in the scores. A score is a sum of D products in fp32, and products of fp16 or bf16 are exact
    there. So a score is off by at most D·2⁻²³·scale·|q||k|, also if accumulators truncate. exp, log and the running
    maximum add a few ulp of the LSE itself.
    """
    if not p.q.numel() or not p.k.numel():
        return 0.0
    D, scale = p.q.shape[-1], abs(p.softmax_scale)
    q, k = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).nan_to_num(0.0, 0.0) for x in (p.q, p.k))
    norms = float(q.max()) * float(k.max())
    return 2.0**-23 * (D * scale * norms + 16 * (scale * norms + 16))


def assert_parity(result: Result, oracle: Oracle, name: str = "output") -> None:
    """Check an output, and the LSE if `result` is a pair. Of a large problem only the queries in `oracle.at` count.

    Raises:
        AssertionError: the error names shape, seed, dtype, the worst place, both values and the bound.
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    p = oracle.seen
    head = f"{name} on {describe(oracle.problem)}"
    shape = (*oracle.problem.q.shape[:-1], p.case.Dv)
    assert out.shape == shape, f"{head}: expected shape {shape}, got {tuple(out.shape)}"
    assert out.dtype == p.q.dtype, f"{head}: expected {p.q.dtype}, got {out.dtype}"
    if lse is not None:
        assert_lse(lse, oracle, head)
    if not out.numel():
        return
    mae, bound = mean_abs_error(out, oracle), oracle.bound
    if oracle.at is not None:  # the other queries are not compared, but N(0,1) inputs must not give NaN
        assert not bool(out.isnan().any()), f"{head}: {int(out.isnan().sum())} NaN"
        out = oracle.pick(out)
    err = largest(errors(out, oracle.out))
    assert err <= bound, (
        f"{head}: error {err:.4g} > bound {bound:.4g} = 2*{oracle.err_sdpa:.3g} (SDPA) + 4*eps*{oracle.peak:.3g}; "
        f"{first_wrong(out, oracle.out, bound, OUTPUT, oracle.at)}"
    )
    assert mae <= MAE, f"{head}: mean absolute error {mae:.4g} > {MAE} (error {err:.4g} within bound {bound:.4g})"
    empty = p.unpack((p.lengths == 0)[:, None].expand(-1, p.case.H))
    assert not bool(out[empty].any()), f"{head}: rows that select no key must be exactly 0"


def assert_lse(lse: Tensor, oracle: Oracle, head: str) -> None:
    """Check an LSE: fp32 `[B,S,HQ]`, -inf exactly for rows that select nothing, within `lse_atol` for the others."""
    want, shape = oracle.lse, oracle.problem.q.shape[:-1]
    assert lse.shape == shape, f"{head}: expected LSE shape {tuple(shape)}, got {tuple(lse.shape)}"
    assert lse.dtype in (torch.float32, torch.float64), f"{head}: expected LSE in float32, got {lse.dtype}"
    if not lse.numel():
        return
    lse = oracle.pick(lse)
    err, bound = largest(errors(lse, want)), oracle.lse_atol
    assert err <= bound, (
        f"{head}: LSE error {err:.4g} > bound {bound:.4g}; "
        f"{first_wrong(lse, want, bound, OUTPUT[:2], oracle.at)}"
    )


def cached_parity(
    got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor], dtype: torch.dtype, head: str
) -> None:
    """Check `(O, LSE or None)` of a call over a cache: O to within rounding of its dtype, the LSE of fp32.

    Raises:
        AssertionError: the error says what is off, and by how much.
    """
    (o, lse), (o_want, lse_want) = got, want
    assert o.dtype == dtype, f"{head}: expected {dtype}, got {o.dtype}"
    for name, x, wanted in (("O", o, o_want), ("an LSE", lse, lse_want)):
        if x is not None:  # results of other shapes could be equal once they are broadcast
            shapes = tuple(wanted.shape), tuple(x.shape)
            assert shapes[0] == shapes[1], f"{head}: expected {name} of shape {shapes[0]}, got {shapes[1]}"
    bound, error = max(6 * torch.finfo(dtype).eps, 1e-5) * max(1.0, largest(o_want)), largest(errors(o, o_want))
    assert error <= bound, f"{head}: error {error:.4g} > bound {bound:.4g}; {first_wrong(o, o_want, bound)}"
    empty = lse_want == -math.inf
    assert not bool(o[empty].any()), f"{head}: rows that select nothing must be exactly 0"
    if lse is not None:
        assert lse.dtype == torch.float32, f"{head}: expected an LSE in float32, got {lse.dtype}"
        excess = errors(lse, lse_want) - (2e-5 + 1e-5 * lse_want.abs().masked_fill(empty, 0.0))
        assert bool((excess <= 0).all()), (
            f"{head}: LSE error exceeds its bound of 2e-5 + 1e-5*|LSE| by {float(excess.max()):.4g}"
        )


def mean_abs_error(out: Tensor, oracle: Oracle) -> float:
    """The mean absolute error over rows of at least `MAE_MIN_L` keys, whose bound is `MAE`; 0 without such rows."""
    p = oracle.seen
    rows = p.unpack((p.lengths >= MAE_MIN_L)[:, None].expand(-1, p.case.H))
    off = (oracle.pick(out).double() - oracle.out)[rows].abs()
    return float(off.mean()) if off.numel() else 0.0


def describe(p: Problem) -> str:
    """Shape, seed and dtype: the beginning of every error."""
    return f"{p.case.id} [q {tuple(p.q.shape)}, k {tuple(p.k.shape)}, {p.case.dtype}, seed {p.seed}]"


def errors(got: Tensor, want: Tensor) -> Tensor:
    """The absolute errors. That of NaN is infinite."""
    return torch.where(got.double() == want, 0.0, (got.double() - want).abs().nan_to_num(math.inf, math.inf))


def largest(x: Tensor) -> float:
    """The largest absolute value, 0 of an empty tensor."""
    return float(x.abs().max()) if x.numel() else 0.0


def first_wrong(
    got: Tensor, want: Tensor, bound: float, axes: Sequence[str] = OUTPUT, queries: Tensor | None = None
) -> str:
    """Where the first element is that is wrong by more than `bound`, and how many there are.

    Args:
        axes: the names of the dimensions after the batch. queries: which queries these are, if only some.
    """
    diff = errors(got, want)
    wrong = (diff > bound).nonzero()
    at = tuple(wrong[0].tolist())
    index = [*at]
    if queries is not None:
        index[1] = int(queries[index[1]])
    names = axes if got.dim() == len(axes) else ("batch", *axes)  # packed sequences have no batch
    where = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
    return (
        f"the first at {where}: got {float(got[at]):.6g}, expected {float(want[at]):.6g} (error "
        f"{float(diff[at]):.3g}); {len(wrong)} of {got.numel()} off, {int(got.isnan().sum())} NaN"
    )
