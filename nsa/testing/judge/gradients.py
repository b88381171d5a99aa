"""Checks gradients. The bound follows from the error of dense SDPA's gradients in the same dtype under the same mask.

`err ≤ 2·err_SDPA + 4·eps(dtype)·max|ref|` for each of dq, dk and dv, both errors against fp64 gradients of the oracle.
The mask is additive: the logarithm of how often a row lists a key, so that a key listed twice counts twice. In fp32
`err_SDPA` is at least two standard deviations of sums that add one product after the other, as in `forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.call import Call
from nsa.plain.oracle import selection_reference
from nsa.testing.judge.forward import OUTPUT, describe, errors, first_wrong, largest, sum_variance
from nsa.testing.matrix.problem import Problem

NAMES = ("dq", "dk", "dv")
KEYS = ("key", "KV head", "dimension")  # the dimensions of dk and dv after the batch


@dataclass(frozen=True, eq=False)
class GradientOracle:
    """The gradients `(dq, dk, dv)` of `sum(O * do)` in fp64, and the largest errors of SDPA's gradients.

    o, lse: the oracle's `[B,S,HQ,Dv]` and `[B,S,HQ]` of the forward pass, in the dtypes that a kernel returns.
    """

    problem: Problem
    do: Tensor
    o: Tensor
    lse: Tensor
    exact: tuple[Tensor, ...]
    err_sdpa: tuple[float, ...]

    @classmethod
    def of(cls, p: Problem) -> GradientOracle:
        """Draw `do` (N(0,1)), and compute the gradients and SDPA's errors.

        Raises:
            AssertionError: SDPA in the problem's dtype is farther from the oracle than rounding explains.
        """
        g = torch.Generator().manual_seed(p.seed + 1)
        do = torch.randn(*p.q.shape[:-1], p.case.Dv, generator=g).to(p.q.device, p.q.dtype)
        leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
        selection = p.selection | {"cu_seqlens": p.cu_seqlens_pair}
        o, lse = selection_reference(Call.of(*leaves, **selection, return_lse=True))
        assert lse is not None
        exact = torch.autograd.grad((o * do.double()).sum(), leaves)
        plain = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        sdpa = torch.autograd.grad(dense_sdpa(p, *plain), plain, do)
        found = tuple(largest(errors(got, want)) for got, want in zip(sdpa, exact, strict=True))
        eps = torch.finfo(p.q.dtype).eps
        ones = one_by_one(p, do, o, lse, exact) if p.q.dtype == torch.float32 else (0.0, 0.0, 0.0)
        for name, error, want, one in zip(NAMES, found, exact, ones, strict=True):
            rounding = max(32 * eps, 1e-4 if p.q.dtype == torch.float32 else 0.0) * max(1.0, largest(want))
            rounding = max(rounding, 8 * one)  # larger than the line above only if scores are large
            assert error <= rounding, (
                f"{describe(p)}: {name} of the fp64 oracle and of dense SDPA differ by {error:.3g}, rounding explains "
                f"{rounding:.3g}: one of the two is wrong"
            )
        err_sdpa = tuple(max(error, 2 * one) for error, one in zip(found, ones, strict=True))
        return cls(p, do, o.detach().to(p.q.dtype), lse.detach().float(), exact, err_sdpa)


def one_by_one(p: Problem, do: Tensor, o: Tensor, lse: Tensor, exact: Sequence[Tensor]) -> tuple[float, ...]:
    """As `forward.one_by_one`, for `(dq, dk, dv)` by the formulas of arXiv 2307.08691, algorithm 2."""
    if not p.q.numel() or not p.k.numel():
        return 0.0, 0.0, 0.0
    batches, HKV = (p.k.shape[0] if p.k.dim() == 4 else 1), p.k.shape[-2]
    by_head = (batches, -1, HKV, p.case.H)
    Q, dO, out, dQ = (x.detach().float().reshape(*by_head, x.shape[-1]) for x in (p.q, do, o, exact[0]))
    K, V, dK, dV = (x.detach().float().reshape(batches, -1, HKV, x.shape[-1]) for x in (p.k, p.v, *exact[1:]))
    D, Dv, scale = Q.shape[-1], V.shape[-1], p.softmax_scale
    listed = multiplicity(p).float()[..., None, :]  # [B, S, HKV, 1, keys]

    def by_row(rows: Tensor, keys: Tensor) -> Tensor:  # [B, S, HKV, H, keys]
        return torch.einsum("bshgd,bkhd->bshgk", rows, keys)

    def over_keys(weights: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("bshgk,bkhd->bshgd", weights, keys)

    def over_rows(weights: Tensor, rows: Tensor) -> Tensor:
        return torch.einsum("bshgk,bshgd->bkhd", weights, rows)

    dot, dP, delta = by_row(Q, K), by_row(dO, V), (dO * out).sum(-1, keepdim=True)
    P = (dot * scale - lse.detach().float().view(*dot.shape[:-1], 1)).masked_fill(listed == 0, -math.inf).exp() * listed
    dS = P * (dP - delta)
    score = scale**2 * sum_variance(D, dot, by_row(Q.square(), K.square()))
    relative = score + (P.square() * score).sum(-1, keepdim=True)  # variance of P / P: of its score and of the LSE
    wrong_dP = sum_variance(Dv, dP, by_row(dO.square(), V.square()))
    wrong_delta = sum_variance(Dv, delta, (dO * out).square().sum(-1, keepdim=True))
    wrong_dS = dS.square() * relative + P.square() * (wrong_dP + wrong_delta)
    keys, rows = listed.sum(-1, keepdim=True), p.case.H * (listed > 0).sum((1, 3)).transpose(1, 2)[..., None]
    dq = over_keys(wrong_dS, K.square()) + sum_variance(keys, dQ / scale, over_keys(dS.square(), K.square()))
    dk = over_rows(wrong_dS, Q.square()) + sum_variance(rows, dK / scale, over_rows(dS.square(), Q.square()))
    dv = over_rows(P.square() * relative, dO.square()) + sum_variance(rows, dV, over_rows(P.square(), dO.square()))
    return tuple(factor * float(x.max()) ** 0.5 for factor, x in ((abs(scale), dq), (abs(scale), dk), (1.0, dv)))


def multiplicity(p: Problem) -> Tensor:
    """`[B, S, HKV, keys]`: how often each row lists each key. For packed sequences B = 1, and S and keys are totals."""
    base, start, end = p.clamped
    batches, keys = (p.k.shape[0], p.k.shape[1]) if p.k.dim() == 4 else (1, p.k.shape[0])
    base = base.view(batches, -1) - torch.arange(batches, device=base.device)[:, None] * (keys if batches > 1 else 0)
    steps = torch.zeros(start.shape[0], keys + 1, dtype=torch.int32, device=start.device)
    ones = torch.ones_like(start, dtype=torch.int32)
    steps.scatter_add_(1, base.reshape(-1, 1) + start, ones).scatter_add_(1, base.reshape(-1, 1) + end, -ones)
    return steps.cumsum(1)[:, :-1].view(batches, -1, p.k.shape[-2], keys)


def dense_sdpa(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense SDPA under the mask of the selection, in the tensors' dtype: `O [B,S,HQ,Dv]`, zero for empty rows."""
    counts = multiplicity(p)  # [B, S, HKV, keys]
    empty = counts.sum(-1, keepdim=True) == 0
    mask = counts.to(q.dtype).log().masked_fill(empty, 0.0)
    mask = mask.repeat_interleave(p.case.H, 2).transpose(1, 2)  # [B, HQ, S, keys]
    Q, K, V = ((x if x.dim() == 4 else x[None]).transpose(1, 2) for x in (q, k, v))
    K, V = (x.repeat_interleave(p.case.H, 1) for x in (K, V))
    out = F.scaled_dot_product_attention(Q, K, V, mask, scale=p.scale).transpose(1, 2)
    return out.masked_fill(empty.repeat_interleave(p.case.H, 2), 0.0).view(*q.shape[:-1], v.shape[-1])


def assert_gradients(got: Sequence[Tensor], oracle: GradientOracle, name: str) -> None:
    """Check `(dq, dk, dv)` of one implementation.

    Raises:
        AssertionError: the error names shape, seed, dtype, the gradient, its error and the bound.
    """
    p = oracle.problem
    eps = torch.finfo(p.q.dtype).eps
    unread = _unread(p)
    for which, x, want, err, like in zip(NAMES, got, oracle.exact, oracle.err_sdpa, (p.q, p.k, p.v), strict=True):
        head = f"{name} on {describe(p)}: {which}"
        assert x.shape == like.shape, f"{head}: expected shape {tuple(like.shape)}, got {tuple(x.shape)}"
        assert x.dtype == like.dtype, f"{head}: expected {like.dtype}, got {x.dtype}"
        bound, error = 2 * err + 4 * eps * largest(want), largest(errors(x, want))
        if error > bound:
            where = first_wrong(x, want, bound, OUTPUT if which == "dq" else KEYS)
            raise AssertionError(
                f"{head}{mistake(which, x, oracle, bound)}: error {error:.4g} > bound {bound:.4g} = 2*{err:.3g} (SDPA) "
                f"+ 4*eps*max; {where}"
            )
        nothing = unread[0] if which == "dq" else unread[1]
        assert not bool(x[nothing].any()), f"{head}: expected exactly 0 for empty rows and for keys that no row lists"


def mistake(which: str, got: Tensor, oracle: GradientOracle, bound: float) -> str:
    """What a wrong gradient is instead, to be read after its name; empty if no known mistake gives it."""
    want = oracle.exact[NAMES.index(which)]
    for text, x in _mistaken(oracle)[which]:
        near = 2 * bound * max(1.0, largest(x) / max(largest(want), 1e-30))
        if largest(errors(got, x)) <= near < largest(errors(x, want)):  # else the mistake does not show
            return f" {text}"
    return ""


def _mistaken(oracle: GradientOracle) -> dict[str, list[tuple[str, Tensor]]]:
    """Gradients in fp64 of kernels that do one thing wrong, by what they do."""
    p, (dq, dk, dv) = oracle.problem, oracle.exact
    batches, HKV, H, scale = (p.k.shape[0] if p.k.dim() == 4 else 1), p.k.shape[-2], p.case.H, p.softmax_scale
    Q, dO, out = (x.detach().double().reshape(batches, -1, HKV, H, x.shape[-1]) for x in (p.q, oracle.do, oracle.o))
    K, V = (x.detach().double().reshape(batches, -1, HKV, x.shape[-1]) for x in (p.k, p.v))
    listed = multiplicity(p).double()[..., None, :]  # [B, S, HKV, 1, keys]
    scores, dP = (torch.einsum("bshgd,bkhd->bshgk", rows, keys) for rows, keys in ((Q, K), (dO, V)))
    lse = oracle.lse.double().reshape(*scores.shape[:-1], 1)
    P = (scores * scale - lse).masked_fill(listed == 0, -math.inf).exp() * listed
    delta = (dO * out).sum(-1, keepdim=True)

    def over_rows(weights: Tensor, rows: Tensor, heads: slice, like: Tensor) -> Tensor:
        return torch.einsum("bshgk,bshgd->bkhd", weights[..., heads, :], rows[..., heads, :]).reshape(like.shape)

    every, dS, whole = slice(None), P * (dP - delta) * scale, P * dP * scale
    unscaled, no_delta = "lacks the factor of the scale", "is of dP, without delta"
    found: dict[str, list[tuple[str, Tensor]]] = {
        "dq": [(unscaled, dq / scale), (no_delta, torch.einsum("bshgk,bkhd->bshgd", whole, K).reshape(dq.shape))],
        "dk": [(unscaled, dk / scale), (no_delta, over_rows(whole, Q, every, dk))],
        "dv": [],
    }
    for name, weights, rows, x in (("dk", dS, Q, dk), ("dv", P, dO, dv)):
        once = over_rows(weights / listed.clamp(min=1), rows, every, x)
        found[name] += [("counts a key that a row lists twice only once", once)]
        if H > 1:
            found[name] += [("is the mean over the query heads of a KV head, not the sum", x / H)]
            for head, said in ((0, "first"), (H - 1, "last")):
                text = f"is of the {said} query head of each KV head alone"
                found[name] += [(text, over_rows(weights, rows, slice(head, head + 1), x))]
    return found


def _unread(p: Problem) -> tuple[Tensor, Tensor]:
    """bool `[B, S, HQ]`: query heads of rows that list nothing; bool `[B, S_kv, HKV]`: keys that no row lists."""
    counts = multiplicity(p)
    rows = counts.sum(-1).repeat_interleave(p.case.H, 2) == 0
    keys = counts.sum(1).transpose(1, 2) == 0
    return rows.view(p.q.shape[:-1]), keys.reshape(p.k.shape[:-1])
