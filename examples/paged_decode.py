"""Serving with selection attention: prefill two prompts, decode 64 tokens each from a paged cache, check the result.

    python examples/paged_decode.py

A layer with random weights stands in for a model. Each query reads four blocks: the first, its own, and of those in
between the two whose mean key it likes best. The same tokens come out where every step computes the whole sequence
again, without a cache. Runs on a GPU, and on a CPU without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

import nsa

BLOCK, TOP, PAGE = 16, 4, 16  # keys of a block, blocks a query reads, keys of a page
HQ, HKV, D, VOCABULARY = 8, 2, 32, 97
STEPS = 64


class Layer(torch.nn.Module):
    """Embedding, one attention over selected keys, and logits."""

    def __init__(self) -> None:
        super().__init__()
        width = HQ * D
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, heads * D, bias=False) for heads in (HQ, HKV, HKV))
        self.out = torch.nn.Linear(width, VOCABULARY, bias=False)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, S, HQ, D]``, keys and values ``[B, S, HKV, D]`` of ``tokens [B, S]``."""
        x = self.embed(tokens)
        return tuple(f(x).unflatten(-1, (-1, D)) for f in (self.q, self.k, self.v))  # type: ignore[return-value]

    def read(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """Logits ``[B, S, VOCABULARY]``."""
        return self.out(self.embed(tokens) + attended.flatten(-2))


def select(q: Tensor, means: Tensor, positions: Tensor) -> Tensor:
    """Block indices ``[B, S, HKV, TOP]`` of queries at ``positions [B, S]``, given the mean keys of whole blocks.

    means: ``[B, blocks, HKV, D]``. Only blocks that ended before a query's own are compared, so that what a query
    selects never depends on what comes after it.
    """
    own = positions // BLOCK
    scores = torch.einsum("bshd,bnhd->bshn", q.unflatten(2, (HKV, -1)).sum(3), means)
    n = torch.arange(means.shape[1], device=q.device)
    between = (n > 0) & (n < own[..., None])
    best = scores.masked_fill(~between[:, :, None], -torch.inf).topk(min(TOP - 2, len(n)), -1)
    some = torch.where(best.values.isfinite(), best.indices, -1)
    first = torch.where(own > 0, 0, -1)[..., None, None].expand(-1, -1, HKV, 1)
    mine = own[..., None, None].expand(-1, -1, HKV, 1)
    return torch.cat((first, some, mine), -1).int()


def block_means(k: Tensor) -> Tensor:
    """``[B, T, HKV, D]`` to ``[B, T // BLOCK, HKV, D]``: of whole blocks."""
    return k[:, : k.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2)


class PagedCache:
    """Keys and values in pages, handed out as sequences grow, and the means of whole blocks."""

    def __init__(self, B: int, room: int, device: torch.device) -> None:
        self.width = -(-room // PAGE)
        self.k, self.v = (torch.zeros(B * self.width, PAGE, HKV, D, device=device) for _ in range(2))
        self.table = torch.full((B, self.width), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(B, dtype=torch.int32, device=device)
        self.means = torch.zeros(B, -(-room // BLOCK), HKV, D, device=device)
        self.held = [0] * B
        self.free = torch.randperm(B * self.width, generator=torch.Generator().manual_seed(0)).tolist()

    def append(self, b: int, k: Tensor, v: Tensor) -> None:
        """Keys and values ``[S, HKV, D]`` of one sequence, the newest."""
        for i in range(k.shape[0]):
            at = self.held[b]
            if at % PAGE == 0:
                self.table[b, at // PAGE] = self.free.pop()
            page = self.table[b, at // PAGE]
            self.k[page, at % PAGE], self.v[page, at % PAGE] = k[i], v[i]
            self.held[b] = at + 1
            if self.held[b] % BLOCK == 0:
                pages = self.table[b, (at + 1 - BLOCK) // PAGE : at // PAGE + 1]
                self.means[b, at // BLOCK] = self.k[pages].flatten(0, 1).mean(0)
        self.lengths[b] = self.held[b]


@torch.no_grad()
def serve(layer: Layer, prompts: list[Tensor]) -> Tensor:
    """Logits ``[B, STEPS, VOCABULARY]`` of the tokens that follow prompts of any lengths, from a paged cache."""
    device = prompts[0].device
    cache = PagedCache(len(prompts), max(map(len, prompts)) + STEPS, device)
    logits = torch.empty(len(prompts), 1, VOCABULARY, device=device)
    for b, prompt in enumerate(prompts):  # prefill: the prompt's own keys, no cache needed yet
        q, k, v = layer.project(prompt[None])
        positions = torch.arange(len(prompt), device=device)[None]
        blocks = select(q, block_means(k), positions)
        attended = nsa.selection_attention(q, k, v, block_indices=blocks, block_size=BLOCK)
        logits[b, 0] = layer.read(prompt[None], attended)[0, -1]
        cache.append(b, k[0], v[0])
    scores = [logits]
    for _ in range(STEPS - 1):
        newest = scores[-1].argmax(-1)
        q, k, v = layer.project(newest)
        for b in range(len(prompts)):
            cache.append(b, k[b], v[b])
        blocks = select(q, cache.means, (cache.lengths - 1)[:, None])
        attended = nsa.selection_attention_with_kvcache(
            q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, block_indices=blocks,
            block_size=BLOCK,
        )  # fmt: skip
        scores.append(layer.read(newest, attended))
    return torch.cat(scores, 1)


@torch.no_grad()
def recompute(layer: Layer, prompt: Tensor) -> Tensor:
    """Logits ``[STEPS, VOCABULARY]`` of the same steps for one prompt, everything computed again at each."""
    tokens, scores = prompt[None], []
    for _ in range(STEPS):
        q, k, v = layer.project(tokens)
        positions = torch.arange(tokens.shape[1], device=prompt.device)[None]
        blocks = select(q, block_means(k), positions)
        attended = nsa.selection_attention(q, k, v, block_indices=blocks, block_size=BLOCK)
        scores.append(layer.read(tokens, attended)[:, -1])
        tokens = torch.cat((tokens, scores[-1].argmax(-1, keepdim=True)), 1)
    return torch.cat(scores)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layer = Layer().to(device)
    prompts = [torch.randint(0, VOCABULARY, (length,), device=device) for length in (150, 37)]
    served = serve(layer, prompts)
    again = torch.stack([recompute(layer, prompt) for prompt in prompts])
    same, off = (served.argmax(-1) == again.argmax(-1)).sum(), (served - again).abs().max()
    print(
        f"{same} of {served[..., 0].numel()} tokens are those of a run without a cache, logits within {off:.0e}; "
        f"routes: {nsa.routes()}"
    )
    assert off < 1e-4


if __name__ == "__main__":
    main()
