"""Whether a selection of blocks is right: judged by the scores of what was chosen, not by which blocks these are.

A selector may order its sums as it likes. So a chosen block is right if its score is at least that of the ``n``-th best
block, less what rounding explains. On integers nothing is rounded, so there the choice must be the oracle's: ties go to
the smaller block. What must not depend on rounding is checked exactly: order, padding, duplicates, the number of
blocks, forced blocks, the tail, and that no block is ahead of the query or behind the end of the sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nsa.selecting import oracle
from nsa.selecting.oracle import Row
from nsa.selecting.request import Request

SHOWN = 20  # blocks of a list in an error
FLAWS = {
    "tail": "keys behind the query's position are scored",
    "ahead": "blocks are counted from 1, or one too far",
    "upward": "of equal scores the larger block is chosen",
    "lowest": "the blocks of the lowest scores are chosen",
    "half": "the maximum is taken over half of a block",
    "mean": "a block has the mean of its keys instead of the largest",
    "short": "the sequence is taken to be one token shorter",
    "unplaced": "q_positions are ignored",
    "unforced": "forced blocks are not forced",
    "one head": "only the first head of a list is scored",
    "signed": "products are not clamped at 0",
    "unweighted": "weights of heads are ignored",
    "nan": "a NaN wins",
    "other pages": "pages are read in the order in which they lie in the cache",
}
"""What a wrong selector may do, in words; :func:`flawed` computes what it then chooses."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One wrong list: ``kind`` is the same for lists that are wrong alike."""

    token: int
    list: int
    kind: str
    text: str


def findings(out: Tensor, r: Request, integers: bool = False, tokens: Iterable[int] | None = None) -> list[Finding]:
    """What is wrong with the selection ``out`` of a call.

    Args:
        integers: the inputs are small integers and the score is no softmax, so that no score is rounded.
        tokens: those that are judged; by default all.
    """
    if tuple(out.shape) != r.shape or out.dtype != torch.int32:
        return [Finding(0, 0, "shape", f"expected int32 {list(r.shape)}, got {out.dtype} {list(out.shape)}")]
    found = []
    rows = out.reshape(r.T, r.lists, r.shape[-1]).cpu().tolist()
    for token in range(r.T) if tokens is None else tokens:
        row = oracle.row_of(r, token)
        for number, got in enumerate(rows[token]):
            problem = _problem(got, row, number, r, integers)
            if problem is not None:
                found.append(Finding(token, number, *problem))
    return found


def _problem(got: list[int], row: Row, number: int, r: Request, integers: bool) -> tuple[str, str] | None:
    """The first thing that is wrong with a list: its kind and a text. None if nothing is."""
    want = row.choose(r.n)[number].tolist()
    listed = [b for b in got if b >= 0]
    chosen = [b for b in listed if b != row.tail]
    blocks = row.scores.shape[1]
    tail = "" if row.tail is None else f" and the tail {row.tail}"
    text = f"got {_short(listed)}, expected {_short(want)}{tail}"
    if got != listed + [-1] * (len(got) - len(listed)):
        return "padding", f"padding is not last, or not -1: {_short(got)}"
    if len(set(listed)) < len(listed):
        return "duplicates", f"a block is listed twice: {text}"
    if listed != sorted(listed):
        return "order", f"blocks are not in rising order: {text}"
    if any(b >= blocks for b in chosen):
        return "unreachable", f"a block is ahead of the query or past the sequence, which has {blocks} blocks: {text}"
    if (row.tail is not None) != (row.tail in listed):
        return "tail", f"the block that the query has begun is missing: {text}"
    missing = set(row.forced.nonzero()[:, 0].tolist()) - set(chosen)
    if missing:
        return "forced", f"the forced blocks {sorted(missing)} are missing: {text}"
    if any(not row.scored[b] and not row.forced[b] for b in chosen):
        return "unseen", f"a block is listed of which the query sees no key: {text}"
    if len(chosen) != len(want):
        return "count", f"expected {len(want)} blocks, got {len(chosen)}: {text}"
    if chosen == want:
        return None
    worst = float(row.scores[number, sorted(set(chosen) - set(want))].min())
    lost = float(row.scores[number, sorted(set(want) - set(chosen))].max())
    if worst == lost and (integers or worst == -math.inf):
        return "ties", f"of equal scores the smaller block must be chosen: {text}"
    if integers or not worst >= lost - _rounding(row, number, r, lost):
        recall = len(set(chosen) & set(want)) / max(len(want), 1)
        return "scores", f"a block of score {worst:.6g} is chosen before one of {lost:.6g}, recall {recall:.0%}: {text}"
    return None


def _short(blocks: list[int]) -> str:
    """A list as an error shows it."""
    return f"{blocks}" if len(blocks) <= SHOWN else f"[{', '.join(map(str, blocks[:SHOWN]))}, … {len(blocks)} blocks]"


def _rounding(row: Row, number: int, r: Request, score: float) -> float:
    """By how much rounding may change a score: sums of ``D`` products in fp32, or in the dtype for fp64."""
    eps = torch.finfo(torch.float64 if r.q.dtype == torch.float64 else torch.float32).eps
    finite = row.scores[number][row.scores[number].isfinite()]
    peak = float(finite.abs().max()) if finite.numel() else 0.0
    if r.score == "softmax":  # weights that underflow are equal
        least = torch.finfo(torch.float32).tiny * r.G * r.size
        return 64 * eps * r.q.shape[-1] * abs(score) + least if math.isfinite(score) else 0.0
    return float(4 * eps * r.q.shape[-1] ** 0.5 * max(peak, 1.0) * r.G)


def flawed(r: Request, token: int, flaw: str) -> list[list[int]]:
    """What a selector with one of :data:`FLAWS` lists for a token: the right blocks if the flaw changes nothing."""
    other = r
    if flaw == "short" and r.cache_seqlens is not None:
        other = r._replace(cache_seqlens=r.cache_seqlens - 1)
    elif flaw == "one head" and r.G > 1:
        of_lists = r.q.unflatten(-2, (r.lists, r.G))[..., 0, :]
        weights = None if r.weights is None else r.weights.unflatten(-1, (r.lists, r.G))[..., 0]
        lse = None if r.lse is None else r.lse.unflatten(-1, (r.lists, r.G))[..., 0]
        other = r._replace(q=of_lists, weights=weights, lse=lse)
    elif flaw == "unweighted":
        other = r._replace(weights=None)
    elif flaw == "unplaced":
        other = r._replace(q_positions=None)
    elif flaw == "unforced":
        other = r._replace(first=0, newest=0)
    elif flaw == "other pages" and r.block_table is not None:
        width = r.block_table.shape[1]
        in_order = torch.arange(r.B * width, dtype=torch.int32).view(r.B, width).to(r.block_table.device)
        other = r._replace(block_table=in_order)
    row = oracle.row_of(other, token)
    if flaw == "ahead":
        return [[b + 1 for b in x] for x in row.choose(r.n).tolist()]
    if flaw == "upward":
        mirrored = row._replace(
            scores=row.scores.flip(1), scored=row.scored.flip(0), forced=row.forced.flip(0)
        ).choose(r.n)  # fmt: skip
        return [_with_tail(sorted(len(row.scored) - 1 - b for b in x), row) for x in mirrored.tolist()]
    lowest = torch.where(row.scored, -row.scores, row.scores)
    scores = lowest if flaw == "lowest" else _other_scores(r, token, flaw, row)
    return [_with_tail(x, row) for x in row._replace(scores=scores).choose(r.n).tolist()]


def _with_tail(blocks: list[int], row: Row) -> list[int]:
    return blocks if row.tail is None else [*blocks, row.tail]


def _other_scores(r: Request, token: int, flaw: str, row: Row) -> Tensor:
    """Scores of blocks as a flawed selector computes them, for max and relu."""
    blocks = row.scores.shape[1]
    if r.score == "softmax" or blocks == 0 or flaw not in ("tail", "half", "mean", "signed", "nan"):
        return row.scores
    seq, keys, _, position = oracle.sequence_of(r, token)
    seen = min(keys, (position + 1 - r.window) // r.stride + 1) if position + 1 >= r.window else 0
    count = min(keys, blocks * r.size) if flaw == "tail" else seen
    q = r.q.reshape(r.T, r.q.shape[-2], -1)[token].cpu().double()
    k, exists = oracle.keys_of(r, seq, count)
    s = torch.einsum("hd,khd->hk", q, k.repeat_interleave(q.shape[0] // r.HK, 1))
    if r.score == "relu":
        weights = torch.ones(q.shape[0]) if r.weights is None else r.weights.reshape(r.T, -1)[token].cpu()
        s = s if flaw == "signed" else s.relu()
        s = (s * weights.double()[:, None]).unflatten(0, (r.lists, r.G)).sum(1)
    else:
        s = s.unflatten(0, (r.lists, r.G)).nan_to_num(nan=float("inf") if flaw == "nan" else -float("inf")).amax(1)
    s = torch.where(exists, s.nan_to_num(nan=float("inf") if flaw == "nan" else -float("inf")), -torch.inf)
    scores = torch.full_like(row.scores, -torch.inf)
    for b in range(blocks):
        mine = s[:, b * r.size : min((b + 1) * r.size, count)]
        if flaw == "half":
            mine = mine[:, : max(1, r.size // 2)]
        if mine.shape[1]:
            scores[:, b] = mine.mean(1) if flaw == "mean" else mine.amax(1)
    return scores


def diagnose(out: Tensor, r: Request, found: list[Finding]) -> str:
    """The flaw that explains all wrong lists, in words; else what is wrong with the first of them."""
    if not found or found[0].kind == "shape":
        return found[0].text if found else "nothing is wrong"
    rows = out.reshape(r.T, r.lists, -1).cpu().tolist()
    wrong = found[:32]
    for flaw, words in FLAWS.items():
        lists = ((rows[x.token][x.list], flawed(r, x.token, flaw)[x.list]) for x in wrong)
        if all(got == listed + [-1] * (len(got) - len(listed)) for got, listed in lists):
            return words
    return f"no known mistake fits; {found[0].text}"


def assert_selection(out: Tensor, r: Request, name: str, integers: bool = False) -> None:
    """Raise AssertionError, with a diagnosis, if a selection is wrong."""
    found = findings(out, r, integers)
    if found:
        kinds = ", ".join(dict.fromkeys(x.kind for x in found))
        first = found[0]
        raise AssertionError(
            f"{name}: {len(found)} of {r.T * r.lists} lists are wrong ({kinds}): {diagnose(out, r, found)}\n"
            f"token {first.token}, list {first.list}: {first.text}"
        )
