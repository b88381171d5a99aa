"""Says what a wrong kernel does, by comparing its result with kernels that do one thing wrong (`counterfactual`).

Findings come in families, the most specific first. Some families are fixed lists. Others search for a number or an
order of heads in a few wrong rows. `Evidence.fits` decides whether a finding explains the result.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nsa.testing.judge.counterfactual import (
    LOG2E,
    PARTS,
    from_kv_head,
    from_kv_heads,
    mixed_up,
    not_rescaled,
    over_slots,
    partial_blocks,
    scaled,
    sinks,
    wrong_cache_scales,
    wrong_keys,
    wrong_scales,
)
from nsa.testing.judge.evidence import Answer, Evidence, Finding, Reading, differ, finite, without_empty_rows
from nsa.testing.judge.forward import Oracle, Result

ENOUGH = 16  # this many right elements cannot be due to chance
EXP_MAX = 88.7  # exp overflows fp32 above
EXP_MAX_FP16 = 11.0  # exp overflows fp16 above


def diagnose(result: Result, oracle: Oracle, known: Sequence[str] = ()) -> list[str]:
    """The findings that fit a wrong result, the most specific first; empty if none fits or the result is right.

    Args:
        result: `O [B,S,HQ,Dv]`, or `(O, LSE)`; `[T,HQ,Dv]` for packed sequences.
        known: findings of earlier cases. They are tried first; if any of them fits, no others are tried.
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    p = oracle.problem
    if out.shape != (*p.q.shape[:-1], p.case.Dv) or lse is not None and lse.shape != p.q.shape[:-1] or not out.numel():
        return []
    evidence, empty = without_empty_rows(Evidence.of(out, lse, oracle))
    if not evidence.wrong_rows.numel():
        return [" and ".join(empty)] if empty else []
    more = "".join(f", and {text}" for text in empty)
    recalled = tuple(text.removesuffix(more) for text in known)
    evidence = dataclasses.replace(evidence, known=recalled)
    for only in (recalled, None) if recalled else (None,):
        found = [
            finding
            for start, family in FAMILIES
            if only is None or any(text.startswith(start) for text in only)
            for finding in family(evidence)
            if (only is None or finding.text in only) and evidence.fits(finding)
        ]
        told = [finding for finding in found if not finding.weak] or found[:1]
        if told:
            return [text + more for text in dict.fromkeys(finding.text for finding in told)]
    return []


def _lse(e: Evidence) -> Iterator[Finding]:
    """The output is right, and the LSE is another known number."""
    if e.lse is not None and not bool(e.off.any()):
        if not bool(differ(e.lse, e.right.lse * LOG2E, e.oracle.lse_atol * LOG2E).any()):
            yield Finding("gives the LSE in base 2")
        if not bool(differ(e.lse, e.right.lse / LOG2E, e.oracle.lse_atol).any()):
            yield Finding("gives the LSE times ln(2), as in base e where the contract says base 2")
        if int(e.oracle.seen.lengths.max()):
            largest = "gives the largest score for the LSE"
            yield Finding(largest, lambda rows: Answer(e.right.out[rows], e.read(rows).scores.amax(-1)))
            yield Finding("leaves the largest score out of the LSE", partial(_lse_of_differences, e))


def _lse_of_differences(e: Evidence, rows: Tensor) -> Answer:
    """The right output, and as the LSE the logarithm of the sum of `exp(score - the largest score)`."""
    right = e.right.pick(rows)
    return Answer(right.out, right.lse - finite(e.read(rows).scores.amax(-1)))


def _unwritten(e: Evidence) -> Iterator[Finding]:
    """Zeros or NaN instead of the right answer: everywhere, or from some column, head or query on."""
    for name, value in (("zero", e.out == 0), ("NaN", e.out.isnan())):
        if bool(value.all()) and bool(e.off.any()):
            yield Finding(f"leaves the whole output {name}")
        for axis, start, tail in _tails(e):
            if bool(tail(value).all()):
                yield Finding(f"leaves {axis} from {start} on {name}")


def _partly_right(e: Evidence) -> Iterator[Finding]:
    """Right up to some column, head or query, or right except for the LSE. The least specific findings."""
    if not bool(e.off.any()):
        yield Finding("is right except for the LSE", weak=True)
    if not bool(e.oracle.seen.lengths[e.wrong_rows].any()):
        yield Finding("is right except for rows that select nothing", weak=True)
    for axis, start, _ in _tails(e):
        yield Finding(f"is right except for {axis} from {start} on", weak=True)


def _tails(e: Evidence) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Axes along which the result is right up to an index and mostly wrong after it.

    Yields the axis's name, the index, and a function that takes the part after the index from a tensor `[N, H, Dv]`.
    """
    p = e.oracle.seen
    B, S, HKV = p.q.shape[0], p.q.shape[1] if p.cu_seqlens is None else 1, p.case.HKV
    axes = [("output columns", (1, -1, p.case.Dv), 2), ("query heads", (-1, p.case.HQ, p.case.Dv), 1)]
    axes += [("the query heads of each group", (-1, p.case.H, p.case.Dv), 1)] * (HKV > 1)
    firsts = [*range(0, B * S, max(S, 1))] if p.cu_seqlens is None else p.cu_seqlens.tolist()  # queries of sequences
    known = p.case.source in ("ranges", "blocks")  # packed rows have no sequences
    axes += [("queries", (1, B * S, -1), 1)] + [("queries of each sequence", (B, S, -1), 1)] * (B > 1 and S > 1)
    for axis, shape, dim in axes:
        columns = axis == "output columns"
        off = (e.off if columns else e.off | e.lse_off[..., None]).reshape(shape)
        wrong = off.transpose(0, dim).flatten(1)
        start = int(wrong.any(1).int().argmax())
        if start and off.numel() // off.shape[dim] * start >= ENOUGH and float(wrong[start:].double().mean()) > 0.5:
            part = partial(_tail, shape, dim, start)
            if axis == "queries" and known and start in firsts:  # whose tensors were probably not read
                axis, start = "sequences", bisect_right(firsts, start) - 1
            if not (columns and bool(e.lse_off.any())):
                yield axis, start, part


def _tail(shape: tuple[int, ...], dim: int, start: int, x: Tensor) -> Tensor:
    return x.reshape(shape).transpose(0, dim)[start:]


def _overflow(e: Evidence) -> Iterator[Finding]:
    """The maximum was not subtracted, or is never negative: NaN, infinite or 0 where exp overflows or vanishes."""
    bad, lse = e.off.any(-1) | e.lse_off, e.right.lse
    wrong = e.out[e.off | e.lse_off[..., None]]  # in a row near the limit, some columns overflow and others are right
    if not bool((~wrong.isfinite() | (wrong == 0)).all()):
        return
    good = ~bad & lse.isfinite()
    vanish = (lse < -EXP_MAX - 17) & lse.isfinite()
    denormal = (lse < -EXP_MAX + 3) & lse.isfinite()
    if not bool((vanish & good).any()) and bool(denormal[bad].all()):
        yield Finding("starts the running maximum at 0, not at -inf: the output is 0 where all scores are far below 0")
    must = (lse > EXP_MAX + 1) | vanish
    may = (lse > EXP_MAX - 1) | denormal  # near the largest number, or denormal
    fp32 = not bool((must & good).any()) and bool(may[bad].all())
    fp16 = bool(good.any()) and float(lse[bad].min()) > max(EXP_MAX_FP16, float(lse[good].max()))
    if fp32 or fp16 and e.oracle.problem.q.dtype == torch.float16:
        yield Finding("does not subtract the maximum: the output is not finite, or 0, where exp overflows")


def _prefix(e: Evidence) -> Iterator[Finding]:
    """Searches for the number of keys that the kernel reads, in the longest wrong rows."""
    longest = e.wrong_rows[e.oracle.seen.lengths[e.wrong_rows].argsort(descending=True)[:2]]
    r = Reading(e.oracle.seen, longest)
    if r.index.shape[1] < 2:
        return
    scores = r.scores[:, :2]
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    total = (weights[..., None] * r.values[:, None]).cumsum(2) / weights.cumsum(2)[..., None]  # [2, 2, L, Dv]
    error = (total - e.out[longest, :2, None]).abs().nan_to_num(math.inf).amax((0, 1, 3))[:-1]
    fitting = (error <= e.bound(total.nan_to_num(0.0))).nonzero()[:, 0].tolist()
    least = 2 * float(error.min())

    def reads(keys: int) -> Finding:
        return over_slots(f"reads only the first {keys} keys of a row", e, lambda r: r.slot < keys)

    def rank(i: int) -> tuple[bool, bool, int, int]:
        """With large scores, several numbers of keys may fit. Numbers found earlier come first, then round ones."""
        return reads(i + 1).text not in e.known, float(error[i]) > least, -(i + 1 & -(i + 1)), i

    for finding in (reads(i + 1) for i in sorted(fitting, key=rank)[:8]):
        if e.fits(finding):
            yield Finding(finding.text)
            return


def _scale_or_sink(e: Evidence) -> Iterator[Finding]:
    """The scale or the sink that fits best. One looks like the other where weights change little."""
    sink = next(filter(e.fits, sinks(e)), None)
    scale = next(_scale(e), None)
    if scale is not None and sink is not None:
        # The learned sink has a number for each query head, and so comes closer in any case.
        closer = (2 if sink.weak else 1) * e.distance(sink) < e.distance(scale)
        scale, sink = (None, sink) if closer else (scale, None)
    yield from (finding for finding in (scale, sink) if finding is not None)


def _scale(e: Evidence) -> Iterator[Finding]:
    """The factor of the scores that fits the longest wrong row best, unless one of `wrong_scales` fits."""
    if any(e.fits(finding) for finding in wrong_scales(e)):
        return
    row = e.wrong_rows[e.oracle.seen.lengths[e.wrong_rows].argmax()].view(1)
    r = Reading(e.oracle.seen, row)
    if r.index.shape[1] < 2:
        return
    # By the output first, then by the LSE: if one key has all the weight, the output says nothing about the factor.
    for lse in (None,) if e.lse is None else (None, e.lse[row[0]]):
        best = _best_factor(r.scores[0], r.values[0], e.out[row[0]], lse)
        for digits in (3, 4, 5, 8):
            factor = float(f"{best:.{digits}g}")
            finding = scaled(f"scales scores by {factor:g} times what was asked", factor, e)
            if e.fits(finding):
                yield finding
                return


def _best_factor(scores: Tensor, values: Tensor, out: Tensor, lse: Tensor | None) -> float:
    """The factor of `scores [H, L]` that fits `out [H, Dv]` best, or `lse [H]` if given. Two heads are compared."""
    scores, best, step = scores[:2], 0.0, 1 / 8
    for points in (48, 16, 16, 16, 16):  # steps to either side of `best`; the step becomes 8 times smaller each time
        octaves = best + step * torch.arange(-points, points + 1, device=scores.device, dtype=torch.float64)
        x = scores * octaves.exp2()[:, None, None]  # [points, 2, L]
        miss = (x.softmax(-1) @ values - out[:2]).square().sum(-1) if lse is None else x.logsumexp(-1) - lse[:2]
        best, step = float(octaves[miss.square().sum(1).nan_to_num(math.inf).argmin()]), step / 8
    return float(2.0**best)


def _query_heads(e: Evidence) -> Iterator[Finding]:
    """Query heads in another order, found by comparing every pair of heads in a few tokens."""
    p = e.oracle.seen
    HQ, HKV, G = p.case.HQ, p.case.HKV, p.case.H
    if HQ == 1:
        return
    right = Answer(e.right.out.reshape(-1, HQ, p.case.Dv), e.right.lse.reshape(-1, HQ))
    out = e.out.reshape(right.out.shape)
    tokens = _some_tokens(e)
    match = ~differ(out[tokens, :, None], right.out[tokens, None], e.oracle.bound).any(-1).any(0)  # [HQ, HQ]
    if not bool(match.any(1).all()):
        return
    source = match.int().argmax(1)
    head = torch.arange(HQ, device=out.device)
    moved = [f"{h} holds {s}" for h, s in enumerate(source.tolist()) if h != s]
    order = "head " + ", ".join(moved[:3]) + ", ..." * (len(moved) > 3)
    if bool((source == source[0]).all()):
        order = f"every head holds {int(source[0])}"
    elif HKV > 1 and bool((source == head % HKV * G + head // HKV).all()):
        order = "[G, HKV] instead of [HKV, G]"
    answer = Answer(right.out[:, source].reshape(e.out.shape), right.lse[:, source].reshape(e.right.lse.shape))
    yield Finding(f"gives the answers of query heads in another order: {order}", answer.pick)


def _some_tokens(e: Evidence) -> Tensor:
    """Up to four tokens with a wrong row. Tokens whose rows all have many keys come first."""
    HKV = e.oracle.seen.case.HKV
    tokens = (e.wrong_rows // HKV).unique()
    fewest = e.oracle.seen.lengths.view(-1, HKV)[tokens].amin(1)
    first: Tensor = tokens[fewest.argsort(descending=True, stable=True)[:4]]
    return first


def _kv_heads(e: Evidence) -> Iterator[Finding]:
    """Query heads that read another KV head, found by trying every KV head in a few tokens."""
    p = e.oracle.seen
    HKV, H = p.case.HKV, p.case.H
    if HKV == 1:
        return
    head = torch.arange(HKV, device=e.out.device)
    rows = (_some_tokens(e)[:, None] * HKV + head).flatten()
    modulo = torch.arange(HKV * H, device=e.out.device).view(HKV, H) % HKV
    for variant in (text for text, part in PARTS.items() if "q" not in part):
        answers = [from_kv_head(p, rows, g, variant).out for g in range(HKV)]
        off = torch.stack([differ(e.out[rows], x, e.bound(x)).any(-1) for x in answers])
        match = ~off.view(HKV, -1, HKV, H).any(1)  # [HKV, HKV, H]: which KV heads fit each query head
        if not bool(match.any(0).all()):
            continue
        heads = modulo if bool(match.gather(0, modulo[None]).all()) else match.int().argmax(0)
        if heads is modulo:
            how = "query head h reads KV head h % HKV, not h // G"
        elif bool((heads == heads[0, 0]).all()):
            how = f"every query head reads KV head {int(heads[0, 0])}"
        else:
            at = int((heads != head[:, None]).flatten().int().argmax())
            how = f"query head {at} reads KV head {int(heads.flatten()[at])}, not {at // H}"
        text = f"reads {variant} of another KV head: {how}"
        yield Finding(text, partial(from_kv_heads, p, heads, variant))


FAMILIES: tuple[tuple[str | tuple[str, ...], Callable[[Evidence], Iterator[Finding]]], ...] = (
    (("gives the", "leaves the largest"), _lse),
    ("leaves", _unwritten),
    (("does not subtract", "starts the running"), _overflow),
    ("", wrong_keys),
    ("reads only", _prefix),
    ("", partial_blocks),
    ("does not rescale", not_rescaled),
    ("", wrong_scales),
    ("", wrong_cache_scales),
    (("scales scores", "adds a sink"), _scale_or_sink),
    ("gives the answers", _query_heads),
    ("reads", mixed_up),
    ("reads the", _kv_heads),
    ("is right except", _partly_right),
)
"""The families, the most specific first, each with the words with which its texts begin."""
